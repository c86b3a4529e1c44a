"""Pictures of a batch: each is there once, however many samples look at it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rlhpc.language.data.images import FAMILIES, PromptImages, looks, positions
from rlhpc.runtime.errors import ConfigError


@dataclass
class Pictures:
    """What N samples look at: M pictures of P patches in all, of which the samples see K.

    Attributes:
        patches: `[P, d]` float32, picture by picture.
        grids: `[M, 3]` int64, on the host: frames, rows and columns of each picture's patches.
        shown: `[K]` int64, on the host: which picture, sample by sample.
        at: `[K]` int64, on the host: at which token of its sample its first one stands.
        counts: `[N]` int64, on the host: how many each sample sees.
        merge: So many patches in each direction become one token.
    """

    patches: Tensor
    grids: Tensor
    shown: Tensor
    at: Tensor
    counts: Tensor
    merge: int

    @classmethod
    def of(cls, seen: Sequence[PromptImages | None]) -> Pictures | None:
        """Those of samples, each with what it sees; None if none sees anything. The same picture is kept once."""
        there = [one for one in seen if one is not None]
        if not there:
            return None
        every = {
            digest: (patches, grid)
            for one in there
            for patches, grid, digest in zip(one.patches, one.grids, one.digests, strict=True)
        }
        place = {digest: number for number, digest in enumerate(every)}
        return cls(
            torch.from_numpy(np.concatenate([patches for patches, _ in every.values()])),
            torch.from_numpy(np.stack([grid for _, grid in every.values()])),
            torch.tensor([place[digest] for one in there for digest in one.digests]),
            torch.from_numpy(np.concatenate([one.at for one in there])),
            torch.tensor([0 if one is None else len(one.grids) for one in seen]),
            there[0].merge,
        )

    @classmethod
    def joined(cls, several: Sequence[tuple[Pictures | None, int]]) -> Pictures | None:
        """Those of several batches, each with its number of samples, one after the other."""
        there = [one for one, _ in several if one is not None]
        if not there:
            return None
        counts = [torch.zeros(n, dtype=torch.int64) if one is None else one.counts for one, n in several]
        shift, shown = 0, list[Tensor]()
        for one in there:
            shown.append(one.shown + shift)
            shift += len(one.grids)
        rest = {name: torch.cat([getattr(one, name) for one in there]) for name in ("patches", "grids", "at")}
        return cls(shown=torch.cat(shown), counts=torch.cat(counts), merge=there[0].merge, **rest)

    def select(self, samples: Tensor) -> Pictures | None:
        """Those of some samples, in this order."""
        which = _ranges(self.counts, samples)
        if not len(which):
            return None
        kept, shown = self.shown[which].unique(return_inverse=True)
        sizes = self.grids.prod(1)
        where = _ranges(sizes, kept).to(self.patches.device)
        return Pictures(
            self.patches[where], self.grids[kept], shown, self.at[which], self.counts[samples], self.merge
        )  # fmt: skip

    def to(self, device: torch.device) -> Pictures:
        """The patches on a device."""
        return dataclasses.replace(self, patches=self.patches.to(device, non_blocking=True))

    def pack(self) -> dict[str, Any]:
        """As arrays, to go through a channel."""
        return {name: getattr(self, name).numpy() for name in _TENSORS} | {"merge": self.merge}

    @classmethod
    def unpack(cls, message: Mapping[str, Any]) -> Pictures:
        """What `pack` made; a copy."""
        return cls(
            merge=int(message["merge"]), **{name: torch.from_numpy(np.array(message[name])) for name in _TENSORS}
        )

    def inputs(self, cu_seqlens: Tensor, formed: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
        """A model's further arguments: `pixel_values` and `image_grid_thw` of what is shown, sample by sample; which tokens
        are parts of pictures, `mm_token_type_ids`, and `position_ids` of three numbers, both in the form of the batch.

        Args:
            cu_seqlens: Where each sample begins, and the last one ends.
            formed: Puts values of all tokens `[T, …]` into the form in which the model reads the batch.
        """
        tokens = int(cu_seqlens[-1])
        kinds, places = torch.zeros(tokens, dtype=torch.int64), torch.empty(tokens, 3, dtype=torch.int64)
        grids = self.grids[self.shown]
        sizes = (grids.prod(1) // self.merge**2).tolist()
        first = 0
        for begin, end, count in zip(cu_seqlens[:-1], cu_seqlens[1:], self.counts.tolist(), strict=True):
            own = slice(first, first + count)
            first += count
            for at, size in zip((self.at[own] + begin).tolist(), sizes[own], strict=True):
                kinds[at : at + size] = 1
            found = positions(int(end - begin), self.at[own].numpy(), grids[own].numpy(), self.merge)
            places[begin:end] = torch.from_numpy(found).T
        device = self.patches.device
        shown = self.patches[_ranges(self.grids.prod(1), self.shown).to(device)]
        kinds, places = (formed(each.to(device)) for each in (kinds, places))
        return {
            "pixel_values": shown,
            "image_grid_thw": grids.to(device),
            "mm_token_type_ids": kinds,
            "position_ids": places.permute(2, 0, 1),
        }


_TENSORS = ("patches", "grids", "shown", "at", "counts")


def _ranges(lengths: Tensor, chosen: Tensor) -> Tensor:
    """Where the parts of some stand, one after the other, among those of all."""
    ends = lengths.cumsum(0)
    own = lengths[chosen]
    shift = (ends - lengths)[chosen] - (own.cumsum(0) - own)
    return torch.arange(int(own.sum())) + torch.repeat_interleave(shift, own)


def sub_attention(model: Any, name: str) -> str | dict[str, str]:
    """What transformers is told so that a model reads by the attention of a name, and looks at pictures by its own."""
    if not looks(model.config):
        return name
    return {"": name, "text_config": name, "vision_config": model.config.vision_config._attn_implementation}


def tell_places(model: Any) -> None:
    """Has a model that looks put what it sees where `mm_token_type_ids` says, if it is given, rather than at each token that
    stands for a part of a picture: a model may write such a token, which then is one like any other."""
    if not looks(model.config):
        return
    trunk = _trunk(model)
    own, told = trunk.get_placeholder_mask, dict[str, Any]()

    def before(_: nn.Module, __: Any, arguments: dict[str, Any]) -> None:
        told["kinds"] = arguments.get("mm_token_type_ids")

    def places(input_ids: Any, inputs_embeds: Tensor, *rest: Any, **named: Any) -> tuple[Tensor, Tensor]:
        kinds = told.get("kinds")
        if kinds is None:
            found: tuple[Tensor, Tensor] = own(input_ids, inputs_embeds, *rest, **named)
            return found
        pictures, films = ((kinds == kind).unsqueeze(-1) for kind in (1, 2))
        return pictures, films

    trunk.register_forward_pre_hook(before, with_kwargs=True)
    trunk.get_placeholder_mask = places


def look_always(model: Any) -> None:
    """Has a model that looks do so in every pass: where a batch shows nothing, at a blank picture that stands at none of its
    tokens. What the model says is the same, and the gradient of the part that looks is zero there. Ranks that hold a part of
    the weights each thus gather them, and sum their gradients, alike, whichever of them see something."""
    config = model.config.vision_config
    side, width = config.spatial_merge_size, config.in_channels * config.temporal_patch_size * config.patch_size**2

    def before(_: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
        if named.get("pixel_values") is not None:
            return None
        ids = named["input_ids"]
        blank = {
            "pixel_values": torch.zeros(side**2, width, device=ids.device),
            "image_grid_thw": torch.tensor([[1, side, side]], device=ids.device),
            "mm_token_type_ids": torch.zeros_like(ids),
        }
        if named.get("position_ids") is None:  # a text's, which it would work out from the picture otherwise
            blank["position_ids"] = torch.arange(ids.shape[1], device=ids.device).expand(ids.shape)
        return given, {**named, **blank}

    # Before `tell_places`, which is to see where the blank picture stands.
    _trunk(model).register_forward_pre_hook(before, prepend=True, with_kwargs=True)


def tower_of(model: Any) -> Any:
    """The part of a model that looks at pictures; None if it has none, or is of a family that is not known here."""
    return _trunk(model).visual if model.config.model_type in FAMILIES else None


def _trunk(model: Any) -> Any:
    """What is below a model's head."""
    return getattr(model, model.base_model_prefix)


def freeze_vision(model: Any, key: str) -> None:
    """Trains nothing of the part that looks at pictures.

    Args:
        model: From transformers.
        key: What messages call the section.

    Raises:
        ConfigError: It has none.
    """
    if not looks(model.config):
        raise ConfigError(f"{key}.model.freeze_vision is true, and a {type(model).__name__} does not look at pictures")
    _trunk(model).visual.requires_grad_(False)
