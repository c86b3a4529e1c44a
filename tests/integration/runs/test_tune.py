"""`rlhpc tune` on a tiny run, as a person would: it measures, searches, runs the best, and leaves a configuration."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from rlhpc.runs.configuration import load_config
from tests import warm
from tests.integration.tiny_run import CONFIG

#: Odd numbers leave little to vary, so that there are few short runs.
ODD = ("env.train.num_envs=3", "algorithm.rollout_steps=5", "actor.global_batch_size=15", "algorithm.update_epochs=1")


def tune(*words: str, code: int = 0) -> tuple[str, str]:
    command = [sys.executable, "-m", "rlhpc.cli", "tune", *words]
    done = warm.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == code, done.stderr
    return done.stdout, done.stderr


def test_it_finds_a_placement_and_leaves_a_configuration(tmp_path: Path) -> None:
    words = (*ODD, f"runner.run_dir={tmp_path}")
    said, _ = tune(str(CONFIG), *words, "--steps", "3", "--verify", "1", "--samples", "1500")
    folder = tmp_path / "quickstart" / "tune"
    record = json.loads((folder / "tune.json").read_text())
    assert record["samples"] == 1500
    assert record["machines"]["nodes"] == 1
    best = record["rows"][0]
    assert best["step_s"] == min(row["step_s"] for row in record["rows"])
    assert best["measured_step_s"] > 0
    assert best["error"] == pytest.approx(best["step_s"] / best["measured_step_s"] - 1)
    assert best["memory"] > 0
    assert sum(row["configured"] for row in record["rows"]) == 1
    assert 0 <= best["idle"] < 1
    assert best["hours"] == pytest.approx(best["step_s"] * 100 / 3600)
    winner = record["rows"][record["winner"]]
    cfg = load_config(folder / "tuned.yaml", words)
    assert dict(cfg.cluster.component_placement) == winner["placement"]
    assert "as configured" in said
    assert sorted(path.name for path in folder.iterdir()) == ["tune.json", "tuned.yaml"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("configs/embodied/pendulum_sac.yaml",), "rlhpc tune takes: dpo, embodied, "),
        (("configs/quickstart.yaml", "--verify", "-1"), "--verify is -1; it must be 0 or more"),
        (("configs/quickstart.yaml", "--deadline", "0"), "--deadline is 0; it must be more than 0 seconds"),
        (("configs/embodied/cartpole_het.yaml", "--nodes", "3"), "without cluster.node_groups"),
    ],
)
def test_bad_input_is_refused_before_anything_runs(tmp_path: Path, words: tuple[str, ...], message: str) -> None:
    _, said = tune(*words, f"runner.run_dir={tmp_path}", code=2)
    assert message in said
    assert not list(tmp_path.iterdir())


def test_a_run_that_cannot_run_says_why(tmp_path: Path) -> None:
    words = (*ODD, f"runner.run_dir={tmp_path}", "env.train.kwargs.no_such_argument=1")
    _, said = tune(str(CONFIG), *words, "--steps", "3", code=2)
    assert "the short run plain failed" in said
    assert "no_such_argument" in said
    assert not (tmp_path / "quickstart" / "tune" / "tune.json").exists()
