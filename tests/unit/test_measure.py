"""Structural figures, on small sources."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import Counter
from pathlib import Path

from tests.structure import measure, steps
from tests.structure.measure import Module


def module(source: str, path: str = "rlhpc/runs/a.py") -> Module:
    """Returns a module of a source text."""
    return Module(Path(path), source)


def test_statements_are_counted_without_imports_and_docstrings() -> None:
    assert measure.count_statements(ast.parse('"""Doc."""\nimport os\nfrom a import b\nx = 1\n')) == 1
    assert measure.count_statements(ast.parse("a, b, c = d\n")) == 3
    assert measure.count_statements(ast.parse("a = b = c\n")) == 1
    assert measure.count_statements(ast.parse("def f():\n    '''Doc.'''\n    if a:\n        return 1\n")) == 3


def test_lines_of_code_are_counted_without_comments_and_docstrings() -> None:
    source = '"""Doc\n\nof two."""\n\n# note\nx = 1  # note\ny = """a\nb"""\n\nz = [\n    1,\n\n    2,\n]\n'
    assert measure.count_lines_of_code(module(source)) == 7


def test_functions_are_measured_in_statements() -> None:
    sizes = measure.functions_of([module("def f():\n    a, b = c\n    return a\nclass A:\n    def g(self): pass\n")])
    assert sizes == [(3, "rlhpc/runs/a.py:1 f"), (1, "rlhpc/runs/a.py:5 g")]


def test_public_names_are_those_that_a_module_defines() -> None:
    source = (
        "import os\nfrom a import b\n__all__ = ['b']\n_c = 1\nd, e = 1, 2\nf: int = 1\nclass G: pass\ndef h(): pass\n"
    )
    assert measure.public_names(ast.parse(source)) == {"d", "e", "f", "G", "h"}


def test_stores_into_parts_of_objects() -> None:
    places = measure.stores_into_parts([module("a.b = 1\na.b.c = 1\na.b.c += 1\nd = a.b.c\na[0].b = 1\n")])
    assert places == ["rlhpc/runs/a.py:2 a.b.c", "rlhpc/runs/a.py:3 a.b.c"]


def test_places_that_describe_keys() -> None:
    modules = [
        module(
            "@dataclass\nclass RunnerConfig:\n    max_steps: int = 1\n    name: str = ''\n"
            "@dataclass(frozen=True)\nclass RunConfig:\n    runner: RunnerConfig\n    groups: list[int]\n"
        ),
        module(
            "RANGES: dict = {'runner.max_steps': 1, 'groups[].name': 2, **{f'runner.{a}': 1 for a in b}}\n"
            "FREE = frozenset(('runner.', 'runner.max_steps'))\n"
            "OTHER = ('a.b', 'runner')\nKEY = 'runner.name'\ndef f():\n    x = fail('runner.max_steps')\n",
            "rlhpc/config/ranges.py",
        ),
    ]
    tables = measure.tables_of_keys(modules)
    assert tables == {
        "rlhpc/config/ranges.py:RANGES": Counter({"runner.max_steps": 1, "groups.name": 1, "runner": 1}),
        "rlhpc/config/ranges.py:FREE": Counter({"runner": 1, "runner.max_steps": 1}),
    }
    files = measure.files_naming_keys([*modules, module("x = 'runner.name'")])
    assert files["runner.name"] == {"rlhpc/config/ranges.py", "rlhpc/runs/a.py"}
    assert measure.describe_keys(tables, files) == {
        "tables": 2, "places": 5, "keys": 3, "max_places": 2, "max_places_key": "runner", "max_files": 2,
        "max_files_key": "runner.name",
    }  # fmt: skip
    assert measure.describe_keys({}, {})["max_places"] == 0


def test_modules_without_a_test_of_their_name(tmp_path: Path) -> None:
    for name in ("unit/runs/test_a.py", "integration/test_b.py"):
        (tmp_path / "tests" / name).parent.mkdir(parents=True)
        (tmp_path / "tests" / name).touch()
    modules = [module("", f"rlhpc/runs/{name}.py") for name in ("__init__", "a", "b", "c")]
    assert measure.modules_without_test(tmp_path, modules) == (
        ["rlhpc/runs/c.py"],
        ["rlhpc/runs/b.py", "rlhpc/runs/c.py"],
    )


def test_circles_and_upward_arrows() -> None:
    assert measure.circles_of({"a": ["b"], "b": ["c"], "c": []}) == []
    arrows = {"a": ["b"], "b": ["c"], "c": ["a", "d"], "d": ["e"], "e": ["d"]}
    assert measure.circles_of(arrows) == [["a", "b", "c"], ["d", "e"]]
    assert measure.fewest_upward(arrows) == 2
    everyone = {a: [b for b in "abcd" if b != a] for a in "abcd"}
    assert measure.fewest_upward(everyone) == 6
    ring = {str(number): [str((number + 1) % 20)] for number in range(20)}  # too long for the exact search
    assert measure.fewest_upward(ring) == 1


def test_arrows_are_those_between_the_children_of_a_package() -> None:
    imports = {"p.a.x": ["p.b.y", "p.a.z", "q"], "p.a.z": [], "p.b.y": ["p.a"], "p.a": [], "p": ["p.a"]}
    assert measure.arrows_inside("p", imports) == {"p.a": {"p.b"}, "p.b": {"p.a"}}
    assert measure.arrows_inside("p.b", imports) == {}


def test_small_modules_with_one_importer() -> None:
    modules = [module("x = 1\n" * 59), module("x = 1\n" * 60, "rlhpc/runs/b.py"), module("", "rlhpc/runs/c.py")]
    imports = {"rlhpc.x": ["rlhpc.runs.a", "rlhpc.runs.b", "rlhpc.runs.c"], "rlhpc.y": ["rlhpc.runs.c"]}
    assert measure.small_modules(modules, imports) == ["rlhpc/runs/a.py (59 lines)"]


PROGRAM = """
import os, sys, threading, time
sys.path.insert(0, sys.argv[1])
from rlhpc import inside
inside.called()
worker = threading.Thread(target=inside.in_thread)
worker.start()
worker.join()
if os.fork() == 0:
    inside.in_child()
    os._exit(0)
