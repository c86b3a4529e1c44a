"""Import paths of started processes: those of the driver, never the working directory as such.

`python -m` and `python -c` put the working directory first. A folder of downloads, or one that others may write to, would
then decide what the ranks import; and a clone called rlhpc would hide the package from processes in the folder above it.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

#: Code that any Python version runs instead of `-P`, which versions before 3.11 refuse.
LEAVE_FOLDER = "import sys; sys.path[:1] == [''] and sys.path.pop(0)"
_RUN_MODULE = f"{LEAVE_FOLDER}; del sys.argv[0]; import runpy; runpy.run_module(sys.argv[0], None, '__main__', True)"


def import_paths(foreign: bool = False) -> list[str]:
    """Returns this process's paths, for a process with the same Python or (`foreign`) for a Python with separate packages.

    The latter omits the paths of this Python. Both have the folder of rlhpc last, so that a folder of that name without an
    `__init__.py` is not mistaken for it.
    """
    root = str(Path(__file__).resolve().parents[2])
    paths = [path or _working_directory() for path in sys.path]
    paths = [path for path in dict.fromkeys([*paths, root]) if path]
    if not foreign:
        return paths
    prefixes = tuple(f"{Path(prefix).resolve()}/" for prefix in (sys.prefix, sys.base_prefix))
    return [path for path in paths if not f"{Path(path).resolve()}/".startswith(prefixes)]


def python_path(foreign: bool = False) -> str:
    """Returns `import_paths`, joined as a value of PYTHONPATH."""
    return os.pathsep.join(import_paths(foreign))


def run_module(module: str, *arguments: str, python: str | None = None) -> list[str]:
    """Returns argv that runs one of rlhpc's modules: with this Python, or with another of any version."""
    if python is None or python == sys.executable:
        return [sys.executable, "-P", "-m", module, *arguments]
    return [python, "-c", _RUN_MODULE, module, *arguments]


def leave_working_directory() -> None:
    """Removes the working directory from the import path of a program started with `python -m`."""
    if not sys.flags.safe_path:
        del sys.path[0]


def _working_directory() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:  # the folder has been removed: nothing can be found there
        return ""


@cache
def fingerprint() -> str:
    """Returns a digest of the package's sources, independent of their location."""
    root = Path(__file__).resolve().parents[1]
    digest = hashlib.blake2b(digest_size=12)
    for path in sorted(root.rglob("*.py")):
        digest.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes())
    return digest.hexdigest()


def lazy_names(
    package: str, homes: Mapping[str, Iterable[str]]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Returns `__getattr__` and `__dir__` of a package.

    Args:
        package: Its `__name__`.
        homes: Module → the names that come from there.
    """
    home_of = {name: module for module, names in homes.items() for name in names}
    namespace = vars(sys.modules[package])

    def find(name: str) -> Any:
        if name not in home_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        namespace[name] = value = getattr(importlib.import_module(home_of[name]), name)
        return value

    def names() -> list[str]:
        return sorted({*namespace, *home_of})

    return find, names
