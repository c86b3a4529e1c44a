"""Configurations of other projects, read and translated."""

from rlhpc.config.foreign.rlinf import translate
from rlhpc.config.foreign.written import report, written

__all__ = ["report", "translate", "written"]
