"""Tasks of MuJoCo's MJX as environments of tensors: JAX simulates on the device, and torch reads its arrays in place."""

from __future__ import annotations

import functools
import os
from abc import abstractmethod
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from rlhpc.embodied.envs.tensor_env import TensorEnv, TensorStep, choose_rows, draw_normal, draw_uniform
from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.plugins import require_package

#: Gymnasium's MuJoCo models.
_GYMNASIUM_MODELS = Path(gymnasium.__file__).parent / "envs/mujoco/assets"


class MjxState(NamedTuple):
    """State of N slots on which the next step depends; MuJoCo computes everything else from it.

    Attributes:
        positions, velocities: Generalized positions and velocities, `[N, nq]` and `[N, nv]`.
        activations: Activations of the actuators, `[N, na]`.
        warmstart: Accelerations from which the solver of the contacts starts, `[N, nv]`.
    """

    positions: Tensor
    velocities: Tensor
    activations: Tensor
    warmstart: Tensor


class MjxEnv(TensorEnv):
    """Base of tasks of one MuJoCo model, which MJX simulates in all slots at once (`TensorEnv`).

    A subclass sets `model_path` and `frame_skip`, and defines `start`, `observe` and `score`. The state is tensors between
    steps, which JAX and torch hand to each other without a copy. The constructor compiles the simulation.

    Args:
        num_envs: Number of slots N.
        device: Device of all tensors.

    Attributes:
        model_path: MJCF file of the model.
        frame_skip: Simulator steps per action.
        model: The model, as `mujoco.MjModel`.
        step_s: Simulated seconds per action.
        state: Current state.
    """

    model_path: str | Path
    frame_skip: int = 1

    def __init__(self, num_envs: int, device: torch.device) -> None:
        super().__init__(num_envs, device)
        self._jax, jax_device = _load_jax(device)
        self.model, self._advance, initial_state = _compile(jax_device, str(self.model_path), self.frame_skip)
        self.step_s = self.model.opt.timestep * self.frame_skip
        low, high = self.model.actuator_ctrlrange.T
        is_limited = self.model.actuator_ctrllimited.astype(bool)
        self.action_space = spaces.Box(
            np.where(is_limited, low, -np.inf).astype(np.float32), np.where(is_limited, high, np.inf).astype(np.float32)
        )
        rows = [torch.tensor(np.array(array), device=device).expand(num_envs, -1) for array in initial_state]
        self._initial_state = self.state = MjxState(*rows)
        self._simulate(torch.zeros(num_envs, self.model.nu, device=device))
        self.observation_space = spaces.Box(-np.inf, np.inf, self.observe(self.state).shape[1:], np.float32)

    @abstractmethod
    def start(self, seeds: Tensor) -> tuple[Tensor, Tensor]:
        """Returns positions `[N, nq]` and velocities `[N, nv]` at which episodes start (`TensorEnv.reset`)."""

    @abstractmethod
    def observe(self, state: MjxState) -> Tensor:
        """Returns the observations of a state, float32 `[N, ...]`."""

    @abstractmethod
    def score(self, before: MjxState, actions: Tensor, after: MjxState) -> tuple[Tensor, Tensor]:
        """Returns rewards `[N]` and terminations bool `[N]` of a step."""

    @property
    def initial_positions(self) -> Tensor:
        """Positions that the model's file defines, `[N, nq]`."""
        return self._initial_state.positions

    def reset(self, mask: Tensor, seeds: Tensor) -> Tensor:
        """Starts episodes with the states that `start` returns, without earlier results of the solver (`TensorEnv.reset`)."""
        positions, velocities = self.start(seeds)
        initial_state = self._initial_state._replace(positions=positions, velocities=velocities)
        self.state = MjxState(*(choose_rows(mask, *rows) for rows in zip(initial_state, self.state, strict=True)))
        return self.observe(self.state)

    def step(self, actions: Tensor) -> TensorStep:
        """Simulates `frame_skip` steps (`TensorEnv.step`)."""
        before, self.state = self.state, self._simulate(actions)
        rewards, terminations = self.score(before, actions, self.state)
        return self.observe(self.state), rewards, terminations, torch.zeros_like(terminations), {}

    def _simulate(self, actions: Tensor) -> MjxState:
        """Returns the state after an action, `[N, nu]`."""
        from_dlpack = self._jax.numpy.from_dlpack
        arrays = self._advance(*(from_dlpack(tensor.contiguous()) for tensor in (*self.state, actions)))
        if self.device.type == "cpu":  # a card's streams wait for each other; on a CPU JAX computes in other threads
            self._jax.block_until_ready(arrays)
        return MjxState(*map(torch.from_dlpack, arrays))

    def state_dict(self) -> dict[str, Tensor]:
        """Returns the state (`TensorEnv.state_dict`)."""
        return self.state._asdict()

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Restores the state (`TensorEnv.load_state_dict`)."""
        self.state = MjxState(**state)


def _load_jax(device: torch.device) -> tuple[Any, Any]:
    """Imports JAX and MJX; returns JAX and its device that has the memory of torch's `device`.

    Raises:
        ConfigError: JAX or MJX is not installed, or JAX cannot use the device.
    """
    if device.type == "cpu":
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
        if torch.get_num_threads() == 1:  # else each rank would simulate in as many threads as there are cores
            os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1")
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # by default JAX reserves three quarters of a card
    jax = require_package("jax", "MJX needs JAX", "mjx")
    require_package("mujoco.mjx", "env_id mjx_… needs MuJoCo's MJX", "mjx")
    platform = "cpu" if device.type == "cpu" else "gpu"
    try:
        return jax, jax.devices(platform)[device.index or 0]
    except (RuntimeError, IndexError):
        raise ConfigError(
            f"environments of MJX simulate on the policy's device, which is {device}, and JAX has only "
            f"{', '.join(map(str, jax.devices()))}: install JAX for this device (pip install 'jax[cuda13]'), or set "
            "cluster.accelerators_per_node=0"
        ) from None


@functools.lru_cache(maxsize=8)
def _compile(device: Any, path: str, frame_skip: int) -> tuple[Any, Any, tuple[Any, ...]]:
    """Returns a model, the compiled function `(*state, controls) -> state` of N slots, and the initial state of one."""
    import jax
    import mujoco
    from mujoco import mjx

    host_model = mujoco.MjModel.from_xml_path(path)
    model = mjx.put_model(host_model, device=device, impl="jax")
    initial_data = mjx.make_data(host_model, device=device, impl="jax")

    def fields(data: Any) -> tuple[Any, ...]:
        return data.qpos, data.qvel, data.act, data.qacc_warmstart

    def advance(qpos: Any, qvel: Any, act: Any, warmstart: Any, controls: Any) -> tuple[Any, ...]:
        data = initial_data.replace(qpos=qpos, qvel=qvel, act=act, qacc_warmstart=warmstart, ctrl=controls)
        # By default a card rounds the factors of a product to ten bits, with which contacts become unstable.
        with jax.default_matmul_precision("highest"):
            return fields(jax.lax.fori_loop(0, frame_skip, lambda _, mjx_data: mjx.step(model, mjx_data), data))

    return host_model, jax.jit(jax.vmap(advance)), fields(initial_data)


class MjxInvertedPendulum(MjxEnv):
    """Pole on a cart that is pushed, with the model, observations, rewards and ends of Gymnasium's `InvertedPendulum-v5`."""

    model_path = _GYMNASIUM_MODELS / "inverted_pendulum.xml"
    frame_skip = 2
    max_episode_steps = 1000

    _MAX_ANGLE, _NOISE = 0.2, 0.01

    def start(self, seeds: Tensor) -> tuple[Tensor, Tensor]:
        """Starts near the upright pole (`MjxEnv.start`)."""
        noise = (draw_uniform(seeds, self.model.nq + self.model.nv) * 2.0 - 1.0) * self._NOISE
        return self.initial_positions + noise[:, : self.model.nq], noise[:, self.model.nq :]

    def observe(self, state: MjxState) -> Tensor:
        """Returns positions and velocities (`MjxEnv.observe`)."""
        return torch.cat((state.positions, state.velocities), 1)

    def score(self, before: MjxState, actions: Tensor, after: MjxState) -> tuple[Tensor, Tensor]:
        """Returns 1 for each step whose pole stands; a fallen pole terminates (`MjxEnv.score`)."""
        del before, actions
        has_fallen = ~self.observe(after).isfinite().all(1) | (after.positions[:, 1].abs() > self._MAX_ANGLE)
        return (~has_fallen).float(), has_fallen


