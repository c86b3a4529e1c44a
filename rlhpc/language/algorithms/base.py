"""Algorithm interface of language models: required columns, advantages and loss.

The rollout ranks send samples with their rollout columns. The trainer computes the columns that the algorithm declares, then
calls the algorithm for the advantages and for the loss of each micro-batch. An algorithm that needs a new value of each token
(a teacher's log-probs, the reward of a step, a critic's value) declares a column for it, and fits in one file.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rlhpc.algorithms.losses import token_weights
from rlhpc.language.agents.episodes import Episode
from rlhpc.language.config.run import GrpoConfig
from rlhpc.language.data.prompts import Prompt
from rlhpc.language.models.logprobs import TokenScores
from rlhpc.language.models.token_batch import TokenBatch
from rlhpc.language.rewards.pool import Scored
from rlhpc.language.scoring.registry import Column, LogitReader
from rlhpc.runtime.former_names import former_attributes, former_members

if not TYPE_CHECKING:
    __getattr__ = former_attributes(__name__)

#: Sums a tensor over the actor ranks.
Reduce = Callable[[Tensor], Tensor]


#: Columns that the rollout ranks always send: the log-probs with which tokens were sampled, and the version of the weights
#: that sampled them (-1 for tokens that no model sampled).
ROLLOUT_LOGPROBS, VERSIONS = "rollout_logprobs", "versions"
#: Columns of the advantages, and of the returns, which are the targets of a critic's values.
ADVANTAGES, RETURNS = "advantages", "returns"
#: Column of `TokenBatch.sequence_tokens` of the full minibatch, because a micro-batch may lack samples of a sequence.
SEQUENCE_TOKENS = "sequence_tokens"
#: Column of a critic's value of each token's state.
VALUES = "values"
#: Sources of columns that are no separate worker groups.
ROLLOUT, ACTOR, VALUE_HEAD, REFERENCE = "rollout", "actor", "value_head", "reference"


@former_members(of="from_batch")
@dataclass(frozen=True)
class MinibatchCounts:
    """Counts of the minibatch over all ranks, by which the losses and metrics of its micro-batches are divided.

    Attributes:
        tokens: Number of trained tokens.
        sequences: Number of sequences with a trained token. A sequence is the text of one role in an episode, mostly one
            sample.
        length: Maximum number of tokens of a sequence (`length_limit`), by which `seq-mean-token-sum-norm` divides.
    """

    tokens: float
    sequences: float
    length: float = 1.0

    @classmethod
    def from_batch(cls, batch: TokenBatch, length: float = 1.0, all_reduce: Reduce | None = None) -> MinibatchCounts:
        """Counts a minibatch, and adds the column `sequence_tokens` to it. The trainer calls this before samples change ranks
        and are split into micro-batches, while a rank has all samples of its sequences.

        Args:
            batch: This rank's samples.
            length: See `MinibatchCounts.length`.
            all_reduce: Sums over the ranks; None for a single rank.
        """
        batch.columns[SEQUENCE_TOKENS] = batch.sequence_tokens()
        trained_sequences = torch.repeat_interleave(batch.sequence(), batch.lengths)[batch.mask]
        class_counts = torch.tensor([float(len(trained_sequences)), float(len(trained_sequences.unique()))])
        tokens, sequences = (all_reduce(class_counts) if all_reduce else class_counts).tolist()
        return cls(tokens, sequences, length)

    def weights(self, batch: TokenBatch, loss_agg: str, dtype: torch.dtype = torch.float32) -> Tensor:
        """Returns token weights `[T]`: a micro-batch's share of an aggregated loss is Σ weight · loss (`token_weights`).

        Args:
            batch: The micro-batch.
            loss_agg: `algorithm.loss_agg`.
            dtype: Dtype of the result.
        """
        column = batch.columns.get(SEQUENCE_TOKENS)
        sequence_tokens = batch.sequence_tokens() if column is None else column
        return token_weights(
            batch.mask, loss_agg, tokens=self.tokens, seqs=self.sequences, seq_tokens=sequence_tokens, length=self.length,
            dtype=dtype,
        )  # fmt: skip

    def loss(self, values: Tensor, batch: TokenBatch, loss_agg: str) -> Tensor:
        """Returns a micro-batch's share of an aggregated loss.

        Args:
            values: `[T]`, the loss of each token.
            batch, loss_agg: See `weights`.
        """
        return (values.masked_fill(~batch.mask, 0) * self.weights(batch, loss_agg, values.dtype)).sum()

    def mean(self, values: Tensor, batch: TokenBatch) -> Tensor:
        """Returns a micro-batch's share of a mean over all trained tokens, detached, as a metric."""
        return self.loss(values.detach(), batch, "token-mean")

    def shares_of_means(self, means: Mapping[str, Any], batch: TokenBatch) -> dict[str, Tensor]:
        """Converts means over a micro-batch's trained tokens to its shares of the means over all trained tokens."""
        num_tokens = batch.mask.sum()
        return {name: torch.as_tensor(mean) * num_tokens / max(self.tokens, 1.0) for name, mean in means.items()}


