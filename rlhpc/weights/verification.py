"""Verification that workers act with the trained weights: compares digests of the tensors that were sent with those applied.

A digest covers all bytes of a small tensor and every n-th page of a large tensor. The sampled pages change with each version.
This costs little, also on an accelerator. An optimizer changes elements everywhere, so the sample differs if a tensor was
swapped with another tensor or with an older version. A difference in a few elements is detected within n versions.
"""

from __future__ import annotations

import contextlib
import ctypes
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import xxhash

from rlhpc.runtime.errors import RlhpcError
from rlhpc.weights.delta import Elements

if TYPE_CHECKING:
    from rlhpc.weights.base import NamedUpdates, Receipt, Update


#: Bytes of a page.
_PAGE = 4096
#: Minimum bytes of a sample.
_MIN_SAMPLE_BYTES = 1 << 16
#: Returns a 64-bit digest of a buffer.
_digest: Callable[[Any], int] = xxhash.xxh3_64_intdigest
#: Number of samples that cover a large tensor completely.
_SAMPLES = 64


def digest(tensor: torch.Tensor, version: int) -> int:
    """Returns a 64-bit digest of a tensor's bytes in a version.

    Args:
        tensor: Any dtype, shape and device.
        version: Version of the weights; it selects the sampled pages.
    """
    nbytes = tensor.nbytes
    if not nbytes:
        return 0
    num_samples = min(_SAMPLES, nbytes // _MIN_SAMPLE_BYTES)
    if not tensor.is_cpu or not tensor.is_contiguous():
        tensor = tensor.detach().contiguous()
        if num_samples > 1 and not tensor.is_cpu:  # so that only the sample leaves the accelerator
            return _digest_of(
                *(sampled.cpu().numpy() for sampled in _sample(tensor.view(-1).view(torch.uint8), version, num_samples))
            )
        tensor = tensor.cpu()
    memory = (ctypes.c_char * nbytes).from_address(tensor.data_ptr())
    if num_samples <= 1:
        return _digest(memory)
    # numpy copies whole pages, torch single bytes.
    return _digest_of(
        *map(np.ascontiguousarray, _sample(np.frombuffer(memoryview(memory), np.uint8), version, num_samples))
    )


def digests(tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> dict[str, int]:
    """Returns the digest of each tensor, by name. Small tensors take a fast path, because workers wait for the digests."""
    digests_by_name: dict[str, int] = {}
    for name, tensor in tensors:
        nbytes = tensor.nbytes
        if 0 < nbytes < 2 * _MIN_SAMPLE_BYTES and tensor.is_cpu and tensor.is_contiguous():  # `digest` inlined
            digests_by_name[name] = _digest((ctypes.c_char * nbytes).from_address(tensor.data_ptr()))
        else:
            digests_by_name[name] = digest(tensor, version)
    return digests_by_name


def _sample(data: Any, version: int, every: int) -> tuple[Any, Any]:
    """Returns the bytes after the last complete page, and every `every`-th page, `[num_pages, _PAGE]`."""
    pages = len(data) // _PAGE
    return data[pages * _PAGE :], data[: pages * _PAGE].reshape(pages, _PAGE)[version % every :: every]


def _digest_of(*buffers: Any) -> int:
    hasher = xxhash.xxh3_64()
    for buffer in buffers:
        hasher.update(buffer)
    return int(hasher.intdigest())


class Cost:
    """CPU seconds of verification and of this process since the last `pop`."""

    def __init__(self) -> None:
        self._verification_s, self._since, self._is_measuring = 0.0, time.process_time(), False

    @contextlib.contextmanager
    def measuring(self, clock: Callable[[], float] = time.thread_time) -> Iterator[None]:
        """Counts the CPU time of a block; a nested block is not counted twice.

        Args:
            clock: Returns CPU seconds: of this thread by default; `time.process_time` includes torch's threads.
        """
        if self._is_measuring:
            yield
            return
        self._is_measuring, start = True, clock()
        try:
            yield
        finally:
            self._is_measuring = False
            self._verification_s += clock() - start

    def pop(self) -> dict[str, float]:
        """Returns and resets the CPU seconds of verification (`proof_s`) and of the whole process (`cpu_s`)."""
        now = time.process_time()
        seconds = {"proof_s": self._verification_s, "cpu_s": now - self._since}
        self._verification_s, self._since = 0.0, now
        return seconds


#: Cost of verification in this process.
COST = Cost()


#: Maximum number of names in a message.
_MAX_NAMES = 4


class WeightsDiffer(RlhpcError):
    """Received weights that differ from the weights sent. No worker may act with them."""


class UpdateVerification:
    """Verification of one update from its arrival until it has been applied.

    Args:
        update: Update returned by a `WeightSync`.
        source: Name of the sender, for messages.
        digest_on_arrival: Compute digests of the tensors as they arrive. Set it to False if `check` gets all applied tensors.
    """

    def __init__(self, update: Update, source: str = "the sender", *, digest_on_arrival: bool = True) -> None:
        self._update, self._source, self._digest_on_arrival = update, source, digest_on_arrival
        self._arrival_digests: dict[str, int] = {}
        self._duplicates: list[str] = []

    def tensors(self) -> NamedUpdates:
        """Yields the update's tensors, and computes the digest of each one first if `digest_on_arrival` is set."""
        version = self._update.version
        for name, tensor in self._update.tensors:
            if name in self._arrival_digests:
                self._duplicates.append(name)
            self._arrival_digests[name] = 0
            if self._digest_on_arrival and not isinstance(tensor, Elements):
                with COST.measuring():
                    self._arrival_digests[name] = digest(tensor, version)
            yield name, tensor

    def complete_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields the tensors of an update that contains no `Elements`. `check` verifies them afterwards."""
        for name, tensor in self.tensors():
            assert not isinstance(tensor, Elements), "whole updates were asked for"
            yield name, tensor

    @COST.measuring()
    def check(self, current_tensor: Callable[[str], torch.Tensor | None] | None = None) -> None:
        """Compares the digests, after all tensors have been applied.

        Args:
            current_tensor: Returns the receiver's tensor of a name; None if the receiver stores it in another form or dtype,
                so that the digest of the received tensor is compared.

        Raises:
            WeightsDiffer: Tensors differ, are missing or came twice (the message names them), or the receipt is of another
                version.
        """
        receipt = self._update.receipt()
        if receipt is None:  # a user's strategy without digests
            return
        changed = self._differing_names(receipt, current_tensor)
        missing = (
            [name for name in receipt.digests if name not in self._arrival_digests] if self._update.complete else []
        )
        if receipt.version != self._update.version:
            raise WeightsDiffer(
                f"weights of version {self._update.version} came with the receipt of version {receipt.version} from "
                f"{self._source}: nobody acts with them"
            )
        for names, relation in (
            (changed, "are others than"),
            (missing, "did not come from"),
            (self._duplicates, "came twice from"),
        ):
            if names:
                omitted = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
                raise WeightsDiffer(
                    f"weights of version {receipt.version}: {', '.join(names[:_MAX_NAMES])}{omitted} {relation} "
                    f"{'those that ' if names is changed else ''}{self._source}{' handed over' if names is changed else ''}: "
                    "nobody acts with them"
                )

    def _differing_names(
        self, receipt: Receipt, current_tensor: Callable[[str], torch.Tensor | None] | None
    ) -> list[str]:
        """Returns the names of the tensors that differ from the receipt. Compares the digest of the receiver's tensor or, if
        there is no such tensor, of the received tensor.
        """
        current = [] if current_tensor is None else [(name, current_tensor(name)) for name in receipt.digests]
        applied = digests([(name, tensor) for name, tensor in current if tensor is not None], self._update.version)
        if applied == receipt.digests:
            return []
        received = {
            name: digest_value for name, digest_value in self._arrival_digests.items() if digest_value
        }  # 0: elements are not digested
        return [
            name
            for name, digest_value in receipt.digests.items()
            if applied.get(name, received.get(name, digest_value)) != digest_value
        ]
