#!/usr/bin/env bash
# A private SLURM cluster on this machine, for tests: N nodes that share its one host, each with G GPUs that are none.
#   cluster.sh start FOLDER [NODES] [GPUS] [PORT]      then: export SLURM_CONF=FOLDER/slurm.conf
#   cluster.sh stop FOLDER
#   cluster.sh lose FOLDER NODE                        its daemon and all it runs are killed
#   cluster.sh restore FOLDER NODE
# FOLDER must be short: it holds a socket, whose path may have 107 bytes. Needs root, for GPUs are character devices.
set -euo pipefail
action=${1:?start, stop, lose or restore} folder=$(mkdir -p "${2:?a folder}" && cd "$2" && pwd)
export SLURM_CONF=$folder/slurm.conf PATH=$PATH:/usr/sbin

write_configuration() {
  local nodes=$1 gpus=$2 port=$3 host n
  host=$(uname -n) host=${host%%.*}
  # Nodes claim more cores and memory than there are (config_overrides); a credential expires fast, so that a requeued
  # job need not wait two minutes; limits are enforced at submission, so that a job that never fits is refused.
  cat >"$SLURM_CONF" <<CONF
ClusterName=test
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=$port
SlurmUser=root
AuthType=auth/munge
AuthInfo=cred_expire=6,socket=$folder/run/munge.socket
StateSaveLocation=$folder/state
SlurmdSpoolDir=$folder/spool/%n
SlurmctldPidFile=$folder/run/slurmctld.pid
SlurmdPidFile=$folder/run/%n.pid
SlurmctldLogFile=$folder/log/slurmctld.log
SlurmdLogFile=$folder/log/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0
ReturnToService=2
EnforcePartLimits=ALL
KillWait=10
MinJobAge=3600
SlurmdTimeout=6
GresTypes=gpu
CONF
  : >"$folder/gres.conf"
  for ((n = 0; n < gpus; n++)); do mknod "$folder/dev/nvidia$n" c 1 3; done # copies of /dev/null
  for ((n = 1; n <= nodes + 1; n++)); do
    local state=UNKNOWN
    ((n <= nodes)) || state=DOWN # the spare, until its daemon is started
    echo "NodeName=n$n NodeHostname=$host NodeAddr=127.0.0.1 Port=$((port + n)) CPUs=32 RealMemory=512000" \
      "Gres=gpu:$gpus State=$state" >>"$SLURM_CONF"
    echo "NodeName=n$n Name=gpu File=$folder/dev/nvidia[0-$((gpus - 1))] Flags=nvidia_gpu_env" >>"$folder/gres.conf"
  done
  echo "PartitionName=main Nodes=n[1-$((nodes + 1))] Default=YES MaxTime=INFINITE State=UP" >>"$SLURM_CONF"
}

start() {
  local nodes=${1:-2} gpus=${2:-8} port=${3:-18100} n
  stop
  rm -rf "${folder:?}"/{state,spool,run,log,dev}
  mkdir -p "$folder"/{state,spool,run,log,dev}
  chmod 755 "$folder" "$folder/run"
  (umask 077 && head -c 128 /dev/urandom >"$folder/munge.key")
  write_configuration "$nodes" "$gpus" "$port"
  munged --key-file="$folder/munge.key" --socket="$folder/run/munge.socket" --pid-file="$folder/run/munged.pid" \
    --log-file="$folder/log/munged.log" --seed-file="$folder/run/munge.seed"
  slurmctld -f "$SLURM_CONF" -c
  for ((n = 1; n <= nodes; n++)); do restore "n$n"; done
  await_idle "$nodes"
}

await_idle() {
  for _ in {1..150}; do
    [[ $(timeout 5 sinfo --noheader --Node --states=idle 2>/dev/null | wc -l) -ge $1 ]] && return
    sleep 0.2
  done
  echo "cluster.sh: the nodes did not come up; the end of $folder/log/slurmctld.log:" >&2
  tail -n 20 "$folder/log/slurmctld.log" >&2
  stop
  return 1
}

# tasks [NODE]: processes that jobs of this cluster started, on all nodes or one.
tasks() {
  local pids
  pids=$(grep -lz "^SLURMD_NODENAME=${1:-}" /proc/[0-9]*/environ 2>/dev/null | cut -d/ -f3 || true)
  for pid in $pids; do
    if grep -qzxF "SLURM_CONF=$SLURM_CONF" "/proc/$pid/environ" 2>/dev/null; then echo "$pid"; fi
  done
}

# end_tasks [NODE]: first those who would report the end of the others.
end_tasks() {
  local pids parents
  pids=$(tasks "$@")
  [[ -n $pids ]] || return 0
  # shellcheck disable=SC2086
  parents=$(ps -o ppid= -p "$(paste -sd, <<<"$pids")" | sort -u | xargs -r ps -o pid=,comm= -p | awk '$2 == "slurmstepd" {print $1}')
  # shellcheck disable=SC2086
  kill -9 $parents $pids 2>/dev/null || true
}

# A stale file may name a process of somebody else.
is_ours() { grep -qaF "$folder/" "/proc/$1/cmdline" 2>/dev/null; }

lose() {
  kill -9 "$(cat "$folder/run/$1.pid")"
  end_tasks "$1"
}

restore() { slurmd -f "$SLURM_CONF" -N "$1"; }

stop() {
  local pids pid
  [[ -d $folder/run ]] || return 0
  if [[ -s $folder/run/slurmctld.pid ]]; then
    timeout 10 scancel --quiet --signal=KILL --full --partition=main 2>/dev/null || true
    timeout 10 scancel --quiet --partition=main 2>/dev/null || true
    for _ in {1..50}; do
      [[ -n $(timeout 5 squeue --noheader 2>/dev/null) ]] || break
      sleep 0.2
    done
  fi
  end_tasks
  pids=$(cat "$folder"/run/*.pid 2>/dev/null || true)
  for pid in $pids; do if is_ours "$pid"; then kill "$pid" 2>/dev/null || true; fi; done
  for _ in {1..50}; do
    for pid in $pids; do if is_ours "$pid"; then sleep 0.1 && continue 2; fi; done
    break
  done
  for pid in $pids; do if is_ours "$pid"; then kill -9 "$pid" 2>/dev/null || true; fi; done
  rm -f "$folder"/run/*.pid
}

"$action" "${@:3}"
