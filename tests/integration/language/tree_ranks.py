"""What the ranks of the tests with many hosts do; importable by the workers."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch
from weight_ranks import digest

from rlhpc import Worker
from rlhpc.runtime.comm.context import current
from rlhpc.weights import make_sync
from rlhpc.weights.receiver import apply
from rlhpc.weights.transport import WeightSender

#: Tensors of 64 KiB, of which four make a part.
TENSORS, ELEMENTS, PART = 40, 1 << 14, 1 << 18
BYTES = TENSORS * ELEMENTS * 4

Receivers = list[tuple[str, list[int]]]


#: Those that are not trained, where some are not.
FROZEN = frozenset(f"t{i}" for i in range(TENSORS // 2))


def tensors(version: int, frozen: frozenset[str] = frozenset()) -> dict[str, torch.Tensor]:
    first, now = (torch.Generator().manual_seed(seed) for seed in (10_000, version))
    return {
        name: torch.randn(ELEMENTS, generator=first if name in frozen else now)
        for name in (f"t{i}" for i in range(TENSORS))
    }


def alike(version: int) -> dict[str, torch.Tensor]:
    """A version that differs from others in a few elements."""
    found = tensors(0)
    for tensor in found.values():
        tensor[version::1000] = version
    return found


class Source(Worker):
    """Sends."""

    def open(self, receivers: Receivers, delta: str = "off") -> None:
        self.sender = WeightSender(self, receivers, delta, PART)
        self.delta, self.frozen = delta, FROZEN if delta == "frozen" else frozenset()

    def send(self, version: int, together: bool = True) -> str:
        """Sends, and after two parts waits for all to begin (`together`): one that comes late would get the first from here.
        Returns the digest of what was sent."""
        named = alike(version) if self.delta == "elements" else tensors(version, self.frozen)
        pool = current().service.pool
        written = {*pool._by_path}

        def awaited() -> bool:
            return any(
                any(pool.list_pending_readers(path))
                for path in {*pool._by_path} - (written if self.delta == "elements" else set())
            )

        def gathering() -> Iterator[tuple[str, torch.Tensor]]:
            for number, item in enumerate(named.items()):
                while together and number == 2 * PART // (4 * ELEMENTS) + 1 and awaited():
                    time.sleep(0.001)
                yield item

        self.sender.send(version, gathering(), frozen=self.frozen)
        return digest(named.items())

    def passed_on(self) -> int:
        """Bytes that this process has sent to other hosts."""
        return current().service.bytes_sent()


class Follower(Worker):
    """Receives."""

    def open(self, receivers: Receivers, delta: str = "off") -> None:
        self.module = torch.nn.Module()
        for name, tensor in tensors(-1).items():
            self.module.register_buffer(name, tensor)
        self.sync = make_sync("auto", self, ("source", 0), receivers, delta)

    def take(self, pause: float = 0.0) -> str:
        """Takes in a version, slowly; returns the digest of what it has then."""
        if not pause:
            apply(self.sync, self.module.state_dict().items(), adopt=self.module)
            return digest(self.module.state_dict().items())
        found: dict[str, Any] = {}
        for name, tensor in self.sync.receive().tensors:
            assert isinstance(tensor, torch.Tensor)
            found[name] = tensor.clone()
            time.sleep(pause)
        return digest(found.items())

    def passed_on(self) -> int:
        """Bytes that this process has sent to other hosts."""
        return current().service.bytes_sent()
