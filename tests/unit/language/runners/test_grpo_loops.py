"""Order of the calls in a step of each loop, and the loop that a configuration chooses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from rlhpc.language.config.run import GrpoConfig
from rlhpc.language.runners import grpo_loops
from rlhpc.language.runners.grpo_loops import (
    AsyncLoop,
    ColocatedLoop,
    GrpoGroups,
    GrpoLoop,
    SyncLoop,
    make_loop,
    served_metrics,
)
from rlhpc.metrics import PhaseTimers

TRAINED = {"loss": 0.5, "tokens": 8.0, "updates": 2.0, "update_s": 4.0, "late_score_s": 1.0, "proof_s": 0.5}
RESULTS: dict[str, list[Any]] = {
    "release_cache": [8e9, 9e9],
    "receive": [{"score_s": 2.0}, {"score_s": 3.0}],
    "update": [TRAINED],
    "generate": [{"tokens": 8.0, "cpu_s": 1.0}],
    "serve": [{"busy_s": 0.0, "tokens": 0.0}],
}


@dataclass
class FakeHandle:
    """A call that is complete when it is waited for."""

    name: str
    events: list[str]

    def wait(self, timeout: float | None = None) -> list[Any]:
        self.events.append(f"{self.name} done")
        return RESULTS.get(self.name.split(".")[1].split("(")[0], [])


class FakeGroup:
    """A worker group that records its calls."""

    def __init__(self, name: str, events: list[str]) -> None:
        self.name = name
        self.events = events
        self.world_size = 1

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> FakeHandle:
            shown = f"{self.name}.{name}({args[0] if args else ''})"
            self.events.append(shown)
            return FakeHandle(shown, self.events)

        return call


class FakeReplicas:
    """Engines that all take part."""

    def __init__(self, rollout: FakeGroup) -> None:
        self.ranks = [0]
        self._rollout = rollout

    def step_group(self) -> FakeGroup:
        return self._rollout

    def firsts(self) -> list[int]:
        return [0]


class FakeAuxiliary:
    """A group `teacher` that scores, and none that rates."""

    def __init__(self, events: list[str]) -> None:
        self.scoring = {"teacher": FakeGroup("teacher", events)}

    def rate(self, phase: str) -> dict[str, Any]:
        return {}

    def end(self, phase: str) -> None:
        pass


class FakeAgents:
    """No agents."""

    def serve(self, phase: str) -> FakeHandle:
        return FakeHandle("agents.none", [])

    def end(self, phase: str) -> None:
        pass


class FakeTracker:
    """A tracker to which all groups were delivered."""

    def __init__(self, events: list[str]) -> None:
        self.events = events

    def enqueue(self, last: int) -> None:
        self.events.append(f"prompts to {last}")

    def wait_complete(self, step: int, wait_s: float) -> bool:
        return True

    def close(self, step: int) -> dict[str, float]:
        return {"samples": 4.0}


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The calls and waits of a step, in order."""
    monkeypatch.setattr(grpo_loops.Channel, "connect", lambda name: FakeGroup(name, []))
    return []


def loop_of(events: list[str], *, end_step: int = 9, critic: bool = True, **changes: Any) -> GrpoLoop:
    cfg = GrpoConfig()
    cfg.algorithm.max_staleness = changes.get("max_staleness", 0)
    cfg.actor.offload_in_rollout = changes.get("offload", False)
    cfg.runner.val_check_interval = changes.get("every", 0)
    cfg.reference.update_interval = changes.get("reference", 0)
    rollout = FakeGroup("rollout", events)
    groups: Any = GrpoGroups(
        actor=FakeGroup("actor", events),  # type: ignore[arg-type]
        rollout=rollout,  # type: ignore[arg-type]
        critic=FakeGroup("critic", events) if critic else None,  # type: ignore[arg-type]
        reference=FakeGroup("reference", events) if changes.get("reference") else None,  # type: ignore[arg-type]
        auxiliary=FakeAuxiliary(events),  # type: ignore[arg-type]
        agents=FakeAgents(),  # type: ignore[arg-type]
        replicas=FakeReplicas(rollout),  # type: ignore[arg-type]
        tracker=FakeTracker(events),  # type: ignore[arg-type]
        shares_accelerators=changes.get("shares", False),
    )
    loop = make_loop(cfg, groups, end_step)
    loop.learning = frozenset({"critic"})
    return loop


