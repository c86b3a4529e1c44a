"""Tasks of Isaac Lab and of mjlab, which has the same interface on MuJoCo Warp, as environments of tensors.

Both own the tensors of all slots. Isaac Lab resets slots within `step` and shows the observations after it, so the last ones
of an episode are read where it resets. Read in Isaac Lab 2.3 (`ManagerBasedRLEnv`, `DirectRLEnv`) and mjlab 1.6.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from rlhpc.embodied.envs.base import similar_ids_hint
from rlhpc.embodied.envs.tensor_env import Obs, TensorEnv, TensorStep, choose_rows
from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.plugins import require_package


class LabEnv(TensorEnv):
    """Base of environments with Isaac Lab's interface (`TensorEnv`).

    The simulator draws from one generator, which a reset of all slots seeds by the first slot's seed. A slot's episodes
    therefore depend on the other slots, groups of slots start in different states, and a resumed run starts its episodes over.

    Args:
        num_envs: Number of slots N.
        device: Device of all tensors.
        task: Id of the task, such as `Isaac-Cartpole-v0`.
        groups: Groups of observations that the policy sees, by name; None shows all.
        action_limit: Bound of the actions, which these tasks leave unbounded; None leaves them so.
    """

    def __init__(
        self,
        num_envs: int,
        device: torch.device,
        task: str,
        groups: list[str] | None = None,
        action_limit: float | None = None,
    ) -> None:
        super().__init__(num_envs, device)
        self.task, self._groups = task, groups
        self.env = self.build()
        self.max_episode_steps = int(self.env.max_episode_length)
        self._obs = self.select(self.env.reset()[0])
        if isinstance(self._obs, dict):
            boxes: dict[str, spaces.Space[Any]] = {name: _box(rows) for name, rows in self._obs.items()}
            self.observation_space = spaces.Dict(boxes)
        else:
            self.observation_space = _box(self._obs)
        bound = np.inf if action_limit is None else action_limit
        shape = tuple(self.env.single_action_space.shape)
        self.action_space = spaces.Box(-bound, bound, shape, np.float32)

    @abstractmethod
    def build(self) -> Any:
        """Returns the simulator's environment of `num_envs` slots."""

    @abstractmethod
    def reset_slots(self, mask: Tensor) -> Obs:
        """Starts episodes in the slots of a mask with a slot at least; returns the observations of all slots."""

    def select(self, obs: dict[str, Any]) -> Obs:
        """Returns the observations that the policy sees: one tensor, or several by name.

        Raises:
            ConfigError: The task has no such group.
        """
        groups = list(obs) if self._groups is None else list(self._groups)
        if missing_groups := [name for name in groups if name not in obs]:
            raise ConfigError(
                f"env.train.kwargs.groups names {', '.join(missing_groups)}, and {self.task} has {', '.join(obs)}"
            )
        tensors: dict[str, Tensor] = {}
        for name in groups:  # a group that is not concatenated is a dict of terms
            group = obs[name]
            tensors |= (
                {f"{name}_{term}": rows for term, rows in group.items()} if isinstance(group, dict) else {name: group}
            )
        # Copies, because a simulator may write the next observations to the same memory.
        copies = {name: rows.clone() for name, rows in tensors.items()}
        return next(iter(copies.values())) if len(copies) == 1 else copies

    def reset(self, mask: Tensor, seeds: Tensor) -> Obs:
        """Starts episodes (`TensorEnv.reset`)."""
        num_slots = int(mask.sum())  # the simulators take indices, for which the host waits
        if num_slots == self.num_envs:
            self.env.seed(int(seeds[0]))
        if num_slots:
            self._obs = self.reset_slots(mask)
        return self._obs


