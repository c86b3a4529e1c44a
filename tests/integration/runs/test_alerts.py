"""Alerts of real runs: each event alerts once, by whoever can see it, and never again after a resume."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from tiny_run import CONFIG, TinyRun, wait_until

from rlhpc.jobs.alerts import past_alerts
from rlhpc.jobs.paths import RunPaths
from tests import warm
from tests.alert_hooks import KeptAlerts, serving

pytestmark = pytest.mark.timeout(400)
HERE = Path(__file__).parents[1]
#: A rule that a run breaks in its first step, and one that it breaks in none.
BROKEN = "runner.alerts.rules=[{name: moves, metrics: [train/lr], above: 0}, {name: kl, metrics: [train/lr], above: 9}]"


class Submitted:
    """A run whose job a waiting command follows."""

    def __init__(self, run: TinyRun) -> None:
        self.run, self.paths = run, RunPaths(run.root)
        command = run.command()
        command[command.index("train")] = "submit"
        self.waiter = warm.Popen(
            [*command, "--executor", "local"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            start_new_session=True,
        )  # fmt: skip

    @property
    def driver(self) -> psutil.Process:
        """The driver, once it trains and its status tells of a step."""
        wait_until(lambda: self.run.status().get("state") == "running" and self.run.status()["step"] > 1)
        return psutil.Process(self.run.status()["pid"])

    def job(self) -> psutil.Process:
        claim = json.loads((self.paths.submit / "segment_0.claim.1.json").read_text())
        return psutil.Process(claim["job"]["pid"])

    def controller(self) -> psutil.Process:
        return psutil.Process(json.loads((self.paths.submit / "segment_0.json").read_text())["process"]["pid"])

    def end(self) -> tuple[int, str]:
        _, err = self.waiter.communicate(timeout=240)
        return self.waiter.returncode, err


def endless(tmp_path: Path, kept: KeptAlerts, *overrides: str) -> TinyRun:
    """A run that goes on until somebody ends it."""
    return TinyRun(tmp_path, "runner.max_steps=100000", kept.override, *overrides)


@pytest.fixture(autouse=True)
def no_process_is_left(tmp_path: Path) -> Iterator[None]:
    """Also none of a test that fails while its run stands still."""
    yield
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if any(str(tmp_path) in word for word in process.cmdline()):
                process.kill()


@pytest.fixture
def kept(tmp_path: Path) -> KeptAlerts:
    return KeptAlerts(tmp_path / "hook")


def settled(paths: RunPaths) -> bool:
    return all(errors == [] for _, errors in past_alerts(paths))


# -- what the driver sees ----------------------------------------------------------------------------------------------


def test_a_rule_and_the_end_alert_once_also_after_a_resume(tmp_path: Path, kept: KeptAlerts) -> None:
    run = TinyRun(tmp_path, kept.override, BROKEN)
    run.train("runner.max_steps=6")
    wait_until(lambda: Counter(kept.rules()) == {"moves": 1, "completed": 1})
    [moves, completed] = sorted(kept.read(), key=lambda alert: alert["time"])
    assert (moves["metric"], moves["step"], moves["threshold"]) == ("train/lr", 1, 0.0) and moves["value"] > 0
    assert completed["step"] == 6 and completed["text"].endswith(f"Next: rlhpc report {run.root}")
    run.train("runner.max_steps=6", "runner.resume_dir=auto")  # there is nothing to do
    run.train("runner.max_steps=9", "runner.resume_dir=auto")  # a longer run completes once more, at another step
    wait_until(lambda: kept.rules().count("completed") == 2 and settled(RunPaths(run.root)))
    assert Counter(kept.rules()) == {"moves": 1, "completed": 2}


def test_a_failure_alerts_with_its_reason(tmp_path: Path, kept: KeptAlerts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{HERE}:{os.environ.get('PYTHONPATH', '')}")
    spoiled = ("env.train.env_id=nonfinite_things:Spoiled-v0", 'env.train.kwargs={"what": "reward", "at": 40}',
               "algorithm.rollout_steps=16", "env.train.num_envs=4", "actor.global_batch_size=32")  # fmt: skip
    stops = TinyRun(tmp_path / "stops", kept.override, *spoiled)
    stops.train(code=1)
    wait_until(lambda: kept.rules() == ["failed"])
    assert "the reward of slot 0" in kept.read()[0]["message"] and kept.read()[0]["step"] == 2
    skips = TinyRun(tmp_path / "skips", kept.override, *spoiled, "runner.on_nonfinite=skip", "runner.max_steps=4")
    skips.train()
    wait_until(lambda: len(kept.rules()) == 3)
    assert Counter(kept.rules()) == {"failed": 1, "nonfinite_skipped": 1, "completed": 1}


def test_lost_ranks_alert_once(tmp_path: Path, kept: KeptAlerts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLHPC_MAX_RESTARTS", "2")
    run = TinyRun(tmp_path, kept.override)
    run.lose("env-0", after=3)
    wait_until(lambda: kept.rules() == ["lost", "completed"])
    lost = kept.read()[0]
    assert "lost env rank 0: " in lost["message"] and "killed" in lost["message"]


def test_an_interrupted_run_alerts_as_cancelled(tmp_path: Path, kept: KeptAlerts) -> None:
    run = endless(tmp_path, kept)
    process = run.start()
    wait_until(lambda: run.steps() > 1)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=120)
    wait_until(lambda: kept.rules() == ["cancelled"])
    assert "Ctrl-C" in kept.read()[0]["message"]


def test_a_step_that_hangs_alerts_while_the_driver_waits(tmp_path: Path, kept: KeptAlerts) -> None:
    run = endless(tmp_path, kept, "runner.alerts.stall_floor_s=4", "runner.alerts.silenced=[cancelled]")
    process = run.start()
    wait_until(lambda: run.steps() > 3)
    record = json.loads((run.root / "registry" / "local-0" / "members" / "env-0.json").read_text())
    os.kill(record["pid"], signal.SIGSTOP)
    hung = run.steps()  # the step in progress ends or not
    wait_until(lambda: any(alert["step"] >= hung - 1 for alert in kept.read()))
    os.kill(record["pid"], signal.SIGCONT)
    before = run.steps()
    wait_until(lambda: run.steps() > before + 2)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=120)
    stalled = [alert["step"] for alert in kept.read()]
    assert set(kept.rules()) == {"stalled"} and len(stalled) == len(set(stalled))
    assert {alert["reporter"] for alert in kept.read()} == {"driver"}


# -- what hooks must not do --------------------------------------------------------------------------------------------


def test_a_hook_that_waits_for_the_end_of_the_run_does_not_delay_it(tmp_path: Path) -> None:
    """The command waits for the result that the driver writes last: a driver that waited for it would never end."""
    waits = tmp_path / "waits.sh"
    waits.write_text(f"while [ ! -e {tmp_path}/ended ]; do sleep 0.1; done; touch {tmp_path}/saw-the-end\n")
    run = TinyRun(
        tmp_path, "runner.max_steps=3", BROKEN, f"runner.alerts.command=[sh, {waits}]", "runner.alerts.timeout_s=200"
    )
    run.train(timeout=150)
    assert run.steps() == 3 and not (tmp_path / "saw-the-end").exists()
    (tmp_path / "ended").touch()
    wait_until(lambda: len(past_alerts(RunPaths(run.root))) == 2 and settled(RunPaths(run.root)))


def test_hooks_that_fail_leave_the_run_as_it_is_and_the_url_nowhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(500) as posts:
        monkeypatch.setenv("ALERT_URL_OF_MINE", posts.url)
        run = TinyRun(
            tmp_path, "runner.max_steps=3", BROKEN, "runner.alerts.webhook=${oc.env:ALERT_URL_OF_MINE}",
            "runner.alerts.command=[sh, -c, 'echo $ALERT_URL_OF_MINE; exit 5']",
        )  # fmt: skip
        plain = TinyRun(tmp_path / "plain", "runner.max_steps=3")
        err = run.train()
        plain.train()
        paths = RunPaths(run.root)
        wait_until(lambda: len(past_alerts(paths)) == 2 and all(len(errors) == 2 for _, errors in past_alerts(paths)))
    assert run.rows() == plain.rows() and len(posts.bodies) == 2
    assert err.count("an alert could not be delivered") <= 1
    for _, errors in past_alerts(paths):
        assert errors[0] == "runner.alerts.command: ended with exit code 5: ${oc.env:ALERT_URL_OF_MINE}"
        assert errors[1].startswith("runner.alerts.webhook: answered 500")
    with_secret = [path for path in run.root.rglob("*") if path.is_file() and b"very-secret" in path.read_bytes()]
    assert not with_secret and "very-secret" not in err


# -- what the job and the waiting command see --------------------------------------------------------------------------


def test_a_killed_driver_alerts_as_lost_and_then_as_failed(tmp_path: Path, kept: KeptAlerts) -> None:
    submitted = Submitted(endless(tmp_path, kept, "runner.max_restarts=1", "runner.save_interval=1000"))
    first = submitted.driver
    first.kill()
    wait_until(lambda: kept.rules() == ["lost"])
    assert kept.read()[0]["reporter"] == "job" and "started again" in kept.read()[0]["message"]
    wait_until(lambda: submitted.run.status().get("pid") not in (None, first.pid), timeout=240)
    submitted.driver.kill()
    code, err = submitted.end()
    assert code == 137, err
    wait_until(lambda: kept.rules() == ["lost", "failed"])
    wait_until(lambda: settled(submitted.paths))
    assert kept.read()[1]["reporter"] == "job"


def test_a_killed_job_is_reported_by_the_waiting_command(
    tmp_path: Path, kept: KeptAlerts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its webhook's URL is known to the waiting command alone: the server that waits for it was started without."""
    with serving() as posts:
        monkeypatch.setenv("ALERT_URL_OF_MINE", posts.url)
        submitted = Submitted(endless(tmp_path, kept, "runner.alerts.webhook=${oc.env:ALERT_URL_OF_MINE}"))
        driver, job = submitted.driver, submitted.job()
        for process in (submitted.controller(), job, driver):
            process.kill()
        code, err = submitted.end()
        assert code == 1 and "ended without a result" in err
        wait_until(lambda: len(posts.bodies) == 1 and settled(submitted.paths))
    assert kept.rules() == ["failed"] and kept.read()[0]["reporter"] == "waiter"
    assert "ended without a result" in kept.read()[0]["message"] and kept.read()[0]["step"] is not None


