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
STATISTICS_BY_NORMALISATION = {"q99": ("q01", "q99"), "bounds": ("min", "max")}


class Scaling(nn.Module):
    """Affine map of [`low`, `high`] to [−1, 1] and back; components with a false `mask` stay unchanged.

    Args:
        low, high, mask: Bounds and mask of each component.
        has_gripper: True if the last component is a gripper, whose values are 0 (closed) and 1 (open) for the model, as in
            RLDS datasets, and 1 (closed) and −1 (open) for the environment.
    """

    low: Tensor
    high: Tensor
    mask: Tensor

    def __init__(self, low: Any, high: Any, mask: Any = None, *, has_gripper: bool = False) -> None:
        super().__init__()
        self.gripper = has_gripper
        low, high = (torch.as_tensor(space_bound, dtype=torch.float32).reshape(-1) for space_bound in (low, high))
        mask = torch.ones(len(low)) if mask is None else torch.as_tensor(mask)
        for name, buffer in (("low", low), ("high", high), ("mask", mask.bool())):
            self.register_buffer(name, buffer, persistent=False)

    def with_gripper(self, has_gripper: bool) -> Scaling:
        """Returns a copy of this scaling with another value of `has_gripper`."""
        return Scaling(self.low, self.high, self.mask, has_gripper=has_gripper)

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
        statistics_content = read_json(file.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"statistics of actions: {file} cannot be read: {error}") from error
    if not isinstance(statistics_content, dict) or not statistics_content:
        raise ConfigError(f"statistics of actions: {file} has none")
    if "action" not in statistics_content:
        return statistics_content
    state_statistics = (
        {"proprio": statistics_content["observation.state"]} if "observation.state" in statistics_content else {}
    )
    return {file.resolve().parents[1].name: {"action": statistics_content["action"], **state_statistics}}


def scaling(
    statistics: dict[str, Any], dataset: str | None, statistics_part: str, dim: int, normalisation: str, where: str
) -> Scaling | None:
    """Builds the scaling of "action" or "proprio"; returns None if the dataset has no statistics of states.

    Args:
        statistics: Statistics by dataset.
        dataset: Name of the dataset; None takes the only dataset of `statistics`.
        statistics_part: "action" or "proprio".
        dim: Required number of components.
        normalisation: Key of `STATISTICS_BY_NORMALISATION`; a dataset without quantiles is scaled by its bounds.
        where: Name of the statistics in messages.

    Raises:
        ConfigError: The dataset does not exist, lacks statistics, or has a different number of components.
    """
    if normalisation not in STATISTICS_BY_NORMALISATION:
        raise ConfigError(
            f"actor.model.kwargs.normalisation is {normalisation!r}; allowed: {', '.join(STATISTICS_BY_NORMALISATION)}"
        )
    if dataset is None and len(statistics) == 1:
        (dataset,) = statistics
    if dataset is None or dataset not in statistics:
        key_problem = "is missing" if dataset is None else f"is {dataset!r}"
        raise ConfigError(
            f"actor.model.kwargs.unnorm_key {key_problem}; {where} has statistics of: {', '.join(sorted(statistics))}"
        )
    stats = statistics[dataset].get(statistics_part)
    if stats is None and statistics_part != "action":
        return None
    statistic_names = next(
        (
            candidate_names
            for candidate_names in (STATISTICS_BY_NORMALISATION[normalisation], STATISTICS_BY_NORMALISATION["bounds"])
            if set(candidate_names) <= set(stats or {})
        ),
        None,
    )
    if stats is None or statistic_names is None:
        raise ConfigError(
            f"{where}: {dataset} lacks {' and '.join(STATISTICS_BY_NORMALISATION[normalisation])} of its {statistics_part}"
        )
    part_scaling = Scaling(stats[statistic_names[0]], stats[statistic_names[1]], stats.get("mask"))
    if len(part_scaling.low) != dim:
        raise ConfigError(
            f"{where}: {dataset} has {len(part_scaling.low)} components of {statistics_part}, the environment {dim}"
        )
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
        statistic_names = _NORM_STATS[normalisation]
        if not isinstance(statistics, dict) or not set(statistic_names) <= set(statistics):
            raise ConfigError(
                f"{where} lacks {' and '.join(statistic_names)}, which normalisation {normalisation} takes"
            )
        low_bounds, high_bounds = (
            torch.as_tensor(statistics[name], dtype=torch.float32).reshape(-1)[:dim] for name in statistic_names
        )
        if len(low_bounds) != dim or len(high_bounds) != dim:
            raise ConfigError(f"{where} has {len(low_bounds)} components, the environment {dim}")
        if normalisation == "quantiles":
            half_range = (high_bounds - low_bounds + 1e-6) / 2
            low_bounds, high_bounds = low_bounds + half_range, half_range
        else:
            high_bounds = high_bounds + 1e-6
        self.register_buffer("shift", low_bounds, persistent=False)
        self.register_buffer("scale", high_bounds, persistent=False)

    def normalise(self, raw_values: Tensor) -> Tensor:
        """Normalises `[..., dim]` for the network."""
        return (raw_values - self.shift) / self.scale

    def unnormalise(self, normalised_values: Tensor) -> Tensor:
        """Inverts `normalise`."""
        return normalised_values * self.scale + self.shift


