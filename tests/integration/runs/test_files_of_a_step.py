"""Number of the package's files that one training step executes, over all processes and threads of a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.extras import need_extra
from tests.structure.steps import run_and_count

need_extra("llm")

#: Run → packages → the most files of a step. The bounds only go down; the goals beside them are where they go.
BOUNDS = {
    "grpo": {
        (): 75,
        ("language", "algorithms", "training"): 40,
    },
    "ppo": {
        (): 62,
        ("embodied", "algorithms", "training"): 25,
    },
}
#: Files of the runtime that its timers execute (heartbeats, the table of ranks, sizes of logs): on a busy machine, where steps
#: take long, one falls into each of them.
TIMERS = 10


@pytest.mark.parametrize("run", BOUNDS)
def test_a_step_executes_few_files(run: str, tmp_path: Path) -> None:
    step = run_and_count(run, tmp_path)
    assert len(step) > 10, "the calls were not recorded"
    for packages, bound in BOUNDS[run].items():
        number = step.count_in(*packages) if packages else len(step)
        assert number <= bound + (0 if packages else TIMERS), step.table()
