"""Tests that need a system program are skipped where it is missing, by its name, and fail in CI."""

from __future__ import annotations

import ast
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import warm
from tests.extras import PROGRAMS_REQUIRED

ROOT = Path(__file__).resolve().parents[2]
#: Programs by their Debian packages, where these have other names.
PACKAGES = {
    "sshd": "openssh-server", "ssh": "openssh-client", "ssh-keygen": "openssh-client", "bwrap": "bubblewrap", "c++": "g++",
    "cc": "g++", "tc": "iproute2",
}  # fmt: skip
TESTS = """
import pytest
from tests.extras import need_programs, needs_programs

@pytest.fixture
def daemon(): need_programs("sh", "rlhpc-no-such-daemon")

def test_by_a_fixture(daemon): pass

@needs_programs("rlhpc-no-such-compiler")
def test_by_a_mark(): raise AssertionError("started without its program")

@needs_programs("sh")
def test_with_its_program(): need_programs("sh")
"""


@pytest.mark.parametrize("required", [False, True])
def test_a_missing_program_is_named(required: bool, tmp_path: Path) -> None:
    (tmp_path / "test_marked.py").write_text(TESTS)
    words = ["-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", "--rootdir", str(tmp_path), str(tmp_path)]
    environment = {name: value for name, value in os.environ.items() if name != PROGRAMS_REQUIRED}
    environment |= {"PYTHONPATH": str(ROOT)} | ({PROGRAMS_REQUIRED: "1"} if required else {})
    done = warm.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True, timeout=120, env=environment)
    if required:
        assert done.returncode == 1 and "1 passed, 1 failed, 1 error" in _ordered(done.stdout), done.stdout
        assert "needs rlhpc-no-such-daemon: sudo tests/install.sh installs" in done.stdout
    else:
        assert done.returncode == 0 and "1 passed, 2 skipped" in done.stdout, done.stdout + done.stderr
        for name in ("daemon", "compiler"):
            assert f"needs rlhpc-no-such-{name}: sudo tests/install.sh installs" in done.stdout


def test_what_tests_ask_for_is_installed_by_the_script() -> None:
    files = [path for path in (ROOT / "tests").rglob("*.py") if path != Path(__file__)]
    calls = [call for path in files for call in re.findall(r"\bneeds?_programs\(([^)]*)\)", path.read_text())]
    names = {name for call in calls for name in re.findall(r'"([^"]+)"', call)}
    scripts = (ROOT / "tests/install.sh").read_text() + (ROOT / "tests/slurm/install.sh").read_text()
    assert {"sshd", "bwrap", "c++", "chromium"} <= names
    assert not [name for name in names if PACKAGES.get(name, name) not in scripts]


def _ordered(text: str) -> str:
    """The counts of pytest's last line, in one order."""
    counts = dict(
        reversed(count.split()) for count in re.findall(r"\d+ (?:passed|failed|errors?)", text.splitlines()[-1])
    )
    return ", ".join(f"{counts[name]} {name}" for name in ("passed", "failed", "error") if name in counts)


# -- programs that tests start ---------------------------------------------------------------------------------------

#: What Debian's essential packages and `make setup` bring.
EVERYWHERE = {"bash", "sh", "git", "make", "mount", "umount", "unshare", "true", "sleep", "env", "cp", "chmod", "rlhpc"}
#: Functions that start a program, whose first argument is the command as a list, or the program itself.
STARTS = {"run", "Popen", "check_output", "check_call", "call", "create_subprocess_exec"}
NAMES = {"need_programs", "needs_programs", "find_program"}


def _function_name(call: ast.Call) -> str:
    function = call.func
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def started_programs(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yields (line, name) of the programs that calls start by a name that stands in the call or in a list before it."""
    lists = {
        target.id: node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.List)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or _function_name(node) not in STARTS or not node.args:
            continue
        command = node.args[0]
        if isinstance(command, ast.Name):
            command = lists.get(command.id, command)
        if isinstance(command, ast.List) and command.elts:
            command = command.elts[0]
        elif _function_name(node) != "create_subprocess_exec":
            continue
        if isinstance(command, ast.Constant) and isinstance(command.value, str) and "/" not in command.value:
            yield node.lineno, command.value


def named_programs(tree: ast.AST) -> set[str]:
    """Returns the programs that a module names by `need_programs`, `needs_programs` or `find_program`."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and _function_name(node) in NAMES]
    return {arg.value for call in calls for arg in call.args if isinstance(arg, ast.Constant)}


def unnamed_programs(files: list[Path]) -> list[str]:
    """Returns "file:line program" of the programs that a file starts and neither every machine has nor the file names."""
    unnamed = []
    for file in files:
        tree = ast.parse(file.read_text())
        known = EVERYWHERE | named_programs(tree)
        unnamed += [f"{file.name}:{line} {program}" for line, program in started_programs(tree) if program not in known]
    return unnamed


def test_each_program_that_a_test_starts_is_named() -> None:
    files = [file for file in sorted((ROOT / "tests").rglob("*.py")) if ROOT / "tests/slurm" not in file.parents]
    assert sum(1 for file in files for _ in started_programs(ast.parse(file.read_text()))) > 30
    assert not unnamed_programs(files)


def test_tests_on_slurm_name_the_commands_of_their_variant() -> None:
    assert "need_programs(*commands_of(variant))" in (ROOT / "tests/slurm/conftest.py").read_text()


def test_a_program_without_a_name_is_seen(tmp_path: Path) -> None:
    file = tmp_path / "test_x.py"
    file.write_text(
        'command = ["sshd", "-D"]\nsubprocess.Popen(command)\nwarm.run(["srun", "x"])\nsubprocess.run(["git"])\n'
    )
    assert unnamed_programs([file]) == ["test_x.py:2 sshd", "test_x.py:3 srun"]
    file.write_text('need_programs("sshd", "srun")\n' + file.read_text())
    assert not unnamed_programs([file])
