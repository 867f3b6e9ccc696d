#!/usr/bin/env bash
# Capture, then train, then evaluate: three jobs, each of which waits until the one before has done all its work.
#   launch/pipeline.sh [sbatch option …] RECIPE [key=value …]        e.g. --partition=gpu --time=12:00:00
# Nodes and GPUs are the recipe's. Environment, beside that of the jobs (launch/job.sh --help):
#   KD_STAGES        which, in this order: by default "capture train evaluate"; prepare may stand before them
#   KD_CAPTURE_JOBS  jobs that share the capture (an array), by default 1
#   KD_LOGS          folder of all logs, by default logs; made before SLURM would fail for want of it
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
source "$root/launch/lib/say.sh"
source "$root/launch/lib/recipe.sh"
export KD_ROOT=$root
enter_venv

options=()
while [[ ${1:-} == -* ]]; do
  if [[ $1 == -h || $1 == --help ]]; then
    sed -n '2,/^set/s/^# \?//p' "${BASH_SOURCE[0]}"
    exit 0
  fi
  options+=("$1")
  shift
done
file=${1:-}
[[ -n $file ]] || die "no recipe: launch/pipeline.sh RECIPE [key=value …]"
[[ -f $file ]] || die "no recipe $file: check its path"
shift
for argument; do
  [[ $argument == *=* && $argument != -* ]] || die "argument '$argument': write key=value; sbatch's options stand first"
done
logs=${KD_LOGS:-logs}
mkdir -p "$logs" || die "cannot make $logs: choose another folder in KD_LOGS"

shape=()
if type -P megatron-kd >/dev/null; then
  values=$(print_recipe "$file" capture "$@") || exit 2 # it has said what is wrong
  fill_recipe <(printf '%s\n' "$values")
  gpus=${recipe[cluster.gpus_per_node]}
  [[ ${recipe[cluster.gpu]} != cpu ]] || gpus=0
  shape=(--nodes="${recipe[cluster.nodes]}" --gpus-per-node="$gpus")
elif [[ " ${options[*]} " != *" --nodes="* ]]; then
  die "no megatron-kd here to read $file with: make setup, set KD_VENV, or say --nodes=N --gpus-per-node=G"
fi
name=${recipe[name]:-$(basename "$file" .yaml)}

submitted=()
# A later job that SLURM refuses takes the others with it.
trap '((${#submitted[@]} == 0)) || scancel "${submitted[@]}"' ERR

submit() {
  local stage=$1 words=(--parsable --job-name="$name-$1" --output="$logs/%x-%j.out" "${shape[@]}")
  shift
  if [[ $stage == capture && ${KD_CAPTURE_JOBS:-1} -gt 1 ]]; then
    words+=(--array="1-$KD_CAPTURE_JOBS" --output="$logs/%x-%A_%a.out")
  fi
  if ((${#submitted[@]})); then words+=(--dependency="afterok:${submitted[-1]}" --kill-on-invalid-dep=yes); fi
  job=$(sbatch "${words[@]}" "${options[@]}" "$root/launch/job.sh" "$stage" "$file" "$@")
  job=${job%%;*}
  say "job $job: $stage${submitted[*]:+, after ${submitted[-1]}}"
  submitted+=("$job")
}

for stage in ${KD_STAGES:-capture train evaluate}; do submit "$stage" "$@"; done
say "their logs: $logs/$name-*.out"
trap - ERR
