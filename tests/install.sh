#!/usr/bin/env bash
# The system packages that the tests need: installs those that are missing, as root where there is apt, and says in one line what is
# missing after that. The tests that need them are skipped then.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
PATH=$PATH:/usr/sbin:/sbin

if [ "$(id -u)" -eq 0 ] && command -v apt-get >/dev/null; then
    bash tests/embodied/install.sh || true
    bash tests/slurm/install.sh || true
    for program in bwrap:bubblewrap c++:g++ chromium:chromium; do
        command -v "${program%%:*}" >/dev/null || apt-get install -q -y --no-install-recommends "${program##*:}" || true
    done
fi

missing=()
compgen -G '/usr/share/vulkan/icd.d/lvp_icd*' >/dev/null || missing+=("Mesa 23 or newer (mesa-vulkan-drivers)")
[ -x /usr/sbin/sshd ] || missing+=("sshd (openssh-server)")
command -v slurmctld >/dev/null || missing+=("Slurm (slurmctld, slurmd)")
command -v bwrap >/dev/null || missing+=("bwrap (bubblewrap)")
command -v c++ >/dev/null || missing+=("a C++ compiler (g++)")
command -v chromium >/dev/null || missing+=("Chromium (chromium)")
if [ ${#missing[@]} -gt 0 ]; then
    printf -v list '%s, ' "${missing[@]}"
    echo "tests/install.sh: missing, and installed only as root with apt: ${list%, }; the tests that need them are skipped"
fi
