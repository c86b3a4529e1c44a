"""Trainers, their memory, weights and messages on an accelerator whose memory nothing but its own kernels can touch."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler")
def test_what_touches_no_memory_of_others_runs_there() -> None:
    """A copy that was forgotten ends the process (`tests.card`)."""
    words = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-n",
        "0",
        "-p",
        "no:cacheprovider",
        str(ROOT / "tests/card/on_card.py"),
    ]
    done = subprocess.run(
        [sys.executable, "-m", "tests.card", *words], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0 and "6 passed" in done.stdout, done.stdout + done.stderr
