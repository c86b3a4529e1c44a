"""Delivery of an alert by a command and a webhook, which may fail, hang, write without end, or leave processes behind."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import psutil
import pytest

from rlhpc.jobs.alert_delivery import environment_of, payload_of
from rlhpc.jobs.alerts import Alert, AlertTargets, delivery_errors, start_delivery
from tests.alert_hooks import KeptAlerts, serving

pytestmark = pytest.mark.timeout(120)


def alert_in(folder: Path, **fields: object) -> Alert:
    (folder / "run").mkdir(parents=True, exist_ok=True)
    values = {"rule": "kl", "name": "kl-train_kl", "message": "train/kl is 2, above 1", "step": 7, "metric": "train/kl",
              "value": 2.0, "threshold": 1.0} | fields  # fmt: skip
    return Alert(run="run", folder=str(folder / "run"), **values)  # type: ignore[arg-type]


def python(source: str) -> tuple[str, ...]:
    return (sys.executable, "-I", "-S", "-c", source)


def test_a_command_reads_the_alert_in_both_forms(tmp_path: Path) -> None:
    alert = alert_in(tmp_path)
    source = (
        "import json, os, sys; sent = json.load(sys.stdin); names = ('rule', 'run', 'step', 'metric', 'value', 'text', "
        "'threshold', 'next_command'); sys.exit(any(str(sent[n]) != os.environ['RLHPC_ALERT_' + n.upper()] for n in names))"
    )
    assert delivery_errors(alert, AlertTargets(python(source))) == []
    assert alert.text == f"run: kl: train/kl is 2, above 1 at step 7. Next: rlhpc watch {tmp_path}/run"


def test_what_a_start_does_not_know_is_empty_in_the_environment(tmp_path: Path) -> None:
    variables = environment_of(alert_in(tmp_path, step=None, value=None, message="a\0b"))
    assert (variables["RLHPC_ALERT_STEP"], variables["RLHPC_ALERT_VALUE"]) == ("", "")
    assert variables["RLHPC_ALERT_MESSAGE"] == "ab"


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        (python("import sys; print('no such\\nchannel'); sys.exit(3)"), "ended with exit code 3: no such channel"),
        (python("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"), "was ended by signal 11"),
        (python("import time; time.sleep(1000)"), "did not end in time, and was killed"),
        (python("while True: print('x' * 65536)"), "was killed after 1 MiB of output: xxx"),
        (("no-such-program-here",), "no-such-program-here cannot be started: No such file or directory"),
    ],
    ids=["fails", "crashes", "hangs", "writes", "missing"],
)
def test_a_command_that_fails_is_ended_and_named(tmp_path: Path, command: tuple[str, ...], reason: str) -> None:
    [error] = delivery_errors(alert_in(tmp_path), AlertTargets(command, timeout_s=3.0))
    assert error.startswith(f"runner.alerts.command: {reason}") and len(error) < 500


#: Starts processes in sessions of their own, which start others; all of them write without end.
FORKS = """
import os, sys, time
for _ in range(6):
    if os.fork() == 0:
        os.setsid()
        os.fork()
        with open(sys.argv[1], "a") as file:
            file.write(f"{os.getpid()}\\n")
        while True:
            os.write(1, b"y" * 4096)
