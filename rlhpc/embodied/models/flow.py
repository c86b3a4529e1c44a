"""Flow matching for action chunks, with log-probabilities of the integration steps.

The path between an action chunk x_0 and noise x_1 ~ N(0, 1) is x_t = (1 − t)·x_0 + t·x_1; a network learns the velocity
v = x_1 − x_0 (Lipman et al. 2023; time runs in the same direction as in π0, Black et al. 2024). Acting integrates from
t = 1 to 0 in K Euler steps. This is deterministic, so reinforcement learning integrates a stochastic equation with the same
marginals (Flow-SDE: Flow-GRPO, Liu et al. 2025; π_RL, Chen et al. 2025):

    x_{t−dt} ~ N(x_t − [v + σ²/(2t)·(x_t + (1 − t)·v)]·dt,  σ²·dt),    σ = noise_level·√(t / (1 − t)),

with 1 − t at least 1/K. Alternatively the network learns the noise of its steps (flow-noise: ReinFlow, Zhang et al. 2025;
π_RL):

    x_{t−dt} ~ N(x_t − v·dt,  σ²),    σ = σ(x_t, t, observation) within `noise_range`.

The log-probability of a chunk is the sum over all K steps, given x_1. With `noise_steps: one` a single step of each chunk
is stochastic, drawn uniformly, and the others are deterministic; its log-probability is that of the chunk (π_RL).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn

from rlhpc.embodied.config import PolicyConfig
from rlhpc.embodied.config.model_options import DenoisingOptions, FlowOptions, model_options
from rlhpc.embodied.models.action_heads import sum_to_level
from rlhpc.embodied.models.base import Guide, Obs, Policy, Velocity
from rlhpc.embodied.models.cnn import build_obs_encoder, encode_obs
from rlhpc.embodied.models.mlp import flat_width, mlp, normalizes_observations
from rlhpc.embodied.models.normalization import ObservationNormaliser
from rlhpc.runtime.errors import ConfigError

_LOG_2PI = math.log(2 * math.pi)
_TIME_FEATURES = 32


@dataclass(frozen=True)
class NoisyVelocity:
    """Velocity of a network that also learns the noise of its steps.

    Attributes:
        network: Function from states `[B, chunk, dim]` and times `[B]` to velocities and logarithms of standard deviations,
            both `[B, chunk, dim]`.
    """

    network: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]

    def __call__(self, x: Tensor, t: Tensor) -> Tensor:
        """Returns velocities `[B, chunk, dim]`."""
        return self.network(x, t)[0]


class Flow:
    """Integrator of a flow from noise to actions in K steps.

    Args:
        num_steps: K.
        noise_level: Scale of σ; 0 gives the deterministic equation, which has no log-probabilities. A `NoisyVelocity` brings
            its own noise.
        one_step: True adds noise in one step of each chain alone.
    """

    def __init__(self, num_steps: int, noise_level: float, one_step: bool = False) -> None:
        self.num_steps = num_steps
        self.noise_level = noise_level
        self.one_step = one_step
        self.times = [1 - k / num_steps for k in range(num_steps)]

    def moments(self, x: Tensor, v: Tensor, t: float) -> tuple[Tensor, float]:
        """Returns mean `[B, chunk, dim]` and standard deviation of the step of Flow-SDE from `t`."""
        dt = 1 / self.num_steps
        variance = self.noise_level**2 * t / max(1 - t, dt)
        drift = v + variance / (2 * t) * (x + (1 - t) * v)
        return x - drift * dt, math.sqrt(variance * dt)

    def _step(self, velocity: Velocity, x: Tensor, t: float) -> tuple[Tensor, Tensor, Tensor | float, Tensor | float]:
        """Returns velocity, mean, standard deviation and its logarithm of the step from `t`."""
        times = x.new_full((x.shape[0],), t)
        if isinstance(velocity, NoisyVelocity):
            v, log_std = velocity.network(x, times)
            return v, x - v / self.num_steps, log_std.exp(), log_std
        v = velocity(x, times)
        mean, std = self.moments(x, v, t)
        return v, mean, std, math.log(std)

    def act(self, velocity: Velocity, noise: Tensor | None, start: Tensor) -> tuple[Tensor, Tensor]:
        """Integrates in K steps; the velocity is computed once in each.

        Args:
            velocity: Velocity of the policy.
            noise: Noise of the steps, `[B, K, chunk, dim]`; None integrates deterministically.
            start: x_1, `[B, chunk, dim]`.

        Returns:
            All states, `[B, K + 1, chunk, dim]`, whose last holds the actions; with `one_step` the states before and after the
            stochastic step, its number, and the actions, `[B, 4, chunk, dim]`. And the log-probabilities of these states
            (`logprobs`).
        """
        if self.one_step:
            return self._act_with_one_step(velocity, noise, start)
        chain_states, logprobs = [start], torch.zeros_like(start)
        for k, t in enumerate(self.times):
            x = chain_states[-1]
            v, mean, std, log_std = self._step(velocity, x, t)
            chain_states.append(x - v / self.num_steps if noise is None else mean + std * noise[:, k])
            logprobs = _add_logprobs(logprobs, chain_states[-1], mean, std, log_std)
        return torch.stack(chain_states, 1), logprobs

    def _act_with_one_step(self, velocity: Velocity, noise: Tensor | None, flow_start: Tensor) -> tuple[Tensor, Tensor]:
        """Integrates with the first step's noise in the drawn step of each row. The number of the step comes from a component
        of the last step's noise, which is used for nothing else unless K is 1.
        """
        zero_times = flow_start.new_zeros(flow_start.shape[0], 1, 1)
        if noise is not None:
            uniform = torch.special.ndtr(noise[:, -1:, :1, 0].double())
            zero_times = (uniform * self.num_steps).floor().clamp(max=self.num_steps - 1).to(flow_start.dtype)
        x = previous_state = next_state = flow_start
        logprobs = torch.zeros_like(flow_start)
        for k in range(self.num_steps):
            is_sampled = zero_times == k
            # The same arithmetic as in training, so that the first importance ratios are 1.
            t = 1 - torch.full_like(zero_times, k) / self.num_steps
            v, mean, log_std = self._step_of_rows(velocity, x, t)
            next_x = x - v / self.num_steps
            if noise is not None:
                next_x = torch.where(is_sampled, mean + log_std.exp() * noise[:, 0], next_x)
            step_logprobs = _add_logprobs(torch.zeros_like(x), next_x, mean, log_std.exp(), log_std)
            previous_state, next_state, logprobs = (
                torch.where(is_sampled, x, previous_state),
                torch.where(is_sampled, next_x, next_state),
                torch.where(is_sampled, step_logprobs, logprobs),
            )
            x = next_x
        return torch.stack([previous_state, next_state, zero_times.expand_as(x), x], 1), logprobs

    def _step_of_rows(self, velocity: Velocity, x: Tensor, t: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns velocity, mean and logarithm of the standard deviation of the steps from times `[B, 1, 1]`."""
        if isinstance(velocity, NoisyVelocity):
            v, log_std = velocity.network(x, t[:, 0, 0])
            return v, x - v / self.num_steps, log_std
        v = velocity(x, t[:, 0, 0])
        variance = self.noise_level**2 * t / (1 - t).clamp(min=1 / self.num_steps)
        drift = v + variance / (2 * t) * (x + (1 - t) * v)
        return v, x - drift / self.num_steps, 0.5 * (variance / self.num_steps).log()

    def logprobs(self, velocity: Velocity, states: Tensor) -> Tensor:
        """Returns log-probabilities per component, summed over the steps, `[B, chunk, dim]`."""
        return self.evaluate(velocity, states)[0]

    def evaluate(self, velocity: Velocity, states: Tensor) -> tuple[Tensor, Tensor]:
        """Returns log-probabilities and entropies per component, both summed over the steps, `[B, chunk, dim]`.

        The entropies are those of the steps' noise given the states; with learned noise, their mean over chains is the entropy
        of the chain.
        """
        if self.one_step:
            return self._evaluate_one_step(velocity, states)
        logprobs = torch.zeros_like(states[:, 0])
        log_stds = list[Tensor]()
        for k, t in enumerate(self.times):
            _, mean, std, log_std = self._step(velocity, states[:, k], t)
            logprobs = _add_logprobs(logprobs, states[:, k + 1], mean, std, log_std)
            log_stds += [log_std] if isinstance(log_std, Tensor) else []
        if not log_stds:
            return logprobs, torch.full_like(logprobs, self.entropy())
        return logprobs, torch.stack(log_stds).sum(0) + self.num_steps * (0.5 + 0.5 * _LOG_2PI)

    def _evaluate_one_step(self, velocity: Velocity, chain_states: Tensor) -> tuple[Tensor, Tensor]:
        """Returns log-probabilities and entropies of the stochastic steps, with one pass of the network for all rows."""
        t = 1 - chain_states[:, 2, :1, :1] / self.num_steps
        _, mean, log_std = self._step_of_rows(velocity, chain_states[:, 0], t)
        log_std = log_std.expand_as(mean)
        logprobs = _add_logprobs(torch.zeros_like(mean), chain_states[:, 1], mean, log_std.exp(), log_std)
        return logprobs, log_std + 0.5 + 0.5 * _LOG_2PI

    def entropy(self) -> float:
        """Returns the entropy of Flow-SDE per component, summed over the steps; it depends only on K and `noise_level`. With
        `one_step`, returns the mean over the steps.
        """
        zero_state = torch.zeros(1, 1, 1)
        stds = [self.moments(zero_state, zero_state, t)[1] for t in self.times]
        total_entropy = sum(math.log(std) + 0.5 + 0.5 * _LOG_2PI for std in stds)
        return total_entropy / self.num_steps if self.one_step else total_entropy


