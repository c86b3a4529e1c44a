"""Where a process computes: on the accelerators that it was granted, or on the CPU where it was granted none."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from rlhpc.runtime.errors import ConfigError

#: Set where accelerators are only a number: `Cluster.local` and the tests' Slurm have nodes with some that are not there.
VIRTUAL = "RLHPC_VIRTUAL_ACCELERATORS"


def landing_device(sent: str) -> str:
    """Where a tensor that lay on the device `sent` of another process goes: this process's own accelerator, whatever its
    number was over there; the CPU where this process has none."""
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
        ConfigError: Torch cannot use what was granted. A run on the CPU in its place would pass for a slow one.
    """
    import torch

    if not granted:
        return "cpu"
    seen = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if seen >= len(granted):
        return "cuda"
    if environ.get(VIRTUAL):
        return "cuda" if seen else "cpu"
    mask = environ.get("CUDA_VISIBLE_DEVICES")
    if torch.version.cuda is None and torch.version.hip is None:
        why = "which is built for the CPU; install the other build: RLHPC_TORCH=auto bash envs/setup.sh"
    else:
        built = f"CUDA {torch.version.cuda}" if torch.version.cuda else f"ROCm {torch.version.hip}"
        why = (
            f"which is built for {built} and finds {seen} of them (CUDA_VISIBLE_DEVICES={mask}); look at that "
            "node's driver with nvidia-smi, or take a build for it: RLHPC_TORCH=cu126 bash envs/setup.sh"
        )
    raise ConfigError(
        f"accelerators {', '.join(map(str, granted))} of {os.uname().nodename} were granted, but cannot be used by torch "
        f"{torch.__version__}, {why}; or do without them: cluster.accelerators_per_node=0"
    )
