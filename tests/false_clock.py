"""Python whose wall clock is wrong: libfaketime shifts it and lets it drift; monotonic clocks and waits stay right."""

from __future__ import annotations

import glob
import sys
from pathlib import Path

import pytest

#: libfaketime shifts the absolute deadlines of Python's sleep, which the kernel then refuses; poll takes a relative time.
_SITE = """
import math, select, time
time.sleep = lambda seconds: select.poll().poll(math.ceil(1000 * seconds)) and None
"""
_WRAPPER = """#!/bin/sh
export LD_PRELOAD={library} FAKETIME="{offset_s:+g} x{rate}" FAKETIME_DONT_FAKE_MONOTONIC=1 PYTHONPATH={site}:$PYTHONPATH
exec {python} "$@"
"""


def find_faketime() -> str:
    """Returns the path of libfaketime; "" where it is missing."""
    return next(iter(glob.glob("/usr/lib/*/faketime/libfaketime.so.1")), "")


def false_clock_variables(site: Path, clock: Path) -> list[str]:
    """Returns lines of a shell that give the programs after them a clock that jumps while they run.

    Skips the test where libfaketime is missing.

    Args:
        site: Folder to make for Python's `sitecustomize`; it goes into PYTHONPATH.
        clock: File with the seconds by which the clock is ahead at present, such as `+3600`.
    """
    library = need_faketime()
    site.mkdir(exist_ok=True)
    (site / "sitecustomize.py").write_text(_SITE)
    return [
        f"export LD_PRELOAD={library} FAKETIME_TIMESTAMP_FILE={clock} FAKETIME_CACHE_DURATION=1",
        "export FAKETIME_DONT_FAKE_MONOTONIC=1 NO_FAKE_STAT=1",
    ]


def need_faketime() -> str:
    """Returns the path of libfaketime; skips the test where it is missing."""
    if not (library := find_faketime()):
        pytest.skip("needs libfaketime: sudo tests/install.sh installs what the tests need of Debian")
    return library


def python_with_false_clock(folder: Path, offset_s: float, drift: float) -> Path:
    """Writes a program that runs Python with a clock that is `offset_s` seconds ahead and gains `drift` seconds a second.

    Skips the test where libfaketime is missing.
    """
    library = need_faketime()
    site = folder / "false_clock"
    site.mkdir(exist_ok=True)
    (site / "sitecustomize.py").write_text(_SITE)
    program = site / "python"
    program.write_text(
        _WRAPPER.format(library=library, offset_s=offset_s, rate=1 + drift, site=site, python=sys.executable)
    )
    program.chmod(0o755)
    return program
