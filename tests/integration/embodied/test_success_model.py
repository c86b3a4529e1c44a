"""A model of success, by the commands a user types: it learns from pictures that say whether the task is done, and PPO learns
from its word."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import yaml
from gymnasium import spaces

from rlhpc import cli

SIDE, LOT = 8, np.random.default_rng(0)


class Dot(gymnasium.Env[np.ndarray, int]):
    """A dot on a picture, which goes left or right; where it is in the right half, the task is done. It pays nothing."""

    observation_space = spaces.Box(0, 255, (SIDE, SIDE, 1), np.uint8)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self.at = self.np_random.integers(SIDE, size=2)
        return self.picture(), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self.at[1] = np.clip(self.at[1] + (1 if action else -1), 0, SIDE - 1)
        return self.picture(), 0.0, False, False, {"success": bool(self.at[1] >= SIDE // 2)}

    def picture(self) -> np.ndarray:
        seen = np.zeros((SIDE, SIDE, 1), np.uint8)
        seen[tuple(self.at)] = 255
        return seen


if "Dot-v0" not in gymnasium.registry:
    gymnasium.register("Dot-v0", Dot)


def anywhere(obs: np.ndarray) -> np.ndarray:
    """Left or right by lot."""
    return LOT.integers(2, size=(len(obs), 1))


TASK = {
    "env": {"train": {"env_id": f"{Path(__file__).stem}:Dot-v0", "max_episode_steps": 10, "ignore_terminations": True},
            "eval": {"num_episodes": 20, "num_envs": 4}},
    "actor": {"model": {"model_type": "cnn", "hidden_sizes": [32]}, "optim": {"lr": 3e-3}},
}  # fmt: skip
JUDGE = {
    **TASK, "runner": {"name": "judge", "task_type": "bc", "max_steps": 10}, "cluster": {"component_placement": {"actor": 0}},
    "demos": {"path": "episodes.h5", "holdout": 0.2},
}  # fmt: skip
PPO = {
    **TASK, "runner": {"name": "ppo", "max_steps": 12}, "cluster": {"component_placement": {"actor,rollout,env": 0}},
    "algorithm": {"rollout_steps": 32, "gamma": 0.9}, "workflow": {"record_only_success": False},
}  # fmt: skip
SUCCESS = "actor.model.model_type=success"


def run(*words: str) -> int:
    return cli.main(list(words))


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with recorded episodes, and a model of success that was trained on them."""
    folder = tmp_path_factory.mktemp("judge")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=":")
        patch.syspath_prepend(str(Path(__file__).parent))
        Path("judge.yaml").write_text(yaml.safe_dump(JUDGE))
        Path("ppo.yaml").write_text(yaml.safe_dump(PPO))
        words = ["--config", "judge.yaml", "--episodes", "40", "--output", "episodes.h5"]
        assert run("record", "--expert", f"{Path(__file__).stem}:anywhere", *words) == 0
        assert run("train", "judge.yaml", SUCCESS) == 0
    return folder


@pytest.fixture
def here(judge: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(judge)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=":")
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    return judge


def test_it_learns_what_success_looks_like(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Judged by episodes that it was not trained on; with all labels turned round it says the opposite."""
    assert run("eval", "--run", "runs/judge", "--output", "judged.json", "--trust-checkpoint-code") == 0
    found = json.loads(Path("judged.json").read_text())
    assert found["held_out"] and found["episodes"] == 8 and found["steps"] == 80
    assert found["accuracy"] > 0.9 and found["recall"] > 0.8 and found["specificity"] > 0.8
    assert "of 8 held-out episodes judged rightly" in capsys.readouterr().out
    assert run("eval", "--run", "runs/judge", "--trust-checkpoint-code") == 0 and run("report", "runs/judge") == 0
    page = Path("runs/judge/report/index.html").read_text()
    assert f"{found['accuracy']:.1%}" in page and "not evaluated yet" not in page


def test_ppo_learns_from_its_word(here: Path) -> None:
    """The simulator pays nothing, but says in evaluation whether the task is done."""
    assert run("train", "ppo.yaml", "env.train.reward_model=runs/judge") == 0
    assert run("eval", "--run", "runs/ppo", "--output", "ppo.json", "--trust-checkpoint-code") == 0
    assert json.loads(Path("ppo.json").read_text())["success_at_end"] > 0.9
    rows = [json.loads(line) for line in Path("runs/ppo/metrics.jsonl").read_text().splitlines()]
    assert all(row.get("train/episode_return", 0) == 0 for row in rows)


@pytest.mark.parametrize(
    ("config", "words", "said"),
    [
        ("ppo", ["env.train.reward_model=nowhere"], "env.train.reward_model is 'nowhere', which is no folder"),
        ("ppo", ["env.train.reward_model=runs/judge", "env.train.env_id=CartPole-v1", "actor.model.model_type=mlp"],
         "which sees Box(0, 255"),
        ("ppo", [SUCCESS], "a model of success does not act"),
        ("judge", [SUCCESS, "runner.val_check_interval=1"], "runner.val_check_interval"),
        ("judge", [SUCCESS, "actor.model.kwargs.gain=1"], "allowed: weights, freeze, channels, encoder"),
    ],
)  # fmt: skip
def test_what_is_said_of_a_mistake(
    here: Path, capsys: pytest.CaptureFixture[str], config: str, words: list[str], said: str
) -> None:
    """Before anything starts, and nothing is written."""
    assert run("train", f"{config}.yaml", "runner.name=wrong", *words) == 2
    assert said in capsys.readouterr().err
    assert not Path("runs/wrong").exists()


def test_it_does_not_act(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        run("record", "--run", "runs/judge", "--episodes", "1", "--output", "none.h5", "--trust-checkpoint-code") == 2
    )
    assert "does not act" in capsys.readouterr().err and not Path("none.h5").exists()
