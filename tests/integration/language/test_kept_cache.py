"""Sequences under way at an update: their keys and values are recomputed, or kept (`rollout.keep_cache_on_update`)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.extras import need_extra

need_extra("llm")

sys.path.insert(0, str(Path(__file__).parent))

from engine_models import TOLERANCE, change, error_of, requests_of, run_out, save_model, save_tokenizer
from engine_ranks import engine_of
from transformers import AutoModelForCausalLM

from rlhpc.language.engines import Completion, Request, RolloutBackend
from rlhpc.language.engines.batch_invariance import round_up_to_tile

pytestmark = pytest.mark.long(together=True)

STEPS = 6


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    save_model(path)
    save_tokenizer(path)
    return path


@pytest.fixture(params=["hf", "vllm", "vllm x 2"])
def made(request: pytest.FixtureRequest, folder: Path) -> Iterator[Callable[[bool], RolloutBackend]]:
    """Makes an engine that keeps caches, or does not."""
    engines: list[RolloutBackend] = []

    def make(keep: bool) -> RolloutBackend:
        engines.append(engine_of(request.param, folder, keep_cache_on_update=keep))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


def computed(engine: Any) -> list[int]:
    """Gets, as the engine goes on, how many tokens each pass computes."""
    counts: list[int] = []
    engine = getattr(engine, "own", engine)
    if hasattr(engine, "_kv"):
        engine._model.register_forward_pre_hook(
            lambda module, args, given: counts.append(given["input_ids"].numel()), with_kwargs=True
        )
        return counts
    scheduler = engine._engine.engine_core.engine_core.scheduler
    schedule = scheduler.schedule

    def counting(*given: Any, **options: Any) -> Any:
        found = schedule(*given, **options)
        counts.append(found.total_num_scheduled_tokens)
        return found

    scheduler.schedule = counting
    return counts


def kept_error(old: Any, new: Any, request: Request, completion: Completion) -> float:
    """Largest distance of the log-probs after the update from those of a model that goes on with the old one's cache."""
    first = completion.versions.index(1)
    prompt, said = list(request.prompt_ids), completion.token_ids
    seen = prompt + said[: max(first - 1, 0)]
    with torch.no_grad():
        cache = old(input_ids=torch.tensor([seen]), use_cache=True).past_key_values
        rest = torch.tensor([said[first - 1 : -1]])
        logits = new(input_ids=rest, past_key_values=cache, use_cache=True).logits[0].double()
    temperature = request.sampling.temperature
    logprobs = (logits / temperature).log_softmax(-1)
    expected = logprobs[torch.arange(len(said) - first), torch.tensor(said[first:])]
    return float((expected - torch.tensor(completion.logprobs[first:]).double()).abs().max())


def under_way(engine: RolloutBackend, folder: Path) -> tuple[dict[int, Request], list[Completion], list[int], Any, Any]:
    """Has requests answered with an update in the middle; what was asked and came, what the passes after the update
    computed, and the models of both versions."""
    old, new = (AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval() for _ in range(2))
    change(new, 1)
    engine.update_weights(0, old.state_dict().items())
    requests = {r.id: r for r in requests_of(12, seed=4, max_new_tokens=40, temperature=1.0, top_p=1.0, top_k=-1)}
    engine.add(requests.values())
    done: list[Completion] = []
    for _ in range(STEPS):
        done += engine.step()
    engine.update_weights(1, new.state_dict().items())
    counts = computed(engine)
    done += engine.step()
    done += run_out(engine)
    return requests, done, counts, old, new


def test_kept_caches_are_gone_on_with(made: Callable[[bool], RolloutBackend], folder: Path) -> None:
    requests, done, counts, old, new = under_way(made(True), folder)
    through = [completion for completion in done if set(completion.versions) == {0, 1}]
    assert len(through) > 5
    assert max(counts) <= round_up_to_tile(len(requests))  # a token each
    for completion in through:
        request = requests[completion.id]
        assert completion.versions == sorted(completion.versions)
        assert error_of(old, request, completion, 0) < TOLERANCE
        assert kept_error(old, new, request, completion) < TOLERANCE
    # It makes a difference.
    assert max(error_of(new, requests[c.id], c, 1) for c in through) > 100 * TOLERANCE


def test_by_default_they_are_made_anew(made: Callable[[bool], RolloutBackend], folder: Path) -> None:
    requests, done, counts, old, new = under_way(made(False), folder)
    through = [completion for completion in done if set(completion.versions) == {0, 1}]
    assert len(through) > 5
    again = sum(len(requests[c.id].prompt_ids) + c.versions.count(0) - 1 for c in through)
    assert sum(counts[:2]) >= again
    for completion in through:
        assert error_of(old, requests[completion.id], completion, 0) < TOLERANCE
        assert error_of(new, requests[completion.id], completion, 1) < TOLERANCE


def test_a_new_request_gets_nothing_that_older_weights_made(
    made: Callable[[bool], RolloutBackend], folder: Path
) -> None:
    """Not even for a prompt that is under way, which an engine may remember."""
    engine = made(True)
    _, _, _, _, new = under_way(engine, folder)
    old = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    engine.update_weights(2, old.state_dict().items())
    prompt = tuple(range(3, 40)) * 5  # more than a block of the cache
    sampling = requests_of(1, max_new_tokens=20, temperature=1.0, top_p=1.0, top_k=-1)[0].sampling
    first = Request(100, prompt, sampling, seed=1)
    engine.add([first])
    for _ in range(3):
        engine.step()
    engine.update_weights(3, new.state_dict().items())
    second = Request(101, prompt, sampling, seed=2)
    (found,) = [completion for completion in engine.generate([second]) if completion.id == 101]
    assert set(found.versions) == {3} and error_of(new, second, found) < TOLERANCE
