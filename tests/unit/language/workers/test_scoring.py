"""Scoring workers: how their ranks are started, groups drawn twice, columns, ratings, the reference's weights."""

from __future__ import annotations

import time
from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

from tests.extras import need_extra

need_extra("llm")

from rlhpc.config.typed import default_section
from rlhpc.language.config.run import GrpoConfig
from rlhpc.language.engines.registry import engine_preload
from rlhpc.language.models.token_batch import TokenBatch
from rlhpc.language.scoring.registry import Rater, Scorer
from rlhpc.language.training.prompt_dispatch import GROUPS, PromptMap, channel_to, ratings_of
from rlhpc.language.workers.scoring import GroupInbox, JudgeWorker, RatingWorker, ReferenceWorker, ScoringWorker
from rlhpc.runtime.channel import QueueEmpty
from rlhpc.runtime.errors import DeadlineExceeded, RlhpcError
from rlhpc.weights.base import Update
from rlhpc.weights.delta import Elements
from tests.unit.language.rollout.answers import group
from tests.unit.language.scoring.judges import Scripted, judge_model, second  # noqa: F401 (a fixture)


def test_ranks_are_forked_where_all_engines_allow_it(model: Path) -> None:
    assert JudgeWorker.forks(second(model, rollout_backend="hf"))
    assert not JudgeWorker.forks(second(model, rollout_backend=f"{Scripted.__module__}:Scripted"))


def test_a_node_imports_the_engines_of_its_judges_once(model: Path) -> None:
    assert list(JudgeWorker.preloads(second(model, rollout_backend="vllm"))) == list(engine_preload("vllm"))
    assert list(JudgeWorker.preloads(second(model, rollout_backend="hf"))) == []
    assert list(ScoringWorker.preloads(second(model, rollout_backend="vllm"))) == [], "the judges have another group"


class Sent:
    """A channel with messages in it, of which more may come when it is empty."""

    def __init__(self, *messages: Any) -> None:
        self.messages = deque(messages)

    def get_nowait(self, key: str = "") -> Any:
        if not self.messages or self.messages[0] is None:
            raise QueueEmpty
        return self.messages.popleft()

    def get(self, timeout: float = 0.0, key: str = "") -> Any:
        while self.messages and self.messages[0] is None:
            self.messages.popleft()
        if not self.messages:
            raise DeadlineExceeded("nothing")
        return self.messages.popleft()


def parts(sent: Sent, step: int, share: range, inbox: GroupInbox | None = None, **how: bool) -> list[list[bytes]]:
    inbox = inbox or GroupInbox(sent, "critic-0", "rollout")  # type: ignore[arg-type]
    return [[one.answers_digest for one in part] for part in inbox.batches(step, share, time.monotonic() + 5, **how)]


def test_both_are_scored_whenever_the_second_comes() -> None:
    a, b, again = group(1, 0, 5), group(1, 1, 6), group(1, 0, 7)
    end = {"end": 1}
    for order in ([a, again, b], [again, a, b], [a, b, again]):
        messages = [one.pack_without_columns() for one in order]
        found = parts(Sent(*messages, end), 1, range(2))
        assert [[order[0].answers_digest], [b.answers_digest]] == found[:2] or [
            [b.answers_digest],
            [order[0].answers_digest],
        ] == found[:2]
        assert found[2:] == [[next(one.answers_digest for one in order[1:] if one is not b)]]
        (whole,) = parts(Sent(*messages, end), 1, range(2), only_arrived=True)
        assert whole == [order[0].answers_digest, b.answers_digest, found[2][0]]


def test_the_same_answers_are_scored_once() -> None:
    a, b = group(1, 0, 5), group(1, 1, 6)
    assert parts(
        Sent(
            a.pack_without_columns(),
            a.pack_without_columns(),
            None,
            b.pack_without_columns(),
            None,
            a.pack_without_columns(),
            {"end": 1},
        ),
        1,
        range(2),
    ) == [
        [a.answers_digest],
        [b.answers_digest],
    ]


