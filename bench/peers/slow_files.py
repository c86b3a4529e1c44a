"""Slow, counted file operations below a folder: a distant filesystem on a local disk.

Imported by the driver, and by the fork server before it forks (`Session(preload=["bench.peers.slow_files"])`), so that every
process of a session is slow alike. `RLHPC_BENCH_SLOW_ROOT` names the folder, `RLHPC_BENCH_SLOW_MS` what each operation costs.
"""

from __future__ import annotations

import builtins
import io
import os
import time
from collections.abc import Callable
from typing import Any

counted: dict[str, int] = {}
_ROOT = os.environ.get("RLHPC_BENCH_SLOW_ROOT", "")
_SECONDS = float(os.environ.get("RLHPC_BENCH_SLOW_MS", "0")) / 1000
_installed = False


def _wrap(module: Any, name: str) -> None:
    original_function: Callable[..., Any] = getattr(module, name)

    def slow(*args: Any, **kwargs: Any) -> Any:
        if _ROOT and args and not isinstance(args[0], int) and os.fspath(args[0]).startswith(_ROOT):
            counted[name] = counted.get(name, 0) + 1
            if _SECONDS:
                time.sleep(_SECONDS)
        return original_function(*args, **kwargs)

    setattr(module, name, slow)


def install(root: str, delay_ms: float = 0.0) -> None:
    """Makes file operations slow in this process and in processes that it forks."""
    global _ROOT, _SECONDS, _installed
    _ROOT, _SECONDS = root, delay_ms / 1000
    if _installed:
        return
    _installed = True
    for name in ("open", "stat", "rename", "unlink", "mkdir", "scandir", "listdir"):
        _wrap(os, name)
    _wrap(io, "open")
    builtins.open = io.open


def take_count() -> int:
    """Returns the operations since the last call."""
    total = sum(counted.values())
    counted.clear()
    return total


if _ROOT:
    install(_ROOT, _SECONDS * 1000)
