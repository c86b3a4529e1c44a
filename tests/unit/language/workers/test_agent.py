"""Agent worker: leases of episodes, their outcomes, and episodes that nobody needs any longer."""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlhpc.config.typed import default_section, typed
from rlhpc.language.agents.gateway.feedback import FEEDBACK
from rlhpc.language.config.agents import ServiceConfig
from rlhpc.language.config.run import GrpoConfig
from rlhpc.language.training.prompt_dispatch import AGENT_MESSAGES, EPISODES, TICKETS, PromptMap
from rlhpc.language.workers import agent
from rlhpc.language.workers.agent import (
    AgentWorker,
    RolloutPost,
    address_for_others,
    connect_agent_ranks,
)
from rlhpc.runtime.channel import LeasedItem, QueueEmpty
from rlhpc.runtime.errors import ConfigError, DeadlineExceeded
from rlhpc.runtime.registry import GenerationFolder
from rlhpc.runtime.worker import Worker
from tests.extras import need_extra

PHASE = "step 1"


def config() -> GrpoConfig:
    return typed(GrpoConfig, default_section(GrpoConfig))


class FakeQueue:
    """Queue of episodes in this process."""

    def __init__(self) -> None:
        self.items: deque[tuple[int, str, int]] = deque()
        self.acknowledged: list[tuple[int, str, int]] = []

    def put(self, item: tuple[int, str, int]) -> None:
        self.items.append(item)

    def take_nowait(self) -> LeasedItem:
        if not self.items:
            raise QueueEmpty
        return LeasedItem(self.items.popleft(), 0)

    def done(self, lease: LeasedItem) -> None:
        self.acknowledged.append(lease.item)


class FakeAgentProcesses:
    """Agents that end at once with `prompt`, and never without."""

    def __init__(self, program: Any, on_outcome: Callable[[int, dict[str, Any]], None]) -> None:
        self.on_outcome = on_outcome
        self.tickets: dict[int, dict[str, Any]] = {}
        self.ended: list[object] = []
        self.prompt = True

    def run(self, ticket: dict[str, Any]) -> None:
        self.tickets[ticket["id"]] = ticket
        if self.prompt:
            self.on_outcome(ticket["id"], {"reward": 1.0})

    def kill(self, number: int) -> None:
        self.ended.append(number)

    def abort(self) -> None:
        self.ended.append("all")

    def close(self) -> None:
        self.ended.append("closed")


class FakeRollout:
    """Rollout ranks that hand over a ticket for each episode and end the phase after so many outcomes or refusals."""

    def __init__(self, expected: int) -> None:
        self.inboxes: dict[str, deque[dict[str, Any]]] = {TICKETS: deque(), AGENT_MESSAGES: deque()}
        self.outcomes: list[tuple[int, dict[str, Any]]] = []
        self.requests: list[tuple[int, dict[str, Any]]] = []
        self.expected = expected
        self.ticket: dict[str, Any] | None = {"host": "here", "far": "", "base_url": "http://near/v1"}
        self.most_in_flight = 0

    def notify(self, message: dict[str, Any], group: str, rank: int, about: str) -> bool:
        assert (group, about) == ("rollout", AGENT_MESSAGES) and message["agent"] == 0
        if "take" in message:
            self.requests.append((rank, message))
            self.most_in_flight = max(self.most_in_flight, len(self.requests) - len(self.outcomes))
            self.tell({"of": message["take"], "ticket": self.ticket})
        else:
            self.outcomes.append((rank, message))
            if len(self.outcomes) == self.expected:
                self.tell({"end": PHASE})
        return True

    def tell(self, message: dict[str, Any]) -> None:
        self.inboxes[TICKETS].append(message)

    def notice(self, about: str) -> dict[str, Any]:
        if not self.inboxes[about]:
            raise queue.Empty
        return self.inboxes[about].popleft()


