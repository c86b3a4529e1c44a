"""Key-value store of a process group, and lists of byte strings in its requests and answers."""

from __future__ import annotations

import itertools
import struct
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field


class KeyValueStore:
    """Key-value store of a process group. Any thread may call any method."""

    def __init__(self) -> None:
        self._values: dict[bytes, bytes] = {}
        #: Requests that wait for keys, by their key list as it was sent: the ranks of a group send the same list.
        self._waiting_requests: dict[bytes, _WaitingRequests] = {}
        self._waiting_for: dict[bytes, list[_WaitingRequests]] = {}
        self._condition = threading.Condition()

    def execute(self, op: bytes, key: bytes, *arguments: bytes) -> bytes:
        """Executes an operation: `get`, `has`, `del`, `count`, `set`, `mset`, `add` or `swap` (torch's `compare_set`).

        Args:
            op: The operation.
            key: The key; for `has` and `mset` a key list (`encode_list`).
            arguments: Values of the operation; for `mset` one for each key.

        Returns:
            The key's value; for `has` a byte b"1" or b"0" for each key, for `del` b"1" or b"0", for `count` the number of keys
            that start with `key`, for `mset` nothing.

        Raises:
            KeyError: The key has not been set.
            ValueError: There is no such operation.
        """
        with self._condition:
            values = self._values
            if op == b"get":
                return values[key]
            if op == b"has":
                return b"".join(b"1" if listed_key in values else b"0" for listed_key in decode_list(key))
            if op == b"del":
                return b"0" if values.pop(key, None) is None else b"1"
            if op == b"count":
                return b"%d" % sum(stored_key.startswith(key) for stored_key in values)
            if op == b"mset":
                for listed_key, value in zip(decode_list(key), arguments, strict=True):
                    self._set(listed_key, value)
                return b""
            if (
                op == b"swap" and values.get(key, b"") != arguments[0]
            ):  # torch's compare_set: a missing key counts as empty
                return values.get(key, arguments[0])
            if op == b"add":
                self._set(key, b"%d" % (int(values.get(key, b"0")) + int(arguments[0])))
            elif op in (b"set", b"swap"):
                self._set(key, arguments[-1])
            else:
                raise ValueError(f"no store operation {op!r}")
            return values[key]

    def _set(self, key: bytes, value: bytes) -> None:
        """Sets a key, and answers the requests whose last missing key it is."""
        self._values[key] = value
        self._condition.notify_all()
        for requests in self._waiting_for.pop(key, ()):
            requests.num_missing -= 1
            if not requests.num_missing:
                del self._waiting_requests[requests.key_list]
                encoded_values = self._encode_values(decode_list(requests.key_list))
                for answer in requests.answers:
                    answer(encoded_values)

    def _encode_values(self, encoded_keys: Sequence[bytes]) -> bytes:
        return encode_list(
            [self._values.get(key, b"") for key in encoded_keys]
        )  # a key may have been deleted meanwhile

    def when_set(self, key_list: bytes, answer: Callable[[bytes], None]) -> None:
        """Calls `answer` with the values of keys, at once or as soon as all keys are set.

        The ranks of a large group wait for the same keys at the same time, so the keys are looked up once for all of them.

        Args:
            key_list: The keys (`encode_list`).
            answer: Called with the values, in the order of the keys (`decode_list`).
        """
        with self._condition:
            requests = self._waiting_requests.get(key_list)
            if requests is None:
                awaited_keys = decode_list(key_list)
                missing_keys = {key for key in awaited_keys if key not in self._values}
                if not missing_keys:
                    answer(self._encode_values(awaited_keys))
                    return
                requests = self._waiting_requests[key_list] = _WaitingRequests(key_list, len(missing_keys))
                for key in missing_keys:
                    self._waiting_for.setdefault(key, []).append(requests)
            requests.answers.append(answer)

    def wait(self, keys: Sequence[bytes], timeout: float) -> list[bytes] | None:
        """Returns the values of keys; None if one of them is not set within `timeout` seconds."""
        with self._condition:
            if not self._condition.wait_for(lambda: all(key in self._values for key in keys), timeout):
                return None
            return [self._values[key] for key in keys]


@dataclass
class _WaitingRequests:
    """Requests for the same keys, not all of which are set.

    Attributes:
        key_list: The keys, as the requests have sent them.
        num_missing: Number of keys that are not set yet.
        answers: Functions that answer the requests.
    """

    key_list: bytes
    num_missing: int
    answers: list[Callable[[bytes], None]] = field(default_factory=list)


def encode_list(byte_strings: Sequence[bytes]) -> bytes:
    """Encodes a list of byte strings, such as keys, as their number and lengths followed by the strings."""
    return struct.pack(f"<{len(byte_strings) + 1}I", len(byte_strings), *map(len, byte_strings)) + b"".join(
        byte_strings
    )


def decode_list(encoded_list: bytes) -> list[bytes]:
    """Decodes a list from `encode_list`.

    Raises:
        struct.error: The bytes do not begin with the lengths of a list.
    """
    (num_items,) = struct.unpack_from("<I", encoded_list)
    item_ends = itertools.accumulate(struct.unpack_from(f"<{num_items}I", encoded_list, 4), initial=4 * (num_items + 1))
    return [encoded_list[item_start:item_end] for item_start, item_end in itertools.pairwise(item_ends)]
