"""The driver's alerts: steps that are repeated, losses of one moment, limits of steps, and ends in and outside of jobs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlhpc.jobs.alerts import past_alerts
from rlhpc.jobs.signals import MAX_RESTARTS, StopRequest
from rlhpc.runs import run_alerts
from rlhpc.runs.configuration import load_config
from rlhpc.runs.run_alerts import RunAlerts
from rlhpc.runs.run_folder import RunFolder
from tests.alert_hooks import KeptAlerts
from tests.eventually import wait_until

pytestmark = pytest.mark.timeout(120)
QUICKSTART = Path(__file__).resolve().parents[3] / "configs" / "quickstart.yaml"
RULES = "runner.alerts.rules=[{name: high, metrics: [train/x], above: 1}]"


class Made:
    """Alerts of a run in a folder, and what its hook was told."""

    def __init__(self, folder: Path, *, has_hook: bool = True) -> None:
        self.kept, self.stop = KeptAlerts(folder / "hook"), StopRequest()
        hook = [self.kept.override] if has_hook else []
        self.cfg = load_config(QUICKSTART, [f"runner.run_dir={folder}", *hook, RULES])
        self.run = RunFolder.plan(self.cfg)
        self.run.paths.root.mkdir()
        self.runner = SimpleNamespace(step=0, stall_limit_s=1e9)

    def alerts(self) -> RunAlerts:
        alerts = RunAlerts(self.cfg, self.run, self.stop)
        alerts.watch(self.runner)
        return alerts

    def rows(self, alerts: RunAlerts, *values: float, first: int = 1) -> None:
        for step, value in enumerate(values, first):
            self.runner.step = step
            alerts.record_steps([(step, {"train/x": value})])

    def came(self, *rules: str) -> list[dict[str, Any]]:
        wait_until(lambda: len(self.kept.read()) >= len(rules), 60)
        assert sorted(self.kept.rules()) == sorted(rules)
        return self.kept.read()


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Made]:
    monkeypatch.delenv(MAX_RESTARTS, raising=False)
    monkeypatch.setattr(run_alerts, "_CHECK_S", 0.05)
    yield Made(tmp_path)


def test_a_metric_alerts_once_and_repeated_steps_are_ignored(made: Made) -> None:
    with made.alerts() as alerts:
        made.rows(alerts, 0, 5, 5)
        made.rows(alerts, 9, first=2)  # step 2 again, after a failure
    [alert] = made.came("high")
    assert (alert["step"], alert["value"], alert["threshold"]) == (2, 5.0, 1.0)
    assert alert["message"] == "train/x is 5, above 1"


def test_without_a_hook_a_metric_is_warned_of_once_and_shown_by_status(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = Made(tmp_path, has_hook=False)
    with made.alerts() as alerts:
        made.rows(alerts, 0.0, 5.0, 6.0)
        alerts.record_end({"stop_reason": "max_steps", "finished": True, "global_step": 3})
    warnings = [line for line in capsys.readouterr().err.splitlines() if "warning" in line]
    text = "step 2: train/x is 5, above 1"
    assert warnings == [f"rlhpc: warning: {text} (to silence it: runner.alerts.silenced=[high])"]
    [(alert, errors)] = past_alerts(made.run.paths)
    assert (alert.rule, alert.step, errors) == ("high", 2, [])


def test_a_resumed_run_does_not_judge_its_old_rows(made: Made) -> None:
    rows = [{"step": step, "train/x": 5.0} for step in (1, 2, 3)]
    made.run.paths.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    made.run = RunFolder.plan(made.cfg)
    checkpoint = made.run.paths.checkpoint(3)
    made.run.resume = made.run.resume.__class__(checkpoint, 3, [])
    with made.alerts() as alerts:
        made.rows(alerts, 5, first=3)
        assert made.kept.read() == [] and not made.run.paths.alerts.exists()
        made.rows(alerts, 0, first=4)
    assert not made.run.paths.alerts.exists()


def test_losses_of_one_moment_are_one_alert(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_alerts, "_CHECK_S", 100.0)
    with made.alerts() as alerts:
        for rank in (*range(12), 3):
            alerts.record_lost("rollout", [rank], f"rank {rank} was killed")
        alerts.record_lost("env", [0], "gone")
    messages = sorted(alert["message"] for alert in made.came("lost", "lost"))
    assert messages == [
        "lost env rank 0: gone",
        "lost rollout ranks 0, 1, 2, 3, 4, 5, 6, 7 and 4 more: rank 0 was killed",
    ]


def test_a_step_beyond_its_limit_stalls_once(made: Made) -> None:
    with made.alerts() as alerts:
        made.rows(alerts, 0, 0)
        made.runner.stall_limit_s = 0.0
        [alert] = made.came("stalled")
        made.runner.stall_limit_s = 1e9
    assert alert["step"] == 2 and "no step has ended for" in alert["message"]


def test_a_run_that_has_not_begun_does_not_stall(made: Made) -> None:
    alerts = RunAlerts(made.cfg, made.run, made.stop)
    alerts._check_stall()
    assert not made.run.paths.alerts.exists()


def test_an_error_alerts_with_its_first_line(made: Made) -> None:
    with pytest.raises(ValueError, match="no such"), made.alerts() as alerts:
        made.rows(alerts, 0)
        raise ValueError("no such action\nand more")
    [alert] = made.came("failed")
    assert alert["message"] == "no such action" and alert["step"] == 1


@pytest.mark.parametrize(
    ("stopped_by", "rule"), [("the job's walltime leaves no room for another step", "preempted"), ("", "cancelled")]
)
def test_an_early_end(made: Made, stopped_by: str, rule: str) -> None:
    if stopped_by:
        made.stop.request(stopped_by)
    with made.alerts() as alerts:
        alerts.record_end({"finished": False, "stop_reason": "signal", "global_step": 4})
    assert made.came(rule)[0]["step"] == 4


def test_in_a_job_the_driver_reports_only_the_end_of_the_complete_run(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(MAX_RESTARTS, "2")
    with pytest.raises(ValueError, match="x"), made.alerts() as alerts:
        alerts.record_end({"finished": False, "stop_reason": "signal", "global_step": 4})
        alerts.record_end({"finished": True, "stop_reason": "segment_end", "global_step": 4})
        alerts.record_end({"finished": True, "stop_reason": "max_steps", "global_step": 8})
        raise ValueError("x")
    assert made.came("completed")[0]["step"] == 8
