"""Runs that end although a worker crashes or a test hangs; a plugin of pytest.

pytest-timeout interrupts a test from a Python signal handler. That handler cannot run while C code holds the interpreter, and
pytest-timeout stops its timer when a test fails, before the teardown. So a thread of C ends the process of a test that takes
longer than `GRACE` times its timeout. pytest-xdist reports that test as the one in which its worker crashed, and a new worker
takes the remaining tests.
"""

from __future__ import annotations

import faulthandler
import os
from collections.abc import Iterator
from typing import Any

import pytest
from xdist.scheduler import LoadFileScheduling

#: A test's process is ended after this many times the test's timeout, and its teardown after as long again.
GRACE = 1.2
_stderr = pytest.StashKey[int]()
_limit_s = pytest.StashKey[float]()


class CrashScheduling(LoadFileScheduling):
    """Whole files to each worker, as `--dist loadfile`, and a run that ends after crashes.

    xdist 3.8 puts all files that a crashed worker was ever given back into the queue. Its finished files then are given to a
    worker that has nothing to run of them and so never asks for more, and each worker runs the test that crashed again.
    """

    def remove_node(self, node: Any) -> str | None:
        """Queues what the worker has not run, without the test in which it crashed, which is returned."""
        unfinished = {scope: tests for scope, tests in self.assigned_work.pop(node).items() if not all(tests.values())}
        if not unfinished:
            return None
        first = next(iter(unfinished))
        crashed = next(test for test, complete in unfinished[first].items() if not complete)
        unfinished[first][crashed] = True
        for scope, tests in reversed(unfinished.items()):
            if not all(tests.values()):
                self.workqueue[scope] = tests
                self.workqueue.move_to_end(scope, last=False)
        for other in self.assigned_work:
            self._reschedule(other)
        return str(crashed)

    def _reschedule(self, node: Any) -> None:
        """Gives a worker files until it has two tests: with one, it waits for the next, or for the end.

        A new worker gets none before it has collected the tests, which `schedule` forgets where two come at once.
        """
        if node not in self.registered_collections:
            return
        super()._reschedule(node)
        while not node.shutting_down and self._pending_of(self.assigned_work[node]) < 2:
            super()._reschedule(node)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadFileScheduling | None:
    return CrashScheduling(config, log) if config.getvalue("dist") == "loadfile" else None


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_stderr] = os.dup(2)  # that of the run: a test's own is captured
    if hasattr(config, "workerinput"):
        _close_in_children(config)


def pytest_unconfigure(config: pytest.Config) -> None:
    os.close(config.stash[_stderr])


def _close_in_children(config: pytest.Config) -> None:
    """Closes a worker's connection to pytest-xdist in the processes it forks: while one has it, a crash goes unnoticed."""
    [channel] = [plugin.channel for plugin in config.pluginmanager.get_plugins() if hasattr(plugin, "torun")]
    descriptors = [file.fileno() for file in (channel.gateway._io.infile, channel.gateway._io.outfile)]

    def close() -> None:
        while descriptors:  # once: the numbers are other files' later
            os.close(descriptors.pop())

    os.register_at_fork(after_in_child=close)


@pytest.hookimpl(tryfirst=True, optionalhook=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> None:
    """Starts a second timer beside that of pytest-timeout."""
    item.stash[_limit_s] = GRACE * settings.timeout
    _end_later(item)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    _end_later(item)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol() -> Iterator[None]:
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


@pytest.hookimpl(tryfirst=True)
def pytest_enter_pdb() -> None:
    faulthandler.cancel_dump_traceback_later()


def _end_later(item: pytest.Item) -> None:
    if limit_s := item.stash.get(_limit_s, None):
        faulthandler.dump_traceback_later(limit_s, exit=True, file=item.config.stash[_stderr])
