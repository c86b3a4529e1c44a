"""Trainers, their memory, weights and messages on an accelerator whose memory nothing but its own kernels can touch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.extras import need_extra, needs_programs

ROOT = Path(__file__).resolve().parents[2]

pytestmark = needs_programs("c++")


def on_card(*words: str) -> str:
    """What pytest says of tests there. A copy that was forgotten ends the process (`tests.card`)."""
    pytest_there = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", *words]
    done = subprocess.run(
        [sys.executable, "-m", "tests.card", *pytest_there], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.long
def test_what_touches_no_memory_of_others_runs_there() -> None:
    need_extra("llm", "deepspeed")
    assert "8 passed" in on_card("tests/card/on_card.py")


@pytest.mark.long
def test_a_whole_run_computes_there() -> None:
    """GRPO, its engine and trainer in turns in bfloat16, saved and resumed."""
    need_extra("llm")
    assert "1 passed" in on_card("-m", "gpu", "tests/integration/language/test_turns_accelerator.py", "-k", "local")


def test_commands_that_use_a_trained_policy_compute_there() -> None:
    assert "3 passed" in on_card("tests/card/on_card_evaluation.py")


def test_updates_do_not_wait_for_the_accelerator() -> None:
    need_extra("llm")
    assert "3 passed" in on_card("tests/card/on_card_training.py")


def test_rollouts_of_tensors_stay_on_the_accelerator() -> None:
    assert "12 passed" in on_card("tests/card/on_card_rollout.py")
