"""Policies in folders: checkpoints, and exports."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rlhpc.checkpoint.export_folder import read_object
from rlhpc.checkpoint.state import load_tensors
from rlhpc.embodied.models.base import Policy
from rlhpc.embodied.models.registry import policy_from_spec
from rlhpc.jobs.paths import MODEL
from rlhpc.runtime.errors import CheckpointError
from rlhpc.runtime.trust import Trust


def spec_in(folder: Path) -> tuple[dict[str, Any], Path]:
    """What a folder says of its policy (`Policy.spec`), and the file that does.

    Raises:
        CheckpointError: It does not say it.
    """
    origin = folder / "config.json"
    spec = read_object(origin).get("policy") if origin.is_file() else None
    if spec is None:
        origin = folder / "model.json"
        spec = read_object(origin)
    return spec, origin


def load_policy(folder: Path, trust: Trust) -> Policy:
    """The policy of a folder, in eval mode, on the CPU.

    Args:
        folder: A checkpoint, or an export.
        trust: What it may name of code.

    Raises:
        CheckpointError: Files are missing, or the weights do not fit the policy.
        ConfigError: It names code that is not trusted.
    """
    spec, origin = spec_in(folder)
    policy = policy_from_spec(spec, trust, str(origin))
    try:
        policy.load_state_dict(load_tensors(folder / MODEL))
    except RuntimeError as error:
        raise CheckpointError(f"{folder}: the weights do not fit the policy it describes: {error}") from error
    policy.eval()
    return policy
