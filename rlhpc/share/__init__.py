"""Files that belong to rlhpc beside its code: workflow, profiles, configurations.

In a checkout these are its top-level folders. A wheel has them below this package, so that an installation without the
repository has them, too.
"""

from __future__ import annotations

from pathlib import Path

#: The top-level folders that a wheel carries.
FOLDERS = ("workflow", "profiles", "configs", "config", "examples")
_PACKAGED = Path(__file__).resolve().parent
_CHECKOUT = _PACKAGED.parents[1]


def root() -> Path:
    """The folder that `workflow/`, `profiles/`, `configs/`, … are in."""
    # Another project's folder of that name beside an installed package is not ours.
    return _PACKAGED if (_PACKAGED / "workflow" / "Snakefile").is_file() else _CHECKOUT


def path(*parts: str) -> Path:
    """A file or folder of it, such as `path("workflow", "Snakefile")`."""
    return root().joinpath(*parts)


def snakefile() -> str:
    """The workflow's Snakefile, for `module: snakefile: snakefile()` in a workflow of one's own."""
    return str(path("workflow", "Snakefile"))
