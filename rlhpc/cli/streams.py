"""Standard input, output and errors, in whatever state a shell, a scheduler or a service hands them over."""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path
from typing import TextIO


def standard_streams() -> None:
    """Opens what is closed, and lets text through that the encoding of the terminal does not have.

    A closed descriptor would be given to the next file that is opened, and messages written into that file.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            if os.open(os.devnull, os.O_RDWR) == number:
                os.set_inheritable(number, True)
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open("r" if number == 0 else "w"))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")


def tell(text: str) -> None:
    """Prints a message to standard error. If that cannot be written to, the exit code is still the intended one."""
    try:
        print(text, file=sys.stderr, flush=True)
    except OSError:
        _silence(sys.stderr, sys.__stderr__)


def silence_output() -> None:
    """Discards further output, which nobody reads any more, so that the interpreter's last flush does not fail, too."""
    _silence(sys.stdout, sys.__stdout__)


def _silence(stream: TextIO, own: TextIO | None) -> None:
    if stream is own:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)
