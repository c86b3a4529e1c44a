"""Watchdog process of a robot: it stops what moves when nobody says that all is well."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import cloudpickle
import pytest

from rlhpc.embodied.robots import watchdog
from rlhpc.embodied.robots.watchdog import WatchdogProcess, watch


def until(condition: Callable[[], bool]) -> None:
    """Waits for a condition."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


class Watched:
    """A watchdog in a thread of this process, and the calls of its function."""

    def __init__(self, path: Path, error: bool = False) -> None:
        self.sock, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.path = path

        def stop() -> None:
            with path.open("a") as file:
                file.write("stop\n")
            if error:
                raise RuntimeError("the robot does not answer")

        self.sock.send(cloudpickle.dumps(stop))
        self.thread = threading.Thread(target=watch, args=(other,), daemon=True)
        self.thread.start()
        assert self.sock.recv(64) == watchdog._READY

    def beat(self, moving: bool, silence_s: float) -> None:
        """Sends a heartbeat."""
        self.sock.send(watchdog._BEAT.pack(moving, silence_s))

    def stops(self) -> int:
        """Returns how often the robot was stopped."""
        return len(self.path.read_text().splitlines()) if self.path.exists() else 0

    def end(self) -> None:
        """Ends it without a stop."""
        self.sock.send(watchdog._QUIT)
        self.thread.join(60)
        assert not self.thread.is_alive()


@pytest.mark.parametrize("error", [False, True])
def test_silence_stops_a_moving_robot_once(tmp_path: Path, error: bool) -> None:
    watched = Watched(tmp_path / "stops", error)
    watched.beat(True, 0.05)
    assert watched.sock.recv(64) == watchdog._STOPPED
    time.sleep(0.2)
    assert watched.stops() == 1
    watched.beat(True, 0.05)
    until(lambda: watched.stops() == 2)
    watched.end()


def test_a_robot_that_stands_still_needs_no_heartbeat(tmp_path: Path) -> None:
    watched = Watched(tmp_path / "stops")
    watched.beat(False, 0.01)
    time.sleep(0.1)
    watched.end()
    assert watched.stops() == 0


def test_the_end_of_the_sender_stops_the_robot(tmp_path: Path) -> None:
    watched = Watched(tmp_path / "stops")
    watched.beat(False, 60.0)
    watched.sock.close()
    watched.thread.join(60)
    assert watched.stops() == 1


@pytest.fixture
def process(tmp_path: Path) -> Iterator[WatchdogProcess]:
    """Returns a watchdog in a process of its own, which writes `stopped`."""
    path = str(tmp_path / "stopped")

    def stop() -> None:
        open(path, "w").close()

    process = WatchdogProcess(stop)
    yield process
    process.close()


def test_a_process_stops_the_robot_and_says_so_once(process: WatchdogProcess, tmp_path: Path) -> None:
    assert not process.has_fired()
    process.beat(is_moving=True, silence_s=0.05)
    until(process.has_fired)
    assert (tmp_path / "stopped").exists() and not process.has_fired()


def test_the_end_of_the_process_itself_counts(process: WatchdogProcess, tmp_path: Path) -> None:
    os.kill(process._process.pid, signal.SIGTERM)  # which it ignores
    process.beat(is_moving=False, silence_s=60.0)
    assert not process.has_fired() and process._process.poll() is None
    process._process.kill()
    process._process.wait(60)
    until(process.has_fired)
    process.beat(is_moving=True, silence_s=1.0)
    assert process.has_fired()


def test_a_process_that_does_not_start_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "run_module", lambda *words: ["false"])
    with pytest.raises(RuntimeError, match="the robot's watchdog process did not start"):
        WatchdogProcess(print)
