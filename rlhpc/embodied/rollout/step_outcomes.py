"""Outcomes of a rollout: rewards, ends of episodes, and final observations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from rlhpc.embodied.envs.base import TIMING_NAMES, Timing, concat_timings, env_failed, timing_row
from rlhpc.embodied.envs.observations import (
    all_finite,
    bad_rows,
    bad_slots,
    is_finite,
    join,
    keep_tensors,
    replace_nonfinite,
    take,
)
from rlhpc.runtime.errors import ConfigError

if TYPE_CHECKING:
    from rlhpc.embodied.config import PpoConfig


@dataclass(frozen=True)
class OutcomeShape:
    """Options that determine the columns of outcomes. `Outcomes` explains them."""

    chunk: int = 1
    reward_per_action: bool = False
    single_episode: bool = False
    interventions: bool = False
    action_shape: tuple[int, ...] | None = None
    marks: bool = False


def ppo_shape(cfg: PpoConfig) -> OutcomeShape:
    """Returns the options of a PPO run. Without `env.train.auto_reset`, each rollout is one episode per slot."""
    algorithm = cfg.algorithm
    is_per_action = algorithm.reward_type == "action_level"
    keeps_actions = is_per_action or algorithm.logprob_type != "chunk_level"
    return OutcomeShape(
        chunk=cfg.actor.model.num_action_chunks if keeps_actions else 1,
        reward_per_action=is_per_action,
        single_episode=not cfg.env.train.auto_reset,
        interventions=cfg.env.train.intervene.source is not None,
    )


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
        intervened: Decisions in which a source of interventions chose an action, bool; None if there is no source.
        executed_actions: Actions that were executed, `[n, T, C, dim]`; None in on-policy runs and without a source.
        marks: A person's verdicts on episodes, int8 (`MARK_CODES`); None unless a success classifier is trained.
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
    intervened: np.ndarray | None = None
    executed_actions: np.ndarray | None = None
    marks: np.ndarray | None = None

    def columns(self) -> dict[str, Any]:
        """Returns the columns of the message by name, without fields that are None."""
        columns = {
            _COLUMNS.get(attribute.name, attribute.name): getattr(self, attribute.name) for attribute in fields(self)
        }
        return {name: column for name, column in columns.items() if column is not None}

    def transition_columns(self) -> dict[str, np.ndarray]:
        """Returns the columns of transitions, `[n, T, ...]`."""
        episode_columns = ("last_obs", "final_slot", "final_step", "final_obs", "executed_actions")
        return {name: column for name, column in self.columns().items() if name not in episode_columns}

    @classmethod
    def from_columns(cls, columns: Mapping[str, Any]) -> SlotOutcomes:
        """Builds the outcomes from a message."""
        arguments: dict[str, Any] = {
            attribute.name: columns.get(_COLUMNS.get(attribute.name, attribute.name)) for attribute in fields(cls)
        }
        return cls(**arguments)

    def shifted(self, num_slots: int) -> SlotOutcomes:
        """Returns the outcomes with `num_slots` added to `final_slot`."""
        return replace(self, final_slot=self.final_slot + num_slots)

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
        num_steps: T, number of decisions in a rollout.
        chunk: Number of actions per decision, if actions are distinguished: `executed [n, T, chunk]` marks executed actions.
        has_action_rewards: Store a reward for each action, `[n, T, chunk]`.
        is_single_episode: Play one episode per slot: `valid [n, T]` excludes the decisions after its end.
        interventions: Whether `intervened [n, T]` marks the decisions in which a source of interventions chose an action.
        action_shape: Shape `(C, dim)` of the stored `executed_actions [n, T, C, dim]`; None stores none.
        marks: Whether `marks [n, T]` stores a person's verdicts on episodes.
        report_nonfinite: Function called for non-finite values with the quantity ("reward", "observation" or "last observation
            of an episode"), the step and the slots (bool `[n]`). It may raise an error. Otherwise 0 replaces the values, and
            `nonfinite [n, T]` marks their transitions.
    """

    def __init__(
        self,
        share: range,
        num_steps: int,
        *,
        chunk: int = 1,
        has_action_rewards: bool = False,
        is_single_episode: bool = False,
        interventions: bool = False,
        action_shape: tuple[int, ...] | None = None,
        marks: bool = False,
        report_nonfinite: Callable[[str, int, np.ndarray], None] | None = None,
    ) -> None:
        num_slots = len(share)
        self._on_nonfinite, self._steps = report_nonfinite, num_steps
        self._per_action = has_action_rewards and chunk > 1
        self.rewards = np.zeros(
            (num_slots, num_steps, chunk) if self._per_action else (num_slots, num_steps), np.float32
        )
        self.terminations = np.zeros((num_slots, num_steps), bool)
        self.truncations = np.zeros((num_slots, num_steps), bool)
        self._optional: dict[str, np.ndarray] = {}
        if chunk > 1:
            self._optional["executed"] = np.ones((num_slots, num_steps, chunk), bool)
        if is_single_episode:
            self._optional["valid"] = np.ones((num_slots, num_steps), bool)
        self._optional["env_failed"] = np.zeros((num_slots, num_steps), bool)
        if interventions:
            self._optional["intervened"] = np.zeros((num_slots, num_steps), bool)
        if action_shape is not None:
            self._optional["executed_actions"] = np.zeros((num_slots, num_steps, *action_shape), np.float32)
        if marks:
            self._optional["marks"] = np.zeros((num_slots, num_steps), np.int8)
        if report_nonfinite is not None:
            self._optional["nonfinite"] = np.zeros((num_slots, num_steps), bool)
        self._is_alive = np.ones(num_slots, bool) if is_single_episode else None
        self._final_obs: list[tuple[int, np.ndarray, Any]] = []

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
        if "intervened" in self._optional:
            self._optional["intervened"][:, t] = infos["intervened"].any(1)
        if "executed_actions" in self._optional:
            column = self._optional["executed_actions"]
            column[:, t] = infos["executed_actions"].reshape(column[:, t].shape)
        if "marks" in self._optional:
            self._optional["marks"][:, t] = infos["marks"]
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
        if self._is_alive is not None:
            self._optional["valid"][:, t] = self._is_alive
            for column in (self.rewards, self.terminations, self.truncations, self._optional["env_failed"]):
                column[~self._is_alive, t] = 0
            self._is_alive &= ~(self.terminations[:, t] | self.truncations[:, t])
        if not is_finite(self.rewards[:, t]):
            self._handle_nonfinite("reward", t, bad_rows(self.rewards[:, t]), (t,))
            self.rewards[:, t] = replace_nonfinite(self.rewards[:, t])
        ended_slots = np.flatnonzero(self.terminations[:, t] | self.truncations[:, t])
        if not ended_slots.size:
            return None
        final_obs = take(keep_tensors(infos["final_obs"]), ended_slots)
        if not all_finite(final_obs):
            rows = np.zeros(len(self.rewards), bool)
            rows[ended_slots] = bad_slots(final_obs)
            self._handle_nonfinite("last observation of an episode", t, rows, (t,))
            final_obs = replace_nonfinite(final_obs)
        self._final_obs.append((t, ended_slots, final_obs))
        return ended_slots

    def _handle_nonfinite(self, quantity_name: str, t: int, rows: np.ndarray, index: tuple[int, ...]) -> None:
        if self._on_nonfinite is None:
            return
        self._on_nonfinite(quantity_name, t, rows)
        for step in index:
            if 0 <= step < self._steps:
                self._optional["nonfinite"][rows, step] = True

    def cleaned_obs(self, t: int, obs: Any) -> Any:
        """Returns the observations `obs` of step `t` for the policy, with 0 in place of non-finite values."""
        if all_finite(obs):
            return obs
        rows = bad_slots(obs)
        if self._is_alive is not None:
            rows &= self._is_alive  # steps after an episode's end do not train
        if rows.any():
            self._handle_nonfinite("observation", t, rows, (t - 1, t))
        return replace_nonfinite(obs)

    def part(self, part: slice, last_obs: Any, num_decisions: int | None = None) -> SlotOutcomes:
        """Returns the outcomes of the slots `part`. `final_slot` is relative to the first slot of `part`.

        Args:
            part: Slots of the environment.
            last_obs: Observations of these slots after the rollout.
            num_decisions: Number of decisions, if the rollout ended early.
        """
        slots, steps, rows = [], [], []
        for t, ended_slots, final_obs in self._final_obs:
            is_in_part = (ended_slots >= part.start) & (ended_slots < part.stop)
            if is_in_part.any():
                slots.append(ended_slots[is_in_part] - part.start)
                steps.append(np.full(int(is_in_part.sum()), t))
                rows.append(take(final_obs, is_in_part))
        no_ends = np.zeros(0, np.int64)
        optional_columns = {name: column[part, :num_decisions] for name, column in self._optional.items()}
        return SlotOutcomes(
            rewards=self.rewards[part, :num_decisions],
            terminations=self.terminations[part, :num_decisions],
            truncations=self.truncations[part, :num_decisions],
            executed=optional_columns.get("executed"),
            valid=optional_columns.get("valid"),
            env_failed=optional_columns["env_failed"],
            nonfinite=optional_columns.get("nonfinite"),
            intervened=optional_columns.get("intervened"),
            executed_actions=optional_columns.get("executed_actions"),
            marks=optional_columns.get("marks"),
            last_obs=last_obs,
            final_slot=np.concatenate(slots) if slots else no_ends,
            final_step=np.concatenate(steps) if steps else no_ends,
            final_obs=join(rows) if rows else take(last_obs, slice(0)),
        )


