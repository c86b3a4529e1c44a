#!/usr/bin/env bash
# Mesa's software renderers (Vulkan and EGL on the CPU), with which SAPIEN and MuJoCo draw pictures without a GPU. Needs root.
# Debian 12's own Mesa is too old for SAPIEN; bookworm-backports has one that works.
set -euo pipefail

newest() { dpkg-query -W -f='${Version}' mesa-vulkan-drivers 2>/dev/null || true; }

installed=$(newest)
if [ -n "$installed" ] && dpkg --compare-versions "$installed" ge 23 && dpkg-query -W libvulkan1 libegl1 libgl1 >/dev/null 2>&1; then
    exit 0
fi
if [ "$(id -u)" -ne 0 ]; then
    echo "install.sh: needs root to install mesa-vulkan-drivers and libvulkan1; rendered tests are skipped without them" >&2
    exit 1
fi

export DEBIAN_FRONTEND=noninteractive
release=()
if [ "$(. /etc/os-release && echo "${VERSION_CODENAME:-}")" = bookworm ]; then
    sources=/etc/apt/sources.list.d/bookworm-backports.sources
    if [ ! -e "$sources" ]; then
        printf '%s\n' "Types: deb" "URIs: http://deb.debian.org/debian" "Suites: bookworm-backports" "Components: main" \
            "Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg" >"$sources"
    fi
    release=(-t bookworm-backports)
fi
apt-get update -q
apt-get install -q -y --no-install-recommends "${release[@]}" mesa-vulkan-drivers libvulkan1 libegl1 libgl1
