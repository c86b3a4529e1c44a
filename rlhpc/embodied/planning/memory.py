"""What the ranks hold that train an embodied policy, or act by it: from the policy itself, built without its weights.

A policy's sizes follow from what its simulator observes, so one environment is made for it, which `rlhpc plan --measure` does
and nothing else. Activations are left out: they are as the policy's class makes them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlhpc.runs.memory.account import GIB, MIB, Account, GroupRanks, MemoryTerm, Moment, terms
from rlhpc.runtime.errors import RlhpcError

_WHY = (
    "its policy's sizes follow from what the simulator observes; rlhpc plan --measure makes one and builds the policy"
)
#: What a process has beside tensors.
_ON_HOST, _ON_ACCELERATOR = 24.0 * MIB, 1.5 * GIB
_POLICIES = ("actor", "rollout")


def accounts(cfg: Any, ranks: Mapping[str, GroupRanks], *, build: bool, measure: bool) -> list[Account]:
    """What each group of a run holds (`rlhpc.runs.memory.plan.Accounting`)."""
    del build
    found = {name: one for name, one in ranks.items() if name in _POLICIES}
    if not measure:
        # On CPUs a policy is small beside what simulators take, of which nothing is known either.
        return [Account(name, unknown=_WHY) for name, one in found.items() if one.accelerated]
    try:
        trained, frozen = _parameters(cfg, any(one.accelerated for one in found.values()))
    except RlhpcError as error:
        return [Account(name, unknown=str(error)) for name in found]
    return [_account(cfg, name, one, trained, frozen) for name, one in found.items()]


def _parameters(cfg: Any, accelerated: bool) -> tuple[int, float]:
    """Parameters that are trained, and bytes of those that are not, in the precision that the ranks take."""
    import torch

    from rlhpc.config.typed import changed
    from rlhpc.embodied.envs.registry import check_env
    from rlhpc.embodied.models.registry import policy_dtype
    from rlhpc.embodied.training.blueprint import PolicyBlueprint

    side = getattr(cfg.env, "train", None) or cfg.env.eval
    actor = cfg.actor
    if hasattr(actor.model, "dtype"):  # what is accelerated is taken to compute in bfloat16
        actor = changed(actor, "model", changed(actor.model, "dtype", policy_dtype(actor, accelerated)))
    blueprint = PolicyBlueprint(actor, check_env(side), torch.device("cpu"), seed=cfg.runner.seed, look=False)
    policy = list(blueprint.build(empty=True).parameters())
    return (
        sum(p.numel() for p in policy if p.requires_grad),
        float(sum(p.numel() * p.element_size() for p in policy if not p.requires_grad)),
    )


def _account(cfg: Any, name: str, ranks: GroupRanks, trained: int, frozen: float) -> Account:
    whole = (
        1.0 / ranks.number if name == "actor" and cfg.actor.training_backend.lower() in ("fsdp", "deepspeed") else 1.0
    )
    process = (
        MemoryTerm("context and collectives", _ON_ACCELERATOR)
        if ranks.accelerated
        else MemoryTerm("libraries' work space", _ON_HOST)
    )
    held = (*terms(weights=4.0 * trained * whole, frozen_weights=frozen * whole), process)
    if name == "actor":
        held = (*held, *terms(gradients=4.0 * trained * whole, optimizer=8.0 * trained * whole))
    return Account(
        name,
        about=f"{cfg.actor.model.model_type}: {trained} parameters are trained; without activations",
        moments=(Moment("update" if name == "actor" else "acting", held),),
    )
