"""Sandboxes for what agents start, and a shell that stays. As `runner.py`, by which it is read: the standard library, any
Python from 3.8 on, nothing of rlhpc.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import shutil
import signal
import subprocess
import tempfile
import time
from typing import Any, Sequence  # noqa: UP035 (Python 3.8)

#: Most characters of what a command says that the model reads: of its beginning, and of its end.
_HEAD, _TAIL = 4000, 4000
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_START = ["bash", "--noprofile", "--norc"]
#: Seconds that a sandbox has to show that it works.
_TRY_S = 20.0


def sandboxed(
    sandbox: str, command: Sequence[str], folder: str, socket: str | None = None, needs: Sequence[str] = ()
) -> list[str]:
    """A command in a sandbox without a network.

    Args:
        sandbox: `bubblewrap`, `unshare` or `none`.
        command: argv.
        folder: Where it may write, and begins.
        socket: The way to the model, if it is to have one.
        needs: Files and folders that it is to see, wherever they are.
    """
    if sandbox == "bubblewrap":
        hidden = [place for place in (os.path.expanduser("~"), "/tmp") if place not in ("", "/")]
        shown = [place for place in dict.fromkeys(needs) if place.startswith(tuple(f"{h}/" for h in hidden))]
        way = [os.path.dirname(socket)] if socket else []
        return [
            "bwrap", "--unshare-all", "--die-with-parent", "--new-session", "--ro-bind", "/", "/", "--dev", "/dev",
            "--proc", "/proc", *(word for place in hidden for word in ("--tmpfs", place)),
            *(word for place in shown for word in ("--ro-bind-try", place, place)),
            *(word for place in [folder, *way] for word in ("--bind", place, place)), "--chdir", folder, *command,
        ]  # fmt: skip
    if sandbox == "unshare":  # the files are those of the user
        return ["unshare", "-rn", "--pid", "--fork", "--kill-child", "--mount-proc", *command]
    return list(command)


def broken(sandbox: str) -> str:
    """Why a sandbox does not work here; "" if it does."""
    if sandbox == "none":
        return ""
    folder = tempfile.mkdtemp(prefix="rlhpc-try-")
    try:
        done = subprocess.run(
            sandboxed(sandbox, ["true"], folder), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, timeout=_TRY_S, cwd=folder, check=False,
        )  # fmt: skip
        return (
            "" if done.returncode == 0 else done.stdout.decode(errors="replace").strip() or f"status {done.returncode}"
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class Shell:
    """A bash that stays: folder and variables are those that the last command left. Use it in a `with`.

    It is a server of one tool, too (`tool_servers.ToolServer`).

    Args:
        sandbox: See `sandboxed`. The variables of this process, the model's key among them, are not passed on.
        timeout_s: Longest time of a command.

    Attributes:
        folder: Where it begins, and may write; removed at its end.
    """

    def __init__(self, sandbox: str = "bubblewrap", timeout_s: float = 60.0) -> None:
        self._sandbox, self._timeout_s = sandbox, timeout_s
        self.folder = tempfile.mkdtemp(prefix="rlhpc-shell-")
        self._process: Any = None

    def __enter__(self) -> Shell:
        return self

    def __exit__(self, *_: Any) -> None:
        self._end()
        shutil.rmtree(self.folder, ignore_errors=True)

    def run(self, command: str) -> str:
        """What a command says, on both of its streams, and its status where that is not 0. One that takes too long is ended,
        with the shell; the next one gets a new shell, in the folder as it is."""
        if self._process is None:
            self._start()
        mark = f"done-{secrets.token_hex(8)}"
        # Read whole before it is run; a heredoc, a quote that is not closed or an `exit` concern this command alone.
        script = f'eval "$(cat <<\'{mark}\'\n{command}\n{mark}\n)" 2>&1 </dev/null; echo "{mark} $?"\n'
        try:
            self._process.stdin.write(script.encode())
            self._process.stdin.flush()
        except OSError:
            pass  # it has ended: what there is of output is read
        said, ended = self._read(mark.encode())
        text, _, status = said.partition(mark.encode())
        shown = _cut(text.decode(errors="replace")).rstrip("\n")
        if ended:
            self._end()
            return f"{shown}\n[{ended}: the shell was started anew]".strip()
        number = status.split()[0].decode() if status.split() else "0"
        return shown if number == "0" else f"{shown}\n[status {number}]".strip()

    def tools(self) -> list[dict[str, Any]]:
        """Its tool, in OpenAI's form."""
        parameters = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
        about = "Runs a command in a bash that stays: the folder and variables are those that the last one left."
        return [{"type": "function", "function": {"name": "shell", "description": about, "parameters": parameters}}]

    def call(self, name: str, arguments: dict[str, Any]) -> str:
        """See `run`."""
        del name
        if not isinstance(arguments.get("command"), str):
            raise ValueError("command must be a text")
        return self.run(arguments["command"])

    def _start(self) -> None:
        environment = {"PATH": _PATH, "HOME": self.folder, "LANG": "C.UTF-8", "TERM": "dumb", "TMPDIR": self.folder}
        self._process = subprocess.Popen(
            sandboxed(self._sandbox, _START, self.folder), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, cwd=self.folder, env=environment, start_new_session=True,
        )  # fmt: skip

    def _read(self, mark: bytes) -> tuple[bytes, str]:
        """What is said up to the mark's line; and why there is none, if so."""
        said, deadline, stream = bytearray(), time.monotonic() + self._timeout_s, self._process.stdout.fileno()
        while True:
            left = deadline - time.monotonic()
            if left <= 0:
                return bytes(said), f"it took longer than {self._timeout_s:g} s"
            if not select.select([stream], [], [], left)[0]:
                continue
            data = os.read(stream, 1 << 16)
            if not data:
                return bytes(said), "it ended the shell"
            said += data
            at = said.find(mark, max(0, len(said) - len(data) - len(mark) - 16))
            if at >= 0 and b"\n" in said[at:]:
                return bytes(said), ""
            if len(said) > 4 * (_HEAD + _TAIL):  # a flood: its middle is thrown away
                del said[_HEAD * 2 : -_TAIL * 2]

    def _end(self) -> None:
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError):
                stream.close()
        self._process = None


def _cut(text: str) -> str:
    if len(text) <= _HEAD + _TAIL:
        return text
    return f"{text[:_HEAD]}\n[… {len(text) - _HEAD - _TAIL} characters …]\n{text[-_TAIL:]}"
