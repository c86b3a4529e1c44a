"""Defaults of a task type's parts: what a task type that defines nothing does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rlhpc.config.sections import RunConfig
from rlhpc.jobs.paths import RunPaths
from rlhpc.runs.task_parts import (
    ConfigChecks,
    Exporting,
    GroupSpec,
    Headline,
    Offline,
    Planning,
    PlayOptions,
    Reporting,
)
from rlhpc.runtime.errors import ConfigError


def run_config(**runner: Any) -> RunConfig:
    cfg = RunConfig()
    for key, value in runner.items():
        setattr(cfg.runner, key, value)
    return cfg


def test_groups_that_define_nothing_end_the_run_at_any_failure() -> None:
    cfg, groups = run_config(), GroupSpec[RunConfig]({"actor": "module:Actor"}, preload=["torch"])
    assert groups.worker_classes_of(cfg) == {"actor": "module:Actor"} and groups.components(cfg) == ["actor"]
    assert groups.preload == ("torch",) and groups.max_useful_ranks(cfg, {"actor": 1}) == {}
    policies = groups.policies(cfg, max_recoveries=2)
    assert policies.max_recoveries == 2 and not policies.restartable and not policies.elastic
    assert groups.placed(cfg, {"actor": 2}) is cfg
    groups.check_placement(cfg, {"actor": 4}, {"actor": 1})


def test_checks_that_define_nothing_accept_every_configuration(tmp_path: Path) -> None:
    cfg, checks = run_config(), ConfigChecks[RunConfig]()
    checks.check(cfg, lambda key, rule: ConfigError(key), training=True)
    assert checks.find_missing_keys(cfg) == [] and list(checks.preflight(cfg, {"actor": 1})) == []
    assert checks.differences(cfg, tmp_path) == [] and list(checks.evaluation_metrics(cfg)) == []
    assert checks.prepare(cfg, resumes=True) is cfg
    with checks.trial(cfg) as trial_cfg:
        assert trial_cfg is cfg


def test_patience_is_a_goal_that_can_end_a_segment_early() -> None:
    checks = ConfigChecks[RunConfig]()
    assert checks.goal(run_config(keep_best="eval/loss")) is None
    assert checks.goal(run_config(keep_best="eval/loss", patience=3)) == ["eval/loss", 3]


def test_work_without_training_is_refused_by_the_name_of_the_task_type(tmp_path: Path) -> None:
    cfg, offline = run_config(), Offline[RunConfig]("bandit")
    assert offline.preparation(cfg).sft is None and offline.recording(cfg) == (0, False)
    for work in (
        lambda: offline.evaluate(cfg, tmp_path, suite="default", episodes=None, output=None, trust_code=False),
        lambda: offline.evaluate_model(cfg, suite="default", output=None),
        lambda: offline.play(cfg, tmp_path, PlayOptions(video=tmp_path / "video.mp4")),
        lambda: offline.export(tmp_path, None, Exporting()),
    ):
        with pytest.raises(ConfigError, match="bandit"):
            work()


def test_reports_without_parts_are_empty(tmp_path: Path) -> None:
    headline = Headline("eval/return_mean", "return")
    reporting = Reporting(compared=[("train/loss", "Loss", "loss")], headlines=[headline])
    assert reporting.compared == (("train/loss", "Loss", "loss"),) and reporting.headlines == (headline,)
    assert reporting.charts(RunPaths(tmp_path), []) == {} and reporting.curves == {}
    parts = reporting.parts(RunPaths(tmp_path), [], linked=True)
    assert parts.curves == [] and parts.evaluated == {} and Planning() == Planning("", "")
