"""Trace and page of a step whose phases have known lengths: two simulators, a policy and a learner that sleep.

The run's own program writes down when it slept. Nothing is compared with the speed of this machine: spans contain what they
belong to, sleeps are lower bounds, and the rest is order.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from rlhpc.tracing.analysis import RankLoad, StepAnalysis, analyze
from rlhpc.tracing.model import RankTrack, Span, Trace
from rlhpc.tracing.read import read_trace
from tests import warm

ROOT = Path(__file__).resolve().parents[3]
STEP, DECISIONS = 3, 10
SLOW_S, FAST_S, LOSS_S, MINIBATCHES = 0.04, 0.02, 0.15, 2
CONFIG = """
defaults: [{root}/configs/quickstart.yaml]
cluster: {{component_placement: {{"actor,rollout": 0, env: "0:0-1"}}}}
algorithm: {{rollout_steps: {decisions}, update_epochs: 1, loss_type: "known_phases:loss"}}
env: {{train: {{num_envs: 2, wrappers: ["known_phases:Sleeping"]}}, eval: {{num_episodes: 1}}}}
actor: {{global_batch_size: {decisions}}}
runner:
  name: run
  run_dir: {folder}
  max_steps: 4
  segments: 1
  save_interval: -1
  logger: {{logger_backends: [jsonl]}}
  trace: {{steps: "{step}"}}
"""
PROGRAM = f"""
import json, os, time
from pathlib import Path
import gymnasium
from rlhpc.algorithms.losses import ppo

FOLDER = Path(__file__).parent

def sleep(seconds, kind):
    started = time.time_ns()
    time.sleep(seconds)
    with open(FOLDER / f"slept-{{os.getpid()}}.jsonl", "a") as file:
        file.write(json.dumps([kind, started, time.time_ns()]) + "\\n")

class Sleeping(gymnasium.Wrapper):
    slow = None  # whether this process is the slow one of the two: the first that steps

    def step(self, action):
        if Sleeping.slow is None:
            try:
                (FOLDER / "slow").touch(exist_ok=False)
                Sleeping.slow = True
            except FileExistsError:
                Sleeping.slow = False
        sleep({SLOW_S} if Sleeping.slow else {FAST_S}, "slow" if Sleeping.slow else "fast")
        return self.env.step(action)

def loss(*args, **kwargs):
    sleep({LOSS_S}, "loss")
    return ppo(*args, **kwargs)
