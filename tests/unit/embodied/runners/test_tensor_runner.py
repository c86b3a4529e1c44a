"""Loop of actors that simulate and act: the order of the calls, the metrics of a step, and what a resume says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rlhpc.config.typed import typed
from rlhpc.embodied.config import PpoConfig
from rlhpc.embodied.data.batches import DropReason, RolloutCounts
from rlhpc.embodied.runners.rollout_runner import EmbodiedRunner, TensorRunner, ppo_runner
from rlhpc.runs.configuration import load_config
from tests.unit.embodied.runners.test_rollout_runner import CONFIGS, Group, report

SLOTS, DECISIONS = 4, 8


def make(tmp_path: Path, *overrides: str, **answers: Any) -> Any:
    """Builds a runner of two ranks; `runner.calls` are the calls of its group."""
    words = [
        f"env.train.num_envs={SLOTS}", f"algorithm.rollout_steps={DECISIONS}", "runner.max_steps=6",
        f"runner.run_dir={tmp_path}", *overrides,
    ]  # fmt: skip
    cfg: Any = typed(PpoConfig, load_config(CONFIGS / "embodied/cartpole_tensors.yaml", words, check=False))
    calls: list[str] = []
    counts = RolloutCounts(0, SLOTS * DECISIONS, dict.fromkeys(DropReason, 0))
    answers = {
        "read_step": (counts, report([3.0, 5.0]), {"policy_loss": 0.5, "update_s": 2.0}), "has_restored_episodes": True,
        "evaluate": [{"return": 7.0, "length": 3.0}], **answers,
    }  # fmt: skip
    group: Any = Group("actor", calls, **answers)
    group.world_size = 2
    runner: Any = ppo_runner(cfg, actor=group)
    runner.build()
    runner.begin()
    runner.calls, runner.group = calls, group
    return runner


def test_a_step_plays_and_trains_on_the_actors_alone(tmp_path: Path) -> None:
    runner = make(tmp_path, "runner.val_check_interval=2")
    assert isinstance(runner, TensorRunner) and list(runner.groups) == ["actor"]
    assert runner.calls == ["actor.build"] and runner.group.arguments[0][1].num_actor_ranks == 2
    first, second = runner.one_step(), runner.one_step()
    assert runner.calls[1:] == [
        *["actor.play", "actor.train", "actor.read_step"] * 2,
        "actor.evaluate",
        "actor.evaluate",
    ]
    assert [args[1:] for args in runner.group.arguments if args[0] == "evaluate"] == [(0, 2), (1, 2)]
    assert first["rollout/env_steps"] == SLOTS * DECISIONS and second["train/episodes"] == 4
    assert first["train/episode_return"] == 4.0 and second["eval/return_mean"] == 7.0
    assert {"time/rollout_s", "time/update_s", "time/train_s"} <= first.keys()
    assert not {"time/act_s", "time/simulate_s", "time/sync_s"} & first.keys()


@pytest.mark.parametrize("restored", [True, False])
def test_a_resume_says_that_episodes_start_anew(tmp_path: Path, restored: bool, capsys: Any) -> None:
    make(tmp_path, has_restored_episodes=restored).check_restored({"actor": [None, None]})
    assert ("their episodes start anew" in capsys.readouterr().err) != restored


def test_with_places_for_all_groups_the_runner_is_the_usual_one(tmp_path: Path) -> None:
    words = ["cluster.component_placement={'actor,rollout,env': 0}", f"runner.run_dir={tmp_path}"]
    cfg: Any = typed(PpoConfig, load_config(CONFIGS / "embodied/cartpole_tensors.yaml", words, check=False))
    groups: Any = {name: Group(name, []) for name in ("actor", "rollout", "env")}
    assert isinstance(ppo_runner(cfg, **groups), EmbodiedRunner)
