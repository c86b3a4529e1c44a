"""Who takes part in a run: which ranks have left a group that goes on without them, and which have come."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rlhpc.runtime.code import fingerprint
from rlhpc.runtime.comm.queues import TooEarly
from rlhpc.runtime.errors import ChannelError, RlhpcError, StaleGeneration, WorkerFailed
from rlhpc.runtime.failures import FailurePolicy
from rlhpc.runtime.host import host_id
from rlhpc.runtime.ranks import Ranks
from rlhpc.runtime.registry import LEFT, Registry
from rlhpc.runtime.reporting import logged
from rlhpc.runtime.rpc import RpcClient
from rlhpc.runtime.starters import Member
from rlhpc.runtime.starters.joined import JoinedStarter

log = logging.getLogger(__name__)


#: A departure that could not be recorded is recorded again so often.
_RETRY_S = 2.0


@dataclass
class _Departure:
    """A rank that has left, and the first line of the reason."""

    member: Member
    reason: str
    warned: bool = False


class Membership:
    """The driver's account of ranks that come and go.

    Args:
        ranks: All ranks.
        registry: Where other processes see who has left.
        failures: Says which groups are elastic.
        log_dir: Where the ranks' logs go.
        listens: Whether processes of other hosts reach this run.

    Attributes:
        epoch: How often somebody has come or gone since the groups were launched.
        is_open: Whether ranks may join at present; who asks earlier or later is told to ask again. Not at first.
        heard: Called with what happens to ranks that have joined: `event` (joined, works, left), who, where and why.
        faulty: Jobs of which a rank has raised something.
        why_fixed: Why no group takes ranks, where something can be changed; for messages.
    """

    def __init__(self, ranks: Ranks, registry: Registry, failures: FailurePolicy, log_dir: Path, listens: bool) -> None:
        self._ranks, self._registry, self._failures = ranks, registry, failures
        self._log_dir, self._listens = log_dir, listens
        self._joined, self._host = JoinedStarter(), host_id()
        self._departures: queue.SimpleQueue[_Departure | None] = queue.SimpleQueue()
        threading.Thread(target=self._conclude, name="rlhpc-departures", daemon=True).start()
        self._jobs: dict[str, tuple[str, Member]] = {}
        #: Ranks that take part or did so, by incarnation: their jobs.
        self._at_work: dict[str, str] = {}
        self.is_open = False
        self.heard: Callable[[dict[str, Any]], None] = lambda event: None
        self.epoch = 0
        self.faulty = set[str]()
        self.why_fixed = ""

    def left(self, member: Member, failure: RlhpcError, rpc: RpcClient) -> None:
        """A rank of a group that goes on without it has ended, or must be taken for lost. So are those that are one replica
        with it: they may be waiting for it where nobody could tell them."""
        self._left(member, failure, rpc)
        spec = member.spec
        replica = self._failures.replica_of(spec.group, spec.rank)
        for mate in self._ranks.alive(spec.group):
            if mate.spec.rank in replica:
                mate.told = mate.told or member.told
                self._left(mate, RlhpcError(f"{spec.name} has ended, and both are one engine"), rpc)

    def _left(self, member: Member, failure: RlhpcError, rpc: RpcClient) -> None:
        spec = member.spec
        if member.told:
            log.info("%s leaves: %s", spec.name, member.told)
        else:
            log.warning("%s goes on without rank %d: %s", spec.group, spec.rank, failure)
        self._ranks.give_up([member])
        self.epoch += 1
        if member.record:
            rpc.leave(member.record)
        job, _ = self._jobs.pop(spec.incarnation, ("", None))
        if job and isinstance(failure, WorkerFailed) and failure.remote_traceback:
            self.faulty.add(job)
        self._departures.put(_Departure(member, str(failure).splitlines()[0]))

    def _conclude(self) -> None:
        """Kills the processes of ranks that have left, and makes their departures known; on a thread of its own.

        Killing may ask the scheduler, and the record may wait for a filesystem that is full or stalls: no thread that hears of
        other ranks may wait for either. A record that cannot be written is tried again, until the session ends.
        """
        unwritten: list[_Departure] = []
        while True:
            with contextlib.suppress(queue.Empty):
                departure = self._departures.get(timeout=_RETRY_S if unwritten else None)
                if departure is None:
                    return
                self._end_process(departure)
                unwritten.append(departure)
            unwritten = [departure for departure in unwritten if not self._record(departure)]

    def close(self) -> None:
        """Ends the thread: nobody is left who waits for a rank."""
        self._departures.put(None)

    def _end_process(self, departure: _Departure) -> None:
        member = departure.member
        if not member.has_exited:
            with logged(f"{member.spec.name} has left, and could not be killed"):
                member.starter.kill([member])
        if member.starter is self._joined:
            self._tell(
                {"event": "left", "incarnation": member.spec.incarnation, "why": member.told or departure.reason}
            )

    def _record(self, departure: _Departure) -> bool:
        """Writes the departure for the ranks that wait for this one; returns False where that is to be tried again."""
        member, spec = departure.member, departure.member.spec
        if not member.record and member.starter is not self._joined:
            return True
        try:
            self._registry.put(LEFT, spec.name, {"incarnation": spec.incarnation, "why": departure.reason})
        except StaleGeneration:
            return True  # another driver's run by now
        except (RlhpcError, OSError) as error:
            if not departure.warned:
                log.warning("cannot record yet that %s has left: %s", spec.name, error)
            departure.warned = True
            return False
        return True

    def _tell(self, event: dict[str, Any]) -> None:
        """Passes on an event of a rank that has joined. The account of these is for users: a run does not end by it."""
        with logged(f"cannot record that {event['incarnation']} has {event['event']}"):
            self.heard(event)

    def why_left(self, group: str, rank: int) -> str:
        """Why a rank has left that was told to; "" for one that ended otherwise."""
        return next((m.told for m in self._ranks.all() if (m.spec.group, m.spec.rank) == (group, rank)), "")

    def leaving(self, group: str) -> list[int]:
        """Ranks of a group that were told to leave, and wait to be let go (`Worker.stay_until_let_go`)."""
        return [member.spec.rank for member in self._ranks.alive(group) if member.leaving]

    def by_job(self) -> dict[str, int]:
        """Ranks that have joined and take part, by the id of their job; 0 for jobs whose ranks have all left again. Jobs of
        which no rank has ever taken part are not in it."""
        found = dict.fromkeys(list(self._at_work.values()), 0)
        for incarnation, (job, member) in list(self._jobs.items()):
            if incarnation in self._at_work and member.state == "ready":
                found[job] += 1
        return found

    def takes_part(self, group: str, rank: int) -> None:
        """A rank that has come has all that it needs, and is at work from now on."""
        for member in self._ranks.alive(group):
            if member.spec.rank == rank and member.starter is self._joined:
                if member.spec.incarnation in self._jobs:
                    self._at_work[member.spec.incarnation] = self._jobs[member.spec.incarnation][0]
                self._tell({"event": "works", "incarnation": member.spec.incarnation})

    def of_job(self, job: str) -> list[Member]:
        """Ranks that have joined from a job and not ended."""
        return [member for own, member in list(self._jobs.values()) if own == job and member.state != "ended"]

    def newcomers(self, group: str, known: Collection[str]) -> list[dict[str, Any]]:
        """The records of ranks of a group that are ready, and of none of the known incarnations."""
        with self._ranks.changed:
            found = [m for m in self._ranks.alive(group) if m.state == "ready" and m.record["incarnation"] not in known]
        self.epoch += len(found)
        return [m.record for m in found]

    def startable(self, group: str) -> list[Member]:
        """Ranks of a group that have ended and whose place is still this run's. Their processes may still be there."""
        return [
            m
            for m in self._ranks.all()
            if m.spec.group == group and m.state == "ended" and m.starter is not self._joined
        ]

    def join(self, wish: Mapping[str, Any]) -> bytes:
        """Gives a process a place in a group; its specification as JSON. Called on the service's thread.

        Raises:
            ChannelError: It may not join; says why. `TooEarly` if it may later.
        """
        group = wish["group"]
        self._allow(group, wish)
        with self._ranks.changed:
            members = [m for m in self._ranks.all() if m.spec.group == group]  # those that have ended, too
            like, number = members[0].spec, self._place_in(group, members, wish)
            stem = self._log_dir / f"{group}-{number}"
            env = {name: value for name, value in like.env.items() if name != "CUDA_VISIBLE_DEVICES"}
            spec = replace(
                like, rank=number, node=wish["node"], node_rank=number, local_rank=0, local_world_size=1,
                accelerators=tuple(range(wish["accelerators"])), log_out=f"{stem}.out", log_err=f"{stem}.err", env=env,
                threads=wish["threads"], interpreter="", incarnation=f"{time.time_ns():x}",
            )  # fmt: skip
            member = Member(spec, self._joined)
            self._ranks.add([member])
            if wish["job"]:
                self._jobs[spec.incarnation] = wish["job"], member
        self._tell({
            "event": "joined", "incarnation": spec.incarnation, "group": group, "rank": number, "node": spec.node,
            "job": wish["job"], "accelerators": wish["accelerators"],
        })  # fmt: skip
        log.info("%s joins from node %s (job %s)", spec.name, spec.node, wish["job"] or "none")
        return spec.to_json()

    def _place_in(self, group: str, members: Sequence[Member], wish: Mapping[str, Any]) -> int:
        """The number of a rank that joins: beside others of its job, or of its node, whose replica is not whole yet."""
        last = 1 + max(m.spec.rank for m in members)
        if len(self._failures.replica_of(group, 0)) == 1:
            return last
        by_rank = {m.spec.rank: m for m in members}
        for mate in members:
            replica = self._failures.replica_of(group, mate.spec.rank)
            free = [rank for rank in replica if rank not in by_rank]
            there = [by_rank[rank] for rank in replica if rank in by_rank]
            jobs = {self._jobs.get(m.spec.incarnation, ("", m))[0] for m in there}
            near = jobs == {wish["job"]} if wish["job"] else {m.spec.node for m in there} == {wish["node"]}
            if free and near and all(m.state != "ended" for m in there):
                return free[0]
        return self._failures.replica_of(group, last - 1).stop

    def _allow(self, group: str, wish: Mapping[str, Any]) -> None:
        if not self.is_open:
            raise TooEarly("the ranks that the run starts with are starting or ending")
        elastic = self._failures.elastic
        if group not in elastic:
            known = f"groups that take some: {', '.join(elastic) or 'none'}"
            why = f"; {self.why_fixed}" if self.why_fixed else ""
            raise ChannelError(f"no rank can join group {group!r} of this run; {known}{why}")
        if wish["code"] != fingerprint():
            raise ChannelError(
                "this is another rlhpc than the run's own: use the environment that the run was started with"
            )
        if wish["host"] != self._host and not self._listens:
            raise ChannelError("this run listens to processes of its own host only")
