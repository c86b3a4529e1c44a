"""Generation with language models: one interface, several engines."""

from rlhpc.rollout.base import Completion, Request, RolloutBackend, SamplingParams
from rlhpc.rollout.registry import make_rollout

__all__ = ["Completion", "Request", "RolloutBackend", "SamplingParams", "make_rollout"]
