"""Harness runner: runs an agent's program in one process per episode.

It needs only the standard library and Python 3.8 or newer, because it runs with the interpreter that has the agent's
packages, not with rlhpc's. It loads only files of its folder.

There are three levels of processes. The nursery imports the agent once and forks a guard for each episode; the guard
forks the episode. When a process ends, its children become children of the episode's guard, even if they have left the
episode's process group. The guard kills all of them when the episode ends, exceeds its time or another limit, or when
the nursery's standard input ends, which happens when the rank ends. If a guard is killed, its descendants become
children of the nursery, which kills them.

The input is JSON lines: first the program's specification, then tickets or the numbers of tickets to end. The output is
JSON lines: a message that the runner is ready, then one outcome per ticket.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import importlib.util
import json
import os
import signal
import stat
import sys
import tempfile
import time
from typing import Any, NamedTuple, NoReturn

_SET_PDEATHSIG, _SET_DUMPABLE, _SET_SUBREAPER = 1, 4, 36
_HERE = os.path.dirname(os.path.abspath(__file__))


def _load_sibling(name: str) -> Any:
    """Loads a file of this folder as a module."""
    module_spec = importlib.util.spec_from_file_location(f"rlhpc_{name}", os.path.join(_HERE, f"{name}.py"))
    assert module_spec is not None and module_spec.loader is not None
    module = importlib.util.module_from_spec(module_spec)
    module_spec.loader.exec_module(module)
    return module


_task: Any = _load_sibling("task")
_shells: Any = _load_sibling("shell")
#: Maximum sizes of an outcome, of a command's output, and of the retained end of other output, in bytes.
_MAX_OUTCOME_BYTES, _MAX_PRINTED_BYTES, _MAX_TAIL_BYTES = 1 << 20, 1 << 16, 2000
#: Time limit for killed processes to exit, in seconds.
_KILL_S = 4.0
#: Seconds between two checks of an episode's resources, and the minimum interval as a multiple of a check's duration.
_CHECK_S, _CHECK_SHARE = 0.25, 20.0
#: Maximum number of processes of an episode in a sandbox, and seconds between two counts. Resource limits do not bind root.
_MAX_PROCESSES, _COUNT_S = 512, 0.1
#: Maximum number of threads of an episode in a sandbox, per allowed process.
_THREADS_PER_PROCESS = 16
_PAGE = os.sysconf("SC_PAGE_SIZE")
_LISTS_CHILDREN = os.path.exists(f"/proc/{os.getpid()}/task/{os.getpid()}/children")


class _Guard(NamedTuple):
    """Record of a guard and its episode in the nursery.

    Attributes:
        number: Number of the episode's ticket.
        pid: Process id of the guard.
        output: Output of the guard so far.
        folder: Folder of the episode; "" if there is no sandbox.
    """

    number: int
    pid: int
    output: bytearray
    folder: str


# -- the nursery ------------------------------------------------------------------------------------------------------


def main() -> None:
    """Runs the nursery until its standard input ends."""
    # The files of this folder belong to rlhpc, and must not be importable as modules by agents.
    sys.path[:] = [path for path in sys.path if os.path.abspath(path) != _HERE]
    commands, replies = os.dup(0), os.dup(1)
    null_fd = os.open(os.devnull, os.O_RDWR)
    os.dup2(null_fd, 0)
    os.dup2(2, 1)  # the rank must not read an agent's output as an outcome
    lines = _MessageReader(commands)
    program_spec = lines.wait()
    if program_spec is None:
        return
    try:
        agent_function = _load_function(program_spec)
    except BaseException as error:
        _send_message(replies, {"failed": f"{type(error).__name__}: {error}"})
        return
    _prctl(_SET_SUBREAPER, 1)
    _prctl(_SET_DUMPABLE, 0)  # an episode must not access the descriptors that carry outcomes
    import_child_pids = frozenset(_list_children(os.getpid()))  # started by imported modules
    _send_message(replies, {"ready": True})
    guards: dict[int, _Guard] = {}  # by the read end of the guard's pipe
    while True:
        for ready_fd in [commands] if lines.pending_lines else _shells.readable_descriptors([commands, *guards]):
            if ready_fd != commands:
                _read_outcome(ready_fd, guards, replies, import_child_pids)
                continue
            for command in lines.read():
                if "kill" in command:
                    for running_guard in guards.values():
                        if running_guard.number == command["kill"]:
                            _signal(running_guard.pid, signal.SIGTERM)
                else:
                    folder = (
                        ""
                        if program_spec["sandbox"] is None
                        else _shells.make_temporary_folder("episode", program_spec["temporary"])
                    )
                    pipe, pid = _fork_guard(
                        {**command, "folder": folder}, agent_function, program_spec, [commands, replies, *guards]
                    )
                    guards[pipe] = _Guard(command["id"], pid, bytearray(), folder)
            if lines.at_end:
                for running_guard in guards.values():
                    _signal(running_guard.pid, signal.SIGTERM)
                _reap_for(_KILL_S)
                return


def _load_function(program_spec: dict[str, Any]) -> Any:
    """Imports the agent; returns the function that runs an episode, or None for a command."""
    sys.path[:] = list(dict.fromkeys([*program_spec["paths"], *sys.path]))
    if program_spec["kind"] == "command":
        return None
    if program_spec["kind"] != "python":
        shell = functools.partial(_shells.Shell, program_spec["sandbox"])
        helpers = {
            "servers": _load_sibling("mcp_client"),
            "text": _task._load("..", "..", "policy_text.py"),
            "shell": shell,
        }
        return _load_sibling("frameworks").agent_of(program_spec["kind"], program_spec["options"], helpers)
    module, _, name = program_spec["target"].partition(":")
    target: Any = importlib.import_module(module)
    for attribute_name in name.split("."):
        target = getattr(target, attribute_name)
    if not callable(target):
        raise TypeError(f"{program_spec['target']} is a {type(target).__name__}, no function")
    return target


def _read_outcome(pipe: int, guards: dict[int, _Guard], num_replies: int, import_child_pids: frozenset[int]) -> None:
    finished_guard = guards[pipe]
    chunk = os.read(pipe, 1 << 16)
    finished_guard.output.extend(chunk)
    if chunk:
        return
    del guards[pipe]
    os.close(pipe)
    os.waitpid(finished_guard.pid, 0)
    try:
        guard_outcome = json.loads(bytes(finished_guard.output))
    except ValueError:
        guard_outcome = {"error": "the process that watches over the episode was killed"}
        _end_orphans(import_child_pids.union(other_guard.pid for other_guard in guards.values()), _KILL_S)
    if finished_guard.folder and os.path.lexists(finished_guard.folder):
        _shells.remove_folder(finished_guard.folder)
    _send_message(num_replies, {"id": finished_guard.number, "outcome": guard_outcome})


def _end_orphans(children: frozenset[int], timeout_s: float) -> None:
    """Kills orphans and their descendants for up to `timeout_s`. An orphan is a child of this process that `children` does not
    contain.
    """
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        orphan_pids = [pid for pid in _list_children(os.getpid()) if pid not in children]
        if not orphan_pids:
            return
        for orphan_pid in orphan_pids:
            for pid in (orphan_pid, *_find_descendants(orphan_pid)):
                _signal(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(orphan_pid, os.WNOHANG)
        time.sleep(0.002)


def _fork_guard(
    ticket: dict[str, Any], run_function: Any, program_spec: dict[str, Any], open_fds: list[int]
) -> tuple[int, int]:
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid:
        os.close(write_end)
        return read_end, pid
    try:
        for fd in [read_end, *open_fds]:
            os.close(fd)
        try:
            guard_outcome = _run_guard(ticket, run_function, program_spec, write_end)
        except BaseException as error:
            guard_outcome = {
                "error": f"the process that watches over the episode failed: {type(error).__name__}: {error}"
            }
        _write_all(write_end, json.dumps(guard_outcome).encode())
    finally:
        os._exit(0)


# -- the guard --------------------------------------------------------------------------------------------------------


class _Terminated(Exception):
    pass


def _run_guard(
    ticket: dict[str, Any], run_function: Any, program_spec: dict[str, Any], output_fd: int
) -> dict[str, Any]:
    """Runs an episode, then kills its remaining processes; returns the outcome."""
    parent_pid = os.getppid()
    os.setsid()
    _prctl(_SET_SUBREAPER, 1)
    signal.signal(signal.SIGTERM, _raise_terminated)
    _prctl(_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent_pid:
        return {}
    guard_outcome: dict[str, Any] = {}
    folder = ticket["folder"]
    try:
        guard_outcome = _supervise_episode(ticket, run_function, program_spec, output_fd)
    except _Terminated:
        guard_outcome = {"error": "the episode was ended from outside"}
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        num_remaining = _kill_descendants(_KILL_S)
        if folder:
            _shells.remove_folder(folder)
    if num_remaining:
        guard_outcome["left"] = num_remaining
    return guard_outcome


def _supervise_episode(
    ticket: dict[str, Any], run_function: Any, program_spec: dict[str, Any], output_fd: int
) -> dict[str, Any]:
    result_pipe, output_pipe, printed_pipe = os.pipe(), os.pipe(), os.pipe()
    wakeup_pipe = os.pipe()
    for fd in wakeup_pipe:
        os.set_blocking(fd, False)
    signal.set_wakeup_fd(wakeup_pipe[1], warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    pid = os.fork()
    if not pid:
        try:
            signal.set_wakeup_fd(-1)
            for signal_number in (signal.SIGCHLD, signal.SIGTERM):
                signal.signal(signal_number, signal.SIG_DFL)
            for fd in (output_fd, result_pipe[0], output_pipe[0], printed_pipe[0], *wakeup_pipe):
                os.close(fd)
            _run_episode(ticket, run_function, program_spec, result_pipe[1], output_pipe[1], printed_pipe[1])
        finally:
            os._exit(1)
    for pipe in (result_pipe, output_pipe, printed_pipe):
        os.close(pipe[1])
    received_bytes = {result_pipe[0]: bytearray(), output_pipe[0]: bytearray(), printed_pipe[0]: bytearray()}
    byte_limits = {result_pipe[0]: _MAX_OUTCOME_BYTES, printed_pipe[0]: _MAX_PRINTED_BYTES}
    deadline, open_fds = time.monotonic() + ticket["timeout_s"], set(received_bytes)
    status: int | None = None
    next_disk_check_at = next_process_count_at = time.monotonic() if ticket["folder"] else float("inf")
    while status is None and b"\n" not in received_bytes[result_pipe[0]]:
        current_time = time.monotonic()
        if current_time >= deadline:
            return {"error": f"it took longer than agent.timeout_s ({ticket['timeout_s']:g} s)", "timeout": True}
        if current_time >= next_process_count_at:
            max_processes = program_spec["sandbox"].get("processes", _MAX_PROCESSES)
            descendants = _find_descendants(os.getpid())
            if len(descendants) > max_processes:
                return {"error": f"it was ended: it had more than {max_processes} processes"}
            if sum(_stat_value(pid, _NUM_THREADS) for pid in descendants) > _THREADS_PER_PROCESS * max_processes:
                return {"error": f"it was ended: it had more than {_THREADS_PER_PROCESS * max_processes} threads"}
            next_process_count_at = time.monotonic() + max(_COUNT_S, _CHECK_SHARE * (time.monotonic() - current_time))
        if current_time >= next_disk_check_at:
            check_start = time.monotonic()
            excess_reason = _find_exceeded_limit(program_spec["sandbox"], ticket["folder"])
            if excess_reason:
                return {"error": f"it was ended: {excess_reason}"}
            elapsed_s = time.monotonic() - check_start
            next_disk_check_at = time.monotonic() + max(_CHECK_S, _CHECK_SHARE * elapsed_s)
        for fd in _shells.readable_descriptors(
            [*open_fds, wakeup_pipe[0]],
            max(0.0, min(deadline, next_disk_check_at, next_process_count_at) - time.monotonic()),
        ):
            if fd == wakeup_pipe[0]:
                os.read(fd, 1 << 16)
            elif not _read_limited(fd, received_bytes[fd], byte_limits.get(fd)):
                open_fds.discard(fd)
        exit_status = _reap(pid)
        status = exit_status if exit_status is not None else status
    for fd in open_fds:  # reads output that was written before the process ended
        while _shells.readable_descriptors([fd], 0) and _read_limited(fd, received_bytes[fd], byte_limits.get(fd)):
            if len(received_bytes[fd]) >= (byte_limits.get(fd) or _MAX_TAIL_BYTES):
                break
    if len(received_bytes[result_pipe[0]]) >= _MAX_OUTCOME_BYTES and b"\n" not in received_bytes[result_pipe[0]]:
        return {"error": f"its outcome is larger than {_MAX_OUTCOME_BYTES >> 20} MiB: return a shorter response"}
    output_tail = _task.redact(received_bytes[output_pipe[0]].decode(errors="replace"), ticket).strip()
    if program_spec["kind"] == "command" and status == 0:
        return {"response": received_bytes[printed_pipe[0]].decode(errors="replace").strip()}
    line, line_end, _ = bytes(received_bytes[result_pipe[0]]).partition(b"\n")
    if line_end:
        try:
            program_outcome: dict[str, Any] = _task.check_outcome(json.loads(line))
            return program_outcome
        except (ValueError, RecursionError) as error:
            return {"error": f"it has written an outcome that is none: {_task.redact(str(error), ticket)}"}
    else:
        exit_text = f"signal {-status}" if status is not None and status < 0 else f"status {status}"
        return {
            "error": f"its process ended with {exit_text}" + (f"; it said: {output_tail[-500:]}" if output_tail else "")
        }


def _read_limited(fd: int, buffer: bytearray, max_bytes: int | None) -> bool:
    """Reads available data into `buffer`; returns False at the end of the stream. Drops data beyond `max_bytes` bytes; without
    a limit, retains only the last `_MAX_TAIL_BYTES` bytes.
    """
    chunk = os.read(fd, 1 << 16)
    if max_bytes is None:
        buffer += chunk
        del buffer[:-_MAX_TAIL_BYTES]
    else:
        buffer += chunk[: max(0, max_bytes - len(buffer))]
    return bool(chunk)


def _reap(child: int) -> int | None:
    """Reaps children that have ended; returns the exit status of `child` (negative for a signal), or None if it still
    runs.
    """
    status = None
    while True:
        try:
            pid, wait_status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return status
        if not pid:
            return status
        if pid == child:
            status = -os.WTERMSIG(wait_status) if os.WIFSIGNALED(wait_status) else os.WEXITSTATUS(wait_status)


def _reap_for(duration_s: float) -> None:
    """Waits up to `duration_s` for all children to end."""
    deadline = time.monotonic() + duration_s
    while time.monotonic() < deadline:
        try:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                time.sleep(0.01)
        except ChildProcessError:
            return


def _kill_descendants(timeout_s: float) -> int:
    """Kills all descendants of this process; returns how many still run after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while True:
        _reap(0)
        descendants = _find_descendants(os.getpid())
        if not descendants or time.monotonic() > deadline:
            return len(descendants)
        for pid in descendants:
            _signal(pid, signal.SIGKILL)
        time.sleep(0.002)


