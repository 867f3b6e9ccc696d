#!/usr/bin/env bash
# The points of a sweep as tasks of one array: sbatch --array=1-N launch/sweep.sh [COMMAND] SWEEP [key=value …]
# megatron-kd sweep SWEEP --dry-run counts and lists them; launch/sweep.sh --help says more.
#SBATCH --job-name=sweep
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --output=%x-%A_%a.out
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=B:USR1@300
KD_RECIPE=${KD_RECIPE:-}
KD_SWEEP=yes
body=${KD_ROOT:-${SLURM_SUBMIT_DIR:-$(dirname "$0")/..}}/launch/lib/job.sh
if [[ ! -r $body ]]; then
  echo "launch: error: no $body: submit from the root of the checkout, or set KD_ROOT to it" >&2
  exit 2
fi
# shellcheck source=lib/job.sh
source "$body"
