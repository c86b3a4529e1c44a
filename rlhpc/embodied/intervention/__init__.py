"""Somebody watches a policy play and takes over where it goes wrong: human-gated DAgger (Kelly et al. 2019)."""

from rlhpc.embodied.intervention.base import (
    INTERVENTIONS,
    Gated,
    Intervention,
    find_intervention,
    named_intervention,
    register_intervention,
)

__all__ = ["INTERVENTIONS", "Gated", "Intervention", "find_intervention", "named_intervention", "register_intervention"]