def _find_descendants(pid: int) -> list[int]:
    """Returns the ids of all descendants of a process. Linux reparents an orphan to the nearest guard above it."""
    descendants: list[int] = []
    pending_pids, children_by_parent = [pid], None if _LISTS_CHILDREN else _map_by_parent()
    while pending_pids:
        current_pid = pending_pids.pop()
        children = (
            _list_children(current_pid) if children_by_parent is None else children_by_parent.get(current_pid, [])
        )
        descendants += children
        pending_pids += children
    return descendants


def _list_children(pid: int) -> list[int]:
    if not _LISTS_CHILDREN:
        return _map_by_parent().get(pid, [])
    children: list[int] = []
    with contextlib.suppress(OSError):
        for thread_id in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{thread_id}/children", "rb") as file:
                children += map(int, file.read().split())
    return children


def _map_by_parent() -> dict[int, list[int]]:
    """Returns the process ids by parent, for kernels that do not list a process's children (CONFIG_PROC_CHILDREN)."""
    children_by_parent: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            children_by_parent.setdefault(_stat_value(int(name), _PARENT), []).append(int(name))
    return children_by_parent


# -- resources of an episode ------------------------------------------------------------------------------------------


def _find_exceeded_limit(confinement: dict[str, Any], folder: str) -> str:
    """Returns a message about the limit that the descendants of this process exceed; "" if they exceed none."""
    descendants = _find_descendants(os.getpid())
    memory_bytes = sum(_stat_value(pid, _RSS_PAGES) for pid in descendants) * _PAGE
    unlinked_disk, unlinked_memory = _measure_unlinked_files(descendants, folder)
    unlinked_memory += _measure_shared_memory(descendants)
    limit_mb = confinement.get("memory_mb") or (memory_bytes + unlinked_memory)
    if (memory_bytes + unlinked_memory) >> 20 > limit_mb and (
        _measure_proportional_memory(descendants) + unlinked_memory
    ) >> 20 > limit_mb:
        return f"its processes used more memory than agent.memory_mb ({limit_mb} MB)"
    limit_mb = confinement.get("disk_mb") or 0
    if limit_mb and (unlinked_disk + _measure_folder(folder, limit_mb << 20)) >> 20 >= limit_mb:
        return f"its folder and its /tmp were larger than agent.disk_mb ({limit_mb} MB)"
    return ""


