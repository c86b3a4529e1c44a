"""Structural figures of a checkout: `python -m tests.structure.measure CHECKOUT [--list FIGURE]`.

Prints the figures as JSON.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import os
import statistics
import subprocess
import sys
import tokenize
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests import words

PACKAGE = "rlhpc"
MAX_LINES, SMALL_LINES, MAX_PUBLIC_NAMES = 700, 60, 12
#: Its tables translate other projects' keys; they say nothing about those of this one.
_NOT_DESCRIBING = "rlhpc/cli"
#: Largest circle of packages whose fewest upward arrows are found exactly.
_EXACT = 12
_NOT_CODE = frozenset(
    (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
#: Prints the imports between modules, those for types included.
_GRAPH = """
import json, grimp
graph = grimp.build_graph("rlhpc", cache_dir=None)
print(json.dumps({module: sorted(graph.find_modules_directly_imported_by(module)) for module in sorted(graph.modules)}))
"""
_IMPORT = "import time; begin = time.perf_counter(); import rlhpc; print(time.perf_counter() - begin)"


@dataclass
class Module:
    """One source file.

    Attributes:
        path: Path relative to the checkout.
        source: Text of the file.
        tree: Syntax tree of the text.
    """

    path: Path
    source: str
    tree: ast.Module = field(init=False)

    def __post_init__(self) -> None:
        """Parses the text."""
        self.tree = ast.parse(self.source)

    @property
    def name(self) -> str:
        """Dotted name of the module."""
        return ".".join(self.path.with_suffix("").parts).removesuffix(".__init__")

    @property
    def lines(self) -> int:
        """Number of lines of the file."""
        return self.source.count("\n")


def read_modules(checkout: Path) -> list[Module]:
    """Returns the modules of the package in a checkout."""
    paths = sorted((checkout / PACKAGE).rglob("*.py"))
    return [Module(path.relative_to(checkout), path.read_text(encoding="utf-8")) for path in paths]


def is_bare_string(node: ast.AST) -> bool:
    """Returns whether a statement is nothing but a string, as docstrings are."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def count_statements(tree: ast.AST) -> int:
    """Counts the statements in a tree, itself included, without imports and docstrings.

    An assignment to a tuple of k targets counts as k, so that packing assignments into a line does not lower the figure.
    """
    total = 0
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom) or is_bare_string(node):
            continue
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Tuple):
            total += len(node.targets[0].elts)
        elif isinstance(node, ast.stmt):
            total += 1
    return total


def count_lines_of_code(module: Module) -> int:
    """Counts the lines that have a token which is neither a comment nor a docstring."""
    code: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(module.source).readline):
        if token.type not in _NOT_CODE:
            code.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Expr) and is_bare_string(node):
            code.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(code)


def functions_of(modules: Iterable[Module]) -> list[tuple[int, str]]:
    """Returns statements and place of each function, the longest first; a function's own `def` does not count."""
    sizes = [
        (count_statements(node) - 1, f"{module.path}:{node.lineno} {node.name}")
        for module in modules
        for node in ast.walk(module.tree)
        if isinstance(node, _FUNCTIONS)
    ]
    return sorted(sizes, reverse=True)


def public_names(tree: ast.Module) -> set[str]:
    """Returns the names without an underscore that a module defines itself: classes, functions and variables."""
    names: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names.update(inner.id for target in targets for inner in ast.walk(target) if isinstance(inner, ast.Name))
    return {name for name in names if not name.startswith("_")}


def stores_into_parts(modules: Iterable[Module]) -> list[str]:
    """Returns the places of assignments `x.y.z = …`, which set an attribute of another object's part."""
    return [
        f"{module.path}:{node.lineno} {ast.unparse(node)}"
        for module in modules
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and isinstance(node.value, ast.Attribute)
    ]