def test_a_step_is_over_when_the_driver_says_so() -> None:
    a, early, late = group(1, 0, 5), group(2, 0, 6), group(1, 0, 9)
    sent = Sent(
        a.pack_without_columns(),
        early.pack_without_columns(),
        {"end": 1},
        None,
        late.pack_without_columns(),
        {"end": 2},
    )
    inbox = GroupInbox(sent, "reference-0", "rollout")  # type: ignore[arg-type]
    assert parts(sent, 1, range(1), inbox) == [[a.answers_digest]]
    assert parts(sent, 2, range(1), inbox) == [[early.answers_digest]], "what comes of an earlier step is nobody's"
    with pytest.raises(DeadlineExceeded, match="no groups came from rollout to reference-0"):
        parts(
            Sent(a.pack_without_columns()),
            1,
            range(1),
            GroupInbox(Sent(a.pack_without_columns()), "reference-0", "rollout"),
        )  # type: ignore[arg-type]


class Kept:
    """A channel that keeps what is put into it."""

    def __init__(self) -> None:
        self.put_messages: list[tuple[str, Any]] = []

    def put(self, message: Any, key: str) -> None:
        self.put_messages.append((key, message))


class TenTimes(Scorer):
    """Ten times the token, and one more than that as a second column."""

    def score(self, batch: TokenBatch) -> torch.Tensor:
        return torch.stack([batch.ids * 10.0, batch.ids * 10.0 + 1], 1)


class Lengths(Rater):
    """The length of an answer; None where it is empty, and no rating of `short` where there are two."""

    short = False

    def __init__(self, cfg: Any, device: torch.device, group: Any = None) -> None:
        self.num_rated, self.closed = 0, False

    def rate(self, samples: Any) -> list[float | None]:
        self.num_rated += len(samples)
        ratings = [len(sample.response) or None for sample in samples]
        return ratings[:1] if self.short else ratings

    def counts(self) -> dict[str, float]:
        counts, self.num_rated = {"rated": float(self.num_rated)}, 0
        return counts

    def close(self) -> None:
        self.closed = True


def configured(scorer: str) -> Any:
    section = {"name": "own", "scorer": f"{__name__}:{scorer}", "max_tokens_per_micro_batch": 4}
    return OmegaConf.merge(default_section(GrpoConfig), {"groups": [section]})


def started(worker: Any, channels: dict[str, Any], prompts: PromptMap, name: str = "own") -> Any:
    worker.group_name, worker.connect_channel = name, channels.__getitem__
    worker.init_worker(prompts)
    worker.connect()
    return worker


