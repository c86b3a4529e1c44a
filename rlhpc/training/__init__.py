"""Training backends and the policy update: gradient accumulation and data parallelism behind one interface."""

from rlhpc.training.local import LocalBackend
from rlhpc.training.minibatches import local_minibatches
from rlhpc.training.policy_update import PolicyUpdate

__all__ = ["LocalBackend", "PolicyUpdate", "local_minibatches"]
