"""Log-probs and entropies from hidden states, against the whole logits of the same models."""

from __future__ import annotations

import sys

import pytest
import torch

from tests.extras import need_extra

need_extra("llm")

from transformers import AutoModelForCausalLM, CohereConfig, Gemma2Config, GPT2Config, GraniteConfig, LlamaConfig

from rlhpc.config.sections import LoraConfig
from rlhpc.language.models.divergence import FullDivergence, TopKDivergence, top_logprobs
from rlhpc.language.models.logprobs import RowReader, linear_head, logit_rows, token_scores
from rlhpc.language.models.token_batch import TokenBatch
from rlhpc.language.models.value_head import add_value_head
from rlhpc.training.lora import adapters_off, attach_lora
from tests import warm

SMALL = {"vocab_size": 61, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
HEADS = {"num_key_value_heads": 1, "head_dim": 8, "initializer_range": 0.3, "pad_token_id": 0}


def built(kind, **changes):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(kind(**{**SMALL, **HEADS, **changes}))


def with_bias():
    model = built(LlamaConfig)
    model.lm_head.bias = torch.nn.Parameter(torch.randn(61))
    return model


def with_adapter():
    model = attach_lora(built(LlamaConfig), LoraConfig(rank=2, target_modules=["lm_head", "q_proj"]), seed=1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:  # they begin at 0
            torch.nn.init.normal_(parameter)
    return model


MODELS = {
    "untied": lambda: built(LlamaConfig),
    "tied": lambda: built(LlamaConfig, tie_word_embeddings=True),
    "bias": with_bias,
    "adapter": with_adapter,
    "values": lambda: add_value_head(built(LlamaConfig), seed=3),
    "gpt2": lambda: AutoModelForCausalLM.from_config(GPT2Config(vocab_size=61, n_embd=16, n_layer=1, n_head=2)).eval(),
}


@pytest.fixture
def batch():
    torch.manual_seed(5)
    lengths = (9, 5, 1, 7)
    masks = [torch.arange(n) >= n // 3 for n in lengths]
    return TokenBatch.from_sequences([torch.randint(0, 61, (n,)) for n in lengths], masks)


def loss_of(logprobs, entropy, values, weights):
    loss = (logprobs * weights[0]).sum() + (entropy * weights[1]).sum()
    return loss if values is None else loss + (values * weights[0]).sum()


def gradients_of(model, loss):
    model.zero_grad()
    loss.backward()
    return {name: p.grad.double() for name, p in model.named_parameters() if p.grad is not None}


def exactly(model, batch, temperature, weights):
    """Log-probs, entropies and the gradients, by torch's own functions in double precision."""

    def flat(found, shape=(1, 0)):
        return batch.flat(torch.nn.functional.pad(found[:, :-1], shape)).where(batch.mask, 0.0)

    ids = batch.padded(batch.ids)
    said = model.double()(input_ids=ids)
    log_p = torch.log_softmax(said["logits"] / temperature, -1)
    next_ids = torch.roll(ids, -1, 1)[..., None]
    logprobs, entropy = flat(log_p.gather(2, next_ids).squeeze(2)), flat(-(log_p.exp() * log_p).sum(-1))
    values = said.get("token_values")
    values = None if values is None else batch.flat(torch.nn.functional.pad(values[:, :-1], (1, 0)))
    return logprobs, entropy, gradients_of(model, loss_of(logprobs, entropy, values, weights))


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("rows", [1 << 24, 3], ids=["one chunk", "three rows"])
def test_values_and_gradients_are_those_of_whole_logits(kind, temperature, rows, batch, monkeypatch) -> None:
    """And as close to those of double precision as single precision gets."""
    monkeypatch.setattr("rlhpc.language.models.logprobs.chunk_rows", lambda width, **_: rows)
    model, weights = MODELS[kind](), torch.randn(2, batch.tokens)
    assert linear_head(model) is not None
    scores = token_scores(model, batch, temperature, computes_entropy=True)
    gradients = gradients_of(model, loss_of(scores.logprobs, scores.entropy, scores.values, weights))
    assert (scores.logprobs[~batch.mask] == 0).all() and (scores.logprobs != 0).sum() == len(batch.predictors()[0])
    with monkeypatch.context() as patch:
        patch.setattr("rlhpc.language.models.logprobs.linear_head", lambda model: None)
        whole = token_scores(model, batch, temperature, computes_entropy=True)
        by_whole = gradients_of(model, loss_of(whole.logprobs, whole.entropy, whole.values, weights))
    logprobs, entropy, exact = exactly(model, batch, temperature, weights)
    torch.testing.assert_close(scores.logprobs.double(), logprobs, rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(scores.entropy.double(), entropy, rtol=2e-6, atol=2e-6)
    assert gradients.keys() == exact.keys() == by_whole.keys() and len(gradients) > 2
    for name, gradient in exact.items():
        # The keys' bias has no gradient but that of rounding.
        allowed = max(1e-6 * float(gradient.norm()), 1.5 * float((by_whole[name] - gradient).norm()), 1e-6)
        assert float((gradients[name] - gradient).norm()) <= allowed, name


def test_adapters_that_are_off_say_nothing(batch) -> None:
    model = with_adapter()
    with torch.no_grad(), adapters_off(model):
        off = token_scores(model, batch).logprobs
        base = token_scores(built(LlamaConfig), batch).logprobs
    torch.testing.assert_close(off, base)


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        (GraniteConfig, {"logits_scaling": 4.0}),
        (CohereConfig, {"logit_scale": 0.25}),
        (Gemma2Config, {"final_logit_softcapping": 5.0}),
    ],
)
def test_a_model_that_changes_its_heads_result_makes_whole_logits(kind, changes, batch) -> None:
    model = built(kind, **changes).eval()
    assert linear_head(model) is None
    every = torch.log_softmax(model(input_ids=batch.padded(batch.ids)).logits, -1)[:, :-1]
    expected = every.gather(2, batch.padded(batch.ids)[:, 1:, None]).squeeze(2)
    expected = batch.flat(torch.nn.functional.pad(expected, (1, 0))).where(batch.mask, 0.0)
    torch.testing.assert_close(token_scores(model, batch).logprobs, expected)


def test_the_model_is_as_before_and_ordinary_calls_give_logits(batch) -> None:
    model = built(LlamaConfig)
    trunk, head = model.model, model.lm_head
    token_scores(model, batch)
    assert model.model is trunk and model.lm_head is head and "forward" not in vars(head)
    assert model(input_ids=batch.padded(batch.ids)).logits.shape == (4, 9, 61)


def test_a_batch_that_trains_nothing_still_has_a_gradient(batch) -> None:
    model = built(LlamaConfig)
    (0.0 * token_scores(model, batch.empty_sample()).logprobs.sum()).backward()
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


class Distils:
    """Wants the divergence from a teacher: of the whole vocabulary, or of the most likely tokens."""

    def __init__(self, teacher, most: int, beta: float) -> None:
        self.teacher, self.most, self.beta = teacher, most, beta

    def rows(self, batch):
        theirs = logit_rows(self.teacher, batch)
        if not self.most:
            return FullDivergence(theirs, 0.7, self.beta)
        return TopKDivergence(top_logprobs(theirs, batch, self.most, 0.7)[batch.predictors()[0]], 0.7, self.beta)

    def read(self, logits, batch):
        raise AssertionError("rows are read")


@pytest.mark.parametrize("beta", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("most", [0, 5], ids=["full", "top 5"])
@pytest.mark.parametrize("kind", ["tied", "bias", "adapter"])
def test_distillation_reads_hidden_states_as_it_does_whole_logits(kind, most, beta, batch, monkeypatch) -> None:
    """Values and gradients, of log-probs and entropies beside it, too; in chunks of three rows."""
    monkeypatch.setattr("rlhpc.language.models.logprobs.chunk_rows", lambda width, **_: 3)
    model, teacher, weights = MODELS[kind](), built(LlamaConfig, hidden_size=24), torch.randn(3, batch.tokens)

    def step():
        scores = token_scores(model, batch, 0.7, computes_entropy=True, reading=Distils(teacher, most, beta))
        loss = loss_of(scores.logprobs, scores.entropy, None, weights) + (scores.read * weights[2]).sum()
        return scores.read.detach(), gradients_of(model, loss)

    read, gradients = step()
    monkeypatch.setattr("rlhpc.language.models.logprobs.linear_head", lambda model: None)
    by_whole, expected = step()
    assert read[batch.predictors()[0]].min() > 1e-3 and not read[~batch.mask].any()
    torch.testing.assert_close(read, by_whole, rtol=1e-6, atol=1e-6)
    for name, gradient in expected.items():
        # A layer with an adapter rounds a gradient in another order; so do processors, by up to 1.2e-6 of it.
        allowed = (3e-6 if kind == "adapter" else 2e-6) * max(float(gradient.norm()), 1.0)
        assert float((gradients[name] - gradient).norm()) <= allowed, name


ASKS = """
import resource, torch
from transformers import AutoModelForCausalLM, LlamaConfig
from rlhpc.language.models.token_batch import TokenBatch
from rlhpc.language.models.divergence import FullDivergence
from rlhpc.language.models.logprobs import RowReader, logit_rows, token_scores
torch.set_num_threads(1)
model = AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=32768, hidden_size=16, intermediate_size=16,
    num_hidden_layers=1, num_attention_heads=1, max_position_embeddings=512))
class Distils:
    def rows(self, batch):
        return FullDivergence(logit_rows(model, batch))
def step(samples):
    batch = TokenBatch.from_sequences([torch.arange(512)] * samples, [torch.ones(512, dtype=torch.bool)] * samples)
    scores = token_scores(model, batch, computes_entropy=True, reading=Distils() if DISTILS else None)
    (scores.logprobs.sum() + scores.entropy.sum() + (scores.read.sum() if DISTILS else 0.0)).backward()
step(1)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
step(8)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.long
@pytest.mark.parametrize("distils", [False, True], ids=["", "beside a teacher"])
def test_no_memory_of_the_size_of_the_logits_is_taken(distils: bool) -> None:
    """Whole logits of 4096 tokens are 512 MiB, and their gradient is as much again."""
    told = warm.run([sys.executable, "-c", f"DISTILS = {distils}\n{ASKS}"], check=True, capture_output=True, text=True)
    assert int(told.stdout) / 1024 < 384


def test_a_reader_may_still_have_the_former_names() -> None:
    with pytest.warns(FutureWarning, match=r"Doubled\.say is now values"):

        class Doubled(RowReader):
            divided = True

            def say(self, logits: torch.Tensor, part: slice) -> torch.Tensor:
                return 2 * logits[:, :1]

            def gradient(self, logits: torch.Tensor, part: slice, grad: torch.Tensor) -> torch.Tensor:
                return grad.expand_as(logits)

    reader: RowReader = Doubled()
    assert reader.supports_shards and float(reader.values(torch.ones(1, 3), slice(0, 1))) == 2.0
