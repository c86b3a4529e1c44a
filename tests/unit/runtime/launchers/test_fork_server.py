"""Fork server: starts, signals and ends of ranks, and its own end with the driver."""

from __future__ import annotations

import os
import pickle
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from rlhpc.runtime import pickle_stream
from rlhpc.runtime.imports import import_paths, run_module
from rlhpc.runtime.scratch import Scratch
from rlhpc.runtime.worker_spec import WorkerSpec
from tests.eventually import has_ended, wait_until

ENTRY = "tests.unit.runtime.launchers.rank_entries:run"


class Server:
    """Process of a fork server, with the driver's end of its socket."""

    def __init__(self, folder: Path, *modules: str, driver: int = 0) -> None:
        self.folder, self.scratch = folder, Scratch.create()
        self.control, end = socket.socketpair()
        self.control.settimeout(60)
        self.process = subprocess.Popen(
            run_module(
                "rlhpc.runtime.launchers.fork_server", str(end.fileno()), self.scratch.token,
                str(driver or os.getpid()), ENTRY, *modules,
            ),
            pass_fds=[end.fileno()], start_new_session=True, cwd=folder,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([*import_paths(), str(folder)])},
        )  # fmt: skip
        end.close()

    def next_event(self) -> dict[str, Any]:
        event = pickle_stream.receive(self.control)
        assert event is not None, "the server has ended"
        return event  # type: ignore[no-any-return]

    def request(self, action: str, rank: int = 0, **fields: Any) -> WorkerSpec:
        """Requests a rank; returns its specification."""
        log = self.folder / f"{rank}"
        spec = WorkerSpec(
            "group", rank, 2, "node", 0, rank, 2, (), "registry", self.scratch.token, action.encode(), f"{log}.out",
            f"{log}.err", sys_path=import_paths(), incarnation="i1",
        )  # fmt: skip
        spec = replace(spec, **fields)
        pickle_stream.send(self.control, {"op": "start", "spec": pickle.dumps(spec)})
        return spec

    def start(self, action: str, rank: int = 0, **fields: Any) -> tuple[WorkerSpec, dict[str, Any]]:
        """Requests a rank; returns its specification and the server's answer."""
        return self.request(action, rank, **fields), self.next_event()

    def kill(self, *ranks: tuple[str, str], number: int = signal.SIGKILL) -> None:
        pickle_stream.send(self.control, {"op": "kill", "ranks": list(ranks), "signal": number})

    def has_folders(self) -> bool:
        return any(folder.exists() for folder in self.scratch.folders)

    def close(self) -> None:
        self.control.close()
        self.process.wait(60)
        self.scratch.remove()
        self.scratch.release()


@pytest.fixture
def start_server(tmp_path: Path) -> Iterator[Callable[..., Server]]:
    servers: list[Server] = []

    def start(*modules: str, **options: Any) -> Server:
        servers.append(Server(tmp_path, *modules, **options))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


@pytest.fixture
def server(start_server: Callable[..., Server]) -> Server:
    server = start_server()
    assert server.next_event() == {"event": "ready", "pid": server.process.pid}
    return server


@pytest.mark.parametrize(("action", "status"), [("exit 0", 0), ("exit 3", 3 << 8), ("raise", 1 << 8)])
def test_the_start_and_the_end_of_a_rank_are_reported(server: Server, action: str, status: int) -> None:
    spec, answer = server.start(action)
    assert answer == {"event": "started", "rank": spec.identity, "pid": answer["pid"]}
    assert server.next_event() == {"event": "exit", "rank": spec.identity, "status": status}


def test_only_the_given_ranks_get_a_signal(server: Server) -> None:
    first, _ = server.start("wait")
    second, _ = server.start("wait", rank=1)
    wait_until(lambda: Path(first.log_out).exists() and Path(second.log_out).exists(), 60)
    server.kill((first.name, "an earlier start"), second.identity)
    assert server.next_event() == {"event": "exit", "rank": second.identity, "status": signal.SIGKILL}
    server.kill(first.identity, number=signal.SIGTERM)
    assert server.next_event() == {"event": "exit", "rank": first.identity, "status": signal.SIGTERM}


