"""Conditions under which a run is the same bit for bit when it is repeated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rlhpc.metrics.provenance import resumes_with_changes

#: Metrics that depend on the clock and on what was lost; all others follow from configuration and seeds.
_VARYING = ("time/", "env/lost_", "env/robot_")
#: Facts about a start that must be the same at every start.
_FIXED = ("packages", "system", "cpus_granted")


def is_determined(metric: str) -> bool:
    """Returns whether a metric follows from the configuration and the seeds (docs/reference/metrics.md)."""
    return not metric.startswith(_VARYING)


def broken_promises(config: Mapping[str, Any], provenance: Mapping[str, Any], run_state_name: str) -> list[str]:
    """Returns the reasons why a repetition of a run may differ in some bits; [] if it is reproducible bit for bit.

    Args:
        config: The run's resolved configuration.
        provenance: The run's provenance record.
        run_state_name: State of the run, such as `finished`.
    """

    def select(key: str) -> Any:
        config_value: Any = config
        for name in key.split("."):
            config_value = config_value.get(name) if isinstance(config_value, Mapping) else None
        return config_value

    placement = provenance.get("placement") or {}
    segment_starts: Sequence[Mapping[str, Any]] = provenance.get("segments") or ()
    reasons = []
    if run_state_name != "finished":
        reasons.append(f"the run is {run_state_name}, so that its end is not that of a whole run")
    if select("algorithm.max_staleness"):
        reasons.append("algorithm.max_staleness is above 0: what is generated ahead depends on the clock")
    if select("runner.enable_decoupled_mode") or select("env.enable_decoupled_mode"):
        reasons.append("decoupled mode: what is generated depends on the clock")
    if any(rank.get("accelerators") for ranks in placement.values() for rank in ranks):
        reasons.append("it ran on accelerators, whose kernels may add in any order")
    if (engine := select("rollout.rollout_backend")) not in (None, "hf"):
        reasons.append(f"rollout.rollout_backend is {engine}: only hf gives the same tokens in every batch")
    if select("cluster.elastic"):
        reasons.append("cluster.elastic: ranks joined and left as the cluster allowed")
    if select("agent.kind") not in (None, "inline") or select("agent.services"):
        reasons.append("agents, services and tools need not answer the same again")
    if select("robots") or select("env.train.env_type") == "robot":
        reasons.append("a real robot never does the same twice")
    if not provenance.get("packages"):
        reasons.append("an earlier version of rlhpc ran it, which recorded only some packages")
    for fixed_fact in _FIXED:
        if len({str(segment_start.get(fixed_fact)) for segment_start in segment_starts}) > 1:
            reasons.append(f"its starts differ in {fixed_fact.replace('_', ' ')}")
    code_states = {
        str([(code_entry.get("commit"), code_entry.get("diff")) for code_entry in segment_start.get("code") or ()])
        for segment_start in segment_starts
    }
    if len(code_states) > 1:
        reasons.append("its starts ran different code")
    for step, changes in resumes_with_changes(provenance):
        reasons.append(
            f"it was resumed at step {step} with another configuration ({changes}), and is repeated with the last one"
        )
    return reasons
