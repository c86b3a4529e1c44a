"""Where metric rows go besides metrics.jsonl: TensorBoard, tracking services, and loggers of one's own."""

from rlhpc.metrics.loggers.base import RunFacts, RunLogger
from rlhpc.metrics.loggers.registry import check_loggers, find_logger, logger_names

__all__ = ["RunFacts", "RunLogger", "check_loggers", "find_logger", "logger_names"]
