"""Policies of LeRobot's library, by family."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rlhpc.embodied.config import ModelConfig
from rlhpc.embodied.config.model_options import LerobotDiffusionOptions, LerobotFlowOptions, LerobotPiOptions
from rlhpc.embodied.envs.observations import boxes_of
from rlhpc.embodied.models.action_heads import GaussianHead
from rlhpc.embodied.models.base import Guide, Obs, Policy, Velocity
from rlhpc.embodied.models.flow import Flow, NoisyVelocity
from rlhpc.embodied.models.lerobot.base import DenoisingPolicy, LerobotPolicy
from rlhpc.embodied.models.lerobot.checkpoint import describe
from rlhpc.embodied.models.normalization import AlohaJoints
from rlhpc.embodied.models.vlm import DeepValueHead
from rlhpc.runtime.errors import ConfigError

_LOG_2PI = math.log(2 * math.pi)


class ActPolicy(LerobotPolicy):
    """ACT policy of LeRobot; the value head takes the mean of the encoder's outputs for the observation.

    `actor.model` takes the keys of `LerobotPolicy`, and `log_std_init`.
    """

    def __init__(self, cfg: ModelConfig, observation_space: Any, action_space: Any) -> None:
        super().__init__(cfg, observation_space, action_space)
        self.head = GaussianHead(self.dim, cfg.log_std_init, self.chunk)

    def value_input_size(self) -> int:
        """Returns the width of the encoder's outputs (`LerobotPolicy.value_input_size`)."""
        return int(self.inner.config.dim_model)

    def features(self, obs: Any, policy: bool, value: bool) -> tuple[Tensor | None, Tensor | None]:
        """Returns the normalised chunk and the values (`Policy.features`)."""
        batch = self.batch(obs)
        if self.inner.config.image_features:
            batch["observation.images"] = [batch[name] for name in self.inner.config.image_features]
        encodings: list[Tensor] = []
        with self.eval_mode() as lerobot_policy:
            hook = lerobot_policy.model.encoder.register_forward_hook(
                lambda module, args, module_output: encodings.append(module_output)
            )
            try:
                chunk: Tensor = lerobot_policy.model(batch)[0]
            finally:
                hook.remove()
        mean = chunk[:, : self.chunk].flatten(1) if policy else None
        return mean, self._values(encodings[0].mean(0)) if value else None

    def default_forward(self, inputs: dict[str, Any], *args: bool, **kwargs: bool) -> dict[str, Tensor]:
        """Runs the training pass (`Policy.default_forward`); `inputs["scaled"]` are the normalised actions from
        `predict_action_batch`.
        """
        return super().default_forward({**inputs, "actions": inputs.get("scaled")}, *args, **kwargs)

    def predict_action_batch(
        self, obs: Obs, mode: str = "train", noise: Tensor | None = None
    ) -> tuple[Tensor, dict[str, Any]]:
        """Chooses actions for a batch of observations (`Policy.predict_action_batch`)."""
        scaled_actions, action_extras = Policy.predict_action_batch(self, obs, mode, noise)
        return self.processors.postprocess(scaled_actions), {**action_extras, "inputs": {"scaled": scaled_actions}}


