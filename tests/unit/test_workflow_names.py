"""Names of the package in the workflow's files, which neither ruff nor mypy reads: each import and each attribute exists."""

from __future__ import annotations

import ast
import importlib
import inspect
import textwrap
import types
import typing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

WORKFLOW = Path(__file__).resolve().parents[2] / "workflow"
FILES = [WORKFLOW / "Snakefile", *sorted((WORKFLOW / "rules").glob("*.smk"))]


def compile_to_python(path: Path) -> ast.Module:
    """Returns the Python that Snakemake makes of a file."""
    from snakemake.parser import parse
    from snakemake.sourcecache import LocalSourceFile

    workflow: Any = SimpleNamespace(sourcecache=SimpleNamespace(open=lambda _: path.open(encoding="utf-8")))
    return ast.parse(parse(LocalSourceFile(str(path)), workflow, {})[0])


class Names:
    """Values and types of the names that files of the workflow define at their top level.

    Args:
        modules: The files as Python, in the order in which the workflow includes them.
    """

    def __init__(self, modules: list[ast.Module]) -> None:
        self.problems: list[str] = []
        self._values: dict[str, Any] = {}
        self._types: dict[str, Any] = {}
        self._functions = {f.name: f for m in modules for f in ast.walk(m) if isinstance(f, ast.FunctionDef)}
        for node in (node for module in modules for node in ast.walk(module)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "rlhpc":
                self._import(node)
        for node in (node for module in modules for node in ast.walk(module)):
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id.isupper():
                self._types[node.targets[0].id] = self.type_of(node.value)

    def _import(self, node: ast.ImportFrom) -> None:
        module = importlib.import_module(str(node.module))
        for alias in node.names:
            if hasattr(module, alias.name):
                self._values[alias.asname or alias.name] = getattr(module, alias.name)
            else:
                self.problems.append(f"{node.module} has no {alias.name}")

    def type_of(self, node: ast.expr, depth: int = 0) -> Any:
        """Returns the class of an expression's value; None if it is not known. Records each attribute that does not exist."""
        if isinstance(node, ast.Name):
            return self._types.get(node.id)
        if isinstance(node, ast.Attribute):
            return _plain(self._attribute(self.type_of(node.value, depth), node.attr))
        if isinstance(node, ast.Call) and depth < 5:
            return self._returned(node, depth)
        return None

    def _returned(self, node: ast.Call, depth: int) -> Any:
        function = node.func
        if isinstance(function, ast.Attribute):
            owner = self._values.get(function.value.id) if isinstance(function.value, ast.Name) else None
            if owner is None:
                return _return_type(getattr(self.type_of(function.value, depth), function.attr, None))
            if not hasattr(owner, function.attr):
                self.problems.append(f"{owner.__name__} has no {function.attr}")
            return _return_type(getattr(owner, function.attr, None))
        if not isinstance(function, ast.Name):
            return None
        if function.id == "checked" and isinstance(node.args[0], ast.Name):
            return _return_type(self._values.get(node.args[0].id))
        if (definition := self._functions.get(function.id)) is not None:
            returned = [
                one.value for one in ast.walk(definition) if isinstance(one, ast.Return) and one.value is not None
            ]
            return self.type_of(returned[0], depth + 1) if len(returned) == 1 else None
        return _return_type(self._values.get(function.id))

    def _attribute(self, owner: Any, name: str) -> Any:
        """Returns the type of an attribute of objects of a class."""
        if not inspect.isclass(owner):
            return None
        hints = typing.get_type_hints(owner)
        if name in hints:
            return hints[name]
        if not hasattr(owner, name) and name not in _assigned_in_init(owner):
            self.problems.append(f"{owner.__name__} has no {name}")
            return None
        member = inspect.getattr_static(owner, name, None)
        return _return_type(member.fget) if isinstance(member, property) else None

    def check(self, modules: list[ast.Module]) -> int:
        """Resolves each attribute that the files use; returns the number of those whose class is known."""
        num_known = 0
        for module in modules:
            loop_names = {
                node.id for loop in ast.walk(module) if isinstance(loop, ast.For) for node in _names_in(loop.target)
            }
            for node in (node for node in ast.walk(module) if isinstance(node, ast.Attribute)):
                if not loop_names & {name.id for name in _names_in(node)}:
                    num_known += self._check_attribute(node)
        return num_known

    def _check_attribute(self, node: ast.Attribute) -> bool:
        """Resolves an attribute; returns whether the class of its object is known."""
        if isinstance(node.value, ast.Name) and node.value.id in self._values:
            if not hasattr(self._values[node.value.id], node.attr):
                self.problems.append(f"{node.value.id} has no {node.attr}")
            return True
        owner = self.type_of(node.value)
        self._attribute(owner, node.attr)
        return owner is not None


def _names_in(node: ast.expr) -> list[ast.Name]:
    return [name for name in ast.walk(node) if isinstance(name, ast.Name)]


def _assigned_in_init(cls: type) -> set[str]:
    """Returns the attributes that the constructors of a class and of its base classes set."""
    sources = (
        textwrap.dedent(inspect.getsource(base)) for base in cls.__mro__[:-1] if base.__module__.startswith("rlhpc")
    )
    nodes = (node for source in sources for node in ast.walk(ast.parse(source)))
    return {node.attr for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)}


def _plain(annotation: Any) -> Any:
    """Returns the class in an annotation such as `X | None`; None if there is no single class."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        classes = [one for one in typing.get_args(annotation) if one is not type(None)]
        return classes[0] if len(classes) == 1 else None
    origin = typing.get_origin(annotation) or annotation
    return origin if inspect.isclass(origin) and origin.__module__.partition(".")[0] == "rlhpc" else None


def _return_type(function: Any) -> Any:
    try:
        return _plain(typing.get_type_hints(function).get("return"))
    except (TypeError, NameError):  # no function, or a name that only type checkers import
        return None


def test_each_name_that_the_workflow_imports_or_reads_exists() -> None:
    modules = [compile_to_python(path) for path in FILES]
    names = Names(modules)
    assert names.check(modules) > 40, "classes are found"
    assert not names.problems


def test_a_renamed_name_is_reported() -> None:
    text = """
from rlhpc.jobs.paths import RunPaths, no_such_name

RUN = RunPaths.no_such_constructor("runs", "name")
OWN = load()


def load():
    return checked(load_config, "run.yaml")


from rlhpc.runs.configuration import load_config

KEYS = OWN.runner.no_such_key, OWN.runner.max_steps, OWN.runner.name
"""
    module = ast.parse(text)
    names = Names([module])
    assert names.check([module]) > 3
    assert {*names.problems} == {
        "rlhpc.jobs.paths has no no_such_name", "RunPaths has no no_such_constructor", "RunnerConfig has no no_such_key",
    }  # fmt: skip
