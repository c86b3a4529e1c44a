"""`python -m rlhpc.cli`: the command, where the script of that name is not on the path."""

from __future__ import annotations

import sys

from rlhpc.cli import main
from rlhpc.runtime.import_paths import leave_working_directory

if __name__ == "__main__":
    leave_working_directory()
    sys.exit(main())
