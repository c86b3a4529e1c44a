"""Batches of embodied runs: transitions that rollout ranks deliver, the batch that a policy trains on, and its minibatches.

Shapes: n slots of a rank, T decisions of a step, C actions of a decision (chunk), N = n · T rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from rlhpc.embodied.envs.observations import bad_rows, cleaned, columns_of, is_column, is_finite, rows_of
from rlhpc.training.flat_parameters import Reduce

Array = TypeVar("Array")
Other = TypeVar("Other")

#: Fields of a `RolloutBatch` by their columns in messages, in the order in which messages have them.
_LEADING = {"actions": "actions", "logprobs": "logprobs", "values": "values"}
_TRAILING = {
    "next_values": "next_values",
    "rewards": "rewards",
    "terminations": "terminations",
    "truncations": "truncations",
    "action_mask": "executed",
    "loss_mask": "valid",
    "nonfinite": "nonfinite",
    "env_failed": "env_failed",
    "lost": "missing",
}


_MASKS = ("truncations", "action_mask", "loss_mask", "nonfinite", "env_failed", "lost")


class DropReason(StrEnum):
    """Reasons for which a transition does not train."""

    RANK_LOST = "rank lost"
    """The env or rollout rank of its slot left the run before the transition was delivered."""

    NONFINITE = "nonfinite"
    """A number of it, or of another transition that its advantage depends on, is not finite."""

    ENV_FAILED = "env failed"
    """Its simulator or robot failed, so that its outcome is unknown."""


@dataclass(frozen=True)
class RolloutCounts:
    """Counts of the transitions that an actor rank received in a step.

    Attributes:
        version: Oldest version of the weights that acted.
        received: Transitions in the rank's batch or buffer.
        dropped: Transitions that do not train, by reason; each counts for one reason.
    """

    version: int
    received: int
    dropped: Mapping[DropReason, int]

    @classmethod
    def sum(cls, parts: Sequence[RolloutCounts]) -> RolloutCounts:
        """Adds the counts of several ranks, or of several parts of a step."""
        dropped = {reason: sum(counts.dropped.get(reason, 0) for counts in parts) for reason in DropReason}
        return cls(min(counts.version for counts in parts), sum(counts.received for counts in parts), dropped)


@dataclass(frozen=True)
class RewardSequence:
    """Rewards and ends in the order in which they happened, `[n, S]`: S decisions, or the actions of all decisions.

    Attributes:
        valid: Positions that train.
        values, next_values: Values of the observation before each position and of the one after it; None if the values do not
            belong to positions.
    """

    rewards: Tensor
    terminations: Tensor
    truncations: Tensor
    valid: Tensor
    values: Tensor | None
    next_values: Tensor | None

    def estimator_inputs(self) -> dict[str, Any]:
        """Returns the arguments of `calculate_adv_and_returns`."""
        inputs = {
            "rewards": self.rewards,
            "values": self.values,
            "next_values": self.next_values,
            "terminations": self.terminations,
            "truncations": self.truncations,
            "loss_mask": self.valid,
        }
        return {name: tensor for name, tensor in inputs.items() if tensor is not None}


@dataclass(frozen=True)
class RolloutBatch(Generic[Array]):
    """Transitions of a rank's slots as rollout ranks deliver them, `[n, T, ...]`: arrays in messages, tensors on an actor.

    Attributes:
        obs: Observations that the policy acted on, an array or a dict of arrays.
        actions: Actions that the policy chose.
        rewards: `[n, T]`, or `[n, T, C]` if each action of a chunk has its own.
        terminations: Decisions that ended an episode, bool.
        truncations: Decisions after which an episode was cut, bool; None in off-policy runs, which do not distinguish it.
        logprobs: Log-probabilities of the actions, of the shape that `algorithm.logprob_type` chooses.
        values, next_values: Values of `obs` and of the true next observations, `[n, T]` or `[n, T, C]`.
        executed: Actions that were executed before their episode ended, bool `[n, T, C]`; None if a decision is one action.
        valid: Transitions that train, bool; None for all of them. Decisions after the end of a slot's only episode do not.
        nonfinite: Transitions in which the env rank replaced numbers that are not finite, bool.
        env_failed: Transitions whose simulator or robot failed, bool.
        missing: Transitions that are missing because a rank left the run, bool; None if no rank did.
        extras: Further columns by name: the model's `inputs.*`, and in off-policy runs `next_obs.*`.
        version: Oldest version of the weights that acted; None if unknown.
        drops: Transitions that `drop` removed, bool; None if there are none.
        dropped: Number of transitions that `drop` removed, by reason.
    """

    obs: Any
    actions: Array
    rewards: Array
    terminations: Array
    truncations: Array | None = None
    logprobs: Array | None = None
    values: Array | None = None
    next_values: Array | None = None
    executed: Array | None = None
    valid: Array | None = None
    nonfinite: Array | None = None
    env_failed: Array | None = None
    missing: Array | None = None
    extras: Mapping[str, Array] = field(default_factory=dict)
    version: int | None = None
    drops: np.ndarray | None = None
    dropped: Mapping[DropReason, int] = field(default_factory=dict)

    # -- messages -------------------------------------------------------------------------------------------------

    def columns(self) -> dict[str, Array]:
        """Returns the columns of a message by name; fields that are None have none."""
        leading_columns = {name: getattr(self, attribute) for name, attribute in _LEADING.items()}
        trailing_columns = {name: getattr(self, attribute) for name, attribute in _TRAILING.items()}
        columns = {**columns_of("obs", self.obs), **leading_columns, **self.extras, **trailing_columns}
        return {name: column for name, column in columns.items() if column is not None}

    def transition_columns(self) -> dict[str, Array]:
        """Returns the columns of the transitions themselves, without masks."""
        return {name: column for name, column in self.columns().items() if name not in _MASKS}

    @classmethod
    def from_columns(cls, columns: Mapping[str, Any]) -> RolloutBatch[Any]:
        """Builds the batch from a message: columns, and `version` if it is known."""
        attributes = {**_LEADING, **_TRAILING}
        arguments = {attribute: columns[name] for name, attribute in attributes.items() if name in columns}
        extras = {
            name: column
            for name, column in columns.items()
            if name not in attributes and name != "version" and not is_column(name, "obs")
        }
        return cls(obs=rows_of(columns, "obs"), extras=extras, version=columns.get("version"), **arguments)

    def map(self, change: Callable[[Array], Other]) -> RolloutBatch[Other]:
        """Returns the batch with `change` applied to each column."""
        mapped_columns = {name: change(column) for name, column in self.columns().items()}
        batch = RolloutBatch.from_columns(mapped_columns)
        return replace(batch, version=self.version, drops=self.drops, dropped=self.dropped)

    def of_slots(self, slots: slice) -> RolloutBatch[Array]:
        """Returns the transitions of some of the slots."""
        return self.map(lambda column: column[slots])  # type: ignore[index]

    @staticmethod
    def join(parts: Sequence[RolloutBatch[np.ndarray]], axis: int) -> RolloutBatch[np.ndarray]:
        """Concatenates batches of consecutive slots (axis 0) or decisions (axis 1)."""
        if any(rollout.missing is not None for rollout in parts):
            parts = [
                rollout if rollout.missing is not None else replace(rollout, missing=rollout._mask())
                for rollout in parts
            ]
        columns = [rollout.columns() for rollout in parts]
        joined_columns = {
            name: np.concatenate([batch_columns[name] for batch_columns in columns], axis) for name in columns[0]
        }
        versions = [rollout.version for rollout in parts if rollout.version is not None]
        batch: RolloutBatch[np.ndarray] = RolloutBatch.from_columns(joined_columns)
        return replace(batch, version=min(versions, default=None))

    @staticmethod
    def blank(like: Mapping[str, np.ndarray], slots: int, decisions: int) -> RolloutBatch[np.ndarray]:
        """Returns zeros for transitions that are missing because their rank left the run.

        Args:
            like: Columns of another message, of any number of slots and decisions.
            slots: n.
            decisions: T.
        """
        columns = {
            name: np.zeros((slots, decisions, *example.shape[2:]), example.dtype) for name, example in like.items()
        }
        return RolloutBatch.from_columns({**columns, "lost": np.ones((slots, decisions), bool)})

    def cut_after_last(self: RolloutBatch[np.ndarray]) -> RolloutBatch[np.ndarray]:
        """Returns the batch with a truncation after the last decision of each episode that has not ended."""
        if self.truncations is None:
            return self
        truncations = self.truncations.copy()
        truncations[:, -1] |= ~self.terminations[:, -1]
        return replace(self, truncations=truncations)

    # -- transitions that do not train ----------------------------------------------------------------------------

    def _mask(self: RolloutBatch[np.ndarray], marks: np.ndarray | None = None) -> np.ndarray:
        """Returns the mask unchanged; for None, a mask that is False everywhere."""
        return np.zeros(self.rewards.shape[:2], bool) if marks is None else marks

    def nonfinite_columns(self: RolloutBatch[np.ndarray]) -> dict[str, np.ndarray]:
        """Returns a bool mask of the transitions with non-finite numbers, by column."""
        return {name: bad_rows(column, 2) for name, column in self.columns().items() if not is_finite(column)}

    def mark_nonfinite(self: RolloutBatch[np.ndarray], marks: Iterable[np.ndarray]) -> RolloutBatch[np.ndarray]:
        """Returns the batch with more transitions marked as not finite."""
        return replace(self, nonfinite=np.logical_or.reduce([self._mask(self.nonfinite), *marks]))

    def drop(self: RolloutBatch[np.ndarray], marks: np.ndarray, reason: DropReason) -> RolloutBatch[np.ndarray]:
        """Removes the marked transitions from those that train, and counts those that were not dropped before.

        Args:
            marks: Bool `[n, T]`.
            reason: Reason that they are counted for.
        """
        drops = self._mask(self.drops)
        num_dropped = int((marks & ~drops).sum())
        if not num_dropped:
            return self
        valid = ~marks if self.valid is None else self.valid & ~marks
        dropped = {**self.dropped, reason: self.dropped.get(reason, 0) + num_dropped}
        return replace(self, drops=drops | marks, valid=valid, dropped=dropped)

    def drop_lost_and_failed(
        self: RolloutBatch[np.ndarray], *, by_slot: bool, failures_by_slot: bool
    ) -> RolloutBatch[np.ndarray]:
        """Drops the transitions that are missing, that are not finite, or whose simulator failed.

        Args:
            by_slot: Drop all transitions of a slot with one that is missing or not finite, because their advantages depend on
                it; those besides the missing ones count as `DropReason.NONFINITE`.
            failures_by_slot: Drop all transitions of a slot whose simulator failed.
        """
        missing, nonfinite, failed = (self._mask(mask) for mask in (self.missing, self.nonfinite, self.env_failed))
        if by_slot:
            nonfinite = _complete_slots(missing | nonfinite)
        if failures_by_slot:
            failed = _complete_slots(failed)
        batch = self.drop(missing, DropReason.RANK_LOST).drop(nonfinite, DropReason.NONFINITE)
        return batch.drop(failed, DropReason.ENV_FAILED)

    def cleaned(self: RolloutBatch[np.ndarray]) -> RolloutBatch[np.ndarray]:
        """Returns the batch with 0 in place of numbers that are not finite."""
        return self.map(cleaned)

    def counts(self: RolloutBatch[np.ndarray], received: int) -> RolloutCounts:
        """Returns the counts of the step; `received` is the number of transitions that arrived."""
        assert self.version is not None
        return RolloutCounts(self.version, received, self.dropped)

    # -- on an actor ----------------------------------------------------------------------------------------------

    def to_tensors(self: RolloutBatch[np.ndarray], device: torch.device) -> RolloutBatch[Tensor]:
        """Returns the batch on a device."""
        return self.map(lambda column: torch.from_numpy(column).to(device))

    def valid_decisions(self: RolloutBatch[Tensor]) -> Tensor:
        """Returns the transitions that train, bool `[n, T]`."""
        if self.valid is not None:
            return self.valid
        return torch.ones(self.rewards.shape[:2], dtype=torch.bool, device=self.rewards.device)

    def valid_actions(self: RolloutBatch[Tensor]) -> Tensor | None:
        """Returns the executed actions of the transitions that train, bool `[n, T, C]`; None if a decision is one action."""
        return None if self.executed is None else self.executed & self.valid_decisions()[..., None]

    def reward_sequence(self: RolloutBatch[Tensor]) -> RewardSequence:
        """Returns rewards and ends as one sequence of each slot, for the advantages."""
        return self._by_action() if self.rewards.dim() == 3 else self._by_decision()

    def _by_action(self: RolloutBatch[Tensor]) -> RewardSequence:
        """Returns outcomes of chunks as one sequence of actions, `[n, T · C]`; an end belongs to the last executed action."""
        executed = self.valid_actions()
        assert executed is not None and self.truncations is not None and self.values is not None
        terminations, truncations = (ends_at(ends, executed) for ends in (self.terminations, self.truncations))
        values, next_values = (self.values, self.next_values) if self.values.dim() == 3 else (None, None)
        return RewardSequence(
            rewards=self.rewards.flatten(1),
            terminations=terminations.flatten(1),
            truncations=truncations.flatten(1),
            valid=executed.flatten(1),
            values=None if values is None else values.flatten(1),
            next_values=None if next_values is None else next_values.flatten(1),
        )

    def _by_decision(self: RolloutBatch[Tensor]) -> RewardSequence:
        """Returns outcomes of decisions, `[n, T]`, with ends at decisions that train."""
        assert self.truncations is not None
        valid, terminations, truncations = self.valid_decisions(), self.terminations, self.truncations
        if DropReason.ENV_FAILED in self.dropped:
            terminations, truncations = ends_at(terminations, valid), ends_at(truncations, valid)
        return RewardSequence(self.rewards, terminations, truncations, valid, self.values, self.next_values)

    def with_advantages(
        self: RolloutBatch[Tensor], advantages: Tensor, returns: Tensor, sequence: RewardSequence
    ) -> TrainBatch:
        """Returns the batch that a policy trains on, `[n, T, ...]`.

        Args:
            advantages, returns: Of the positions of `sequence`.
            sequence: See `reward_sequence`.
        """
        assert self.logprobs is not None and self.values is not None
        shape, executed = self.rewards.shape, self.valid_actions()
        return TrainBatch(
            obs=self.obs,
            actions=self.actions,
            inputs={name: column for name, column in self.extras.items() if is_column(name, "inputs")},
            logprobs=self.logprobs,
            values=self.values,
            advantages=advantages.reshape(shape),
            returns=returns.reshape(shape),
            mask=sequence.valid.reshape(shape).float(),
            token_mask=None if executed is None else token_mask(executed, self.logprobs),
        )


def _complete_slots(marks: np.ndarray) -> np.ndarray:
    """Returns a bool mask `[n, T]` of all transitions in slots with at least one marked transition."""
    return np.broadcast_to(marks.any(1, keepdims=True), marks.shape)


def token_mask(executed: Tensor, logprobs: Tensor) -> Tensor:
    """Returns the mask of the log-probabilities that train: `executed` `[n, T, C]` in the shape of `logprobs`
    `[n, T, C(, dim)]`.
    """
    num_missing = logprobs.dim() - executed.dim()
    return executed.reshape(*executed.shape, *[1] * num_missing).expand(logprobs.shape).float()


def ends_at(ends: Tensor, trained: Tensor) -> Tensor:
    """Returns the ends of episodes at positions that train: each end moves to the last such position up to its
    decision.

    If the decision of an end does not train (none of its actions was executed, or its simulator failed), the episode is cut
    after the position before; otherwise it would be credited with the rewards that follow.

    Args:
        ends: Decisions that ended an episode, bool `[n, T]`.
        trained: Positions that train, bool `[n, T]` or `[n, T, C]`.

    Returns:
        Bool, of the shape of `trained`.
    """
    positions = trained.flatten(1)
    index = torch.arange(positions.shape[1], device=positions.device)
    latest = torch.where(positions, index, -1).cummax(1).values.view(trained.shape)
    latest = latest if trained.dim() == 2 else latest[..., -1]
    end_marks = (ends & (latest >= 0)).to(torch.uint8)
    counts = torch.zeros_like(positions, dtype=torch.uint8).scatter_reduce_(1, latest.clamp(min=0), end_marks, "amax")
    return counts.bool().view(trained.shape)


@dataclass(frozen=True)
class TrainBatch:
    """Transitions that a policy trains on, `[N, ...]`, slot by slot (before `flatten`: `[n, T, ...]`).

    Attributes:
        obs: Observations, a tensor or a dict of tensors.
        actions: Actions that were chosen.
        inputs: The model's own inputs, by the names of their columns (`inputs.*`).
        logprobs: Log-probabilities of the actions under the weights that acted.
        values: Values of the observations under the weights that acted.
        advantages, returns: `[N]`, or `[N, C]` if they belong to single actions.
        mask: Rows, or actions, that train: 1 or 0, of the shape of `advantages`.
        token_mask: Log-probabilities that train, in their shape; None if those of a row all train or none does.
        proximal_logprobs: Log-probabilities under the weights before the update; None if the loss does not need them.
    """

    obs: Any
    actions: Tensor
    logprobs: Tensor
    values: Tensor
    advantages: Tensor
    returns: Tensor
    mask: Tensor
    inputs: Mapping[str, Tensor] = field(default_factory=dict)
    token_mask: Tensor | None = None
    proximal_logprobs: Tensor | None = None

    def __len__(self) -> int:
        return len(self.mask)

    def map(self, change: Callable[[Tensor], Tensor]) -> TrainBatch:
        """Returns the batch with `change` applied to each tensor."""
        columns = {attribute.name: getattr(self, attribute.name) for attribute in fields(self)}
        return TrainBatch(**{name: _map(column, change) for name, column in columns.items()})

    def tensors(self) -> Iterator[Tensor]:
        """Yields all tensors, in the same order for batches with the same fields."""
        for attribute in fields(self):
            column = getattr(self, attribute.name)
            if isinstance(column, Mapping):
                yield from column.values()
            elif column is not None:
                yield column

    def select(self, rows: Tensor) -> TrainBatch:
        """Returns the rows with these indices."""
        return self.map(lambda tensor: tensor[rows])

    def flatten(self) -> TrainBatch:
        """Returns `[n, T, ...]` as rows, `[N, ...]`."""
        return self.map(lambda tensor: tensor.flatten(0, 1))

    def idle_row(self) -> TrainBatch:
        """Returns one row that trains nothing, for a rank that has fewer passes to make than the others."""
        row = self.map(lambda tensor: tensor[:1])
        masked = None if row.token_mask is None else torch.zeros_like(row.token_mask)
        return replace(row, mask=torch.zeros_like(row.mask), token_mask=masked)

    def policy_inputs(self) -> dict[str, Any]:
        """Returns the inputs of `Policy.default_forward`."""
        return {"obs": self.obs, "actions": self.actions} | rows_of(self.inputs, "inputs")

    @property
    def tokens_per_row(self) -> int:
        """Log-probabilities of one row."""
        return math.prod(self.logprobs.shape[1:])

    def token_weights(self) -> Tensor:
        """Returns the mask of the log-probabilities that train, `[N, tokens]`."""
        if self.token_mask is not None:
            return self.token_mask.reshape(len(self), -1)
        return spread(self.mask.reshape(len(self), -1), self.tokens_per_row)


def _map(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Applies `change` to a tensor, or to each tensor of a mapping; None stays None."""
    if isinstance(value, Mapping):
        return {name: change(tensor) for name, tensor in value.items()}
    return None if value is None else change(value)


