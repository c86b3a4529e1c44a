"""Configurations of other projects, read and translated."""

from rlhpc.cli.foreign.rlinf import translate
from rlhpc.cli.foreign.written import report, written

__all__ = ["report", "translate", "written"]
