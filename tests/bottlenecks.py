"""Bottlenecks and lengths of the steps of a real run, for tests that make parts of it slow."""

from __future__ import annotations

import itertools
import json
import re
import statistics
from collections.abc import Callable
from pathlib import Path

from rlhpc.jobs.paths import RunPaths
from rlhpc.runs.step_pages import read_config, read_steps
from rlhpc.tracing.analysis import StepAnalysis
from rlhpc.tracing.bottlenecks import Bottleneck, find_bottlenecks

#: Number of pairs of runs, of which one takes the advice.
PAIRS = 3
#: Key of an advice → category of the work that it makes shorter.
CATEGORIES = {
    "actor.max_tokens_per_micro_batch": "train", "env.train.simulators": "simulator",
    "reward.processes": "judge", "rollout.max_batch_size": "engine", "runner.async_save": "save",
    "runner.weight_sync_interval": "weights",
}  # fmt: skip


def named(root: Path) -> dict[str, Bottleneck]:
    """The bottlenecks that most of the traced steps have, by kind."""
    steps = [{one.kind: one for one in find_bottlenecks(step, read_config(RunPaths(root)))} for step in traced(root)]
    assert len(steps) >= 3
    return {
        kind: next(step[kind] for step in steps if kind in step)
        for kind in sorted({kind for step in steps for kind in step})
        if sum(kind in step for step in steps) > len(steps) / 2
    }


def traced(root: Path) -> list[StepAnalysis]:
    """The traced steps of a run."""
    result = read_steps(RunPaths(root))
    assert result is not None
    return list(result[1].values())


def step_s(root: Path) -> float:
    """Median of the seconds of a step, with the checkpoint before it; without the first step."""
    rows = [json.loads(line) for line in (root / "metrics.jsonl").read_text().splitlines()]
    return statistics.median(after - before for before, after in itertools.pairwise(row["time/wall_s"] for row in rows))


def path_s(root: Path, category: str) -> float:
    """Median of the seconds that a category of work has on the critical path of a step."""
    return statistics.median(step.path_ns(category) / 1e9 for step in traced(root))


def advised(cause: Bottleneck) -> str:
    """The advice of a bottleneck, as an override."""
    value = re.match(r"\w+", cause.advice)
    assert value is not None, cause.advice
    return f"{cause.key}={value[0]}"


def assert_advice_helps(slow: Path, fast: Path, cause: Bottleneck) -> None:
    """Fails unless the work that a bottleneck is about is a smaller part of the critical path of a run with its advice.

    Other work of the machine makes the rest of a step longer, but hardly this: it is what the test made slow.
    """
    if cause.key == "algorithm.max_staleness":  # the answer is as long as before, and other steps pass beside it
        assert step_s(fast) < 0.75 * step_s(slow)
        return
    category = CATEGORIES[cause.key]
    assert path_s(fast, category) < 0.75 * path_s(slow, category)


def check_advice(train: Callable[..., Path], kind: str, key: str, limit: float) -> None:
    """Trains pairs of runs in turns, one of them with the advice that the step page of the other gives.

    Args:
        train: Trains a run with a name and overrides.
        kind: The bottleneck, which must be the only one.
        key: Key that the advice names.
        limit: Share of a step's seconds, in the median of the pairs, that the steps with the advice take at most.
    """
    ratios = []
    for number in range(PAIRS):
        slow = train(f"slow-{number}")
        causes = named(slow)
        assert set(causes) == {kind}
        assert causes[kind].key == key
        fast = train(f"advised-{number}", advised(causes[kind]))
        assert_advice_helps(slow, fast, causes[kind])
        ratios.append(step_s(fast) / step_s(slow))
    assert statistics.median(ratios) < limit, ratios
