"""Mirror tests of the modules: `python -m tests.structure.mirror [--cover] [--write] [MODULE…]`.

The tests of `rlhpc/a/b.py` are in `tests/unit/a/test_b.py`. Prints for each module of 60 statements or more whether that file
exists and, with `--cover`, which share of the module's lines it executes when it runs alone, in the processes that it starts
too. `tests/structure/unmirrored.txt` lists the modules that have no such file yet; `--write` takes out those that have one
now, and follows modules that were moved, but never lets the list grow.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

from tests.structure.measure import PACKAGE, Module, count_statements, read_modules

ROOT = Path(__file__).resolve().parents[2]
UNMIRRORED = Path(__file__).with_name("unmirrored.txt")
#: A module of as many statements has a mirror test, which executes this share of its lines.
MIN_STATEMENTS, MIN_SHARE = 60, 0.6
#: What the tests that start processes are measured with: children, forks and `os._exit` included.
_SETTINGS = """
[run]
source = {package}
data_file = {folder}/data
parallel = true
sigterm = true
patch = subprocess, fork, _exit
"""


def mirror_of(path: Path) -> Path:
    """Returns the path of a module's mirror test."""
    return Path("tests", "unit", *path.parts[1:-1], f"test_{path.name}")


def modules_to_mirror(checkout: Path) -> list[Module]:
    """Returns the modules that should have a mirror test: all large ones but `__init__.py` files."""
    modules = (module for module in read_modules(checkout) if module.path.name != "__init__.py")
    return [module for module in modules if count_statements(module.tree) >= MIN_STATEMENTS]


def unmirrored(checkout: Path) -> set[str]:
    """Returns the paths of the large modules without a mirror test."""
    modules = modules_to_mirror(checkout)
    return {str(module.path) for module in modules if not (checkout / mirror_of(module.path)).exists()}


def listed() -> set[str]:
    """Returns the modules of the list."""
    return set(UNMIRRORED.read_text().split())


def write(paths: Iterable[str], limit: int) -> None:
    """Writes the list.

    Args:
        paths: Modules without a mirror test.
        limit: Number of modules that it may have.

    Raises:
        SystemExit: There are more.
    """
    rows = sorted(paths)
    if len(rows) > limit:
        raise SystemExit(
            f"{len(rows)} modules have no mirror test, {limit} may have none: write tests for the new ones"
        )
    UNMIRRORED.write_text("".join(f"{row}\n" for row in rows))


def executed_share(module: Path, checkout: Path = ROOT) -> float:
    """Returns the share of a module's lines that its mirror test executes, when that runs alone.

    Raises:
        SystemExit: The test fails.
    """
    import coverage

    with tempfile.TemporaryDirectory() as name:
        settings = Path(name, "settings")
        settings.write_text(_SETTINGS.format(package=checkout / PACKAGE, folder=name))
        pytest = ["-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", str(mirror_of(module))]
        command = [sys.executable, "-m", "coverage", "run", f"--rcfile={settings}", *pytest]
        done = subprocess.run(command, cwd=checkout, env={**os.environ}, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{mirror_of(module)} fails:\n{done.stdout}{done.stderr}")
        measured = coverage.Coverage(config_file=str(settings))
        measured.combine()
        _, lines, _, missing, _ = measured.analysis2(str(checkout / module))
    return 1 - len(missing) / len(lines)


def main() -> None:
    """Prints the modules and their mirror tests, or writes the list of those without."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.structure.mirror", description="Mirror tests of the modules."
    )
    parser.add_argument("modules", nargs="*", help="paths of modules or folders (default: all)")
    parser.add_argument(
        "--cover", action="store_true", help="run each mirror test and print the share that it executes"
    )
    parser.add_argument("--write", action="store_true", help="bring the list of modules without mirror test up to date")
    options = parser.parse_args()
    missing = unmirrored(ROOT)
    if options.write:
        write(missing, len(listed()))
    modules = [
        module
        for module in modules_to_mirror(ROOT)
        if not options.modules or any(module.path.is_relative_to(each) for each in options.modules)
    ]
    shares: list[float] = []
    for module in modules:
        text = "no mirror test" if str(module.path) in missing else "has one"
        if options.cover and str(module.path) not in missing:
            shares.append(executed_share(module.path))
            text = f"{shares[-1]:.0%}"
        print(f"{text:>14}  {module.path}", flush=True)
    have = sum(str(module.path) not in missing for module in modules)
    print(f"{have} of {len(modules)} modules of {MIN_STATEMENTS} statements or more have a mirror test")
    if options.cover:
        enough = sum(share >= MIN_SHARE for share in shares)
        print(f"{enough} of these {len(shares)} execute {MIN_SHARE:.0%} of their module's lines")


if __name__ == "__main__":
    main()
