"""Watchdog process of a robot with an independent stop. It also works while the driver's process is blocked or dead.

The command is `python -m rlhpc.embodied.robots.watchdog SOCKET`, where SOCKET is an inherited descriptor. The safety
core sends heartbeats. Each heartbeat says whether the robot may be moving, and after how many seconds of silence it
must be stopped.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
import subprocess
import sys
import traceback
from collections.abc import Callable

import cloudpickle

from rlhpc.runtime.imports import python_path, run_module
from rlhpc.runtime.os_resources import readable_descriptors

_BEAT = struct.Struct("!?d")
_READY, _STOPPED, _QUIT = b"ready", b"stopped", b"quit"
#: Maximum seconds until the process has started, including the imports of the stop function.
_START_S = 60.0


class WatchdogProcess:
    """Handle with which the safety core controls the watchdog process.

    Args:
        stop: Function that stops the robot from another process.

    Raises:
        RuntimeError: The process does not start.
    """

    def __init__(self, stop: Callable[[], None]) -> None:
        self._sock, child_sock = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._process = subprocess.Popen(
            run_module("rlhpc.embodied.robots.watchdog", str(child_sock.fileno())),
            pass_fds=(child_sock.fileno(),),
            stdin=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": python_path(foreign=False)},
            start_new_session=True,  # a signal to the driver's process group must not kill this process
        )
        child_sock.close()
        self._sock.settimeout(_START_S)
        try:
            self._sock.send(cloudpickle.dumps(stop))
            has_started = self._sock.recv(64) == _READY
        except OSError:
            has_started = False
        if not has_started:
            self.close()
            raise RuntimeError("the robot's watchdog process did not start; its messages are above")
        self._sock.setblocking(False)
        self._has_fired = False

    def beat(self, *, is_moving: bool, silence_s: float) -> None:
        """Sends a heartbeat to the process.

        Args:
            is_moving: Whether the robot may be moving.
            silence_s: Seconds without a heartbeat after which a moving robot is stopped.
        """
        with contextlib.suppress(BlockingIOError):
            try:
                self._sock.send(_BEAT.pack(is_moving, silence_s))
            except OSError:
                self._has_fired = True

    def has_fired(self) -> bool:
        """Returns whether the process has stopped the robot since the last call or has ended."""
        with contextlib.suppress(BlockingIOError):
            try:
                self._has_fired |= self._sock.recv(64) in (_STOPPED, b"")
            except BlockingIOError:
                raise
            except OSError:
                self._has_fired = True
        has_fired, self._has_fired = self._has_fired, False
        return has_fired

    def close(self) -> None:
        """Ends the process."""
        with contextlib.suppress(OSError):
            self._sock.send(_QUIT)
        self._sock.close()
        try:
            self._process.wait(5.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _stop(stop: Callable[[], None]) -> None:
    try:
        stop()
    except Exception:
        traceback.print_exc()


def watch(sock: socket.socket) -> None:
    """Stops the robot if heartbeats cease while it may be moving, or if the safety core's process is gone."""
    stop = cloudpickle.loads(sock.recv(1 << 20))
    sock.send(_READY)
    is_moving, silence_s = False, 1.0
    while True:
        if not readable_descriptors([sock.fileno()], silence_s):
            if is_moving:
                is_moving = False
                _stop(stop)
                with contextlib.suppress(OSError):
                    sock.send(_STOPPED)
            continue
        try:
            message = sock.recv(64)
        except OSError:
            message = b""
        if message == _QUIT:
            return
        if not message:
            _stop(stop)
            return
        is_moving, silence_s = _BEAT.unpack(message)


def main() -> None:
    """Runs the watchdog process."""
    for signal_number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signal_number, signal.SIG_IGN)  # this process ends after the driver's process
    watch(socket.socket(fileno=int(sys.argv[1])))


if __name__ == "__main__":
    main()
