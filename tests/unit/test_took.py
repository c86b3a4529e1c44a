"""What took how long is counted where the tests run, and told where the reports come together."""

from __future__ import annotations

import sys
from pathlib import Path

from tests import warm
from tests.took import SLOWEST, Took, summary

ROOT = Path(__file__).resolve().parents[2]
BUSY = """
import subprocess, sys, time
WORK = "import time\\nwhile time.process_time() < 0.3: pass"
def test_that_works(): subprocess.run([sys.executable, "-c", WORK], check=True)
def test_that_waits(): time.sleep(0.3)
"""


def test_two_processes_write_one_table(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / f"test_{name}.py").write_text(BUSY)
    (tmp_path / "conftest.py").write_text("pytest_plugins = ['tests.took']\n")
    words = ["-n", "2", "-p", "no:cacheprovider", "--rootdir", str(tmp_path), "--took", str(tmp_path / "took.txt")]
    command = [sys.executable, "-m", "pytest", "-q", *words, str(tmp_path)]
    done = warm.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    files, _, tests = (tmp_path / "took.txt").read_text().partition("The slowest:")
    rows = {line.split()[-1]: line.split()[:3] for line in files.splitlines()[1:] if line}
    assert {name: row[2] for name, row in rows.items()} == {"them": "4", "test_one.py": "2", "test_two.py": "2"}
    assert float(rows["test_one.py"][0]) >= 0.6 and float(rows["them"][0]) >= 1.2
    assert 0.3 <= float(rows["test_one.py"][1]) < float(rows["them"][1])
    found = {line.split()[-1]: float(line.split()[1]) for line in tests.splitlines()[2:]}
    assert len(found) == 4
    for name in ("one", "two"):
        assert found[f"test_{name}.py::test_that_works"] >= 0.3 > found[f"test_{name}.py::test_that_waits"]


def test_the_slowest_come_first_and_are_so_many() -> None:
    said = summary({f"test_a.py::test_{n}": Took(float(n), 0.0, 1) for n in range(SLOWEST + 10)})
    names = [line.split()[-1] for line in said.partition("The slowest:")[2].splitlines()[2:]]
    assert names == [f"test_a.py::test_{n}" for n in range(SLOWEST + 9, 9, -1)]
