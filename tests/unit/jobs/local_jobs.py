"""Drivers that run as jobs of this machine, or of a Slurm that is a few shell scripts."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from rlhpc.jobs.paths import RunPaths
from rlhpc.jobs.segment import Claim, SegmentJournal
from rlhpc.jobs.submit import Submission, SubmitRequest, WaitOptions, cancel

# A driver that counts its starts, "trains" for some seconds, saves on SIGUSR2 or SIGTERM, and writes its marker last.
DRIVER = """
import json, os, signal, sys, time
from pathlib import Path
root, seconds, mode = Path(sys.argv[1]), float(sys.argv[2]), sys.argv[3]
with (root / "starts").open("a") as file:
    file.write(f"{os.getpid()}\\n")
stop = []
signal.signal(signal.SIGUSR2, lambda s, f: stop.append(s))
signal.signal(signal.SIGTERM, lambda s, f: stop.append(s))
print("driver starts", flush=True)
if mode == "reject":
    print("noise before\\nrlhpc: error: env.train.env_id: unknown 'CartPoel'", file=sys.stderr)
    sys.exit(2)
if mode == "fail":
    print("rlhpc: error: actor rank 1 on n1 was killed", file=sys.stderr)
    sys.exit(1)
if mode == "nomarker":
    sys.exit(0)
saved = root / "saved"
count = int(saved.read_text()) if saved.exists() else 0
while count < seconds * 20:
    time.sleep(0.05)
    count += 1
    now = time.time()
    status = {"step": count, "max_steps": int(seconds * 20), "return": 12.5, "env_steps_per_s": 1000.0, "eta_s": 3.0,
              "pid": os.getpid(), "host": os.uname().nodename, "started": now - 1, "updated": now, "state": "running",
              "stop_reason": ""}
    (root / "status.tmp").write_text(json.dumps(status))
    os.replace(root / "status.tmp", root / "status.json")
    if stop:
        saved.write_text(str(count))
        folder = root / "checkpoints" / f"global_step_{count}"
        if mode != "stall":
            folder.mkdir(parents=True)
            (folder / "COMPLETE").touch()
        sys.exit(75 if stop[-1] == signal.SIGUSR2 else 143)
(root / "segments").mkdir(exist_ok=True)
(root / "segments" / "tmp").write_text(json.dumps({"global_step": count}))
os.replace(root / "segments" / "tmp", root / "segments" / "0.json")
"""

# As `rlhpc submit` does: once nothing is left but to wait, a watcher does it for all.
WAITER = """
import os
import signal
import sys
from pathlib import Path
from rlhpc.runtime.exit_codes import report_errors
from rlhpc.cli.train import print_outcome
from rlhpc.runtime import env_references
from rlhpc.jobs.wait_client import Wait, hand_over
from rlhpc.jobs.probes import ProcessId
from rlhpc.jobs import submit
from rlhpc.jobs.submit import Submission, SubmitRequest, WaitOptions
submit.DYING_S = float(os.environ.get("DYING_S", submit.DYING_S))
# as at a terminal, also where the tests run in the background of a shell that has SIGINT ignored
signal.signal(signal.SIGINT, signal.default_int_handler)
asked_by = ProcessId.from_pid(int(os.environ["ASKED_BY"])) if "ASKED_BY" in os.environ else None
if "KEY_OF_MINE" in os.environ:  # as a configuration would
    from omegaconf import OmegaConf
    env_references.watch()
    OmegaConf.create({"key": "${oc.env:KEY_OF_MINE}"}).key
def main():
    request = SubmitRequest(Path(sys.argv[1]), sys.argv[2:], executor="local")
    wait = WaitOptions(
        poll_s=0.1, requester=asked_by, hand_over=lambda waiter: hand_over(Wait.from_waiter(waiter, answers=True))
    )
    print_outcome(Submission(request, wait).run(), as_json=True)
    return 0
