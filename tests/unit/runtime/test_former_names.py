"""Former module paths: each imports today's module, warns once, and nothing of ours uses one."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from rlhpc.runtime.former_names import (
    FORMER_ATTRIBUTES,
    FORMER_MODULES,
    FormerModuleFinder,
    current_keywords,
    current_module,
    former_keywords,
    former_members,
)
from rlhpc.runtime.plugins import load_attribute
from tests.extras import need_extra

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize("former", sorted(FORMER_MODULES))
def test_a_former_path_is_todays_module(former: str) -> None:
    """Both names are one module object, so that classes are the same."""
    sys.modules.pop(former, None)
    try:
        today = importlib.import_module(FORMER_MODULES[former])
    except ImportError as error:
        need_extra("llm", "embodied")
        raise error
    spec = today.__spec__
    with pytest.warns(FutureWarning, match=f"{former} is now {FORMER_MODULES[former]}"):
        assert importlib.import_module(former) is today
    assert today.__spec__ is spec and today.__name__ == FORMER_MODULES[former]


def test_a_module_of_a_former_package_is_loaded_once() -> None:
    need_extra("llm")
    sys.modules.pop("rlhpc.language.algorithm.registry", None)
    with pytest.warns(FutureWarning):
        former = importlib.import_module("rlhpc.language.algorithm.registry")
    assert former is importlib.import_module("rlhpc.language.algorithms.registry")


def test_configurations_may_name_a_former_path() -> None:
    """`module:attribute`, as in files of earlier runs."""
    sys.modules.pop("rlhpc.runs.kinds", None)
    with pytest.warns(FutureWarning):
        found = load_attribute("rlhpc.runs.kinds:find_task_type", "key")
    assert found is importlib.import_module("rlhpc.runs.task_type").find_task_type


@pytest.mark.parametrize("module", sorted(FORMER_ATTRIBUTES))
def test_a_former_name_in_a_module_is_todays(module: str) -> None:
    need_extra("llm")
    here = importlib.import_module(module)
    for former, current in FORMER_ATTRIBUTES[module].items():
        with pytest.warns(FutureWarning, match=f"{module}.{former} is now {current}"):
            assert getattr(here, former) is getattr(here, current)
    with pytest.raises(AttributeError, match="has no attribute 'Nothing'"):
        here.Nothing  # noqa: B018


@former_members(size="num_rows", grow="extend")
@dataclass
class Table:
    num_rows: int = 0

    def extend(self, count: int) -> None:
        self.num_rows += count


def test_former_members_can_be_passed_read_set_and_called() -> None:
    with pytest.warns(FutureWarning, match="argument size of Table.__init__ is now num_rows"):
        table = Table(size=2)  # type: ignore[call-arg]
    with pytest.warns(FutureWarning, match="Table.grow is now extend"):
        table.grow(3)  # type: ignore[attr-defined]
    with pytest.warns(FutureWarning):
        assert table.size == table.num_rows == 5  # type: ignore[attr-defined]
    with pytest.warns(FutureWarning):
        table.size = 1  # type: ignore[attr-defined]
    assert table == Table(1)


def test_a_subclass_may_define_a_member_under_its_former_name() -> None:
    with pytest.warns(FutureWarning, match="Doubled.grow is now extend"):

        class Doubled(Table):
            def grow(self, count: int) -> None:
                self.num_rows += 2 * count

    table = Doubled(1)
    table.extend(2)
    assert table.num_rows == 5


@pytest.mark.parametrize(
    ("path", "former", "current"),
    [
        ("rlhpc.runs.runner:Runner", "restored", "check_restored"),
        ("rlhpc.runs.task_parts:ConfigChecks", "missing", "find_missing_keys"),
        ("rlhpc.runs.task_parts:GroupSpec", "most_useful", "max_useful_ranks"),
        ("rlhpc.runtime.worker_group:WorkerGroup", "why_left", "find_leave_reason"),
        ("rlhpc.embodied.models.base:Policy", "imitated", "imitated_offsets"),
        ("rlhpc.embodied.models.base:Policy", "played", "decode_plan"),
        ("rlhpc.language.models.token_batch:TokenBatch", "of", "from_sequences"),
        ("rlhpc.language.algorithms.base:MinibatchCounts", "of", "from_batch"),
    ],
)
def test_a_former_member_of_a_plugin_interface_works(path: str, former: str, current: str) -> None:
    """It can be read, and a subclass that defines it is called under its current name."""
    need_extra(*{"embodied": ("embodied",), "language": ("llm",)}.get(path.split(".")[1], ()))
    cls = load_attribute(path, "key")
    with pytest.warns(FutureWarning, match=f"{cls.__name__}.{former} is now {current}"):
        assert getattr(cls, former) == getattr(cls, current)
    with pytest.warns(FutureWarning, match=f"Own.{former} is now {current}"):
        own = type("Own", (cls,), {former: "own"})
    assert getattr(own, current) == "own"


def test_a_class_with_former_members_keeps_its_own_hook_for_subclasses() -> None:
    defined = []

    @former_members(grow="extend")
    class Hooked:
        def __init_subclass__(cls, **kwargs: object) -> None:
            super().__init_subclass__()
            defined.append((cls.__name__, "extend" in vars(cls), kwargs))

    with pytest.warns(FutureWarning, match="Extended.grow is now extend"):
        type("Extended", (Hooked,), {"grow": None}, size=2)
    assert defined == [("Extended", True, {"size": 2})]


def test_keywords_are_checked_by_todays_names() -> None:
    @former_keywords(size="num_rows")
    def rows(num_rows: int) -> int:
        return num_rows

    with pytest.warns(FutureWarning):
        assert rows(size=3) == 3  # type: ignore[call-arg]
    assert current_keywords(rows, {"size": 3}) == {"num_rows": 3} == current_keywords(Table, {"size": 3})
    assert current_keywords(len, {"size": 3}) == {"size": 3}


def test_other_names_are_not_touched() -> None:
    finder = FormerModuleFinder()
    assert finder.find_spec("rlhpc.runtime") is None and finder.find_spec("numpy") is None
    assert current_module("rlhpc.nothing.at_all") is None
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("rlhpc.nothing")


def test_nothing_of_ours_uses_a_former_path() -> None:
    files = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    pattern = re.compile(rf"(?<![\w.])({'|'.join(map(re.escape, FORMER_MODULES))})(?![\w.]*\w)")
    skipped = ("CHANGELOG.md", "tests/data/", "bench/results/", "rlhpc/runtime/former_names.py")
    uses = {
        path: sorted({match[1] for match in pattern.finditer((ROOT / path).read_text(errors="ignore"))})
        for path in files
        if not path.startswith((*skipped, "tests/unit/runtime/test_former_names.py")) and (ROOT / path).is_file()
    }
    assert {path: names for path, names in uses.items() if names} == {}
