"""Batches of embodied runs: transitions from rollout ranks, training batches and their minibatches.

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

from rlhpc.embodied.envs.observations import bad_rows, columns_of, is_column, is_finite, replace_nonfinite, rows_of
from rlhpc.training.flat_parameters import Reduce

Array = TypeVar("Array")
Other = TypeVar("Other")

#: Fields of a `RolloutBatch` by the names of their columns in messages, in message order.
_LEADING_COLUMNS = {"actions": "actions", "logprobs": "logprobs", "values": "values"}
_TRAILING_COLUMNS = {
    "next_values": "next_values",
    "rewards": "rewards",
    "terminations": "terminations",
    "truncations": "truncations",
    "action_mask": "executed",
    "loss_mask": "valid",
    "nonfinite": "nonfinite",
    "env_failed": "env_failed",
    "lost": "missing",
    "intervened": "intervened",
    "marks": "marks",
    "lags": "lags",
}


_MASKS = ("truncations", "action_mask", "loss_mask", "nonfinite", "env_failed", "lost", "intervened", "marks")


class DropReason(StrEnum):
    """Reason why a transition is not trained on."""

    RANK_LOST = "rank lost"
    """The env or rollout rank of its slot left the run before the transition was delivered."""

    NONFINITE = "nonfinite"
    """The transition, or another one that its advantage depends on, contains a non-finite number."""

    ENV_FAILED = "env failed"
    """The simulator or robot failed, so that the transition's outcome is unknown."""

    FILTERED = "filtered"
    """The mean return of the slot's group is outside the bounds of `algorithm.filter_rewards`."""


@dataclass(frozen=True)
class RolloutCounts:
    """Counts of the transitions that an actor rank received in a step.

    Attributes:
        version: Oldest version of the weights that acted.
        num_received: Number of transitions in the rank's batch or buffer.
        dropped: Number of dropped transitions by reason. Each transition counts for one reason.
    """

    version: int
    num_received: int
    dropped: Mapping[DropReason, int]

    @classmethod
    def sum(cls, parts: Sequence[RolloutCounts]) -> RolloutCounts:
        """Returns the sum of counts from several ranks or several parts of a step. `version` is the minimum."""
        dropped_by_reason = {reason: sum(counts.dropped.get(reason, 0) for counts in parts) for reason in DropReason}
        return cls(
            min(part_counts.version for part_counts in parts),
            sum(part_counts.num_received for part_counts in parts),
            dropped_by_reason,
        )


