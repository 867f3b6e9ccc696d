#!/usr/bin/env bash
# The whole road on a laptop: SmolLM2-135M teaches a third of its own layers, online and from a top-100 cache.
# Every line below is a command that you can type yourself. What is there already is reused.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export PATH="$PWD/.venv/bin:$PATH"

offline=recipes/smollm2_cpu.yaml
online=recipes/smollm2_cpu_online.yaml

run() {
  echo
  echo "\$ $*"
  "$@"
}

started=$SECONDS
run megatron-kd convert import $offline # Hugging Face weights (GGUF) into a Megatron-Core checkpoint
run megatron-kd prepare $offline        # English text into rows of 240 tokens
run megatron-kd capture $offline        # the teacher's top-100 for every position, once
run megatron-kd evaluate $offline       # the freshly cut student on held-out text
run megatron-kd train $offline          # against the cache, with the fused loss
run megatron-kd evaluate runs/demo/offline
run megatron-kd train $online # the teacher runs in every step
run megatron-kd evaluate runs/demo/online
run megatron-kd compare runs/demo/online runs/demo/offline --out runs/demo/compare

echo
echo "Done in $((SECONDS - started)) s."
echo "Picture:         $PWD/runs/demo/compare/compare.png"
echo "Page:            $PWD/runs/demo/compare/compare.html"
echo "Run directories: $PWD/runs/demo/online"
echo "                 $PWD/runs/demo/offline"
