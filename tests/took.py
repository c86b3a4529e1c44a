"""What took how long: a plugin of pytest that the tests' conftest.py names.

Every test's time counts, of the clock and of the processors: of this process and of all that it has waited for. The latter
says what a test costs where other things run beside it. `--took FILE` writes a table of each file and of the slowest tests.
"""

from __future__ import annotations

import resource
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

SLOWEST = 120
_before = pytest.StashKey[float]()


@dataclass
class Took:
    """Seconds, of one test or several."""

    clock_s: float = 0.0
    processors_s: float = 0.0
    tests: int = 0


def processors_s() -> float:
    """Of this process and of those that it has waited for, with theirs."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def table(rows: Iterable[tuple[str, Took]]) -> str:
    lines = [f"{'clock s':>9} {'CPU s':>8} {'tests':>6}  what"]
    lines += [f"{took.clock_s:9.1f} {took.processors_s:8.1f} {took.tests:6}  {name}" for name, took in rows]
    return "\n".join(lines) + "\n"


def summary(by_test: dict[str, Took]) -> str:
    """The table of each file, then that of the slowest tests."""
    by_file: dict[str, Took] = defaultdict(Took)
    for name, took in by_test.items():
        for where in (name.partition("::")[0], "all of them"):
            by_file[where].clock_s += took.clock_s
            by_file[where].processors_s += took.processors_s
            by_file[where].tests += 1
    longest = sorted(by_test.items(), key=lambda one: -one[1].clock_s)[:SLOWEST]
    files = sorted(by_file.items(), key=lambda one: -one[1].clock_s)
    return f"{table(files)}\nThe slowest:\n{table((name, Took(one.clock_s, one.processors_s, 1)) for name, one in longest)}"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--took", type=Path, metavar="FILE", help="write what each file and the slowest tests took")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("took") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Writer(config.getoption("took")))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """Where the test runs: one of xdist's processes, maybe."""
    report = yield
    now = processors_s()
    report.processors_s = now - item.session.stash.get(_before, now)
    item.session.stash[_before] = now
    return report


def pytest_collection_finish(session: pytest.Session) -> None:
    session.stash[_before] = processors_s()


class Writer:
    """Where the reports come together."""

    def __init__(self, path: Path) -> None:
        self.path, self.by_test = path, defaultdict[str, Took](Took)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        took = self.by_test[report.nodeid]
        took.clock_s += report.duration
        took.processors_s += getattr(
            report, "processors_s", 0.0
        )  # xdist reports a test in which its process crashed by itself

    def pytest_sessionfinish(self) -> None:
        self.path.write_text(summary(self.by_test))
