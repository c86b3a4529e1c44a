"""Env workers: turns with a policy, checkpoints, ranks that joined, and episodes without a deciding policy."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest

from rlhpc.algorithms.nonfinite import NonFinite
from rlhpc.embodied.rollout.slot_map import SlotMap
from rlhpc.embodied.rollout.work_sharing import FullRollout, RolloutShard
from rlhpc.embodied.workers.env import EnvWorker, entropy_of, open_joined_rank, unit_map
from rlhpc.embodied.workers.rollout import MultiStepRolloutWorker
from rlhpc.runtime.errors import ConfigError, DeadlineExceeded
from tests.unit.embodied.workers.in_process import QueueChannel, RankPair, in_a_run


class Half:
    """Lanes to two rollout ranks, one of which has gone."""

    def __init__(self, *parts: np.ndarray | None) -> None:
        self.parts = list(zip((range(8, 10), range(10, 12)), parts, strict=True))

    def get(self, stage: int) -> list[tuple[range, np.ndarray | None]]:
        return self.parts


def test_episodes_in_which_nobody_acted_for_a_while_are_left_out() -> None:
    """Their slots get actions of others meanwhile; where nobody acts at all, there are none."""
    rank = object.__new__(EnvWorker)
    rank.shares, rank._mixed_slots, rank._wait_s = [range(8, 12)], [np.zeros(4, bool)], 0.0
    rank.links = Half(np.array([[[0.1]], [[0.2]]]), np.array([[[0.3]], [[0.4]]]))  # type: ignore[assignment]
    chosen = rank._receive_actions(0)
    assert chosen is not None and chosen.ravel().tolist() == [0.1, 0.2, 0.3, 0.4]
    assert rank._select_policy_slots(0, np.arange(4)).tolist() == [0, 1, 2, 3]
    rank.links = Half(None, np.array([[[0.3]], [[0.4]]]))  # type: ignore[assignment]
    chosen = rank._receive_actions(0)
    assert chosen is not None and chosen.ravel().tolist() == [0.3, 0.4, 0.3, 0.4]
    assert rank._select_policy_slots(0, np.array([0, 3])).tolist() == [3], "slot 1 is still in such an episode"
    assert rank._select_policy_slots(0, np.array([0, 1])).tolist() == [0]
    rank.links = Half(None, None)  # type: ignore[assignment]
    assert rank._receive_actions(0) is None


@pytest.fixture(autouse=True)
def run(tmp_path: Path) -> Iterator[None]:
    with in_a_run(tmp_path):
        yield


SLOTS = SlotMap(4, env_name="left", rollout_name="right")


def test_a_turn_reports_the_episodes_that_ended_in_it() -> None:
    pair = RankPair(SLOTS, "algorithm.rollout_steps=40", "env.train.max_episode_steps=15")
    report, _ = pair.play(FullRollout(1, 1, 0, 40))
    assert set(report["slot"]) == {0, 1, 2, 3} and len(report["return"]) >= 8, "two ends of 15 steps in each slot"
    assert max(report["length"]) <= 15 and np.array_equal(report["return"], report["length"])
    assert report["busy_s"] > 0 and report["by_device"] == 0


def test_simulators_go_on_from_a_checkpoint(tmp_path: Path) -> None:
    first = RankPair(SLOTS, "algorithm.rollout_steps=6")
    first.play(FullRollout(1, 1, 0, 6))
    first.env.save(str(tmp_path))
    second = RankPair(SLOTS, "algorithm.rollout_steps=6")
    assert second.env.load(str(tmp_path)) and np.array_equal(second.env.obs[0], first.env.obs[0])
    second.rollout.policy.load_state_dict(first.rollout.policy.state_dict())
    for pair in (first, second):
        pair.play(FullRollout(2, 2, 0, 6))
    assert np.array_equal(second.env.obs[0], first.env.obs[0]), "the same steps follow"
    for pair in (first, second):
        pair.env.offload()
        pair.env.close()


def test_episodes_of_a_step_begin_alike_where_each_is_a_whole_one() -> None:
    pair = RankPair(SLOTS)
    starts = []
    for step, first_decision in ((3, 0), (3, 0), (4, 0), (3, 5)):
        pair.env.new_episodes(step, first_decision)
        starts.append(np.array(pair.env.obs[0]))
    assert np.array_equal(starts[0], starts[1])
    assert not np.array_equal(starts[0], starts[2]) and not np.array_equal(starts[0], starts[3])


class Broken(gymnasium.Env[Any, Any]):
    """Rewards that are not finite."""

    observation_space = gymnasium.spaces.Box(-1.0, 1.0, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return np.zeros(1, np.float32), float("nan"), False, False, {}


gymnasium.register("Broken-v0", Broken)


def test_a_number_that_is_not_finite_stops_the_run_where_it_came_from() -> None:
    pair = RankPair(SLOTS, "env.train.env_id=Broken-v0", "algorithm.rollout_steps=2")
    outcomes = pair.env.outcomes_of(7, range(2, 4))
    done = np.zeros(2, bool)
    with pytest.raises(
        NonFinite, match=r"step 7, decision 0: the reward of slot 3 of Broken-v0 \(env-0\) is not finite"
    ):
        outcomes.add(0, np.array([0.0, np.nan], np.float32), done, done, {})


@pytest.fixture
def joined() -> Any:
    """A rank that joined after step 5, with the channels of shards and reports."""
    pair = RankPair(SLOTS, "algorithm.rollout_steps=6", "runner.step_timeout_s=0.05")
    env = EnvWorker(pair.cfg)  # type: ignore[arg-type]
    env.rank, channels = 1, {"parts": QueueChannel(), "played": QueueChannel()}
    rank = open_joined_rank(env, lambda: MultiStepRolloutWorker(pair.cfg), SLOTS, pair.spaces, 5)  # type: ignore[arg-type]
    env.connect_channel = lambda name: channels.setdefault(name, QueueChannel())  # type: ignore[assignment,method-assign]
    rank.connect()
    return rank


def test_a_joined_rank_plays_a_shard_and_reports_it(joined: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    notices = ["the weights of version 2 are on their way"]

    def notice(about: str) -> str:
        if not notices:
            raise queue.Empty
        return notices.pop()

    monkeypatch.setattr(joined._env_worker, "notice", notice)
    monkeypatch.setattr(joined._rollout_worker, "sync_weights", lambda: 2)
    joined.play(RolloutShard(9, 1, step=6, unit=0, num_decisions=6, version=2), is_random=False)
    [report] = [
        item for channel in [joined._report_channel] for items in channel.items.values() for item in items.queue
    ]
    assert (report.number, report.key, report.rank, report.num_decisions, report.version) == (9, 1, 1, 6, 2)
    [message] = [item for items in joined._shard_channel.items.values() for item in items.queue]
    assert message["rewards"].shape == (len(SLOTS.unit_share(0)), 6) and message["version"] == 2
    assert message["actions"].shape[:2] == message["rewards"].shape


def test_a_joined_rank_that_gets_no_weights_says_so(joined: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(about: str) -> str:
        raise queue.Empty

    monkeypatch.setattr(joined._env_worker, "notice", nothing)
    with pytest.raises(DeadlineExceeded, match=r"the weights of step 2 did not reach EnvWorker-1"):
        joined.play(RolloutShard(9, 1, step=6, unit=0, num_decisions=6, version=2), is_random=False)


def test_ranks_that_joined_have_slots_and_seeds_of_their_own() -> None:
    maps = [unit_map(SLOTS, rank) for rank in (1, 2)]
    shares = [range(each.env_share(0, 0).start, each.env_share(0, 0).stop) for each in maps]
    assert not {*shares[0]} & {*shares[1]} and min(shares[0]) >= SLOTS.num_envs
    assert entropy_of(3, 1, 5) != entropy_of(3, 2, 5) != entropy_of(3, 2, 6)


def test_a_node_with_another_environment_cannot_join() -> None:
    pair = RankPair(SLOTS)
    spaces = (gymnasium.spaces.Box(-1.0, 1.0, (3,), np.float32), pair.spaces[1])
    with pytest.raises(ConfigError, match="shows or takes something else than where the run was started"):
        open_joined_rank(EnvWorker(pair.cfg), lambda: MultiStepRolloutWorker(pair.cfg), SLOTS, spaces, 0)  # type: ignore[arg-type]
