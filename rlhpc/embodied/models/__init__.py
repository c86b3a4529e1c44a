"""Policies: networks with one way to act and one way to be trained, which agree on log-probabilities."""

from rlhpc.embodied.models.base import Policy
from rlhpc.embodied.models.registry import build_model, check_policy, policy_from_spec, policy_section, register_model

__all__ = ["Policy", "build_model", "check_policy", "policy_from_spec", "policy_section", "register_model"]
