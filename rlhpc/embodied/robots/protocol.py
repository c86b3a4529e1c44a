"""Protocol between a run and a robot: messages of JSON and plain arrays, without executable content.

A message consists of two lengths, JSON, the bytes of its arrays, and an HMAC-SHA256 over a message count and the
message, under a key of the connection. The HMAC is checked before the content is parsed. Each side sends a heartbeat
every second. A side that receives nothing for `LOST_S` regards the connection as lost.
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

#: Seconds of silence after which the other side is lost, and seconds between heartbeats.
LOST_S, SIGN_S = 5.0, 1.0
_HEAD = struct.Struct("!II")
_MAC = 32
#: Maximum bytes of a message's JSON, of its arrays, and of a greeting, which precedes the proof of a key.
_MAX_JSON_BYTES, _MAX_ARRAY_BYTES, MAX_GREETING_BYTES = 1 << 20, 1 << 26, 1 << 16
_DTYPES = {name: np.dtype(name) for name in (
    "bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64", "float16", "float32", "float64",
)}  # fmt: skip
_POLL_S = 0.1


class ConnectionLost(ConnectionError):
    """Error of a lost connection; the message says how the loss was detected."""


class Message(NamedTuple):
    """Message: JSON fields and arrays by name."""

    fields: dict[str, Any]
    arrays: dict[str, np.ndarray]


def pack_message(
    fields: Mapping[str, Any], arrays: Mapping[str, np.ndarray], max_json_bytes: int = _MAX_JSON_BYTES
) -> list[bytes]:
    """Serializes a message, without its HMAC.

    Raises:
        ValueError: The message is too long.
    """
    contiguous_arrays = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    array_headers = {name: [array.dtype.name, list(array.shape)] for name, array in contiguous_arrays.items()}
    body = b"".join(array.tobytes() for array in contiguous_arrays.values())
    header = json.dumps({"words": dict(fields), "arrays": array_headers}).encode()
    if len(header) > max_json_bytes or len(body) > _MAX_ARRAY_BYTES:
        raise ValueError(f"a message of {len(header)} and {len(body)} bytes is too long")
    return [_HEAD.pack(len(header), len(body)), header, body]


def unpack_message(text: bytes, body: bytes) -> Message:
    """Parses a message from its JSON and the bytes of its arrays (see `pack_message`).

    Raises:
        ValueError: The bytes are not a valid message.
    """
    content = read_json(text)
    if not isinstance(content, dict) or not all(isinstance(content.get(key), dict) for key in ("words", "arrays")):
        raise ValueError("no message")
    arrays, offset = {}, 0
    for name, array_header in content["arrays"].items():
        dtype_name, shape = array_header
        if dtype_name not in _DTYPES or not all(isinstance(size, int) and size >= 0 for size in shape):
            raise ValueError(f"no array of {dtype_name!r}{shape!r}")
        num_elements = math.prod(shape)
        if offset + num_elements * _DTYPES[dtype_name].itemsize > len(body):
            raise ValueError("an array is longer than its message")
        arrays[name] = np.frombuffer(body, _DTYPES[dtype_name], num_elements, offset).reshape(shape).copy()
        offset += arrays[name].nbytes
    return Message(content["words"], arrays)


def send_greeting(sock: socket.socket, fields: Mapping[str, Any]) -> None:
    """Sends a message of the greeting, whose fields contain the proofs."""
    sock.sendall(b"".join(pack_message(fields, {}, MAX_GREETING_BYTES)))


def receive_greeting(sock: socket.socket, timeout_s: float) -> dict[str, Any]:
    """Receives a message of the greeting.

    Raises:
        ConnectionLost: The message did not arrive in time, or is invalid.
    """
    deadline = time.monotonic() + timeout_s
    sizes = _HEAD.unpack(_receive_exactly(sock, _HEAD.size, deadline))
    if sizes[0] > MAX_GREETING_BYTES or sizes[1]:
        raise ConnectionLost("what answers there is no robot and no run")
    try:
        return unpack_message(_receive_exactly(sock, sizes[0], deadline), b"").fields
    except (ValueError, TypeError):
        raise ConnectionLost("what answers there is no robot and no run") from None


def _receive_exactly(sock: socket.socket, size: int, deadline: float) -> bytes:
    received_bytes = b""
    while len(received_bytes) < size:
        sock.settimeout(max(0.001, deadline - time.monotonic()))
        try:
            chunk = sock.recv(size - len(received_bytes))
        except TimeoutError:
            raise ConnectionLost("it did not answer in time") from None
        except OSError as error:
            raise ConnectionLost(str(error.strerror or error)) from None
        if not chunk:
            raise ConnectionLost("it closed the connection")
        received_bytes += chunk
    return received_bytes


class RobotConnection:
    """One side of an authenticated connection between a run and a robot.

    Args:
        sock: Connected socket, which the connection takes over.
        key: HMAC key of this connection.
        role, peer_role: Names of this side and the other side.

    Attributes:
        loss_reason: Reason why the other side is regarded as gone; empty while it is connected.
        round_trips_s: Round-trip times of heartbeats, by this side's clock.
    """

    def __init__(self, sock: socket.socket, key: bytes, role: bytes, peer_role: bytes) -> None:
        self._sock, self._key, self._roles, self._counts = sock, key, (role, peer_role), [0, 0]
        self._send_lock = threading.Lock()
        self._inbox: queue.Queue[Message | None] = queue.Queue()
        self.loss_reason = ""
        self.round_trips_s: list[float] = []
        sock.settimeout(None)
        # A peer that receives nothing must not block a sender for ever.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(LOST_S), 0))
        if sock.family == socket.AF_INET:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._thread = threading.Thread(target=self._listen, name="robot-line", daemon=True)
        self._thread.start()

    def send(self, fields: Mapping[str, Any], arrays: Mapping[str, np.ndarray] | None = None) -> None:
        """Sends a message.

        Raises:
            ConnectionLost: The other side is gone.
        """
        buffers = pack_message(fields, arrays or {})
        with self._send_lock:
            if not self.loss_reason:
                try:
                    self._sock.sendall(b"".join([*buffers, self._mac(0, buffers)]))
                except OSError as error:
                    self._set_lost("it takes no message" if isinstance(error, BlockingIOError) else str(error.strerror))
        if self.loss_reason:
            raise ConnectionLost(self.loss_reason)

    def receive(self, timeout_s: float) -> Message | None:
        """Returns the next message; None after `timeout_s` without a message.

        Raises:
            ConnectionLost: The other side is gone.
        """
        try:
            message = self._inbox.get(timeout=timeout_s)
        except queue.Empty:
            return None
        if message is None:
            self._inbox.put(None)
            raise ConnectionLost(self.loss_reason)
        return message

    def close(self) -> None:
        """Ends the connection."""
        self._set_lost("the line was closed")
        if threading.current_thread() is not self._thread:
            self._thread.join()
        self._sock.close()

    def _set_lost(self, reason: str) -> None:
        if not self.loss_reason:
            self.loss_reason = reason
            self._inbox.put(None)
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def _mac(self, direction: int, parts: list[bytes]) -> bytes:
        self._counts[direction] += 1
        head = b"%s %d " % (self._roles[direction], self._counts[direction])
        return hmac.digest(self._key, b"".join([head, *parts]), "sha256")

    def _listen(self) -> None:
        poller, buffer, last_received, last_sign = select.poll(), bytearray(), time.monotonic(), 0.0
        poller.register(self._sock, select.POLLIN)
        try:
            while not self.loss_reason:
                if time.monotonic() - last_sign > SIGN_S:
                    last_sign = time.monotonic()
                    self.send({"sign": last_sign})
                if poller.poll(_POLL_S * 1000):
                    received_bytes = self._sock.recv(1 << 18)
                    if not received_bytes:
                        raise ConnectionLost("its connection ended")
                    buffer += received_bytes
                    last_received = time.monotonic()
                    while (message := self._pop_message(buffer)) is not None:
                        self._handle(message)
                elif time.monotonic() - last_received > LOST_S:
                    raise ConnectionLost(f"nothing was heard for {LOST_S:g} s")
        except (OSError, ValueError, TypeError) as error:
            self._set_lost(str(getattr(error, "strerror", None) or error))

    def _handle(self, message: Message) -> None:
        if "sign" in message.fields:
            self.send({"seen": message.fields["sign"]})
        elif "seen" in message.fields:
            self.round_trips_s.append(time.monotonic() - float(message.fields["seen"]))
        else:
            self._inbox.put(message)

    def _pop_message(self, buffer: bytearray) -> Message | None:
        if len(buffer) < _HEAD.size:
            return None
        header_bytes, body_bytes = _HEAD.unpack_from(buffer)
        if header_bytes > _MAX_JSON_BYTES or body_bytes > _MAX_ARRAY_BYTES:
            raise ConnectionLost("a message is too long")
        length = _HEAD.size + header_bytes + body_bytes + _MAC
        if len(buffer) < length:
            return None
        frame = bytes(buffer[:length])
        del buffer[:length]
        body_start = _HEAD.size + header_bytes
        if not hmac.compare_digest(frame[-_MAC:], self._mac(1, [frame[:-_MAC]])):
            raise ConnectionLost("a message is not the other side's")
        return unpack_message(frame[_HEAD.size : body_start], frame[body_start:-_MAC])


_KEY = "env.train.kwargs"


def observation_space_of(description: Any) -> spaces.Space[Any]:
    """Returns the observation space that `kwargs.observes` describes: a shape or a mapping of shapes. A shape of three numbers
    is a picture.

    Raises:
        ConfigError: The value is not such a description.
    """
    if isinstance(description, Mapping):
        return spaces.Dict(
            {str(name): _parse_box(f"{_KEY}.observes.{name}", shape) for name, shape in description.items()}
        )
    return _parse_box(f"{_KEY}.observes", description)


def _parse_box(key: str, shape: Any) -> spaces.Box:
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


def action_space_of(description: Any) -> spaces.Box:
    """Returns the action space that `kwargs.acts` describes by its bounds.

    Raises:
        ConfigError: The value is not such a description.
    """
    try:
        low, high = (np.atleast_1d(np.asarray(description[name], np.float32)) for name in ("low", "high"))
        if set(description) != {"low", "high"} or low.shape != high.shape or low.ndim != 1 or not (low < high).all():
            raise ValueError
    except (TypeError, KeyError, ValueError):
        raise ConfigError(
            f"{_KEY}.acts is {description!r}; it must be the bounds of each number of a command: "
            "{low: [-1, -1], high: [1, 1]}, low below high"
        ) from None
    return spaces.Box(low, high, dtype=np.float32)


def describe_spaces(observation: Any, action: Any) -> dict[str, Any]:
    """Returns a description of a robot's spaces as a JSON object."""
    subspaces = observation.spaces if isinstance(observation, spaces.Dict) else {"": observation}
    observes = {
        name: ["pictures" if subspace.dtype == np.uint8 else "numbers", list(subspace.shape or ())]
        for name, subspace in subspaces.items()
    }
    bounds = {name: np.asarray(getattr(action, name), float).reshape(-1).tolist() for name in ("low", "high")}
    return {"observes": observes, "acts": bounds}


def describe_misfit(expected_facts: Mapping[str, Any], description: Any) -> str:
    """Returns a text about the first difference between a robot's description and the run's configuration; empty if they
    agree.
    """
    for name in ("observes", "acts"):
        expected_fact, robot_fact = (
            expected_facts[name],
            description.get(name) if isinstance(description, Mapping) else None,
        )
        is_same = expected_fact == robot_fact
        if name == "acts" and isinstance(robot_fact, Mapping):
            is_same = all(_are_close(expected_fact[bound], robot_fact.get(bound)) for bound in ("low", "high"))
        if not is_same:
            return f"{_KEY}.{name} of the run says {expected_fact}, and this robot {robot_fact}"
    return ""


def _are_close(expected_numbers: list[float], received_numbers: Any) -> bool:
    if not isinstance(received_numbers, list) or len(expected_numbers) != len(received_numbers):
        return False
    return bool(np.allclose(expected_numbers, np.asarray(received_numbers, float)))
