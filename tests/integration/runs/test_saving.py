"""Saves beside training, by real ranks: when a checkpoint appears, what is in it, and what becomes of one that fails."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from saving_roles import Plain, Weights
from test_resume import assert_identical
from tiny_run import TinyRun, kill_tree, wait_until

from rlhpc import Cluster, NodePlacementStrategy, Session, WorkerFailed
from rlhpc.checkpoint import CheckpointWriter, newest_valid, read_manifest, verify
from rlhpc.checkpoint.state import load_tensors
from rlhpc.jobs.paths import RunPaths
from rlhpc.runs.checkpointing import Saves
from rlhpc.runtime.errors import CheckpointError

#: 18 MB of weights, and twice as much of the optimizer's.
WIDE = (
    "actor.model.hidden_sizes=[2100, 2100]", "runner.max_steps=4", "runner.save_interval=1", "runner.keep_checkpoints=0",
    "algorithm.rollout_steps=8", "algorithm.update_epochs=1", "actor.global_batch_size=32", "env.eval.num_episodes=1",
)  # fmt: skip


class Run:
    """A run's folder and groups."""

    def __init__(self, folder: Path) -> None:
        self.paths, self.gate = RunPaths.from_run_dir(folder, "run"), folder / "gate"
        self.paths.root.mkdir(parents=True)
        cluster = Cluster.local(num_nodes=1, accelerators_per_node=0)
        token = folder.name
        self.actor = Weights.create_group(str(self.gate)).launch(
            cluster, placement_strategy=NodePlacementStrategy([0, 0, 0]), name=f"actor-{token}"
        )
        self.plain = Plain.create_group().launch(
            cluster, placement_strategy=NodePlacementStrategy([0]), name=f"plain-{token}"
        )
        self.saves = Saves({"actor": self.actor, "plain": self.plain}, True, 60.0)

    def begin(self, step: int) -> None:
        self.saves.begin(CheckpointWriter(self.paths, step), {"runner.json": b"{}"}, {"env_steps": step})

    def left(self) -> list[str]:
        return sorted(path.name for path in self.paths.checkpoints.iterdir())


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    found = Run(tmp_path)
    yield found
    found.gate.write_text("")  # a thread that still waits must not keep its rank
    if session := Session.running():
        session.stop()


def ended(saves: Saves) -> float:
    deadline = time.monotonic() + 60
    while (seconds := saves.advance()) is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return seconds


@pytest.mark.long
def test_a_checkpoint_appears_once_all_is_written_and_is_of_the_step_that_began_it(run: Run) -> None:
    for step in (1, 2):
        run.actor.train().wait()
        run.begin(step)
        assert run.saves.pending_step == step
        for _ in range(3):
            run.actor.train().wait()  # the ranks do something else meanwhile
            assert run.saves.advance() is None
        assert not run.paths.checkpoint(step).exists()
        run.gate.write_text("")
        assert (ended(run.saves) if step == 1 else run.saves.finish()) and run.saves.pending_step is None
        run.gate.unlink()
        checkpoint = run.paths.checkpoint(step)
        assert not verify(checkpoint) and run.saves.finish() is None
        for rank in (0, 1, 2):
            weights = load_tensors(checkpoint / f"weights-{rank}")["w"]
            assert weights.unique().tolist() == [1.0 if step == 1 else 5.0]
        files = {*(f"{name}-{rank}" for name in ("weights", "small") for rank in (0, 1, 2)), "plain", "runner.json"}
        assert read_manifest(checkpoint)["files"].keys() == files


def test_a_full_disk_ends_the_save_and_leaves_nothing_of_it(run: Run) -> None:
    run.begin(1)
    run.gate.write_text("full")
    with pytest.raises(
        (CheckpointError, WorkerFailed), match=r"weights-.: could not be written: No space left on device"
    ):
        ended(run.saves)
    assert run.saves.pending_step is None and run.left() == []


def test_a_save_whose_writer_was_killed_is_dropped(run: Run) -> None:
    run.gate.write_text("")
    run.begin(1)
    run.saves.finish()
    run.gate.unlink()
    run.begin(2)
    os.kill(run.actor.pid().wait()[1], signal.SIGKILL)
    assert run.saves.finish_or_drop() is None and run.saves.pending_step is None
    assert newest_valid(run.paths).step == 1 and run.left() == ["global_step_1"]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> TinyRun:
    """A run that stands still for its saves."""
    run = TinyRun(tmp_path_factory.mktemp("still"), *WIDE, "runner.async_save=false")
    run.train()
    return run


@pytest.mark.long
def test_a_run_that_trains_on_is_the_run_that_stands_still(reference: TinyRun, tmp_path: Path) -> None:
    """Each of its checkpoints, too."""
    run = TinyRun(tmp_path, *WIDE)
    run.train()
    assert_identical(run, reference, 4)
    for step in range(1, 5):
        ours, theirs = (read_manifest(one.checkpoint(step))["files"] for one in (run, reference))
        assert not verify(run.checkpoint(step))
        assert (
            ours["model.safetensors"] == theirs["model.safetensors"] and ours["optimizer.pt"] == theirs["optimizer.pt"]
        )
    assert all("time/save_s" in row for row in rows_with_times(run)[1:])


@pytest.mark.long
@pytest.mark.parametrize("seed", range(2))
def test_killed_while_a_checkpoint_is_written_beside_training(reference: TinyRun, tmp_path: Path, seed: int) -> None:
    """Everything at once; what was committed is there, and the run that goes on is the same."""
    chance, run = random.Random(seed), TinyRun(tmp_path, *WIDE)
    process, step = run.start(), chance.randint(1, 3)
    wait_until(lambda: any(run.root.glob(f"checkpoints/.tmp_global_step_{step}-*/*")) or run.checkpoint(step).exists())
    time.sleep(chance.uniform(0, 0.3))
    committed = sorted(
        int(path.parent.name.rpartition("_")[2]) for path in run.root.glob("checkpoints/global*/COMPLETE")
    )
    kill_tree(process)
    for kept in committed:
        assert not verify(run.checkpoint(kept))
    run.train("runner.resume_dir=auto")
    assert_identical(run, reference, 4)
    assert not [path for path in (run.root / "checkpoints").iterdir() if path.name.startswith(".")]


def rows_with_times(run: TinyRun) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run.root / "metrics.jsonl").read_text().splitlines()]
