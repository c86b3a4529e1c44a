"""The base class of engines, and engines of other packages that do not derive from it."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Sequence
from typing import Any, ClassVar

import pytest

from rlhpc.language.engines.base import Completion, Request, RolloutBackend, SamplingParams
from rlhpc.language.engines.registry import ENGINES, _factory, is_forkable
from tests.extras import need_extra


class Echo:
    """An engine as other packages wrote it before there was a base class: it repeats the prompt."""

    forkable = False
    capacity = 3
    updates_in_part = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.version = 0
        self._requests = list[Request]()

    def add(self, requests: Iterable[Request]) -> None:
        self._requests += requests

    def step(self) -> list[Completion]:
        done, self._requests = self._requests, []
        return [
            Completion(request.id, list(request.prompt_ids), versions=[self.version] * len(request.prompt_ids))
            for request in done
        ]

    def unfinished(self) -> int:
        return len(self._requests)

    def abort(self) -> list[Completion]:
        return self.step()

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        self.add(requests)
        return self.step()

    def update_weights(self, version: int, named_tensors: Iterable[tuple[str, Any]], *, complete: bool = True) -> None:
        self.version = version

    def offload(self) -> None: ...

    def reload(self) -> None: ...

    def close(self) -> None: ...


class Droppable(Echo):
    context = 8
    awaiting: ClassVar[dict[str, Any]] = {"load": False}

    def drop(self, ids: Collection[int]) -> None:
        self._requests = [request for request in self._requests if request.id not in ids]

    def so_far(self, ids: Collection[int]) -> dict[int, list[int]]:
        return {number: [7] for number in ids}

    def score(self, token_ids: Sequence[int]) -> list[float]:
        return [-1.0] * (len(token_ids) - 1)


class Once:
    """Has only what a judge needs."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        return [Completion(request.id, [1]) for request in requests]


class Derived(RolloutBackend):
    add = step = unfinished = abort = generate = update_weights = offload = reload = close = None  # type: ignore[assignment]


def test_a_class_with_the_methods_alone_works_and_is_warned_about() -> None:
    with pytest.warns(FutureWarning, match=r"Echo does not derive from rlhpc.language.engines.RolloutBackend"):
        factory = _factory(f"{__name__}:Echo")
    engine = factory(None, model_path="", device="cpu", seed=0)
    assert isinstance(engine, RolloutBackend) and isinstance(engine, Echo)
    assert (engine.capacity, engine.context, engine.choices, engine.forkable) == (3, 0, None, False)
    assert engine.takes_partial_updates and not engine.can_drop and not engine.can_score and not engine.takes_shards
    engine.update_weights(4, [], complete=False)
    (done,) = engine.generate([Request(1, (5, 6), SamplingParams())])
    assert (done.token_ids, done.versions) == ([5, 6], [4, 4])
    assert engine.wants() is None and engine.held("w") is None


def test_its_further_methods_are_used() -> None:
    with pytest.warns(FutureWarning):
        engine = _factory(f"{__name__}:Droppable")(None, model_path="", device="cpu", seed=0)
    assert engine.can_drop and engine.can_score and engine.context == 8
    engine.add([Request(1, (5,), SamplingParams()), Request(2, (6,), SamplingParams())])
    engine.drop([1])
    assert [done.id for done in engine.step()] == [2]
    assert engine.sampled_tokens([3]) == {3: [7]} and engine.score([1, 2]) == [-1.0]
    with pytest.warns(FutureWarning):
        assert not is_forkable(f"{__name__}:Echo")


def test_a_class_that_lacks_methods_works_until_one_is_called() -> None:
    with pytest.warns(FutureWarning):
        engine = _factory(f"{__name__}:Once")(None, model_path="", device="cpu", seed=0)
    assert engine.generate([Request(4, (5,), SamplingParams())])[0].token_ids == [1]
    with pytest.raises(NotImplementedError, match="Once has no method step"):
        engine.step()


def test_an_engine_that_can_do_no_more_says_so(recwarn: pytest.WarningsRecorder) -> None:
    engine: Any = _factory(f"{__name__}:Derived")()
    assert engine.capacity == sys.maxsize and is_forkable(f"{__name__}:Derived")
    for act in (lambda: engine.drop([1]), lambda: engine.score([1, 2]), lambda: engine.update_shards(1, [])):
        with pytest.raises(NotImplementedError, match="Derived"):
            act()
    assert not recwarn.list


@pytest.mark.parametrize("name", ["hf", "vllm"])
def test_the_packages_engines_derive_from_the_base_class(name: str) -> None:
    need_extra("llm", *(["vllm"] if name == "vllm" else []))
    engine: Any = ENGINES.find(name)
    assert issubclass(engine, RolloutBackend) and not engine.__abstractmethods__
    assert engine.can_drop and engine.can_score