def test_a_rank_scores_its_share_and_sends_each_actor_its_columns() -> None:
    prompts = PromptMap(4, 1, rollout_ranks=1, actor_ranks=2, scoring={"own": 1})
    groups = [group(3, position, 5 + position) for position in range(4)]
    inbox, actors = Sent(*[one.pack_without_columns() for one in groups[::-1]], {"end": 3}), Kept()
    rank = started(ScoringWorker(configured("TenTimes")), {channel_to("own"): inbox, GROUPS: actors}, prompts)
    report = rank.serve(3)
    assert report["tokens"] == sum(one.batch.tokens for one in groups) and report["busy_s"] > 0
    columns = {message["position"]: (key, message) for key, message in actors.put_messages}
    for position, one in enumerate(groups):
        key, message = columns[position]
        assert key == str(position // 2) and message["source"] == "own" and message["digest"] == one.answers_digest
        expected = one.batch.ids * 10.0
        assert torch.equal(torch.from_numpy(message["values"]), torch.stack([expected, expected + 1], 1))
    rank.offload()
    rank.reload()
    rank.close()


def sample(text: str) -> Any:
    return SimpleNamespace(response=text)


def request(phase_ids: list[int], *texts: str, rollout: int = 0) -> dict[str, Any]:
    return {"round": 7, "ids": phase_ids, "samples": [sample(text) for text in texts], "rollout": rollout}


def test_answers_are_rated_until_the_phase_ends() -> None:
    prompts = PromptMap(4, 1, rollout_ranks=2, actor_ranks=1, rating={"own": 1})
    channel = Sent(request([1, 2], "abc", ""), None, request([3], "ab", rollout=1), {"end": "step 3"})
    rank = started(RatingWorker(configured("Lengths")), {channel_to("own"): channel}, prompts)
    sent: list[tuple[Any, ...]] = []
    rank.notify = lambda *message: sent.append(message)
    report = rank.serve("step 3")
    assert sent == [
        ({"round": 7, "ids": [1, 2], "values": [3.0, None]}, "rollout", 0, ratings_of("own")),
        ({"round": 7, "ids": [3], "values": [2.0]}, "rollout", 1, ratings_of("own")),
    ]
    assert (report["answers"], report["count/rated"]) == (3.0, 3.0)
    rank.scorer.short = True
    channel.messages.append(request([4, 5], "a", "b"))
    with pytest.raises(RlhpcError, match="Lengths: rate gave 1 numbers for 2 answers"):
        rank.serve("step 4")
    with pytest.raises(DeadlineExceeded, match=r"step 5: rollout asked own-0 nothing, and was not done"):
        rank.serve("step 5")
    rank.close()
    assert rank.scorer.closed


@pytest.fixture
def reference(causal: Path) -> Any:
    keys = {"actor": {"model": {"model_path": str(causal), "dtype": "float32"}}}
    cfg: Any = OmegaConf.merge(default_section(GrpoConfig), keys)
    inbox, actors = Sent(), Kept()
    prompts = PromptMap(2, 1, rollout_ranks=1, actor_ranks=1, scoring={"reference": 1})
    channels = {channel_to("reference"): inbox, GROUPS: actors}
    return started(ReferenceWorker(cfg), channels, prompts, "reference")


class Sending:
    """A weight sync that has received these tensors."""

    def __init__(self, *tensors: tuple[str, Any]) -> None:
        self.tensors = tensors

    def receive(self) -> Update:
        return Update(1, False, iter(self.tensors))

    def forget(self) -> None: ...


def test_a_reference_takes_the_actors_weights_and_no_others(reference: Any) -> None:
    parameters = reference.scorer.model.state_dict()
    name = next(iter(parameters))
    reference._sync = Sending((name, torch.full_like(parameters[name], 2.0)))
    reference.take_weights()
    assert reference.scorer.model.state_dict()[name].eq(2.0).all()
    for other in (("none.weight", torch.zeros(2)), (name, Elements.__new__(Elements))):
        reference._sync = Sending(other)
        with pytest.raises(RlhpcError, match=f"the actor's weight {other[0]} does not fit the reference's model"):
            reference.take_weights()


def test_a_reference_saves_its_weights_and_reads_them_again(reference: Any, tmp_path: Path) -> None:
    before = {name: parameter.clone() for name, parameter in reference.scorer.model.named_parameters()}
    reference.save(str(tmp_path))
    with torch.no_grad():
        for parameter in reference.scorer.model.parameters():
            parameter.zero_()
    reference.load(str(tmp_path))
    after = dict(reference.scorer.model.named_parameters())
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


def test_a_reference_computes_the_log_probs_of_its_model(reference: Any) -> None:
    one = group(1, 0, 5, 6)
    reference._inbox = GroupInbox(Sent(one.pack_without_columns(), {"end": 1}), "reference-0", "rollout")  # type: ignore[arg-type]
    reference.prompts = PromptMap(1, 1, rollout_ranks=1, actor_ranks=1, scoring={"reference": 1})
    reference.serve(1)
    [(_, message)] = reference._actors.put_messages
    ids = one.batch.ids[None]
    logprobs = (reference.scorer.model(input_ids=ids).logits / reference.scorer.temperature).log_softmax(-1)[0, :-1]
    expected = logprobs.gather(1, ids[0, 1:, None]).squeeze(1)
    torch.testing.assert_close(torch.from_numpy(message["values"])[-2:], expected[-2:], rtol=1e-4, atol=1e-5)
