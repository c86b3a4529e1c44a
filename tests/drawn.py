"""What there is too much of for every run: each takes a part, drawn by the commit; `make test-all` takes all of it.

What is to be drawn from is shuffled by a seed and dealt into n parts, of which this run takes the k-th: the n parts together
are everything. pytest says which part it took, and with `make test-all SEED=… PART=k/n` anybody takes it again.

There are two such things. Cases by the hundred are drawn by the test that has them (`drawn`, marked so, RLHPC_TESTS_PART).
Long tests are marked `long`: `make test` takes a part of them (RLHPC_TESTS_LONG); who names tests takes
all. What a file's tests share, such as a run, is paid for once where they are drawn together: `long(together=True)`.

`python -m tests.drawn k/n FOLDER...` prints the part k/n of the folders' test files.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
SEED, PART, LONG = "RLHPC_TESTS_SEED", "RLHPC_TESTS_PART", "RLHPC_TESTS_LONG"
#: Without a word of the environment's.
USUAL = {PART: "1/20", LONG: "1/1"}
#: Long tests that the draw left out, by their ids; of a process of xdist the names under which it passes them on.
_OMITTED = pytest.StashKey[set[str]]()
_OUTPUT = "omitted_long_tests"


def commit() -> str:
    """What is checked out; of a tree without its history nothing but the same each time."""
    done = subprocess.run(
        ["git", "rev-parse", "--short=12", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return done.stdout.strip() or "1"


def part(which: str = PART) -> tuple[int, int]:
    """(k, n) of this run.

    Raises:
        pytest.UsageError: It is not one.
    """
    text = os.environ.get(which, USUAL[which])
    number, _, count = text.partition("/")
    if not (number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
        raise pytest.UsageError(f"{which} is {text!r}; it must be k/n with 1 <= k <= n, such as 1/20")
    return int(number), int(count)


def seed() -> str:
    return os.environ.setdefault(SEED, commit())


def number() -> int:
    """The seed, for what wants a number."""
    return random.Random(seed()).randrange(2**31)


def drawn(
    what: str, everything: Iterable[str], *, always: Sequence[str] = (), least: int = 1, which: str = PART
) -> list[str]:
    """This run's part, sorted.

    Args:
        what: A word of its own for each that draws.
        always: Those that each run takes.
        least: So many are drawn even where the part has fewer.
        which: Whose part: `PART` or `LONG`.
    """
    names, (k, n) = sorted(everything), part(which)
    random.Random(f"{seed()} {what}").shuffle(names)
    ordered = [name for first in range(n) for name in names[(k - 1 + first) % n :: n]]
    return sorted({*always, *ordered[: max(least, len(names[k - 1 :: n]))]})


def pytest_configure(config: pytest.Config) -> None:
    """Who names tests gets all of them; the workers of this process are told by its environment."""
    named = config.args_source is pytest.Config.ArgsSource.ARGS or config.option.keyword
    if named and not hasattr(config, "workerinput"):
        os.environ.pop(LONG, None)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out the long tests that are not drawn."""
    alone, together = dict[str, list[pytest.Item]](), dict[str, list[pytest.Item]]()
    for item in items:
        if mark := item.get_closest_marker("long"):
            if mark.kwargs.get("together"):
                together.setdefault(item.nodeid.partition("::")[0], []).append(item)
            else:
                alone[item.nodeid] = [item]
    taken = {*drawn("long tests", alone, which=LONG), *drawn("long files", together, which=LONG)}
    left = {id(item) for name, group in (alone | together).items() if name not in taken for item in group}
    if left:
        omitted = [item for item in items if id(item) in left]
        config.hook.pytest_deselected(items=omitted)
        config.stash.setdefault(_OMITTED, set()).update(item.nodeid for item in omitted)
        items[:] = [item for item in items if id(item) not in left]


def pytest_report_header() -> str:
    (k, n), (long_k, long_n) = part(), part(LONG)
    long = (
        "all long tests" if long_n == 1 else f"part {long_k}/{long_n} of the long tests (make test LONG=1/1 takes all)"
    )
    again = f"make test-all SEED={seed()} PART={k}/{n} takes it again"
    return f"part {k}/{n} of what there are hundreds of, drawn by {seed()}: {again}; {long}"


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Passes the omitted tests on, where xdist runs the tests in several processes."""
    output = getattr(session.config, "workeroutput", None)
    if output is not None:
        output[_OUTPUT] = sorted(session.config.stash.get(_OMITTED, set()))


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Takes over the omitted tests of a process of xdist; one that crashed passed none on."""
    output = getattr(node, "workeroutput", None) or {}
    node.config.stash.setdefault(_OMITTED, set()).update(output.get(_OUTPUT, ()))


def omitted_line(names: Iterable[str]) -> str:
    """Returns the line about the long tests that were not run: how many of which folders, and the command that runs them."""
    folders = Counter(str(Path(name.partition("::")[0]).parent) for name in names)
    counts = ", ".join(f"{count} of {folder}" for folder, count in sorted(folders.items()))
    command = "make test LONG=1/1 PYTEST_ARGS=\"-m 'long and not gpu and not slurm'\""
    return f"{folders.total()} long tests were not run ({counts}); {command} runs all long tests"


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    """Prints the last line, after pytest's own summary."""
    names = config.stash.get(_OMITTED, set())
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if names and reporter and not hasattr(config, "workerinput"):
        reporter.write_line(omitted_line(names))


def main(words: Sequence[str]) -> None:
    os.environ[PART], *folders = words
    files = (str(path) for folder in folders for path in Path(folder).rglob("test_*.py"))
    print(*drawn("files", files))


if __name__ == "__main__":
    main(sys.argv[1:])
