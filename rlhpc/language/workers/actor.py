"""Base class of language model actors: a rank of a trainer, with the methods that all task types share."""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Iterator
from pathlib import Path
from typing import Generic, TypeVar

import torch

from rlhpc.algorithms.nonfinite import SkippedSteps, require_finite, skips
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
from rlhpc.runs.device import set_up_process
from rlhpc.runtime.devices import empty_cache
from rlhpc.runtime.text import format_names
from rlhpc.runtime.trace_recorder import span
from rlhpc.training.flat_parameters import schedule_factor
from rlhpc.weights.device_sharing import spare_bytes

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

    def _load_model(self, total_steps: int, make_trainer: Callable[[], Trainer]) -> Trainer:
        """Loads tokenizer, model and optimizer.

        Args:
            total_steps: Number of steps of the run, for the learning rate.
            make_trainer: Function that builds the trainer that holds the model.

        Returns:
            The trainer.
        """
        cfg, section = self.cfg, self.section
        self.total = total_steps
        self.seed = cfg.runner.seed
        self.version = 0
        self.sizes = MeshSizes.from_config(section.parallel, self.world_size, f"{self.section_name}.parallel")
        self.data = self.sizes.data_of(self.rank)
        self._balances_load = section.enable_dp_load_balance and self.sizes.data > 1
        # Tensor-parallel ranks drop the same elements of their shared activations.
        set_up_process(self.cfg.runner, self.section_name, self.rank // self.sizes.tensor)
        self.tokenizer = load_tokenizer(section.model.model_path, section.model.trust_remote_code)
        pad = self.tokenizer.pad_token_id
        self.pad = int(pad if pad is not None else self.tokenizer.eos_token_id or 0)
        trainer = make_trainer()
        self.backend = trainer
        self.skips = SkippedSteps(skips(cfg))
        self.max_tokens = section.max_tokens_per_micro_batch
        self.log.info("trains %s parameters of %s by %s", trainer.num_trained_parameters, section.model.model_path,
                      section.training_backend)  # fmt: skip
        return trainer

    def trained_version(self) -> int:
        """Returns the step that produced the current weights."""
        return self.version

    # -- training -------------------------------------------------------------------------------------------------

    def _micro_batches(
        self, batch: TokenBatch, *, packed: bool | None = None, shares_prefixes: bool | None = None
    ) -> Parts:
        """Splits a batch into micro-batches, with the indices of their samples.

        All ranks get the same number of micro-batches; some may be empty.

        Args:
            batch: Samples of this rank.
            packed: Whether to pack several samples into a row; None packs if the trained model supports it.
            shares_prefixes: Whether a row has shared prefixes once; None shares them if the trained model supports it.
        """
        return split_micro_batches(
            batch,
            self.max_tokens,
            is_packed=self.backend.packed if packed is None else packed,
            shares_prefixes=self.backend.shares_prefixes if shares_prefixes is None else shares_prefixes,
            hidden_size=self.backend.hidden,
            agree_count=self._find_max_count,
        )

    def _find_max_count(self, local_count: int) -> int:
        """Returns the maximum of the ranks' counts."""
        if self.world_size == 1:
            return local_count
        return int(self.all_reduce(torch.tensor(float(local_count)), "max").item())

    def _pad_evenly(self, batches: Parts, batch: TokenBatch) -> Parts:
        """Returns the micro-batches of a batch, padded with empty ones to the maximum number over the ranks."""
        no_samples = torch.zeros(0, dtype=torch.long)
        return batches + [
            (no_samples, batch.empty_sample()) for _ in range(self._find_max_count(len(batches)) - len(batches))
        ]

    def _balance_load(self, batch: TokenBatch, unit_size: int = 1) -> TokenBatch:
        """Balances the load of the data-parallel ranks by an exchange of samples; returns this rank's samples.

        Args:
            batch: Samples of this rank before the exchange.
            unit_size: Number of neighbouring samples that stay on one rank.
        """
        if not self._balances_load:
            return batch
        return balance_across_ranks(
            batch,
            self,
            self.sizes,
            unit_size=unit_size,
            hidden_size=self.backend.hidden,
            shares_prefixes=self.backend.shares_prefixes,
        )

    @property
    def is_leader(self) -> bool:
        """True on the first rank of a model-parallel block. The ranks of a block train on the same samples."""
        return self.sizes.lane_of(self.rank) == 0

    def _sum_over_ranks(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sums a tensor in place over the data-parallel ranks; only the first rank of each model-parallel block counts."""
        if self.world_size == 1:
            return tensor
        return self.all_reduce(tensor if self.is_leader else tensor.zero_())

    def _count_minibatch(self, batch: TokenBatch, length: float = 1.0) -> MinibatchCounts:
        """Counts a minibatch over all ranks (`MinibatchCounts.from_batch`); called before `_balance_load`."""
        return MinibatchCounts.from_batch(batch, length, self._sum_over_ranks)

    def _iter_held_out_indices(self, num_rows: int, of_step: int) -> Iterator[range]:
        """Yields this rank's indices of held-out rows, in chunks of the rows of `_HELD_OUT_STEPS` training steps.

        Args:
            num_rows: Number of held-out rows.
            of_step: Number of rows in a training step.
        """
        rows_at_once = of_step * _HELD_OUT_STEPS
        for batch_start in range(0, num_rows, rows_at_once):
            yield range(batch_start + self.data, min(batch_start + rows_at_once, num_rows), self.sizes.data)

    def _run_minibatches(
        self,
        minibatches: Iterable[tuple[str, TokenBatch]],
        max_length: float,
        take_step: Callable[[TokenBatch, MinibatchCounts, str], dict[str, float]],
        at_first: Container[str] = (),
    ) -> tuple[dict[str, float], int]:
        """Runs an optimizer step on each minibatch that has a trained token on any rank.

        Other minibatches are skipped, because without a gradient Adam would still move the weights by momentum and weight
        decay.

        Args:
            minibatches: Name of each minibatch, for messages, with this rank's samples.
            max_length: See `MinibatchCounts.length`.
            take_step: Function that trains on a minibatch and returns the metrics; a non-finite `grad_norm` marks a skipped
                step.
            at_first: Names of metrics that report the first step's value.

        Returns:
            Means over the optimizer steps, with `empty_minibatches` if it is not 0; and the number of steps.
        """
        metric_sums, first_metrics, num_updates, num_empty = dict[str, float](), dict[str, float](), 0, 0
        for minibatch_name, batch in minibatches:
            minibatch_counts = self._count_minibatch(batch, max_length)
            if not minibatch_counts.tokens:
                num_empty += 1
                continue
            metrics = take_step(batch, minibatch_counts, minibatch_name)
            if not math.isfinite(metrics["grad_norm"]):
                continue
            if not num_updates:
                first_metrics = {name: metric_value for name, metric_value in metrics.items() if name in at_first}
            metric_sums = {name: metric_sums.get(name, 0.0) + metric_value for name, metric_value in metrics.items()}
            num_updates += 1
        metric_means = (
            {"tokens": 0.0}
            | {name: metric_value / num_updates for name, metric_value in metric_sums.items()}
            | first_metrics
        )
        return metric_means | (
            {"empty_minibatches": float(num_empty)} if num_empty else {}
        ) | self._pop_skip_metrics(), num_updates

    def _pop_skip_metrics(self) -> dict[str, float]:
        """Returns the metrics of skipped steps and, in float16, of the loss scale."""
        metrics, scale = self.skips.pop_metrics(), self.backend.backend.loss_scale
        if scale is None:
            return metrics
        return {**metrics, "loss_scale": scale, "overflow_skipped": float(self.skips.pop_overflows())}

    def _run_optimizer_step(
        self, rate: float, metrics: dict[str, float], num_tokens: float, label: str, batch: TokenBatch
    ) -> dict[str, float]:
        """Runs the optimizer step; returns the metrics with `grad_norm` and `tokens`.

        Raises:
            NonFinite: The gradient is not finite, for another reason than the loss scale of float16, and the configuration
                does not skip such steps. All ranks raise this error, because the norm is global.
        """
        with span("optimizer step", "train"):
            norm = self.backend.optimizer_step(rate)
        if math.isfinite(norm):
            self.skips.record_step()
        else:
            non_finite_names = [name for name, metric_value in metrics.items() if not math.isfinite(metric_value)]
            if self.backend.backend.overflowed and not non_finite_names:  # the loss is finite, so its scale is to blame
                self.skips.record_overflow()
                return {**metrics, "grad_norm": norm, "tokens": num_tokens}
            other_names = f", and so are {format_names(non_finite_names)}" if non_finite_names else ""
            self.skips.record_skip(
                lambda: (
                    f"{label}: the gradient's norm is {norm}{other_names}{_describe_non_finite(batch)} "
                    f"({self.section_name}-{self.rank})"
                )
            )
        return {**metrics, "grad_norm": norm, "tokens": num_tokens}

    def _run_only_step(
        self, step: int, batch_metrics: list[dict[str, torch.Tensor]], num_tokens: float, batch: TokenBatch
    ) -> dict[str, float]:
        """Runs the only optimizer step of a training step, after the backward passes.

        Returns:
            The metrics of the step, which include the sums of `batch_metrics`.
        """
        learning_rate = self._compute_learning_rate(step)
        metrics = self._run_optimizer_step(
            learning_rate, self._reduce_metrics(batch_metrics), num_tokens, f"step {step}", batch
        )
        self.version = step
        return {**metrics, "lr": learning_rate, **self._pop_skip_metrics()}

    def _reduce_metrics(self, batch_metrics: list[dict[str, torch.Tensor]]) -> dict[str, float]:
        """Returns the sums of the metrics over micro-batches and ranks."""
        metric_names, device = sorted(batch_metrics[0]), self.backend.device
        sums = torch.zeros(len(metric_names), device=device)
        for metrics in batch_metrics:
            sums = sums + torch.stack([metrics[name].float().to(device) for name in metric_names])
        # The only copy to the host, which waits for all passes of the step.
        return dict(zip(metric_names, self._sum_over_ranks(sums.cpu()).tolist(), strict=True))

    def _compute_value_metrics(self, batch: TokenBatch) -> dict[str, float]:
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
        mean, squared_mean, residual_mean, residual_squared_mean = (metric_sum / num_tokens for metric_sum in sums)
        variance = squared_mean - mean**2
        metrics = {"return": mean}
        if variance > 1e-12:
            metrics["explained_variance"] = 1.0 - (residual_squared_mean - residual_mean**2) / variance
        return metrics

    def _compute_learning_rate(self, step: int) -> float:
        optim, num_steps = self.section.optim, step - 1
        progress = num_steps / max(self.total, 1)
        return optim.lr * schedule_factor(optim, num_steps, progress, is_annealed=self.cfg.algorithm.anneal_lr)

    # -- checkpoint -----------------------------------------------------------------------------------------------

    def save(self, folder: str) -> None:
        """Writes the backend's files, and this rank's random states and version.

        Raises:
            NonFinite: A weight is not finite.
        """
        path = Path(folder)
        with self.backend.keep_on_device():
            require_finite(self.backend.local_tensors(), f"step {self.version} ({self.section_name}-{self.rank})")
            self.backend.save(path)
        save_state(
            path / STATE.format(section=self.section_name, rank=self.rank),
            {"rng": rng_state(), "version": self.version},
        )

    def load(self, folder: str) -> None:
        """Restores a checkpoint of any world size."""
        path = Path(folder)
        self.backend.load(path)
        files = [path / STATE.format(section=self.section_name, rank=rank) for rank in (self.rank, 0)]
        saved_state = load_state(files[0] if files[0].is_file() else files[1])
        set_rng_state(saved_state["rng"])
        self.version = int(saved_state["version"])

    def release_cache(self) -> float:
        """Returns memory that torch has cached to the accelerator, for another process.

        Returns:
            Bytes that are free on the accelerator beyond those of all weights in the dtype of the computation and of an update
            (`device_sharing.spare_bytes`); infinite on a CPU.
        """
        empty_cache()
        device, blueprint = self.backend.device, self.backend.blueprint
        if device.type == "cpu":
            return math.inf
        parameters = self.backend.backend.module.parameters()
        # DeepSpeed empties parameters that are divided among ranks.
        tensor_sizes = [
            int(getattr(parameter, "ds_numel", parameter.numel())) * blueprint.dtype.itemsize
            for parameter in parameters
        ]
        free_bytes, total_bytes = torch.accelerator.get_memory_info(device)
        return float(free_bytes - sum(tensor_sizes) - spare_bytes(max(tensor_sizes, default=0), total_bytes))

    def offload(self) -> None:
        """Moves all tensors to the host."""
        self.backend.offload()

    def reload(self) -> None:
        """Moves the tensors back to the accelerator after `offload`."""
        self.backend.reload()


def _describe_non_finite(batch: TokenBatch) -> str:
    """Returns text for a message that names the columns and prompts with non-finite values; "" if all are finite."""
    parameter_names = set()
    for name, column in batch.columns.items():
        is_non_finite = (
            batch.mask & ~column.isfinite() if column.dim() == 1 else batch.mask & ~column.flatten(1).isfinite().all(1)
        )
        non_finite_groups = torch.repeat_interleave(batch.group, batch.lengths)[is_non_finite]
        parameter_names |= {f"{name} of prompt {group}" for group in non_finite_groups.unique().tolist()}
    return f"; not finite: {format_names(sorted(parameter_names))}" if parameter_names else ""
