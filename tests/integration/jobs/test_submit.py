"""Submission through submitit's local executor: nothing that is killed loses the job, and no job runs twice."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from rlhpc.jobs.paths import RunPaths
from rlhpc.jobs.probes import JobReport, JobState, ProcessId, SlurmProbe
from rlhpc.jobs.segment import Attempts, Claim, SegmentJournal
from rlhpc.jobs.shared_files import read_json_file
from rlhpc.jobs.state import Facts, run_state
from rlhpc.jobs.status import print_logs, render_runs, render_status
from rlhpc.jobs.submit import (
    DriverFailed,
    DriverRejected,
    JobCancelled,
    JobRecord,
    WaitInterrupted,
    cancel,
)
from rlhpc.runtime.errors import DeadlineExceeded, UserError
from tests.unit.jobs.local_jobs import LIMIT, SILENT, Run, refuse, until

pytestmark = pytest.mark.timeout(120)

QUICKSTART = Path(__file__).resolve().parents[3] / "configs" / "quickstart.yaml"


def test_errors_of_the_driver_reach_the_caller(run: Run) -> None:
    with pytest.raises(DriverRejected, match=r"^env.train.env_id: unknown 'CartPoel'") as rejected:
        run.submit(mode="reject")
    assert isinstance(rejected.value, UserError) and rejected.value.exit_code == 2
    assert "noise" not in str(rejected.value) and str(run.files.driver_err) in str(rejected.value)
    with pytest.raises(DriverFailed, match=r"^actor rank 1 on n1 was killed") as failed:
        run.submit(mode="fail")
    assert failed.value.exit_code == 1
    assert run_state(run.paths) == ("failed", "actor rank 1 on n1 was killed")
    with pytest.raises(DriverFailed, match=r"exit code 0 but left no .*segments/0.json"):
        run.submit(mode="nomarker")
    with pytest.raises(DriverFailed, match="cannot start /no/such/driver"):
        run.submit(command=["/no/such/driver"])
    assert run.submit()["state"] == "finished"  # none of them is in the way of the next
    assert JobRecord.read(run.files).attempt == 5  # type: ignore[union-attr]


def test_killed_waiter_loses_nothing(run: Run) -> None:
    waiter = run.waiter(3.0)
    claim = run.claim()
    os.killpg(waiter.pid, signal.SIGKILL)  # as a workflow engine would, with everything in its group
    waiter.communicate()
    assert claim.job.alive() and claim.driver is not None and claim.driver.alive()
    answer = run.submit(3.0)
    assert answer["job_id"] == claim.job_id and "waiting for local job" in run.out.getvalue()
    assert len(run.starts()) == 1


def test_ctrl_c_leaves_the_job_and_cancel_ends_it(run: Run) -> None:
    waiter = run.waiter(60.0)
    claim = run.claim()
    waiter.send_signal(signal.SIGINT)
    _, err = waiter.communicate(timeout=20)
    assert waiter.returncode == 130
    assert f"local job {claim.job_id} goes on" in err and f"rlhpc cancel {run.root}" in err and "Traceback" not in err
    assert claim.driver is not None and claim.driver.alive()
    assert run_state(run.paths)[0] == "running"
    assert cancel(run.paths) == [f"segment 0: local job {claim.job_id} was cancelled"]
    assert claim.driver.alive() is False and claim.job.alive() is False
    assert (run.root / "saved").exists()  # it was asked, not killed
    assert cancel(run.paths) == []
    assert run_state(run.paths)[0] == "cancelled"


def test_cancel_reaches_the_waiter(run: Run) -> None:
    waiter = run.waiter(60.0)
    run.claim()
    cancel(run.paths)
    _, err = waiter.communicate(timeout=20)
    assert waiter.returncode == 143 and "was cancelled" in err


def test_no_retry_starts_again_what_was_cancelled(run: Run) -> None:
    waiters = [run.waiter(60.0) for _ in range(2)]
    run.claim()
    cancel(run.paths)
    for waiter in waiters:
        _, err = waiter.communicate(timeout=20)
        assert waiter.returncode == 143 and "run the same command (snakemake, rlhpc submit) again" in err
    with pytest.raises(JobCancelled, match=r"quickstart: local job .* was cancelled") as refused:
        run.submit(attempt=2)  # as a workflow engine does by itself
    assert refused.value.exit_code == 143 and len(run.starts()) == 1
    assert run_state(run.paths)[0] == "cancelled"
    assert run.submit(0.5)["state"] == "finished"  # as a person does
    assert run.submit(0.5, attempt=2)["state"] == "finished"


def test_a_retry_starts_again_what_failed(run: Run) -> None:
    with pytest.raises(DriverFailed):
        run.submit(mode="fail")
    assert run.submit(0.5, attempt=2)["state"] == "finished"


def test_concurrent_submitters_start_one_job(run: Run) -> None:
    waiters = [run.waiter(2.0) for _ in range(4)]
    outputs = [w.communicate(timeout=60) for w in waiters]
    assert [w.returncode for w in waiters] == [0] * 4, outputs
    assert len(run.starts()) == 1


@pytest.mark.parametrize("victims", ["driver", "job", "controller", "all"])
def test_killed_processes(run: Run, victims: str) -> None:
    run.submit(3.0, enabled=False)
    claim = run.claim()
    record = JobRecord.read(run.files)
    assert record is not None and record.process is not None and claim.driver is not None
    chosen = {"driver": [claim.driver], "job": [claim.job], "controller": [record.process]}
    for process in chosen.get(victims, [record.process, claim.job, claim.driver]):
        os.kill(process.pid, signal.SIGKILL)
    if victims == "controller":  # the job itself is alive and well
        assert run.submit(3.0)["state"] == "finished" and len(run.starts()) == 1
        return
    if victims == "driver":
        ended = until(lambda: read_json_file(run.files.exit), "the job notes how its driver ended")
        assert (ended["signal"], ended["exit_code"]) == ("SIGKILL", 137)
    assert run.submit(3.0)["state"] == "finished"
    assert len(run.starts()) == 2


def test_job_killed_while_waited_for(run: Run) -> None:
    waiter = run.waiter(30.0)
    claim = run.claim()
    record = until(lambda: JobRecord.read(run.files), "record")
    for process in (record.process, claim.job, claim.driver):
        assert process is not None
        os.kill(process.pid, signal.SIGKILL)
    _, err = waiter.communicate(timeout=20)
    assert waiter.returncode == 1 and "ended without a result" in err and "starts anew: there is no checkpoint" in err
    assert run_state(run.paths)[0] == "dead"


@pytest.mark.parametrize("gone", ["the run", "submit"])
def test_a_folder_that_is_removed_is_what_the_waiter_names(run: Run, gone: str) -> None:
    """Not logs that went with it, nor a checkpoint."""
    waiter = run.waiter(30.0)
    claim = run.claim()
    record = JobRecord.read(run.files)
    removed = run.root if gone == "the run" else run.paths.submit
    removed.rename(run.root.with_name("removed"))  # at once, while the driver writes
    for process in (record and record.process, claim.job, claim.driver):
        assert process is not None
        os.kill(process.pid, signal.SIGKILL)
    _, err = waiter.communicate(timeout=20)
    run.root.mkdir(exist_ok=True)
    run.root.with_name("removed").rename(removed)
    assert waiter.returncode == 1 and f"{removed} was removed while local job {claim.job_id} was pending or ran" in err
    assert "log:" not in err and "Traceback" not in err and len(run.starts()) == 1
    assert ("starts the run anew, at step 0" in err) == (gone == "the run") and "put it back from a copy" in err


def test_submitter_killed_between_submission_and_record(run: Run) -> None:
    run.submit(3.0, enabled=False)
    claim = run.claim()
    record = JobRecord.read(run.files)
    assert record is not None
    value = json.loads(run.files.record.read_text())
    run.files.record.write_text(json.dumps({**value, "job_id": "", "process": None, "phase": "submitting"}))
    assert run.submit(3.0)["job_id"] == claim.job_id
    assert len(run.starts()) == 1


def test_second_job_gives_way(run: Run) -> None:
    run.submit(2.0, enabled=False)
    first = run.claim()
    # behind everybody's back: no lock, no look
    second = run.submission(2.0, save_grace_s=10.0)._start_job()
    answer = run.submit(2.0)
    assert second.job_id != first.job_id and answer["state"] == "finished" and len(run.starts()) == 1


def test_signal_saves_and_requeues(run: Run) -> None:
    run.submit(2.0, enabled=False)
    claim = run.claim()
    os.kill(claim.job.pid, signal.SIGUSR2)
    answer = run.submit(2.0)
    assert answer["job_id"] == claim.job_id and answer["result"] == {"global_step": 40}
    assert len(run.starts()) == 2 and JobRecord.read(run.files).attempt == 1  # type: ignore[union-attr]
    assert run.files.newest_claim() == 2


def test_driver_killed_while_waited_for(run: Run) -> None:
    with pytest.raises(DriverFailed, match="ended by SIGKILL") as killed:
        timer = threading.Timer(0.1, lambda: os.kill(until(run.starts, "the driver starts")[0], signal.SIGKILL))
        timer.start()
        run.submit(60.0)
    assert killed.value.exit_code == 137


def test_no_progress_is_not_requeued_for_ever(run: Run) -> None:
    errors: list[BaseException] = []

    def wait() -> None:
        try:
            run.submit(60.0, mode="stall")
        except DriverFailed as error:
            errors.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    for attempt in range(1, 3):
        while len(run.starts()) < attempt:
            time.sleep(0.05)
        time.sleep(0.3)
        os.kill(run.claim().job.pid, signal.SIGUSR2)
    thread.join(30)
    assert errors and "made no progress in 2 attempts" in str(errors[0])
    assert len(run.starts()) == 2


def test_waiting_ends_with_who_asked(run: Run) -> None:
    engine = subprocess.Popen(["sleep", "60"])
    threading.Timer(1.0, engine.kill).start()
    reaper = threading.Thread(target=engine.wait)
    reaper.start()
    with pytest.raises(WaitInterrupted, match=r"local job .* goes on"):
        run.submit(60.0, requester=ProcessId.from_pid(engine.pid))
    reaper.join()
    assert run.claim().alive_here()


def test_deadline(run: Run) -> None:
    with pytest.raises(DeadlineExceeded, match=r"not finished within 1 s; local job .* goes on"):
        run.submit(60.0, deadline_s=1.0)


def test_status_and_logs(run: Run) -> None:
    run.submit(60.0, enabled=False)
    claim = run.claim()
    members = run.paths.generation("local", 0) / "members"
    members.mkdir(parents=True)
    log = run.paths.segment_logs(0) / "actor-0.out"
    log.write_text("one\ntwo\n")
    row = {"group": "actor", "rank": 0, "node": "n1", "pid": 77, "state": "ready", "log_out": str(log), "log_err": ""}
    (members / "actor-0.json").write_text(json.dumps(row))
    text = render_status(run.paths)
    assert "quickstart" in text and f"running: local job {claim.job_id}" in text and "return 12.5" in text
    assert "actor           0  n1                     77  ready" in text
    out = io.StringIO()
    print_logs(run.paths, group="actor", num_lines=1, out=out)
    assert out.getvalue() == "[actor-0] two\n"
    print_logs(run.paths, out=out)
    assert "[driver] driver starts\n" in out.getvalue()

    followed = io.StringIO()
    thread = threading.Thread(target=print_logs, args=(run.paths, "actor", 0, True), kwargs={"out": followed})
    thread.start()
    with log.open("a") as file:
        file.write("three\n")
    until(lambda: "[actor-0] three\n" in followed.getvalue(), "the new line is printed")
    cancel(run.paths)
    thread.join(10)
    assert not thread.is_alive() and followed.getvalue().count("three") == 1


def test_status_is_of_the_newest_attempt(run: Run) -> None:
    """What an earlier attempt left says nothing about this one, and a run that is over says how long it ran in all."""
    run.submit(60.0, enabled=False)
    claim = run.claim()
    assert claim.driver is not None
    other = {"state": "failed", "stop_reason": "env[0] was killed", "pid": claim.driver.pid + 1, "step": 7}
    status = {**json.loads(run.paths.driver_state.read_text()), **other}
    found = Facts(run.paths, status, run.files, JobRecord.read(run.files), claim).state()
    assert (found.state, found.is_current) == ("starting", False) and found.reason == f"local job {claim.job_id}"
    cancel(run.paths)
    ended = {**status, "elapsed_s": 3700.0}
    run.paths.driver_state.write_text(json.dumps(ended))
    text = render_status(run.paths)
    assert f"state        cancelled: local job {claim.job_id}; submit the run again to go on" in text
    assert "trained for  1h01m in all" in text and "failed" not in text


def report(state: str, reason: str = "") -> JobReport:
    return JobReport(JobState.parse(state), reason, "squeue")


def test_status_of_a_job_of_slurm(run: Run) -> None:
    """Slurm's word on a job comes before what the files say of an earlier attempt."""
    run.paths.submit.mkdir()
    record = JobRecord(0, 1, "t", "slurm", [], "name", job_id="27", phase="submitted", submitted=1.0)
    record.write(run.files)
    elsewhere = ProcessId(77, 5, "n1/other/x")
    claim = Claim(run.files, 1, "t", "27", "slurm", elsewhere, driver=replace(elsewhere, pid=78), started=2.0)
    trains = {"state": "running", "pid": 78, "host": "n1", "started": 3.0, "updated": 4.0, "step": 5}
    killed = {**trains, "state": "failed", "stop_reason": "env[0] on n1 was killed by signal 15"}

    def state(said: JobReport | None, status: dict[str, Any], claim: Claim | None = claim) -> tuple[str, str]:
        facts = Facts(run.paths, status, run.files, record, claim)
        assert facts.slurm_job == "27"
        found = facts.state(said)
        return found.state, found.reason

    job = "Slurm job 27"
    assert state(report("PENDING", "Priority"), {}, None) == ("pending", f"{job}: Priority")
    assert state(report("PENDING", "None"), {}, None) == ("pending", job)
    assert state(report("REQUEUE_HOLD", "None"), {}, None) == ("pending", f"{job}: requeue_hold")
    assert state(report("RUNNING"), {}, None) == ("starting", job)
    assert state(report("RUNNING"), trains) == ("running", job)
    assert state(report("RUNNING"), {**trains, "pid": 79}) == ("starting", job)
    assert state(report("RUNNING"), killed) == ("starting", f"{job}, again after: env[0] on n1 was killed by signal 15")
    assert state(report("PENDING", "BeginTime"), killed) == ("pending", f"{job}, to go on: BeginTime")
    assert state(report("CANCELLED"), trains)[0] == "cancelled"
    assert state(report("NODE_FAIL"), trains)[0] == "dead"
    attempts = Attempts(run.files, "t")
    attempts.begin(-1, "27")
    attempts.end("requeued: the job had to end")
    assert state(report("RUNNING"), trains) == ("starting", f"{job}, again after: requeued: the job had to end")
    run.files.mark_cancelled("t")  # while it was pending; Slurm has forgotten the job
    assert state(None, {}, None)[0] == "cancelled"
    run.files.record.unlink()


