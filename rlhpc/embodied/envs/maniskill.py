"""Vector environment of ManiSkill 3 tasks. On a CPU, `maniskill_physx` simulates all slots in one batch; on a GPU,
ManiSkill's own simulation does.
"""

from __future__ import annotations

import itertools
import logging
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from omegaconf import OmegaConf

from rlhpc.embodied.envs.base import Step, VectorEnv, similar_ids_hint
from rlhpc.embodied.envs.episode_tracker import EpisodeTracker
from rlhpc.embodied.envs.maniskill_data import (
    convert_obs,
    join_states,
    joint_action_space,
    picture,
    row_of,
    select,
    space_of,
    to_rows,
)
from rlhpc.embodied.envs.observations import join
from rlhpc.runtime.devices import accelerator
from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.plugins import require_package

if TYPE_CHECKING:
    from rlhpc.embodied.config import EnvSideConfig


class ActionLog:
    """Log of each slot's actions since its reset. Actions are stored by step, because appending to thousands of lists
    would take as long as the simulation.

    Args:
        num_envs: Number of slots.
        width: Number of values of an action.
    """

    def __init__(self, num_envs: int, width: int) -> None:
        self._steps: list[np.ndarray] = []
        self._num_dropped = 0
        #: First step of each slot's episode, counted from the creation of the log.
        self._episode_starts = np.zeros(num_envs, np.int64)
        self._no_actions = np.zeros((0, width), np.float32)

    def begin(self, slots: np.ndarray) -> None:
        """Starts new episodes of these slots and drops their earlier actions."""
        self._episode_starts[slots] = self._num_dropped + len(self._steps)
        num_expired = int(self._episode_starts.min()) - self._num_dropped
        del self._steps[:num_expired]
        self._num_dropped += num_expired

    def add(self, actions: np.ndarray) -> None:
        """Adds a step's actions of all slots, `[N, width]`. Actions between the end of a slot's episode and its next
        `begin` are dropped by this `begin`.
        """
        self._steps.append(np.array(actions, np.float32))

    def actions_of(self, slot: int) -> np.ndarray:
        """Returns a slot's actions since its reset, float32 `[steps, width]`."""
        steps = self._steps[self._episode_starts[slot] - self._num_dropped :]
        return np.stack([step[slot] for step in steps]) if steps else self._no_actions


log = logging.getLogger(__name__)
_RESERVED_KWARGS = ("num_envs", "max_episode_steps", "render_mode")
#: Names of simulation and render backends without a GPU.
_CPU_BACKENDS = ("cpu", "physx_cpu", "sapien_cpu")


