"""Confinement of a program: its limits and privileges, its end, and what it can reach with each mechanism."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from rlhpc.language.rewards.expected_values import decode
from rlhpc.language.sandbox import confine
from rlhpc.language.sandbox.python import build_seccomp_filter, readable_paths

LIMITS = {"cpu_s": 30, "memory": 1 << 40, "file_size": 1 << 26, "open_files": 64, "disk": 1 << 23, "processes": 1}
NONCE = "n"
KEEPER = """
import sys
from rlhpc.language.sandbox import confine, harness
confine.main(harness, *map(int, sys.argv[1:]))
"""


@dataclass
class Keeper:
    """Keeper of a program, in an interpreter of its own: a fork of this process would end with this process's exit functions.

    Attributes:
        process: Its process.
        result: Descriptor from which the harness's records are read.
        status: Descriptor from which the report of the program's exit is read.
    """

    process: subprocess.Popen[bytes]
    result: int
    status: int

    def read_result(self) -> bytes:
        """Returns the next records; b"" if the program has ended."""
        poll = select.poll()
        poll.register(self.result, select.POLLIN)
        assert poll.poll(60_000), "the program neither writes nor ends"
        return os.read(self.result, 1 << 16)

    def wait(self) -> Outcome:
        """Returns the outcome, once all processes have ended."""
        text = b""
        while chunk := self.read_result():
            text += chunk
        status = os.read(self.status, 1 << 16)
        code = self.process.wait(timeout=60)
        for descriptor in (self.result, self.status):
            os.close(descriptor)
        records = dict[str, Any]()
        for line in text.decode().splitlines():
            nonce, label, payload = line.split(" ", 2)
            assert nonce == NONCE
            if label in ("value", "error"):
                number, _, payload = payload.partition(" ")
                label = f"{label} {number}"
            records[label] = json.loads(payload)
        return Outcome(records, json.loads(status) if status else None, code)


@dataclass
class Outcome:
    """Outcome of a program.

    Attributes:
        records: Records of the harness by label.
        report: Report of the program's exit; None if there is none.
        code: Exit code of the keeper.
    """

    records: dict[str, Any]
    report: dict[str, Any] | None
    code: int

    def value(self, number: int = 0) -> Any:
        return decode(self.records[f"value {number}"])


def start(source: str, folder: Path, *values: str, caller: int | None = None, **changes: Any) -> Keeper:
    """Starts a program, whose `values` are expressions that are evaluated at its end."""
    job = {
        **LIMITS, "nonce": NONCE, "folder": str(folder), "source": source, "setup": "", "main": False, "packages": [],
        "checks": [{"kind": "value", "source": value} for value in values], "mechanisms": [], "need": [],
        "read": readable_paths(()), "filters": {f"{mount} {fork}": "" for mount in (False, True) for fork in (False, True)},
        **changes,
    }  # fmt: skip
    job_fd = os.memfd_create("job")
    os.write(job_fd, json.dumps(job).encode())
    os.lseek(job_fd, 0, os.SEEK_SET)
    (result, result_write), (status, status_write) = os.pipe(), os.pipe()
    descriptors = (job_fd, result_write, status_write)
    process = subprocess.Popen(
        [sys.executable, "-c", KEEPER, *map(str, descriptors), str(os.getpid() if caller is None else caller)],
        pass_fds=descriptors, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    for descriptor in descriptors:
        os.close(descriptor)
    return Keeper(process, result, status)


def run(source: str, folder: Path, *values: str, **changes: Any) -> Outcome:
    return start(source, folder, *values, **changes).wait()


def attempts(*statements: str) -> str:
    """Returns a program that counts in `through` which of the statements do not raise an OSError."""
    lines = ["through = []"]
    for number, statement in enumerate(statements):
        lines += ["try:", f"    {statement}", f"    through.append({number})", "except OSError:", "    pass"]
    return "\n".join(lines) + "\n"


def test_a_program_has_its_limits_and_no_privileges(tmp_path: Path) -> None:
    names = ("CPU", "AS", "CORE", "FSIZE", "NOFILE", "MEMLOCK")
    outcome = run(
        "import os, resource",
        tmp_path,
        f"[resource.getrlimit(getattr(resource, 'RLIMIT_' + name))[0] for name in {names}]",
        "[line.split()[1] for line in open('/proc/self/status') if line.startswith(('CapEff', 'NoNewPrivs'))]",
        "(os.getcwd(), os.environ['HOME'], os.environ['TMPDIR'], os.umask(0))",
    )
    assert outcome.records["have"] == {} and outcome.records["end"] == ""
    assert outcome.value(0) == [30, 1 << 40, 0, 1 << 26, 64, 0]
    assert outcome.value(1) == ["0000000000000000", "1"]
    assert outcome.value(2) == (str(tmp_path), str(tmp_path), str(tmp_path), 0o077)
    assert outcome.report is not None and outcome.report["code"] == 0 == outcome.code
    assert outcome.report["memory"] > 1 << 20 and outcome.report["cpu_s"] >= 0


@pytest.mark.parametrize(
    ("source", "code"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
        ("import sys; sys.exit(3)", 3),
        ("1 / 0", 1),
    ],
)
def test_the_keeper_reports_how_the_program_ended(tmp_path: Path, source: str, code: int) -> None:
    outcome = run(source, tmp_path)
    assert outcome.report is not None and outcome.report["code"] == code and outcome.code == 0


def test_a_program_without_a_needed_mechanism_does_not_run(tmp_path: Path) -> None:
    outcome = run("open('ran', 'w')", tmp_path, need=["landlock", "seccomp"])
    assert outcome.records == {"failed": "OSError: landlock, seccomp could be had before, but not now"}
    assert not list(tmp_path.iterdir())


def test_a_keeper_whose_caller_has_ended_starts_nothing(tmp_path: Path) -> None:
    outcome = run("open('ran', 'w')", tmp_path, caller=1 << 30)
    assert (outcome.records, outcome.report, outcome.code) == ({}, None, 1) and not list(tmp_path.iterdir())


@pytest.mark.parametrize("mechanisms", [[], ["namespaces"]], ids=["none", "namespaces"])
def test_a_program_ends_with_its_keeper(tmp_path: Path, mechanisms: Sequence[str]) -> None:
    keeper = start("import time; time.sleep(600)", tmp_path, mechanisms=mechanisms)
    assert keeper.read_result().startswith(f"{NONCE} have ".encode())
    keeper.process.kill()
    outcome = keeper.wait()
    assert outcome.records == {} and outcome.code == -signal.SIGKILL


def test_namespaces_hide_files_and_processes(tmp_path: Path) -> None:
    folder, secret = tmp_path / "box", tmp_path / "secret"
    folder.mkdir()
    secret.write_text("secret")
    outcome = run(
        "import os\nopen('new', 'w').write('x')", folder, f"os.path.exists({str(secret)!r})",
        "(os.getcwd(), os.listdir('.'))", "os.getpid()", mechanisms=["namespaces"],
    )  # fmt: skip
    mechanisms = outcome.records["have"]
    assert outcome.report is not None and outcome.report["code"] == 0
    if "mount" in mechanisms:
        assert outcome.value(0) is False and outcome.value(1) == ("/box", ["new"]) and not list(folder.iterdir())
    else:
        assert outcome.value(1) == (str(folder), ["new"]) and list(folder.iterdir())
    assert (outcome.value(2) == 2) == ("pid" in mechanisms), "after the init process of the namespace"
    assert "user" in mechanisms or not mechanisms, "a program without a user namespace has no other one"


def test_landlock_refuses_files_outside_of_the_box(tmp_path: Path) -> None:
    folder, secret = tmp_path / "box", tmp_path / "secret"
    folder.mkdir()
    secret.write_text("secret")
    outside = (f"open({str(secret)!r})", f"open({str(tmp_path / 'new')!r}, 'w')")
    source = attempts(*outside, "open('inside', 'w')", "open('/dev/null', 'w')", "open(__import__('os').__file__)")
    outcome = run(source, folder, "through", mechanisms=["landlock"])
    version = confine.landlock_version()
    assert outcome.records["have"] == ({"landlock": str(version)} if version else {})
    assert outcome.value() == ([2, 3, 4] if version else [0, 1, 2, 3, 4])
    assert (tmp_path / "new").exists() == (not version) and (folder / "inside").exists()


def test_seccomp_refuses_sockets_processes_and_signals_to_others(tmp_path: Path) -> None:
    code = build_seccomp_filter(os.uname().machine, allows_fork=False, files_read_only=False)
    filters = {"False False": code.hex() if code else ""}
    source = "import os, signal, socket\n" + attempts(
        "socket.socket()", f"os.kill({os.getpid()}, 0)", "os.chmod('.', 0o700)", "os.kill(os.getpid(), 0)"
    )
    outcome = run(source, tmp_path, "through", mechanisms=["seccomp"], filters=filters)
    assert outcome.records["have"] == ({"seccomp": "yes"} if code else {})
    assert outcome.value() == ([3] if code else [0, 1, 2, 3])
