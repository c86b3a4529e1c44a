"""Training loops of runs with simulators: the order of the calls and the metrics of a step, with groups that record calls."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from gymnasium import spaces

from rlhpc.algorithms.nonfinite import MAX_IN_A_ROW
from rlhpc.config.typed import typed
from rlhpc.embodied.config import PpoConfig, SacConfig
from rlhpc.embodied.data.batches import DropReason, RolloutCounts
from rlhpc.embodied.rollout.step_outcomes import EpisodeLog, episode_metrics, joined_metrics
from rlhpc.embodied.runners import rollout_sources
from rlhpc.embodied.runners.off_policy_runner import OffPolicyRunner
from rlhpc.embodied.runners.rollout_runner import (
    WINDOW,
    ColocatedRolloutLoop,
    EmbodiedRunner,
)
from rlhpc.runs.configuration import load_config
from rlhpc.runtime.channel import QueueEmpty
from rlhpc.runtime.errors import NonFinite

CONFIGS = Path(__file__).resolve().parents[4] / "configs"
SLOTS, DECISIONS = 4, 8
OVERRIDES = [f"env.train.num_envs={SLOTS}", f"algorithm.rollout_steps={DECISIONS}", "runner.max_steps=6"]
SPACES = {"observation_space": spaces.Box(-1, 1, (3,), np.float32), "action_space": spaces.Discrete(2)}


class Call:
    """Handle of a call that is complete."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer

    def wait(self, timeout: float | None = None) -> list[Any]:
        return [self.answer]


class Group:
    """Group of one rank that records its calls and gives the answers of `answers`."""

    world_size, present, leaving = 1, (0,), frozenset[int]()
    accelerators: ClassVar = [frozenset[tuple[int, int]]()]

    def __init__(self, name: str, calls: list[str], **answers: Any) -> None:
        self.name, self.calls, self.answers = name, calls, answers
        self.arguments: list[tuple[Any, ...]] = []

    def execute_on(self, *ranks: int) -> Group:
        return self

    def admit(self) -> list[int]:
        return []

    def restart(self) -> list[int]:
        return []

    def __getattr__(self, method: str) -> Any:
        if method.startswith("_"):
            raise AttributeError(method)

        def call(*arguments: Any) -> Call:
            self.calls.append(f"{self.name}.{method}")
            self.arguments.append((method, *arguments))
            return Call(self.answers.get(method))

        return call


class Channels:
    """Channels without messages."""

    @classmethod
    def create(cls, name: str, **homes: Any) -> Channels:
        return cls()

    def get_nowait(self) -> Any:
        raise QueueEmpty


