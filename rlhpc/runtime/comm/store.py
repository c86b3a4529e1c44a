"""Stores of process groups: the keys and values with which the ranks of a group find each other.

torch asks a store for each key of each rank. These stores need a few requests for each rank, whatever the number of ranks.
"""

from __future__ import annotations

import contextlib
import datetime
import time
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from rlhpc.runtime.comm.context import Context
from rlhpc.runtime.comm.key_value_store import decode_list, encode_list
from rlhpc.runtime.comm.zmq_sockets import choose
from rlhpc.runtime.errors import DeadlineExceeded
from rlhpc.runtime.text import format_names

#: Seconds between two checks whether the run has failed, while the rank that stores the keys waits for one.
_CHECK_S = 0.2
#: torch keeps only the C++ part of a store; without a reference here, the Python object and its methods would be lost.
_stores: list[dist.Store] = []


class ServiceStore(dist.Store):
    """torch store of a process group; the service of one rank of the group stores the keys and values.

    Args:
        context: This process's context.
        group: Name of the worker group.
        name: Name that distinguishes several stores of one rank.
        timeout_s: Seconds to wait for a key that another rank sets.
        holder: Rank whose service stores the keys.
    """

    def __init__(self, context: Context, group: str, name: str, timeout_s: float, holder: int = 0) -> None:
        super().__init__()
        self._context, self._group, self._name, self._timeout_s = context, group, name, timeout_s
        self._holder_rank = holder
        _stores.append(self)

    def _request(self, op: bytes, key: bytes, *arguments: bytes, timeout: float | None = None) -> bytes:
        """Executes an operation (`KeyValueStore.execute`, or "wait") in the service of the rank that stores the keys.

        Args:
            op: The operation.
            key: Full key, or key list, of the operation.
            arguments: The operation's values.
            timeout: Seconds to wait for the answer; None waits as long as for a key.

        Returns:
            The operation's result.
        """
        service, endpoint = self._context.service, self._find_holder_endpoint()
        if endpoint is None:
            return service.store.execute(op, key, *arguments)
        wait_purpose = f"{self._group}-{self._holder_rank} to answer for the process group"
        timeout_s = self._timeout_s if timeout is None else timeout
        return service.peers.request(endpoint, b"STORE", [op, key, *arguments], timeout_s, wait_purpose)[0]

    def _find_holder_endpoint(self) -> str | None:
        """Returns the endpoint of the process that stores the keys; None if this process stores them."""
        record = self._context.rank_record(self._group, self._holder_rank)["data"]
        return None if record["ipc"] == self._context.service.endpoint["ipc"] else choose(record)

    def _make_full_key(self, key: str) -> bytes:
        return f"{self._name}/{key}".encode()

    def _wait_for_values(self, value_keys: Sequence[str], deadline: float) -> list[bytes]:
        """Waits until ranks have set all the keys, in one request; returns their values.

        Raises:
            DeadlineExceeded: A key has not been set before the deadline.
        """
        limit = max(0.0, deadline - time.monotonic())
        full_keys = [self._make_full_key(key) for key in value_keys]
        if self._find_holder_endpoint() is not None:
            with contextlib.suppress(DeadlineExceeded):
                return decode_list(self._request(b"wait", encode_list(full_keys), timeout=limit))
        else:
            while True:
                self._context.check()
                remaining_s = deadline - time.monotonic()
                found_values = self._context.service.store.wait(full_keys, max(0.0, min(remaining_s, _CHECK_S)))
                if found_values is not None:
                    return found_values
                if remaining_s <= 0:
                    break
        missing_keys = list(value_keys)
        with contextlib.suppress(DeadlineExceeded):  # the rank that stores the keys may have ended
            missing_keys = self.find_missing_keys(value_keys, _CHECK_S) or missing_keys
        raise DeadlineExceeded(f"{self._context.name} waited {limit:.0f} s for the ranks of {self._group!r} "
                               f"to form their process group (key {format_names(missing_keys, limit=1)})")  # fmt: skip

    def find_missing_keys(self, keys: Sequence[str], timeout_s: float | None = None) -> list[str]:
        """Returns the keys that are not set, with one request.

        Raises:
            DeadlineExceeded: The rank that stores the keys does not answer within `timeout_s` seconds.
        """
        are_set = self._request(b"has", encode_list([self._make_full_key(key) for key in keys]), timeout=timeout_s)
        return [key for key, is_set in zip(keys, are_set.decode(), strict=True) if is_set == "0"]

    def set(self, key: str, value: Any) -> None:
        self._request(b"set", self._make_full_key(key), _as_bytes(value))

    def get(self, key: str) -> bytes:
        return self.multi_get([key])[0]

    def has_extended_api(self) -> bool:
        """Returns True, so that libraries get and set many keys with one request (`multi_get`, `multi_set`)."""
        return True

    def multi_get(self, value_keys: Sequence[str]) -> list[bytes]:
        """Returns the values of keys with one request; waits until all of them are set."""
        return self._wait_for_values(value_keys, time.monotonic() + self._timeout_s)

    def multi_set(self, value_keys: Sequence[str], new_values: Sequence[Any]) -> None:
        """Sets keys with one request."""
        self._request(
            b"mset", encode_list([self._make_full_key(key) for key in value_keys]), *map(_as_bytes, new_values)
        )

    def add(self, key: str, amount: int) -> int:
        return int(self._request(b"add", self._make_full_key(key), str(amount).encode()))

    def compare_set(self, key: str, expected_value: Any, desired_value: Any) -> bytes:
        return self._request(b"swap", self._make_full_key(key), _as_bytes(expected_value), _as_bytes(desired_value))

    def check(self, keys: Sequence[str]) -> bool:
        return not self.find_missing_keys(keys)

    def wait(self, keys: Sequence[str], timeout: datetime.timedelta | None = None) -> None:
        timeout_s = self._timeout_s if timeout is None else timeout.total_seconds()
        self._wait_for_values(keys, time.monotonic() + timeout_s)

    def delete_key(self, key: str) -> bool:
        return self._request(b"del", self._make_full_key(key)) == b"1"

    def num_keys(self) -> int:
        return int(self._request(b"count", self._make_full_key("")))

    def set_timeout(self, timeout_delta: datetime.timedelta) -> None:
        self._timeout_s = timeout_delta.total_seconds()

    def clone(self) -> ServiceStore:
        """Returns another handle of the same store; torch derives a subgroup's store from it."""
        return ServiceStore(self._context, self._group, self._name, self._timeout_s, self._holder_rank)


