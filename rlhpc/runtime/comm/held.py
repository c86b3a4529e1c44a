"""Keys and values that a process holds for torch's rendezvous, of the groups whose rank 0 it is."""

from __future__ import annotations

import threading
from collections.abc import Callable


class HeldValues:
    """Any thread may call any method."""

    def __init__(self) -> None:
        self._values: dict[bytes, bytes] = {}
        self._waiting: dict[bytes, list[Callable[[bytes], None]]] = {}
        self._grew = threading.Condition()

    def act(self, op: bytes, key: bytes, *values: bytes) -> list[bytes]:
        """One of the store's operations, in torch's words.

        Raises:
            KeyError: Nobody has set the key.
            ValueError: There is no such operation.
        """
        with self._grew:
            held = self._values
            if op == b"set":
                held[key] = values[0]
                self._tell(key)
                return [b""]
            if op == b"get":
                return [held[key]]
            if op == b"has":
                return [b"1" if key in held else b"0"]
            if op == b"add":
                held[key] = str(int(held.get(key, b"0")) + int(values[0])).encode()
                self._tell(key)
                return [held[key]]
            if op == b"swap":  # torch's compare_set: an absent key counts as an empty value
                if held.get(key, b"") == values[0]:
                    held[key] = values[1]
                    self._tell(key)
                return [held.get(key, values[0])]
            if op == b"del":
                return [b"1" if held.pop(key, None) is not None else b"0"]
            if op == b"count":
                return [str(sum(known.startswith(key) for known in held)).encode()]
        raise ValueError(f"no store operation {op!r}")

    def _tell(self, key: bytes) -> None:
        self._grew.notify_all()
        for answer in self._waiting.pop(key, ()):
            answer(self._values[key])

    def when_set(self, key: bytes, answer: Callable[[bytes], None]) -> None:
        """Answers with the value of a key: now, or once somebody has set it."""
        with self._grew:
            if key in self._values:
                answer(self._values[key])
            else:
                self._waiting.setdefault(key, []).append(answer)

    def wait(self, key: bytes, timeout: float) -> bytes | None:
        """The value of a key; None if nobody has set it within `timeout` seconds."""
        with self._grew:
            self._grew.wait_for(lambda: key in self._values, timeout)
            return self._values.get(key)
