#!/usr/bin/env bash
# The system packages that the tests need: installs those that are missing, as root where there is apt, and says in one line what is
# missing after that. The tests that need them are skipped then.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
PATH=$PATH:/usr/sbin:/sbin

if [ "$(id -u)" -eq 0 ] && command -v apt-get >/dev/null; then
    bash tests/embodied/install.sh || true
    bash tests/slurm/install.sh || true
    for program in bwrap:bubblewrap c++:g++ chromium:chromium strace:strace unshare:util-linux mount:mount; do
        command -v "${program%%:*}" >/dev/null || apt-get install -q -y --no-install-recommends "${program##*:}" || true
    done
    compgen -G '/usr/lib/*/faketime/libfaketime.so.1' >/dev/null || apt-get install -q -y --no-install-recommends libfaketime || true
    ldconfig -p | grep -q 'libfuse\.so\.2' || apt-get install -q -y --no-install-recommends libfuse2 ||
        apt-get install -q -y --no-install-recommends libfuse2t64 || true
    command -v mkfs.ext4 >/dev/null || apt-get install -q -y --no-install-recommends e2fsprogs || true
fi

missing=()
compgen -G '/usr/share/vulkan/icd.d/lvp_icd*' >/dev/null || missing+=("Mesa 23 or newer (mesa-vulkan-drivers)")
[ -x /usr/sbin/sshd ] || missing+=("sshd (openssh-server)")
command -v slurmctld >/dev/null || missing+=("Slurm (slurmctld, slurmd)")
command -v bwrap >/dev/null || missing+=("bwrap (bubblewrap)")
command -v c++ >/dev/null || missing+=("a C++ compiler (g++)")
for program in strace unshare mount; do
    command -v "$program" >/dev/null || missing+=("$program")
done
command -v chromium >/dev/null || missing+=("Chromium (chromium)")
compgen -G '/usr/lib/*/faketime/libfaketime.so.1' >/dev/null || missing+=("libfaketime")
ldconfig -p | grep -q 'libfuse\.so\.2' || missing+=("libfuse2")
command -v mkfs.ext4 >/dev/null || missing+=("mkfs.ext4 (e2fsprogs)")
if [ ${#missing[@]} -gt 0 ]; then
    printf -v list '%s, ' "${missing[@]}"
    echo "tests/install.sh: missing, and installed only as root with apt: ${list%, }; the tests that need them are skipped"
fi