def test_a_driver_that_stands_still_is_reported_by_the_waiting_command(tmp_path: Path, kept: KeptAlerts) -> None:
    submitted = Submitted(
        endless(tmp_path, kept, "runner.alerts.stall_floor_s=4", "runner.alerts.silenced=[cancelled]")
    )
    driver = submitted.driver
    driver.suspend()
    wait_until(lambda: any(alert["reporter"] == "waiter" for alert in kept.read()))
    step = next(alert["step"] for alert in kept.read() if alert["reporter"] == "waiter")
    assert step >= submitted.run.status()["step"]
    driver.resume()
    wait_until(lambda: submitted.run.steps() > step + 3)
    cancelled = warm.run(
        [*submitted.run.command()[:3], "cancel", str(submitted.paths.root)], capture_output=True, text=True
    )
    assert cancelled.returncode == 0, cancelled.stderr
    submitted.end()
    assert set(kept.rules()) == {"stalled"}
    steps: list[Any] = [alert["step"] for alert in kept.read()]
    assert len(steps) == len(set(steps))


def test_a_cancelled_job_alerts_once(tmp_path: Path, kept: KeptAlerts) -> None:
    submitted = Submitted(endless(tmp_path, kept))
    assert submitted.driver.is_running()
    done = warm.run([*submitted.run.command()[:3], "cancel", str(submitted.paths.root)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    code, err = submitted.end()
    assert code == 143, err
    wait_until(lambda: kept.rules() == ["cancelled"] and settled(submitted.paths))


def test_a_test_alert_goes_out_without_a_run(tmp_path: Path, kept: KeptAlerts) -> None:
    command = [*TinyRun(tmp_path, kept.override).command()[:3], "status", str(CONFIG), "--test-alert"]
    done = warm.run([*command, kept.override], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and kept.rules() == ["test"], done.stderr
    fails = warm.run([*command, "runner.alerts.command=[sh, -c, exit 3]"], capture_output=True, text=True, timeout=120)
    assert fails.returncode == 1 and "runner.alerts.command: ended with exit code 3" in fails.stderr
    without = warm.run(command, capture_output=True, text=True, timeout=120)
    assert without.returncode == 2 and "has neither a command nor a webhook" in without.stderr