def report(returns: list[float], success: float = np.nan, skipped: int = 0) -> dict[str, np.ndarray]:
    """Report of an env rank, with an episode of 10 steps for each return."""
    log = EpisodeLog()
    log.num_skipped = skipped
    for slot, episode_return in enumerate(returns):
        episode = {"return": np.array([episode_return]), "length": np.array([10.0]), "success": np.array([success])}
        log.add(0, slot, {"episode": episode}, np.array([0]))
    return log.report(busy_s=0.25)


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Builds a runner of a configuration; `runner.calls` are the calls of its groups."""
    monkeypatch.setattr(rollout_sources, "Channel", Channels)

    def make_runner(cls: type[Any], *overrides: str, **answers: Any) -> Any:
        config, schema = ("embodied/pendulum_sac", SacConfig) if cls is OffPolicyRunner else ("quickstart", PpoConfig)
        words = [*OVERRIDES, f"runner.run_dir={tmp_path}", *overrides]
        cfg: Any = typed(schema, load_config(CONFIGS / f"{config}.yaml", words, check=False))
        calls: list[str] = []
        counts = RolloutCounts(0, SLOTS * DECISIONS, dict.fromkeys(DropReason, 0))
        answers = {
            "init_worker": SPACES, "interact": report([]), "generate": {"busy_s": 0.5}, "receive": counts,
            "update": {"policy_loss": 0.5, "update_s": 2.0}, "evaluate": [{"return": 7.0, "length": 3.0}], **answers,
        }  # fmt: skip
        groups = [Group(name, calls, **answers) for name in ("actor", "rollout", "env")]
        runner = cls(cfg, *groups)
        runner.build()
        runner.begin()
        calls.clear()
        runner.calls, runner.group = calls, {group.name: group for group in groups}
        return runner

    return make_runner


SYNC = ["actor.sync_weights", "rollout.sync_weights"]
PLAY = ["rollout.generate", "env.interact", "actor.receive"]


def test_all_calls_of_a_step_are_issued_before_the_first_is_awaited(make: Any) -> None:
    runner = make(EmbodiedRunner)
    runner.one_step()
    assert runner.calls == [*SYNC, *PLAY, "actor.update"] and runner.step == 1
    assert runner.group["actor"].arguments[-1][:2] == ("update", 1)


def test_a_step_has_the_metrics_of_its_episodes_and_of_the_last_ones(make: Any) -> None:
    runner = make(EmbodiedRunner, interact=report([1.0, 3.0], success=1.0, skipped=2))
    row = runner.one_step()
    assert row["train/policy_loss"] == 0.5 and row["time/train_s"] == 2.0 and "train/update_s" not in row
    assert (row["time/act_s"], row["time/simulate_s"]) == (0.5, 0.25)
    assert row["rollout/env_steps"] == SLOTS * DECISIONS - 2, "two actions of a chunk were not executed"
    assert row["rollout/episode_return"] == 2.0 and row["rollout/success_once"] == 1.0
    runner.group["env"].answers["interact"] = report([8.0], success=0.0)
    row = runner.one_step()
    assert (row["rollout/episode_return"], row["train/episode_return"]) == (8.0, 4.0)
    assert row["train/episodes"] == 3 and row["train/success_once"] == pytest.approx(2 / 3)
    assert runner.result()["episode_return"] == 4.0 and runner.facts(row)["env_steps"] == 2 * SLOTS * DECISIONS - 2


def test_evaluations_are_due_at_an_interval(make: Any) -> None:
    runner = make(EmbodiedRunner, "runner.val_check_interval=2")
    assert "eval/return_mean" not in runner.one_step()
    runner.calls.clear()
    assert runner.one_step()["eval/return_mean"] == 7.0
    assert runner.calls[-3:] == [*SYNC, "rollout.evaluate"], "with the weights of the step's update"
    assert runner.group["actor"].arguments[-1][:2] == ("sync_weights", 2)


def test_colocated_groups_take_turns_on_the_accelerator(make: Any) -> None:
    runner = make(EmbodiedRunner, "actor.enable_offload=true", "rollout.enable_offload=true")
    assert isinstance(runner.loop, ColocatedRolloutLoop)
    runner.one_step()
    to_actor = ["rollout.offload", "rollout.release_observations", "env.offload", "actor.reload"]
    assert runner.calls == [*SYNC, "actor.offload", "rollout.reload", *PLAY, *to_actor, "actor.update"]
    runner.calls.clear()
    assert runner.loop.evaluate(1) == [[{"return": 7.0, "length": 3.0}]]
    assert runner.calls == [*SYNC, "actor.offload", "rollout.reload", "rollout.evaluate", *to_actor]


@pytest.mark.parametrize(("free", "reloads"), [(1e9, ["rollout.reload"]), (-1e9, [])], ids=["room for both", "no room"])
def test_a_policy_that_takes_weights_within_its_accelerator_is_reloaded_for_them(
    make: Any, monkeypatch: pytest.MonkeyPatch, free: float, reloads: list[str]
) -> None:
    """Where there is memory for it beside the actor's; in an evaluation, too."""
    monkeypatch.setattr(Group, "accelerators", [frozenset({(0, 3)})])
    overrides = ("actor.enable_offload=true", "rollout.enable_offload=true")
    runner = make(EmbodiedRunner, *overrides, free_beside_update=free)
    assert runner.slots.weight_sources == (0,)
    first = ["actor.release_cache", "rollout.free_beside_update", *reloads, *SYNC, "actor.offload", "rollout.reload"]
    runner.one_step()
    assert runner.calls[: len(first)] == first
    runner.calls.clear()
    runner.loop.evaluate(1)
    assert runner.calls[: len(first)] == first


