"""Compiled transformer layers (`actor.compile: blocks`) against layers that are not compiled."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

from tests.extras import need_extra

need_extra("llm")

import torch._dynamo
from torch._dynamo.utils import counters
from transformers import AutoModelForCausalLM, PreTrainedConfig

from rlhpc import Worker
from rlhpc.language.config.run import GrpoConfig
from rlhpc.language.models import packing
from rlhpc.language.models.logprobs import TokenScores
from rlhpc.language.models.token_batch import TokenBatch
from rlhpc.language.training.trainer import TokenTrainer
from rlhpc.runtime import torch_adapter
from rlhpc.runtime.errors import ConfigError
from rlhpc.training.blueprint import compile_layers
from tests.unit.language.models.test_packing import EXPERTS, NOT_READ, READ, SMALL, WINDOW

DENSE = [name for name in READ if not {"moe", "mixtral", "v3"} & set(name.split())]
#: Families that each run takes: the commonest layer, one with windows and norms of its own, one with joined projections.
USUAL = ("llama", "gemma 3", "phi 3")


@pytest.fixture(autouse=True)
def graphs_are_counted_anew(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Graphs are traced and differentiated as ever, and run by PyTorch itself: code takes half a minute to be made."""
    monkeypatch.setattr(torch_adapter, "_COMPILER", "aot_eager")
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def saved(folder: Path, config_class: type[PreTrainedConfig], changes: dict[str, Any]) -> Path:
    torch.manual_seed(0)
    options = changes if "n_embd" in changes else {**SMALL, **changes}
    AutoModelForCausalLM.from_config(config_class(**options)).save_pretrained(folder)
    return folder


def trainer_of(model: Path, **changes: Any) -> TokenTrainer:
    cfg = OmegaConf.structured(GrpoConfig)
    cfg.actor.model.model_path = str(model)
    for key, value in changes.items():
        OmegaConf.update(cfg.actor, key.replace("__", "."), value)
    return TokenTrainer(cfg, Worker(), has_values=cfg.actor.model.value_head)


def batch_of(seed: int, count: int, device: str = "cpu") -> TokenBatch:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 24, (count,), generator=generator).tolist()
    ids = [torch.randint(1, 61, (length,), generator=generator) for length in lengths]
    return TokenBatch.from_sequences(ids, [torch.ones(length, dtype=torch.bool) for length in lengths])


