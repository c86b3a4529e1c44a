"""Mirror tests: each large module has one, but for those of a list that only shrinks; and the share that each executes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.structure import mirror

#: Modules that the list may have. Lower it with the list.
LIMIT = 1


def test_each_large_module_has_its_tests_where_one_looks() -> None:
    missing, listed = mirror.unmirrored(mirror.ROOT), mirror.listed()
    expected = {path: str(mirror.mirror_of(Path(path))) for path in sorted(missing - listed)}
    assert not expected, "these modules lack these tests"
    assert not listed - missing, "these have tests now or are gone: python -m tests.structure.mirror --write"
    assert len(listed) <= LIMIT


def test_the_mirror_of_a_module_has_its_path() -> None:
    assert mirror.mirror_of(Path("rlhpc/a/b.py")) == Path("tests/unit/a/test_b.py")
    assert mirror.mirror_of(Path("rlhpc/reference.py")) == Path("tests/unit/test_reference.py")


def test_only_large_modules_need_one(tmp_path: Path) -> None:
    for name, statements in {"small": 59, "large": 60, "tested": 60, "__init__": 60}.items():
        (tmp_path / "rlhpc/runs").mkdir(parents=True, exist_ok=True)
        (tmp_path / f"rlhpc/runs/{name}.py").write_text('"""Doc."""\nimport os\n' + "x = 1\n" * statements)
    (tmp_path / "tests/unit/runs").mkdir(parents=True)
    (tmp_path / "tests/unit/runs/test_tested.py").touch()
    assert mirror.unmirrored(tmp_path) == {"rlhpc/runs/large.py"}


def test_the_list_never_grows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mirror, "UNMIRRORED", tmp_path / "list.txt")
    mirror.write(["rlhpc/b.py", "rlhpc/a.py"], limit=2)
    assert mirror.listed() == {"rlhpc/a.py", "rlhpc/b.py"}
    with pytest.raises(SystemExit, match="2 modules have no mirror test, 1 may have none"):
        mirror.write(["rlhpc/b.py", "rlhpc/a.py"], limit=1)
    assert mirror.listed() == {"rlhpc/a.py", "rlhpc/b.py"}


MODULE = """
def here():
    return 1

def in_a_process():
    return 2

def nowhere():
    a = 3
    return a
"""
TEST = """
import subprocess, sys
from rlhpc.a import here

def test_both():
    assert here() == 1
    program = "import sys; sys.path.insert(0, '.'); from rlhpc.a import in_a_process; sys.exit(in_a_process())"
    assert subprocess.run([sys.executable, "-c", program]).returncode == CODE
"""
MEASURE = """
import json, sys
from pathlib import Path
from tests.structure import mirror
try:
    print(json.dumps(mirror.executed_share(Path("rlhpc/a.py"), Path(sys.argv[1]), limit_s=float(sys.argv[2]))))
except mirror.NotMeasured as error:
    print(json.dumps(str(error)))
"""


@pytest.mark.parametrize(("code", "limit_s", "said"), [(2, 60, 5 / 7), (3, 60, "fails"), (2, 0, "takes more than 0 s")])
def test_the_share_has_the_lines_of_processes_that_the_test_starts(
    tmp_path: Path, code: int, limit_s: float, said: float | str
) -> None:
    for folder in ("rlhpc", "tests/unit"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "pyproject.toml").write_text('[tool.pytest.ini_options]\npythonpath = ["."]\n')
    (tmp_path / "rlhpc/__init__.py").touch()
    (tmp_path / "rlhpc/a.py").write_text(MODULE)
    (tmp_path / "tests/unit/test_a.py").write_text(TEST.replace("CODE", str(code)))
    command = [sys.executable, "-c", MEASURE, str(tmp_path), str(limit_s)]
    done = subprocess.run(command, cwd=mirror.ROOT, capture_output=True, text=True, timeout=120)
    share = json.loads(done.stdout)
    assert said in share if isinstance(said, str) else share == pytest.approx(said), done.stderr


def test_a_measurement_goes_on_where_it_ended(tmp_path: Path) -> None:
    results = tmp_path / "results.tsv"
    assert mirror.read_shares(None) == mirror.read_shares(results) == {}
    results.write_text("61.5%\trlhpc/a.py\nnot measured\trlhpc/b.py\n")
    assert mirror.read_shares(results) == {"rlhpc/a.py": "61.5%", "rlhpc/b.py": "not measured"}
