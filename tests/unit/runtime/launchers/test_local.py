"""Launcher of ranks on this host, with a fork server that the test plays."""

from __future__ import annotations

import pickle
import queue
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlhpc import Cluster, WorkerFailed
from rlhpc.runtime import pickle_stream
from rlhpc.runtime.errors import RlhpcError, SubmitError
from rlhpc.runtime.launchers import RankProcess
from rlhpc.runtime.launchers.local import ForkLauncher
from rlhpc.runtime.worker_spec import WorkerSpec
from tests.eventually import wait_until


class RecordingReports:
    """Receiver of a launcher's reports that records them."""

    def __init__(self) -> None:
        self.calls: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()

    def record_start(self, member: RankProcess, pid: int) -> None:
        self.calls.put(("started", member.spec.name, pid))

    def record_exit(self, member: RankProcess, status: int) -> None:
        member.has_exited = True
        self.calls.put(("exited", member.spec.name, status))

    def record_ends(self, members: Sequence[RankProcess]) -> list[RankProcess]:
        unexpected = [member for member in members if not member.has_exited]
        for member in unexpected:
            member.has_exited = True
        return unexpected

    def fail(self, failure: RlhpcError) -> None:
        self.calls.put(("failed", type(failure), str(failure)))


class Launching:
    """Launcher whose fork server is played by the test."""

    def __init__(self, folder: Path) -> None:
        self.reports, self.folder = RecordingReports(), folder
        control, self.server_end = socket.socketpair()
        self.server_end.settimeout(60)
        self.process = subprocess.Popen(["sleep", "600"])
        self.output_file = folder / "output"
        self.output_file.write_text("the server's last words\n")
        server: Any = SimpleNamespace(control=control, process=self.process, output_file=self.output_file)
        self.launcher = ForkLauncher(server, folder, self.reports)
        self.cluster = Cluster.local(num_nodes=1, accelerators_per_node=4)

    def member(self, rank: int, *accelerators: int) -> RankProcess:
        spec = WorkerSpec(
            "group", rank, 2, "here", 0, rank, 2, accelerators, "registry", "token", b"", "out", "err", incarnation="i1"
        )
        return RankProcess(spec, self.launcher)

    def request(self) -> dict[str, Any]:
        """Returns the launcher's next request to the server."""
        request = pickle_stream.receive(self.server_end)
        assert request is not None
        return request  # type: ignore[no-any-return]

    def event(self, **event: Any) -> None:
        """Sends the launcher an event of the server."""
        pickle_stream.send(self.server_end, event)

    def report(self) -> tuple[Any, ...]:
        """Returns the next report."""
        return self.reports.calls.get(timeout=60)

    def end_server(self) -> None:
        self.process.kill()
        self.process.wait()
        self.server_end.close()


@pytest.fixture
def launching(tmp_path: Path) -> Iterator[Launching]:
    made = Launching(tmp_path)
    yield made
    made.end_server()


def test_ranks_are_started_and_their_events_reported(launching: Launching) -> None:
    first, second = members = [launching.member(0), launching.member(1)]
    launching.launcher.start(members, launching.cluster)
    requests = [launching.request(), launching.request()]
    assert [request["op"] for request in requests] == ["start", "start"]
    assert [pickle.loads(request["spec"]) for request in requests] == [first.spec, second.spec]
    launching.event(event="started", rank=first.spec.identity, pid=7)
    launching.event(event="exit", rank=("group-0", "another start"), status=9)  # of nobody any more
    launching.event(event="exit", rank=first.spec.identity, status=256)
    launching.event(event="refused", rank=second.spec.identity, error="no such file")
    assert [launching.report() for _ in range(3)] == [
        ("started", "group-0", 7),
        ("exited", "group-0", 256),
        ("failed", SubmitError, "cannot start group-1 on here: no such file"),
    ]


def test_signals_go_to_ranks_that_have_not_ended(launching: Launching) -> None:
    first, second = members = [launching.member(0), launching.member(1)]
    first.has_exited = True
    launching.launcher.end(members)
    launching.launcher.kill(members)
    ranks = [second.spec.identity]
    assert launching.request() == {"op": "kill", "ranks": ranks, "signal": signal.SIGTERM}
    assert launching.request() == {"op": "kill", "ranks": ranks, "signal": signal.SIGKILL}


@pytest.mark.parametrize(
    ("ready", "moment"), [(True, "and its workers with it"), (False, "before it had started a rank")]
)
def test_the_end_of_the_server_is_a_failure(launching: Launching, ready: bool, moment: str) -> None:
    """Its output is in the message, and in the log that the message names."""
    launching.launcher.start([launching.member(0)], launching.cluster)
    if ready:
        launching.event(event="ready", pid=1)
    launching.end_server()
    kind, error, message = launching.report()
    log = launching.folder / "forkserver.err"
    assert (kind, error) == ("failed", WorkerFailed) and "the server's last words" in message
    assert f"the fork server of node here died, {moment} (log {log})" in message
    assert log.read_text() == "the server's last words\n"
    launching.launcher.start([launching.member(1)], launching.cluster)
    assert "and can start no more ranks" in launching.report()[2]


def test_a_server_that_still_imports_is_killed_instead_of_asked(launching: Launching) -> None:
    assert launching.launcher.cut_short()
    assert launching.process.wait(60) == -signal.SIGKILL
    launching.event(event="ready", pid=1)
    wait_until(lambda: not launching.launcher.cut_short(), 60)


def test_a_rank_sees_its_accelerators_and_gets_an_interpreter_if_it_may_not_be_forked(launching: Launching) -> None:
    node = replace(launching.cluster.nodes[0], visible_devices=("4", "5", "6", "7"))
    spec = launching.member(0, 1, 3).spec
    launching.launcher.prepare(spec, node, fork=True)
    assert spec.env == {"CUDA_VISIBLE_DEVICES": "5,7"} and spec.interpreter == ""
    launching.launcher.prepare(spec, node, fork=False)
    assert spec.interpreter == sys.executable
    spec.interpreter, spec.env = "/other/python", {"CUDA_VISIBLE_DEVICES": "0"}
    launching.launcher.prepare(spec, node, fork=False)
    assert spec.interpreter == "/other/python" and spec.env == {"CUDA_VISIBLE_DEVICES": "0"}


def test_a_rank_on_another_node_is_refused(launching: Launching) -> None:
    node = replace(launching.cluster.nodes[0], name="elsewhere", is_local=False)
    with pytest.raises(SubmitError, match="node elsewhere is not this machine: rank 0 of 'group' needs a job step"):
        launching.launcher.prepare(launching.member(0).spec, node, fork=True)
