"""Vision-language-action policy with actions as tokens, as in RT-2 (Brohan et al. 2023) and OpenVLA (Kim et al. 2024).

Each component of an action is one of 256 bins between −1 and 1. The bins are the last tokens of the vocabulary, in reverse
order: the first bin is the very last token. A chunk is generated action by action; probabilities are normalised over the bins.
Values are computed from the hidden state that predicts the first action token.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import Any

import torch
from gymnasium import spaces
from torch import Tensor

from rlhpc.config.sections import PolicyAdapterConfig
from rlhpc.embodied.config import ModelConfig
from rlhpc.embodied.config.model_options import ActionTokenOptions, model_options
from rlhpc.embodied.models.action_heads import sum_to_level
from rlhpc.embodied.models.base import Obs, Policy
from rlhpc.embodied.models.flow import action_bounds
from rlhpc.embodied.models.normalization import Scaling
from rlhpc.embodied.models.vlm import (
    PROMPT,
    ImagePreprocessing,
    ValueHead,
    VlmInputs,
    count_image_tokens,
    load_vlm,
    position_ids,
    state_width,
)
from rlhpc.runtime.errors import ConfigError
from rlhpc.training.lora import inject_lora

BINS = 256
#: Logit of a bin that is not among the `top_k` most likely ones.
_EXCLUDED_LOGIT = -1e9


class ActionTokens:
    """Converter between actions in [−1, 1] and token ids, as in OpenVLA: 256 edges bound 255 bins, and a token stands
    for the middle of its bin.

    Args:
        end: End of the vocabulary's token ids, exclusive.
    """

    def __init__(self, end: int) -> None:
        self.first, self.end = end - BINS, end
        self.edges = torch.linspace(-1, 1, BINS)
        self.middles = (self.edges[:-1] + self.edges[1:]) / 2

    def ids(self, actions: Tensor) -> Tensor:
        """Returns the token ids of actions."""
        return self.end - torch.bucketize(actions.clamp(-1, 1), self.edges.to(actions.device), right=True)

    def actions(self, ids: Tensor) -> Tensor:
        """Returns the actions of token ids."""
        return self.middles.to(ids.device)[(self.end - ids - 1).clamp(0, BINS - 2)]


class TokenPolicy(Policy):
    """Policy whose actions are tokens of a language model. Subclasses implement `load`, `_encode`, `_run_body` and
    `_logits`.

    Raises:
        ConfigError: The action space is not continuous.
    """

    has_head = False
    mixed_precision = True
    #: Dataclass of `actor.model.kwargs`.
    options_type: type[ActionTokenOptions] = ActionTokenOptions
    vlm: Any
    inputs: VlmInputs
    tokens: ActionTokens
    scaling: Scaling

    def __init__(self, cfg: ModelConfig, observation_space: Any, action_space: Any) -> None:
        super().__init__(cfg, observation_space, action_space)
        name = cfg.model_type
        if not isinstance(action_space, spaces.Box):
            raise ConfigError(f"model_type {name!r} needs continuous actions; these are {action_space}")
        self.options: ActionTokenOptions = model_options(self.options_type, cfg)
        self.dim = math.prod(action_space.shape)
        self.scaling = Scaling(*action_bounds(action_space))
        self.load(cfg)
        if self.options.lora:
            inject_lora(self.vlm, PolicyAdapterConfig(**self.options.lora))
        width = int(self.vlm.config.text_config.hidden_size)
        self.value_head = ValueHead(width, self.value_width) if cfg.add_value_head else None

    @abstractmethod
    def load(self, cfg: ModelConfig) -> None:
        """Sets `vlm`, `inputs`, `tokens` and the other attributes of the subclass."""

    @abstractmethod
    def _encode(self, obs: Obs, token_ids: Tensor | None = None, use_cache: bool = False) -> Any:
        """Runs the model's body on images, prompt, and the action tokens generated so far `[B, n]`; returns its outputs and
        the mask.
        """

    @abstractmethod
    def _run_body(self, **inputs: Any) -> Any:
        """Runs the transformer without the LM head; takes the arguments of transformers' `forward` and returns its output."""

    @abstractmethod
    def _logits(self, hidden_states: Tensor) -> Tensor:
        """Returns logits over the complete vocabulary."""

    def recompute_activations(self) -> bool:
        """Enables gradient checkpointing (`Policy.recompute_activations`)."""
        self.vlm.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        return True

    # -- passes ---------------------------------------------------------------------------------------------------

    def _compute_bin_logprobs(self, hidden_states: Tensor, temperature: float) -> Tensor:
        """Returns log-probabilities over the bins, `[..., 256]`, in the order of token ids. Bins outside the `top_k` most
        likely ones have a probability of 0.
        """
        logits = self._logits(hidden_states)[..., self.tokens.first : self.tokens.end].float() / temperature
        if 0 < self.options.top_k < BINS:
            lowest_logits = logits.topk(self.options.top_k, -1).values[..., -1:]
            # finite, because the difference of two infinite log-probs is not a number
            logits = logits.masked_fill(logits < lowest_logits, _EXCLUDED_LOGIT)
        return torch.log_softmax(logits, -1)

    def features(self, obs: Any, policy: bool, value: bool) -> tuple[Tensor | None, Tensor | None]:
        """Returns None in place of the head's input, and the values (`Policy.features`)."""
        if self.value_head is None and value:
            return None, self._values(self.inputs(obs)[0])
        return None, self._values(self._hidden_states(obs, None)[:, 0]) if value else None

    def _hidden_states(self, obs: Obs, tokens: Tensor | None) -> Tensor:
        """Returns the hidden states `[B, n, width]` that predict the tokens `[B, n]`; without tokens, only the first state."""
        previous_tokens, num_tokens = (None, 1) if tokens is None else (tokens[:, :-1], tokens.shape[1])
        return self._encode(obs, previous_tokens)[0].last_hidden_state[:, -num_tokens:]

    def default_forward(
        self,
        inputs: dict[str, Any],
        compute_logprobs: bool = True,
        compute_entropy: bool = False,
        compute_values: bool = False,
    ) -> dict[str, Tensor]:
        """Runs the training pass (`Policy.default_forward`); `inputs["tokens"]` may hold the sampled tokens
        `[B, chunk · dim]`.
        """
        tokens = (
            inputs["tokens"]
            if "tokens" in inputs
            else self.tokens.ids(self._scale_actions(inputs["actions"])).flatten(1)
        )
        hidden_states = self._hidden_states(inputs["obs"], tokens)
        outputs: dict[str, Tensor] = {}
        if compute_logprobs or compute_entropy:
            logp = self._compute_bin_logprobs(hidden_states, self.options.temperature_train)
            token_logprobs = logp.gather(-1, (tokens - self.tokens.first)[..., None]).squeeze(-1)
            outputs["logprobs"] = sum_to_level(token_logprobs, self.logprob_type, self.chunk)
            if compute_entropy:
                outputs["entropy"] = sum_to_level(-(logp.exp() * logp).sum(-1), self.logprob_type, self.chunk)
        if compute_values:
            outputs["values"] = self._values(hidden_states[:, 0])
        return outputs

    def predict_action_batch(
        self, obs: Obs, mode: str = "train", noise: Tensor | None = None
    ) -> tuple[Tensor, dict[str, Any]]:
        """Chooses actions for a batch of observations (`Policy.predict_action_batch`)."""
        device = self.scaling.low.device
        if mode != "eval":
            noise, temperature = self.noise_for(obs, noise, device), self.options.temperature_train
        elif self.options.temperature_eval > 0:
            noise, temperature = self.start_for(obs, noise, device), self.options.temperature_eval
        else:
            noise, temperature = None, 1.0
        chosen_bins, logprobs, first_hidden = self._sample_tokens(obs, noise, temperature)
        tokens = chosen_bins + self.tokens.first
        actions = self.scaling.unscaled(self.tokens.actions(tokens).unflatten(1, (self.chunk, self.dim)))
        level_logprobs = sum_to_level(logprobs, self.logprob_type, self.chunk)
        return actions, {
            "prev_logprobs": level_logprobs,
            "prev_values": self._values(first_hidden),
            "inputs": {"tokens": tokens},
        }

    def _sample_tokens(self, obs: Obs, noise: Tensor | None, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
        """Samples the tokens one after the other at a temperature; returns their bins and log-probs `[B, chunk · dim]`, and
        the hidden state that predicts the first token.
        """
        outputs, mask = self._encode(obs, use_cache=True)
        first_hidden = hidden_states = outputs.last_hidden_state[:, -1]
        sampled_bins: list[Tensor] = []
        logprobs: list[Tensor] = []
        for i in range(self.chunk * self.dim):
            if i:
                mask = torch.cat([mask, mask.new_ones(len(mask), 1)], 1)
                outputs = self._run_body(
                    input_ids=sampled_bins[-1] + self.tokens.first,
                    attention_mask=mask,
                    position_ids=position_ids(mask)[:, -1:],
                    past_key_values=outputs.past_key_values,
                    use_cache=True,
                )
                hidden_states = outputs.last_hidden_state[:, -1]
            token_noise = None if noise is None else noise[:, i : i + 1]
            chosen_bins, token_logprobs = self._choose_bins(hidden_states[:, None], token_noise, temperature)
            logprobs.append(token_logprobs)
            sampled_bins.append(chosen_bins)
        return torch.cat(sampled_bins, 1), torch.cat(logprobs, 1), first_hidden

    def _choose_bins(self, hidden_states: Tensor, noise: Tensor | None, temperature: float) -> tuple[Tensor, Tensor]:
        """Chooses bins from hidden states `[B, n, width]`; returns the bins and their log-probs `[B, n]`. Without
        noise, takes the most likely bins.
        """
        logp = self._compute_bin_logprobs(hidden_states, temperature)
        chosen_bins = logp.argmax(-1, keepdim=True) if noise is None else _sample_bins(logp, noise[..., None])
        return chosen_bins.squeeze(-1), logp.gather(-1, chosen_bins).squeeze(-1)

    def sample_noise(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """Draws uniform noise `[*shape, chunk · dim]`: each token's position in the cumulative distribution."""
        return torch.rand((*shape, self.chunk * self.dim), generator=generator, device=generator.device)

    @property
    def start_shape(self) -> tuple[int, ...]:
        """Shape of the noise from which an evaluation samples tokens; () if it takes the most likely ones."""
        return (self.chunk * self.dim,) if self.options.temperature_eval > 0 else ()

    def sample_start(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """Draws the noise of an evaluation, uniform as in `sample_noise`."""
        return torch.rand((*shape, *self.start_shape), generator=generator)

    def _scale_actions(self, actions: Tensor) -> Tensor:
        return self.scaling.scaled(actions.reshape(len(actions), -1, self.dim))


class VLAPolicy(TokenPolicy):
    """Policy that predicts action tokens from images and an instruction with a Llava model.

    `actor.model`: `model_path` (a Hugging Face folder, or `builtin:tiny`), `dtype`, `add_value_head`; `actor.lora`;
    `kwargs` are `ActionTokenOptions`.
    """

    def load(self, cfg: ModelConfig) -> None:
        """Loads the Llava model and its tokenizer (`TokenPolicy.load`).

        Raises:
            ConfigError: The image token is one of the tokens that stand for actions.
        """
        space = self.observation_space
        self.vlm, tokenizer, settings = load_vlm(cfg, "vla", self.chunk, self.dim, state_width(space))
        config, image = self.vlm.config, int(self.vlm.config.image_token_id)
        prompt = self.options.prompt or PROMPT
        self.inputs = VlmInputs(
            space,
            tokenizer,
            ImagePreprocessing.from_settings(config, settings),
            image,
            count_image_tokens(self.vlm, config),
            prompt,
        )
        self.tokens = ActionTokens(int(tokenizer.vocab_size))
        if self.tokens.first <= image < self.tokens.end:
            raise ConfigError(
                f"actor.model.model_path: the image token {image} is among the last {BINS} words of the vocabulary, which "
                "stand for actions"
            )

    def _encode(self, obs: Obs, token_ids: Tensor | None = None, use_cache: bool = False) -> Any:
        ids, mask, pixels = self.inputs(obs)
        if token_ids is not None:
            ids, mask = torch.cat([ids, token_ids], 1), torch.cat([mask, torch.ones_like(token_ids)], 1)
        outputs = self.vlm.model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=position_ids(mask),
            use_cache=use_cache,
            pixel_values=pixels.flatten(0, 1).to(self.vlm.dtype),
        )
        return outputs, mask

    def _run_body(self, **inputs: Any) -> Any:
        return self.vlm.model(**inputs)

    def _logits(self, hidden_states: Tensor) -> Tensor:
        return self.vlm.lm_head(hidden_states)


def _sample_bins(logp: Tensor, uniform: Tensor) -> Tensor:
    """Samples bins `[..., 1]` by inversion of the cumulative distribution."""
    cumulative_probs = logp.exp().cumsum(-1)
    # above 0, because the first bin with a cumulative probability of at least 0 may have a probability of 0
    sample_thresholds = (uniform * cumulative_probs[..., -1:]).clamp(min=torch.finfo(logp.dtype).tiny)
    return torch.searchsorted(cumulative_probs, sample_thresholds).clamp(max=logp.shape[-1] - 1)