def unknown_outcomes(slot_share: range, num_steps: int, shape: OutcomeShape, last_obs: Any) -> SlotOutcomes:
    """Returns placeholder outcomes for slots of an env rank that left the run. The caller must mark them as `missing`."""
    outcomes = Outcomes(
        slot_share,
        num_steps,
        chunk=shape.chunk,
        has_action_rewards=shape.reward_per_action,
        is_single_episode=shape.single_episode,
        interventions=shape.interventions,
        action_shape=shape.action_shape,
        marks=shape.marks,
        report_nonfinite=lambda *_: None,
    )
    return outcomes.part(slice(0, len(slot_share)), last_obs)


def next_values(
    values: Any,
    last_values: Any,
    final_slot: Any,
    final_step: Any,
    final_values: Any,
    is_executed: Any = None,
) -> Any:
    """Returns the value of the true next observation of each transition, `[n, T]`. All arguments are arrays, or all are
    tensors.

    Args:
        values: Values of the observations that were acted on, `[n, T]`, or `[n, T, chunk]` with a value per action.
        last_values: Values of the observations after the rollout, `[n]`, or `[n, chunk]`, of which the first is used.
        final_slot, final_step, final_values: Slot, decision `[k]` and value of the last observation, `[k]` or `[k, chunk]`, of
            each ended episode.
        is_executed: Mask of the executed actions, `[n, T, chunk]`; required for values per action.
    """
    following_values: Any = np.empty_like(values) if isinstance(values, np.ndarray) else values.new_empty(values.shape)
    if values.ndim == 3:
        assert is_executed is not None
        following_values[:, :, :-1] = values[:, :, 1:]
        following_values[:, :-1, -1], following_values[:, -1, -1] = values[:, 1:, 0], last_values[:, 0]
        following_values[final_slot, final_step, (is_executed[final_slot, final_step].sum(-1) - 1)] = final_values[:, 0]
        return following_values
    following_values[:, :-1] = values[:, 1:]
    following_values[:, -1] = last_values
    following_values[final_slot, final_step] = final_values
    return following_values


