"""Pictures for vLLM: it is given what the trainer sees, patches and places, and cuts no picture itself.

Its own way, from a picture to patches, needs torchvision, whose builds go with one of torch's each; and a second way could
place or cut a picture otherwise than the first.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from rlhpc.language.data.images import make_looker

if TYPE_CHECKING:
    from rlhpc.language.data.images import Looker, PromptImages

#: Where vLLM has each family's model, and its class there.
_MODELS = {
    "qwen2_5_vl": ("qwen2_5_vl", "Qwen2_5_VLForConditionalGeneration"),
    "qwen3_vl": ("qwen3_vl", "Qwen3VLForConditionalGeneration"),
}
#: Modules of transformers that import torchvision for their classes; vLLM takes one function from each.
_CUTTERS = "transformers.models.qwen2_vl.image_processing_qwen2_vl"
_CUTTERS_OF_PIL = "transformers.models.qwen2_vl.image_processing_pil_qwen2_vl"
_KIND = "image"


def take_pictures(config: Any, path: str, trust_remote_code: bool) -> None:
    """Tells vLLM, in this process, how a model of a family that looks at pictures gets them.

    Args:
        config: Of the model.
        path: Of the model; what came with it says how large a picture is at most.
        trust_remote_code: See `rlhpc.language.data.images.make_looker`.

    Raises:
        ConfigError: The model came without an image processor, or is of another family.
    """
    from vllm.model_executor.models.registry import ModelRegistry
    from vllm.multimodal import MULTIMODAL_REGISTRY

    looker = make_looker(path, trust_remote_code)
    module, name = _MODELS[config.model_type]
    theirs: Any = getattr(_imported(f"vllm.model_executor.models.{module}"), name)
    own = type(name, (theirs,), {"__module__": theirs.__module__})
    registered = MULTIMODAL_REGISTRY.register_processor(
        _Given, info=functools.partial(_info_of(theirs), looker=looker), dummy_inputs=_no_samples
    )(own)
    ModelRegistry.register_model(name, registered)


def shown(ids: Sequence[int], seen: PromptImages) -> dict[str, Any]:
    """A prompt as vLLM's engine takes it after its own way from pictures to patches.

    Args:
        ids: The prompt's tokens.
        seen: What it shows.
    """
    from vllm.inputs.engine import mm_input

    digests = [digest.hex() for digest in seen.digests]
    return dict(mm_input(list(ids), _items(seen), {_KIND: digests}, {_KIND: _places(seen)}))


def _items(seen: PromptImages) -> Any:
    from transformers import BatchFeature
    from vllm.multimodal.inputs import MultiModalFieldConfig, MultiModalKwargsItems

    grids = torch.from_numpy(seen.grids)
    given = BatchFeature({"pixel_values": torch.from_numpy(np.concatenate(seen.patches)), "image_grid_thw": grids})
    fields = {
        "pixel_values": MultiModalFieldConfig.flat_from_sizes(_KIND, grids.prod(1)),
        "image_grid_thw": MultiModalFieldConfig.batched(_KIND, keep_on_cpu=True),
    }
    return MultiModalKwargsItems.from_hf_inputs(given, fields)


def _places(seen: PromptImages) -> list[Any]:
    from vllm.multimodal.inputs import PlaceholderRange

    return [
        PlaceholderRange(offset=at, length=length)
        for at, length in zip(seen.at.tolist(), seen.tokens.tolist(), strict=True)
    ]


def _info_of(model: Any) -> Any:
    """What vLLM asks about the pictures of a model, of the class that its own functions expect."""
    base: Any = model._processor_factory.info

    class Info(base):
        def __init__(self, ctx: Any, looker: Looker) -> None:
            super().__init__(ctx)
            self.looker, self.most = looker, min(looker.most, int(ctx.model_config.max_model_len))

        def get_supported_mm_limits(self) -> Mapping[str, int | None]:
            return {_KIND: None}

        def get_mm_max_tokens_per_item(self, seq_len: int, mm_counts: Mapping[str, int]) -> Mapping[str, int]:
            del seq_len, mm_counts
            return {_KIND: self.most}

    return Info


def _no_samples(info: Any) -> Any:
    """In place of what makes samples of text and pictures: `_Given` has its own."""
    return info


class _Given:
    """In the place of what cuts pictures in vLLM: they come cut."""

    def __init__(self, info: Any, dummy_inputs: Any) -> None:
        del dummy_inputs
        self.info = info

    def get_dummy_mm_inputs(self, mm_counts: Mapping[str, int], **_: Any) -> Any:
        """The largest picture there is, by which vLLM measures what memory it needs."""
        del mm_counts
        return shown([0] * self.info.most, self.info.looker.blank(self.info.most))


def _imported(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "torchvision":
            raise
    with _by_pil():
        return importlib.import_module(name)


@contextmanager
def _by_pil() -> Iterator[None]:
    """Has an import find transformers' functions of pictures beside its classes for PIL, which need no torchvision."""
    sys.modules[_CUTTERS] = importlib.import_module(_CUTTERS_OF_PIL)
    try:
        yield
    finally:
        del sys.modules[_CUTTERS]
