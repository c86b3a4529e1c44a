"""Workload of a PPO step, for `rlhpc tune`."""

from __future__ import annotations

from rlhpc.config.typed import select
from rlhpc.embodied.config import PpoConfig, minibatch_size
from rlhpc.runs.tuning.workload import Knob, Phase, Workload

STAGES, STALENESS, MICRO = "rollout.pipeline_stage_num", "algorithm.max_staleness", "actor.micro_batch_size"


def ppo_workload(cfg: PpoConfig, ahead: int) -> Workload:
    """Returns the workload of a step of PPO, GRPO and similar algorithms in simulators."""
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