class _StubMaterial:
    """Substitute for SAPIEN's render material on machines without a renderer, where nothing reads the material."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        vars(self).update(kwargs)


_REQUIREMENT = ("env_type maniskill needs ManiSkill", "embodied")


def load_maniskill() -> bool:
    """Imports ManiSkill, even on a machine without Vulkan.

    Returns:
        True if SAPIEN can render on this machine.

    Raises:
        ConfigError: ManiSkill is not installed.
    """
    require_package("sapien.render", *_REQUIREMENT)
    import sapien

    if sapien.render.RenderMaterial is not _StubMaterial:
        try:
            sapien.render.RenderMaterial()
        except RuntimeError:
            material_class = sapien.render.RenderMaterial
            for module in list(sys.modules.values()):
                # Replaces the class also in modules that have already imported it, such as SAPIEN's loader of robots.
                if getattr(module, "__dict__", {}).get("RenderMaterial") is material_class:
                    vars(module)["RenderMaterial"] = _StubMaterial
    require_package("mani_skill.envs", *_REQUIREMENT)  # registers the tasks
    return sapien.render.RenderMaterial is not _StubMaterial


def find_task(env_id: str) -> Any:
    """Returns ManiSkill's registry entry of a task.

    Raises:
        ConfigError: The task is unknown, or its assets are not downloaded.
    """
    load_maniskill()
    from mani_skill.utils import assets
    from mani_skill.utils.registration import REGISTERED_ENVS

    if env_id not in REGISTERED_ENVS:
        hint = similar_ids_hint(env_id, REGISTERED_ENVS, "see mani_skill's list of tasks")
        raise ConfigError(f"env_id is {env_id!r}, which ManiSkill does not know; {hint}")
    spec = REGISTERED_ENVS[env_id]
    for name in spec.asset_download_ids or []:
        group = name in assets.DATA_GROUPS
        sources = assets.expand_data_group_into_individual_data_source_ids(name) if group else [name]
        if not all(assets.is_data_source_downloaded(source) for source in sources):
            raise ConfigError(
                f"env_id {env_id!r} needs assets that are not on this machine ({name}); "
                f"run: python -m mani_skill.utils.download_asset {env_id}"
            )
    return spec


class ManiSkillVectorEnv(VectorEnv):
    """Vector environment of N slots of a ManiSkill task; `env.train.kwargs` are the arguments of `gym.make`.

    obs_mode `state` (default) gives `[N, D]`; modes with textures (`rgb`, `rgbd`, `rgb+state`, …) give a dict of
    `state` (the part that the task reveals to the policy), `rgb` uint8 `[N, H, W, 3 x cameras]` and `depth` float32 in
    metres. sim_backend and render_backend `auto` (default) use a GPU if torch finds one.

    (seed, slot, number of the episode) determine an episode. On a GPU, all slots of a reset start in one call, with each
    slot's numbers from its own seed. There, this holds for what a task draws with one row per slot; with fixed reset states
    slots start one after the other, and it holds for all.

    A slot keeps the values that its task draws at construction (such as the size of a peg), except with
    `reconfiguration_freq`.

    The saved state of a slot is the number and the actions of its episode; loading replays the actions. On the CPU the
    replay is exact: every reset first clears PhysX's contact caches, which outlive a reset and are not part of
    ManiSkill's state.

    Args:
        cfg: Section `env.train` or `env.eval`.
        num_envs: Number of slots in this environment.
        slot_offset: Global number of its first slot.
        seed: Seed of the run.

    Raises:
        ConfigError: The section names wrappers, which ManiSkill tasks cannot use.
    """

    supports_state = True
    gains_by_processes = True

    @classmethod
    def uses_accelerator(cls, cfg: EnvSideConfig) -> bool:
        """Returns whether `sim_backend` or `render_backend` is on an accelerator (`VectorEnv.uses_accelerator`)."""
        kwargs = cfg.kwargs or {}
        sim_backend, render_backend = _backends(
            kwargs.get("sim_backend", "auto"), kwargs.get("render_backend", "auto"), kwargs.get("obs_mode", "state")
        )
        return sim_backend not in _CPU_BACKENDS or render_backend not in (*_CPU_BACKENDS, "none", None)

    def __init__(self, cfg: EnvSideConfig, num_envs: int, slot_offset: int, seed: int) -> None:
        self.num_envs = num_envs
        self._env_id = cfg.env_id
        if cfg.wrappers:
            raise ConfigError(f"env.train.wrappers is {list(cfg.wrappers)}; ManiSkill tasks take none")
        spec = find_task(self._env_id)
        self._kwargs = {**spec.default_kwargs, **_task_kwargs(cfg, spec)}
        self._uses_gpu = self._kwargs["sim_backend"] not in _CPU_BACKENDS
        has_images = _has_images(self._kwargs["obs_mode"])
        limit = cfg.max_episode_steps if cfg.max_episode_steps is not None else spec.max_episode_steps
        self.episodes = EpisodeTracker(cfg, num_envs, slot_offset, seed, int(limit or 0))
        resets_jointly = self._uses_gpu and not cfg.use_fixed_reset_state_ids
        # On the CPU, image observations and scenes that are rebuilt for every episode need a simulation per slot.
        self._is_separate = not self._uses_gpu and (has_images or bool(self._kwargs.get("reconfiguration_freq")))
        self._build_seeds = [build_seed(seed, (slot_offset + i) // cfg.group_size) for i in range(num_envs)]
        self._simulations = self._build(spec, is_seeded=not resets_jointly)
        self._spec = spec
        self._camera: Any = None
        #: Arguments of `gym.make` that rebuild the task, for recordings.
        self.record_kwargs = {**self._kwargs, "sim_backend": "physx_cuda" if self._uses_gpu else "physx_cpu"}
        self.max_episode_steps = int(limit or 0)
        first_simulation = self._simulations[0]
        self.control_hz = float(first_simulation.control_freq)
        self.action_space, self._robot_widths = joint_action_space(first_simulation.single_action_space)
        row = convert_obs(first_simulation.get_obs())
        self.can_stay_on_device = self._uses_gpu and len(self._simulations) == 1
        self.observation_space = space_of(row)
        self._action_log = ActionLog(num_envs, int(np.prod(self.action_space.shape)))

    def _build(self, spec: Any, is_seeded: bool) -> list[Any]:
        """Builds one simulation per slot (`_is_separate`), or one for all slots."""
        from rlhpc.embodied.envs.maniskill_tasks import seeded_task

        is_batched, simulations = not self._uses_gpu and not self._is_separate, []
        size = 1 if self._is_separate else self.num_envs
        kwargs = {**self._kwargs, "render_backend": "none"} if is_batched else self._kwargs
        try:
            for start in range(0, self.num_envs, size):
                task = seeded_task(spec.cls, is_batched, is_seeded, self._build_seeds[start : start + size])
                with torch.inference_mode():
                    simulations.append(task(num_envs=size, **kwargs))
        except (TypeError, ValueError, KeyError, AssertionError, NotImplementedError, RuntimeError) as error:
            raise ConfigError(f"env_id {self._env_id!r} refuses kwargs {self._kwargs}: {error}") from None
        return simulations

    # -- episodes ---------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def reset(self, seed: int | None = None) -> tuple[Any, dict[str, Any]]:
        """Starts an episode in every slot (`VectorEnv.reset`)."""
        if seed is not None:
            self.episodes.reseed(seed)
        return self._begin_episodes(np.arange(self.num_envs)), {}

    def _begin_episodes(self, slots: np.ndarray) -> Any:
        """Resets these slots; returns the observations of all slots."""
        seeds = dict(zip(slots.tolist(), self.episodes.begin(slots), strict=True))
        self._action_log.begin(slots)
        observations = []
        for start, simulation in self._slot_starts():
            local_seeds = {
                slot - start: seeds[slot] for slot in range(start, start + simulation.num_envs) if slot in seeds
            }
            obs = simulation.reset_slots(local_seeds) if local_seeds else simulation._last_obs
            observations.append(convert_obs(obs, self.on_device))
        return join(observations)

    def _slot_starts(self) -> Iterator[tuple[int, Any]]:
        """Yields the first slot of each simulation, and the simulation."""
        first_slots = itertools.accumulate((simulation.num_envs for simulation in self._simulations), initial=0)
        return zip(first_slots, self._simulations, strict=False)

    @torch.inference_mode()
    def step(self, actions: np.ndarray) -> Step:
        """Steps every slot by one action (`VectorEnv.step`). ManiSkill clips actions to the space's bounds."""
        return self._execute_chunk(actions.reshape(self.num_envs, 1, -1))

    @torch.inference_mode()
    def chunk_step(self, actions: np.ndarray) -> Step:
        """Executes a chunk (`VectorEnv.chunk_step`); a slot whose episode ends within the chunk is reset after the
        chunk.
        """
        return self._execute_chunk(actions.reshape(self.num_envs, actions.shape[1], -1))

    def _execute_chunk(self, actions: np.ndarray) -> Step:
        n, chunk = self.num_envs, actions.shape[1]
        chunk_rewards, is_executed = np.zeros((n, chunk), np.float32), np.zeros((n, chunk), bool)
        terminations, truncations = np.zeros(n, bool), np.zeros(n, bool)
        final_obs: Any = None
        success: np.ndarray | None = None
        for i in range(chunk):
            is_active = ~(terminations | truncations)
            if not is_active.any():
                break
            obs, rewards, is_terminal, success = self._simulate(actions[:, i])
            self._action_log.add(actions[:, i])
            chunk_rewards[:, i], terminated, truncated = self.episodes.add(rewards, is_terminal, success, is_active)
            is_executed[:, i] = is_active
            terminations |= terminated
            truncations |= truncated
            has_just_ended = terminated | truncated
            if has_just_ended.any():
                final_obs = select(has_just_ended, obs, obs if final_obs is None else final_obs)
        is_done = terminations | truncations
        infos: dict[str, Any] = {}
        if chunk == 1 and success is not None:
            infos["success"] = success
        if is_done.any():
            infos |= {"final_obs": final_obs, "episode": self.episodes.report(is_done)}
            if self.keep_states:
                infos["final_env_states"] = self.env_states()
            obs = self._begin_episodes(np.flatnonzero(is_done))
        if chunk > 1:
            infos["chunk"] = {"rewards": chunk_rewards, "mask": is_executed}
        return obs, chunk_rewards.sum(1), terminations, truncations, infos

    def _simulate(self, actions: np.ndarray) -> tuple[Any, np.ndarray, np.ndarray, np.ndarray | None]:
        """Executes one control step of all slots; returns obs, rewards `[N]`, failed `[N]`, and success `[N]` or, if the task
        does not report it, None.
        """
        obs, rewards, failed, success = [], [], [], []
        for start, simulation in self._slot_starts():
            rows = np.ascontiguousarray(actions[start : start + simulation.num_envs], np.float32)
            joint_actions: Any = torch.from_numpy(rows).to(simulation.device)
            if self._robot_widths is not None:
                robot_actions = joint_actions.split([*self._robot_widths.values()], 1)
                joint_actions = dict(zip(self._robot_widths, robot_actions, strict=True))
            simulation_obs, reward, _, _, info = simulation.step(joint_actions)
            obs.append(convert_obs(simulation_obs, self.on_device))
            flag_names = [name for name in ("fail", "success") if name in info]
            reward_row, *flag_rows = to_rows([reward, *(info[name] for name in flag_names)], simulation.num_envs)
            flags = dict(zip(flag_names, flag_rows, strict=True))
            rewards.append(reward_row)
            failed.append(flags.get("fail", np.zeros(simulation.num_envs, bool)))
            if "success" in flags:
                success.append(flags["success"].astype(bool))
        return (
            join(obs),
            np.concatenate(rewards).astype(np.float32),
            np.concatenate(failed).astype(bool),
            np.concatenate(success) if success else None,
        )

    # -- state ------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Returns for each slot the number of its episode and the actions since its reset."""
        slots = range(self.num_envs)
        return {
            "slots": [{**self.episodes.position(slot), "actions": self._action_log.actions_of(slot)} for slot in slots]
        }

    @torch.inference_mode()
    def load_state_dict(self, state: Any) -> None:
        """Restores the slots by replaying their episodes. Longer episodes start first, so that all replays end in the
        same step.
        """
        slots = self.slots_of(state)
        if self._uses_gpu:
            log.warning(
                "%s: PhysX on a GPU is not deterministic: the resumed episodes are close, not equal", self._env_id
            )
        saved_actions = [np.asarray(slot["actions"], np.float32) for slot in slots]
        lengths = np.array([len(actions) for actions in saved_actions])
        for i, slot in enumerate(slots):
            self.episodes.replay(i, slot)
        actions = np.zeros((self.num_envs, int(np.prod(self.action_space.shape))), np.float32)
        for num_remaining in range(int(lengths.max()), -1, -1):
            starting_slots = np.flatnonzero(lengths == num_remaining)
            if starting_slots.size:
                self._begin_episodes(starting_slots)
            if not num_remaining:
                return
            is_active = lengths >= num_remaining
            for slot in np.flatnonzero(is_active).tolist():
                actions[slot] = saved_actions[slot][lengths[slot] - num_remaining]
            self._action_log.add(actions)
            _, rewards, is_terminal, success = self._simulate(actions)
            self.episodes.add(rewards, is_terminal, success, is_active)

    def env_states(self) -> dict[str, Any]:
        """Returns ManiSkill's `get_state_dict` of all slots: nested dicts of arrays `[N, ...]`."""
        return join_states([simulation.get_state_dict() for simulation in self._simulations])

    # -- images -----------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def render(self, slots: Any = None) -> np.ndarray | None:
        """Renders slots (`VectorEnv.render`). A separate environment with a renderer shows slots that are simulated
        without a renderer.
        """
        rendered_slots = list(range(self.num_envs)) if slots is None else [int(slot) for slot in slots]
        if self._is_separate and self._kwargs["render_backend"] != "none":
            return np.concatenate([picture(self._simulations[slot]) for slot in rendered_slots])
        if self._uses_gpu and self._kwargs["render_backend"] != "none":
            return picture(self._simulations[0])[rendered_slots]
        if self._camera is None and not self._open_camera():
            return None
        frames = []
        for slot in rendered_slots:
            simulation, row = (self._simulations[slot], 0) if self._is_separate else (self._simulations[0], slot)
            self._camera.set_state_dict(row_of(simulation.get_state_dict(), row))
            frames.append(picture(self._camera))
        return np.concatenate(frames)

    def _open_camera(self) -> bool:
        if self._camera is False or not load_maniskill():
            return False
        from rlhpc.embodied.envs.maniskill_tasks import rendering_task

        backend = "gpu" if accelerator() == "cuda" else "cpu"
        kwargs = {**self._kwargs, "obs_mode": "none", "sim_backend": "physx_cpu", "render_backend": backend}
        try:
            with torch.inference_mode():
                self._camera = rendering_task(self._spec.cls)(num_envs=1, render_mode="rgb_array", **kwargs)
        except RuntimeError as error:
            log.warning("%s: no pictures, SAPIEN cannot render here: %s", self._env_id, error)
            self._camera = False
            return False
        return True

    def close(self) -> None:
        """Frees the simulations."""
        for env in [*self._simulations, *([self._camera] if self._camera else [])]:
            env.close()
        self._simulations, self._camera = [], None


