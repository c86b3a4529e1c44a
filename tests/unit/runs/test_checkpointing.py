"""The best checkpoint, and the end of a run that does not get better."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from rlhpc.checkpoint import CheckpointWriter, prune
from rlhpc.cli.arguments import checkpoint_of
from rlhpc.cli.parser import CHECKPOINT
from rlhpc.jobs.paths import RunPaths
from rlhpc.runs.checkpointing import BestCheckpoint
from rlhpc.runs.configuration import load_config
from rlhpc.runs.tuning.tune import SHORT_RUN_OVERRIDES
from rlhpc.runtime.errors import CheckpointError, ConfigError

ROOT = Path(__file__).resolve().parents[3]


def tracked(metric: str, values: list[float], patience: int = 0) -> BestCheckpoint:
    best = BestCheckpoint(metric, patience)
    for step, value in enumerate(values, start=1):
        best.record(step, {metric: value, "train/loss": 0.0})
    return best


@pytest.mark.parametrize(
    ("metric", "values", "step", "waited"),
    [
        ("eval/accuracy", [0.1, 0.4, 0.3], 2, 1),
        ("eval/loss", [3.0, 2.0, 2.5, 2.0], 2, 2),  # of equal values the first stays
        ("eval/loss", [math.nan, 2.0, math.nan, math.inf], 2, 2),
        ("eval/held_out/calibration_error", [0.3, 0.1], 2, 0),
        ("eval/return_mean", [-5.0, -9.0, -3.0], 3, 0),
        ("eval/accuracy", [math.nan, math.nan], None, 2),
    ],
)
def test_the_best_step_is_the_one_that_the_metric_calls_better(
    metric: str, values: list[float], step: int | None, waited: int
) -> None:
    best = tracked(metric, values)
    assert (best.step, best.num_unimproved) == (step, waited)


def test_steps_without_an_evaluation_neither_count_nor_end_a_run() -> None:
    best = tracked("eval/loss", [1.0, 2.0], patience=2)
    for step in range(3, 20):
        best.record(step, {"train/loss": 0.5})
    assert not best.is_over()
    best.record(20, {"eval/loss": 1.5})
    assert best.is_over() and "2 evaluations in a row" in best.reason() and "1 of step 1" in best.reason()


def test_without_patience_no_run_ends() -> None:
    assert not tracked("eval/loss", [1.0, 2.0, 3.0, 4.0]).is_over()


@pytest.mark.parametrize("cut", range(6))
def test_a_resumed_run_remembers_the_best_value_and_its_patience(cut: int) -> None:
    values = [5.0, 3.0, 4.0, 4.5, 2.0, 6.0]
    whole, first = tracked("eval/loss", values, patience=3), tracked("eval/loss", values[:cut], patience=3)
    second = BestCheckpoint("eval/loss", 3)
    second.load_state(json.loads(json.dumps(first.state())))
    for step, value in enumerate(values[cut:], start=cut + 1):
        second.record(step, {"eval/loss": value})
    assert second.state() == whole.state()


def test_another_metric_begins_anew() -> None:
    other = BestCheckpoint("eval/accuracy", 2)
    other.load_state(tracked("eval/loss", [1.0, 2.0]).state())
    assert (other.step, other.num_unimproved) == (None, 0)


def test_a_metric_that_evaluations_do_not_have_ends_the_run_at_the_first() -> None:
    with pytest.raises(ConfigError, match=r"eval/success_once.*allowed: eval/return_mean"):
        BestCheckpoint("eval/success_once", 0).record(1, {"eval/return_mean": 1.0})


def saved(paths: RunPaths, step: int) -> None:
    with CheckpointWriter(paths, step) as writer:
        writer.add_bytes("runner.json", b"{}")
        writer.commit()


def test_the_best_checkpoint_outlives_newer_ones_and_is_found_by_its_link(tmp_path: Path) -> None:
    paths, best = RunPaths(tmp_path / "run"), BestCheckpoint("eval/loss", 0)
    for step, value in enumerate([3.0, 1.0, 2.0, 2.0, 2.0, 0.5, 0.7], start=1):
        best.record(step, {"eval/loss": value})
        saved(paths, step)
        best.link(paths)
        prune(paths, 2, best.retained_steps(paths), checks_digests=False)
        assert best.step is not None and paths.best.resolve() == paths.checkpoint(best.step).resolve()
        kept = {step for step, _ in paths.checkpoint_steps()}
        assert kept == {best.step, step, max(1, step - 1)}


def test_until_the_new_best_checkpoint_is_complete_the_old_one_stays(tmp_path: Path) -> None:
    paths, best = RunPaths(tmp_path / "run"), BestCheckpoint("eval/loss", 0)
    best.record(1, {"eval/loss": 3.0})
    for step in (1, 2, 3):
        saved(paths, step)
    best.link(paths)
    best.record(4, {"eval/loss": 1.0})  # its save is under way while that of step 3 is committed
    best.link(paths)
    prune(paths, 1, best.retained_steps(paths), checks_digests=False)
    assert paths.best.resolve().name == "global_step_1" and paths.checkpoint(1).is_dir()
    saved(paths, 4)
    best.link(paths)
    prune(paths, 1, best.retained_steps(paths), checks_digests=False)
    assert paths.best.resolve().name == "global_step_4" and not paths.checkpoint(1).exists()


def test_a_link_to_a_checkpoint_that_is_gone_is_removed(tmp_path: Path) -> None:
    paths, best = RunPaths(tmp_path / "run"), tracked("eval/loss", [1.0])
    saved(paths, 1)
    best.link(paths)
    paths.checkpoint(1).rename(paths.checkpoints / "superseded-global_step_1")
    best.link(paths)
    assert not paths.best.is_symlink()


def named(*words: str) -> Path:
    import argparse

    parser = argparse.ArgumentParser()
    for names, options in CHECKPOINT:
        parser.add_argument(*names, **options)
    return checkpoint_of(parser.parse_args([*words]))


def test_best_names_a_checkpoint(tmp_path: Path) -> None:
    paths, best = RunPaths(tmp_path / "run"), tracked("eval/loss", [2.0, 1.0, 3.0])
    for step in (1, 2, 3):
        saved(paths, step)
    run = str(paths.root)
    with pytest.raises(CheckpointError, match=r"runner\.keep_best"):
        named("--run", run, "--step", "best")
    assert named("--run", run) == named("--run", run, "--step", "latest") == paths.checkpoint(3)
    assert (paths.best_step(), paths.chosen_step()) == (None, 3)
    best.link(paths)
    wanted = paths.checkpoint(2)
    assert named("--run", run) == wanted and paths.chosen_step() == 2  # as in the workflow
    assert named("--run", run, "--step", "latest") == paths.checkpoint(3)
    assert named("--run", run, "--step", "best") == wanted
    assert named("--run", run, "--checkpoint", "best") == wanted
    assert named("--checkpoint", str(paths.best)) == wanted
    with pytest.raises(ConfigError, match="--run FOLDER"):
        named("--checkpoint", "best")
    BestCheckpoint(None, 0).link(paths)  # the run goes on without the key
    assert paths.chosen_step() == 3 and not paths.best.is_symlink()


QUICK, SFT = ROOT / "configs/quickstart.yaml", ROOT / "configs/reasoning/demo_sft.yaml"
GRPO, RM, DPO, BC = (
    ROOT / f"configs/{name}.yaml"
    for name in ("reasoning/demo", "reasoning/reward_model", "reasoning/dpo", "embodied/cartpole_swingup_bc")
)
EVERY = "runner.val_check_interval=5"


@pytest.mark.parametrize(
    ("config", "words", "complaint"),
    [
        (QUICK, [EVERY, "runner.keep_best=eval/retrun_mean"], "did you mean 'eval/return_mean'"),
        (QUICK, ["runner.keep_best=eval/return_mean"], r"set runner\.val_check_interval"),
        (QUICK, [EVERY, "runner.patience=3"], r"runner\.keep_best"),
        (SFT, [EVERY, "runner.keep_best=eval/los"], "did you mean 'eval/loss'"),
        (GRPO, [EVERY, "runner.keep_best=eval/accurcy"], "did you mean 'eval/accuracy'"),
        (GRPO, [EVERY, "runner.keep_best=eval/pass_at_k"], "allowed: eval/accuracy"),  # of one answer to each problem
        (RM, [EVERY, "runner.keep_best=eval/mse"], "allowed: eval/accuracy, eval/loss, eval/margin"),
        (DPO, [EVERY, "runner.keep_best=eval/mse"], "allowed: eval/loss, eval/pair_accuracy, eval/margin"),
        (DPO, [EVERY, "runner.keep_best=eval/accuracy"], r"set cluster\.component_placement\.rollout"),
        (
            BC,
            ["demos.holdout=0", "runner.val_check_interval=-1", "runner.keep_best=train/holdout_loss"],
            "evaluates nothing",
        ),
    ],
)
def test_a_metric_that_is_not_measured_is_refused(config: Path, words: list[str], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        load_config(config, [*words, "runner.name=x"])


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (QUICK, [EVERY, "runner.keep_best=eval/return_mean", "runner.patience=3"]),
        (SFT, [EVERY, "runner.keep_best=eval/loss"]),
        (GRPO, [EVERY, "runner.keep_best=eval/accuracy"]),
        (RM, [EVERY, "runner.keep_best=eval/loss"]),
        (DPO, [EVERY, "runner.keep_best=eval/pair_accuracy"]),
        (BC, ["demos.holdout=0.1", "runner.keep_best=train/holdout_loss"]),
    ],
)
def test_a_metric_that_is_measured_is_taken(config: Path, words: list[str]) -> None:
    cfg: Any = load_config(config, [*words, "runner.name=x"])
    assert cfg.runner.keep_best in words[1]


def test_a_short_run_of_the_tuner_goes_without() -> None:
    words = [EVERY, "runner.keep_best=eval/return_mean", "runner.patience=3", "runner.name=x"]
    cfg: Any = load_config(QUICK, [*words, *(f"{key}={value}" for key, value in SHORT_RUN_OVERRIDES.items())])
    assert cfg.runner.keep_best is None


def test_an_evaluation_that_is_not_finite_is_none_that_is_better() -> None:
    best = BestCheckpoint("eval/return_mean", 2)
    assert not best.record(1, {"eval/nonfinite": 1.0}) and best.num_unimproved == 1
    assert best.record(2, {"eval/return_mean": -3.0}) and best.num_unimproved == 0
