"""Where a process computes: on the accelerators it was granted, or on the CPU if it was granted none."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.host import node_name

#: Set when accelerators are only a number: `Cluster.local` and the tests' Slurm have nodes with imaginary ones.
VIRTUAL = "RLHPC_VIRTUAL_ACCELERATORS"

#: The oldest driver (by the newest CUDA that it takes) on which a build of torch runs, the newest build first.
_BUILDS = (((13, 0), "cu130"), ((12, 8), "cu128"))


def landing_device(sent: str) -> str:
    """Where a tensor goes that was on the device `sent` of another process: this process's own accelerator, whatever its
    number was over there; the CPU if this process has none."""
    import torch

    kind = sent.partition(":")[0]
    backend = getattr(torch, kind, None)
    return kind if backend is not None and backend.is_available() else "cpu"


def torch_device(granted: Sequence[int], environ: Mapping[str, str] = os.environ) -> str:
    """`cuda` (the first visible one) for a process that was granted accelerators, `cpu` for one that was not.

    Args:
        granted: Their indices on the node.
        environ: Of the process.

    Raises:
        ConfigError: Torch cannot use what was granted. A run on the CPU instead would look like a merely slow one.
    """
    import torch

    if not granted:
        return "cpu"
    seen = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if seen >= len(granted):
        return "cuda"
    if environ.get(VIRTUAL):
        return "cuda" if seen else "cpu"
    why, do = why_unseen(seen, torch.version.cuda, torch.version.hip, environ.get("CUDA_VISIBLE_DEVICES"))
    raise ConfigError(
        f"accelerators {', '.join(map(str, granted))} of {node_name()} were granted, but cannot be used by torch "
        f"{torch.__version__}, which {why}; {do}; or do without them: cluster.accelerators_per_node=0"
    )


def why_unseen(seen: int, cuda: str | None, hip: str | None, mask: str | None, driver: str = "") -> tuple[str, str]:
    """Why torch sees fewer accelerators than were granted ("torch 2.13, which …"), and what to do about it.

    Args:
        seen: How many it sees.
        cuda, hip: The versions that torch is built for.
        mask: CUDA_VISIBLE_DEVICES.
        driver: The newest CUDA that the node's driver takes, if known.
    """
    if not cuda and not hip:
        build = next((build for since, build in _BUILDS if _number(driver) >= since), "cu126") if driver else "auto"
        return "is built for the CPU", f"install the other build: RLHPC_TORCH={build} bash envs/setup.sh"
    return (
        f"is built for {f'CUDA {cuda}' if cuda else f'ROCm {hip}'} and finds {seen} of them (CUDA_VISIBLE_DEVICES={mask})",
        "look at that node's driver with nvidia-smi, or take a build for it: RLHPC_TORCH=cu126 bash envs/setup.sh",
    )


def _number(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))
