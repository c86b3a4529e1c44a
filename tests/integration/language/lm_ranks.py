"""What the ranks of the training-backend tests do; importable by the workers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from omegaconf import OmegaConf
from safetensors.torch import load_file

from rlhpc import Session, Worker
from rlhpc.checkpoint import async_writer as beside
from rlhpc.checkpoint.async_writer import HostBuffers, Writes
from rlhpc.config.typed import default_section
from rlhpc.language.config.run import GrpoConfig as Config
from rlhpc.language.models.logprobs import TokenScores
from rlhpc.language.models.micro_batching import micro_batches
from rlhpc.language.models.token_batch import TokenBatch
from rlhpc.language.training.trainer import TokenTrainer
from rlhpc.runtime import torch_adapter
from rlhpc.training import fsdp
from tests.accelerators import OTHERS_ON_CARD, cards, cluster_of, need, placed, same

TEMPERATURE, ENTROPY_COEF, LR = 0.8, 0.01, 3e-3


def make_config(model: str | Path, **changes: Any) -> Any:
    """A configuration; `changes` are dotted keys below `actor`, with `__` for dots."""
    cfg = default_section(Config)
    base = {"model.model_path": str(model), "optim.name": "adamw", "optim.weight_decay": 0.1, "optim.clip_grad": 1.0,
            "optim.lr": 3e-4, "optim.adam_eps": 1e-5}  # fmt: skip
    if OTHERS_ON_CARD:  # as on the CPU
        base["model.dtype"] = "float32"
    for key, value in {**base, **changes}.items():
        OmegaConf.update(cfg.actor, key.replace("__", "."), value)
    return cfg


def groups_of(cls: type[Worker], name: str) -> Iterator[Callable[[int], Any]]:
    """Gives, once, what makes groups of real worker processes, one of each size; afterwards ends them."""
    cluster, groups = cluster_of(max(1, cards()), OTHERS_ON_CARD), dict[int, Any]()

    def of(n: int) -> Any:
        need(n)
        if n not in groups:
            strategy = placed(n, OTHERS_ON_CARD)
            groups[n] = cls.create_group().launch(cluster, placement_strategy=strategy, name=f"{name}{n}")
        return groups[n]

    yield of
    for group in groups.values():
        group.shutdown()
    session = Session.running()
    if session:
        session.stop()


def alone() -> Worker:
    """This process as the only rank."""
    worker = Worker()
    worker.accelerators = (0,) if OTHERS_ON_CARD else ()
    return worker


def sequences(step: int) -> list[dict[str, Any]]:
    """Eight sequences of 3 to 14 tokens with a weight a token; a step's are always the same."""
    generator = torch.Generator().manual_seed(1000 + step)
    made = []
    for _ in range(8):
        n = int(torch.randint(3, 15, (), generator=generator))
        weights = torch.randn(n, generator=generator)
        weights[0] = 0.0
        made.append({"ids": torch.randint(3, 64, (n,), generator=generator), "weights": weights})
    return made


def count(step: int) -> int:
    """Tokens that something predicts, of all ranks."""
    return sum(len(sequence["ids"]) - 1 for sequence in sequences(step))


