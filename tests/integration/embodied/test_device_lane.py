"""Simulator and policy on one accelerator: observations stay there, and a run is what it is without (`near.py`)."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from tiny_run import TinyRun

from rlhpc.checkpoint.state import load_tensors

pytestmark = pytest.mark.long(together=True)

ROOT = Path(__file__).parents[3]
WIDE = (
    "runner.max_steps=3", "runner.save_interval=3", "algorithm.rollout_steps=16", "algorithm.update_epochs=2",
    "actor.global_batch_size=32", "env.train.num_envs=4", "env.eval.num_envs=2", "runner.val_check_interval=-1",
    "env.train.env_type=near:Wide", "env.eval.env_type=near:Wide", "actor.model.model_type=near:Near",
)  # fmt: skip
Start = Callable[..., TinyRun]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Start:
    """Runs to the end: on the device, with the policy on the device of that address, or without one."""
    path = [str(Path(__file__).parent), str(ROOT), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path))

    def run(name: str, *overrides: str, policy: str | None = None, lose: str = "") -> TinyRun:
        if policy is not None:
            (folder := tmp_path / f"device-{name}").mkdir()
            monkeypatch.setenv("RLHPC_TEST_LANE", str(folder))
            monkeypatch.setenv("RLHPC_TEST_LANE_OF_POLICY", policy)
        made = TinyRun(tmp_path / name, *WIDE, *overrides)
        if lose:
            monkeypatch.setenv("RLHPC_MAX_RESTARTS", "2")
            made.lose(lose, after=1)
        else:
            made.train()
        return made

    return run


def ways(run: TinyRun) -> list[float]:
    return [row["env/on_device"] for row in run.rows() if "env/on_device" in row]


def check_same(one: TinyRun, other: TinyRun) -> None:
    """Numbers and weights, to the last bit."""
    rows = [[{k: v for k, v in row.items() if k != "env/on_device"} for row in run.rows()] for run in (one, other)]
    assert rows[0] == rows[1]
    last = one.rows()[-1]["step"]
    mine, theirs = (load_tensors(run.checkpoint(last) / "model.safetensors") for run in (one, other))
    assert mine.keys() == theirs.keys() and all((mine[name] == theirs[name]).all() for name in theirs)


@pytest.mark.parametrize("layout", [(), ("rollout.pipeline_stage_num=2",)], ids=["one stage", "two stages"])
def test_a_run_on_the_device_is_the_same(start: Start, layout: tuple[str, ...]) -> None:
    plain, near = start("plain", *layout), start("near", *layout, policy="one")
    assert ways(plain) == []
    *finding, found = ways(near)
    # A sender learns where a key's reader computes when it has sent a message. Where the reader came for the first one later,
    # that is with the second: of what is sent once a step, the third is the first that stays.
    assert len(finding) == 2 and all(0.5 < way <= 1 for way in finding) and found == 1
    check_same(near, plain)


def test_a_policy_on_another_device_gets_them_through_the_host(start: Start) -> None:
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
