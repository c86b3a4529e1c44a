#!/usr/bin/env bash
# The Debian packages of a real Slurm for the tests of this folder, of what makes roots with others (roots.sh), of Charliecloud,
# and of sshd for other tests. Needs root; starts no service.
set -euo pipefail

packages=(slurmctld slurmd slurm-client slurmdbd munge mariadb-server iproute2 iputils-ping util-linux procps openssh-server openssh-client mmdebstrap
    charliecloud-runtime)

missing=()
for package in "${packages[@]}"; do
    dpkg-query -W -f='${Status}' "$package" 2>/dev/null | grep -q 'ok installed' || missing+=("$package")
done
[ ${#missing[@]} -eq 0 ] && exit 0

if [ "$(id -u)" -ne 0 ]; then
    echo "install.sh: needs root to install ${missing[*]}; the tests of tests/slurm are skipped without them" >&2
    exit 1
fi

# The cluster starts its own daemons under a folder of its own: the packages' services must not start beside it.
policy=/usr/sbin/policy-rc.d
if [ ! -e "$policy" ]; then
    printf '#!/bin/sh\nexit 101\n' >"$policy"
    chmod +x "$policy"
    trap 'rm -f "$policy"' EXIT
fi
export DEBIAN_FRONTEND=noninteractive
apt-get update -q
apt-get install -q -y --no-install-recommends "${packages[@]}"