def loss_of(step: int):
    def loss(scores: TokenScores, batch: TokenBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        assert scores.entropy is not None
        value = -(batch.columns["weights"] * scores.logprobs + ENTROPY_COEF * scores.entropy).sum() / count(step)
        if scores.values is not None:
            value = value + (scores.values - batch.columns["weights"]).square().sum() / count(step)
        return value, {"loss": value}

    return loss


def share(worker: Worker, step: int, max_tokens: int = 32) -> list[TokenBatch]:
    """This rank's micro-batches."""
    mine = batch_of(sequences(step)[worker.rank :: worker.world_size])
    batches = [mine.select(samples) for samples in micro_batches(mine.lengths, max_tokens)]
    most = int(worker.all_reduce(torch.tensor(len(batches)), "max")) + 1  # one is empty, on every rank
    return batches + [mine.empty_sample()] * (most - len(batches))


def batch_of(sequences: list[dict[str, Any]]) -> TokenBatch:
    ids, weights = ([sequence[name] for sequence in sequences] for name in ("ids", "weights"))
    return TokenBatch.from_sequences(
        ids, [torch.ones(len(sample), dtype=torch.bool) for sample in ids], {"weights": weights}
    )


def probe_batch() -> TokenBatch:
    every = batch_of(sequences(99))
    return every.select(micro_batches(every.lengths, 1000)[0])


def train(worker: Worker, cfg: Any, steps: range = range(4), load: Path | None = None, **then: Any) -> dict[str, Any]:
    """Trains and tells: losses and norms by step, full weights, scores before and after; `then` names what follows:
    save=folder, export=folder, adapter=folder. All tensors are the host's. `reductions` has, for each step, the numbers of
    micro-batches and of FSDP's reductions of gradients."""
    torch_adapter._COMPILER = "aot_eager"  # code for the CPU takes a minute to be made
    backend = TokenTrainer(cfg, worker, has_values=cfg.actor.model.value_head)
    if load is not None:
        backend.load(load)
    before = backend.forward(probe_batch(), temperature=TEMPERATURE).logprobs
    losses, norms, scales, reductions = [], [], [backend.backend.loss_scale], []
    for step in steps:
        if then.get("offload"):
            backend.offload()
            backend.reload()
        batches = share(worker, step)
        with mock.patch.object(fsdp, "_reduce_scatter", wraps=fsdp._reduce_scatter) as reduce:
            metrics = backend.forward_backward(batches, loss_of(step), temperature=TEMPERATURE, compute_entropy=True)
        reductions.append((len(batches), reduce.call_count))
        total = worker.all_reduce(torch.stack([m["loss"] for m in metrics]).double().sum())
        losses.append(float(total))
        norms.append(backend.optimizer_step(LR))
        scales.append(backend.backend.loss_scale)
    scores = backend.forward(probe_batch(), temperature=TEMPERATURE)
    reference = backend.reference(probe_batch(), temperature=TEMPERATURE)
    writes = Writes(Path(then.get("save", ".")), HostBuffers())
    if "save" in then:
        with mock.patch.object(beside, "_MIN_ASYNC_BYTES", 0), writes.collect():  # copies all
            backend.save(Path(then["save"]))
    if "export" in then:
        backend.export(Path(then["export"]))
    if "adapter" in then:
        backend.export(Path(then["adapter"]), adapter_only=True)
    weights = {name: tensor.clone().cpu() for name, tensor in backend.named_weights()}
    if "save" in then:  # beside what follows, of which the files must not show anything
        with torch.no_grad():
            for _, tensor in backend.local_tensors():
                tensor.zero_()
        writes.write()
    return {
        "losses": losses,
        "norms": norms,
        "scales": scales,
        "weights": weights,
        "before": before.cpu(),
        "after": scores.logprobs.cpu(),
        "reference": reference.logprobs.cpu(),
        "values": None if scores.values is None else scores.values.cpu(),
        "trained": backend.num_trained_parameters,
        "reductions": reductions,
    }


def poisoned(worker: Worker, cfg: Any) -> dict[str, Any]:
    """Two steps with another between them whose loss is not a number on the last rank: norms, and the full weights."""
    backend, norms = TokenTrainer(cfg, worker), []

    def broken(scores: TokenScores, batch: TokenBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        value, metrics = loss_of(0)(scores, batch)
        return value * (float("nan") if worker.rank == worker.world_size - 1 else 1.0), metrics

    for step, loss in ((0, loss_of(0)), (0, broken), (1, loss_of(1))):
        backend.forward_backward(share(worker, step), loss, temperature=TEMPERATURE, compute_entropy=True)
        norms.append(backend.optimizer_step(LR))
    weights = {name: tensor.clone().cpu() for name, tensor in backend.named_weights()}
    return {"norms": norms, "weights": weights, "held": [name for name, _ in backend.local_tensors()]}


def overflow(worker: Worker, cfg: Any) -> dict[str, Any]:
    """Three steps; in the second the gradient of the last rank alone overflows. Scales, norms and weights after each."""
    trainer, reports = TokenTrainer(cfg, worker), []

    def large(scores: TokenScores, batch: TokenBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        value, metrics = loss_of(0)(scores, batch)
        return value * (1e9 if worker.rank == worker.world_size - 1 else 1.0), metrics

    for step, loss in ((0, loss_of(0)), (0, large), (1, loss_of(1))):
        micro_batches = share(worker, step)
        metrics = trainer.forward_backward(micro_batches, loss, temperature=TEMPERATURE, compute_entropy=True)
        norm = trainer.optimizer_step(LR)
        weights = {name: tensor.clone().cpu() for name, tensor in trainer.named_weights()}
        is_finite = all(bool(m["loss"].isfinite()) for m in metrics)
        reports.append(
            (norm, trainer.backend.loss_scale, trainer.backend.overflowed, is_finite, weights, len(micro_batches))
        )
    return {"reports": reports, "held": [tensor.dtype for _, tensor in trainer.local_tensors()]}


class Trainer(Worker):
    """A rank that trains."""

    def overflow(self, cfg: Any) -> dict[str, Any]:
        torch.set_num_threads(1)
        return overflow(self, cfg)

    def poisoned(self, cfg: Any) -> dict[str, Any]:
        torch.set_num_threads(1)
        return poisoned(self, cfg)

    def train(self, cfg: Any, **options: Any) -> dict[str, Any]:
        torch.set_num_threads(1)
        return train(self, cfg, **options)

    def train_parked(self, cfg: Any, steps: int = 3) -> tuple[list[float], int, int]:
        """Gives its memory away before each step; losses, bytes given away, bytes then still held."""
        torch.set_num_threads(1)
        trainer = TokenTrainer(cfg, self)
        backend: Any = trainer.backend
        losses, given, held = [], 0, 0
        for step in range(steps):
            given = backend.move_to_host()
            here = [t for part in backend.offloadable_tensors() for t in part if t.device.type == backend.device.type]
            storages = [tensor.untyped_storage() for tensor in here]
            held = sum(storage.nbytes() for storage in storages if storage.resizable())
            backend.reload()
            metrics = trainer.forward_backward(
                share(self, step), loss_of(step), temperature=TEMPERATURE, compute_entropy=True
            )
            losses.append(float(self.all_reduce(torch.stack([m["loss"] for m in metrics]).double().sum())))
            trainer.optimizer_step(LR)
        return losses, given, held

    def moved(self, cfg: Any) -> tuple[int, int]:
        """Parameters, and the bytes of the host that they go to with what belongs to them."""
        trainer = TokenTrainer(cfg, self)
        backend: Any = trainer.backend
        backend.move_to_host()
        return trainer.num_trained_parameters, backend._host.nbytes

    def save_and_load_parked(self, cfg: Any, folder: str) -> dict[str, bool]:
        """Writes, reads, sends and exports while its memory is given away, as the runner asks it to; what is then right."""
        torch.set_num_threads(1)
        trainer = TokenTrainer(cfg, self)
        backend: Any = trainer.backend
        backend.offload = lambda: (
            None if backend.is_offloaded else backend.move_to_host()
        )  # on a CPU it would give nothing away

        def step(number: int) -> None:
            micro = share(self, number)
            trainer.forward_backward(micro, loss_of(number), temperature=TEMPERATURE, compute_entropy=True)
            trainer.optimizer_step(LR)

        def weights() -> dict[str, torch.Tensor]:
            return {name: tensor.clone().cpu() for name, tensor in backend.named_weights()}

        step(0)
        before = weights()
        backend.offload()
        backend.save(Path(folder) / "parked")
        sent = weights()
        trainer.export(Path(folder) / "exported")
        exported = load_file(Path(folder) / "exported" / "model.safetensors")
        found = {
            "away again": backend.is_offloaded,
            "sent": all(torch.equal(sent[name], before[name]) for name in before),
        }
        found["exported"] = all(torch.equal(exported[name], before[name]) for name in before)
        backend.reload()
        step(1)
        expected = weights()
        backend.offload()
        backend.load(Path(folder) / "parked")
        found |= {
            "away after load": backend.is_offloaded,
            "loaded": all(torch.equal(t, before[n]) for n, t in weights().items()),
        }
        backend.reload()
        step(1)
        found["moments"] = all(same(tensor, expected[name]) for name, tensor in weights().items())
        return found
