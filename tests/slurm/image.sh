#!/usr/bin/env bash
# Makes an unpacked image of another Debian release for ranks: tests/slurm/image.sh FOLDER. It has the libraries that Python and
# torch need, and no Python: tests bind this project's environment to /opt/venv, where envs/Dockerfile installs it.
set -euo pipefail
image=${1:?tests/slurm/image.sh FOLDER}
suite=trixie
libraries=libstdc++6,libgomp1,libffi8,libssl3t64,libsqlite3-0,libreadline8t64,libbz2-1.0,liblzma5,libncursesw6,zlib1g,libuuid1,libexpat1

mkdir -p "${image%/*}"
exec 9>"${image%/*}/image.lock"
flock 9
script=$(sha256sum <"$0")
[ "$(cat "$image/made-by" 2>/dev/null)" = "$script" ] && exit 0
server=$(apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' 'Origin: Debian' 'Label: Debian' | head -n 1)
[ -n "$server" ] || { echo "image.sh: no Debian server in /etc/apt that has answered: apt-get update" >&2; exit 1; }
rm -rf "$image.new"
env -u APT_CONFIG mmdebstrap --quiet --mode=root --variant=essential \
    --aptopt='Acquire::Check-Valid-Until "false"' --aptopt='APT::Install-Recommends "false"' --dpkgopt=force-unsafe-io \
    --dpkgopt='path-exclude=/usr/share/man/*' --dpkgopt='path-exclude=/usr/share/doc/*' \
    --dpkgopt='path-exclude=/usr/share/locale/*' --include="$libraries" \
    "$suite" "$image.new" "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $server $suite main"
# The image is read-only: what is bound into it needs a folder there.
mkdir -p "$image.new/opt/venv" "$image.new/opt/rlhpc"
echo "$script" >"$image.new/made-by"
rm -rf "$image"
mv "$image.new" "$image"
