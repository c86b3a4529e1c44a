"""The line between a run and a robot: messages of JSON and plain arrays, and nothing that is executed.

A message is two lengths, JSON, the bytes of its arrays, and an HMAC-SHA256 over a count and all of it, under the line's own
key, which is checked before anything of it is read. Either side says every second that it is there; one that hears nothing
for `LOST_S` has lost the other.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import math
import queue
import select
import socket
import struct
import threading
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from gymnasium import spaces

from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.files import read_json

#: Silence after which the other side is lost, and how often either gives a sign of life.
LOST_S, SIGN_S = 5.0, 1.0
_HEAD = struct.Struct("!II")
_MAC = 32
#: Bytes of a message's JSON, and of its arrays; of one from somebody who has not shown a key yet.
_MOST_WORDS, _MOST_BYTES, MOST_GREETING = 1 << 20, 1 << 26, 1 << 16
_KINDS = {name: np.dtype(name) for name in (
    "bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64", "float16", "float32", "float64",
)}  # fmt: skip
_LOOK_S = 0.1


class LineLost(ConnectionError):
    """The other side is gone; says how that showed."""


class Message(NamedTuple):
    """What was said, and the arrays with it."""

    words: dict[str, Any]
    arrays: dict[str, np.ndarray]


def packed(words: Mapping[str, Any], arrays: Mapping[str, np.ndarray], most: int = _MOST_WORDS) -> list[bytes]:
    """A message, without its HMAC."""
    plain = {name: np.ascontiguousarray(value) for name, value in arrays.items()}
    described = {name: [value.dtype.name, list(value.shape)] for name, value in plain.items()}
    body = b"".join(value.tobytes() for value in plain.values())
    text = json.dumps({"words": dict(words), "arrays": described}).encode()
    if len(text) > most or len(body) > _MOST_BYTES:
        raise ValueError(f"a message of {len(text)} and {len(body)} bytes is too long")
    return [_HEAD.pack(len(text), len(body)), text, body]


def unpacked(text: bytes, body: bytes) -> Message:
    """Inverse of `packed`.

    Raises:
        ValueError: It is no such message.
    """
    found = read_json(text)
    if (
        not isinstance(found, dict)
        or not isinstance(found.get("words"), dict)
        or not isinstance(found.get("arrays"), dict)
    ):
        raise ValueError("no message")
    arrays, at = {}, 0
    for name, described in found["arrays"].items():
        kind, shape = described
        if kind not in _KINDS or not all(isinstance(size, int) and size >= 0 for size in shape):
            raise ValueError(f"no array of {kind!r}{shape!r}")
        count = math.prod(shape)
        if at + count * _KINDS[kind].itemsize > len(body):
            raise ValueError("an array is longer than its message")
        arrays[name] = np.frombuffer(body, _KINDS[kind], count, at).reshape(shape).copy()
        at += arrays[name].nbytes
    return Message(found["words"], arrays)


def take(obs: Any, name: str) -> dict[str, np.ndarray]:
    """An observation as named arrays; inverse of `give`."""
    if isinstance(obs, Mapping):
        return {f"{name}.{key}": np.asarray(part) for key, part in obs.items()}
    return {name: np.asarray(obs)}


def give(arrays: Mapping[str, np.ndarray], name: str) -> Any:
    """The observation that `take` turned into arrays."""
    if name in arrays:
        return arrays[name]
    return {key[len(name) + 1 :]: part for key, part in arrays.items() if key.startswith(f"{name}.")}


def greet(sock: socket.socket, words: Mapping[str, Any]) -> None:
    """Sends a message of the greeting, whose HMACs are among its words."""
    sock.sendall(b"".join(packed(words, {}, MOST_GREETING)))


def hear_greeting(sock: socket.socket, timeout_s: float) -> dict[str, Any]:
    """Receives a message of the greeting.

    Raises:
        LineLost: It did not come in time, or was something else.
    """
    deadline = time.monotonic() + timeout_s
    sizes = _HEAD.unpack(_exactly(sock, _HEAD.size, deadline))
    if sizes[0] > MOST_GREETING or sizes[1]:
        raise LineLost("what answers there is no robot and no run")
    try:
        return unpacked(_exactly(sock, sizes[0], deadline), b"").words
    except (ValueError, TypeError):
        raise LineLost("what answers there is no robot and no run") from None


def _exactly(sock: socket.socket, size: int, deadline: float) -> bytes:
    data = b""
    while len(data) < size:
        sock.settimeout(max(0.001, deadline - time.monotonic()))
        try:
            part = sock.recv(size - len(data))
        except TimeoutError:
            raise LineLost("it did not answer in time") from None
        except OSError as error:
            raise LineLost(str(error.strerror or error)) from None
        if not part:
            raise LineLost("it closed the connection")
        data += part
    return data


class RobotConnection:
    """One side of a connection between a run and a robot that know each other.

    Args:
        sock: Connected; becomes the line's.
        key: Of this connection alone.
        role, other: Names of this side and the other.

    Attributes:
        lost: Why the other side is taken to be gone; empty while it is there.
        trips_s: How long signs of life took to the other side and back, by this side's clock.
    """

    def __init__(self, sock: socket.socket, key: bytes, role: bytes, other: bytes) -> None:
        self._sock, self._key, self._roles, self._counts = sock, key, (role, other), [0, 0]
        self._sending = threading.Lock()
        self._said: queue.Queue[Message | None] = queue.Queue()
        self.lost = ""
        self.trips_s: list[float] = []
        sock.settimeout(None)
        # A peer that takes nothing must not hold a sender for ever.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(LOST_S), 0))
        if sock.family == socket.AF_INET:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._thread = threading.Thread(target=self._listen, name="robot-line", daemon=True)
        self._thread.start()

    def say(self, words: Mapping[str, Any], arrays: Mapping[str, np.ndarray] | None = None) -> None:
        """Sends a message.

        Raises:
            LineLost: The other side is gone.
        """
        parts = packed(words, arrays or {})
        with self._sending:
            if not self.lost:
                try:
                    self._sock.sendall(b"".join([*parts, self._mac(0, parts)]))
                except OSError as error:
                    self._lose("it takes no message" if isinstance(error, BlockingIOError) else str(error.strerror))
        if self.lost:
            raise LineLost(self.lost)

    def hear(self, timeout_s: float) -> Message | None:
        """The next message; None if none comes in time.

        Raises:
            LineLost: The other side is gone.
        """
        try:
            found = self._said.get(timeout=timeout_s)
        except queue.Empty:
            return None
        if found is None:
            self._said.put(None)
            raise LineLost(self.lost)
        return found

    def close(self) -> None:
        """Ends the connection."""
        self._lose("the line was closed")
        if threading.current_thread() is not self._thread:
            self._thread.join()
        self._sock.close()

    def _lose(self, why: str) -> None:
        if not self.lost:
            self.lost = why
            self._said.put(None)
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def _mac(self, direction: int, parts: list[bytes]) -> bytes:
        self._counts[direction] += 1
        head = b"%s %d " % (self._roles[direction], self._counts[direction])
        return hmac.digest(self._key, b"".join([head, *parts]), "sha256")

    def _listen(self) -> None:
        poll, buffer, heard, signed = select.poll(), bytearray(), time.monotonic(), 0.0
        poll.register(self._sock, select.POLLIN)
        try:
            while not self.lost:
                if time.monotonic() - signed > SIGN_S:
                    signed = time.monotonic()
                    self.say({"sign": signed})
                if poll.poll(_LOOK_S * 1000):
                    data = self._sock.recv(1 << 18)
                    if not data:
                        raise LineLost("its connection ended")
                    buffer += data
                    heard = time.monotonic()
                    while (message := self._next(buffer)) is not None:
                        self._hear(message)
                elif time.monotonic() - heard > LOST_S:
                    raise LineLost(f"nothing was heard for {LOST_S:g} s")
        except (OSError, ValueError, TypeError) as error:
            self._lose(str(getattr(error, "strerror", None) or error))

    def _hear(self, message: Message) -> None:
        if "sign" in message.words:
            self.say({"seen": message.words["sign"]})
        elif "seen" in message.words:
            self.trips_s.append(time.monotonic() - float(message.words["seen"]))
        else:
            self._said.put(message)

    def _next(self, buffer: bytearray) -> Message | None:
        if len(buffer) < _HEAD.size:
            return None
        words, body = _HEAD.unpack_from(buffer)
        if words > _MOST_WORDS or body > _MOST_BYTES:
            raise LineLost("a message is too long")
        whole = _HEAD.size + words + body + _MAC
        if len(buffer) < whole:
            return None
        data = bytes(buffer[:whole])
        del buffer[:whole]
        cut = _HEAD.size + words
        if not hmac.compare_digest(data[-_MAC:], self._mac(1, [data[:-_MAC]])):
            raise LineLost("a message is not the other side's")
        return unpacked(data[_HEAD.size : cut], data[cut:-_MAC])


_KEY = "env.train.kwargs"


def observed(said: Any) -> spaces.Space[Any]:
    """The space of observations that `kwargs.observes` names: a shape or a mapping of shapes, of three numbers for pictures.

    Raises:
        ConfigError: It is something else.
    """
    if isinstance(said, Mapping):
        return spaces.Dict({str(name): _box(f"{_KEY}.observes.{name}", shape) for name, shape in said.items()})
    return _box(f"{_KEY}.observes", said)


def _box(key: str, shape: Any) -> spaces.Box:
    sizes = [shape] if isinstance(shape, int) else shape
    try:
        sizes = tuple(sizes)
    except TypeError:
        sizes = ()
    if not sizes or not all(isinstance(size, int) and size > 0 for size in sizes):
        raise ConfigError(f"{key} is {shape!r}; it must be a shape, such as 7 or [64, 64, 3]")
    if len(sizes) == 3:
        return spaces.Box(0, 255, sizes, np.uint8)
    return spaces.Box(-np.inf, np.inf, sizes, np.float32)


def taken(said: Any) -> spaces.Box:
    """The space of actions that `kwargs.acts` names by its bounds.

    Raises:
        ConfigError: It is something else.
    """
    try:
        low, high = (np.atleast_1d(np.asarray(said[name], np.float32)) for name in ("low", "high"))
        if set(said) != {"low", "high"} or low.shape != high.shape or low.ndim != 1 or not (low < high).all():
            raise ValueError
    except (TypeError, KeyError, ValueError):
        raise ConfigError(
            f"{_KEY}.acts is {said!r}; it must be the bounds of each number of a command: "
            "{low: [-1, -1], high: [1, 1]}, low below high"
        ) from None
    return spaces.Box(low, high, dtype=np.float32)


def told(observation: Any, action: Any) -> dict[str, Any]:
    """A robot's spaces, in words that JSON has."""
    parts = observation.spaces if isinstance(observation, spaces.Dict) else {"": observation}
    seen = {
        name: ["pictures" if part.dtype == np.uint8 else "numbers", list(part.shape or ())]
        for name, part in parts.items()
    }
    bounds = {name: np.asarray(getattr(action, name), float).reshape(-1).tolist() for name in ("low", "high")}
    return {"observes": seen, "acts": bounds}


def misfit(wanted: Mapping[str, Any], found: Any) -> str:
    """Where what a robot tells differs from what a run's configuration says; empty if it does not."""
    for name in ("observes", "acts"):
        here, there = wanted[name], found.get(name) if isinstance(found, Mapping) else None
        same = here == there
        if name == "acts" and isinstance(there, Mapping):
            same = all(_near(here[bound], there.get(bound)) for bound in ("low", "high"))
        if not same:
            return f"{_KEY}.{name} of the run says {here}, and this robot {there}"
    return ""


def _near(here: list[float], there: Any) -> bool:
    return isinstance(there, list) and len(here) == len(there) and np.allclose(here, np.asarray(there, float))
