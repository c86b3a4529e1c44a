"""Open-loop check of a policy against demonstrations: does the policy see and act as its training data say.

The policy predicts the actions of demonstrated observations. A mistake of the setup, such as a mirrored image or foreign
statistics, shows because the prediction fits better once the mistake is undone. Each such comparison is paired over frames,
and counts only if it is far outside the noise of the mean.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from rlhpc.embodied.data.demonstrations import check_fit, chunks_of, windows_of
from rlhpc.embodied.data.trajectory import Trajectory
from rlhpc.embodied.envs.observations import boxes_of
from rlhpc.embodied.models.base import Policy
from rlhpc.embodied.models.normalization import ObservationNormaliser, Scaling
from rlhpc.runs.device import device_of, to_tensors
from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.text import format_names

#: Steps by which a chunk may be shifted against the demonstrated actions.
_MAX_SHIFT = 2
#: Demonstrated steps that a predicted action may advance.
_RATES = (0.5, 2 / 3, 0.8, 1.25, 1.5, 2.0)
#: A comparison counts if the error falls by this share, and by this many standard errors of the mean difference.
_MIN_GAIN, _MIN_STANDARD_ERRORS = 0.05, 4.0
#: The same share for a variant that fits in some of the episodes only.
_MIN_GAIN_OF_EPISODE = 0.2
#: Limits for statistics of observations: of the ratio of spreads, of the shift in standard deviations, and of the share of
#: values beyond the bounds of 1 and 99 %.
_MAX_SPREAD_RATIO, _MAX_SHIFT_STDS, _MAX_SHARE_OUTSIDE = 1.4, 0.5, 0.05
#: Actions of a policy that fits explain at least this share of the mean action's error.
_MIN_EXPLAINED = 0.1
_BATCH = 64
#: Minimum number of frames; with fewer, no comparison could find a fault.
MIN_FRAMES = 16
#: Numbers of dimensions that a verdict names.
_MAX_NAMED = 4

Observations = dict[str, Tensor]


@dataclass(frozen=True)
class PolicyVerdict:
    """Result of one part of the check.

    Attributes:
        subject: Part of the check, such as `cameras`.
        fault: Sentence about the fault; "" if there is no fault.
        key: Configuration key or option to change; "" if there is no fault.
    """

    subject: str
    fault: str = ""
    key: str = ""


@dataclass(frozen=True)
class PolicyCheck:
    """Result of the check of a policy.

    Attributes:
        num_frames, num_episodes: Frames that were compared, and the episodes from which they were drawn.
        errors: Mean absolute errors of the first action by dimension `[dim]`, in standard deviations of the demonstrated
            action: of the policy, and of the predictions `mean action`, `last action` and `another frame's action`.
        errors_by_step: Mean error of the policy by step of the chunk `[chunk]`.
        verdicts: One verdict for each part of the check.
    """

    num_frames: int
    num_episodes: int
    errors: dict[str, list[float]]
    errors_by_step: list[float]
    verdicts: list[PolicyVerdict]

    @property
    def faults(self) -> list[PolicyVerdict]:
        """Verdicts with a fault."""
        return [check_verdict for check_verdict in self.verdicts if check_verdict.fault]


@dataclass(frozen=True)
class _Frames:
    """Frames of demonstrations.

    Attributes:
        obs: Observations by name, `[F, ...]`; the name is "" for a space without names.
        actions: Demonstrated actions `[F, K, dim]` from `first_frame` steps relative to the observation on.
        is_padding: Steps outside the episode, bool `[F, K]`.
        first_frame: Offset of the first action.
        episodes: Number of each frame's episode, int `[F]`.
    """

    obs: Observations
    actions: Tensor
    is_padding: Tensor
    first_frame: int
    episodes: Tensor

    def demonstrated_actions(self, offsets: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Returns the actions at steps relative to the observation, and where they are inside the episode.

        Args:
            offsets: Steps.

        Returns:
            Actions `[F, len(offsets), dim]`, and a bool mask `[F, len(offsets)]`.
        """
        columns = [offset - self.first_frame for offset in offsets]
        return self.actions[:, columns], ~self.is_padding[:, columns]


