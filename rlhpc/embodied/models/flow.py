"""Flow matching for action chunks, with log-probabilities of the integration steps.

The path between an action chunk x_0 and noise x_1 ~ N(0, 1) is x_t = (1 − t)·x_0 + t·x_1; a network learns the velocity
v = x_1 − x_0 (Lipman et al. 2023; time runs in the same direction as in π0, Black et al. 2024). Acting integrates from
t = 1 to 0 in K Euler steps. This is deterministic, so reinforcement learning integrates a stochastic equation with the same
marginals (Flow-SDE: Flow-GRPO, Liu et al. 2025; π_RL, Chen et al. 2025):

    x_{t−dt} ~ N(x_t − [v + σ²/(2t)·(x_t + (1 − t)·v)]·dt,  σ²·dt),    σ = noise_level·√(t / (1 − t)),

with 1 − t at least 1/K. The log-probability of a chunk is the sum over all K steps, given x_1.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from rlhpc.embodied.config import PolicyConfig
from rlhpc.embodied.config.model_options import DenoisingOptions, FlowOptions, model_options
from rlhpc.embodied.envs.observations import count_rows
from rlhpc.embodied.models.action_heads import sum_to_level
from rlhpc.embodied.models.base import Guide, Obs, Policy, Velocity
from rlhpc.embodied.models.cnn import build_obs_encoder, encode_obs
from rlhpc.embodied.models.mlp import flat_width, mlp, normalizes_observations
from rlhpc.embodied.models.normalization import ObservationNormaliser
from rlhpc.runtime.errors import ConfigError

_LOG_2PI = math.log(2 * math.pi)
_TIME_FEATURES = 32


class Flow:
    """Integrator of a flow from noise to actions in K steps.

    Args:
        steps: K.
        noise_level: Scale of σ; 0 gives the deterministic equation, which has no log-probabilities.
    """

    def __init__(self, steps: int, noise_level: float) -> None:
        self.steps = steps
        self.noise_level = noise_level
        self.times = [1 - k / steps for k in range(steps)]

    def moments(self, x: Tensor, v: Tensor, t: float) -> tuple[Tensor, float]:
        """Returns mean `[B, chunk, dim]` and standard deviation of the step from `t`."""
        dt = 1 / self.steps
        variance = self.noise_level**2 * t / max(1 - t, dt)
        drift = v + variance / (2 * t) * (x + (1 - t) * v)
        return x - drift * dt, math.sqrt(variance * dt)

    def act(self, velocity: Velocity, noise: Tensor | None, start: Tensor) -> Tensor:
        """Returns all states of the K steps, `[B, K + 1, chunk, dim]`; the last state holds the actions.

        Args:
            velocity: Velocity of the policy.
            noise: Noise of the steps, `[B, K, chunk, dim]`; None integrates deterministically.
            start: x_1, `[B, chunk, dim]`.
        """
        states = [start]
        for k, t in enumerate(self.times):
            x = states[-1]
            v = velocity(x, x.new_full((x.shape[0],), t))
            if noise is None:
                states.append(x - v / self.steps)
            else:
                mean, std = self.moments(x, v, t)
                states.append(mean + std * noise[:, k])
        return torch.stack(states, 1)

    def logprobs(self, velocity: Velocity, states: Tensor) -> Tensor:
        """Returns log-probabilities per component, summed over the steps, `[B, chunk, dim]`."""
        logprobs = torch.zeros_like(states[:, 0])
        for k, t in enumerate(self.times):
            x = states[:, k]
            mean, std = self.moments(x, velocity(x, x.new_full((x.shape[0],), t)), t)
            logprobs = logprobs - 0.5 * ((states[:, k + 1] - mean) / std) ** 2 - math.log(std) - 0.5 * _LOG_2PI
        return logprobs

    def entropy(self) -> float:
        """Returns the entropy per component, summed over the steps; it depends only on K and `noise_level`."""
        zero_state = torch.zeros(1, 1, 1)
        stds = [self.moments(zero_state, zero_state, t)[1] for t in self.times]
        return sum(math.log(std) + 0.5 + 0.5 * _LOG_2PI for std in stds)


class BaseFlowPolicy(Policy):
    """Policy that generates actions by a flow. Subclasses implement `prepare`, which encodes an observation once for all
    steps.

    The networks use actions scaled to [−1, 1] by the bounds of the action space, if it has bounds.
    """

    has_head = False
    #: Dataclass of `actor.model.kwargs`.
    options_type: type[DenoisingOptions] = DenoisingOptions
    low: Tensor
    high: Tensor

    def __init__(self, cfg: PolicyConfig, observation_space: Any, action_space: Any) -> None:
        super().__init__(cfg, observation_space, action_space)
        if not isinstance(action_space, spaces.Box):
            raise ConfigError(f"model_type {cfg.model_type!r} needs continuous actions; these are {action_space}")
        self.options: DenoisingOptions = model_options(self.options_type, cfg)
        self.flow = Flow(self.options.num_steps, self.options.noise_level)
        self.dim = math.prod(action_space.shape)
        low, high = action_bounds(action_space)
        self.register_buffer("low", low, persistent=False)
        self.register_buffer("high", high, persistent=False)

    @property
    def state_shape(self) -> tuple[int, int]:
        """Chunk size and action width of the flow's states; their first `chunk` rows and `dim` columns are the policy's
        actions.
        """
        return self.chunk, self.dim

    def prepare(self, obs: Obs, policy: bool, value: bool) -> tuple[Velocity | None, Tensor | None]:
        """Returns the velocity for an observation if `policy`, and values if `value`."""
        raise NotImplementedError

    def features(self, obs: Any, policy: bool, value: bool) -> tuple[Tensor | None, Tensor | None]:
        """Returns None in place of the head's input, and the values (`Policy.features`)."""
        return None, self.prepare(obs, False, value)[1]

    def default_forward(
        self,
        inputs: dict[str, Any],
        compute_logprobs: bool = True,
        compute_entropy: bool = False,
        compute_values: bool = False,
    ) -> dict[str, Tensor]:
        """Runs the training pass (`Policy.default_forward`); `inputs["chain"]` holds the states from
        `predict_action_batch`.
        """
        velocity, values = self.prepare(inputs["obs"], compute_logprobs, compute_values)
        outputs: dict[str, Tensor] = {}
        if velocity is not None:
            outputs["logprobs"] = self._sum_components(self.flow.logprobs(velocity, inputs["chain"]))
        if compute_entropy:
            entropies = self.low.new_full((count_rows(inputs["obs"]), self.chunk, self.dim), self.flow.entropy())
            outputs["entropy"] = sum_to_level(entropies, self.logprob_type, self.chunk)
        if values is not None:
            outputs["values"] = values
        return outputs

    def predict_action_batch(
        self, obs: Obs, mode: str = "train", noise: Tensor | None = None
    ) -> tuple[Tensor, dict[str, Any]]:
        """Chooses actions (`Policy.predict_action_batch`). "eval" integrates deterministically from x_1."""
        velocity, values = self.prepare(obs, True, True)
        assert velocity is not None and values is not None
        if mode == "eval":
            chain = self._eval_chain(velocity, obs, noise)
        else:
            noise = self.noise_for(obs, noise, values.device)
            chain = self.flow.act(velocity, noise[:, 1:], noise[:, 0])
        actions = self.played(chain[:, -1], slice(self.chunk))
        logprobs = self._sum_components(self.flow.logprobs(velocity, chain))
        return actions, {"prev_logprobs": logprobs, "prev_values": values, "inputs": {"chain": chain}}

    @property
    def horizon(self) -> int:
        """Length of the chunk (`Policy.horizon`)."""
        return self.chunk

    def plan(self, obs: Obs, guide: Guide | None = None, noise: Tensor | None = None) -> Tensor:
        """Predicts a chunk as in evaluation (`Policy.plan`)."""
        velocity, _ = self.prepare(obs, True, False)
        assert velocity is not None  # the velocity was requested
        return self._eval_chain(velocity if guide is None else guide(velocity), obs, noise)[:, -1]

    def _eval_chain(self, velocity: Velocity, obs: Obs, noise: Tensor | None) -> Tensor:
        """Returns all states of deterministic integration, as in evaluation."""
        return self.flow.act(velocity, None, self.start_for(obs, noise, self.low.device))

    @property
    def start_shape(self) -> tuple[int, ...]:
        """Shape of x_1 (`Policy.start_shape`)."""
        return self.state_shape

    def played(self, plan: Tensor, part: slice) -> Tensor:
        """Returns the environment's actions for a slice of a plan (`Policy.played`)."""
        return self.unscaled(plan[:, part, : self.dim])

    def sample_noise(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """Draws standard normal noise `[*shape, K + 1, *state_shape]`: x_1, then the noise of the steps."""
        return torch.randn((*shape, self.flow.steps + 1, *self.state_shape), generator=generator)

    def bc_loss(self, inputs: dict[str, Any]) -> Tensor:
        """Returns the loss of conditional flow matching, `[B]`: the squared error of the velocity at a random time. Noise and
        times come from torch's default generator.
        """
        actions = self.scaled(inputs["actions"].reshape(-1, self.chunk, self.dim))
        velocity, _ = self.prepare(inputs["obs"], True, False)
        assert velocity is not None  # the velocity was requested
        rows, device = len(actions), actions.device
        noise, target = (
            torch.randn(rows, *self.state_shape).to(device),
            torch.zeros(rows, *self.state_shape, device=device),
        )
        target[:, : self.chunk, : self.dim] = actions
        times = self.draw_times(rows).to(device)
        t = times[:, None, None]
        error = (velocity((1 - t) * target + t * noise, times) - (noise - target))[:, : self.chunk, : self.dim]
        return error.square().mean((1, 2))

    def draw_times(self, rows: int) -> Tensor:
        """Draws training times `[rows]` from torch's default generator; 0 stands for actions, 1 for noise."""
        return torch.rand(rows)

    def scaled(self, actions: Tensor) -> Tensor:
        """Converts actions to [−1, 1] for the flow."""
        return 2 * (actions - self.low) / (self.high - self.low) - 1

    def unscaled(self, actions: Tensor) -> Tensor:
        """Inverts `scaled`: returns actions in the environment's units."""
        return self.low + (actions + 1) / 2 * (self.high - self.low)

    def _sum_components(self, logprobs: Tensor) -> Tensor:
        return sum_to_level(logprobs[:, : self.chunk, : self.dim], self.logprob_type, self.chunk)


def action_bounds(box: spaces.Box) -> tuple[Tensor, Tensor]:
    """Returns the lower and upper bounds `[dim]` of actions. Unbounded components get the bounds −1 and 1."""
    is_bounded = np.isfinite(box.low) & np.isfinite(box.high)
    low, high = np.where(is_bounded, box.low, -1), np.where(is_bounded, box.high, 1)
    return torch.from_numpy(low.reshape(-1).astype(np.float32)), torch.from_numpy(high.reshape(-1).astype(np.float32))


class FlowPolicy(BaseFlowPolicy):
    """Flow policy for state vectors, or for images with a convolutional encoder. `actor.model.kwargs` are `FlowOptions`."""

    options_type = FlowOptions
    options: FlowOptions

    def __init__(self, cfg: PolicyConfig, observation_space: Any, action_space: Any) -> None:
        super().__init__(cfg, observation_space, action_space)
        sizes, activation, orthogonal = list(cfg.hidden_sizes), cfg.activation, cfg.ortho_init
        self.encoder = build_obs_encoder(cfg, observation_space, action_space, self.options)
        width = flat_width(observation_space) if self.encoder is None else self.encoder.hidden
        if self.encoder is None and normalizes_observations(cfg):
            self.normaliser = ObservationNormaliser(width)
        self.critic = mlp([width, *sizes], self.value_width, activation, orthogonal, 1.0)
        inputs = width + self.chunk * self.dim + _TIME_FEATURES
        self.velocity = mlp([inputs, *sizes], self.chunk * self.dim, activation, orthogonal, 1.0)

    def prepare(self, obs: Obs, policy: bool, value: bool) -> tuple[Velocity | None, Tensor | None]:
        """Encodes observations once for all steps of the flow (`BaseFlowPolicy.prepare`)."""
        encoded = encode_obs(self.encoder, obs)
        if self.normaliser is not None:
            encoded = self.normaliser(encoded)

        def velocity(x: Tensor, t: Tensor) -> Tensor:
            return self.velocity(torch.cat([encoded, x.flatten(1), _time_features(t)], 1)).reshape(x.shape)

        return velocity if policy else None, self.critic(encoded).squeeze(-1) if value else None


def _time_features(t: Tensor) -> Tensor:
    phases = t[:, None] * torch.exp(torch.linspace(0, math.log(100), _TIME_FEATURES // 2, device=t.device))
    return torch.cat([phases.sin(), phases.cos()], 1)
