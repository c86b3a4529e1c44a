"""Both generation engines against a plain transformers forward of the same weights."""

from __future__ import annotations

import os
import random
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

from rlhpc.config.typed import default_section, typed, with_value
from rlhpc.language.agents.episodes import Episode, EpisodeRunner
from rlhpc.language.config.run import GrpoConfig, SftConfig
from rlhpc.language.data.tokenizer import end_tokens
from rlhpc.language.engines import Completion, Request, RolloutBackend, SamplingParams, make_rollout
from rlhpc.language.engines.common import EngineOptions, WeightUpdateError
from rlhpc.language.engines.hf_forward import KVCache
from rlhpc.language.engines.registry import awaiting_weights
from rlhpc.language.engines.vllm_weights import Loaded, reload_counted
from rlhpc.language.models.micro_batching import split_micro_batches, values_of
from rlhpc.language.models.token_batch import TokenBatch
from rlhpc.language.scoring.groups import scoring_groups
from rlhpc.language.scoring.registry import make_scorer
from rlhpc.language.training.weight_sync import Probe, check_probe, long_text, probe_text
from rlhpc.runtime.errors import ConfigError
from rlhpc.weights.verification import WeightsDiffer
from tests.accelerators import loose
from tests.extras import need_extra

need_extra("llm")

sys.path.insert(0, str(Path(__file__).parent))

import transformers
from engine_models import (
    CHARACTERS,
    CONTEXT,
    DEVICE,
    END,
    EXPERTS,
    TOLERANCE,
    VOCABULARY,
    change,
    config,
    distributions,
    error_of,
    requests_of,
    run_out,
    save_model,
    save_tokenizer,
)
from engine_ranks import engine_of


def test_an_engine_sleeps_only_where_the_run_has_it_take_turns() -> None:
    rl, demonstrations = default_section(GrpoConfig), default_section(SftConfig)
    assert not EngineOptions.from_config(demonstrations, "model", "cpu").sleep_mode
    assert not EngineOptions.from_config(rl, "model", "cpu").sleep_mode
    rl.actor.offload_in_rollout = True
    assert EngineOptions.from_config(rl, "model", "cpu").sleep_mode


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    save_model(path)
    save_tokenizer(path)
    return path


@pytest.fixture
def model(folder: Path) -> Any:
    """The reference, with the weights that the engines start from."""
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture(scope="module", params=["hf", "vllm"])
def built(request: pytest.FixtureRequest, folder: Path) -> Iterator[RolloutBackend]:
    """One engine for all tests: vLLM takes its time to start."""
    engine = engine_of(request.param, folder)
    yield engine
    engine.close()


@pytest.fixture
def engine(built: RolloutBackend, model: Any) -> RolloutBackend:
    """The engine with nothing under way and the reference's weights, as version 0."""
    built.abort()
    built.update_weights(0, model.state_dict().items())
    return built


def test_generates_what_the_model_says(engine: RolloutBackend, model: Any) -> None:
    requests = requests_of(50)
    completions = engine.generate(requests)
    assert [completion.id for completion in completions] == [request.id for request in requests]
    for request, completion in zip(requests, completions, strict=True):
        assert len(completion.token_ids) == len(completion.logprobs) == len(completion.versions)
        assert error_of(model, request, completion) < TOLERANCE
        ended = completion.token_ids[-1] == END
        assert completion.finish_reason == ("stop" if ended else "length")
        assert END not in completion.token_ids[:-1]
        assert ended or len(completion.token_ids) == request.sampling.max_new_tokens
    assert engine.unfinished() == 0


def test_greedy_tokens_are_those_of_transformers_generate(engine: RolloutBackend, model: Any) -> None:
    requests = requests_of(12, seed=1, temperature=0.0, top_p=1.0, top_k=-1, max_new_tokens=30)
    for request, completion in zip(requests, engine.generate(requests), strict=True):
        prompt = torch.tensor([request.prompt_ids])
        whole = model.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=30)
        assert completion.token_ids == whole[0, prompt.shape[1] :].tolist()


def test_engines_agree(engine: RolloutBackend, folder: Path) -> None:
    """Same greedy answers and log-probs from either."""
    other = make_rollout(config("hf", max_batch_size=3), model_path=str(folder), device=DEVICE, seed=0)
    requests = requests_of(12, seed=2, temperature=0.0, top_p=1.0, top_k=-1)
    for a, b in zip(engine.generate(requests), other.generate(requests), strict=True):
        assert a.token_ids == b.token_ids
        assert a.logprobs == pytest.approx(b.logprobs, abs=1e-4)


