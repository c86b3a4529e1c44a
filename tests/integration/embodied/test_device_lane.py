"""Simulator and policy on one accelerator: observations stay there, and a run is what it is without (`near.py`)."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tiny_run import TinyRun

pytestmark = pytest.mark.long(together=True)

RUN = (
    "runner.max_steps=3", "runner.save_interval=3", "algorithm.rollout_steps=16", "algorithm.update_epochs=2",
    "actor.global_batch_size=32", "env.train.num_envs=4", "env.eval.num_envs=2", "runner.val_check_interval=-1",
    "env.train.env_type=near:Wide", "env.eval.env_type=near:Wide", "actor.model.model_type=near:Near",
)  # fmt: skip
Start, Check = Callable[..., TinyRun], Callable[[TinyRun, TinyRun], None]


def ways(run: TinyRun) -> list[float]:
    return [row["env/on_device"] for row in run.rows() if "env/on_device" in row]


@pytest.mark.parametrize("layout", [(), ("rollout.pipeline_stage_num=2",)], ids=["one stage", "two stages"])
def test_a_run_on_the_device_is_the_same(start: Start, check_same: Check, layout: tuple[str, ...]) -> None:
    plain, near = start("plain", *layout), start("near", *layout, policy="one")
    assert ways(plain) == []
    *finding, found = ways(near)
    # A sender learns where a key's reader computes when it has sent a message. Where the reader came for the first one later,
    # that is with the second: of what is sent once a step, the third is the first that stays.
    assert len(finding) == 2 and all(0.5 < way <= 1 for way in finding) and found == 1
    check_same(near, plain)


def test_a_policy_on_another_device_gets_them_through_the_host(start: Start, check_same: Check) -> None:
    plain, far = start("plain"), start("far", policy="two")
    assert ways(far) == [0, 0, 0]
    check_same(far, plain)


@pytest.mark.chaos
@pytest.mark.parametrize("rank", ["rollout-0", "env-0"])
def test_after_a_loss_they_find_each_other_again(start: Start, rank: str) -> None:
    steps = ("runner.max_steps=12", "runner.save_interval=1")
    plain, near = start("plain", *steps), start("near", *steps, policy="one", lose=rank)
    assert ways(near)[-1] == 1
    assert [row["step"] for row in near.rows()] == [row["step"] for row in plain.rows()]
