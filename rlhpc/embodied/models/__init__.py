"""Policy networks: one interface for acting and training, which agree on log-probs."""

from rlhpc.embodied.models.base import Policy
from rlhpc.embodied.models.registry import build_model, check_policy, policy_from_spec, policy_section, register_model

__all__ = ["Policy", "build_model", "check_policy", "policy_from_spec", "policy_section", "register_model"]