"""


@dataclass(frozen=True)
class TracedRun:
    """A run with a traced step.

    Attributes:
        trace: The trace.
        step: Analysis of its step.
        slept: Intervals of sleeps in the step, by kind: slow, fast, loss.
        tracks: Track of the process that slept so, by kind.
        page: HTML of the step's page.
    """

    trace: Trace
    step: StepAnalysis
    slept: Mapping[str, list[tuple[int, int]]]
    tracks: Mapping[str, RankTrack]
    page: str

    def load(self, kind: str) -> RankLoad:
        """Returns the load of the rank that slept so."""
        return next(load for group in self.step.groups for load in group.ranks if load.track == self.tracks[kind].name)

    def spans(self, kind: str, category: str) -> list[Span]:
        """Returns the spans of a category in the step, of the rank that slept so."""
        return [span for span in self.step.spans[self.tracks[kind].name] if span.category == category]

    def in_path_s(self, kind: str, category: str) -> float:
        """Returns the seconds of the critical path in which the rank that slept so was in a category."""
        parts = (p for p in self.step.path if (p.track, p.category) == (self.tracks[kind].name, category))
        return sum(part.length_ns for part in parts) / 1e9


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> TracedRun:
    folder = tmp_path_factory.mktemp("known")
    config = folder / "run.yaml"
    config.write_text(CONFIG.format(root=ROOT, folder=folder, decisions=DECISIONS, step=STEP))
    (folder / "known_phases.py").write_text(PROGRAM)
    environment = {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"}
    for words in (["train", str(config)], ["report", str(folder / "run")]):
        done = warm.run(
            [sys.executable, "-m", "rlhpc.cli", *words], env=environment, cwd=folder, capture_output=True, text=True,
            timeout=240,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
    trace = read_trace(folder / "run")
    step = analyze(trace)[STEP]
    slept: dict[str, list[tuple[int, int]]] = {}
    tracks = {}
    for path in folder.glob("slept-*.jsonl"):
        pid = int(path.stem.partition("-")[2])
        for kind, start_ns, end_ns in map(json.loads, path.read_text().splitlines()):
            if step.start_ns <= start_ns < step.end_ns:
                slept.setdefault(kind, []).append((start_ns, end_ns))
                (tracks[kind],) = [track for track in trace.tracks if track.pid == pid]
    (page,) = folder.glob(f"run/**/step-{STEP}.html")
    return TracedRun(trace, step, slept, tracks, page.read_text())


def test_each_sleep_lies_in_one_span_of_its_kind(run: TracedRun) -> None:
    assert {kind: len(intervals) for kind, intervals in run.slept.items()} == {
        "slow": DECISIONS, "fast": DECISIONS, "loss": MINIBATCHES,
    }  # fmt: skip
    assert {track.group for track in run.tracks.values()} == {"env", "actor"}
    for kind, category, name in (
        ("slow", "simulator", "simulate"), ("fast", "simulator", "simulate"), ("loss", "train", "micro-batch"),
    ):  # fmt: skip
        spans = [span for span in run.spans(kind, category) if span.name == name]
        assert len(spans) == len(run.slept[kind])
        for (start_ns, end_ns), span in zip(sorted(run.slept[kind]), spans, strict=True):
            assert span.start_ns <= start_ns < end_ns <= span.end_ns


def test_ranks_worked_and_waited_as_long_as_the_others_slept(run: TracedRun) -> None:
    slow, fast, learner = run.load("slow"), run.load("fast"), run.load("loss")
    assert slow.categories["simulator"] >= DECISIONS * SLOW_S * 1e9
    assert fast.categories["simulator"] >= DECISIONS * FAST_S * 1e9
    assert learner.categories["train"] >= MINIBATCHES * LOSS_S * 1e9
    for load in (slow, fast):
        assert load.idle_ns >= 0.99 * MINIBATCHES * LOSS_S * 1e9, "simulators wait while the learner trains"
        assert load.busy_ns + load.idle_ns == run.step.length_ns
    assert learner.idle_ns >= 0.99 * DECISIONS * SLOW_S * 1e9, "the learner waits for the slowest simulator"
    waits = [
        sum(span.end_ns - span.start_ns for span in run.spans(kind, "wait") if span.name == "actions") / 1e9
        for kind in ("fast", "slow")
    ]
    assert waits[0] - waits[1] >= DECISIONS * (SLOW_S - FAST_S) / 2, "the fast simulator waits for the slow one"
    (group,) = [group for group in run.step.groups if group.group == "env"]
    assert group.slowest.track == run.tracks["slow"].name and group.excess_ns > 0


def test_the_critical_path_goes_through_the_slow_simulator_then_the_learner(run: TracedRun) -> None:
    assert sum(part.length_ns for part in run.step.path) == run.step.length_ns
    assert run.in_path_s("slow", "simulator") >= 0.8 * DECISIONS * SLOW_S
    assert run.in_path_s("fast", "simulator") <= run.in_path_s("slow", "simulator") / 2
    assert run.in_path_s("loss", "train") >= 0.99 * MINIBATCHES * LOSS_S
    last_simulation = max(part.end_ns for part in run.step.path if part.category == "simulator")
    first_training = min(part.start_ns for part in run.step.path if part.category == "train")
    assert last_simulation <= first_training


def test_the_page_gives_these_lengths(run: TracedRun) -> None:
    rows = [
        [re.sub(r"<[^>]*>", "", cell) for cell in re.findall(r"<td[^>]*>(.*?)</td>", row)]
        for row in re.findall(r"<tr>(.*?)</tr>", run.page)
    ]
    shown = {(row[0], row[1]): seconds(row[3]) for row in rows if len(row) == 5 and row[1] in ("simulator", "train")}
    on_path = run.step.path_groups()
    assert shown["env", "simulator"] == pytest.approx(on_path["env", "simulator"] / 1e9, rel=0.06)
    assert shown["actor", "train"] == pytest.approx(on_path["actor", "train"] / 1e9, rel=0.06)
    assert (
        shown["env", "simulator"] >= 0.8 * DECISIONS * SLOW_S and shown["actor", "train"] >= 0.9 * MINIBATCHES * LOSS_S
    )
    worked = {row[0]: seconds(row[2]) for row in rows if len(row) == 5 and row[0] in run.step.spans}
    assert worked[run.tracks["slow"].name] >= 0.9 * DECISIONS * SLOW_S > worked[run.tracks["fast"].name] * 0.9


def seconds(text: str) -> float:
    """Returns the seconds of a duration on a page."""
    number, unit = text.split()
    return float(number) * {"ms": 1e-3, "s": 1.0}[unit]
