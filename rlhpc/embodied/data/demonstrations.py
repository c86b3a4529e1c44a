"""Demonstrations of behaviour cloning: index of the episodes, checks against the environment, and training targets."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from gymnasium import spaces

from rlhpc.embodied.config import BcConfig
from rlhpc.embodied.data.batches import permutation
from rlhpc.embodied.data.trajectories import EpisodeFacts, EpisodeFilter, facts_of, open_sources
from rlhpc.embodied.data.trajectory import EpisodeSource, Trajectory, shapes
from rlhpc.embodied.envs.observations import boxes_of
from rlhpc.runtime.errors import ConfigError


@dataclass(frozen=True)
class DemoEpisode:
    """Index entry of an episode.

    Attributes:
        source: Dataset or file.
        number: Number of the episode in the source.
        length: Number of steps.
        step_bytes: Bytes of a step without images.
    """

    source: EpisodeSource
    number: int
    length: int
    step_bytes: int

    def read(self) -> Trajectory:
        """Returns the episode, with `Frames` in place of arrays of images.

        Raises:
            ConfigError: The episode cannot be read, or has changed since it was indexed.
        """
        trajectory = self.source.episode(self.number)
        if len(trajectory["actions"]) != self.length:
            raise ConfigError(
                f"{trajectory['source']} has {len(trajectory['actions'])} steps, and had {self.length} when the run began; "
                "leave demonstrations unchanged while a run reads them"
            )
        return trajectory


def _open_demo_sources(cfg: BcConfig) -> list[EpisodeSource]:
    path = cfg.demos.path
    if not path:
        raise ConfigError("demos.path is not set; name trajectories: a .h5 file, a folder, or a LeRobot dataset")
    return open_sources(path if isinstance(path, str) else [str(demo_path) for demo_path in path], "demos.path")


def _make_demo_filter(cfg: BcConfig, left_out: list[str] | None) -> EpisodeFilter:
    return EpisodeFilter(
        "demos.path",
        only_success=cfg.demos.only_success,
        limit=cfg.demos.limit,
        require=("obs", "actions", *_list_required_fields(cfg)),
        left_out=left_out,
    )


def index_demos(
    cfg: BcConfig,
    left_out: list[str] | None = None,
    *,
    spaces: tuple[Any, Any] | None = None,
    rank: int = 0,
    world_size: int = 1,
    gather: Callable[[Any], list[Any]] | None = None,
) -> list[DemoEpisode]:
    """Returns the index of the episodes of section `demos`, after a check of each episode's numbers; images are not read.

    Args:
        cfg: Configuration.
        left_out: List that collects messages about episodes with non-finite numbers, which are skipped; None raises an error.
        spaces: Observation space and action space that the episodes have to fit; None is not checked.
        rank, world_size: This rank and the number of ranks. Each looks at a part of the episodes.
        gather: Returns the objects of all ranks, in order; all ranks call it.

    Raises:
        ConfigError: `demos.path` is not set, its files cannot be read, or an episode does not fit. All ranks raise the same
            error.
    """
    episodes = [
        (episode_source, episode_number)
        for episode_source in _open_demo_sources(cfg)
        for episode_number in range(len(episode_source))
    ]
    demo_filter = _make_demo_filter(cfg, left_out)
    gathered_facts: Iterable[tuple[EpisodeFacts, str]]
    if gather is None or world_size == 1 or cfg.demos.limit is not None:
        gathered_facts = (
            _inspect_episode(episode_source, episode_number, demo_filter.require, spaces)
            for episode_source, episode_number in episodes
        )
    else:
        rank_share = episodes[len(episodes) * rank // world_size : len(episodes) * (rank + 1) // world_size]
        local_facts = [
            _inspect_episode(episode_source, episode_number, demo_filter.require, spaces)
            for episode_source, episode_number in rank_share
        ]
        gathered_facts = [episode_entry for rank_facts in gather(local_facts) for episode_entry in rank_facts]
    index = []
    for (episode_source, episode_number), (episode_facts, mismatch_text) in zip(episodes, gathered_facts, strict=False):
        if demo_filter.accepts(episode_facts):
            if mismatch_text:
                raise ConfigError(mismatch_text)
            index.append(DemoEpisode(episode_source, episode_number, episode_facts.length, episode_facts.step_bytes))
        if demo_filter.is_full:
            break
    demo_filter.check_not_empty()
    return index


def _inspect_episode(
    episode_source: EpisodeSource, episode_number: int, required_fields: Sequence[str], spaces: tuple[Any, Any] | None
) -> tuple[EpisodeFacts, str]:
    """Returns an episode's facts, and a message if it does not fit the spaces."""
    try:
        trajectory = episode_source.episode(episode_number)
        episode_facts = facts_of(trajectory, required_fields)
    except ConfigError as error:
        return EpisodeFacts(source="", error=str(error)), ""
    try:
        if spaces is not None and trajectory["obs"] is not None:
            check_fit(trajectory, *spaces)
    except ConfigError as error:
        return episode_facts, str(error)
    return episode_facts, ""


