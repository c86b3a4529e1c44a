"""Paths of rlhpc's files that are not code: workflow, profiles, configurations, examples.

A checkout has these files in its top-level folders. A wheel has them below this package, so that an installation without
the repository includes them.
"""

from __future__ import annotations

from pathlib import Path

#: The top-level folders that a wheel carries.
FOLDERS = ("workflow", "profiles", "configs", "config", "examples")
_PACKAGED = Path(__file__).resolve().parent
_CHECKOUT = _PACKAGED.parents[1]


def root() -> Path:
    """Returns the folder that contains `workflow/`, `profiles/`, `configs/`, …."""
    # Next to an installed package, a folder of that name belongs to another project.
    return _PACKAGED if (_PACKAGED / "workflow" / "Snakefile").is_file() else _CHECKOUT


def path(*path_parts: str) -> Path:
    """Returns the path of a file or folder below `root()`, such as `path("workflow", "Snakefile")`."""
    return root().joinpath(*path_parts)


def snakefile() -> str:
    """Returns the workflow's Snakefile, for `module: snakefile: snakefile()` in a user's workflow."""
    return str(path("workflow", "Snakefile"))
