"""PaliGemma and Gemma with the changes of openpi's PyTorch models, for LeRobot's π0 and π0.5.

LeRobot 0.4.4 requires a copy of transformers in which openpi's files replace some files (`transformers_replace`), and
refuses any other. The changes are small. This module applies them to the installed transformers, but only in LeRobot's
modules of π0 and π0.5:

- Gemma's norm may be adapted to a condition c (adaRMS, π0.5's expert): x / rms(x) · (1 + scale(c)) + shift(c), and a
  gate(c) on the block's output. The norm also returns the gate, which is None if there is no condition.
- Gemma does not scale its inputs by √width, and PaliGemma does not scale its image features by 1/√width, because
  LeRobot scales the text embeddings itself.
- A pass with `use_cache=False` does not extend the cached keys and values.

The module omits openpi's conversions for bfloat16, because `library.load` loads float32 weights.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.models.gemma import modeling_gemma
from transformers.models.gemma.modeling_gemma import GemmaDecoderLayer, GemmaForCausalLM, GemmaModel, GemmaRMSNorm
from transformers.models.paligemma.modeling_paligemma import PaliGemmaForConditionalGeneration, PaliGemmaModel

from rlhpc.runtime.text import format_names

#: Versions against whose sources this module was checked (envs/lerobot.txt).
VERIFIED = {"lerobot": "0.4", "transformers": "4.57"}

_CHECK_MODULE = "transformers.models.siglip.check"


class AdaptedNorm(nn.Module):
    """Gemma's RMS norm, optionally adapted to a condition (adaRMS).

    Args:
        norm: Norm to replace.
        width: Width of the input and of the condition.
        std: Standard deviation of the initial weights for the condition; None builds a plain norm.
    """

    def __init__(self, norm: GemmaRMSNorm, width: int, std: float | None) -> None:
        super().__init__()
        self.eps = norm.eps
        self.dense: nn.Linear | None = None
        if std is None:
            self.weight = norm.weight
            return
        self.dense = nn.Linear(width, 3 * width)
        nn.init.normal_(self.dense.weight, std=std)
        nn.init.zeros_(self.dense.bias)

    def forward(self, x: Tensor, cond: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Normalises `[B, S, width]`, by a condition `[B, width]`; also returns the gate `[B, 1, width]`."""
        normalized_x = x * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + self.eps)
        if cond is None or self.dense is None:
            return (normalized_x * (1 + self.weight.float())).to(x.dtype), None
        scale, norm_shift, gate = self.dense(cond)[:, None].chunk(3, -1)
        return (normalized_x * (1 + scale.float()) + norm_shift.float()).to(x.dtype), gate.to(x.dtype)


def gated_residual(x: Tensor, y: Tensor, gate: Tensor | None) -> Tensor:
    """Returns x plus the block's output y, multiplied by the gate unless the gate is None."""
    return x + y if gate is None else x + y * gate


class _AdaptedLayer(GemmaDecoderLayer):
    def forward(self, *args: Any, **attention: Any) -> Tensor:
        x, cond = args  # positional: hidden states, and the condition of the norms
        normalized_x, gate = self.input_layernorm(x, cond)
        x = gated_residual(x, self.self_attn(hidden_states=normalized_x, **attention)[0], gate)
        normalized_x, gate = self.post_attention_layernorm(x, cond)
        return gated_residual(x, self.mlp(normalized_x), gate)


class _ReadOnlyCache:
    """Read-only cache of keys and values."""

    def __init__(self, cache: Any) -> None:
        self._layers = cache.layers

    def update(self, keys: Tensor, values: Tensor, layer: int, cache_kwargs: Any = None) -> tuple[Tensor, Tensor]:
        cached_layer = self._layers[layer]
        return torch.cat([cached_layer.keys, keys], 2), torch.cat([cached_layer.values, values], 2)


