"""Calls on the ranks that a group started with leave out those that have joined."""

from __future__ import annotations

from typing import Any

import pytest

from rlhpc.runs.replicas import CompletedCall, Originals
from rlhpc.runtime.worker import Worker
from rlhpc.runtime.worker_group import WorkerGroup


class Counter(Worker):
    """A rank."""

    def count(self, start: int) -> int:
        """Counts."""
        return start


def test_they_are_called_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    group = WorkerGroup(Counter)
    group.name, group._world_size = "counter", 2
    asked: list[Any] = []

    def call(self: WorkerGroup, name: str) -> Any:
        return lambda *args: asked.append((name, args, self._selected_ranks))

    monkeypatch.setattr(WorkerGroup, "__getattr__", call)
    originals = Originals(group)
    originals.count(3)
    assert asked == [("count", (3,), {0, 1})]
    assert originals.name == "counter" and originals.world_size == 2 and originals.worker_class is Counter
    assert CompletedCall().wait(1.0) == [] and CompletedCall().done()