@pytest.mark.parametrize(
    ("overrides", "sources"),
    [((), (0,)), (("rollout.weight_sync=host",), ()), (("algorithm.max_staleness=1",), ())],
)
def test_one_actor_rank_sends_to_all_where_the_weights_leave_the_accelerator(
    make: Any, monkeypatch: pytest.MonkeyPatch, overrides: tuple[str, ...], sources: tuple[int, ...]
) -> None:
    monkeypatch.setattr(Group, "accelerators", [frozenset({(0, 3)})])
    assert make(EmbodiedRunner, *overrides).slots.weight_sources == sources


def test_a_step_says_how_its_weights_came(make: Any) -> None:
    received = {"weights/versions": 1.0, "weights/s": 0.5, "weights/bytes_by_ipc": 2e9}
    runner = make(EmbodiedRunner, generate={"busy_s": 0.5, **received})
    row = runner.one_step()
    assert (row["time/weights_gb"], row["time/weights_gb_per_s"], row["time/weights_by_ipc"]) == (2.0, 4.0, 1.0)
    assert runner.facts(row)["weights_by"] == {"ipc": 1.0} and runner.facts(row)["weights_gb_per_s"] == 4.0


def test_a_rollout_is_ahead_but_not_beyond_a_checkpoint(make: Any) -> None:
    runner = make(EmbodiedRunner, "algorithm.max_staleness=2", "runner.save_interval=3", "runner.val_check_interval=-1")

    def started() -> list[int]:
        return [call[1].step for call in runner.group["env"].arguments if call[0] == "interact"]

    runner.one_step()
    assert started() == [1, 2, 3] and runner.sources.in_progress
    runner.one_step()
    runner.one_step()
    assert started() == [1, 2, 3] and not runner.sources.in_progress, "the checkpoint of step 3 is written first"
    runner.one_step()
    assert started() == [1, 2, 3, 4, 5, 6], "the last step of the run is the sixth"


def test_a_run_stops_at_a_return_of_a_full_window(make: Any) -> None:
    runner = make(EmbodiedRunner, "runner.stop_return=5")
    runner.window.extend([(9.0, 1.0, 1.0)] * (WINDOW - 1))
    assert runner.goal() == ""
    runner.window.append((9.0, 1.0, 1.0))
    assert runner.goal() == "stop_return"
    runner.window.extend([(0.0, 1.0, 1.0)] * WINDOW)
    assert runner.goal() == ""


def test_counters_and_window_are_restored(make: Any) -> None:
    runner, resumed = make(EmbodiedRunner, interact=report([1.0, 2.0])), make(EmbodiedRunner)
    runner.one_step()
    state = runner.state()
    assert [row[2] for row in state["window"]] == [None, None], "JSON has no nan"
    resumed.load_state(state)
    assert (resumed.env_steps, resumed.episodes) == (SLOTS * DECISIONS, 2)
    assert np.array_equal(list(resumed.window), list(runner.window), equal_nan=True)
    before = {"env_steps": 100, "episodes": 5}
    resumed.count_lost(1, before)
    assert resumed.lost_counts == {"ranks": 1, "steps": 100, "episodes": 3}
    assert resumed.one_step()["env/lost_steps"] == 100


def test_dropped_transitions_are_counted_and_end_a_run_that_has_no_others(make: Any) -> None:
    size = SLOTS * DECISIONS
    some = RolloutCounts(0, size - 3, {DropReason.NONFINITE: 1, DropReason.ENV_FAILED: 2, DropReason.RANK_LOST: 0})
    row = make(EmbodiedRunner, receive=some).one_step()
    assert (row["env/nonfinite"], row["env/failed"]) == (1, 2)
    none = RolloutCounts(0, 0, {**dict.fromkeys(DropReason, 0), DropReason.NONFINITE: size})
    runner = make(EmbodiedRunner, receive=none)
    for _ in range(MAX_IN_A_ROW - 1):
        runner.one_step()
    with pytest.raises(NonFinite, match=rf"step {MAX_IN_A_ROW}: .* {MAX_IN_A_ROW} steps in a row"):
        runner.one_step()


def test_metrics_of_joined_ranks_and_of_a_step_without_episodes() -> None:
    assert joined_metrics(Counter(), 2) == {}
    assert joined_metrics(Counter({3: 5, 2: 1}), 2) == {
        "env/joined_transitions": 12, "env/joined_transitions_2": 2, "env/joined_transitions_3": 10,
    }  # fmt: skip
    assert episode_metrics(report([])) == {"rollout/episodes": 0}
