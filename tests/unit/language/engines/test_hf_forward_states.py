"""Recurrent states of the hf engine's rows, against the trainer's log-probs, in each family that has such states."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.extras import need_extra

need_extra("llm")

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from rlhpc import Worker
from rlhpc.config.typed import default_section
from rlhpc.language.config.run import GrpoConfig
from rlhpc.language.engines import make_rollout
from rlhpc.language.engines.base import Completion, Request, SamplingParams
from rlhpc.language.engines.hf import HFRollout
from rlhpc.language.engines.hf_forward import KVCache
from rlhpc.language.models.token_batch import TokenBatch
from rlhpc.language.training.trainer import TokenTrainer
from rlhpc.language.training.weight_sync import compare_probe_samples, sample_probe
from rlhpc.runtime.errors import ConfigError
from tests.unit.language.models.test_packing_families import LEAKING, MAMBA, SMALL

HYBRIDS = {
    **{name: sizes for name, sizes in LEAKING.items() if name not in ("gpt_oss", "minimax") and "deepseek" not in name},
    "bamba": {**MAMBA, "attn_layer_indices": [1, 3]},
}
del HYBRIDS["glm_moe_dsa"]
TOLERANCE = 2e-5
#: Prompts of more and of fewer tokens than a convolution reads, and than a chunk of a scan has.
LENGTHS = (1, 7, 70, 2, 3, 66, 12)


def save_model(folder: Path, family: str) -> Path:
    torch.manual_seed(0)
    config = CONFIG_MAPPING[family](**{**SMALL, **HYBRIDS.get(family, {})})
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder


def config_of(folder: Path) -> GrpoConfig:
    cfg = default_section(GrpoConfig)
    cfg.actor.model.model_path, cfg.actor.model.dtype = str(folder), "float32"
    cfg.rollout.max_batch_size = 4
    return cfg


def engine_of(folder: Path) -> HFRollout:
    engine: Any = make_rollout(config_of(folder), model_path=str(folder), device="cpu", seed=0)
    return engine  # type: ignore[no-any-return]


@pytest.fixture(params=list(HYBRIDS), scope="module")
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("family") / request.param, request.param)


@pytest.fixture(scope="module")
def trainer(folder: Path) -> TokenTrainer:
    return TokenTrainer(config_of(folder), Worker())


@pytest.fixture
def engine(folder: Path) -> HFRollout:
    return engine_of(folder)


def requests_of(lengths: Sequence[int] = LENGTHS) -> list[Request]:
    generator = torch.Generator().manual_seed(7)
    return [
        Request(
            number,
            tuple(torch.randint(3, 64, (length,), generator=generator).tolist()),
            SamplingParams(max_new_tokens=6 + 5 * (number % 3)),
            seed=number,
        )
        for number, length in enumerate(lengths)
    ]


def trained_logprobs(trainer: TokenTrainer, requests: Sequence[Request], completions: Sequence[Completion]) -> Any:
    """Returns the trainer's log-probs of the completions' tokens."""
    texts = [
        torch.tensor([*request.prompt_ids, *completion.token_ids])
        for request, completion in zip(requests, completions, strict=True)
    ]
    masks = [torch.arange(len(text)) >= len(request.prompt_ids) for text, request in zip(texts, requests, strict=True)]
    batch = TokenBatch.from_sequences(texts, masks)
    return trainer.forward(batch).logprobs[batch.mask]


def assert_exact(trainer: TokenTrainer, requests: Sequence[Request], completions: Sequence[Completion]) -> None:
    drawn = torch.tensor([logprob for completion in completions for logprob in completion.logprobs])
    torch.testing.assert_close(drawn, trained_logprobs(trainer, requests, completions), rtol=0, atol=TOLERANCE)


def test_rows_of_different_lengths_come_and_go_with_the_trainers_logprobs(
    engine: HFRollout, trainer: TokenTrainer
) -> None:
    """Seven requests in four rows; and each request has the same numbers, bit for bit, alone."""
    requests = requests_of()
    completions = engine.generate(requests)
    assert_exact(trainer, requests, completions)
    assert engine._forward.is_batched and not trainer.packed
    for number in (0, 5):
        (alone,) = engine.generate([requests[number]])
        assert (alone.token_ids, alone.logprobs) == (completions[number].token_ids, completions[number].logprobs)


def test_an_aborted_response_is_continued_from_its_tokens(engine: HFRollout, trainer: TokenTrainer) -> None:
    requests = requests_of(LENGTHS[:4])
    engine.add(requests)
    parts = [completion for _ in range(3) for completion in engine.step()]
    assert len(parts) < len(requests)
    parts = sorted([*parts, *engine.abort()], key=lambda completion: completion.id)
    assert_exact(trainer, requests, parts)
    continued = [
        Request(request.id, (*request.prompt_ids, *part.token_ids), request.sampling, request.seed)
        for request, part in zip(requests, parts, strict=True)
    ]
    assert_exact(trainer, continued, engine.generate(continued))


def test_states_are_recomputed_after_an_update_amid_responses(folder: Path, engine: HFRollout) -> None:
    trainer = TokenTrainer(config_of(folder), Worker())
    requests = requests_of(LENGTHS[:4])
    engine.add(requests)
    completions = [completion for _ in range(3) for completion in engine.step()]
    with torch.no_grad():
        for parameter in trainer.backend.module.parameters():
            parameter.mul_(1.1).add_(0.01)
    engine.update_weights(1, [(name, p.detach().clone()) for name, p in trainer.backend.module.named_parameters()])
    while len(completions) < len(requests):
        completions += engine.step()
    completions.sort(key=lambda completion: completion.id)
    drawn = torch.tensor([logprob for completion in completions for logprob in completion.logprobs])
    is_new = torch.tensor([version for completion in completions for version in completion.versions]) == 1
    assert is_new.any() and not is_new.all()
    expected = trained_logprobs(trainer, requests, completions)
    torch.testing.assert_close(drawn[is_new], expected[is_new], rtol=0, atol=TOLERANCE)


# --- states of one row that reach another


def probe(engine: HFRollout, trainer: TokenTrainer) -> float:
    """Compares engine and trainer as at the start of a run."""
    samples = sample_probe(engine, 64, 40, 40, 90, 0, 0)
    scores = list[Any]()
    for sample in samples:
        text = torch.tensor(sample.token_ids)
        batch = TokenBatch.from_sequences([text], [torch.arange(len(text)) >= 1])
        scores.append((trainer.forward(batch).logprobs[batch.mask].tolist(), 0.0))
    return compare_probe_samples(samples, scores, None, {"float32"}, "cpu", "the engine hf")


def test_a_state_that_stays_behind_when_its_row_moves_is_refused_at_the_start(
    engine: HFRollout, trainer: TokenTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert probe(engine, trainer) < TOLERANCE
    drop = KVCache.drop

    def drop_without_states(self: KVCache, rows: Sequence[int]) -> Any:
        states, self.states = self.states, []
        moves = drop(self, rows)
        self.states = states
        return moves

    monkeypatch.setattr(KVCache, "drop", drop_without_states)
    with pytest.raises(ConfigError, match="log-probs of tokens that it drew differ from the trainer's"):
        probe(engine, trainer)


def test_rows_that_begin_with_the_state_of_another_are_refused_when_the_engine_is_made(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    append = KVCache._append_states

    def append_zeros(self: KVCache, layers: Any, first_row: int, end_row: int) -> None:
        append(self, layers, first_row, end_row)
        for states in self.states:
            for tensor in states.values():
                tensor[first_row:end_row] = tensor[:1].clone()

    monkeypatch.setattr(KVCache, "_append_states", append_zeros)
    with pytest.raises(
        ConfigError, match=r"does not compute texts token by token as in one pass over each \(other numbers\)"
    ):
        engine_of(folder)


@pytest.mark.parametrize(
    ("family", "sizes", "reason"),
    [
        ("recurrent_gemma", {"lru_width": 32}, "other numbers"),
        ("minimax", LEAKING["minimax"], "ValueError: MiniMax uses cache of its own .*"),
    ],
)
def test_a_family_that_keeps_states_elsewhere_is_refused_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, sizes: dict[str, Any], reason: str
) -> None:
    """One has them in its modules, where rows share them, and one in a cache class of its own."""
    monkeypatch.setitem(HYBRIDS, family, sizes)
    with pytest.raises(ConfigError, match=rf"a {family} model does not compute .* \({reason}\), so the engine would"):
        engine_of(save_model(tmp_path, family))
