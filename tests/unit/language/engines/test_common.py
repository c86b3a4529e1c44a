"""Base of the engines: which requests and weight updates are accepted, and who gets a completion."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

import numpy as np
import pytest

from rlhpc.config.typed import typed
from rlhpc.language.config.run import GrpoConfig
from rlhpc.language.engines.base import Completion, Request, SamplingParams
from rlhpc.language.engines.common import EngineBase, EngineOptions, WeightUpdateError, checked_update
from rlhpc.runs.configuration import load_config
from rlhpc.runtime.errors import ConfigError
from tests.unit.language.planning.accounts import MATH


class Engine(EngineBase):
    """Engine that finishes its requests one by one."""

    context, vocabulary = 16, 50

    def __init__(self) -> None:
        super().__init__()
        self.requests: list[Request] = []

    def _queue(self, requests: Sequence[Request]) -> None:
        self.requests += requests

    def _advance(self) -> list[Completion]:
        request = self.requests.pop(0)
        return [Completion(request.id, [1] * self._max_response_tokens(request))]

    def _abort(self) -> list[Completion]:
        aborted = [Completion(request.id, finish_reason="abort") for request in self.requests]
        self.requests.clear()
        return aborted

    def _drop(self, ids: Collection[int]) -> None:
        self.requests = [request for request in self.requests if request.id not in ids]

    def begin(self, version: int) -> None:
        self._begin_update(version)

    def end(self, version: int) -> None:
        self._end_update(version)

    update_weights = offload = reload = close = lambda self, *_, **__: None  # type: ignore[assignment]


def request_of(number: int, prompt: tuple[int, ...] = (3, 4), **sampling: object) -> Request:
    return Request(number, prompt, replace(SamplingParams(max_new_tokens=4), **sampling))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (request_of(1, ()), "request 1 has an empty prompt"),
        (request_of(1, (1,) * 16), "a prompt of 16 tokens leaves no room in the context of 16"),
        (request_of(1, (1, 50)), "token ids from 1 to 50; the model's vocabulary is 50"),
        (request_of(1, stop_token_ids=(60,)), "stop_token_ids 60; the model's vocabulary is 50"),
        (request_of(1, max_new_tokens=0), "rollout.max_new_tokens is 0; allowed: at least 1"),
        (request_of(1, temperature=-1.0), "rollout.temperature is -1.0; allowed: at least 0"),
        (request_of(1, top_p=0.0), "rollout.top_p is 0.0; allowed"),
        (request_of(1, top_k=0), "rollout.top_k is 0; allowed: -1, or at least 1"),
    ],
)
def test_a_request_that_cannot_be_answered_is_refused_with_all_that_came_with_it(
    request_: Request, message: str
) -> None:
    engine = Engine()
    with pytest.raises(ConfigError, match=message):
        engine.add([request_of(0), request_])
    assert engine.unfinished() == 0 and engine.requests == []


def test_two_requests_of_one_id_are_refused() -> None:
    engine = Engine()
    engine.add([request_of(1)])
    for requests in ([request_of(1)], [request_of(2), request_of(2)]):
        with pytest.raises(ValueError, match="same id"):
            engine.add(requests)


def test_a_response_ends_with_the_context() -> None:
    engine = Engine()
    assert [len(one.token_ids) for one in engine.generate([request_of(1, (1,) * 14), request_of(2)])] == [2, 4]


def test_generate_leaves_completions_of_other_requests_to_the_next_step() -> None:
    engine = Engine()
    engine.add([request_of(1), request_of(2)])
    assert [one.id for one in engine.generate([request_of(3)])] == [3]
    assert engine.unfinished() == 2
    assert [one.id for one in engine.step()] == [1, 2] and engine.unfinished() == 0


def test_dropped_requests_are_not_returned_and_aborted_ones_are() -> None:
    engine = Engine()
    engine.add([request_of(1), request_of(2), request_of(3)])
    engine.drop([2, 9])
    assert engine.unfinished() == 2
    assert sorted(one.id for one in engine.abort()) == [1, 3] and engine.unfinished() == 0


def test_no_token_is_sampled_between_the_weights_of_two_versions() -> None:
    engine = Engine()
    engine.add([request_of(1)])
    engine.begin(4)
    with pytest.raises(WeightUpdateError, match=r"the update to version 4 .* did not arrive whole"):
        engine.step()
    engine.end(4)
    assert [one.id for one in engine.step()] == [1] and engine.version == 4


NEEDED = {"a": (2,), "b": (3,)}


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ({"a": 2, "c": 1}, "brought 'c', which the rollout engine's model does not have"),
        ({"a": 3}, r"brought 'a' of shape \(3,\); the model's is \(2,\)"),
        ({"a": 2}, "left out b"),
    ],
)
def test_an_update_that_does_not_fit_the_model_is_refused(names: dict[str, int], message: str) -> None:
    tensors = [(name, np.zeros(size)) for name, size in names.items()]
    with pytest.raises(WeightUpdateError, match=message):
        list(checked_update(tensors, NEEDED, {}))  # type: ignore[type-var]


def test_an_update_may_bring_optional_tensors_and_an_incomplete_one_leaves_some_out() -> None:
    tensors = [("a", np.zeros(2)), ("tied", np.zeros(5))]
    passed = list(checked_update(tensors, NEEDED, {"tied": (5,)}, complete=False))  # type: ignore[type-var]
    assert [name for name, _ in passed] == ["a", "tied"]
    with pytest.raises(WeightUpdateError, match="brought 'a' twice"):
        list(checked_update([*tensors[:1], *tensors[:1]], NEEDED, {}, complete=False))  # type: ignore[type-var]


def test_options_are_those_of_the_configuration() -> None:
    def options(*overrides: str) -> EngineOptions:
        cfg = typed(GrpoConfig, load_config(MATH, ["cluster.accelerators_per_node=8", *overrides], check=False))
        return EngineOptions.from_config(cfg, "folder", "cpu")

    made = options("rollout.dtype=bfloat16", "rollout.max_batch_size=3", "actor.offload_in_rollout=true")
    assert (made.dtype, made.batch, made.sleep_mode, made.adapters) == ("bfloat16", 3, True, None)
    assert options("rollout.max_batch_size=null").batch == 64
    separate = options("actor.lora.rank=8", "actor.lora.alpha=16", "rollout.merge_adapters=false")
    assert separate.adapters == (8, 16)
    for override, message in (
        ("rollout.max_batch_size=0", "rollout.max_batch_size is 0"),
        ("rollout.gpu_memory_utilization=1.5", "rollout.gpu_memory_utilization is 1.5"),
        ("rollout.dtype=float8", "rollout.dtype is 'float8'"),
        (
            "rollout.quantization=fp8",
            "rollout.quantization is 'fp8', .*rollout.dtype is 'auto', which on cpu is float32",
        ),
    ):
        with pytest.raises(ConfigError, match=message):
            options(override, "actor.model.dtype=float32")