def test_every_update_arrives_and_a_missed_one_shows(engine: RolloutBackend, model: Any) -> None:
    requests = requests_of(20, seed=3)
    for version in (1, 2, 3):
        change(model, version)
        missed = engine.generate(requests)
        assert max(error_of(model, *pair) for pair in zip(requests, missed, strict=True)) > 0.01
        weights = model.state_dict() if version == 2 else dict(model.named_parameters())
        engine.update_weights(version, ((name, tensor.detach().clone()) for name, tensor in weights.items()))
        assert engine.version == version
        completions = engine.generate(requests)
        assert max(error_of(model, *pair) for pair in zip(requests, completions, strict=True)) < TOLERANCE
        assert {v for completion in completions for v in completion.versions} == {version}


def test_the_longest_text_of_a_run_that_fills_the_context_is_scored(engine: RolloutBackend) -> None:
    """As the start's proof does it: engines want room for a token that they would draw next."""
    assert engine.can_score and engine.context
    text = probe_text(64, long_text(engine.context, 0, 0, engine.context), seed=1)
    assert len(engine.score(text)) == len(text) - 1 == min(engine.context, 257) - 2


def test_a_text_is_scored_by_the_weights_of_now(engine: RolloutBackend, model: Any) -> None:
    """As the trainer scores it, while others are under way; what is not so is noticed behind the loader."""
    assert engine.can_score
    text = probe_text(64, 20)
    ids = torch.tensor([text])

    def trainers() -> Probe:
        with torch.no_grad():
            logprobs = model(input_ids=ids).logits[0, :-1].log_softmax(-1)
        return Probe(tuple(text), tuple(logprobs.gather(1, ids[0, 1:, None]).squeeze(1).tolist()), "float32")

    requests = requests_of(10, seed=8, max_new_tokens=20)
    expected = {completion.id: completion.token_ids for completion in engine.generate(requests)}
    engine.add(requests)
    done = engine.step()
    assert check_probe(engine, trainers(), 0, None, {"float32"}, "actor-0") < TOLERANCE / 2
    assert {completion.id: completion.token_ids for completion in [*done, *run_out(engine)]} == expected
    change(model, 4)
    with pytest.raises(WeightsDiffer, match=r"version 4 of the weights: .* actor-0 by .* rounding explains 0.001"):
        check_probe(engine, trainers(), 4, None, {"float32"}, "actor-0")
    twice = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
    name = next(name for name in twice if name.endswith("down_proj.weight"))
    twice[name] += 0.05 * torch.randn_like(twice[name])  # such as an adapter that was merged twice
    engine.update_weights(5, twice.items())
    with pytest.raises(WeightsDiffer, match="version 5"):
        check_probe(engine, trainers(), 5, None, {"float32"}, "actor-0")
    engine.update_weights(6, model.named_parameters())
    assert check_probe(engine, trainers(), 6, None, {"float32"}, "actor-0") < TOLERANCE / 2


def test_where_weights_are_to_come_is_for_vllm_to_know() -> None:
    cfg = default_section(GrpoConfig)
    assert awaiting_weights(cfg) is cfg
    cfg.rollout.rollout_backend, cfg.rollout.engine_kwargs = "vLLM", {"block_size": 32}
    cfg = typed(GrpoConfig, cfg)
    assert awaiting_weights(cfg).rollout.engine_kwargs == {"load_format": "dummy", "block_size": 32}
    assert cfg.rollout.engine_kwargs == {"block_size": 32}
    kept = with_value(cfg, "rollout.engine_kwargs", {"load_format": "safetensors"})
    assert awaiting_weights(kept).rollout.engine_kwargs == {"load_format": "safetensors"}


