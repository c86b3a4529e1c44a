"""Entry point `python -m rlhpc.cli`, for environments whose PATH does not contain the script `rlhpc`."""

from __future__ import annotations

import importlib
import sys

import rlhpc
from rlhpc.cli import main
from rlhpc.runtime.imports import leave_working_directory

if __name__ == "__main__":
    leave_working_directory()
    if getattr(rlhpc, "__file__", None) is None:
        # A folder `rlhpc` in the working directory, perhaps a clone, has precedence over the editable install.
        importlib.reload(rlhpc)
    sys.exit(main())
