"""π0 (Black et al. 2024): a vision-language model that is read once, and an action expert that goes along a flow."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rlhpc.config.sections import LoraConfig
from rlhpc.embodied.config import ModelConfig
from rlhpc.embodied.envs.observations import boxes_of
from rlhpc.embodied.models.base import Obs
from rlhpc.embodied.models.flow import FlowActing
from rlhpc.embodied.models.guidance import Velocity
from rlhpc.embodied.models.vlm import (
    Eye,
    ValueHead,
    VlmInputs,
    image_tokens,
    load_vlm,
    numbers_in,
    positions,
    values_of,
)
from rlhpc.runtime.errors import ConfigError
from rlhpc.training.lora import inject_lora

_OPTIONS = ("num_steps", "noise_level", "prompt", "lora")


class Pi0Policy(FlowActing):
    """Pictures, an instruction and the robot's state to chunks of actions. Log-probs are those of `models.flow`,
    over the actions that are used; values come from the vision-language model's last token.

    `actor.model`: `model_path` (a Hugging Face folder, or `builtin:tiny`), `dtype`, `add_value_head`; `actor.lora`;
    `kwargs`: `num_steps` (default 4), `noise_level` (default 0.5), `prompt`, with `{instruction}`.
    """

    mixed_precision = True
    model: Any
    value_head: ValueHead | None

    def __init__(self, cfg: ModelConfig, observation_space: Any, action_space: Any) -> None:
        super().__init__(cfg, observation_space, action_space)
        if unknown := set(self.options) - set(_OPTIONS):
            raise ConfigError(
                f"actor.model.kwargs of pi0 has {', '.join(sorted(unknown))}; allowed: num_steps, noise_level, prompt"
            )
        self.numbers = numbers_in(observation_space)
        model, tokenizer, settings = load_vlm(cfg, "pi0", self.chunk, self.dim, self.numbers)
        self.model = model
        config = self.model.config
        for key, wanted, most in (
            ("actor.model.num_action_chunks", self.chunk, config.chunk_size),
            ("the action space's components", self.dim, config.max_action_dim),
            ("the state's length", self.numbers, config.max_state_dim),
        ):
            if wanted > most:
                raise ConfigError(f"{key}: {wanted} is more than this model's {most}")
        tokens = image_tokens(self.model.model.vlm, config.vlm_config)
        prompt = str(self.options.get("prompt") or "{instruction}\n")
        eye, image = Eye.of(config.vlm_config, settings), int(config.vlm_config.image_token_id)
        self.inputs = VlmInputs(observation_space, tokenizer, eye, image, tokens, prompt, image_first=True)
        if self.options.get("lora"):
            inject_lora(self.model, LoraConfig(**self.options["lora"]))
        width = int(config.vlm_config.text_config.hidden_size)
        valued = cfg.add_value_head
        self.value_head = ValueHead(width, self.value_width) if valued else None

    @property
    def state_shape(self) -> tuple[int, int]:
        """See `FlowActing.state_shape`: the model's own chunk and width."""
        return int(self.model.config.chunk_size), int(self.model.config.max_action_dim)

    def prepare(self, obs: Obs, policy: bool, value: bool) -> tuple[Velocity | None, Tensor | None]:
        """Encodes observations once for all steps of the flow (`FlowActing.prepare`): reads pictures and prompt once."""
        ids, mask, pixels = self.inputs(obs)
        if not policy and self.value_head is None:
            return None, self._values(pixels.flatten(1))
        body, dtype = self.model.model, self.model.dtype
        seen = torch.ones(pixels.shape[:2], dtype=torch.bool, device=pixels.device)
        embedded = body.embed_prefix(ids, pixels.to(dtype), seen)
        read = body.vlm(
            inputs_embeds=embedded, attention_mask=mask, position_ids=positions(mask), use_cache=policy,
            token_type_ids=torch.zeros_like(ids),
        )  # fmt: skip
        cache, state = read.past_key_values, self._state(obs, len(ids)).to(dtype)

        def velocity(x: Tensor, t: Tensor) -> Tensor:
            out = self.model(state=state, noise=x.to(dtype), timestep=t, attention_mask=mask, past_key_values=cache)
            cache.crop(-(x.shape[1] + 1))  # the state and the actions of this step; the next one sees the prefix only
            found: Tensor = out.logits
            return found.float()

        return velocity if policy else None, self._values(read.last_hidden_state[:, -1]) if value else None

    def _state(self, obs: Any, rows: int) -> Tensor:
        state = self.low.new_zeros(rows, int(self.model.config.max_state_dim))
        if self.numbers and "state" in boxes_of(self.observation_space):
            state[:, : self.numbers] = obs["state"].reshape(rows, -1)
        return state

    def _values(self, hidden: Tensor) -> Tensor:
        return values_of(self.value_head, hidden, self.value_width)
