"""Runs whose engines have two ranks each: they train as with one, and one that loses a rank is started again alone."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="needs the extra vllm")

sys.path.insert(0, str(Path(__file__).parent))

from test_reasoning import LanguageRun, improves
from test_replicas import Disturbed

TWO = (
    "rollout.rollout_backend=vllm", "rollout.parallel.tensor=2", "rollout.probe_interval=1", "runner.save_interval=-1",
    "cluster.component_placement={actor: '0', rollout: '0:0-3'}", "runner.val_check_interval=4",
)  # fmt: skip


def test_two_engines_of_two_ranks(tmp_path: Path) -> None:
    """Each version is looked at by a text that trainer and engines score."""
    run = LanguageRun(tmp_path / "two", *TWO)
    run.train()
    rows = run.rows()
    assert improves(rows) and max(row["train/mismatch_abs"] for row in rows) < 1e-4
    assert [row["rollout/samples"] for row in rows] == [64.0 * step for step in range(1, 9)]
    assert [row["eval/problems"] for row in rows if "eval/problems" in row] == [10, 10]


@pytest.mark.timeout(600)
def test_an_engine_ends_whole_and_alone(tmp_path: Path) -> None:
    """Whichever of its ranks is killed, in the middle of a step; no other process is started again, and a helper is an engine
    of as many ranks. Who comes back, or comes anew, gets the weights by routes of its own."""
    run = Disturbed(
        tmp_path / "disturbed", pause_s=0.1, settings=(*TWO, "runner.max_steps=60", "rollout.weight_sync=shards")
    )
    run.until(lambda: run.step() >= 1)
    before = run.members()
    os.kill(before["rollout-3"], signal.SIGKILL)
    back = "rollout[2], rollout[3] takes part from the next step on"
    run.until(lambda: back in run.said())
    between = run.members()
    assert {name for name in before if before[name] != between[name]} == {"rollout-2", "rollout-3"}
    os.kill(between["rollout-0"], signal.SIGKILL)
    run.until(lambda: "rollout[0], rollout[1] takes part from the next step on" in run.said())
    after = run.members()
    assert {name for name in between if between[name] != after[name]} == {"rollout-0", "rollout-1"}
    helpers = [run.join(), run.join()]
    run.until(lambda: "rollout[4], rollout[5] takes part from the next step on" in run.said())
    run.hurry()
    said = run.end()
    assert "start again from" not in said and "rollout[2], rollout[3] ended; the others have made its prompts" in said
    for helper in helpers:
        helper.communicate(timeout=60)
    assert [row["rollout/samples"] for row in run.rows()] == [64.0 * step for step in range(1, 61)]
    assert max(row["train/mismatch_abs"] for row in run.rows()) < 1e-4
    assert not [name for name in os.listdir("/dev/shm") if "cpushm" in name and "rollout-" in name]


TWO_TO_TWO = ("cluster.component_placement={actor: '0:0-1', rollout: '0:0-1'}",)
ADAPTERS = (*TWO_TO_TWO, "actor.lora.rank=4", "actor.optim.lr=2e-2")


@pytest.mark.parametrize(
    "settings",
    [
        TWO_TO_TWO,
        (*ADAPTERS, "actor.offload_in_rollout=true"),
        (*ADAPTERS, "rollout.merge_adapters=false"),
        ("cluster.component_placement={actor: '0:0-3', rollout: '0'}", "rollout.parallel.tensor=1"),
    ],
    ids=["2 to 2", "adapters merged, in turns", "adapters apart", "4 to 1"],
)
def test_weights_from_shards_to_shards(tmp_path: Path, settings: tuple[str, ...]) -> None:
    """Ranks that train a part of each matrix, and ranks of an engine that want others; each version is looked at."""
    run = LanguageRun(
        tmp_path / "shards", *TWO, "rollout.weight_sync=shards", "actor.training_backend=fsdp", "runner.max_steps=3",
        "runner.val_check_interval=-1", *settings,
    )  # fmt: skip
    run.train()
    rows = run.rows()
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert max(row["train/mismatch_abs"] for row in rows) < 1e-4
