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
from tests.unit.language.models.test_packing import EXPERTS, READ, SMALL, WINDOW

DENSE = [name for name in READ if not {"moe", "mixtral", "v3"} & set(name.split())]


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
    return TokenTrainer(cfg, Worker(), values=cfg.actor.model.value_head)


def batch_of(seed: int, count: int, device: str = "cpu") -> TokenBatch:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 24, (count,), generator=generator).tolist()
    ids = [torch.randint(1, 61, (length,), generator=generator) for length in lengths]
    return TokenBatch.of(ids, [torch.ones(length, dtype=torch.bool) for length in lengths])


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


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"model__gradient_checkpointing": True},
        {"lora__rank": 2},
        {"lora__rank": 2, "model__gradient_checkpointing": True},
        {"model__value_head": True},
        {"use_remove_padding": False},
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
    # A rectangle of one row is a special case of torch's, for training and for scoring.
    assert 2 <= counters["stats"]["unique_graphs"] <= (3 if compiled.packed else 4)


@pytest.mark.parametrize("family", DENSE)
def test_families_whose_layers_are_one_graph(tmp_path: Path, family: str) -> None:
    folder = saved(tmp_path / "model", *READ[family])
    plain, compiled = trainer_of(folder), trainer_of(folder, compile="blocks")
    batches = [batch_of(seed, 1 + seed) for seed in range(3)]
    assert_equal(step(compiled, batches), step(plain, batches))
    assert counters["stats"]["unique_graphs"] and not counters["graph_break"]


def test_the_code_that_inductor_makes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_adapter, "_COMPILER", "inductor")
    folder = saved(tmp_path / "model", *READ["llama"])
    plain, compiled = trainer_of(folder), trainer_of(folder, compile="blocks")
    for seed in range(2):
        assert_equal(step(compiled, [batch_of(seed, 3)]), step(plain, [batch_of(seed, 3)]))


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
    trainer._compile_blocks()
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
    trainer._compile_blocks()
    with pytest.raises(
        ConfigError, match=r"actor\.compile=blocks: torch cannot compile LlamaDecoderLayer .*set it to off"
    ):
        trainer.forward(batch_of(0, 2))
    monkeypatch.setattr(trainer.blueprint, "decoder_layers", lambda model: [])
    with pytest.raises(ConfigError, match=r"LlamaForCausalLM does not declare its layers"):
        trainer._compile_blocks()


def test_case_does_not_matter(tmp_path: Path) -> None:
    """What asks for layers or kernels in capitals gets them, or is refused; it never trains without them unnoticed."""
    folder = saved(tmp_path / "experts", READ["qwen3 moe"][0], EXPERTS)
    with pytest.raises(ConfigError, match="is for models without experts"):
        trainer_of(folder, compile="BLOCKS")
    with pytest.raises(ConfigError, match=r"actor\.kernels=liger needs a GPU"):
        trainer_of(folder, kernels="LIGER")
