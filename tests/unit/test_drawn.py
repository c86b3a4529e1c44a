"""The parts of what is too much for every run."""

from __future__ import annotations

import os
import re
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests import warm
from tests.drawn import LONG, PART, SEED, commit, drawn, omitted_line, pytest_report_header

ROOT = Path(__file__).resolve().parents[2]
NAMES = [f"name {n}" for n in range(47)]


@pytest.mark.parametrize("n", [1, 2, 20, 47, 100])
def test_the_parts_together_are_everything(monkeypatch: pytest.MonkeyPatch, n: int) -> None:
    monkeypatch.setenv(SEED, "some commit")
    found: Counter[str] = Counter()
    for k in range(1, n + 1):
        monkeypatch.setenv(PART, f"{k}/{n}")
        found.update(drawn("names", NAMES, least=0))
    assert found == Counter(NAMES)


def test_a_part_is_the_same_again_and_another_of_another_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PART, "3/10")
    parts = []
    for seed in ("a", "a", "b"):
        monkeypatch.setenv(SEED, seed)
        parts.append(drawn("names", NAMES))
    assert parts[0] == parts[1] != parts[2] and len(parts[0]) == 5
    assert drawn("others", NAMES) != parts[2]
    assert "make test-all SEED=b PART=3/10" in pytest_report_header()
    assert len(drawn("names", NAMES, least=9)) == 9 and {*drawn("names", NAMES)} < {*drawn("names", NAMES, least=9)}
    assert "name 1" in drawn("names", NAMES[2:], always=["name 1"])


def test_without_a_seed_the_commit_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SEED, raising=False)
    monkeypatch.delenv(PART, raising=False)
    monkeypatch.delenv(LONG, raising=False)
    assert f"part 1/20 of what there are hundreds of, drawn by {commit()}:" in pytest_report_header()
    assert pytest_report_header().endswith("all long tests")


FILES = {
    "test_alone.py": "@pytest.mark.long\n@pytest.mark.parametrize('n', range(8))\ndef test_one(n): pass\n"
    "def test_short(): pass\n",
    **{
        f"test_together_{n}.py": "pytestmark = pytest.mark.long(together=True)\ndef test_a(): pass\ndef test_b(): pass\n"
        for n in range(4)
    },
}


def ran(folder: Path, *words: str, long: str = "", omitted: int = 0) -> set[str]:
    """Returns the tests of `FILES` that a run takes; its last line says how many long ones the draw omitted, if any."""
    environment = {name: value for name, value in os.environ.items() if name not in (PART, LONG)}
    environment |= {SEED: "some commit", **({LONG: long} if long else {})}
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", *words]
    done = warm.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    last = done.stdout.strip().splitlines()[-1]
    line = f"{omitted} long tests were not run ({omitted} of .); make test LONG=1/1 "
    assert last.startswith(line) if omitted else "not run" not in done.stdout
    return set(re.findall(r"(test_\w+\.py::\S+)", done.stdout))


def test_long_tests_are_drawn_each_or_by_files_and_who_names_some_gets_them(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(
        f"import sys; sys.path.append({str(ROOT)!r})\npytest_plugins = ['tests.drawn']\n"
    )
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    long\n")
    for name, text in FILES.items():
        (tmp_path / name).write_text(f"import pytest\n{text}")
    every = ran(tmp_path)
    assert len(every) == 17
    parts = [ran(tmp_path, "-n", "2", long="1/2", omitted=8), ran(tmp_path, long="2/2", omitted=8)]
    assert parts[0] | parts[1] == every and parts[0] & parts[1] == {"test_alone.py::test_short"}
    for part in parts:
        assert sum("test_one" in name for name in part) == 4 and sum("together" in name for name in part) == 4
        assert {name.replace("test_a", "test_b") for name in part if "::test_a" in name} <= part
    assert len(ran(tmp_path, "test_alone.py", "-n", "2", long="1/2")) == 9
    assert len(ran(tmp_path, "-k", "test_a", long="1/2")) == 4 + 9


@pytest.mark.parametrize("text", ["0/20", "21/20", "1", "1/", "a/b", "1/2/3", ""])
def test_what_is_no_part_is_refused(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv(PART, text)
    with pytest.raises(pytest.UsageError, match="must be k/n"):
        drawn("names", NAMES)


def test_the_last_line_counts_what_was_omitted_by_folder() -> None:
    names = ["tests/integration/runs/test_a.py::test_1", "tests/integration/runs/test_b.py::test_1[x::y]"]
    line = omitted_line([*names, "tests/docs/test_docs.py::test_2"])
    assert line.startswith(
        "3 long tests were not run (1 of tests/docs, 2 of tests/integration/runs); make test LONG=1/1 "
    )
