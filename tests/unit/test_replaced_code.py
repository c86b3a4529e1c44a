"""Code of other libraries is replaced in adapter modules alone, each with the versions that were read and a contract test."""

from __future__ import annotations

import ast
import importlib.metadata
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

#: Adapter module → its contract test, and the distribution of each library where its name differs from the library's.
ADAPTERS = {
    "rlhpc/runtime/torch_adapter.py": "tests/unit/runtime/test_torch_adapter.py",
    "rlhpc/language/engines/vllm_adapter.py": "tests/unit/language/engines/test_vllm_adapter.py",
    "rlhpc/embodied/models/lerobot/openpi.py": "tests/unit/embodied/models/lerobot/test_openpi.py",
    "rlhpc/embodied/envs/maniskill_physx.py": "tests/unit/embodied/envs/test_maniskill_physx.py",
}
#: Files that change the interpreter itself for a reason, and no library.
INTERPRETER = {
    "rlhpc/runtime/former_names.py": "resolves former names of the package's own modules",
    "rlhpc/language/sandbox/harness.py": "makes a program the main module of its own process",
    "rlhpc/language/rewards/pool_server.py": "sets the folder for temporary files of its own process",
    "rlhpc/language/agents/runner/main.py": "sets the folder for temporary files of its own process",
}
#: Attributes of sys and os that are made to be set.
_SETTABLE = ("path", "argv", "stdout", "stderr", "stdin", "environ")


def imported_names(tree: ast.Module) -> set[str]:
    """Returns the names that a file imports from other packages than rlhpc."""
    names = set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] not in (
            "",
            "rlhpc",
            "__future__",
        ):
            names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            names |= {(a.asname or a.name).partition(".")[0] for a in node.names if not a.name.startswith("rlhpc")}
    return names


def root_of(target: ast.expr) -> str:
    """Returns the name that an attribute or an item belongs to."""
    while isinstance(target, ast.Attribute | ast.Subscript):
        target = target.value
    return target.id if isinstance(target, ast.Name) else ""


def replacements(source: str) -> Iterator[tuple[int, str]]:
    """Yields line and text of each statement that replaces an attribute of another package, or a module's `forward`."""
    tree = ast.parse(source)
    foreign = imported_names(tree)
    for node in ast.walk(tree):
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign):
            targets = [part for each in node.targets for part in (each.elts if isinstance(each, ast.Tuple) else [each])]
        elif isinstance(node, ast.AugAssign | ast.AnnAssign):
            targets = [node.target]
        elif isinstance(node, ast.Delete):
            targets = node.targets
        for target in targets:
            if isinstance(target, ast.Subscript | ast.Attribute):
                text = ast.unparse(target)
                settable = text.startswith(tuple(f"{module}.{name}" for module in ("sys", "os") for name in _SETTABLE))
                special = isinstance(target, ast.Attribute) and target.attr in ("forward", "__class__", "__init__")
                if special or (root_of(target) in foreign and not settable):
                    yield node.lineno, ast.unparse(node)
        if isinstance(node, ast.Call):
            function = ast.unparse(node.func)
            first = node.args[0] if node.args else None
            if function in ("setattr", "delattr", "vars") and first is not None and root_of(first) in foreign - {"sys"}:
                if not (function == "vars" and root_of(first) == "builtins"):
                    yield node.lineno, ast.unparse(node)
            elif function.startswith(("sys.meta_path.", "sys.path_hooks.")):
                yield node.lineno, ast.unparse(node)


def test_other_libraries_are_changed_in_adapters_alone() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {text[:100]}"
        for path in sorted((ROOT / "rlhpc").rglob("*.py"))
        if str(path.relative_to(ROOT)) not in ADAPTERS.keys() | INTERPRETER.keys()
        for line, text in replacements(path.read_text())
    ]
    assert not wrong, "\n".join(["moves to the library's adapter (see ADAPTERS):", *wrong])


@pytest.mark.parametrize("path", [*ADAPTERS, *INTERPRETER])
def test_each_listed_file_replaces_something(path: str) -> None:
    assert list(replacements((ROOT / path).read_text())), "take it from the list"


@pytest.mark.parametrize(
    "statement",
    [
        "import torch\ntorch.set_num_threads = print",
        "from torch import nn\nnn.Linear.forward = f",
        "def f(layer):\n    layer.forward = g",
        "def f(x):\n    x.__class__ = Other",
        "def f():\n    from vllm import layers\n    setattr(layers, 'name', 1)",
        "import sys\nsys.modules['torch'] = None",
        "import sys\nsys.meta_path.insert(0, finder)",
        "import vllm\nvars(vllm)['x'] = 1",
        "import vllm\ndel vllm.x.y",
    ],
)
def test_each_way_to_replace_code_is_seen(statement: str) -> None:
    assert list(replacements(statement))


@pytest.mark.parametrize(("path", "contract"), ADAPTERS.items())
def test_an_adapter_names_the_versions_that_were_read(path: str, contract: str) -> None:
    """An installed library of another minor version fails here, before it fails in a run."""
    assert (ROOT / contract).is_file()
    tree = ast.parse((ROOT / path).read_text())
    verified = next(
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "VERIFIED"
    )
    if path.endswith("openpi.py"):
        return  # its libraries are in another environment, where its contract test compares them
    for library, version in verified.items():
        for distribution in (library, f"{library}-cpu"):
            try:
                installed = importlib.metadata.version(distribution)
            except importlib.metadata.PackageNotFoundError:
                continue
            assert installed.startswith(f"{version}."), (
                f"{distribution} {installed} is installed, and {path} was written for {version}: run {contract}, read the "
                "sources of what it replaces, then change VERIFIED"
            )
