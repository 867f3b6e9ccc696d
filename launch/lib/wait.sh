# shellcheck shell=bash
# Waiting for a child while signals come: bash runs a trap only between commands, and wait ends for it.

heard=0 # signals; every trap counts them here

# wait_for PID: until it has ended, not until a signal has come. Sets code to its status.
wait_for() {
  local before
  while true; do
    before=$heard code=0
    wait "$1" || code=$?
    ((heard != before)) || return 0
  done
}
