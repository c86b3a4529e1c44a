"""Translation of other projects' configurations."""

from rlhpc.cli.foreign.output import report, written
from rlhpc.cli.foreign.rlinf import translate

__all__ = ["report", "translate", "written"]
