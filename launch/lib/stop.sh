# shellcheck shell=bash
# Time limits and pre-emption: SLURM sends USR1 to this shell, the ranks save and leave, the job is queued again.

signalled=''
# Within an array this task alone: the number of the array's last task is that of the whole array.
this_job=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}
this_job=${this_job:-${SLURM_JOB_ID:-}}

# One signal can be lost while a rank starts, so it is sent until the step is gone. Steps only: not this shell.
ask_ranks_to_stop() {
  while true; do
    scancel --signal=USR1 "$this_job" 2>/dev/null || true
    sleep 5
  done
}

on_usr1() {
  heard=$((heard + 1))
  [[ -z $signalled ]] || return 0
  signalled=yes
  say "SLURM asks to stop (time limit or pre-emption): the ranks save and leave"
  ask_ranks_to_stop &
  asking=$!
}

# Until the ranks run, while nodes import an image perhaps: there is nothing to save, and the job is queued again.
listen_early() { trap 'signalled=yes' USR1; }

leave_early() {
  [[ -z $signalled ]] || case $command in
    train | capture) requeue "SLURM asks to stop (time limit or pre-emption) before $command began" ;;
  esac
}

# Runs the ranks. Sets code.
run_and_listen() {
  asking=''
  if [[ $command == train || $command == capture ]]; then
    trap on_usr1 USR1
  else
    trap '' USR1 # the others keep nothing on the way, and may just get done
  fi
  trap 'heard=$((heard + 1))' TERM # scancel: SLURM tells the ranks itself, and their save is waited for
  leave_early
  "$@" &
  wait_for $!
  [[ -z $asking ]] || kill "$asking" 2>/dev/null || true
}

# conclude [STATUS_FILE]: whether the work is done, to be gone on with, or unknown. Only done work exits with 0.
conclude() {
  local state=finished
  [[ -z $1 ]] || state=$(sed -n 's/^ *"state": "\([a-z]*\)".*/\1/p' "$1" 2>/dev/null || true)
  if [[ $state == finished ]]; then
    say "$command is finished"
    exit 0
  fi
  [[ $state == stopped ]] || die "$command ended with status 0, but $1 says '${state:-nothing}': look at $job_dir"
  if [[ -z $signalled ]]; then
    say "$command was stopped before it was done, not by SLURM's time limit: submit it again to go on"
    exit 75
  fi
  requeue "$command is not done"
}

# requeue WHY: as often as it may; does not return.
requeue() {
  local times=${SLURM_RESTART_COUNT:-0} most=${KD_MAX_REQUEUES:-20}
  if ((times >= most)); then
    say "$1 after $times requeues: submit it again to go on, or raise KD_MAX_REQUEUES ($most)"
    exit 75
  fi
  say "$1: it goes on after requeue $((times + 1)) of at most $most"
  if scontrol requeue "$this_job"; then
    sleep 120 # SLURM ends this shell
  fi
  say "SLURM did not requeue job $SLURM_JOB_ID: submit it again to go on"
  exit 75
}
