"""A run in which nothing can be judged ends, and says why."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.extras import need_extra

need_extra("llm")

sys.path.insert(0, str(Path(__file__).parent))

from test_reasoning import LanguageRun

RUN = (
    "runner.max_steps=14", "runner.save_interval=20", "data.eval=[]", "workflow.eval_suites=[]", "data.prompts_per_step=2",
    "algorithm.group_size=2", "actor.global_batch_size=4",
)  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize(
    ("overrides", "failure"),
    [
        (("reward.terms=[{name: 'lm_rewards:unreachable'}]",), "the service is down"),
        (
            ("agent={kind: python, target: 'outside_agents:broken', timeout_s: 60}", "reward.terms=[{name: agent}]"),
            "ValueError: no such database",
        ),
    ],
    ids=["reward", "agent"],
)
def test_steps_without_a_judged_sample_end_a_run(overrides: tuple[str, ...], failure: str, tmp_path: Path) -> None:
    message = LanguageRun(tmp_path / "ten", *RUN, "reward.max_failed_steps=9").train(*overrides, code=2)
    assert "step 10: no sample could be judged and trained on, 10 steps in a row; the last failure: " in message
    assert failure in message and "Traceback" not in message
    message = LanguageRun(tmp_path / "one", *RUN).train(*overrides, code=2)
    assert "step 1: no sample could be judged and trained on, in the whole step; the last failure: " in message
    assert failure in message and "Traceback" not in message


@pytest.mark.long
def test_answers_that_cannot_be_judged_stand_in_the_progress_line(tmp_path: Path) -> None:
    run = LanguageRun(tmp_path / "bar", *RUN, "runner.max_steps=1", "reward.max_failed_steps=1")
    assert "4 of 4 not judged" in run.train("reward.terms=[{name: 'lm_rewards:unreachable'}]")