sys.exit(report_errors(main))
"""


def until(condition: Callable[[], Any], what: str, seconds: float = 30.0) -> Any:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        value = condition()
        if value:
            return value
        time.sleep(0.05)
    raise AssertionError(f"did not happen: {what}")


class Run:
    def __init__(self, root: Path) -> None:
        self.root = root
        root.mkdir()
        self.paths = RunPaths(root)
        self.files = SegmentJournal(self.paths, 0)
        self.script = root.parent / "driver.py"
        self.script.write_text(DRIVER)
        self.waiter_script = root.parent / "waiter.py"
        self.waiter_script.write_text(textwrap.dedent(WAITER))
        self.out = io.StringIO()
        self.environment: dict[str, str] = {}

    def command(self, seconds: float = 1.0, mode: str = "ok") -> list[str]:
        return [sys.executable, str(self.script), str(self.root), str(seconds), mode]

    def submission(self, seconds: float = 1.0, mode: str = "ok", **options: Any) -> Submission:
        """A submission with options of `SubmitRequest` and of `WaitOptions`."""
        names = {field.name for field in fields(SubmitRequest)}
        request = {"command": self.command(seconds, mode), "executor": "local"}
        wait: dict[str, Any] = {"poll_s": 0.05, "progress_s": 0.2, "stream": self.out}
        for name, value in options.items():
            (request if name in names else wait)[name] = value
        return Submission(SubmitRequest(self.root, **request), WaitOptions(**wait))

    def submit(self, seconds: float = 1.0, mode: str = "ok", **options: Any) -> dict[str, Any]:
        return self.submission(seconds, mode, **options).run()

    def waiter(self, seconds: float = 1.0, mode: str = "ok") -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, str(self.waiter_script), str(self.root), *self.command(seconds, mode)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p), **self.environment},
        )

    def starts(self) -> list[int]:
        file = self.root / "starts"
        return [int(line) for line in file.read_text().split()] if file.exists() else []

    def claim(self) -> Claim:
        found = until(
            lambda: (c := Claim.newest(self.files)) is not None and c.driver is not None and c, "the driver starts"
        )
        assert isinstance(found, Claim)
        until(lambda: self.paths.driver_state.exists(), "the driver trains")
        return found


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    run = Run(tmp_path / "quickstart")
    yield run
    cancel(run.paths, grace_s=0.0)
    for pid in run.starts():
        assert not Path(f"/proc/{pid}").exists() or "Z" in Path(f"/proc/{pid}/stat").read_text().split()[2]


# Slurm as far as submission needs it: sbatch starts the script with the job's variables, squeue looks at its process.
SBATCH = """#!/bin/bash
cp "${@: -1}" script.sh
echo 0 > restarts
echo "Submitted batch job 42"
export SLURM_JOB_ID=42 SLURM_JOB_NODELIST=n1 SLURM_JOB_NUM_NODES=1 SLURM_NTASKS=1 SLURM_PROCID=0 SLURM_LOCALID=0
export SLURM_NODEID=0
setsid bash -c 'while true; do rm -f again; bash script.sh; [ -e again ] || break; done' < /dev/null >> batch.log 2>&1 &
echo $! > batch.pid
"""
SQUEUE = """#!/bin/bash
case "$*" in *%k*) echo "42+0|$PWD||$(sed -n 's/^#SBATCH --job-name=//p' script.sh)"; exit;; esac
kill -0 $(cat batch.pid) 2>/dev/null && echo "42|RUNNING|None" || { echo "Invalid job id specified" >&2; exit 1; }
"""
SCONTROL = """#!/bin/bash
case "$1" in
requeue) touch again;;
*) echo "slurm_load_jobs error: Invalid job id specified" >&2; exit 1;;
esac
"""


@pytest.fixture
def fake_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "slurm"
    folder.mkdir()
    fail = "#!/bin/bash\nexit 1\n"
    commands = {"sbatch": SBATCH, "squeue": SQUEUE, "scontrol": SCONTROL, "sacct": fail, "srun": fail}
    commands["scancel"] = "#!/bin/bash\nkill -TERM -- -$(cat batch.pid)\n"
    for name, body in commands.items():
        path = folder / name
        path.write_text(body.replace("\n", f"\ncd {folder}\n", 1))
        path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return folder


FULL = """#!/bin/bash
echo "$(date +%s.%N)" >> tries
[ "$(cat limit)" = gone ] && exec bash sbatch.real "$@"
cat limit >&2
exit 1
"""


@pytest.fixture
def full_slurm(fake_slurm: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where sbatch says what is in the file `limit`, until that is `gone`."""
    monkeypatch.setattr("rlhpc.jobs.submit_backoff.MIN_PAUSE_S", 0.5)
    (fake_slurm / "sbatch").rename(fake_slurm / "sbatch.real")
    (fake_slurm / "sbatch").write_text(FULL.replace("\n", f"\ncd {fake_slurm}\n", 1))
    (fake_slurm / "sbatch").chmod(0o755)
    return fake_slurm


def refuse(folder: Path, words: str) -> None:
    (folder / "limit.new").write_text(words)
    (folder / "limit.new").replace(folder / "limit")


LIMIT = "sbatch: error: QOSMaxSubmitJobPerAccountLimit\nsbatch: error: Batch job submission failed: Job violates"
SILENT = "sbatch: error: Batch job submission failed: Unable to contact slurm controller (connect failure)"
