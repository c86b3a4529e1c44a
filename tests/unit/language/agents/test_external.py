"""Episodes of external agents: keys, rewards of turns, and roles."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.extras import need_extra

need_extra("llm")

from rlhpc.language.agents.external import AgentRanks, RemoteAgents
from rlhpc.language.rollout.group_builder import drop_tokens
from rlhpc.language.rollout.pending_group import PendingGroup
from rlhpc.language.rollout.sample_group import build_sample_group
from rlhpc.runtime.trace_recorder import recorder
from rlhpc.tracing.read import _read_file
from tests.integration.language.gateway_things import QUESTION, Scripted, episodes_of, product, run_all

ROOT = Path(__file__).resolve().parents[4]


@pytest.fixture(autouse=True)
def agents_of_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT / "tests" / "integration" / "language"), str(ROOT)]))


def test_one_key_for_many_episodes_and_each_has_its_own_turns() -> None:
    with episodes_of(Scripted(lambda prompt: "84"), "outside_agents:one_key") as generation:
        episodes = run_all(generation, 4)
    assert [len(episode.samples) for episode in episodes] == [1] * 4
    assert [episode.outcome.reward for episode in episodes] == [1.0, None, 1.0, None]
    assert "KEY KEY KEY" in episodes[1].outcome.error


def test_a_trace_has_the_episodes_of_agents_in_processes_around_their_turns(tmp_path: Path) -> None:
    recorder.start(str(tmp_path / "g-0.jsonl"), {"group": "g", "rank": 0, "host": "h", "host_id": "h", "pid": 1})
    try:
        with episodes_of(Scripted(lambda prompt: "84"), "outside_agents:paid_by_turn") as generation:
            run_all(generation, 2)
        recorder.stop(flush=True)
        rows = _read_file(tmp_path / "g-0.jsonl", {}).spans
    finally:
        recorder.stop()
        recorder.reset()
    by_lane = {row[4]: row for row in rows if row[:2] == ["episode", "wait"]}
    assert {row[5]["episode"] for row in by_lane.values()} == {0, 1}
    assert all((row[5]["turns"], row[5]["agents"]) == (2, "python") for row in by_lane.values())
    turns = [row for row in rows if row[:2] == ["turn", "turn"]]
    assert len(turns) == 4
    assert all(by_lane[turn[4]][2] <= turn[2] <= turn[3] <= by_lane[turn[4]][3] for turn in turns)


def test_an_agent_says_what_each_turn_was_worth() -> None:
    with episodes_of(Scripted(lambda prompt: "84"), "outside_agents:paid_by_turn") as generation:
        (episode,) = run_all(generation, 1)
    (sample,) = episode.samples
    ends = [at for at, drawn in enumerate(sample.loss_mask) if drawn and not [*sample.loss_mask, False][at + 1]]
    assert [(at, reward) for at, reward in enumerate(sample.rewards) if reward] == list(
        zip(ends, [0.5, -1.0], strict=True)
    )
    assert episode.outcome.reward == -0.5
    with episodes_of(Scripted(lambda prompt: "84"), "outside_agents:paid_by_turn", more=1) as generation:
        (episode,) = run_all(generation, 1)
    assert episode.failed and "3 numbers; the model answered 2 times" in episode.outcome.error


def test_roles_have_contexts_and_rewards_of_their_own() -> None:
    roles = ("first", "second")
    with episodes_of(Scripted(product), "outside_agents:game", roles=roles) as generation:
        episodes = run_all(generation, 2)
    for seed, episode in enumerate(episodes):
        assert [(sample.role, sample.turns) for sample in episode.samples] == [(0, 2), (1, 2)], (
            "each goes on from its own"
        )
        assert episode.outcome.reward == seed / 2
    totals = torch.tensor([10.0 + episode.outcome.reward for episode in episodes]).numpy()  # another term gave 10
    columns: list[Any] = [{}] * 4
    group = build_sample_group(1, 0, dict(enumerate(episodes)), totals, columns, True, 2, agent_weight=1.0)
    assert group.batch.role.tolist() == [0, 1, 0, 1] and group.batch.episode.tolist() == [0, 0, 1, 1]
    assert group.batch.reward.tolist() == [9.0, 11.0, 9.0, 12.0]
    assert len(group.batch.by_episode()) == 4
    with episodes_of(Scripted(product), "outside_agents:game", roles=roles, untrained=("first",)) as generation:
        (spared,) = run_all(generation, 1)
    slot, said = PendingGroup(1, 0, 0, QUESTION, (1,), {0: spared}), sum(episodes[0].samples[0].loss_mask)
    drop_tokens(slot, 0, drop_truncated=False, drop_reason="")
    assert [sample.role for sample in spared.samples] == [1] and all(sum(s.loss_mask) for s in spared.samples)
    assert slot.dropped_tokens["role"] == said > 0
    with episodes_of(Scripted(product), "outside_agents:game", roles=roles, third=True) as generation:
        (episode,) = run_all(generation, 1)
    assert "agent.roles has: first, second" in episode.outcome.error
    with episodes_of(Scripted(product), "outside_agents:game") as generation:
        (episode,) = run_all(generation, 1)
    assert "agent.roles is empty" in episode.outcome.error


class Post:
    """What a rollout rank offers and sends to the ranks that run agents."""

    def __init__(self) -> None:
        self.offered: list[tuple[int, str, int]] = []
        self.sent: list[tuple[int, dict[str, Any]]] = []
        self.arrived: list[dict[str, Any]] = []

    def offer(self, item: tuple[int, str, int]) -> None:
        self.offered.append(item)

    def send(self, rank: int, message: dict[str, Any]) -> None:
        self.sent.append((rank, message))

    def receive(self) -> list[dict[str, Any]]:
        arrived, self.arrived = self.arrived, []
        return arrived


def test_an_episode_on_another_rank_starts_again_when_that_rank_is_lost() -> None:
    post, outcomes = Post(), dict[int, Any]()
    runner = RemoteAgents(
        AgentRanks(post, 3), outcomes.__setitem__, lambda number: {"id": number, "timeout_s": 60.0, "key": "b"}
    )
    runner.run({"id": 7, "timeout_s": 60.0, "key": "a"})
    assert post.offered == [(3, runner.ident, 7)]
    taken = {"ident": runner.ident, "number": 7}
    post.arrived = [{"agent": 0, "take": 10, **taken}, {"agent": 1, "take": 11, **taken}]
    runner.poll()
    assert [(rank, message["of"], message["ticket"]["key"]) for rank, message in post.sent] == [
        (0, 10, "a"),
        (1, 11, "b"),
    ]
    post.arrived = [{"agent": 0, "of": 10, "outcome": {"reward": 1.0}, **taken}]
    runner.poll()
    assert not outcomes, "the first rank was given up"
    post.arrived = [{"agent": 1, "of": 11, "outcome": {"reward": 2.0}, **taken}, {"agent": 2, "take": 12, **taken}]
    runner.poll()
    assert outcomes == {7: {"reward": 2.0}} and post.sent[-1] == (2, {"of": 12, "ticket": None})


def test_an_episode_that_each_rank_loses_or_that_is_overdue_fails() -> None:
    post, outcomes = Post(), dict[int, Any]()
    runner = RemoteAgents(AgentRanks(post, 0), outcomes.__setitem__, lambda number: {"id": number, "timeout_s": 60.0})
    runner.run({"id": 1, "timeout_s": 60.0})
    post.arrived = [{"agent": rank, "take": 0, "ident": runner.ident, "number": 1} for rank in range(4)]
    runner.poll()
    assert "3 ranks of the group agent were lost" in outcomes[1]["error"]
    runner.run({"id": 2, "timeout_s": -100.0})
    post.arrived = [{"agent": 5, "take": 9, "ident": runner.ident, "number": 2}]
    runner.poll()
    assert "agent-5, which ran it, said nothing" in outcomes[2]["error"] and post.sent[-1] == (5, {"kill": 9})
