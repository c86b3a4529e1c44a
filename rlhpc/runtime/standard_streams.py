"""Standard input, output and errors, in any state in which a shell, a scheduler or a service provides them."""

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
    """Text stream that makes control characters visible, whatever their origin.

    Run names, logs, errors of other processes and files from elsewhere are printed by nearly every command. A write
    may begin with a carriage return, as progress bars do.
    """

    def write(self, text: str, /) -> int:
        """Writes text without anything that a terminal obeys."""
        prefix = _OVERWRITE.match(text)
        prefix_end = prefix.end() if prefix else 0
        super().write(text[:prefix_end] + printable(text[prefix_end:]))
        return len(text)


def standard_streams() -> None:
    """Opens closed standard streams, tolerates text that the terminal's encoding lacks, and shows control characters.

    A closed descriptor would be assigned to the next file that is opened, and messages written into that file.
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
            # The process's own stream stays usable; any other would close what both write to once nobody refers to it.
            buffer = stream.buffer if stream is getattr(sys, f"__{name}__") else stream.detach()
            setattr(sys, name, VisibleText(
                buffer, encoding=encoding, errors="backslashreplace", line_buffering=by_line, write_through=write_through
            ))  # fmt: skip


def tell(text: str) -> None:
    """Prints a message to standard error. If that cannot be written to, the exit code is still the intended one."""
    try:
        print(text, file=sys.stderr, flush=True)
    except OSError:
        _silence(sys.stderr)


def silence_output() -> None:
    """Discards further output, which has no reader any more, so that the interpreter's last flush does not fail, too."""
    _silence(sys.stdout)


def _silence(stream: TextIO) -> None:
    if isinstance(stream, VisibleText):  # the process's own, not one that a caller of `main` put in its place
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)
