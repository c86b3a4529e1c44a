"""GRPO actor: rank of the policy's trainer in an RL run."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import numpy as np
import torch

from rlhpc.language.algorithms.base import (
    ACTOR,
    ADVANTAGES,
    REFERENCE,
    ROLLOUT,
    VALUE_HEAD,
    VALUES,
    MinibatchCounts,
    length_limit,
)
from rlhpc.language.algorithms.base import RETURNS as RETURNS_OF
from rlhpc.language.algorithms.base import VERSIONS as VERSION_OF
from rlhpc.language.algorithms.policy_gradient import SPECIAL
from rlhpc.language.algorithms.registry import make_algorithm
from rlhpc.language.config.run import GrpoConfig, minibatch_size, responses_per_step
from rlhpc.language.data.tokenizer import special_tokens
from rlhpc.language.engines.common import engine_precision
from rlhpc.language.models.logprobs import TokenScores
from rlhpc.language.models.micro_batching import Parts, minibatch_of, minibatches, values_of
from rlhpc.language.models.token_batch import TokenBatch
from rlhpc.language.multi_policy import Policies, policies_of
from rlhpc.language.rollout.sample_group import NUM_BATCHES, Arrivals, BlockChannel, SampleGroup
from rlhpc.language.scoring.groups import CRITIC
from rlhpc.language.scoring.registry import Column, LogitReader, Scorer
from rlhpc.language.training.prompt_dispatch import GROUPS, RETURNS, PromptMap
from rlhpc.language.training.trainer import TokenTrainer
from rlhpc.language.training.weight_sync import ActorWeights, Probe, Prober, is_probed, probe_text
from rlhpc.language.workers.actor import LanguageActor
from rlhpc.runs.device import worker_device
from rlhpc.runtime.channel import Channel
from rlhpc.runtime.devices import device_name, empty_cache
from rlhpc.runtime.errors import ConfigError, DeadlineExceeded, RlhpcError
from rlhpc.runtime.text import format_names
from rlhpc.runtime.trace_recorder import traced
from rlhpc.weights.verification import COST

#: Largest mean difference of log-probs with `runner.deterministic` if ranks compute parts of sums, by dtype.
SPLIT_BOUNDS = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}
#: Prefix of the metrics of one policy.
POLICY = "policy/"
#: Metrics of a policy that are not means over its tokens.
_COUNTS = ("tokens", "grad_norm")


def split_policy_batches(policies: Policies, batch: TokenBatch, split: Callable[[TokenBatch], Parts]) -> Parts:
    """Splits a batch into micro-batches of one policy each.

    Args:
        policies: Policies by role.
        batch: Batch with samples of any policies.
        split: Function that splits the samples of one policy into micro-batches: the same number on all ranks, some maybe
            empty.
    """
    policy_of_sample, micro_batches = policies.indices_of(batch.role), Parts()
    for policy in range(len(policies.names)):
        indices = torch.nonzero(policy_of_sample == policy).flatten()
        micro_batches += [(indices[samples], micro_batch) for samples, micro_batch in split(batch.select(indices))]
    return micro_batches


def split_by_policy(
    policies: Policies, batches: Sequence[TokenBatch], metric_parts: Sequence[Mapping[str, torch.Tensor]]
) -> list[dict[str, torch.Tensor]]:
    """Returns each micro-batch's metrics with an additional copy for each policy (`policy/NAME/METRIC`).

    The copies are 0 except for the policy of the micro-batch. They include `tokens`, the number of trained tokens.

    Args:
        policies: Policies by role.
        batches: Micro-batches, each of one policy.
        metric_parts: Metrics of each micro-batch.
    """
    metrics = []
    for batch, batch_metrics in zip(batches, metric_parts, strict=True):
        policy_name = policies.names[int(policies.indices_of(batch.role)[0])]
        metrics_with_tokens = {**batch_metrics, "tokens": batch.mask.sum()}
        policy_metrics = {
            f"{POLICY}{name}/{metric}": metric_total if name == policy_name else torch.zeros(())
            for name in policies.names
            for metric, metric_total in metrics_with_tokens.items()
        }
        metrics.append({**batch_metrics, **policy_metrics})
    return metrics


def scale_policy_means(policies: Policies, metrics: dict[str, float]) -> dict[str, float]:
    """Converts the metrics by policy from means over all trained tokens to means over the policy's tokens."""
    for name in policies.names:
        prefix = f"{POLICY}{name}/"
        scale = metrics["tokens"] / max(metrics[f"{prefix}tokens"], 1.0)
        metrics |= {
            key: mean * scale
            for key, mean in metrics.items()
            if key.startswith(prefix) and key.removeprefix(prefix) not in _COUNTS
        }
    return metrics


