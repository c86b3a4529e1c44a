"""Engine group: commands between the ranks of an engine, and the weights that they receive."""

from __future__ import annotations

import itertools
import logging
import queue
from collections import deque
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlhpc.config.typed import default_section, typed
from rlhpc.language.config.run import GrpoConfig
from rlhpc.language.rollout import engine_group
from rlhpc.language.rollout.engine_group import EngineRank, EngineWeights, RunLink, first_of_engine, leader_only
from rlhpc.language.training.prompt_dispatch import VERSIONS, PromptMap
from rlhpc.language.training.weight_sync import Probe
from rlhpc.runtime.comm import p2p
from rlhpc.runtime.errors import CallAborted, DeadlineExceeded, RlhpcError
from rlhpc.runtime.worker import Worker
from rlhpc.weights.base import Update, VersionDigests
from rlhpc.weights.verification import WeightsDiffer, digests

COMMANDS: Any = ([("step",)], 0)


def config() -> GrpoConfig:
    return typed(GrpoConfig, default_section(GrpoConfig))


class Inboxes:
    """Inboxes of a group's ranks in this process.

    Attributes:
        departed: Ranks that have ended.
        aborts: Number of waits that an abort of the call ends.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.items: dict[int, deque[Any]] = {}
        self.departed = set[int]()
        self.aborts = 0
        context = SimpleNamespace(
            host="host", wait_deadline=5.0, rank_record=lambda group, rank: {"incarnation": f"of {rank}"},
            has_left=lambda group, rank: rank in self.departed,
        )  # fmt: skip
        monkeypatch.setattr(engine_group, "current", lambda: context)
        monkeypatch.setattr(p2p, "post", self.post)
        monkeypatch.setattr(p2p, "await_post", self.await_post)
        self.reader = 0

    def post(self, item: Any, topic: str, group: str, rank: int) -> bool:
        assert (topic, group) == ("engine", "rollout")
        self.items.setdefault(rank, deque()).append(item)
        return rank not in self.departed

    def await_post(self, topic: str, deadline: float, source: str) -> Any:
        assert source == "rollout-2", "the leader's name"
        if self.aborts:
            self.aborts -= 1
            raise CallAborted("another rank has failed")
        return self.items[self.reader].popleft()


def worker_of(rank: int) -> Any:
    worker = Worker()
    worker.group_name, worker.rank, worker.log = "rollout", rank, logging.getLogger("rollout")
    return worker


def links(monkeypatch: pytest.MonkeyPatch) -> tuple[Inboxes, RunLink, RunLink]:
    """Returns the links of ranks 2 and 3, which are the second engine of two ranks."""
    inboxes = Inboxes(monkeypatch)
    inboxes.reader = 3
    return inboxes, RunLink(worker_of(2), 2), RunLink(worker_of(3), 2)


def test_neighbouring_ranks_are_one_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    _, leader, follower = links(monkeypatch)
    assert (leader.rank, follower.rank) == (0, 1) and leader.ranks == follower.ranks == range(2, 4)
    assert leader.ident == follower.ident == "host-rollout-2-of 2"
    cfg = config()
    cfg.rollout.parallel.tensor = 2
    assert [first_of_engine(rank, cfg) for rank in range(4)] == [0, 0, 2, 2]


def test_a_follower_skips_commands_of_an_aborted_call(monkeypatch: pytest.MonkeyPatch) -> None:
    _, leader, follower = links(monkeypatch)
    leader.begin_call()
    leader.broadcast(([("abort",)], 0))
    for link in (leader, follower):
        link.call = 2
    leader.broadcast(COMMANDS)
    assert follower.receive() == COMMANDS


def test_a_follower_waits_for_the_leader_s_command_for_a_while_after_an_abort(monkeypatch: pytest.MonkeyPatch) -> None:
    inboxes, leader, follower = links(monkeypatch)
    leader.broadcast(COMMANDS)
    inboxes.aborts = 1
    assert follower.receive() == COMMANDS, "the leader may already compute, and wait in a collective"
    monkeypatch.setattr(engine_group, "_ABORT_GRACE_S", -1.0)
    inboxes.aborts = 1
    with pytest.raises(CallAborted):
        follower.receive()


def test_a_command_to_a_rank_that_has_ended_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    inboxes, leader, _ = links(monkeypatch)
    inboxes.departed.add(3)
    with pytest.raises(RlhpcError, match=r"rollout-3 has ended, and it is one engine with rollout-2"):
        leader.broadcast(COMMANDS)


def test_a_failed_computation_waits_for_the_driver_if_another_rank_has_ended(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    inboxes, leader, _ = links(monkeypatch)
    for name in ("_NOTICE_S", "_TERMINATION_S"):
        monkeypatch.setattr(engine_group, name, 0.001)
    caplog.set_level(logging.INFO)
    leader.handle_failure(CallAborted("the driver ends the call"))
    leader.handle_failure(RuntimeError("out of memory"))
    inboxes.departed.add(2)
    leader.handle_failure(RuntimeError("out of memory"))
    assert not caplog.records, "its other rank has not ended"
    inboxes.departed.add(3)
    leader.handle_failure(RuntimeError("connection closed by peer"))
    assert "a rank of this engine has ended" in caplog.text


class FakeEngine:
    """Engine that keeps its weights and records its calls."""

    capacity, can_drop, can_score, chunk, context, choices = 4, True, True, 0, 0, 0
    takes_partial_updates, takes_shards, can_compute = True, False, True

    def __init__(self) -> None:
        self.version = -1
        self.calls: list[Any] = []
        self.weights: dict[str, torch.Tensor] = {}
        self.logprobs = [-1.0] * 15

    def step(self) -> list[Any]:
        self.calls.append("step")
        return []

    def score(self, token_ids: Any, policy: int = 0) -> list[float]:
        return self.logprobs

    def update_weights(self, version: int, tensors: Iterable[Any], *, complete: bool = True) -> None:
        self.calls.append("complete" if complete else "partial")
        self.weights.update(tensors)
        self.version = version

    def held(self, name: str) -> torch.Tensor | None:
        return self.weights.get(name)


class Ranks:
    """Worker whose calls only the leader runs."""

    def __init__(self, engine_rank: EngineRank) -> None:
        self.engine_rank = engine_rank

    @leader_only
    def sample(self, error: BaseException | None = None, *, takes_weights: bool = False) -> str:
        if takes_weights:
            self.engine_rank.begin_weights()
        self.engine_rank.engine.step()
        if error is not None:
            raise error
        return "sampled"


def test_a_follower_repeats_the_engine_calls_of_the_leader_s_call(monkeypatch: pytest.MonkeyPatch) -> None:
    inboxes, *both = links(monkeypatch)
    engines: list[Any] = [FakeEngine(), FakeEngine()]
    updates: list[int] = []
    leader, follower = (
        Ranks(EngineRank(engine, link, lambda: updates.append(1))) for engine, link in zip(engines, both, strict=True)
    )
    assert (leader.engine_rank.follows, follower.engine_rank.follows) == (False, True)
    for call in (1, 2):
        assert leader.sample(takes_weights=call == 1) == "sampled" and follower.sample() == {}
        assert engines[0].calls == engines[1].calls == ["step"] * call and not inboxes.items[3]
    assert updates == [1], "the follower receives weights where the leader does"


def test_an_aborted_call_releases_the_followers(monkeypatch: pytest.MonkeyPatch) -> None:
    inboxes, *both = links(monkeypatch)
    leader, follower = (Ranks(EngineRank(FakeEngine(), link, list)) for link in both)
    with pytest.raises(CallAborted):
        leader.sample(CallAborted("another rank has failed"))
    assert follower.sample() == {} and not inboxes.items[3]
    with pytest.raises(ValueError, match="no prompts"):
        leader.sample(ValueError("no prompts"))
    assert len(inboxes.items[3]) == 1, "the run ends, and with it the followers"


def test_an_engine_of_one_rank_runs_calls_itself() -> None:
    engine: Any = FakeEngine()
    rank = Ranks(EngineRank(engine, None, list))
    rank.engine_rank.begin_weights()
    assert rank.sample() == "sampled" and rank.engine_rank.engine is engine


class FakeSync:
    """Receiver of updates that were put into it."""

    def __init__(self) -> None:
        self.updates: deque[Update] = deque()
        self.forgotten = 0

    def receive(self) -> Update:
        return self.updates.popleft()

    def forget(self) -> None:
        self.forgotten += 1


class Receiving:
    """Rank 0 with an engine and a receiver of weights in this process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, partial: bool = True) -> None:
        self.engine, self.sync = FakeEngine(), FakeSync()
        self.engine.takes_partial_updates = partial
        self.announced: deque[Probe | None] = deque()
        self.sync_options: dict[str, Any] = {}

        def make_sync(*arguments: Any, **options: Any) -> FakeSync:
            self.sync_options = {"arguments": arguments[2:], **options}
            return self.sync

        monkeypatch.setattr(engine_group, "awaiting_weights", lambda cfg: cfg)
        monkeypatch.setattr(engine_group, "make_engine", lambda cfg, **options: self.engine)
        monkeypatch.setattr(engine_group, "make_sync", make_sync)
        monkeypatch.setattr(Worker, "notice", self.notice)
        cfg = config()
        cfg.rollout.dtype, cfg.runner.step_timeout_s, cfg.actor.model.model_path = "float32", 60.0, "/models/tiny"
        self.weights = EngineWeights(worker_of(0), cfg, PromptMap(2, 2, 2, 1))
        self.cfg = cfg

    def notice(self, about: str) -> Probe | None:
        assert about == VERSIONS
        if not self.announced:
            raise queue.Empty
        return self.announced.popleft()

    def send(self, version: int, probe: Probe | None = None, *, complete: bool = True, **changes: torch.Tensor) -> None:
        """Announces and sends an update; `changes` replace tensors on their way."""
        tensors = {"a": torch.full((4,), float(version)), "b": torch.arange(3.0)}
        version_digests = VersionDigests(version, digests(tensors.items(), version))
        self.sync.updates.append(
            Update(version, complete, iter({**tensors, **changes}.items()), lambda: version_digests)
        )
        self.announced.append(probe)


