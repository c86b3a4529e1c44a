"""Traffic: operations on the run folder and queries of Slurm, counted, with 512 simulated ranks."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench import traffic
from rlhpc.jobs.paths import RunPaths
from tests.extras import need_programs

pytestmark = [pytest.mark.timeout(400)]

RANKS = 512


@pytest.fixture(scope="module")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[dict[str, Any], Path]]:
    """Starts a driver with simulated ranks; yields the ids of its processes and the run folder."""
    need_programs("strace")
    folder = tmp_path_factory.mktemp("traffic").resolve() / "run"
    folder.mkdir()
    with traffic.simulated_run(RANKS, folder) as pids:
        table = RunPaths(folder).registry / "local-0" / "ranks" / "ranks.json"
        traffic.wait_for(
            lambda: table.exists() and table.read_text().count('"running"') > RANKS, "the driver to publish the ranks"
        )
        yield pids, folder


@pytest.mark.long
def test_a_steady_run_does_little_to_the_filesystem(simulated: tuple[dict[str, Any], Path]) -> None:
    """While one rank a second writes to its log."""
    pids, folder = simulated
    operations = traffic.count_steady(pids, folder, 10.0)
    assert 0 < operations.per_s <= 20, operations


@pytest.mark.long
def test_a_terminal_that_follows_the_logs_reads_what_has_grown(simulated: tuple[dict[str, Any], Path]) -> None:
    """All new lines come, and the other thousand logs are not opened."""
    _, folder = simulated
    operations, ages = traffic.count_following(folder, 15.0)
    assert operations.per_s <= 5, operations
    assert len(ages) >= 10, ages
    assert not operations.commands


@pytest.mark.long
def test_a_status_reads_one_table_of_all_ranks(simulated: tuple[dict[str, Any], Path]) -> None:
    _, folder = simulated
    operations = traffic.count_status(folder)
    assert sum(operations.counts.values()) <= 100, operations
    assert not [path for path in operations.paths if "/members/" in path], operations


@pytest.mark.long
def test_joined_ranks_that_wait_look_once_a_host(simulated: tuple[dict[str, Any], Path]) -> None:
    """Runs last: it kills the driver."""
    pids, folder = simulated
    for pid in (pids["driver"], *pids["simulators"], pids["lines"]):
        os.kill(pid, signal.SIGKILL)
    paths = RunPaths(folder)
    status = json.loads(paths.driver_state.read_text())
    paths.driver_state.write_text(json.dumps({**status, "host": "elsewhere", "updated": time.time()}))
    operations = traffic.count_waiting_host(folder, 3, 20.0)
    assert 0 < operations.per_s <= 1, operations


@pytest.mark.long
def test_all_commands_of_a_host_together_ask_slurm_six_times_a_minute() -> None:
    """Waiters, drivers with helper jobs, followers and a loop of `rlhpc status`, each a process."""
    window_s = 40.0
    figures = traffic.count_queries(window_s)
    assert figures["status commands"] > 3
    assert 1 <= figures["squeue/min"] <= 6
