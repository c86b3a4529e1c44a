"""Handle of a run that a separate process trains: its state, its rows, and how it ends. The driver is a stand-in."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rlhpc.jobs.signals import EXIT_REQUEUE, MAX_RESTARTS
from rlhpc.jobs.waiter import DriverFailed, DriverRejected
from rlhpc.runs import handle
from rlhpc.runs.configuration import load_config
from rlhpc.runs.handle import TrainingRun, load_for_training, train
from rlhpc.runtime.errors import ConfigError, DeadlineExceeded
from tests.eventually import wait_until

QUICKSTART = Path(__file__).resolve().parents[3] / "configs" / "quickstart.yaml"
PATIENCE_S = 200.0
#: A driver: it writes a checkpoint's folder and rows, then does what the test says.
DRIVER = """
import json, pathlib, signal, sys, time
root = pathlib.Path(sys.argv[1])
def end(*_):
    sys.exit(143)
signal.signal(signal.SIGTERM, end)
def begin(steps=3):
    (root / "checkpoints" / f"global_step_{steps}").mkdir(parents=True)
    (root / "checkpoints" / f"global_step_{steps}" / "COMPLETE").touch()
    (root / "config.yaml").touch()
    (root / "metrics.jsonl").write_text("".join(json.dumps({"step": n, "x": n / 2}) + chr(10) for n in range(1, steps + 1)))
def say(text, code):
    print("noise", text, sep=chr(10), file=sys.stderr)
    sys.exit(code)