def loss(scores: TokenScores, batch: TokenBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    weights = torch.sin(torch.arange(batch.tokens) + batch.ids)
    total = (weights * scores.logprobs).sum() / 100
    if scores.values is not None:
        total = total + (scores.values - weights).square().sum() / 100
    return total, {"loss": total}


def step(trainer: TokenTrainer, batches: list[TokenBatch]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Losses and gradients of some micro-batches, of which one has no token to train."""
    metrics = trainer.forward_backward([*batches, batches[0].empty_sample()], loss)
    gradients = {
        name: parameter.grad.clone()
        for name, parameter in trainer.backend.module.named_parameters()
        if parameter.grad is not None
    }
    return torch.stack([each["loss"] for each in metrics]), gradients


def assert_equal(found: tuple[torch.Tensor, dict[str, torch.Tensor]], expected: Any) -> None:
    torch.testing.assert_close(found[0], expected[0], rtol=1e-5, atol=1e-6)
    assert found[1].keys() == expected[1].keys() and found[1]
    largest = max(float(gradient.abs().max()) for gradient in expected[1].values())
    for name, gradient in found[1].items():
        torch.testing.assert_close(gradient, expected[1][name], rtol=1e-5, atol=1e-5 * largest, msg=name)


def compile_blocks(trainer: TokenTrainer) -> None:
    """Compiles the layers of a trainer's model as `actor.compile=blocks` does."""
    model = trainer.backend.module
    compile_layers(model, trainer.blueprint.decoder_layers(model), "actor.compile")


@pytest.mark.parametrize(
    "changes",
    [
        {},
        pytest.param({"model__gradient_checkpointing": True}, marks=pytest.mark.long),
        pytest.param({"lora__rank": 2}, marks=pytest.mark.long),
        {"lora__rank": 2, "model__gradient_checkpointing": True},
        {"model__value_head": True},
        {"use_remove_padding": False},
        pytest.param(
            {"use_remove_padding": False, "lora__rank": 2, "model__gradient_checkpointing": True},
            marks=pytest.mark.long,
        ),
        pytest.param({"use_remove_padding": False, "model__value_head": True}, marks=pytest.mark.long),
    ],
    ids=lambda changes: ", ".join(changes) or "all weights",
)
def test_gradients_are_those_of_plain_layers_by_few_graphs(tmp_path: Path, changes: dict[str, Any]) -> None:
    """Micro-batches of many lengths and numbers of samples: one graph to train, one to score, and no break."""
    folder = saved(tmp_path / "model", *READ["qwen3"])
    plain, compiled = trainer_of(folder, **changes), trainer_of(folder, compile="blocks", **changes)
    for first in range(0, 20 if changes else 50, 10):
        batches = [batch_of(seed, 1 + seed % 7) for seed in range(first, first + 10)]
        assert_equal(step(compiled, batches), step(plain, batches))
        scored = [trainer.forward(batches[0]).logprobs for trainer in (compiled, plain)]
        torch.testing.assert_close(*scored, rtol=1e-5, atol=1e-5)
        for trainer in (compiled, plain):
            trainer.optimizer_step(1e-3)
    assert not counters["graph_break"]
    assert 2 <= counters["stats"]["unique_graphs"] <= 3


@pytest.mark.parametrize("packed", [True, False], ids=["rows", "rectangles"])
def test_lengths_below_and_above_a_window_need_no_graphs_of_their_own(tmp_path: Path, packed: bool) -> None:
    """50 micro-batches, of which a third is shorter than the window, so that attention needs no mask: each equals plain
    layers, and all of them take one graph to train and one to score."""
    folder = saved(tmp_path / "model", READ["mistral, window"][0], {"sliding_window": 9})
    changes = {"use_remove_padding": packed}
    plain, compiled = trainer_of(folder, **changes), trainer_of(folder, compile="blocks", **changes)
    for number in range(50):
        longest = (4, 8, 9, 10, 23, 7)[number % 6]
        lengths = [longest, *range(1, longest, 3)][: 1 + number % 4]
        ids = [(torch.arange(length) * (number + 2) + number) % 60 + 1 for length in lengths]
        batch = TokenBatch.from_sequences(ids, [torch.ones(length, dtype=torch.bool) for length in lengths])
        assert_equal(step(compiled, [batch]), step(plain, [batch]))
        if number % 5 == 0:
            scored = [trainer.forward(batch).logprobs for trainer in (compiled, plain)]
            torch.testing.assert_close(*scored, rtol=1e-5, atol=1e-5)
    assert not counters["graph_break"]
    assert 2 <= counters["stats"]["unique_graphs"] <= 3


#: A window in every other layer; the first layer's input needs no gradient with LoRA.
TWO_KINDS = {
    "sliding_window": 9, "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}  # fmt: skip


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"lora__rank": 2, "model__gradient_checkpointing": True},
        pytest.param({"use_remove_padding": False}, marks=pytest.mark.long),
        pytest.param({"lora__rank": 2}, marks=pytest.mark.long),
        pytest.param({"use_remove_padding": False, "model__gradient_checkpointing": True}, marks=pytest.mark.long),
    ],
    ids=lambda changes: ", ".join(changes) or "all weights",
)
def test_layers_of_two_kinds_need_a_graph_of_each_kind(tmp_path: Path, changes: dict[str, Any]) -> None:
    """Micro-batches of many lengths and numbers of samples, trained and scored: scoring takes the graphs of training."""
    folder = saved(tmp_path / "model", READ["gemma 3"][0], TWO_KINDS)
    plain, compiled = trainer_of(folder, **changes), trainer_of(folder, compile="blocks", **changes)
    for first in range(0, 20 if changes else 50, 10):
        batches = [batch_of(seed, 1 + seed % 7) for seed in range(first, first + 10)]
        scored = [trainer.forward(batches[0]).logprobs for trainer in (compiled, plain)]
        torch.testing.assert_close(*scored, rtol=1e-5, atol=1e-5)
        assert not scored[0].requires_grad
        assert_equal(step(compiled, batches), step(plain, batches))
        for trainer in (compiled, plain):
            trainer.optimizer_step(1e-3)
    assert counters["stats"]["unique_graphs"] == 2 and not counters["graph_break"]


