"""Tasks of a job step on one node: one process imports for all of them, and each rank ends with its task and the other way."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil
import pytest

from rlhpc.runtime.imports import import_paths
from rlhpc.runtime.launchers.srun_commands import killing_step
from rlhpc.runtime.scratch import Scratch
from tests.eventually import has_ended, is_there, wait_until
from tests.extras import need_extra, need_programs

#: Task of a step: asks the node's server for its rank, or says that it runs the rank itself. Arguments: the scratch token, the
#: folder for logs, the number of tasks, the rank's action, the modules to import.
TASK = """
import os, sys
from rlhpc.runtime.launchers import node_fork
from rlhpc.runtime.scratch import Scratch
from rlhpc.runtime.worker_spec import WorkerSpec

token, folder, size, action, *modules = sys.argv[1:]
rank = int(os.environ["SLURM_PROCID"])
Scratch(token).ensure()
variables = dict(word.split("=") for word in os.environ.get("RANK_VARIABLES", "").split())
if os.environ.get("OTHER_CONTAINER"):
    node_fork._read_namespaces = lambda: (1, 2)
spec = WorkerSpec(
    "group", rank, int(size), "node", 0, rank, int(size), (), "registry", token, action.encode(), f"{folder}/{rank}.out",
    f"{folder}/{rank}.err", incarnation=f"i{rank}" if os.environ.get("JOINED") else "i1", preload=modules, env=variables,
)
status = node_fork.run_forked(
    spec, "tests.unit.runtime.launchers.rank_entries:run", is_joined=bool(os.environ.get("JOINED"))
)
Scratch(token).leave()
if status is None:
    print("by itself", flush=True)
else:
    node_fork.end_like(status)
"""


ENTRIES = "tests.unit.runtime.launchers.rank_entries"


class Step:
    """Tasks of a step on this node, as Slurm starts them."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.scratch = folder, Scratch.create()
        self.mark = self.scratch.token
        self.tasks: list[subprocess.Popen[str]] = []

    def start(self, size: int, action: str, *modules: str, prefix: tuple[str, ...] = (), **variables: str) -> None:
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(import_paths()),
            "RLHPC_STEP": self.mark,
            **variables,
        }
        command = [
            *prefix,
            sys.executable,
            "-P",
            "-c",
            TASK,
            self.scratch.token,
            str(self.folder),
            str(size),
            action,
            *modules,
        ]
        self.tasks += [
            subprocess.Popen(
                command, env={**environment, "SLURM_PROCID": str(rank)}, text=True, stdout=subprocess.PIPE,
                stderr=subprocess.PIPE, stdin=subprocess.PIPE, cwd=self.folder,
            )
            for rank in range(len(self.tasks), len(self.tasks) + size)
        ]  # fmt: skip

    def ends(self) -> list[int]:
        """Exit codes of the tasks, once they have ended."""
        return [task.wait(60) for task in self.tasks]

    def forked(self, rank: int) -> int:
        """Process id of a forked rank, once it is known."""
        path = self.scratch.sockets / f"forked-{self.mark}-{rank}"
        wait_until(lambda: path.exists() and bool(path.read_text()), 30)
        return int(path.read_text())

    def close(self) -> None:
        for task in self.tasks:
            task.kill()
            task.communicate()
        self.scratch.remove()
        self.scratch.release()


@pytest.fixture
def step(tmp_path: Path) -> Iterator[Step]:
    step = Step(tmp_path)
    yield step
    step.close()


def test_a_task_ends_as_its_rank_ends(step: Step) -> None:
    step.start(3, "exit 3")
    assert step.ends() == [3, 3, 3]


def test_a_rank_that_is_killed_kills_its_task_and_no_other(step: Step) -> None:
    step.start(3, "wait")
    pids = [step.forked(rank) for rank in range(3)]
    os.kill(pids[1], signal.SIGKILL)
    assert step.tasks[1].wait(30) == -signal.SIGKILL
    assert [task.poll() for task in (step.tasks[0], step.tasks[2])] == [None, None]
    assert is_there(pids[0]) and is_there(pids[2])
    wait_until(lambda: not (step.scratch.sockets / f"forked-{step.mark}-1").exists(), 30)


def parent_of(pid: int) -> int:
    return psutil.Process(pid).ppid()


