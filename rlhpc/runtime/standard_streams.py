"""Setup of the standard streams, which a shell, a scheduler or a service may provide closed or with a limited encoding."""

from __future__ import annotations

import io
import os
import re
import sys
from pathlib import Path
from typing import TextIO

from rlhpc.runtime.text import printable

#: Start of a progress bar's write, which overwrites its line.
_OVERWRITE = re.compile(r"(\r *)*(\x1b\[2K)?")


class VisibleText(io.TextIOWrapper):
    """Text stream that makes control characters visible.

    Nearly all commands print text from other sources, such as run names, logs, files and errors of other processes. A write
    may begin with a carriage return, as progress bars need it.
    """

    def write(self, text: str, /) -> int:
        """Writes text with escapes in place of control characters."""
        prefix = _OVERWRITE.match(text)
        prefix_end = prefix.end() if prefix else 0
        super().write(text[:prefix_end] + printable(text[prefix_end:]))
        return len(text)


def standard_streams() -> None:
    """Opens closed standard streams, and makes the output streams escape control characters and unsupported characters.

    If a standard descriptor stayed closed, the next opened file would get its number, and messages would go to that file.
    """
    for fd, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(fd)
        except OSError:
            if os.open(os.devnull, os.O_RDWR) == fd:
                os.set_inheritable(fd, True)
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open("r" if fd == 0 else "w"))  # noqa: SIM115
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if type(stream) is io.TextIOWrapper:
            stream.flush()
            encoding, by_line, write_through = stream.encoding, stream.line_buffering, stream.write_through
            # The original stream of the process stays usable. Any other stream is detached, because it would close the shared
            # buffer when it is deleted.
            buffer = stream.buffer if stream is getattr(sys, f"__{name}__") else stream.detach()
            setattr(sys, name, VisibleText(
                buffer, encoding=encoding, errors="backslashreplace", line_buffering=by_line, write_through=write_through
            ))  # fmt: skip


def tell(text: str) -> None:
    """Prints a message to standard error. Ignores write errors, so that they do not change the exit code."""
    try:
        print(text, file=sys.stderr, flush=True)
    except OSError:
        _silence(sys.stderr)


def silence_output() -> None:
    """Discards further output after a write error, so that the interpreter's last flush does not fail, too."""
    _silence(sys.stdout)


def _silence(stream: TextIO) -> None:
    if isinstance(stream, VisibleText):  # the stream of this process, not a replacement by the caller of `main`
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)