def test_the_processes_that_a_rank_has_started_end_with_it(server: Server) -> None:
    spec, _ = server.start("leave child")
    assert server.next_event()["status"] == 0
    assert has_ended(int(Path(spec.log_out).read_text()), 60)


def test_a_rank_with_an_interpreter_reads_its_specification_there(server: Server) -> None:
    fields: dict[str, Any] = {"interpreter": sys.executable, "env": {"OF_THE_RANK": "its value"}}
    spec, _ = server.start("environment OF_THE_RANK", **fields)
    assert server.next_event() == {"event": "exit", "rank": spec.identity, "status": 0}
    assert Path(spec.log_out).read_text() == "its value True\n", Path(spec.log_err).read_text()


def test_an_interpreter_that_does_not_exist_is_refused(server: Server) -> None:
    spec, answer = server.start("exit 0", interpreter="/no/such/python")
    assert (answer["event"], answer["rank"]) == ("refused", spec.identity)
    assert "No such file or directory: '/no/such/python'" in answer["error"]
    assert server.start("exit 0", rank=1)[1]["event"] == "started", "the server goes on"


@pytest.mark.parametrize("driver", ["stops it", "has ended"])
def test_the_server_ends_its_ranks_and_removes_the_folders(server: Server, driver: str) -> None:
    spec, answer = server.start("wait")
    wait_until(lambda: Path(spec.log_out).exists(), 60)
    assert server.has_folders()
    if driver == "stops it":
        pickle_stream.send(server.control, {"op": "stop"})
    else:
        server.control.shutdown(socket.SHUT_RDWR)
    assert server.process.wait(60) == 0
    assert has_ended(answer["pid"]) and not server.has_folders()


def test_signals_of_the_job_do_not_end_the_server(server: Server) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP):
        server.process.send_signal(number)
    assert server.start("exit 0")[1]["event"] == "started"


def test_modules_are_imported_before_the_first_rank(start_server: Callable[..., Server], tmp_path: Path) -> None:
    """One that is missing is the affair of the rank that needs it."""
    (tmp_path / "preloaded.py").write_text("import os\nos.environ['PRELOADED_BY'] = str(os.getpid())\n")
    server = start_server("no_such_module", "preloaded")
    assert server.next_event()["event"] == "ready"
    spec, _ = server.start("environment PRELOADED_BY", interpreter=sys.executable)
    assert server.next_event()["status"] == 0
    assert Path(spec.log_out).read_text().split()[0] == str(server.process.pid)


