"""Simulator process: messages with deadlines, and the calls of a parent."""

from __future__ import annotations

import os
import pickle
import socket
import threading
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rlhpc.embodied.envs.base import Timing
from rlhpc.embodied.envs.subprocess_main import ENV_PROPERTIES, close_hardware_on_close, receive, send, serve
from rlhpc.runtime.errors import ConfigError


class Counter:
    """Environment that counts its steps."""

    holds_hardware, timing = False, None

    def __init__(self, cfg: str, num_envs: int) -> None:
        if cfg == "unknown":
            raise ConfigError("no such environment")
        vars(self).update({name: f"{name} of {cfg}" for name in ENV_PROPERTIES if name != "holds_hardware"})
        self.num_envs, self.count = num_envs, 0
        if cfg == "robot":
            self.timing: Any = Timing()

    def step(self, actions: np.ndarray) -> Any:
        self.count += 1
        if self.timing is not None:
            self.timing.record_refusal()
        return actions, self.count, None, None, {}

    def state_dict(self) -> Any:
        return {"slots": [self.count] * self.num_envs}

    def slot_state(self, state: Any, index: int) -> Any:
        return state["slots"][index]

    def merge_states(self, slots: list[Any]) -> Any:
        return {"slots": slots}

    def load_state_dict(self, state: Any) -> None:
        self.count = state["slots"][0]

    def refuse(self) -> None:
        raise ConfigError("not so")


class Served:
    """The calls of a parent, to `serve` in a thread."""

    def __init__(self, cfg: str) -> None:
        self.sock, child = socket.socketpair()
        self.thread = threading.Thread(target=serve, args=(child, -1), daemon=True)
        self.thread.start()
        send(self.sock, pickle.dumps((Counter, cfg, {"num_envs": 2})))
        self.first = receive(self.sock, time.monotonic() + 20)

    def call(self, name: str, *args: Any) -> Any:
        send(self.sock, (name, args))
        return receive(self.sock, time.monotonic() + 20)

    def end(self) -> None:
        self.sock.close()
        self.thread.join(20)
        assert not self.thread.is_alive()


def test_a_parent_gets_the_environments_properties_and_answers() -> None:
    served = Served("plain")
    kind, env_facts = served.first
    assert kind == "done" and env_facts["control_hz"] == "control_hz of plain" and env_facts["timed"] is False
    assert env_facts.keys() == {*ENV_PROPERTIES, "timed"}
    for count in (1, 2):
        kind, answer = served.call("step", np.ones(2))
        assert kind == "done" and answer[1] == count and answer[4] == {}
    assert served.call("save") == ("done", [2, 2])
    served.call("load", [7, 7])
    assert served.call("save") == ("done", [7, 7])
    served.end()


def test_a_robots_timing_travels_with_its_steps() -> None:
    served = Served("robot")
    timing = served.call("step", np.ones(2))[1][4]["timing"]
    assert served.first[1]["timed"] and timing["robot_refused"].tolist() == [1]
    served.end()


@pytest.mark.parametrize(
    ("name", "kind", "words"), [("refuse", "config", "not so"), ("jump", "raised", "AttributeError")]
)
def test_an_error_is_told_and_ends_the_process(name: str, kind: str, words: str) -> None:
    served = Served("plain")
    answer_kind, text = served.call(name)
    assert answer_kind == kind and words in text
    served.thread.join(20)
    assert not served.thread.is_alive()
    served.sock.close()


def test_what_cannot_be_built_is_told() -> None:
    served = Served("unknown")
    assert served.first == ("config", "no such environment")
    served.end()


def test_a_message_has_one_deadline() -> None:
    left, right = socket.socketpair()
    with left, right:
        with pytest.raises(TimeoutError):
            receive(left, time.monotonic() + 0.1)
        right.sendall(b"\0" * 7 + b"\x09" + b"half")
        with pytest.raises(TimeoutError):
            receive(left, time.monotonic() + 0.1)
        right.close()
        with pytest.raises(EOFError):
            receive(left)


def test_hardware_is_closed_when_the_parent_is_gone() -> None:
    """In a process of its own, which ends with it."""
    lifeline, parents_end = os.pipe()
    report, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(parents_end)
        close_hardware_on_close(lifeline, SimpleNamespace(close=lambda: os.write(write_end, b"closed")))
        time.sleep(60)
        os._exit(1)
    os.close(lifeline)
    os.close(parents_end)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert os.read(report, 10) == b"closed"
    os.close(report)
    os.close(write_end)
