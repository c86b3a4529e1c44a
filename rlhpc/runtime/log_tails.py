"""The end of a rank's log, for messages."""

from __future__ import annotations

import contextlib
import itertools
from pathlib import Path

_TAIL_BYTES = 16384


def tail(path: str) -> str:
    """The last lines of a log, as the end of a message; "" if there are none."""
    with contextlib.suppress(OSError):
        return last_lines(Path(path).read_bytes()[-_TAIL_BYTES:].decode(errors="replace"))
    return ""


def last_lines(text: str) -> str:
    """Those of a log's text that tell, as the end of a message; "" if there are none."""
    lines = text.strip().splitlines()
    return "\n  last lines of its log:\n" + "\n".join("    " + line for line in _telling(lines)) if lines else ""


def _telling(lines: list[str]) -> list[str]:
    """The last lines; of `faulthandler`'s output only the thread at fault, without the list of all modules."""
    fatal = [at for at, line in enumerate(lines) if line.startswith("Fatal Python error")]
    if not fatal or not lines[-1].startswith(("  File ", "Extension modules: ")):  # or it was an earlier process's
        return lines[-12:]
    at = next((at for at in range(fatal[-1], len(lines)) if lines[at].startswith("Current thread")), fatal[-1] + 1)
    frames = itertools.takewhile(str.strip, lines[at : at + 8])
    return [*lines[: fatal[-1]][-3:], lines[fatal[-1]], *frames]
