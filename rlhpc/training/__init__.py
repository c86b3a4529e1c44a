"""Training backends: gradient accumulation and data parallelism behind one interface."""

from rlhpc.training.local import LocalBackend

__all__ = ["LocalBackend"]
