"""Base of wrappers of vector environments."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest

from rlhpc.embodied.envs.base import Step, VectorEnv
from rlhpc.embodied.envs.vector_wrapper import VectorEnvWrapper
from tests.unit.embodied.workers.failing import Failing

#: What a wrapper decides itself: how it steps, what it saves, and where its observations are.
_OWN = {"step", "chunk_step", "uses_accelerator", "slots_of", "continue_episodes"}


class Counting(VectorEnvWrapper):
    """Counts the steps of each slot."""

    def __init__(self, env: VectorEnv) -> None:
        super().__init__(env)
        self.columns: dict[str, Any] = {"steps": np.zeros(env.num_envs, np.int64), "seen": {"at": np.zeros((2, 1))}}
        self.columns["source"] = [{"in_control": 1}, {"in_control": 2}]

    def step(self, actions: np.ndarray) -> Step:
        self.columns["steps"] += 1
        return self.env.step(actions)

    def chunk_step(self, actions: np.ndarray) -> Step:
        return self.env.chunk_step(actions)

    def own_columns(self) -> dict[str, Any]:
        return self.columns

    def load_own_columns(self, columns: Mapping[str, Any]) -> None:
        self.columns = {name: columns[name] for name in self.columns}


class Suite(Failing):
    """Slots of several tasks, whose state is where they are."""

    task_names = ("reach", "push")
    supports_state = True
    control_hz = 20.0
    restarts = 3
    record_kwargs: Any = MappingProxyType({"suite": 1})
    holds_hardware = True

    def state_dict(self) -> Any:
        return {"slots": self._at.tolist()}

    def load_state_dict(self, state: Any) -> None:
        self._at[:] = state["slots"]


def test_all_that_it_does_not_change_is_forwarded() -> None:
    inner = Suite(set())
    env = Counting(inner)
    for name in (
        "task_names",
        "supports_state",
        "control_hz",
        "restarts",
        "record_kwargs",
        "holds_hardware",
        "num_envs",
    ):
        assert getattr(env, name) == getattr(inner, name), name


@pytest.mark.parametrize(
    "name",
    [
        name
        for name, method in vars(VectorEnv).items()
        if inspect.isfunction(method) and name[0] != "_" and name not in _OWN
    ],
)
def test_each_method_reaches_the_environment(name: str) -> None:
    """Also one that `VectorEnv` gets later."""
    assert getattr(VectorEnvWrapper, name) is not getattr(VectorEnv, name)


def test_a_state_is_taken_apart_by_slots_and_joined() -> None:
    env = Counting(Suite(set()))
    env.reset()
    env.step(np.zeros((2, 1)))
    env.columns["steps"] += [0, 5]
    state = env.state_dict()
    swapped = Counting(Suite(set()))
    swapped.load_state_dict(env.merge_states([env.slot_state(state, index) for index in (1, 0)]))
    assert swapped.columns["steps"].tolist() == [6, 1] and swapped.columns["seen"]["at"].shape == (2, 1)
    assert swapped.columns["source"] == [{"in_control": 2}, {"in_control": 1}]
