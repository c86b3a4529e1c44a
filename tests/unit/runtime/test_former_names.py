"""Former module paths: each imports today's module, warns once, and nothing of ours uses one."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

from rlhpc.runtime.former_names import FORMER_MODULES, FormerModuleFinder, current_module
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
        found = load_attribute("rlhpc.runs.kinds:find_kind", "key")
    assert found is importlib.import_module("rlhpc.runs.task_type").find_kind


def test_other_names_are_not_touched() -> None:
    finder = FormerModuleFinder()
    assert finder.find_spec("rlhpc.runtime") is None and finder.find_spec("numpy") is None
    assert current_module("rlhpc.nothing.at_all") is None
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("rlhpc.nothing")


def test_nothing_of_ours_uses_a_former_path() -> None:
    files = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    pattern = re.compile(rf"(?<![\w.])({'|'.join(map(re.escape, FORMER_MODULES))})(?![\w.]*\w)")
    skipped = ("CHANGELOG.md", "tests/refactor/", "tests/data/", "bench/results/", "rlhpc/runtime/former_names.py")
    uses = {
        path: sorted({match[1] for match in pattern.finditer((ROOT / path).read_text(errors="ignore"))})
        for path in files
        if not path.startswith((*skipped, "tests/unit/runtime/test_former_names.py")) and (ROOT / path).is_file()
    }
    assert {path: names for path, names in uses.items() if names} == {}