def first_demo(cfg: BcConfig, left_out: list[str] | None = None) -> Trajectory:
    """Returns the first episode of section `demos` (`index_demos`), with `Frames` in place of arrays of images.

    Raises:
        ConfigError: `demos.limit` is 0.
    """
    demo_filter = _make_demo_filter(cfg, left_out)
    for episode_source in _open_demo_sources(cfg):
        for episode_number in range(len(episode_source)):
            trajectory = episode_source.episode(episode_number)
            if demo_filter.accepts(facts_of(trajectory, demo_filter.require)):
                return trajectory
    demo_filter.check_not_empty()
    raise ConfigError("demos.limit is 0, so there is no episode")


def _list_required_fields(cfg: BcConfig) -> list[str]:
    """Returns the fields that an episode must have in addition to observations and actions."""
    rewards = ["rewards"] if cfg.algorithm.bc_value_coef or cfg.algorithm.value_model else []
    return [*rewards, *(["success"] if cfg.actor.model.model_type == "success" else [])]


def window_length(name: str, shape: tuple[int, ...], boxes: Mapping[str, Any]) -> int:
    """Returns the number of observations in a step's window; 0 if the space of observation `name` has no time axis.

    Args:
        name: Name of the observation; "" if it has none.
        shape: Shape of an episode's array.
        boxes: Spaces by name.
    """
    if name in boxes and 1 < len(shape) == len(boxes[name].shape) and boxes[name].shape[1:] == shape[1:]:
        return int(boxes[name].shape[0])
    return 0


def fitted_obs(obs: Any, space: Any) -> dict[str, Any]:
    """Returns the observations of an episode that the environment's space has, by name ("" for an array), without windows.

    Texts get the length of the space, because a dataset's may have another.
    """
    boxes, arrays = boxes_of(space), obs if isinstance(obs, dict) else {"": obs}
    fitted_arrays = {
        name: array for name, array in arrays.items() if name in boxes or not isinstance(space, spaces.Dict)
    }
    instruction_text = fitted_arrays.get("instruction")
    if instruction_text is not None and "instruction" in boxes and instruction_text.ndim == 2:
        text_length = boxes["instruction"].shape[-1]
        fitted_arrays["instruction"] = np.pad(
            instruction_text[:, :text_length], ((0, 0), (0, max(0, text_length - instruction_text.shape[1])))
        )
    return fitted_arrays


def _observed_windows(obs: Any, space: Any) -> Iterator[tuple[str, Any, int]]:
    """Yields the observations of an episode that the environment's space has: name, array (`fitted_obs`) and number of
    observations in a step's window (`window_length`).
    """
    boxes = boxes_of(space)
    for name, array in fitted_obs(obs, space).items():
        yield name, array, window_length(name, array.shape, boxes)


