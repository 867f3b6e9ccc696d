# shellcheck shell=bash
# One line at a time, under one name, so that a job's log can be searched.

say() { printf 'launch: %s\n' "$*"; }

# What was wrong, where, what to do; then the end.
die() {
  printf 'launch: error: %s\n' "$*" >&2
  exit 2
}

# The virtual environment of the checkout, or KD_VENV; without one, what PATH has.
enter_venv() {
  local venv=${KD_VENV:-$root/.venv}
  [[ -z ${KD_VENV:-} || -x $venv/bin/python ]] ||
    die "KD_VENV $venv is no virtual environment: set it to one, or unset it and use the checkout's (make setup)"
  export PATH="$venv/bin:$PATH"
}
