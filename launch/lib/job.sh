# shellcheck shell=bash
# The body of every sbatch script here: read the arguments, look around on all nodes, run the ranks, conclude.
# Set before: KD_RECIPE, the script's own recipe or nothing.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
lib=$root/launch/lib
source "$lib/say.sh"
source "$lib/arguments.sh"
source "$lib/recipe.sh"
source "$lib/steps.sh"
source "$lib/wait.sh"
source "$lib/stop.sh"
source "$lib/point.sh"

start_job() {
  local alone="launch/local.sh ${command/#import/convert import} $target"
  [[ -z ${KD_SWEEP:-} ]] || alone="megatron-kd sweep $target"
  [[ -n ${SLURM_JOB_ID:-} ]] || die "this is a job: sbatch $0${*:+ $*}; on one machine without SLURM: $alone"
  cd "$SLURM_SUBMIT_DIR"
  job_dir=${KD_LOGS:-logs}/$SLURM_JOB_NAME-$SLURM_JOB_ID
  mkdir -p "$job_dir" || die "cannot make $job_dir: submit from a folder that can be written, or set KD_LOGS"
  say "job $SLURM_JOB_ID${SLURM_RESTART_COUNT:+, requeued $SLURM_RESTART_COUNT times}: $command $target ${overrides[*]}"
  say "nodes $SLURM_JOB_NODELIST; their logs in $job_dir"
}

# Which part of a capture this task of an array does.
choose_part() {
  [[ -n ${SLURM_ARRAY_TASK_ID:-} && -z ${KD_SWEEP:-} ]] || return 0
  [[ $command == capture ]] || die "--array is for capture, whose parts can be done at once; submit $command without"
  local parts=${KD_PARTS:-$SLURM_ARRAY_TASK_COUNT}
  # shellcheck disable=SC2153 # SLURM sets both
  if ((SLURM_ARRAY_TASK_MIN < 1 || SLURM_ARRAY_TASK_MAX > parts)); then
    die "array $SLURM_ARRAY_TASK_MIN-$SLURM_ARRAY_TASK_MAX of $parts parts: use --array=1-N, or say N in KD_PARTS"
  fi
  options+=("--part=$SLURM_ARRAY_TASK_ID/$parts")
}

# One line for everything that is wrong, however many nodes say it; a mistake in the recipe is nobody's own.
gather_complaints() {
  awk -F'\t' '
    NF < 2 { if (/error:/ && !seen[$0]++) print; next }
    !($2 in count) { order[++kinds] = $2 }
    ++count[$2] <= 4 { nodes[$2] = nodes[$2] (count[$2] > 1 ? " " : "") $1 }
    END {
      for (i = 1; i <= kinds; i++) {
        what = order[i]; more = count[what] - 4
        printf "launch: error: %s%s: %s\n", nodes[what], (more > 0 ? " and " more " more nodes" : ""), what
      }
    }' "$@"
}

look_around() {
  local failed=0 log=$job_dir/preflight
  rm -f "$job_dir"/recipe.values "$log".*
  step "$SLURM_NNODES" 1 --output="$log.%n" --kill-on-bad-exit=0 \
    bash "$lib/preflight.sh" "$command" "$(recipe_file)" "$job_dir" "${overrides[@]}" 2>"$log.srun" || failed=$?
  if ((failed)); then
    ((failed == 3)) || cat "$log".* >&2
    ((failed == 3)) || die "the nodes could not be looked at (status $failed)${KD_CONTAINER:+; KD_CONTAINER is $KD_CONTAINER}"
    gather_complaints "$log".[0-9]* >&2
    exit 2
  fi
  rm -f "$log".*
  fill_recipe "$job_dir/recipe.values"
}

check_nodes() {
  local wanted=${recipe[cluster.nodes]}
  [[ $command == prepare ]] || ((wanted == SLURM_NNODES)) ||
    die "$target has cluster.nodes $wanted, the job has $SLURM_NNODES: sbatch --nodes=$wanted, or cluster.nodes=$SLURM_NNODES"
}

warn_without_login() {
  [[ $command == train && ${recipe[logging.wandb.mode]} == online && -z ${WANDB_API_KEY:-} ]] || return 0
  grep -qsE "machine .*(wandb|coreweave)" "${NETRC:-$HOME/.netrc}" ||
    say "warning: logging.wandb.mode is online and there is no login: the run is written offline (wandb login, then wandb sync)"
}

run_ranks() {
  local nodes=${recipe[cluster.nodes]} tasks=${recipe[cluster.gpus_per_node]} words
  [[ $command != prepare ]] || nodes=1 tasks=1
  command_words
  local ranks=(step "$nodes" "$tasks" --kill-on-bad-exit=1 --output="$job_dir/node_%n.log" bash "$lib/rank.sh")
  choose_rendezvous
  case $command in
    train) status=${recipe[run_dir]}/status.json ;;
    capture)
      status=$job_dir/status.json
      rm -f "$status"
      words+=("--status=$status")
      ;;
    *) status= ;; # what they exit with says it
  esac
  run_and_listen "${ranks[@]}" "${words[@]}"
}

report_failure() {
  say "$command failed with status $code; what the ranks said last, of $job_dir/node_*.log:"
  tail -qn 50 "$job_dir"/node_*.log | awk '/^megatron-kd: .*error:/ && !seen[$0]++' | tail -n 5 || true
  exit "$code"
}

parse_arguments "$@"
start_job "$@"
choose_part
choose_environment
listen_early
choose_point
look_around
warn_without_login
check_nodes
run_ranks
((code == 0)) || report_failure
conclude "$status"