def check_open_loop(
    policy: Policy,
    trajectories: Iterable[Trajectory],
    *,
    num_frames: int = 256,
    seed: int = 0,
    fps: float | None = None,
    control_hz: float | None = None,
) -> PolicyCheck:
    """Compares a policy's predictions with demonstrations.

    Args:
        policy: Policy in eval mode.
        trajectories: Demonstrated episodes.
        num_frames: Number of frames, drawn evenly from all episodes.
        seed: Seed of the draw.
        fps: Frame rate of the demonstrations; None if unknown.
        control_hz: Control rate for which the policy was trained; None if unknown.

    Raises:
        ConfigError: The demonstrations do not fit the policy's observation or action space, or the policy does not act.
    """
    if policy.is_success_classifier:
        raise ConfigError("check-policy: this is a success classifier, which does not act; give a policy")
    frames, num_episodes, observations = _draw_frames(policy, trajectories, num_frames, seed)
    policy_comparison = _Comparison(policy, frames)
    errors = {"policy": _by_dimension(policy_comparison.errors), **policy_comparison.floors(seed)}
    verdicts = [policy_comparison.compare_with_floors(errors)]
    for variant_subject, variants, key in (
        ("cameras", _list_camera_variants(frames.obs), "env.train.kwargs: cameras or image_orientation"),
        ("instruction", _list_instruction_variants(frames.obs), "the instructions of the demonstrations"),
        ("state", _list_state_variants(frames.obs), "the state's columns in the demonstrations"),
    ):
        if variants:
            verdicts.append(policy_comparison.compare_variants(variant_subject, variants, key))
    if not policy_comparison.is_discrete:
        verdicts.append(policy_comparison.compare_scales())
    if (statistics := _check_statistics(policy, observations)) is not None:
        verdicts.append(statistics)
    verdicts += policy_comparison.compare_timing(fps, control_hz)
    by_step = (policy_comparison.errors.mean(-1) * policy_comparison.mask).sum(0) / policy_comparison.mask.sum(0).clamp(
        min=1
    )
    return PolicyCheck(len(frames.actions), num_episodes, errors, by_step.tolist(), verdicts)


def _by_dimension(errors: Tensor) -> list[float]:
    """Returns the mean error of the first action by dimension, of errors `[F, chunk, dim]`."""
    means: list[float] = errors[:, 0].mean(0).tolist()
    return means


def _draw_frames(
    policy: Policy, trajectories: Iterable[Trajectory], num_frames: int, seed: int
) -> tuple[_Frames, int, Observations]:
    """Returns random frames with their actions, the number of episodes, and the numeric observations of all episodes."""
    first_offset, chunk = -_MAX_SHIFT - 1, policy.chunk
    offsets = range(first_offset, 2 * chunk + _MAX_SHIFT + 1)
    episodes: list[tuple[dict[str, np.ndarray], np.ndarray, np.ndarray]] = []
    boxes = boxes_of(policy.observation_space)
    for trajectory in trajectories:
        check_fit(trajectory, policy.observation_space, policy.action_space, "--demos", "the policy")
        obs = windows_of(trajectory["obs"], policy.observation_space)
        arrays = obs if isinstance(obs, Mapping) else {"": obs}
        inputs = {name: arrays[name][:-1].astype(box.dtype, copy=False) for name, box in boxes.items()}
        episodes.append((inputs, *chunks_of(trajectory["actions"], offsets)))
    if not episodes:
        raise ConfigError("check-policy: --demos has no episode")
    episode_lengths = [len(actions) for _, actions, _ in episodes]
    frame_places = [
        (episode, step) for episode, episode_length in enumerate(episode_lengths) for step in range(episode_length)
    ]
    if min(num_frames, len(frame_places)) < MIN_FRAMES:
        raise ConfigError(
            f"check-policy: {min(num_frames, len(frame_places))} frames of the demonstrations are too few to compare "
            f"(--demos has "
            f"{len(frame_places)}, --frames is {num_frames}); take at least {MIN_FRAMES}"
        )
    rng = np.random.default_rng(seed)
    chosen_indices = sorted(rng.permutation(len(frame_places))[:num_frames].tolist())
    chosen_places = [frame_places[index] for index in chosen_indices]

    def stack(arrays: Sequence[np.ndarray]) -> Tensor:
        return torch.from_numpy(np.stack([arrays[episode][step] for episode, step in chosen_places]))

    obs_names = list(episodes[0][0])
    frame_obs = {name: stack([inputs[name] for inputs, _, _ in episodes]) for name in obs_names}
    actions = stack([actions for _, actions, _ in episodes]).float()
    padding = stack([is_padding for *_, is_padding in episodes])
    frame_numbers = {
        name: torch.from_numpy(np.concatenate([inputs[name] for inputs, _, _ in episodes]))
        for name in obs_names
        if episodes[0][0][name].dtype.kind == "f" and episodes[0][0][name].ndim == 2
    }
    numbers_of_episodes = torch.tensor([episode for episode, _ in chosen_places])
    return _Frames(frame_obs, actions, padding, first_offset, numbers_of_episodes), len(episodes), frame_numbers


