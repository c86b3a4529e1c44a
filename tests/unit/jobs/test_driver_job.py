"""Driver jobs: failure messages, restarts, requeues, cancellation, and jobs that own the segment already."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rlhpc.jobs import driver_job
from rlhpc.jobs.driver_job import DriverJob, first_failure
from rlhpc.jobs.probes import ProcessId
from rlhpc.jobs.segment import Attempts, Claim

CHATTER = "2026-11-27 INFO an ordinary line of a library, about eighty bytes long, of which there are many\n"


@pytest.mark.parametrize("before", [0, 100, 110_000])
def test_the_reason_is_found_however_much_was_printed_before(tmp_path: Path, before: int) -> None:
    output = tmp_path / "driver.err"
    earlier = "rlhpc: error: of an earlier attempt\n"
    output.write_text(earlier + CHATTER * before + "rlhpc: error: CUDA out of memory on actor-3\n  log: x\n")
    assert first_failure(output, len(earlier)) == "CUDA out of memory on actor-3\n  log: x"


@pytest.mark.parametrize("before", [0, 110_000])
def test_without_a_message_the_last_lines_count(tmp_path: Path, before: int) -> None:
    output = tmp_path / "driver.err"
    output.write_text(CHATTER * before + "Segmentation fault\n")
    assert first_failure(output).endswith("Segmentation fault")
    assert first_failure(tmp_path / "missing") == ""


#: A driver by its mode: it fails, is killed, fails for others' fault, asks for a requeue, or finishes its segment.
DRIVER = """
import json, os, signal, sys, time
from pathlib import Path
root, mode = Path(sys.argv[1]), sys.argv[2]
starts = root / "starts"
count = len(starts.read_text().split()) if starts.exists() else 0
starts.write_text("x " * (count + 1))
if mode == "fail" or (mode == "twice" and count < 2):
    print("rlhpc: error: the reward is not finite\\n  log: x", file=sys.stderr)
    if mode == "twice":
        (root / "status.json").write_text(json.dumps({"pid": os.getpid(), "restartable": True}))
    sys.exit(1)
if mode == "silent":
    sys.exit(0)
if mode == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
if mode == "saves":
    stop = []
    for number in (signal.SIGUSR2, signal.SIGTERM):
        signal.signal(number, lambda number, frame: stop.append(number))
    (root / "ready").touch()
    while not stop:
        time.sleep(0.02)
    (root / "checkpoints" / f"global_step_{count + 1}").mkdir(parents=True)
    (root / "checkpoints" / f"global_step_{count + 1}" / "COMPLETE").touch()
    sys.exit(75 if stop[0] == signal.SIGUSR2 else 143)
(root / "segments").mkdir(exist_ok=True)
(root / "segments" / "0.json").write_text(json.dumps({"global_step": 7, "tokens": os.environ.get("TOKENS")}))
"""


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., DriverJob]]:
    """Jobs that call `DriverJob` as submitit does; the process's handlers of signals are restored."""
    script = tmp_path / "driver.py"
    script.write_text(DRIVER)
    root = tmp_path / "run"
    (root / "submit").mkdir(parents=True)
    for name, value in {"EXECUTOR": "local", "JOB_ID": "42", "FOLDER": str(tmp_path)}.items():
        monkeypatch.setenv(f"SUBMITIT_{name}" if name == "EXECUTOR" else f"SUBMITIT_LOCAL_{name}", value)

    def build(mode: str, **options: Any) -> DriverJob:
        command = [sys.executable, str(script), str(root), mode]
        return DriverJob(str(root), 0, command, "token", "local", **options)

    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR2)}
    yield build
    for number, handler in handlers.items():
        signal.signal(number, handler)


def starts_of(job: DriverJob) -> int:
    return len((job.files.paths.root / "starts").read_text().split())


def test_a_finished_driver_leaves_its_result_and_frees_the_segment(job: Callable[..., DriverJob]) -> None:
    first = job("finish", environment={"TOKENS": "9"})
    assert first() == {"exit_code": 0} and first.files.result() == {"global_step": 7, "tokens": "9"}
    claim = Claim.newest(first.files)
    assert claim is not None and claim.released and claim.job_id == "42" and claim.token == "token"
    assert job("finish")() == {"exit_code": 0} and starts_of(first) == 1, "a finished segment is not trained again"


