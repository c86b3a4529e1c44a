"""Images of a token batch: each is stored once, however many samples use it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rlhpc.language.data.images import FAMILIES, PromptImages, has_vision, positions
from rlhpc.runtime.errors import ConfigError


@dataclass
class Pictures:
    """Images of N samples: M images of P patches in all, to which the samples refer K times.

    Attributes:
        patches: `[P, d]` float32, image by image.
        grids: `[M, 3]` int64, on the host: frames, rows and columns of each image's patches.
        image_indices: `[K]` int64, on the host: index of the image, sample by sample.
        at: `[K]` int64, on the host: position in the sample of the image's first token.
        counts: `[N]` int64, on the host: number of images of each sample.
        merge: This number of patches in each direction becomes one token.
    """

    patches: Tensor
    grids: Tensor
    image_indices: Tensor
    at: Tensor
    counts: Tensor
    merge: int

    @classmethod
    def of(cls, images: Sequence[PromptImages | None]) -> Pictures | None:
        """Returns the images of samples, which may have None; None if no sample has any. Equal images are stored once."""
        present = [one for one in images if one is not None]
        if not present:
            return None
        every = {
            digest: (patches, grid)
            for one in present
            for patches, grid, digest in zip(one.patches, one.grids, one.digests, strict=True)
        }
        place = {digest: number for number, digest in enumerate(every)}
        return cls(
            torch.from_numpy(np.concatenate([patches for patches, _ in every.values()])),
            torch.from_numpy(np.stack([grid for _, grid in every.values()])),
            torch.tensor([place[digest] for one in present for digest in one.digests]),
            torch.from_numpy(np.concatenate([one.at for one in present])),
            torch.tensor([0 if one is None else len(one.grids) for one in images]),
            present[0].merge,
        )

    @classmethod
    def joined(cls, several: Sequence[tuple[Pictures | None, int]]) -> Pictures | None:
        """Joins the images of several batches, each with its number of samples, one after the other."""
        present = [one for one, _ in several if one is not None]
        if not present:
            return None
        counts = [torch.zeros(n, dtype=torch.int64) if one is None else one.counts for one, n in several]
        shift, indices = 0, list[Tensor]()
        for one in present:
            indices.append(one.image_indices + shift)
            shift += len(one.grids)
        fields = {name: torch.cat([getattr(one, name) for one in present]) for name in ("patches", "grids", "at")}
        return cls(image_indices=torch.cat(indices), counts=torch.cat(counts), merge=present[0].merge, **fields)

    def select(self, samples: Tensor) -> Pictures | None:
        """Returns the images of some samples, in this order."""
        which = _ranges(self.counts, samples)
        if not len(which):
            return None
        used, indices = self.image_indices[which].unique(return_inverse=True)
        sizes = self.grids.prod(1)
        where = _ranges(sizes, used).to(self.patches.device)
        return Pictures(
            self.patches[where], self.grids[used], indices, self.at[which], self.counts[samples], self.merge
        )

    def to(self, device: torch.device) -> Pictures:
        """Moves the patches to a device."""
        return dataclasses.replace(self, patches=self.patches.to(device, non_blocking=True))

    def pack(self) -> dict[str, Any]:
        """Returns the images as arrays, for a channel."""
        return {name: getattr(self, name).numpy() for name in _TENSORS} | {"merge": self.merge}

    @classmethod
    def unpack(cls, message: Mapping[str, Any]) -> Pictures:
        """Returns the images of a message from `pack`; a copy."""
        return cls(
            merge=int(message["merge"]), **{name: torch.from_numpy(np.array(message[name])) for name in _TENSORS}
        )

    def inputs(self, cu_seqlens: Tensor, formed: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
        """Returns a model's further arguments for images.

        These are `pixel_values` and `image_grid_thw` of the images, sample by sample; `mm_token_type_ids`, which marks the
        images' tokens, and `position_ids` of three numbers, both in the form of the batch.

        Args:
            cu_seqlens: Where each sample begins, and the last one ends.
            formed: Converts values of all tokens `[T, …]` into the form in which the model reads the batch.
        """
        tokens = int(cu_seqlens[-1])
        kinds, places = torch.zeros(tokens, dtype=torch.int64), torch.empty(tokens, 3, dtype=torch.int64)
        grids = self.grids[self.image_indices]
        sizes = (grids.prod(1) // self.merge**2).tolist()
        first = 0
        for begin, end, count in zip(cu_seqlens[:-1], cu_seqlens[1:], self.counts.tolist(), strict=True):
            image_range = slice(first, first + count)
            first += count
            for at, size in zip((self.at[image_range] + begin).tolist(), sizes[image_range], strict=True):
                kinds[at : at + size] = 1
            sample_positions = positions(
                int(end - begin), self.at[image_range].numpy(), grids[image_range].numpy(), self.merge
            )
            places[begin:end] = torch.from_numpy(sample_positions).T
        device = self.patches.device
        pixels = self.patches[_ranges(self.grids.prod(1), self.image_indices).to(device)]
        kinds, places = (formed(each.to(device)) for each in (kinds, places))
        return {
            "pixel_values": pixels,
            "image_grid_thw": grids.to(device),
            "mm_token_type_ids": kinds,
            "position_ids": places.permute(2, 0, 1),
        }


_TENSORS = ("patches", "grids", "image_indices", "at", "counts")


def _ranges(lengths: Tensor, chosen: Tensor) -> Tensor:
    """Returns the indices of the parts of the chosen items, one after the other, among those of all items."""
    ends = lengths.cumsum(0)
    chosen_lengths = lengths[chosen]
    shift = (ends - lengths)[chosen] - (chosen_lengths.cumsum(0) - chosen_lengths)
    return torch.arange(int(chosen_lengths.sum())) + torch.repeat_interleave(shift, chosen_lengths)


def sub_attention(model: Any, name: str) -> str | dict[str, str]:
    """Returns transformers' setting for text attention of this name, with the vision tower's attention unchanged."""
    if not has_vision(model.config):
        return name
    return {"": name, "text_config": name, "vision_config": model.config.vision_config._attn_implementation}


def place_by_token_type(model: Any) -> None:
    """Makes a vision-language model place image features where `mm_token_type_ids` says, if it is passed.

    By default the model places them at each placeholder token. But a model may generate such a token, which then is an
    ordinary token.
    """
    if not has_vision(model.config):
        return
    trunk = _trunk(model)
    original_mask, call_inputs = trunk.get_placeholder_mask, dict[str, Any]()

    def before(_: nn.Module, __: Any, arguments: dict[str, Any]) -> None:
        call_inputs["kinds"] = arguments.get("mm_token_type_ids")

    def places(input_ids: Any, inputs_embeds: Tensor, *args: Any, **named: Any) -> tuple[Tensor, Tensor]:
        kinds = call_inputs.get("kinds")
        if kinds is None:
            default_masks: tuple[Tensor, Tensor] = original_mask(input_ids, inputs_embeds, *args, **named)
            return default_masks
        pictures, films = ((kinds == kind).unsqueeze(-1) for kind in (1, 2))
        return pictures, films

    trunk.register_forward_pre_hook(before, with_kwargs=True)
    trunk.get_placeholder_mask = places


def always_run_vision(model: Any) -> None:
    """Makes a vision-language model run its vision tower in every pass: on a blank image, placed at no token, in batches
    without.

    The outputs are unchanged, and the vision tower's gradient is zero there. Ranks with sharded weights thus issue the same
    collectives for weights and gradients, whichever of them have images.
    """
    config = model.config.vision_config
    side, width = config.spatial_merge_size, config.in_channels * config.temporal_patch_size * config.patch_size**2

    def before(_: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
        if named.get("pixel_values") is not None:
            return None
        ids = named["input_ids"]
        blank = {
            "pixel_values": torch.zeros(side**2, width, device=ids.device),
            "image_grid_thw": torch.tensor([[1, side, side]], device=ids.device),
            "mm_token_type_ids": torch.zeros_like(ids),
        }
        if named.get("position_ids") is None:  # of text; otherwise derived from the image
            blank["position_ids"] = torch.arange(ids.shape[1], device=ids.device).expand(ids.shape)
        return inputs, {**named, **blank}

    # Before the hook of `place_by_token_type`, which reads the blank image's token types.
    _trunk(model).register_forward_pre_hook(before, prepend=True, with_kwargs=True)


def tower_of(model: Any) -> Any:
    """Returns a model's vision tower; None if it has none, or its family is not supported."""
    return _trunk(model).visual if model.config.model_type in FAMILIES else None


def _trunk(model: Any) -> Any:
    """Returns the model below the LM head."""
    return getattr(model, model.base_model_prefix)


def freeze_vision(model: Any, key: str) -> None:
    """Freezes the vision tower.

    Args:
        model: From transformers.
        key: Name of the section in messages.

    Raises:
        ConfigError: The model has no vision tower.
    """
    if not has_vision(model.config):
        raise ConfigError(f"{key}.model.freeze_vision is true, and a {type(model).__name__} does not look at pictures")
    _trunk(model).visual.requires_grad_(False)
