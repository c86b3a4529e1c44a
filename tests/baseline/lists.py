"""Lists of public names, collected from the sources and the reference pages; each is a text file with a name a line.

`tests/docs` holds the generated pages to the code, and the code to the pages; these lists hold both to an earlier commit.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import re
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

from rlhpc.runtime.former_names import FORMER_ATTRIBUTES, current_module
from tests.baseline.archive import DATA

ROOT = Path(__file__).resolve().parents[2]
PACKAGE, REFERENCE = ROOT / "rlhpc", ROOT / "docs" / "reference"
#: Calls that print a message or make the error of one, besides the constructors of errors.
_MESSAGE_CALLS = {
    "check_rules",
    "make_error",
    "fail",
    "_fail",
    "tell",
    "say",
    "report",
    "print_line",
    "print_message",
    "error",
}


def config_keys() -> list[str]:
    """Returns each configuration key with its type, default and task types."""
    lines, section_runs = list[str](), ""
    for line in (REFERENCE / "config.md").read_text().splitlines():
        if line.startswith("## "):
            section_runs = ""
        elif found := re.search(r" Runs: ([\w, ]+)\.$", line):
            section_runs = found[1]
        elif cells := _cells(line):
            key, kind, default, *runs = cells[:-1]
            lines.append(f"{key} | {kind} | {default} | {(runs and runs[0]) or section_runs or 'all'}")
    return sorted(lines)


def commands() -> list[str]:
    """Returns each argument of each command, with what argparse makes of it."""
    from rlhpc.cli import build_parser

    parser = build_parser()
    lines = list[str]()
    for name, command in parser.commands.items():
        lines.append(f"{name}")
        for action in command._actions:
            if action.dest == "help":
                continue
            facts = {
                "nargs": action.nargs, "choices": sorted(map(str, action.choices)) if action.choices else None,
                "default": action.default, "type": getattr(action.type, "__name__", action.type),
                "required": action.required or None, "is": type(action).__name__.strip("_"),
            }  # fmt: skip
            shown = ", ".join(
                f"{key}={value}" for key, value in facts.items() if value not in (None, argparse.SUPPRESS)
            )
            lines.append(f"{name} {'|'.join(action.option_strings) or action.dest} | {shown}")
    return sorted(lines)


def metrics() -> list[str]:
    """Returns the names of metrics, as the tables of their page have them."""
    return _first_column(REFERENCE / "metrics.md")


def run_files() -> list[str]:
    """Returns the paths of a run's files, and the fields of those files, as the tables of their page have them."""
    return _first_column(REFERENCE / "run-folder.md")


def environment_variables() -> list[str]:
    """Returns the environment variables that the package reads or sets."""
    return sorted({name for path in _modules() for name in re.findall(r"\bRLHPC_[A-Z0-9_]+\b", path.read_text())})


def plugins() -> list[str]:
    """Returns the entry point groups with their built-in names, and the scripts of the package."""
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [f"scripts: {name} = {target}" for name, target in project["scripts"].items()]
    lines += [f"extra: {name}" for name in project["optional-dependencies"]]
    for registry in _registries():
        lines.append(f"{registry.group} | {registry.key}")
        lines += [f"{registry.group}: {name}" for name in registry.built_in]
    return sorted(lines)


def _registries() -> Iterator[Any]:
    for path in _modules():
        for node in ast.parse(path.read_text()).body:
            target = node.target if isinstance(node, ast.AnnAssign) else None
            called = isinstance(getattr(node, "value", None), ast.Call)
            if called and isinstance(target, ast.Name) and ast.unparse(node.value.func) == "Registry":  # type: ignore[attr-defined]
                yield getattr(importlib.import_module(_dotted(path)), target.id)


def public_api() -> list[str]:
    """Returns the names that `rlhpc` exports, their public members, and the signatures of both."""
    import rlhpc

    lines, heading = [f"from rlhpc import {name}" for name in rlhpc.__all__], ""
    text = (REFERENCE / "runtime.md").read_text()
    for found in re.finditer(r"^#{3,4} (\S+)$|^```text\n(.*?)\n```$", text, re.M | re.S):
        heading = found[1] or heading
        if found[2]:
            lines.append(f"{heading}: {found[2]}")
    return sorted(lines)


def import_paths() -> list[str]:
    """Returns the modules, and names in modules, of the package that documentation, examples and configurations name."""
    folders = ("docs", "examples", "configs", "config", "profiles", "workflow")
    pages = [*ROOT.glob("*.md"), *(path for name in folders for path in ROOT.joinpath(name).rglob("*"))]
    paths = set[str]()
    for page in pages:
        if page.suffix in (".md", ".py", ".yaml", ".toml", ".smk", ".sh", ".txt") and page.name != "CHANGELOG.md":
            paths |= {path for path in _named_paths(page.read_text()) if resolves(path)}
    return sorted(paths)