@dataclass(frozen=True)
class _Timing:
    """Other timing of a chunk that fits the demonstrations better.

    Attributes:
        value: The shift, or the rate.
        error: Mean error with this timing.
        current_error: Mean error without, on the same steps.
    """

    value: float
    error: float
    current_error: float

    @property
    def gain(self) -> float:
        """Share of the current error that this timing removes."""
        return 1 - self.error / self.current_error

    @property
    def errors_text(self) -> str:
        """The error with this timing and the current error, as text."""
        return f"error {self.error:.3f} instead of {self.current_error:.3f}"


class _Comparison:
    """Comparison of a policy's predictions with the demonstrated actions of frames.

    Attributes:
        errors: Errors `[F, chunk, dim]` of the policy, in standard deviations of the demonstrated action; for discrete
            actions 1 for a wrong action.
        mask: Actions inside their episode, bool `[F, chunk]`.
        is_discrete: True for actions that are numbers of choices.
    """

    def __init__(self, policy: Policy, frames: _Frames) -> None:
        self._policy, self._frames, self._chunk = policy, frames, policy.chunk
        self.is_discrete = not isinstance(policy.action_space, spaces.Box)
        now = frames.actions[:, -frames.first_frame]
        self._std = now.std(0, correction=0).clamp(min=1e-3 * max(1e-6, float(now.std(0, correction=0).max())))
        self._mean = now.mean(0)
        self._predicted_actions = self._predict(frames.obs)
        self._steps = list(range(self._chunk))
        self._actions, self.mask = frames.demonstrated_actions(self._steps)
        self.errors = self._errors(self._predicted_actions, self._actions)

    def _predict(self, obs: Observations) -> Tensor:
        """Returns predicted actions `[F, chunk, dim]`."""
        predictions, device = [], device_of(self._policy)
        for batch_start in range(0, len(self._frames.actions), _BATCH):
            batch = {name: obs_values[batch_start : batch_start + _BATCH] for name, obs_values in obs.items()}
            rows = to_tensors(batch, device)
            with torch.no_grad():
                actions, _ = self._policy.predict_action_batch(rows[""] if list(rows) == [""] else rows, mode="eval")
            predictions.append(actions.float().cpu().reshape(len(actions), self._chunk, -1))
        return torch.cat(predictions)

    def _errors(self, predicted_actions: Tensor, demonstrated_actions: Tensor) -> Tensor:
        if self.is_discrete:
            return (predicted_actions.round() != demonstrated_actions).float()
        return (predicted_actions - demonstrated_actions).abs() / self._std

    def _by_frame(self, predicted_actions: Tensor, demonstrated_actions: Tensor, mask: Tensor) -> Tensor:
        """Returns the mean error of each frame `[F]`; NaN for a frame without a step in the mask."""
        errors = self._errors(predicted_actions, demonstrated_actions).mean(-1)
        return (errors * mask).sum(1) / torch.where(mask.any(1), mask.sum(1), torch.nan)

    def floors(self, seed: int) -> dict[str, list[float]]:
        """Returns the errors by dimension of predictions that know nothing of the observation."""
        now, previous_actions = self._actions[:, :1], self._frames.actions[:, -self._frames.first_frame - 1, None]
        frame_order = torch.from_numpy(np.random.default_rng(seed).permutation(len(now)))
        mean_action = self._mean.round() if self.is_discrete else self._mean
        predictions = {
            "mean action": mean_action.expand_as(now),
            "last action": previous_actions,
            "another frame's action": now[frame_order],
        }  # fmt: skip
        return {name: _by_dimension(self._errors(prediction, now)) for name, prediction in predictions.items()}

    def compare_with_floors(self, errors: Mapping[str, Sequence[float]]) -> PolicyVerdict:
        """Compares the error of the first action with those of the mean action and of a random frame's action."""
        floors = {name: float(np.mean(errors[name])) for name in ("mean action", "another frame's action")}
        best_floor = min(floors, key=floors.__getitem__)
        error = float(np.mean(errors["policy"]))
        if error <= (1 - _MIN_EXPLAINED) * floors[best_floor] or floors[best_floor] == 0:
            return PolicyVerdict("open-loop error")
        return PolicyVerdict(
            "open-loop error",
            f"the policy's first action is {error:.2f} standard deviations from the demonstrated one, and the {best_floor} "
            f"{floors[best_floor]:.2f}: the policy does not know these demonstrations, or its inputs are wrong",
            "the checkpoint, its adapter (LoRA) or --demos",
        )

    def _is_better(self, candidate: Tensor, current_errors: Tensor, min_gain: float = _MIN_GAIN) -> bool:
        """Returns whether candidate errors `[F]` are lower than the current ones, beyond the noise."""
        gains = (current_errors - candidate)[~(current_errors - candidate).isnan()]
        if len(gains) < 4:
            return False
        mean, noise = float(gains.mean()), float(gains.std()) / math.sqrt(len(gains))
        return mean > min_gain * float(current_errors.nanmean()) and mean > _MIN_STANDARD_ERRORS * noise

    def compare_variants(
        self, variant_subject: str, variants: Sequence[tuple[str, Observations]], key: str
    ) -> PolicyVerdict:
        """Compares the predictions for other observations, such as mirrored images, with those for the given ones.

        A variant that fits better in some episodes only is a fault, too: the demonstrations are of two kinds.
        """
        current_errors = self._by_frame(self._predicted_actions, self._actions, self.mask)
        error = float(current_errors.nanmean())
        errors_of = {name: self._by_frame(self._predict(obs), self._actions, self.mask) for name, obs in variants}
        better_names = [name for name, errors in errors_of.items() if self._is_better(errors, current_errors)]
        if better_names:
            best_variant = min(better_names, key=lambda name: float(errors_of[name].nanmean()))
            best_error = float(errors_of[best_variant].nanmean())
            return PolicyVerdict(
                variant_subject,
                f"with {best_variant}, the error is {best_error:.3f} instead of {error:.3f}: the policy was trained so",
                key,
            )
        frames_by_episode = [self._frames.episodes == episode for episode in self._frames.episodes.unique()]
        gain_by_variant = {}
        for name, errors in errors_of.items():
            fitting = [
                rows
                for rows in frames_by_episode
                if self._is_better(errors[rows], current_errors[rows], _MIN_GAIN_OF_EPISODE)
            ]
            total_gain = sum(float((current_errors - errors)[rows].nansum()) for rows in fitting)
            gain_by_variant[name] = (total_gain, len(fitting))
        best_variant = max(gain_by_variant, key=lambda name: gain_by_variant[name], default="")
        if not best_variant or not gain_by_variant[best_variant][1]:
            return PolicyVerdict(variant_subject)
        return PolicyVerdict(
            variant_subject,
            f"with {best_variant}, {gain_by_variant[best_variant][1]} of {len(frames_by_episode)} episodes fit "
            f"better, and the others do not: "
            "the demonstrations are of two kinds",
            key,
        )

    def compare_scales(self) -> PolicyVerdict:
        """Fits the demonstrated actions by a line through the predictions, by dimension, on half of the frames; names
        dimensions for which the line fits the other half clearly better than the predictions themselves.
        """
        check_subject = "normalisation of actions"
        predicted_actions, demonstrated_actions = self._predicted_actions[:, 0], self._actions[:, 0]
        fault_texts = []
        for dimension in range(predicted_actions.shape[1]):
            x, y = predicted_actions[:, dimension], demonstrated_actions[:, dimension]
            slope, offset = _fit_line(x[::2], y[::2])
            explained_share = _compute_correlation(x[::2], y[::2]) ** 2
            corrected_errors = (slope * x + offset - y)[1::2].abs() / self._std[dimension]
            uncorrected_errors = (x - y)[1::2].abs() / self._std[dimension]
            is_other_scale = not 0.8 <= slope <= 1.25 or abs(offset) > 0.1 * float(self._std[dimension])
            if explained_share > 0.5 and is_other_scale and self._is_better(corrected_errors, uncorrected_errors):
                fault_texts.append(f"dimension {dimension}: demonstrated = {slope:.2f} · predicted {offset:+.3g}")
        return PolicyVerdict(
            check_subject,
            format_names(fault_texts, limit=_MAX_NAMED, separator="; "),
            "actor.model.kwargs: the statistics of actions" if fault_texts else "",
        )

    def compare_timing(self, fps: float | None, control_hz: float | None) -> list[PolicyVerdict]:
        """Compares each chunk with demonstrated actions of shifted steps, and of faster and slower steps."""
        best_shift, rate = self._find_best_shift(), self._find_best_rate()
        if (
            best_shift and rate
        ):  # a wrong rate also looks like a shift, and the other way: the larger gain explains both
            best_shift, rate = (best_shift, None) if best_shift.gain >= rate.gain else (None, rate)
        alignment = PolicyVerdict("chunk alignment")
        if best_shift is not None:
            alignment = PolicyVerdict(
                "chunk alignment",
                f"the chunk fits the actions {best_shift.value:+.0f} step(s) from where it is used ({best_shift.errors_text})",
                "the offset of actions in the demonstrations, or env.train.delay",
            )
        return [alignment, self._rate_verdict(rate, fps, control_hz)]

    def _find_best_shift(self) -> _Timing | None:
        """Returns the number of steps by which the demonstrated actions fit the chunk best; None if it is 0."""
        candidates = []
        for step_shift in _list_shifts(_MAX_SHIFT):
            actions, mask = self._frames.demonstrated_actions([step + step_shift for step in self._steps])
            shared_mask = mask & self.mask
            current_errors = self._by_frame(self._predicted_actions, self._actions, shared_mask)
            candidates.append(
                (float(step_shift), self._by_frame(self._predicted_actions, actions, shared_mask), current_errors)
            )
        return self._choose_best_timing(candidates)

    def _find_best_rate(self) -> _Timing | None:
        """Returns the number of demonstrated steps that one predicted step takes; None if it is 1.

        The predictions are interpolated, and not the demonstrations, whose noise an interpolation would average out.
        """
        candidates = []
        for rate in _RATES if self._chunk > 2 and not self.is_discrete else ():
            num_steps = math.floor(rate * (self._chunk - 1)) + 1
            step_positions = torch.arange(num_steps) / rate
            lower_steps = step_positions.floor().long().clamp(max=self._chunk - 1)
            upper_steps = (lower_steps + 1).clamp(max=self._chunk - 1)
            weight = (step_positions - lower_steps)[:, None]
            stretched_actions = (
                self._predicted_actions[:, lower_steps] * (1 - weight)
                + self._predicted_actions[:, upper_steps] * weight
            )
            num_shared_steps = min(num_steps, self._chunk)
            actions, mask = self._frames.demonstrated_actions(list(range(num_shared_steps)))
            current_errors = self._by_frame(self._predicted_actions[:, :num_shared_steps], actions, mask)
            candidates.append(
                (rate, self._by_frame(stretched_actions[:, :num_shared_steps], actions, mask), current_errors)
            )
        return self._choose_best_timing(candidates)

    def _choose_best_timing(self, candidates: Sequence[tuple[float, Tensor, Tensor]]) -> _Timing | None:
        """Returns the timing with the largest relative gain, of (value, errors, current errors on the same steps)."""
        timings = [
            _Timing(timing_value, float(errors.nanmean()), float(current_errors.nanmean()))
            for timing_value, errors, current_errors in candidates
            if self._is_better(errors, current_errors)
        ]
        return max(timings, key=lambda timing: timing.gain, default=None)

    def _rate_verdict(self, rate: _Timing | None, fps: float | None, control_hz: float | None) -> PolicyVerdict:
        key = "--fps of rlhpc data convert, or the environment's control rate"
        if rate is not None:
            return PolicyVerdict(
                "frame rate", f"one predicted step is {rate.value:.3g} demonstrated steps ({rate.errors_text})", key
            )
        if fps and control_hz and abs(fps - control_hz) > 0.02 * control_hz:
            return PolicyVerdict(
                "frame rate", f"the demonstrations have {fps:g} frames/s, and the policy acts at {control_hz:g} Hz", key
            )
        return PolicyVerdict("frame rate")


