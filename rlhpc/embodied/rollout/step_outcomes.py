"""Outcomes of a rollout: rewards, ends of episodes, and final observations."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from rlhpc.embodied.envs.base import TIMING_NAMES, Timing, concat_timings, env_failed
from rlhpc.embodied.envs.observations import (
    all_finite,
    bad_rows,
    bad_slots,
    cleaned,
    is_finite,
    join,
    keep_tensors,
    take,
)
from rlhpc.runtime.errors import ConfigError

if TYPE_CHECKING:
    from rlhpc.embodied.config import PlayingConfig, PpoConfig


@dataclass(frozen=True)
class OutcomeShape:
    """Options that determine the columns of outcomes. `Outcomes` explains them."""

    chunk: int = 1
    reward_per_action: bool = False
    single_episode: bool = False


def shape_of(cfg: PlayingConfig, rewards: str, logprobs: str, single_episode: bool) -> OutcomeShape:
    """Returns the options for the levels (action or chunk) of rewards and log-probabilities."""
    is_per_action = rewards == "action_level"
    keeps_actions = is_per_action or logprobs != "chunk_level"
    return OutcomeShape(cfg.actor.model.num_action_chunks if keeps_actions else 1, is_per_action, single_episode)


def ppo_shape(cfg: PpoConfig) -> OutcomeShape:
    """Returns the options of a PPO run. Without `env.train.auto_reset`, each rollout is one episode per slot."""
    algorithm = cfg.algorithm
    return shape_of(cfg, algorithm.reward_type.lower(), algorithm.logprob_type.lower(), not cfg.env.train.auto_reset)


#: Columns of a message whose names differ from the fields of `SlotOutcomes`.
_COLUMNS = {"executed": "action_mask", "valid": "loss_mask", "missing": "lost"}


@dataclass(frozen=True)
class SlotOutcomes:
    """Outcomes of some slots over a rollout, `[n, T]`, as an env rank sends them to a rollout rank.

    Attributes:
        rewards: `[n, T]`, or `[n, T, C]` with a reward for each action of a chunk.
        terminations, truncations: Decisions after which an episode ended, bool.
        executed: Actions that were executed, bool `[n, T, C]`; None if actions of a chunk are not distinguished.
        valid: Decisions to train on, bool; None for all.
        env_failed: Transitions whose simulator or robot failed, bool.
        nonfinite: Transitions in which 0 replaced non-finite values, bool; None if the values were not checked.
        last_obs: Observations after the rollout, `[n, ...]`.
        final_slot, final_step, final_obs: Slot, decision `[k]` and last observation `[k, ...]` of each ended episode.
        missing: Transitions whose outcome is missing because an env rank left the run, bool; None if none is missing.
    """

    rewards: np.ndarray
    terminations: np.ndarray
    truncations: np.ndarray
    executed: np.ndarray | None
    valid: np.ndarray | None
    env_failed: np.ndarray
    nonfinite: np.ndarray | None
    last_obs: Any
    final_slot: np.ndarray
    final_step: np.ndarray
    final_obs: Any
    missing: np.ndarray | None = None

    def columns(self) -> dict[str, Any]:
        """Returns the columns of the message by name, without fields that are None."""
        columns = {
            _COLUMNS.get(attribute.name, attribute.name): getattr(self, attribute.name) for attribute in fields(self)
        }
        return {name: column for name, column in columns.items() if column is not None}

    def transition_columns(self) -> dict[str, np.ndarray]:
        """Returns the columns of transitions, `[n, T, ...]`."""
        episode_columns = ("last_obs", "final_slot", "final_step", "final_obs")
        return {name: column for name, column in self.columns().items() if name not in episode_columns}

    @classmethod
    def from_columns(cls, columns: Mapping[str, Any]) -> SlotOutcomes:
        """Builds the outcomes from a message."""
        arguments: dict[str, Any] = {
            attribute.name: columns.get(_COLUMNS.get(attribute.name, attribute.name)) for attribute in fields(cls)
        }
        return cls(**arguments)

    def shifted(self, slots: int) -> SlotOutcomes:
        """Returns the outcomes with `slots` added to `final_slot`."""
        return replace(self, final_slot=self.final_slot + slots)

    @staticmethod
    def join(parts: Sequence[SlotOutcomes]) -> SlotOutcomes:
        """Concatenates the outcomes of consecutive slots. `final_slot` must be relative to the same slot in all parts."""
        columns = [outcomes.columns() for outcomes in parts]
        return SlotOutcomes.from_columns(
            {name: join([outcome_columns[name] for outcome_columns in columns]) for name in columns[0]}
        )


class Outcomes:
    """Collector of one vector environment's outcomes over a rollout, batch first: `[n, T]`.

    `env_failed [n, T]` marks the transitions whose simulator or robot failed, so that their outcome is unknown.

    Args:
        share: Global slots of the environment.
        steps: T, number of decisions in a rollout.
        chunk: Number of actions per decision, if actions are distinguished: `executed [n, T, chunk]` marks executed actions.
        reward_per_action: Store a reward for each action, `[n, T, chunk]`.
        single_episode: Play one episode per slot: `valid [n, T]` excludes the decisions after its end.
        spoiled: Function called for non-finite values with the quantity ("reward", "observation" or "last observation of an
            episode"), the step and the slots (bool `[n]`). It may raise an error. Otherwise 0 replaces the values, and
            `nonfinite [n, T]` marks their transitions.
    """

    def __init__(
        self,
        share: range,
        steps: int,
        *,
        chunk: int = 1,
        reward_per_action: bool = False,
        single_episode: bool = False,
        spoiled: Callable[[str, int, np.ndarray], None] | None = None,
    ) -> None:
        num_slots = len(share)
        self._on_nonfinite, self._steps = spoiled, steps
        self._per_action = reward_per_action and chunk > 1
        self.rewards = np.zeros((num_slots, steps, chunk) if self._per_action else (num_slots, steps), np.float32)
        self.terminations = np.zeros((num_slots, steps), bool)
        self.truncations = np.zeros((num_slots, steps), bool)
        self._optional: dict[str, np.ndarray] = {}
        if chunk > 1:
            self._optional["executed"] = np.ones((num_slots, steps, chunk), bool)
        if single_episode:
            self._optional["valid"] = np.ones((num_slots, steps), bool)
        self._optional["env_failed"] = np.zeros((num_slots, steps), bool)
        if spoiled is not None:
            self._optional["nonfinite"] = np.zeros((num_slots, steps), bool)
        self._alive = np.ones(num_slots, bool) if single_episode else None
        self._finals: list[tuple[int, np.ndarray, Any]] = []

    def add(
        self, t: int, rewards: np.ndarray, terminations: np.ndarray, truncations: np.ndarray, infos: dict[str, Any]
    ) -> np.ndarray | None:
        """Stores step `t` of all slots.

        Returns:
            Indices of the slots whose episode ended; None if no episode ended.

        Raises:
            ConfigError: The environment does not report the actions of a chunk separately.
        """
        if "executed" in self._optional:
            if "chunk" not in infos:
                raise ConfigError(
                    "algorithm.logprob_type and algorithm.reward_type need to know what each action of a chunk brought, "
                    "which this environment does not say (infos['chunk']); choose chunk_level for both"
                )
            self._optional["executed"][:, t] = infos["chunk"]["mask"]
            if self._per_action:
                rewards = infos["chunk"]["rewards"]
        self.rewards[:, t] = rewards
        self.terminations[:, t] = terminations
        self.truncations[:, t] = truncations
        has_failed = self._optional["env_failed"][:, t] = env_failed(infos, len(self.rewards))
        if has_failed.any():
            self.rewards[has_failed, t], self.terminations[has_failed, t], self.truncations[has_failed, t] = (
                0,
                False,
                True,
            )
        if self._alive is not None:
            self._optional["valid"][:, t] = self._alive
            for column in (self.rewards, self.terminations, self.truncations, self._optional["env_failed"]):
                column[~self._alive, t] = 0
            self._alive &= ~(self.terminations[:, t] | self.truncations[:, t])
        if not is_finite(self.rewards[:, t]):
            self._handle_nonfinite("reward", t, bad_rows(self.rewards[:, t]), (t,))
            self.rewards[:, t] = cleaned(self.rewards[:, t])
        ended_slots = np.flatnonzero(self.terminations[:, t] | self.truncations[:, t])
        if not ended_slots.size:
            return None
        final_obs = take(keep_tensors(infos["final_obs"]), ended_slots)
        if not all_finite(final_obs):
            rows = np.zeros(len(self.rewards), bool)
            rows[ended_slots] = bad_slots(final_obs)
            self._handle_nonfinite("last observation of an episode", t, rows, (t,))
            final_obs = cleaned(final_obs)
        self._finals.append((t, ended_slots, final_obs))
        return ended_slots

    def _handle_nonfinite(self, quantity: str, t: int, rows: np.ndarray, at: tuple[int, ...]) -> None:
        if self._on_nonfinite is None:
            return
        self._on_nonfinite(quantity, t, rows)
        for step in at:
            if 0 <= step < self._steps:
                self._optional["nonfinite"][rows, step] = True

    def cleaned_obs(self, t: int, obs: Any) -> Any:
        """Returns the observations `obs` of step `t` for the policy, with 0 in place of non-finite values."""
        if all_finite(obs):
            return obs
        rows = bad_slots(obs)
        if self._alive is not None:
            rows &= self._alive  # steps after an episode's end do not train
        if rows.any():
            self._handle_nonfinite("observation", t, rows, (t - 1, t))
        return cleaned(obs)

    def part(self, part: slice, last_obs: Any, num_decisions: int | None = None) -> SlotOutcomes:
        """Returns the outcomes of the slots `part`. `final_slot` is relative to the first slot of `part`.

        Args:
            part: Slots of the environment.
            last_obs: Observations of these slots after the rollout.
            num_decisions: Number of decisions, if the rollout ended early.
        """
        slots, steps, rows = [], [], []
        for t, ended_slots, final_obs in self._finals:
            is_in_part = (ended_slots >= part.start) & (ended_slots < part.stop)
            if is_in_part.any():
                slots.append(ended_slots[is_in_part] - part.start)
                steps.append(np.full(int(is_in_part.sum()), t))
                rows.append(take(final_obs, is_in_part))
        no_ends = np.zeros(0, np.int64)
        optional = {name: column[part, :num_decisions] for name, column in self._optional.items()}
        return SlotOutcomes(
            rewards=self.rewards[part, :num_decisions],
            terminations=self.terminations[part, :num_decisions],
            truncations=self.truncations[part, :num_decisions],
            executed=optional.get("executed"),
            valid=optional.get("valid"),
            env_failed=optional["env_failed"],
            nonfinite=optional.get("nonfinite"),
            last_obs=last_obs,
            final_slot=np.concatenate(slots) if slots else no_ends,
            final_step=np.concatenate(steps) if steps else no_ends,
            final_obs=join(rows) if rows else take(last_obs, slice(0)),
        )


def unknown_outcomes(share: range, steps: int, shape: OutcomeShape, last_obs: Any) -> SlotOutcomes:
    """Returns placeholder outcomes for slots of an env rank that left the run. The caller must mark them as `missing`."""
    outcomes = Outcomes(
        share,
        steps,
        chunk=shape.chunk,
        reward_per_action=shape.reward_per_action,
        single_episode=shape.single_episode,
        spoiled=lambda *_: None,
    )
    return outcomes.part(slice(0, len(share)), last_obs)


def next_values(
    values: np.ndarray,
    last_values: np.ndarray,
    final_slot: np.ndarray,
    final_step: np.ndarray,
    final_values: np.ndarray,
    executed: np.ndarray | None = None,
) -> np.ndarray:
    """Returns the value of the true next observation of each transition, `[n, T]`.

    Args:
        values: Values of the observations that were acted on, `[n, T]`, or `[n, T, chunk]` with a value per action.
        last_values: Values of the observations after the rollout, `[n]`, or `[n, chunk]`, of which the first is used.
        final_slot, final_step, final_values: Slot, decision `[k]` and value of the last observation, `[k]` or `[k, chunk]`, of
            each ended episode.
        executed: Mask of the executed actions, `[n, T, chunk]`; required for values per action.
    """
    following_values = np.empty_like(values)
    if values.ndim == 3:
        assert executed is not None
        following_values[:, :, :-1] = values[:, :, 1:]
        following_values[:, :-1, -1], following_values[:, -1, -1] = values[:, 1:, 0], last_values[:, 0]
        following_values[final_slot, final_step, (executed[final_slot, final_step].sum(-1) - 1)] = final_values[:, 0]
        return following_values
    following_values[:, :-1] = values[:, 1:]
    following_values[:, -1] = last_values
    following_values[final_slot, final_step] = final_values
    return following_values


class EpisodeLog:
    """Log of the episodes that ended during a rollout. Episodes with a non-finite return are only counted.

    Attributes:
        spoiled: Number of episodes with a non-finite return.
        skipped: Number of actions of chunks that were not executed because the episode had ended.
    """

    def __init__(self) -> None:
        self._rows: list[np.ndarray] = []
        self.spoiled = self.skipped = 0

    def count_skipped(self, infos: dict[str, Any], slots: slice = slice(None)) -> None:
        """Counts the actions of a step's chunks that were not executed in `slots`."""
        if "chunk" in infos:
            self.skipped += int((~np.asarray(infos["chunk"]["mask"], bool)[slots]).sum())

    def add(self, t: int, slot_offset: int, infos: dict[str, Any], ended_slots: np.ndarray) -> None:
        """Records the episodes that ended at step `t` in `ended_slots`, which are relative to `slot_offset`."""
        episode = infos.get("episode")
        if episode is None:
            return
        finished_slots = ended_slots[np.asarray(episode["mask"])[ended_slots]] if "mask" in episode else ended_slots
        finished_slots = finished_slots[~env_failed(infos, len(episode["return"]))[finished_slots]]
        success = episode.get("success_once", episode.get("success"))
        rows = np.empty((finished_slots.size, 5))
        rows[:, 0], rows[:, 1] = t, finished_slots + slot_offset
        rows[:, 2], rows[:, 3] = (
            np.asarray(episode["return"])[finished_slots],
            np.asarray(episode["length"])[finished_slots],
        )
        rows[:, 4] = np.nan if success is None else np.asarray(success)[finished_slots]
        if not is_finite(rows[:, 2]):
            has_finite_return = np.isfinite(rows[:, 2])
            self.spoiled += int((~has_finite_return).sum())
            rows = rows[has_finite_return]
        self._rows.append(rows)

    def arrays(self) -> dict[str, np.ndarray]:
        """Returns `step`, `slot`, `return`, `length`, `success` (nan if the environment does not report it), each `[k]`."""
        rows = np.concatenate(self._rows) if self._rows else np.zeros((0, 5))
        names = ("step", "slot", "return", "length", "success")
        return {name: rows[:, i] for i, name in enumerate(names)}

    def report(
        self,
        *,
        restarts: int = 0,
        by_device: int = 0,
        by_host: int = 0,
        busy_s: float = 0.0,
        timing: Iterable[Timing | None] = (),
    ) -> dict[str, np.ndarray]:
        """Returns the rank's report of a rollout: `arrays`, `COUNTS` (each `[1]`), and `concat_timings`.

        Args:
            restarts: Number of simulator processes restarted since the rank started, after they died or hung.
            by_device: Number of observation messages that stayed on the accelerator.
            by_host: Number of observation messages that were produced on the accelerator but copied to the host.
            busy_s: Seconds in which the rank did not wait for actions.
            timing: Timing statistics of the robots.
        """
        counts = (restarts, self.spoiled, self.skipped, by_device, by_host, busy_s)
        return {
            **self.arrays(),
            **{name: np.array([n]) for name, n in zip(COUNTS, counts, strict=True)},
            **concat_timings(timing),
        }


#: Counts in an env rank's report, in addition to episodes and `TIMING_NAMES`; see `EpisodeLog.report`.
COUNTS = ("restarts", "spoiled", "skipped", "by_device", "by_host", "busy_s")


def merge_reports(parts: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Merges the ranks' reports. Orders episodes by step and slot, so that the result does not depend on the placement."""
    parts = parts or [EpisodeLog().report()]
    columns = {name: np.concatenate([log_columns[name] for log_columns in parts]) for name in parts[0]}
    order = np.lexsort((columns["slot"], columns["step"]))
    return {name: column if name in (*COUNTS, *TIMING_NAMES) else column[order] for name, column in columns.items()}
