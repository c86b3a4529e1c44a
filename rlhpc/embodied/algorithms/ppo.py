"""Policy update of PPO and related algorithms: epochs over global minibatches. The result does not depend on the
division of minibatches into ranks and micro-batches.

Sums over all ranks (valid counts, advantage moments) are computed once for all minibatches before the first one, and
metrics are summed once after the last one. In between, the ranks exchange only gradients.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

import torch
from torch import nn

from rlhpc.algorithms import losses, policy_loss, value_loss
from rlhpc.algorithms.nonfinite import SkippedSteps, nonfinite
from rlhpc.algorithms.registry import POLICY_LOSSES
from rlhpc.embodied.data.batches import (
    TrainBatch,
    count_passes,
    local_minibatches,
    permutation,
    permutation_by_part,
    spread,
)
from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.text import format_names
from rlhpc.training.backend import Metrics, TrainingBackend
from rlhpc.training.flat_parameters import Reduce

if TYPE_CHECKING:
    from rlhpc.embodied.config import PpoAlgorithmConfig

Item = TypeVar("Item")


class TransitionStream:
    """Stream of a step's transitions on one rank, which arrive in parts.

    Args:
        receive_part: Receives the part with a given number: the part's decisions in all slots, `[n, T / parts, ...]`.
        num_parts: Number of parts, which arrive in order.
        num_steps: T, number of decisions in the step.

    Attributes:
        wait_s: Seconds spent on receiving parts.
    """

    def __init__(self, receive_part: Callable[[int], TrainBatch], num_parts: int, num_steps: int) -> None:
        self._receive_part, self.num_parts, self.num_steps = receive_part, num_parts, num_steps
        self._batch: TrainBatch | None = None
        self._next_part = 0
        self.wait_s = 0.0

    @property
    def batch(self) -> TrainBatch:
        """All transitions, available after the first part has arrived. Rows of missing parts are uninitialized."""
        assert self._batch is not None, "nothing has been received"
        return self._batch

    def wait_until(self, part: int) -> None:
        """Blocks until all parts up to and including `part` have been received."""
        start_time = time.perf_counter()
        while self._next_part <= part:
            part_batch = self._receive_part(self._next_part)
            if self._batch is None:
                self._batch = part_batch.map(self._allocate)
            for column, rows in zip(self._batch.tensors(), part_batch.tensors(), strict=True):
                num_slots, num_steps, *shape = rows.shape
                column.view(num_slots, self.num_parts, num_steps, *shape)[:, self._next_part] = rows
            self._next_part += 1
        self.wait_s += time.perf_counter() - start_time

    def _allocate(self, rows: torch.Tensor) -> torch.Tensor:
        """Allocates rows for all parts, with the shape and dtype of one part's rows."""
        num_slots, num_steps, *shape = rows.shape
        return rows.new_empty((num_slots * num_steps * self.num_parts, *shape))

    def iter_micro_batches(
        self, indices: torch.Tensor, chunk_size: int, make_item: Callable[[torch.Tensor], Item]
    ) -> Sequence[Item]:
        """Returns the items that `make_item` builds from chunks of up to `chunk_size` rows, ordered by part. Each chunk
        belongs to one part.

        The sequence builds an item when the item is requested, and waits for the item's rows.
        """
        part_of_row = indices % self.num_steps // (self.num_steps // self.num_parts)
        row_chunks = [
            (part_index, rows)
            for part_index in part_of_row.unique().tolist()
            for rows in indices[part_of_row == part_index].split(chunk_size)
        ]

        def build(part: int, rows: torch.Tensor) -> Item:
            self.wait_until(part)
            return make_item(rows)

        return LazySequence([partial(build, part_index, rows) for part_index, rows in row_chunks])


class LazySequence(Sequence[Item], Generic[Item]):
    """Sequence whose items are built each time they are requested."""

    def __init__(self, builders: Sequence[Callable[[], Item]]) -> None:
        self._builders = builders

    def __len__(self) -> int:
        return len(self._builders)

    def __iter__(self) -> Iterator[Item]:
        return (build_item() for build_item in self._builders)

    def __getitem__(self, index):  # type: ignore[no-untyped-def]
        return self._builders[index]()


