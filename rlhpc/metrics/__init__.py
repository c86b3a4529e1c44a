"""Metric rows, progress, timers, provenance, and the report."""

from rlhpc.metrics.logger import MetricLogger, read_metrics
from rlhpc.metrics.progress import ProgressBar
from rlhpc.metrics.provenance import read_provenance, update_provenance, write_provenance
from rlhpc.metrics.timers import PhaseTimers

__all__ = [
    "MetricLogger",
    "PhaseTimers",
    "ProgressBar",
    "read_metrics",
    "read_provenance",
    "update_provenance",
    "write_provenance",
]