def length_limit(cfg: GrpoConfig) -> int:
    """Returns the maximum number of tokens that the model may write in an episode: the constant of `algorithm.loss_agg:
    seq-mean-token-sum-norm`."""
    return cfg.rollout.max_new_tokens if cfg.agent.kind == "inline" else cfg.agent.max_tokens


class LanguageAlgorithm(abc.ABC):
    """Algorithm of an RL run. `algorithm.name` selects it; `algorithm.kwargs` are further arguments of its constructor.

    Args:
        cfg: The configuration.

    Attributes:
        columns: Required columns of each token besides `rollout_logprobs` and `versions`.
        entropy: Whether the loss uses the entropy of each token's distribution.
        reader: Reader of further values of the logits for the loss, or None.
        at_first: Names of loss metrics that describe the samples rather than the training. For these metrics, the value of a
            step's first minibatch is logged.
    """

    columns: Sequence[Column] = ()
    entropy: bool = False
    reader: type[LogitReader] | None = None
    at_first: frozenset[str] = frozenset()

    def __init__(self, cfg: GrpoConfig) -> None:
        self.cfg = cfg

    def rollout_columns(self, episode: Episode, scored: Scored) -> Mapping[str, Sequence[float]]:
        """Returns the columns with `by="rollout"` of one episode; called on a rollout rank.

        Args:
            episode: The episode.
            scored: Its score.

        Returns:
            One value for each of `episode.token_ids`, by name. The prompt's tokens get 0.
        """
        return {}

    def prompt_columns(self, prompt: Prompt) -> Mapping[str, float]:
        """Returns the columns with `by="rollout"` that have one value for all responses to a prompt; called on a rollout rank.

        Args:
            prompt: The prompt.

        Returns:
            The value for each token of the responses, by name. The prompt's tokens get 0.
        """
        return {}

    @abc.abstractmethod
    def advantages(self, batch: TokenBatch, all_reduce: Reduce | None) -> Tensor:
        """Returns the advantage of each token.

        Args:
            batch: All samples of this rank in the step, in complete groups, with all columns.
            all_reduce: Sums over the ranks; None for a single rank.

        Returns:
            `[T]`, float32, finite where `batch.mask` is True.
        """

    @abc.abstractmethod
    def loss(self, scores: TokenScores, batch: TokenBatch, counts: MinibatchCounts) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns a micro-batch's share of the minibatch's loss: sums over its tokens, divided by the counts of the minibatch.
        So any split into micro-batches and ranks gives the gradient of the minibatch.

        Args:
            scores: Scores by the trained weights, with gradients.
            batch: The micro-batch, with all columns, and `advantages`. It may have no tokens.
            counts: Counts of the minibatch.

        Returns:
            A scalar; and metrics, which are also shares: their sums over micro-batches and ranks are logged as `train/NAME`.
        """

    def summarize(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Returns a minibatch's metrics to log, from the sums of the shares that `loss` returned.

        A metric that is no sum over tokens, such as a ratio of two sums, is computed here.

        Args:
            metrics: Sums over micro-batches and ranks. With several policies, their names have a prefix.
        """
        return dict(metrics)
