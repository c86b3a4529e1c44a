"""torch's rendezvous store over the run's own authenticated sockets.

torch's TCPStore lets anybody on the network read and write; its FileStore locks files, which network filesystems are bad
at. This one is kept by the service thread of the group's rank 0.
"""

from __future__ import annotations

import contextlib
import datetime
import time
from typing import Any

import torch.distributed as dist

from rlhpc.runtime.comm.sockets import choose
from rlhpc.runtime.context import Context
from rlhpc.runtime.errors import DeadlineExceeded

#: How often a rank that holds the store and waits checks whether the run has failed.
_LOOK_S = 0.2
#: torch keeps only its own half of a store: without a reference here, the Python object would lose its methods.
_alive: list[ServiceStore] = []


class ServiceStore(dist.Store):
    """Keys and values of one process group.

    Args:
        context: This process's context.
        group: Worker group; one of its ranks holds the store.
        name: Keeps the stores of one holder apart.
        timeout_s: How long to wait for a key that another rank sets.
        holder: The rank that holds it.
    """

    def __init__(self, context: Context, group: str, name: str, timeout_s: float, holder: int = 0) -> None:
        super().__init__()
        self._context, self._group, self._name, self._timeout_s = context, group, name, timeout_s
        self._rank = holder
        _alive.append(self)

    def _ask(self, op: bytes, key: str, *frames: bytes, timeout: float | None = None) -> list[bytes]:
        service, endpoint = self._context.service, self._holder()
        if endpoint is None:
            return service.held.act(op, self._full(key), *frames)
        whom = f"{self._group}-{self._rank} to answer for the process group"
        limit = self._timeout_s if timeout is None else timeout
        return service.peers.request(endpoint, b"STORE", [op, self._full(key), *frames], limit, whom)

    def _holder(self) -> str | None:
        """The endpoint of the process that holds the store; None if this one does."""
        record = self._context.member(self._group, self._rank)["data"]
        return None if record["ipc"] == self._context.service.endpoint["ipc"] else choose(record)

    def _full(self, key: str) -> bytes:
        return f"{self._name}/{key}".encode()

    def _value(self, key: str, deadline: float) -> bytes:
        """The value of a key, once some rank has set it.

        Raises:
            DeadlineExceeded: No rank has set it in time.
        """
        limit = max(0.0, deadline - time.monotonic())
        if self._holder() is not None:
            with contextlib.suppress(DeadlineExceeded):
                return self._ask(b"wait", key, timeout=limit)[0]
        else:
            while True:
                self._context.check()
                left = deadline - time.monotonic()
                value = self._context.service.held.wait(self._full(key), max(0.0, min(left, _LOOK_S)))
                if value is not None:
                    return value
                if left <= 0:
                    break
        raise DeadlineExceeded(f"{self._context.name} waited {limit:.0f} s for the ranks of {self._group!r} "
                               f"to form their process group (key {key})")  # fmt: skip

    def set(self, key: str, value: Any) -> None:
        self._ask(b"set", key, value if isinstance(value, bytes) else str(value).encode())

    def get(self, key: str) -> bytes:
        return self._value(key, time.monotonic() + self._timeout_s)

    def add(self, key: str, amount: int) -> int:
        return int(self._ask(b"add", key, str(amount).encode())[0])

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        sides = [side if isinstance(side, bytes) else str(side).encode() for side in (expected, desired)]
        return self._ask(b"swap", key, *sides)[0]

    def check(self, keys: list[str]) -> bool:
        return all(self._ask(b"has", key)[0] == b"1" for key in keys)

    def wait(self, keys: list[str], timeout: datetime.timedelta | None = None) -> None:
        limit = self._timeout_s if timeout is None else timeout.total_seconds()
        deadline = time.monotonic() + limit
        for key in keys:
            self._value(key, deadline)

    def delete_key(self, key: str) -> bool:
        return self._ask(b"del", key)[0] == b"1"

    def num_keys(self) -> int:
        return int(self._ask(b"count", "")[0])

    def set_timeout(self, timeout: datetime.timedelta) -> None:
        self._timeout_s = timeout.total_seconds()

    def clone(self) -> ServiceStore:
        """A second handle on the same store, from which torch makes a subgroup's."""
        return ServiceStore(self._context, self._group, self._name, self._timeout_s, self._rank)
