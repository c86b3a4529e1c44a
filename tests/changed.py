"""Tests of a change: `make test-changed`, `make test-changed BASE=main`, `python -m tests.changed FILE…`.

Takes the files that differ from a commit and chooses the tests most likely to notice a mistake in them, in this order: changed
test files, mirror tests (`tests/unit/<package path>/test_<module>.py`), unit tests that import a changed module, mirror tests
of the modules that import it, the other tests of its folder, and integration tests that import it. They run in that order
until the time is used up, short ones first; the last lines say what was not run.
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grimp
import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "rlhpc"
#: Absolute times, in seconds since the epoch, after which no test and no long test begins; order of the files.
TESTS_UNTIL, LONG_UNTIL, ORDER = "RLHPC_CHANGED_UNTIL", "RLHPC_CHANGED_LONG_UNTIL", "RLHPC_CHANGED_ORDER"
#: Fractions of the limit after which no long test and no test begins: what began must end within the limit.
LONG_SHARE, TESTS_SHARE = 0.5, 0.8
#: Rows of each list that is printed; test files of a run, since pytest imports all of them first.
MAX_ROWS, MAX_FILES = 12, 40


@dataclass(frozen=True, order=True)
class Choice:
    """A test file and why it is run.

    Attributes:
        tier: Position of the reason in the order; the lowest comes first.
        breadth: Number of modules that the file imports: what is about one module comes before what is about many.
        path: Path from the repository's root.
        reason: What the file has to do with the change.
    """

    tier: int
    breadth: int
    path: str
    reason: str


@dataclass
class Sources:
    """Test files of a checkout, and the modules that each names.

    Attributes:
        root: Folder of the checkout.
        imports: Test file → modules of the package that it imports or names in a string.
    """

    root: Path
    imports: dict[str, set[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Reads the test files."""
        homes = exported_names(self.root)
        for path in sorted((self.root / "tests").rglob("*.py")):
            name = path.relative_to(self.root).as_posix()
            self.imports[name] = modules_named_in(path.read_text(encoding="utf-8"), homes)

    def importers(self, module: str) -> list[str]:
        """Returns the test files, helpers excluded, that import or name a module."""
        return [path for path, modules in self.imports.items() if module in modules and is_test(path)]

    def mirrors(self, module: str) -> list[str]:
        """Returns the mirror test of a module, then those that have its name and a suffix."""
        folder, stem = mirror_folder(module), f"test_{module.rpartition('.')[2]}"
        siblings = self.tests_in(folder)
        return sorted(each for each in siblings if re.fullmatch(rf"{stem}(_\w+)?", Path(each).stem))

    def tests_in(self, folder: str) -> list[str]:
        """Returns the test files that lie in a folder itself."""
        return [path for path in self.imports if Path(path).parent.as_posix() == folder and is_test(path)]

    def nearest(self, module: str) -> list[str]:
        """Returns the test files of the closest folder that has any, from the module's mirror folder upwards."""
        folder = Path(mirror_folder(module))
        while len(folder.parts) > 2:
            if tests := self.tests_in(folder.as_posix()):
                return tests
            folder = folder.parent
        return []


def is_test(path: str) -> bool:
    """Returns whether a path is that of a test file that runs without a cluster."""
    return Path(path).name.startswith("test_") and not path.startswith("tests/slurm/")


def mirror_folder(module: str) -> str:
    """Returns the folder of a module's mirror test."""
    return "/".join(("tests", "unit", *module.split(".")[1:-1]))


def module_of(path: str) -> str | None:
    """Returns the module of a source file of the package, None for other files."""
    if not path.startswith(f"{PACKAGE}/") or not path.endswith(".py"):
        return None
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def exported_names(root: Path) -> dict[tuple[str, str], str]:
    """Returns where the names live that packages load when they are first used: (package, name) → module."""
    homes: dict[tuple[str, str], str] = {}
    for path in (root / PACKAGE).rglob("__init__.py"):
        package = module_of(path.relative_to(root).as_posix())
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if package and isinstance(node, ast.ImportFrom) and node.module and node.module.startswith(PACKAGE):
                homes |= {(package, alias.asname or alias.name): node.module for alias in node.names}
            elif package and isinstance(node, ast.Dict):
                for key, value in zip(node.keys, node.values, strict=True):
                    if isinstance(key, ast.Constant) and isinstance(value, ast.List | ast.Tuple):
                        names = [each.value for each in value.elts if isinstance(each, ast.Constant)]
                        homes |= {(package, str(name)): str(key.value) for name in names}
    return homes


