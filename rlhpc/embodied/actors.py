"""Whoever acts in an environment: a policy from a folder, or an expert."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from rlhpc.checkpoint.start import find_weights
from rlhpc.embodied.export import load_exported
from rlhpc.runtime.errors import CheckpointError
from rlhpc.runtime.files import expand_home
from rlhpc.runtime.plugins import load_attribute
from rlhpc.runtime.trust import Trust


class ExpertPolicy:
    """A function `obs [N, ...] -> actions [N, A]` instead of a policy; it has no noise and no values."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        self._function = function

    def predict_action_batch(
        self, obs: Any, mode: str = "eval", noise: Any = None
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        """Actions `[N, 1, A]`."""
        del mode, noise
        seen = {name: part.cpu().numpy() for name, part in obs.items()} if isinstance(obs, dict) else obs.cpu().numpy()
        actions = np.asarray(self._function(seen))
        return torch.from_numpy(actions.reshape(len(actions), 1, -1)), {}


def load_actor(source: str, key: str, trust: Trust | None = None) -> Any:
    """What acts: an expert given as `module:function`, or the policy of a checkpoint, export folder or run folder.

    Args:
        source: As the user gives it.
        key: What messages call it.
        trust: What a folder may name of code.

    Raises:
        ConfigError, CheckpointError: It cannot be loaded.
    """
    if ":" in source and not expand_home(source).exists():
        return ExpertPolicy(load_attribute(source, key))
    folder = find_weights(source, key)
    if not any((folder / name).is_file() for name in ("config.json", "model.json")):
        raise CheckpointError(f"{folder} says nothing of the network (no model.json, no config.json)")
    return load_exported(folder, trust=trust)