def spread(columns: Tensor, tokens: int) -> Tensor:
    """Expands values of a row or of its actions, `[N, 1]` or `[N, C]`, to each of its tokens, `[N, tokens]`."""
    return columns if columns.shape[1] == tokens else columns.repeat_interleave(tokens // columns.shape[1], 1)


def permutation(total: int, *entropy: int) -> torch.Tensor:
    """Draws a permutation of `range(total)` that depends on `entropy` alone (seed, step, epoch)."""
    seed = int(np.random.SeedSequence(entropy).generate_state(1, np.uint64)[0] >> np.uint64(1))
    return torch.randperm(total, generator=torch.Generator().manual_seed(seed))


def permutation_by_part(slots: int, steps: int, parts: int, *entropy: int) -> torch.Tensor:
    """Draws a permutation of a step's transitions, numbered slot by slot. Each part of the decisions is permuted
    separately, and the parts stay in order.
    """
    size = steps // parts
    part_orders = [permutation(slots * size, *entropy, part) for part in range(parts)]
    return torch.cat(
        [(part_order // size) * steps + part * size + part_order % size for part, part_order in enumerate(part_orders)]
    )


def local_minibatches(order: torch.Tensor, size: int, held: range) -> list[torch.Tensor]:
    """Returns the part of each global minibatch that one rank holds.

    Args:
        order: Permutation of all transitions of the run; minibatch m is `order[m·size : (m+1)·size]`.
        size: Transitions of a minibatch over all ranks.
        held: Transitions of this rank.

    Returns:
        For each minibatch the indices into this rank's transitions; may be empty.
    """
    if held == range(len(order)):
        return list(order.split(size))
    is_local = (order >= held.start) & (order < held.stop)
    return [
        minibatch[mask] - held.start for minibatch, mask in zip(order.split(size), is_local.split(size), strict=True)
    ]


def passes(num_local: Sequence[int], rank: int, ranks: int, reduce: Reduce) -> list[int]:
    """Returns the forward passes of each minibatch, the same number on all ranks: the maximum over the ranks.

    Args:
        num_local: Passes that this rank needs for each minibatch.
        rank, ranks: Rank in the group, and its size.
        reduce: Sums a tensor over the group, in place.
    """
    passes_by_rank = torch.zeros((ranks, len(num_local)), dtype=torch.int64)
    passes_by_rank[rank] = torch.tensor(list(num_local), dtype=torch.int64)
    if ranks > 1:
        reduce(passes_by_rank)
    return [max(int(num_passes), 1) for num_passes in passes_by_rank.amax(0)]
