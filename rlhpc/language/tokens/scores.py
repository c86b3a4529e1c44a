"""Log-probs and entropies of tokens, from a causal model's hidden states or from its logits.

For a vocabulary of 150 000 and 16 000 tokens, logits in bfloat16 are 5 GB; log_softmax in float32 would add 10 GB forward
and 10 GB backward. Where the head is a linear layer whose result the model gives as it is (`tokens.head`), logits are made of
the hidden states of the tokens that are trained on, in chunks, forward and again backward: no tensor has their size. With
other heads, and where a loss wants them whole, the model makes them; they are read in chunks of rows, and the one tensor of
their size that is added is their gradient.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from rlhpc.language.tokens.batches import TokenBatch
from rlhpc.language.tokens.context import RowShare
from rlhpc.language.tokens.head import linear_head
from rlhpc.language.tokens.packing import packs
from rlhpc.language.tokens.rows import Beside, From, LogitRows, RowReader, Said, read_rows
from rlhpc.runtime.errors import ConfigError


class Reading(Protocol):
    """What a loss wants of the trained model's logits beside log-probs and entropies: one value per token."""

    def rows(self, batch: TokenBatch) -> RowReader | None:
        """Says one number of each row of logits that says what a trained token is; None if the logits are wanted whole."""

    def read(self, logits: torch.Tensor, batch: TokenBatch) -> torch.Tensor:
        """`[T]` float32, of whole logits."""


@dataclass
class TokenScores:
    """What one forward pass says of a batch's tokens, `[T]`, one after the other as in the batch; 0 for tokens that are not
    trained on, and for a sample's first.

    Attributes:
        logprobs: log p(token t | tokens before it in its sample) at the temperature asked for.
        entropy: Of that distribution, where asked for.
        read: What else was made of the logits, where asked for.
        values: Of the state before the token, in float32, where the model has a head for them.
    """

    logprobs: torch.Tensor
    entropy: torch.Tensor | None = None
    read: torch.Tensor | None = None
    values: torch.Tensor | None = None


def token_scores(
    model: nn.Module,
    batch: TokenBatch,
    temperature: float = 1.0,
    entropy: bool = False,
    reading: Reading | None = None,
    share: RowShare | None = None,
) -> TokenScores:
    """One forward pass of a Hugging Face causal language model.

    The model gets one row of all samples, if it can (`tokens.packing`), or a rectangle; never a mask, which keeps the fast
    causal attention kernels.

    Args:
        model: Takes `TokenBatch.inputs` and gives `logits` `[1, T, V]` or `[N, W, V]`.
        batch: What is scored.
        temperature: Divides the logits.
        entropy: Whether entropies are wanted.
        reading: What else is wanted of the logits, as they are before the temperature divides them.
        share: Of rows, if several ranks share them: all of them get the same scores.

    Raises:
        ConfigError: The reading wants whole logits, and this rank's model makes those of a part.
    """
    batch = batch.read_by(packs(model))
    where, places = batch.predictors()
    reader: RowReader = Said(batch.ids[where], temperature, entropy)
    further = None if reading is None else reading.rows(batch)
    if further is not None:
        reader = Beside([reader, further])
    inputs = batch.inputs() if share is None else share.inputs(batch)
    if share is not None:
        where, places, reader = _own(where, places, reader, share.bounds(batch))
    head = linear_head(model) if reading is None or further is not None else None
    if head is None:
        found = model(**inputs, use_cache=False)
        said = read_rows(found["logits"], places, reader)
    else:
        with head.answering(places, reader):
            found = model(**inputs, use_cache=False)
        said = found["logits"]
    every = said.new_zeros(batch.tokens, said.shape[1]).index_copy(0, where, said)
    values = found.get("token_values")
    if share is not None:
        every = share.together(every)
        if reading is not None and further is None:
            raise ConfigError(
                "this loss reads whole logits, of which ranks with actor.parallel.context have parts: set it to 1"
            )
        values = None if values is None else share.whole(values, batch)
    if values is not None:
        values = batch.before(batch.of_tokens(values))
    read = None
    if reading is not None:
        read = reading.read(found["logits"], batch) if further is None else every[:, -1]
    return TokenScores(every[:, 0], every[:, 1] if entropy else None, read, values)


def _own(
    where: torch.Tensor, places: torch.Tensor, reader: RowReader, bounds: tuple[int, int]
) -> tuple[torch.Tensor, torch.Tensor, RowReader]:
    """Of trained tokens, in the row's order, those that a part of the row says, and where in it."""
    start, end = (int((places < bound).sum()) for bound in bounds)
    return where[start:end], places[start:end] - bounds[0], From(reader, start)


@torch.no_grad()
def logit_rows(model: nn.Module, batch: TokenBatch) -> LogitRows:
    """The logits that a frozen causal model says the trained tokens by (`TokenBatch.predictors`), made when they are looked
    at, if its head can be asked.

    Args:
        model: See `token_scores`.
        batch: The samples.
    """
    batch = batch.read_by(packs(model))
    places = batch.predictors()[1]

    def call() -> torch.Tensor:
        found: torch.Tensor = model(**batch.inputs(), use_cache=False)["logits"]
        return found

    head = linear_head(model)
    return LogitRows.of(call(), places) if head is None else head.rows(call, places)
