"""Forward passes over the running rows: a row's logits are those of the model, bit for bit the same in any batch."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from tests.extras import need_extra

need_extra("llm")

import torch
from torch import nn

from rlhpc.language.engines.batch_invariance import DecodingLinear
from rlhpc.language.engines.hf_forward import Forward
from rlhpc.language.hugging_face import transformers
from rlhpc.language.models.tiny import make_tiny_model

PROMPTS = [[5, 9, 3], [7, 7, 1, 2, 8, 4, 6], [11], [3, 5, 8, 13, 2]]
TOKENS = torch.tensor([[4, 6, 2, 9], [1, 3, 5, 7]])


@pytest.fixture(scope="module")
def model(causal: Path) -> Any:
    module = transformers().AutoModelForCausalLM.from_pretrained(causal, attn_implementation="sdpa")
    return module.eval().requires_grad_(False)


def make_forward(model: Any, max_rows: int) -> Forward:
    return Forward(copy.deepcopy(model), torch.device("cpu"), max_rows, context=48, vocabulary=model.config.vocab_size)


@torch.inference_mode()
def run(forward: Forward, prompts: list[list[int]], tokens: torch.Tensor) -> list[torch.Tensor]:
    """Returns the logits behind prompts, and behind each further token of each."""
    logits = [forward.prefill(prompts, range(len(prompts)))]
    logits += [forward.decode(step) for step in tokens]
    forward.free()
    return logits


def test_logits_are_those_of_the_model(model: Any) -> None:
    forward = make_forward(model, max_rows=8)
    assert forward.is_batched
    logits = run(forward, PROMPTS, TOKENS)
    for row, prompt in enumerate(PROMPTS):
        ids = torch.tensor([[*prompt, *TOKENS[:, row].tolist()]])
        expected = model(input_ids=ids).logits[0, len(prompt) - 1 :]
        torch.testing.assert_close(torch.stack([step[row] for step in logits]), expected, rtol=1e-4, atol=1e-5)


def test_a_row_has_the_same_logits_alone_and_in_a_batch_of_any_size(model: Any) -> None:
    expected = run(make_forward(model, max_rows=8), PROMPTS, TOKENS)
    for row, prompt in enumerate(PROMPTS):
        logits = run(make_forward(model, max_rows=64), [prompt], TOKENS[:, row : row + 1])
        assert all(
            torch.equal(step[0], step_expected[row]) for step, step_expected in zip(logits, expected, strict=True)
        )


@pytest.mark.parametrize("hidden", [64, 128, 256, 512])
def test_rows_of_wider_models_are_computed_together(tmp_path: Path, hidden: int) -> None:
    """Libraries choose the order of a product's terms by its rows and its width."""
    make_tiny_model(tmp_path, hidden=hidden, layers=1, heads=2, context=64)
    module = transformers().AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="sdpa")
    assert make_forward(module.eval().requires_grad_(False), max_rows=8).is_batched


def test_rows_of_one_prompt_share_its_prefill(model: Any) -> None:
    forward = make_forward(model, max_rows=8)
    with torch.inference_mode():
        forward.prefill(PROMPTS[:2], [0, 0, 1])
        logits = forward.decode(torch.tensor([4, 4, 6]))
    assert torch.equal(logits[0], logits[1]) and not torch.equal(logits[0], logits[2])


def test_linear_layers_are_replaced_and_keep_their_names_and_weights(model: Any) -> None:
    forward = make_forward(model, max_rows=8)
    layers = [module for module in forward._model.modules() if isinstance(module, nn.Linear)]
    assert layers and all(type(layer) is DecodingLinear for layer in layers)
    state_dict = forward._model.state_dict()
    assert list(state_dict) == list(model.state_dict())
    assert all(torch.equal(tensor, state_dict[name]) for name, tensor in model.state_dict().items())


def test_rows_are_probed_once_together_and_once_one_by_one_if_need_be(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    probed_rows, prefill = list[int](), Forward.prefill

    def count_rows(self: Forward, sequences: Any, *args: Any) -> torch.Tensor:
        probed_rows.append(len(sequences))
        return prefill(self, sequences, *args)

    monkeypatch.setattr(Forward, "prefill", count_rows)
    assert make_forward(model, max_rows=8).is_batched
    assert probed_rows == [37, 1, 1]  # two rows again alone, whose bits are compared
    probed_rows.clear()
    verdicts = iter([False, True])
    monkeypatch.setattr("rlhpc.language.engines.hf_forward.agrees", lambda *_: next(verdicts))
    assert not make_forward(model, max_rows=8).is_batched
    assert probed_rows == [37, 2]


def test_a_model_whose_positions_depend_on_the_longest_sequence_is_computed_row_by_row(model: Any) -> None:
    changed = copy.deepcopy(model)
    changed.config.rope_parameters = {**changed.config.rope_parameters, "rope_type": "dynamic",
                                      "original_max_position_embeddings": 8}  # fmt: skip
    forward = make_forward(changed, max_rows=8)
    assert not forward.is_batched
    logits = run(forward, PROMPTS, TOKENS)
    for row, prompt in enumerate(PROMPTS):
        alone = run(forward, [prompt], TOKENS[:, row : row + 1])
        assert all(torch.equal(step[0], batch_step[row]) for step, batch_step in zip(alone, logits, strict=True))
