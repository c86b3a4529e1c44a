"""Metrics of a run: rows, loggers, progress display, phase times, provenance, and the charts and tables of the report."""

from rlhpc.metrics.logger import MetricLogger, ProgressBar, read_metrics
from rlhpc.metrics.phase_times import PhaseTimers
from rlhpc.metrics.provenance import read_provenance, update_provenance, write_provenance

__all__ = [
    "MetricLogger",
    "PhaseTimers",
    "ProgressBar",
    "read_metrics",
    "read_provenance",
    "update_provenance",
    "write_provenance",
]
