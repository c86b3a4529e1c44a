"""Sandboxes for agents' programs, and a persistent shell.

`main.py` loads this file. Like `main.py`, it needs only the standard library and Python 3.8 or newer, not rlhpc.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from typing import Any, Iterable, Sequence  # noqa: UP035 (Python 3.8)

#: Maximum number of characters that the model reads from the beginning and from the end of a command's output.
_HEAD, _TAIL = 4000, 4000
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_SHELL_COMMAND = ["bash", "--noprofile", "--norc"]
#: Time limit of the check that a sandbox works, in seconds.
_TEST_S = 20.0
_HERE = os.path.dirname(os.path.abspath(__file__))
_LOOPBACK_FILE = os.path.join(_HERE, "loopback.py")
#: Limits of programs in a sandbox, by the names of their keys in section `agent`.
LIMITS = ("memory_mb", "disk_mb")
#: Subfolders of an episode's folder: the command's working directory, and its `/tmp` and `/dev/shm`.
_SUBFOLDERS = ("work", "tmp", "shm")
#: Paths in /etc with settings of programs, but without keys, passwords or addresses of services.
_ETC = (
    "alternatives", "bash.bashrc", "ca-certificates", "crypto-policies", "fonts", "group", "hosts", "inputrc", "ld.so.cache",
    "ld.so.conf", "ld.so.conf.d", "localtime", "locale.conf", "magic", "mime.types", "nsswitch.conf", "passwd", "profile",
    "protocols", "services", "shells", "ssl/certs", "ssl/openssl.cnf", "pki/ca-trust/extracted", "pki/tls/certs",
    "pki/tls/openssl.cnf", "terminfo", "timezone",
)  # fmt: skip
#: Arguments of bubblewrap for paths that are visible unchanged.
_UNCHANGED_PATH_OPTIONS = ("--ro-bind-try", "--symlink")
_SYS = ("/sys/devices/system/cpu", "/sys/devices/system/node")
#: Folders that are not made visible as a whole when a program needs a file in them.
_BROAD = (
    "/", "/dev", "/etc", "/home", "/media", "/mnt", "/proc", "/root", "/run", "/sys", "/tmp", "/var", "/var/run", "/var/tmp",
)  # fmt: skip


def find_program(name: str) -> str:
    """Returns the path of a program in PATH; returns the name if PATH does not contain the program."""
    return shutil.which(name) or name


def sandbox_command(
    confinement: dict[str, Any],
    command: Sequence[str],
    folder: str,
    socket: str | None = None,
    needed_paths: Sequence[str] = (),
) -> list[str]:
    """Returns a command line that runs `command` in a sandbox without a network, started by `loopback.py`.

    Args:
        confinement: `kind` (`bubblewrap`, `unshare`, or `none` to run the command unchanged) and the limits of
            `loopback.py`. For bubblewrap also `read`, additional visible paths, and `hidden`, paths that are not visible
            unless `read` names them.
        command: Command line (argv).
        folder: Folder of the episode. The command may write to its subfolder `work`, where it starts. With bubblewrap, the
            subfolders `tmp` and `shm` are mounted as `/tmp` and `/dev/shm`.
        socket: Socket of the model; None for a command without access to it.
        needed_paths: Files and folders that the command needs.
    """
    sandbox_kind = confinement["kind"]
    if sandbox_kind not in ("bubblewrap", "unshare"):
        return list(command)
    socket_folder = os.path.dirname(socket) if socket else ""
    loopback_settings = {
        "socket": socket,
        "fixed": socket_folder if sandbox_kind == "unshare" else "",
        **{name: confinement[name] for name in LIMITS if name in confinement},
    }
    loopback_command = [sys.executable, "-I", "-B", _LOOPBACK_FILE, json.dumps(loopback_settings), *command]
    if sandbox_kind == "unshare":  # the user's files are visible
        return [
            find_program("unshare"),
            "-rn",
            "--ipc",
            "--pid",
            "--fork",
            "--kill-child",
            "--mount-proc",
            *loopback_command,
        ]
    work_folder = os.path.join(folder, "work")
    mounts = _mount_options(confinement, [_HERE, *_find_interpreter_folders(), *needed_paths], folder, socket_folder)
    return [
        find_program("bwrap"),
        "--unshare-all",
        "--die-with-parent",
        "--new-session",
        *mounts,
        "--chdir",
        work_folder,
        *loopback_command,
    ]


def make_subfolders(folder: str) -> str:
    """Creates the subfolders of an episode's folder; returns the working directory of its command."""
    for subfolder in _SUBFOLDERS:
        os.makedirs(os.path.join(folder, subfolder), mode=0o700, exist_ok=True)
    return os.path.join(folder, "work")


