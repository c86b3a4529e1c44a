"""A seeded part of the mistakes of `tests/attack/bad_inputs.py`; and that it sees what is wrong."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests import warm
from tests.attack.bad_inputs import ROOT, Case, Verdict, changes, complaints, snapshot
from tests.drawn import part, seed
from tests.extras import need_extra


@pytest.mark.drawn
@pytest.mark.timeout(1200)  # all of them
def test_a_part_of_all_mistakes() -> None:
    """In a process of its own: it adopts the orphans of its cases, and would reap the children of other tests."""
    need_extra("llm")  # many are in configurations of language models
    env = {name: value for name, value in os.environ.items() if not name.startswith("RLHPC_")}
    command = [
        sys.executable,
        "-m",
        "tests.attack.bad_inputs",
        "--seed",
        seed(),
        "--part",
        "{}/{}".format(*part()),
        "--cheap",
    ]
    kinds = ("misspelt key", "wrong type", "number", "placement", "YAML", "override", "command", "argument", "site")
    command += [word for kind in kinds for word in ("--class", kind)]
    done = warm.run(command, capture_output=True, text=True, timeout=1100, cwd=ROOT, env=env, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    cases, right, wrong = map(int, done.stdout.splitlines()[-1].split()[1:])
    assert cases >= 500 / part()[1] and right == cases and wrong == 0


@pytest.mark.parametrize(
    ("code", "err", "complaint"),
    [
        (2, "rlhpc: error: seed is 5\n", ""),
        (1, "rlhpc: error: seed is 5\n", "exit code 1, not 2"),
        (0, "", "exit code 0, not 2"),
        (None, "rlhpc: error: seed is 5\n", "still there"),
        (2, "", "0 messages"),
        (2, "rlhpc: error: seed is 5\nrlhpc: error: seed\n", "2 messages"),
        (2, "rlhpc: error: seed is 5\nTraceback (most recent call last):\n", "a traceback"),
        (2, "rlhpc: error: seed is 5 (a fault of rlhpc itself)\n", "a fault of rlhpc"),
        (2, "a warning\nrlhpc: error: seed is 5\n", "something before"),
        (2, "rlhpc: error: it is 5\n", "does not say 'seed'"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_seen(code: int | None, err: str, complaint: str, tmp_path: Path) -> None:
    found = complaints(Verdict(Case("k", "n", (), ("seed",)), code, "", err, 0.1, []), tmp_path)
    assert (complaint in "; ".join(found)) if complaint else not found


def test_what_is_left_is_seen(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("1")
    before = snapshot(tmp_path)
    assert not changes(before, snapshot(tmp_path))
    (tmp_path / "a").write_text("2")
    (tmp_path / "runs").mkdir()
    assert changes(before, snapshot(tmp_path)) == ["a", "runs"]
