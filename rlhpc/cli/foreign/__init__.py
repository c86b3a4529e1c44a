"""Translation of other projects' configurations."""

from rlhpc.cli.foreign.output import format_config, format_report
from rlhpc.cli.foreign.rlinf import translate

__all__ = ["format_config", "format_report", "translate"]
