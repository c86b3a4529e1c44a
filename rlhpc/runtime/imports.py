"""Import paths of started processes: the paths of the driver, without the working directory that Python adds.

`python -m` and `python -c` put the working directory first on the import path. Files in a folder of downloads, or in a folder
that other users may write to, could then replace modules of the ranks. A clone in a folder named rlhpc would hide the package
from processes in its parent folder.
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

#: Code with the effect of `-P` for all versions of Python; versions before 3.11 do not have this option.
LEAVE_FOLDER = "import sys; sys.path[:1] == [''] and sys.path.pop(0)"
_RUN_MODULE = f"{LEAVE_FOLDER}; del sys.argv[0]; import runpy; runpy.run_module(sys.argv[0], None, '__main__', True)"


def import_paths(foreign: bool = False) -> list[str]:
    """Returns the import paths for a process that this one starts: those of this process, and the parent folder of rlhpc.

    Without that folder, the process could import a folder named rlhpc without an `__init__.py` in place of the package.

    Args:
        foreign: Whether the process has another Python with separate packages. The paths of this Python are then omitted.
    """
    root = str(Path(__file__).resolve().parents[2])
    paths = [path or _find_working_directory() for path in sys.path]
    paths = [path for path in dict.fromkeys([*paths, root]) if path]
    if not foreign:
        return paths
    prefixes = tuple(f"{Path(prefix).resolve()}/" for prefix in (sys.prefix, sys.base_prefix))
    return [path for path in paths if not f"{Path(path).resolve()}/".startswith(prefixes)]


def python_path(foreign: bool = False) -> str:
    """Returns `import_paths`, joined as a value of PYTHONPATH."""
    return os.pathsep.join(import_paths(foreign))


def run_module(module: str, *arguments: str, python: str | None = None, folder: str | None = None) -> list[str]:
    """Returns the command that runs a module of rlhpc, with this Python or with another Python of any version.

    Args:
        module: Name of the module.
        arguments: Arguments of the module.
        python: The other Python; None for this one.
        folder: Working directory that the module enters if it exists; some programs start the commands of a container
            elsewhere. None for the working directory of the command.
    """
    if folder is not None:
        enter_folder = f"import os; os.path.isdir({folder!r}) and os.chdir({folder!r})"
        return [python or sys.executable, "-c", f"{enter_folder}; {_RUN_MODULE}", module, *arguments]
    if python is None or python == sys.executable:
        return [sys.executable, "-P", "-m", module, *arguments]
    return [python, "-c", _RUN_MODULE, module, *arguments]


def leave_working_directory() -> None:
    """Removes the working directory from the import path of a program that was started with `python -m`.

    A command of `run_module` for another Python, which begins with `-c`, has done so already.
    """
    if not sys.flags.safe_path and sys.orig_argv[1:2] != ["-c"]:
        del sys.path[0]


def _find_working_directory() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:  # the folder has been removed, so it contains no modules
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
    """Returns `__getattr__` and `__dir__` functions for a package that imports its names when they are first used.

    Args:
        package: The package's `__name__`.
        homes: Module → names that are imported from this module.
    """
    home_of = {name: module for module, module_names in homes.items() for name in module_names}
    namespace = vars(sys.modules[package])

    def find(name: str) -> Any:
        if name not in home_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        namespace[name] = attribute_value = getattr(importlib.import_module(home_of[name]), name)
        return attribute_value

    def list_names() -> list[str]:
        return sorted({*namespace, *home_of})

    return find, list_names