def _list_shifts(max_shift: int) -> list[int]:
    return [shift_sign * shift_size for shift_size in range(1, max_shift + 1) for shift_sign in (1, -1)]


def _fit_line(x: Tensor, targets: Tensor) -> tuple[float, float]:
    """Returns slope and offset of the least-squares line through points."""
    variance = float(x.var(correction=0))
    slope = float(((x - x.mean()) * (targets - targets.mean())).mean()) / variance if variance > 0 else 1.0
    return slope, float(targets.mean()) - slope * float(x.mean())


def _compute_correlation(x: Tensor, y: Tensor) -> float:
    deviations = float(x.std(correction=0)) * float(y.std(correction=0))
    return float(((x - x.mean()) * (y - y.mean())).mean()) / deviations if deviations > 0 else 0.0


def format_check(policy_check: PolicyCheck) -> str:
    """Returns the check as text: errors by dimension, errors by step of the chunk, and the verdicts."""
    error_names = list(policy_check.errors)
    rows = [["dimension", *error_names]]
    rows += [
        [str(dimension), *(f"{policy_check.errors[name][dimension]:.3f}" for name in error_names)]
        for dimension in range(len(policy_check.errors["policy"]))
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        f"errors of the first action in standard deviations of the demonstrated one ({policy_check.num_frames} frames of "
        f"{policy_check.num_episodes} episodes):",
        *("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows),
    ]
    if len(policy_check.errors_by_step) > 1:
        lines.append("by step of the chunk: " + " ".join(f"{error:.3f}" for error in policy_check.errors_by_step))
    for check_verdict in policy_check.verdicts:
        lines.append(
            f"{'FAULT' if check_verdict.fault else 'ok':>5}  {check_verdict.subject}"
            + (f": {check_verdict.fault}" if check_verdict.fault else "")
        )
        if check_verdict.key:
            lines.append(f"       change: {check_verdict.key}")
    return "\n".join(lines)


# -- variants of observations -----------------------------------------------------------------------------------------------


def _is_image(obs_values: Tensor) -> bool:
    return obs_values.dtype == torch.uint8 and obs_values.ndim in (4, 5) and obs_values.shape[-1] % 3 == 0


Variant = tuple[str, Observations]


def _list_camera_variants(obs: Observations) -> list[Variant]:
    """Returns observations with each image mirrored or rotated, and with two cameras exchanged."""
    images = [name for name, obs_values in obs.items() if _is_image(obs_values)]
    variants: list[Variant] = []
    transformations: dict[str, tuple[int, ...]] = {
        "mirrored images": (-2,), "images upside down": (-3,), "images rotated by 180 degrees": (-3, -2),
    }  # fmt: skip
    for variant_text, axes in transformations.items():
        if images:
            variants.append((variant_text, obs | {name: obs[name].flip(axes) for name in images}))
        if len(images) > 1:
            variants += [(f"{variant_text} of {name}", obs | {name: obs[name].flip(axes)}) for name in images]
    for first_camera, second_camera in itertools.combinations(images, 2):
        if obs[first_camera].shape == obs[second_camera].shape:
            variants.append(
                (
                    f"{first_camera} and {second_camera} exchanged",
                    obs | {first_camera: obs[second_camera], second_camera: obs[first_camera]},
                )
            )
    for name in images:
        cameras = obs[name].split(3, -1)
        label = name or "the image"
        for first_index, second_index in itertools.combinations(range(len(cameras)), 2):
            channel_order = list(range(len(cameras)))
            channel_order[first_index], channel_order[second_index] = second_index, first_index
            swapped_images = torch.cat([cameras[index] for index in channel_order], -1)
            variants.append(
                (f"cameras {first_index} and {second_index} of {label} exchanged", obs | {name: swapped_images})
            )
        colours = torch.cat([camera.flip(-1) for camera in cameras], -1)
        variants.append((f"red and blue of {label} exchanged", obs | {name: colours}))
    return variants


def _list_instruction_variants(obs: Observations) -> list[Variant]:
    if "instruction" not in obs:
        return []
    return [("no instruction", obs | {"instruction": torch.zeros_like(obs["instruction"])})]


def _list_state_variants(obs: Observations) -> list[Variant]:
    """Returns observations with a state of zeros; only for policies that also see images, which can act without a state."""
    if "state" not in obs or not any(_is_image(obs_values) for obs_values in obs.values()):
        return []
    return [("a state of zeros", obs | {"state": torch.zeros_like(obs["state"])})]


# -- statistics of observations ---------------------------------------------------------------------------------------------


def _check_statistics(policy: Policy, observations: Observations) -> PolicyVerdict | None:
    """Compares the policy's statistics of observations with those of the demonstrations; returns None without statistics."""
    check_subject, key = "normalisation of observations", "actor.model.kwargs: the statistics of states"
    fault_texts: list[str] = []
    has_statistics = False
    action_scaling, numbers = _find_action_scaling(policy), to_tensors(dict(observations), device_of(policy))
    for module in policy.modules():
        for obs_values in numbers.values():
            if (
                isinstance(module, ObservationNormaliser)
                and len(module.mean) == obs_values.shape[1]
                and module.count > 0
            ):
                has_statistics = True
                fault_texts += _compare_moments(module.mean, module.var.sqrt(), obs_values.double())
            elif (
                isinstance(module, Scaling) and module is not action_scaling and len(module.low) == obs_values.shape[1]
            ):
                has_statistics = True
                fault_texts += _compare_bounds(module, obs_values)
    return (
        PolicyVerdict(
            check_subject, format_names(fault_texts, limit=_MAX_NAMED, separator="; "), key if fault_texts else ""
        )
        if has_statistics
        else None
    )


def _find_action_scaling(policy: Policy) -> Any:
    return next(
        (module for name, module in policy.named_modules() if name.rpartition(".")[2].startswith("action")), None
    )


def _compare_moments(mean: Tensor, std: Tensor, state_values: Tensor) -> list[str]:
    data_mean, data_std = state_values.mean(0), state_values.std(0, correction=0)
    fault_texts = []
    for dimension in torch.nonzero(data_std > 1e-8).flatten().tolist():
        ratio = float(std[dimension] / data_std[dimension])
        mean_shift = float((mean[dimension] - data_mean[dimension]).abs() / data_std[dimension])
        if not 1 / _MAX_SPREAD_RATIO <= ratio <= _MAX_SPREAD_RATIO or mean_shift > _MAX_SHIFT_STDS:
            fault_texts.append(
                f"dimension {dimension}: mean {float(mean[dimension]):.3g} ± {float(std[dimension]):.3g}, and in the "
                f"demonstrations {float(data_mean[dimension]):.3g} ± {float(data_std[dimension]):.3g}"
            )
    return fault_texts


def _compare_bounds(scaling: Scaling, state_values: Tensor) -> list[str]:
    fault_texts = []
    width = scaling.high - scaling.low
    for dimension in torch.nonzero(scaling.mask & (width > 0)).flatten().tolist():
        column = state_values[:, dimension]
        outside = float(((column < scaling.low[dimension]) | (column > scaling.high[dimension])).float().mean())
        value_spread = float(column.quantile(0.99) - column.quantile(0.01))
        ratio = float(width[dimension]) / value_spread if value_spread > 0 else 1.0
        if outside > _MAX_SHARE_OUTSIDE or ratio > 2 * _MAX_SPREAD_RATIO:
            fault_texts.append(
                f"dimension {dimension}: bounds {float(scaling.low[dimension]):.3g} to {float(scaling.high[dimension]):.3g}; "
                f"{outside:.0%} of the demonstrations are outside, and their middle 98 % are {value_spread:.3g} wide"
            )
    return fault_texts