@dataclass(frozen=True)
class RewardSequence:
    """Rewards and episode ends in temporal order, `[n, S]`: S decisions, or the actions of all decisions.

    Attributes:
        rewards: Reward of each position.
        terminations, truncations: Positions at which an episode terminated or was truncated, bool.
        valid: Positions that are trained on, bool.
        values, next_values: Values of the observations before and after each position; None if the positions have no
            values.
    """

    rewards: Tensor
    terminations: Tensor
    truncations: Tensor
    valid: Tensor
    values: Tensor | None
    next_values: Tensor | None

    def as_truncated(self) -> RewardSequence:
        """Returns the sequence with its terminations as truncations, after which estimators bootstrap."""
        truncations = self.terminations | self.truncations
        return replace(self, terminations=torch.zeros_like(self.terminations), truncations=truncations)

    def estimator_inputs(self) -> dict[str, Any]:
        """Returns the keyword arguments of `calculate_adv_and_returns`, without those that are None."""
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
    """Transitions of a rank's slots from rollout ranks, `[n, T, ...]`: arrays in messages, tensors on an actor.

    Attributes:
        obs: Observations that the policy acted on, an array or a dict of arrays.
        actions: Actions sampled by the policy.
        rewards: `[n, T]`, or `[n, T, C]` if each action of a chunk has a reward.
        terminations: Decisions that ended an episode, bool.
        truncations: Decisions after which an episode was truncated, bool; None in off-policy runs, which do not need it.
        logprobs: Log-probabilities of the actions; `algorithm.logprob_type` determines their shape.
        values, next_values: Values of `obs` and of the true next observations, `[n, T]` or `[n, T, C]`.
        executed: Actions that were executed before their episode ended, bool `[n, T, C]`; None if a decision is one action.
        valid: Transitions to train on, bool; None selects all. Decisions after a slot's only episode are excluded.
        nonfinite: Transitions in which the env rank replaced non-finite numbers, bool.
        env_failed: Transitions whose simulator or robot failed, bool.
        missing: Transitions that are missing because a rank left the run, bool; None if no rank left.
        intervened: Transitions in which a source of interventions chose an action, bool; None if there is no source.
        marks: A person's verdicts on episodes, int8 (`MARK_CODES`); None unless a success classifier is trained.
        lags: Numbers of versions by which the weights that acted are older than those before the update; None if the loss does
            not need them.
        extras: Additional columns by name: the model's `inputs.*`, and in off-policy runs `next_obs.*`.
        version: Oldest version of the weights that acted; None if unknown.
        drops: Transitions that `drop` masked out, bool; None if no transition was dropped.
        dropped: Number of transitions that `drop` masked out, by reason.
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
    intervened: Array | None = None
    marks: Array | None = None
    lags: Array | None = None
    extras: Mapping[str, Array] = field(default_factory=dict)
    version: int | None = None
    drops: np.ndarray | None = None
    dropped: Mapping[DropReason, int] = field(default_factory=dict)

    # -- messages -------------------------------------------------------------------------------------------------

    def columns(self) -> dict[str, Array]:
        """Returns the batch as a message's columns by name, without fields that are None."""
        leading_columns = {name: getattr(self, attribute) for name, attribute in _LEADING_COLUMNS.items()}
        trailing_columns = {name: getattr(self, attribute) for name, attribute in _TRAILING_COLUMNS.items()}
        columns = {**columns_of("obs", self.obs), **leading_columns, **self.extras, **trailing_columns}
        return {name: column for name, column in columns.items() if column is not None}

    def transition_columns(self) -> dict[str, Array]:
        """Returns the columns without truncations and masks."""
        return {name: column for name, column in self.columns().items() if name not in _MASKS}

    @classmethod
    def from_columns(cls, columns: Mapping[str, Any]) -> RolloutBatch[Any]:
        """Builds a batch from a message's columns, which may include `version`."""
        attributes = {**_LEADING_COLUMNS, **_TRAILING_COLUMNS}
        arguments = {attribute: columns[name] for name, attribute in attributes.items() if name in columns}
        extra_columns = {
            name: column
            for name, column in columns.items()
            if name not in attributes and name != "version" and not is_column(name, "obs")
        }
        return cls(obs=rows_of(columns, "obs"), extras=extra_columns, version=columns.get("version"), **arguments)

    def map(self, change: Callable[[Array], Other]) -> RolloutBatch[Other]:
        """Returns the batch with `change` applied to each column."""
        mapped_columns = {name: change(column) for name, column in self.columns().items()}
        batch = RolloutBatch.from_columns(mapped_columns)
        return replace(batch, version=self.version, drops=self.drops, dropped=self.dropped)

    def of_slots(self, slots: slice) -> RolloutBatch[Array]:
        """Returns the transitions of a range of slots."""
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
    def zeros(like: Mapping[str, np.ndarray], num_slots: int, num_decisions: int) -> RolloutBatch[np.ndarray]:
        """Returns a batch of zeros for transitions that are missing because their rank left the run.

        Args:
            like: Columns of another message; their dtypes and trailing dimensions are used.
            num_slots: Number of slots, n.
            num_decisions: Number of decisions, T.
        """
        columns = {
            name: np.zeros((num_slots, num_decisions, *example.shape[2:]), example.dtype)
            for name, example in like.items()
        }
        return RolloutBatch.from_columns({**columns, "lost": np.ones((num_slots, num_decisions), bool)})

    def with_lags(self: RolloutBatch[np.ndarray], version: int) -> RolloutBatch[np.ndarray]:
        """Returns the batch with `lags`, for weights of `version` before the update. Missing transitions have no lag."""
        lag = 0 if self.version is None else max(version - self.version, 0)
        return replace(self, lags=np.full(self.rewards.shape[:2], lag, np.float32))

    def truncate_last_decision(self: RolloutBatch[np.ndarray]) -> RolloutBatch[np.ndarray]:
        """Returns the batch with unfinished episodes marked as truncated at the last decision."""
        if self.truncations is None:
            return self
        truncations = self.truncations.copy()
        truncations[:, -1] |= ~self.terminations[:, -1]
        return replace(self, truncations=truncations)

    # -- dropped transitions --------------------------------------------------------------------------------------

    def _mask(self: RolloutBatch[np.ndarray], marks: np.ndarray | None = None) -> np.ndarray:
        """Returns `marks` unchanged, or a mask `[n, T]` of False if it is None."""
        return np.zeros(self.rewards.shape[:2], bool) if marks is None else marks

    def nonfinite_columns(self: RolloutBatch[np.ndarray]) -> dict[str, np.ndarray]:
        """Returns, for each column with non-finite numbers, a bool mask `[n, T]` of the transitions that contain them."""
        return {name: bad_rows(column, 2) for name, column in self.columns().items() if not is_finite(column)}

    def mark_nonfinite(self: RolloutBatch[np.ndarray], marks: Iterable[np.ndarray]) -> RolloutBatch[np.ndarray]:
        """Returns the batch with additional transitions marked as non-finite, by bool masks `[n, T]`."""
        return replace(self, nonfinite=np.logical_or.reduce([self._mask(self.nonfinite), *marks]))

    def drop(self: RolloutBatch[np.ndarray], marks: np.ndarray, reason: DropReason) -> RolloutBatch[np.ndarray]:
        """Returns the batch with the marked transitions excluded from training, and counted by reason.

        A transition that was dropped before is not counted again.

        Args:
            marks: Transitions to drop, bool `[n, T]`.
            reason: Reason to count them under.
        """
        drop_reasons = self._mask(self.drops)
        num_dropped = int((marks & ~drop_reasons).sum())
        if not num_dropped:
            return self
        is_valid = ~marks if self.valid is None else self.valid & ~marks
        dropped_by_reason = {**self.dropped, reason: self.dropped.get(reason, 0) + num_dropped}
        return replace(self, drops=drop_reasons | marks, valid=is_valid, dropped=dropped_by_reason)

    def drop_lost_and_failed(
        self: RolloutBatch[np.ndarray], *, by_slot: bool, failures_by_slot: bool
    ) -> RolloutBatch[np.ndarray]:
        """Returns the batch with missing, non-finite and failed transitions dropped.

        Args:
            by_slot: Drop all transitions of a slot if a transition is missing or non-finite, because their advantages depend
                on it. The additional transitions count as `DropReason.NONFINITE`.
            failures_by_slot: Drop all transitions of a slot whose simulator failed.
        """
        is_missing, nonfinite, is_failed = (
            self._mask(mask) for mask in (self.missing, self.nonfinite, self.env_failed)
        )
        if by_slot:
            nonfinite = _complete_slots(is_missing | nonfinite)
        if failures_by_slot:
            is_failed = _complete_slots(is_failed)
        batch = self.drop(is_missing, DropReason.RANK_LOST).drop(nonfinite, DropReason.NONFINITE)
        return batch.drop(is_failed, DropReason.ENV_FAILED)

    def drop_groups(
        self: RolloutBatch[np.ndarray], group_size: int, lower_bound: float, upper_bound: float
    ) -> RolloutBatch[np.ndarray]:
        """Returns the batch with all groups dropped whose mean return is below `lower_bound` or above `upper_bound`. A
        slot without any transition to train on does not count as a member of its group.

        Args:
            group_size: Number of consecutive slots in a group; the batch has complete groups.
            lower_bound, upper_bound: Bounds, which are themselves allowed.
        """
        is_valid = np.ones(self.rewards.shape[:2], bool) if self.valid is None else self.valid
        is_counted = is_valid if self.rewards.ndim == 2 else (is_valid[..., None] & self._mark_executed_actions())
        returns = np.where(is_counted, self.rewards, 0).reshape(len(is_valid), -1).sum(1, dtype=np.float64)
        is_member = is_valid.any(1).reshape(-1, group_size)
        sums, member_counts = (returns.reshape(-1, group_size) * is_member).sum(1), is_member.sum(1)
        means = sums / np.maximum(member_counts, 1)
        is_outside = ~((means >= lower_bound) & (means <= upper_bound)) & (member_counts > 0)
        is_dropped = np.repeat(is_outside, group_size)[:, None] & is_valid
        return self.drop(is_dropped, DropReason.FILTERED)

    def _mark_executed_actions(self: RolloutBatch[np.ndarray]) -> np.ndarray:
        return np.ones(self.rewards.shape, bool) if self.executed is None else self.executed

    def replace_nonfinite(self: RolloutBatch[np.ndarray]) -> RolloutBatch[np.ndarray]:
        """Returns the batch with non-finite numbers replaced by 0."""
        return self.map(replace_nonfinite)

    def counts(self, num_received: int) -> RolloutCounts:
        """Returns the counts of the step, with `num_received` as the number of received transitions."""
        assert self.version is not None
        return RolloutCounts(self.version, num_received, self.dropped)

    # -- on an actor ----------------------------------------------------------------------------------------------

    def to_tensors(self: RolloutBatch[np.ndarray], device: torch.device) -> RolloutBatch[Tensor]:
        """Returns the batch as tensors on a device."""
        return self.map(lambda column: torch.from_numpy(column).to(device))

    def valid_decisions(self: RolloutBatch[Tensor]) -> Tensor:
        """Returns the mask of the transitions to train on, bool `[n, T]`."""
        if self.valid is not None:
            return self.valid
        return torch.ones(self.rewards.shape[:2], dtype=torch.bool, device=self.rewards.device)

    def valid_actions(self: RolloutBatch[Tensor]) -> Tensor | None:
        """Returns the mask of executed actions in transitions to train on, bool `[n, T, C]`; None if a decision is one
        action."""
        return None if self.executed is None else self.executed & self.valid_decisions()[..., None]

    def reward_sequence(self: RolloutBatch[Tensor]) -> RewardSequence:
        """Returns each slot's rewards and episode ends as one sequence, for the advantage estimator."""
        return self._by_action() if self.rewards.dim() == 3 else self._by_decision()

    def _by_action(self: RolloutBatch[Tensor]) -> RewardSequence:
        """Returns a sequence over the actions of all chunks, `[n, T · C]`. An episode ends at its last executed action."""
        is_executed = self.valid_actions()
        assert is_executed is not None and self.truncations is not None and self.values is not None
        terminations, truncations = (
            ends_at(end_column, is_executed) for end_column in (self.terminations, self.truncations)
        )
        action_values, next_values = (self.values, self.next_values) if self.values.dim() == 3 else (None, None)
        return RewardSequence(
            rewards=self.rewards.flatten(1),
            terminations=terminations.flatten(1),
            truncations=truncations.flatten(1),
            valid=is_executed.flatten(1),
            values=None if action_values is None else action_values.flatten(1),
            next_values=None if next_values is None else next_values.flatten(1),
        )

    def _by_decision(self: RolloutBatch[Tensor]) -> RewardSequence:
        """Returns a sequence over decisions, `[n, T]`. After simulator failures, episode ends move to trained decisions."""
        assert self.truncations is not None
        is_valid, terminations, truncations = self.valid_decisions(), self.terminations, self.truncations
        if DropReason.ENV_FAILED in self.dropped:
            terminations, truncations = ends_at(terminations, is_valid), ends_at(truncations, is_valid)
        return RewardSequence(self.rewards, terminations, truncations, is_valid, self.values, self.next_values)

    def with_advantages(
        self: RolloutBatch[Tensor], advantages: Tensor, returns: Tensor, sequence: RewardSequence
    ) -> TrainBatch:
        """Returns the training batch, `[n, T, ...]`.

        Args:
            advantages, returns: Advantages and returns of the positions of `sequence`, `[n, S]`.
            sequence: Result of `reward_sequence`.
        """
        assert self.logprobs is not None and self.values is not None
        shape, is_executed = self.rewards.shape, self.valid_actions()
        return TrainBatch(
            obs=self.obs,
            actions=self.actions,
            inputs={name: column for name, column in self.extras.items() if is_column(name, "inputs")},
            logprobs=self.logprobs,
            values=self.values,
            advantages=advantages.reshape(shape),
            returns=returns.reshape(shape),
            mask=sequence.valid.reshape(shape).float(),
            token_mask=None if is_executed is None else token_mask(is_executed, self.logprobs),
            policy_mask=None if self.intervened is None else (~self.intervened).float(),
            lags=self.lags,
        )