class Run:
    """Worker with fakes for its surroundings.

    Attributes:
        incarnations: Incarnation of each rollout rank.
        departed: Rollout ranks that have left.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, expected: int = 0, **changes: Any) -> None:
        self.rollout, self.queue = FakeRollout(expected), FakeQueue()
        self.incarnations, self.departed = {0: "a", 1: "b"}, set[int]()
        context = SimpleNamespace(
            host="here",
            registry=None,
            rank_record=lambda group, rank: {"incarnation": self.incarnations[rank]},
            has_left=lambda group, rank: rank in self.departed,
        )
        monkeypatch.setattr(agent, "current", lambda: context)
        monkeypatch.setattr(agent, "in_background", lambda name, act: act())
        monkeypatch.setattr(agent, "AgentProcesses", FakeAgentProcesses)
        monkeypatch.setattr(Worker, "notify", self.rollout.notify)
        monkeypatch.setattr(Worker, "notice", self.rollout.notice)
        monkeypatch.setattr(Worker, "connect_channel", {EPISODES: self.queue}.__getitem__)
        cfg = config()
        cfg.runner.name = "run"
        cfg.agent.kind, cfg.agent.target, cfg.agent.episodes_per_rank = "python", "my_agent:solve", 2
        cfg.runner.step_timeout_s = changes.get("timeout_s", 60.0)
        self.worker = AgentWorker(cfg)
        self.worker.init_worker(PromptMap(2, 2, 1, 1))
        self.worker.connect()
        self.agent_processes: Any = self.worker._agent_processes


def test_episodes_of_all_rollout_ranks_run_within_the_limit_and_are_acknowledged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = Run(monkeypatch, expected=5)
    episodes = [(0, "a", 7), (1, "b", 7), (0, "a", 8), (1, "b", 8), (1, "b", 9)]
    for episode in episodes:
        run.queue.put(episode)
    assert run.worker.serve(PHASE)["episodes"] == 5
    outcomes = [(rank, message["ident"], message["number"]) for rank, message in run.rollout.outcomes]
    assert sorted(outcomes) == sorted(episodes) == sorted(run.queue.acknowledged)
    assert {message["outcome"]["reward"] for _, message in run.rollout.outcomes} == {1.0}
    assert run.rollout.most_in_flight == 2
    local_numbers = [message["of"] for _, message in run.rollout.outcomes]
    assert sorted(local_numbers) == sorted(run.agent_processes.tickets) == [1, 2, 3, 4, 5]


def test_an_episode_without_a_ticket_is_acknowledged_and_does_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch)
    run.rollout.ticket = None
    run.queue.put((0, "a", 7))
    run.worker._lease_episodes()
    run.rollout.tell({"end": PHASE})
    assert run.worker.serve(PHASE) == {"busy_s": pytest.approx(0.0, abs=60.0), "episodes": 0.0}
    assert run.queue.acknowledged == [(0, "a", 7)] and not run.agent_processes.tickets


def test_an_outcome_of_a_killed_episode_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch)
    run.agent_processes.prompt = False
    run.queue.put((0, "a", 7))
    run.worker._lease_episodes()
    run.rollout.tell({"kill": 1})
    run.worker._handle_messages()
    assert run.agent_processes.ended == [1] and run.queue.acknowledged == [(0, "a", 7)]
    run.agent_processes.on_outcome(1, {"reward": 1.0})
    run.rollout.tell({"end": PHASE})
    assert run.worker.serve(PHASE)["episodes"] == 0 and not run.rollout.outcomes


@pytest.mark.parametrize("departs", [False, True])
def test_episodes_of_a_rollout_rank_that_was_restarted_or_has_left_end(
    monkeypatch: pytest.MonkeyPatch, departs: bool
) -> None:
    monkeypatch.setattr(agent, "_LIVENESS_CHECK_S", 0.0)
    run = Run(monkeypatch)
    run.agent_processes.prompt = False
    for episode in ((0, "a", 7), (1, "b", 7)):
        run.queue.put(episode)
    run.worker._lease_episodes()
    run.worker._handle_messages()
    if departs:
        run.departed.add(1)
    else:
        run.incarnations[1] = "c"
    run.rollout.tell({"end": PHASE})
    run.worker.serve(PHASE)
    assert run.agent_processes.ended == [2] and run.queue.acknowledged == [(1, "b", 7)], "the other episode goes on"


def test_a_phase_that_does_not_end_names_the_rank_and_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch, timeout_s=0.02)
    with pytest.raises(DeadlineExceeded, match=r"step 1 was not over for AgentWorker-0 within runner.step_timeout_s"):
        run.worker.serve(PHASE)


def test_a_begin_forgets_episodes_and_messages_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch)
    run.agent_processes.prompt = False
    run.queue.put((0, "a", 7))
    run.worker._lease_episodes()
    run.rollout.tell({"end": PHASE})
    run.worker.begin()
    assert run.agent_processes.ended == ["all"] and not run.rollout.inboxes[TICKETS]
    run.agent_processes.on_outcome(1, {"reward": 1.0})
    run.rollout.tell({"end": PHASE})
    assert run.worker.serve(PHASE)["episodes"] == 0 and not run.rollout.outcomes
    run.worker.close()
    assert run.agent_processes.ended == ["all", "closed"]


def test_an_agent_on_another_node_reaches_the_model_through_a_relay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        agent, "Relays", lambda: SimpleNamespace(socket_for=lambda url: f"/relay of {url}", close=lambda: None)
    )
    run = Run(monkeypatch, expected=2)
    run.rollout.ticket = {"host": "there", "far": "http://far:1", "base_url": "http://near/v1"}
    for episode in ((0, "a", 7), (1, "b", 7)):
        run.queue.put(episode)
    run.worker.serve(PHASE)
    ticket = run.agent_processes.tickets[1]
    assert (ticket["base_url"], ticket["socket"]) == ("http://far:1/v1", "/relay of http://far:1")
    assert run.rollout.ticket["base_url"] == "http://near/v1", "the rollout rank's ticket is unchanged"


def test_an_agent_that_cannot_start_names_its_node(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch)

    def refuse(*_: object) -> None:
        raise ConfigError("my_agent cannot be imported")

    monkeypatch.setattr(agent, "AgentProcesses", refuse)
    run.worker.node = "node7"
    with pytest.raises(ConfigError, match="on node7: my_agent cannot be imported"):
        run.worker.init_worker(PromptMap(2, 2, 1, 1))


def test_the_first_rank_of_a_node_starts_the_services_for_all_its_ranks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    registry = GenerationFolder.create(tmp_path / "registry", "local-0")
    starts: list[dict[str, str]] = []

    class FakeServices:
        def __init__(self, sections: Any, folder: Path, previous: dict[str, str]) -> None:
            assert folder == tmp_path and sections[0].name == "search"
            starts.append(previous)
            self.addresses = {"search": "127.0.0.1:99"}

    monkeypatch.setattr(agent, "Services", FakeServices)
    run = Run(monkeypatch)
    context = SimpleNamespace(
        registry=registry, check=lambda: None, rank_record=lambda group, rank: {"log_err": str(tmp_path / "err.log")}
    )
    monkeypatch.setattr(agent, "current", lambda: context)
    run.worker.cfg.agent.services = [ServiceConfig("search", ["search"])]
    run.worker.node = "node7"
    programs: list[Any] = []
    monkeypatch.setattr(agent, "AgentProcesses", lambda program, on_outcome: programs.append(program))
    for run.worker.local_rank in (0, 1, 0):
        run.worker.init_worker(PromptMap(2, 2, 1, 1))
    assert starts == [{}, {"search": "127.0.0.1:99"}], "a restart takes the former addresses"
    assert [program.environment["RLHPC_SERVICE_SEARCH"] for program in programs] == ["127.0.0.1:99"] * 3


def test_a_rollout_rank_reaches_the_agents_only_in_a_run_that_places_them(monkeypatch: pytest.MonkeyPatch) -> None:
    need_extra("llm")
    run = Run(monkeypatch)
    cfg, sent = config(), list[tuple[Any, ...]]()
    monkeypatch.setattr(Worker, "notify", lambda *arguments: sent.append(arguments))
    service = SimpleNamespace(endpoint={"tcp": "tcp://[::1]:5555"})
    monkeypatch.setattr(agent, "current", lambda: SimpleNamespace(service=service))
    cfg.cluster.component_placement = {"actor,rollout": 0}
    assert connect_agent_ranks(run.worker, cfg) is None and address_for_others(cfg) == ""
    cfg.cluster.component_placement = {"actor,rollout": 0, "agent": 0}
    ranks = connect_agent_ranks(run.worker, cfg)
    assert ranks is not None and address_for_others(cfg) == "[::1]"
    assert isinstance(ranks.post, RolloutPost)
    ranks.post.offer((0, "a", 7))
    ranks.post.send(3, {"of": 1, "ticket": None})
    assert [*run.queue.items] == [(0, "a", 7)] and sent == [({"of": 1, "ticket": None}, "agent", 3, TICKETS)]
    for number in (1, 2):
        run.rollout.inboxes[AGENT_MESSAGES].append({"take": number})
    assert ranks.post.receive() == [{"take": 1}, {"take": 2}] and ranks.post.receive() == []


def test_the_endpoint_of_delayed_rewards_is_in_the_registry_while_the_rank_lives(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run = Run(monkeypatch)
    registry = GenerationFolder.create(tmp_path / "registry", "local-0")
    monkeypatch.setattr(agent, "current", lambda: SimpleNamespace(registry=registry))
    generation: Any = SimpleNamespace(feedback_s=0.0, scorer={"url": "http://host:1", "key": "k"})
    run.worker.node = "node7"
    with ExitStack() as resources:
        agent.publish_feedback_endpoint(run.worker, generation, resources)
        assert registry.get(FEEDBACK, "AgentWorker-0") is None, "it has no delayed rewards"
        generation.feedback_s = 5.0
        agent.publish_feedback_endpoint(run.worker, generation, resources)
        record = registry.get(FEEDBACK, "AgentWorker-0")
        assert record is not None and {**generation.scorer, "node": "node7"}.items() <= record.items()
    assert registry.get(FEEDBACK, "AgentWorker-0") is None
