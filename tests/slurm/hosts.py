"""Nodes that are hosts of their own: network, UTS and mount namespaces joined by a bridge. Needs root.

A node is a process that sleeps in its namespaces; they are entered through it and vanish with it, so nothing is left in
/run/netns. A node has its own name, address, /tmp and /dev/shm, its own folder behind ROOT/local, and the cluster's files
as /etc/slurm. Everything else of the file system is shared, and of /tmp those folders that `add_node` is told of.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

from . import processes
from .processes import ClusterError, Process

_SETUP = """set -e
hostname "$1"
mount -t tmpfs -o mode=1777 rlhpc-shm /dev/shm
# its /tmp is made beside the real one, where the shared folders still are
own="$2/nodes/$1/tmp"
mkdir "$own"
mount -t tmpfs -o mode=1777 rlhpc-tmp "$own"
for shared in "${@:3}"; do
  mkdir -p "$own/${shared#/tmp/}"
  mount --rbind "$shared" "$own/${shared#/tmp/}"
done
case "$2" in
  /tmp/*) mkdir -p "$own/${2#/tmp/}"; mount --bind "$2" "$own/${2#/tmp/}";;
esac
mount --move "$own" /tmp
cd /
mount --bind "$2/nodes/$1/local" "$2/local"
if [ -d /etc/slurm ]; then mount --bind "$2/etc" /etc/slurm; fi
: >"$2/nodes/$1/ready"
exec sleep infinity
"""


def allowed() -> bool:
    """Whether this user may make the namespaces and the bridge: root of a container often may not."""
    probe = ["unshare", "--net", "--uts", "--mount", "ip", "link", "add", "probe0", "type", "bridge"]
    return os.geteuid() == 0 and subprocess.run(probe, capture_output=True, check=False).returncode == 0


def ip(*argv: str | int) -> str:
    done = subprocess.run(["ip", *map(str, argv)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise ClusterError(f"ip {' '.join(map(str, argv))}: {done.stderr.strip()}")
    return done.stdout


def add_bridge(root: Path) -> tuple[str, str]:
    """A new bridge with the first address of a free network: its name, and the address less its last part.

    Making the bridge is what claims the network: it fails where another cluster was first.
    """
    taken = {route.get("dst", "") for route in json.loads(ip("-json", "-4", "route", "show", "table", "all"))}
    for number in range(1, 250):
        prefix = f"10.77.{number}"
        if any(destination.startswith(f"{prefix}.") for destination in taken):
            continue
        bridge = f"rlhpc{number}"
        # With a hardware address of its own the bridge does not change it, and lose its neighbours, when a node joins.
        mac = f"02:77:00:00:{number:02x}:01"
        try:
            ip("link", "add", bridge, "address", mac, "type", "bridge", "stp_state", 0, "forward_delay", 0)
        except ClusterError as error:
            if "File exists" in str(error):
                continue
            raise
        ip("link", "set", bridge, "alias", str(root))
        ip("addr", "add", f"{prefix}.1/24", "dev", bridge)
        ip("link", "set", bridge, "up")
        return bridge, prefix
    raise ClusterError("no free network from 10.77.1.0/24 to 10.77.249.0/24: `ip link` shows the bridges rlhpc*")


def is_bridge_of(root: Path, bridge: str) -> bool:
    """False where it is gone, or, after a reboot, another cluster's of the same name."""
    alias = Path("/sys/class/net") / bridge / "ifalias"
    # Before it has its alias it can only be one that was left half made.
    return alias.exists() and alias.read_text().strip() in ("", str(root))


def add_node(root: Path, name: str, shared: Sequence[Path] = ()) -> Process:
    """The sleeping process that holds the namespaces of node `name`.

    Args:
        root: The cluster's folder, which all nodes see.
        name: Of the node.
        shared: What else below /tmp all nodes see.
    """
    namespaces = ["unshare", "--net", "--uts", "--mount", "--propagation", "slave"]
    return processes.start(
        [*namespaces, "bash", "-c", _SETUP, "node", name, root, *shared],
        env=os.environ,
        output=root / "log" / f"node-{name}.out",
    )


def wait_for_node(root: Path, name: str, holder: Process) -> None:
    ready = root / "nodes" / name / "ready"
    log = [root / "log" / f"node-{name}.out"]
    processes.wait_until(
        lambda: ready.exists() or not holder.alive(), f"the namespaces of {name}", deadline_s=10, logs=log
    )
    if not holder.alive():
        raise ClusterError(f"the namespaces of {name} could not be made\n{processes.tail(log)}")


def connect(bridge: str, name: str, holder: Process, address: str) -> None:
    ip("link", "add", link(bridge, name), "type", "veth", "peer", "name", "eth0", "netns", holder.pid)
    ip("link", "set", link(bridge, name), "master", bridge, "up")
    inside = f"link set lo up\naddr add {address}/24 dev eth0\nlink set eth0 up\n"
    done = subprocess.run(
        [*enter(holder), "ip", "-batch", "-"], input=inside, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise ClusterError(f"network of {name}: {done.stderr.strip()}")


def link(bridge: str, name: str) -> str:
    """The login side's end of a node's cable."""
    return f"{bridge}-{name}"


def enter(holder: Process) -> Sequence[str]:
    """What to put before a command to run it on the node. Not `ip netns exec`: it remounts /sys, and slurmd then stops."""
    return ["nsenter", f"--target={holder.pid}", "--net", "--uts", "--mount"]


def files(holder: Process) -> Path:
    """The node's root folder, as it is reached from here."""
    return Path(f"/proc/{holder.pid}/root")


def namespace(holder: Process) -> str:
    """What /proc/PID/ns/net of the node's processes reads; "" where the node is gone, is just going, or is not made yet.

    A holder begins in this host's namespace: for its first moments, everything on this host would be on the node.
    """
    try:
        namespace = os.readlink(f"/proc/{holder.pid}/ns/net")
    except FileNotFoundError:
        return ""
    return "" if namespace == processes.own_network_namespace() else namespace
