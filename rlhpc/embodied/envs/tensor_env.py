"""Environments of tensors: simulators that step all their slots at once on one device, and their vector environment."""

from __future__ import annotations

import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from rlhpc.embodied.envs.base import Step, VectorEnv
from rlhpc.embodied.envs.interface import InterfaceError, describe
from rlhpc.embodied.envs.observations import as_arrays, boxes_of
from rlhpc.runtime.devices import accelerator
from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.plugins import Registry

if TYPE_CHECKING:
    from rlhpc.embodied.config import EnvSideConfig

#: Observation of N slots: a tensor `[N, ...]`, or a dict of tensors.
Obs = Any
TensorStep = tuple[Obs, Tensor, Tensor, Tensor, dict[str, Tensor]]

#: Classes or functions `(num_envs, device, **kwargs) -> TensorEnv`, by name in `env.train.env_id`.
TENSOR_ENVS: Registry[Callable[..., TensorEnv]] = Registry(
    "environment of tensors", "env.train.env_id", "rlhpc.tensor_envs",
    {
        "cartpole": "rlhpc.embodied.envs.tensor_tasks:CartPole",
        "isaac_lab": "rlhpc.embodied.envs.isaac_lab:IsaacLabEnv",
        "mjlab": "rlhpc.embodied.envs.isaac_lab:MjlabEnv",
        "mjx_half_cheetah": "rlhpc.embodied.envs.mjx_tasks:MjxHalfCheetah",
        "mjx_inverted_pendulum": "rlhpc.embodied.envs.mjx_tasks:MjxInvertedPendulum",
        "pendulum": "rlhpc.embodied.envs.tensor_tasks:Pendulum",
    },
)  # fmt: skip


