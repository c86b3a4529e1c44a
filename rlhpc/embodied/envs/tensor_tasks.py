"""Built-in environments of tensors: Gymnasium's cart-pole and pendulum, for all slots at once."""

from __future__ import annotations

import math

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from rlhpc.embodied.envs.tensor_env import TensorEnv, TensorStep, choose_rows, draw_uniform


class _StateEnv(TensorEnv):
    """Environment whose complete state is one tensor, `[N, ...]`."""

    state: Tensor

    def state_dict(self) -> dict[str, Tensor]:
        """Returns the state (`TensorEnv.state_dict`)."""
        return {"state": self.state}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Restores the state (`TensorEnv.load_state_dict`)."""
        self.state = state["state"]


class CartPole(_StateEnv):
    """Cart-pole with the constants of `CartPole-v1`: a pole on a cart that is pushed to the left or to the right."""

    observation_space = spaces.Box(-np.inf, np.inf, (4,), np.float32)
    action_space = spaces.Discrete(2)
    max_episode_steps = 500

    _GRAVITY, _POLE_MASS, _TOTAL_MASS, _HALF_LENGTH = 9.8, 0.1, 1.1, 0.5
    _FORCE, _STEP_S = 10.0, 0.02
    _MAX_POSITION, _MAX_ANGLE = 2.4, 12 * 2 * math.pi / 360

    def __init__(self, num_envs: int, device: torch.device) -> None:
        super().__init__(num_envs, device)
        #: Position, velocity, angle and angular velocity.
        self.state = torch.zeros(num_envs, 4, device=device)

    def reset(self, mask: Tensor, seeds: Tensor) -> Tensor:
        """Starts at four numbers between -0.05 and 0.05 (`TensorEnv.reset`)."""
        self.state = choose_rows(mask, draw_uniform(seeds, 4) * 0.1 - 0.05, self.state)
        return self.state

    def step(self, actions: Tensor) -> TensorStep:
        """Pushes the carts (`TensorEnv.step`). Every step's reward is 1; a fallen pole or a cart at the edge terminates."""
        position, velocity, angle, angular_velocity = self.state.unbind(1)
        force = self._FORCE * (2.0 * actions - 1.0)
        pole_moment = self._POLE_MASS * self._HALF_LENGTH
        cosine, sine = angle.cos(), angle.sin()
        push = (force + pole_moment * angular_velocity.square() * sine) / self._TOTAL_MASS
        inertia = self._HALF_LENGTH * (4.0 / 3.0 - self._POLE_MASS * cosine.square() / self._TOTAL_MASS)
        angular_acceleration = (self._GRAVITY * sine - cosine * push) / inertia
        acceleration = push - pole_moment * angular_acceleration * cosine / self._TOTAL_MASS
        changes = torch.stack([velocity, acceleration, angular_velocity, angular_acceleration], 1)
        self.state = self.state + self._STEP_S * changes
        has_fallen = (self.state[:, 0].abs() > self._MAX_POSITION) | (self.state[:, 2].abs() > self._MAX_ANGLE)
        return self.state, torch.ones_like(position), has_fallen, torch.zeros_like(has_fallen), {}


class Pendulum(_StateEnv):
    """Pendulum with the constants of `Pendulum-v1`: it is swung up by a torque and never terminates.

    Args:
        g: Gravitational acceleration.
    """

    observation_space = spaces.Box(
        np.array([-1, -1, -8], np.float32), np.array([1, 1, 8], np.float32), dtype=np.float32
    )
    action_space = spaces.Box(-2.0, 2.0, (1,), np.float32)
    max_episode_steps = 200

    _MAX_SPEED, _STEP_S = 8.0, 0.05

    def __init__(self, num_envs: int, device: torch.device, g: float = 10.0) -> None:
        super().__init__(num_envs, device)
        self._gravity = g
        #: Angle and angular velocity.
        self.state = torch.zeros(num_envs, 2, device=device)

    def reset(self, mask: Tensor, seeds: Tensor) -> Tensor:
        """Starts at any angle, with a speed between -1 and 1 (`TensorEnv.reset`)."""
        angle, speed = (draw_uniform(seeds, 2) * 2.0 - 1.0).unbind(1)
        self.state = choose_rows(mask, torch.stack([math.pi * angle, speed], 1), self.state)
        return self._observe()

    def _observe(self) -> Tensor:
        angle, speed = self.state.unbind(1)
        return torch.stack([angle.cos(), angle.sin(), speed], 1)

    def step(self, actions: Tensor) -> TensorStep:
        """Turns the pendulums (`TensorEnv.step`). The reward is lower for large angles, speeds and torques."""
        angle, speed = self.state.unbind(1)
        torque = actions[:, 0]
        deviation = torch.remainder(angle + math.pi, 2 * math.pi) - math.pi
        costs = deviation.square() + 0.1 * speed.square() + 0.001 * torque.square()
        speed = speed + (1.5 * self._gravity * angle.sin() + 3.0 * torque) * self._STEP_S
        speed = speed.clamp(-self._MAX_SPEED, self._MAX_SPEED)
        self.state = torch.stack([angle + speed * self._STEP_S, speed], 1)
        truncations = torch.zeros(self.num_envs, dtype=torch.bool, device=self.device)
        return self._observe(), -costs, truncations, truncations, {}
