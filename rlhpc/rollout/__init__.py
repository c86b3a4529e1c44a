"""Generation with language models: one interface, several engines."""

from rlhpc.rollout.base import Completion, Request, RolloutBackend, SamplingParams

__all__ = ["Completion", "Request", "RolloutBackend", "SamplingParams"]
