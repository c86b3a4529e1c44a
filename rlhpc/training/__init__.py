"""Training backends: gradients, data parallelism, sharding and the optimizer, behind one contract."""

from rlhpc.training.contract import Blueprint, TrainingBackend
from rlhpc.training.registry import make_backend
from rlhpc.training.replicated import ReplicatedBackend

__all__ = ["Blueprint", "ReplicatedBackend", "TrainingBackend", "make_backend"]