def join_ranks(step: Step, count: int, action: str, *modules: str) -> None:
    """Starts processes that join a run, one after another; no task has neighbours that it knows of."""
    for _ in range(count):
        step.start(1, action, *modules, JOINED="1")
        step.forked(len(step.tasks) - 1)


def test_ranks_that_join_one_after_another_share_a_server(step: Step) -> None:
    join_ranks(step, 3, "wait", f"{ENTRIES}:note_import")
    [server] = {parent_of(step.forked(rank)) for rank in range(3)}
    assert (step.folder / "imports").read_text().split() == [str(server)]
    for task in step.tasks:
        task.kill()
    wait_until(lambda: has_ended(server), 30)
    join_ranks(step, 1, "wait")
    assert parent_of(step.forked(3)) != server, "the next one starts another server"


def test_a_joined_rank_reads_what_its_process_is_told(step: Step) -> None:
    join_ranks(step, 2, "read")
    for rank, task in enumerate(step.tasks):
        assert task.communicate(f"leave {rank}", timeout=60)[0] == f"leave {rank}\n"


def test_a_joined_rank_whose_process_is_told_to_leave_does_not_wait_for_the_imports(step: Step) -> None:
    step.start(1, "exit 0", f"{ENTRIES}:note_import", f"{ENTRIES}:import_slowly", JOINED="1")
    imports = step.folder / "imports"
    wait_until(imports.exists, 30)
    task = step.tasks[0]
    assert task.stdin is not None and task.stderr is not None
    task.stdin.write("L")
    task.stdin.flush()
    assert step.ends() == [1] and "was told to leave before it had started" in task.stderr.readline()
    (step.folder / "go on").touch()
    assert has_ended(int(imports.read_text()), 60), "the server ends without ranks"


def test_a_joined_rank_is_killed_with_its_process(step: Step) -> None:
    join_ranks(step, 2, "wait on")
    pids = [step.forked(rank) for rank in range(2)]
    wait_until(lambda: (step.folder / "0.out").exists(), 30)
    step.tasks[0].kill()
    assert has_ended(pids[0], 60) and is_there(pids[1])


def test_a_task_that_is_killed_takes_its_rank_and_what_that_has_started(step: Step) -> None:
    step.start(2, "wait")
    pids = [step.forked(rank) for rank in range(2)]
    wait_until(lambda: (step.folder / "0.out").exists(), 30)
    step.tasks[0].kill()
    wait_until(lambda: has_ended(pids[0]), 30)
    assert is_there(pids[1]) and step.tasks[1].poll() is None
    step.tasks[1].terminate()
    wait_until(lambda: has_ended(pids[1]), 30)


@pytest.mark.parametrize("given_up", range(3))
def test_a_rank_that_is_given_up_is_killed_with_its_task_and_no_other(step: Step, given_up: int) -> None:
    """By the command of a job step; each of them in turn, since one of the tasks has started the server."""
    need_programs("bash", "grep")
    step.start(3, "wait")
    pids = [step.forked(rank) for rank in range(3)]
    os.kill(pids[given_up], signal.SIGSTOP)
    words = killing_step(0, 1, "here", f"RLHPC_STEP={step.mark}", given_up, step.scratch.sockets)
    subprocess.run(words[words.index("bash") :], check=True, timeout=60)
    assert has_ended(pids[given_up]) and step.tasks[given_up].wait(30) == -signal.SIGKILL
    others = [rank for rank in range(3) if rank != given_up]
    assert all(is_there(pids[rank]) for rank in others)
    assert all(step.tasks[rank].poll() is None for rank in others)


def test_a_rank_has_its_tasks_environment_and_output(step: Step) -> None:
    step.start(2, "environment SLURM_PROCID")
    assert [task.communicate(timeout=60)[0] for task in step.tasks] == ["0 True\n", "1 True\n"]


def test_tasks_in_containers_of_their_own_import_by_themselves(step: Step) -> None:
    step.start(2, "exit 3", OTHER_CONTAINER="1")
    assert [task.communicate(timeout=60)[0] for task in step.tasks] == ["by itself\n"] * 2
    assert step.ends() == [0, 0]


