"""A working directory in which nobody should look for modules: one of somebody else's, or full of downloads."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
#: What rlhpc's processes import, from the standard library and from elsewhere.
NAMES = (
    "cloudpickle",
    "numpy",
    "psutil",
    "runpy",
    "secrets",
    "selectors",
    "socket",
    "submitit",
    "tempfile",
    "torch",
    "zmq",
)


def plant(folder: Path) -> Path:
    """Fills the folder with modules that end whoever imports them, and with a clone called rlhpc.

    Each writes who that was into `imported`, which does not exist otherwise.
    """
    folder.mkdir(parents=True, exist_ok=True)
    code = (
        "import os, sys\n"
        f"with open({str(folder / 'imported')!r}, 'a') as file:\n"
        "    file.write(f'{__name__}: {sys.orig_argv}\\n')\n"
        "os._exit(97)\n"
    )
    for name in NAMES:
        (folder / f"{name}.py").write_text(code)
    (folder / "rlhpc").symlink_to(ROOT)
    return folder


def imported(folder: Path) -> str:
    """Who has imported what was planted; empty for nobody."""
    try:
        return (folder / "imported").read_text()
    except FileNotFoundError:
        return ""