@pytest.mark.parametrize("buffers", [False, True], ids=["weights alone", "buffers, too"])
def test_an_engine_that_awaits_all_weights_reads_no_file(
    buffers: bool, model: Any, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless there are buffers, which an update need not bring. What it compiles goes to the node's own disk."""
    need_extra("vllm")
    from vllm.model_executor.layers import rotary_embedding

    from rlhpc.language.engines import vllm as engines

    # All engines of a process share these tables. After an update that broke off, which ends a rank, a further engine would
    # take them for weights, and make up numbers for them.
    rotary_embedding._ROPE_DICT.clear()
    monkeypatch.setenv("VLLM_CACHE_ROOT", "")  # put back at the end, whatever is put there
    monkeypatch.delenv("VLLM_CACHE_ROOT")
    monkeypatch.setenv("RLHPC_SCRATCH", str(tmp_path))
    if buffers:
        found = engines.tensors_of
        monkeypatch.setattr(engines, "tensors_of", lambda m: (found(m)[0], {**found(m)[1], "own": (1,)}, found(m)[2]))
    text = probe_text(64, 20)
    with torch.no_grad():
        said = model(input_ids=torch.tensor([text])).logits[0, :-1].log_softmax(-1)
    expected = said.gather(1, torch.tensor(text)[1:, None]).squeeze(1)
    engine = make_rollout(
        config("vllm", engine_kwargs={"load_format": "dummy"}), model_path=str(folder), device=DEVICE, seed=0
    )
    try:
        assert engine.can_score
        read = torch.allclose(torch.tensor(engine.score(text)), expected, atol=loose(1e-4, 1e-2))
        assert read == buffers
        engine.update_weights(0, model.named_parameters())
        torch.testing.assert_close(torch.tensor(engine.score(text)), expected, rtol=0, atol=loose(1e-5))
    finally:
        engine.close()
    cache = tmp_path / f"rlhpc-cache-{os.getuid()}"
    assert os.environ["VLLM_CACHE_ROOT"] == str(cache / "vllm") and cache.stat().st_mode & 0o777 == 0o700


def test_update_with_requests_under_way(engine: RolloutBackend, model: Any, folder: Path) -> None:
    """Tokens after an update are drawn by the new weights from prompt and response so far, and say so."""
    requests = {request.id: request for request in requests_of(40, seed=4, max_new_tokens=40)}
    engine.add(requests.values())
    done: list[Completion] = []
    models = {}
    for version in range(3):
        if version:
            change(model, version)
            engine.update_weights(version, model.named_parameters())
        models[version] = transformers.AutoModelForCausalLM.from_config(model.config).eval()
        models[version].load_state_dict(model.state_dict())
        for _ in range(6):
            done += engine.step()
    done += run_out(engine)
    assert sorted(completion.id for completion in done) == sorted(requests)
    spans = [completion.versions for completion in done]
    assert all(versions == sorted(versions) for versions in spans)
    assert [0, 1, 2] in [sorted(set(versions)) for versions in spans]
    for completion in done:
        request = requests[completion.id]
        for version, weights in models.items():
            assert error_of(weights, request, completion, version) < TOLERANCE
        if request.sampling.temperature == 0.0:
            best = {v: distributions(m, request.prompt_ids, completion.token_ids, 0.0) for v, m in models.items()}
            said = [int(best[v][t].argmax()) for t, v in enumerate(completion.versions)]
            assert completion.token_ids == said


def test_neighbours_do_not_matter(engine: RolloutBackend) -> None:
    requests = requests_of(30, seed=5)
    together = engine.generate(requests)
    shuffled = random.Random(0).sample(range(30), 30)
    others = {completion.id: completion for completion in engine.generate([requests[i] for i in shuffled])}
    for request, completion in zip(requests, together, strict=True):
        assert others[request.id].token_ids == completion.token_ids
    for i in (0, 7, 19):
        alone = engine.generate([requests[i]])[0]
        assert alone.token_ids == together[i].token_ids
        assert alone.logprobs == pytest.approx(together[i].logprobs, abs=TOLERANCE)


def test_seeds(engine: RolloutBackend) -> None:
    sampling = SamplingParams(max_new_tokens=20)
    first = engine.generate([Request(i, (5, 6, 7), sampling, seed=i) for i in range(8)])
    again = engine.generate([Request(i, (5, 6, 7), sampling, seed=i) for i in range(8)])
    assert [c.token_ids for c in first] == [c.token_ids for c in again]
    assert len({tuple(c.token_ids) for c in first}) > 5


def test_frequencies_are_the_models_probabilities(engine: RolloutBackend, model: Any) -> None:
    draws, prompt, temperature = 3000, (9, 30, 12), 0.8
    sampling = SamplingParams(max_new_tokens=1, temperature=temperature)
    completions = engine.generate([Request(i, prompt, sampling, seed=i) for i in range(draws)])
    seen = torch.bincount(torch.tensor([c.token_ids[0] for c in completions]), minlength=VOCABULARY).double()
    expected = distributions(model, prompt, (3,), temperature)[0].double().exp() * draws
    large = expected >= 5.0
    seen = torch.cat([seen[large], seen[~large].sum().reshape(1)])
    expected = torch.cat([expected[large], expected[~large].sum().reshape(1)])
    statistic = ((seen - expected) ** 2 / expected).sum()
    # The upper tail of the chi-square distribution.
    assert torch.special.gammaincc(torch.tensor((len(seen) - 1) / 2.0).double(), statistic / 2.0) > 1e-3


def test_filters_draw_allowed_tokens_only(engine: RolloutBackend, model: Any) -> None:
    """And the log-probs are still those of the whole distribution."""
    for filters in ({"top_k": 4}, {"top_p": 0.6}, {"top_k": 8, "top_p": 0.7}):
        requests = requests_of(
            12, seed=6, **{"temperature": 1.4, "max_new_tokens": 25, "top_k": -1, "top_p": 1.0, **filters}
        )
        for request, completion in zip(requests, engine.generate(requests), strict=True):
            assert error_of(model, request, completion) < TOLERANCE
            expected = distributions(model, request.prompt_ids, completion.token_ids, 1.4)
            for line, token in zip(expected, completion.token_ids, strict=True):
                ordered, order = line.exp().double().sort(descending=True)
                kept = ordered[: filters.get("top_k", VOCABULARY)]
                kept = kept / kept.sum()
                allowed = int((kept.cumsum(0) - kept < filters.get("top_p", 2.0) + 1e-5).sum())
                assert token in order[:allowed]


def test_abort_gives_back_what_there_is(engine: RolloutBackend, model: Any) -> None:
    requests = requests_of(30, seed=7, max_new_tokens=40, temperature=1.0)
    engine.add(requests)
    done = engine.step() + engine.step() + engine.step()
    left = engine.unfinished()
    aborted = engine.abort()
    assert len(aborted) == left == 30 - len(done)
    assert {c.finish_reason for c in aborted} == {"abort"}
    assert engine.unfinished() == 0 and engine.step() == []
    begun = [c for c in aborted if c.token_ids]
    assert begun and len(begun) < len(aborted)  # 16 at a time
    for completion in begun:
        assert error_of(model, requests[completion.id], completion) < TOLERANCE
    assert len(engine.generate(requests)) == 30


def test_some_are_dropped_and_the_others_do_not_notice(engine: RolloutBackend, model: Any) -> None:
    """Waiting ones, and those under way, also right behind an update; what there is of the others can be looked at."""
    assert engine.can_drop
    requests = requests_of(30, seed=8, max_new_tokens=40, temperature=1.0)
    whole = {completion.id: completion for completion in engine.generate(requests)}
    engine.add(requests)
    done = {completion.id: completion for _ in range(4) for completion in engine.step()}
    under_way = [request.id for request in requests if request.id not in done]
    begun = engine.sampled_tokens(under_way)
    assert any(begun.values())
    assert all(whole[number].token_ids[: len(ids)] == ids for number, ids in begun.items())
    early, late = set(under_way[::3]), set(under_way[1::3])
    engine.drop([*early, 10_000])
    done |= {completion.id: completion for completion in engine.step()}
    engine.update_weights(1, model.state_dict().items())  # the same ones: the cache is to be made anew
    late -= done.keys()
    engine.drop(late)
    done |= {completion.id: completion for completion in run_out(engine)}
    assert done.keys() == {*range(30)} - early - late and engine.unfinished() == 0
    for number, completion in done.items():
        assert completion.token_ids == whole[number].token_ids
    engine.drop([0])


def test_another_goes_on_where_one_had_to_leave(engine: RolloutBackend, model: Any, folder: Path) -> None:
    """Whose weights are newer: what there is stays, each token is of the weights that it says, limits are for the whole."""
    requests = requests_of(30, seed=11, temperature=1.0, top_p=1.0, top_k=-1)
    leaves = EpisodeRunner(engine, None)
    leaves.add(requests)
    ended = [episode for _ in range(6) for episode in leaves.step()]
    left = {episode.id: episode for episode in leaves.abort()}
    assert len(ended) + len(left) == len(requests) and any(e.token_ids for e in left.values())
    models = [model, transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()]
    change(models[1], 1)
    engine.update_weights(1, models[1].named_parameters())
    takes = EpisodeRunner(engine, None)
    for request in requests:
        if (e := left.get(request.id)) is not None:
            drawn = Completion(e.id, list(e.token_ids), list(e.logprobs), list(e.versions), e.finish_reason)
            takes.resume(request, drawn)
    found = list(to_the_end(takes))
    assert sorted(episode.id for episode in found) == sorted(left)
    for episode in found:
        request, before = requests[episode.id], left[episode.id]
        count = len(before.token_ids)
        assert count < len(episode.token_ids) <= request.sampling.max_new_tokens
        for name in ("token_ids", "logprobs", "versions"):
            assert getattr(episode, name)[:count] == getattr(before, name)
        assert episode.versions == [0] * count + [1] * (len(episode.token_ids) - count)
        assert episode.loss_mask == [True] * len(episode.token_ids) and episode.turn_ids == [0] * len(episode.token_ids)
        assert episode.prompt_ids == request.prompt_ids and episode.turns == 1
        stopped = episode.token_ids[-1] == END
        assert episode.finish_reason == ("stop" if stopped else "length") and END not in episode.token_ids[:-1]
        assert stopped or len(episode.token_ids) == request.sampling.max_new_tokens
        said = Completion(episode.id, episode.token_ids, episode.logprobs, episode.versions)
        for version, weights in enumerate(models):
            assert error_of(weights, request, said, version) < TOLERANCE


def to_the_end(episodes: EpisodeRunner) -> Iterator[Episode]:
    while episodes.unfinished():
        yield from episodes.step()


@pytest.mark.parametrize(
    "odd", [{"stop_token_ids": (10**9,)}, {"stop_token_ids": (-5,)}, {"stop": ("\ud800",)}, {"stop": ("x", "")}]
)
def test_a_request_that_cannot_be_made_is_refused_alone(engine: RolloutBackend, odd: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"stop_token_ids|a stop text is"):
        engine.add([Request(1, (5, 6), SamplingParams(max_new_tokens=4, **odd))])
    assert engine.unfinished() == 0
    (done,) = engine.generate([Request(2, (5, 6), SamplingParams(max_new_tokens=4, stop_token_ids=(7,)))])
    assert done.token_ids


def test_stop_tokens_and_texts(engine: RolloutBackend, model: Any) -> None:
    plain = SamplingParams(max_new_tokens=40)
    requests = [Request(i, (4 + i, 8, 3), plain, seed=i) for i in range(16)]
    tried = 0
    for request, free in zip(requests, engine.generate(requests), strict=True):
        said = free.token_ids
        if len(said) < 7 or min(said[:6]) < 3:
            continue
        tried += 1
        sampling = SamplingParams(max_new_tokens=40, stop_token_ids=(said[4],))
        cut = engine.generate([Request(0, request.prompt_ids, sampling, seed=request.seed)])[0]
        assert cut.token_ids == said[: said.index(said[4]) + 1]
        assert cut.finish_reason == "stop"

        wanted = "".join(CHARACTERS[token - 3] for token in said[3:6])
        sampling = SamplingParams(max_new_tokens=40, stop=("never this", wanted))
        engine.add([Request(0, request.prompt_ids, sampling, seed=request.seed)])
        done = engine.step() + engine.step()
        # The text is found although an update interrupts it.
        engine.update_weights(1, model.state_dict().items())
        cut = (done + run_out(engine))[0]
        assert cut.token_ids == said[:6]
        assert cut.finish_reason == "stop" and len(cut.logprobs) == 6
    assert tried > 3


def test_the_context_is_kept(engine: RolloutBackend) -> None:
    with pytest.raises(
        ConfigError, match=r"a prompt of 256 tokens leaves no room in the context of 256 \(rollout.max_model_len"
    ):
        engine.add([Request(0, (5,) * 10, SamplingParams()), Request(1, (5,) * CONTEXT, SamplingParams())])
    assert engine.unfinished() == 0
    sampling = SamplingParams(max_new_tokens=50, temperature=1.0)
    for length in (CONTEXT - 1, CONTEXT - 3):
        completion = engine.generate([Request(0, (5,) * length, sampling)])[0]
        assert len(completion.token_ids) <= CONTEXT - length
        assert completion.finish_reason == "stop" or len(completion.token_ids) == CONTEXT - length
    for prompt, message in (((), "empty prompt"), ((70,), "vocabulary is 64")):
        with pytest.raises(ConfigError, match=message):
            engine.add([Request(0, prompt, SamplingParams())])


def test_generate_keeps_what_others_added(engine: RolloutBackend) -> None:
    others = requests_of(6, seed=8, max_new_tokens=2)
    engine.add(others)
    mine = [Request(100 + i, (5, 9), SamplingParams(max_new_tokens=30), seed=i) for i in range(3)]
    assert [c.id for c in engine.generate(mine)] == [100, 101, 102]
    assert engine.unfinished() == 6
    assert sorted(c.id for c in run_out(engine)) == [0, 1, 2, 3, 4, 5]


def test_more_prompts_than_a_step_computes(tmp_path: Path) -> None:
    """Twice the tokens of a step of vLLM's, so that some prompt does not fit whole into what is left of a step."""
    need_extra("vllm")
    save_model(tmp_path, max_position_embeddings=512)
    save_tokenizer(tmp_path)
    engine = engine_of("vllm", tmp_path, max_model_len=512)
    step = engine._engine.vllm_config.scheduler_config.max_num_batched_tokens  # type: ignore[attr-defined]
    prompts = [tuple((7 * i + j) % (VOCABULARY - 4) + 3 for j in range(300)) for i in range(2 * step // 300)]
    sampling = SamplingParams(max_new_tokens=3)
    completions = engine.generate([Request(i, prompt, sampling, seed=i) for i, prompt in enumerate(prompts)])
    assert len(completions) == len(prompts) and all(completion.token_ids for completion in completions)
    engine.close()


def test_offload_loses_no_request(engine: RolloutBackend, model: Any) -> None:
    requests = requests_of(10, seed=9, max_new_tokens=20, temperature=0.7)
    expected = [c.token_ids for c in engine.generate(requests)]
    engine.add(requests)
    done = engine.step()
    engine.offload()
    engine.reload()
    engine.update_weights(1, model.state_dict().items())
    done += run_out(engine)
    assert [c.token_ids for c in sorted(done, key=lambda c: c.id)] == expected


@pytest.mark.parametrize("missing", [True, False])
def test_zz_half_an_update_stops_the_engine(built: RolloutBackend, model: Any, missing: bool) -> None:
    """Last in the file: vLLM has to be started again after one."""
    weights = list(model.state_dict().items())
    broken = (
        weights[:-3] if missing else [*weights[:4], ("model.layers.7.mlp.up_proj.weight", torch.zeros(1)), *weights[4:]]
    )
    with pytest.raises(WeightUpdateError, match="left out" if missing else "does not have|restart"):
        built.update_weights(5, broken)
    built.add([Request(0, (5,), SamplingParams(max_new_tokens=3))])
    with pytest.raises(WeightUpdateError, match="version 5"):
        built.step()
    built.abort()


#: By architecture, a weight of the file that gets lost, and what is said of it.
LOST = {
    "Qwen2": (
        "layers.1.self_attn.k_proj.weight",
        r"did not load all of version 4 once: \S*{name} \(0 of \d+ elements\)",
    ),
    "Qwen3Moe": (
        "layers.0.mlp.experts.2.up_proj.weight",
        r"did not load all of version 4 once: \S*{name} \(0 of \d+ elements\)",
    ),
    # Tied to the embeddings, which arrive: the head's kernel has a packed copy of its own.
    "Llama": ("lm_head.weight", "kept the old weights of layers that version 4 does not reach: lm_head;"),
}


#: Of the models with experts, what makes them small.
OF_EXPERTS = {"Qwen3Moe": {**EXPERTS, "num_experts": 4, "moe_intermediate_size": 48, "head_dim": 32}}


def what_gets_lost_is_noticed(
    engine: RolloutBackend, kind: str, weights: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of the tensors of version 4 gets lost behind the last look at them; vLLM itself says nothing of it."""
    lost, said = LOST[kind]

    def losing(worker: Any, weights: Any, *others: Any) -> Loaded:
        return reload_counted(worker, ((name, one) for name, one in weights if not name.endswith(lost)), *others)

    monkeypatch.setattr("rlhpc.language.engines.vllm.reload_counted", losing)
    with pytest.raises(WeightUpdateError, match=said.replace("{name}", re.escape(lost))):
        engine.update_weights(4, weights.items())
    with pytest.raises(WeightUpdateError, match="restart the rollout group"):
        engine.update_weights(5, weights.items())


@pytest.mark.parametrize("kind", LOST)
def test_what_gets_lost_in_half_precision_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Where the weights move by a millionth, which changes few of their bits."""
    changes = OF_EXPERTS.get(kind, {"tie_word_embeddings": True})
    reference = save_model(tmp_path, kind, **changes)
    engine = engine_of("vllm", tmp_path, seed=0, max_batch_size=5, dtype="bfloat16")
    for version in (1, 2, 3):
        for parameter in reference.parameters():
            parameter.data += 1e-6 * torch.randn_like(parameter).sign()
        weights = {name: parameter.detach().bfloat16() for name, parameter in reference.named_parameters()}
        engine.update_weights(version, weights.items())
    what_gets_lost_is_noticed(engine, kind, weights, monkeypatch)
    engine.close()


@pytest.mark.parametrize(
    ("backend", "kind", "changes"),
    [
        ("hf", "Mistral", {"sliding_window": 6}),
        ("hf", "Qwen2", {"tie_word_embeddings": True}),
        (
            "hf",
            "Gemma3Text",
            {"head_dim": 32, "sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]},
        ),
        ("vllm", "Qwen2", {"tie_word_embeddings": True}),
        ("vllm", "Llama", {"tie_word_embeddings": True}),
        # A kernel that packs experts has to do so at each update; and their names in files are not those of the module.
        ("vllm", "Qwen3Moe", OF_EXPERTS["Qwen3Moe"]),
        ("vllm", "Mixtral", {**EXPERTS, "num_local_experts": 4}),
    ],
)
def test_other_architectures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: str, kind: str, changes: dict[str, Any]
) -> None:
    """Each update arrives; and if an expert, half of a fused weight, or a tied head gets lost behind the last look at the
    tensors, of which vLLM itself says nothing, that is noticed."""
    reference = save_model(tmp_path, kind, **changes)
    engine = engine_of(backend, tmp_path, seed=0, max_batch_size=5)
    requests = requests_of(15, seed=10)
    for version, weights in enumerate((reference.named_parameters(), reference.state_dict().items(), None), start=1):
        change(reference, version)
        engine.update_weights(version, weights or reference.named_parameters())
        for request, completion in zip(requests, engine.generate(requests), strict=True):
            assert error_of(reference, request, completion) < 5 * TOLERANCE
    if backend == "vllm" and kind in LOST:
        what_gets_lost_is_noticed(engine, kind, dict(reference.named_parameters()), monkeypatch)
    engine.close()


def test_experts_whose_updates_are_not_tested_are_left_to_the_check_at_the_start(tmp_path: Path) -> None:
    save_model(tmp_path, "GraniteMoe", **EXPERTS, num_local_experts=4)
    for backend in ("vllm", "hf"):
        make_rollout(config(backend), model_path=str(tmp_path), device=DEVICE, seed=0).close()


def test_bad_configurations(folder: Path, tmp_path: Path) -> None:
    def make(backend: str, path: Path = folder, **rollout: Any) -> RolloutBackend:
        return make_rollout(config(backend, **rollout), model_path=str(path), device=DEVICE, seed=0)

    for backend, message in (("vlm", "did you mean 'vllm'"), ("no.such:Engine", "cannot be imported")):
        with pytest.raises(ConfigError, match=message):
            make(backend)
    with pytest.raises(ConfigError, match=r"actor.model.model_path is .*no-model"):
        make("hf", tmp_path / "no-model")
    with pytest.raises(ConfigError, match=r"rollout.max_model_len is 300; the model's context is 256"):
        make("hf", max_model_len=300)
    with pytest.raises(ConfigError, match=r"rollout.dtype is 'int4'; allowed: float32"):
        make("hf", dtype="int4")
    save_model(tmp_path)
    with pytest.raises(ConfigError, match="stop texts need a tokenizer"):
        make("hf", tmp_path).add([Request(0, (5,), SamplingParams(stop=("x",)))])


def test_vllm_says_what_it_lacks(folder: Path) -> None:
    need_extra("vllm")
    for arguments, message in (
        ({"no_such_argument": 1}, "rollout.engine_kwargs: .*no_such_argument"),
        ({"tensor_parallel_size": 2}, "rollout.parallel.tensor"),
        ({"kv_cache_memory_bytes": 1 << 50}, "VLLM_CPU_KVCACHE_SPACE .* rollout.max_batch_size"),
        ({"quantization": "nonsense"}, "vLLM refuses .*nonsense"),
    ):
        with pytest.raises(ConfigError, match=message):
            make_rollout(config("vllm", engine_kwargs=arguments), model_path=str(folder), device=DEVICE, seed=0)
    with pytest.raises(ConfigError, match="rollout_backend is 'vllm' on cuda"):
        make_rollout(config("vllm"), model_path=str(folder), device="cuda", seed=0)


def test_memory_that_does_not_suffice_names_the_knobs(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"rollout.max_batch_size \(1099511627776\)"):
        make_rollout(config("hf", max_batch_size=1 << 40), model_path=str(folder), device=DEVICE, seed=0)


def test_end_tokens_of_all_three_places(tmp_path: Path) -> None:
    model = save_model(tmp_path)
    transformers.GenerationConfig(eos_token_id=[7, 8]).save_pretrained(tmp_path)
    tokenizer = OmegaConf.create({"eos_token_id": 9})
    assert end_tokens(str(tmp_path), model.config, tokenizer) == {END, 7, 8, 9}


class _Layer:
    def __init__(self, keys: torch.Tensor) -> None:
        self.keys, self.values = keys, -keys


def test_cache_rows_come_and_go() -> None:
    """Against lists: what a row holds stays its own through growing, moving and other rows' leaving."""
    rng = random.Random(0)
    store, mine = KVCache(9), list[list[float]]()
    counter = 0.0
    for _ in range(400):
        action = rng.random()
        if action < 0.1 and len(mine) < 6:
            lengths = [rng.randint(1, 12) for _ in range(rng.randint(1, 3))]
            given = torch.arange(counter, counter + sum(lengths) + 2)  # some behind the last, as tiles are filled up
            held = given[: sum(lengths)].split(lengths)
            counter += len(given)
            store.append(
                [_Layer(given[None, None, :, None].expand(1, 2, -1, 3))],
                lengths,
                range(len(lengths)),
                [0] * len(lengths),
            )
            mine += [values.tolist() for values in held]
        elif action < 0.25 and mine:
            leaving = sorted(rng.sample(range(len(mine)), rng.randint(1, len(mine))))
            for come, to in store.drop(leaving):
                mine[to] = mine[come]
            del mine[len(mine) - len(leaving) :]
        elif mine:
            store.reserve()
            for row, held in enumerate(mine):
                store.keys[0][row, :, store.length[row]], store.values[0][row, :, store.length[row]] = counter, -counter
                held.append(counter)
                counter += 1
            store.length[: store.rows] += 1
        assert store.rows == len(mine)
        for row, held in enumerate(mine):
            columns = slice(0, int(store.length[row]))
            assert store.keys[0][row, 1, columns, 2].tolist() == held
            assert store.values[0][row, 0, columns, 0].tolist() == [-value for value in held]


# --- a teacher that an engine computes


def answers(seed: int = 0) -> TokenBatch:
    """Prompts of different lengths; turns of the model with what others wrote between them; one that is not trained on, one of
    a single token, and one in which the model has the last word but one."""
    rng = random.Random(seed)
    turns = [[(3, False), (4, True)], [(20, False), (7, True), (5, False), (9, True)], [(12, False)], [(1, True)],
             [(60, False), (8, True), (2, False), (30, True), (6, False)], [(1, False), (1, True)]]  # fmt: skip
    masks = [[mine for length, mine in sample for _ in range(length)] for sample in turns]
    return TokenBatch.from_sequences([[rng.randrange(3, VOCABULARY - 4) for _ in mask] for mask in masks], masks)


def teacher_of(folder: Path, student: Path, mode: str, **teacher: Any) -> Any:
    """A run's configuration, at a temperature of its own."""
    cfg = default_section(GrpoConfig)
    cfg.actor.model.model_path, cfg.teacher.model.model_path = str(student), str(folder)
    cfg.algorithm.distillation.mode, cfg.algorithm.distillation.topk = mode, 8
    cfg.rollout.temperature, cfg.teacher.max_tokens_per_micro_batch = 0.7, 240
    return OmegaConf.merge(cfg, {"teacher": teacher})


@pytest.mark.parametrize("mode", ["sampled", "topk"])
def test_a_teacher_in_vllm_says_what_it_says_in_transformers(mode: str, folder: Path, tmp_path: Path) -> None:
    """At a temperature, which vLLM gives to no prompt; of a vocabulary that is filled up to more than the student's; several
    samples in a pass, and one in several."""
    need_extra("vllm")
    transformers.AutoConfig.from_pretrained(folder, vocab_size=VOCABULARY - 3).save_pretrained(tmp_path)
    device, batch = torch.device(DEVICE), answers()
    engine = {
        "rollout_backend": "vllm",
        "engine_kwargs": {"max_num_batched_tokens": 64},
        "max_batch_size": 4,
        "max_model_len": 106,
    }
    said = []
    for teacher in ({}, engine):
        cfg = teacher_of(folder, tmp_path, mode, **teacher)
        group = scoring_groups(cfg)["teacher"]
        scorer = make_scorer(cfg, device, group)
        scorer.offload()
        scorer.reload()
        said.append([
            values_of(scorer.score, split_micro_batches(part, group.max_tokens), part, "the teacher").cpu()
            for part in (batch, answers(1))
        ])  # fmt: skip
    with pytest.raises(
        ConfigError, match=r"a sequence has 107 tokens, and this engine reads at most 106 \(teacher.max_model_l"
    ):
        scorer.score(TokenBatch.from_sequences([[5] * 107], [[True] * 107]))
    scorer.close()
    for part, mine, theirs in zip((batch, answers(1)), *said, strict=True):
        assert mine.shape == ((batch.tokens, 9, 2) if mode == "topk" else (batch.tokens,))
        if mode == "sampled":  # vLLM says something of the prompts, too
            mine, theirs = mine[part.mask], theirs[part.mask]
        torch.testing.assert_close(theirs[..., 0] if mode == "topk" else theirs, mine[..., 0] if mode == "topk" else mine,
                                   rtol=0, atol=TOLERANCE)  # fmt: skip
        if mode == "topk":
            assert torch.equal(theirs[..., 1], mine[..., 1]) and mine[..., 1].max() < VOCABULARY - 3