def _mount_options(
    confinement: dict[str, Any], needed_paths: Sequence[str], folder: str, socket_folder: str
) -> list[str]:
    """Returns bubblewrap's mount options. The closest mount above a file determines whether the file is visible."""
    mount_options: dict[str, list[str]] = {}
    shown_trees: list[tuple[str, str]] = []  # (path in the sandbox, real path)

    def show(path: str) -> None:
        for shown_path in dict.fromkeys((os.path.abspath(path), os.path.realpath(path))):
            mount_options[shown_path] = ["--ro-bind-try", os.path.realpath(path), shown_path]
            shown_trees.append((shown_path, os.path.realpath(path)))

    for path in _find_system_paths():
        if os.path.islink(path):
            mount_options[path] = ["--symlink", os.readlink(path), path]
        show(os.path.realpath(path))
    for path in needed_paths:
        if not _is_broad(path):
            show(path)
    readable_paths = [os.path.expanduser(path) for path in confinement.get("read", ())]
    for path in readable_paths:
        show(path)
    explicit_paths = {
        shown_path for path in readable_paths for shown_path in (os.path.abspath(path), os.path.realpath(path))
    }
    for path in [os.path.expanduser("~"), "/run", "/var/run", *confinement.get("hidden", ())]:
        real_path = os.path.realpath(path)
        for shown_path, source_path in list(shown_trees):
            if not _is_below(real_path, source_path) or not os.path.lexists(real_path):
                continue
            masked_path = os.path.normpath(os.path.join(shown_path, os.path.relpath(real_path, source_path)))
            if masked_path in explicit_paths:
                continue
            mount_options[masked_path] = (
                ["--tmpfs", masked_path] if os.path.isdir(real_path) else ["--ro-bind", os.devnull, masked_path]
            )
    work_folder = os.path.join(folder, "work")
    mount_options.update(
        {
            "/dev": ["--dev", "/dev"],
            "/proc": ["--proc", "/proc"],
            work_folder: ["--bind", work_folder, work_folder],
            "/tmp": ["--bind", os.path.join(folder, "tmp"), "/tmp"],
            "/var/tmp": ["--bind", os.path.join(folder, "tmp"), "/var/tmp"],
            "/dev/shm": ["--bind", os.path.join(folder, "shm"), "/dev/shm"],
        }
    )
    if (
        socket_folder
    ):  # read-only, so that a program cannot replace the socket and answer the model calls of later episodes
        mount_options[socket_folder] = ["--ro-bind", socket_folder, socket_folder]
    sorted_paths = sorted(mount_options, key=lambda path: 0 if path == "/" else path.count("/"))
    for path in sorted_paths[:]:
        if (
            mount_options[path][0] in _UNCHANGED_PATH_OPTIONS
            and mount_options.get(_find_nearest_ancestor(path, mount_options), [""])[0] in _UNCHANGED_PATH_OPTIONS
        ):
            sorted_paths.remove(path)  # already visible by the mount of a folder above it
    masked_folders = [path for path, options in mount_options.items() if options[0] == "--tmpfs"]
    return [
        *(mount_option for path in sorted_paths for mount_option in mount_options[path]),
        *(mount_option for path in ["/", "/dev", *masked_folders] for mount_option in ("--remount-ro", path)),
    ]


def _find_system_paths() -> list[str]:
    """Returns the system paths that Linux programs need: programs, libraries, and a few settings."""
    root_folders = [
        f"/{name}" for name in os.listdir("/") if name in ("usr", "opt", "bin", "sbin") or name.startswith("lib")
    ]
    return [path for path in [*root_folders, *(f"/etc/{name}" for name in _ETC), *_SYS] if os.path.lexists(path)]


