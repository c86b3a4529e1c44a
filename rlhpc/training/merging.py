"""Adapters merged into what is sent: once, and into the weights that they were trained beside.

Each merge is looked at where it is made, before anything is sent. Of every layer with adapters a sample of its own weights is
kept as they were when they were first read: what is merged must be those weights, bit for bit, and what comes of it must be
their sum with the adapters' product, to the rounding of its dtype. A second merge is wrong by as much as an update changes,
also where that is far too little for anybody to notice by what the model says.
"""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

import torch
from torch import nn

from rlhpc.runtime.errors import RlhpcError

#: Where a part of a weight begins, by dimension.
Part = tuple[int, ...]

#: Elements of a sample that are spread evenly; as many again are those closest to zero among so many. In half precision
#: a small update changes nothing but those.
_SAMPLE, _AMONG = 4096, 1 << 18
#: How far the product may be off, of the sum of its terms' magnitudes: some kernels round factors to ten bits.
_ROUNDED = 2.0**-9


class _Sample(NamedTuple):
    """Positions in a flattened weight, and the elements that were there."""

    at: torch.Tensor
    held: torch.Tensor


#: By layer, for as long as there is one, and by the part of its weights.
_BASES: weakref.WeakKeyDictionary[nn.Module, dict[Part, _Sample]] = weakref.WeakKeyDictionary()


def merged(
    layer: Any, name: str, base: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: float, part: Part = ()
) -> torch.Tensor:
    """A layer's weights with its adapters in them, in their dtype; nothing is written to the layer.

    Args:
        layer: peft's, with the adapters of one name.
        name: Of the weights, for messages.
        base: The layer's own weights, [out, in], or transposed if the layer has `fan_in_fan_out`; whole, or a part.
        a: The first adapter, [rank, in], as far as it belongs to the part.
        b: The second, [out, rank], likewise.
        scale: What their product is multiplied by.
        part: Where the part begins.

    Raises:
        RlhpcError: The layer's own weights have changed, or what comes out is not their sum with the product.
    """
    if not base.numel():
        return base
    sample = _sample_of(layer, part, base)
    if layer.merged or not torch.equal(_bytes(base, sample.at), _bytes(sample.held)):
        raise RlhpcError(
            f"{name} has changed, though only its adapters are trained: they would be merged twice. If code of yours calls "
            "merge_adapter(), or writes to the model's weights, let it do so to a copy"
        )
    found = _sum(base, a, b, scale, layer.fan_in_fan_out)
    if not _is_sum(sample, found, a, b, scale, layer.fan_in_fan_out):
        raise RlhpcError(
            f"{name} as it is to be sent is not the model's weight and its adapters' product, once each: nothing is sent"
        )
    return found


def _sum(base: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: float, transposed: bool) -> torch.Tensor:
    delta = (b.float() @ a.float()).mul_(scale)
    return (base.float() + (delta.T if transposed else delta)).to(base.dtype)


def _sample_of(layer: nn.Module, part: Part, base: torch.Tensor) -> _Sample:
    """What is kept of a part of a layer; from its first call on."""
    kept = _BASES.setdefault(layer, {})
    if part not in kept:
        flat, spread, among = base.flatten(), _every(base, _SAMPLE), _every(base, _AMONG)
        closest = flat[among].abs().float().topk(min(_SAMPLE, len(among)), largest=False).indices.cpu()
        at = torch.cat([spread, among[closest]]).cpu()
        kept[part] = _Sample(at, flat[at].cpu())
    return kept[part]


def _every(base: torch.Tensor, count: int) -> torch.Tensor:
    """Positions of at most so many elements, evenly spread."""
    return torch.arange(0, base.numel(), max(1, -(-base.numel() // count)))


def _bytes(tensor: torch.Tensor, at: torch.Tensor | None = None) -> torch.Tensor:
    """Elements as bytes, for which NaN equals itself, on the host."""
    return (tensor if at is None else tensor.flatten()[at]).cpu().contiguous().view(torch.uint8)


def _is_sum(
    sample: _Sample, found: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: float, transposed: bool
) -> bool:
    """Whether each element of the sample is what it was and the product, rounded once.

    The product is made otherwise than by `_sum`: element by element, which no kernel rounds to ten bits.
    """
    row, column = sample.at // found.shape[1], sample.at % found.shape[1]
    outs, ins = (column, row) if transposed else (row, column)
    terms = b[outs].float() * a.T[ins].float() * scale
    delta, size = terms.sum(1).cpu().double(), terms.abs().sum(1).cpu().double()
    expected, single = sample.held.double() + delta, torch.finfo(torch.float32)
    off = expected.abs() * single.eps + size * _ROUNDED + single.tiny
    least, most = (expected - off).to(found.dtype), (expected + off).to(found.dtype)
    held = found.flatten()[sample.at].cpu()
    # What is not finite is told elsewhere, with more to say about it.
    return bool(((least <= held) & (held <= most) | ~expected.isfinite()).all())
