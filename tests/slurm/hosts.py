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
from contextlib import suppress
from pathlib import Path

from . import processes
from .processes import ClusterError, Process

_SETUP = """set -e
hostname "$1"
mount -t tmpfs -o mode=1777 rlhpc-shm /dev/shm
# its /tmp is made beside the real one, where the shared folders still are
own="$2/nodes/$1/tmp"
mkdir -p "$own"
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
mkdir -p "$2/nodes/$1/local"
mount --bind "$2/nodes/$1/local" "$2/local"
if [ -d "$2/pm_counters" ]; then
  sys="$2/nodes/$1/sys"
  mkdir -p "$sys"
  mount -t tmpfs rlhpc-sys "$sys"
  for folder in /sys/*; do
    mkdir "$sys/${folder##*/}"
    mount --rbind "$folder" "$sys/${folder##*/}"
  done
  mkdir -p "$sys/cray/pm_counters"
  mount --bind "$2/pm_counters" "$sys/cray/pm_counters"
  mount --move "$sys" /sys
fi
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


def connect(bridge: str, name: str, holder: Process, address: str, interface: str = "eth0") -> None:
    cable = link(bridge, name, interface)
    ip("link", "add", cable, "type", "veth", "peer", "name", interface, "netns", holder.pid)
    ip("link", "set", cable, "master", bridge, "up")
    inside = f"link set lo up\naddr add {address}/24 dev {interface}\nlink set {interface} up\n"
    done = subprocess.run(
        [*enter(holder), "ip", "-batch", "-"], input=inside, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise ClusterError(f"network of {name}: {done.stderr.strip()}")


def disconnect(bridge: str, name: str) -> None:
    """Takes a node's cable away; does nothing where its namespaces, and the cable with them, are gone already."""
    with suppress(ClusterError):
        ip("link", "del", link(bridge, name))


#: A hardware address that no host has: what is sent to it reaches nobody, and nobody says so.
_NOBODY = "02:77:ff:ff:ff:ff"


def drop_packets_to(address: str, device: str, holder: Process | None) -> None:
    """Has all packets from a host (None: this one) to an address vanish without an error, as a cut cable does."""
    _neighbour(holder, "replace", address, "lladdr", _NOBODY, "dev", device, "nud", "permanent")


def pass_packets_to(address: str, device: str, holder: Process | None) -> None:
    """Ends `drop_packets_to`; does nothing where the address is reached already."""
    with suppress(ClusterError):
        _neighbour(holder, "del", address, "dev", device)


def _neighbour(holder: Process | None, *words: str) -> None:
    argv = [*(enter(holder) if holder else ()), "ip", "neigh", *words]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ClusterError(f"{' '.join(argv)}: {done.stderr.strip()}")


def link(bridge: str, name: str, interface: str = "eth0") -> str:
    """The login side's end of a node's cable; a name of at most 15 letters, as the kernel wants it."""
    return f"{bridge}-{name}" + ("" if interface == "eth0" else interface[0])


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