def test_status_of_all_runs(tmp_path: Path, fake_slurm: Path) -> None:
    """One query, however many there are."""
    (fake_slurm / "squeue").write_text(
        f'#!/bin/bash\necho x >> {fake_slurm}/asked\nfor i in $(seq 0 99); do echo "$i|PENDING|Priority"; done\n'
    )
    for number in range(100):
        paths = RunPaths(tmp_path / "runs" / "sweep" / f"s{number}")
        paths.submit.mkdir(parents=True)
        JobRecord(0, 1, "t", "slurm", [], "name", job_id=str(number), phase="submitted").write(SegmentJournal(paths, 0))
    (tmp_path / "runs" / "sweep" / "s7" / "status.json").write_text(
        json.dumps({"step": 3, "max_steps": 9, "return": 1.25})
    )
    lines = render_runs(
        tmp_path / "runs", headlines=lambda runs: {"return": ["1.2" if run.root.name == "s7" else "–" for run in runs]}
    ).splitlines()
    assert len(lines) == 101 and (fake_slurm / "asked").read_text().split() == ["x"]
    assert lines[0].split() == ["run", "state", "job", "step", "return", "note"]
    assert re.search(r"^sweep/s7 +pending +Slurm job 7 +3/9 +1.2 +Priority$", "\n".join(lines), re.M)


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to be another user")
def test_a_colleague_sees_what_is_open_to_all(run: Run) -> None:
    run.submit(60.0, enabled=False)
    driver = run.claim().driver
    assert driver is not None
    still = [psutil.Process(driver.pid), *psutil.Process(driver.pid).children(recursive=True)]
    for process in still:  # it would write its status again
        process.suspend()
    run.paths.driver_state.rename(run.root / "later")
    for folder in (run.root, *run.root.parents):
        folder.chmod(folder.stat().st_mode | 0o555)
    render_status(run.paths)  # imports what it needs
    os.seteuid(65534)
    try:
        with pytest.raises(UserError, match="was submitted by root, so its jobs are not yours to cancel"):
            cancel(run.paths)
        assert "submitted by root; what it does before its first step only they can see" in render_status(run.paths)
    finally:
        os.seteuid(0)
        for process in still:
            process.resume()
    claim = Claim.newest(run.files)
    assert claim is not None and claim.alive_here()