class EpisodeLog:
    """Log of the episodes that ended during a rollout. Episodes with a non-finite return are only counted.

    Attributes:
        num_nonfinite: Number of episodes with a non-finite return.
        num_skipped: Number of actions of chunks that were not executed because the episode had ended.
        num_actions: Number of executed actions, if there is a source of interventions.
        num_intervention_actions: Number of those actions that the source chose.
    """

    def __init__(self) -> None:
        self._rows: list[np.ndarray] = []
        self.num_nonfinite = self.num_skipped = 0
        self.num_actions = self.num_intervention_actions = 0

    def count_actions(self, infos: dict[str, Any], slots: slice = slice(None)) -> None:
        """Counts the actions of a step's chunks that were not executed in `slots`, and those of a source of interventions."""
        num_skipped = 0
        if "chunk" in infos:
            num_skipped = int((~np.asarray(infos["chunk"]["mask"], bool)[slots]).sum())
            self.num_skipped += num_skipped
        if "intervened" in infos:
            is_intervened = infos["intervened"][slots]
            self.num_actions += is_intervened.size - num_skipped
            self.num_intervention_actions += int(is_intervened.sum())

    def add(self, t: int, slot_offset: int, infos: dict[str, Any], ended_slots: np.ndarray) -> None:
        """Records the episodes that ended at step `t` in `ended_slots`, which are relative to `slot_offset`."""
        episode = infos.get("episode")
        if episode is None:
            return
        finished_slots = ended_slots[np.asarray(episode["mask"])[ended_slots]] if "mask" in episode else ended_slots
        finished_slots = finished_slots[~env_failed(infos, len(episode["return"]))[finished_slots]]
        success = episode.get("success_once", episode.get("success"))
        rows = np.empty((finished_slots.size, 6))
        rows[:, 0], rows[:, 1] = t, finished_slots + slot_offset
        rows[:, 2], rows[:, 3] = (
            np.asarray(episode["return"])[finished_slots],
            np.asarray(episode["length"])[finished_slots],
        )
        rows[:, 4] = np.nan if success is None else np.asarray(success)[finished_slots]
        rows[:, 5] = np.asarray(episode["helped"])[finished_slots] if "helped" in episode else 0
        self.add_rows(rows)

    def add_rows(self, rows: np.ndarray) -> None:
        """Records ended episodes, `[k, 6]` in the order of the columns of `arrays`."""
        if not is_finite(rows[:, 2]):
            has_finite_return = np.isfinite(rows[:, 2])
            self.num_nonfinite += int((~has_finite_return).sum())
            rows = rows[has_finite_return]
        self._rows.append(rows)

    def arrays(self) -> dict[str, np.ndarray]:
        """Returns `step`, `slot`, `return`, `length`, `success` (nan if the environment does not report it) and `helped` (1 if
        a source of interventions chose an action, else 0), each `[k]`.
        """
        rows = np.concatenate(self._rows) if self._rows else np.zeros((0, 6))
        column_names = ("step", "slot", "return", "length", "success", "helped")
        return {name: rows[:, i] for i, name in enumerate(column_names)}

    def report(
        self,
        *,
        num_restarts: int = 0,
        by_device: int = 0,
        by_host: int = 0,
        busy_s: float = 0.0,
        timing: Iterable[Timing | None] = (),
    ) -> dict[str, np.ndarray]:
        """Returns the rank's report of a rollout: `arrays`, `COUNTS` (each `[1]`), and `concat_timings`.

        Args:
            num_restarts: Number of simulator processes restarted since the rank started, after they died or hung.
            by_device: Number of observation messages that stayed on the accelerator.
            by_host: Number of observation messages that were produced on the accelerator but copied to the host.
            busy_s: Seconds in which the rank did not wait for actions.
            timing: Timing statistics of the robots.
        """
        report_counts = (
            num_restarts,
            self.num_nonfinite,
            self.num_skipped,
            by_device,
            by_host,
            busy_s,
            self.num_actions,
            self.num_intervention_actions,
        )
        return {
            **self.arrays(),
            **{name: np.array([n]) for name, n in zip(COUNTS, report_counts, strict=True)},
            **concat_timings(timing),
        }


