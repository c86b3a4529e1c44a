"""Proof that what acts is what was trained: what was handed over, tensor by tensor, and what was taken in.

A tensor's digest is that of a sample of its bytes: all of a small one, every so many pages of a large one, other pages with
each version. So it costs next to nothing, on an accelerator, too. An optimizer changes elements everywhere, so one tensor in
place of another, or of an older version, differs in the sample; that it differs in a few elements alone is noticed within as
many versions as there are samples.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import xxhash

from rlhpc.runtime.errors import RlhpcError
from rlhpc.weights.elements import Elements

if TYPE_CHECKING:
    from rlhpc.weights.strategy import NamedUpdates, Update

#: Bytes that are taken together, and those of a sample at least.
_PAGE, _LEAST = 4096, 1 << 16
#: Samples in which a large tensor is looked at whole.
_SAMPLES = 64
#: Names in a message.
_SHOWN = 4


class WeightsDiffer(RlhpcError):
    """What was taken in is not what was handed over. Nobody may act with it."""


@dataclass(frozen=True)
class Receipt:
    """What a version was to be.

    Attributes:
        version: Version of the weights.
        digests: Of each tensor that the sender was given, by name. Those that never change and were sent before may be
            missing.
    """

    version: int
    digests: dict[str, int]


def digest(tensor: torch.Tensor, version: int) -> int:
    """64 bits that stand for a tensor's bytes in a version.

    Args:
        tensor: Any dtype, shape and device.
        version: Chooses the sample.
    """
    if not tensor.numel():
        return 0
    tensor = tensor.detach().contiguous()
    every = min(_SAMPLES, tensor.nbytes // _LEAST)
    if every > 1 and tensor.device.type != "cpu":  # so that only the sample leaves the accelerator
        return _of(*(part.cpu().numpy() for part in _sample(tensor.view(-1).view(torch.uint8), version, every)))
    if tensor.device.type != "cpu":
        tensor = tensor.cpu()
    # By its address: there are hundreds of small ones, and acting waits for them.
    memory = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
    if every <= 1:
        return _of(memory)
    # By numpy: it copies pages as such, and torch byte by byte.
    return _of(*map(np.ascontiguousarray, _sample(np.frombuffer(memoryview(memory), np.uint8), version, every)))


def _sample(data: Any, version: int, every: int) -> tuple[Any, Any]:
    """Of bytes, those behind the last page; and one of every so many pages."""
    pages = len(data) // _PAGE
    return data[pages * _PAGE :], data[: pages * _PAGE].reshape(pages, _PAGE)[version % every :: every]


def _of(*parts: Any) -> int:
    if len(parts) == 1:
        only: int = xxhash.xxh3_64_intdigest(parts[0])
        return only
    found = xxhash.xxh3_64()
    for part in parts:
        found.update(part)
    return int(found.intdigest())


class Proof:
    """Follows an update to where it is taken in.

    Args:
        update: As a `WeightSync` gave it.
        source: Who sent it, for messages.
        look: Whether what passes is looked at; not where all that is held afterwards is.
    """

    def __init__(self, update: Update, source: str = "the sender", *, look: bool = True) -> None:
        self._update, self._source, self._look = update, source, look
        self._seen: dict[str, int] = {}
        self._twice: list[str] = []

    def tensors(self) -> NamedUpdates:
        """The update's tensors, each looked at as it passes."""
        version = self._update.version
        for name, what in self._update.tensors:
            if name in self._seen:
                self._twice.append(name)
            self._seen[name] = digest(what, version) if self._look and not isinstance(what, Elements) else 0
            yield name, what

    def whole(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The same, for who asked for tensors alone."""
        for name, what in self.tensors():
            assert not isinstance(what, Elements), "whole updates were asked for"
            yield name, what

    def check(self, held: Callable[[str], torch.Tensor | None] | None = None) -> None:
        """Compares, once all is taken in.

        Args:
            held: The tensor of a name as it is held now; None where it is held in another form or dtype: what passed counts
                then.

        Raises:
            WeightsDiffer: Names tensors that are others, or did not come, or came twice.
        """
        receipt = self._update.receipt()
        if receipt is None:  # a strategy of the user's own, which gives none
            return
        find = functools.partial(self._found, held)
        other = [name for name, expected in receipt.digests.items() if find(name) not in (expected, None)]
        lacking = [name for name in receipt.digests if self._update.complete and name not in self._seen]
        if receipt.version != self._update.version:
            raise WeightsDiffer(
                f"weights of version {self._update.version} came with the receipt of version {receipt.version} from "
                f"{self._source}: nobody acts with them"
            )
        for names, what in (
            (other, "are others than"),
            (lacking, "did not come from"),
            (self._twice, "came twice from"),
        ):
            if names:
                more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
                raise WeightsDiffer(
                    f"weights of version {receipt.version}: {', '.join(names[:_SHOWN])}{more} {what} "
                    f"{'those that ' if names is other else ''}{self._source}{' handed over' if names is other else ''}: "
                    "nobody acts with them"
                )

    def _found(self, held: Callable[[str], torch.Tensor | None] | None, name: str) -> int | None:
        """The digest of what is there by a name; None if only a part of it passed, and what is held cannot be seen."""
        tensor = None if held is None else held(name)
        if tensor is not None:
            return digest(tensor, self._update.version)
        return self._seen.get(name) or None