def _complete_slots(is_marked: np.ndarray) -> np.ndarray:
    """Returns the bool mask `[n, T]` of all transitions in slots with a marked transition."""
    return np.broadcast_to(is_marked.any(1, keepdims=True), is_marked.shape)


def token_mask(is_executed: Tensor, logprobs: Tensor) -> Tensor:
    """Returns the float mask of the log-probabilities to train on: `is_executed` `[n, T, C]`, expanded to the shape of
    `logprobs`, `[n, T, C(, dim)]`.
    """
    num_missing = logprobs.dim() - is_executed.dim()
    return is_executed.reshape(*is_executed.shape, *[1] * num_missing).expand(logprobs.shape).float()


def ends_at(decision_ends: Tensor, is_trained: Tensor) -> Tensor:
    """Moves each episode end to the last trained position at or before its decision.

    If no position of the end's decision is trained (no action was executed, or the simulator failed), the end moves to an
    earlier decision. Otherwise rewards of the next episode would be credited to this episode.

    Args:
        decision_ends: Decisions that ended an episode, bool `[n, T]`.
        is_trained: Positions to train on, bool `[n, T]` or `[n, T, C]`.

    Returns:
        Bool mask of the ends, of the shape of `is_trained`.
    """
    flat_trained = is_trained.flatten(1)
    index = torch.arange(flat_trained.shape[1], device=flat_trained.device)
    last_trained = torch.where(flat_trained, index, -1).cummax(1).values.view(is_trained.shape)
    last_trained = last_trained if is_trained.dim() == 2 else last_trained[..., -1]
    end_marks = (decision_ends & (last_trained >= 0)).to(torch.uint8)
    end_mask = torch.zeros_like(flat_trained, dtype=torch.uint8).scatter_reduce_(
        1, last_trained.clamp(min=0), end_marks, "amax"
    )
    return end_mask.bool().view(is_trained.shape)