def _as_bytes(value_or_text: Any) -> bytes:
    return value_or_text if isinstance(value_or_text, bytes) else str(value_or_text).encode()


class _AddressExchange(dist.Store):
    """Store in which gloo's ranks exchange their addresses: gets the addresses of all ranks with one request.

    gloo publishes its address under `<device>/<rank>`, and then gets that of each other rank.

    Args:
        store: Store of the process group.
        world_size: Number of ranks of the process group.
    """

    def __init__(self, store: dist.Store, world_size: int) -> None:
        super().__init__()
        self._store, self._size = store, world_size
        self._addresses: dict[str, bytes] = {}

    def set(self, key: str, value: Any) -> None:
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        if key not in self._addresses:
            device, separator, _ = key.rpartition("/")
            rank_keys = [f"{device}{separator}{rank}" for rank in range(self._size)]
            self._addresses |= zip(rank_keys, self._store.multi_get(rank_keys), strict=True)
        return self._addresses[key]

    def wait(self, keys: Sequence[str], timeout: datetime.timedelta | None = None) -> None:
        for key in keys:
            self.get(key)

    def check(self, keys: Sequence[str]) -> bool:
        return self._store.check(list(keys))

    def has_extended_api(self) -> bool:
        """Returns False, because gloo gets many keys in parts of 128, and this store gets all of them at once."""
        return False


def address_exchange(store: dist.Store, world_size: int) -> dist.Store:
    """Returns a store in which the ranks of one gloo group exchange their addresses, over the group's store."""
    _stores.append(exchange := _AddressExchange(store, world_size))
    return exchange
