"""torch's rendezvous store over the run's own authenticated sockets.

torch's TCPStore lets anybody on the network read and write; its FileStore locks files, which network filesystems are bad
at. This one lives in the service thread of the group's rank 0.
"""

from __future__ import annotations

import datetime
import time
from typing import Any

import torch.distributed as dist

from rlhpc.runtime.comm.sockets import choose
from rlhpc.runtime.context import Context
from rlhpc.runtime.errors import DeadlineExceeded

_PAUSE_S = 0.002
_LONGEST_PAUSE_S = 0.05
#: torch keeps its half of a store only: without this one the object would lose its methods.
_alive: list[ServiceStore] = []


class ServiceStore(dist.Store):
    """Keys and values of one process group.

    Args:
        context: This process's.
        group: Worker group; its rank 0 holds the store.
        name: Separates the stores of one holder.
        timeout_s: How long to wait for a key that another rank sets.
    """

    def __init__(self, context: Context, group: str, name: str, timeout_s: float) -> None:
        super().__init__()
        self._context, self._group, self._name, self._timeout_s = context, group, name, timeout_s
        _alive.append(self)

    def _ask(self, op: bytes, key: str, *frames: bytes) -> list[bytes]:
        record = self._context.member(self._group, 0)["data"]
        full = f"{self._name}/{key}".encode()
        service = self._context.service
        if record["ipc"] == service.endpoint["ipc"]:
            return service.store(op, full, *frames)
        whom = f"{self._group}-0 to answer for the process group"
        return service.peers.request(choose(record), b"STORE", [op, full, *frames], self._timeout_s, whom)

    def set(self, key: str, value: Any) -> None:
        self._ask(b"set", key, value if isinstance(value, bytes) else str(value).encode())

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._ask(b"get", key)[0]

    def add(self, key: str, amount: int) -> int:
        return int(self._ask(b"add", key, str(amount).encode())[0])

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        sides = [side if isinstance(side, bytes) else str(side).encode() for side in (expected, desired)]
        return self._ask(b"swap", key, *sides)[0]

    def check(self, keys: list[str]) -> bool:
        return all(self._ask(b"has", key)[0] == b"1" for key in keys)

    def wait(self, keys: list[str], timeout: datetime.timedelta | None = None) -> None:
        limit = self._timeout_s if timeout is None else timeout.total_seconds()
        end, pause = time.monotonic() + limit, _PAUSE_S
        for key in keys:
            while self._ask(b"has", key)[0] != b"1":
                self._context.check()
                if time.monotonic() > end:
                    raise DeadlineExceeded(f"{self._context.name} waited {limit:.0f} s for the ranks of {self._group!r} "
                                           f"to form their process group (key {key})")  # fmt: skip
                time.sleep(pause)
                pause = min(1.5 * pause, _LONGEST_PAUSE_S)

    def delete_key(self, key: str) -> bool:
        return self._ask(b"del", key)[0] == b"1"

    def num_keys(self) -> int:
        return int(self._ask(b"count", "")[0])

    def set_timeout(self, timeout: datetime.timedelta) -> None:
        self._timeout_s = timeout.total_seconds()

    def clone(self) -> ServiceStore:
        """What torch makes a subgroup's store from."""
        return ServiceStore(self._context, self._group, self._name, self._timeout_s)
