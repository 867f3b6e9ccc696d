# shellcheck shell=bash
# [COMMAND] [RECIPE] [key=value …] [--option …] → command, target, overrides, options; then words for megatron-kd.

usage() {
  cat <<'TEXT'
Usage: sbatch [sbatch options] launch/JOB.sh [COMMAND] [RECIPE] [key=value …] [--option …]

COMMAND is one of
  train           (default) train, or go on training, the recipe's student
  capture         the teacher's cache; under sbatch --array=1-N each task does its N-th part
  evaluate        the run that the recipe trained, or a run directory instead of RECIPE
  prepare         the corpus into rows of tokens, one process
  doctor          what each node has and lacks, the links between all ranks, a self-test of the losses
  convert import  Hugging Face weights into a checkpoint, every rank its shard; --role=student for the student
RECIPE is a YAML file; each script but job.sh has a default. key=value overrides keys of the recipe.
Options such as --repair or --role=student go to the command.
sweep.sh takes a sweep for RECIPE, and --base=RECIPE: under sbatch --array=1-N each task does its point, and with prepare,
capture or convert import what some of the points read.

Environment:
  KD_CONTAINER     image for pyxis: a squashfs file, or a name such as nvcr.io#nvidia/pytorch:26.06-py3
  KD_MOUNTS        paths to mount there, with commas; the submit directory and the checkout are mounted always
  KD_VENV          without a container: the virtual environment, by default .venv of the checkout
  KD_ROOT          the checkout, where a job is not submitted from its root
  KD_LOGS          folder of the nodes' logs, by default logs
  KD_MASTER_PORT   port of the rendezvous, by default 20000 + job id mod 10000, or the next that is free
  KD_MAX_REQUEUES  how often a job that was stopped by a signal is queued again, by default 20
  KD_PARTS         N of capture's --part I/N, where an array has fewer tasks than the capture has parts
TEXT
}

parse_arguments() {
  command=train target=$KD_RECIPE overrides=() options=()
  case ${1:-} in
    -h | --help)
      usage
      exit 0
      ;;
    train | capture | evaluate | prepare | doctor)
      command=$1
      shift
      ;;
    convert)
      [[ ${2:-} == import ]] || die "convert ${2:-}: a job can only convert import"
      command=import
      shift 2
      ;;
  esac
  if (($#)) && [[ $1 != *=* && $1 != -* ]]; then
    target=$1
    shift
  fi
  local argument
  for argument; do
    case $argument in
      -*) options+=("$argument") ;;
      *=*) overrides+=("$argument") ;;
      *) die "argument '$argument': write key=value for the recipe, --name=value for an option of $command" ;;
    esac
  done
  [[ -n $target ]] || die "no recipe: sbatch launch/job.sh $command RECIPE (--help says more)"
}

# The file that holds the recipe: a run directory has its own.
recipe_file() {
  if [[ $command == evaluate && -d $target ]]; then
    printf '%s\n' "$target/recipe.yaml"
  else
    printf '%s\n' "$target"
  fi
}

# The words behind megatron-kd. A recipe that is evaluated stands for the run that it trained.
command_words() {
  words=("$command" "$target" "${overrides[@]}" "${options[@]}")
  case $command in
    import) words=(convert "${words[@]}") ;;
    evaluate) [[ -d $target ]] || words=(evaluate "${recipe[run_dir]}" "${options[@]}") ;;
  esac
}
