"""Tests of a change: which are chosen, in which order, and when none begins any more."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

from tests import changed, warm
from tests.changed import Sources, choose, parse

FILES = {
    "rlhpc/__init__.py": '_HOMES = {"rlhpc.runs.a": ["A"]}\n',
    "rlhpc/runs/__init__.py": "",
    "rlhpc/runs/a.py": "class A: pass\ndef f(): pass\n",
    "rlhpc/runs/b.py": "from rlhpc.runs.a import A\n",
    "tests/__init__.py": "",
    "tests/helper.py": "",
    "tests/unit/runs/test_a.py": "from rlhpc.runs.a import f\n",
    "tests/unit/runs/test_a_pages.py": "from rlhpc import A\n",
    "tests/unit/runs/test_b.py": "from rlhpc.runs.b import A\n",
    "tests/unit/runs/test_c.py": "from tests import helper\n",
    "tests/unit/jobs/test_d.py": "from rlhpc import A\n",
    "tests/unit/jobs/test_e.py": "from rlhpc import config\nPATH = 'configs/small.yaml'\n",
    "tests/integration/test_run.py": "TARGET = 'rlhpc.runs.a:A'\n",
    "tests/slurm/test_job.py": "from rlhpc.runs.a import A\n",
}
IMPORTERS = {"rlhpc.runs.a": ["rlhpc.runs.b"]}


@pytest.fixture
def sources(tmp_path: Path) -> Sources:
    """Returns the test files of a small checkout."""
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return Sources(tmp_path)


def chosen(sources: Sources, *names: str) -> list[tuple[int, str]]:
    """Returns tier and name of the test files that a change of these files chooses."""
    return [(each.tier, each.path.removeprefix("tests/")) for each in choose(names, sources, IMPORTERS)]


def test_a_module_chooses_its_own_tests_then_those_further_away(sources: Sources) -> None:
    assert chosen(sources, "rlhpc/runs/a.py") == [
        (1, "unit/runs/test_a.py"),
        (1, "unit/runs/test_a_pages.py"),
        (2, "unit/jobs/test_d.py"),
        (3, "unit/runs/test_b.py"),
        (4, "unit/runs/test_c.py"),
        (5, "integration/test_run.py"),
    ]


def test_other_files_choose_the_tests_that_name_them(sources: Sources) -> None:
    assert chosen(sources, "tests/helper.py") == [(2, "unit/runs/test_c.py")]
    assert chosen(sources, "configs/small.yaml") == [(2, "unit/jobs/test_e.py")]
    assert chosen(sources, "tests/unit/runs/test_b.py", "docs/index.md") == [(0, "unit/runs/test_b.py")]
    assert chosen(sources, "tests/slurm/test_job.py") == []


def test_the_nearest_tests_of_a_module_without_any_lie_further_up(sources: Sources) -> None:
    assert changed.mirror_folder("rlhpc.runs.deep.x") == "tests/unit/runs/deep"
    assert {Path(each).name for each in sources.nearest("rlhpc.runs.deep.x")} == {
        "test_a.py", "test_a_pages.py", "test_b.py", "test_c.py",
    }  # fmt: skip
    assert sources.nearest("rlhpc.weights.x") == []


def test_modules_are_named_by_imports_and_strings() -> None:
    source = (
        "def f():\n    import rlhpc.jobs.x\n    from rlhpc.jobs import y as z\nT = 'rlhpc.runs.b:B rlhpc'\nimport os\n"
    )
    modules = changed.modules_named_in(source, {})
    assert {"rlhpc.jobs.x", "rlhpc.jobs.y", "rlhpc.runs.b"} <= modules and "os" not in modules


TESTS = """
import pytest
def test_short(): pass
@pytest.mark.long
def test_long(): pass
"""


@pytest.mark.parametrize(
    ("tests_s", "long_s", "names"),
    [(9e3, 9e3, ["b::test_short", "a::test_short", "b::test_long", "a::test_long"]),
     (9e3, -1, ["b::test_short", "a::test_short"]), (-1, -1, [])],
)  # fmt: skip
@pytest.mark.parametrize("processes", ["0", "2"])
def test_no_test_begins_after_its_time(
    tmp_path: Path, tests_s: float, long_s: float, names: list[str], processes: str
) -> None:
    folder = tmp_path / "tests"
    folder.mkdir()
    (folder / "changed.py").write_text(Path(changed.__file__).read_text())
    for name in "ab":
        (tmp_path / f"test_{name}.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    long\n")
    environment = os.environ | {
        changed.ORDER: os.pathsep.join(["test_b.py", "test_a.py"]), "PYTHONPATH": str(tmp_path),
        changed.TESTS_UNTIL: str(time.time() + tests_s), changed.LONG_UNTIL: str(time.time() + long_s),
    }  # fmt: skip
    options = ["-v", "-p", "tests.changed", "-p", "no:cacheprovider", "-n", processes, "--dist", "load"]
    command = [sys.executable, "-m", "pytest", *options, "test_a.py", "test_b.py"]
    done = warm.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120, check=False)
    lines = [line for line in done.stdout.splitlines() if "PASSED" in line]
    found = [line[line.index("test_") + len("test_") :].split()[0].replace(".py", "") for line in lines]
    assert (found if processes == "0" else sorted(found)) == (names if processes == "0" else sorted(names))
    assert (f"Out of time for {4 - len(names)} of the tests" in done.stdout) == (len(names) < 4)


def test_the_number_of_processes_is_no_changed_file() -> None:
    """As `make test-changed` calls it."""
    options, arguments = parse(["--base", "main", "-n", "2", "-x"])
    assert (options.files, options.base, arguments) == ([], "main", ["-n", "2", "-x"])
    options, arguments = parse(["rlhpc/a.py", "rlhpc/b.py"])
    assert (options.files, arguments) == (["rlhpc/a.py", "rlhpc/b.py"], [])
