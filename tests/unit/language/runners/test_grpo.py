"""GRPO runner: start, comparison of engines and trainer, metrics of a step, steps without a sample, and recovery."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlhpc.algorithms.nonfinite import MAX_IN_A_ROW
from rlhpc.config.typed import default_section, typed
from rlhpc.jobs.paths import RunPaths
from rlhpc.language.config.run import GrpoConfig
from rlhpc.language.runners import grpo
from rlhpc.language.runners.engine_check import ROUNDS
from rlhpc.language.runners.grpo import ReasoningRunner
from rlhpc.language.runners.grpo_loops import StepResults
from rlhpc.runtime.channel import Channel
from rlhpc.runtime.errors import NonFinite, NothingTrained

END_STEP = 9
TRAINED = {"loss": 0.5, "tokens": 8.0, "updates": 1.0, "update_s": 2.0, "late_score_s": 0.0}
#: Sums of a step with four samples of two prompts, two of which are right.
SUMS = {
    "samples": 4.0, "groups": 2.0, "reward": 2.0, "reward_squared": 2.0, "accuracy": 2.0, "length": 40.0, "max_length": 20.0,
    "truncated": 1.0, "varied": 1.0, "failed": 0.0, "refills": 0.0, "stale": 2.0, "max_stale": 1.0, "term/math": 2.0,
}  # fmt: skip
#: Results of the rollout ranks.
RANKS = [
    {"tokens": 30.0, "seconds": 2.0, "busy_s": 1.5, "sync_s": 0.25},
    {"tokens": 10.0, "seconds": 1.0, "busy_s": 0.5, "sync_s": 0.5},
]


def config() -> GrpoConfig:
    return typed(GrpoConfig, default_section(GrpoConfig))


@dataclass
class FakeHandle:
    """A call with known results."""

    results: list[Any]

    def wait(self, timeout: float | None = None) -> list[Any]:
        return self.results


class FakeGroup:
    """A worker group of one rank that records its calls, with the results of `results`."""

    world_size, present, accelerators = 1, (0,), [frozenset[tuple[int, int]]()]

    def __init__(self, name: str, events: list[str], results: dict[str, list[Any]]) -> None:
        self.name, self._events, self._results = name, events, results

    def execute_on(self, *ranks: int) -> FakeGroup:
        return FakeGroup(f"{self.name}{[*ranks]}", self._events, self._results)

    def __getattr__(self, method: str) -> Callable[..., FakeHandle]:
        def call(*arguments: Any) -> FakeHandle:
            self._events.append(f"{self.name}.{method}")
            key = f"{self.name.partition('[')[0]}.{method}"
            self._results.setdefault(f"arguments of {key}", []).append(arguments)
            return FakeHandle(self._results.get(key, []))

        return call


class FakeLoop:
    """A loop whose steps have the results that a test sets."""

    repeats_steps, resume_note, rollout_sums = True, "", ("refill_waits",)

    def __init__(self, events: list[str]) -> None:
        self.events = events
        self.sums: dict[str, float] = SUMS
        self.evaluation: dict[str, float] = {}

    def step(self, step: int, timers: Any) -> StepResults:
        self.events.append(f"step {step}")
        return StepResults([self.sums, *RANKS], {}, [{"score_s": 0.0}], [TRAINED], {})

    def evaluates(self, step: int) -> bool:
        return bool(self.evaluation)

    def evaluate(self, step: int) -> dict[str, float]:
        return self.evaluation

    def sample_probe(self, step: int, phase: int, *, is_perturbed: bool) -> list[dict[str, Any]]:
        self.events.append(f"probe {phase}")
        return []

    def __getattr__(self, method: str) -> Callable[..., None]:
        return lambda *arguments: self.events.append(f"loop.{method}")


class FakeReplicas:
    """Engines that all take part."""

    def __init__(self, group: Any, opens: Any, joins: Any, restarts: Any, cost: str, size: int) -> None:
        self.opens, self.joins, self.size = opens, joins, size

    def begin(self) -> None:
        pass

    def update_presence(self) -> None:
        pass


class FakeAgreement:
    """A check of the engines that no earlier run has passed."""

    is_known = False

    def __init__(self, cfg: GrpoConfig, devices: list[str], placement: tuple[int, int]) -> None:
        self.devices = devices
        self.compared: list[str] = []

    def compare(self, weights: str, samples: Any, scores: Any) -> float:
        self.compared.append(weights)
        return 0.1

    def keep(self, largest: float) -> None:
        assert largest == 0.1 and len(self.compared) == len(ROUNDS) and self.devices == ["cpu", "cuda"]


class Run:
    """A runner with fake groups and a fake loop.

    Attributes:
        events: Calls of the groups and of the loop, in order.
        results: Results of the groups' calls by `<group>.<method>`; and the arguments of all calls.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *groups: str, cfg: GrpoConfig | None = None) -> None:
        self.events: list[str] = []
        self.results: dict[str, list[Any]] = {
            "rollout.init_worker": [{"digest": "d1", "dropped": 3, "device": "cpu"}],
            "actor.init_worker": [{"device": "cuda"}],
            "actor.trained_version": [0],
            "critic.trained_version": [0],
            "actor.score_probe_samples": [{}],
        }
        self.loop = FakeLoop(self.events)
        monkeypatch.setattr(grpo, "make_loop", lambda cfg, groups, end_step: self.loop)
        monkeypatch.setattr(grpo, "Replicas", FakeReplicas)
        monkeypatch.setattr(grpo, "Agreement", FakeAgreement)
        monkeypatch.setattr(Channel, "create", lambda name, **options: None)
        folder: Any = SimpleNamespace(
            end_step=END_STEP, total=END_STEP, paths=RunPaths(Path("run")), continues_run=False
        )
        made: dict[str, Any] = {name: FakeGroup(name, self.events, self.results) for name in groups}
        actor, rollout = (FakeGroup(name, self.events, self.results) for name in ("actor", "rollout"))
        self.runner = ReasoningRunner(cfg or config(), actor, rollout, run=folder, **made)  # type: ignore[arg-type]