def test_weights_are_received_until_the_version_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Receiving(monkeypatch)
    assert rank.weights.version == -1 and not rank.weights.take(), "nothing was announced"
    rank.send(0)
    rank.send(1, complete=False)
    rank.weights.await_version(1)
    assert rank.weights.version == rank.engine.version == 1 and rank.engine.calls == ["complete", "partial"]
    assert torch.equal(rank.engine.weights["a"], torch.ones(4))
    assert rank.weights.pop_sync_s() > 0 and rank.weights.pop_sync_s() == 0
    assert rank.sync_options["arguments"][:2] == (("actor", 0), [("rollout", [0, 1])])
    assert rank.weights.computes() == {"dtype": "float32", "device": "cpu"}
    rank.weights.forget()
    rank.weights.forget_version()
    assert rank.sync.forgotten == 1 and rank.weights.version == -1


@pytest.mark.parametrize("partial", [False, True])
def test_an_engine_without_partial_updates_gets_complete_ones(monkeypatch: pytest.MonkeyPatch, partial: bool) -> None:
    rank = Receiving(monkeypatch, partial)
    assert rank.sync_options["complete_updates"] is not partial
    rank.send(0)
    rank.weights.await_version(0)
    assert rank.engine.calls == ["complete"] and rank.weights.version == 0