def test_the_configuration_chooses_the_loop(events: list[str]) -> None:
    assert type(loop_of(events)) is SyncLoop
    assert type(loop_of(events, max_staleness=1)) is AsyncLoop
    assert type(loop_of(events, offload=True)) is ColocatedLoop


def test_a_synchronous_step_calls_everything_first_and_ends_with_the_weights(events: list[str]) -> None:
    timers = PhaseTimers()
    loop_of(events).step(3, timers)
    assert events == [
        "prompts to 3", "rollout.generate(3)", "critic.serve(3)", "teacher.serve(3)", "actor.receive(3)",
        "actor.update(3)", "critic.update(3)", "actor.sync_weights(3)", "rollout.generate(3) done",
        "critic.serve(3) done", "teacher.serve(3) done", "actor.receive(3) done", "actor.update(3) done",
        "critic.update(3) done", "rollout.take_weights(3)", "actor.sync_weights(3) done", "rollout.take_weights(3) done",
    ]  # fmt: skip
    assert [*timers.pop()] == ["time/rollout_s", "time/receive_s", "time/update_s", "time/sync_s"]


def test_an_asynchronous_step_starts_the_next_rollout_before_its_update(events: list[str]) -> None:
    loop = loop_of(events, max_staleness=1, critic=False, end_step=3)
    loop.step(1, PhaseTimers())
    assert events.index("rollout.generate(2)") < events.index("actor.update(1)")
    assert "prompts to 3" in events and "rollout.take_weights(1)" not in events, "they come between two tokens"
    loop.step(2, PhaseTimers())
    assert events.count("rollout.generate(2)") == 1, "the rollout that is under way is the step's"
    loop.step(3, PhaseTimers())
    assert "rollout.generate(4)" not in events and "actor.sync_weights(3)" not in events, "the last step"


def test_an_asynchronous_loop_waits_where_weights_are_evaluated(events: list[str]) -> None:
    loop = loop_of(events, max_staleness=1, critic=False, every=2)
    loop.step(2, PhaseTimers())
    assert "rollout.generate(3)" not in events and events[-1] == "rollout.take_weights(2) done"
    loop.step(3, PhaseTimers())
    assert "rollout.generate(4)" in events
    loop.reset()
    loop.step(4, PhaseTimers())
    assert events.count("rollout.generate(4)") == 2, "what was under way has been dropped"


def test_colocated_groups_have_the_accelerators_one_after_the_other(events: list[str]) -> None:
    timers = PhaseTimers()
    loop_of(events, offload=True).step(3, timers)
    moves = ("reload", "offload", "update", "serve", "generate", "sync")
    assert [event for event in events if any(move in event for move in moves) and not event.endswith("done")] == [
        "rollout.reload()", "rollout.generate(3)", "rollout.offload()",
        "critic.reload()", "critic.serve(3)", "critic.offload()", "teacher.reload()", "teacher.serve(3)", "teacher.offload()",
        "actor.reload()", "actor.update(3)", "actor.sync_weights(3)", "actor.offload()",
        "critic.reload()", "critic.update(3)", "critic.offload()",
    ]  # fmt: skip
    assert {*timers.pop()} == {f"time/{name}_s" for name in ("turns", "rollout", "receive", "update", "sync")}


