"""How much memory accelerators and nodes have: as the configuration says, or as is found here."""

from __future__ import annotations

import functools
import re
import shutil
import subprocess

from rlhpc.config.sections import RunConfig
from rlhpc.config.typed import mapping
from rlhpc.runtime.cluster import Cluster, read_key
from rlhpc.runtime.os_resources import total_memory

_UNITS = {"": 20, "K": 10, "M": 20, "G": 30, "T": 40}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)([KMGT]?)(?:i?B)?", re.IGNORECASE)
_ASK_S = 10.0


def parse_bytes(text: str) -> float | None:
    """Bytes of what Slurm would write: `80G`, `512M`; a bare number is in MiB. None for what is no size, or 0 (all there
    is)."""
    found = _SIZE.fullmatch(text.strip())
    return float(found[1]) * (1 << _UNITS[found[2].upper()]) or None if found else None


def accelerator_room(cfg: RunConfig, cluster: Cluster, node: int) -> tuple[float | None, str]:
    """Bytes of an accelerator of a node, and who says so.

    Args:
        cfg: The configuration.
        cluster: The nodes.
        node: Rank of the node.
    """
    for raw in read_key(cfg.cluster, "node_groups", ()):
        label = str(read_key(raw, "label"))
        own = read_key(raw, "accelerator_memory")
        if own is not None and node in cluster.node_group(label).node_ranks:
            return parse_bytes(str(own)), f"cluster.node_groups[{label}].accelerator_memory"
    if (common := read_key(cfg.cluster, "accelerator_memory")) is not None:
        return parse_bytes(str(common)), "cluster.accelerator_memory"
    found = _found_here() if len(cluster.nodes) == 1 else None
    return found, "nvidia-smi" if found else ""


@functools.cache
def _found_here() -> float | None:
    """Bytes of the smallest accelerator of this machine, as its driver says; None without one."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return None
    asked = [command, "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        said = subprocess.run(asked, capture_output=True, text=True, timeout=_ASK_S, check=True).stdout
        return min(float(line) * (1 << 20) for line in said.splitlines() if line.strip())
    except (OSError, ValueError, subprocess.SubprocessError):
        return None


def host_room(cfg: RunConfig, cluster: Cluster, node: int, *, here: bool) -> tuple[float | None, str]:
    """Bytes of a node that the run may use, and who says so.

    Args:
        cfg: The configuration.
        cluster: The nodes.
        node: Rank of the node.
        here: Whether the run starts on this machine, rather than in a job.
    """
    for raw in read_key(cfg.cluster, "node_groups", ()):
        label = str(read_key(raw, "label"))
        if read_key(raw, "mem") is not None and node in cluster.node_group(label).node_ranks:
            return parse_bytes(str(mapping(raw)["mem"])), f"cluster.node_groups[{label}].mem"
    if cfg.cluster.mem is not None and not here:
        return parse_bytes(cfg.cluster.mem), "cluster.mem"
    if here:
        return float(total_memory()), "this machine"
    return None, ""
