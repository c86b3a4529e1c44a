"""LanguageActor: one data-parallel rank of a language model's trainer; what all kinds of run have in common."""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Iterator
from pathlib import Path
from typing import Generic, TypeVar

import torch

from rlhpc.algorithms.nonfinite import Skips, listed, require_finite, skips
from rlhpc.checkpoint.async_writer import SavingWorker
from rlhpc.checkpoint.state import load_state, rng_state, save_state, set_rng_state
from rlhpc.config.parallel import MeshSizes
from rlhpc.language.algorithms.base import RETURNS, VALUES, Whole
from rlhpc.language.config.run import TrainedLanguageConfig
from rlhpc.language.config.training import LanguageActorConfig
from rlhpc.language.data import load_tokenizer
from rlhpc.language.models.micro_batching import Parts, balance_across_ranks, split_micro_batches
from rlhpc.language.models.token_batch import TokenBatch
from rlhpc.language.training.trainer import ModelTrainer
from rlhpc.runs.device import seed_process

STATE = "{part}-{rank}.pt"
#: Steps' worth of held-out rows that are looked at together.
_HELD_OUT_STEPS = 8

#: The configuration of a run that trains a language model.
Cfg = TypeVar("Cfg", bound=TrainedLanguageConfig)
Trainer = TypeVar("Trainer", bound=ModelTrainer)