def build_seed(seed: int, group_index: int) -> int:
    """Returns the seed of the values that a slot's task draws at construction, which differs from the seeds of episodes."""
    return int(np.random.SeedSequence([seed, group_index, 0, 1]).generate_state(1)[0]) & 0x7FFFFFFF


def _has_images(obs_mode: str) -> bool:
    return obs_mode not in ("state", "state_dict", "none")


def _backends(sim: str | None, render: str | None, obs_mode: str) -> tuple[str | None, str | None]:
    """Returns the simulation and the render backend, with `auto` replaced by the best backend of this process."""
    use_gpu = "auto" in (sim, render) and accelerator() == "cuda"
    if sim == "auto":
        sim = "physx_cuda" if use_gpu else "physx_cpu"
    if render == "auto":
        render = ("gpu" if use_gpu else "cpu") if _has_images(obs_mode) else "none"
    return sim, render


def _task_kwargs(cfg: EnvSideConfig, spec: Any) -> dict[str, Any]:
    """Returns `cfg.kwargs` with this adapter's defaults, checked as far as possible without building the task."""
    # A copy, because ManiSkill changes nested values.
    user_kwargs: Any = OmegaConf.to_container(cfg.kwargs) if OmegaConf.is_config(cfg.kwargs) else cfg.kwargs
    kwargs: dict[str, Any] = dict(user_kwargs or {})
    for name in _RESERVED_KWARGS:
        if name in kwargs:
            raise ConfigError(f"env.train.kwargs.{name} is {kwargs[name]!r}; this one rlhpc sets itself")
    kwargs.setdefault("obs_mode", "state")
    if kwargs["obs_mode"] in ("none", "sensor_data", "pointcloud"):
        raise ConfigError(
            f"env.train.kwargs.obs_mode is {kwargs['obs_mode']!r}; supported are state, rgb, depth, and these joined by '+'"
        )
    # Several tasks rebuild their scene for every episode, but only with one slot.
    kwargs.setdefault("reconfiguration_freq", 0)
    modes = spec.cls.SUPPORTED_REWARD_MODES
    if kwargs.get("reward_mode") is not None and kwargs["reward_mode"] not in modes:
        raise ConfigError(
            f"env.train.kwargs.reward_mode is {kwargs['reward_mode']!r}; {cfg.env_id} has: {', '.join(modes)}"
        )
    kwargs["sim_backend"], kwargs["render_backend"] = _backends(
        kwargs.get("sim_backend", "auto"), kwargs.get("render_backend", "auto"), kwargs["obs_mode"]
    )
    if _has_images(kwargs["obs_mode"]) and (kwargs["render_backend"] in ("none", None) or not load_maniskill()):
        raise ConfigError(
            f"env.train.kwargs.obs_mode is {kwargs['obs_mode']!r}, which needs a renderer: a GPU's Vulkan driver, or "
            f"Mesa 23 or newer (mesa-vulkan-drivers, libvulkan1); obs_mode=state needs none"
        )
    return kwargs