class MjxHalfCheetah(MjxEnv):
    """Half-cheetah that runs forward, with the model, observations and rewards of Gymnasium's `HalfCheetah-v5`."""

    model_path = _GYMNASIUM_MODELS / "half_cheetah.xml"
    frame_skip = 5
    max_episode_steps = 1000

    _CONTROL_COST, _NOISE = 0.1, 0.1

    def start(self, seeds: Tensor) -> tuple[Tensor, Tensor]:
        """Starts near the pose of the model's file (`MjxEnv.start`)."""
        noise = (draw_uniform(seeds, self.model.nq) * 2.0 - 1.0) * self._NOISE
        return self.initial_positions + noise, draw_normal(seeds + 1, self.model.nv) * self._NOISE

    def observe(self, state: MjxState) -> Tensor:
        """Returns all positions except the forward one, then the velocities (`MjxEnv.observe`)."""
        return torch.cat((state.positions[:, 1:], state.velocities), 1)

    def score(self, before: MjxState, actions: Tensor, after: MjxState) -> tuple[Tensor, Tensor]:
        """Returns the speed forward less the squares of the actions; nothing terminates (`MjxEnv.score`)."""
        speeds = (after.positions[:, 0] - before.positions[:, 0]) / self.step_s
        never = torch.zeros(self.num_envs, dtype=torch.bool, device=self.device)
        return speeds - self._CONTROL_COST * actions.square().sum(1), never
