"""Frameworks of agents as they come from PyPI, each with the packages that it wants: what the model drew for them is what is
trained, in as many samples as they tear it into."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.extras import find_python, need_extra, needs_python

need_extra("llm")

sys.path.insert(0, str(Path(__file__).parent))

from gateway_things import QUESTION as PROMPT
from gateway_things import Scripted, chat_tokenizer, episodes_of, product, run_all

from rlhpc.language.agents.episodes import tokens_of

pytestmark = pytest.mark.long

CLIENTS, VERIFIERS = find_python("agents"), find_python("verifiers")


@pytest.fixture(autouse=True)
def found_by_agents(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("PYTHONWARNINGS", "ignore")


def asked_by(client: str, python: str | None, **kwargs: Any) -> tuple[Any, Scripted]:
    """An episode of a client, after a look at what holds of any: the tokens that were drawn are those of the loss."""
    engine = Scripted(product)
    with episodes_of(engine, f"agent_clients:{client}", python=python, timeout_s=120, **kwargs) as generation:
        (episode,) = run_all(generation, 1, prompt=PROMPT, seconds=150)
    assert not episode.failed, episode.outcome.error
    assert episode.outcome.reward == 1.0
    drawn = sum(len(engine._completion(request).token_ids) for request in engine.requests)
    assert tokens_of(episode) == drawn
    return episode, engine


def drifting(engine: Scripted) -> int:
    """Prompts that would be other tokens, were their text encoded again."""
    tokenizer = chat_tokenizer()
    prompts = [list(request.prompt_ids) for request in engine.requests]
    return sum(tokenizer.encode(tokenizer.decode(ids), add_special_tokens=False) != ids for ids in prompts)


@needs_python("agents")
@pytest.mark.parametrize(
    ("client", "turns", "samples"),
    [
        ("openai_client", 3, 2),
        ("openai_agents", 2, 1),
        ("langgraph", 2, 1),
        ("anthropic_client", 2, 1),
        ("smolagents_tools", 2, 2),  # it rewrites its own calls, and so always begins anew
        ("smolagents_code", 1, 1),
    ],
)
def test_a_framework(client: str, turns: int, samples: int) -> None:
    episode, engine = asked_by(client, CLIENTS)
    assert (episode.turns, len(episode.samples)) == (turns, samples)
    assert drifting(engine) == (0 if client.startswith("smolagents") else 1)


@needs_python("agents")
@pytest.mark.parametrize("seed", range(3))
def test_requests_that_clients_make_get_what_they_must(seed: int) -> None:
    """Replies that end where a client asked, and a refusal of what the endpoint cannot honour: 40 requests, drawn."""
    from client_bodies import TEXT

    engine = Scripted(lambda prompt: TEXT)
    with episodes_of(
        engine, "client_bodies:solve", python=CLIENTS, timeout_s=140, limits=(200, 10**6), seed=seed, count=40
    ) as made:
        (episode,) = run_all(made, 1, most=400, seconds=150)
    assert not episode.failed, episode.outcome.error
    assert json.loads(episode.outcome.response) == []


@needs_python("agents")
def test_openenv_captures_what_is_trained() -> None:
    episode, engine = asked_by("openenv", CLIENTS)
    (sample,) = episode.samples
    whole, captured = [*sample.prompt_ids, *sample.token_ids], json.loads(episode.outcome.response)
    assert sample.turns == len(captured) == 2
    for turn in captured:
        begin = len(turn["prompt"])
        assert whole[:begin] == turn["prompt"] and whole[begin : begin + len(turn["ids"])] == turn["ids"]
        at = begin - len(sample.prompt_ids)
        assert sample.logprobs[at : at + len(turn["ids"])] == turn["logprobs"]
    assert drifting(engine) == 1


@needs_python("verifiers")
def test_verifiers_has_the_very_sample_that_is_trained(tmp_path: Path) -> None:
    chat_tokenizer().save_pretrained(tmp_path)
    episode, _ = asked_by("verifiers", VERIFIERS, tokenizer=str(tmp_path))
    (sample,) = episode.samples
    (branch,) = json.loads(episode.outcome.response)
    prompt = len(sample.prompt_ids)
    assert branch["ids"] == [*sample.prompt_ids, *sample.token_ids]
    assert branch["mask"] == [*[False] * prompt, *sample.loss_mask]
    drawn = [logprob for logprob, own in zip(sample.logprobs, sample.loss_mask, strict=True) if own]
    assert branch["logprobs"] in ([*[0.0] * prompt, *sample.logprobs], drawn)