time.sleep(1000)
"""


def test_no_process_of_a_killed_command_is_left(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    [error] = delivery_errors(alert_in(tmp_path), AlertTargets((*python(FORKS), str(pids)), timeout_s=20.0))
    assert "was killed after 1 MiB of output" in error
    left = [pid for pid in map(int, pids.read_text().split()) if psutil.pid_exists(pid)]
    assert not [pid for pid in left if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE]


def test_a_process_that_a_command_leaves_behind_does_not_hold_the_delivery(tmp_path: Path) -> None:
    source = "import os, time\nif os.fork() == 0:\n    os.setsid()\n    time.sleep(1000)\nprint('sent', flush=True)"
    assert delivery_errors(alert_in(tmp_path), AlertTargets(python(source))) == []


# -- the webhook ------------------------------------------------------------------------------------------------------


def webhook(url: str, timeout_s: float = 10.0) -> AlertTargets:
    return AlertTargets(url=url, url_variable="ALERT_URL", timeout_s=timeout_s)


def test_a_webhook_gets_a_text_that_chats_show(tmp_path: Path) -> None:
    alert = alert_in(tmp_path)
    with serving() as posts:
        assert delivery_errors(alert, webhook(posts.url)) == []
    [body] = posts.bodies
    assert body["text"] == body["content"] == alert.text and body["alert"] == json.loads(json.dumps(alert.to_json()))


@pytest.mark.parametrize(
    ("status", "reason"),
    [(500, "answered 500: what the server says"), (307, "answered 307"), (302, "answered 302"), (404, "answered 404")],
)
def test_a_refused_post_is_named_without_the_url(tmp_path: Path, status: int, reason: str) -> None:
    with serving(status) as posts:
        [error] = delivery_errors(alert_in(tmp_path), webhook(posts.url))
    assert error.startswith(f"runner.alerts.webhook: {reason}") and "secret" not in error and len(posts.bodies) == 1


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:9/very-secret", "http://very-secret.invalid:port/x", "http:///secret"]
)
def test_a_webhook_that_is_not_there_is_named_without_the_url(tmp_path: Path, url: str) -> None:
    [error] = delivery_errors(alert_in(tmp_path), webhook(url))
    assert error.startswith("runner.alerts.webhook: cannot be reached (") and "secret" not in error


def test_a_webhook_that_hangs_is_abandoned_and_the_command_runs_nevertheless(tmp_path: Path) -> None:
    kept = KeptAlerts(tmp_path / "hook")
    with serving(hangs=True) as posts:
        targets = AlertTargets(tuple(kept.command), posts.url, "ALERT_URL", 2.0)
        assert delivery_errors(alert_in(tmp_path), targets) == ["runner.alerts.webhook: no answer within 2 s"]
    assert kept.rules() == ["kl"] and len(posts.bodies) == 1


def test_no_text_mentions_everyone(tmp_path: Path) -> None:
    payload = payload_of(alert_in(tmp_path, message=f"<!channel> @everyone @here {'x' * 5000}"))
    assert not [word for word in ("<!channel", "@everyone", "@here") if word in payload["text"]]
    assert payload["allowed_mentions"] == {"parse": []} and len(payload["content"]) < 2000


# -- the record -------------------------------------------------------------------------------------------------------


def test_of_many_reporters_one_delivers(tmp_path: Path) -> None:
    kept, alert = KeptAlerts(tmp_path / "hook"), alert_in(tmp_path)
    reporters = [start_delivery(alert, AlertTargets(tuple(kept.command))) for _ in range(6)]
    assert [reporter.wait(60) for reporter in reporters] == [0] * 6
    assert kept.rules() == ["kl"]
    assert start_delivery(alert, AlertTargets(tuple(kept.command))).wait(60) == 0 and len(kept.read()) == 1
    record = tmp_path / "run" / "alerts" / "kl-train_kl.json"
    assert json.loads(record.read_text())["errors"] == [] and record.stat().st_mode & 0o077 == 0


def test_a_failure_stands_in_the_record_without_secrets(tmp_path: Path) -> None:
    source = "import sys; print('token-of-mine at http://secret/x'); sys.exit(1)"
    targets = AlertTargets(
        python(source), "http://127.0.0.1:9/secret-path", "ALERT_URL", 5.0, (), {"MY": "token-of-mine"}
    )
    assert start_delivery(alert_in(tmp_path), targets).wait(60) == 1
    text = (tmp_path / "run" / "alerts" / "kl-train_kl.json").read_text()
    assert "exit code 1: ${oc.env:MY}" in text and "secret-path" not in text and "token-of-mine" not in text


def test_a_removed_run_does_not_come_back(tmp_path: Path) -> None:
    alert = Alert("failed", "end", "gone", str(tmp_path / "gone"), "it is gone")
    assert start_delivery(alert, AlertTargets(python("pass"))).wait(60) == 1
    assert not (tmp_path / "gone").exists()


def test_an_alert_that_cannot_be_recorded_is_delivered(tmp_path: Path) -> None:
    """A file is where its folder should be: the error of a write, as on a full disk."""
    kept, alert = KeptAlerts(tmp_path / "hook"), alert_in(tmp_path)
    (tmp_path / "run" / "alerts").write_text("planted")
    assert start_delivery(alert, AlertTargets(tuple(kept.command))).wait(60) == 0
    assert kept.rules() == ["kl"] and (tmp_path / "run" / "alerts").read_text() == "planted"


def test_the_url_is_on_no_command_line(tmp_path: Path) -> None:
    with serving(hangs=True) as posts:
        process = start_delivery(alert_in(tmp_path), webhook(posts.url, 30.0))
        while not posts.bodies:
            assert process.poll() is None
        command = " ".join(psutil.Process(process.pid).cmdline())
        assert "alert_delivery" in command and "secret" not in command
        assert (
            "secret" not in Path(f"/proc/{process.pid}/environ").read_text() and os.getsid(process.pid) == process.pid
        )
        posts.released.set()
        process.wait(60)