class GrpoActor(LanguageActor[GrpoConfig]):
    """Rank of a GRPO trainer: receives groups from rollout ranks, scores and trains on them, and sends the new weights."""

    backend: TokenTrainer

    def __init__(self, cfg: GrpoConfig) -> None:
        super().__init__(cfg)
        self._weights: ActorWeights | None = None
        self._prober: Prober | None = None

    def init_worker(self, total_steps: int, prompts: PromptMap) -> dict[str, Any]:
        """Loads model and optimizer.

        Args:
            total_steps: Number of steps of the run, for the learning rate.
            prompts: Map of prompts to ranks.

        Returns:
            `parameters`: number of trained parameters; `device`: name of the device.
        """
        cfg, self.prompts = self.cfg, prompts
        self.algorithm = make_algorithm(cfg)
        reference = (
            any(column.by == REFERENCE for column in self.algorithm.columns) and REFERENCE not in prompts.scoring
        )
        self.policies = policies_of(cfg)
        make_trainer = partial(
            TokenTrainer,
            cfg,
            self,
            has_reference=reference,
            has_values=cfg.actor.model.value_head,
            policies=self.policies,
        )
        trainer = self._load_model(total_steps, make_trainer)
        self._scorers = {
            column.name: column.by(cfg, self.backend.device)
            for column in self.algorithm.columns
            if not isinstance(column.by, str)
        }
        reader = self.algorithm.reader
        self._reader = None if reader is None else reader(cfg, self.backend.device)
        # Marks of tool calls are often added to a vocabulary without being special.
        special_ids = {*special_tokens(self.tokenizer), *self.tokenizer.added_tokens_decoder}
        self._special_ids = torch.tensor(sorted(special_ids), device=self.backend.device)
        self._received_columns: dict[str, list[str]] = {}
        for column in self.algorithm.columns:
            if isinstance(column.by, str) and column.by in prompts.scoring:
                self._received_columns.setdefault(column.by, []).append(column.name)
        self._local_columns = [
            c for c in self.algorithm.columns if c.by != ROLLOUT and c.by not in self._received_columns
        ]
        # Values and log-probs come from one pass. Further epochs need the log-probs from before the first one.
        is_scored = cfg.algorithm.update_epochs > 1 or any(c.by == VALUE_HEAD for c in self._local_columns)
        self._columns_of_loss = [] if is_scored else [c for c in self._local_columns if c.loss_only]
        self._batches: list[TokenBatch] = []
        #: Number of minibatches of the current step that `algorithm.early_stop_imp_ratio` left out.
        self._num_early_stopped = 0
        self._members: dict[int, tuple[bytes, torch.Tensor]] = {}
        self._received_step = -1
        self._num_responses = responses_per_step(cfg)
        self._minibatch_size = minibatch_size(cfg, cfg.actor)
        self._weights = ActorWeights(self, cfg, prompts, trainer)
        self.temperature = cfg.rollout.temperature
        COST.pop()
        return {"parameters": trainer.num_trained_parameters, "device": device_name(trainer.device)}

    def connect(self) -> None:
        """Connects to the channels, once the driver has created them."""
        self._groups = BlockChannel(self.connect_channel(GROUPS), self, self.sizes)
        self._returns = self.connect_channel(RETURNS) if CRITIC in self._received_columns else None
        self._arrivals = Arrivals(frozenset(self._received_columns))

    def load(self, folder: str) -> None:
        """Restores a checkpoint of any world size; frozen weights are sent again."""
        super().load(folder)
        self.forget_sent()

    # -- weights --------------------------------------------------------------------------------------------------

    def sync_weights(
        self,
        version: int,
        ranks: Sequence[int],
        *,
        is_trial: bool = False,
        is_perturbed: bool = False,
        engines_wait: bool = False,
    ) -> None:
        """Sends the weights to rollout ranks; frozen weights are sent once, and again if the ranks change.

        Args:
            version: Version of the actor's weights.
            ranks: Ranks of the rollout group.
            is_trial: Whether to omit the probe, because the trainer will score the engines' samples (`score_probe_samples`).
            is_perturbed: Whether to send perturbed weights (`TrainingBackend.perturbed`).
            engines_wait: Whether all engines receive the weights while they are sent.

        Raises:
            RlhpcError: The actor has weights of another version.
        """
        if version != self.version:  # the previous update failed
            raise RlhpcError(f"weights of version {version} are not there: the actor has {self.version}")
        with self._perturb_weights(is_perturbed):  # the last bucket needs all weights until it is written
            self.weights.send(version, ranks, None if is_trial else self._probe(version), engines_wait=engines_wait)

    def score_probe_samples(
        self, probe_texts: Sequence[tuple[Sequence[int], int | None]], is_perturbed: bool = False
    ) -> dict[str, Any]:
        """Scores the samples of the engines; all ranks call this method.

        Args:
            probe_texts: Token ids of each sample, with the index of its policy or, in a run with one policy, None.
            is_perturbed: Whether to score with perturbed weights.

        Returns:
            `dtype`: dtype of the trainer's computation; `scores`: result of `Prober.score` for each sample; `untrained`: names
            of buffers and frozen weights.
        """
        _, policy_by_role = self.policies
        with self._perturb_weights(is_perturbed):
            prober = self._find_prober()
            scores = [
                prober.score(
                    token_ids, 0 if policy is None else policy_by_role.index(policy), is_perturbed=is_perturbed
                )
                for token_ids, policy in probe_texts
            ]
        module = self.backend.backend.module
        untrained_names = [name for name, parameter in module.named_parameters() if not parameter.requires_grad]
        untrained_names += [name for name, _ in module.named_buffers()]
        return {"dtype": prober.dtype, "scores": scores, "untrained": untrained_names}

    def _perturb_weights(self, is_perturbed: bool) -> AbstractContextManager[None]:
        return self.backend.backend.perturbed() if is_perturbed else self.backend.keep_on_device()

    def send_all_weights(self, version: int, ranks: Sequence[int]) -> None:
        """Sends the current weights in full to rollout ranks that have just joined.

        Raises:
            RlhpcError: The actor has weights of another version.
        """
        if version != self.version:
            raise RlhpcError(f"weights of version {version} are not there: the actor has {self.version}")
        with self.backend.keep_on_device():
            self.weights.send_all_weights(version, ranks)

    @property
    def weights(self) -> ActorWeights:
        """Sender of the weights."""
        assert self._weights is not None
        return self._weights

    def _probe(self, version: int) -> Probe | None:
        """Returns the trainer's log-probs of a fixed text, or None if this version is not probed.

        All ranks call this method, with reloaded tensors.
        """
        if not is_probed(version, self.cfg.rollout.probe_interval):
            return None
        prober = self._find_prober()
        policy_names, policy_by_role = self.policies
        policy = version % len(policy_names) if policy_names else None
        return prober.ask() if policy is None else prober.ask(policy, policy_by_role.index(policy))

    def _find_prober(self) -> Prober:
        if self._prober is None:
            data_config, rollout_config = self.cfg.data, self.cfg.rollout
            token_ids = probe_text(
                len(self.tokenizer), data_config.max_prompt_tokens + rollout_config.max_new_tokens - 1
            )
            dtypes = [self.backend.backend.dtype, getattr(torch, engine_precision(self.cfg, worker_device(self)))]
            coarsest_dtype = max(dtypes, key=lambda dtype: torch.finfo(dtype).eps)
            self._prober = Prober(self.backend, token_ids, self.pad, coarsest_dtype)
        return self._prober

    def refresh_reference(self, version: int) -> None:
        """Sends all weights to the reference's ranks, which use them from then on."""
        with self.backend.keep_on_device():
            self.weights.refresh_reference(version)

    def forget_sent(self) -> None:
        """Makes the next weight sync include the frozen weights again; all ranks call this method."""
        if self._weights is not None:
            self._weights.forget()

    # -- received groups ------------------------------------------------------------------------------------------

    def receive(self, step: int) -> dict[str, float]:
        """Receives this rank's groups of a step; scores them on arrival, except in a colocated run.

        Returns:
            `score_s` and `wait_s`: seconds spent scoring and waiting.

        Raises:
            DeadlineExceeded: Groups or columns did not arrive within `runner.step_timeout_s`.
        """
        prompt_positions = self.prompts.of_actor(self.data)
        self._batches = []
        self._received_step = -1
        score_s = 0.0
        wait_s = 0.0
        self._arrivals.begin(step)
        self._members.clear()
        deadline = time.monotonic() + self.cfg.runner.step_timeout_s
        position_groups = np.array_split(np.asarray(prompt_positions), min(NUM_BATCHES, len(prompt_positions)))
        for group_positions in position_groups:
            while missing_by_source := self._arrivals.find_missing_positions(step, group_positions.tolist()):
                start_time = time.perf_counter()
                try:
                    self._arrivals.add(self._groups.get(max(0.0, deadline - time.monotonic())))
                except DeadlineExceeded:
                    raise DeadlineExceeded(
                        f"step {step}: {self._describe_missing(missing_by_source)} within runner.step_timeout_s "
                        f"({self.cfg.runner.step_timeout_s:g} s)"
                    ) from None
                wait_s += time.perf_counter() - start_time
            batch = TokenBatch.joined(
                [self._unpack_group(*self._arrivals.pop_complete(step, p)) for p in group_positions.tolist()]
            )
            if not self.cfg.actor.offload_in_rollout:
                score_s += self._recompute_logprobs(batch, step)
            self._batches.append(batch)
        self._received_step = step
        return {"score_s": score_s, "wait_s": wait_s}

    def _describe_missing(self, missing_by_source: Mapping[str, Sequence[int]]) -> str:
        """Returns a description of the missing messages and their senders."""
        descriptions = []
        for group_name, missing_positions in missing_by_source.items():
            ranks = {self.prompts.scorer_of(group_name, p) for p in missing_positions} if group_name else set[int]()
            sender_names = ", ".join(f"{group_name}-{rank}" for rank in sorted(ranks)) or self.prompts.rollout_name
            missing_text = "the column of prompts" if group_name else "prompts"
            descriptions.append(
                f"{missing_text} {format_names(missing_positions, limit=8)} did not come from {sender_names}"
            )
        return ", and ".join(descriptions)

    def _unpack_group(self, group: SampleGroup, columns: Mapping[str, torch.Tensor]) -> TokenBatch:
        """Returns the trained samples of a group, with the received columns.

        Raises:
            RlhpcError: A trained token is older than `algorithm.max_staleness` allows.
        """
        batch, cfg = group.batch, self.cfg.algorithm
        self._members[group.position] = group.answers_digest, group.members
        batch.columns |= {
            name: column for group_name, column in columns.items() for name in self._received_columns[group_name]
        }
        batch.pad_id = self.pad
        batch = group.trained_samples()
        token_versions = batch.columns[VERSION_OF][batch.mask]
        if len(token_versions) and group.step - 1 - int(token_versions.min()) > cfg.max_staleness:
            raise RlhpcError(
                f"step {group.step}, prompt {group.position}: a token was drawn by version {int(token_versions.min())}, "
                f"more than algorithm.max_staleness ({cfg.max_staleness}) behind {group.step - 1}"
            )
        return batch

    @traced("log-probs", "train")
    def _recompute_logprobs(self, batch: TokenBatch, step: int) -> float:
        """Adds the columns that this rank computes, such as log-probs with the weights before the update.

        The columns of `_columns_of_loss` get no values for the samples of the step's first minibatch. All ranks call this
        method the same number of times.

        Returns:
            Seconds spent.
        """
        start_time = time.perf_counter()
        batch.columns |= self._compute_columns(
            batch, [c for c in self._local_columns if c not in self._columns_of_loss]
        )
        if self._minibatch_size < self._num_responses:
            minibatch_index = minibatch_of(batch, self._num_responses, self._minibatch_size, (self.seed, step, 0))
            later_samples = torch.nonzero(minibatch_index).flatten()
            token_indices = batch.tokens_of(later_samples)
            for name, column_values in self._compute_columns(
                batch.select(later_samples), self._columns_of_loss
            ).items():
                batch.columns[name] = column_values.new_zeros(batch.tokens).index_copy(0, token_indices, column_values)
        return time.perf_counter() - start_time

    def _compute_columns(self, batch: TokenBatch, columns: Sequence[Column]) -> dict[str, torch.Tensor]:
        """Computes columns of a batch; all ranks call this method for the same columns."""
        column_values, model_scores = dict[str, torch.Tensor](), dict[int, TokenScores]()
        micro_batches = dict[tuple[bool, bool], Parts]()
        for column in columns:
            model = self.backend if isinstance(column.by, str) else self._scorers[column.name]
            form = model.packed, model.shares_prefixes
            if form not in micro_batches:
                micro_batches[form] = self._micro_batches(batch, packed=form[0], shares_prefixes=form[1])
            scorer_name = f"algorithm.name={self.cfg.algorithm.name}: the scorer of column {column.name}"
            column_values[column.name] = values_of(
                partial(self._compute_column, column, model_scores), micro_batches[form], batch, scorer_name
            )
        return column_values

    def _compute_column(self, column: Column, model_scores: dict[int, TokenScores], batch: TokenBatch) -> torch.Tensor:
        """Computes a column of a micro-batch; `model_scores` caches the model's outputs by the `id` of the micro-batch."""
        if column.by in (ACTOR, VALUE_HEAD):
            if id(batch) not in model_scores:
                model_scores[id(batch)] = self.backend.forward(batch, temperature=self.temperature)
            values = model_scores[id(batch)].logprobs if column.by == ACTOR else model_scores[id(batch)].values
            assert values is not None
            return values
        if column.by == REFERENCE:
            return self.backend.reference(batch, temperature=self.temperature).logprobs
        return self._scorers[column.name].score(batch.to(self.backend.device))

    def offload(self) -> None:
        """Moves all tensors to the host, including the tensors of the algorithm's scorers."""
        super().offload()
        for scorer in self._list_offloadable_scorers():
            scorer.offload()
        empty_cache()

    def reload(self) -> None:
        """Moves the tensors back to the accelerator after `offload`."""
        super().reload()
        for scorer in self._list_offloadable_scorers():
            scorer.reload()

    def _list_offloadable_scorers(self) -> list[Scorer | LogitReader]:
        return [*self._scorers.values(), *([self._reader] if self._reader else [])]

    # -- training -------------------------------------------------------------------------------------------------

    def _micro_batches(
        self, batch: TokenBatch, *, packed: bool | None = None, shares_prefixes: bool | None = None
    ) -> Parts:
        """Splits a batch into micro-batches, each of one policy (`LanguageActor._micro_batches`)."""
        split_batch = partial(super()._micro_batches, packed=packed, shares_prefixes=shares_prefixes)
        return split_policy_batches(self.policies, batch, split_batch) if self.policies.names else split_batch(batch)

    @traced("update", "train")
    def update(self, step: int) -> dict[str, float]:
        """Sends the returns to the critic, then trains on the groups of `receive`.

        Returns:
            Metrics, the same on all ranks except for times.

        Raises:
            NonFinite: A gradient is not finite.
            RlhpcError: The step's groups were not received.
        """
        if self._received_step != step:
            raise RlhpcError(f"step {step} cannot be trained: its groups did not come")
        start_time = time.perf_counter()
        batch = TokenBatch.joined(self._batches)
        self._batches = []
        score_s = self._recompute_logprobs(batch, step) if self.cfg.actor.offload_in_rollout else 0.0
        reduce = self._sum_over_ranks if self.world_size > 1 else None
        batch.columns[ADVANTAGES] = self.algorithm.advantages(batch, reduce)
        if self._returns is not None:
            self._send_returns(step, batch, self._returns)
        learning_rate, self._num_early_stopped = self._compute_learning_rate(step), 0
        named_minibatches = minibatches(
            batch, self._num_responses, self._minibatch_size, self._count_epochs(step), (self.seed, step)
        )
        metrics, num_updates = self._run_minibatches(
            self._without_columns_of_loss((f"step {step}, {name}", minibatch) for name, minibatch in named_minibatches),
            length_limit(self.cfg),
            partial(self._train_minibatch, learning_rate),
            self.algorithm.at_first,
        )
        self._require_agreement(step, metrics)
        self.version = step
        if RETURNS_OF in batch.columns:
            metrics |= self._compute_value_metrics(batch)
        if self._num_early_stopped:
            metrics["early_stopped"] = float(self._num_early_stopped)
        phase_s = {"update_s": time.perf_counter() - start_time - score_s, "late_score_s": score_s}
        return {**metrics, "lr": learning_rate, "updates": float(num_updates), **phase_s, **COST.pop()}

    def _require_agreement(self, step: int, metrics: Mapping[str, float]) -> None:
        """Checks the log-probs of trainer and engine with `runner.deterministic`, before the step's first update.

        Raises:
            RlhpcError: They have different bits or, where ranks compute parts of sums, differ by more than rounding does.
        """
        if not self.cfg.runner.deterministic or "mismatch_abs" not in metrics:
            return
        unequal, difference = metrics["mismatch_unequal"], metrics["mismatch_abs"]
        if self.backend.blueprint.exact:
            reason = (
                f"{unequal:.3%} of the tokens have other log-probs (by {difference:.3g} on average)" if unequal else ""
            )
        else:
            bound = SPLIT_BOUNDS[self.backend.blueprint.dtype]
            reason = (
                f"log-probs differ by {difference:.3g} on average, and at most {bound:g}" if difference > bound else ""
            )
        if reason:
            raise RlhpcError(
                f"step {step}: runner.deterministic: {reason} in the trainer than in the engine; set it to false to train "
                "with the difference, which train/mismatch_abs reports"
            )

    def _without_columns_of_loss(
        self, named_minibatches: Iterable[tuple[str, TokenBatch]]
    ) -> Iterator[tuple[str, TokenBatch]]:
        """Removes the columns of `_columns_of_loss` from the first of a step's minibatches."""
        for index, (name, minibatch) in enumerate(named_minibatches):
            if index == 0:
                for column in self._columns_of_loss:
                    minibatch.columns.pop(column.name, None)
            yield name, minibatch

    def _count_epochs(self, step: int) -> int:
        """Returns the number of passes over a step's samples: 0 in the critic's warm-up, then `algorithm.update_epochs`."""
        if self._returns is not None and step <= self.cfg.critic.warmup_steps:
            return 0
        return self.cfg.algorithm.update_epochs

    def _send_returns(self, step: int, batch: TokenBatch, channel: Channel) -> None:
        """Sends the returns of each group's trained samples to the critic's ranks.

        Raises:
            RlhpcError: The algorithm computed no returns.
        """
        if RETURNS_OF not in batch.columns:
            raise RlhpcError(
                f"algorithm.name={self.cfg.algorithm.name} asks the critic for {VALUES}, but its advantages left no "
                f"batch.columns[{RETURNS_OF!r}] for it to learn from"
            )
        token_returns = batch.columns.pop(RETURNS_OF)
        for prompt_position, (digest, members) in self._members.items():
            group_tokens = batch.tokens_of(torch.nonzero(batch.group == prompt_position).flatten())
            message = {
                "step": step,
                "position": prompt_position,
                "digest": digest,
                "values": token_returns[group_tokens].numpy(),
                "members": members.numpy(),
            }
            if self.is_leader:
                channel.put(message, key=str(self.prompts.scorer_of(CRITIC, prompt_position)))

    def _exceeds_ratio(self, metrics: Mapping[str, float]) -> bool:
        """Returns whether a minibatch's mean importance ratio exceeds `algorithm.early_stop_imp_ratio`.

        Raises:
            ConfigError: The loss does not report its ratio.
        """
        max_ratio = self.cfg.algorithm.early_stop_imp_ratio
        if max_ratio is None:
            return False
        if "ratio" not in metrics:
            raise ConfigError(
                f"algorithm.early_stop_imp_ratio: the loss of algorithm.name={self.cfg.algorithm.name} reports no metric "
                "'ratio'; set it to null"
            )
        return metrics["ratio"] > max_ratio

    def _train_minibatch(self, rate: float, batch: TokenBatch, counts: MinibatchCounts, label: str) -> dict[str, float]:
        """Runs one optimizer step on a minibatch of all ranks; returns the metrics.

        A non-finite `grad_norm` marks a skipped step.
        """
        batch = self._balance_load(batch)
        own_columns = [column.name for column in self._columns_of_loss if column.name not in batch.columns]

        def compute_loss(scores: TokenScores, micro_batch: TokenBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            micro_batch.columns |= dict.fromkeys(own_columns, scores.logprobs.detach())
            micro_batch.columns[SPECIAL] = torch.isin(micro_batch.ids, self._special_ids)
            return self.algorithm.loss(scores, micro_batch, counts)

        reader = self._reader
        packed = self.backend.packed and (reader is None or reader.packed)
        shares_prefixes = self.backend.shares_prefixes and (reader is None or reader.shares_prefixes)
        micro_batches = self._micro_batches(batch, packed=packed, shares_prefixes=shares_prefixes)
        batches, entropy = [micro_batch for _, micro_batch in micro_batches], self.algorithm.entropy
        batch_metrics = self.backend.forward_backward(
            batches, compute_loss, temperature=self.temperature, compute_entropy=entropy, reading=self._reader
        )
        if self.policies.names:
            batch_metrics = split_by_policy(self.policies, batches, batch_metrics)
        reduced_metrics = self._reduce_metrics(batch_metrics)
        if self._exceeds_ratio(reduced_metrics):
            self._num_early_stopped += 1
            return {**reduced_metrics, "grad_norm": math.nan}
        metrics = self._run_optimizer_step(rate, reduced_metrics, counts.tokens, label, batch)
        if self.policies.names:
            norms = {f"{POLICY}{name}/grad_norm": norm for name, norm in self.backend.backend.norms.items()}
            metrics = scale_policy_means(self.policies, {**metrics, **norms})
        return self.algorithm.summarize(metrics)
