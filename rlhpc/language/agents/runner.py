"""Runs harnesses: an agent's program, one episode in a process of its own. The standard library and Python 3.8 or newer are
enough: it is started with the interpreter that has the agent's packages, not with rlhpc's, and reads files beside it alone.

It is three processes deep. The nursery imports the agent once, and forks for each episode a guard, which forks the episode.
Whatever an episode starts, also what leaves its process group, falls to its guard when its parent ends; and the guard ends
all of it when the episode is over, when its time is, or when the nursery's standard input ends, as it does with the rank.

Lines of JSON come in: first what to run, then tickets, or the number of one to be ended. Lines go out: that it is ready, then
an outcome for each ticket.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import importlib.util
import json
import os
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
from typing import Any, NoReturn

_SET_PDEATHSIG, _SET_SUBREAPER = 1, 36
_HERE = os.path.dirname(os.path.abspath(__file__))


def _beside(name: str) -> Any:
    """A file beside this one, as a module."""
    found = importlib.util.spec_from_file_location(f"rlhpc_{name}", os.path.join(_HERE, f"{name}.py"))
    assert found is not None and found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


_task: Any = _beside("task")
_shells: Any = _beside("shells")
#: Most bytes of an outcome, of what a command prints, and of what is kept of other output.
_OUTCOME, _PRINTED, _TAIL = 1 << 20, 1 << 16, 2000
#: Seconds that processes have to be gone once they are killed.
_GONE_S = 4.0


# -- the nursery ------------------------------------------------------------------------------------------------------


def main() -> None:
    """Runs until the standard input ends."""
    # The files beside this one are rlhpc's, and no modules of an agent's.
    sys.path[:] = [path for path in sys.path if os.path.abspath(path) != _HERE]
    commands, replies = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(2, 1)  # what agents print is no outcome
    lines = _Lines(commands)
    spec = lines.wait()
    if spec is None:
        return
    try:
        run = _loaded(spec)
    except BaseException as error:
        _say(replies, {"failed": f"{type(error).__name__}: {error}"})
        return
    _say(replies, {"ready": True})
    guards: dict[int, tuple[int, int, bytearray]] = {}  # the end of a pipe -> number, process, what it has said
    while True:
        for ready in select.select([commands, *guards], [], [])[0]:
            if ready != commands:
                _hear(ready, guards, replies)
                continue
            for command in lines.read():
                if "kill" in command:
                    for number, pid, _ in guards.values():
                        if number == command["kill"]:
                            _signal(pid, signal.SIGTERM)
                else:
                    pipe, pid = _fork_guard(command, run, spec, [commands, replies, *guards])
                    guards[pipe] = command["id"], pid, bytearray()
            if lines.ended:
                for _, pid, _ in guards.values():
                    _signal(pid, signal.SIGTERM)
                _reap_for(_GONE_S)
                return


def _loaded(spec: dict[str, Any]) -> Any:
    """What runs an episode, imported; None for a command."""
    sys.path[:] = list(dict.fromkeys([*spec["paths"], *sys.path]))
    if spec["kind"] == "command":
        return None
    if spec["kind"] != "python":
        helpers = {"servers": _beside("tool_servers"), "shell": functools.partial(_shells.Shell, spec["sandbox"])}
        return _beside("frameworks").agent_of(spec["kind"], spec["options"], helpers)
    module, _, name = spec["target"].partition(":")
    target: Any = importlib.import_module(module)
    for part in name.split("."):
        target = getattr(target, part)
    if not callable(target):
        raise TypeError(f"{spec['target']} is a {type(target).__name__}, no function")
    return target


def _hear(pipe: int, guards: dict[int, tuple[int, int, bytearray]], replies: int) -> None:
    number, pid, said = guards[pipe]
    found = os.read(pipe, 1 << 16)
    said += found
    if found:
        return
    del guards[pipe]
    os.close(pipe)
    os.waitpid(pid, 0)
    try:
        outcome = json.loads(bytes(said))
    except ValueError:
        outcome = {"error": "the process that watches over the episode was killed"}
    _say(replies, {"id": number, "outcome": outcome})


def _fork_guard(ticket: dict[str, Any], run: Any, spec: dict[str, Any], others: list[int]) -> tuple[int, int]:
    here, there = os.pipe()
    pid = os.fork()
    if pid:
        os.close(there)
        return here, pid
    try:
        for fd in [here, *others]:
            os.close(fd)
        outcome = _guard(ticket, run, spec, there)
        _write(there, json.dumps(outcome).encode())
    finally:
        os._exit(0)


# -- the guard --------------------------------------------------------------------------------------------------------


class _Ended(Exception):
    pass


def _guard(ticket: dict[str, Any], run: Any, spec: dict[str, Any], out: int) -> dict[str, Any]:
    """Runs an episode, and ends all that is left of it."""
    nursery = os.getppid()
    os.setsid()
    _prctl(_SET_SUBREAPER, 1)
    signal.signal(signal.SIGTERM, _raise_ended)
    _prctl(_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != nursery:
        return {}
    outcome: dict[str, Any] = {}
    folder = tempfile.mkdtemp(prefix="rlhpc-episode-") if spec["sandbox"] not in (None, "none") else None
    try:
        outcome = _watched({**ticket, "folder": folder}, run, spec, out)
    except _Ended:
        outcome = {"error": "the episode was ended from outside"}
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        left = _end_all(_GONE_S)
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
    if left:
        outcome["left"] = left
    return outcome


def _watched(ticket: dict[str, Any], run: Any, spec: dict[str, Any], out: int) -> dict[str, Any]:
    result, said, printed = os.pipe(), os.pipe(), os.pipe()
    wake = os.pipe()
    for fd in wake:
        os.set_blocking(fd, False)
    signal.set_wakeup_fd(wake[1], warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    pid = os.fork()
    if not pid:
        try:
            signal.set_wakeup_fd(-1)
            for name in (signal.SIGCHLD, signal.SIGTERM):
                signal.signal(name, signal.SIG_DFL)
            for fd in (out, result[0], said[0], printed[0], *wake):
                os.close(fd)
            _episode(ticket, run, spec, result[1], said[1], printed[1])
        finally:
            os._exit(1)
    for pipe in (result, said, printed):
        os.close(pipe[1])
    found = {result[0]: bytearray(), said[0]: bytearray(), printed[0]: bytearray()}
    most = {result[0]: _OUTCOME, printed[0]: _PRINTED}
    deadline, opened = time.monotonic() + ticket["timeout_s"], set(found)
    status: int | None = None
    while status is None and b"\n" not in found[result[0]]:
        left = deadline - time.monotonic()
        if left <= 0:
            return {"error": f"it took longer than agent.timeout_s ({ticket['timeout_s']:g} s)", "timeout": True}
        for fd in select.select([*opened, wake[0]], [], [], left)[0]:
            if fd == wake[0]:
                _drain(fd)
                continue
            if not _take(fd, found[fd], most.get(fd)):
                opened.discard(fd)
        gone = _reap(pid)
        status = gone if gone is not None else status
    for fd in opened:  # what it had written before it ended
        while select.select([fd], [], [], 0)[0] and _take(fd, found[fd], most.get(fd)):
            if len(found[fd]) >= (most.get(fd) or _TAIL):
                break
    tail = _task.unkeyed(found[said[0]].decode(errors="replace"), ticket).strip()
    if spec["kind"] == "command" and status == 0:
        return {"response": found[printed[0]].decode(errors="replace").strip()}
    try:
        outcome: dict[str, Any] = json.loads(bytes(found[result[0]]).split(b"\n")[0])
        return outcome
    except ValueError:
        how = f"signal {-status}" if status is not None and status < 0 else f"status {status}"
        return {"error": f"its process ended with {how}" + (f"; it said: {tail[-500:]}" if tail else "")}


def _take(fd: int, into: bytearray, most: int | None) -> bool:
    """Reads on; beyond `most` bytes it is thrown away, and of output only the end is kept."""
    data = os.read(fd, 1 << 16)
    if most is None:
        into += data
        del into[:-_TAIL]
    else:
        into += data[: max(0, most - len(into))]
    return bool(data)


def _drain(fd: int) -> None:
    with contextlib.suppress(BlockingIOError):
        while os.read(fd, 4096):
            pass


def _reap(wanted: int) -> int | None:
    """Takes leave of children that have ended; the status of the one wanted, if it is among them."""
    status = None
    while True:
        try:
            pid, how = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return status
        if not pid:
            return status
        if pid == wanted:
            status = -os.WTERMSIG(how) if os.WIFSIGNALED(how) else os.WEXITSTATUS(how)


def _reap_for(seconds: float) -> None:
    """Waits for all children to end."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                time.sleep(0.01)
        except ChildProcessError:
            return