def test_layers_of_two_kinds_with_dropout_score_without_it(tmp_path: Path) -> None:
    """Training and scoring then compute different things, so that scoring has graphs of its own."""
    dropout = {"attention_dropout": 0.5, "sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"]}
    folder = saved(tmp_path / "model", READ["gemma 3"][0], dropout)
    trainers = []
    for section in ("off", "blocks"):
        cfg = OmegaConf.structured(GrpoConfig)
        cfg.actor.model.model_path, cfg.actor.compile = str(folder), section
        trainers.append(TokenTrainer(cfg, Worker(), has_values=False, has_dropout=True))
    plain, compiled = trainers
    batch = batch_of(0, 3)
    scored = [trainer.forward(batch).logprobs for trainer in (compiled, plain)]
    torch.testing.assert_close(*scored, rtol=1e-5, atol=1e-5)
    losses = [step(compiled, [batch])[0][0] for _ in range(2)]
    assert losses[0] != losses[1]
    assert not counters["graph_break"]


def test_layers_without_a_window_get_no_mask(tmp_path: Path) -> None:
    """With windows in every other layer, rectangles of any length."""
    folder = saved(tmp_path / "model", READ["gemma 3"][0], TWO_KINDS)
    plain, compiled = (
        trainer_of(folder, use_remove_padding=False, **changes) for changes in ({}, {"compile": "blocks"})
    )
    masks = list[bool]()
    for layer in compiled.blueprint.decoder_layers(compiled.backend.module):
        layer.register_forward_pre_hook(
            lambda module, inputs, options: masks.append(options["attention_mask"] is not None), with_kwargs=True
        )
    for number, longest in enumerate((4, 23, 8, 10)):
        ids = [torch.arange(1, longest + 1 - sample) for sample in range(1 + number % 3)]
        batch = TokenBatch.from_sequences(ids, [torch.ones(len(sample), dtype=torch.bool) for sample in ids])
        assert_equal(step(compiled, [batch]), step(plain, [batch]))
    assert masks and masks == [True, False, True] * (len(masks) // 3)
    assert counters["stats"]["unique_graphs"] == 2 and not counters["graph_break"]


@pytest.mark.parametrize(
    "family", [name if name in USUAL else pytest.param(name, marks=pytest.mark.long) for name in DENSE]
)
def test_families_whose_layers_are_one_graph(tmp_path: Path, family: str) -> None:
    folder = saved(tmp_path / "model", *READ[family])
    plain, compiled = trainer_of(folder), trainer_of(folder, compile="blocks")
    batches = [batch_of(seed, 1 + seed) for seed in range(3)]
    assert_equal(step(compiled, batches), step(plain, batches))
    assert counters["stats"]["unique_graphs"] and not counters["graph_break"]


@pytest.mark.parametrize(
    "family",
    [
        name if name == "gemma 3" else pytest.param(name, marks=pytest.mark.long)
        for name in (*DENSE, "bound on logits", "longrope", "dynamic rope")
    ],
)
def test_a_rectangle_of_one_row_needs_no_graph_of_its_own(tmp_path: Path, family: str) -> None:
    """Also with masks, which layers with windows have, and for the families that read nothing but rectangles."""
    folder = saved(tmp_path / "model", *{**READ, **NOT_READ}[family])
    plain, compiled = (
        trainer_of(folder, use_remove_padding=False, **changes) for changes in ({}, {"compile": "blocks"})
    )
    graphs = set[int]()
    for count in (1, 3, 1):
        ids = [torch.arange(1, 11 + sample) for sample in range(count)]
        batch = TokenBatch.from_sequences(ids, [torch.ones(len(sample), dtype=torch.bool) for sample in ids])
        metrics = [trainer.forward_backward([batch], loss)[0]["loss"] for trainer in (compiled, plain)]
        torch.testing.assert_close(*metrics, rtol=1e-5, atol=1e-6)
        graphs.add(counters["stats"]["unique_graphs"])
    assert len(graphs) == 1 and not counters["graph_break"]


@pytest.mark.parametrize("packed", [True, pytest.param(False, marks=pytest.mark.long)], ids=["rows", "rectangles"])
def test_the_code_that_inductor_makes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, packed: bool) -> None:
    monkeypatch.setattr(torch_adapter, "_COMPILER", "inductor")
    folder = saved(tmp_path / "model", *READ["llama"])
    changes = {"use_remove_padding": packed}
    plain, compiled = trainer_of(folder, **changes), trainer_of(folder, compile="blocks", **changes)
    for count in (3, 1):
        assert_equal(step(compiled, [batch_of(count, count)]), step(plain, [batch_of(count, count)]))


