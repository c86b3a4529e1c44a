"""Rollout sources of a run: the original env and rollout ranks, and joined env ranks. The module assigns steps to the
sources and tracks the steps.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import secrets
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from rlhpc.embodied.evaluation.episodes import EvaluationRows
from rlhpc.embodied.rollout.slot_map import PlayedRollout, SlotMap, Source
from rlhpc.embodied.rollout.step_outcomes import merge_reports
from rlhpc.embodied.rollout.work_sharing import PLAYED, DeliveredShard, FullRollout, ShardTracker, keys_of, shares
from rlhpc.runs.replicas import CompletedCall, Originals, Replicas
from rlhpc.runs.run_folder import note
from rlhpc.runtime.channel import Channel, QueueEmpty
from rlhpc.runtime.comm.context import current
from rlhpc.runtime.errors import ChannelError, DeadlineExceeded
from rlhpc.runtime.worker_group import WorkerGroup
from rlhpc.weights.receiver import transfer_metrics

#: Seconds between checks for lost ranks while waiting for shards.
_HELPER_POLL_S = 0.1


def wait_all(handles: list[Any], timeout_s: float) -> None:
    """Waits for calls in order. Drops each handle before it waits for the next one, because handles may hold memory."""
    while handles:
        handles.pop(0).wait(timeout_s)


class JoinedEnvRanks:
    """Joined env ranks and the shards that they play.

    Args:
        env, actor: Launched groups.
        slots: Slot map of the run.
        num_decisions: `algorithm.rollout_steps`.
        max_ahead: `algorithm.max_staleness`.
        has_random_actions: Returns whether all actions of a step are random.
        timeout: Maximum duration of a step, in seconds.

    Attributes:
        ranks: Joined ranks that currently take part.
    """

    def __init__(
        self,
        env: WorkerGroup,
        actor: WorkerGroup,
        slots: SlotMap,
        num_decisions: int,
        max_ahead: int,
        has_random_actions: Callable[[int], bool],
        timeout: float,
    ) -> None:
        self._env, self._actor, self._slots, self._timeout = env, actor, slots, timeout
        self._max_ahead, self._has_random_actions = max_ahead, has_random_actions
        self.tracker = ShardTracker(slots.num_env_ranks, num_decisions)
        self.ranks: list[int] = []
        #: Number of shards per step, and maximum number of steps of which a rank has shards at a time.
        self._shards_per_step, self._steps_per_rank = slots.num_env_ranks, 1
        #: Version of the weights last sent to each rank.
        self._sent_versions: dict[int, int] = {}
        self._left_ranks: list[int] = []

    def open(self) -> None:
        """Resets the state: no joined ranks, and no shards in progress."""
        self._reports = Channel.create(PLAYED)
        self.tracker.clear()
        self._left_ranks += self._sent_versions
        self.ranks, self._sent_versions = [], {}

    def add_rank(self, rank: int) -> None:
        """Connects a joined rank that has built its simulators, so that the rank takes part in later steps."""
        self._env.execute_on(rank).connect_joined_rank().wait(self._timeout)
        self.ranks.append(rank)

    def poll(self) -> None:
        """Receives reports, and makes undelivered shards of lost ranks assignable again."""
        present_ranks = set(self._env.present)
        with contextlib.suppress(QueueEmpty):
            while True:  # reports of a lost rank count, because the rank sent them before it was lost
                self.tracker.accept(self._reports.get_nowait())
        for rank in [rank for rank in self.ranks if rank not in present_ranks]:
            self.ranks.remove(rank)
            self.tracker.lose(rank)
            if self._sent_versions.pop(rank, None) is not None:
                self._left_ranks.append(rank)

    def can_play_step(self) -> bool:
        """Returns whether enough joined ranks are idle to play a whole step.

        While the joined ranks play the step, the original ranks play as many further steps as `max_staleness` allows,
        and then wait. Too few joined ranks would play the step's units one after the other and delay the run.
        """
        num_units = self._slots.num_env_ranks
        num_idle = sum(self.tracker.num_assigned(rank) == 0 for rank in self.ranks)
        has_capacity = len(self.ranks) * (self._max_ahead + 1) >= num_units
        return (
            bool(self.ranks)
            and has_capacity
            and not self.tracker.has_unassigned
            and num_idle >= min(num_units, len(self.ranks))
        )

    def add_step(self, step: int, decisions: int | None = None, num_pieces: int = 1) -> None:
        """Adds a step, or its last `decisions`, to the work of the joined ranks (`ShardTracker.add_step`). A rank may
        have shards of up to `max_staleness` + 1 shared steps at a time, but of only one whole step.
        """
        self.tracker.add_step(step, decisions, num_pieces)
        self._shards_per_step = self._slots.num_env_ranks * num_pieces
        self._steps_per_rank = 1 if decisions is None else self._max_ahead + 1

    def assign(self, version: int) -> None:
        """Assigns shards to the joined ranks with the fewest shards. The ranks play the shards with the actor's weights
        of `version`.
        """
        max_shards = -(-self._shards_per_step // max(1, len(self.ranks))) * self._steps_per_rank
        assignments = []
        while self.ranks:
            num_shards, rank = min((self.tracker.num_assigned(rank), rank) for rank in self.ranks)
            shard = None if num_shards >= max_shards else self.tracker.assign(rank, version)
            if shard is None:
                break
            assignments.append((rank, shard))
        outdated_ranks = sorted({rank for rank, _ in assignments if self._sent_versions.get(rank, -1) < version})
        if outdated_ranks or self._left_ranks:
            self._actor.send_weights_to(version, self._env.name, outdated_ranks, self._left_ranks)
            self._sent_versions |= dict.fromkeys(outdated_ranks, version)
            self._left_ranks = []
        for rank, shard in assignments:
            self._env.execute_on(rank).play(shard, self._has_random_actions(shard.step))

    def wait_for_step(self, step: int, version: int) -> list[list[DeliveredShard]] | None:
        """Waits until the joined ranks have played a step.

        Returns:
            The step's shards by unit; None if all joined ranks have left or were lost, so that the original ranks must
            play the
                step.

        Raises:
            DeadlineExceeded: The step took too long; the message names the ranks.
        """
        deadline = time.monotonic() + self._timeout
        while True:
            self.poll()
            if self.tracker.is_complete(step):
                return self.tracker.close(step)
            if not self.ranks:
                self.tracker.give_up(step)
                return None
            self.assign(version)
            if time.monotonic() > deadline:
                raise DeadlineExceeded(
                    f"step {step} was not played within runner.step_timeout_s ({self._timeout:g} s) by "
                    f"{', '.join(f'{self._env.name}[{rank}]' for rank in self.ranks)}"
                )
            with contextlib.suppress(DeadlineExceeded):
                self.tracker.accept(self._reports.get(timeout=_HELPER_POLL_S))

    def count_transitions(self, shards_by_unit: Sequence[Sequence[DeliveredShard]]) -> Counter[int]:
        """Returns the number of decisions in a step's shards by rank, summed over slots."""
        transitions: Counter[int] = Counter()
        for unit_index, unit_shards in enumerate(shards_by_unit):
            for shard in unit_shards:
                transitions[shard.rank] += shard.num_decisions * len(self._slots.unit_share(unit_index))
        return transitions


