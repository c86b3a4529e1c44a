"""Verification that workers act with the trained weights: compares digests of the tensors that were sent with those applied.

A digest covers all bytes of a small tensor and every n-th page of a large tensor. The sampled pages change with each version.
This costs little, even on an accelerator. An optimizer changes elements everywhere, so the sample differs if a tensor was
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
from rlhpc.runtime.text import format_names
from rlhpc.weights.delta import Elements

if TYPE_CHECKING:
    from rlhpc.weights.base import NamedUpdates, Update, VersionDigests


#: Bytes of a page.
_PAGE = 4096
#: Minimum bytes of a sample.
_MIN_SAMPLE_BYTES = 1 << 16
#: Bytes of samples on an accelerator that the host reads at once.
_MAX_SAMPLED_BYTES = 32 << 20
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
    if not tensor.is_cpu:
        return _digest(_device_sample(tensor, version).cpu().numpy())
    tensor = tensor.detach().contiguous()
    num_samples = _num_samples(nbytes)
    memory = (ctypes.c_char * nbytes).from_address(tensor.data_ptr())
    if num_samples <= 1:
        return _digest(memory)
    # numpy copies whole pages, torch single bytes.
    return _digest_of(
        *map(np.ascontiguousarray, _sample(np.frombuffer(memoryview(memory), np.uint8), version, num_samples))
    )


def digests(tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> dict[str, int]:
    """Returns the digest of each tensor, by name. Small tensors take a fast path, because workers wait for the digests; those
    on an accelerator are read in few copies (`_DeviceSamples`).
    """
    digests_by_name: dict[str, int] = {}
    device_samples = _DeviceSamples()
    for name, tensor in tensors:
        nbytes = tensor.nbytes
        if 0 < nbytes < 2 * _MIN_SAMPLE_BYTES and tensor.is_cpu and tensor.is_contiguous():  # `digest` inlined
            digests_by_name[name] = _digest((ctypes.c_char * nbytes).from_address(tensor.data_ptr()))
        elif tensor.is_cpu or not nbytes:
            digests_by_name[name] = digest(tensor, version)
        else:
            digests_by_name[name] = 0  # for the order of the names
            digests_by_name.update(device_samples.add(name, tensor, version))
    return {**digests_by_name, **device_samples.pop()}


def _num_samples(nbytes: int) -> int:
    """Returns the number of samples that cover a tensor; it is read completely if there are fewer than two."""
    return min(_SAMPLES, nbytes // _MIN_SAMPLE_BYTES)


def _device_sample(tensor: torch.Tensor, version: int) -> torch.Tensor:
    """Returns the bytes that a digest covers, of a tensor on an accelerator: flat, uint8. The host does not wait for them."""
    flat_bytes, num_samples = tensor.detach().contiguous().view(-1).view(torch.uint8), _num_samples(tensor.nbytes)
    if num_samples <= 1:
        return flat_bytes
    tail, pages = _sample(flat_bytes, version, num_samples)
    return torch.cat((tail, pages.reshape(-1)))


class _DeviceSamples:
    """Samples of tensors on an accelerator, of which the host reads many in one copy. It would otherwise wait for the
    accelerator hundreds of times an update.
    """

    def __init__(self) -> None:
        self._samples: list[tuple[str, torch.Tensor]] = []
        self._nbytes = 0

    def add(self, name: str, tensor: torch.Tensor, version: int, *, may_change: bool = False) -> dict[str, int]:
        """Adds a tensor's sample; returns the digests of the samples so far if they are many, else {}.

        Args:
            name: Name of the tensor.
            tensor: The tensor.
            version: See `digest`.
            may_change: Whether the tensor may change before its sample is read.
        """
        sample = _device_sample(tensor, version)
        if may_change and sample.data_ptr() == tensor.data_ptr():
            sample = sample.clone()
        is_other_device = bool(self._samples) and self._samples[0][1].device != sample.device
        digests_by_name = self.pop() if is_other_device else {}
        self._samples.append((name, sample))
        self._nbytes += sample.nbytes
        return {**digests_by_name, **self.pop()} if self._nbytes >= _MAX_SAMPLED_BYTES else digests_by_name

    def pop(self) -> dict[str, int]:
        """Returns the digests of the samples, by name, and removes the samples."""
        samples, self._samples, self._nbytes = self._samples, [], 0
        if not samples:
            return {}
        memory, digests_by_name, start = torch.cat([sample for _, sample in samples]).cpu().numpy(), {}, 0
        for name, sample in samples:
            digests_by_name[name] = _digest(memory[start : start + len(sample)])
            start += len(sample)
        return digests_by_name


def _sample(data: Any, version: int, stride: int) -> tuple[Any, Any]:
    """Returns the bytes after the last complete page, and every `stride`-th page, `[num_pages, _PAGE]`."""
    num_pages = len(data) // _PAGE
    return data[num_pages * _PAGE :], data[: num_pages * _PAGE].reshape(num_pages, _PAGE)[version % stride :: stride]


def _digest_of(*buffers: Any) -> int:
    hasher = xxhash.xxh3_64()
    for buffer in buffers:
        hasher.update(buffer)
    return int(hasher.intdigest())


class Cost:
    """CPU seconds of verification and of this process since the last `pop`."""

    def __init__(self) -> None:
        self._verification_s, self._started_at, self._is_measuring = 0.0, time.process_time(), False

    @contextlib.contextmanager
    def measure(self, clock: Callable[[], float] = time.thread_time) -> Iterator[None]:
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
        """Returns and resets the CPU seconds of verification (`proof_s`) and of the process (`cpu_s`)."""
        now = time.process_time()
        seconds = {"proof_s": self._verification_s, "cpu_s": now - self._started_at}
        self._verification_s, self._started_at = 0.0, now
        return seconds


#: Cost of verification in this process.
COST = Cost()


class WeightsDiffer(RlhpcError):
    """Received weights that differ from the weights sent. No worker may act with them."""


class UpdateVerification:
    """Verification of one update from its arrival until it has been applied.

    Args:
        update: Update returned by a `WeightSync`.
        source: Name of the sender, for messages.
        digests_on_arrival: Compute digests of the tensors as they arrive. Set it to False if `check` gets all applied tensors.
    """

    def __init__(self, update: Update, source: str = "the sender", *, digests_on_arrival: bool = True) -> None:
        self._update, self._source, self._digests_on_arrival = update, source, digests_on_arrival
        self._arrival_digests: dict[str, int] = {}
        self._duplicates: list[str] = []
        self._device_samples = _DeviceSamples()

    def tensors(self) -> NamedUpdates:
        """Yields the update's tensors, and computes the digest of each one first if `digests_on_arrival` is set."""
        version = self._update.version
        for name, tensor in self._update.tensors:
            if name in self._arrival_digests:
                self._duplicates.append(name)
            self._arrival_digests[name] = 0
            if self._digests_on_arrival and not isinstance(tensor, Elements):
                with COST.measure():
                    if tensor.is_cpu or not tensor.nbytes:
                        self._arrival_digests[name] = digest(tensor, version)
                    else:
                        self._arrival_digests |= self._device_samples.add(name, tensor, version, may_change=True)
            yield name, tensor

    def complete_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields the tensors of an update that contains no `Elements`. `check` verifies them afterwards."""
        for name, tensor in self.tensors():
            assert not isinstance(tensor, Elements), "whole updates were asked for"
            yield name, tensor

    @COST.measure()
    def check(self, find_current: Callable[[str], torch.Tensor | None] | None = None) -> None:
        """Compares the digests, after all tensors have been applied.

        Args:
            find_current: Returns the receiver's tensor of a name; None if the receiver stores it in a different
                form or dtype; then the digest of the received tensor is compared.

        Raises:
            WeightsDiffer: Tensors differ, are missing or arrived twice (the message names them), or the digests belong to
                a different version.
        """
        version_digests = self._update.version_digests()
        self._arrival_digests |= self._device_samples.pop()
        differing_names = [] if version_digests is None else self._differing_names(version_digests, find_current)
        if (transfer := self._update.transfer) is not None:
            transfer.end_s = time.monotonic()  # digests have waited for pending copies on an accelerator
        if version_digests is None:  # a user's strategy without digests
            return
        missing_names = (
            [name for name in version_digests.digests if name not in self._arrival_digests]
            if self._update.complete
            else []
        )
        if version_digests.version != self._update.version:
            raise WeightsDiffer(
                f"weights of version {self._update.version} came with the digests of version {version_digests.version} from "
                f"{self._source}: nobody acts with them"
            )
        for names, relation in (
            (differing_names, "are others than"),
            (missing_names, "did not come from"),
            (self._duplicates, "came twice from"),
        ):
            if names:
                source_text = f"those that {self._source} handed over" if names is differing_names else self._source
                raise WeightsDiffer(
                    f"weights of version {version_digests.version}: {format_names(names)} {relation} "
                    f"{source_text}: "
                    "nobody acts with them"
                )

    def _differing_names(
        self, version_digests: VersionDigests, find_current: Callable[[str], torch.Tensor | None] | None
    ) -> list[str]:
        """Returns the tensors that differ from the sender's digests. Compares the digest of the receiver's tensor or, if
        there is no such tensor, of the received tensor.
        """
        current_tensors = (
            [] if find_current is None else [(name, find_current(name)) for name in version_digests.digests]
        )
        applied_digests = digests(
            [(name, tensor) for name, tensor in current_tensors if tensor is not None], self._update.version
        )
        if applied_digests == version_digests.digests:
            return []
        received_digests = {
            name: digest_value for name, digest_value in self._arrival_digests.items() if digest_value
        }  # 0: elements are not digested
        return [
            name
            for name, digest_value in version_digests.digests.items()
            if applied_digests.get(name, received_digests.get(name, digest_value)) != digest_value
        ]