def read_norm_stats(source: Any, model_path: str) -> dict[str, Any] | None:
    """Reads openpi's statistics of "state" and "actions"; returns None if actions are scaled by the bounds of their space.

    Args:
        source: `actor.model.kwargs.statistics`: a norm_stats.json file, a folder that contains one, the content
            of such a file, `bounds`, or None for the file in the model's folder.
        model_path: The model's folder or hub name, or `builtin:…`, which needs no statistics.

    Raises:
        ConfigError: The file is missing (the message names the searched paths) or has no statistics of actions.
    """
    if isinstance(source, Mapping):
        stats_content: Any = plain(source)
        return dict(stats_content.get("norm_stats", stats_content))
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
        stats_content = read_json(files[0].read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"actor.model.kwargs.statistics: {files[0]} cannot be read: {error}") from error
    stats_content = stats_content.get("norm_stats", stats_content) if isinstance(stats_content, dict) else None
    if not isinstance(stats_content, dict) or "actions" not in stats_content:
        raise ConfigError(f"actor.model.kwargs.statistics: {files[0]} has no statistics of actions")
    return dict(stats_content)


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

    def forward(self, flat_obs: Tensor) -> Tensor:
        """Returns normalised observations `[B, width]`."""
        return ((flat_obs - self.mean.float()) * (self.var.float() + _EPS).rsqrt()).clamp(-_CLIP, _CLIP)

    def moments(self, flat_obs: Tensor, mask: Tensor) -> Tensor:
        """Returns sums over the steps of each slot, `[n, 1 + 2 · width]`: the number of valid observations, the sums of their
        offsets from the mean, and the sums of the squared offsets.

        Args:
            flat_obs: Observations `[n, T, width]`.
            mask: Valid observations, bool `[n, T]`.
        """
        offsets = (flat_obs.double() - self.mean) * mask[..., None]
        return torch.cat([mask.double().sum(1, keepdim=True), offsets.sum(1), (offsets * offsets).sum(1)], 1)

    @torch.no_grad()
    def update(self, moments: Tensor) -> None:
        """Updates the statistics with observations (Chan et al. 1979).

        Args:
            moments: Moments of all slots of the run, in slot order. The result then does not depend on the number of
                ranks.
        """
        row_count, offset_sums, squared_sums = moments.sum(0).split([1, len(self.mean), len(self.mean)])
        has_rows = row_count > 0  # decided on the device, so that the host reads nothing
        total_count = self.count + row_count
        squared_deviations = self.var * self.count + squared_sums - offset_sums * offset_sums / total_count
        variance = (squared_deviations / total_count).clamp(min=0)
        self.mean.copy_(torch.where(has_rows, self.mean + offset_sums / total_count, self.mean))
        self.var.copy_(torch.where(has_rows, variance, self.var))
        self.count.copy_(total_count[0])


class AlohaJoints:
    """Conversion between the joint space of two ALOHA arms and that of π0's training data (openpi's `adapt_to_pi`).

    State and actions have 14 components: six joints and a gripper of the left arm, then of the right arm. π0's data count some
    joints in the other direction and measure a gripper as an angle; the robot measures it as a position of its fingers.
    """

    #: Number of components of state and actions.
    width = 14
    _grippers = (6, 13)
    _flipped_joints = (1, 2, 8, 9)
    #: Positions in metres of a closed and an open gripper, from ALOHA's code.
    _positions = (0.01844, 0.05800)
    #: Lengths in metres of the arm and the horn between motor and finger, from Interbotix's code.
    _arm, _horn = 0.036, 0.022
    #: Angles in radians of π0's closed and open gripper, and of the robot's gripper joint.
    _pi_angles, _robot_angles = (0.5476, 1.6296), (-0.6213, 1.4910)

    @classmethod
    def state_to_pi(cls, robot_state: Tensor) -> Tensor:
        """Returns robot states `[..., 14]` in π0's space: grippers as angles, from 0 (closed) to 1 (open)."""
        flipped_state, (low_position, high_position) = cls._flip(robot_state), cls._positions
        gripper_position = flipped_state[..., list(cls._grippers)] * (high_position - low_position) + low_position
        sine = (cls._horn**2 + gripper_position**2 - cls._arm**2) / (2 * cls._horn * gripper_position)
        closed_angle, open_angle = cls._pi_angles
        flipped_state[..., list(cls._grippers)] = (sine.clamp(-1, 1).arcsin() - closed_angle) / (
            open_angle - closed_angle
        )
        return flipped_state

    @classmethod
    def actions_from_pi(cls, actions: Tensor) -> Tensor:
        """Returns actions `[..., 14]` of the network as the robot executes them."""
        flipped_actions, (low_angle, high_angle) = cls._flip(actions), cls._robot_angles
        flipped_actions[..., list(cls._grippers)] = (
            flipped_actions[..., list(cls._grippers)] + cls._pi_angles[0] - low_angle
        ) / (high_angle - low_angle)
        return flipped_actions

    @classmethod
    def actions_to_pi(cls, actions: Tensor) -> Tensor:
        """Returns a robot's actions `[..., 14]` in π0's space; the inverse of `actions_from_pi`."""
        flipped_actions, (low_angle, high_angle) = cls._flip(actions), cls._robot_angles
        flipped_actions[..., list(cls._grippers)] = (
            flipped_actions[..., list(cls._grippers)] * (high_angle - low_angle) + low_angle - cls._pi_angles[0]
        )
        return flipped_actions

    @classmethod
    def _flip(cls, rows: Tensor) -> Tensor:
        """Returns a copy of rows `[..., 14]` with the joints turned that π0's data count in the other direction."""
        signs = torch.ones(cls.width, dtype=rows.dtype, device=rows.device)
        signs[list(cls._flipped_joints)] = -1
        return rows * signs
