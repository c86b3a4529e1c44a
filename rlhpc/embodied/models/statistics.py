"""Statistics of a dataset by which actions and states are scaled to −1 … 1: OpenVLA's `norm_stats`, LeRobot's `stats.json`.

{"<dataset>": {"action": {"q01": […], "q99": […], "min": […], "max": […], "mask": […]}, "proprio": {…}}, …}
{"action": {"min": […], "max": […], "q01": […], …}, "observation.state": {…}, …}
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.plain import read_json

#: What becomes −1 and 1, by the name of a normalisation.
RANGES = {"q99": ("q01", "q99"), "bounds": ("min", "max")}


class Scaling(nn.Module):
    """Maps `low … high` to −1 … 1 and back; components that `mask` leaves out stay as they are.

    Args:
        low, high, mask: Of each component.

    Attributes:
        gripper: The last component is a gripper, of which the model says 0 for closed and 1 for open, as datasets of RLDS do,
            and the environment takes 1 and −1 for these.
    """

    gripper = False

    low: Tensor
    high: Tensor
    mask: Tensor

    def __init__(self, low: Any, high: Any, mask: Any = None) -> None:
        super().__init__()
        low, high = (torch.as_tensor(bound, dtype=torch.float32).reshape(-1) for bound in (low, high))
        mask = torch.ones(len(low)) if mask is None else torch.as_tensor(mask)
        for name, value in (("low", low), ("high", high), ("mask", mask.bool())):
            self.register_buffer(name, value, persistent=False)

    def scaled(self, values: Tensor) -> Tensor:
        """`[..., dim]` to −1 … 1, where what lies outside ends; components that never change become 0."""
        width = self.high - self.low
        found = (2 * (values - self.low) / torch.where(width == 0, 1, width) - 1).clamp(-1, 1)
        found = torch.where(self.mask, torch.where(width == 0, 0, found), values)
        if self.gripper:
            found[..., -1] = ((1 - values[..., -1]) / 2).clamp(0, 1)
        return found

    def unscaled(self, values: Tensor) -> Tensor:
        """The inverse, without an end."""
        found = torch.where(self.mask, self.low + (values + 1) / 2 * (self.high - self.low), values)
        if self.gripper:
            found[..., -1] = torch.where(values[..., -1] < 0.5, 1.0, -1.0)
        return found


def read_statistics(path: Path) -> dict[str, Any]:
    """Statistics by dataset, from a file of either kind, or a LeRobot dataset's folder.

    Raises:
        ConfigError: There is no such file, or it has none.
    """
    file = path / "meta" / "stats.json" if path.is_dir() else path
    try:
        found = read_json(file.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"statistics of actions: {file} cannot be read: {error}") from error
    if not isinstance(found, dict) or not found:
        raise ConfigError(f"statistics of actions: {file} has none")
    if "action" not in found:
        return found
    state = {"proprio": found["observation.state"]} if "observation.state" in found else {}
    return {file.resolve().parents[1].name: {"action": found["action"], **state}}


def scaling(
    statistics: dict[str, Any], dataset: str | None, part: str, dim: int, normalisation: str, where: str
) -> Scaling | None:
    """The scaling of "action" or "proprio"; None if the dataset says nothing of states.

    Args:
        statistics: By dataset.
        dataset: Which one; None takes the only one.
        part: Which of the two.
        dim: Components it must have.
        normalisation: One of `RANGES`; where a dataset has no quantiles, its bounds.
        where: Its name in messages.

    Raises:
        ConfigError: There is no such dataset, or it has other components.
    """
    if normalisation not in RANGES:
        raise ConfigError(f"actor.model.kwargs.normalisation is {normalisation!r}; allowed: {', '.join(RANGES)}")
    if dataset is None and len(statistics) == 1:
        (dataset,) = statistics
    if dataset is None or dataset not in statistics:
        named = "is missing" if dataset is None else f"is {dataset!r}"
        raise ConfigError(
            f"actor.model.kwargs.unnorm_key {named}; {where} has statistics of: {', '.join(sorted(statistics))}"
        )
    found = statistics[dataset].get(part)
    if found is None and part != "action":
        return None
    names = next((names for names in (RANGES[normalisation], RANGES["bounds"]) if set(names) <= set(found or {})), None)
    if found is None or names is None:
        raise ConfigError(f"{where}: {dataset} lacks {' and '.join(RANGES[normalisation])} of its actions")
    made = Scaling(found[names[0]], found[names[1]], found.get("mask"))
    if len(made.low) != dim:
        raise ConfigError(f"{where}: {dataset} has {len(made.low)} components of {part}, the environment {dim}")
    return made
