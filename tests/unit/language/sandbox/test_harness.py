"""Harness of a program: the records that it writes for the program's end and for each check."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from rlhpc.language.rewards.expected_values import decode
from rlhpc.language.sandbox import harness

PROGRAM = """
import json, sys
from rlhpc.language.sandbox import harness
harness.run(json.loads(sys.argv[1]), int(sys.argv[2]))
"""


def run(source: str, checks: list[dict[str, str]], **job: Any) -> tuple[int, list[tuple[str, Any]]]:
    """Runs a job in a process of its own, since the harness ends its process; returns the exit code and the records."""
    settings = {"nonce": "n", "packages": [], "main": False, "setup": "", "source": source, "checks": checks, **job}
    read_end, write_end = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, json.dumps(settings), str(write_end)],
        pass_fds=[write_end], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    os.close(write_end)
    with open(read_end) as file:
        lines = file.read().splitlines()
    records = []
    for line in lines:
        assert line.startswith("n ")
        label, _, payload = line[2:].partition(" ")
        if label != "end":
            number, _, payload = payload.partition(" ")
            label = f"{label} {number}"
        records.append((label, json.loads(payload)))
    return process.wait(timeout=60), records


def test_checks_run_in_the_program_s_namespace() -> None:
    code, records = run(
        "def f(x):\n    return [x, (x, 0.5)]",
        [
            {"kind": "value", "source": "f(2)"}, {"kind": "do", "source": "y = f(3)"}, {"kind": "value", "source": "y[0] + z"},
            {"kind": "value", "source": "nosuch"}, {"kind": "raises", "source": "f()"}, {"kind": "value", "source": "f"},
        ],
        setup="z = 4",
    )  # fmt: skip
    assert code == 0 and records[0] == ("end", "")
    assert (records[1][0], decode(records[1][1])) == ("value 0", [2, (2, 0.5)])
    assert records[2] == ("passed 1", None) and decode(records[3][1]) == 7
    assert records[4] == ("error 3", "NameError: name 'nosuch' is not defined")
    text, classes = decode(records[5][1])
    assert text.startswith("TypeError: ") and classes[:2] == ["TypeError", "Exception"]
    assert records[6][0] == "error 5" and "cannot leave the sandbox" in records[6][1]


@pytest.mark.parametrize(
    ("source", "exit_code", "failure"),
    [
        ("raise ValueError('no')", 1, "ValueError: no"),
        ("import sys; sys.exit(3)", 3, "SystemExit: 3"),
        ("import sys; sys.exit('no data')", 1, "SystemExit: no data"),
        ("def f(:", 1, "SyntaxError: "),
        ("assert __name__ == '__main__'", 0, ""),
        ("import atexit; atexit.register(lambda: 1 / 0)", 0, ""),
    ],
)
def test_the_end_of_a_program_is_told(source: str, exit_code: int, failure: str) -> None:
    code, records = run(source, [{"kind": "value", "source": "1"}], main=True)
    assert code == exit_code and records[0][0] == "end" and records[0][1].startswith(failure)
    assert len(records) == (1 if failure else 2), "no check runs after a failure"


def test_values_of_other_types_are_refused() -> None:
    assert harness.encode(True) is True and harness.encode("a") == "a"
    nested: Any = []
    for _ in range(50):
        nested = [nested]
    for value in (object(), nested, {1: object()}):
        with pytest.raises(TypeError):
            harness.encode(value)
