"""`python -m rlhpc.cli`: the command, where the script of that name is not on the path."""

from __future__ import annotations

import importlib
import sys

import rlhpc
from rlhpc.cli import main
from rlhpc.runtime.import_paths import leave_working_directory

if __name__ == "__main__":
    leave_working_directory()
    if getattr(rlhpc, "__file__", None) is None:
        # The working directory has a folder of that name, a clone perhaps, and comes before an editable install's finder.
        importlib.reload(rlhpc)
    sys.exit(main())