#: Counts in an env rank's report, in addition to episodes and `TIMING_NAMES`; see `EpisodeLog.report`.
COUNTS = ("restarts", "spoiled", "skipped", "by_device", "by_host", "busy_s", "actions", "led_actions")


def merge_reports(report_parts: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Merges the ranks' reports. Orders episodes by step and slot, so that the result does not depend on the placement."""
    report_parts = report_parts or [EpisodeLog().report()]
    columns = {name: np.concatenate([log_columns[name] for log_columns in report_parts]) for name in report_parts[0]}
    episode_order = np.lexsort((columns["slot"], columns["step"]))
    return {
        name: column if name in (*COUNTS, *TIMING_NAMES) else column[episode_order] for name, column in columns.items()
    }


def _compute_device_metrics(episodes: dict[str, np.ndarray]) -> dict[str, float]:
    """Returns the timing metrics of robots and, if simulators produce observations on an accelerator, the fraction of
    observation messages that stayed on the accelerator.
    """
    num_device_messages, num_host_messages = int(episodes["by_device"].sum()), int(episodes["by_host"].sum())
    return (
        {"env/on_device": num_device_messages / (num_device_messages + num_host_messages)}
        if num_device_messages + num_host_messages
        else {}
    ) | timing_row(episodes)


def autonomous_episodes(episodes: dict[str, np.ndarray]) -> list[tuple[float, float, float]]:
    """Returns return, length and success of each episode in which the policy chose all actions."""
    is_autonomous = episodes["helped"] == 0
    columns = [episodes[name][is_autonomous].tolist() for name in ("return", "length", "success")]
    return list(zip(*columns, strict=True))


def episode_metrics(episodes: dict[str, np.ndarray]) -> dict[str, float]:
    """Returns metrics of one step alone: its ended episodes, the share of a source of interventions, the timing of robots, and
    the share of observations that stayed on an accelerator. Return and success are of episodes without interventions.
    """
    num_episodes, rows = len(episodes["return"]), np.array(autonomous_episodes(episodes))
    metrics: dict[str, float] = {"rollout/episodes": num_episodes}
    if len(rows):
        metrics["rollout/episode_return"] = float(rows[:, 0].mean())
        if not np.isnan(rows[:, 2]).any():
            metrics["rollout/success_once"] = float(rows[:, 2].mean())
    if num_actions := int(episodes["actions"].sum()):
        metrics["rollout/intervention_rate"] = float(episodes["led_actions"].sum() / num_actions)
        metrics["rollout/helped_episodes"] = float((episodes["helped"] > 0).sum())
    return metrics | _compute_device_metrics(episodes)


def joined_metrics(decisions: Counter[int], chunk: int) -> dict[str, float]:
    """Returns the number of a step's transitions from joined ranks, in total and for each rank.

    Args:
        decisions: Number of decisions by rank.
        chunk: Number of transitions per decision.
    """
    if not decisions:
        return {}
    by_rank = {
        f"env/joined_transitions_{rank}": num_decisions * chunk for rank, num_decisions in sorted(decisions.items())
    }
    return {"env/joined_transitions": decisions.total() * chunk, **by_rank}
