"""Processes that end with their parent, however it ends, and limits of open files."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rlhpc.runtime.os_resources import max_ranks_of_driver, open_files_of_driver, start_bound_to_parent

PARENT = """
import signal, sys, time
from rlhpc.runtime.os_resources import start_bound_to_parent
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2, signal.SIGTERM})
process = start_bound_to_parent(["bash", "-c", 'grep SigBlk /proc/self/status; exec sleep 60'], stdout=sys.stdout)
print(process.pid, flush=True)
time.sleep(60)
"""


def test_the_command_ends_with_its_parent_and_has_no_signal_blocked() -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    lines = [parent.stdout.readline(), parent.stdout.readline()]
    [blocked] = [line for line in lines if "SigBlk" in line]
    pid = int(next(line for line in lines if line.strip().isdigit()))
    parent.kill()
    parent.communicate()
    assert int(blocked.split()[1], 16) == 0
    end = time.monotonic() + 20
    while Path(f"/proc/{pid}").exists():
        assert time.monotonic() < end, "the command outlived its parent"
        time.sleep(0.02)


def test_it_is_the_command_itself_that_is_started() -> None:
    process = start_bound_to_parent(["bash", "-c", "echo $0 $$ $PPID $MINE; exit 7", "a b"], signal.SIGTERM,
                                    stdout=subprocess.PIPE, env={**os.environ, "MINE": "x y"})  # fmt: skip
    output, _ = process.communicate(timeout=30)
    assert output.decode() == f"a b {process.pid} {os.getpid()} x y\n" and process.returncode == 7


def test_a_command_that_is_not_there() -> None:
    with pytest.raises(FileNotFoundError):
        start_bound_to_parent(["no-such-command-anywhere"])
    with pytest.raises(FileNotFoundError):
        start_bound_to_parent(["bash"], env={"PATH": "/nowhere"})


#: Driver with a limit of open files, which starts 30 ranks.
LIMITED = """
import os, resource, sys
from rlhpc import Cluster, NodePlacementStrategy, Session, Worker
from rlhpc.runtime.errors import ConfigError
soft, hard = map(int, sys.argv[1:])
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
try:
    group = Worker.create_group().launch(Cluster.local(1, 0), NodePlacementStrategy([0] * 30), "many")
    group.barrier().wait()
    print("started", resource.getrlimit(resource.RLIMIT_NOFILE)[0], len(os.listdir("/proc/self/fd")) - 1)
except ConfigError as error:
    print(len(Session.current().processes), error)
Session.current().stop()
"""


@pytest.mark.parametrize("hard", [open_files_of_driver(30) - 1, open_files_of_driver(30)])
def test_a_limit_of_open_files_that_is_too_low_is_refused_before_a_rank_starts(hard: int) -> None:
    """The soft limit is below the need in both cases, and is raised where that helps."""
    driver = subprocess.run(
        [sys.executable, "-c", LIMITED, "70", str(hard)], capture_output=True, text=True, timeout=120
    )
    assert driver.returncode == 0, driver.stderr
    if hard < open_files_of_driver(30):
        need = f"a process may open {hard} files on node {os.uname().nodename}; the driver of 30 ranks needs {hard + 1}"
        assert driver.stdout.startswith(f"0 {need}"), driver.stdout
        assert f"ulimit -n {hard + 1}" in driver.stdout
    else:
        word, soft, num_open = driver.stdout.split()
        assert (word, int(soft)) == ("started", hard)
        assert int(num_open) <= hard


def test_ranks_that_a_limit_of_open_files_allows() -> None:
    assert [max_ranks_of_driver(open_files_of_driver(ranks)) for ranks in (0, 1, 330)] == [0, 1, 330]
    assert max_ranks_of_driver(open_files_of_driver(330) - 1) == 329
    assert max_ranks_of_driver(3) == 0


def test_ended_children_are_reaped_and_others_go_on() -> None:
    """In a process of its own, whose children are these alone; a group ends with all of its processes."""
    program = """
import os, signal, subprocess, sys, time
from rlhpc.runtime.os_resources import kill_group, reaped_children

assert list(reaped_children()) == []
quick = [os.posix_spawn("/bin/sh", ["sh", "-c", f"exit {code}"], {}) for code in (0, 3)]
slow = subprocess.Popen(["sh", "-c", "sleep 600 & wait"], start_new_session=True)
found = {}
while len(found) < 2:
    found.update(reaped_children())
    time.sleep(0.01)
assert {pid: os.waitstatus_to_exitcode(status) for pid, status in found.items()} == dict(zip(quick, (0, 3))), found
assert list(reaped_children()) == []
kill_group(slow.pid, signal.SIGKILL)
while slow.pid not in found:
    found.update(reaped_children())
    time.sleep(0.01)
assert os.waitstatus_to_exitcode(found[slow.pid]) == -signal.SIGKILL
slow.returncode = 0
kill_group(slow.pid, signal.SIGKILL)  # of a process that has ended
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
