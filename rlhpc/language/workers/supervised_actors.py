"""Workers of supervised runs: trainers for SFT, DPO and reward models, and engines for evaluation.

The group `rollout` of a supervised run generates no training samples. At each evaluation, it receives the weights and answers
the evaluation suites, as in reinforcement learning (`Validation`).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from rlhpc.algorithms.preference_losses import dpo_loss, find_reward_loss
from rlhpc.config.typed import plain, typed
from rlhpc.language.agents.registry import make_generation
from rlhpc.language.config.algorithms import DpoAlgorithmConfig
from rlhpc.language.config.run import DpoConfig, RewardRunConfig, SftConfig, answering_config
from rlhpc.language.data import PromptSampler, PromptTokenizer, load_tokenizer
from rlhpc.language.data.preferences import PreferenceRow, encode_demonstrations
from rlhpc.language.data.prompts import Prompt
from rlhpc.language.engines.registry import engine_preload, is_forkable
from rlhpc.language.evaluation.reward_model import (
    EACH,
    Suite,
    batch_of,
    encoder_of,
    most_tokens,
    rewards_of,
    split_rows,
    suites_of,
    training_rows,
)
from rlhpc.language.models.logprobs import TokenScores
from rlhpc.language.models.token_batch import Pictures, TokenBatch
from rlhpc.language.models.value_head import last_values
from rlhpc.language.preflight import open_demonstrations, open_pairs
from rlhpc.language.rollout.engine_group import EngineWeights, ranks_of_engine
from rlhpc.language.rollout.validation import Row, Validation
from rlhpc.language.scoring.reward_aggregator import make_local_aggregator
from rlhpc.language.training.prompt_dispatch import PromptMap
from rlhpc.language.training.trainer import ScalarTrainer, TokenTrainer
from rlhpc.language.training.weight_sync import ActorWeights
from rlhpc.language.workers.actor import Cfg, LanguageActor
from rlhpc.language.workers.agent import address_for_others
from rlhpc.runs.device import set_up_process, worker_device
from rlhpc.runtime.trace_recorder import traced
from rlhpc.runtime.worker import Worker


class EvaluatedActor(LanguageActor[Cfg]):
    """Rank of a trainer that sends its weights to the engines that answer the evaluation suites."""

    backend: TokenTrainer

    def __init__(self, cfg: Cfg) -> None:
        super().__init__(cfg)
        self._weights: ActorWeights | None = None

    def open_weights(self, prompts: PromptMap) -> None:
        """Creates the sender of the weights; `prompts` names the worker groups."""
        self._weights = ActorWeights(self, answering_config(typed(SftConfig, self.cfg)), prompts, self.backend)

    def send_weights(self, version: int, ranks: Sequence[int]) -> None:
        """Sends the weights as `version` to engine ranks; all actor ranks call this method."""
        assert self._weights is not None
        with self.backend.keep_on_device():
            self._weights.send(version, ranks, None)


class EvaluationWorker(Worker):
    """Rank that answers the suites of a supervised run and scores the answers; it has no state in checkpoints."""

    def __init__(self, cfg: SftConfig) -> None:
        super().__init__()
        self.cfg = answering_config(cfg)
        self._resources = ExitStack()

    @classmethod
    def forks(cls, cfg: SftConfig) -> bool:
        """Returns whether the engine's rank may be started by fork."""
        return is_forkable(cfg.rollout.rollout_backend)

    @classmethod
    def preloads(cls, cfg: SftConfig) -> Sequence[str]:
        """Returns the modules that a node imports once for the engines of its ranks."""
        return engine_preload(cfg.rollout.rollout_backend)

    @classmethod
    def ranks_sharing_devices(cls, cfg: SftConfig) -> int:
        """Returns the number of ranks of an engine (`LanguageRolloutWorker.ranks_sharing_devices`)."""
        return ranks_of_engine(answering_config(cfg))

    def close(self) -> None:
        """Ends the engine, its processes, and the judges."""
        self._resources.close()

    def init_worker(self, prompts: PromptMap) -> None:
        """Loads engine, tokenizer, suites and judges; `prompts` names the groups."""
        cfg, model = self.cfg, self.cfg.actor.model
        set_up_process(cfg.runner, "rollout", self.rank)
        self.tokenizer = load_tokenizer(model.model_path, model.trust_remote_code)
        self.weights = EngineWeights(self, cfg, prompts)
        engine = self.weights.engine_rank.engine
        self._resources.callback(engine.close)
        self.generation = make_generation(cfg, engine, self.tokenizer, address=address_for_others(cfg))
        self._resources.callback(self.generation.close)
        self.reward_scorer = make_local_aggregator(cfg, worker_device(self))
        self._resources.callback(self.reward_scorer.close)
        self.validation = Validation(cfg, self.tokenizer)
        self.log.info("answers suites by %s on %s", cfg.rollout.rollout_backend, worker_device(self))

    def evaluate(self, version: int, ranks: Sequence[int]) -> dict[str, list[Row]]:
        """Receives the weights of `version`, then answers this rank's share of the suites.

        Args:
            version: Step of the actor.
            ranks: Ranks that take part.

        Returns:
            See `Validation.rows`.
        """
        self.weights.await_version(version)
        deadline = time.monotonic() + self.cfg.runner.step_timeout_s
        return self.validation.rows(
            self.generation, self.reward_scorer, (list(ranks).index(self.rank), len(ranks)), deadline
        )


