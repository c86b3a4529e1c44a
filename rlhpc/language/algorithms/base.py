"""What an algorithm for language models is, to the trainer and to the rollout ranks.

The rollout ranks hand over samples with what they know about each token. The trainer has the columns made that the
algorithm asks for, then asks it for advantages, and for the loss of each micro-batch. So an algorithm that needs
something new for each token (a teacher's log-probs, the reward of a step, a critic's value) brings it along: it is one
file.
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
from rlhpc.language.models.logprobs import TokenScores
from rlhpc.language.models.token_batch import TokenBatch
from rlhpc.language.rewards.pool import Scored
from rlhpc.language.scoring.registry import Column, LogitReader

if TYPE_CHECKING:
    pass

#: Sums a tensor over the actor ranks.
Reduce = Callable[[Tensor], Tensor]


#: What the rollout ranks always hand over: the log-probs with which tokens were drawn, and the version of the weights that
#: drew them (-1 for tokens that no model drew).
ROLLOUT_LOGPROBS, VERSIONS = "rollout_logprobs", "versions"
#: What `advantages` gives; and what it adds to the batch where there is a critic: what its values are to become.
ADVANTAGES, RETURNS = "advantages", "returns"
#: `TokenBatch.sequence_tokens` of the whole minibatch: a micro-batch may have a part of a sequence's samples.
SEQUENCE_TOKENS = "sequence_tokens"
#: What a critic says of each token's state.
VALUES = "values"
#: Makers of columns that are no groups of their own.
ROLLOUT, ACTOR, VALUE_HEAD, REFERENCE = "rollout", "actor", "value_head", "reference"


@dataclass(frozen=True)
class Whole:
    """The minibatch over all ranks, of which a micro-batch is a part: what losses and metrics are divided by.

    Attributes:
        tokens: Tokens that are trained on.
        sequences: What a role says in an episode, with such a token: most often one sample.
        length: Tokens that a sequence may have (`length_limit`), by which `seq-mean-token-sum-norm` divides.
    """

    tokens: float
    sequences: float
    length: float = 1.0

    @classmethod
    def of(cls, batch: TokenBatch, length: float = 1.0, all_reduce: Reduce | None = None) -> Whole:
        """Counts a minibatch, and adds the column `sequence_tokens` to it. Called before samples change ranks and before they
        are cut into micro-batches: a rank has all samples of its sequences.

        Args:
            batch: This rank's samples.
            length: See `Whole.length`.
            all_reduce: Sums over the ranks; None where there is one.
        """
        batch.columns[SEQUENCE_TOKENS] = batch.sequence_tokens()
        trained = torch.repeat_interleave(batch.sequence(), batch.lengths)[batch.mask]
        counts = torch.tensor([float(len(trained)), float(len(trained.unique()))])
        tokens, sequences = (all_reduce(counts) if all_reduce else counts).tolist()
        return cls(tokens, sequences, length)

    def weights(self, batch: TokenBatch, loss_agg: str, dtype: torch.dtype = torch.float32) -> Tensor:
        """`[T]`: a micro-batch's share of an aggregated loss is Σ weight · loss over its tokens (`token_weights`).

        Args:
            batch: The micro-batch.
            loss_agg: `algorithm.loss_agg`.
            dtype: Of the result.
        """
        known = batch.columns.get(SEQUENCE_TOKENS)
        of_sequence = batch.sequence_tokens() if known is None else known
        return token_weights(
            batch.mask, loss_agg, tokens=self.tokens, seqs=self.sequences, seq_tokens=of_sequence, length=self.length,
            dtype=dtype,
        )  # fmt: skip

    def loss(self, values: Tensor, batch: TokenBatch, loss_agg: str) -> Tensor:
        """A micro-batch's share of an aggregated loss.

        Args:
            values: `[T]`, the loss of each token.
            batch, loss_agg: See `weights`.
        """
        return (values.masked_fill(~batch.mask, 0) * self.weights(batch, loss_agg, values.dtype)).sum()

    def mean(self, values: Tensor, batch: TokenBatch) -> Tensor:
        """A micro-batch's share of a mean over all trained tokens, detached: a metric."""
        return self.loss(values.detach(), batch, "token-mean")

    def of_means(self, means: Mapping[str, Any], batch: TokenBatch) -> dict[str, Tensor]:
        """A micro-batch's shares of means over all trained tokens, from its means over its own."""
        count = batch.mask.sum()
        return {name: torch.as_tensor(mean) * count / max(self.tokens, 1.0) for name, mean in means.items()}


def length_limit(cfg: GrpoConfig) -> int:
    """Tokens that the model may write in an episode: the constant of `algorithm.loss_agg: seq-mean-token-sum-norm`."""
    return cfg.rollout.max_new_tokens if cfg.agent.kind == "inline" else cfg.agent.max_tokens


class LanguageAlgorithm(abc.ABC):
    """What a run by RL optimizes. `algorithm.name` chooses it; `algorithm.kwargs` are further arguments of its constructor.

    Args:
        cfg: The configuration.

    Attributes:
        columns: What is needed for each token besides `rollout_logprobs` and `versions`.
        entropy: Whether the loss wants the entropy of each token's distribution.
        reader: What else the loss wants of the logits, if anything.
        at_first: Metrics of the loss that describe the samples, not the training: only those of a step's first
            minibatch count.
    """

    columns: Sequence[Column] = ()
    entropy: bool = False
    reader: type[LogitReader] | None = None
    at_first: frozenset[str] = frozenset()

    def __init__(self, cfg: GrpoConfig) -> None:
        self.cfg = cfg

    def rollout_columns(self, episode: Episode, scored: Scored) -> Mapping[str, Sequence[float]]:
        """On a rollout rank: the columns that are made `by="rollout"`, for one episode.

        Args:
            episode: What was written.
            scored: What the judges said of it.

        Returns:
            One value for each of `episode.token_ids`, by name. The prompt's tokens get 0.
        """
        return {}

    @abc.abstractmethod
    def advantages(self, batch: TokenBatch, all_reduce: Reduce | None) -> Tensor:
        """The advantage of each token.

        Args:
            batch: All samples of this rank in the step, each group whole, with all columns.
            all_reduce: Sums over the ranks; None where there is one.

        Returns:
            `[T]`, float32, finite where `batch.mask` is True.
        """

    @abc.abstractmethod
    def loss(self, scores: TokenScores, batch: TokenBatch, whole: Whole) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of a micro-batch, as its share of the whole's: sums, divided by the counts of the whole minibatch. So any
        split into micro-batches and ranks has the gradient of the whole.

        Args:
            scores: By the weights that are trained, with gradients.
            batch: The micro-batch, with all columns, and `advantages`. It may have no tokens.
            whole: What it is a part of.

        Returns:
            A scalar; metrics, as shares too: their sums over micro-batches and ranks are logged as `train/NAME`.
        """
