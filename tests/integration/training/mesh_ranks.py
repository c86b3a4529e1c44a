"""What the ranks of the tests of the mesh do: a model divided, its losses, gradients and weights after a few steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from torch.distributed.tensor import DTensor

from rlhpc.config.typed import default_section
from rlhpc.language.config.run import GrpoConfig as Config
from rlhpc.language.models.logprobs import RowReader, TokenScores, linear_head
from rlhpc.language.models.micro_batching import split_micro_batches
from rlhpc.language.models.token_batch import TokenBatch
from rlhpc.language.training.trainer import TokenTrainer
from rlhpc.training import safetensors_writer
from rlhpc.training.parameter_names import checkpoint_parts, plain
from tests.forked import Rank

TEMPERATURE, ENTROPY_COEF, LR, STEPS, VOCABULARY = 0.8, 0.05, 1e-2, 3, 64
#: Tokens of eight samples; the longest is not a multiple of anything.
LENGTHS = (5, 11, 3, 9, 14, 2, 8, 7)


def make_config(model: str | Path, **changes: Any) -> Any:
    cfg = default_section(Config)
    base = {
        "model.model_path": str(model), "training_backend": "fsdp", "optim.name": "adamw", "optim.clip_grad": 0.05,
        "optim.adam_eps": 1e-3, "optim.lr": 3e-4,
    }  # fmt: skip
    for key, value in {**base, **changes}.items():
        OmegaConf.update(cfg.actor, key.replace("__", "."), value)
    return cfg


def samples(step: int) -> TokenBatch:
    """Eight samples with a weight for each token; a step's are always the same."""
    generator = torch.Generator().manual_seed(100 + step)
    ids = [torch.randint(3, VOCABULARY, (n,), generator=generator) for n in LENGTHS]
    weights = [torch.randn(n, generator=generator) for n in LENGTHS]
    masks = [torch.rand(n, generator=generator) < 0.8 for n in LENGTHS]
    return TokenBatch.from_sequences(ids, masks, {"weights": weights})