#: Seconds between checks for a new rollout rank while no rollout rank is left.
_POLL_S = 0.1
#: Maximum ratio of the largest share of a step to an even share; a step with a higher ratio is not shared.
_MAX_IMBALANCE = 1.25


@dataclasses.dataclass
class _PendingRollout:
    """Full rollout in progress.

    Attributes:
        full_rollout: Decisions of the full rollout.
        slots: Slot map of the full rollout.
        rollout_call, env_call: Handles of the calls of rollout and env ranks.
        lost_ranks: Rollout ranks lost since the full rollout began.
    """

    full_rollout: FullRollout
    slots: SlotMap
    rollout_call: Any
    env_call: Any
    lost_ranks: set[int] = dataclasses.field(default_factory=set)


class RolloutSources:
    """Scheduler of a run's steps over its rollout sources, in order and up to `max_staleness` steps ahead.

    With `max_staleness` > 0, ranks may join and leave. If an original env rank or a rollout rank is lost, the steps in
    progress lose the rank's slots. The other ranks continue, and the lost rank takes part again after its restart. From
    the next step on, the remaining rollout ranks act on the slots of a lost rollout rank, and a rollout rank that joins
    gets a share of all slots. A rollout rank that is told to leave still acts in the steps assigned to it, and exits
    once its slots are reassigned. Joined env ranks play the last decisions of each step, or whole steps if steps cannot
    be divided (`JoinedEnvRanks`).

    Args:
        env, rollout, actor: Launched groups.
        slots: Slot map.
        num_decisions: `algorithm.rollout_steps`.
        max_ahead: Maximum number of steps that may be played ahead of the actors.
        is_divisible: True if several ranks may play the decisions of a slot in a step, one after the other.
        num_parts: Number of parts into which a step's decisions are split; each part is a full rollout.
        generate: Makes the rollout ranks act in a full rollout; returns a handle.
        has_random_actions: Returns whether all actions of a step are random.
        restarts: Returns how often ranks of a group may be restarted.
        timeout: Maximum duration of a step, in seconds.

    Attributes:
        slots: Current slot map, which changes when ranks join or leave.
        env, rollout: Original ranks: the ranks with which the run started.
    """

    def __init__(
        self,
        env: WorkerGroup,
        rollout: WorkerGroup,
        actor: WorkerGroup,
        slots: SlotMap,
        *,
        num_decisions: int,
        max_ahead: int,
        is_divisible: bool,
        num_parts: int,
        generate: Callable[[WorkerGroup, FullRollout], Any],
        has_random_actions: Callable[[int], bool],
        restarts: Callable[[], int],
        timeout: float,
    ) -> None:
        self._env_group, self.env, self._rollout_group, self.rollout = env, Originals(env), rollout, Originals(rollout)
        self._actor, self._generate = actor, generate
        self.slots, self._max_ahead, self._timeout = slots, max_ahead, timeout
        self._decisions, self._divisible, self._full_rollout_size = (
            num_decisions,
            is_divisible,
            num_decisions // num_parts,
        )
        self._num_rollouts = 0
        self._original_ranks = range(env.world_size)
        self._present_env_ranks, self._acting_ranks = list(self._original_ranks), list(range(rollout.world_size))
        self._joined_envs = JoinedEnvRanks(env, actor, slots, num_decisions, max_ahead, has_random_actions, timeout)
        loss_text = "what it had not delivered is played by others or left out, and no step is made anew"
        self._env_ranks = Replicas(env, self._open_env, self._join_env, restarts, loss_text)
        loss_text = "others act on its slots from the next step on, and no step is made anew"
        self._rollout_ranks = Replicas(rollout, self._open_rollout, self._join_rollout, restarts, loss_text)
        self._spaces: tuple[Any, Any] = (None, None)
        self._completed_step, self._needs_reconnect = 0, False
        self._num_lost = 0
        self._transfer_reports: list[dict[str, float]] = []
        self.forget(0)

    # -- start ----------------------------------------------------------------------------------------------------

    def build(self) -> tuple[Any, Any]:
        """Builds the environments; returns the observation space and action space of a slot."""
        env_facts = self.env.init_worker(self.slots).wait(self._timeout)[0]
        self._spaces = env_facts["observation_space"], env_facts["action_space"]
        return self._spaces

    def connect(self) -> None:
        """Connects all original ranks."""
        self._present_env_ranks, self._acting_ranks = (
            list(self._original_ranks),
            list(range(self._rollout_group.world_size)),
        )
        for name, homes in self.slots.channels().items():
            Channel.create(name, home=homes.group, ranks=homes.ranks)
        self._joined_envs.open()
        slots = self.slots
        wait_all([self.env.connect(slots), self._actor.connect(), self.rollout.connect(slots)], self._timeout)

    def rebuild(self, lost_ranks: dict[str, list[int]]) -> None:
        """Recovers from a failure: restarts env and rollout ranks that have ended, and reconnects all ranks."""
        self.slots = dataclasses.replace(self.slots, token=secrets.token_hex(4), absent=frozenset(), acting=())
        rebuilt_groups: list[tuple[WorkerGroup, list[int], tuple[Any, ...]]] = []
        for group, present_ranks, spaces in (
            (self._rollout_group, self._acting_ranks, self._spaces),
            (self._env_group, self._present_env_ranks, ()),
        ):
            intact_ranks = {*present_ranks} - {*lost_ranks.get(group.name, ())}
            if ranks := [rank for rank in range(group.world_size) if rank not in intact_ranks]:
                rebuilt_groups.append((group, ranks, spaces))
        for group, _, _ in rebuilt_groups:
            group.relaunch()
        for group, _, _ in rebuilt_groups:
            group.wait_ready()
        wait_all(
            [group.execute_on(*ranks).init_worker(self.slots, *spaces) for group, ranks, spaces in rebuilt_groups],
            self._timeout,
        )
        self.connect()

    def begin(self, step: int) -> None:
        """Prepares the step after `step`: drops full rollouts in progress and resets the state of joined ranks."""
        self.forget(step)
        if not self._max_ahead:
            return
        self._env_ranks.begin()
        self._rollout_ranks.begin()
        for rank in [rank for rank in self._env_ranks.ranks if rank not in self._original_ranks]:
            self._open_env(rank).wait(self._timeout)
            self._joined_envs.add_rank(rank)
        for rank in [rank for rank in self._rollout_ranks.ranks if rank not in self._acting_ranks]:
            self._open_rollout(rank).wait(self._timeout)
            self._join_rollout(rank)
        self._keep_connected()

    def forget(self, step: int) -> None:
        """Drops all full rollouts in progress; the next step follows `step`."""
        self._completed_step, self._next_step = step, step + 1
        #: Full rollouts in progress, in order.
        self._pending_rollouts: list[_PendingRollout] = []

    # -- ranks that join and leave --------------------------------------------------------------------------------

    def update_ranks(self, step: int) -> None:
        """Removes lost and leaving ranks and adds joined ranks, before the step that follows `step`."""
        self._completed_step = step
        self._joined_envs.poll()
        self._remove_lost()
        self._release_leaving()
        self._env_ranks.update_presence()
        self._rollout_ranks.update_presence()
        self._keep_connected()

    def _remove_lost(self) -> bool:
        """Removes lost ranks; returns whether any rank was lost since the last call."""
        lost_envs, lost_rollouts = (
            {*self._present_env_ranks} - {*self._env_group.present},
            {*self._acting_ranks} - {*self._rollout_group.present},
        )
        self._present_env_ranks = [rank for rank in self._present_env_ranks if rank not in lost_envs]
        self._acting_ranks = [rank for rank in self._acting_ranks if rank not in lost_rollouts]
        self._needs_reconnect = self._needs_reconnect or bool(lost_rollouts)
        for pending_rollout in self._pending_rollouts:
            pending_rollout.lost_ranks |= lost_rollouts
        self._num_lost += len(lost_envs) + len(lost_rollouts)
        return bool(lost_envs or lost_rollouts)

    def pop_transfer_metrics(self) -> dict[str, float]:
        """Returns the metrics of the weights that rollout ranks have received for the steps since the last call."""
        reports, self._transfer_reports = self._transfer_reports, []
        return transfer_metrics(reports)

    def pop_num_lost(self) -> int:
        """Returns the number of ranks lost since the last call, and resets the count."""
        num_lost, self._num_lost = self._num_lost, 0
        return num_lost

    def _release_leaving(self) -> None:
        """Removes leaving rollout ranks from the acting ranks, if other ranks can act."""
        leaving_ranks = self._rollout_group.leaving
        if remaining_ranks := [rank for rank in self._acting_ranks if rank not in leaving_ranks]:
            self._needs_reconnect = self._needs_reconnect or len(remaining_ranks) < len(self._acting_ranks)
            self._acting_ranks = remaining_ranks

    def _open_env(self, rank: int) -> Any:
        """Makes a restarted or joined env rank build its simulators; returns a handle."""
        if rank in self._original_ranks:
            return self._env_group.execute_on(rank).init_worker(self.slots)
        return self._env_group.execute_on(rank).open_joined_rank(self.slots, self._spaces, self._completed_step)

    def _join_env(self, rank: int) -> None:
        """Adds an env rank to the participants from the next step on."""
        if rank not in self._original_ranks:
            self._joined_envs.add_rank(rank)
            return
        self._present_env_ranks = sorted([*self._present_env_ranks, rank])
        self._needs_reconnect = True

    def _open_rollout(self, rank: int) -> Any:
        """Makes a rollout rank build the policy; returns a handle."""
        return self._rollout_group.execute_on(rank).init_worker(self.slots, *self._spaces)

    def _join_rollout(self, rank: int) -> None:
        """Adds a rollout rank to the acting ranks from the next step on."""
        self._acting_ranks = sorted([*self._acting_ranks, rank])
        self._needs_reconnect = True

    def _keep_connected(self) -> None:
        """Reassigns the slots and reconnects env and rollout ranks if the ranks have changed. First waits for the turns
        in progress, because no message may be in transit while the ranks reconnect.
        """
        if not self._needs_reconnect:
            return
        for pending_rollout in self._pending_rollouts:
            pending_rollout.rollout_call.wait(self._timeout)
            pending_rollout.env_call.wait(self._timeout)
        while self._needs_reconnect:
            self._remove_lost()
            self._await_rollouts()
            try:
                self._connect_ranks()
                self._needs_reconnect = False
            except ChannelError:
                if not self._remove_lost():
                    raise
        for rank in {*self._rollout_group.leaving} - {*self._acting_ranks}:
            self._rollout_group.execute_on(rank).allow_exit()

    def _await_rollouts(self) -> None:
        """Waits until at least one rollout rank can act.

        Raises:
            DeadlineExceeded: No rollout rank became available in time.
        """
        deadline = time.monotonic() + self._timeout
        while not self._acting_ranks:
            current().check()
            self._rollout_ranks.update_presence()
            if time.monotonic() > deadline:
                raise DeadlineExceeded(
                    f"no rank of {self._rollout_group.name} could act within runner.step_timeout_s ({self._timeout:g} s)"
                )
            time.sleep(_POLL_S)

    def _connect_ranks(self) -> None:
        self.slots = slots = dataclasses.replace(
            self.slots,
            token=secrets.token_hex(4),
            absent=frozenset(self._original_ranks) - {*self._present_env_ranks},
            acting=tuple(self._acting_ranks[: self.slots.max_ranks]),
        )
        for name, homes in slots.playing_channels().items():
            Channel.create(name, home=homes.group, ranks=homes.ranks)
        wait_all([self._call_envs("connect", slots), self._select_acting_group().connect(slots)], self._timeout)

    def _call_envs(self, method: str, *args: Any) -> Any:
        """Calls a method of the original env ranks that are present; returns a handle."""
        return (
            getattr(self._env_group.execute_on(*self._present_env_ranks), method)(*args)
            if self._present_env_ranks
            else CompletedCall()
        )

    def _select_acting_group(self) -> WorkerGroup:
        """Returns a group of the acting rollout ranks, for one call."""
        return self._rollout_group.execute_on(*self.slots.acting_ranks)

    # -- steps ----------------------------------------------------------------------------------------------------

    def sync(self, version: int) -> list[Any]:
        """Sends the actor's weights, as `version`, to the acting rollout ranks; returns the handles of both sides."""
        ranks = self.slots.acting_ranks
        return [self._actor.sync_weights(version, ranks), self._select_acting_group().sync_weights()]

    def evaluate(self) -> Callable[[], list[EvaluationRows]]:
        """Makes the acting rollout ranks evaluate in `env.eval`, a part of its slots each; returns a function that waits for
        the results of the parts (`evaluation_rows`).
        """
        ranks = self.slots.acting_ranks
        calls = [self._evaluate_part(rank, part_index, len(ranks)) for part_index, rank in enumerate(ranks)]
        return lambda: [self._wait_for_rows(call, part_index, ranks) for part_index, call in enumerate(calls)]

    def _evaluate_part(self, rank: int, part_index: int, num_parts: int) -> Any:
        return self._rollout_group.execute_on(rank).evaluate(part_index, num_parts)

    def _wait_for_rows(self, call: Any, part_index: int, ranks: Sequence[int]) -> EvaluationRows:
        """Waits for the rows of a part of an evaluation. Another rank plays the part if its rank was lost."""
        retries = (self._evaluate_part(rank, part_index, len(ranks)) for rank in ranks if rank != ranks[part_index])
        for attempt in itertools.chain([call], retries):
            if rows_by_rank := attempt.wait(self._timeout):
                rows: EvaluationRows = rows_by_rank[0]
                return rows
        raise ChannelError(f"all ranks of {self._rollout_group.name} ended during an evaluation")

    @property
    def in_progress(self) -> bool:
        """True while steps are being played."""
        return bool(self._pending_rollouts or self._joined_envs.tracker.steps)

    def start_until(self, last_step: int) -> None:
        """Starts all steps up to `last_step` that have not been started, with the weights that have just been sent."""
        while self._next_step <= last_step:
            self._start_step(self._next_step)
            self._next_step += 1
        self._joined_envs.assign(self._completed_step)

    def play(self, step: int) -> None:
        """Starts a step on the original ranks, with the weights that have just been sent."""
        self._play_decisions(step, 0, self._decisions)
        self._next_step = step + 1

    def _start_step(self, step: int) -> None:
        """Starts a step on all ranks. If the step cannot be shared, starts it on the original or the joined ranks
        alone.
        """
        original_decisions, num_pieces, duration = self._decisions, 1, math.inf
        if self._joined_envs.ranks and self._present_env_ranks and self._divisible:
            original_decisions, num_pieces, duration = shares(
                self._decisions, self.slots.num_env_ranks, len(self._joined_envs.ranks)
            )
        if original_decisions < self._decisions and duration <= _MAX_IMBALANCE:
            self._play_decisions(step, 0, original_decisions)
            self._joined_envs.add_step(step, self._decisions - original_decisions, num_pieces)
        elif (self._joined_envs.can_play_step() and self._pending_rollouts) or (
            self._joined_envs.ranks and not self._present_env_ranks
        ):
            self._joined_envs.add_step(step)
        else:
            self._play_decisions(step, 0, self._decisions)

    def _play_decisions(self, step: int, begin: int, num_decisions: int) -> None:
        end_decision = begin + num_decisions
        while begin < end_decision:
            self._num_rollouts += 1
            next_cut = (begin // self._full_rollout_size + 1) * self._full_rollout_size
            full_rollout = FullRollout(self._num_rollouts, step, begin, min(end_decision, next_cut) - begin)
            acting_handle = self._generate(self._select_acting_group(), full_rollout)
            self._pending_rollouts.append(
                _PendingRollout(full_rollout, self.slots, acting_handle, self._call_envs("interact", full_rollout))
            )
            begin += full_rollout.num_decisions

    def plays(self, step: int) -> bool:
        """Returns whether the initial ranks play a part of a step; ranks that joined later may play the rest."""
        return bool(self._list_rollouts(step))

    def _list_rollouts(self, step: int) -> list[_PendingRollout]:
        return [pending for pending in self._pending_rollouts if pending.full_rollout.step == step]

    def wait_for_shards(self, step: int) -> list[list[DeliveredShard]] | None:
        """Waits for the joined ranks' shards of a step; returns None if the original ranks play the whole step."""
        if step not in self._joined_envs.tracker.steps:
            return None
        shards = self._joined_envs.wait_for_step(step, self._completed_step)
        if shards is None:
            note(f"all ranks that joined have gone: step {step} is played by those that the run started with")
            begin_decision = sum(pending.full_rollout.num_decisions for pending in self._list_rollouts(step))
            self._play_decisions(step, begin_decision, self._decisions - begin_decision)
        return shards

    def receive(self, step: int, shards: list[list[DeliveredShard]] | None = None) -> Any:
        """Makes the actors receive a step, with the joined ranks' shards (`wait_for_shards`); returns a handle."""
        present_ranks, step_rollouts = {*self._rollout_group.present}, self._list_rollouts(step)
        played_rollouts = [
            PlayedRollout(
                pending.full_rollout,
                pending.slots,
                frozenset(pending.lost_ranks | ({*pending.slots.acting_ranks} - present_ranks)),
            )
            for pending in step_rollouts
        ]
        later_rollouts = {
            pending.full_rollout.number for pending in self._pending_rollouts if pending not in step_rollouts
        }
        unit_keys = None if shards is None else keys_of(shards)
        useless_shards = () if shards is None else tuple(self._joined_envs.tracker.pop_useless_keys())
        return self._actor.receive(
            step, Source(self.slots, tuple(played_rollouts), frozenset(later_rollouts), unit_keys, useless_shards)
        )

    def outcome(
        self, step: int, shards: list[list[DeliveredShard]] | None = None
    ) -> tuple[dict[str, np.ndarray], float, float]:
        """Waits for a step; returns its episodes, the seconds that rollout ranks acted, and the seconds that env ranks
        simulated.

        Args:
            step: Number of the step.
            shards: Result of `wait_for_shards` for the step; None in runs that ranks cannot join.
        """
        episodes = [report.episodes for unit_reports in shards or () for report in unit_reports]
        joined_s, act_s, simulate_s = max((float(report["busy_s"].max()) for report in episodes), default=0.0), 0.0, 0.0
        step_rollouts = self._list_rollouts(step)
        for pending in step_rollouts:
            reports = pending.env_call.wait(self._timeout)
            simulate_s += max((float(report["busy_s"].max()) for report in reports), default=0.0)
            acting_reports = pending.rollout_call.wait(self._timeout)
            act_s += max((acting_report["busy_s"] for acting_report in acting_reports), default=0.0)
            self._transfer_reports += acting_reports
            # A report counts restarts since the rank's start, so only the last full rollout's reports are counted.
            episodes += (
                reports if pending is step_rollouts[-1] else [{**report, "restarts": np.zeros(1)} for report in reports]
            )
            self._pending_rollouts.remove(pending)
        return merge_reports(episodes), act_s, max(joined_s, simulate_s)

    def joined_decisions(self, shards: list[list[DeliveredShard]] | None) -> Counter[int]:
        """Returns the number of decisions of a step by joined rank, summed over slots."""
        return self._joined_envs.count_transitions(shards or ())
