"""Workload of a PPO step for `rlhpc tune`, and memory accounts of actor and rollout ranks of embodied runs, computed from the
policy's parameter counts.

A policy's size depends on the simulator's observations, so `rlhpc plan --measure` builds one environment and the policy
without its weights. Other plans report the memory as unknown. Activations are excluded, because they depend on the
policy class.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rlhpc.config.typed import select
from rlhpc.embodied.config import PpoConfig, SacConfig, acts_in_actor, minibatch_size
from rlhpc.runs.memory.account import Account, GroupRanks, MemoryTerm, Moment, process, terms
from rlhpc.runs.tuning.workload import Knob, Phase, Workload
from rlhpc.runtime.errors import ConfigError, RlhpcError
from rlhpc.weights.device_sharing import update_bytes

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
        policy_size = _measure_policy(cfg, any(group_ranks.accelerated for group_ranks in policy_groups.values()))
    except RlhpcError as error:
        return [Account(name, unknown=str(error)) for name in policy_groups]
    return [_build_account(cfg, name, group_ranks, policy_size) for name, group_ranks in policy_groups.items()]


@dataclass(frozen=True)
class PolicySize:
    """Size of a policy and of its transitions.

    Attributes:
        num_trained: Number of trained parameters.
        frozen_bytes: Bytes of the frozen parameters in the ranks' dtype.
        max_elements: Number of elements of the largest parameter.
        num_target: Number of parameters of target networks.
        obs_bytes, action_bytes: Bytes of an observation, and of a decision's actions.
    """

    num_trained: int
    frozen_bytes: float
    max_elements: int
    num_target: int = 0
    obs_bytes: int = 0
    action_bytes: int = 0


def _measure_policy(cfg: Any, is_on_accelerator: bool) -> PolicySize:
    """Builds the policy without its weights, and returns its size."""
    from rlhpc.embodied.envs.observations import row_bytes

    spaces = _spaces_of(cfg)
    policy = _build_off_policy(cfg, spaces) if _is_off_policy(cfg) else _build_policy(cfg, spaces, is_on_accelerator)
    parameters = list(policy.parameters())
    frozen_parameters = [parameter for parameter in parameters if not parameter.requires_grad]
    targets = _TARGET_NETWORKS.get(cfg.algorithm.name, ("critics", "actor")) if _is_off_policy(cfg) else ()
    return PolicySize(
        sum(parameter.numel() for parameter in parameters if parameter.requires_grad),
        float(sum(parameter.numel() * parameter.element_size() for parameter in frozen_parameters)),
        max((parameter.numel() for parameter in parameters), default=0),
        sum(parameter.numel() for network in targets for parameter in getattr(policy, network).parameters()),
        sum(row_bytes(spaces[0]).values()),
        cfg.actor.model.num_action_chunks * math.prod(spaces[1].shape) * spaces[1].dtype.itemsize,
    )


def _spaces_of(cfg: Any) -> tuple[Any, Any]:
    """Returns the observation space and the action space of a slot."""
    from rlhpc.embodied.envs.registry import check_env, environment_of

    env_cfg = getattr(cfg.env, "train", None) or cfg.env.eval
    return check_env(env_cfg if hasattr(env_cfg, "group_size") else environment_of(cfg))


#: Networks of which an off-policy algorithm has a copy as target (`OffPolicyUpdate.build_targets`); all for other algorithms.
_TARGET_NETWORKS = {"sac": ("critics",), "iql": ("critics",), "td3": ("critics", "actor"), "crossq": ()}


def _is_off_policy(cfg: Any) -> bool:
    return hasattr(cfg.algorithm, "replay_buffer")


def _build_policy(cfg: Any, spaces: Any, is_on_accelerator: bool) -> Any:
    import torch

    from rlhpc.config.typed import with_value
    from rlhpc.embodied.models.registry import policy_dtype
    from rlhpc.embodied.training import PolicyBlueprint

    actor = cfg.actor
    if hasattr(actor.model, "dtype"):  # accelerators are assumed to compute in bfloat16
        actor = with_value(actor, "model", with_value(actor.model, "dtype", policy_dtype(actor, is_on_accelerator)))
    return PolicyBlueprint(actor, spaces, torch.device("cpu"), seed=cfg.runner.seed, reads_norm=False).build(empty=True)


def _build_off_policy(cfg: SacConfig, spaces: tuple[Any, Any]) -> Any:
    from rlhpc.embodied.models import build_model

    return build_model(cfg.actor.model, *spaces, seed=cfg.runner.seed)


def _build_account(cfg: Any, name: str, ranks: GroupRanks, policy_size: PolicySize) -> Account:
    backend = "local" if _is_off_policy(cfg) else cfg.actor.training_backend
    is_sharded, acts = backend in ("fsdp", "deepspeed"), hasattr(cfg.env, "train") and acts_in_actor(cfg)
    fraction = 1.0 / ranks.number if name == "actor" and is_sharded else 1.0
    resident_terms = (
        *terms(weights=4.0 * policy_size.num_trained * fraction, frozen_weights=policy_size.frozen_bytes * fraction),
        process(ranks.accelerated),
    )
    if name == "actor":
        state_terms = terms(
            optimizer=8.0 * policy_size.num_trained * fraction,
            target_networks=4.0 * policy_size.num_target,
            inputs_of_recorded_passes=_compute_recorded_bytes(cfg, ranks, policy_size),
        )
        weights = 4.0 * policy_size.num_trained + policy_size.frozen_bytes
        gradient_terms = terms(gradients=4.0 * policy_size.num_trained * fraction)
        if acts:
            # The copy that acts is the only receiver of weights.
            state_terms = (
                *state_terms,
                *terms(copy_that_acts=weights),
                *_list_transition_terms(cfg, ranks, policy_size),
            )
        memory_moments: tuple[Moment, ...] = (Moment("update", (*resident_terms, *gradient_terms, *state_terms)),)
        if not acts:
            buffers = update_bytes(weights, ranks.accelerated, ranks.capacity)
            update_terms = terms(
                a_weight_in_full=4.0 * policy_size.max_elements * is_sharded, buffers_of_the_update=buffers
            )
            memory_moments = (
                *memory_moments,
                Moment("weights are sent", (*resident_terms, *state_terms, *update_terms)),
            )
    else:
        memory_moments = (Moment("acting", resident_terms),)
    return Account(
        name,
        description=f"{cfg.actor.model.model_type}: {policy_size.num_trained} parameters are trained; without activations",
        moments=memory_moments,
    )


def _list_transition_terms(cfg: Any, ranks: GroupRanks, policy_size: PolicySize) -> tuple[MemoryTerm, ...]:
    """Returns the terms of transitions on the device of actors that act themselves: an off-policy run's buffer and a
    rollout.
    """
    num_slots, row_bytes = cfg.env.train.num_envs // ranks.number, _row_bytes(cfg, policy_size)
    rollout = num_slots * cfg.algorithm.rollout_steps * (row_bytes + 4 * _NUM_SCALAR_COLUMNS)
    if not _is_off_policy(cfg):
        return terms(rollout=rollout)
    replay = cfg.algorithm.replay_buffer.size // cfg.env.train.num_envs * num_slots * row_bytes
    return terms(replay_buffer=replay, rollout=rollout)


def _row_bytes(cfg: Any, policy_size: PolicySize) -> float:
    """Returns the bytes of a transition: observation and next observation, actions, reward and end. The rest of a rollout's
    columns are single numbers.
    """
    return (
        2.0 * policy_size.obs_bytes
        + policy_size.action_bytes
        + 5
        + 8 * (_is_off_policy(cfg) and cfg.algorithm.n_step > 1)
    )


#: Columns of a rollout with one number a decision: log-prob, value, next value, advantage, return, masks and statistics.
_NUM_SCALAR_COLUMNS = 9


def _compute_recorded_bytes(cfg: Any, ranks: GroupRanks, policy_size: PolicySize) -> float:
    """Returns the bytes of the inputs that recorded passes keep (`CapturedPasses`). Their activations share memory."""
    if not (cfg.actor.capture_graphs and ranks.accelerated):
        return 0.0
    if _is_off_policy(cfg):  # the critics' pass, and the actor's
        return 2 * cfg.actor.global_batch_size / ranks.number * _row_bytes(cfg, policy_size)
    num_rows = (
        minibatch_size(cfg) if hasattr(cfg.algorithm, "rollout_steps") else cfg.actor.global_batch_size
    ) / ranks.number
    return min(num_rows, cfg.actor.micro_batch_size or math.inf) * _row_bytes(cfg, policy_size)


STAGES, STALENESS, MICRO = "rollout.pipeline_stage_num", "algorithm.max_staleness", "actor.micro_batch_size"


def ppo_workload(cfg: PpoConfig, ahead: int) -> Workload:
    """Returns the workload of a step of PPO, GRPO and similar algorithms in simulators.

    Raises:
        ConfigError: The actor ranks simulate and act themselves, so that there is nothing to place.
    """
    if acts_in_actor(cfg):
        raise ConfigError(
            "rlhpc tune places actor, rollout and env ranks, and in this run actor ranks simulate and act themselves; give "
            "env and rollout a place (cluster.component_placement), or set the number of actor ranks yourself"
        )
    num_slots, batch_size, group_size = cfg.env.train.num_envs, minibatch_size(cfg), cfg.env.train.group_size
    return Workload(
        phases=(
            Phase("act", "rollout", "time/act_s", turn=True),
            Phase("simulate", "env", "time/simulate_s", turn=True, on_cores=not _on_accelerator(cfg)),
            Phase("receive", "actor", "time/advantage_s", waits=True),
            Phase("train", "actor", "time/train_s"),
            Phase("sync", "actor", "time/sync_s", waits=True),
        ),
        samples=num_slots * cfg.algorithm.rollout_steps * cfg.actor.model.num_action_chunks,
        unit="environment steps",
        knobs=(
            Knob(STAGES, _knob_values(cfg, STAGES, [n for n in (1, 2, 4) if num_slots % (n * group_size) == 0])),
            Knob(STALENESS, tuple(range(ahead + 1))),
            Knob(MICRO, _knob_values(cfg, MICRO, [None, *(batch_size // n for n in (2, 4) if batch_size % n == 0)])),
        ),
        stages=STAGES,
        turns="time/rollout_s",
        staleness=STALENESS,
        measured_with=(f"{STAGES}=1", f"{STALENESS}=0"),
        smaller={
            n: (
                f"env.train.num_envs={num_slots // n}",
                f"actor.global_batch_size={batch_size // n}",
                f"{MICRO}={_scaled_micro_batch(cfg, n)}",
            )
            for n in (2, 4)
            if num_slots % (n * group_size) == 0 and batch_size % n == 0 and (cfg.actor.micro_batch_size or n) % n == 0
        },
        divides=dict.fromkeys(("rollout", "env", "actor"), num_slots // group_size),
        several=frozenset({"env"}),
    )


def _knob_values(cfg: PpoConfig, key: str, values: list[int | None] | list[int]) -> tuple[int | None, ...]:
    return tuple(dict.fromkeys([*values, select(cfg, key)]))


def _scaled_micro_batch(cfg: PpoConfig, divisor: int) -> str:
    return "null" if cfg.actor.micro_batch_size is None else str(cfg.actor.micro_batch_size // divisor)


def _on_accelerator(cfg: PpoConfig) -> bool:
    from rlhpc.embodied.envs.base import VectorEnv
    from rlhpc.embodied.envs.registry import ENVS

    factory = ENVS.find(cfg.env.train.env_type)
    return isinstance(factory, type) and issubclass(factory, VectorEnv) and factory.uses_accelerator(cfg.env.train)