def _find_interpreter_folders() -> list[str]:
    """Returns the folders of this interpreter's files and libraries."""
    paths, path = [sys.prefix, sys.base_prefix, sys.exec_prefix, sys.base_exec_prefix], sys.executable
    while os.path.islink(path):
        paths.append(os.path.dirname(path))
        path = os.path.join(os.path.dirname(path), os.readlink(path))
    paths.append(os.path.dirname(path))
    with contextlib.suppress(OSError), open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as file:
        mapped_libraries = {line.rstrip("\n").split(None, 5)[-1] for line in file if ".so" in line}
        paths += [os.path.dirname(name) for name in sorted(mapped_libraries) if os.path.isfile(name)]
    return list(dict.fromkeys(paths))


def required_paths(command: Sequence[str]) -> list[str]:
    """Returns the paths that a command needs: its absolute paths and their folders, the program's folder, and the
    program's complete virtual environment.
    """
    program = shutil.which(command[0])
    named_paths = [argument for argument in command if os.path.isabs(argument)] + ([program] if program else [])
    paths = [*named_paths, *(os.path.dirname(argument) for argument in named_paths)]
    if program:
        paths += [os.path.realpath(program), os.path.dirname(os.path.realpath(program))]
        environment_folder = os.path.dirname(os.path.dirname(program))
        if any(os.path.exists(os.path.join(environment_folder, name)) for name in ("pyvenv.cfg", "conda-meta")):
            paths.append(environment_folder)
    return paths


def _find_nearest_ancestor(path: str, paths: dict[str, Any]) -> str:
    """Returns the closest ancestor of a path that `paths` contains; "" if `paths` contains no ancestor."""
    while path != "/":
        path = os.path.dirname(path)
        if path in paths:
            return path
    return ""


def _is_below(path: str, ancestor: str) -> bool:
    return path == ancestor or path.startswith(ancestor.rstrip("/") + "/")


def _is_broad(path: str) -> bool:
    """Returns whether a folder is too broad to be made visible for a single program in it."""
    real_path, home_folder = os.path.realpath(path), os.path.realpath(os.path.expanduser("~"))
    return os.path.isdir(real_path) and (
        _is_below(home_folder, real_path) or real_path in _BROAD or real_path == os.path.realpath(tempfile.gettempdir())
    )


def make_temporary_folder(name: str, parent: str | None = None) -> str:
    """Creates a folder for an episode's files and returns its path. If `parent` is the folder of the rank's session, the
    new folder is removed together with it, even if processes are killed.

    Counterpart of `runtime.scratch.make_temporary_folder` for interpreters without rlhpc.
    """
    return tempfile.mkdtemp(prefix=f"rlhpc-{name}-", dir=parent)