class TensorEnv(ABC):
    """Simulator of N slots that takes and returns tensors on one device, with one row per slot.

    `TensorVectorEnv` counts the steps, resets the slots whose episode has ended, keeps their final observations, and
    computes the statistics. A step must not read a value on the host (`.item()`, `if mask.any()`), because the host
    would then wait for the device.

    Args:
        num_envs: Number of slots N.
        device: Device of all tensors.

    Attributes:
        observation_space: Space of one slot: `Box`, or a `Dict` of `Box`.
        action_space: Space of one slot: `Box`, `Discrete`, `MultiDiscrete` or `MultiBinary`.
        max_episode_steps: Steps after which an episode is truncated, unless `env.train.max_episode_steps` is set; 0 for
            none.
    """

    observation_space: Any
    action_space: Any
    max_episode_steps: int = 0

    def __init__(self, num_envs: int, device: torch.device) -> None:
        self.num_envs, self.device = num_envs, device

    @abstractmethod
    def reset(self, mask: Tensor, seeds: Tensor) -> Obs:
        """Starts new episodes in some slots.

        Args:
            mask: Slots to reset, bool `[N]`.
            seeds: Seed of each slot's new episode, int64 `[N]`. `draw_uniform` turns them into random numbers. Slots of a
                group get the same seed.

        Returns:
            Observations of all slots, `[N, ...]`; those of the other slots are unchanged.
        """

    @abstractmethod
    def step(self, actions: Tensor) -> TensorStep:
        """Steps all slots. The caller resets the slots whose episode ends.

        Args:
            actions: `[N, *action_space.shape]`, within the space's bounds.

        Returns:
            Observations `[N, ...]`, rewards `[N]`, terminations and truncations bool `[N]`, and a dict; `success`, bool
            `[N]`, in the dict marks slots in a successful state.
        """

    def state_dict(self) -> dict[str, Tensor]:
        """Returns the complete state on which the next step depends, as tensors `[N, ...]`. An environment without this
        method starts its episodes over when a run resumes.
        """
        raise NotImplementedError(f"{type(self).__name__} cannot save its state")

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Restores a state that `state_dict` returned."""
        raise NotImplementedError(f"{type(self).__name__} cannot restore a state")


_WORD = 0xFFFFFFFF
_GOLDEN = 0x9E3779B9


def _mix(words: Tensor) -> Tensor:
    """Returns a hash of 32-bit words in int64 tensors (lowbias32 of Wellons). All devices compute the same words."""
    words = words ^ (words >> 16)
    words = (words * 0x7FEB352D) & _WORD
    words = words ^ (words >> 15)
    words = (words * (0x846CA68B - (1 << 32))) & _WORD  # the negative factor keeps the product within 64 bits
    return words ^ (words >> 16)


def combine_seeds(seeds: Tensor, words: Tensor | int) -> Tensor:
    """Returns new seeds from seeds and further 32-bit words."""
    return _mix((_mix((seeds + _GOLDEN) & _WORD) + words) & _WORD)


def draw_uniform(seeds: Tensor, count: int) -> Tensor:
    """Draws numbers that depend only on a slot's seed, not on the other slots or the device.

    Args:
        seeds: int64 `[N]`, as `TensorEnv.reset` gets them.
        count: Numbers per slot.

    Returns:
        Uniform numbers in [0, 1), float32 `[N, count]`.
    """
    indices = torch.arange(1, count + 1, device=seeds.device) * _GOLDEN & _WORD
    return (combine_seeds(seeds[:, None], indices) >> 8).float() * 2.0**-24


def draw_normal(seeds: Tensor, count: int) -> Tensor:
    """Draws standard normal numbers as `draw_uniform` draws uniform ones, float32 `[N, count]` (Box and Muller 1958)."""
    radii, angles = draw_uniform(seeds, 2 * count).split(count, 1)
    return (-2.0 * torch.log1p(-radii)).sqrt() * (2.0 * math.pi * angles).cos()


def map_obs(change: Callable[..., Any], *observations: Obs) -> Obs:
    """Applies a function to the tensors of observations with the same keys."""
    if isinstance(observations[0], dict):
        return {key: change(*(obs[key] for obs in observations)) for key in observations[0]}
    return change(*observations)


def choose_rows(mask: Tensor, obs: Obs, other_obs: Obs) -> Obs:
    """Returns the rows of `obs` that `mask` (bool `[N]`) selects, and the other rows of `other_obs`."""

    def choose(rows: Tensor, other_rows: Tensor) -> Tensor:
        return torch.where(mask.reshape(-1, *[1] * (rows.dim() - 1)), rows, other_rows)

    return map_obs(choose, obs, other_obs)


@dataclass(frozen=True)
class ChunkStep:
    """Result of a chunk of C actions in N slots, as tensors on the device.

    Attributes:
        obs: Observations after the chunk; where an episode ended, the first of the next episode.
        rewards: Sums of the actions' rewards, float32 `[N]`.
        action_rewards: Rewards of the actions, float32 `[N, C]`; 0 for actions that were not executed.
        executed: Actions that were executed before their episode ended, bool `[N, C]`.
        terminations, truncations: Slots whose episode ended, bool `[N]`.
        final_obs: Last observations before a reset, of all slots.
        returns, lengths: Return (float64) and length (int64) of each slot's episode so far, `[N]`.
        success_once, success_at_end: Successes of each slot's episode, bool `[N]`; None if they are not reported.
    """

    obs: Obs
    rewards: Tensor
    action_rewards: Tensor
    executed: Tensor
    terminations: Tensor
    truncations: Tensor
    final_obs: Obs
    returns: Tensor
    lengths: Tensor
    success_once: Tensor | None
    success_at_end: Tensor | None


class TensorVectorEnv(VectorEnv):
    """Vector environment of a `TensorEnv`; `env.train.env_id` names its class, and `env.train.kwargs` are its arguments.

    `reset_tensors` and `step_tensors` leave everything on the device and never wait for it. The methods of `VectorEnv`
    return arrays of the same numbers; with `on_device`, observations remain tensors. A slot whose episode ends within a
    chunk is reset after the chunk.

    Args:
        cfg: Section `env.train` or `env.eval`.
        num_envs: Number of slots in this environment.
        slot_offset: Global number of its first slot.
        seed: Seed of the run.
        device: Device of the simulator; None takes the accelerator of this process, or the CPU.

    Raises:
        ConfigError: The section names wrappers, which environments of tensors cannot use.
    """

    @classmethod
    def uses_accelerator(cls, cfg: EnvSideConfig) -> bool:
        """Returns whether this process has an accelerator (`VectorEnv.uses_accelerator`)."""
        del cfg
        return bool(accelerator())

    def __init__(
        self, cfg: EnvSideConfig, num_envs: int, slot_offset: int, seed: int, device: torch.device | None = None
    ) -> None:
        if cfg.wrappers:
            raise ConfigError(f"env.train.wrappers is {list(cfg.wrappers)}; environments of tensors take none")
        self.num_envs = num_envs
        self.device = torch.device(accelerator() or "cpu") if device is None else device
        self._env = _build(cfg, num_envs, self.device)
        self._name = f"env_id {cfg.env_id!r}"
        self.observation_space, self.action_space = self._env.observation_space, self._env.action_space
        self.supports_state = type(self._env).state_dict is not TensorEnv.state_dict
        self.can_stay_on_device = self.device.type != "cpu"
        limit = self._env.max_episode_steps if cfg.max_episode_steps is None else cfg.max_episode_steps
        self.max_episode_steps = int(limit or 0)
        self._cfg = cfg
        self._obs_dtypes = {key: _torch_dtype(box.dtype) for key, box in boxes_of(self.observation_space).items()}
        self._action_bounds: tuple[Tensor, Tensor] | None = None
        if isinstance(self.action_space, spaces.Box):
            low, high = (
                torch.from_numpy(np.array(x)).to(self.device) for x in (self.action_space.low, self.action_space.high)
            )
            self._action_bounds = low, high
        self._first_action = torch.as_tensor(getattr(self.action_space, "start", 0), device=self.device)
        slots = torch.arange(slot_offset, slot_offset + num_envs, device=self.device)
        self._slot_groups = slots // max(1, cfg.group_size)
        zeros = torch.zeros(num_envs, dtype=torch.int64, device=self.device)
        self._reports_success = False
        #: State of the slots' episodes, `[N]` each; part of a checkpoint.
        self._episodes = {
            "seeds": self._series_seeds(seed),
            "begun": zeros,
            "lengths": zeros,
            "returns": zeros.double(),
            "success_once": zeros.bool(),
            "success_at_end": zeros.bool(),
            "previous_rewards": zeros.float(),
        }

    def _series_seeds(self, seed: int) -> Tensor:
        """Returns the seeds of the slots' series of episodes, `[N]`."""
        low, high = seed & _WORD, seed >> 32 & _WORD
        return combine_seeds(
            combine_seeds(combine_seeds(torch.zeros_like(self._slot_groups), low), high), self._slot_groups
        )

    # -- tensors --------------------------------------------------------------------------------------------------

    def reset_tensors(self, seed: int | None = None) -> Obs:
        """Starts new episodes in all slots; returns their observations (`VectorEnv.reset`)."""
        if seed is not None:
            episodes = self._episodes
            self._episodes = {
                **episodes, "seeds": self._series_seeds(seed), "begun": torch.zeros_like(episodes["begun"])
            }  # fmt: skip
        return self._begin(torch.ones(self.num_envs, dtype=torch.bool, device=self.device))

    def _begin(self, mask: Tensor) -> Obs:
        """Starts new episodes in the slots of `mask`; returns the observations of all slots."""
        episodes = self._episodes
        number: Tensor | int = 0 if self._cfg.use_fixed_reset_state_ids else episodes["begun"]
        obs = self._env.reset(mask, combine_seeds(episodes["seeds"], number))
        self._check_obs("reset", obs)
        statistics = ("lengths", "returns", "success_once", "success_at_end", "previous_rewards")
        self._episodes = {
            **episodes,
            "begun": episodes["begun"] + mask,
            **{name: episodes[name].masked_fill(mask, 0) for name in statistics},
        }
        return obs

    def step_tensors(self, actions: Tensor) -> ChunkStep:
        """Executes a chunk of actions, `[N, C, dim]`, as policies return them; actions are clipped to a `Box`'s bounds."""
        count, chunk = actions.shape[:2]
        is_active = torch.ones(count, dtype=torch.bool, device=self.device)
        terminations = truncations = torch.zeros_like(is_active)
        final_obs: Obs = None
        rewards, executed_masks = [], []
        for index in range(chunk):
            obs, raw_rewards, failed, truncated, infos = self._step(actions[:, index])
            # A copy, because a simulator may write the next observations to the same memory.
            final_obs = map_obs(torch.clone, obs) if index == 0 else choose_rows(is_active, obs, final_obs)
            success = infos.get("success")
            self._reports_success |= success is not None
            terminated, action_rewards = self._count(is_active, raw_rewards, failed, success)
            truncated = truncated & is_active & ~terminated
            if self.max_episode_steps:
                truncated = truncated | (
                    is_active & ~terminated & (self._episodes["lengths"] >= self.max_episode_steps)
                )
            rewards.append(action_rewards)
            executed_masks.append(is_active)
            terminations, truncations = terminations | terminated, truncations | truncated
            is_active = is_active & ~(terminated | truncated)
        episodes, action_rewards = self._episodes, torch.stack(rewards, 1)
        done = terminations | truncations
        return ChunkStep(
            obs=choose_rows(done, self._begin(done), final_obs),
            rewards=action_rewards.sum(1),
            action_rewards=action_rewards,
            executed=torch.stack(executed_masks, 1),
            terminations=terminations,
            truncations=truncations,
            final_obs=final_obs,
            returns=episodes["returns"],
            lengths=episodes["lengths"],
            success_once=episodes["success_once"] if self._reports_success else None,
            success_at_end=episodes["success_at_end"] if self._reports_success else None,
        )

    def _count(
        self, is_active: Tensor, rewards: Tensor, terminations: Tensor, success: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Adds a step of the slots `is_active` to their episodes (`EpisodeTracker.add`). Returns the terminations, and the
        rewards for training.
        """
        cfg, episodes = self._cfg, self._episodes
        rewards = rewards.float().masked_fill(~is_active, 0)
        terminated = terminations & is_active
        new_totals = {"lengths": episodes["lengths"] + is_active, "returns": episodes["returns"] + rewards}
        if success is not None:
            terminated = terminated | (success & is_active)
            new_totals["success_once"] = episodes["success_once"] | (success & is_active)
            new_totals["success_at_end"] = torch.where(is_active, success, episodes["success_at_end"])
        if cfg.ignore_terminations:
            terminated = torch.zeros_like(terminated)
        if cfg.use_rel_reward:
            previous_rewards = episodes["previous_rewards"]
            new_totals["previous_rewards"] = torch.where(is_active, rewards, previous_rewards)
            rewards = (rewards - previous_rewards).masked_fill(~is_active, 0)
        self._episodes = {**episodes, **new_totals}
        return terminated, rewards * cfg.reward_scale

    def _step(self, actions: Tensor) -> TensorStep:
        """Steps the simulator by one action in every slot, `[N, dim]`, and checks its results."""
        actions = actions.reshape(self.num_envs, *self.action_space.shape)
        if self._action_bounds is None:
            actions = actions + self._first_action
        else:
            low, high = self._action_bounds
            actions = torch.minimum(torch.maximum(actions.to(low.dtype), low), high)
        step = self._env.step(actions)
        if not isinstance(step, tuple) or len(step) != 5 or not isinstance(step[4], dict):
            raise self._interface_error(f"step() returned {describe(step)}")
        obs, rewards, terminations, truncations, infos = step
        self._check_obs("step", obs)
        self._check_row("rewards", rewards, is_flag=False)
        flags = {"terminations": terminations, "truncations": truncations}
        if infos.get("success") is not None:
            flags["success"] = infos["success"]
        for label, flag in flags.items():
            self._check_row(label, flag, is_flag=True)
        return step

    def _check_obs(self, method: str, obs: Obs) -> None:
        for key, box in boxes_of(self.observation_space).items():
            tensor = obs.get(key) if key and isinstance(obs, dict) else obs
            if (
                not isinstance(tensor, Tensor)
                or tuple(tensor.shape) != (self.num_envs, *box.shape)
                or tensor.dtype != self._obs_dtypes[key]
                or tensor.device.type != self.device.type
            ):
                label = f"observation {key}" if key else "observations"
                raise self._interface_error(f"{method}() returned {_describe(tensor)} as {label}; the space is {box}")

    def _check_row(self, label: str, row: Any, *, is_flag: bool) -> None:
        is_row = isinstance(row, Tensor) and row.shape == (self.num_envs,) and row.device.type == self.device.type
        if not is_row or (row.dtype == torch.bool) != is_flag:
            raise self._interface_error(f"step() returned {_describe(row)} as {label}")

    def _interface_error(self, problem: str) -> InterfaceError:
        return InterfaceError(
            f"{self._name}: {problem}; on {self.device.type}, an environment of tensors with N = {self.num_envs} slots "
            "returns observations [N, …] from reset(mask, seeds), and (observations [N, …], rewards [N], terminations bool "
            "[N], truncations bool [N], infos) from step(actions); change the environment (rlhpc.embodied.envs.TensorEnv)"
        )

    # -- arrays ---------------------------------------------------------------------------------------------------

    def reset(self, seed: int | None = None) -> tuple[Any, dict[str, Any]]:
        """Starts new episodes in all slots (`VectorEnv.reset`)."""
        return self._as_configured(self.reset_tensors(seed)), {}

    def step(self, actions: np.ndarray) -> Step:
        """Steps all slots by one action (`VectorEnv.step`)."""
        return self.chunk_step(actions.reshape(self.num_envs, 1, -1))

    def chunk_step(self, actions: np.ndarray) -> Step:
        """Executes a chunk of actions (`VectorEnv.chunk_step`)."""
        step = self.step_tensors(torch.from_numpy(np.array(actions)).to(self.device))
        rewards, terminations, truncations = _to_arrays(step.rewards, step.terminations, step.truncations)
        infos: dict[str, Any] = {}
        if actions.shape[1] > 1:
            action_rewards, is_executed = _to_arrays(step.action_rewards, step.executed)
            infos["chunk"] = {"rewards": action_rewards, "mask": is_executed}
        elif step.success_at_end is not None:
            infos["success"] = _to_arrays(step.success_at_end)[0]
        is_done = terminations | truncations
        if is_done.any():
            infos["final_obs"] = self._as_configured(step.final_obs)
            episode_rows = {"return": step.returns, "length": step.lengths}
            if step.success_once is not None and step.success_at_end is not None:
                successes = {"success_once": step.success_once, "success_at_end": step.success_at_end}
                episode_rows |= {name: flags.double() for name, flags in successes.items()}
            arrays = zip(episode_rows, _to_arrays(*episode_rows.values()), strict=True)
            infos["episode"] = {**dict(arrays), "mask": is_done}
        return self._as_configured(step.obs), rewards, terminations, truncations, infos

    def _as_configured(self, obs: Obs) -> Any:
        """Returns observations as tensors if `on_device` is set, else as arrays with separate memory."""
        return obs if self.on_device else map_obs(lambda tensor: np.array(as_arrays(tensor)), obs)

    # -- state ----------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, dict[str, np.ndarray]]:
        """Returns the state of episodes and simulator, as arrays `[N, ...]` (`VectorEnv.state_dict`)."""
        simulator = self._env.state_dict()
        for name, tensor in simulator.items():
            if tensor.shape[:1] != (self.num_envs,):
                raise self._interface_error(
                    f"state_dict() returned {_describe(tensor)} as {name}, which has no row per slot"
                )
        state = {"episodes": self._episodes, "simulator": simulator}
        return {
            part: {name: np.array(as_arrays(tensor)) for name, tensor in tensors.items()}
            for part, tensors in state.items()
        }

    def load_state_dict(self, state: Any) -> None:
        """Restores a state (`VectorEnv.load_state_dict`).

        Raises:
            ValueError: The state has a different number of slots.
        """
        tensors = {
            part: {name: torch.from_numpy(np.array(array)).to(self.device) for name, array in arrays.items()}
            for part, arrays in state.items()
        }
        episodes = {name: tensors["episodes"][name] for name in self._episodes}
        if len(episodes["begun"]) != self.num_envs:
            raise ValueError(f"state of {len(episodes['begun'])} slots for {self.num_envs}")
        self._episodes = episodes
        self._env.load_state_dict(tensors["simulator"])

    def slot_state(self, state: Any, index: int) -> Any:
        """Returns the rows of one slot (`VectorEnv.slot_state`)."""
        return {part: {name: array[index] for name, array in arrays.items()} for part, arrays in state.items()}

    def merge_states(self, slots: list[Any]) -> Any:
        """Joins the rows of slots (`VectorEnv.merge_states`)."""
        return {
            part: {name: np.stack([slot[part][name] for slot in slots]) for name in rows}
            for part, rows in slots[0].items()
        }


def _build(cfg: EnvSideConfig, num_envs: int, device: torch.device) -> TensorEnv:
    """Builds the simulator that `env_id` names.

    Raises:
        ConfigError: The class is unknown, is no `TensorEnv`, or does not take `kwargs`.
    """
    factory = TENSOR_ENVS.find(cfg.env_id)
    kwargs = dict(cfg.kwargs or {})
    try:
        inspect.signature(factory).bind(num_envs, device, **kwargs)
    except TypeError as error:
        raise ConfigError(f"env_id {cfg.env_id!r} refuses kwargs {kwargs}: {error}") from None
    env = factory(num_envs, device, **kwargs)
    if not isinstance(env, TensorEnv):
        raise ConfigError(
            f"env.train.env_id is {cfg.env_id!r}, which builds a {type(env).__name__}; with env_type tensors it must be a "
            "subclass of rlhpc.embodied.envs.TensorEnv"
        )
    return env


def _torch_dtype(dtype: Any) -> torch.dtype:
    return torch.from_numpy(np.empty(0, dtype)).dtype


def _to_arrays(*tensors: Tensor) -> list[np.ndarray]:
    return [tensor.cpu().numpy() for tensor in tensors]


def _describe(value: Any) -> str:
    """Describes a value with a tensor's dtype and device."""
    return f"{describe(value)} on {value.device.type}" if isinstance(value, Tensor) else describe(value)
