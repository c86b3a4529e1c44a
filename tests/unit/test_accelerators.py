"""What only an accelerator can show is named, and nothing else of what is marked `gpu` is skipped."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

from tests import warm
from tests.accelerators import ASKED, ONLY_ON_A_CARD, ONLY_ON_THE_CPU, TWO_CARDS

ROOT = Path(__file__).resolve().parents[2]
NAMED = next(iter(ONLY_ON_A_CARD))
TESTS = f"""
import pytest
pytestmark = pytest.mark.gpu
def test_runs(): pass
def test_skips_itself(): pytest.skip("not today")
@pytest.mark.parametrize("n", [1, 2])
def {NAMED}(n): raise AssertionError("this is not a card")
"""


def test_a_skip_without_a_name_fails(tmp_path: Path) -> None:
    (tmp_path / "test_marked.py").write_text(TESTS)
    (tmp_path / "conftest.py").write_text("pytest_plugins = ['tests.accelerators']\n")
    words = ["-m", "gpu", "-rA", "-p", "no:cacheprovider", "--rootdir", str(tmp_path), str(tmp_path)]
    done = warm.run(
        [sys.executable, "-m", "pytest", "-q", *words], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False,
        env={**os.environ, "RLHPC_TEST_DEVICE": "cpu", "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 1, done.stdout + done.stderr
    assert "1 failed, 1 passed, 2 skipped" in done.stdout
    assert "test_skips_itself was skipped, but ONLY_ON_A_CARD in tests/accelerators.py does not name it" in done.stdout
    assert ONLY_ON_A_CARD[NAMED] in done.stdout


def test_every_name_is_that_of_a_test() -> None:
    files = {str(path.relative_to(ROOT / "tests")): path.read_text() for path in (ROOT / "tests").rglob("test_*.py")}
    marked = "\n".join(text for text in files.values() if "pytestmark = pytest.mark.gpu" in text)
    found = set(re.findall(r"^def (test_\w+)", marked, re.MULTILINE))
    assert {*ONLY_ON_A_CARD, *TWO_CARDS} <= found
    assert set(ASKED) <= files.keys()
    asked = set(re.findall(r"^def (test_\w+)", "\n".join(files[name] for name in ASKED), re.MULTILINE))
    assert set(ONLY_ON_THE_CPU) <= asked