def modules_without_test(checkout: Path, modules: Iterable[Module]) -> tuple[list[str], list[str]]:
    """Returns the modules without a test file of their name anywhere, and those without one at the mirrored path."""
    tests = [path.relative_to(checkout / "tests") for path in (checkout / "tests").rglob("test_*.py")]
    names, paths = {path.name for path in tests}, {path.as_posix() for path in tests}
    own = [module for module in modules if module.path.name != "__init__.py"]
    nowhere = [str(module.path) for module in own if f"test_{module.path.name}" not in names]
    mirrors = {
        str(module.path): Path("unit", *module.path.parts[1:-1], f"test_{module.path.name}").as_posix()
        for module in own
    }
    return nowhere, [path for path, mirror in mirrors.items() if mirror not in paths]


# Configuration keys


def _is_dataclass(node: ast.ClassDef) -> bool:
    """Returns whether a class is decorated as a dataclass."""
    names = (ast.unparse(each.func if isinstance(each, ast.Call) else each) for each in node.decorator_list)
    return any(name.endswith("dataclass") for name in names)


def _configuration_fields(modules: Iterable[Module]) -> set[str]:
    """Returns the names of the fields of all configuration dataclasses: those named `…Config`."""
    return {
        statement.target.id
        for module in modules
        for node in ast.walk(module.tree)
        if isinstance(node, ast.ClassDef) and node.name.endswith("Config") and _is_dataclass(node)
        for statement in node.body
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)
    }


def _key_of(node: ast.AST | None, fields: set[str]) -> str | None:
    """Returns the configuration key or section that a string names, without brackets; of an f-string, what it begins with."""
    if isinstance(node, ast.JoinedStr) and node.values:
        node = node.values[0]
    if not isinstance(node, ast.Constant) or not isinstance(node.value, str):
        return None
    key = node.value.replace("[]", "").removesuffix(".")
    is_dotted = "." in key or node.value.endswith(".")
    return key if is_dotted and all(part in fields for part in key.split(".")) else None


def _rows(node: ast.AST) -> Iterator[ast.AST]:
    """Yields the elements of each collection in an expression, of dictionaries the keys."""
    for inner in ast.walk(node):
        if isinstance(inner, ast.Dict):
            yield from filter(None, inner.keys)
        elif isinstance(inner, ast.DictComp):
            yield inner.key
        elif isinstance(inner, ast.Tuple | ast.List | ast.Set):
            yield from inner.elts


def tables_of_keys(modules: Iterable[Module]) -> dict[str, Counter[str]]:
    """Returns the module-level tables that describe configuration keys by their dotted names, such as ranges and choices.

    Returns:
        `file:variable` → how often each key stands in it.
    """
    modules = list(modules)
    fields = _configuration_fields(modules)
    tables: dict[str, Counter[str]] = {}
    for module in modules:
        if module.path.is_relative_to(_NOT_DESCRIBING):
            continue
        for node in module.tree.body:
            if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
                keys = Counter(key for row in _rows(node.value) if (key := _key_of(row, fields)))
                if keys:
                    target = node.targets[0] if isinstance(node, ast.Assign) else node.target
                    tables[f"{module.path}:{ast.unparse(target)}"] = keys
    return tables


def files_naming_keys(modules: Iterable[Module]) -> dict[str, set[str]]:
    """Returns the files in which a configuration key stands as a dotted string anywhere, by key."""
    modules = list(modules)
    fields = _configuration_fields(modules)
    files: dict[str, set[str]] = defaultdict(set)
    for module in modules:
        for node in ast.walk(module.tree):
            if key := _key_of(node, fields):
                files[key].add(str(module.path))
    return dict(files)


def _longest(lengths: Mapping[str, int]) -> tuple[str, int]:
    """Returns the key with the greatest number, of several the first by name."""
    return min(lengths.items(), key=lambda item: (-item[1], item[0]), default=("", 0))


def describe_keys(tables: Mapping[str, Counter[str]], files: Mapping[str, Collection[str]]) -> dict[str, Any]:
    """Returns how many places describe configuration keys besides the field itself.

    `places` counts every row of every table, `max_places` those of the key that has most; `max_files` are the files in which
    the key that is named in most stands as a dotted string.
    """
    places = Counter[str]()
    for keys in tables.values():
        places.update(keys)
    key, number = _longest(places)
    named, most = _longest({key: len(names) for key, names in files.items()})
    return {
        "tables": len(tables),
        "places": places.total(),
        "keys": len(places),
        "max_places": number,
        "max_places_key": key,
        "max_files": most,
        "max_files_key": named,
    }


