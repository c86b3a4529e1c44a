"""Models that say one number about each token: the numbers of transformers' classifiers, and where they are taken."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.extras import need_extra

need_extra("llm")

from rlhpc.language.config.models import LanguageModelConfig
from rlhpc.language.models.loading import export_model
from rlhpc.language.models.packing import pack
from rlhpc.language.models.value_head import last_values, load_scalar_model, token_values
from rlhpc.runtime.errors import ConfigError
from tests.unit.language.models.scalar_models import SAMPLES, batch_of


def saved(module: torch.nn.Module, folder: Path, path: Path) -> Path:
    export_model(folder, module.state_dict().items(), LanguageModelConfig(model_path=str(path)), load=load_scalar_model)
    return folder


def test_it_is_a_sequence_classifier_of_transformers(causal: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

    module = load_scalar_model(LanguageModelConfig(model_path=str(causal)), seed=3).eval()
    batch = batch_of(SAMPLES)
    with torch.no_grad():
        values = token_values(module, batch)
        folder = saved(module, tmp_path / "saved", causal)
        theirs = AutoModelForSequenceClassification.from_pretrained(folder).eval()
        found = theirs(input_ids=batch.padded(batch.ids, 0), attention_mask=batch.attended()).logits
        hidden = AutoModelForCausalLM.from_pretrained(causal).model(torch.tensor([SAMPLES[0]])).last_hidden_state
    torch.testing.assert_close(last_values(values, batch), found[:, 0])
    torch.testing.assert_close(values[:5], (hidden @ module.score.weight.T)[0, :, 0])
    assert theirs.config.num_labels == 1 and theirs.config.pad_token_id == 0
    assert AutoTokenizer.from_pretrained(folder).pad_token_id == 0
    again = load_scalar_model(LanguageModelConfig(model_path=str(folder)), seed=4).eval()
    with torch.no_grad():
        assert torch.equal(token_values(again, batch), values)  # its own head, not one of another seed


def test_a_new_head_depends_on_the_seed_alone(causal: Path) -> None:
    section = LanguageModelConfig(model_path=str(causal))
    torch.manual_seed(1)
    first = load_scalar_model(section, seed=5).score.weight
    torch.manual_seed(2)
    assert torch.equal(load_scalar_model(section, seed=5).score.weight, first)
    assert not torch.equal(load_scalar_model(section, seed=6).score.weight, first)
    assert first.std().item() == pytest.approx(0.02, rel=0.5)


def test_the_last_token_is_the_last_that_is_no_padding() -> None:
    batch = batch_of([[1, 5, 2], [7, 8, 0, 0], [], [0, 0]])
    assert last_values(torch.arange(9.0) + 10, batch).tolist() == [12, 14, 0, 17]
    assert last_values(torch.arange(9.0), batch_of([[1, 5, 2], [7, 8, 0, 0], [], [0, 0]], pad=2)).tolist() == [
        1,
        6,
        0,
        8,
    ]


def test_a_critic_is_asked_before_the_token_is_read(causal: Path) -> None:
    module = load_scalar_model(LanguageModelConfig(model_path=str(causal))).eval()
    batch = batch_of(SAMPLES)
    with torch.no_grad():
        after, before = token_values(module, batch), token_values(module, batch, per_input=True)
    assert before.tolist() == [0, *after[:4], 0, *after[5:7], 0, *after[8:14], 0]


@pytest.mark.parametrize("packed", [True, False], ids=["rows", "rectangles"])
def test_a_rank_without_tokens_values_none(causal: Path, packed: bool) -> None:
    """It computes with the others, whatever its model reads."""
    module = load_scalar_model(LanguageModelConfig(model_path=str(causal))).eval()
    assert not packed or pack(module)
    nothing = batch_of(SAMPLES).empty_sample()
    for before in (False, True):
        assert token_values(module, nothing, per_input=before).shape == (0,)


def test_the_head_computes_in_float32(causal: Path) -> None:
    module = load_scalar_model(LanguageModelConfig(model_path=str(causal)), dtype=torch.bfloat16)
    assert token_values(module, batch_of(SAMPLES)).dtype is torch.float32


def test_what_has_no_head_for_values_says_so(causal: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification, BertConfig, BertForSequenceClassification

    def refused(path: Path | str, message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            load_scalar_model(LanguageModelConfig(model_path=str(path)), key="critic.model.model_path")

    refused("", r"critic\.model\.model_path is not set")
    refused(tmp_path, r"critic\.model\.model_path=.*no config\.json")
    three = AutoModelForSequenceClassification.from_pretrained(causal, num_labels=3)
    three.save_pretrained(tmp_path / "three")
    refused(tmp_path / "three", "the sequence classifier has 3 labels; one that gives a value has 1")
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    BertForSequenceClassification(BertConfig(vocab_size=32, num_labels=1, **sizes)).save_pretrained(tmp_path / "bert")  # type: ignore[call-arg]
    refused(tmp_path / "bert", "BertForSequenceClassification has no linear head 'score' over a decoder's tokens")
