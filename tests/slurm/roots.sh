#!/usr/bin/env bash
# Runs a command with the Slurm of another Debian suite: tests/slurm/roots.sh SUITE [COMMAND...]. Without a command it only
# makes the suite's root, once, in $RLHPC_SLURM_ROOTS (/var/cache/rlhpc-slurm). Needs root.
#
# trixie has Slurm 24.11, forky and sid have 26.05; only sid has Apptainer. The command sees the suite's programs, and of this
# machine /tmp, this checkout with its .venv, the Python of that, and the image of image.sh. install.sh installs what the script
# needs on Debian 12.
set -euo pipefail
suite=${1:?tests/slurm/roots.sh SUITE [COMMAND...]}
shift
checkout=$(cd "$(dirname "$0")/../.." && pwd)
root=${RLHPC_SLURM_ROOTS:-/var/cache/rlhpc-slurm}/$suite
python=$("$checkout/.venv/bin/python" -c 'import sys; print(sys.base_prefix)')

fail() {
    echo "roots.sh: $*" >&2
    exit 1
}
[ "$(id -u)" -eq 0 ] || fail "needs root"
# A Debian's own Python has its libraries in places where the other suite has others.
[ "$python" != /usr ] || fail "the .venv needs a Python from outside /usr, such as uv's or pyenv's"

# The server that this machine has its packages from; its signatures are checked, their age is not: a mirror may be old.
make_root() {
    local server library containers=
    [ "$suite" != sid ] || containers=apptainer,bubblewrap,mmdebstrap
    server=$(apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' 'Origin: Debian' 'Label: Debian' | head -n 1)
    [ -n "$server" ] || fail "no Debian server in /etc/apt that has answered: apt-get update"
    # The client library of MariaDB 11.8 refuses a query with which slurmdbd begins; that of 10.11 answers it.
    library=$(ldconfig -p | awk '/libmariadb\.so\.3 / { print $NF; exit }')
    mkdir -p "${root%/*}"
    rm -rf "$root.new"
    env -u APT_CONFIG mmdebstrap --quiet --mode=root --variant=apt \
        --aptopt='Acquire::Check-Valid-Until "false"' --aptopt='APT::Install-Recommends "false"' --dpkgopt=force-unsafe-io \
        --dpkgopt='path-exclude=/usr/share/man/*' --dpkgopt='path-exclude=/usr/share/doc/*' \
        --dpkgopt='path-exclude=/usr/share/locale/*' \
        --include=slurmctld,slurmd,slurm-client,slurmdbd,munge,mariadb-server,iproute2,iputils-ping,util-linux,mount,procps \
        --include="openssh-server,openssh-client,git,make,ca-certificates,python3,libfaketime${containers:+,$containers}" \
        "$suite" "$root.new" "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $server $suite main"
    # Apptainer shows it to every container.
    [ -z "$containers" ] || [ -e "$root.new/etc/localtime" ] || cp -L /etc/localtime "$root.new/etc/localtime"
    [ -z "$library" ] || cp -L "$library" "$root.new$(chroot "$root.new" ldconfig -p | awk '/libmariadb\.so\.3 / { print $NF; exit }')"
    echo "$script" >"$root.new/made-by"
    rm -rf "$root"
    mv "$root.new" "$root"
}

# Made anew where another version of this script made it.
script=$(sha256sum <"$0")
exec 9>"/run/lock/rlhpc-slurm-$suite"
flock 9
[ "$(cat "$root/made-by" 2>/dev/null)" = "$script" ] || make_root
exec 9>&-
[ $# -gt 0 ] || exit 0

# pivot_root, not chroot: who enters a mount namespace, as the tests do on nodes, comes to its root.
here=$PWD
exec unshare --mount --propagation private bash -c '
set -euo pipefail
root=$1 here=$2
shared=(/proc /dev /sys /tmp "$3" "$4")
# The environment lies elsewhere where .venv is a link.
for folder in "${root%/*}/image" "$(readlink -f "$3/.venv")"; do
    [ ! -d "$folder" ] || shared+=("$folder")
done
shift 4
mount --bind "$root" "$root"
mount -t tmpfs -o mode=755 rlhpc-run "$root/run"
for folder in "${shared[@]}"; do
    mkdir -p "$root$folder"
    mount --rbind "$folder" "$root$folder"
done
cp /etc/hosts /etc/resolv.conf "$root/etc/"
mkdir -p "$root/.old"
cd "$root"
pivot_root . .old
umount --lazy /.old
cd "$here"
exec "$@"
' roots.sh "$root" "$here" "$checkout" "$python" "$@"
