"""Failure policy of a session and heartbeat monitor of its ranks.

The policy records the first failure, and decides which ranks must end and which may stay alive or be restarted.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Protocol, TypeVar

from rlhpc.runtime.errors import RlhpcError, StepFailed, WorkerFailed
from rlhpc.runtime.launchers import RankProcess
from rlhpc.runtime.policies import NEXT_PHASES, SessionPhase, SessionPolicies
from rlhpc.runtime.worker_spec import WorkerSpec

T = TypeVar("T")
K = TypeVar("K")


class Rank(Protocol):
    """Specification and state of a rank; the state is starting, ready, stopping or ended."""

    @property
    def spec(self) -> WorkerSpec: ...
    @property
    def state(self) -> str: ...


_STRICT = SessionPolicies()


class FailurePolicy:
    """Failure policy of a session: the session's failures, and their consequences for its ranks.

    Attributes:
        phase: Phase of the session.
        first_failure: First failure, which has caused the later ones; None if nothing has failed.
        past_failure: Failure that happened before the current groups were launched.
    """

    def __init__(self) -> None:
        self.phase = SessionPhase.STARTING
        self.first_failure: RlhpcError | None = None
        self.past_failure: RlhpcError | None = None
        self._policies = _STRICT

    @property
    def policies(self) -> SessionPolicies:
        """The policies that apply in the current phase. In STARTING and CLOSING the end of any rank ends the run."""
        return self._policies if self.phase in (SessionPhase.RUNNING, SessionPhase.RECOVERING) else _STRICT

    def enter(self, phase: SessionPhase, policies: SessionPolicies | None = None) -> None:
        """Enters a phase; `policies` replaces the policies of the training phases.

        Raises:
            RlhpcError: The phase cannot follow the current one.
        """
        if phase not in NEXT_PHASES[self.phase]:
            raise RlhpcError(f"a session that is {self.phase} cannot be {phase} next")
        self.phase = phase
        if policies is not None:
            self._policies = policies

    def take(self, failure: RlhpcError) -> bool:
        """Records a failure if it is the first one, because later failures are its consequences; returns whether it is."""
        if self.first_failure is not None:
            return False
        self.first_failure = failure
        return True

    def is_departure(self, failure: RlhpcError, ranks: Collection[Rank]) -> bool:
        """Returns whether a failure is the end of a rank and the other ranks can continue without this rank.

        The other ranks do not continue after an exception in a rank, unless the rank has joined. The machine of a joined rank
        may be at fault; if the program is at fault, the other ranks will raise the exception, too.
        """
        group, rank = failure.group, failure.rank
        elastic = self.policies.elastic
        if group not in elastic or rank is None or not isinstance(failure, (WorkerFailed, StepFailed)):
            return False
        is_joined = any(
            (r.spec.group, r.spec.rank) == (group, rank) and r.spec.rank >= r.spec.world_size for r in ranks
        )
        if isinstance(failure, WorkerFailed) and failure.remote_traceback and not is_joined:
            return False
        replica = self.replica_of(group, rank)
        remaining_ranks = [
            r for r in ranks if r.spec.group == group and r.state == "ready" and r.spec.rank not in replica
        ]
        return self.first_failure is None and len(remaining_ranks) >= elastic[group]

    def replica_of(self, group: str, rank: int) -> range:
        """Returns the ranks of a rank's replica, including itself."""
        replica_size = self.policies.for_group(group).replica_size
        return range(rank - rank % replica_size, rank - rank % replica_size + replica_size)

    def forgive(self) -> None:
        """Forgets the first failure, because the session recovers from it."""
        self.first_failure = None

    def archive_failure(self) -> None:
        """Moves the first failure to `past_failure`, because new groups are launched after it."""
        if self.first_failure is not None:
            self.past_failure, self.first_failure = self.first_failure, None

    def names_to_keep(self, failure: RlhpcError, ranks: Collection[Rank]) -> set[str]:
        """Returns the names of the ranks that may stay alive after a failure.

        If a restartable group has failed, these are the ranks of all groups that are not restartable. If a rank of a group
        with independent ranks has failed and ended, these are all other ranks.
        """
        group, rank, restartable = failure.group, failure.rank, self.policies.restartable
        if group not in restartable or not failure.restartable:
            return set()
        is_independent = self.policies.for_group(group).independent_ranks and any(
            r.spec.rank == rank and r.state == "ended" for r in ranks if r.spec.group == group
        )
        return {
            r.spec.name for r in ranks if (is_independent and r.state != "ended") or r.spec.group not in restartable
        }

    def names_to_end(self, failure: RlhpcError, ranks: Collection[Rank]) -> set[str]:
        """Returns the names of the ranks that must end after a failure."""
        return {r.spec.name for r in ranks} - self.names_to_keep(failure, ranks)

    def recoverable(self, ranks: Collection[Rank]) -> bool:
        """Returns whether the run can continue with the remaining ranks after the others have ended.

        All ended ranks must be restartable, at least one rank must be ready, and all other ranks must have ended. Ranks that
        are joining do not count, because no other rank needs them, and they may never arrive.
        """
        rank_states = [r.state for r in ranks if r.state != "starting" or r.spec.rank < r.spec.world_size]
        ended_groups = {r.spec.group for r in ranks if r.state == "ended"}
        return (
            ended_groups <= self.policies.restartable
            and "ready" in rank_states
            and {*rank_states} <= {"ended", "ready"}
        )


