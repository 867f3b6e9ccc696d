# shellcheck shell=bash
# Job steps: where they run, in which container, with which share of a node.

choose_environment() {
  container=()
  if [[ -z ${KD_CONTAINER:-} ]]; then
    enter_venv
    return
  fi
  if [[ $KD_CONTAINER == [./]* && ! -r $KD_CONTAINER ]]; then
    die "no container image $KD_CONTAINER: enroot import --output $KD_CONTAINER docker://REGISTRY#IMAGE:TAG makes one"
  fi
  srun --help 2>&1 | grep -q -- '--container-image' ||
    die "KD_CONTAINER is set, but this SLURM has no pyxis (srun knows no --container-image): unset it and use KD_VENV"
  container=(
    --container-image="$KD_CONTAINER"
    --container-mounts="$PWD,$root${KD_MOUNTS:+,$KD_MOUNTS}"
    --container-workdir="$PWD"
    --no-container-mount-home
  )
}

# step NODES TASKS_PER_NODE [srun option …] PROGRAM … ; pyxis wants to be told the counts again.
step() {
  local nodes=$1 tasks=$2 cpus
  shift 2
  cpus=$((SLURM_CPUS_ON_NODE / tasks))
  srun --nodes="$nodes" --ntasks=$((nodes * tasks)) --ntasks-per-node="$tasks" --cpus-per-task=$((cpus > 0 ? cpus : 1)) \
    --distribution=block --export=ALL --open-mode=append "${container[@]}" "$@"
}

# Address of the first node as SLURM itself reaches it; never a guess, which would make each node a world of its own.
head_address() {
  local head address
  head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n1)
  address=$(scontrol show node -o "$head" | grep -o ' NodeAddr=[^ ]*' | cut -d= -f2)
  [[ -n $address ]] || die "scontrol show node $head names no NodeAddr: ask the cluster's administrators"
  printf '%s\n' "$address"
}

listens() { (exec 3<>"/dev/tcp/$1/$2") 2>/dev/null; }

# Sets MASTER_ADDR and MASTER_PORT; this shell runs on the first node, where the first rank will listen.
choose_rendezvous() {
  MASTER_ADDR=$(head_address)
  MASTER_PORT=${KD_MASTER_PORT:-$((20000 + SLURM_JOB_ID % 10000))}
  export MASTER_ADDR MASTER_PORT
  local last=$((MASTER_PORT + 20))
  while listens "$MASTER_ADDR" "$MASTER_PORT"; do
    [[ -z ${KD_MASTER_PORT:-} ]] ||
      die "port $MASTER_PORT of $MASTER_ADDR is in use: choose another KD_MASTER_PORT, or unset it"
    ((++MASTER_PORT < last)) || die "ports $((last - 20)) to $last of $MASTER_ADDR are in use: set KD_MASTER_PORT"
  done
}
