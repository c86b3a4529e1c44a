"""Loops of off-policy runs: random first actions, offline steps, and runs whose actors simulate and act themselves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rlhpc.config.typed import typed
from rlhpc.embodied.config import SacConfig
from rlhpc.embodied.data.batches import DropReason, RolloutCounts
from rlhpc.embodied.runners.off_policy_runner import OffPolicyRunner, OffPolicyTensorRunner, off_policy_runner
from rlhpc.runs.configuration import load_config
from tests.unit.embodied.runners.test_rollout_runner import CONFIGS, DECISIONS, OVERRIDES, SLOTS, Group, report
from tests.unit.embodied.runners.test_rollout_runner import make as make

ALONE = ("env.train.env_type=tensors", "env.train.env_id=pendulum", "cluster.component_placement={actor: 0}")


@pytest.fixture
def make_alone(tmp_path: Path) -> Any:
    """Builds a runner of actors alone; `runner.calls` are the calls of its group."""

    def make_runner(*overrides: str, **answers: Any) -> Any:
        words = [*OVERRIDES, *ALONE, f"runner.run_dir={tmp_path}", *overrides]
        cfg: Any = typed(SacConfig, load_config(CONFIGS / "embodied/pendulum_sac.yaml", words, check=False))
        calls: list[str] = []
        counts = RolloutCounts(0, SLOTS * DECISIONS, dict.fromkeys(DropReason, 0))
        played = {"read_step": (counts, report([3.0]), {"q_loss": 0.5}), **answers}
        group = Group("actor", calls, **played)
        runner: Any = off_policy_runner(cfg, actor=group)
        runner.build()
        runner.begin()
        calls.clear()
        runner.calls, runner.group = calls, group
        return runner

    return make_runner


def test_the_first_transitions_of_an_off_policy_run_are_random(make: Any) -> None:
    size = SLOTS * DECISIONS
    runner = make(OffPolicyRunner, f"algorithm.random_steps={size + 1}")
    assert [runner.has_random_actions(step) for step in (1, 2, 3)] == [True, True, False]
    runner.one_step()
    assert [call[2] for call in runner.group["rollout"].arguments if call[0] == "generate"] == [size + 1]
    assert runner.state()["random_steps"] == size + 1
    default = make(OffPolicyRunner, "algorithm.replay_buffer.min_buffer_size=77")
    assert default.random_steps == 77
    default.load_state(runner.state())
    assert default.random_steps == size + 1


def test_offline_steps_need_no_environment(make: Any) -> None:
    runner = make(OffPolicyRunner, "algorithm.offline_steps=1", update_offline={"q_loss": 3.0})
    row = runner.one_step()
    assert runner.calls == ["actor.update_offline"] and row["train/q_loss"] == 3.0
    assert row["rollout/env_steps"] == 0 and "rollout/version" not in row
    assert runner.random_steps == 0, "the policy is trained"
    runner.calls.clear()
    assert runner.one_step()["rollout/env_steps"] == SLOTS * DECISIONS and "actor.update" in runner.calls


def test_actors_that_act_know_which_actions_are_random(make_alone: Any) -> None:
    runner = make_alone("algorithm.random_steps=40", "algorithm.offline_steps=1", update_offline={"q_loss": 3.0})
    assert isinstance(runner, OffPolicyTensorRunner)
    assert "rollout/version" not in runner.one_step() and runner.calls == ["actor.update_offline"]
    row = runner.one_step()
    assert (
        runner.calls[1:] == ["actor.play", "actor.train", "actor.read_step"]
        and row["rollout/env_steps"] == SLOTS * DECISIONS
    )
    assert [args[1:] for args in runner.group.arguments if args[0] == "play"] == [(2, 40 + SLOTS * DECISIONS)]


def test_with_places_for_all_groups_the_runner_is_the_usual_one(make: Any, tmp_path: Path) -> None:
    runner = make(OffPolicyRunner)
    groups = {name: Group(name, []) for name in ("actor", "rollout", "env")}
    assert type(off_policy_runner(runner.cfg, **groups)) is OffPolicyRunner
