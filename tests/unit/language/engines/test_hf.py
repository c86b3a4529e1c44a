"""The engine hf: what it samples, updates and interruptions of running requests, its rows, and the models that it refuses."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from rlhpc.runtime.errors import ConfigError
from tests.extras import need_extra

need_extra("llm")

import transformers

from rlhpc.config.typed import default_section
from rlhpc.language.config.models import FrozenModelConfig
from rlhpc.language.config.run import GrpoConfig
from rlhpc.language.data.tokenizer import StopTexts
from rlhpc.language.engines import make_rollout
from rlhpc.language.engines.base import Completion, Request, SamplingParams
from rlhpc.language.engines.common import WeightUpdateError
from rlhpc.language.engines.hf import HFRollout, RowSampling, SequenceTable, draw
from rlhpc.language.models.loading import load_causal_lm


@pytest.mark.parametrize("seed", range(3))
def test_each_row_ends_at_its_own_tokens_and_no_more_sets_are_kept_than_rows(seed: int) -> None:
    draw, rows, vocabulary = random.Random(seed), 4, 50
    ledger = SequenceTable(rows, vocabulary, frozenset({49}), StopTexts(None, ""))
    for number in range(300):
        ends = tuple(sorted(draw.sample(range(40), draw.randint(0, 3))))
        ledger.add(Request(number, (1,), SamplingParams(stop_token_ids=ends)), 1000)
        tokens = np.array([draw.randrange(vocabulary) for _ in ledger.requests])
        ended = ledger.record(0, tokens, np.zeros(len(tokens), np.float32), 0)
        due = [
            row for row, request in enumerate(ledger.requests) if tokens[row] in {*request.sampling.stop_token_ids, 49}
        ]
        assert [row for row, _ in ended] == due
        gone = {row for row, _ in ended} or ({draw.randrange(rows)} if len(ledger) == rows else set())
        keep = [row for row in range(len(ledger)) if row not in gone]
        ledger.move([(come, to) for to, come in enumerate(keep) if come != to], len(keep))
    assert len(ledger._end_sets) <= rows and len(ledger._end_masks) <= rows


def tiny_config(family: str, **sizes: Any) -> Any:
    sizes |= {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2}
    return getattr(transformers, f"{family}Config")(num_hidden_layers=2, vocab_size=64, **sizes)


def test_a_family_without_the_configured_attention_names_the_key(tmp_path: Path) -> None:
    """GPT-OSS computes by eager alone; trainer and engine say so, and load it with the value that the message names."""
    config = tiny_config("GptOss", num_local_experts=2, num_experts_per_tok=1, head_dim=16)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    section = FrozenModelConfig(model_path=str(tmp_path))
    cfg = default_section(GrpoConfig)
    for load in (
        lambda: load_causal_lm(section),
        lambda: make_rollout(cfg, model_path=str(tmp_path), device="cpu", seed=0),
    ):
        with pytest.raises(ConfigError, match=r"set actor\.model\.attn_implementation=eager"):
            load()
    section.attn_implementation = "eager"
    assert load_causal_lm(section).config.model_type == "gpt_oss"


def test_layers_that_are_neither_attention_nor_recurrent_are_refused_by_name(tmp_path: Path) -> None:
    tiny_config("Lfm2", layer_types=["indexed_attention", "full_attention"]).save_pretrained(tmp_path)
    cfg = default_section(GrpoConfig)
    with pytest.raises(ConfigError, match=r"layers of kind indexed_attention.*check at the start") as caught:
        make_rollout(cfg, model_path=str(tmp_path), device="cpu", seed=0)
    assert "use vllm" not in str(caught.value)


def test_draw_takes_no_token_without_mass() -> None:
    """Whatever the random number, and next to rows that are not filtered."""
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.05], [0.05, 0.15, 0.3, 0.5], [0.25, 0.25, 0.25, 0.25]]))
    samplings = [SamplingParams(top_p=0.75), SamplingParams(top_k=1), SamplingParams()]
    rows = RowSampling([Request(i, (0,), sampling) for i, sampling in enumerate(samplings)], 4, torch.device("cpu"))
    for noise in (0.0, 0.3, 0.6249, 0.6251, 1.0 - 2**-53):
        tokens, logprobs = draw(logits, rows, torch.full((3,), noise, dtype=torch.float64))
        assert tokens.tolist() == [0 if noise < 0.625 else 1, 3, int(noise * 4)]
        assert logprobs.tolist() == pytest.approx(
            [logits[i, t].item() for i, t in enumerate(tokens.tolist())], abs=1e-6
        )


def make_engine(folder: Path, **rollout: Any) -> HFRollout:
    keys = {"max_new_tokens": 8, "max_batch_size": 4, "dtype": "float32", **rollout}
    cfg: Any = OmegaConf.merge(default_section(GrpoConfig), {"rollout": keys})
    engine = make_rollout(cfg, model_path=str(folder), device="cpu", seed=0)
    assert isinstance(engine, HFRollout)
    return engine


@pytest.fixture(scope="module")
def model(causal: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(causal).eval().requires_grad_(False)


@pytest.fixture
def engine(causal: Path) -> HFRollout:
    return make_engine(causal)


def request(number: int, prompt: tuple[int, ...] = (5, 9, 3), **sampling: Any) -> Request:
    sampling = {"max_new_tokens": 8, "temperature": 1.0, **sampling}
    return Request(number, prompt, SamplingParams(**sampling), seed=number)


def logprobs_of(model: Any, prompt: tuple[int, ...], response: list[int]) -> list[float]:
    ids = torch.tensor([[*prompt, *response]])
    rows = model(input_ids=ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    scores: list[float] = rows.gather(1, ids[0, len(prompt) :, None]).squeeze(1).tolist()
    return scores


def by_id(completions: list[Completion]) -> dict[int, Completion]:
    return {completion.id: completion for completion in completions}


def test_sampled_tokens_have_the_log_probs_of_the_model(engine: HFRollout, model: Any) -> None:
    prompts = [(5, 9, 3), (7, 7, 1, 2, 8), (5, 9, 3)]
    done = by_id(engine.generate([request(number, prompt) for number, prompt in enumerate(prompts)]))
    for number, prompt in enumerate(prompts):
        found = done[number]
        assert found.finish_reason in ("length", "stop") and 1 <= len(found.token_ids) <= 8
        assert found.logprobs == pytest.approx(logprobs_of(model, prompt, found.token_ids), abs=1e-4)
        assert found.versions == [0] * len(found.token_ids)
    assert done[0].token_ids != done[2].token_ids, "each request has random numbers of its own"


def test_greedy_tokens_are_the_most_likely_ones(engine: HFRollout, model: Any) -> None:
    [found] = engine.generate([request(0, temperature=0.0)])
    ids = [5, 9, 3]
    for token in found.token_ids:
        assert token == int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax())
        ids.append(token)


def test_a_response_depends_on_its_request_alone(causal: Path, engine: HFRollout) -> None:
    requests = [request(number, (5, 9, number + 1), max_new_tokens=3 + number) for number in range(7)]
    together = by_id(engine.generate(requests))
    assert engine.unfinished() == 0 and len(together) == 7, "more than there are rows: the others wait"
    alone = make_engine(causal, max_batch_size=1)
    for each in requests:
        [found] = alone.generate([each])
        assert (found.token_ids, found.logprobs) == (together[each.id].token_ids, together[each.id].logprobs)


def test_a_response_goes_on_with_new_weights(engine: HFRollout, model: Any) -> None:
    engine.add([request(0, max_new_tokens=6, stop_token_ids=())])
    for _ in range(2):
        assert engine.step() == []
    weights = {name: parameter * 0.5 for name, parameter in model.named_parameters()}
    engine.update_weights(3, weights.items())
    [found] = [completion for _ in range(8) for completion in engine.step()][:1]
    old = found.versions.count(0)
    assert 0 < old < len(found.versions) and found.versions == [0] * old + [3] * (len(found.versions) - old)
    assert engine.needs() == weights.keys() and set(engine.parameter_digests()) == weights.keys()
    name, tensor = next(iter(weights.items()))
    assert torch.equal(engine.held(name), tensor) and engine.held("none") is None  # type: ignore[arg-type]
    scores = engine.score([5, 9, 3, *found.token_ids])[2:]
    assert scores[old:] == pytest.approx(found.logprobs[old:], abs=1e-4), "the cache was computed anew"
    assert scores[:old] != pytest.approx(found.logprobs[:old], abs=1e-4)


def test_an_update_of_other_weights_is_refused(engine: HFRollout, model: Any) -> None:
    names = dict(model.named_parameters())
    with pytest.raises(WeightUpdateError):
        engine.update_weights(1, [*names.items(), ("none.weight", torch.zeros(2))])
    name = next(iter(names))
    partial = make_engine_like(engine)
    partial.update_weights(1, [(name, names[name] + 1)], complete=False)
    assert partial.version == 1 and torch.equal(partial.held(name), names[name] + 1)  # type: ignore[arg-type]


def make_engine_like(engine: HFRollout) -> HFRollout:
    return make_engine(Path(engine._model.name_or_path))


def test_requests_are_taken_back_with_their_tokens(engine: HFRollout) -> None:
    engine.add([request(number, max_new_tokens=20) for number in range(6)])
    for _ in range(2):
        engine.step()
    running = engine.sampled_tokens([0, 1, 5])
    assert running.keys() == {0, 1}, "others wait for a row"
    engine.drop([0, 5])
    assert engine.unfinished() == 4 and 0 not in engine.sampled_tokens([0])
    aborted = by_id(engine.abort())
    assert aborted.keys() == {1, 2, 3, 4} and aborted[1].token_ids[: len(running[1])] == running[1]
    assert {completion.finish_reason for completion in aborted.values()} == {"abort"} and aborted[4].token_ids == []
    assert engine.unfinished() == 0
    [again] = engine.generate([request(1, max_new_tokens=20)])
    assert again.token_ids[: len(running[1])] == running[1]


def test_offloading_loses_no_request(causal: Path, engine: HFRollout) -> None:
    [expected] = make_engine(causal).generate([request(0)])
    engine.add([request(0)])
    engine.step()
    engine.offload()
    engine.reload()
    found = [completion for _ in range(9) for completion in engine.step()]
    assert found[0].token_ids == expected.token_ids
    engine.close()


def test_a_response_ends_at_its_stop_tokens_and_at_the_context(causal: Path, engine: HFRollout) -> None:
    [free] = engine.generate([request(0, max_new_tokens=8)])
    stop = free.token_ids[1]
    [stopped] = engine.generate([request(0, max_new_tokens=8, stop_token_ids=(stop,))])
    assert stopped.finish_reason == "stop" and stopped.token_ids == free.token_ids[: free.token_ids.index(stop) + 1]
    short = make_engine(causal, max_model_len=5)
    assert short.context == 5
    [cut] = short.generate([request(0)])
    assert len(cut.token_ids) <= 2
    with pytest.raises(ConfigError, match="5"):
        short.add([request(1, (1, 2, 3, 4, 5))])
    with pytest.raises(ConfigError, match=r"rollout.max_model_len is \d+; the model's context is"):
        make_engine(causal, max_model_len=1 << 20)
    with pytest.raises(ConfigError, match=r"rollout.max_batch_size \(1099511627776\)"):
        make_engine(causal, max_batch_size=1 << 40)
    with pytest.raises(ConfigError, match="has no routers"):
        make_engine(causal, routing_replay=True)