def test_all_groups_load_before_they_are_connected(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch, "critic", "teacher")
    run.runner.build()
    assert run.events == [
        "rollout[0].init_worker", "loop.await_engines", "actor.init_worker", "critic.init_worker", "teacher.init_worker",
        "loop.offload_loaded", "actor.connect", "rollout.connect", "critic.connect", "teacher.connect",
    ]  # fmt: skip
    assert [*run.runner.groups] == ["actor", "critic"], "a scoring group has no state in checkpoints"


def test_a_rank_that_joins_must_read_the_files_of_the_first_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch)
    run.runner.build()
    replicas: Any = run.runner.replicas
    replicas.opens(0)
    replicas.opens(1)
    digests = [arguments[2] for arguments in run.results["arguments of rollout.init_worker"]]
    assert digests == ["", "", "d1"], "the first ranks, a restarted one, and one that has joined"
    run.events.clear()
    replicas.joins(1)
    assert run.events == ["rollout[1].connect", "rollout[1].begin", "actor.send_all_weights", "rollout[1].take_weights"]


def test_engines_are_compared_with_the_trainer_before_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch)
    run.runner.build()
    run.events.clear()
    run.runner.begin()
    rounds = [[f"probe {phase}", "actor.score_probe_samples", "rollout.begin"] for phase in range(len(ROUNDS))]
    assert run.events == ["loop.reset", "rollout.begin", *(event for each in rounds for event in each), "loop.begin"]
    run.events.clear()
    monkeypatch.setattr(FakeAgreement, "is_known", True)
    run.runner.begin()
    assert run.events == ["loop.reset", "rollout.begin", "loop.begin"]
    run.events.clear()
    run.runner.step = END_STEP
    run.runner.begin()
    assert run.events == ["loop.reset"], "no step is left"


def test_a_step_s_row_has_means_over_its_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch)
    run.runner.build()
    run.loop.sums = {**SUMS, "refill_waits": 2.0}
    row = run.runner.one_step()
    expected = {
        "train/reward": 0.5, "train/reward_std": 0.5, "train/accuracy": 0.5, "train/response_tokens": 10.0,
        "train/response_tokens_max": 20.0, "train/truncated": 0.25, "train/varied_groups": 0.5, "train/dropped_problems": 3.0,
        "rollout/staleness": 0.5, "rollout/staleness_max": 1.0, "rollout/samples": 4.0, "rollout/refill_waits": 2.0,
        "reward/math": 0.5, "time/generate_s": 1.5, "time/rollout_sync_s": 0.5, "time/tokens_per_s": 20.0, "train/loss": 0.5,
    }  # fmt: skip
    assert {name: row[name] for name in expected} == expected
    assert not {"eval/accuracy", "agent/failed", "rollout/nonfinite"} & {*row}
    run.loop.evaluation = {"eval/accuracy": 0.75}
    row = run.runner.one_step()
    assert (row["eval/accuracy"], row["rollout/samples"], run.runner.step) == (0.75, 8.0, 2)
    assert run.runner.facts(row) == {"reward": 0.5, "tokens_per_s": 20.0}
    assert run.runner.result() == {"samples": 8, "reward": 0.5}