def _end_all(seconds: float) -> int:
    """Kills everything below this process; how many would not go."""
    deadline = time.monotonic() + seconds
    while True:
        _reap(0)
        below = _below(os.getpid())
        if not below or time.monotonic() > deadline:
            return len(below)
        for pid in below:
            _signal(pid, signal.SIGKILL)
        time.sleep(0.002)


def _below(pid: int) -> list[int]:
    """All processes that descend from one: Linux hands those whose parent has ended to the nearest guard above them."""
    parents: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    parents.setdefault(int(file.read().rpartition(b")")[2].split()[1]), []).append(int(name))
            except (OSError, IndexError, ValueError):
                continue
    found: list[int] = []
    look = [pid]
    while look:
        children = parents.get(look.pop(), [])
        found += children
        look += children
    return found


# -- the episode ------------------------------------------------------------------------------------------------------


def _episode(ticket: dict[str, Any], run: Any, spec: dict[str, Any], result: int, said: int, printed: int) -> NoReturn:
    """In the episode's own process; does not come back."""
    os.setsid()
    _prctl(_SET_PDEATHSIG, signal.SIGKILL)
    os.dup2(printed if spec["kind"] == "command" else said, 1)
    os.dup2(said, 2)
    confined = spec["kind"] == "command" and spec["sandbox"] not in (None, "none")
    if confined:  # there, it is where `inside.py` leads to the model from
        ticket = {**ticket, "base_url": f"http://127.0.0.1:{_beside('inside').PORT}/v1"}
    environment = _task.environment_of(ticket)
    if spec["kind"] == "command":
        folder = ticket.get("folder") or os.environ.get("TMPDIR", "/tmp")
        words = [word.replace("{question}", ticket["task"]["question"]) for word in spec["command"]]
        if confined:
            words = [sys.executable, os.path.join(_HERE, "inside.py"), ticket["socket"], *words]
            # As the configuration names them, and not as a question does.
            named = [os.path.dirname(word) or word for word in spec["command"] if os.path.isabs(word)]
            needs = [_HERE, sys.prefix, sys.base_prefix, *named, *filter(os.path.isabs, spec["command"])]
            words = _shells.sandboxed(spec["sandbox"], words, folder, ticket["socket"], needs)
        try:
            os.chdir(folder)
            os.execvpe(
                words[0], words, {**os.environ, **environment, "RLHPC_TASK": json.dumps(_task.public(ticket["task"]))}
            )
        except OSError as error:
            os.write(2, f"{words[0]}: {error.strerror}".encode())
            os._exit(127)
    os.environ.update(environment)
    try:
        outcome = _task.outcome_of(run, ticket)
    except BaseException as error:
        where = traceback.extract_tb(error.__traceback__)[-1:]
        at = f" ({os.path.basename(where[0].filename)}, line {where[0].lineno})" if where else ""
        outcome = {"error": _task.unkeyed(f"{type(error).__name__}: {error}{at}", ticket)}
    _write(result, json.dumps(outcome).encode() + b"\n")
    os._exit(0)


# -- small things -----------------------------------------------------------------------------------------------------


class _Lines:
    """Lines of JSON from a descriptor."""

    def __init__(self, fd: int) -> None:
        self._fd, self._rest, self.ended = fd, b"", False

    def read(self) -> list[dict[str, Any]]:
        """Those that are there; blocks if there is nothing at all."""
        data = os.read(self._fd, 1 << 16)
        self.ended = not data
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [json.loads(line) for line in lines]

    def wait(self) -> dict[str, Any] | None:
        """The first one; None if there is none."""
        while not self.ended:
            found = self.read()
            if found:
                return found[0]
        return None


def _say(fd: int, message: dict[str, Any]) -> None:
    _write(fd, json.dumps(message).encode() + b"\n")


def _write(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _raise_ended(*_: Any) -> NoReturn:
    raise _Ended


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(option, ctypes.c_ulong(value), 0, 0, 0)


if __name__ == "__main__":
    main()
