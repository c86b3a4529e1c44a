"""Size of the interfaces that a new task type implements: those of `Runner` and `TaskType`."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from rlhpc.runs.runner import Runner
from rlhpc.runs.task_type import TaskType, all_task_types
from rlhpc.runtime.plugins import load_attribute


def hooks_of(cls: type) -> set[str]:
    """The public methods and properties of a class that are not final: those that a subclass may override."""
    members = {name: member for name, member in vars(cls).items() if not name.startswith("_")}
    functions = {
        name: member.fget if isinstance(member, property) else member
        for name, member in members.items()
        if callable(member) or isinstance(member, property)
    }
    return {name for name, function in functions.items() if not getattr(function, "__final__", False)}


def test_a_runner_has_at_most_twelve_hooks() -> None:
    assert hooks_of(Runner) == {
        "begin", "build", "count_lost", "facts", "goal", "load_state", "one_step", "rebuild", "restored", "result", "state",
        "unharmed",
    }  # fmt: skip
    assert len(hooks_of(Runner)) <= 12


def test_a_task_type_has_at_most_ten_members() -> None:
    for kind in all_task_types():
        members = {name for name, _ in inspect.getmembers(kind) if not name.startswith("_")}
        assert members == {
            "checks", "config", "groups", "keys", "name", "offline", "planning", "reporting", "runner", "schema",
        }, kind.name  # fmt: skip
        assert len(members) <= 10


@pytest.mark.parametrize("kind", all_task_types(), ids=lambda kind: kind.name)
def test_no_runner_overrides_what_is_final(kind: TaskType[Any]) -> None:
    runner = load_attribute(kind.runner, "runner")
    final = {name for name in vars(Runner) if not name.startswith("_")} - hooks_of(Runner)
    assert final >= {"init_workers", "run", "max_recoveries"}
    for cls in runner.__mro__[: runner.__mro__.index(Runner)]:
        assert not final & set(vars(cls)), cls
