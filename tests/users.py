"""Two ordinary users, for tests that run as root: what one of them leaves must not harm the other."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest

#: Made up: no account has these numbers.
ALICE, BOB = 23001, 23002
needs_root = pytest.mark.skipif(os.getuid() != 0, reason="needs root, to become other users")

# Modules first: the interpreter may lie where only root can read.
_BECOME = """
import errno, json, os, pathlib, pwd, random, shutil, sys, tempfile
import rlhpc.runtime.scratch, rlhpc.runtime.registry
given = sys.argv.pop(1).split(":")
os.chdir("/"); os.umask(int(given[1]))
os.setgroups([]); os.setgid(int(given[0])); os.setuid(int(given[0]))
"""


def run_as(uid: int, code: str, *words: object, umask: int = 0o022, **options: Any) -> subprocess.CompletedProcess[str]:
    """Runs Python code as a user; `words` are its `sys.argv[1:]`. It imports what it needs of rlhpc before it is that user."""
    imports = "".join(line + "\n" for line in code.splitlines() if line.startswith(("import rlhpc", "from rlhpc")))
    return subprocess.run(
        [sys.executable, "-c", imports + _BECOME + code, f"{uid}:{umask}", *map(str, words)],
        capture_output=True, text=True, timeout=60, **options,
    )  # fmt: skip