def test_the_error_of_a_driver_is_its_record(job: Callable[..., DriverJob]) -> None:
    failing = job("fail", max_restarts=3)
    assert failing()["exit_code"] == 1
    record = failing.files.exit_of("token")
    assert record is not None and (record.message, record.cancelled) == ("the reward is not finite\n  log: x", False)
    assert starts_of(failing) == 1, "it would fail again"
    assert failing.files.exit_of("another") is None


def test_a_driver_that_ends_well_without_a_result_has_failed(job: Callable[..., DriverJob]) -> None:
    assert "exit code 0 but left no" in job("silent")()["message"]


def test_a_missing_command_is_the_error(job: Callable[..., DriverJob]) -> None:
    missing = job("finish")
    missing.command = ["/no/such/driver"]
    record = missing()
    assert record["exit_code"] == 127 and record["message"].startswith("cannot start /no/such/driver: No such file")


def test_a_driver_is_started_again_after_the_fault_of_others(
    job: Callable[..., DriverJob], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(driver_job.time, "sleep", lambda seconds, sleep=time.sleep: sleep(min(seconds, 0.05)))
    restarted = job("twice", max_restarts=2)
    assert restarted() == {"exit_code": 0} and starts_of(restarted) == 3
    assert "started again in 1 s: the reward is not finite" in capfd.readouterr().err
    assert Attempts(restarted.files, "token").count == 3


def test_restarts_without_a_checkpoint_have_an_end(
    job: Callable[..., DriverJob], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver_job.time, "sleep", lambda seconds, sleep=time.sleep: sleep(min(seconds, 0.05)))
    killed = job("killed", max_restarts=1)
    record = killed()
    assert (record["exit_code"], record["signal"]) == (137, "SIGKILL") and starts_of(killed) == 2
    assert "(restarted 1 times without a new checkpoint)" in record["message"]


def test_the_signal_before_the_end_of_a_job_makes_the_driver_save_and_requeues(job: Callable[..., DriverJob]) -> None:
    saving = job("saves")
    requeued: list[Any] = []

    def on_signal(signum: int, frame: object) -> None:
        requeued.append(saving.checkpoint())
        raise SystemExit(0)  # as Slurm ends a requeued job

    signal.signal(signal.SIGUSR2, on_signal)
    threading.Thread(target=signal_when_ready, args=(saving, signal.SIGUSR2)).start()
    with pytest.raises(SystemExit):
        saving()
    assert [path.name for _, path in saving.files.paths.complete_steps()] == ["global_step_1"]
    next_job = requeued[0].function
    assert isinstance(next_job, DriverJob) and next_job.command == saving.command and next_job._claim is None
    assert saving.files.exit_of("token") is None, "the segment goes on"


def test_a_terminated_job_saves_and_is_recorded_as_cancelled(job: Callable[..., DriverJob]) -> None:
    saving = job("saves")
    threading.Thread(target=signal_when_ready, args=(saving, signal.SIGTERM)).start()
    record = saving()
    assert (record["exit_code"], record["cancelled"]) == (143, True) and starts_of(saving) == 1
    assert saving.files.paths.complete_steps()


def signal_when_ready(job: DriverJob, signum: int) -> None:
    while not (job.files.paths.root / "ready").exists():
        time.sleep(0.02)
    os.kill(os.getpid(), signum)


def test_a_second_job_gives_way(job: Callable[..., DriverJob], bystander: subprocess.Popen[bytes]) -> None:
    second = job("finish")
    owner = {"token": "t", "job_id": "7", "executor": "local", "job": ProcessId.from_pid(bystander.pid).to_json()}
    second.files.claim(1).write_text(json.dumps(owner))
    assert second() == {"superseded": True} and not (second.files.paths.root / "starts").exists()


def test_attempts_without_progress_end_the_job(job: Callable[..., DriverJob]) -> None:
    stalled = job("finish")
    attempts = Attempts(stalled.files, "token")
    for _ in range(3):
        attempts.begin(-1, "41")
    record = stalled()
    assert record["exit_code"] == 1 and "made no progress in 3 attempts (newest checkpoint: none)" in record["message"]
    assert not (stalled.files.paths.root / "starts").exists()
