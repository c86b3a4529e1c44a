"""Leases: a late heartbeat makes a rank suspect; only a much later one, or its exit, makes it dead."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from rlhpc.runtime.errors import RlhpcError, WorkerFailed
from rlhpc.runtime.spec import WorkerSpec
from rlhpc.runtime.starters import Member

log = logging.getLogger(__name__)

#: How often the driver checks.
TICK_S = 2.0
SUSPECT_S = 15.0
LOST_S = 180.0
#: The same of a rank that has joined: the others do without it, and its job may have been suspended for another.
JOINED_LOST_S = 60.0
#: How long one that joins may take to its first sign of life, and between two until it is ready.
ARRIVES_S = 180.0
#: A driver that checks this late was itself not running.
_AWAY_S = 5.0
#: Silent ranks named at a time: when a switch fails, thousands are silent.
_NAMED = 5


class Leases:
    """Watches the heartbeats of the ranks that are ready.

    Args:
        fail: Called with the failure of a rank that is lost.
        has_ended: Whether the process of a rank's record is known to have ended. Asked of ranks that have joined: of others
            whoever started them says so, but of these nobody does, if that one was killed with them.

    Attributes:
        patience: Groups that are to be done without sooner: after how many seconds of silence.
    """

    def __init__(
        self, fail: Callable[[RlhpcError], None], has_ended: Callable[[Mapping[str, Any]], bool] = lambda record: False
    ) -> None:
        self._fail, self._has_ended = fail, has_ended
        #: Incarnations that another process of their host has found to have ended.
        self._unreachable = set[str]()
        self.patience: Mapping[str, float] = {}
        self.looked = time.monotonic()

    def heard(self, member: Member, what: str) -> None:
        """Takes in a note of a rank, or, if it is `unreachable`, of another one about it."""
        if what == "unreachable":
            self._unreachable.add(member.spec.incarnation)
            return
        member.alive, member.suspect = time.monotonic(), False
        member.leaving = member.leaving or what == "leaving"

    def look(self, members: Iterable[Member]) -> None:
        """Checks all ranks; call it every `TICK_S`. `alive` says when each was last heard from."""
        now = time.monotonic()
        # a job that was suspended, or a driver that was stopped: nobody could send anything meanwhile
        away, self.looked = now - self.looked - TICK_S, now
        suspects: list[Member] = []
        for member in members:
            spec, joined = member.spec, member.spec.rank >= member.spec.world_size
            if member.state != "ready" and not (member.state == "starting" and joined):
                continue
            if away > _AWAY_S:
                member.alive += away
            silent = now - member.alive
            usual = LOST_S if not joined else JOINED_LOST_S if member.state == "ready" else ARRIVES_S
            if joined and member.record and (spec.incarnation in self._unreachable or self._has_ended(member.record)):
                self._unreachable.discard(spec.incarnation)
                self._fail(_lost(spec, "has ended, and so has whoever started it"))
            elif silent > self.patience.get(spec.group, usual):
                self._fail(_lost(spec, f"gave no sign of life for {silent:.0f} s"))
            elif silent > SUSPECT_S and not member.suspect:
                member.suspect = True
                suspects.append(member)
        for member in suspects[:_NAMED]:
            log.warning("%s has been silent for %.0f s (not yet lost)", member.spec.name, now - member.alive)
        if len(suspects) > _NAMED:
            log.warning("so have %d other ranks", len(suspects) - _NAMED)


def _lost(spec: WorkerSpec, how: str) -> WorkerFailed:
    return WorkerFailed(
        f"{spec.group}[{spec.rank}] on node {spec.node} {how} (log {spec.log_err})",
        group=spec.group, rank=spec.rank, node=spec.node, log_path=spec.log_err,
    )  # fmt: skip