os.wait()
"""


def test_calls_are_recorded_in_all_threads_and_processes(tmp_path: Path) -> None:
    package, records = tmp_path / "rlhpc", tmp_path / "calls"
    for folder in (package, records):
        folder.mkdir()
    (package / "__init__.py").touch()
    names = ("called", "in_thread", "in_child", "never_called")
    (package / "inside.py").write_text("class A:\n    pass\n" + "".join(f"def {name}(): pass\n" for name in names))
    (package / "only_imported.py").write_text("x = 1\n")
    command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    subprocess.run(command, env=steps.recording(records, package), check=True, timeout=60)
    calls = steps.read_calls(records)
    assert {(call.path, call.function) for call in calls} == {("rlhpc/inside.py", name) for name in names[:3]}
    assert len(list(records.iterdir())) == 2
    [first] = [call.time_ns for call in calls if call.function == "called"]
    [last] = [call.time_ns for call in calls if call.function == "in_child"]
    step = steps.files_of_step(calls, first, last)  # after the first, up to the last
    assert step.functions == {"rlhpc/inside.py": {"in_thread", "in_child"}}


def test_files_of_a_step_are_counted_by_package() -> None:
    step = steps.StepFiles({"rlhpc/runs/a.py": {"f"}, "rlhpc/runs/b.py": {"f", "g"}, "rlhpc/config/c.py": {"f"}})
    assert len(step) == 3
    assert step.by_package() == Counter(runs=2, config=1)
    assert step.count_in("runs", "training") == 2
    assert step.table().startswith("3 files, 4 functions\n")