def test_slurm_submits_requeues_and_finishes(run: Run, fake_slurm: Path) -> None:
    slurm = {"partition": "gpu", "time": 60, "setup": ["#SBATCH hetjob", "#SBATCH --partition=cpu"]}
    answer = run.submit(2.0, executor="auto", slurm=slurm, enabled=False)
    assert answer == {"state": "submitted", "segment": 0, "executor": "slurm", "job_id": "42", "result": None}
    script = (fake_slurm / "script.sh").read_text()
    for line in ("#SBATCH --partition=gpu", "#SBATCH hetjob", "#SBATCH --signal=B:USR2@120", "#SBATCH --requeue"):
        assert line in script
    assert f"exec {sys.executable} -P -u -m submitit.core._submit" in script and "\nsrun" not in script
    claim = run.claim()
    assert run.submit(2.0, executor="slurm", enabled=False)["state"] == "attached"
    os.kill(claim.job.pid, signal.SIGUSR2)
    answer = run.submit(2.0, executor="slurm")
    assert (answer["state"], answer["job_id"]) == ("finished", "42")
    assert "Slurm job 42 running" in run.out.getvalue()
    assert len(run.starts()) == 2, (fake_slurm / "batch.log").read_text()


@pytest.mark.parametrize("source", ["squeue", "sacct", "nobody"])
def test_an_allocation_that_has_ended(run: Run, fake_slurm: Path, source: str) -> None:
    """A shell still has a job's variables: one message, one question to Slurm, nothing written."""
    asked = f"echo x >> {fake_slurm}/asked\n"
    unknown = "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1\n"
    says = {"squeue": "echo '42|TIMEOUT|None'\n"}.get(source, unknown)
    (fake_slurm / "squeue").write_text(f"#!/bin/bash\n{asked}{says}")
    (fake_slurm / "sacct").write_text(
        "#!/bin/bash\n" + ("echo '42|TIMEOUT|0:0'\n" if source == "sacct" else "exit 1\n")
    )
    done = subprocess.run(
        [sys.executable, "-P", "-m", "rlhpc.cli", "train", str(QUICKSTART), f"runner.run_dir={run.root}"],
        env={**os.environ, "SLURM_JOB_ID": "42", "SLURM_JOB_NODELIST": "n1"}, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 2 and done.stderr.count("rlhpc: error:") == 1 and "Traceback" not in done.stderr
    how = "Slurm does not know it any more" if source == "nobody" else "it is TIMEOUT"
    assert f"SLURM_JOB_ID is 42, but that job is over ({how})" in done.stderr and "unset SLURM_JOB_ID" in done.stderr
    assert not list(run.root.iterdir()) and (fake_slurm / "asked").read_text() == "x\n"


def test_an_allocation_that_lives_or_is_not_known_of(fake_slurm: Path) -> None:
    from rlhpc.jobs.driver_lock import require_live_allocation

    job = {"SLURM_JOB_ID": "42", "SLURM_JOB_NODELIST": "n1"}
    for answer in ("echo '42|RUNNING|None'", "echo '42|COMPLETING|None'", "echo 'Unable to contact' >&2; exit 1"):
        (fake_slurm / "squeue").write_text(f"#!/bin/bash\n{answer}\n")
        require_live_allocation(job)
    (fake_slurm / "squeue").write_text("#!/bin/bash\necho '42|CANCELLED|None'\n")
    require_live_allocation({"SLURM_JOB_ID": "42"})  # of no use as it is
    with pytest.raises(UserError, match="42, but that job is over"):
        require_live_allocation(job)


HOLD = (
    "import sys; from pathlib import Path; from rlhpc.jobs.driver_lock import sole_driver; "
    "from rlhpc.jobs.paths import RunPaths\n"
    "with sole_driver(RunPaths(Path(sys.argv[1]))): print('held', flush=True); sys.stdin.read()"
)


def test_one_run_has_one_driver(run: Run, fake_slurm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second is refused and says who has the run; one that died, or this job's own earlier start, gives way."""
    holder = run.paths.driver_record
    first = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(run.root)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
    )  # fmt: skip
    assert first.stdout is not None and first.stdout.readline() == "held\n"
    with pytest.raises(UserError, match=rf"is being trained by process {first.pid} on .*runner.name"), sole(run):
        pass
    left = json.loads(holder.read_text())
    first.kill()
    first.communicate()
    with sole(run):
        assert json.loads(holder.read_text())["process"]["pid"] == os.getpid()
    assert not holder.exists()
    # a job on another node, whose lock cannot be seen here
    left["process"]["host"], left["job"] = "n1/other/x", "42"
    holder.write_text(json.dumps(left))
    (fake_slurm / "squeue").write_text("#!/bin/bash\necho '42|RUNNING|None'\n")
    with pytest.raises(UserError, match=r"is being trained by Slurm job 42 \(process"), sole(run):
        pass
    monkeypatch.setenv("SLURM_JOB_ID", "42")  # this very job, requeued
    with sole(run):
        pass
    holder.write_text(json.dumps(left))
    monkeypatch.setenv("SLURM_JOB_ID", "43")
    (fake_slurm / "squeue").write_text("#!/bin/bash\necho '42|CANCELLED|None'\n")
    with sole(run):
        pass


def sole(run: Run) -> Any:
    from rlhpc.jobs.driver_lock import sole_driver

    return sole_driver(run.paths)


def test_waiting_commands_share_one_query(fake_slurm: Path, tmp_path: Path) -> None:
    """Each asks at every look; Slurm is asked once an interval, for all, and nothing is left in the end."""
    from rlhpc.jobs.shared_probe import SharedProbe

    (fake_slurm / "squeue").write_text(
        f'#!/bin/bash\necho "$*" >> {fake_slurm}/asked\nfor i in $(seq 0 39); do echo "$i|PENDING|Priority"; done\n'
    )
    place = tmp_path / "place"
    probes = [SharedProbe(SlurmProbe(interval_s=0.0), place, interval_s=3600.0) for _ in range(40)]
    for _ in range(3):
        for number, probe in enumerate(probes):
            probe.query_job(str(number))
    assert (fake_slurm / "asked").read_text().count("\n") == 1
    answers = json.loads((place / "answers.json").read_text())
    assert len(answers["wanted"]) == 40
    (place / "answers.json").write_text(json.dumps({**answers, "asked": -7200.0}))  # an hour later
    for number, probe in enumerate(probes):
        assert probe.query_job(str(number)) == JobReport(JobState.PENDING, "Priority", "squeue")
    asked = (fake_slurm / "asked").read_text().splitlines()
    assert len(asked) == 2 and "--me" in asked[1], "the list of the user's jobs, however many commands wait"
    for number, probe in enumerate(probes):
        probe.leave([str(number)])
    assert not place.exists()
    (place / "answers.new").mkdir(parents=True, mode=0o700)  # nothing can be written there: each asks for itself
    place.chmod(0o700)
    assert SharedProbe(SlurmProbe(), place).query_job("7") == JobReport(JobState.PENDING, "Priority", "squeue")


@pytest.mark.parametrize("said", [LIMIT, SILENT], ids=["limit", "silent"])
def test_waits_for_room_in_the_queue(run: Run, full_slurm: Path, said: str) -> None:
    refuse(full_slurm, said)
    timer = threading.Timer(2.0, refuse, (full_slurm, "gone"))
    timer.start()
    assert run.submit(1.0, executor="slurm")["state"] == "finished"
    assert len((full_slurm / "tries").read_text().split()) >= 2
    why = "QOSMaxSubmitJobPerAccountLimit; waits for room" if said == LIMIT else "Slurm does not answer; tries again"
    assert f"quickstart segment 0: not submitted yet: {why}" in run.out.getvalue()
    record = JobRecord.read(run.files)
    assert record is not None and (record.attempt, record.phase, record.reason) == (1, "submitted", "")