class _AdaptedGemma(GemmaModel):
    def forward(
        self,
        inputs_embeds: Tensor,
        attention_mask: Tensor,
        position_ids: Tensor,
        past_key_values: Any = None,
        use_cache: bool | None = None,
        adarms_cond: Tensor | None = None,
    ) -> BaseModelOutputWithPast:
        if use_cache:
            past_key_values = modeling_gemma.DynamicCache(config=self.config)
        cache = past_key_values if use_cache or past_key_values is None else _ReadOnlyCache(past_key_values)
        rotary_embeddings = self.rotary_emb(inputs_embeds, position_ids)
        x = inputs_embeds
        for layer in self.layers:
            x = layer(
                x,
                adarms_cond,
                attention_mask=attention_mask,
                past_key_values=cache,
                position_embeddings=rotary_embeddings,
            )
        return BaseModelOutputWithPast(last_hidden_state=self.norm(x, adarms_cond)[0], past_key_values=past_key_values)


class _AdaptedPaliGemma(PaliGemmaModel):
    def get_image_features(self, pixel_values: Tensor) -> Tensor:
        return self.multi_modal_projector(self.vision_tower(pixel_values).last_hidden_state)


def _adapt(gemma: Any) -> None:
    config = gemma.config
    std = float(config.initializer_range) if getattr(config, "use_adarms", False) else None
    gemma.__class__ = _AdaptedGemma
    gemma.norm = AdaptedNorm(gemma.norm, config.hidden_size, std)
    for layer in gemma.layers:
        layer.__class__ = _AdaptedLayer
        for name in ("input_layernorm", "post_attention_layernorm"):
            setattr(layer, name, AdaptedNorm(getattr(layer, name), config.hidden_size, std))


def gemma(config: Any) -> GemmaForCausalLM:
    """Builds the action expert (Gemma) as in openpi."""
    model = GemmaForCausalLM(config)
    _adapt(model.model)
    return model


def paligemma(config: Any) -> PaliGemmaForConditionalGeneration:
    """Builds PaliGemma as in openpi."""
    model = PaliGemmaForConditionalGeneration(config)
    model.model.__class__ = _AdaptedPaliGemma
    _adapt(model.model.language_model)
    return model


def patch_lerobot() -> None:
    """Makes LeRobot's π0 and π0.5 use these models, and makes its check for openpi's files pass. Does nothing if transformers
    already has openpi's files.
    """
    if _CHECK_MODULE in sys.modules or importlib.util.find_spec(_CHECK_MODULE) is not None:
        return
    vars(modeling_gemma)["_gated_residual"] = gated_residual
    for name in ("pi0", "pi05"):
        module: Any = importlib.import_module(f"lerobot.policies.{name}.modeling_{name}")
        module.GemmaForCausalLM, module.PaliGemmaForConditionalGeneration = gemma, paligemma
    check_module: Any = ModuleType(_CHECK_MODULE)
    check_module.check_whether_transformers_replace_is_installed_correctly = lambda: True
    sys.modules[_CHECK_MODULE] = check_module


def load(policy_class: Any, config: Any, weights: Path) -> Any:
    """Loads a π0 or π0.5 with the weights of a file. LeRobot's `from_pretrained` would silently keep random values for
    weights that do not fit.

    Args:
        policy_class: Policy class of LeRobot.
        config: Configuration of the policy.
        weights: Safetensors file, whose names may lack the prefix `model.`.

    Raises:
        ValueError: Weights are missing, or belong to another model.
    """
    policy = policy_class(config)
    state_dict = policy._fix_pytorch_state_dict_keys(load_file(weights), config)
    state_dict = {name if name.startswith("model.") else f"model.{name}": weight for name, weight in state_dict.items()}
    missing_names, unexpected_names = policy.load_state_dict(state_dict, strict=False)
    parameters = policy.state_dict()
    loaded_pointers = {parameters[name].data_ptr() for name in state_dict.keys() & parameters.keys()}
    # Token embeddings and LM head are tied, so a file may have only one of them.
    mismatches = [
        *unexpected_names,
        *(name for name in missing_names if parameters[name].data_ptr() not in loaded_pointers),
    ]
    if mismatches:
        raise ValueError(f"{weights.name} and its configuration do not fit: {format_names(mismatches)}")
    return policy.eval()