@pytest.mark.parametrize("window", [{}, WINDOW], ids=["all tokens", "window"])
def test_the_kernel_for_packed_rows_is_in_the_graph(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, window: Any
) -> None:
    """What a GPU would run, traced on a CPU, which has no such kernel: one graph for any number of samples."""
    graphs: list[torch.fx.GraphModule] = []

    class Traced(Exception):
        pass

    def record(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)

        def run(*inputs: Any) -> Any:
            raise Traced

        return run

    folder = saved(tmp_path / "model", READ["mistral, window"][0], {"sliding_window": None, **window})
    trainer = trainer_of(folder, model__dtype="bfloat16")
    monkeypatch.setattr(packing, "has_segment_attention", lambda query, value: True)
    monkeypatch.setattr(torch_adapter, "_COMPILER", record)
    compile_blocks(trainer)
    for seed, count in enumerate((3, 1, 7)):
        with pytest.raises(Traced):
            trainer.backend.evaluate(lambda model, batch: model(**batch.inputs()), batch_of(seed, count).read_by(True))
    assert len(graphs) == 1
    kernels = [node for node in graphs[0].graph.nodes if "varlen_attn" in str(node.target)]
    assert len(kernels) == 1


def test_layers_that_cannot_be_one_graph_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"actor\.compile=blocks is for models without experts: set it to off"):
        trainer_of(saved(tmp_path / "experts", READ["qwen3 moe"][0], EXPERTS), compile="blocks")
    trainer = trainer_of(saved(tmp_path / "dense", *READ["llama"]))
    (first, *_) = trainer.blueprint.decoder_layers(trainer.backend.module)
    forward = first.forward

    def printing(*arguments: Any, **options: Any) -> Any:
        print("a graph cannot print")
        return forward(*arguments, **options)

    torch_adapter.replace_forward(first, printing)
    compile_blocks(trainer)
    with pytest.raises(
        ConfigError, match=r"actor\.compile=blocks: torch cannot compile LlamaDecoderLayer .*set it to off"
    ):
        trainer.forward(batch_of(0, 2))
    monkeypatch.setattr(trainer.blueprint, "decoder_layers", lambda model: [])
    with pytest.raises(ConfigError, match=r"LlamaForCausalLM does not declare its layers"):
        compile_blocks(trainer)
