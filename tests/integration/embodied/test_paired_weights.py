"""Weights from each actor rank to the rollout rank on its accelerator: within it, and through no host memory (`near.py`)."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from tiny_run import TinyRun

pytestmark = pytest.mark.long(together=True)

RUN = (
    "runner.max_steps=4", "runner.save_interval=2", "algorithm.rollout_steps=16", "actor.global_batch_size=64",
    "env.eval.num_envs=2", "actor.model.model_type=near:Shared", "cluster.accelerators_per_node=2",
    'cluster.component_placement={"actor,rollout,env": 0-1}',
)  # fmt: skip
Start, Check = Callable[..., TinyRun], Callable[[TinyRun, TinyRun], None]


@pytest.fixture(autouse=True)
def accelerators(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gives ranks two stand-ins for accelerators, neither of which can read the other's memory."""
    monkeypatch.setenv("RLHPC_VIRTUAL_ACCELERATORS", "1")


def roads(run: TinyRun) -> list[dict[str, float]]:
    """The shares of each step's bytes."""
    rows: list[dict[str, Any]] = [json.loads(line) for line in (run.root / "metrics.jsonl").read_text().splitlines()]
    mark = "time/weights_by_"
    return [{key.removeprefix(mark): row[key] for key in row if key.startswith(mark)} for row in rows]


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("actor.training_backend=fsdp",),
        ("actor.enable_offload=true", "rollout.enable_offload=true"),
        ("runner.val_check_interval=2",),
    ],
    ids=["each has all", "sharded", "in turn", "evaluated"],
)
def test_no_byte_goes_through_the_host(start: Start, check_same: Check, overrides: tuple[str, ...]) -> None:
    paired = start("paired", *overrides, policy="own")
    plain = start("plain", "rollout.weight_sync=host", *overrides, policy="own")
    # Rollout ranks say where they compute when they come for the first version, which may have begun by then.
    assert roads(paired)[1:] == [{"ipc": 1.0}] * 3
    assert roads(plain) == [{"host": 1.0}] * 4
    check_same(paired, plain)


def test_a_run_that_overlaps_steps_has_one_sender(start: Start) -> None:
    """Ranks may join it. Not all rollout ranks can read the first actor rank's accelerator, and so none does."""
    ahead = start("ahead", "algorithm.max_staleness=1", policy="own")
    assert {tuple(road) for road in roads(ahead) if road} == {("host",)}


@pytest.mark.chaos
def test_after_a_loss_the_pairs_find_each_other_again(start: Start, check_same: Check) -> None:
    lost = start("lost", "runner.max_steps=8", policy="own", lose="rollout-1", after=2)
    whole = start("whole", "runner.max_steps=8", policy="own")
    assert roads(lost)[-1] == {"ipc": 1.0}
    check_same(lost, whole)