def check_fit(
    trajectory: Trajectory, observation_space: Any, action_space: Any, key: str = "demos.path", owner: str = "env.train"
) -> None:
    """Checks that a trajectory fits an observation and an action space.

    Args:
        trajectory: An episode.
        observation_space, action_space: The spaces.
        key: Key or option that names the demonstrations, for the message.
        owner: Owner of the spaces, for the message.

    Raises:
        ConfigError: The trajectory does not fit; the message shows both shapes.
    """
    actions, boxes = trajectory["actions"], boxes_of(observation_space)
    step_shapes = {
        name: (length, *array.shape[1:]) if length else array.shape[1:]
        for name, array, length in _observed_windows(trajectory["obs"], observation_space)
    }
    is_compatible = all(step_shapes.get(name) == box.shape for name, box in boxes.items()) and (
        isinstance(trajectory["obs"], dict) == isinstance(observation_space, spaces.Dict)
    )
    if isinstance(observation_space, spaces.Dict):
        expected_text = "observations " + ", ".join(f"{name} {list(box.shape or ())}" for name, box in boxes.items())
    else:
        expected_text = f"observations {list(observation_space.shape or ())}"
    is_discrete = not isinstance(action_space, spaces.Box)
    action_dim = 1 if isinstance(action_space, spaces.Discrete) else math.prod(action_space.shape or ())
    if not is_compatible or actions.shape[1] != action_dim or is_discrete != (actions.dtype.kind in "iu"):
        raise ConfigError(
            f"{key}: {trajectory['source']} has {shapes(trajectory)} ({actions.dtype}); {owner} has {expected_text} and "
            f"actions {action_space}"
        )


def held_out_of(num_episodes: int, cfg: BcConfig) -> set[int]:
    """Returns the indices of the episodes that are held out of training."""
    episode_order = permutation(num_episodes, cfg.runner.seed).tolist()
    return set(episode_order[: int(num_episodes * cfg.demos.holdout)])


def returns_to_go(rewards: np.ndarray, gamma: float) -> np.ndarray:
    """Returns the discounted sum of rewards from each step to the episode's end, `[T]`, without a bootstrap value."""
    sums, return_sum = np.empty(len(rewards), np.float32), 0.0
    for t in range(len(rewards) - 1, -1, -1):
        return_sum = float(rewards[t]) + gamma * return_sum
        sums[t] = return_sum
    return sums


def chunk_steps(steps: np.ndarray, episode_lengths: np.ndarray, chunk: range) -> tuple[np.ndarray, np.ndarray]:
    """Returns the steps whose actions form each row's chunk, and a mask of padding.

    Args:
        steps: Step of each row, `[n]`.
        episode_lengths: Number of steps in each row's episode, `[n]`.
        chunk: Offsets of a chunk's actions from the step.

    Returns:
        Steps `[n, chunk]`, and a bool mask `[n, chunk]` of positions outside the episode. These positions repeat the first or
        last step.
    """
    step_positions, last_steps = steps[:, None] + np.asarray(chunk), episode_lengths[:, None] - 1
    return np.minimum(step_positions.clip(0), last_steps), (step_positions < 0) | (step_positions > last_steps)


def window_steps(steps: np.ndarray, num_window_steps: int) -> np.ndarray:
    """Returns the steps of each row's window, `[n, length]`, which ends with the row's step. The first step is repeated before
    the start of the episode, as in `frame_stack`. If `num_window_steps` is 0, the steps `[n]` are returned unchanged.
    """
    return (steps[:, None] + np.arange(1 - num_window_steps, 1)).clip(0) if num_window_steps else steps


def chunks_of(actions: np.ndarray, chunk: range) -> tuple[np.ndarray, np.ndarray]:
    """Returns the action chunk of each step of an episode, `[T, chunk, dim]`, and the mask of padding (`chunk_steps`)."""
    steps, is_pad = chunk_steps(np.arange(len(actions)), np.full(len(actions), len(actions)), chunk)
    return actions[steps], is_pad


def windows_of(obs: Any, space: Any) -> Any:
    """Returns observations of an episode `[T, ...]` in the form of the environment's space: those that it has, and with a time
    axis `[T, n, ...]` where it has one (`window_steps`).
    """
    windows = {
        name: array[window_steps(np.arange(len(array)), length)] if length else array
        for name, array, length in _observed_windows(obs, space)
    }
    return windows if isinstance(obs, dict) else windows[""]