class IsaacLabEnv(LabEnv):
    """Task of Isaac Lab, with its manager-based or its direct workflow (`LabEnv`)."""

    #: Application of Isaac Sim, of which a process has one.
    _app: Any = None

    def build(self) -> Any:
        """Starts Isaac Sim without a window, and builds the task (`LabEnv.build`).

        Raises:
            ConfigError: Isaac Lab is not installed.
        """
        import gymnasium

        try:
            from isaaclab.app import AppLauncher
        except ImportError as error:
            raise ConfigError(
                f"env_id isaac_lab needs Isaac Lab ({error}): install it with Isaac Sim, as its documentation says, in a "
                "Python that also has rlhpc"
            ) from None
        if IsaacLabEnv._app is None:
            IsaacLabEnv._app = AppLauncher(headless=True, device=str(self.device)).app
        # Isaac Sim must run before these can be imported.
        import isaaclab_tasks  # noqa: F401
        from isaaclab_tasks.utils import parse_env_cfg

        cfg = parse_env_cfg(self.task, device=str(self.device), num_envs=self.num_envs)
        env: Any = gymnasium.make(self.task, cfg=cfg).unwrapped
        self._final_obs: Obs = None
        self._has_reset = torch.zeros(self.num_envs, dtype=torch.bool, device=self.device)
        self._reset_in_simulator = env._reset_idx
        env._reset_idx = self._reset_and_keep
        return env

    def _reset_and_keep(self, indices: Any) -> None:
        """Resets slots for Isaac Lab's `step`, which calls this in place of its own method; keeps their last observations."""
        if self.env_is_stepping:
            self._final_obs = self.select(self._compute())
            self._has_reset[indices.long()] = True
        self._reset_in_simulator(indices)

    #: Tells whether `step` runs.
    env_is_stepping = False

    def _compute(self) -> dict[str, Any]:
        manager = getattr(self.env, "observation_manager", None)
        return self.env._get_observations() if manager is None else manager.compute()

    def step(self, actions: Tensor) -> TensorStep:
        """Steps all slots (`TensorEnv.step`). Where an episode ended, the observations are its last ones."""
        self._final_obs = None
        self._has_reset = torch.zeros_like(self._has_reset)
        self.env_is_stepping = True
        try:
            obs, rewards, terminations, truncations, _ = self.env.step(actions)
        finally:
            self.env_is_stepping = False
        self._obs = self.select(obs)
        last_obs = self._obs if self._final_obs is None else choose_rows(self._has_reset, self._final_obs, self._obs)
        return last_obs, rewards.clone(), terminations.bool().clone(), truncations.bool().clone(), {}

    def reset_slots(self, mask: Tensor) -> Obs:
        """Resets the slots that the last step has not reset (`LabEnv.reset_slots`)."""
        indices = (mask & ~self._has_reset).nonzero().squeeze(1)
        if len(indices):
            self._reset_in_simulator(indices)
            self.env.scene.write_data_to_sim()
            self.env.sim.forward()
            self._obs = choose_rows(self._has_reset, self._obs, self.select(self._compute()))
        self._has_reset = torch.zeros_like(self._has_reset)
        return self._obs


class MjlabEnv(LabEnv):
    """Task of mjlab on MuJoCo Warp, which simulates on NVIDIA GPUs and on CPUs (`LabEnv`)."""

    def build(self) -> Any:
        """Builds the task without its own resets, because the caller resets the slots (`LabEnv.build`).

        Raises:
            ConfigError: mjlab is not installed, or does not know the task.
        """
        require_package("mjlab.tasks", "env_id mjlab needs mjlab", "mjlab")  # registers the tasks
        from mjlab.envs import ManagerBasedRlEnv
        from mjlab.tasks.registry import list_tasks, load_env_cfg

        if self.task not in list_tasks():
            hint = similar_ids_hint(self.task, list_tasks(), f"it has {', '.join(list_tasks())}")
            raise ConfigError(f"env.train.kwargs.task is {self.task!r}, which mjlab does not know; {hint}")
        cfg = load_env_cfg(self.task)
        scene = cfg.scene
        scene.num_envs, cfg.auto_reset, cfg.seed = self.num_envs, False, 0
        self._pending_reset = torch.zeros(self.num_envs, dtype=torch.bool, device=self.device)
        return ManagerBasedRlEnv(cfg, device=str(self.device))

    def step(self, actions: Tensor) -> TensorStep:
        """Steps all slots (`TensorEnv.step`)."""
        if bool(self._pending_reset.any()):  # within a chunk; mjlab refuses to step a slot whose episode has ended
            self.reset_slots(self._pending_reset)
        obs, rewards, terminations, truncations, _ = self.env.step(actions)
        self._pending_reset = terminations | truncations
        self._obs = self.select(obs)
        return self._obs, rewards.clone(), terminations.clone(), truncations.clone(), {}

    def reset_slots(self, mask: Tensor) -> Obs:
        """Resets slots (`LabEnv.reset_slots`)."""
        obs, _ = self.env.reset(env_ids=mask.nonzero().squeeze(1))
        self._pending_reset = self._pending_reset & ~mask
        return self.select(obs)


def _box(rows: Tensor) -> spaces.Box:
    """Returns the space of a slot's observation."""
    if rows.dtype == torch.uint8:
        return spaces.Box(0, 255, tuple(rows.shape[1:]), np.uint8)
    return spaces.Box(-np.inf, np.inf, tuple(rows.shape[1:]), np.float32)
