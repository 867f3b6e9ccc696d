#!/usr/bin/env bash
# Any recipe, any command, as one SLURM job: sbatch launch/job.sh [COMMAND] RECIPE [key=value …]
# launch/job.sh --help says more; sbatch's own options override the lines below.
#SBATCH --job-name=megatron-kd
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --output=%x-%j.out
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=B:USR1@300
KD_RECIPE=${KD_RECIPE:-}
body=${KD_ROOT:-${SLURM_SUBMIT_DIR:-$(dirname "$0")/..}}/launch/lib/job.sh
if [[ ! -r $body ]]; then
  echo "launch: error: no $body: submit from the root of the checkout, or set KD_ROOT to it" >&2
  exit 2
fi
# shellcheck source=lib/job.sh
source "$body"