def _add_logprobs(
    logprobs: Tensor, states: Tensor, mean: Tensor, std: Tensor | float, log_std: Tensor | float
) -> Tensor:
    """Adds the log-densities of a step's states under its normal distribution."""
    return logprobs - 0.5 * ((states - mean) / std) ** 2 - log_std - 0.5 * _LOG_2PI


class BaseFlowPolicy(Policy):
    """Policy that generates actions by a flow. Subclasses implement `prepare`, which encodes an observation once for all
    steps.

    The networks use actions scaled to [−1, 1] by the bounds of the action space, if it has bounds.

    Raises:
        ConfigError: The action space is not continuous.
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
        self.flow = Flow(self.options.num_steps, self.options.noise_level, one_step=self.options.noise_steps == "one")
        self.dim = math.prod(action_space.shape)
        low_bounds, high_bounds = action_bounds(action_space)
        self.register_buffer("low", low_bounds, persistent=False)
        self.register_buffer("high", high_bounds, persistent=False)

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
        velocity, predicted_values = self.prepare(inputs["obs"], compute_logprobs or compute_entropy, compute_values)
        outputs: dict[str, Tensor] = {}
        if velocity is not None:
            logprobs, entropies = self.flow.evaluate(velocity, inputs["chain"])
            if compute_logprobs:
                outputs["logprobs"] = self._sum_components(logprobs)
            if compute_entropy:
                outputs["entropy"] = self._sum_components(entropies)
        if predicted_values is not None:
            outputs["values"] = predicted_values
        return outputs

    def predict_action_batch(
        self, obs: Obs, mode: str = "train", noise: Tensor | None = None
    ) -> tuple[Tensor, dict[str, Any]]:
        """Chooses actions (`Policy.predict_action_batch`). "eval" integrates deterministically from x_1."""
        velocity, predicted_values = self.prepare(obs, True, True)
        assert velocity is not None and predicted_values is not None
        if mode == "eval":
            chain, logprobs = self._integrate_for_evaluation(velocity, obs, noise)
        else:
            noise = self.noise_for(obs, noise, predicted_values.device)
            chain, logprobs = self.flow.act(velocity, noise[:, 1:], noise[:, 0])
        actions = self.decode_plan(chain[:, -1], slice(self.chunk))
        return actions, {
            "prev_logprobs": self._sum_components(logprobs),
            "prev_values": predicted_values,
            "inputs": {"chain": chain},
        }

    @property
    def horizon(self) -> int:
        """Length of the chunk (`Policy.horizon`)."""
        return self.chunk

    def plan(self, obs: Obs, guide: Guide | None = None, noise: Tensor | None = None) -> Tensor:
        """Predicts a chunk as in evaluation (`Policy.plan`)."""
        velocity, _ = self.prepare(obs, True, False)
        assert velocity is not None  # the velocity was requested
        chain, _ = self._integrate_for_evaluation(velocity if guide is None else guide(velocity), obs, noise)
        return chain[:, -1]

    def _integrate_for_evaluation(self, velocity: Velocity, obs: Obs, noise: Tensor | None) -> tuple[Tensor, Tensor]:
        """Returns the result of deterministic integration (`Flow.act`)."""
        return self.flow.act(velocity, None, self.start_for(obs, noise, self.low.device))

    @property
    def start_shape(self) -> tuple[int, ...]:
        """Shape of x_1 (`Policy.start_shape`)."""
        return self.state_shape

    def decode_plan(self, plan: Tensor, part: slice) -> Tensor:
        """Returns the environment's actions for a slice of a plan (`Policy.decode_plan`)."""
        return self.unscaled(plan[:, part, : self.dim])

    def sample_noise(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """Draws standard normal noise `[*shape, K + 1, *state_shape]`: x_1, then the noise of the steps."""
        return torch.randn(
            (*shape, self.flow.num_steps + 1, *self.state_shape), generator=generator, device=generator.device
        )

    def bc_loss(self, inputs: dict[str, Any]) -> Tensor:
        """Returns the loss of conditional flow matching, `[B]`: the squared error of the velocity at a random time. Noise and
        times come from torch's default generator.
        """
        actions = self.scaled(inputs["actions"].reshape(-1, self.chunk, self.dim))
        velocity, _ = self.prepare(inputs["obs"], True, False)
        assert velocity is not None  # the velocity was requested
        num_rows, device = len(actions), actions.device
        noise, target = (
            torch.randn(num_rows, *self.state_shape).to(device),
            torch.zeros(num_rows, *self.state_shape, device=device),
        )
        target[:, : self.chunk, : self.dim] = actions
        times = self.draw_times(num_rows).to(device)
        t = times[:, None, None]
        error = (velocity((1 - t) * target + t * noise, times) - (noise - target))[:, : self.chunk, : self.dim]
        return error.square().mean((1, 2))

    def draw_times(self, num_rows: int) -> Tensor:
        """Draws training times `[rows]` from torch's default generator; 0 stands for actions, 1 for noise."""
        return torch.rand(num_rows)

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
    low_bounds, high_bounds = np.where(is_bounded, box.low, -1), np.where(is_bounded, box.high, 1)
    return torch.from_numpy(low_bounds.reshape(-1).astype(np.float32)), torch.from_numpy(
        high_bounds.reshape(-1).astype(np.float32)
    )


class FlowPolicy(BaseFlowPolicy):
    """Flow policy for state vectors, or for images with a convolutional encoder. `actor.model.kwargs` are `FlowOptions`."""

    options_type = FlowOptions
    start_options = ("weights",)
    options: FlowOptions

    def __init__(self, cfg: PolicyConfig, observation_space: Any, action_space: Any) -> None:
        super().__init__(cfg, observation_space, action_space)
        hidden_sizes, activation, is_orthogonal = list(cfg.hidden_sizes), cfg.activation, cfg.ortho_init
        self.encoder = build_obs_encoder(cfg, observation_space, action_space, self.options)
        width = flat_width(observation_space) if self.encoder is None else self.encoder.hidden
        if self.encoder is None and normalizes_observations(cfg):
            self.normaliser = ObservationNormaliser(width)
        self.critic = mlp([width, *hidden_sizes], self.value_width, activation, is_orthogonal, 1.0)
        self._learns_noise = self.options.noise_method == "flow_noise"
        self._log_std_range = [math.log(std) for std in self.options.noise_range]
        outputs = self.dim * (2 if self._learns_noise else 1)
        if self.options.network == "transformer":
            self.velocity: nn.Module = _Transformer(width, self.chunk, self.dim, outputs, self.options)
        else:
            inputs = width + self.chunk * self.dim + _TIME_FEATURES
            self.velocity = mlp([inputs, *hidden_sizes], self.chunk * outputs, activation, is_orthogonal, 1.0)

    def prepare(self, obs: Obs, policy: bool, value: bool) -> tuple[Velocity | None, Tensor | None]:
        """Encodes observations once for all steps of the flow (`BaseFlowPolicy.prepare`)."""
        encoding = encode_obs(self.encoder, obs)
        if self.normaliser is not None:
            encoding = self.normaliser(encoding)

        def predict(x: Tensor, t: Tensor) -> Tensor:
            if isinstance(self.velocity, _Transformer):
                outputs: Tensor = self.velocity(encoding, x, t)
            else:
                outputs = self.velocity(torch.cat([encoding, x.flatten(1), _encode_time(t)], 1))
            return outputs.reshape(*x.shape[:2], -1)

        def predict_with_noise(x: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
            v, noise = predict(x, t).chunk(2, -1)
            min_log_std, max_log_std = self._log_std_range
            return v, min_log_std + 0.5 * (max_log_std - min_log_std) * (torch.tanh(noise) + 1)

        velocity: Velocity = NoisyVelocity(predict_with_noise) if self._learns_noise else predict
        return velocity if policy else None, self.critic(encoding).squeeze(-1) if value else None


class _Transformer(nn.Module):
    """Transformer decoder: the actions of a chunk attend to each other and to the observation."""

    def __init__(self, width: int, chunk: int, dim: int, num_outputs: int, options: FlowOptions) -> None:
        super().__init__()
        self.observation = nn.Linear(width, options.width)
        self.action = nn.Linear(dim, options.width)
        self.time = nn.Linear(_TIME_FEATURES, options.width)
        self.position = nn.Parameter(0.02 * torch.randn(chunk, options.width))
        self.layers = nn.ModuleList(
            nn.TransformerDecoderLayer(
                options.width, options.heads, 4 * options.width, dropout=0.0, activation="gelu", batch_first=True,
                norm_first=True,
            )
            for _ in range(options.layers)
        )  # fmt: skip
        self.norm = nn.LayerNorm(options.width)
        self.output = nn.Linear(options.width, num_outputs)

    def forward(self, encoding: Tensor, x: Tensor, t: Tensor) -> Tensor:
        """Returns outputs `[B, chunk, outputs]` for observations `[B, width]`, states `[B, chunk, dim]` and times `[B]`."""
        memory = self.observation(encoding)[:, None]
        hidden_states = self.action(x) + self.time(_encode_time(t))[:, None] + self.position
        for layer in self.layers:
            hidden_states = layer(hidden_states, memory)
        outputs: Tensor = self.output(self.norm(hidden_states))
        return outputs


def _encode_time(t: Tensor) -> Tensor:
    phases = t[:, None] * torch.exp(torch.linspace(0, math.log(100), _TIME_FEATURES // 2, device=t.device))
    return torch.cat([phases.sin(), phases.cos()], 1)