class DiffusionPolicy(DenoisingPolicy):
    """Diffusion Policy of LeRobot; the value head takes the denoising network's conditioning on the observation.

    `actor.model` takes the keys of `LerobotPolicy`; `kwargs` are `LerobotDiffusionOptions`.

    Raises:
        ConfigError: `num_steps` is above the number of training timesteps.
    """

    def __init__(self, cfg: ModelConfig, observation_space: Any, action_space: Any) -> None:
        super().__init__(cfg, observation_space, action_space)
        model = self.inner.diffusion
        options = self.description.options
        assert isinstance(options, LerobotDiffusionOptions)
        self.steps, self.noise_level = options.num_steps or int(model.num_inference_steps), options.noise_level
        max_steps = int(model.noise_scheduler.config.num_train_timesteps)
        if self.steps > max_steps:
            raise ConfigError(f"actor.model.kwargs.num_steps is {self.steps}; it must lie between 1 and {max_steps}")
        model.num_inference_steps = self.steps
        model.noise_scheduler.set_timesteps(self.steps)
        self._times = [int(t) for t in model.noise_scheduler.timesteps]
        self._stds = [max(self.noise_level, math.sqrt(self._compute_coefficients(t)[2])) for t in self._times]

    def value_input_size(self) -> int:
        """Returns the width of the conditioning (`LerobotPolicy.value_input_size`)."""
        model = self.inner.diffusion
        return int(model.unet.down_modules[0][0].cond_encoder[1].in_features) - int(
            model.config.diffusion_step_embed_dim
        )

    @property
    def state_shape(self) -> tuple[int, int]:
        """Horizon of the network and width of an action (`DenoisingPolicy.state_shape`)."""
        return int(self.inner.config.horizon), self.dim

    # -- steps ----------------------------------------------------------------------------------------------------

    def _compute_coefficients(self, t: int) -> tuple[float, float, float]:
        """Returns the coefficients of x_0 and x_t in the posterior mean at `t`, and the posterior variance."""
        scheduler = self.inner.diffusion.noise_scheduler
        previous_t = t - int(scheduler.config.num_train_timesteps) // self.steps
        current_alpha = float(scheduler.alphas_cumprod[t])
        previous_alpha = float(scheduler.alphas_cumprod[previous_t]) if previous_t >= 0 else 1.0
        ratio = current_alpha / previous_alpha
        predicted_scale, state_scale = (
            math.sqrt(previous_alpha) * (1 - ratio) / (1 - current_alpha),
            math.sqrt(ratio) * (1 - previous_alpha) / (1 - current_alpha),
        )
        return predicted_scale, state_scale, (1 - previous_alpha) / (1 - current_alpha) * (1 - ratio)

    def _run_unet(self, encoding: Tensor, x: Tensor, t: int) -> Tensor:
        return self.inner.diffusion.unet(x, x.new_full((len(x),), t, dtype=torch.long), global_cond=encoding)

    def _compute_posterior_mean(self, encoding: Tensor, x: Tensor, t: int) -> Tensor:
        """Returns the posterior mean of the step from `t`."""
        scheduler = self.inner.diffusion.noise_scheduler
        prediction, alpha = self._run_unet(encoding, x, t), float(scheduler.alphas_cumprod[t])
        if scheduler.config.prediction_type == "epsilon":
            prediction = (x - math.sqrt(1 - alpha) * prediction) / math.sqrt(alpha)
        if scheduler.config.clip_sample:
            clip_range = float(scheduler.config.clip_sample_range)
            prediction = prediction.clamp(-clip_range, clip_range)
        predicted_scale, state_scale, _ = self._compute_coefficients(t)
        return predicted_scale * prediction + state_scale * x

    def add_time_axis(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Adds the time axis to single observations (`LerobotPolicy.add_time_axis`)."""
        if self.oldest_obs_offset:
            return batch
        return {name: tensor[:, None] if name.startswith("observation.") else tensor for name, tensor in batch.items()}

    # -- acting and training --------------------------------------------------------------------------------------

    def encode(self, obs: Obs) -> tuple[Tensor, Tensor]:
        """Returns the denoising network's conditioning `[B, width]` as encoding and as the value head's input
        (`DenoisingPolicy.encode`).
        """
        rows, config = self.add_time_axis(self.batch(obs)), self.inner.config
        if config.image_features:
            rows["observation.images"] = torch.stack([rows[name] for name in config.image_features], -4)
        conditioning: Tensor = self.inner.diffusion._prepare_global_conditioning(rows)
        return conditioning, conditioning

    def chain(self, encoding: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the chain of states and its log-probabilities (`DenoisingPolicy.chain`)."""
        chain_states, logprobs = [noise[:, 0]], torch.zeros_like(noise[:, 0])
        for k, (t, std) in enumerate(zip(self._times, self._stds, strict=True)):
            mean = self._compute_posterior_mean(encoding, chain_states[-1], t)
            chain_states.append(mean + std * noise[:, k + 1])
            logprobs = self._add_logprobs(logprobs, chain_states[-1], mean, std)
        return torch.stack(chain_states, 1), logprobs

    def chain_logprobs(self, encoding: Tensor, chain: Tensor) -> Tensor:
        """Returns log-probabilities of the steps (`DenoisingPolicy.chain_logprobs`)."""
        logprobs = torch.zeros_like(chain[:, 0])
        for k, (t, std) in enumerate(zip(self._times, self._stds, strict=True)):
            mean = self._compute_posterior_mean(encoding, chain[:, k], t)
            logprobs = self._add_logprobs(logprobs, chain[:, k + 1], mean, std)
        return logprobs

    @staticmethod
    def _add_logprobs(logprobs: Tensor, states: Tensor, mean: Tensor, std: float) -> Tensor:
        return logprobs - 0.5 * ((states - mean) / std) ** 2 - math.log(std) - 0.5 * _LOG_2PI

    def noise_entropy(self) -> float:
        """Returns the entropy of the steps' noise (`DenoisingPolicy.noise_entropy`)."""
        return sum(math.log(std) + 0.5 + 0.5 * _LOG_2PI for std in self._stds)

    def denoise(self, encoding: Tensor, x: Tensor) -> Tensor:
        """Denoises by the scheduler's steps for DDIM, otherwise by the posterior means (`DenoisingPolicy.denoise`)."""
        scheduler = self.inner.diffusion.noise_scheduler
        is_ddim = type(scheduler).__name__ == "DDIMScheduler"
        for t in self._times:
            x = (
                scheduler.step(self._run_unet(encoding, x, t), t, x).prev_sample
                if is_ddim
                else self._compute_posterior_mean(encoding, x, t)
            )
        return x


class LeRobotFlowPolicy(DenoisingPolicy):
    """Flow policy of LeRobot whose configuration has `chunk_size` and `max_action_dim`; subclasses encode observations.

    `actor.model` takes the keys of `LerobotPolicy`; `kwargs` are `LerobotFlowOptions`.
    """

    #: Key of K in the folder's config.json.
    steps_key: str

    def __init__(self, cfg: ModelConfig, observation_space: Any, action_space: Any) -> None:
        super().__init__(cfg, observation_space, action_space)
        options = self.description.options
        assert isinstance(options, LerobotFlowOptions)
        self.steps = options.num_steps or int(getattr(self.inner.config, self.steps_key))
        self.flow = Flow(self.steps, options.noise_level, one_step=options.noise_steps == "one")

    @property
    def state_shape(self) -> tuple[int, int]:
        """Chunk size of the network and width of its padded actions (`DenoisingPolicy.state_shape`)."""
        return int(self.inner.config.chunk_size), int(self.inner.config.max_action_dim)

    def chain(self, encoding: Velocity, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the chain of states and its log-probabilities (`DenoisingPolicy.chain`)."""
        return self.flow.act(encoding, noise[:, 1:], noise[:, 0])

    def chain_logprobs(self, encoding: Velocity, chain: Tensor) -> Tensor:
        """Returns log-probabilities of the steps (`DenoisingPolicy.chain_logprobs`)."""
        return self.flow.logprobs(encoding, chain)

    def noise_entropy(self) -> float:
        """Returns the entropy of the steps' noise (`DenoisingPolicy.noise_entropy`)."""
        return self.flow.entropy()

    @property
    def horizon(self) -> int:
        """Number of actions that the network predicts (`Policy.horizon`)."""
        return self.state_shape[0]

    def plan(self, obs: Obs, guide: Guide | None = None, noise: Tensor | None = None) -> Tensor:
        """Predicts a chunk as in evaluation (`Policy.plan`)."""
        with self.eval_mode():
            velocity, value_input = self.encode(obs)
            return self.denoise_for_evaluation(velocity if guide is None else guide(velocity), value_input, obs, noise)

    def decode_plan(self, plan: Tensor, part: slice) -> Tensor:
        """Returns the environment's actions for a slice of a plan (`Policy.decode_plan`)."""
        return self.processors.postprocess(plan[:, part, : self.dim])

    def denoise(self, encoding: Velocity, x: Tensor) -> Tensor:
        """Denoises with the same arithmetic as LeRobot (`DenoisingPolicy.denoise`)."""
        dt = -1.0 / self.steps
        for k in range(self.steps):
            x = x + dt * encoding(x, x.new_full((len(x),), 1.0 + k * dt))
        return x


class _PiVelocity:
    """Velocity of π0 for encoded observations, which also records the inputs of the value head.

    Attributes:
        features: Means of the action expert's hidden states `[B, width]`, of each call.
    """

    def __init__(self, policy: PiPolicy, state_inputs: list[Tensor], mask: Tensor, cache: Any) -> None:
        self._policy, self._prefix = policy, (*state_inputs, mask, cache)
        self.features: list[Tensor] = []

    def __call__(self, x: Tensor, t: Tensor) -> Tensor:
        """Returns velocities `[B, chunk, dim]`."""
        return self.with_noise(x, t)[0]

    def with_noise(self, x: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        """Returns velocities, and logarithms of the learned standard deviations if the policy has a noise head, otherwise the
        velocities again.
        """
        model, hidden_states = self._policy.inner.model, list[Tensor]()
        hook_handle = model.action_out_proj.register_forward_pre_hook(
            lambda module, args: hidden_states.append(args[0])
        )
        try:
            velocity: Tensor = model.denoise_step(*self._prefix, x, t)
        finally:
            hook_handle.remove()
        if self._policy.values_need_chain:
            self.features.append(hidden_states[0].float().mean(1))
        noise_head = self._policy.noise_head
        return velocity, velocity if noise_head is None else noise_head(hidden_states[0])


def _find_recording_velocity(encoding: Any) -> _PiVelocity:
    """Returns the velocity behind an encoding of `PiPolicy`."""
    bound_method: Any = encoding.network if isinstance(encoding, NoisyVelocity) else None
    velocity: _PiVelocity = encoding if bound_method is None else bound_method.__self__
    return velocity


class NoiseHead(nn.Module):
    """Learned noise of denoising steps (ReinFlow, Zhang et al. 2025): the logarithm of a standard deviation within a range,
    of each component of an action.

    Args:
        width: Width of the hidden states.
        outputs: Number of components of an action.
        noise_range: Lowest and highest standard deviation.
    """

    def __init__(self, width: int, outputs: int, noise_range: Sequence[float]) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(width, 128), nn.Tanh(), nn.Linear(128, 64), nn.Tanh(), nn.Linear(64, outputs)
        )
        self._low, self._high = (math.log(std) for std in noise_range)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Returns log standard deviations `[B, chunk, outputs]` for hidden states `[B, chunk, width]`."""
        std_position = (torch.tanh(self.layers(hidden_states.float())) + 1) / 2
        return self._low + (self._high - self._low) * std_position


class PiPolicy(LeRobotFlowPolicy):
    """π0 or π0.5 of LeRobot, with a value head on `value_input`, and optionally a learned noise.

    `actor.model` takes the keys of `LerobotPolicy`; `kwargs` are `LerobotPiOptions`.

    Raises:
        ConfigError: `adapt_to_pi` or `delta_actions` does not fit the sizes of state and action.
    """

    steps_key = "num_inference_steps"
    pi_options: LerobotPiOptions

    def __init__(self, cfg: ModelConfig, observation_space: Any, action_space: Any) -> None:
        super().__init__(cfg, observation_space, action_space)
        options = self.description.options
        assert isinstance(options, LerobotPiOptions)
        self.pi_options = options
        self.values_need_chain = options.value_input == "action_expert" and cfg.add_value_head
        if cfg.add_value_head and options.value_hidden:
            self.value_head = DeepValueHead(self.value_input_size(), self.value_width, options.value_hidden)
        self.noise_head: NoiseHead | None = None
        if options.noise_method == "flow_noise":
            self.noise_head = NoiseHead(self._expert_width, self.state_shape[1], options.noise_range)
        reads_state = bool(options.delta_actions or options.adapt_to_pi)
        state_width = math.prod(boxes_of(observation_space)[self._state_source].shape) if reads_state else 0
        if options.adapt_to_pi and (state_width, self.dim) != (AlohaJoints.width, AlohaJoints.width):
            raise ConfigError(
                f"actor.model.kwargs.adapt_to_pi is true, which needs a state and actions of {AlohaJoints.width} components, "
                f"those of two ALOHA arms; these have {state_width} and {self.dim}"
            )
        if options.delta_actions and max(options.delta_actions) >= min(self.dim, state_width):
            raise ConfigError(
                f"actor.model.kwargs.delta_actions is {list(options.delta_actions)}; actions have {self.dim} components and "
                f"the state {state_width}, counted from 0"
            )

    @property
    def _has_state(self) -> bool:
        """True if the action expert takes the robot's state."""
        return self.description.family == "pi0"

    @property
    def _state_source(self) -> str:
        """Entry of the environment's observations that feeds the state."""
        obs_sources = [obs_source for obs_source in self.description.sources.values() if obs_source is not None]
        if not obs_sources:
            raise ConfigError(
                "actor.model.kwargs: delta_actions and adapt_to_pi need a state, which "
                f"{self.description.path} does not take"
            )
        return obs_sources[0]

    @property
    def _expert_width(self) -> int:
        return int(self.inner.model.action_out_proj.in_features)

    def value_input_size(self) -> int:
        """Returns the width of the value head's input (`LerobotPolicy.value_input_size`)."""
        options = self.description.options
        assert isinstance(options, LerobotPiOptions)
        if options.value_input == "action_expert":
            return self._expert_width
        width = int(self.inner.model.paligemma_with_expert.paligemma.config.text_config.hidden_size)
        has_state = self._has_state and options.value_input == "last_token"
        return width + (int(self.inner.config.max_state_dim) if has_state else 0)

    def encode(self, obs: Obs) -> tuple[Velocity, Tensor]:
        """Encodes observations; returns the velocity function for the denoising steps, and the value head's input
        (`DenoisingPolicy.encode`).
        """
        from lerobot.policies.pi0.modeling_pi0 import make_att_2d_masks

        lerobot_policy, model, batch = self.inner, self.inner.model, self.batch(obs)
        token_ids, token_mask = (batch[f"observation.language.{name}"] for name in ("tokens", "attention_mask"))
        prefix_embeddings, mask, causal = model.embed_prefix(
            *lerobot_policy._preprocess_images(batch), token_ids, token_mask
        )
        paligemma_with_expert = model.paligemma_with_expert
        # As in `sample_actions`, which computes no gradients in its other steps.
        paligemma_with_expert.paligemma.language_model.config._attn_implementation = "eager"
        (prefix_hidden, _), cache = paligemma_with_expert.forward(
            attention_mask=model._prepare_attention_masks_4d(make_att_2d_masks(mask, causal)),
            position_ids=mask.cumsum(1) - 1,
            inputs_embeds=[prefix_embeddings, None],
            use_cache=True,
        )
        state_inputs = [lerobot_policy.prepare_state(batch)] if self._has_state else []
        velocity = _PiVelocity(self, state_inputs, mask, cache)
        value_input = self._build_value_input(prefix_hidden, mask, token_ids.shape[1], state_inputs)
        if self.noise_head is None:
            return velocity, value_input
        return NoisyVelocity(velocity.with_noise), value_input

    def _build_value_input(
        self, prefix: Tensor, mask: Tensor, prompt_tokens: int, state_inputs: list[Tensor]
    ) -> Tensor:
        """Returns the value head's input from PaliGemma's hidden states `[B, tokens, width]`, which end with the prompt's."""
        input_kind = self.pi_options.value_input
        if input_kind == "mean_token":
            included_mask = mask.clone()
            included_mask[:, -prompt_tokens:] = True
            weights = included_mask.to(prefix.dtype)[..., None]
            value_input = (prefix * weights).sum(1) / weights.sum(1)
        elif input_kind == "first_token":
            value_input = prefix[:, 0]
        else:
            last_token = (mask * torch.arange(mask.shape[1], device=mask.device)).argmax(1)
            value_input = prefix[torch.arange(len(prefix)), last_token]
            value_input = torch.cat([value_input.float(), *state_inputs], 1)
        return value_input.detach().float() if self.pi_options.detach_value_input else value_input.float()

    def chain_values(self, encoding: Any, value_input: Tensor) -> Tensor:
        """Returns the mean of the values in the computed denoising steps, or the values of the encoded observations
        (`DenoisingPolicy.chain_values`).
        """
        if not self.values_need_chain:
            return self._values(value_input)
        velocity = _find_recording_velocity(encoding)
        features = torch.stack(velocity.features, 1)
        velocity.features = []
        if self.pi_options.detach_value_input:
            features = features.detach()
        return self._values(features).mean(1)

    def features(self, obs: Any, policy: bool, value: bool) -> tuple[Tensor | None, Tensor | None]:
        """Returns None in place of the head's input, and the values (`Policy.features`). Values that depend on denoising steps
        are computed from a chain with the same noise for all observations, so that they do not depend on the batch.
        """
        if not (value and self.values_need_chain):
            return super().features(obs, policy, value)
        with self.eval_mode():
            encoding, value_input = self.encode(obs)
            noise = self.sample_noise((1,), torch.Generator().manual_seed(0)).to(value_input.device)
            self.chain(encoding, noise.expand(len(value_input), *noise.shape[1:]))
            return None, self.chain_values(encoding, value_input)

    def chain(self, encoding: Any, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the chain of states and its log-probabilities (`DenoisingPolicy.chain`)."""
        chain, logprobs = super().chain(encoding, noise)
        return chain, self._with_start(logprobs, -0.5 * chain[:, 0] ** 2 - 0.5 * _LOG_2PI)

    def evaluate_chain(self, encoding: Any, chain: Tensor) -> tuple[Tensor, Tensor]:
        """Returns log-probabilities and entropies over the steps (`DenoisingPolicy.evaluate_chain`)."""
        velocity = _find_recording_velocity(encoding)
        velocity.features = []
        logprobs, entropy = self.flow.evaluate(encoding, chain)
        logprobs = self._with_start(logprobs, -0.5 * chain[:, 0] ** 2 - 0.5 * _LOG_2PI)
        return logprobs, self._with_start(entropy, 0.5 + 0.5 * _LOG_2PI)

    def _with_start(self, step_sum: Tensor, start: Tensor | float) -> Tensor:
        """Returns a sum over the steps, or with `step_logprobs: mean` the mean over the steps and the start noise. This noise
        has a density that no weight changes, and counts as a step.
        """
        if self.pi_options.step_logprobs == "sum":
            return step_sum
        return (step_sum + start) / (self.steps + 1 if not self.flow.one_step else 2)

    # -- actions in another space than the robot's ----------------------------------------------------------------

    def _state_vector(self, array: Tensor) -> Tensor:
        state_vector = super()._state_vector(array)
        return AlohaJoints.state_to_pi(state_vector) if self.pi_options.adapt_to_pi else state_vector

    def _offsets(self, obs: Obs) -> Tensor:
        """Returns the offsets that are added to the network's actions, `[B, 1, dim]`."""
        state_source = self._state_source
        state_vector = self._state_vector(obs[state_source] if isinstance(obs, dict) else obs)
        offsets = state_vector.new_zeros(len(state_vector), 1, self.dim)
        components = list(self.pi_options.delta_actions)
        offsets[:, 0, components] = state_vector[:, components]
        return offsets

    def _executed_actions(self, actions: Tensor, obs: Obs) -> Tensor:
        executed_actions = super()._executed_actions(actions, obs)
        if self.pi_options.delta_actions:
            executed_actions = executed_actions + self._offsets(obs)
        return AlohaJoints.actions_from_pi(executed_actions) if self.pi_options.adapt_to_pi else executed_actions

    def batch(self, obs: Obs, actions: Tensor | None = None, is_pad: Tensor | None = None) -> dict[str, Any]:
        """Converts observations and actions to the network's inputs (`LerobotPolicy.batch`)."""
        if actions is not None:
            actions = actions.reshape(len(actions), -1, self.dim).float()
            if self.pi_options.adapt_to_pi:
                actions = AlohaJoints.actions_to_pi(actions)
            if self.pi_options.delta_actions:
                actions = actions - self._offsets(obs)
        return super().batch(obs, actions, is_pad)

    def plan(self, obs: Obs, guide: Guide | None = None, noise: Tensor | None = None) -> Tensor:
        """Predicts a chunk as in evaluation (`Policy.plan`).

        Raises:
            ConfigError: Actions are relative to the state, which differs between the chunks, or in another space than the
                robot's.
        """
        if self.pi_options.adapt_to_pi:
            raise ConfigError(
                "env.eval.real_time_chunking: a chunk cannot be continued in π0's joint space "
                "(actor.model.kwargs.adapt_to_pi); set env.eval.real_time_chunking.inference_delay=null"
            )
        if self.pi_options.delta_actions:
            raise ConfigError(
                "env.eval.real_time_chunking: actions relative to the state (actor.model.kwargs.delta_actions) cannot be "
                "continued from another state; set env.eval.real_time_chunking.inference_delay=null"
            )
        return super().plan(obs, guide, noise)


class SmolVlaPolicy(LeRobotFlowPolicy):
    """SmolVLA of LeRobot; the value head takes the vision-language model's hidden state of its last token, which encodes the
    robot's state.
    """

    steps_key = "num_steps"

    def value_input_size(self) -> int:
        """Returns the width of the hidden state (`LerobotPolicy.value_input_size`)."""
        return int(self.inner.model.vlm_with_expert.config.text_config.hidden_size)

    def encode(self, obs: Obs) -> tuple[Velocity, Tensor]:
        """Returns the velocity for an observation, and the value head's input (`DenoisingPolicy.encode`)."""
        from lerobot.policies.smolvla.modeling_smolvla import make_att_2d_masks

        lerobot_policy, batch = self.inner, self.batch(obs)
        images, image_mask = lerobot_policy.prepare_images(batch)
        token_ids, token_mask = (batch[f"observation.language.{name}"] for name in ("tokens", "attention_mask"))
        prefix_embeddings, mask, causal = lerobot_policy.model.embed_prefix(
            images, image_mask, token_ids, token_mask, state=lerobot_policy.prepare_state(batch)
        )
        (prefix_hidden, _), cache = lerobot_policy.model.vlm_with_expert.forward(
            attention_mask=make_att_2d_masks(mask, causal),
            position_ids=mask.cumsum(1) - 1,
            past_key_values=None,
            inputs_embeds=[prefix_embeddings, None],
            use_cache=True,
            fill_kv_cache=True,
        )

        def compute_velocity(x: Tensor, t: Tensor) -> Tensor:
            return lerobot_policy.model.denoise_step(mask, cache, x, t)

        last_token = (mask * torch.arange(mask.shape[1], device=mask.device)).argmax(1)
        return compute_velocity, prefix_hidden[torch.arange(len(prefix_hidden)), last_token].float()


_POLICY_CLASSES: dict[str, type[LerobotPolicy]] = {
    "act": ActPolicy, "diffusion": DiffusionPolicy, "smolvla": SmolVlaPolicy, "pi0": PiPolicy, "pi05": PiPolicy,
}  # fmt: skip


def lerobot_policy(cfg: ModelConfig, observation_space: Any, action_space: Any) -> LerobotPolicy:
    """Builds the policy of any supported family from the folder `actor.model.model_path`.

    Raises:
        ConfigError: The policy cannot be loaded, or was made for another task.
    """
    return _POLICY_CLASSES[describe(cfg, observation_space, action_space).family](cfg, observation_space, action_space)
