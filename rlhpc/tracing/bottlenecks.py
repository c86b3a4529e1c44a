"""Bottlenecks of a traced step: causes of a material part of its length, with the configuration key that would help."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rlhpc.runtime.files import is_number
from rlhpc.runtime.text import format_bytes, format_duration
from rlhpc.tracing.analysis import GroupLoad, StepAnalysis

#: Share of a step that a bottleneck must cost, at least, to be named.
MATERIAL = 0.15


#: Tokens of a micro-batch that uses an accelerator well, most tokens of a small one, and number of them that is many.
_FULL_MICRO_BATCH, _SMALL_MICRO_BATCH, _MANY_MICRO_BATCHES = 16384, 2048, 8


@dataclass(frozen=True)
class Bottleneck:
    """Cause of a material part of a step's length.

    Attributes:
        kind: `slow_env_rank`, `slow_rank`, `slow_judge`, `small_batch`, `slow_disk`, `long_tail` or `slow_network`.
        title: Slow part, in a few words.
        evidence: Measured numbers.
        key: Configuration key to change.
        advice: Its new value, and the reason why that helps.
        gain_ns: Estimate of the time that the step becomes shorter, at most.
        share: `gain_ns` as a share of the step.
    """

    kind: str
    title: str
    evidence: str
    key: str
    advice: str
    gain_ns: int
    share: float


@dataclass(frozen=True)
class _Cause:
    """Candidate of a bottleneck: all its fields that do not depend on the step's length."""

    kind: str
    title: str
    evidence: str
    key: str
    advice: str
    gain_ns: float


def find_bottlenecks(step: StepAnalysis, config: Mapping[str, Any] | None = None) -> list[Bottleneck]:
    """Returns the bottlenecks of a step in descending order of estimated gain; [] for a balanced step.

    Args:
        step: Analysis of the step.
        config: Configuration of the run, nested as in config.yaml, by which advice is chosen; None advises by defaults.
    """
    settings = _Settings(config or {})
    causes = [
        *_find_slow_ranks(step, settings), *_find_slow_judge(step, settings), *_find_small_batch(step, settings),
        *_find_small_micro_batches(step), *_find_slow_disk(step, settings),
        *_find_long_tail(step, settings), *_find_slow_network(step, settings),
    ]  # fmt: skip
    bottlenecks = [
        Bottleneck(
            cause.kind, cause.title, cause.evidence, cause.key, cause.advice, int(cause.gain_ns),
            cause.gain_ns / max(1, step.length_ns),
        )
        for cause in causes
    ]  # fmt: skip
    material_bottlenecks = [bottleneck for bottleneck in bottlenecks if bottleneck.share >= MATERIAL]
    return sorted(material_bottlenecks, key=lambda bottleneck: -bottleneck.gain_ns)


