#!/usr/bin/env bash
# GPT-OSS 120B heals its own pruned self at 32,768 tokens on four nodes of eight GPUs, from the teacher's cache.
# sbatch launch/gptoss120b_32k.sh [COMMAND] [RECIPE] [key=value …]; launch/gptoss120b_32k.sh --help says more.
#SBATCH --job-name=gptoss120b_32k
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --output=%x-%j.out
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=B:USR1@300
KD_RECIPE=${KD_RECIPE:-recipes/gptoss120b_32k/healed_offline_h200.yaml}
body=${KD_ROOT:-${SLURM_SUBMIT_DIR:-$(dirname "$0")/..}}/launch/lib/job.sh
if [[ ! -r $body ]]; then
  echo "launch: error: no $body: submit from the root of the checkout, or set KD_ROOT to it" >&2
  exit 2
fi
# shellcheck source=lib/job.sh
source "$body"
