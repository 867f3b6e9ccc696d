#!/usr/bin/env bash
# The four methods on SmolLM2-135M with equal data and seeds, and their comparison: a table, a picture and a page.
# Arguments are overrides of every recipe, such as training.train_iters=3. What is there already is reused, so give a
# machine to itself for the times to mean anything, and remove runs/smollm2_comparison to measure again.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export PATH="$PWD/.venv/bin:$PATH"

recipes=recipes/smollm2_comparison
runs=runs/smollm2_comparison
methods=(online offline_dense offline_forward_chunked offline_fused)

run() {
  echo
  echo "\$ $*"
  "$@"
}

run megatron-kd convert import "$recipes/offline_fused.yaml"
run megatron-kd prepare "$recipes/offline_fused.yaml"
run megatron-kd capture "$recipes/offline_fused.yaml" # once, for all of them
for method in "${methods[@]}"; do
  run megatron-kd train "$recipes/$method.yaml" "$@" # evaluates at its beginning, every 11 steps and at its end
  run megatron-kd evaluate "$runs/$method"
done
run megatron-kd compare "${methods[@]/#/$runs/}" --out "$runs/compare"

echo
echo "Page:    $PWD/$runs/compare/compare.html"
echo "Picture: $PWD/$runs/compare/compare.png"
