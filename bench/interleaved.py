"""Common code of the benchmarks of environments. It imports no heavy modules, because simulators' own Pythons run some of it,
too.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

#: Rollouts of a measurement, of which the fastest counts: the others were disturbed.
ROLLOUTS = 3


def measure_vector_env(envs: Any, num_slots: int, num_steps: int) -> float:
    """Returns environment steps per second of one of Gymnasium's vector environments, on random actions; closes it."""
    envs.reset(seed=1)
    envs.action_space.seed(1)
    actions = [envs.action_space.sample() for _ in range(num_steps)]
    durations = []
    for _ in range(ROLLOUTS + 1):
        start_time = time.perf_counter()
        for action in actions:
            envs.step(action)
        durations.append(time.perf_counter() - start_time)
    envs.close()
    return num_slots * num_steps / min(durations[1:])


def compare(
    name: str,
    contenders: Mapping[str, Callable[[], float]],
    compute_ratios: Callable[[dict[str, float]], dict[str, float]],
    repeat: int,
    only: str,
) -> None:
    """Runs all contenders in turn, `repeat` times, prints the figures, and writes `results/<name>.json`.

    Args:
        name: Name of the benchmark.
        contenders: Measured functions by name.
        compute_ratios: Function that returns the ratios of the medians.
        repeat: Number of repetitions.
        only: Part of the names of the contenders to measure; no result is written. "" measures all.
    """
    from bench.machine import spread, write

    runs = {label: run_contender for label, run_contender in contenders.items() if only in label}
    values_by_label: dict[str, list[float]] = {label: [] for label in runs}
    for _ in range(repeat):
        for label, run_contender in runs.items():
            values_by_label[label].append(run_contender())
            print(f"{label:50} {values_by_label[label][-1]:12.2f}", flush=True)
    ratio = compute_ratios({label: statistics.median(values) for label, values in values_by_label.items()})
    print(json.dumps(ratio, indent=2))
    if not only:
        figures = {label: spread(values) for label, values in values_by_label.items()}
        print(write(name, f"python -m bench.{name} --repeat {repeat}", {"figures": figures, "ratios": ratio}))