def _named_paths(text: str) -> Iterator[str]:
    yield from re.findall(r"(?<![\w.])rlhpc(?:\.[A-Za-z_]\w*)+(?::[A-Za-z_]\w*)?", text)
    for module, names in re.findall(r"from (rlhpc(?:\.\w+)*) import (\([^)]*\)|[^\n#]+)", text):
        for name in re.findall(r"[A-Za-z_]\w*(?: as \w+)?", names):
            yield f"{module}:{name.split()[0]}"


def resolves(path: str) -> bool:
    """Returns whether a module, or a name in one, exists, under this path or where `former_names` leads from it; nothing is
    imported. Of members of a class, the class has to."""
    return _is_there(path) or _is_there(_current(path))


def _current(path: str) -> str:
    """Returns a path that begins with a former module as it is today."""
    dotted, mark, attribute = path.partition(":")
    names = dotted.split(".")
    for size in range(len(names), 0, -1):
        if module := current_module(".".join(names[:size])):
            dotted = ".".join([module, *names[size:]])
            break
    return dotted + mark + FORMER_ATTRIBUTES.get(dotted, {}).get(attribute, attribute)


def _is_there(path: str) -> bool:
    dotted, _, attribute = path.partition(":")
    names = [*dotted.split("."), *([attribute] if attribute else [])]
    depth = next((n for n in range(len(names), 0, -1) if _file(".".join(names[:n]))), 0)
    return depth == len(names) or (depth > 0 and names[depth] in _names(".".join(names[:depth])))


@cache
def _names(module: str) -> frozenset[str]:
    """Returns the names that a module defines, imports or exports lazily."""
    path = _file(module)
    if path is None:
        return frozenset()
    names = set[str]()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and path.name == "__init__.py":
            names.add(node.value)
    return frozenset(names)


def _file(module: str) -> Path | None:
    base = ROOT.joinpath(*module.split("."))
    return next((path for path in (base / "__init__.py", base.with_suffix(".py")) if path.is_file()), None)


def messages() -> list[str]:
    """Returns the templates of messages, with `{}` for what is filled in."""
    return sorted(messages_by_call())


def messages_by_call() -> dict[str, set[str]]:
    """Returns the template of each message → the names of the calls that it is an argument of: errors, or functions."""
    errors = _error_classes()
    calls = dict[str, set[str]]()
    for path in _modules():
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call):
                continue
            name = ast.unparse(node.func).rpartition(".")[2]
            if name in errors or name in _MESSAGE_CALLS:
                arguments = [*node.args, *(word.value for word in node.keywords)]
                if name == "check_rules":  # a table of rules, each with its message
                    arguments = [
                        element for rule in ast.walk(tree) if isinstance(rule, ast.Tuple) for element in rule.elts
                    ]
                for text in map(_template, arguments):
                    if re.search(r"[a-z]{3}.* ", text):
                        calls.setdefault(text.replace("\n", "\\n"), set()).add(name)
    return calls


def _template(node: ast.expr) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(_template(part) for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _template(node.left) + _template(node.right)
    return "{}"


def _error_classes() -> set[str]:
    """Returns the names of the package's errors that are meant for a user."""
    bases = dict[str, set[str]]()
    for path in _modules():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                bases.setdefault(node.name, set()).update(ast.unparse(base).rpartition(".")[2] for base in node.bases)
    errors, size = {"RlhpcError", "RequestError"}, 0
    while len(errors) > size:
        size = len(errors)
        errors |= {name for name, parents in bases.items() if parents & errors}
    return errors


def _modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def _dotted(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def _cells(line: str) -> list[str]:
    """Returns the cells of a table's row that begins with a name in code; nothing for other lines."""
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip("|"))] if line.startswith("| `") else []


def _first_column(page: Path) -> list[str]:
    names = (cells[0] for line in page.read_text().splitlines() if (cells := _cells(line)))
    return sorted(set(names))


LISTS: dict[str, Callable[[], list[str]]] = {
    "config_keys": config_keys,
    "commands": commands,
    "metrics": metrics,
    "run_files": run_files,
    "environment_variables": environment_variables,
    "plugins": plugins,
    "public_api": public_api,
    "import_paths": import_paths,
    "messages": messages,
}


def path_of(name: str) -> Path:
    """Returns the path of a recorded list."""
    return DATA / f"{name}.txt"


def read(name: str) -> list[str]:
    """Returns a recorded list, or the lines of an allow file; without comments."""
    path = path_of(name)
    lines: Iterable[str] = path.read_text().splitlines() if path.exists() else ()
    return [line for line in lines if line and not line.startswith("#")]


def write_all() -> None:
    """Writes all lists anew."""
    DATA.mkdir(parents=True, exist_ok=True)
    for name, collect in LISTS.items():
        lines = collect()
        path_of(name).write_text("".join(f"{line}\n" for line in lines))
        print(f"{path_of(name).relative_to(ROOT)}: {len(lines)} lines")
