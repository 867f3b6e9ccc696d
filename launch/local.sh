#!/usr/bin/env bash
# A recipe on this machine, on as many ranks as it asks for: launch/local.sh [COMMAND] RECIPE [key=value …]
# COMMAND is train (default), capture, evaluate, prepare or convert import; --help says more.
# Ctrl-C, SIGTERM and SIGUSR1 reach the ranks of train and capture, which save and leave with status 0; the same line
# goes on from there. (torchrun itself would die of USR1, and kill its ranks 30 seconds after the others.) The other
# commands end. A second Ctrl-C ends it at once.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
source "$root/launch/lib/say.sh"
source "$root/launch/lib/arguments.sh"
source "$root/launch/lib/recipe.sh"
source "$root/launch/lib/wait.sh"
KD_RECIPE=${KD_RECIPE:-}
enter_venv

parse_arguments "$@"
file=$(recipe_file)
type -P megatron-kd >/dev/null || die "no megatron-kd: make setup, or set KD_VENV"
[[ -f $file ]] || die "no recipe $file: check its path"
values=$(print_recipe "$file" "$command" "${overrides[@]}") || exit 2 # it has said what is wrong
fill_recipe <(printf '%s\n' "$values")
nodes=${recipe[cluster.nodes]} ranks=${recipe[cluster.gpus_per_node]}
[[ $command == prepare ]] || ((nodes == 1)) ||
  die "$target has cluster.nodes $nodes: sbatch launch/job.sh starts it, or add cluster.nodes=1"

command_words
launcher=()
[[ $command == prepare ]] || ((ranks == 1)) ||
  launcher=(torchrun --no-python --standalone --nproc-per-node "$ranks")

# shellcheck disable=SC2329 # all three by traps
# The ranks: the children of torchrun, or the one process itself.
rank_pids() {
  if ((${#launcher[@]})); then cat "/proc/$work/task/$work/children"; else echo "$work"; fi
}

case $command in
  train | capture) stop=USR1 means="the ranks save and leave" ;;
  *) stop=TERM means="$command ends" ;; # nothing to save on the way
esac

# A signal can be lost while a rank starts, so it is sent until all are gone.
# shellcheck disable=SC2329
ask_ranks_to_stop() {
  local pids
  while pids=$(rank_pids) && [[ -n $pids ]]; do
    # shellcheck disable=SC2086 # several
    kill "-$stop" $pids || true
    sleep 5
  done 2>/dev/null
}

asking='' interrupts=0
# shellcheck disable=SC2329
on_signal() {
  heard=$((heard + 1))
  [[ $1 != INT ]] || interrupts=$((interrupts + 1))
  if ((interrupts > 1)); then
    # shellcheck disable=SC2046
    kill -KILL $(rank_pids) "$work" 2>/dev/null || true
  elif [[ -z $asking ]]; then
    say "stopping: $means; a second Ctrl-C ends them at once" >&2
    ask_ranks_to_stop &
    asking=$!
  fi
}

trap '' USR1 # the ranks inherit it: until they have a handler, a signal to stop must not end them
# In a session of its own, so that the terminal's Ctrl-C comes here alone.
setsid "${launcher[@]}" megatron-kd "${words[@]}" &
work=$!
trap 'on_signal INT' INT
trap 'on_signal TERM' TERM
trap 'on_signal HUP' HUP
trap 'on_signal USR1' USR1
wait_for "$work"
[[ -z $asking ]] || kill "$asking" 2>/dev/null || true
exit "$code"
