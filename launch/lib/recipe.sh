# shellcheck shell=bash
# What the scripts need to know of a recipe, read by megatron-kd itself and without torch.

# The last is never empty: $(…) drops empty lines at the end.
readonly FIELDS=(
  cluster.nodes cluster.gpus_per_node cluster.gpu data.samples teacher.mode teacher.engine teacher.cache
  teacher.checkpoint student.checkpoint student.from_teacher logging.wandb.mode
  name run_dir
)
declare -A recipe=()

# Prints the values of FIELDS, one a line: read_recipe FILE COMMAND [key=value …]
print_recipe() {
  local file=$1 command=$2 field words=()
  shift 2
  for field in "${FIELDS[@]}"; do words+=(--field "$field"); done
  [[ $command == train ]] || words+=(--for-capture)
  megatron-kd show "$file" "$@" "${words[@]}"
}

# Fills the table recipe from what print_recipe printed.
fill_recipe() {
  local lines i
  mapfile -t lines <"$1"
  ((${#lines[@]} == ${#FIELDS[@]})) || die "$1 has ${#lines[@]} lines instead of ${#FIELDS[@]}"
  for i in "${!FIELDS[@]}"; do recipe[${FIELDS[i]}]=${lines[i]}; done
}
