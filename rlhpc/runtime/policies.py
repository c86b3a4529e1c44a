"""Failure policies of a run's worker groups: frozen values that the task type declares and the session applies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class SessionPhase(StrEnum):
    """Phase of a session, which decides whether its policies apply.

    The policies apply in RUNNING and RECOVERING. In STARTING and CLOSING, the end of any rank ends the run.
    """

    STARTING = "starting"
    RUNNING = "running"
    RECOVERING = "recovering"
    CLOSING = "closing"


#: Phases that may follow each phase. A script may train again with the same session.
NEXT_PHASES: Mapping[SessionPhase, frozenset[SessionPhase]] = {
    SessionPhase.STARTING: frozenset({SessionPhase.RUNNING}),
    SessionPhase.RUNNING: frozenset({SessionPhase.RECOVERING, SessionPhase.CLOSING}),
    SessionPhase.RECOVERING: frozenset({SessionPhase.RUNNING, SessionPhase.CLOSING}),
    SessionPhase.CLOSING: frozenset({SessionPhase.RUNNING, SessionPhase.CLOSING}),
}


@dataclass(frozen=True)
class GroupPolicy:
    """Failure handling of one worker group.

    Attributes:
        restartable: Whether the other groups survive a failure of this group, and the run restarts this group.
        independent_ranks: Whether the ranks use no collectives with each other, so that a rank that has died is restarted
            alone. Only for restartable groups.
        min_ranks: Minimum number of ranks of an elastic group; None for a group that ranks cannot join or leave.
        replica_size: Number of neighbouring ranks that form one replica, such as an engine. The ranks of a replica join, leave
            and end together.
        lease_s: Seconds of silence after which a rank counts as lost; None for the default.
    """

    restartable: bool = False
    independent_ranks: bool = False
    min_ranks: int | None = None
    replica_size: int = 1
    lease_s: float | None = None


_STRICT = GroupPolicy()


@dataclass(frozen=True)
class SessionPolicies:
    """Failure handling of a run.

    Attributes:
        groups: Policies by group; the end of a rank of any other group ends the run.
        max_recoveries: Maximum number of restarts of restartable groups without a new checkpoint in between; 0: no restarts.
        closed_reason: Reason why no group accepts ranks, and a change of the configuration that would allow it, for messages;
            "" if no change would.
    """

    groups: Mapping[str, GroupPolicy] = field(default_factory=dict)
    max_recoveries: int = 0
    closed_reason: str = ""

    def for_group(self, group: str | None) -> GroupPolicy:
        """Returns the policy of a group."""
        return self.groups.get(group or "", _STRICT)

    @property
    def restartable(self) -> frozenset[str]:
        """The groups that may fail and be restarted."""
        if not self.max_recoveries:
            return frozenset()
        return frozenset(name for name, policy in self.groups.items() if policy.restartable)

    @property
    def elastic(self) -> dict[str, int]:
        """The groups that ranks may join and leave, each with its minimum number of ranks."""
        return {name: policy.min_ranks for name, policy in self.groups.items() if policy.min_ranks is not None}
