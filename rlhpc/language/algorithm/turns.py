"""Credit by turn: what each turn of an episode gets is what came after it, compared with turns like it."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

from rlhpc.algorithms import calculate_adv_and_returns
from rlhpc.algorithms.advantages import masked_whiten
from rlhpc.language.algorithm.base import Reduce
from rlhpc.language.tokens.batches import TokenBatch

#: Ways of `algorithm.credit`: all of a role's turns alike; compared by their number; by what they had just read, too.
EPISODE, TURN, STATE = "episode", "turn", "state"


@dataclass(frozen=True)
class Credit:
    """What turns are credited with.

    Attributes:
        by: `algorithm.credit`.
        estimator: `algorithm.adv_type`, which compares their returns.
        gamma: Discount from turn to turn.
        coef: Weight of the comparison of states.
        normalizes: Whether advantages are whitened over the batch.
    """

    by: str
    estimator: str
    gamma: float
    coef: float
    normalizes: bool


def turn_advantages(batch: TokenBatch, rewards: Tensor, credit: Credit) -> Tensor:
    """The advantage of each turn, over all its tokens.

    Args:
        batch: Groups as a whole.
        rewards: `[T]`, of each token: what the episode was worth at its last one, and what was paid on the way.
        credit: By `TURN` or `STATE`: which turns of a group's role are compared.

    Returns:
        `[T]`, 0 where nothing is trained.
    """
    owner = torch.repeat_interleave(batch.sequence(), batch.lengths)
    keys = torch.stack([owner, batch.turn], 1)[batch.mask]
    credits = torch.zeros(batch.tokens, dtype=rewards.dtype)
    if not len(keys):
        return credits
    turns, which = keys.unique(dim=0, return_inverse=True)  # by sequence, then in the order of time
    turn_rewards = torch.zeros(len(turns), dtype=rewards.dtype).index_add(0, which, rewards[batch.mask])
    like = batch.turn[batch.mask] if credit.by == TURN else _states(batch)
    place = torch.repeat_interleave(batch.group * (int(batch.role.max()) + 1) + batch.role, batch.lengths)[batch.mask]
    groups = torch.zeros(len(turns), 2, dtype=torch.long)
    groups[which] = torch.stack([place, like], 1)
    advantages, _ = calculate_adv_and_returns(
        credit.estimator, rewards=to_go(turn_rewards, turns[:, 0], credit.gamma)[:, None],
        loss_mask=torch.ones(len(turns), 1, dtype=torch.bool), group_ids=groups.unique(dim=0, return_inverse=True)[1],
        gamma=1.0,
    )  # fmt: skip
    credits[batch.mask] = advantages[which, 0]
    return credits


def credited(batch: TokenBatch, whole: Tensor, rewards: Tensor, credit: Credit, all_reduce: Reduce | None) -> Tensor:
    """The advantages as `algorithm.credit` wants them.

    Args:
        batch, rewards, credit: See `turn_advantages`.
        whole: `[T]`, by episode.
        all_reduce: Sums over the ranks.
    """
    if credit.by == EPISODE:
        return whole
    own = turn_advantages(batch, rewards, credit)
    if credit.by == STATE:  # as GiGPO (Feng et al. 2025): both, the second weighted
        own = whole + credit.coef * own
    if credit.normalizes:
        own = masked_whiten(own[None], batch.mask[None], all_reduce=all_reduce)[0]
    return own.masked_fill(~batch.mask, 0)


def to_go(paid: Tensor, sequence: Tensor, gamma: float) -> Tensor:
    """What each turn and those after it were paid, discounted by turns.

    Args:
        paid: `[U]`, by sequence, then in the order of time.
        sequence: `[U]`, of which sequence each turn is.
        gamma: `algorithm.turn_gamma`.
    """
    found, after, of = paid.tolist(), 0.0, sequence.tolist()
    for at in range(len(found) - 1, -1, -1):
        after = found[at] + (gamma * after if at + 1 < len(of) and of[at + 1] == of[at] else 0.0)
        found[at] = after
    return torch.tensor(found, dtype=paid.dtype)


def _states(batch: TokenBatch) -> Tensor:
    """`[trained tokens]`: equal where their turns had just read the same."""
    known: dict[bytes, int] = {}
    found = torch.zeros(batch.tokens, dtype=torch.long)
    ids, turn, mask, cuts = batch.ids.numpy(), batch.turn.numpy(), batch.mask.numpy(), batch.cu_seqlens.tolist()
    for begin, end in itertools.pairwise(cuts):
        at = begin
        while at < end:
            last = at
            while last < end and turn[last] == turn[at]:
                last += 1
            first = at
            while first < last and not mask[first]:
                first += 1
            if first < last:
                found[at:last] = known.setdefault(ids[at:first].tobytes(), len(known))
            at = last
    return found[batch.mask]
