"""Loggers of metric rows: TensorBoard, W&B, MLflow, SwanLab, Trackio, and user-defined ones."""

from rlhpc.metrics.loggers.base import RunFacts, RunLogger
from rlhpc.metrics.loggers.registry import check_loggers, find_logger, logger_names

__all__ = ["RunFacts", "RunLogger", "check_loggers", "find_logger", "logger_names"]
