#!/usr/bin/env bash
# Installs what tests/slurm starts (Debian and Ubuntu); says nothing and does nothing where it is there already.
set -euo pipefail
PATH=$PATH:/usr/sbin:/sbin
packages=(slurmctld slurmd slurm-client munge procps)
if type -P slurmctld slurmd sbatch munged ps >/dev/null; then exit 0; fi

as_root=()
if ((EUID != 0)); then as_root=(sudo -n); fi
if ! type -P apt-get >/dev/null || ! "${as_root[@]}" true 2>/dev/null; then
  echo "slurm-deps: no ${packages[*]} here, and no right to install them: run apt-get install ${packages[*]} as root" >&2
  exit 1
fi
echo "slurm-deps: installing ${packages[*]}"
# The daemons are for tests to start, not for this machine's boot.
"${as_root[@]}" apt-get update -qq
"${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${packages[@]}" >/dev/null