#: Metrics that the built-in losses return. Additional metrics of other losses are reported under their names.
_BUILT_IN_METRICS = ("approx_kl", "clip_fraction", "ratio")
_BUILT_IN_LOSSES = (losses.ppo, losses.gspo, losses.cispo)
METRICS = ("policy_loss", "value_loss", "entropy", "approx_kl", "clip_fraction")


class MinibatchTotals(NamedTuple):
    """Numbers of a minibatch over all ranks: of its rows and tokens, and moments of its advantages."""

    num_rows: torch.Tensor
    tokens: torch.Tensor
    entropy_tokens: torch.Tensor
    mean: torch.Tensor
    std: torch.Tensor


@dataclass
class MinibatchShard:
    """One rank's rows of a minibatch, with numbers over all ranks and the number of passes of each rank. `stream` is set
    if training begins before the step's transitions have all arrived.
    """

    indices: torch.Tensor
    totals: MinibatchTotals
    num_passes: int = 0
    stream: TransitionStream | None = None
    is_empty: bool = False


class MicroBatch(NamedTuple):
    """Input of one forward and backward pass."""

    rows: TrainBatch
    totals: MinibatchTotals


#: Number of sizes of a pass where passes are recorded, each of which needs a recording.
_NUM_RECORDED_SIZES = 16