def find_fault(confinement: dict[str, Any], parent: str | None = None) -> str:
    """Tests a sandbox in a new folder of `parent`; returns the reason why it does not work here, or "" if it works."""
    if confinement["kind"] == "none":
        return ""
    folder = make_temporary_folder("try", parent)
    try:
        work_folder = make_subfolders(folder)
        test_process = subprocess.run(
            sandbox_command(confinement, ["true"], folder),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=_TEST_S,
            cwd=work_folder,
            check=False,
        )
        return (
            ""
            if test_process.returncode == 0
            else test_process.stdout.decode(errors="replace").strip() or f"status {test_process.returncode}"
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    finally:
        remove_folder(folder)


def remove_folder(folder: str) -> None:
    """Removes a folder of any depth, even if a program has removed the permissions to change it."""
    with contextlib.suppress(RecursionError):
        shutil.rmtree(folder, ignore_errors=True)
    if os.path.lexists(folder):
        for removal_command in (["chmod", "-R", "u+rwX", folder], ["rm", "-rf", "--one-file-system", folder]):
            with contextlib.suppress(OSError):
                subprocess.run(removal_command, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)


def readable_descriptors(descriptors: Iterable[int], timeout_s: float | None = None) -> set[int]:
    """Waits until descriptors have data or have reached their end; returns these descriptors, or an empty set after a timeout.

    Copy of `runtime.os_resources.readable_descriptors` for interpreters without rlhpc.
    """
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    return {descriptor for descriptor, _ in poll.poll(None if timeout_s is None else timeout_s * 1000)}


class Shell:
    """Persistent bash, as a context manager. Commands share the working directory and the variables.

    It is also a tool server with one tool (`mcp_client.ToolServer`).

    Args:
        confinement: Argument of `sandbox_command`, or only its kind. The shell does not inherit this process's environment
            variables, which include the model's key.
        timeout_s: Time limit of a command, in seconds.

    Attributes:
        folder: Working directory, in which commands may write; removed when the shell ends.
    """

    def __init__(self, confinement: str | dict[str, Any] = "bubblewrap", timeout_s: float = 60.0) -> None:
        self._confinement = {"kind": confinement} if isinstance(confinement, str) else confinement
        self._timeout_s = timeout_s
        self._root = make_temporary_folder("shell")
        self.folder = make_subfolders(self._root)
        self._process: Any = None

    def __enter__(self) -> Shell:
        return self

    def __exit__(self, *_: Any) -> None:
        self._end_process()
        remove_folder(self._root)

    def run(self, command: str) -> str:
        """Runs a command; returns the output of both streams, and the exit status if it is not 0. A command that exceeds
        the time limit is killed together with the shell; the next command gets a new shell in the same folder.
        """
        if self._process is None:
            self._start_process()
        end_marker = f"done-{secrets.token_hex(8)}"
        # Bash reads the whole command before it runs: a heredoc, an open quote or an `exit` affects only this command.
        script = (
            f'eval "$(cat <<\'{end_marker}\'\n{command}\n{end_marker}\n)" 2>&1 </dev/null; echo "{end_marker} $?"\n'
        )
        with contextlib.suppress(OSError):  # if the shell has ended, the available output is read
            self._process.stdin.write(script.encode())
            self._process.stdin.flush()
        output, reason = self._read_output(end_marker.encode())
        command_output, _, status = output.partition(end_marker.encode())
        shown_output = _drop_middle(command_output.decode(errors="replace")).rstrip("\n")
        if reason:
            self._end_process()
            return f"{shown_output}\n[{reason}: the shell was started anew]".strip()
        exit_code = status.split()[0].decode() if status.split() else "0"
        return shown_output if exit_code == "0" else f"{shown_output}\n[status {exit_code}]".strip()

    def tools(self) -> list[dict[str, Any]]:
        """Returns the shell's tool, in OpenAI's format."""
        parameters = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
        description = "Runs a command in a bash that stays: the folder and variables are those that the last one left."
        return [
            {"type": "function", "function": {"name": "shell", "description": description, "parameters": parameters}}
        ]

    def call(self, name: str, arguments: dict[str, Any]) -> str:
        """Implements `ToolServer.call`; see `run`.

        Raises:
            ValueError: The command is not a text.
        """
        del name
        if not isinstance(arguments.get("command"), str):
            raise ValueError("command must be a text")
        return self.run(arguments["command"])

    def _start_process(self) -> None:
        temporary_folder = os.path.join(self._root, "tmp") if self._confinement["kind"] != "bubblewrap" else "/tmp"
        environment = {
            "PATH": _PATH,
            "HOME": self.folder,
            "LANG": "C.UTF-8",
            "TERM": "dumb",
            "TMPDIR": temporary_folder,
        }
        self._process = subprocess.Popen(
            sandbox_command(self._confinement, _SHELL_COMMAND, self._root),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd=self.folder,
            env=environment,
            start_new_session=True,
        )

    def _read_output(self, mark: bytes) -> tuple[bytes, str]:
        """Reads output up to the line with the mark; returns the output and the reason why the mark is missing, or ""."""
        output, deadline, stream = bytearray(), time.monotonic() + self._timeout_s, self._process.stdout.fileno()
        while True:
            remaining_s = deadline - time.monotonic()
            if remaining_s <= 0:
                return bytes(output), f"it took longer than {self._timeout_s:g} s"
            if not readable_descriptors([stream], remaining_s):
                continue
            chunk = os.read(stream, 1 << 16)
            if not chunk:
                return bytes(output), "it ended the shell"
            output += chunk
            mark_start = output.find(mark, max(0, len(output) - len(chunk) - len(mark) - 16))
            if mark_start >= 0 and b"\n" in output[mark_start:]:
                return bytes(output), ""
            if len(output) > 4 * (_HEAD + _TAIL):  # drops the middle of long output
                del output[_HEAD * 2 : -_TAIL * 2]

    def _end_process(self) -> None:
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError):
                stream.close()
        self._process = None


def _drop_middle(long_text: str) -> str:
    if len(long_text) <= _HEAD + _TAIL:
        return long_text
    return f"{long_text[:_HEAD]}\n[… {len(long_text) - _HEAD - _TAIL} characters …]\n{long_text[-_TAIL:]}"
