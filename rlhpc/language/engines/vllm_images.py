"""Image inputs of vLLM: patches and positions as the trainer uses them.

vLLM processes no image itself. Its image processing needs torchvision, which requires an exactly matching build of torch, and
could divide an image into patches differently than the trainer.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from rlhpc.language.data.images import load_image_processor
from rlhpc.language.engines.vllm_adapter import import_model_module, processor_info

if TYPE_CHECKING:
    from rlhpc.language.data.images import PromptImageProcessor, PromptImages

#: vLLM's module and class of each family's model.
_MODELS = {
    "qwen2_5_vl": ("qwen2_5_vl", "Qwen2_5_VLForConditionalGeneration"),
    "qwen3_vl": ("qwen3_vl", "Qwen3VLForConditionalGeneration"),
}
#: vLLM's name of the modality.
_MODALITY = "image"


def register_images(config: Any, path: str, trust_remote_code: bool) -> None:
    """Registers image processing for a vision-language model with vLLM, in this process.

    Args:
        config: Configuration of the model.
        path: Path of the model; its image processor sets the largest image.
        trust_remote_code: See `rlhpc.language.data.images.load_image_processor`.

    Raises:
        ConfigError: The model has no image processor, or is of an unsupported family.
    """
    from vllm.model_executor.models.registry import ModelRegistry
    from vllm.multimodal import MULTIMODAL_REGISTRY

    image_processor = load_image_processor(path, trust_remote_code)
    module, name = _MODELS[config.model_type]
    vllm_model: Any = getattr(import_model_module(f"vllm.model_executor.models.{module}"), name)
    model_class = type(name, (vllm_model,), {"__module__": vllm_model.__module__})
    register_class = MULTIMODAL_REGISTRY.register_processor(
        _PatchProcessor,
        info=functools.partial(_make_info_class(vllm_model), image_processor=image_processor),
        dummy_inputs=_make_no_samples,
    )(model_class)
    ModelRegistry.register_model(name, register_class)


def image_prompt(ids: Sequence[int], images: PromptImages) -> dict[str, Any]:
    """Returns a prompt with images in the form of vLLM's engine after image processing.

    Args:
        ids: The prompt's tokens.
        images: The prompt's images.
    """
    from vllm.inputs.engine import mm_input

    digests = [digest.hex() for digest in images.digests]
    return dict(mm_input(list(ids), _build_items(images), {_MODALITY: digests}, {_MODALITY: _places(images)}))


def _build_items(images: PromptImages) -> Any:
    from transformers import BatchFeature
    from vllm.multimodal.inputs import MultiModalFieldConfig, MultiModalKwargsItems

    grids = torch.from_numpy(images.grids)
    features = BatchFeature({"pixel_values": torch.from_numpy(np.concatenate(images.patches)), "image_grid_thw": grids})
    field_configs = {
        "pixel_values": MultiModalFieldConfig.flat_from_sizes(_MODALITY, grids.prod(1)),
        "image_grid_thw": MultiModalFieldConfig.batched(_MODALITY, keep_on_cpu=True),
    }
    return MultiModalKwargsItems.from_hf_inputs(features, field_configs)


def _places(images: PromptImages) -> list[Any]:
    from vllm.multimodal.inputs import PlaceholderRange

    return [
        PlaceholderRange(offset=offset, length=num_tokens)
        for offset, num_tokens in zip(images.at.tolist(), images.tokens.tolist(), strict=True)
    ]


def _make_info_class(model: Any) -> Any:
    """Returns a subclass of the model's processing-info class in vLLM, with the image limits of this run."""
    base_info: Any = processor_info(model)

    class Info(base_info):
        def __init__(self, ctx: Any, image_processor: PromptImageProcessor) -> None:
            super().__init__(ctx)
            self.image_processor = image_processor
            self.max_image_tokens = min(image_processor.max_tokens, int(ctx.model_config.max_model_len))

        def get_supported_mm_limits(self) -> Mapping[str, int | None]:
            return {_MODALITY: None}

        def get_mm_max_tokens_per_item(self, seq_len: int, mm_counts: Mapping[str, int]) -> Mapping[str, int]:
            del seq_len, mm_counts
            return {_MODALITY: self.max_image_tokens}

    return Info


def _make_no_samples(processing_info: Any) -> Any:
    """Returns a placeholder for the builder of dummy samples, which `_PatchProcessor` replaces."""
    return processing_info


class _PatchProcessor:
    """Replacement of vLLM's image processor for images that are already patches."""

    def __init__(self, processing_info: Any, dummy_inputs: Any) -> None:
        del dummy_inputs
        self.info = processing_info

    def get_dummy_mm_inputs(self, mm_counts: Mapping[str, int], **_: Any) -> Any:
        """Returns a prompt with the largest image, with which vLLM measures its memory use."""
        del mm_counts
        return image_prompt(
            [0] * self.info.max_image_tokens, self.info.image_processor.blank(self.info.max_image_tokens)
        )