def modules_named_in(source: str, homes: Mapping[tuple[str, str], str]) -> set[str]:
    """Returns the modules of the package that a source file imports, or names in a string.

    Args:
        source: Text of the file.
        homes: Modules of the names that packages export.
    """
    modules: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names if alias.name.split(".")[0] == PACKAGE}
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == PACKAGE:
            for alias in node.names:  # a name of the module, or a module of the package
                modules |= {
                    node.module,
                    f"{node.module}.{alias.name}",
                    homes.get((node.module, alias.name), node.module),
                }
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and f"{PACKAGE}." in node.value:
            modules |= set(re.findall(rf"\b{PACKAGE}(?:\.\w+)+", node.value))
    return modules


def import_graph() -> grimp.ImportGraph:
    """Returns the imports between the modules of the package."""
    return grimp.build_graph(PACKAGE, cache_dir=None)


def choose(changed: Iterable[str], sources: Sources, importers_of: Mapping[str, Collection[str]]) -> list[Choice]:
    """Returns the test files of a change, the most telling first.

    Args:
        changed: Paths of the changed files, from the repository's root.
        sources: The test files.
        importers_of: Module → the modules that import it.
    """
    choices: dict[str, Choice] = {}

    def add(tier: int, path: str, reason: str) -> None:
        choice = Choice(tier, len(sources.imports[path]), path, reason)
        choices[path] = min(choices.get(path, choice), choice)

    for name in changed:
        module = module_of(name)
        if module:
            for path in sources.mirrors(module):
                add(1, path, f"mirror test of {module}")
            for path in sources.importers(module):
                add(2 if path.startswith("tests/unit/") else 5, path, f"imports {module}")
            for importer in importers_of.get(module, ()):
                for path in sources.mirrors(importer):
                    add(3, path, f"mirror test of {importer}, which imports {module}")
            for path in sources.nearest(module):
                add(4, path, f"lies nearest to {module}")
        elif name in sources.imports and is_test(name):
            add(0, name, "changed")
        else:
            for path in naming(name, sources):
                add(2, path, f"names {name}")
    return sorted(choices.values())


def naming(name: str, sources: Sources) -> Iterator[str]:
    """Yields the test files that name a changed file, or import it if it is a helper of the tests."""
    if name.endswith(".py"):
        parent, _, stem = name.removesuffix(".py").removesuffix("/__init__").replace("/", ".").rpartition(".")
        pattern = rf"\b{re.escape(parent)}\.{stem}\b|from {re.escape(parent)} import .*\b{stem}\b"
    else:
        pattern = rf"\b{re.escape(Path(name).name)}\b"
    for path in filter(is_test, sources.imports):
        if re.search(pattern, (sources.root / path).read_text(encoding="utf-8")):
            yield path


def git(*arguments: str) -> list[str]:
    """Returns the lines that git prints."""
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"test-changed: git {arguments[0]}: {done.stderr.strip()}")
    return done.stdout.splitlines()


def changed_files(base: str) -> tuple[list[str], str]:
    """Returns the files that differ from a commit, and the commit; without one, uncommitted changes or the last commit."""
    untracked = git("ls-files", "--others", "--exclude-standard")
    files = git("diff", "--name-only", base or "HEAD") + untracked
    if not base and not files:
        base = "HEAD~1"
        files = git("diff", "--name-only", base)
    return files, base or "HEAD"


