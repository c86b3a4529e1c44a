"""Senders of alerts: each alert once, nothing without hooks, and nothing that a sender's process notices."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlhpc.config.alerts import EVENT_RULES, AlertsConfig
from rlhpc.jobs import alerts
from rlhpc.jobs.alerts import (
    Alert,
    AlertSender,
    AlertTargets,
    ending_name,
    past_alerts,
    safe_name,
    send_stalled,
    stall_limit_s,
)
from rlhpc.jobs.paths import RunPaths
from rlhpc.jobs.status import render_status
from tests.alert_hooks import KeptAlerts
from tests.eventually import wait_until

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def run(tmp_path: Path) -> RunPaths:
    (tmp_path / "run" / "submit").mkdir(parents=True)
    return RunPaths(tmp_path / "run")


def delivered(sender: AlertSender) -> None:
    for _, process in sender._deliveries:
        process.wait(60)
    sender.poll()


def test_the_same_alert_is_sent_once_by_any_number_of_senders(run: RunPaths, tmp_path: Path) -> None:
    kept = KeptAlerts(tmp_path / "hook")
    senders = [AlertSender(run, AlertTargets(tuple(kept.command)), name) for name in ("driver", "job", "waiter")]
    for sender in senders:
        for _ in range(3):
            send_stalled(sender, 4, 700.4, 600.0)
    for sender in senders:
        delivered(sender)
    [alert] = kept.read()
    assert alert["message"] == "no step has ended for 700 s, which is more than 600 s" and alert["step"] == 4
    send_stalled(senders[0], 5, 700.0, 600.0)  # the next step stalls, too
    delivered(senders[0])
    assert kept.rules() == ["stalled", "stalled"]


def test_silenced_rules_and_missing_hooks_send_nothing(run: RunPaths, tmp_path: Path) -> None:
    kept = KeptAlerts(tmp_path / "hook")
    silent = AlertSender(run, AlertTargets(tuple(kept.command), silenced=("kl",)), "driver")
    silent.send("kl", "kl", "x")
    without = AlertSender(run, AlertTargets(), "driver")
    without.send("failed", "x", "x")
    assert not silent._deliveries and not without._deliveries and not run.alerts.exists()


def test_a_rule_without_end_is_limited(run: RunPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alerts, "_MAX_ALERTS", 2)
    sender = AlertSender(run, AlertTargets((sys.executable, "-c", "")), "driver")
    for number in range(5):
        sender.send("lost", f"lost-{number}", "x")
    delivered(sender)
    assert len(past_alerts(run)) == 2


def test_failed_deliveries_are_warned_of_once_and_shown_by_status(
    run: RunPaths, capsys: pytest.CaptureFixture[str]
) -> None:
    command = (sys.executable, "-I", "-c", "import sys; print('no channel of mine-secret'); sys.exit(4)")
    sender = AlertSender(run, AlertTargets(command, secrets={"MINE": "mine-secret"}), "driver")
    for number in range(3):
        sender.send("lost", f"lost-{number}", f"rank {number}", step=number)
        delivered(sender)
    err = capsys.readouterr().err
    assert err.count("warning: an alert could not be delivered") == 1
    assert "ended with exit code 4: no channel of ${oc.env:MINE}" in err and "mine-secret" not in err
    shown = render_status(run)
    assert shown.count("not delivered: runner.alerts.command: ended with exit code 4") == 3 and "rank 2" in shown


def test_a_process_that_cannot_start_is_a_warning(
    run: RunPaths, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(alerts, "run_module", lambda name: ["/no/such/python", name])
    AlertSender(run, AlertTargets(("true",)), "driver").send("failed", "x", "x")
    assert "an alert could not be delivered: FileNotFoundError" in capsys.readouterr().err


def test_close_waits_in_a_slurm_job_only(run: RunPaths, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    command = (sys.executable, "-I", "-S", "-c", f"open({str(gate)!r}).read()")
    sender = AlertSender(run, AlertTargets(command, timeout_s=60.0), "driver")
    sender.send("failed", "one", "x")
    sender.close()  # the command waits for this test, so this returns only because it does not wait
    assert past_alerts(run) == [] or past_alerts(run)[0][1] == ["not delivered yet"]
    gate.write_text("go on")
    wait_until(lambda: [errors for _, errors in past_alerts(run)] == [[]], 60)
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n1")
    quick = AlertSender(run, AlertTargets((sys.executable, "-c", "")), "driver")
    quick.send("failed", "two", "x")
    quick.close()
    assert [errors for alert, errors in past_alerts(run) if alert.name == "two"] == [[]]


def test_planted_records_are_no_alerts(run: RunPaths) -> None:
    run.alerts.mkdir()
    good = Alert("kl", "kl", "run", str(run.root), "a\x1b[2Jb\nc")
    contents: dict[str, Any] = {
        "good": good.to_json(), "list": [], "empty": {}, "time": good.to_json() | {"time": "soon"},
        "more": good.to_json() | {"name": "more", "unknown": 1, "time": 2.0},
    }  # fmt: skip
    for name, content in contents.items():
        (run.alerts / f"{name}.json").write_text(json.dumps(content))
    (run.alerts / "half.json").write_text('{"rule": ')
    assert [alert.name for alert, _ in past_alerts(run)] == ["more", "kl"]
    assert "\x1b" not in render_status(run) and "a\\x1b[2Jb\\nc" in render_status(run)


def test_names_of_files() -> None:
    assert safe_name("kl-train/policy/a b/kl") == "kl-train_policy_a_b_kl"
    assert safe_name("../../x") == "_.._x" and safe_name("") == "alert" and len(safe_name("x" * 999)) == 150
    assert ending_name(None, "t") == ending_name(0, "t") != ending_name(1, "t")


def test_each_event_has_a_next_command(run: RunPaths) -> None:
    assert set(alerts._NEXT_COMMANDS) == {*EVENT_RULES, ""}
    alert = Alert("failed", "x", "run", "/a folder/run", "why")
    assert alert.text == "run: failed: why. Next: rlhpc logs '/a folder/run'"


def test_the_limit_of_a_step() -> None:
    section = AlertsConfig(stall_factor=10.0, stall_floor_s=600.0)
    assert stall_limit_s([], section, 2100.0) == 2100.0 and stall_limit_s([], section, 1.0) == 600.0
    assert stall_limit_s([1.0, 2.0, 90.0], section, 2100.0) == 600.0
    assert stall_limit_s([100.0, 90.0, 8000.0], section, 2100.0) == 1000.0


# -- targets from the file of a run ------------------------------------------------------------------------------------


def targets_of(folder: Path, section: dict[str, Any] | None, environment: dict[str, str]) -> AlertTargets:
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump({"runner": {"name": "x"} if section is None else {"alerts": section}}))
    return AlertTargets.from_file(path, environment)


def test_targets_are_read_from_the_file_and_the_environment(tmp_path: Path) -> None:
    section = {"command": ["~/hook", "${oc.env:CHANNEL}", "${oc.env:NONE,rl}"], "webhook": "${oc.env:HOOK,null}",
               "timeout_s": 3, "silenced": ["kl"]}  # fmt: skip
    targets = targets_of(
        tmp_path, section, {"CHANNEL": "robots", "HOOK": "https://hook/secret", "OTHER": "value-of-other"}
    )
    assert targets.command == (str(Path("~/hook").expanduser()), "robots", "rl")
    assert (targets.url, targets.url_variable, targets.timeout_s, [*targets.silenced]) == (
        "https://hook/secret", "HOOK", 3.0, ["kl"],
    )  # fmt: skip
    assert targets.public("robots: https://hook/secret, value-of-other") == (
        "${oc.env:CHANNEL}: ${oc.env:HOOK}, value-of-other"
    )


@pytest.mark.parametrize(
    "section", [None, {}, {"command": 7}, {"command": None}, {"timeout_s": "x", "command": "y"}, []]
)
def test_a_file_without_targets(tmp_path: Path, section: Any) -> None:
    assert not targets_of(tmp_path, section, {})


def test_no_file_has_no_targets(tmp_path: Path) -> None:
    assert not AlertTargets.from_file(tmp_path / "none.yaml", {})