# Imports


def circles_of(arrows: Mapping[str, Iterable[str]]) -> list[list[str]]:
    """Returns the circles of a graph: its strongly connected components of more than one node, sorted (Tarjan, 1972)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    circles = []
    for root in arrows:
        if root in index:
            continue
        index[root] = low[root] = len(index)
        stack.append(root)
        path = [(root, iter(arrows.get(root, ())))]
        while path:
            node, following = path[-1]
            for other in following:
                if other not in index:
                    index[other] = low[other] = len(index)
                    stack.append(other)
                    path.append((other, iter(arrows.get(other, ()))))
                    break
                if other in stack:
                    low[node] = min(low[node], index[other])
            else:
                path.pop()
                if path:
                    low[path[-1][0]] = min(low[path[-1][0]], low[node])
                if low[node] == index[node]:
                    component = stack[stack.index(node) :]
                    del stack[stack.index(node) :]
                    if len(component) > 1:
                        circles.append(sorted(component))
    return sorted(circles)


def fewest_upward(arrows: Mapping[str, Iterable[str]]) -> int:
    """Returns the fewest arrows whose removal leaves no circle: the arrows that go up in the best order of layers."""
    total = 0
    for circle in circles_of(arrows):
        edges = [(a, b) for a in circle for b in arrows[a] if b in circle and b != a]
        total += _fewest_exact(circle, edges) if len(circle) <= _EXACT else _few_greedy(circle, edges)
    return total


def _fewest_exact(nodes: list[str], edges: list[tuple[str, str]]) -> int:
    """Returns the fewest arrows against an order, over all orders: a dynamic program over sets of nodes."""
    number = {node: position for position, node in enumerate(nodes)}
    targets = [0] * len(nodes)
    for source, target in edges:
        targets[number[source]] |= 1 << number[target]
    best = [0] + [len(edges)] * ((1 << len(nodes)) - 1)
    for chosen in range(1 << len(nodes)):  # the lowest layers; what they import above them goes up
        for node, mask in enumerate(targets):
            if not chosen >> node & 1:
                up = best[chosen] + (mask & ~chosen & ~(1 << node)).bit_count()
                best[chosen | 1 << node] = min(best[chosen | 1 << node], up)
    return best[-1]


def _few_greedy(nodes: list[str], edges: list[tuple[str, str]]) -> int:
    """Returns an upper bound of the fewest arrows against an order, by the heuristic of Eades, Lin and Smyth (1993)."""
    remaining, arrows, up = set(nodes), set(edges), 0
    while remaining:
        outgoing, incoming = Counter(a for a, _ in arrows), Counter(b for _, b in arrows)
        sinks = [node for node in remaining if not outgoing[node]]
        node = min(sinks) if sinks else max(sorted(remaining), key=lambda each: incoming[each] - outgoing[each])
        up += outgoing[node]
        remaining.remove(node)
        arrows = {(a, b) for a, b in arrows if node not in (a, b)}
    return up


def arrows_inside(package: str, imports: Mapping[str, Iterable[str]]) -> dict[str, set[str]]:
    """Returns the imports between the direct children of a package; empty where it has fewer than two."""
    depth = package.count(".") + 2

    def child_of(module: str) -> str | None:
        return ".".join(module.split(".")[:depth]) if module.startswith(f"{package}.") else None

    arrows: dict[str, set[str]] = defaultdict(set)
    for module, imported in imports.items():
        if importer := child_of(module):
            arrows[importer] |= {child for each in imported if (child := child_of(each)) and child != importer}
    return dict(arrows) if len(arrows) > 1 else {}


def run_python(checkout: Path, code: str) -> str:
    """Runs code with the checkout's package importable; returns what it prints."""
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True, check=True).stdout