"""


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., TrainingRun]]:
    """Starts a run whose driver executes these lines; runs are ended with the test."""
    monkeypatch.delenv(MAX_RESTARTS, raising=False)
    runs: list[TrainingRun] = []

    def start(lines: str, **overrides: Any) -> TrainingRun:
        command = [sys.executable, "-IS", "-c", DRIVER + lines, str(tmp_path / "runs" / "one")]
        monkeypatch.setattr(handle, "driver_command", lambda path, segment: [*command, str(path)])
        cfg = load_for_training(QUICKSTART, words(tmp_path, **overrides))
        runs.append(TrainingRun(cfg, "quickstart.yaml"))
        return runs[-1]

    yield start
    for run in runs:
        run.cancel(grace_s=0)


def words(folder: Path, **overrides: Any) -> list[str]:
    keys = {"run_dir": str(folder / "runs"), "name": "one", "max_steps": 9, **overrides}
    return [f"runner.{key}={json.dumps(value)}" for key, value in keys.items()]


LIVES = "begin(); time.sleep(1000)"


def test_a_run_that_trains_to_its_end_has_rows_and_a_checkpoint(
    start: Callable[..., TrainingRun], tmp_path: Path
) -> None:
    run = start("begin()")
    assert run.wait(PATIENCE_S) is run and run.done()
    assert (run.state, run.step, run.folder) == ("finished", 3, tmp_path / "runs" / "one")
    assert [(row["step"], row["x"]) for row in run.metrics()] == [(1, 0.5), (2, 1.0), (3, 1.5)]
    assert run.checkpoint == run.folder / "checkpoints" / "global_step_3"
    assert repr(run) == f"TrainingRun({str(run.folder)!r}, finished, step 3 of 9)"
    resolved = run.folder / "logs" / "segment_0" / "driver.yaml"
    assert resolved.read_text().startswith("# As started from quickstart.yaml")
    assert load_config(resolved).runner.max_steps == 9
    run.cancel()  # it has ended: nothing happens
    assert run.state == "finished"


def test_a_deadline_leaves_the_run_alone_and_a_cancelled_run_has_stopped(start: Callable[..., TrainingRun]) -> None:
    with start(LIVES) as run:
        wait_until(lambda: run.step == 3, PATIENCE_S)
        with pytest.raises(DeadlineExceeded, match=r"has not ended within 0 s; it goes on \(step 3 of 9\)"):
            run.wait(0)
        assert run.state == "running" and not run.done()
    assert run.state == "stopped" and run.wait(0) is run


def test_a_run_that_does_not_end_in_time_is_killed(start: Callable[..., TrainingRun]) -> None:
    run = start("signal.signal(signal.SIGTERM, signal.SIG_IGN); " + LIVES)
    wait_until(lambda: run.step == 3, PATIENCE_S)
    run.cancel(grace_s=0)
    assert run.done() and run.wait(0) is run


@pytest.mark.parametrize("code", [EXIT_REQUEUE, 128 + signal.SIGTERM])
def test_a_run_that_ends_by_another_hand_says_so(start: Callable[..., TrainingRun], code: int) -> None:
    run = start(f"begin(); sys.exit({code})")
    with pytest.raises(DriverFailed, match=r"asked to end from elsewhere at step 3 of 9; saved in .*global_step_3"):
        run.wait(PATIENCE_S)
    assert run.state == "stopped"


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("say('rlhpc: error: env[0] is gone', 1)", r"one failed: env\[0\] is gone\n\(log: .*driver\.err\)"),
        ("say('Killed', 1)", r"one failed: noise\nKilled\n"),
        ("sys.exit(3)", r"one failed: its process ended with code 3 and no message\n"),
    ],
)
def test_the_first_error_of_a_failed_run_is_raised(start: Callable[..., TrainingRun], lines: str, message: str) -> None:
    run = start(lines)
    with pytest.raises(DriverFailed, match=message):
        run.wait(PATIENCE_S)
    assert run.state == "failed" and run.checkpoint is None and run.step == 0 and run.metrics() == []


def test_a_run_that_its_driver_refuses_leaves_nothing(start: Callable[..., TrainingRun], tmp_path: Path) -> None:
    run = start("say('rlhpc: error: no such environment', 2)")
    with pytest.raises(DriverRejected, match=r"^no such environment$"):
        run.wait(PATIENCE_S)
    assert run.state == "failed" and list(tmp_path.iterdir()) == []


def test_a_run_that_has_begun_keeps_its_files_though_it_is_refused(start: Callable[..., TrainingRun]) -> None:
    run = start("begin(); say('rlhpc: error: the disk is full', 2)")
    with pytest.raises(DriverRejected, match="the disk is full"):
        run.wait(PATIENCE_S)
    assert (run.folder / "logs" / "segment_0" / "driver.err").exists()


def test_a_driver_that_cannot_be_started_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handle, "driver_command", lambda path, segment: ["/nowhere/python"])
    with pytest.raises(FileNotFoundError, match="/nowhere/python"):
        TrainingRun(load_for_training(QUICKSTART, words(tmp_path)), "x")
    assert list(tmp_path.iterdir()) == []


def test_rows_of_an_earlier_start_are_not_this_runs(start: Callable[..., TrainingRun], tmp_path: Path) -> None:
    old = tmp_path / "runs" / "one" / "metrics.jsonl"
    old.parent.mkdir(parents=True)
    old.write_text('{"step": 7}\n')
    run = start("time.sleep(1000)")
    assert run.step == 0 and run.metrics() == []
    run.cancel()
    assert start("begin()").wait(PATIENCE_S).step == 3


def test_an_interrupt_while_waiting_ends_the_run(
    start: Callable[..., TrainingRun], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(handle, "ProgressBar", interrupt)
    run = start(LIVES)
    with pytest.raises(KeyboardInterrupt):
        run.wait(PATIENCE_S)
    assert run.state == "stopped" and "saves and ends; Ctrl-C again" in capsys.readouterr().err


def test_runs_end_with_the_program_that_started_them(
    start: Callable[..., TrainingRun], capsys: pytest.CaptureFixture[str]
) -> None:
    run = start(LIVES)
    handle._end_all(owner_pid=0)  # as in a forked process
    assert not run.done() and run in handle._live_runs
    handle._end_all()
    assert run.state == "stopped" and f"{run.folder} saves and ends with the program" in capsys.readouterr().err
    assert run not in handle._live_runs


# -- configurations -------------------------------------------------------------------------------------------------------


def test_a_segment_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--segment is 3; the run has segments 0 to 2"):
        load_for_training(QUICKSTART, words(tmp_path), segment=3)
    assert load_for_training(QUICKSTART, words(tmp_path), segment=2).runner.name == "one"


def test_keys_without_effect_are_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(MAX_RESTARTS, raising=False)
    overrides = [*words(tmp_path), "runner.max_epochs=2"]
    load_for_training(QUICKSTART, overrides)
    assert "no effect: runner.max_epochs" in capsys.readouterr().err
    monkeypatch.setenv(MAX_RESTARTS, "0")  # the submission of this job has told it
    load_for_training(QUICKSTART, overrides)
    assert "no effect" not in capsys.readouterr().err


def test_wrong_keys_and_folders_are_refused_before_anything_starts(tmp_path: Path) -> None:
    folder = {"runner.run_dir": tmp_path / "runs", "runner.name": "one"}
    with pytest.raises(ConfigError, match=r"unknown key runner\.max_stepz; did you mean runner\.max_steps\?"):
        train(QUICKSTART, **folder, **{"runner.max_stepz": 5})
    with pytest.raises(ConfigError, match=r"runner\.max_steps is of type object"):
        train(QUICKSTART, **folder, **{"runner.max_steps": object()})
    assert list(tmp_path.iterdir()) == []
    logs = tmp_path / "runs" / "one" / "logs"
    logs.parent.mkdir(parents=True)
    logs.touch()
    with pytest.raises(ConfigError, match=r"runner\.run_dir: .*/one/logs.* cannot be written"):
        TrainingRun(load_for_training(QUICKSTART, words(tmp_path)), "x")


def test_a_run_with_checkpoints_is_not_started_anew(tmp_path: Path) -> None:
    checkpoint = tmp_path / "runs" / "one" / "checkpoints" / "global_step_4"
    checkpoint.mkdir(parents=True)
    (checkpoint / "COMPLETE").touch()
    with pytest.raises(ConfigError, match=r"has checkpoints already \(newest: global_step_4\)"):
        train(QUICKSTART, runner={"run_dir": str(tmp_path / "runs"), "name": "one"})
