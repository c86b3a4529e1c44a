"""Base class of language model actors: a rank of a trainer, with the methods that all task types share."""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Iterator
from pathlib import Path
from typing import Generic, TypeVar

import torch

from rlhpc.algorithms.nonfinite import SkippedSteps, format_names, require_finite, skips
from rlhpc.checkpoint.async_writer import SavingWorker
from rlhpc.checkpoint.state import load_state, rng_state, save_state, set_rng_state
from rlhpc.config.parallel import MeshSizes
from rlhpc.language.algorithms.base import RETURNS, VALUES, MinibatchCounts
from rlhpc.language.config.run import TrainedLanguageConfig
from rlhpc.language.config.training import LanguageActorConfig
from rlhpc.language.data import load_tokenizer
from rlhpc.language.models.micro_batching import Parts, balance_across_ranks, split_micro_batches
from rlhpc.language.models.token_batch import TokenBatch
from rlhpc.language.training.trainer import ModelTrainer
from rlhpc.runs.device import seed_process
from rlhpc.runtime.devices import empty_cache

STATE = "{section}-{rank}.pt"
#: Number of held-out rows that are evaluated at once, in multiples of the rows of a training step.
_HELD_OUT_STEPS = 8

#: The configuration of a run that trains a language model.
Cfg = TypeVar("Cfg", bound=TrainedLanguageConfig)
Trainer = TypeVar("Trainer", bound=ModelTrainer)


