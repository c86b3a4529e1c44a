"""Simulator process: builds a vector environment for its parent (`subprocess_env`) and executes its calls until the
parent has ended.

The parent starts it as `python -m rlhpc.embodied.envs.subprocess_main SOCKET LIFELINE`; both arguments are inherited
file descriptors.
"""

from __future__ import annotations

import fcntl
import os
import pickle
import select
import signal
import socket
import struct
import sys
import threading
import time
import traceback
from typing import Any

_HEADER = struct.Struct("!Q")


def send(sock: socket.socket, message: Any, deadline: float | None = None) -> None:
    """Sends one message.

    Raises:
        TimeoutError: The other end did not read it in time.
        OSError: The other end has closed.
    """
    content = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    _set_timeout(sock, deadline)
    sock.sendall(_HEADER.pack(len(content)) + content)


def receive(sock: socket.socket, deadline: float | None = None) -> Any:
    """Receives one message.

    Raises:
        TimeoutError: The message did not arrive in time.
        EOFError, OSError: The other end has closed.
    """
    (size,) = _HEADER.unpack(_receive_bytes(sock, _HEADER.size, deadline))
    return pickle.loads(_receive_bytes(sock, size, deadline))


def _receive_bytes(sock: socket.socket, size: int, deadline: float | None) -> bytearray:
    content = bytearray(size)
    view, num_received = memoryview(content), 0
    while num_received < size:
        # The deadline applies to the complete message: a process may be stopped in the middle of it.
        _set_timeout(sock, deadline)
        num_bytes = sock.recv_into(view[num_received:])
        if not num_bytes:
            raise EOFError("the other end has closed")
        num_received += num_bytes
    return content


def _set_timeout(sock: socket.socket, deadline: float | None) -> None:
    # The timeout stays positive after the deadline, so that data that has arrived is still read: the process may have waited
    # for another simulator until the deadline.
    sock.settimeout(None if deadline is None else max(deadline - time.monotonic(), 0.05))


def kill_on_close(lifeline: int) -> None:
    """Makes the kernel kill this process when the other end of a pipe closes, even while the process hangs or is
    stopped.
    """
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)
    if _close_poller(lifeline).poll(0):
        os._exit(1)


def _close_poller(lifeline: int) -> select.poll:
    """Returns a poll object that reports when a pipe's other end closes. `select.select` refuses descriptors above
    1023.
    """
    poller = select.poll()
    poller.register(lifeline, select.POLLIN)
    return poller


#: Maximum seconds for stopping and closing hardware, after the parent has ended or requests it.
CLOSE_S = 5.0


def close_hardware_on_close(lifeline: int, env: Any) -> None:
    """Starts a thread that closes the hardware and ends this process when the other end of a pipe closes. The thread
    works even while a call hangs. It replaces `kill_on_close`, which kills the process before the hardware is stopped.
    """
    fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) & ~os.O_ASYNC)

    def watch() -> None:
        _close_poller(lifeline).poll()
        close_thread = threading.Thread(target=env.close, name="close-hardware", daemon=True)
        close_thread.start()
        close_thread.join(CLOSE_S)
        os._exit(0)

    threading.Thread(target=watch, name="simulator-lifeline", daemon=True).start()


class _SlotCalls:
    """Slots of the process, and the methods that the parent calls on them.

    Args:
        env: Vector environment of the process.
        sock: Connection to the parent.
    """

    def __init__(self, env: Any, sock: socket.socket) -> None:
        self.env = env
        if env.holds_hardware:
            env.on_wait = lambda reason: send(sock, ("waits", reason))

    def step(self, actions: Any) -> Any:
        """Steps the slots, and adds a robot's timing to the infos."""
        return self._add_timing(self.env.step(actions))

    def chunk_step(self, actions: Any) -> Any:
        """Executes an action chunk, and adds a robot's timing to the infos."""
        return self._add_timing(self.env.chunk_step(actions))

    def _add_timing(self, step: Any) -> Any:
        if self.env.timing is not None:
            step[4]["timing"] = self.env.timing.pop_measurements()
        return step

    def save(self) -> list[Any]:
        """Returns the state of each slot."""
        state = self.env.state_dict()
        return [self.env.slot_state(state, i) for i in range(self.env.num_envs)]

    def load(self, slots: list[Any]) -> None:
        """Restores the states that `save` returned."""
        self.env.load_state_dict(self.env.merge_states(slots))


#: Attributes of an environment that the parent's `ProcessVectorEnv` copies.
ENV_PROPERTIES = (
    "observation_space", "action_space", "supports_state", "max_episode_steps", "record_kwargs", "holds_hardware",
    "control_hz", "task_names",
)  # fmt: skip


def serve(sock: socket.socket, lifeline: int) -> None:
    """Builds the environment that the first message describes, and executes calls until the parent closes the
    connection.
    """
    from rlhpc.runtime.errors import ConfigError

    factory, cfg, kwargs = pickle.loads(receive(sock))
    try:
        env = factory(cfg, **kwargs)
    except ConfigError as error:
        send(sock, ("config", str(error)))
        return
    except Exception:
        send(sock, ("raised", traceback.format_exc()))
        return
    if env.holds_hardware:
        close_hardware_on_close(lifeline, env)
    env_properties = {name: getattr(env, name) for name in ENV_PROPERTIES}
    send(sock, ("done", {**env_properties, "timed": env.timing is not None}))
    try:
        _execute_calls(sock, env)
    finally:
        if env.holds_hardware:
            env.close()


def _execute_calls(sock: socket.socket, env: Any) -> None:
    from rlhpc.runtime.errors import ConfigError

    slots = _SlotCalls(env, sock)
    while True:
        try:
            name, args = receive(sock)
        except (EOFError, ConnectionError):
            return
        try:
            answer = getattr(slots if hasattr(slots, name) else env, name)(*args)
        except ConfigError as error:
            send(sock, ("config", str(error)))
            return
        except Exception:
            send(sock, ("raised", traceback.format_exc()))
            return
        send(sock, ("done", answer))


def main() -> None:
    """Runs the simulator process."""
    sock, lifeline = (int(arg) for arg in sys.argv[1:3])
    kill_on_close(lifeline)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides what an interrupt means
    serve(socket.socket(fileno=sock), lifeline)
    os._exit(0)  # simulators' destructors may hang


if __name__ == "__main__":
    main()