class SftActor(EvaluatedActor[SftConfig]):
    """Rank of an SFT trainer on the demonstrations of a dataset."""

    def init_worker(self, total_steps: int) -> dict[str, Any]:
        """Loads model, optimizer and dataset.

        Args:
            total_steps: Number of steps of the run, for the learning rate.

        Returns:
            `parameters`: number of trained parameters; `dropped`: number of demonstrations that are too long.
        """
        self.backend = self._load_model(total_steps, lambda: TokenTrainer(self.cfg, self, has_dropout=True))
        self.encoder, self.dataset = open_demonstrations(self.cfg, self.cfg.data, self.tokenizer)
        self.sampler = PromptSampler(len(self.dataset), self.cfg.data.prompts_per_step, self.seed)
        if self.cfg.runner.val_check_interval > 0:
            self.held_out = open_demonstrations(self.cfg, self.cfg.data, self.tokenizer, is_holdout=True)
        return {"parameters": self.backend.num_trained_parameters, "dropped": self.dataset.dropped}

    @traced("update", "train")
    def update(self, step: int) -> dict[str, float]:
        """Runs one optimizer step on this step's demonstrations; the loss is the mean of −log p over the trained tokens.

        Returns:
            Metrics, the same on all ranks.
        """
        rows = [self.dataset[index] for index in self.sampler.of_step(step, self.data, self.sizes.data)]
        demonstrations = self._batch_of(rows, self.encoder)
        minibatch_counts = self._count_minibatch(demonstrations)
        balanced_batch = self._balance_load(demonstrations)

        def loss(scores: TokenScores, batch: TokenBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            loss_value = minibatch_counts.loss(-scores.logprobs, batch, "token-mean")
            return loss_value, {"loss": loss_value.detach()}

        batches = [batch for _, batch in self._micro_batches(balanced_batch)]
        return self._run_only_step(
            step, self.backend.forward_backward(batches, loss), minibatch_counts.tokens, balanced_batch
        )

    def validate(self) -> dict[str, float]:
        """Computes the held-out loss with the current weights: the mean of −log p over all trained tokens.

        The loss does not depend on the number of ranks and micro-batches.

        Returns:
            `loss`, and the numbers of `tokens` and `rows`; the same on all ranks.
        """
        encoder, dataset = self.held_out
        loss_and_tokens = torch.zeros(2, dtype=torch.float64)
        for indices in self._iter_held_out_indices(len(dataset), self.cfg.data.prompts_per_step):
            demonstrations = self._batch_of([dataset[index] for index in indices], encoder)
            for _, batch in self._micro_batches(demonstrations):
                losses = -self.backend.forward(batch).logprobs.cpu().double()
                loss_and_tokens += torch.stack([losses[batch.mask].sum(), batch.mask.sum().double()])
        loss, tokens = self._sum_over_ranks(loss_and_tokens).tolist()
        return {"loss": loss / max(tokens, 1.0), "tokens": tokens, "rows": float(len(dataset))}

    def _batch_of(self, rows: Sequence[Prompt], encoder: PromptTokenizer) -> TokenBatch:
        samples, masks, pictures = [], [], []
        for prompt in rows:
            tokens_and_mask = encoder.encode_demonstration(prompt, self.max_tokens)
            assert tokens_and_mask is not None, "those that do not fit are dropped at the start"
            ids, mask, image_offsets = tokens_and_mask
            samples.append(ids)
            masks.append(mask)
            pictures.append(encoder.prompt_images(prompt, image_offsets))
        return TokenBatch.from_sequences(samples, masks, pad_id=self.pad, pictures=Pictures.from_images(pictures))


#: Column of the reference's log-probs.
REF_LOGPROBS = "ref_logprobs"
_PAIR = EACH["pairs"]


class DpoActor(EvaluatedActor[DpoConfig]):
    """Rank of a DPO trainer on the preference pairs of a dataset.

    The reference is the initial model; with adapters, the reference is the model without adapters.
    """

    def init_worker(self, total_steps: int) -> dict[str, Any]:
        """Loads model, optimizer, reference and datasets.

        Args:
            total_steps: Number of steps of the run, for the learning rate.

        Returns:
            `parameters`: number of trained parameters; `dropped`: number of pairs that are too long.
        """
        cfg = self.cfg
        self.backend = self._load_model(total_steps, lambda: TokenTrainer(cfg, self, has_reference=True))
        self.encoder, self.dataset, num_dropped = open_pairs(cfg, self.tokenizer)
        self.sampler = PromptSampler(len(self.dataset), cfg.data.prompts_per_step, self.seed)
        if cfg.runner.val_check_interval > 0:
            self.held_out = open_pairs(cfg, self.tokenizer, is_holdout=True)
        return {"parameters": self.backend.num_trained_parameters, "dropped": num_dropped}

    @traced("update", "train")
    def update(self, step: int) -> dict[str, float]:
        """Runs one optimizer step on this step's pairs; the loss is the mean over the pairs.

        Returns:
            Metrics, the same on all ranks.
        """
        num_pairs = self.cfg.data.prompts_per_step
        indices = self.sampler.of_step(step, self.data, self.sizes.data)
        pairs = self._batch_of([self.dataset[index] for index in indices], self.encoder)
        tokens = self._count_minibatch(pairs).tokens
        balanced_batch = self._balance_load(pairs, _PAIR)

        def loss(scores: TokenScores, batch: TokenBatch) -> tuple[Tensor, dict[str, Tensor]]:
            metrics = {
                name: pair_values.sum() / num_pairs
                for name, pair_values in pair_metrics(self.cfg.algorithm, scores.logprobs, batch).items()
            }
            return metrics["loss"], {name: pair_values.detach() for name, pair_values in metrics.items()}

        batch_metrics = self.backend.forward_backward([*self._add_reference_logprobs(balanced_batch)], loss)
        return self._run_only_step(step, batch_metrics, tokens, balanced_batch)

    def validate(self) -> dict[str, float]:
        """Computes the metrics of the held-out pairs with the current weights.

        Returns:
            Means over all pairs, and the number of pairs `rows`; the same on all ranks, for any number of ranks and
            micro-batches.
        """
        encoder, dataset, _ = self.held_out
        metric_sums = dict[str, Tensor]()
        for indices in self._iter_held_out_indices(len(dataset), self.cfg.data.prompts_per_step):
            for batch in self._add_reference_logprobs(self._batch_of([dataset[index] for index in indices], encoder)):
                metrics = pair_metrics(self.cfg.algorithm, self.backend.forward(batch).logprobs.cpu().double(), batch)
                metric_sums = {
                    name: metric_sums.get(name, torch.zeros(())) + pair_values.sum()
                    for name, pair_values in metrics.items()
                }
        metric_means = self._sum_over_ranks(torch.stack([*metric_sums.values()])) / len(dataset)
        means = dict(zip(metric_sums, metric_means.tolist(), strict=True))
        return {"pair_accuracy": means.pop("accuracy"), **means, "rows": float(len(dataset))}

    def _batch_of(self, pairs: Sequence[PreferenceRow], encoder: PromptTokenizer) -> TokenBatch:
        """Returns a batch of the pairs' completions with their prompts; the two completions of a pair are adjacent."""
        max_tokens = most_tokens(self.max_tokens, "pairs")
        samples, masks = list[list[int]](), list[list[bool]]()
        for pair in pairs:
            completions = encode_demonstrations(pair, encoder, max_tokens)
            assert completions is not None, "those that do not fit are dropped at the start"
            samples += [ids for ids, _ in completions]
            masks += [mask for _, mask in completions]
        return TokenBatch.from_sequences(samples, masks, pad_id=self.pad)

    def _add_reference_logprobs(self, batch: TokenBatch) -> Iterator[TokenBatch]:
        """Yields micro-batches of complete pairs with the reference's log-probs, the same number on each rank."""
        for _, micro_batch in self._pad_evenly(split_rows(batch, _PAIR, self.max_tokens), batch):
            micro_batch.columns[REF_LOGPROBS] = self.backend.reference(micro_batch).logprobs.cpu()
            yield micro_batch


def pair_metrics(options: DpoAlgorithmConfig, logprobs: Tensor, batch: TokenBatch) -> dict[str, Tensor]:
    """Computes loss and metrics of the pairs of a micro-batch.

    Args:
        options: Section `algorithm`.
        logprobs: `[T]`, log-probs of the policy.
        batch: Complete pairs, with the column `ref_logprobs`; may have no tokens.

    Returns:
        `[P]` each: `loss`; `accuracy`, whether the chosen completion has the higher reward; `margin`, the difference of
        the two rewards; `rewards_chosen` and `rewards_rejected`; `logps_chosen` and `logps_rejected`, log-probs of the policy.
    """
    log_ratios, loss_type = (
        _sum_over_completions(logprobs - batch.columns[REF_LOGPROBS], batch),
        options.loss_type,
    )
    scores = log_ratios
    if loss_type == "ipo":
        scores = log_ratios / _sum_over_completions(batch.mask.to(logprobs.dtype), batch)
    losses = dpo_loss(
        *scores.view(-1, _PAIR).unbind(1),
        beta=options.beta,
        loss_type=loss_type,
        label_smoothing=options.label_smoothing,
    )
    reward_chosen, reward_rejected = (options.beta * log_ratios.detach()).view(-1, _PAIR).unbind(1)
    logps_chosen, logps_rejected = _sum_over_completions(logprobs.detach(), batch).view(-1, _PAIR).unbind(1)
    return {
        "loss": losses,
        "accuracy": (reward_chosen > reward_rejected).to(logprobs.dtype),
        "margin": reward_chosen - reward_rejected,
        "rewards_chosen": reward_chosen,
        "rewards_rejected": reward_rejected,
        "logps_chosen": logps_chosen,
        "logps_rejected": logps_rejected,
    }


def _sum_over_completions(values: Tensor, batch: TokenBatch) -> Tensor:
    """Returns the sums `[N]` of values `[T]` over the trained tokens of each sample; `[0]` for a batch without tokens."""
    if not batch.tokens:
        return values[:0]
    return batch.padded(values.masked_fill(~batch.mask, 0)).sum(1)


class RewardModelActor(LanguageActor[RewardRunConfig]):
    """Rank of a reward model's trainer on the preference pairs or labels of a dataset."""

    backend: ScalarTrainer

    def init_worker(self, total_steps: int) -> dict[str, Any]:
        """Loads model, optimizer and datasets.

        Args:
            total_steps: Number of steps of the run, for the learning rate.

        Returns:
            `parameters`: number of trained parameters; `dropped`: number of rows that are too long.
        """
        cfg = self.cfg
        self.backend = self._load_model(total_steps, lambda: ScalarTrainer(cfg.actor, self, seed=cfg.runner.seed))
        self.loss, self.form = find_reward_loss(cfg.algorithm.loss_type, plain(cfg.algorithm.loss_kwargs))
        self.max_tokens_per_row = most_tokens(self.max_tokens, self.form)
        self.encoder: PromptTokenizer = encoder_of(cfg, cfg.data.train, self.tokenizer, "data.train")
        self.dataset = training_rows(cfg)
        num_dropped = self.dataset.fit(self.encoder, self.max_tokens_per_row)
        self.sampler = PromptSampler(len(self.dataset), cfg.data.prompts_per_step, self.seed)
        self.suites: dict[str, Suite] = {}
        if cfg.runner.val_check_interval > 0:
            self.suites = suites_of(cfg, self.tokenizer, self.form)
        return {"parameters": self.backend.num_trained_parameters, "dropped": num_dropped}

    @traced("update", "train")
    def update(self, step: int) -> dict[str, float]:
        """Runs one optimizer step on this step's rows; the loss is the mean over the rows.

        Returns:
            Metrics, the same on all ranks.
        """
        prompts_per_step = self.cfg.data.prompts_per_step
        rows = [self.dataset[index] for index in self.sampler.of_step(step, self.data, self.sizes.data)]
        answers_per_row = EACH[self.form]
        responses = batch_of(rows, self.encoder, self.max_tokens_per_row, self.pad)
        tokens = self._count_minibatch(responses).tokens
        balanced_batch = self._balance_load(responses, answers_per_row)

        def loss(predictions: torch.Tensor, batch: TokenBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            rewards, target_rewards = last_values(predictions, batch), batch.reward
            if not batch.tokens:
                rewards, target_rewards = rewards[:0], target_rewards[:0]
            metrics: dict[str, torch.Tensor] = {"reward": rewards.sum() / (prompts_per_step * answers_per_row)}
            if self.form == "pairs":
                reward_chosen, reward_rejected = rewards.view(-1, 2).unbind(1)
                losses = self.loss(reward_chosen, reward_rejected, target_rewards[::2])
                metrics |= {
                    "accuracy": (reward_chosen > reward_rejected).sum() / prompts_per_step,
                    "margin": (reward_chosen - reward_rejected).sum() / prompts_per_step,
                    "reward_chosen": reward_chosen.sum() / prompts_per_step,
                    "reward_rejected": reward_rejected.sum() / prompts_per_step,
                }
            else:
                losses = self.loss(rewards, target_rewards)
                metrics["mse"] = (rewards - target_rewards).square().sum() / prompts_per_step
            loss_value = losses.sum() / prompts_per_step
            return loss_value, {"loss": loss_value, **metrics}

        batches = [
            batch
            for _, batch in self._pad_evenly(
                split_rows(balanced_batch, answers_per_row, self.max_tokens), balanced_batch
            )
        ]
        return self._run_only_step(step, self.backend.forward_backward(batches, loss), tokens, balanced_batch)

    def validate(self) -> dict[str, list[dict[str, Any]]]:
        """Computes the rewards of this rank's share of the suites' rows with the current weights.

        Returns:
            Suite → rows, each with its index `place` in the suite; {} except on the first rank of a model-parallel block.
        """
        rows_by_suite: dict[str, list[dict[str, Any]]] = {}
        for name, suite in self.suites.items():
            indices = list(range(self.data, len(suite.rows), self.sizes.data))
            rows = [suite.rows[index] for index in indices]
            rewards = rewards_of(
                rows,
                suite.encoder,
                self.max_tokens_per_row,
                self.pad,
                self.max_tokens,
                self.backend.forward,
                self._pad_evenly,
            )
            if not self.is_leader:  # the block's first rank returns the same rows
                continue
            rows_by_suite[name] = [
                {
                    "place": index,
                    "rewards": reward,
                    "target": row.target,
                    "level": row.prompt.level,
                    "prompt": row.prompt.question,
                }
                for index, row, reward in zip(indices, rows, rewards, strict=True)
            ]
        return rows_by_suite
