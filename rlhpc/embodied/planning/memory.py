"""Memory accounts of actor and rollout ranks of embodied runs, computed from the policy's parameter counts.

A policy's size depends on the simulator's observations, so `rlhpc plan --measure` builds one environment and the policy
without its weights. Other plans report the memory as unknown. Activations are excluded, because they depend on the
policy class.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlhpc.runs.memory.account import Account, GroupRanks, Moment, process, terms
from rlhpc.runtime.errors import RlhpcError

_UNKNOWN_REASON = (
    "its policy's sizes follow from what the simulator observes; rlhpc plan --measure makes one and builds the policy"
)
_POLICY_GROUPS = ("actor", "rollout")


def accounts(cfg: Any, ranks: Mapping[str, GroupRanks], *, build: bool, measure: bool) -> list[Account]:
    """Returns the memory accounts of a run's groups (`rlhpc.runs.memory.plan.Accounting`)."""
    del build
    policy_groups = {name: group_ranks for name, group_ranks in ranks.items() if name in _POLICY_GROUPS}
    if not measure:
        # On CPUs a policy is small compared with the simulators, whose memory is unknown, too.
        return [
            Account(name, unknown=_UNKNOWN_REASON)
            for name, group_ranks in policy_groups.items()
            if group_ranks.accelerated
        ]
    try:
        num_trained, frozen_bytes = _count_parameters(
            cfg, any(group_ranks.accelerated for group_ranks in policy_groups.values())
        )
    except RlhpcError as error:
        return [Account(name, unknown=str(error)) for name in policy_groups]
    return [
        _build_account(cfg, name, group_ranks, num_trained, frozen_bytes) for name, group_ranks in policy_groups.items()
    ]


def _count_parameters(cfg: Any, accelerated: bool) -> tuple[int, float]:
    """Returns the number of trained parameters, and the bytes of the frozen parameters in the ranks' dtype."""
    import torch

    from rlhpc.config.typed import changed
    from rlhpc.embodied.envs.registry import check_env
    from rlhpc.embodied.models.registry import policy_dtype
    from rlhpc.embodied.training.blueprint import PolicyBlueprint

    env_cfg = getattr(cfg.env, "train", None) or cfg.env.eval
    actor = cfg.actor
    if hasattr(actor.model, "dtype"):  # accelerators are assumed to compute in bfloat16
        actor = changed(actor, "model", changed(actor.model, "dtype", policy_dtype(actor, accelerated)))
    blueprint = PolicyBlueprint(actor, check_env(env_cfg), torch.device("cpu"), seed=cfg.runner.seed, look=False)
    parameters = list(blueprint.build(empty=True).parameters())
    return (
        sum(parameter.numel() for parameter in parameters if parameter.requires_grad),
        float(
            sum(parameter.numel() * parameter.element_size() for parameter in parameters if not parameter.requires_grad)
        ),
    )


def _build_account(cfg: Any, name: str, ranks: GroupRanks, num_trained: int, frozen_bytes: float) -> Account:
    shard_fraction = (
        1.0 / ranks.number if name == "actor" and cfg.actor.training_backend.lower() in ("fsdp", "deepspeed") else 1.0
    )
    resident_terms = (
        *terms(weights=4.0 * num_trained * shard_fraction, frozen_weights=frozen_bytes * shard_fraction),
        process(ranks.accelerated),
    )
    if name == "actor":
        resident_terms = (
            *resident_terms,
            *terms(gradients=4.0 * num_trained * shard_fraction, optimizer=8.0 * num_trained * shard_fraction),
        )
    return Account(
        name,
        description=f"{cfg.actor.model.model_type}: {num_trained} parameters are trained; without activations",
        moments=(Moment("update" if name == "actor" else "acting", resident_terms),),
    )
