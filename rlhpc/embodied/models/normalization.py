"""Dataset statistics for scaling actions and states to [−1, 1]: OpenVLA's `norm_stats`, LeRobot's `stats.json`.

{"<dataset>": {"action": {"q01": […], "q99": […], "min": […], "max": […], "mask": […]}, "proprio": {…}}, …}
{"action": {"min": […], "max": […], "q01": […], …}, "observation.state": {…}, …}

The module also reads openpi's `norm_stats.json`, for π0:

{"norm_stats": {"state": {"mean": […], "std": […], "q01": […], "q99": […]}, "actions": {…}}}
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rlhpc.config.typed import plain
from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.files import expand_home, read_json

#: Names of the statistics that map to −1 and 1, by normalisation.
RANGES = {"q99": ("q01", "q99"), "bounds": ("min", "max")}


class Scaling(nn.Module):
    """Affine map of [`low`, `high`] to [−1, 1] and back; components with a false `mask` stay unchanged.

    Args:
        low, high, mask: Bounds and mask of each component.
        gripper: True if the last component is a gripper, whose values are 0 (closed) and 1 (open) for the model, as in RLDS
            datasets, and 1 (closed) and −1 (open) for the environment.
    """

    low: Tensor
    high: Tensor
    mask: Tensor

    def __init__(self, low: Any, high: Any, mask: Any = None, *, gripper: bool = False) -> None:
        super().__init__()
        self.gripper = gripper
        low, high = (torch.as_tensor(bound, dtype=torch.float32).reshape(-1) for bound in (low, high))
        mask = torch.ones(len(low)) if mask is None else torch.as_tensor(mask)
        for name, buffer in (("low", low), ("high", high), ("mask", mask.bool())):
            self.register_buffer(name, buffer, persistent=False)

    def with_gripper(self, gripper: bool) -> Scaling:
        """Returns a copy of this scaling with another value of `gripper`."""
        return Scaling(self.low, self.high, self.mask, gripper=gripper)

    def scaled(self, values: Tensor) -> Tensor:
        """Converts values `[..., dim]` to [−1, 1] with clamping; components with an empty range become 0."""
        width = self.high - self.low
        scaled_values = (2 * (values - self.low) / torch.where(width == 0, 1, width) - 1).clamp(-1, 1)
        scaled_values = torch.where(self.mask, torch.where(width == 0, 0, scaled_values), values)
        if self.gripper:
            scaled_values[..., -1] = ((1 - values[..., -1]) / 2).clamp(0, 1)
        return scaled_values

    def unscaled(self, values: Tensor) -> Tensor:
        """Inverts `scaled`, without clamping."""
        unscaled_values = torch.where(self.mask, self.low + (values + 1) / 2 * (self.high - self.low), values)
        if self.gripper:
            unscaled_values[..., -1] = torch.where(values[..., -1] < 0.5, 1.0, -1.0)
        return unscaled_values


def read_statistics(path: Path) -> dict[str, Any]:
    """Reads statistics by dataset from an OpenVLA or LeRobot file, or from the folder of a LeRobot dataset.

    Raises:
        ConfigError: The file cannot be read, or has no statistics.
    """
    file = path / "meta" / "stats.json" if path.is_dir() else path
    try:
        content = read_json(file.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"statistics of actions: {file} cannot be read: {error}") from error
    if not isinstance(content, dict) or not content:
        raise ConfigError(f"statistics of actions: {file} has none")
    if "action" not in content:
        return content
    state = {"proprio": content["observation.state"]} if "observation.state" in content else {}
    return {file.resolve().parents[1].name: {"action": content["action"], **state}}


def scaling(
    statistics: dict[str, Any], dataset: str | None, part: str, dim: int, normalisation: str, where: str
) -> Scaling | None:
    """Builds the scaling of "action" or "proprio"; returns None if the dataset has no statistics of states.

    Args:
        statistics: Statistics by dataset.
        dataset: Name of the dataset; None takes the only dataset of `statistics`.
        part: "action" or "proprio".
        dim: Required number of components.
        normalisation: Key of `RANGES`; a dataset without quantiles is scaled by its bounds.
        where: Name of the statistics in messages.

    Raises:
        ConfigError: The dataset does not exist, lacks statistics, or has another number of components.
    """
    if normalisation not in RANGES:
        raise ConfigError(f"actor.model.kwargs.normalisation is {normalisation!r}; allowed: {', '.join(RANGES)}")
    if dataset is None and len(statistics) == 1:
        (dataset,) = statistics
    if dataset is None or dataset not in statistics:
        key_problem = "is missing" if dataset is None else f"is {dataset!r}"
        raise ConfigError(
            f"actor.model.kwargs.unnorm_key {key_problem}; {where} has statistics of: {', '.join(sorted(statistics))}"
        )
    stats = statistics[dataset].get(part)
    if stats is None and part != "action":
        return None
    names = next((names for names in (RANGES[normalisation], RANGES["bounds"]) if set(names) <= set(stats or {})), None)
    if stats is None or names is None:
        raise ConfigError(f"{where}: {dataset} lacks {' and '.join(RANGES[normalisation])} of its {part}")
    part_scaling = Scaling(stats[names[0]], stats[names[1]], stats.get("mask"))
    if len(part_scaling.low) != dim:
        raise ConfigError(f"{where}: {dataset} has {len(part_scaling.low)} components of {part}, the environment {dim}")
    return part_scaling


#: Value of `kwargs.statistics` that scales actions and state by the bounds of their spaces instead of a file's statistics.
BOUNDS = "bounds"
#: Name of openpi's statistics file, in a released folder or its `assets/<name>`.
NORM_STATS = "norm_stats.json"
#: Statistics that openpi's normalisations need, by normalisation.
_NORM_STATS = {"mean_std": ("mean", "std"), "quantiles": ("q01", "q99")}


class NormStats(nn.Module):
    """Normalisation of a state or of actions as in openpi: (x − mean) / (std + 1e-6) for π0, and 2·(x − q01) /
    (q99 − q01 + 1e-6) − 1 for π0.5. Networks pad the result with zeros.

    Args:
        statistics: Statistics of "state" or "actions": `mean` and `std`, or `q01` and `q99`, each a list of numbers.
        normalisation: "mean_std" or "quantiles".
        dim: Number of components; further components in the file are ignored.
        where: Name of the statistics in messages.

    Raises:
        ConfigError: A statistic is missing, or has too few components.
    """

    shift: Tensor
    scale: Tensor

    def __init__(self, statistics: Any, normalisation: str, dim: int, where: str) -> None:
        super().__init__()
        if normalisation not in _NORM_STATS:
            raise ConfigError(
                f"actor.model.kwargs.normalisation is {normalisation!r}; allowed: {', '.join(_NORM_STATS)}"
            )
        names = _NORM_STATS[normalisation]
        if not isinstance(statistics, dict) or not set(names) <= set(statistics):
            raise ConfigError(f"{where} lacks {' and '.join(names)}, which normalisation {normalisation} takes")
        low, high = (torch.as_tensor(statistics[name], dtype=torch.float32).reshape(-1)[:dim] for name in names)
        if len(low) != dim or len(high) != dim:
            raise ConfigError(f"{where} has {len(low)} components, the environment {dim}")
        if normalisation == "quantiles":
            half_range = (high - low + 1e-6) / 2
            low, high = low + half_range, half_range
        else:
            high = high + 1e-6
        self.register_buffer("shift", low, persistent=False)
        self.register_buffer("scale", high, persistent=False)

    def normalise(self, values: Tensor) -> Tensor:
        """Normalises `[..., dim]` for the network."""
        return (values - self.shift) / self.scale

    def unnormalise(self, values: Tensor) -> Tensor:
        """Inverts `normalise`."""
        return values * self.scale + self.shift


def read_norm_stats(source: Any, model_path: str) -> dict[str, Any] | None:
    """Reads openpi's statistics of "state" and "actions"; returns None if actions are scaled by the bounds of their space.

    Args:
        source: `actor.model.kwargs.statistics`: a norm_stats.json file, a folder that contains one, the content of such a
            file, `bounds`, or None for the file in the model's folder.
        model_path: The model's folder or hub name, or `builtin:…`, which needs no statistics.

    Raises:
        ConfigError: The file is missing (the message names the searched paths) or has no statistics of actions.
    """
    if isinstance(source, Mapping):
        content: Any = plain(source)
        return dict(content.get("norm_stats", content))
    if source == BOUNDS or (source is None and model_path.startswith("builtin:")):
        return None
    stats_path = expand_home(str(source or model_path))
    files = (
        [stats_path]
        if stats_path.is_file()
        else sorted({*stats_path.glob(NORM_STATS), *stats_path.glob(f"assets/**/{NORM_STATS}")})
    )
    if len(files) != 1:
        problem = f"there are several: {', '.join(map(str, files))}" if files else "there is none"
        raise ConfigError(
            f"actor.model.model_path is {model_path!r}, whose actions and state are normalised by a dataset's statistics; "
            f"looked for {stats_path}/{NORM_STATS} and {stats_path}/assets/**/{NORM_STATS}: {problem}. Name the file: "
            f"actor.model.kwargs.statistics=FILE; or {BOUNDS}, for weights that were trained on actions scaled by the "
            "bounds of their space"
        )
    try:
        content = read_json(files[0].read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"actor.model.kwargs.statistics: {files[0]} cannot be read: {error}") from error
    content = content.get("norm_stats", content) if isinstance(content, dict) else None
    if not isinstance(content, dict) or "actions" not in content:
        raise ConfigError(f"actor.model.kwargs.statistics: {files[0]} has no statistics of actions")
    return dict(content)


#: Clip range of normalised values, and the term added to variances.
_CLIP, _EPS = 10.0, 1e-8


class ObservationNormaliser(nn.Module):
    """Observation normaliser: (x − mean) / √(var + 1e-8), within ±10. Before the first update, x stays unchanged except
    for the clipping.

    Args:
        width: Number of values in an observation.
    """

    count: Tensor
    mean: Tensor
    var: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))
        self.register_buffer("mean", torch.zeros(width, dtype=torch.float64))
        self.register_buffer("var", torch.ones(width, dtype=torch.float64))

    def forward(self, flat: Tensor) -> Tensor:
        """Returns normalised observations `[B, width]`."""
        return ((flat - self.mean.float()) * (self.var.float() + _EPS).rsqrt()).clamp(-_CLIP, _CLIP)

    def moments(self, flat: Tensor, mask: Tensor) -> Tensor:
        """Returns sums over the steps of each slot, `[n, 1 + 2 · width]`: the number of valid observations, the sums of their
        offsets from the mean, and the sums of the squared offsets.

        Args:
            flat: Observations `[n, T, width]`.
            mask: Valid observations, bool `[n, T]`.
        """
        offsets = (flat.double() - self.mean) * mask[..., None]
        return torch.cat([mask.double().sum(1, keepdim=True), offsets.sum(1), (offsets * offsets).sum(1)], 1)

    @torch.no_grad()
    def update(self, moments: Tensor) -> None:
        """Updates the statistics with observations (Chan et al. 1979).

        Args:
            moments: Moments of all slots of the run, in slot order. The result then does not depend on the number of
                ranks.
        """
        count, offset_sums, squared_sums = moments.sum(0).split([1, len(self.mean), len(self.mean)])
        if not count.item():
            return
        total_count = self.count + count
        squared_deviations = self.var * self.count + squared_sums - offset_sums * offset_sums / total_count
        self.mean.copy_(self.mean + offset_sums / total_count)
        self.var.copy_((squared_deviations / total_count).clamp(min=0))
        self.count.copy_(total_count[0])