def test_the_count_of_samples_goes_on_after_a_resume(monkeypatch: pytest.MonkeyPatch) -> None:
    run, resumed = Run(monkeypatch), Run(monkeypatch)
    assert run.runner.result() == {"samples": 0, "reward": None}
    run.runner.one_step()
    resumed.runner.load_state(run.runner.state())
    assert resumed.runner.one_step()["rollout/samples"] == 8.0


def test_a_row_of_external_agents_has_their_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = config()
    cfg.agent.kind = "python"
    run = Run(monkeypatch, cfg=cfg)
    run.loop.sums = {**SUMS, "agent_failed": 1.0, "agent/turns": 12.0, "nonfinite": 2.0}
    row = run.runner.one_step()
    assert (row["agent/failed"], row["agent/turns"], row["rollout/nonfinite"]) == (1.0, 3.0, 2.0)
    assert row["untrained/refilled"] == 0.0


def test_a_run_ends_after_more_steps_without_a_judged_sample_than_it_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = config()
    cfg.reward.max_failed_steps = 1
    run = Run(monkeypatch, cfg=cfg)
    unjudged = {**SUMS, "failed": 4.0}
    for run.loop.sums in (unjudged, SUMS, unjudged):
        run.runner.one_step()
    run.runner.tracker.failure = "the judge does not answer"
    run.loop.sums = unjudged
    with pytest.raises(
        NothingTrained, match=r"step 4: .*, 2 steps in a row; the last failure: the judge does not answer"
    ):
        run.runner.one_step()


def test_a_run_ends_if_all_answers_are_truncated_for_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = config()
    cfg.algorithm.overlong_filter = True
    run = Run(monkeypatch, cfg=cfg)
    run.loop.sums = {**SUMS, "truncated": 4.0}
    for _ in range(MAX_IN_A_ROW - 1):
        run.runner.one_step()
    with pytest.raises(NothingTrained, match=r"all answers were truncated or left out"):
        run.runner.one_step()


def test_a_run_ends_if_no_sample_is_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch)
    run.loop.sums = {"refills": 0.0, "nonfinite": 8.0}
    for _ in range(MAX_IN_A_ROW - 1):
        row = run.runner.one_step()
    assert row["train/reward"] == 0.0 and math.isfinite(row["train/reward_std"])
    with pytest.raises(NonFinite, match="no prompt brought anything finite"):
        run.runner.one_step()


def test_a_lost_scorer_is_restarted_alone_and_all_groups_reconnect(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch, "teacher")
    run.runner.rebuild({"teacher": [0]})
    assert run.events == [
        "loop.reset", "loop.offload_actor", "teacher.relaunch", "teacher.wait_ready", "teacher[0].init_worker",
        "loop.offload_restarted", "actor.connect", "rollout.connect", "teacher.connect", "actor.forget_sent",
        "rollout.forget_sent",
    ]  # fmt: skip


def test_a_lost_engine_restarts_all_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch, "teacher")
    run.runner.rebuild({"rollout": [0]})
    assert [event for event in run.events if "relaunch" in event or "init_worker" in event] == [
        "rollout.relaunch", "rollout[0].init_worker",
    ]  # fmt: skip


def test_a_step_is_repeated_only_if_no_state_was_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch, "critic", "teacher")
    assert run.runner.unharmed({"teacher": [0]})
    assert not run.runner.unharmed({"rollout": [0]}) and not run.runner.unharmed({"teacher": [0], "critic": [0]})
    run.results["critic.trained_version"] = [1]
    assert not run.runner.unharmed({"teacher": [0]}), "the critic has already trained"
    run.results["critic.trained_version"] = [0]
    run.loop.repeats_steps = False
    assert not run.runner.unharmed({"teacher": [0]}), "an asynchronous run has other samples in flight"


def test_a_reference_that_moves_is_in_checkpoints(monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = config()
    run = Run(monkeypatch, "reference", cfg=cfg)
    assert [*run.runner.groups] == ["actor"]
    cfg.reference.update_interval = 2
    run = Run(monkeypatch, "reference", cfg=cfg)
    assert [*run.runner.groups] == ["actor", "reference"]
