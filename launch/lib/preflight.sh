#!/usr/bin/env bash
# Looks around on one node, within its container, before any model is loaded: COMMAND FILE JOB_DIR [key=value …]
# Says everything that is wrong here and exits with 3. The first node leaves the recipe's values in JOB_DIR.
set -uo pipefail
here=$(dirname "${BASH_SOURCE[0]}")
source "$here/say.sh"
source "$here/recipe.sh"
command=$1 file=$2 job_dir=$3
shift 3
node=${SLURMD_NODENAME:-$(uname -n)}
failed=0

complain() {
  printf '%s\t%s\n' "$node" "$*" # NODE, tab, what is wrong: the job's log names all nodes of which it is so
  failed=3
}

# need KEY COMMAND: a path of the recipe that must be on this node, and what makes it; object stores are looked at by
# the command itself.
need() {
  local path=${recipe[$1]}
  [[ -z $path || $path == *://* || -e $path ]] ||
    complain "$1 $path is not there: $2 makes it; mount it on every node, or set $1 to where it is"
}

visible_gpus() {
  if [[ -n ${CUDA_VISIBLE_DEVICES:-} ]]; then
    tr ',' '\n' <<<"$CUDA_VISIBLE_DEVICES" | grep -c .
  elif type -P nvidia-smi >/dev/null; then
    nvidia-smi --list-gpus 2>/dev/null | grep -c '^GPU' || true
  else
    echo 0
  fi
}

check_gpus() {
  local wanted=${recipe[cluster.gpus_per_node]} kind=${recipe[cluster.gpu]} seen
  [[ $kind != cpu && $command != prepare ]] || return 0
  seen=$(visible_gpus)
  if ((seen == 0)); then
    complain "no GPU here, the recipe wants $wanted × $kind: sbatch --gpus-per-node=$wanted to a partition that has them"
  elif ((seen != wanted)); then
    complain "$seen GPUs here, the recipe wants $wanted: sbatch --gpus-per-node=$wanted, or cluster.gpus_per_node=$seen"
  fi
}

check_paths() {
  [[ $command == prepare || $command == import ]] || need data.samples prepare
  case $command in
    train | evaluate)
      need student.checkpoint "convert import --role=student"
      if [[ ${recipe[teacher.mode]} == online ]]; then
        need teacher.checkpoint "convert import"
      else
        need teacher.cache capture
      fi
      [[ -z ${recipe[student.from_teacher]} ]] || need teacher.checkpoint "convert import"
      ;;
    capture)
      [[ ${recipe[teacher.engine]} != megatron ]] || need teacher.checkpoint "convert import"
      ;;
  esac
  if [[ $command == train ]] && ! mkdir -p "${recipe[run_dir]}" 2>/dev/null; then
    complain "run_dir ${recipe[run_dir]} cannot be made: choose a folder that can be written (run_dir=…)"
  elif [[ $command == evaluate && ! -d ${recipe[run_dir]} ]]; then
    complain "run_dir ${recipe[run_dir]} is not there: train first, or name the run directory instead of a recipe"
  fi
}

[[ -d $job_dir ]] || complain "$job_dir is not there: submit from a folder that all nodes share"
[[ -f $file ]] || complain "no recipe $file in $PWD: check its path and submit from where it starts"
type -P megatron-kd >/dev/null ||
  complain "no megatron-kd${KD_CONTAINER:+ in $KD_CONTAINER}: make setup, or set KD_VENV or KD_CONTAINER"
((failed == 0)) || exit "$failed"
values=$(mktemp)
trap 'rm -f "$values"' EXIT
print_recipe "$file" "$command" "$@" >"$values" || exit 3
fill_recipe "$values"
if [[ $command != doctor ]]; then # it says all that and more
  check_gpus
  check_paths
fi
if [[ ${SLURM_NODEID:-0} == 0 ]]; then cp "$values" "$job_dir/recipe.values"; fi
exit "$failed"
