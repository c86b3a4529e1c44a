"""Cost of recording a trace: of a span, and of a step whose trace is recorded.

    python -m bench.trace --repeat 3

Spans and messages are measured in this process by their CPU time, spans with recording off and on. Runs record every other
step (`runner.trace.steps: 5,7,9,…`), so that each traced step has two neighbours that were not recorded. `ratio` is the
median of the traced steps' durations, each divided by the mean of its neighbours'; the same ratio of steps of runs that
record nothing shows the noise (`untraced`). `cpu_share` is the CPU time of a step's spans and messages, recorded and written
by all ranks together, divided by the step's duration. Prints a line for each measurement and writes
bench/results/trace.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.machine import goal, spread, write
from rlhpc.runtime.trace_recorder import mark_flow, record, recorder, span
from rlhpc.tracing.read import read_trace, trace_files

ROOT = Path(__file__).resolve().parents[1]
NUM_SPANS = 20_000
#: First traced step, and last step of a run.
FIRST, LAST = 5, 30
RUNNER = (
    "runner.segments=1",
    f"runner.max_steps={LAST}",
    "runner.save_interval=-1",
    "runner.logger.logger_backends=[jsonl]",
)
RUNS: dict[str, tuple[str, tuple[str, ...]]] = {
    "PPO, CartPole": (
        "configs/quickstart.yaml", ("algorithm.rollout_steps=128", "algorithm.update_epochs=10", "env.eval.num_episodes=1"),
    ),
    "GRPO, tiny model": (
        "configs/base/grpo.yaml",
        (
            "runner.name=grpo", "data.train={source: arithmetic, size: 64, kwargs: {digits: 1}}", "data.max_prompt_tokens=16",
            "data.prompts_per_step=8", "reward.terms=[{name: length, kwargs: {limit: 8}}]", "algorithm.group_size=8",
            "rollout.max_new_tokens=32", "rollout.max_batch_size=64", "actor.global_batch_size=64",
            "actor.model.model_path=builtin:tiny", "actor.model.kwargs={hidden: 128, layers: 4, heads: 4}",
        ),
    ),
}  # fmt: skip


def measure_span_cost() -> dict[str, float]:
    """Returns nanoseconds of CPU time of a span with recording off and on, with and without arguments, and of messages, both
    when they are recorded and when they are written.
    """

    def loop() -> None:
        for _ in range(NUM_SPANS):
            pass

    def spans() -> None:
        for _ in range(NUM_SPANS):
            with span("step", "call"):
                pass

    def spans_with_arguments() -> None:
        for _ in range(NUM_SPANS):
            with span("step", "engine", tokens=64, batch=8):
                pass

    def cost(work: Callable[[], None]) -> float:
        durations = []
        for _ in range(5):
            recorder.spans.clear()
            recorder.messages.clear()
            recorder.flows.clear()
            start_ns = time.thread_time_ns()
            work()
            durations.append((time.thread_time_ns() - start_ns) / NUM_SPANS)
        return min(durations)

    def arrays() -> None:
        for _ in range(NUM_SPANS):
            recorder.add_message("array", "env-0", 1 << 60, time.time_ns())

    def flow_ends() -> None:
        for _ in range(NUM_SPANS):
            mark_flow("message", 1 << 60, is_target=True)

    def measure_written(fill: Callable[[], None]) -> float:
        durations = []
        for _ in range(5):
            fill()
            start_ns = time.thread_time_ns()
            recorder._write()
            durations.append((time.thread_time_ns() - start_ns) / NUM_SPANS)
        return min(durations)

    empty_ns = cost(loop)
    costs = {"off": cost(spans) - empty_ns, "off, arguments": cost(spans_with_arguments) - empty_ns}
    with tempfile.TemporaryDirectory() as folder:
        recorder.start(f"{folder}/bench-0.jsonl", {"group": "bench", "rank": 0})
        costs |= {"on": cost(spans) - empty_ns, "on, arguments": cost(spans_with_arguments) - empty_ns}
        recorder.stop()
        time.sleep(0.5)  # the recorder's thread has ended its work
        costs |= {"array": cost(arrays) - empty_ns, "flow end": cost(flow_ends) - empty_ns}
        recorder._write()

        def fill() -> None:  # the recorder's thread sleeps while recording is off
            for number in range(NUM_SPANS):
                record("step", "engine", number, number + 300_000, {"tokens": 64})

        recorder._wake_event = threading.Event()
        costs["written"], costs["array, written"] = measure_written(fill), measure_written(arrays)
        costs["flow end, written"] = measure_written(flow_ends)
    return costs


def train(name: str, folder: Path, steps: str) -> tuple[list[float], Path]:
    """Trains; returns the duration of each step in seconds, and the run's folder."""
    config, overrides = RUNS[name]
    command = [
        sys.executable, "-m", "rlhpc.cli", "train", str(ROOT / config), *RUNNER, *overrides, f"runner.run_dir={folder}",
        f"runner.trace.steps='{steps}'",
    ]  # fmt: skip
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {result.returncode}:\n{result.stderr[-2000:]}")
    (root,) = (path.parent for path in folder.glob("*/metrics.jsonl"))
    return [json.loads(line)["time/step_s"] for line in (root / "metrics.jsonl").read_text().splitlines()], root