@dataclass(frozen=True)
class TrainBatch:
    """Transitions to train on, `[N, ...]`, slot by slot (before `flatten`: `[n, T, ...]`).

    Attributes:
        obs: Observations, a tensor or a dict of tensors.
        actions: Actions sampled by the policy.
        inputs: Model-specific inputs, by column name (`inputs.*`).
        logprobs: Log-probabilities of the actions under the weights that acted.
        values: Values of the observations under the weights that acted.
        advantages, returns: `[N]`, or `[N, C]` if they are per action.
        mask: Loss mask of rows or actions: 1 or 0, of the shape of `advantages`.
        token_mask: Loss mask of `logprobs`, in their shape; None if `mask` applies to all log-probabilities of a row.
        entropy_mask: Loss mask of the entropy, in the shape of `logprobs`; None if that of the log-probabilities applies.
        policy_mask: 1 or 0 for each row, `[N]`: 0 excludes its log-probabilities from the policy loss, because a person or a
            script chose an action, which is not a sample of the policy. Its reward counts in returns and its value is trained,
            so that the actions before it are valued by what followed. None if the policy chose all actions.
        proximal_logprobs: Log-probabilities under the weights before the update; None if the loss does not need them.
        lags: Numbers of versions by which the weights that acted are older than those before the update, `[N]`; None if the
            loss does not need them.
        sequence_sizes: Numbers of trained tokens, and of trained values of `mask`, in the row's sequence, `[N, 2]`; None if
            losses are not aggregated by sequence.
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
    entropy_mask: Tensor | None = None
    policy_mask: Tensor | None = None
    proximal_logprobs: Tensor | None = None
    lags: Tensor | None = None
    sequence_sizes: Tensor | None = None

    def __len__(self) -> int:
        return len(self.mask)

    def map(self, change: Callable[[Tensor], Tensor]) -> TrainBatch:
        """Returns the batch with `change` applied to each tensor."""
        columns = {attribute.name: getattr(self, attribute.name) for attribute in fields(self)}
        return TrainBatch(**{name: _map(column, change) for name, column in columns.items()})

    def tensors(self) -> Iterator[Tensor]:
        """Yields all tensors; batches with the same fields yield them in the same order."""
        for attribute in fields(self):
            column = getattr(self, attribute.name)
            if isinstance(column, Mapping):
                yield from column.values()
            elif column is not None:
                yield column

    def select(self, rows: Tensor) -> TrainBatch:
        """Returns a batch of the rows with these indices."""
        return self.map(lambda tensor: tensor[rows])

    def flatten(self) -> TrainBatch:
        """Returns the batch with its first two dimensions merged: `[n, T, ...]` to `[N, ...]`."""
        return self.map(lambda tensor: tensor.flatten(0, 1))

    def idle_row(self) -> TrainBatch:
        """Returns one row with a zero mask, for a rank with fewer micro-batches than other ranks."""
        return self.map(lambda tensor: tensor[:1]).idle_from(0)

    def idle_from(self, first_row: int) -> TrainBatch:
        """Returns the batch with a zero mask for the rows from `first_row` on."""

        def idle(mask: Tensor) -> Tensor:
            mask = mask.clone()
            mask[first_row:] = 0
            return mask

        token_mask, entropy_mask = (
            None if mask is None else idle(mask) for mask in (self.token_mask, self.entropy_mask)
        )
        return replace(self, mask=idle(self.mask), token_mask=token_mask, entropy_mask=entropy_mask)

    def policy_inputs(self) -> dict[str, Any]:
        """Returns the inputs of `Policy.default_forward` by name."""
        return {"obs": self.obs, "actions": self.actions} | rows_of(self.inputs, "inputs")

    @property
    def tokens_per_row(self) -> int:
        """Number of log-probabilities per row."""
        return math.prod(self.logprobs.shape[1:])

    def with_sequence_sizes(self, sequence_length: int) -> TrainBatch:
        """Returns the batch with `sequence_sizes`, for sequences of `sequence_length` consecutive rows, `[N, ...]`."""
        sequence_sizes = torch.stack([self.token_weights().sum(1), self.mask.reshape(len(self), -1).sum(1)], 1)
        total_sizes = sequence_sizes.view(-1, sequence_length, 2).sum(1, keepdim=True).expand(-1, sequence_length, -1)
        return replace(self, sequence_sizes=total_sizes.reshape(-1, 2))

    def token_weights(self) -> Tensor:
        """Returns the loss mask of the log-probabilities, `[N, tokens]`."""
        if self.token_mask is not None:
            weights = self.token_mask.reshape(len(self), -1)
        else:
            weights = spread(self.mask.reshape(len(self), -1), self.tokens_per_row)
        return weights if self.policy_mask is None else weights * self.policy_mask.reshape(len(self), 1)


def _map(tensors: Any, transform: Callable[[Tensor], Tensor]) -> Any:
    """Returns the result of `transform` for a tensor, or for each tensor of a mapping; None for None."""
    if isinstance(tensors, Mapping):
        return {name: transform(tensor) for name, tensor in tensors.items()}
    return None if tensors is None else transform(tensors)


def spread(columns: Tensor, num_tokens: int) -> Tensor:
    """Repeats values per row `[N, 1]` or per action `[N, C]` for each token; returns `[N, tokens]`."""
    return columns if columns.shape[1] == num_tokens else columns.repeat_interleave(num_tokens // columns.shape[1], 1)


def permutation(num_rows: int, *entropy: int) -> torch.Tensor:
    """Returns a random permutation of `range(num_rows)` that depends only on `entropy` (seed, step, epoch)."""
    seed = int(np.random.SeedSequence(entropy).generate_state(1, np.uint64)[0] >> np.uint64(1))
    return torch.randperm(num_rows, generator=torch.Generator().manual_seed(seed))


def permutation_by_part(num_slots: int, num_steps: int, num_parts: int, *entropy: int) -> torch.Tensor:
    """Returns a random permutation of a step's transitions, numbered slot by slot. The decisions are split into `num_parts`
    consecutive parts. Each part is permuted separately, and the parts stay in order.
    """
    steps_per_part = num_steps // num_parts
    part_orders = [permutation(num_slots * steps_per_part, *entropy, part_index) for part_index in range(num_parts)]
    return torch.cat(
        [
            (part_order // steps_per_part) * num_steps + part_index * steps_per_part + part_order % steps_per_part
            for part_index, part_order in enumerate(part_orders)
        ]
    )


def local_minibatches(row_order: torch.Tensor, minibatch_size: int, local_range: range) -> list[torch.Tensor]:
    """Returns this rank's part of each global minibatch.

    Args:
        row_order: Permutation of all transitions of the run, or a part of it; minibatch m is `row_order[m·size : (m+1)·size]`.
        minibatch_size: Number of transitions in a minibatch, over all ranks.
        local_range: Transitions of this rank, as a range of global indices.

    Returns:
        Indices into this rank's transitions for each minibatch. They may be empty.
    """
    is_local = (row_order >= local_range.start) & (row_order < local_range.stop)
    return [
        minibatch[mask] - local_range.start
        for minibatch, mask in zip(row_order.split(minibatch_size), is_local.split(minibatch_size), strict=True)
    ]


def count_passes(num_local: Sequence[int], rank: int, world_size: int, reduce: Reduce) -> list[int]:
    """Returns the number of forward passes of each minibatch: the maximum over the ranks, at least 1.

    Args:
        num_local: Number of passes that this rank needs for each minibatch.
        rank, world_size: Rank in the group, and the group's size.
        reduce: Sums a tensor over the group, in place.
    """
    passes_by_rank = torch.zeros((world_size, len(num_local)), dtype=torch.int64)
    passes_by_rank[rank] = torch.tensor(list(num_local), dtype=torch.int64)
    if world_size > 1:
        reduce(passes_by_rank)
    return [max(int(num_passes), 1) for num_passes in passes_by_rank.amax(0)]
