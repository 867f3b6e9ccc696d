#!/usr/bin/env bash
# One rank: SLURM's place of this task as torch.distributed knows it, then the command in its stead.
export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-${SLURM_CPUS_PER_TASK:-1}}
# A signal to stop that comes while Python still imports must not end it; the command sets its own handler later.
trap '' USR1
exec megatron-kd "$@"
