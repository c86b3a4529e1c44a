"""Where a process that is started looks for modules."""

from __future__ import annotations

import sys
from pathlib import Path


def import_paths(foreign: bool = False) -> list[str]:
    """This process's paths, for one with the same Python, or (`foreign`) for one whose packages are its own.

    The latter leaves out what belongs to this Python and adds the folder of rlhpc where that is not installed.
    """
    paths = [path or str(Path.cwd()) for path in sys.path]
    if not foreign:
        return paths
    own = tuple(f"{Path(prefix).resolve()}/" for prefix in (sys.prefix, sys.base_prefix))
    root = str(Path(__file__).resolve().parents[2])
    return [path for path in dict.fromkeys([*paths, root]) if not f"{Path(path).resolve()}/".startswith(own)]