def test_engines_on_the_actors_accelerators_take_the_weights_before_it_leaves(events: list[str]) -> None:
    loop = loop_of(events, offload=True, shares=True, critic=False)
    loop.begin(2)
    handed_over = [
        "actor.release_cache()", "actor.release_cache() done", "rollout.reload_weights()", "rollout.reload_weights() done",
        "actor.sync_weights({0})", "rollout.take_update({0})", "actor.sync_weights({0}) done",
        "rollout.take_update({0}) done", "actor.offload()", "actor.offload() done",
    ]  # fmt: skip
    assert events == [event.format(2) for event in handed_over]
    events.clear()
    loop.step(3, PhaseTimers())
    assert events[-10:] == [event.format(3) for event in handed_over]
    assert events.index("actor.update(3) done") < events.index("actor.release_cache()"), "activations are gone"


def test_engines_for_whose_weights_there_is_no_memory_take_them_later(
    events: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(RESULTS, "release_cache", [8e9, -1e9])
    loop = loop_of(events, offload=True, shares=True, critic=False)
    loop.begin(2)
    assert [event for event in events if not event.endswith("done")] == [
        "actor.release_cache()", "actor.sync_weights(2)", "actor.offload()",
    ]  # fmt: skip


def test_engines_get_the_weights_again_after_an_evaluation_in_turn(
    events: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine may have dropped them when it was offloaded."""
    monkeypatch.setattr(GrpoLoop, "evaluate", lambda self, step: {})
    loop = loop_of(events, offload=True, critic=False, every=1)
    loop.step(3, PhaseTimers())
    events.clear()
    loop.evaluate(3)
    shown = [event for event in events if not event.endswith("done")]
    assert shown[-2:] == ["rollout.offload()", "actor.sync_weights(3)"]
    events.clear()
    loop.evaluate(loop.end_step)
    assert not any("sync_weights" in event for event in events), "nobody samples any more"


def test_a_reference_that_moves_follows_the_step(events: list[str]) -> None:
    loop = loop_of(events, reference=2, critic=False)
    loop.step(1, PhaseTimers())
    assert "reference.take_weights()" not in events
    loop.step(2, PhaseTimers())
    assert events[-4:] == [
        "actor.refresh_reference(2)", "reference.take_weights()",
        "actor.refresh_reference(2) done", "reference.take_weights() done",
    ]  # fmt: skip


def test_the_row_of_a_step_has_times_and_training_metrics_apart(events: list[str]) -> None:
    row = loop_of(events).step(3, PhaseTimers()).metrics({"time/rollout_s": 1.0})
    assert row == {
        "train/loss": 0.5, "train/tokens": 8.0, "train/updates": 2.0,
        "critic/loss": 0.5, "critic/tokens": 8.0, "critic/updates": 2.0,
        "time/teacher_s": 0.0, "time/teacher_tokens_per_s": 0.0, "time/critic_s": 0.0, "time/critic_tokens_per_s": 0.0,
        "time/rollout_s": 1.0, "time/score_s": 4.0, "time/train_s": 4.0, "time/proof_s": 0.5, "time/cpu_s": 1.0,
        "time/train_tokens_per_s": 4.0,
    }  # fmt: skip


def test_ranks_work_side_by_side_and_their_work_adds_up() -> None:
    teacher = [
        {"busy_s": 2.0, "tokens": 300.0, "count/late": 1.0, "count/time/template_s": 0.25},
        {"busy_s": 4.0, "tokens": 500.0, "count/late": 2.0, "count/time/template_s": 0.5},
    ]
    assert served_metrics({"teacher": teacher}) == {
        "time/teacher_s": 4.0,
        "time/teacher_tokens_per_s": 200.0,
        "teacher/late": 3.0,
        "time/teacher_template_s": 0.75,
    }


def test_those_that_rate_count_answers_and_an_idle_group_divides_by_nothing() -> None:
    row = served_metrics({"judge": [{"busy_s": 0.0, "answers": 0.0}]})
    assert row == {"time/judge_s": 0.0, "time/judge_answers_per_s": 0.0}