class PolicyUpdate:
    """Update of the policy in a training backend by PPO or a related algorithm, on one rollout at a time.

    Args:
        algorithm: Section `algorithm` of the configuration.
        backend: Training backend that holds the policy.
        batch_size: Number of transitions of a minibatch, summed over all ranks.
        micro_batch: Number of transitions per forward and backward pass; None for all rows of a rank's minibatch shard.
        seed: Seed of the order of transitions.
        reduce: Sums a tensor over the group, in place.
        rank, num_ranks: Index of this rank, and number of ranks in the group.
        gather: Gathers an object from all ranks, in rank order.
        skips_nonfinite: True skips optimizer steps with a non-finite gradient; False raises an error.
        sequence_length: Number of consecutive rows in a sequence, for `algorithm.loss_agg: seq-mean-token-mean`.
        may_mask_rows: Whether the loss mask may leave out rows. The host then reads which minibatches have none to train on.

    Raises:
        ConfigError: `algorithm.normalize_advantages` has an unknown value.
    """

    def __init__(
        self,
        algorithm: PpoAlgorithmConfig,
        backend: TrainingBackend,
        *,
        batch_size: int,
        micro_batch: int | None,
        sequence_length: int = 1,
        seed: int,
        reduce: Reduce = lambda t: t,
        gather: Callable[[Any], list[Any]] = lambda value: [value],
        rank: int = 0,
        num_ranks: int = 1,
        skips_nonfinite: bool = False,
        may_mask_rows: bool = True,
    ) -> None:
        self._may_mask_rows = may_mask_rows
        self.backend, self.batch_size, self.micro_batch, self.seed = backend, batch_size, micro_batch, seed
        self._reduce, self._rank, self._ranks = reduce, rank, num_ranks
        self.skips, self._gather = SkippedSteps(skips_nonfinite), gather
        self.epochs = algorithm.update_epochs
        self.loss_type = algorithm.loss_type
        self.value_coef, self.entropy_coef = algorithm.value_coef, algorithm.entropy_coef
        self.value_clip, self.huber_delta = algorithm.value_clip, algorithm.huber_delta
        self._sequence_steps = None if algorithm.loss_agg == "token-mean" else sequence_length
        self._counts_filtered = algorithm.count_filtered_groups
        self.target_kl = algorithm.target_kl
        normalize = algorithm.normalize_advantages
        self.normalize = "minibatch" if normalize == "auto" else normalize
        if self.normalize not in ("batch", "minibatch", "none", "false"):
            raise ConfigError(
                f"algorithm.normalize_advantages is {algorithm.normalize_advantages!r}; "
                "choose from batch, minibatch, none"
            )
        self._loss_options: dict[str, Any] = {
            "clip_ratio_low": algorithm.clip_ratio_low,
            "clip_ratio_high": algorithm.clip_ratio_high,
            "clip_ratio_c": algorithm.clip_ratio_c,
            "loss_agg": "token-mean",
        }
        self.decoupled = POLICY_LOSSES.find(self.loss_type) is losses.decoupled_ppo
        if self.decoupled:
            self._loss_options["behave_weight_cap"] = algorithm.tis_cap
        self._behave_weight_threshold = algorithm.behave_weight_threshold if self.decoupled else None
        self._interpolates = self.decoupled and algorithm.proximal_policy == "interpolated"

    def run(
        self,
        batch: TrainBatch,
        local_rows: range,
        total: int,
        step: int,
        lr: float,
        stream: TransitionStream | None = None,
    ) -> dict[str, float]:
        """Runs all epochs over one rollout, and reads the metrics (`train`).

        Returns:
            Metrics, the same on all ranks.

        Raises:
            NonFinite: A gradient is not finite.
        """
        return self.train(batch, local_rows, total, step, lr, stream)()

    def train(
        self,
        batch: TrainBatch,
        local_rows: range,
        total: int,
        step: int,
        lr: float,
        stream: TransitionStream | None = None,
    ) -> Callable[[], dict[str, float]]:
        """Runs all epochs over one rollout. The host reads nothing of the device, unless rows may be masked, non-finite steps
        are skipped, or `target_kl` is set.

        Args:
            batch: This rank's transitions, `[N, ...]`.
            local_rows: Indices of this rank's rows among the `total` transitions.
            total: Number of transitions on all ranks.
            step: Global step, which also seeds the order of transitions.
            lr: Learning rate.
            stream: Stream of the rows of `batch`, if some rows have not arrived. The first epoch then trains on each
                part as soon as the part has arrived.

        Returns:
            Function that reads the metrics, the same on all ranks. It raises NonFinite if a gradient is not finite. All ranks
            call it, before any weight leaves a rank.
        """
        device = batch.logprobs.device
        if self.decoupled and not self._interpolates:
            batch = replace(batch, proximal_logprobs=self._compute_proximal_logprobs(batch))
            if self._behave_weight_threshold is not None:
                batch = _without_stale_tokens(batch, self._behave_weight_threshold)
        if self._sequence_steps is not None:
            batch = self._add_sequence_weights(batch, total)
        sums = torch.zeros(len(METRICS), dtype=torch.float64, device=device)
        norms = torch.zeros((), dtype=torch.float64, device=device)
        loss_metrics: dict[str, torch.Tensor] = {}
        num_updates = num_empty = 0
        for minibatch_index, minibatch in enumerate(self._iter_minibatches(batch, local_rows, total, step, stream)):
            if minibatch.is_empty:  # an optimizer step would move the weights by Adam's momentum alone
                num_empty += 1
                continue
            metric_sums, minibatch_metrics = self._accumulate(batch, minibatch)
            if self._exceeds_target_kl(metric_sums):
                break
            norm = self.backend.optimizer_step(lr)
            if self.backend.is_step_skipped(norm):
                nonfinite_text = self._describe_nonfinite(metric_sums)
                self.skips.record_skip(lambda: f"step {step}, minibatch {minibatch_index}: {nonfinite_text}")  # noqa: B023 (called at once)
                continue
            self.skips.record_step()
            norms += norm
            sums += metric_sums
            loss_metrics = _sum_metrics(loss_metrics, minibatch_metrics)
            num_updates += 1
        if stream is not None:  # waits also if the updates have ended early
            stream.wait_until(stream.num_parts - 1)
        sums = self._sum_over_ranks(sums)

        def read() -> dict[str, float]:
            means = (sums / max(num_updates, 1)).tolist()
            total_norm = float(norms)
            if not math.isfinite(total_norm):
                raise nonfinite(f"step {step}: the norm of a gradient is not finite")
            return {
                **dict(zip(METRICS, means, strict=True)),
                "grad_norm": total_norm / max(num_updates, 1),
                "epochs": num_updates / -(-total // self.batch_size),
                "lr": lr,
                **self._compute_loss_metrics(loss_metrics, max(num_updates, 1)),
                **self.skips.pop_metrics(),
                **({"empty_minibatches": float(num_empty)} if num_empty else {}),
            }

        return read

    def _add_sequence_weights(self, batch: TrainBatch, total: int) -> TrainBatch:
        """Returns the batch with the sizes of its sequences, scaled such that the loss weight of a token or value in a
        minibatch of n rows is 1 / (n · size). Summed over all `total` rows of the step, that is the mean over the trained
        sequences, or over all of them (`algorithm.count_filtered_groups`), of the mean over a sequence.
        """
        assert self._sequence_steps is not None
        batch = batch.with_sequence_sizes(self._sequence_steps)
        assert batch.sequence_sizes is not None
        trained_sequences = (batch.sequence_sizes[:: self._sequence_steps, 1] > 0).sum().double()
        num_sequences: torch.Tensor | float = self._sum_over_ranks(trained_sequences.reshape(1))[0].clamp(min=1).float()
        if self._counts_filtered:
            num_sequences = total / self._sequence_steps
        return replace(batch, sequence_sizes=batch.sequence_sizes.clamp(min=1) * num_sequences / total)

    @torch.no_grad()
    def _compute_proximal_logprobs(self, batch: TrainBatch) -> torch.Tensor:
        """Returns log-probs of the rollout's actions under the weights before the update, which may be newer than the
        rollout's weights.
        """
        logprobs = []
        options = {"compute_logprobs": True, "compute_entropy": False, "compute_values": False}
        for rows in torch.arange(len(batch), device=batch.mask.device).split(self.micro_batch or len(batch)):
            logprobs.append(self.backend.evaluate(_forward, (batch.select(rows).policy_inputs(), options))["logprobs"])
        return torch.cat(logprobs)

    def _compute_loss_metrics(self, sums: dict[str, torch.Tensor], num_updates: int) -> dict[str, float]:
        """Returns the means of the additional metrics of a loss that is not built in. A rank without rows gets the
        metrics' names from the other ranks.
        """
        if POLICY_LOSSES.find(self.loss_type) in _BUILT_IN_LOSSES:
            return {}
        metric_names = sorted(set().union(*self._gather(sorted(sums)))) if self._ranks > 1 else sorted(sums)
        if not metric_names:
            return {}
        zero = torch.zeros((), dtype=torch.float64, device=self.backend.device)
        metric_sums = self._sum_over_ranks(torch.stack([sums.get(name, zero) for name in metric_names]))
        return dict(zip(metric_names, (metric_sums / num_updates).tolist(), strict=True))

    def _describe_nonfinite(self, stats: torch.Tensor) -> str:
        """Describes the non-finite values and their ranks. All ranks must call the method; they get the same text."""
        flags = torch.zeros((self._ranks, len(METRICS)), dtype=torch.float64, device=stats.device)
        flags[self._rank] = (~stats.isfinite()).double()
        losses = [
            f"{name} of actor-{rank}"
            for rank, row in enumerate(self._sum_over_ranks(flags).tolist())
            for name, is_nonfinite in zip(METRICS, row, strict=True)
            if is_nonfinite
        ]
        gradients = self.backend.bad_gradients()
        gradient_text = (
            f"the gradient of {format_names(gradients)} is not finite"
            if gradients
            else "the gradient's norm is not finite"
        )
        return f"{gradient_text} ({format_names(losses)})" if losses else gradient_text

    def _exceeds_target_kl(self, stats: torch.Tensor) -> bool:
        """Returns whether a minibatch's KL estimate exceeds `target_kl`. The caller then skips this update and all
        later updates (as in ManiSkill).
        """
        if self.target_kl is None:
            return False
        return float(self._sum_over_ranks(stats[METRICS.index("approx_kl")].clone())) > self.target_kl

    def _sum_over_ranks(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._reduce(tensor) if self._ranks > 1 else tensor

    def _iter_minibatches(
        self, batch: TrainBatch, local_rows: range, total: int, step: int, stream: TransitionStream | None
    ) -> Iterator[MinibatchShard]:
        """Yields the minibatches of all epochs. If possible, computes sums over the ranks before the first minibatch."""
        first_row = 0
        if stream is not None:
            yield from self._iter_stream_minibatches(batch, local_rows, total, step, stream)
            first_row = 1
        orders = [permutation(total, self.seed, step, epoch) for epoch in range(first_row, self.epochs)]
        epochs = [
            self._make_shards(batch, local_minibatches(row_order, self.batch_size, local_rows)) for row_order in orders
        ]
        yield from (minibatch for minibatches in epochs for minibatch in minibatches)

    def _iter_stream_minibatches(
        self, batch: TrainBatch, local_rows: range, num_rows: int, step: int, stream: TransitionStream
    ) -> Iterator[MinibatchShard]:
        """Yields the minibatches of the first epoch.

        A minibatch that spans several parts starts before all parts have arrived. The number of its valid rows and the
        moments of its advantages are then unknown. Therefore it trains on all its rows, and its advantages are not
        normalized.
        """
        num_slots, num_parts = num_rows // stream.num_steps, stream.num_parts
        indices = local_minibatches(
            permutation_by_part(num_slots, stream.num_steps, num_parts, self.seed, step, 0), self.batch_size, local_rows
        )
        minibatches_per_part = num_rows // num_parts // self.batch_size
        if minibatches_per_part:
            for part_index in range(num_parts):
                stream.wait_until(part_index)
                yield from self._make_shards(
                    batch, indices[part_index * minibatches_per_part : (part_index + 1) * minibatches_per_part]
                )
            return
        stream.wait_until(0)
        device, tokens_per_row = batch.logprobs.device, batch.tokens_per_row
        zero = torch.zeros((), device=device)
        row_counts = zero + self.batch_size
        for local_indices in indices:
            num_tokens = row_counts * tokens_per_row
            totals = MinibatchTotals(row_counts, num_tokens, num_tokens, zero, zero + 1)
            yield MinibatchShard(local_indices.to(device), totals, stream=stream)

    def _make_shards(self, batch: TrainBatch, indices: list[torch.Tensor]) -> list[MinibatchShard]:
        """Returns this rank's shards of minibatches, with counts and advantage moments over all ranks."""
        device = batch.logprobs.device
        indices = [rows_of_shard.to(device) for rows_of_shard in indices]
        mask = policy_mask = batch.mask.double()
        if batch.policy_mask is not None:
            policy_mask = mask * batch.policy_mask.reshape(-1, *[1] * (mask.dim() - 1))
        advantages = batch.advantages.double() * policy_mask
        moment_columns = [policy_mask, advantages, advantages * batch.advantages]
        rows = torch.stack(
            [column.flatten(1).sum(1) if column.dim() > 1 else column for column in moment_columns], dim=1
        )
        tokens = batch.token_weights()
        has_token_mask = batch.token_mask is not None or batch.policy_mask is not None
        token_counts = mask if tokens.shape[1] == 1 and not has_token_mask else tokens.double().sum(1)
        if self.normalize == "batch":
            advantage_moments = rows.sum(0).expand(len(indices), 3).clone()
        else:
            advantage_moments = torch.stack([rows[rows_of_shard].sum(0) for rows_of_shard in indices])
        counted_columns = [mask] if token_counts is mask else [mask, token_counts]
        num_columns = len(counted_columns)
        if batch.entropy_mask is not None:
            counted_columns.append(batch.entropy_mask.double().reshape(len(batch), -1).sum(1))
        counts = [torch.stack([column[rows_of_shard].sum() for rows_of_shard in indices]) for column in counted_columns]
        num_valid, value_sums, squared_sums, *counts = self._sum_over_ranks(
            torch.cat([advantage_moments, torch.stack(counts, dim=1)], dim=1)
        ).unbind(1)
        mean = value_sums / num_valid.clamp(min=1)
        variance = ((squared_sums - num_valid * mean * mean) / (num_valid - 1).clamp(min=1)).clamp(min=0)
        if self.normalize in ("none", "false"):
            mean, variance = torch.zeros_like(mean), torch.ones_like(variance)
        mean, std = mean.float(), variance.sqrt().float()
        empty_flags = (counts[0] == 0).tolist() if self._may_mask_rows else [False] * len(indices)
        counts = [sums_per_shard.float().clamp(min=1) for sums_per_shard in counts]
        shards = [
            MinibatchShard(
                indices[i],
                MinibatchTotals(counts[0][i], counts[num_columns - 1][i], counts[-1][i], mean[i], std[i]),
                is_empty=is_empty,
            )
            for i, is_empty in enumerate(empty_flags)
        ]
        if not self.backend.lockstep:
            return shards
        local_passes = [-(-shard.indices.numel() // self._choose_micro_batch_size(shard)) for shard in shards]
        num_passes = count_passes(local_passes, self._rank, self._ranks, self._reduce)
        return [replace(shard, num_passes=shard_passes) for shard, shard_passes in zip(shards, num_passes, strict=True)]

    def _choose_micro_batch_size(self, shard: MinibatchShard) -> int:
        return self.micro_batch or max(shard.indices.numel(), 1)

    def _recorded_size(self, count: int) -> int:
        """Returns the number of rows to which a pass of `count` rows is padded where passes are recorded.

        The transitions of several ranks are shuffled together, so the number of a rank's rows differs between minibatches.
        """
        limit = self.micro_batch or self.batch_size
        quantum = max(limit // _NUM_RECORDED_SIZES, 1)
        return min(-(-count // quantum) * quantum, limit)

    def _accumulate(self, batch: TrainBatch, shard: MinibatchShard) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Accumulates the gradients of one minibatch; returns this rank's summands of the metrics and of the loss's
        additional metrics.
        """
        metric_sums = torch.zeros(len(METRICS), dtype=torch.float64, device=batch.logprobs.device)
        loss_metrics: dict[str, torch.Tensor] = {}

        def select_rows(indices: torch.Tensor) -> MicroBatch:
            count = indices.numel()
            num_idle = self._recorded_size(count) - count if self.backend.records_passes else 0
            if not num_idle:
                return MicroBatch(batch.select(indices), shard.totals)
            padded_indices = torch.cat([indices, indices[-1:].expand(num_idle)])
            return MicroBatch(batch.select(padded_indices).idle_from(count), shard.totals)

        if shard.stream is not None:
            micro_batches = shard.stream.iter_micro_batches(
                shard.indices, self._choose_micro_batch_size(shard), select_rows
            )
        else:
            micro_batches = [
                select_rows(rows) for rows in shard.indices.split(self._choose_micro_batch_size(shard)) if rows.numel()
            ]
        if shard.num_passes > len(micro_batches):
            micro_batches = [
                *micro_batches,
                *[MicroBatch(batch.idle_row(), shard.totals)] * (shard.num_passes - len(micro_batches)),
            ]
        for metrics in self.backend.forward_backward(micro_batches, self._compute_loss):
            metric_sums += metrics.pop("stats")
            loss_metrics = _sum_metrics(loss_metrics, metrics)
        return metric_sums, loss_metrics

    def _compute_loss(self, module: nn.Module, micro_batch: MicroBatch) -> tuple[torch.Tensor, Metrics]:
        """Returns a micro-batch's summands of the minibatch's loss and metrics; "stats" holds the values of `METRICS`."""
        rows, totals = micro_batch
        num_rows = len(rows)
        tokens = rows.token_weights()
        advantages = rows.advantages.reshape(num_rows, -1)
        if self.normalize not in ("none", "false"):
            advantages = (advantages - totals.mean) / (totals.std + 1e-8)
        has_value_loss = self.value_coef > 0
        options = {"compute_logprobs": True, "compute_entropy": True, "compute_values": has_value_loss}
        outputs = _forward(module, (rows.policy_inputs(), options))
        mask = rows.mask.reshape(num_rows, -1)
        extra_inputs: dict[str, Any] = {}
        policy_tokens = tokens
        if self._interpolates:
            proximal_logprobs = interpolate_logprobs(rows, outputs["logprobs"])
            extra_inputs["proximal_logprobs"] = proximal_logprobs
            policy_tokens = self._without_stale(tokens, proximal_logprobs - rows.logprobs.reshape(num_rows, -1))
        token_weights, value_weights = self._compute_sequence_weights(rows, policy_tokens, mask)
        if rows.proximal_logprobs is not None:
            extra_inputs["proximal_logprobs"] = rows.proximal_logprobs.reshape(num_rows, -1)
        # For the loss, a decision is a sequence of one or several tokens: [M, ...] → [M, tokens].
        policy_term, loss_metrics = policy_loss(
            self.loss_type,
            logprobs=outputs["logprobs"].reshape(num_rows, -1),
            old_logprobs=rows.logprobs.reshape(num_rows, -1),
            advantages=spread(advantages, tokens.shape[1]),
            loss_mask=policy_tokens,
            global_tokens=totals.tokens,
            weights=token_weights,
            **self._loss_options,
            **extra_inputs,
        )
        if has_value_loss:
            value_term, _ = value_loss(
                values=outputs["values"].reshape(num_rows, -1),
                returns=rows.returns.reshape(num_rows, -1),
                loss_mask=mask,
                old_values=rows.values.reshape(num_rows, -1),
                value_clip=self.value_clip,
                huber_delta=self.huber_delta,
                global_tokens=totals.num_rows,
                weights=value_weights,
            )
        else:
            value_term = torch.zeros_like(policy_term)
        entropy_mask = tokens if rows.entropy_mask is None else rows.entropy_mask.reshape(num_rows, -1)
        entropy = (outputs["entropy"].reshape(num_rows, -1) * entropy_mask).sum() / totals.entropy_tokens
        loss = policy_term + self.value_coef * value_term - self.entropy_coef * entropy
        with torch.no_grad():
            token_fraction = tokens.sum() / totals.tokens  # `loss_metrics` are means over this micro-batch
            zero = torch.zeros_like(loss)
            means = [
                token_fraction * loss_metrics.get("approx_kl", zero),
                token_fraction * loss_metrics.get("clip_fraction", zero),
            ]
            metric_values = torch.stack([policy_term, value_term, entropy, *means]).double()
            additional_metrics = {
                name: token_fraction * torch.as_tensor(metric, dtype=torch.float64, device=metric_values.device)
                for name, metric in loss_metrics.items()
                if name not in _BUILT_IN_METRICS
            }
        return loss, {"stats": metric_values, **additional_metrics}

    def _without_stale(self, tokens: torch.Tensor, log_ratios: torch.Tensor) -> torch.Tensor:
        """Returns the loss mask without the tokens whose ratio of proximal to behaviour policy exceeds
        `algorithm.behave_weight_threshold`. The mean over the minibatch counts them, with a loss of 0.
        """
        from rlhpc.algorithms.correction_types import TokenRejection

        threshold = self._behave_weight_threshold
        return tokens if threshold is None else tokens * TokenRejection(high=threshold).keeps(log_ratios.exp())

    def _compute_sequence_weights(
        self, rows: TrainBatch, tokens: torch.Tensor, mask: torch.Tensor
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Returns the loss weights of tokens and values, `[M, ...]`; None if losses are means over tokens."""
        if rows.sequence_sizes is None:
            return None, None
        token_sizes, value_sizes = rows.sequence_sizes.split(1, dim=1)
        return tokens / (token_sizes * self.batch_size), mask / (value_sizes * self.batch_size)


def interpolate_logprobs(rows: TrainBatch, logprobs: torch.Tensor) -> torch.Tensor:
    """Returns log-probs of the proximal policy `[M, tokens]`, without a gradient: d / (d + 1) of the way from the policy that
    acted to the trained one, for weights that acted d versions ago (RLinf's asynchronous PPO).

    Args:
        rows: Rows of a micro-batch, with `lags`.
        logprobs: Log-probs under the weights in training.
    """
    assert rows.lags is not None
    behaviour_logprobs = rows.logprobs.reshape(len(rows), -1)
    lags = rows.lags.reshape(len(rows), 1).to(behaviour_logprobs.dtype)
    trained_logprobs = logprobs.detach().reshape(len(rows), -1)
    return behaviour_logprobs + lags / (lags + 1) * (trained_logprobs - behaviour_logprobs)


def _forward(module: nn.Module, request: tuple[dict[str, Any], dict[str, bool]]) -> dict[str, torch.Tensor]:
    """Runs the policy's training pass on `(inputs, options)`."""
    inputs, options = request
    return module(lambda policy: policy.default_forward(inputs, **options))


def _sum_metrics(sums: dict[str, torch.Tensor], added_sums: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {**sums, **{name: sums[name] + metric if name in sums else metric for name, metric in added_sums.items()}}


def _without_stale_tokens(batch: TrainBatch, threshold: float) -> TrainBatch:
    """Returns the batch with a loss mask that leaves out the tokens whose ratio of proximal to behaviour policy exceeds a
    threshold (the correction `token_rejection`). The entropy of these tokens still counts.
    """
    from rlhpc.algorithms.correction_types import TokenRejection

    assert batch.proximal_logprobs is not None
    tokens, shape = batch.token_weights(), batch.logprobs.shape
    ratios = (batch.proximal_logprobs - batch.logprobs).reshape(tokens.shape).exp()
    kept_tokens = tokens * TokenRejection(high=threshold).keeps(ratios)
    return replace(batch, token_mask=kept_tokens.reshape(shape), entropy_mask=tokens.reshape(shape))