def test_the_end_of_the_server_ends_ranks_and_tasks(step: Step) -> None:
    step.start(2, "wait")
    pids = [step.forked(rank) for rank in range(2)]
    [server] = {int(re.search(r"PPid:\s*(\d+)", Path(f"/proc/{pid}/status").read_text())[1]) for pid in pids}  # type: ignore[index]
    os.kill(server, signal.SIGKILL)
    assert step.ends() == [1, 1]
    assert "the server that forked group-0 on this node has ended" in step.tasks[0].communicate()[1]
    wait_until(lambda: all(map(has_ended, pids)), 30)


def test_a_rank_has_the_variables_that_an_import_has_set_unless_it_has_others(step: Step) -> None:
    step.start(2, "environment RLHPC_TEST_IMPORTED", f"{ENTRIES}:set_variable")
    assert [task.communicate(timeout=60)[0] for task in step.tasks] == ["by the server True\n"] * 2


def test_a_rank_keeps_a_variable_that_differs_from_the_one_before_the_import(step: Step) -> None:
    # The server starts with the variables of the first task's rank, so it has this one, and the tasks do not.
    step.start(
        2, "environment RLHPC_TEST_IMPORTED", f"{ENTRIES}:set_variable", RANK_VARIABLES="RLHPC_TEST_IMPORTED=rank"
    )
    assert [task.communicate(timeout=60)[0] for task in step.tasks] == ["None True\n"] * 2


@pytest.mark.parametrize(
    ("function", "reason"), [("open_device", "it opens"), ("fail", "it fails: RuntimeError: no driver")]
)
def test_an_import_that_cannot_be_forked_is_left_to_the_ranks(
    step: Step, tmp_path: Path, function: str, reason: str
) -> None:
    """The others are made once all the same; nothing of the refused one is left in the server."""
    device = tmp_path / "dev" / "nvidia0"
    device.parent.mkdir()
    items = (f"{ENTRIES}:{function}", "numpy")
    step.start(2, "environment RLHPC_TEST_IMPORTED", *items, RLHPC_TEST_DEVICE_FILE=str(device))
    assert [task.communicate(timeout=60)[0] for task in step.tasks] == ["None True\n"] * 2
    logs = "".join(path.read_text() for path in step.folder.glob("*.err"))
    assert f"makes the import {items[0]} by itself, because {reason}" in logs


def count_opens(folder: Path, package: str) -> int:
    """Files of a package that processes have opened, as strace has recorded it."""
    opened = re.compile(rf"open(at)?\(.*/{package}/.*\) = \d")
    return sum(bool(opened.search(line)) for path in folder.glob("trace.*") for line in path.read_text().splitlines())


def opens_by_size(
    make_step: Callable[[], Step], package: str, action: str, items: Sequence[str], sizes: Sequence[int]
) -> list[int]:
    """Files of a package that the ranks of a node and their server open, for each number of ranks."""
    need_programs("strace")
    counts = []
    for size in sizes:
        counted = make_step()
        prefix = (
            "strace",
            "--follow-forks",
            "--output-separately",
            "--seccomp-bpf",
            "-e",
            "trace=open,openat",
            f"--output={counted.folder}/trace",
        )
        counted.start(size, action, *items, prefix=prefix)
        assert [task.wait(500) for task in counted.tasks] == [0] * size
        counts.append(count_opens(counted.folder, package))
    return counts


def test_a_node_opens_a_package_once_whatever_the_number_of_ranks(make_step: Callable[[], Step]) -> None:
    counts = opens_by_size(make_step, "numpy", "exit 0", ["numpy"], (1, 4, 8))
    assert counts[0] > 50 and counts == [counts[0]] * 3


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_a_node_imports_vllm_once_whatever_the_number_of_ranks(make_step: Callable[[], Step]) -> None:
    """With what it imports while it builds an engine; each rank then asks for the same again."""
    need_extra("llm", "vllm")
    from rlhpc.language.engines.registry import engine_preload

    items = engine_preload("vllm")
    counts = opens_by_size(make_step, "vllm", f"import {' '.join(items)}", items, (1, 3))
    assert counts[0] > 500 and counts == [counts[0]] * 2


@pytest.fixture
def make_step(tmp_path: Path) -> Iterator[Callable[[], Step]]:
    steps: list[Step] = []

    def make() -> Step:
        folder = tmp_path / f"step{len(steps)}"
        folder.mkdir()
        steps.append(Step(folder))
        return steps[-1]

    yield make
    for made in steps:
        made.close()
