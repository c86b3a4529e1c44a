"""A crashed worker or a test that hangs ends the run, and the run names the test."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.extras import ROOT, make_plan

PASSES = "def test_one(): pass\ndef test_two(): pass\ndef test_three(): pass\n"
#: Names of tests that do not end by themselves, and what they do.
ENDLESS = {
    "aborts": "os.kill(os.getpid(), signal.SIGABRT)",
    "aborts_with_a_child": (
        "if not (pid := os.fork()):\n        time.sleep(1000)\n        os._exit(0)\n"
        "    pathlib.Path(__file__).with_name('pid').write_text(str(pid))\n    os.abort()"
    ),
    "sleeps": "time.sleep(1000)",
    "is_blocked_in_c": (
        "signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())\n    ctypes.PyDLL(None).pause()"
    ),
    "hangs_in_its_teardown": "request.addfinalizer(lambda: time.sleep(1000))\n    assert not 'this'",
}
LAST = "def test_last(): pass\n"


def written(folder: Path) -> None:
    """Files of tests: each endless one is in a file of its own with tests that pass, among files whose tests all pass."""
    for number, (name, body) in enumerate(ENDLESS.items()):
        for letter in "ab":
            (folder / f"test_{number}_{letter}.py").write_text(PASSES)
        imports = "import ctypes, os, pathlib, pytest, signal, time\n"
        test = f"@pytest.mark.timeout(2)\ndef test_{name}(request):\n    {body}\n"
        (folder / f"test_{number}_c.py").write_text(f"{imports}def test_first(): pass\n{test}{LAST}")
    (folder / "test_z.py").write_text(LAST)


def commands(target: str) -> list[list[str]]:
    """The lines with pytest that a target of the Makefile runs, split into words, with two workers."""
    lines = map(shlex.split, make_plan(target, "WORKERS=2"))
    return [words[words.index("pytest") + 1 :] for words in lines if "pytest" in words]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("target", ["test", pytest.param("test-slurm", marks=pytest.mark.long)])
def test_a_run_ends_and_names_the_tests_that_do_not(target: str, tmp_path: Path) -> None:
    written(tmp_path)
    [words] = commands(target)
    words = [word for word in words if word not in ("-m", "slurm", "tests/slurm")]
    where = [
        "-c",
        str(ROOT / "pyproject.toml"),
        "--rootdir",
        str(ROOT),
        "-p",
        "tests.conftest",
        "-p",
        "no:cacheprovider",
    ]
    command = [
        sys.executable,
        "-m",
        "pytest",
        *words,
        *where,
        f"--took={tmp_path / 'took'}",
        "-o",
        f"testpaths={tmp_path}",
    ]
    output = tmp_path / "output"
    with output.open("w") as file:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
        run = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=file, stderr=file, start_new_session=True)
    try:
        status = run.wait(500)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(run.pid, signal.SIGKILL)
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)
    text = output.read_text()
    assert status == 1, text
    reports = [line for line in text.splitlines() if line.startswith("FAILED")]
    for number, name in enumerate(ENDLESS):
        assert any(f"test_{number}_c.py::test_{name} " in line for line in reports), text
    passed = len(ENDLESS) * 2 * 3 + len(ENDLESS) * 2 + 1
    assert f" {passed} passed" in text, text