class LanguageActor(SavingWorker, Generic[Cfg]):
    """Owns a training backend, and trains it on samples of tokens.

    Attributes:
        part: The section of the configuration that it trains by, and the name of its files.
    """

    part: str = "actor"
    backend: ModelTrainer

    def __init__(self, cfg: Cfg) -> None:
        super().__init__()
        self.cfg: Cfg = cfg

    @property
    def section(self) -> LanguageActorConfig:
        """How it trains."""
        return self.cfg.actor

    def _load_model(self, total_steps: int, make: Callable[[], Trainer]) -> Trainer:
        """Loads tokenizer, model and optimizer.

        Args:
            total_steps: Steps of the whole run, for the learning rate.
            make: Makes what holds the model.

        Returns:
            What `make` made.
        """
        cfg, section = self.cfg, self.section
        self.total, self.seed, self.version = total_steps, cfg.runner.seed, 0
        self.sizes = MeshSizes.of(section.parallel, self.world_size, f"{self.part}.parallel")
        # Ranks that share a layer's matrices drop the same of what all of them have.
        seed_process(self.seed, self.part, self.rank // self.sizes.tensor)
        self.tokenizer = load_tokenizer(section.model.model_path, section.model.trust_remote_code)
        pad = self.tokenizer.pad_token_id
        self.pad = int(pad if pad is not None else self.tokenizer.eos_token_id or 0)
        trainer = make()
        self.backend = trainer
        self.skips = Skips(skips(cfg))
        self.max_tokens = section.max_tokens_per_micro_batch
        self.log.info("trains %s parameters of %s by %s", trainer.parameters_trained, section.model.model_path,
                      section.training_backend)  # fmt: skip
        return trainer

    def trained_version(self) -> int:
        """The step whose update its weights are of."""
        return self.version

    # -- training -------------------------------------------------------------------------------------------------

    def _micro_batches(self, batch: TokenBatch, *, packed: bool | None = None) -> Parts:
        """Which samples each micro-batch has, and the micro-batches, as many on each rank: some train nothing.

        Args:
            batch: What is cut.
            packed: Whether they are rows of several samples; by default where the trained model reads such.
        """
        packed = self.backend.packed if packed is None else packed
        return split_micro_batches(batch, self.max_tokens, packed=packed, hidden=self.backend.hidden, agreed=self._most)

    def _most(self, count: int) -> int:
        """The largest of the ranks' counts."""
        if self.world_size == 1:
            return count
        return int(self.all_reduce(torch.tensor(float(count)), "max").item())

    def _evenly(self, batches: Parts, batch: TokenBatch) -> Parts:
        """Micro-batches of a batch, with as many more on each rank that train nothing as the rank with the most has."""
        none = torch.zeros(0, dtype=torch.long)
        return batches + [(none, batch.nothing()) for _ in range(self._most(len(batches)) - len(batches))]

    def _shared(self, batch: TokenBatch, each: int = 1) -> TokenBatch:
        """This rank's part of all ranks' samples, so that each has about equally much to compute.

        Args:
            batch: What this rank has now.
            each: So many neighbours stay together.
        """
        if not self.section.enable_dp_load_balance or self.sizes.data == 1:
            return batch
        return balance_across_ranks(batch, self, self.sizes, each=each, hidden=self.backend.hidden)

    @property
    def data(self) -> int:
        """Which of the shares of samples this rank trains on."""
        return self.sizes.data_of(self.rank)

    @property
    def leads(self) -> bool:
        """Whether it speaks for the ranks that train on the same samples."""
        return self.sizes.lane_of(self.rank) == 0

    def _summed(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over all samples' ranks, in place: of those with the same samples one counts."""
        if self.world_size == 1:
            return tensor
        return self.all_reduce(tensor if self.leads else tensor.zero_())

    def _count(self, batch: TokenBatch, length: float = 1.0) -> Whole:
        """Counts a minibatch over all ranks; called before samples change ranks (`Whole.of`)."""
        return Whole.of(batch, length, self._summed)

    def _held_out_places(self, rows: int, of_step: int) -> Iterator[range]:
        """Yields this rank's places among held-out rows, some steps' worth at a time.

        Args:
            rows: How many there are.
            of_step: Rows of a step of training.
        """
        some = of_step * _HELD_OUT_STEPS
        for first in range(0, rows, some):
            yield range(first + self.data, min(first + some, rows), self.sizes.data)

    def _optimize(
        self,
        minibatches: Iterable[tuple[str, TokenBatch]],
        length: float,
        take_step: Callable[[TokenBatch, Whole, str], dict[str, float]],
        at_first: Container[str] = (),
    ) -> tuple[dict[str, float], int]:
        """Takes an optimizer step on each minibatch that has a trained token on any rank. The others take none: without a
        gradient, Adam would move the weights by its momentum and by weight decay.

        Args:
            minibatches: What a message calls each, and this rank's samples of it.
            length: See `Whole.length`.
            take_step: Trains on a minibatch; its metrics, of which `grad_norm` is not finite if the step was left out.
            at_first: Metrics of which the first step's value counts.

        Returns:
            Means over the steps that were taken, with `empty_minibatches` if there were any; and the number of steps.
        """
        sums, first, updates, empty = dict[str, float](), dict[str, float](), 0, 0
        for where, batch in minibatches:
            counts = self._count(batch, length)
            if not counts.tokens:
                empty += 1
                continue
            metrics = take_step(batch, counts, where)
            if not math.isfinite(metrics["grad_norm"]):
                continue
            if not updates:
                first = {name: value for name, value in metrics.items() if name in at_first}
            sums = {name: sums.get(name, 0.0) + value for name, value in metrics.items()}
            updates += 1
        means = {"tokens": 0.0} | {name: value / updates for name, value in sums.items()} | first
        return means | ({"empty_minibatches": float(empty)} if empty else {}) | self.skips.counted(), updates

    def _step(
        self, rate: float, metrics: dict[str, float], tokens: float, where: str, batch: TokenBatch
    ) -> dict[str, float]:
        """The optimizer's step and its metrics.

        Raises:
            NonFinite: The gradient is not finite. All ranks say so: the norm is over them all.
        """
        norm = self.backend.optimizer_step(rate)
        if math.isfinite(norm):
            self.skips.took()
        else:
            bad = [name for name, value in metrics.items() if not math.isfinite(value)]
            told = f"the gradient's norm is {norm}" + (f", and so are {listed(bad)}" if bad else "")
            self.skips.left_out(lambda: f"{where}: {told}{_prompts(batch)} ({self.part}-{self.rank})")
        return {**metrics, "grad_norm": norm, "tokens": tokens}

    def _only_step(
        self, step: int, parts: list[dict[str, torch.Tensor]], tokens: float, batch: TokenBatch
    ) -> dict[str, float]:
        """The one step of the optimizer in a global step, from its micro-batches' metrics; and all metrics."""
        rate = self._learning_rate(step)
        found = self._step(rate, self._reduced(parts), tokens, f"step {step}", batch)
        self.version = step
        return {**found, "lr": rate, **self.skips.counted()}

    def _reduced(self, parts: list[dict[str, torch.Tensor]]) -> dict[str, float]:
        """Sums over micro-batches and ranks."""
        names = sorted(parts[0])
        sums = torch.stack([sum((part[name].float().cpu() for part in parts), torch.zeros(())) for name in names])
        sums = self._summed(sums)
        return dict(zip(names, sums.tolist(), strict=True))

    def _fit(self, batch: TokenBatch) -> dict[str, float]:
        """How much of the returns' variance the values explained, before this step's training."""
        returns, values = batch.columns[RETURNS][batch.mask].double(), batch.columns[VALUES][batch.mask].double()
        rest = returns - values
        sums = torch.stack(
            [torch.tensor(float(len(rest))).double(), returns.sum(), (returns**2).sum(), rest.sum(), (rest**2).sum()]
        )
        sums = self._summed(sums)
        n, total, squares, rests, rest_squares = sums.tolist()
        if not n:
            return {}
        variance = squares / n - (total / n) ** 2
        left = rest_squares / n - (rests / n) ** 2
        found = {"return": total / n}
        if variance > 1e-12:
            found["explained_variance"] = 1.0 - left / variance
        return found

    def _learning_rate(self, step: int) -> float:
        optim = self.section.optim
        base, warmup = optim.lr, optim.lr_warmup_steps
        if step <= warmup:
            return base * step / (warmup + 1)
        done = (step - 1 - warmup) / max(self.total - warmup, 1)
        kind = "linear" if self.cfg.algorithm.anneal_lr else optim.lr_scheduler
        factor = {"constant": 1.0, "linear": 1.0 - done, "cosine": 0.5 * (1 + math.cos(math.pi * done))}[kind]
        return base * factor

    # -- checkpoint -----------------------------------------------------------------------------------------------

    def save(self, folder: str) -> None:
        """Writes the backend's files, and this rank's random states.

        Raises:
            NonFinite: A weight is not finite.
        """
        path = Path(folder)
        with self.backend.awake():
            require_finite(self.backend.held_tensors(), f"step {self.version} ({self.part}-{self.rank})")
            self.backend.save(path)
        save_state(path / STATE.format(part=self.part, rank=self.rank), {"rng": rng_state(), "version": self.version})

    def load(self, folder: str) -> None:
        """Restores a checkpoint, of this or another world size."""
        path = Path(folder)
        self.backend.load(path)
        own = path / STATE.format(part=self.part, rank=self.rank)
        state = load_state(own if own.is_file() else path / STATE.format(part=self.part, rank=0))
        set_rng_state(state["rng"])
        self.version = int(state["version"])

    def offload(self) -> None:
        """Moves everything to the host."""
        self.backend.offload()

    def reload(self) -> None:
        """Takes back what `offload` moved away."""
        self.backend.reload()


def _prompts(batch: TokenBatch) -> str:
    """Which of a rank's prompts brought something that is not finite, for a message."""
    found = set()
    for name, values in batch.columns.items():
        bad = (
            batch.mask & ~values.isfinite() if values.dim() == 1 else batch.mask & ~values.flatten(1).isfinite().all(1)
        )
        lines = torch.repeat_interleave(batch.group, batch.lengths)[bad]
        found |= {f"{name} of prompt {group}" for group in lines.unique().tolist()}
    return f"; not finite: {listed(sorted(found))}" if found else ""