def compute_neighbour_ratios(durations: list[float]) -> list[float]:
    """Returns the duration of every other step, divided by the mean of its two neighbours'."""
    return [
        durations[step - 1] / statistics.fmean([durations[step - 2], durations[step]]) for step in range(FIRST, LAST, 2)
    ]


def measure_run_cost(name: str) -> dict[str, Any]:
    """Returns the ratios of a run that records every other step and of one that records none, and the trace's size."""
    with tempfile.TemporaryDirectory() as folder:
        traced_durations, root = train(name, Path(folder), ",".join(map(str, range(FIRST, LAST, 2))))
        trace = read_trace(root)
        num_steps, num_spans = len(trace.steps()), sum(len(track.spans) for track in trace.tracks)
        num_bytes = sum(path.stat().st_size for path in trace_files(root))
        lines = [json.loads(line) for path in trace_files(root) for line in path.read_text().splitlines()]
        num_arrays = sum(len(kind[-1]) // 2 for line in lines for kind in line.get("messages", {"kinds": ()})["kinds"])
        num_flow_ends = sum(len(line.get("flows", ())) for line in lines)
    with tempfile.TemporaryDirectory() as folder:
        untraced_durations, _ = train(name, Path(folder), "")
    return {
        "traced": compute_neighbour_ratios(traced_durations), "untraced": compute_neighbour_ratios(untraced_durations),
        "step_s": statistics.median(untraced_durations),
        "spans": num_spans / num_steps, "arrays": num_arrays / num_steps, "flow ends": num_flow_ends / num_steps,
        "bytes": num_bytes / num_steps,
    }  # fmt: skip


def main() -> None:
    """Measures spans and runs in turn, and writes the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=3)
    args = parser.parse_args()
    spans: list[dict[str, float]] = []
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in RUNS}
    for _ in range(args.repeat):
        spans.append(measure_span_cost())
        print("a span", json.dumps({name: round(ns) for name, ns in spans[-1].items()}), flush=True)
        for name, rows in runs.items():
            rows.append(measure_run_cost(name))
            medians = {key: statistics.median(rows[-1][key]) for key in ("traced", "untraced")}
            print(name, json.dumps(medians), flush=True)
    span_figures = {name: spread([costs[name] for costs in spans]) for name in spans[0]}
    run_figures = {
        name: {
            "ratio": spread([ratio for row in rows for ratio in row["traced"]]),
            "untraced": spread([ratio for row in rows for ratio in row["untraced"]]),
            **{key: spread([row[key] for row in rows]) for key in ("step_s", "spans", "arrays", "flow ends", "bytes")},
        }
        for name, rows in runs.items()
    }
    ns = {name: figure["median"] for name, figure in span_figures.items()}
    for figures in run_figures.values():
        num = {name: figures[name]["median"] for name in ("spans", "arrays", "flow ends")}
        total_ns = num["spans"] * (ns["on, arguments"] + ns["written"])
        total_ns += num["arrays"] * (ns["array"] + ns["array, written"])
        total_ns += num["flow ends"] * (ns["flow end"] + ns["flow end, written"])
        figures["cpu_share"] = spread([total_ns / 1e9 / figures["step_s"]["median"]])
    share = max(figures["cpu_share"]["median"] for figures in run_figures.values())
    slower = max(figures["ratio"]["median"] / figures["untraced"]["median"] for figures in run_figures.values())
    goals = [
        goal("a span while recording is off, in ns", span_figures["off"]["median"], at_most=150),
        goal("a span while recording is on, in ns", span_figures["on"]["median"], at_most=1000),
        goal("CPU time of a step's trace / duration of the step", share, at_most=0.01),
        goal("duration of a traced step / of one that is not", slower, at_most=1.01),
    ]
    content = {"spans_ns": span_figures, "runs": run_figures, "goals": goals}
    print(write("trace", f"python -m bench.trace --repeat {args.repeat}", content))


if __name__ == "__main__":
    main()
