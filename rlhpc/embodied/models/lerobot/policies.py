"""Policies of LeRobot's library, by family."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlhpc.embodied.config import ModelConfig
from rlhpc.embodied.config.model_options import LerobotDiffusionOptions, LerobotFlowOptions
from rlhpc.embodied.envs.observations import count_rows, decode_text
from rlhpc.embodied.models.action_heads import GaussianHead, sum_to_level
from rlhpc.embodied.models.base import Guide, Obs, Policy, Velocity
from rlhpc.embodied.models.flow import Flow
from rlhpc.embodied.models.lerobot import checkpoint as folder
from rlhpc.embodied.models.lerobot import library
from rlhpc.embodied.models.lerobot.checkpoint import FAMILIES, describe
from rlhpc.embodied.models.vlm import ValueHead
from rlhpc.runtime.errors import ConfigError


class LerobotPolicy(Policy):
    """Policy of LeRobot's library. A subclass implements acting and the value head's input.

    `actor.model`: `model_path`, `num_action_chunks` (number of predicted actions that are executed), `add_value_head`;
    `kwargs` are `LerobotOptions`.

    Attributes:
        inner: The policy of LeRobot's library.
    """

    has_head = False
    inner: Any

    def __init__(self, cfg: ModelConfig, observation_space: Any, action_space: Any) -> None:
        super().__init__(cfg, observation_space, action_space)
        self.description = folder.describe(cfg, observation_space, action_space)
        self.dim = math.prod(action_space.shape)
        options = self.description.options
        vlm, task = (options.vlm, options.task) if isinstance(options, LerobotFlowOptions) else (None, None)
        self.inner = library.load(self.description, vlm)
        self.processors = library.Processors(self.description, self.inner.config, options.statistics, vlm)
        self._task = task or ""
        self.value_head = ValueHead(self.value_inputs(), self.value_width) if cfg.add_value_head else None

    def value_inputs(self) -> int:
        """Returns the width of the value head's input."""
        raise NotImplementedError

    @property
    def imitated(self) -> range:
        """Offsets of the actions that behaviour cloning learns (`Policy.imitated`): the offsets of all actions that the
        network predicts, beginning at its oldest observation.
        """
        return range(
            self.oldest_obs_offset,
            self.oldest_obs_offset + int(getattr(self.inner.config, FAMILIES[self.description.family])),
        )

    @property
    def oldest_obs_offset(self) -> int:
        """Offset of the policy's oldest input observation from the current one; 0 or negative."""
        return 1 - self.description.num_obs_steps

    # -- inputs ---------------------------------------------------------------------------------------------------

    def batch(self, obs: Obs, actions: Tensor | None = None, is_pad: Tensor | None = None) -> dict[str, Any]:
        """Converts observations, and actions if given, to the inputs of LeRobot's networks: normalised, by name, with
        one image per camera.

        Args:
            obs: Observations of the environment; `[B, num_obs_steps, ...]` if the network takes several steps.
            actions: `[B, imitated, dim]`, in the environment's units.
            is_pad: `[B, imitated]`, true for actions outside the episode; by default, all actions are inside.
        """
        obs_arrays = obs if isinstance(obs, dict) else {"": obs}
        batch: dict[str, Any] = {}
        for name, source in self.description.sources.items():
            batch[name] = (
                self._camera_images(name, obs_arrays) if source is None else self._state_vector(obs_arrays[source])
            )
        batch["task"] = self._task_texts(obs_arrays, count_rows(obs))
        if actions is not None:
            batch["action"] = actions.reshape(len(actions), -1, self.dim).float()
            batch["action_is_pad"] = torch.zeros(batch["action"].shape[:2], dtype=torch.bool, device=actions.device)
            if is_pad is not None:
                batch["action_is_pad"] = is_pad
        return self.processors.preprocess(batch)

    def add_time_axis(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Returns the batch. A subclass adds a time axis to observations if its network needs the axis."""
        return batch

    def _state_vector(self, array: Tensor) -> Tensor:
        return array.flatten(1 if self.description.num_obs_steps == 1 else 2).float()

    def _camera_images(self, name: str, obs_arrays: dict[str, Tensor]) -> Tensor:
        """Returns the images of a camera input, channels first, with values from 0 to 1."""
        key, camera_index = self.description.cameras[name]
        return (
            obs_arrays[key][..., 3 * camera_index : 3 * camera_index + 3].movedim(-1, -3).float() / 255
        ).contiguous()

    def _task_texts(self, obs_arrays: dict[str, Tensor], rows: int) -> list[str]:
        if "instruction" not in obs_arrays:
            return [self._task] * rows
        instructions = (
            obs_arrays["instruction"] if self.description.num_obs_steps == 1 else obs_arrays["instruction"][:, -1]
        )
        return [decode_text(bytes(row)) for row in instructions.cpu().numpy()]

    @contextmanager
    def eval_mode(self) -> Iterator[Any]:
        """Yields LeRobot's policy without dropout and random crops, so that acting and training compute the same
        log-probs.
        """
        was_training = self.inner.training
        self.inner.eval()
        try:
            yield self.inner
        finally:
            self.inner.train(was_training)

    # -- training and export --------------------------------------------------------------------------------------

    def bc_loss(self, inputs: dict[str, Any]) -> Tensor:
        """Returns the loss of behaviour cloning (`Policy.bc_loss`): LeRobot's loss, which is a mean over the rows, repeated
        for each row.
        """
        batch = self.add_time_axis(self.batch(inputs["obs"], inputs["actions"], inputs.get("is_pad")))
        self.inner.train()
        return self.inner(batch)[0].expand(len(inputs["actions"]))

    def release(self, target: Path, step: int) -> None:
        """Writes the policy with LeRobot's `save_pretrained`, and its processors."""
        del step
        self.inner.save_pretrained(target)
        self.processors.save(target)


class ActPolicy(LerobotPolicy):
    """ACT policy of LeRobot; the value head takes the mean of the encoder's outputs for the observation.

    `actor.model` takes the keys of `LerobotPolicy`, and `log_std_init`.
    """

    def __init__(self, cfg: ModelConfig, observation_space: Any, action_space: Any) -> None:
        super().__init__(cfg, observation_space, action_space)
        self.head = GaussianHead(self.dim, cfg.log_std_init, self.chunk)

    def value_inputs(self) -> int:
        """Returns the width of the encoder's outputs (`LerobotPolicy.value_inputs`)."""
        return int(self.inner.config.dim_model)

    def features(self, obs: Any, policy: bool, value: bool) -> tuple[Tensor | None, Tensor | None]:
        """Returns the normalised chunk and the values (`Policy.features`)."""
        batch = self.batch(obs)
        if self.inner.config.image_features:
            batch["observation.images"] = [batch[name] for name in self.inner.config.image_features]
        encoded: list[Tensor] = []
        with self.eval_mode() as inner:
            hook = inner.model.encoder.register_forward_hook(lambda module, args, out: encoded.append(out))
            try:
                chunk: Tensor = inner.model(batch)[0]
            finally:
                hook.remove()
        mean = chunk[:, : self.chunk].flatten(1) if policy else None
        return mean, self._values(encoded[0].mean(0)) if value else None

    def default_forward(self, inputs: dict[str, Any], *args: bool, **kwargs: bool) -> dict[str, Tensor]:
        """Runs the training pass (`Policy.default_forward`); `inputs["scaled"]` are the normalised actions from
        `predict_action_batch`.
        """
        return super().default_forward({**inputs, "actions": inputs.get("scaled")}, *args, **kwargs)

    def predict_action_batch(
        self, obs: Obs, mode: str = "train", noise: Tensor | None = None
    ) -> tuple[Tensor, dict[str, Any]]:
        """Chooses actions for a batch of observations (`Policy.predict_action_batch`)."""
        scaled, extras = Policy.predict_action_batch(self, obs, mode, noise)
        return self.processors.postprocess(scaled), {**extras, "inputs": {"scaled": scaled}}


class DenoisingPolicy(LerobotPolicy):
    """Policy that denoises actions step by step. The states form a chain `[B, K + 1, *state_shape]`. The
    log-probability of a chunk is the log-probability of the chain, restricted to the executed actions. Evaluation
    denoises deterministically.

    Attributes:
        steps: K, number of denoising steps.
    """

    steps: int

    @property
    @abstractmethod
    def state_shape(self) -> tuple[int, int]:
        """Shape of a state: number of actions that the network predicts, and width of an action, which may be padded."""

    @abstractmethod
    def encode(self, obs: Obs) -> tuple[Any, Tensor]:
        """Encodes observations once; returns the encoding for the denoising steps, and the value head's input `[B, width]`."""

    @abstractmethod
    def chain(self, encoded: Any, noise: Tensor) -> Tensor:
        """Returns the chain of states `[B, K + 1, *state_shape]` for noise of the same shape."""

    @abstractmethod
    def chain_logprobs(self, encoded: Any, chain: Tensor) -> Tensor:
        """Returns log-probabilities `[B, *state_shape]`, summed over all steps."""

    @abstractmethod
    def noise_entropy(self) -> float:
        """Returns the entropy of the noise of all steps, per component of a state; the entropy is constant."""

    @abstractmethod
    def denoise(self, encoded: Any, x: Tensor) -> Tensor:
        """Denoises a state deterministically to normalised actions `[B, *state_shape]`."""

    def denoise_for_evaluation(self, encoded: Any, hidden: Tensor, obs: Obs, noise: Tensor | None) -> Tensor:
        """Returns the actions for evaluation, denoised from rows of `sample_start`."""
        return self.denoise(encoded, self.start_for(obs, noise, hidden.device))

    @property
    def start_shape(self) -> tuple[int, ...]:
        """Shape of a state (`Policy.start_shape`)."""
        return self.state_shape

    def features(self, obs: Any, policy: bool, value: bool) -> tuple[Tensor | None, Tensor | None]:
        """Returns None in place of the head's input, and the values (`Policy.features`)."""
        with self.eval_mode():
            return None, self._values(self.encode(obs)[1]) if value else None

    def default_forward(
        self,
        inputs: dict[str, Any],
        compute_logprobs: bool = True,
        compute_entropy: bool = False,
        compute_values: bool = False,
    ) -> dict[str, Tensor]:
        """Runs the training pass (`Policy.default_forward`); `inputs["chain"]` are the states from
        `predict_action_batch`.
        """
        outputs: dict[str, Tensor] = {}
        with self.eval_mode():
            encoded, hidden = self.encode(inputs["obs"])
            if compute_logprobs:
                outputs["logprobs"] = self._sum_components(self.chain_logprobs(encoded, inputs["chain"]))
        if compute_entropy:
            outputs["entropy"] = self._sum_components(
                hidden.new_full((len(hidden), *self.state_shape), self.noise_entropy())
            )
        if compute_values:
            outputs["values"] = self._values(hidden)
        return outputs

    def predict_action_batch(
        self, obs: Obs, mode: str = "train", noise: Tensor | None = None
    ) -> tuple[Tensor, dict[str, Any]]:
        """Chooses actions for a batch of observations (`Policy.predict_action_batch`); evaluations denoise
        deterministically.
        """
        with self.eval_mode():
            encoded, hidden = self.encode(obs)
            values = self._values(hidden)
            if mode == "eval":
                return self._executed_actions(self.denoise_for_evaluation(encoded, hidden, obs, noise)), {
                    "prev_values": values
                }
            chain = self.chain(encoded, self.noise_for(obs, noise, hidden.device))
            logprobs = self._sum_components(self.chain_logprobs(encoded, chain))
        return self._executed_actions(chain[:, -1]), {
            "prev_logprobs": logprobs,
            "prev_values": values,
            "inputs": {"chain": chain},
        }

    def sample_noise(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """Draws standard normal noise `[*shape, K + 1, *state_shape]`: the initial state, and the noise of each step."""
        return torch.randn((*shape, self.steps + 1, *self.state_shape), generator=generator)

    def _executed_actions(self, actions: Tensor) -> Tensor:
        return self.processors.postprocess(self._select_executed(actions))

    def _sum_components(self, values: Tensor) -> Tensor:
        return sum_to_level(self._select_executed(values), self.logprob_type, self.chunk)

    def _select_executed(self, values: Tensor) -> Tensor:
        """Returns the executed actions, which begin at the current observation; the prediction begins at the oldest
        one.
        """
        return values[:, -self.oldest_obs_offset : self.chunk - self.oldest_obs_offset, : self.dim]


_LOG_2PI = math.log(2 * math.pi)


class DiffusionPolicy(DenoisingPolicy):
    """Diffusion Policy of LeRobot; the value head takes the denoising network's conditioning on the observation.

    `actor.model` takes the keys of `LerobotPolicy`; `kwargs` are `LerobotDiffusionOptions`.
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
        self._stds = [max(self.noise_level, math.sqrt(self._coefficients(t)[2])) for t in self._times]

    def value_inputs(self) -> int:
        """Returns the width of the conditioning (`LerobotPolicy.value_inputs`)."""
        model = self.inner.diffusion
        return int(model.unet.down_modules[0][0].cond_encoder[1].in_features) - int(
            model.config.diffusion_step_embed_dim
        )

    @property
    def state_shape(self) -> tuple[int, int]:
        """Horizon of the network and width of an action (`DenoisingPolicy.state_shape`)."""
        return int(self.inner.config.horizon), self.dim

    # -- steps ----------------------------------------------------------------------------------------------------

    def _coefficients(self, t: int) -> tuple[float, float, float]:
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

    def _run_unet(self, encoded: Tensor, x: Tensor, t: int) -> Tensor:
        return self.inner.diffusion.unet(x, x.new_full((len(x),), t, dtype=torch.long), global_cond=encoded)

    def _posterior_mean(self, encoded: Tensor, x: Tensor, t: int) -> Tensor:
        """Returns the posterior mean of the step from `t`."""
        scheduler = self.inner.diffusion.noise_scheduler
        prediction, alpha = self._run_unet(encoded, x, t), float(scheduler.alphas_cumprod[t])
        if scheduler.config.prediction_type == "epsilon":
            prediction = (x - math.sqrt(1 - alpha) * prediction) / math.sqrt(alpha)
        if scheduler.config.clip_sample:
            clip_range = float(scheduler.config.clip_sample_range)
            prediction = prediction.clamp(-clip_range, clip_range)
        predicted_scale, state_scale, _ = self._coefficients(t)
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

    def chain(self, encoded: Tensor, noise: Tensor) -> Tensor:
        """Returns the chain of states (`DenoisingPolicy.chain`)."""
        states = [noise[:, 0]]
        for k, (t, std) in enumerate(zip(self._times, self._stds, strict=True)):
            states.append(self._posterior_mean(encoded, states[-1], t) + std * noise[:, k + 1])
        return torch.stack(states, 1)

    def chain_logprobs(self, encoded: Tensor, chain: Tensor) -> Tensor:
        """Returns log-probabilities of the steps (`DenoisingPolicy.chain_logprobs`)."""
        logprobs = torch.zeros_like(chain[:, 0])
        for k, (t, std) in enumerate(zip(self._times, self._stds, strict=True)):
            deviation = (chain[:, k + 1] - self._posterior_mean(encoded, chain[:, k], t)) / std
            logprobs = logprobs - 0.5 * deviation**2 - math.log(std) - 0.5 * _LOG_2PI
        return logprobs

    def noise_entropy(self) -> float:
        """Returns the entropy of the steps' noise (`DenoisingPolicy.noise_entropy`)."""
        return sum(math.log(std) + 0.5 + 0.5 * _LOG_2PI for std in self._stds)

    def denoise(self, encoded: Tensor, x: Tensor) -> Tensor:
        """Denoises by the scheduler's steps for DDIM, otherwise by the posterior means (`DenoisingPolicy.denoise`)."""
        scheduler = self.inner.diffusion.noise_scheduler
        is_ddim = type(scheduler).__name__ == "DDIMScheduler"
        for t in self._times:
            x = (
                scheduler.step(self._run_unet(encoded, x, t), t, x).prev_sample
                if is_ddim
                else self._posterior_mean(encoded, x, t)
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
        self.flow = Flow(self.steps, options.noise_level)

    @property
    def state_shape(self) -> tuple[int, int]:
        """Chunk size of the network and width of its padded actions (`DenoisingPolicy.state_shape`)."""
        return int(self.inner.config.chunk_size), int(self.inner.config.max_action_dim)

    def chain(self, encoded: Velocity, noise: Tensor) -> Tensor:
        """Returns the chain of states (`DenoisingPolicy.chain`)."""
        return self.flow.act(encoded, noise[:, 1:], noise[:, 0])

    def chain_logprobs(self, encoded: Velocity, chain: Tensor) -> Tensor:
        """Returns log-probabilities of the steps (`DenoisingPolicy.chain_logprobs`)."""
        return self.flow.logprobs(encoded, chain)

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
            velocity, hidden = self.encode(obs)
            return self.denoise_for_evaluation(velocity if guide is None else guide(velocity), hidden, obs, noise)

    def played(self, plan: Tensor, part: slice) -> Tensor:
        """Returns the environment's actions for a slice of a plan (`Policy.played`)."""
        return self.processors.postprocess(plan[:, part, : self.dim])

    def denoise(self, encoded: Velocity, x: Tensor) -> Tensor:
        """Denoises with the same arithmetic as LeRobot (`DenoisingPolicy.denoise`)."""
        dt = -1.0 / self.steps
        for k in range(self.steps):
            x = x + dt * encoded(x, x.new_full((len(x),), 1.0 + k * dt))
        return x


class PiPolicy(LeRobotFlowPolicy):
    """π0 or π0.5 of LeRobot; the value head takes PaliGemma's hidden state of the last token, and for π0 also the state."""

    steps_key = "num_inference_steps"

    @property
    def _has_state(self) -> bool:
        """True if the action expert takes the robot's state."""
        return self.description.family == "pi0"

    def value_inputs(self) -> int:
        """Returns the width of the value head's input (`LerobotPolicy.value_inputs`)."""
        width = int(self.inner.model.paligemma_with_expert.paligemma.config.text_config.hidden_size)
        return width + (int(self.inner.config.max_state_dim) if self._has_state else 0)

    def encode(self, obs: Obs) -> tuple[Velocity, Tensor]:
        """Returns the velocity for an observation, and the value head's input (`DenoisingPolicy.encode`)."""
        from lerobot.policies.pi0.modeling_pi0 import make_att_2d_masks

        inner, model, batch = self.inner, self.inner.model, self.batch(obs)
        token_ids, token_mask = (batch[f"observation.language.{name}"] for name in ("tokens", "attention_mask"))
        prefix_embeddings, mask, causal = model.embed_prefix(*inner._preprocess_images(batch), token_ids, token_mask)
        paligemma_with_expert = model.paligemma_with_expert
        # As in `sample_actions`, which computes no gradients in its other steps.
        paligemma_with_expert.paligemma.language_model.config._attn_implementation = "eager"
        (prefix_hidden, _), cache = paligemma_with_expert.forward(
            attention_mask=model._prepare_attention_masks_4d(make_att_2d_masks(mask, causal)),
            position_ids=mask.cumsum(1) - 1,
            inputs_embeds=[prefix_embeddings, None],
            use_cache=True,
        )
        state = [inner.prepare_state(batch)] if self._has_state else []

        def velocity(x: Tensor, t: Tensor) -> Tensor:
            return model.denoise_step(*state, mask, cache, x, t)

        last_token = (mask * torch.arange(mask.shape[1], device=mask.device)).argmax(1)
        return velocity, torch.cat([prefix_hidden[torch.arange(len(prefix_hidden)), last_token].float(), *state], 1)


class SmolVlaPolicy(LeRobotFlowPolicy):
    """SmolVLA of LeRobot; the value head takes the vision-language model's hidden state of its last token, which encodes the
    robot's state.
    """

    steps_key = "num_steps"

    def value_inputs(self) -> int:
        """Returns the width of the hidden state (`LerobotPolicy.value_inputs`)."""
        return int(self.inner.model.vlm_with_expert.config.text_config.hidden_size)

    def encode(self, obs: Obs) -> tuple[Velocity, Tensor]:
        """Returns the velocity for an observation, and the value head's input (`DenoisingPolicy.encode`)."""
        from lerobot.policies.smolvla.modeling_smolvla import make_att_2d_masks

        inner, batch = self.inner, self.batch(obs)
        images, image_mask = inner.prepare_images(batch)
        token_ids, token_mask = (batch[f"observation.language.{name}"] for name in ("tokens", "attention_mask"))
        prefix_embeddings, mask, causal = inner.model.embed_prefix(
            images, image_mask, token_ids, token_mask, state=inner.prepare_state(batch)
        )
        (prefix_hidden, _), cache = inner.model.vlm_with_expert.forward(
            attention_mask=make_att_2d_masks(mask, causal),
            position_ids=mask.cumsum(1) - 1,
            past_key_values=None,
            inputs_embeds=[prefix_embeddings, None],
            use_cache=True,
            fill_kv_cache=True,
        )

        def velocity(x: Tensor, t: Tensor) -> Tensor:
            return inner.model.denoise_step(mask, cache, x, t)

        last_token = (mask * torch.arange(mask.shape[1], device=mask.device)).argmax(1)
        return velocity, prefix_hidden[torch.arange(len(prefix_hidden)), last_token].float()


_POLICY_CLASSES: dict[str, type[LerobotPolicy]] = {
    "act": ActPolicy, "diffusion": DiffusionPolicy, "smolvla": SmolVlaPolicy, "pi0": PiPolicy, "pi05": PiPolicy,
}  # fmt: skip


def lerobot_policy(cfg: ModelConfig, observation_space: Any, action_space: Any) -> LerobotPolicy:
    """Builds the policy in the folder `actor.model.model_path`, of any supported family.

    Raises:
        ConfigError: The policy cannot be loaded, or was made for another task.
    """
    return _POLICY_CLASSES[describe(cfg, observation_space, action_space).family](cfg, observation_space, action_space)
