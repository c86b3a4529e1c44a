"""A rollout rank is killed between two of the messages with which it hands a group over: some have its answers, others do not,
and the prompt is drawn again, with other answers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.extras import need_extra

need_extra("llm")

from test_replicas import Disturbed

pytestmark = pytest.mark.long

STEPS = 20
SETTINGS = (
    f"runner.max_steps={STEPS}", "runner.save_interval=-1", "rollout.max_batch_size=8",
    "rollout.rollout_backend='dying:Uneven'",
    "algorithm.adv_type=gae", "algorithm.kl_coef=0.01", "critic.optim.lr=1e-3", "workflow.eval_suites=[]",
    "runner.step_timeout_s=60",
    "cluster.component_placement={actor: '0:0-1', rollout: '0:0-2', critic: '0:0-1', reference: '0'}",
)  # fmt: skip


class Handed(Disturbed):
    """A run whose rollout ranks die when they are told to."""

    def __init__(self, folder: Path) -> None:
        self.order = folder / "dies"
        super().__init__(folder, pause_s=0.05, settings=SETTINGS)

    def dies_before(self, channel: str) -> None:
        """Some rank is killed before it puts a group into a channel, and two steps are made."""
        new = self.order.with_suffix(".new")
        new.write_text(channel)
        new.rename(self.order)
        self.until(lambda: not self.order.exists())
        step = self.step()
        self.until(lambda: self.step() >= min(STEPS, step + 2))


def test_who_scores_and_who_trains_have_the_same_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLHPC_TEST_DIES", str(tmp_path / "run" / "dies"))
    run = Handed(tmp_path / "run")
    run.until(lambda: run.step() >= 1)
    for channel in ("to-reference", "to-critic", "delivered"):
        run.dies_before(channel)
    run.hurry()
    said = run.end()
    assert said.count("ended; the others have made its prompts") == 3 and "start again from" not in said, said
    assert [row["rollout/samples"] for row in run.rows()] == [64.0 * step for step in range(1, STEPS + 1)]
