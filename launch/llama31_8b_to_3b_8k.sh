#!/usr/bin/env bash
# Llama 3.1 8B teaches Llama 3.2 3B at 8,192 tokens on one GPU.
# sbatch launch/llama31_8b_to_3b_8k.sh [COMMAND] [RECIPE] [key=value …]; launch/llama31_8b_to_3b_8k.sh --help says more.
#SBATCH --job-name=llama31_8b_to_3b_8k
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=1
#SBATCH --cpus-per-task=16
#SBATCH --mem=128G
#SBATCH --output=%x-%j.out
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=B:USR1@300
KD_RECIPE=${KD_RECIPE:-recipes/llama31_8b_to_3b_8k/offline_fused.yaml}
body=${KD_ROOT:-${SLURM_SUBMIT_DIR:-$(dirname "$0")/..}}/launch/lib/job.sh
if [[ ! -r $body ]]; then
  echo "launch: error: no $body: submit from the root of the checkout, or set KD_ROOT to it" >&2
  exit 2
fi
# shellcheck source=lib/job.sh
source "$body"
