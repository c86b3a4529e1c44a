"""Protocol between a run and a robot: messages, signs of life, and descriptions of spaces."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from rlhpc.embodied.robots import protocol
from rlhpc.embodied.robots.protocol import ConnectionLost, RobotConnection
from rlhpc.runtime.errors import ConfigError

ARRAYS = {
    "a": np.arange(6, dtype=np.float32).reshape(2, 3).T,  # not contiguous
    "b": np.zeros((0, 4), np.uint8),
    "c": np.array([True]),
}


def test_a_message_is_read_back() -> None:
    head, text, body = protocol.pack_message({"x": [1, None]}, ARRAYS)
    assert struct.unpack("!II", head) == (len(text), len(body))
    message = protocol.unpack_message(text, body)
    assert message.fields == {"x": [1, None]} and set(message.arrays) == set(ARRAYS)
    for name, array in ARRAYS.items():
        assert message.arrays[name].dtype == array.dtype and np.array_equal(message.arrays[name], array)


@pytest.mark.parametrize(
    "text",
    [b"[]", b"{}", b'{"words": 1, "arrays": {}}', b'{"words": {}, "arrays": {"a": ["object", [1]]}}',
     b'{"words": {}, "arrays": {"a": ["uint8", [-1]]}}', b'{"words": {}, "arrays": {"a": ["uint8", [5]]}}', b"{"],
)  # fmt: skip
def test_what_is_no_message_is_refused(text: bytes) -> None:
    with pytest.raises(ValueError):
        protocol.unpack_message(text, b"1234")


def test_the_length_of_a_message_is_bounded() -> None:
    with pytest.raises(ValueError, match="is too long"):
        protocol.pack_message({"x": "y" * 100}, {}, 50)


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Returns two connected sockets."""
    pair = socket.socketpair()
    yield pair
    for end in pair:
        end.close()


def test_a_greeting_is_heard(ends: tuple[socket.socket, socket.socket]) -> None:
    protocol.send_greeting(ends[0], {"key": "k"})
    assert protocol.receive_greeting(ends[1], 60) == {"key": "k"}


@pytest.mark.parametrize(
    ("sent", "message"),
    [
        (struct.pack("!II", protocol.MAX_GREETING_BYTES + 1, 0), "no robot and no run"),
        (struct.pack("!II", 2, 1) + b"{}", "no robot and no run"),
        (struct.pack("!II", 2, 0) + b"[]", "no robot and no run"),
        (b"\x00", "closed the connection"),
        (None, "did not answer in time"),
    ],
)
def test_something_else_answers(ends: tuple[socket.socket, socket.socket], sent: bytes | None, message: str) -> None:
    if sent is not None:
        ends[0].sendall(sent)
        ends[0].shutdown(socket.SHUT_WR)
    with pytest.raises(ConnectionLost, match=message):
        protocol.receive_greeting(ends[1], 0.05 if sent is None else 60)


def connected(ends: tuple[socket.socket, socket.socket], *keys: bytes) -> tuple[RobotConnection, RobotConnection]:
    """Returns both sides of a connection."""
    run = RobotConnection(ends[0], keys[0], b"run", b"robot")
    return run, RobotConnection(ends[1], keys[-1], b"robot", b"run")


def test_both_sides_hear_each_other_and_their_signs_of_life(ends: tuple[socket.socket, socket.socket]) -> None:
    run, robot = connected(ends, b"key")
    for number in range(3):
        run.send({"n": number}, {"a": np.full(2, number)})
    for number in range(3):
        message = robot.receive(60)
        assert message and message.fields == {"n": number} and message.arrays["a"].tolist() == [number] * 2
    robot.send({"done": True})
    answer = run.receive(60)
    assert answer and answer.fields == {"done": True}
    assert run.receive(0.01) is None
    while not run.round_trips_s:
        run.receive(0.01)
    assert 0 <= run.round_trips_s[0] < 60
    run.close()
    with pytest.raises(ConnectionLost):
        while True:
            robot.receive(60)
    with pytest.raises(ConnectionLost, match="the line was closed"):
        run.send({})
    robot.close()


def test_a_message_under_another_key_ends_the_connection(ends: tuple[socket.socket, socket.socket]) -> None:
    run, robot = connected(ends, b"key", b"another")
    with pytest.raises(ConnectionLost, match="a message is not the other side's"):
        while True:
            robot.receive(60)
    run.close()
    robot.close()


def test_silence_ends_the_connection(
    ends: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol, "LOST_S", 0.2)
    run = RobotConnection(ends[0], b"key", b"run", b"robot")
    with pytest.raises(ConnectionLost, match=r"nothing was heard for 0\.2 s"):
        run.receive(60)
    run.close()


def test_spaces_are_built_from_their_descriptions() -> None:
    picture = protocol.observation_space_of({"image": [8, 8, 3], "state": 7})
    assert isinstance(picture, spaces.Dict)
    assert picture["image"] == spaces.Box(0, 255, (8, 8, 3), np.uint8) and picture["state"].shape == (7,)
    action = protocol.action_space_of({"low": [-1, -2], "high": [1, 2]})
    assert action.low.tolist() == [-1, -2] and action.high.tolist() == [1, 2]


@pytest.mark.parametrize("shape", ["7", 0, [3, -1], [], 1.5, None])
def test_a_shape_must_be_one(shape: Any) -> None:
    with pytest.raises(ConfigError, match=r"kwargs\.observes\.x is .*; it must be a shape"):
        protocol.observation_space_of({"x": shape})


@pytest.mark.parametrize(
    "bounds",
    [{"low": [1], "high": [1]}, {"low": [0, 0], "high": [1]}, {"low": [0]}, {"low": [0], "high": [1], "more": 1}, 7,
     {"low": ["a"], "high": [1]}, {"low": [[0]], "high": [[1]]}],
)  # fmt: skip
def test_bounds_must_be_some(bounds: Any) -> None:
    with pytest.raises(ConfigError, match=r"kwargs\.acts is "):
        protocol.action_space_of(bounds)


def test_a_robot_must_fit_the_runs_configuration() -> None:
    observation, action = spaces.Dict({"state": spaces.Box(-1, 1, (7,))}), spaces.Box(-1, 1, (2,))
    expected = protocol.describe_spaces(observation, action)
    assert expected == {"observes": {"state": ["numbers", [7]]}, "acts": {"low": [-1, -1], "high": [1, 1]}}
    assert protocol.describe_misfit(expected, expected) == ""
    near = {**expected, "acts": {"low": [-1 + 1e-7, -1], "high": [1, 1]}}
    assert protocol.describe_misfit(expected, near) == ""
    for name, other in (
        ("observes", protocol.describe_spaces(spaces.Box(-1, 1, (7,)), action)),
        ("acts", {**expected, "acts": {"low": [-1], "high": [1]}}),
        ("observes", None),
    ):
        assert protocol.describe_misfit(expected, other).startswith(f"env.train.kwargs.{name} of the run says ")
