"""Generation engines (hf, vLLM) behind one interface."""

from rlhpc.language.engines.base import Completion, Request, RolloutBackend, SamplingParams
from rlhpc.language.engines.registry import make_rollout

__all__ = ["Completion", "Request", "RolloutBackend", "SamplingParams", "make_rollout"]