#: Indices in /proc/<pid>/stat, counted from the process's state.
_PARENT, _NUM_THREADS, _RSS_PAGES = 1, 17, 21


def _stat_value(pid: int, index: int) -> int:
    """Returns a number from /proc/<pid>/stat; 0 if the process has ended."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return int(file.read().rpartition(b")")[2].split()[index])
    except (OSError, IndexError, ValueError):
        return 0


def _measure_unlinked_files(pids: list[int], folder: str) -> tuple[int, int]:
    """Returns the total sizes of unlinked open files in bytes: of files on the folder's disk, and of other files, such as
    files in memory.
    """
    device, bytes_by_kind = os.stat(folder).st_dev, {True: 0, False: 0}
    inodes = set()
    for pid in pids:
        with contextlib.suppress(OSError), os.scandir(f"/proc/{pid}/fd") as fd_entries:
            for fd_entry in fd_entries:
                with contextlib.suppress(OSError):
                    file_stat = os.stat(fd_entry.path)
                    inode = file_stat.st_dev, file_stat.st_ino
                    if stat.S_ISREG(file_stat.st_mode) and file_stat.st_nlink == 0 and inode not in inodes:
                        inodes.add(inode)
                        bytes_by_kind[file_stat.st_dev == device] += file_stat.st_blocks * 512
    return bytes_by_kind[True], bytes_by_kind[False]


def _measure_shared_memory(pids: list[int]) -> int:
    """Returns the size in bytes of the processes' System V shared-memory segments, including unmapped segments. Does not count
    segments in this process's IPC namespace.
    """
    pid_by_namespace: dict[str, int] = {}
    for pid in pids:
        pid_by_namespace.setdefault(_read_namespace(pid, "ipc"), pid)
    return sum(
        _measure_namespace_memory(pid)
        for namespace, pid in pid_by_namespace.items()
        if namespace not in ("", _read_namespace("self", "ipc"))
    )


def _read_namespace(pid: Any, namespace_kind: str) -> str:
    try:
        return os.readlink(f"/proc/{pid}/ns/{namespace_kind}")
    except OSError:
        return ""


def _measure_namespace_memory(pid: int) -> int:
    """Returns the size in bytes of the segments in another process's IPC namespace. A child process enters that namespace
    to read it, because /proc shows only the reader's namespace.
    """
    read_end, write_end = os.pipe()
    child = os.fork()
    if not child:
        try:
            libc = ctypes.CDLL(None)
            for namespace in ("user", "ipc"):
                with contextlib.suppress(OSError):
                    namespace_fd = os.open(f"/proc/{pid}/ns/{namespace}", os.O_RDONLY)
                    if _read_namespace(pid, namespace) != _read_namespace("self", namespace):
                        libc.setns(namespace_fd, 0)
            if _read_namespace("self", "ipc") == _read_namespace(pid, "ipc"):
                with open("/proc/sysvipc/shm", "rb") as file:
                    header = next(file).split()
                    os.write(write_end, b"%d" % sum(int(line.split()[header.index(b"rss")]) for line in file))
        finally:
            os._exit(0)
    os.close(write_end)
    try:
        return int(os.read(read_end, 100) or 0)
    finally:
        os.close(read_end)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(child, 0)


def _measure_proportional_memory(pids: list[int]) -> int:
    """Returns the memory of processes in bytes. Each shared page is divided among the processes that map it (PSS). For a
    process whose PSS cannot be read, all resident pages count.
    """
    num_bytes = 0
    for pid in pids:
        try:
            with open(f"/proc/{pid}/smaps_rollup", "rb") as file:
                num_bytes += sum(int(line.split()[1]) << 10 for line in file if line.startswith(b"Pss:"))
        except (OSError, IndexError, ValueError):
            with contextlib.suppress(OSError, IndexError, ValueError), open(f"/proc/{pid}/statm", "rb") as file:
                num_bytes += int(file.read().split()[1]) * _PAGE
    return num_bytes


def _measure_folder(folder: str, max_bytes: int) -> int:
    """Returns the size of a folder in bytes, with at least 1 KiB per directory entry; stops counting at `max_bytes`."""
    num_bytes, pending_folders, inodes = 0, [folder], set()
    while pending_folders and num_bytes < max_bytes:
        with contextlib.suppress(OSError), os.scandir(pending_folders.pop()) as folder_entries:
            for folder_entry in folder_entries:
                with contextlib.suppress(OSError):
                    entry_stat = folder_entry.stat(follow_symlinks=False)
                    is_uncounted = entry_stat.st_nlink == 1 or entry_stat.st_ino not in inodes
                    if entry_stat.st_nlink > 1:
                        inodes.add(entry_stat.st_ino)
                    num_bytes += max(1024, entry_stat.st_blocks * 512 if is_uncounted else 0)
                    if folder_entry.is_dir(follow_symlinks=False):
                        pending_folders.append(folder_entry.path)
                if num_bytes >= max_bytes:
                    break
    return num_bytes


# -- the episode ------------------------------------------------------------------------------------------------------


def _run_episode(
    ticket: dict[str, Any], run_function: Any, program_spec: dict[str, Any], result: int, output: int, printed_fd: int
) -> NoReturn:
    """Runs the episode in this process; does not return."""
    os.setsid()
    _prctl(_SET_PDEATHSIG, signal.SIGKILL)
    _prctl(_SET_DUMPABLE, 1)
    os.dup2(printed_fd if program_spec["kind"] == "command" else output, 1)
    os.dup2(output, 2)
    confinement = program_spec["sandbox"]
    is_confined = program_spec["kind"] == "command" and confinement is not None and confinement["kind"] != "none"
    if is_confined:  # in the sandbox, `loopback.py` forwards this port to the model
        ticket = {**ticket, "base_url": f"http://127.0.0.1:{_load_sibling('loopback').PORT}/v1"}
    environment = _task.environment_of(ticket)
    if program_spec["kind"] == "command":
        folder = _shells.make_subfolders(ticket["folder"]) if is_confined else os.environ.get("TMPDIR", "/tmp")
        command_line = [
            argument.replace("{question}", ticket["task"]["question"]) for argument in program_spec["command"]
        ]
        if is_confined:
            needed_paths = _shells.required_paths(
                program_spec["command"]
            )  # taken from the configuration, never from a question
            command_line = _shells.sandbox_command(
                confinement, command_line, ticket["folder"], ticket["socket"], needed_paths
            )
            has_home = confinement["kind"] == "unshare"
            environment["TMPDIR"] = os.path.join(ticket["folder"], "tmp") if has_home else "/tmp"
            if not has_home:  # the user's home folder is not visible
                environment["HOME"] = folder
        try:
            os.chdir(folder)
            os.execvpe(
                command_line[0],
                command_line,
                {**os.environ, **environment, "RLHPC_TASK": json.dumps(_task.without_reference(ticket["task"]))},
            )
        except OSError as error:
            os.write(2, f"{command_line[0]}: {error.strerror}".encode())
            os._exit(127)
    os.environ.update(environment)
    if ticket["folder"]:  # a shell's folder is removed with the episode's
        tempfile.tempdir = ticket["folder"]
    try:
        agent_outcome = _task.run_agent(run_function, ticket)
    except BaseException as error:
        agent_outcome = {"error": _task.redact(_task.describe(error), ticket)}
    _write_all(result, json.dumps(agent_outcome).encode() + b"\n")
    os._exit(0)


# -- helpers ---------------------------------------------------------------------------------------------------------


class _MessageReader:
    """Reader of JSON lines from a descriptor. `pending_lines` contains messages that were read but not yet returned."""

    def __init__(self, fd: int) -> None:
        self._fd, self._partial, self.at_end, self.pending_lines = fd, b"", False, []  # type: ignore[var-annotated]

    def read(self) -> list[dict[str, Any]]:
        """Returns the pending messages or, without any, waits for data and returns the messages of complete lines."""
        if self.pending_lines:
            lines, self.pending_lines = self.pending_lines, []
            return lines
        chunk = os.read(self._fd, 1 << 16)
        self.at_end = not chunk
        *lines, self._partial = (self._partial + chunk).split(b"\n")
        return [json.loads(line) for line in lines]

    def wait(self) -> dict[str, Any] | None:
        """Waits for a message and returns it; returns None at the end of the stream."""
        while not self.at_end:
            lines = self.read()
            if lines:
                self.pending_lines = lines[1:]
                return lines[0]
        return None


def _send_message(fd: int, message: dict[str, Any]) -> None:
    _write_all(fd, json.dumps(message).encode() + b"\n")


def _write_all(fd: int, remaining_bytes: bytes) -> None:
    unwritten_bytes = memoryview(remaining_bytes)
    while unwritten_bytes:
        unwritten_bytes = unwritten_bytes[os.write(fd, unwritten_bytes) :]


def _signal(pid: int, signal_number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal_number)


def _raise_terminated(*_: Any) -> NoReturn:
    raise _Terminated


def _prctl(prctl_option: int, option_value: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(prctl_option, ctypes.c_ulong(option_value), 0, 0, 0)


if __name__ == "__main__":
    main()
