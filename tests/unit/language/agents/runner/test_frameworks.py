"""Tasks of agent frameworks."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from rlhpc.language.agents.runner.frameworks import pick_task


def test_a_problem_beyond_a_taskset_is_refused() -> None:
    tasks = ["a", "b", "c"]
    assert [pick_task(tasks, SimpleNamespace(id=n, meta={})) for n in range(3)] == tasks
    assert pick_task(tasks, SimpleNamespace(id=70, meta={"idx": 1})) == "b"
    for number in (3, 70, -1):
        with pytest.raises(ValueError, match=rf"has tasks 0 to 2, and the source asks for {number}"):
            pick_task(tasks, SimpleNamespace(id=number, meta={}))
