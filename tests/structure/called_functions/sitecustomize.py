"""Record of the functions of `rlhpc` that each process calls, with the time of each call.

Python imports this module at its start where its folder is on PYTHONPATH. It is active where RLHPC_CALLED_FUNCTIONS names a
folder for records, and RLHPC_CALLED_PACKAGE that of the package: each process appends `nanoseconds<TAB>file<TAB>function` to
a file named after its process id, for the first call of a function in each slice of time. Bodies of modules and classes are no
functions.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import sys
import threading
import time
from types import FrameType
from typing import Any

_FOLDER = os.environ.get("RLHPC_CALLED_FUNCTIONS")
#: Calls of a function within this time of a recorded one are not recorded again.
_SLICE_NS = 10_000_000
_PACKAGE = os.environ.get("RLHPC_CALLED_PACKAGE", "")
#: File name of code → its path from `rlhpc/` on; None for other packages' files.
_paths: dict[str, str | None] = {}
_next_ns: dict[tuple[str, int], int] = {}


def _path_in_package(filename: str) -> str | None:
    """Returns the path of a source file from `rlhpc/` on, or None where it is not one of the package's."""
    path = os.path.realpath(filename)
    return os.path.relpath(path, os.path.dirname(_PACKAGE)) if path.startswith(f"{_PACKAGE}{os.sep}") else None


def _record_call(frame: FrameType, event: str, argument: Any) -> None:
    """Writes a line for a call, unless the function has one in this slice of time."""
    if event != "call":
        return
    code = frame.f_code
    filename = code.co_filename
    try:
        path = _paths[filename]
    except KeyError:
        path = _paths[filename] = _path_in_package(filename)
    if path is None or not code.co_flags & inspect.CO_OPTIMIZED:
        return
    key = (filename, code.co_firstlineno)
    now = time.time_ns()
    if now < _next_ns.get(key, 0):
        return
    _next_ns[key] = now + _SLICE_NS
    with contextlib.suppress(OSError):
        # Opened each time: processes close descriptors that they do not know, and a fork has a file of its own.
        descriptor = os.open(f"{_FOLDER}/{os.getpid()}", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            os.write(descriptor, f"{now}\t{path}\t{code.co_qualname}\n".encode())
        finally:
            os.close(descriptor)


if _FOLDER:
    os.register_at_fork(after_in_child=_next_ns.clear)
    sys.setprofile(_record_call)
    threading.setprofile(_record_call)