class Limit:
    """Order of the tests, and the time after which none begins: a plugin of pytest.

    Attributes:
        ranks: Test file → its position.
    """

    def __init__(self) -> None:
        """Reads the environment, which the processes of xdist share."""
        self.ranks = {path: rank for rank, path in enumerate(os.environ[ORDER].split(os.pathsep))}
        self.until, self.long_until = float(os.environ[TESTS_UNTIL]), float(os.environ[LONG_UNTIL])
        self.collected: list[str] = []
        self.reported: set[str] = set()

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Sorts by the order of the files, long tests last."""
        last = len(self.ranks)
        items.sort(key=lambda item: (is_long(item), self.ranks.get(item.path.relative_to(ROOT).as_posix(), last)))
        self.collected = [item.nodeid for item in items]

    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        """Notes what another process collected."""
        self.collected = ids

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> bool | None:
        """Leaves a test out when it is too late for it."""
        return True if time.time() > (self.long_until if is_long(item) else self.until) else None

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Notes which tests ran."""
        self.reported.add(report.nodeid)

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Prints what was left out."""
        missing: dict[str, int] = defaultdict(int)
        for name in self.collected:
            if name not in self.reported:
                missing[name.partition("::")[0]] += 1
        if missing:
            terminalreporter.write_line(f"Out of time for {sum(missing.values())} of the tests that were chosen:")
            for row in shorten(f"{count} of {path}" for path, count in missing.items()):
                terminalreporter.write_line(f"  {row}")


def is_long(item: pytest.Item) -> bool:
    """Returns whether a test is marked as long."""
    return item.get_closest_marker("long") is not None


def shorten(rows: Iterable[str]) -> list[str]:
    """Returns the first rows of a list, and how many there are more."""
    rows = list(rows)
    return rows if len(rows) <= MAX_ROWS else [*rows[:MAX_ROWS], f"and {len(rows) - MAX_ROWS} more"]


def print_rows(rows: Iterable[str]) -> None:
    """Prints the first rows of a list, indented."""
    print("\n".join(f"  {row}" for row in shorten(rows)))


def pytest_configure(config: pytest.Config) -> None:
    """Registers the limit, where `run` asked for it."""
    if ORDER in os.environ:
        config.pluginmanager.register(Limit())


def run(choices: list[Choice], limit_s: float, arguments: list[str]) -> int:
    """Runs the chosen tests; returns pytest's exit status.

    Args:
        choices: Test files, in order.
        limit_s: Seconds that all of it may take.
        arguments: Arguments of pytest.
    """
    begin = time.time()
    paths = [choice.path for choice in choices]
    environment = {
        **os.environ,
        ORDER: os.pathsep.join(paths),
        TESTS_UNTIL: str(begin + TESTS_SHARE * limit_s),
        LONG_UNTIL: str(begin + LONG_SHARE * limit_s),
    }
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.changed", "--dist", "load", "--maxschedchunk", "2"]
    return subprocess.run([*command, *arguments, *paths], cwd=ROOT, env=environment, check=False).returncode


def parse(words: Sequence[str] | None = None) -> tuple[argparse.Namespace, list[str]]:
    """Returns the options, and further arguments of pytest."""
    parser = argparse.ArgumentParser(prog="python -m tests.changed", description="Runs the tests of a change.")
    parser.add_argument("files", nargs="*", help="changed files (default: those that differ from --base)")
    parser.add_argument("--base", default="", help="commit to compare with (default: HEAD, if nothing differs HEAD~1)")
    parser.add_argument("--limit", type=float, default=110, metavar="S", help="seconds (default: %(default)s)")
    parser.add_argument("--list", action="store_true", help="only print the tests that would be run")
    # Its number would be taken for a changed file, if only pytest knew this option.
    parser.add_argument("-n", dest="processes", metavar="N", help="processes of pytest")
    options, arguments = parser.parse_known_args(words)
    return options, [*(["-n", options.processes] if options.processes else []), *arguments]


def main() -> int:
    """Chooses the tests of a change, prints why, and runs them."""
    options, arguments = parse()
    files, base = (options.files, "") if options.files else changed_files(options.base)
    sources, graph = Sources(ROOT), import_graph()
    importers = {
        module: sorted(graph.find_modules_that_directly_import(module))
        for module in filter(None, map(module_of, files))
        if module in graph.modules
    }
    choices = choose(files, sources, importers)
    chosen, omitted = choices[:MAX_FILES], choices[MAX_FILES:]
    print(f"{len(files)} changed files{f' since {base}' * bool(base)}; {len(chosen)} test files chosen:")
    print_rows(f"{each.path}: {each.reason}" for each in chosen)
    if omitted:
        print(f"Not chosen, since only {MAX_FILES} files are run:")
        print_rows(f"{each.path}: {each.reason}" for each in omitted)
    others = sum(map(is_test, sources.imports)) - len(choices)
    print(f"Not chosen: {others} other test files (make test), and the tests on Slurm (make test-slurm)")
    untested = [module for name in files if (module := module_of(name)) and not sources.mirrors(module)]
    if untested:
        print("Without a mirror test:")
        print_rows(untested)
    sys.stdout.flush()
    return 0 if options.list or not chosen else run(chosen, options.limit, arguments)


if __name__ == "__main__":
    sys.exit(main())