def import_figures(checkout: Path) -> tuple[dict[str, Any], Mapping[str, list[str]]]:
    """Returns the numbers of circles and of upward arrows, inside packages too, and the imports by module."""
    imports: dict[str, list[str]] = json.loads(run_python(checkout, _GRAPH))
    packages = sorted({module.rpartition(".")[0] for module in imports if "." in module})
    upward = {package: fewest_upward(arrows_inside(package, imports)) for package in packages}
    figures = {
        "circles": len(circles_of(imports)),
        "upward": sum(upward.values()),
        "upward_by_package": {package: number for package, number in upward.items() if number},
    }
    return figures, imports


def small_modules(modules: Iterable[Module], imports: Mapping[str, Iterable[str]]) -> list[str]:
    """Returns the modules of fewer than 60 lines that a single module of the package imports."""
    importers = Counter(imported for each in imports.values() for imported in each)
    return [
        f"{module.path} ({module.lines} lines)"
        for module in modules
        if module.path.name != "__init__.py" and module.lines < SMALL_LINES and importers[module.name] == 1
    ]


def import_time_ms(checkout: Path, tries: int = 7) -> float:
    """Returns the median time of `import rlhpc` in a new process, after one that fills the caches."""
    times = [float(run_python(checkout, _IMPORT)) * 1000 for _ in range(tries + 1)]
    return round(statistics.median(times[1:]), 1)


def measure(checkout: Path) -> tuple[dict[str, Any], dict[str, list[str]]]:
    """Returns the figures of a checkout, and the names behind some of them."""
    modules = read_modules(checkout)
    functions = functions_of(modules)
    tables = tables_of_keys(modules)
    imports, graph = import_figures(checkout)
    nowhere, unmirrored = modules_without_test(checkout, modules)
    findings = words.check_sources(words.read_sources(checkout))
    names = {
        "without_test_file": nowhere,
        "without_mirror_test": unmirrored,
        "longest_functions": [f"{size} {place}" for size, place in functions[:30]],
        "tables_of_keys": [f"{table}: {keys.total()}" for table, keys in sorted(tables.items())],
        "over_700_lines": [f"{each.path} ({each.lines} lines)" for each in modules if each.lines > MAX_LINES],
        "small_with_one_importer": small_modules(modules, graph),
        "over_12_public_names": [
            f"{each.path} ({count})" for each in modules if (count := len(public_names(each.tree))) > MAX_PUBLIC_NAMES
        ],
        "stores_into_parts": stores_into_parts(modules),
    }
    figures = {
        "modules": len(modules),
        "classes": sum(isinstance(node, ast.ClassDef) for each in modules for node in ast.walk(each.tree)),
        "lines_of_code": sum(map(count_lines_of_code, modules)),
        "statements": sum(count_statements(module.tree) for module in modules),
        "words": {kind: sum(finding.kind == kind for finding in findings) for kind in words.KINDS},
        "without_test_file": len(nowhere),
        "without_mirror_test": len(unmirrored),
        "configuration_keys": describe_keys(tables, files_naming_keys(modules)),
        "imports": imports,
        "functions": {
            "number": len(functions),
            "median_statements": statistics.median(size for size, _ in functions),
            "max_statements": functions[0][0],
            "longest": functions[0][1],
        },
        **{
            name: len(names[name])
            for name in ("over_700_lines", "small_with_one_importer", "over_12_public_names", "stores_into_parts")
        },
        "import_ms": import_time_ms(checkout),
    }
    return figures, names


def commit_of(checkout: Path) -> str:
    """Returns the short name of the checked-out commit."""
    command = ["git", "-C", str(checkout), "rev-parse", "--short=8", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def main() -> None:
    """Measures a checkout and prints its figures."""
    parser = argparse.ArgumentParser(prog="python -m tests.structure.measure", description="Figures of a checkout.")
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--list", metavar="FIGURE", action="append", default=[], help="print the names behind a figure")
    options = parser.parse_args()
    checkout = options.checkout.resolve()
    figures, names = measure(checkout)
    print(json.dumps({commit_of(checkout): figures}, indent=2))
    for name in options.list:
        print("\n".join([f"{name}:", *names[name]]))


if __name__ == "__main__":
    main()