def loss(scores: TokenScores, batch: TokenBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    assert scores.entropy is not None
    total = sum(LENGTHS)
    value = -(batch.columns["weights"] * scores.logprobs + ENTROPY_COEF * scores.entropy).sum() / total
    return value, {"loss": value}


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def by_names(module: torch.nn.Module, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Whole tensors by the names of the checkpoint; adapters by their own."""
    parts = checkpoint_parts(module, {name: tuple(tensor.shape) for name, tensor in tensors.items()})
    found = {}
    for name, tensor in tensors.items():
        for part in parts[name]:
            found[plain(part.name)] = part.view_in(tensor)
    return found


def train(rank: Any, model: str, max_tokens: int = 24, steps: int = STEPS, **changes: Any) -> dict[str, Any]:
    """Trains; losses, norms and, of the first step, gradients, before anything is clipped; weights at the end."""
    trainer = TokenTrainer(make_config(model, **changes), rank)
    backend, module = trainer.backend, trainer.backend.module
    sizes = backend.sizes
    found: dict[str, Any] = {"losses": [], "norms": [], "packed": trainer.packed}
    batch = samples(99)
    found["scores"] = trainer.forward(batch, temperature=TEMPERATURE, compute_entropy=True).logprobs
    for step in range(steps):
        mine = samples(step).select(torch.arange(sizes.data_of(rank.rank), len(LENGTHS), sizes.data))

        def agreed(count: int) -> int:
            return int(rank.all_reduce(torch.tensor(count), "max"))

        parts = [
            p
            for _, p in split_micro_batches(
                mine, max_tokens, is_packed=trainer.packed, hidden_size=trainer.hidden, agree_count=agreed
            )
        ]
        metrics = trainer.forward_backward(parts, loss, temperature=TEMPERATURE, compute_entropy=True)
        total = torch.stack([m["loss"] for m in metrics]).double().sum()
        found["losses"].append(float(rank.all_reduce(total * (sizes.lane_of(rank.rank) == 0))))
        if not step:
            named = {n: whole(p.grad) for n, p in module.named_parameters() if p.grad is not None}
            found["gradients"] = by_names(module, named)
        found["norms"].append(trainer.optimizer_step(LR))
    named = {n: whole(p) for n, p in module.named_parameters()}
    found["weights"] = by_names(module, named)
    found["held"] = sum((p.to_local() if isinstance(p, DTensor) else p).numel() for p in module.parameters())
    found["all"] = sum(p.numel() for p in module.parameters())
    found["placements"] = {n: str(getattr(p, "placements", None)) for n, p in module.named_parameters()}
    return found if rank.rank == 0 else {"losses": found["losses"], "scores": found["scores"]}


def several(rank: Rank, cases: list[tuple[str, dict[str, Any]]]) -> list[Any]:
    """`train` of one case after the other."""
    return [train(rank, model, **changes) for model, changes in cases]


def refusals(rank: Rank, cases: list[tuple[str, dict[str, Any]]]) -> list[str]:
    """What is said of each case."""
    from rlhpc.runtime.errors import ConfigError

    found = []
    for model, changes in cases:
        try:
            TokenTrainer(make_config(model, **changes), rank)
            found.append("")
        except ConfigError as error:
            found.append(str(error))
    return found


def units(rank: Rank, model: str, changes: dict[str, Any]) -> tuple[list[str], bool]:
    """Which modules are gathered for themselves, and whether the head is asked, which makes no whole logits."""
    from torch.distributed.fsdp import FSDPModule

    module = TokenTrainer(make_config(model, **changes), rank).backend.module
    return [name for name, part in module.named_modules() if isinstance(part, FSDPModule)], linear_head(
        module
    ) is not None


def accumulated(rank: Rank, model: str, own: bool) -> float:
    """Of weights that are whole on each rank of a tensor group, without FSDP around them: how far the gradient over four
    micro-batches is from that over all samples at once, relative to it."""
    from unittest import mock

    import transformers.distributed.tensor_parallel as theirs
    from transformers import AutoModelForCausalLM

    from rlhpc.config.parallel import MeshSizes
    from rlhpc.training import tensor_parallel as plans
    from rlhpc.training.mesh import Mesh

    mesh = Mesh(MeshSizes(tensor=rank.world_size), rank.rank, "cpu")
    module = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    ids = torch.randint(3, VOCABULARY, (4, 12), generator=torch.Generator().manual_seed(0))
    module(ids, labels=ids).loss.backward()
    expected = {n: p.grad for n, p in module.named_parameters() if "q_norm" in n}
    module = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    style = plans.summed_gradient() if own else theirs.ALL_PARALLEL_STYLES["replicated_with_grad_allreduce"]
    with mock.patch.object(plans, "summed_gradient", lambda: style):
        plans.divide(module, mesh, "actor.parallel")
    for row in ids:
        (module(row[None], labels=row[None]).loss / 4).backward()
    named = dict(module.named_parameters())
    return max(float((named[n].grad - g).norm() / g.norm()) for n, g in expected.items())


def saved(rank: Rank, model: str, folder: str, changes: dict[str, Any]) -> dict[str, torch.Tensor] | None:
    """Trains a step and saves; weights and moments in full."""
    trainer = TokenTrainer(make_config(model, **changes), rank)
    _step(trainer, rank)
    trainer.save(Path(folder))
    return _all(trainer) if rank.rank == 0 else _all(trainer) and None


def resumed(rank: Rank, model: str, folder: str, meshes: list[dict[str, Any]]) -> list[dict[str, torch.Tensor]]:
    """What is there after loading it on each of some meshes; and the next step's loss."""
    found = []
    for changes in meshes:
        trainer = TokenTrainer(make_config(model, **changes), rank)
        trainer.load(Path(folder))
        found.append({**_all(trainer), "loss": torch.tensor(_step(trainer, rank))})
    return found


def _step(trainer: TokenTrainer, rank: Rank) -> float:
    sizes = trainer.backend.sizes
    mine = samples(0).select(torch.arange(sizes.data_of(rank.rank), len(LENGTHS), sizes.data))
    metrics = trainer.forward_backward([mine], loss, temperature=TEMPERATURE, compute_entropy=True)
    trainer.optimizer_step(LR)
    return float(rank.all_reduce(metrics[0]["loss"].double() * (sizes.lane_of(rank.rank) == 0)))


def _all(trainer: TokenTrainer) -> dict[str, torch.Tensor]:
    return {name: whole(tensor) for name, tensor in trainer.backend._checkpoint_state().items()}  # type: ignore[attr-defined]


def exported(rank: Rank, model: str, folder: str, cases: list[dict[str, Any]]) -> list[dict[str, torch.Tensor]]:
    """Exports from each mesh after a step, to a folder of its number; the weights in full, as engines get them."""
    found = []
    for number, changes in enumerate(cases):
        trainer = TokenTrainer(make_config(model, **changes), rank)
        _step(trainer, rank)
        trainer.export(Path(folder) / str(number))
        found.append({name: tensor.clone() for name, tensor in trainer.named_weights()})
    return found


def exported_in_files(rank: Rank, model: str, folder: str, changes: dict[str, Any]) -> list[tuple[Any, torch.Tensor]]:
    """Exports to files of few tensors after a step; samples, and what the model says of each but its first token."""
    safetensors_writer.MAX_FILE_BYTES = 1 << 16
    trainer = TokenTrainer(make_config(model, **changes), rank)
    _step(trainer, rank)
    trainer.export(Path(folder))
    batch = samples(99)
    batch.mask[:] = True
    said = trainer.forward(batch).logprobs
    parts = zip(batch.ids.split(list(LENGTHS)), said.split(list(LENGTHS)), strict=True)
    return [(ids.tolist(), logprobs[1:]) for ids, logprobs in parts]


class Weighed(RowReader):
    """Says Σ c z of a row of logits, which it wants whole."""

    def __init__(self) -> None:
        self._weights = torch.linspace(-1, 1, VOCABULARY)

    def values(self, logits: torch.Tensor, part: slice) -> torch.Tensor:
        assert logits.shape[1] == VOCABULARY
        return (logits.float() @ self._weights)[:, None]

    def gradient(self, logits: torch.Tensor, part: slice, grad: torch.Tensor) -> torch.Tensor:
        return grad * self._weights


class WeighedReading:
    def rows(self, batch: TokenBatch) -> RowReader:
        return Weighed()

    def read(self, logits: torch.Tensor, batch: TokenBatch) -> torch.Tensor:
        raise AssertionError("rows are read")


def read(rank: Rank, model: str, cases: list[dict[str, Any]]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """What such a reader says beside log-probs, and a gradient of it."""
    found, said = [], list[torch.Tensor]()

    def value(scores: TokenScores, batch: TokenBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        assert scores.read is not None
        said.append(scores.read.detach())
        return (scores.read * batch.columns["weights"] + scores.logprobs).sum() / 50, {}

    for changes in cases:
        trainer = TokenTrainer(make_config(model, **changes), rank)
        trainer.forward_backward([samples(1)], value, reading=WeighedReading())
        named = dict(trainer.backend.module.named_parameters())
        gradient = whole(next(p.grad for n, p in named.items() if n.endswith("layers.0.mlp.up_proj.weight")))
        found.append((said[-1], gradient))
    return found
