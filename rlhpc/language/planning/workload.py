"""Workloads of language runs for `rlhpc tune`: phases and tunable keys of a step."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rlhpc.config.typed import select
from rlhpc.language.config.run import (
    GrpoConfig,
    LanguageConfig,
    RewardRunConfig,
    TrainedLanguageConfig,
    minibatch_size,
    responses_per_step,
)
from rlhpc.language.scoring.groups import AGENT, group_worker_classes
from rlhpc.runs.tuning.shapes import configured_placements
from rlhpc.runs.tuning.workload import Knob, Phase, Workload
from rlhpc.runtime.cluster import Cluster

STALENESS, OFFLOAD = "algorithm.max_staleness", "actor.offload_in_rollout"
MICRO, BATCH = "actor.max_tokens_per_micro_batch", "rollout.max_batch_size"
TENSOR = "rollout.parallel.tensor"
#: Default number of concurrent sequences of an engine.
_DEFAULT_SEQUENCES = 64


def rl_workload(cfg: GrpoConfig, max_staleness: int) -> Workload:
    """Returns the workload of an RL step: generation, scoring, training and weight sync."""
    prompts, responses, minibatch = cfg.data.prompts_per_step, responses_per_step(cfg), minibatch_size(cfg, cfg.actor)
    scoring_phases = tuple(
        Phase(name, name, f"time/{name}_s", streams=True) for name in group_worker_classes(cfg) if name != AGENT
    )
    knobs = [Knob(STALENESS, tuple(range(max_staleness + 1))), _make_micro_batch_knob(cfg)]
    if cfg.rollout.rollout_backend == "hf":  # one rank; its number of concurrent sequences is a key
        knobs.append(Knob(BATCH, _list_values(cfg, BATCH, (responses, responses // 2))))
    else:
        num_ranks = len(configured_placements(cfg)["rollout"].processes)
        knobs.append(Knob(TENSOR, _list_values(cfg, TENSOR, (n for n in (2, 4, 8) if num_ranks % n == 0))))
    if Cluster.planned(cfg.cluster).num_accelerators and not max_staleness:
        knobs.append(Knob(OFFLOAD, _list_values(cfg, OFFLOAD, (False, True))))
    return Workload(
        phases=(
            Phase("generate", "rollout", "time/generate_s"),
            *scoring_phases,
            Phase("score", "actor", "time/score_s", streams=True),
            Phase("train", "actor", "time/train_s"),
            Phase("take weights", "rollout", "time/rollout_sync_s"),
        ),
        samples=responses,
        unit="responses",
        knobs=tuple(knobs),
        staleness=STALENESS,
        measured_with=(f"{STALENESS}=0",),
        smaller={
            n: (f"data.prompts_per_step={prompts // n}", f"actor.global_batch_size={minibatch // n}")
            for n in (2, 4)
            if prompts % n == 0 and minibatch % n == 0
        },
        divides={**{phase.group: prompts for phase in scoring_phases}, "actor": prompts},
        pieces=responses / (cfg.rollout.max_batch_size or _DEFAULT_SEQUENCES),
    )


def supervised_workload(cfg: LanguageConfig | RewardRunConfig, num_prefetched: int) -> Workload:
    """Returns the workload of a supervised optimizer step."""
    del num_prefetched
    rows_per_step = cfg.data.prompts_per_step
    return Workload(
        phases=(Phase("train", "actor", "time/step_s"),),
        samples=rows_per_step,
        unit="rows",
        knobs=(_make_micro_batch_knob(cfg),),
        smaller={n: (f"data.prompts_per_step={rows_per_step // n}",) for n in (2, 4) if rows_per_step % n == 0},
        divides={"actor": rows_per_step},
    )


def _make_micro_batch_knob(cfg: TrainedLanguageConfig) -> Knob:
    """Returns the sizes of micro-batches to try: the configured size, and its half and quarter if at least 8 tokens."""
    tokens = cfg.actor.max_tokens_per_micro_batch
    return Knob(MICRO, (tokens, *(tokens // n for n in (2, 4) if tokens >= 8 * n)))


def _list_values(cfg: GrpoConfig, key: str, candidates: Iterable[Any]) -> tuple[Any, ...]:
    return tuple(dict.fromkeys([select(cfg, key), *candidates]))