def test_weights_that_changed_on_their_way_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Receiving(monkeypatch)
    rank.send(0, b=torch.arange(3.0) + 1e-3)
    with pytest.raises(WeightsDiffer, match=r"weights of version 0: b are others than those that actor-0"):
        rank.weights.await_version(0)
    assert rank.weights.version == -1


def test_an_engine_that_computes_other_logprobs_than_the_trainer_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Receiving(monkeypatch)
    probe = Probe(tuple(range(16)), (-1.0,) * 15, "float32")
    rank.send(0, probe)
    rank.weights.await_version(0)
    rank.engine.logprobs = [-1.5] * 15
    rank.send(1, probe)
    with pytest.raises(WeightsDiffer):
        rank.weights.await_version(1)
    assert rank.weights.version == 0


def test_weights_that_came_before_the_rest_of_the_memory_are_checked_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine cannot compute before its cache has memory; and the same version may come again."""
    rank = Receiving(monkeypatch)
    rank.engine.can_compute = False
    rank.engine.logprobs = [-1.5] * 15
    rank.send(3, Probe(tuple(range(16)), (-1.0,) * 15, "float32"))
    rank.weights.await_update(3)
    assert rank.weights.version == 3
    with pytest.raises(WeightsDiffer, match="version 3 of the weights"):
        rank.weights.check_deferred_probe()
    rank.weights.check_deferred_probe()  # once
    rank.send(3)
    rank.weights.await_update(3)
    assert not rank.sync.updates and rank.engine.calls == ["complete", "complete"]


def test_a_receiver_follows_the_actor_rank_on_its_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Receiving(monkeypatch)
    assert rank.sync_options["arguments"][0] == ("actor", 0)
    EngineWeights(worker_of(1), rank.cfg, PromptMap(2, 2, 2, 1, sources=(4, 5)))
    assert rank.sync_options["arguments"][0] == ("actor", 5)


@pytest.mark.parametrize(
    ("wait", "says"),
    [
        (lambda weights: weights.await_version(3), "the weights of step 3 did not reach rollout-0"),
        (lambda weights: weights._receive_as_follower(), "rollout-0 was not told of weights that rank 0 takes in"),
    ],
)
def test_weights_that_do_not_arrive_are_not_waited_for_without_end(
    monkeypatch: pytest.MonkeyPatch, wait: Callable[[EngineWeights], None], says: str
) -> None:
    rank = Receiving(monkeypatch)
    ticks = itertools.count(0, 40)
    monkeypatch.setattr(
        engine_group, "time", SimpleNamespace(monotonic=lambda: next(ticks), sleep=lambda seconds: None)
    )
    with pytest.raises(DeadlineExceeded, match=says):
        wait(rank.weights)