class _Settings:
    """Configuration of a run; a value that is missing or of a different type is the default."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = config

    def get(self, key: str, default: Any) -> Any:
        config_value: Any = self._config
        for name in key.split("."):
            config_value = config_value.get(name) if isinstance(config_value, Mapping) else None
        return config_value if type(config_value) is type(default) else default

    def has(self, section: str) -> bool:
        return section in self._config


def _find_slow_ranks(step: StepAnalysis, settings: _Settings) -> Iterator[_Cause]:
    for group_load in step.groups:
        category = _find_category_of_excess(group_load)
        # Prompts are leased one by one, so an engine that is slow gets fewer: what remains of the difference is the long tail.
        if len(group_load.ranks) < 2 or category in ("", "engine", "turn"):
            continue
        path_ns = sum(path_span.length_ns for path_span in step.path if path_span.track == group_load.slowest.track)
        gain_ns = min(group_load.excess_ns, path_ns)
        median_ns = group_load.slowest.busy_ns - group_load.excess_ns
        slowest = group_load.slowest
        evidence_text = (
            f"{slowest.track} on {slowest.host} worked {format_duration(slowest.busy_ns / 1e9)}, the median rank of "
            f"{group_load.group} {format_duration(median_ns / 1e9)}"
        )
        if category == "simulator":
            num_simulators = max(4, 2 * settings.get("env.train.simulators", 0))
            yield _Cause(
                "slow_env_rank", f"slow env rank {slowest.track}", evidence_text, "env.train.simulators",
                f"{num_simulators}, or one per core: a rank simulates its slots at once; if only this host is slow, leave it "
                "out (cluster.sbatch: [--exclude=HOST])", gain_ns,
            )  # fmt: skip
        else:
            yield _Cause(
                "slow_rank", f"slow rank {slowest.track}", evidence_text, "cluster.sbatch",
                f"[--exclude={slowest.host}], if this host is slow in other steps, too", gain_ns,
            )  # fmt: skip


def _find_category_of_excess(group_load: GroupLoad) -> str:
    """Returns the category in which the slowest rank of a group exceeds the median rank most; "" if there is no excess."""
    categories = {category for rank in group_load.ranks for category in rank.categories}
    excess_ns = {
        category: group_load.slowest.categories.get(category, 0)
        - statistics.median_low(rank.categories.get(category, 0) for rank in group_load.ranks)
        for category in sorted(categories)
    }
    largest_category = max(excess_ns, key=lambda category: excess_ns[category], default="")
    return largest_category if largest_category and excess_ns[largest_category] > 0 else ""


def _main_category(group_load: GroupLoad) -> str:
    return max(group_load.slowest.categories.items(), key=lambda category_item: category_item[1], default=("", 0))[0]


def _find_slow_judge(step: StepAnalysis, settings: _Settings) -> Iterator[_Cause]:
    path_ns = step.path_ns("judge")
    # Ranks that only score; a rollout rank's own pool scores beside its engine.
    judge_groups = [
        group_load
        for group_load in step.groups
        if "engine" not in group_load.slowest.categories and _main_category(group_load) == "judge"
    ]
    processes = settings.get("reward.processes", 1)
    evidence_text = f"{format_duration(path_ns / 1e9)} of the step's critical path are rewards"
    if judge_groups:
        group = judge_groups[0]
        yield _Cause(
            "slow_judge", f"slow judge {group.group}", evidence_text, "cluster.component_placement",
            f"more than {len(group.ranks)} ranks for {group.group}", path_ns / 2,
        )  # fmt: skip
    else:
        yield _Cause(
            "slow_judge", "slow judge", evidence_text, "reward.processes",
            f"{4 * processes} (now {processes}): more samples are scored at once", path_ns * 3 / 4,
        )  # fmt: skip


def _find_small_batch(step: StepAnalysis, settings: _Settings) -> Iterator[_Cause]:
    for generation in step.generation:
        max_batch = generation.num_finished
        is_full = generation.full_ns >= generation.busy_ns / 2  # else the batch is small for another reason
        if not generation.capacity or not is_full or max_batch < 2 * generation.mean_batch:
            continue
        # All sequences at once need as many engine steps as there are tokens for each.
        fixed_ns = generation.fixed_ns if generation.fixed_ns is not None else generation.busy_ns / generation.num_steps
        num_steps = generation.num_tokens / max_batch
        gain_ns = (
            max(0.0, generation.num_steps - num_steps) * fixed_ns * generation.full_ns / max(1, generation.busy_ns)
        )
        path_ns = sum(
            path_span.length_ns
            for path_span in step.path
            if path_span.track == generation.track and path_span.category == "engine"
        )
        yield _Cause(
            "small_batch", f"small batch of {generation.track}",
            f"the engine of {generation.track} generated {generation.mean_batch:.1f} of {max_batch} sequences at once",
            "rollout.max_batch_size",
            f"{max_batch}, or as many as fit into memory", min(gain_ns, path_ns),
        )  # fmt: skip
        break


def _find_small_micro_batches(step: StepAnalysis) -> Iterator[_Cause]:
    for track, spans in step.spans.items():
        micro_batches = [
            (span.end_ns - span.start_ns, float(span.args["tokens"]))
            for span in spans
            if span.category == "train" and span.name == "micro-batch" and is_number(span.args.get("tokens"))
        ]
        num_tokens = sum(tokens for _, tokens in micro_batches)
        num_needed = max(1, math.ceil(num_tokens / _FULL_MICRO_BATCH))
        if len(micro_batches) < _MANY_MICRO_BATCHES or num_tokens / len(micro_batches) > _SMALL_MICRO_BATCH:
            continue
        # The shortest one took no less than the fixed cost of a micro-batch.
        fixed_ns = min(length_ns for length_ns, _ in micro_batches)
        path_ns = sum(
            path_span.length_ns for path_span in step.path if path_span.track == track and path_span.category == "train"
        )
        yield _Cause(
            "small_batch", f"small micro-batches of {track}",
            f"{track} trained on {num_tokens:.0f} tokens in {len(micro_batches)} micro-batches",
            "actor.max_tokens_per_micro_batch", f"{_FULL_MICRO_BATCH}, or as many as fit into memory",
            min((len(micro_batches) - num_needed) * fixed_ns, path_ns),
        )  # fmt: skip
        break


def _find_slow_disk(step: StepAnalysis, settings: _Settings) -> Iterator[_Cause]:
    saves = [
        (span.start_ns, span.end_ns)
        for track, spans in step.spans.items()
        if track == step.driver_name
        for span in spans
        if span.category == "save"
    ]
    # What ranks do while the driver saves belongs to the checkpoint, too.
    path_ns = sum(
        path_span.length_ns
        if path_span.category == "save"
        else sum(
            max(0, min(path_span.end_ns, end_ns) - max(path_span.start_ns, start_ns)) for start_ns, end_ns in saves
        )
        for path_span in step.path
    )
    evidence_text = f"{format_duration(path_ns / 1e9)} of the step's critical path are a checkpoint"
    save_interval = settings.get("runner.save_interval", -1)
    async_gain_ns = min(path_ns, _measure_large_files_ns(step)) if not settings.get("runner.async_save", True) else 0
    if async_gain_ns >= path_ns / 2:
        key, advice_text, gain_ns = (
            "runner.async_save",
            "true: training continues during the write",
            float(async_gain_ns),
        )
    elif save_interval > 0:
        key, advice_text = "runner.save_interval", f"{4 * save_interval} (now {save_interval}): fewer checkpoints"
        gain_ns = path_ns * 3 / 4
    else:
        key, advice_text, gain_ns = "runner.run_dir", "a folder on a faster file system", path_ns / 2
    yield _Cause("slow_disk", "slow disk", evidence_text, key, advice_text, gain_ns)


def _measure_large_files_ns(step: StepAnalysis) -> int:
    """Returns how long the slowest rank wrote files that are large enough for `runner.async_save`."""
    return max(
        (
            sum(span.end_ns - span.start_ns for span in spans if span.category == "save" and span.args.get("is_large"))
            for spans in step.spans.values()
        ),
        default=0,
    )


def _find_long_tail(step: StepAnalysis, settings: _Settings) -> Iterator[_Cause]:
    tails = [generation for generation in step.generation if generation.largest_batch >= 4]
    if not tails:
        return
    last_generation = max(tails, key=lambda generation: generation.end_ns)
    path_ns = sum(
        max(0, path_span.end_ns - max(path_span.start_ns, last_generation.tail_start_ns))
        for path_span in step.path
        if path_span.track == last_generation.track and path_span.category == "engine"
    )
    evidence_text = (
        f"for the last {format_duration(last_generation.tail_ns / 1e9)} of {last_generation.track}'s generation fewer "
        f"than a quarter of its "
        f"{last_generation.largest_batch} sequences were left"
    )
    if settings.get("algorithm.max_staleness", 0) == 0:
        yield _Cause(
            "long_tail", "long tail of generation", evidence_text, "algorithm.max_staleness",
            "1: the next step's prompts start while the last answers are generated", path_ns,
        )  # fmt: skip
    else:
        yield _Cause(
            "long_tail", "long tail of generation", evidence_text, "rollout.max_new_tokens",
            "a lower limit, if the longest answers are seldom right", path_ns,
        )  # fmt: skip


def _find_slow_network(step: StepAnalysis, settings: _Settings) -> Iterator[_Cause]:
    # A message to a rank of the same host takes the time in which the rank wakes up, which no network shortens.
    weights_ns = step.path_ns("weights")
    path_ns = weights_ns + sum(
        path_span.length_ns
        for path_span in step.path
        if path_span.category in ("receive", "send")
        and (not path_span.sender or step.hosts.get(path_span.sender) != step.hosts.get(path_span.track))
    )
    evidence_text = (
        f"{format_duration(path_ns / 1e9)} of the step's critical path are weights and messages on their way"
    )
    num_bytes = sum(
        float(span.args["bytes"])
        for spans in step.spans.values()
        for span in spans
        if span.category in ("receive", "weights") and is_number(span.args.get("bytes"))
    )
    if num_bytes:
        evidence_text += f" ({format_bytes(num_bytes)} in all)"
    if weights_ns < path_ns / 2:
        yield _Cause(
            "slow_network", "slow network", evidence_text, "cluster.interface",
            "the fastest interface between the nodes, such as ib0; or fewer nodes for the groups that exchange most",
            path_ns / 2,
        )  # fmt: skip
    elif settings.has("env"):
        sync_interval = settings.get("runner.weight_sync_interval", 1)
        yield _Cause(
            "slow_network", "slow network", evidence_text, "runner.weight_sync_interval",
            f"{4 * sync_interval} (now {sync_interval}): weights travel less often, and the policy acts with older ones",
            path_ns * 3 / 4,
        )  # fmt: skip
    else:
        yield _Cause(
            "slow_network", "slow network", evidence_text, "rollout.weight_delta",
            "elements: only changed weights travel; or algorithm.max_staleness: 1, so that they travel during generation",
            path_ns / 2,
        )  # fmt: skip