def group_by(items: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    """Returns the items by key; keys and items are in the order of their first appearance."""
    groups: dict[K, list[T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


log = logging.getLogger(__name__)

#: Seconds between two checks of the driver.
TICK_S = 2.0
#: Seconds of silence after which a rank is suspect.
SUSPECT_S = 15.0
#: Seconds of silence after which a rank is lost.
LOST_S = 180.0
#: Seconds of silence after which a joined rank is lost: the other ranks continue, and its job may have been suspended.
JOINED_LOST_S = 60.0
#: Seconds of silence after which a joining rank that is not ready yet is lost.
ARRIVES_S = 180.0
#: Delay of a check in seconds from which the driver concludes that it was not running itself.
_DRIVER_PAUSE_S = 5.0
#: Maximum number of silent ranks that a check names: after the failure of a switch, thousands of ranks may be silent.
_MAX_NAMED = 5


class HeartbeatMonitor:
    """Heartbeat monitor of the ranks that are ready.

    Args:
        fail: Called with the failure of each lost rank.
        has_ended: Returns whether the process of a rank's record is known to have ended. Called only for joined ranks: the
            launcher of other ranks reports their end, but the process that started a joined rank may have been killed, too.
        failures: Failure policy, which has the leases of the groups.
    """

    def __init__(
        self,
        fail: Callable[[RlhpcError], None],
        has_ended: Callable[[Mapping[str, Any]], bool],
        failures: FailurePolicy,
    ) -> None:
        self._fail, self._has_ended, self._failures = fail, has_ended, failures
        #: Incarnations of ranks that another process of the same host has reported as ended.
        self._unreachable = set[str]()
        self.last_check = time.monotonic()

    def record_note(self, process: RankProcess, event: str) -> None:
        """Records a note about a rank. Another rank sends the note `unreachable`; the rank itself sends all other notes."""
        if event == "unreachable":
            self._unreachable.add(process.spec.incarnation)
            return
        process.last_heartbeat, process.suspect = time.monotonic(), False
        process.asks_to_leave = process.asks_to_leave or event == "leaving"

    def check_ranks(self, processes: Iterable[RankProcess]) -> None:
        """Checks the time since each rank's last heartbeat (`RankProcess.last_heartbeat`); called every `TICK_S` seconds."""
        now = time.monotonic()
        # if the job was suspended or the driver stopped, no heartbeat could arrive during that time
        pause_s, self.last_check = now - self.last_check - TICK_S, now
        suspects: list[RankProcess] = []
        for process in processes:
            worker_spec, is_joined = process.spec, process.spec.rank >= process.spec.world_size
            if process.state != "ready" and not (process.state == "starting" and is_joined):
                continue
            if pause_s > _DRIVER_PAUSE_S:
                process.last_heartbeat += pause_s
            silent_s = now - process.last_heartbeat
            lease_s = LOST_S if not is_joined else JOINED_LOST_S if process.state == "ready" else ARRIVES_S
            if (
                is_joined
                and process.record
                and (worker_spec.incarnation in self._unreachable or self._has_ended(process.record))
            ):
                self._unreachable.discard(worker_spec.incarnation)
                self._fail(_make_lost_rank_error(worker_spec, "has ended, and so has whoever started it"))
            elif silent_s > (self._failures.policies.for_group(worker_spec.group).lease_s or lease_s):
                self._fail(_make_lost_rank_error(worker_spec, f"gave no sign of life for {silent_s:.0f} s"))
            elif silent_s > SUSPECT_S and not process.suspect:
                process.suspect = True
                suspects.append(process)
        for process in suspects[:_MAX_NAMED]:
            log.warning("%s has been silent for %.0f s (not yet lost)", process.spec.name, now - process.last_heartbeat)
        if len(suspects) > _MAX_NAMED:
            log.warning("so have %d other ranks", len(suspects) - _MAX_NAMED)


def _make_lost_rank_error(worker_spec: WorkerSpec, fault_text: str) -> WorkerFailed:
    return WorkerFailed(
        f"{worker_spec.group}[{worker_spec.rank}] on node {worker_spec.node} {fault_text} (log {worker_spec.log_err})",
        group=worker_spec.group, rank=worker_spec.rank, node=worker_spec.node, log_path=worker_spec.log_err,
    )  # fmt: skip