class LanguageActor(SavingWorker, Generic[Cfg]):
    """Rank of a trainer of a language model.

    Attributes:
        section_name: Name of the configuration section, and prefix of the rank's files.
        backend: Trainer with the model.
    """

    section_name: str = "actor"
    backend: ModelTrainer

    def __init__(self, cfg: Cfg) -> None:
        super().__init__()
        self.cfg: Cfg = cfg

    @property
    def section(self) -> LanguageActorConfig:
        """Training section of the configuration."""
        return self.cfg.actor

    def _load_model(self, total_steps: int, make: Callable[[], Trainer]) -> Trainer:
        """Loads tokenizer, model and optimizer.

        Args:
            total_steps: Number of steps of the run, for the learning rate.
            make: Function that builds the trainer that holds the model.

        Returns:
            The trainer.
        """
        cfg, section = self.cfg, self.section
        self.total = total_steps
        self.seed = cfg.runner.seed
        self.version = 0
        self.sizes = MeshSizes.of(section.parallel, self.world_size, f"{self.section_name}.parallel")
        self.data = self.sizes.data_of(self.rank)
        self._balances_load = section.enable_dp_load_balance and self.sizes.data > 1
        # Tensor-parallel ranks drop the same elements of their shared activations.
        seed_process(self.seed, self.section_name, self.rank // self.sizes.tensor)
        self.tokenizer = load_tokenizer(section.model.model_path, section.model.trust_remote_code)
        pad = self.tokenizer.pad_token_id
        self.pad = int(pad if pad is not None else self.tokenizer.eos_token_id or 0)
        trainer = make()
        self.backend = trainer
        self.skips = SkippedSteps(skips(cfg))
        self.max_tokens = section.max_tokens_per_micro_batch
        self.log.info("trains %s parameters of %s by %s", trainer.parameters_trained, section.model.model_path,
                      section.training_backend)  # fmt: skip
        return trainer

    def trained_version(self) -> int:
        """Returns the step that produced the current weights."""
        return self.version

    # -- training -------------------------------------------------------------------------------------------------

    def _micro_batches(self, batch: TokenBatch, *, packed: bool | None = None) -> Parts:
        """Splits a batch into micro-batches, with the indices of their samples.

        All ranks get the same number of micro-batches; some may be empty.

        Args:
            batch: Samples of this rank.
            packed: Whether to pack several samples into a row; None packs if the trained model supports it.
        """
        packed = self.backend.packed if packed is None else packed
        return split_micro_batches(
            batch, self.max_tokens, packed=packed, hidden=self.backend.hidden, agree_count=self._max_count
        )

    def _max_count(self, count: int) -> int:
        """Returns the maximum of the ranks' counts."""
        if self.world_size == 1:
            return count
        return int(self.all_reduce(torch.tensor(float(count)), "max").item())

    def _pad_evenly(self, batches: Parts, batch: TokenBatch) -> Parts:
        """Returns the micro-batches of a batch, padded with empty ones to the maximum number over the ranks."""
        no_samples = torch.zeros(0, dtype=torch.long)
        return batches + [
            (no_samples, batch.empty_sample()) for _ in range(self._max_count(len(batches)) - len(batches))
        ]

    def _balance_load(self, batch: TokenBatch, unit_size: int = 1) -> TokenBatch:
        """Balances the load of the data-parallel ranks by an exchange of samples; returns this rank's samples.

        Args:
            batch: Samples of this rank before the exchange.
            unit_size: Number of neighbouring samples that stay on one rank.
        """
        if not self._balances_load:
            return batch
        return balance_across_ranks(batch, self, self.sizes, unit_size=unit_size, hidden=self.backend.hidden)

    @property
    def is_leader(self) -> bool:
        """True on the first rank of a model-parallel block. The ranks of a block train on the same samples."""
        return self.sizes.lane_of(self.rank) == 0

    def _sum_over_ranks(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sums a tensor in place over the data-parallel ranks; only the first rank of each model-parallel block counts."""
        if self.world_size == 1:
            return tensor
        return self.all_reduce(tensor if self.is_leader else tensor.zero_())

    def _count(self, batch: TokenBatch, length: float = 1.0) -> MinibatchCounts:
        """Counts a minibatch over all ranks (`MinibatchCounts.of`); called before `_balance_load`."""
        return MinibatchCounts.of(batch, length, self._sum_over_ranks)

    def _held_out_indices(self, rows: int, of_step: int) -> Iterator[range]:
        """Yields this rank's indices of held-out rows, in chunks of the rows of `_HELD_OUT_STEPS` training steps.

        Args:
            rows: Number of held-out rows.
            of_step: Number of rows in a training step.
        """
        rows_at_once = of_step * _HELD_OUT_STEPS
        for start in range(0, rows, rows_at_once):
            yield range(start + self.data, min(start + rows_at_once, rows), self.sizes.data)

    def _optimize(
        self,
        minibatches: Iterable[tuple[str, TokenBatch]],
        length: float,
        take_step: Callable[[TokenBatch, MinibatchCounts, str], dict[str, float]],
        at_first: Container[str] = (),
    ) -> tuple[dict[str, float], int]:
        """Runs an optimizer step on each minibatch that has a trained token on any rank.

        Other minibatches are skipped, because without a gradient Adam would still move the weights by momentum and weight
        decay.

        Args:
            minibatches: Name of each minibatch, for messages, with this rank's samples.
            length: See `MinibatchCounts.length`.
            take_step: Function that trains on a minibatch and returns the metrics; a non-finite `grad_norm` marks a skipped
                step.
            at_first: Names of metrics that report the first step's value.

        Returns:
            Means over the optimizer steps, with `empty_minibatches` if it is not 0; and the number of steps.
        """
        metric_sums, first_metrics, num_updates, num_empty = dict[str, float](), dict[str, float](), 0, 0
        for minibatch_name, batch in minibatches:
            counts = self._count(batch, length)
            if not counts.tokens:
                num_empty += 1
                continue
            metrics = take_step(batch, counts, minibatch_name)
            if not math.isfinite(metrics["grad_norm"]):
                continue
            if not num_updates:
                first_metrics = {name: value for name, value in metrics.items() if name in at_first}
            metric_sums = {name: metric_sums.get(name, 0.0) + value for name, value in metrics.items()}
            num_updates += 1
        metric_means = (
            {"tokens": 0.0} | {name: value / num_updates for name, value in metric_sums.items()} | first_metrics
        )
        return metric_means | (
            {"empty_minibatches": float(num_empty)} if num_empty else {}
        ) | self.skips.pop_metrics(), num_updates

    def _run_optimizer_step(
        self, rate: float, metrics: dict[str, float], tokens: float, where: str, batch: TokenBatch
    ) -> dict[str, float]:
        """Runs the optimizer step; returns the metrics with `grad_norm` and `tokens`.

        Raises:
            NonFinite: The gradient is not finite, and the configuration does not skip such steps. All ranks raise this error,
                because the norm is global.
        """
        norm = self.backend.optimizer_step(rate)
        if math.isfinite(norm):
            self.skips.record_step()
        else:
            non_finite_names = [name for name, value in metrics.items() if not math.isfinite(value)]
            other_names = f", and so are {format_names(non_finite_names)}" if non_finite_names else ""
            self.skips.record_skip(
                lambda: (
                    f"{where}: the gradient's norm is {norm}{other_names}{_describe_non_finite(batch)} "
                    f"({self.section_name}-{self.rank})"
                )
            )
        return {**metrics, "grad_norm": norm, "tokens": tokens}

    def _run_only_step(
        self, step: int, batch_metrics: list[dict[str, torch.Tensor]], tokens: float, batch: TokenBatch
    ) -> dict[str, float]:
        """Runs the only optimizer step of a training step, after the backward passes.

        Returns:
            The metrics of the step, which include the sums of `batch_metrics`.
        """
        learning_rate = self._learning_rate(step)
        metrics = self._run_optimizer_step(
            learning_rate, self._reduce_metrics(batch_metrics), tokens, f"step {step}", batch
        )
        self.version = step
        return {**metrics, "lr": learning_rate, **self.skips.pop_metrics()}

    def _reduce_metrics(self, batch_metrics: list[dict[str, torch.Tensor]]) -> dict[str, float]:
        """Returns the sums of the metrics over micro-batches and ranks."""
        names, device = sorted(batch_metrics[0]), self.backend.device
        sums = torch.zeros(len(names), device=device)
        for metrics in batch_metrics:
            sums = sums + torch.stack([metrics[name].float().to(device) for name in names])
        # The only copy to the host, which waits for all passes of the step.
        return dict(zip(names, self._sum_over_ranks(sums.cpu()).tolist(), strict=True))

    def _value_metrics(self, batch: TokenBatch) -> dict[str, float]:
        """Computes metrics of the values from before this step's update, over all ranks.

        Returns:
            `return`, the mean return; and `explained_variance`, the fraction of the returns' variance that the values explain.
        """
        returns = batch.columns[RETURNS][batch.mask].double()
        residuals = returns - batch.columns[VALUES][batch.mask].double()
        local_sums = torch.stack(
            [torch.ones_like(returns).sum(), returns.sum(), (returns**2).sum(), residuals.sum(), (residuals**2).sum()]
        )
        num_tokens, *sums = self._sum_over_ranks(local_sums).tolist()
        if not num_tokens:
            return {}
        mean, squared_mean, residual_mean, residual_squared_mean = (value / num_tokens for value in sums)
        variance = squared_mean - mean**2
        metrics = {"return": mean}
        if variance > 1e-12:
            metrics["explained_variance"] = 1.0 - (residual_squared_mean - residual_mean**2) / variance
        return metrics

    def _learning_rate(self, step: int) -> float:
        optim, warmup = self.section.optim, self.section.optim.lr_warmup_steps
        if step <= warmup:
            return optim.lr * step / (warmup + 1)
        progress = (step - 1 - warmup) / max(self.total - warmup, 1)
        schedule = "linear" if self.cfg.algorithm.anneal_lr else optim.lr_scheduler
        factors = {"constant": 1.0, "linear": 1.0 - progress, "cosine": 0.5 * (1 + math.cos(math.pi * progress))}
        return optim.lr * factors[schedule]

    # -- checkpoint -----------------------------------------------------------------------------------------------

    def save(self, folder: str) -> None:
        """Writes the backend's files, and this rank's random states and version.

        Raises:
            NonFinite: A weight is not finite.
        """
        path = Path(folder)
        with self.backend.awake():
            require_finite(self.backend.local_tensors(), f"step {self.version} ({self.section_name}-{self.rank})")
            self.backend.save(path)
        save_state(
            path / STATE.format(section=self.section_name, rank=self.rank),
            {"rng": rng_state(), "version": self.version},
        )

    def load(self, folder: str) -> None:
        """Restores a checkpoint of this or another world size."""
        path = Path(folder)
        self.backend.load(path)
        files = [path / STATE.format(section=self.section_name, rank=rank) for rank in (self.rank, 0)]
        saved_state = load_state(files[0] if files[0].is_file() else files[1])
        set_rng_state(saved_state["rng"])
        self.version = int(saved_state["version"])

    def release_cache(self) -> float:
        """Returns memory that torch has cached to the accelerator, for another process.

        Returns:
            Bytes that are free on the accelerator beyond those of all weights in the dtype of the computation; infinite on a
            CPU.
        """
        empty_cache()
        device, blueprint = self.backend.device, self.backend.blueprint
        if device.type == "cpu":
            return math.inf
        parameters = self.backend.backend.module.parameters()
        # DeepSpeed empties parameters that are divided among ranks.
        count = sum(int(getattr(parameter, "ds_numel", parameter.numel())) for parameter in parameters)
        return float(torch.accelerator.get_memory_info(device)[0] - count * blueprint.dtype.itemsize)

    def offload(self) -> None:
        """Moves all tensors to the host."""
        self.backend.offload()

    def reload(self) -> None:
        """Moves the tensors back to the accelerator after `offload`."""
        self.backend.reload()


def _describe_non_finite(batch: TokenBatch) -> str:
    """Returns text for a message that names the columns and prompts with non-finite values; "" if all are finite."""
    names = set()
    for name, column in batch.columns.items():
        is_non_finite = (
            batch.mask & ~column.isfinite() if column.dim() == 1 else batch.mask & ~column.flatten(1).isfinite().all(1)
        )
        non_finite_groups = torch.repeat_interleave(batch.group, batch.lengths)[is_non_finite]
        names |= {f"{name} of prompt {group}" for group in non_finite_groups.unique().tolist()}
    return f"; not finite: {format_names(sorted(names))}" if names else ""
