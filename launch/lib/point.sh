# shellcheck shell=bash
# A sweep in place of a recipe: which of its points, or of the inputs that they read, is this task's.

# Sets target to the recipe of this task's point; overrides and --base are in it then. Needs an environment and job_dir.
choose_point() {
  [[ -n ${KD_SWEEP:-} ]] || return 0
  local kind=points base=() rest=() files option index=${SLURM_ARRAY_TASK_ID:-1}
  case $command in
    prepare | capture | import) kind=inputs ;;
  esac
  for option in "${options[@]}"; do
    if [[ $option == --base=* ]]; then base+=("$option"); else rest+=("$option"); fi
  done
  rm -f "$job_dir"/sweep.*
  if ! step 1 1 --output="$job_dir/sweep.$kind" --error="$job_dir/sweep.errors" \
    megatron-kd sweep "$target" "${overrides[@]}" "${base[@]}" "--write=$kind"; then
    cat "$job_dir/sweep.errors" >&2
    exit 2 # it has said what is wrong
  fi
  mapfile -t files <"$job_dir/sweep.$kind"
  [[ -n ${SLURM_ARRAY_TASK_ID:-} ]] || ((${#files[@]} == 1)) ||
    die "$target has ${#files[@]} $kind: sbatch --array=1-${#files[@]} launch/sweep.sh $command $target"
  ((index >= 1 && index <= ${#files[@]})) ||
    die "task $index of the array, and $target has the $kind 1 to ${#files[@]}: sbatch --array=1-${#files[@]}"
  target=${files[index - 1]} overrides=() options=("${rest[@]}")
  say "of the ${#files[@]} $kind number $index: $target"
}
