"""Vision towers of language models: placement of image features, runs without images, and freezing."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from rlhpc.language.data.images import FAMILIES, has_vision
from rlhpc.runtime.errors import ConfigError


def sub_attention(model: Any, name: str) -> str | dict[str, str]:
    """Returns the `set_attn_implementation` argument that sets the text model's attention and keeps the vision tower's."""
    if not has_vision(model.config):
        return name
    return {"": name, "text_config": name, "vision_config": model.config.vision_config._attn_implementation}


def place_by_token_type(model: Any) -> None:
    """Makes a vision-language model place image features at the tokens that `mm_token_type_ids` marks, if it is passed.

    By default, transformers places image features at all image tokens. However, an image token that the model sampled is
    ordinary text.
    """
    if not has_vision(model.config):
        return
    trunk = _trunk(model)
    original_mask, call_inputs = trunk.get_placeholder_mask, dict[str, Any]()

    def store_token_types(_: nn.Module, __: Any, arguments: dict[str, Any]) -> None:
        call_inputs["token_types"] = arguments.get("mm_token_type_ids")

    def placeholder_masks(input_ids: Any, inputs_embeds: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        token_types = call_inputs.get("token_types")
        if token_types is None:
            default_masks: tuple[Tensor, Tensor] = original_mask(input_ids, inputs_embeds, *args, **kwargs)
            return default_masks
        is_image, is_video = ((token_types == token_type).unsqueeze(-1) for token_type in (1, 2))
        return is_image, is_video

    trunk.register_forward_pre_hook(store_token_types, with_kwargs=True)
    trunk.get_placeholder_mask = placeholder_masks


def always_run_vision(model: Any) -> None:
    """Makes a vision-language model run its vision tower in every pass, on a blank image if the batch has no images.

    The features of the blank image are not used, so it changes no output and gives the vision tower a gradient of zero. Thus
    all ranks with sharded weights issue the same collectives, whether or not their batches have images.
    """
    config = model.config.vision_config
    merge_size, width = (
        config.spatial_merge_size,
        config.in_channels * config.temporal_patch_size * config.patch_size**2,
    )

    def add_blank_image(
        _: nn.Module, inputs: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, dict[str, Any]] | None:
        if kwargs.get("pixel_values") is not None:
            return None
        ids = kwargs["input_ids"]
        blank_image = {
            "pixel_values": torch.zeros(merge_size**2, width, device=ids.device),
            "image_grid_thw": torch.tensor([[1, merge_size, merge_size]], device=ids.device),
            "mm_token_type_ids": torch.zeros_like(ids),
        }
        if kwargs.get("position_ids") is None:  # text positions; otherwise the model would derive them from the image
            blank_image["position_ids"] = torch.arange(ids.shape[1], device=ids.device).expand(ids.shape)
        return inputs, {**kwargs, **blank_image}

    # This hook runs before that of `place_by_token_type`, which reads the token types.
    _trunk(model).register_forward_pre_hook(add_blank_image, prepend=True, with_kwargs=True)


def tower_of(model: Any) -> Any:
    """Returns a model's vision tower; None if the model is not of a supported vision-language family."""
    return _trunk(model).visual if model.config.model_type in FAMILIES else None


def _trunk(model: Any) -> Any:
    """Returns the model without its LM head."""
    return getattr(model, model.base_model_prefix)


def freeze_vision(model: Any, key: str) -> None:
    """Freezes the weights of a model's vision tower.

    Args:
        model: Model of transformers.
        key: Name of the section in messages.

    Raises:
        ConfigError: The model has no vision tower.
    """
    if not has_vision(model.config):
        raise ConfigError(f"{key}.model.freeze_vision is true, and a {type(model).__name__} does not look at pictures")
    _trunk(model).visual.requires_grad_(False)