def test_the_end_of_the_driver_ends_the_imports(start_server: Callable[..., Server], tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    (tmp_path / "endless.py").write_text(
        f"import time\nopen({str(mark)!r}, 'w').close()\nwhile True:\n    time.sleep(0.01)\n"
    )
    server = start_server("endless")
    wait_until(mark.exists, 60)
    server.control.shutdown(socket.SHUT_RDWR)
    assert server.process.wait(60) == 0 and not server.has_folders()


def test_a_server_whose_driver_ended_before_it_started_serves_nobody(start_server: Callable[..., Server]) -> None:
    server = start_server(driver=1)
    assert server.process.wait(60) == 0
    assert pickle_stream.receive(server.control) is None and not server.has_folders()


ENTRIES = "tests.unit.runtime.launchers.rank_entries"


def start_ranks(server: Server, action: str, items: list[str], size: int) -> list[int]:
    """Starts ranks of a group with imports of its own; returns their statuses in the order of their ends."""
    for rank in range(size):
        server.request(action, rank, local_world_size=size, preload=items)
    statuses: list[int] = []
    while len(statuses) < size:
        event = server.next_event()
        assert event["event"] in ("started", "exit"), event
        statuses += [event["status"]] if event["event"] == "exit" else []
    return statuses


def test_the_ranks_of_a_host_import_once(server: Server, tmp_path: Path) -> None:
    """Nor does the group import again when it starts again; another group with the same imports has them already."""
    for _ in range(2):
        assert start_ranks(server, "exit 0", [f"{ENTRIES}:note_import"], 5) == [0] * 5
    [importer] = (tmp_path / "imports").read_text().split()
    assert int(importer) != server.process.pid, "the server itself must be able to fork ranks of other groups"


def test_what_the_server_has_imported_needs_no_other_process(start_server: Callable[..., Server]) -> None:
    server = start_server("numpy")
    assert server.next_event()["event"] == "ready"
    start_ranks(server, "parent", ["numpy"], 2)
    assert {Path(f"{server.folder}/{rank}.out").read_text() for rank in range(2)} == {str(server.process.pid)}


@pytest.mark.parametrize(
    ("function", "reason"), [("open_device", "it opens"), ("fail", "it fails: RuntimeError: no driver")]
)
def test_an_import_that_cannot_be_forked_is_left_to_the_ranks(
    start_server: Callable[..., Server], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, function: str, reason: str
) -> None:
    """The others are made once all the same; nothing of the refused one is left in the process that forks."""
    device = tmp_path / "dev" / "nvidia0"
    device.parent.mkdir()
    monkeypatch.setenv("RLHPC_TEST_DEVICE_FILE", str(device))
    server = start_server()
    assert server.next_event()["event"] == "ready"
    items = [f"{ENTRIES}:{function}", f"{ENTRIES}:set_variable"]
    start_ranks(server, "write RLHPC_TEST_IMPORTED", items, 3)
    assert [(tmp_path / f"{rank}.out").read_text() for rank in range(3)] == ["by the server"] * 3
    log = (tmp_path / "0.err").read_text()
    assert log.count("makes the import") == 1 and f"import {items[0]} by itself, because {reason}" in log


def test_an_import_that_ends_its_process_is_left_to_the_ranks(server: Server) -> None:
    start_ranks(server, "exit 0", [f"{ENTRIES}:crash"], 2)
    assert "because the process that made it has ended" in (server.folder / "0.err").read_text()


def test_a_rank_that_waits_for_imports_can_be_killed(server: Server) -> None:
    """The server serves other ranks while the imports of a group take place."""
    spec = server.request("exit 0", preload=[f"{ENTRIES}:import_endlessly"])
    assert server.start("exit 3", rank=1)[1]["event"] == "started"
    assert server.next_event()["status"] == 3 << 8
    server.kill(spec.identity)
    assert server.next_event() == {"event": "exit", "rank": spec.identity, "status": signal.SIGKILL}
    pickle_stream.send(server.control, {"op": "stop"})
    assert server.process.wait(60) == 0 and not server.has_folders()


def test_ranks_with_imports_get_signals_and_end_with_the_server(server: Server) -> None:
    items = [f"{ENTRIES}:set_variable"]
    first, answer = server.start("wait", preload=items)
    second, _ = server.start("wait", rank=1, preload=items)
    wait_until(lambda: Path(first.log_out).exists() and Path(second.log_out).exists(), 60)
    server.kill(second.identity, number=signal.SIGTERM)
    assert server.next_event() == {"event": "exit", "rank": second.identity, "status": signal.SIGTERM}
    pickle_stream.send(server.control, {"op": "stop"})
    assert server.next_event()["rank"] == first.identity
    assert server.process.wait(60) == 0
    assert has_ended(answer["pid"]) and not server.has_folders()


def test_the_end_of_an_import_server_is_the_end_of_its_ranks_alone(server: Server) -> None:
    spec, answer = server.start("wait", preload=[f"{ENTRIES}:set_variable"])
    wait_until(lambda: Path(spec.log_out).exists(), 60)
    os.kill(psutil.Process(answer["pid"]).ppid(), signal.SIGKILL)
    assert server.next_event() == {"event": "exit", "rank": spec.identity, "status": signal.SIGKILL}
    assert has_ended(answer["pid"], 60)
    _, answer = server.start("exit 0", rank=1, preload=[f"{ENTRIES}:set_variable"])
    assert answer["event"] == "started" and server.next_event()["status"] == 0
