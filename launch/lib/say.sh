# shellcheck shell=bash
# One line at a time, under one name, so that a job's log can be searched.

say() { printf 'launch: %s\n' "$*"; }

# What was wrong, where, what to do; then the end.
die() {
  printf 'launch: error: %s\n' "$*" >&2
  exit 2
}
