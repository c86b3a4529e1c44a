"""Mirror tests of the modules: `python -m tests.structure.mirror [--cover] [--results FILE] [--write] [MODULE…]`.

The tests of `rlhpc/a/b.py` are in `tests/unit/a/test_b.py`. Prints for each module of 60 statements or more whether that file
exists and, with `--cover`, which share of the module's lines it executes when it runs alone, in the processes that it starts
too. Each file runs in a process forked from one that has imported other projects' packages, and only them. With
`--results FILE`, each share is appended to that file, and modules that are in it are not measured again.
`tests/structure/unmirrored.txt` lists the modules that have no such file yet; `--write` takes out those that have one
now, and follows modules that were moved, but never lets the list grow.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterable
from pathlib import Path

from tests.structure.measure import Module, count_statements, read_modules

ROOT = Path(__file__).resolve().parents[2]
UNMIRRORED = Path(__file__).with_name("unmirrored.txt")
#: A module of as many statements has a mirror test, which executes this share of its lines.
MIN_STATEMENTS, MIN_SHARE = 60, 0.6
#: What the tests that start processes are measured with: children, forks and `os._exit` included.
_SETTINGS = """
[run]
include = {module}
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


class NotMeasured(Exception):
    """The mirror test failed, or took too long."""


def preload() -> None:
    """Imports packages of other projects that many tests import; each measurement is a fork of this process."""
    from tests.warm.starting import PRELOAD, PRELOAD_WITH, TESTING

    for name in ("coverage", *TESTING, *PRELOAD, *PRELOAD_WITH["transformers"]):
        if not name.startswith("rlhpc"):
            with contextlib.suppress(ImportError):
                importlib.import_module(name)


def executed_share(module: Path, checkout: Path = ROOT, limit_s: float = 600.0) -> float:
    """Returns the share of a module's lines that its mirror test executes, when that runs alone.

    Raises:
        NotMeasured: The test fails, or does not end within `limit_s`.
    """
    import coverage

    with tempfile.TemporaryDirectory() as name:
        settings, output = Path(name, "settings"), Path(name, "output")
        settings.write_text(_SETTINGS.format(module=checkout / module, folder=name))
        pid = os.fork()
        if not pid:
            _run_covered(settings, output, mirror_of(module), checkout)
        try:
            status = _exit_status(pid, limit_s)
        except TimeoutError:
            raise NotMeasured(f"{mirror_of(module)} takes more than {limit_s:g} s") from None
        if status:
            raise NotMeasured(f"{mirror_of(module)} fails:\n{output.read_text()}")
        measured = coverage.Coverage(config_file=str(settings))
        measured.combine()
        _, lines, _, missing, _ = measured.analysis2(str(checkout / module))
    return 1 - len(missing) / len(lines)


def _run_covered(settings: Path, output: Path, test: Path, checkout: Path) -> None:
    """Runs a test file in this process, a fork, with coverage, and ends the process with its exit status."""
    import coverage
    import pytest

    status = 70
    try:
        os.setsid()
        with output.open("w") as stream:
            os.dup2(stream.fileno(), 1)
            os.dup2(stream.fileno(), 2)
        os.chdir(checkout)
        measured = coverage.Coverage(config_file=str(settings))
        measured.start()
        status = int(pytest.main(["-q", "-n", "0", "-p", "no:cacheprovider", str(test)]))
        sys.stdout.flush()
        measured.stop()
        measured.save()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def _exit_status(pid: int, limit_s: float) -> int:
    """Waits for a process that leads its session, and ends what it has left running; returns its exit status.

    Raises:
        TimeoutError: It has not ended within `limit_s`; it is killed.
    """
    deadline, ended, status = time.monotonic() + limit_s, 0, 0
    while not ended and time.monotonic() < deadline:
        ended, status = os.waitpid(pid, os.WNOHANG)
        time.sleep(0 if ended else 0.02)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    if not ended:
        os.waitpid(pid, 0)
        raise TimeoutError
    return os.waitstatus_to_exitcode(status)


def main() -> None:
    """Prints the modules and their mirror tests, or writes the list of those without."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.structure.mirror", description="Mirror tests of the modules."
    )
    parser.add_argument("modules", nargs="*", help="paths of modules or folders (default: all)")
    parser.add_argument(
        "--cover", action="store_true", help="run each mirror test and print the share that it executes"
    )
    parser.add_argument("--results", type=Path, metavar="FILE", help="append each share to FILE; go on where it ends")
    parser.add_argument(
        "--limit", type=float, default=600.0, metavar="S", help="seconds for a mirror test (default: 600)"
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
    shares: dict[str, str] = read_shares(options.results)
    if options.cover:
        preload()
    for module in modules:
        path = str(module.path)
        text = "no mirror test" if path in missing else "has one"
        if options.cover and path not in missing:
            if path not in shares:
                shares[path] = _measured(module.path, options.limit)
                if options.results is not None:
                    with options.results.open("a") as results:
                        results.write(f"{shares[path]}\t{path}\n")
            text = shares[path]
        print(f"{text:>14}  {path}", flush=True)
    have = sum(str(module.path) not in missing for module in modules)
    print(f"{have} of {len(modules)} modules of {MIN_STATEMENTS} statements or more have a mirror test")
    if options.cover:
        texts = [shares[path] for path in map(str, (module.path for module in modules)) if path in shares]
        enough = sum(text.endswith("%") and float(text[:-1]) >= 100 * MIN_SHARE for text in texts)
        print(f"{enough} of these {len(texts)} execute {MIN_SHARE:.0%} of their module's lines")


def read_shares(results: Path | None) -> dict[str, str]:
    """Returns the shares in a file of results by module, `not measured` among them."""
    if results is None or not results.exists():
        return {}
    rows = (line.split("\t") for line in results.read_text().splitlines())
    return {path: share for share, path in rows}


def _measured(module: Path, limit_s: float) -> str:
    """Returns the share of a module as text, or `not measured` after printing the reason to stderr."""
    try:
        return f"{100 * executed_share(module, limit_s=limit_s):.1f}%"
    except NotMeasured as reason:
        print(reason, file=sys.stderr, flush=True)
        return "not measured"


if __name__ == "__main__":
    main()
