"""Membership of a run: table of its ranks, and the ranks that join and leave while it runs."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import pickle
import queue
import signal
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rlhpc.runtime.comm.background import in_background
from rlhpc.runtime.comm.queues import TooEarly
from rlhpc.runtime.comm.service import Service
from rlhpc.runtime.comm.zmq_sockets import choose
from rlhpc.runtime.errors import ChannelError, RlhpcError, StaleGeneration, UserError, WorkerFailed, log_errors
from rlhpc.runtime.failure_detection import FailurePolicy
from rlhpc.runtime.host import host_id, process_key
from rlhpc.runtime.imports import fingerprint
from rlhpc.runtime.launchers import JoinedLauncher, Member
from rlhpc.runtime.policies import SessionPhase
from rlhpc.runtime.registry import DEPARTED, GenerationFolder
from rlhpc.runtime.rpc import RpcClient
from rlhpc.runtime.text import last_lines, tail
from rlhpc.runtime.worker_spec import WorkerSpec


def state_check(awaited_state: str, members: Sequence[Member]) -> Callable[[], bool]:
    """Returns a function that returns whether all ranks have reached `awaited_state`. It does not check a rank again
    afterwards.
    """
    pending_members = list(members)

    def answer() -> bool:
        while pending_members and pending_members[-1].state == awaited_state:
            pending_members.pop()
        return not pending_members

    return answer


def early_output_text(member: Member) -> str:
    """Returns the last lines of output of a rank that died before it opened its log, as the end of a message.

    Saves the output in the rank's log if possible.
    """
    output, log_err = "", Path(member.spec.log_err)
    with contextlib.suppress(OSError):
        if not log_err.exists():
            output = member.launcher.early_output(member)
            log_err.write_text(output + "\n")
    return last_lines(output)


def exit_failure(worker_spec: WorkerSpec, status: int, output: str = "") -> WorkerFailed:
    """Returns the failure for a rank's wait status. The message ends with `output` or, if that is empty, the log's end."""
    signal_number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else None
    cause_text = f"was killed by signal {signal_number} ({signal.Signals(signal_number).name})" if signal_number else (
        f"exited with status {os.WEXITSTATUS(status)}")  # fmt: skip
    if signal_number == signal.SIGKILL:
        cause_text += "; if nobody killed it, look for the out-of-memory killer (dmesg, sacct)"
    failure = WorkerFailed(
        f"{worker_spec.group}[{worker_spec.rank}] on node {worker_spec.node} {cause_text} (log "
        f"{worker_spec.log_err}){output or tail(worker_spec.log_err)}",
        group=worker_spec.group, rank=worker_spec.rank, node=worker_spec.node, log_path=worker_spec.log_err,
        exit_signal=signal_number,
    )  # fmt: skip
    if not signal_number and os.WEXITSTATUS(status) == UserError.exit_code:  # the rank's log says what the user can do
        failure.exit_code, failure.__cause__ = UserError.exit_code, UserError(cause_text)
    return failure


_ALIVE = ("starting", "ready")
#: Seconds that all ranks together may take to confirm a membership change. Otherwise its next call notifies it of the change.
_CONFIRM_S = 5.0


class RankTable:
    """Table of a session's ranks: the latest incarnation of each name.

    Args:
        on_change: Called before the table changes because ranks are added, become ready or have ended. The argument is the
            list of the ended ranks' processes (`host.process_key`).
    """

    def __init__(self, on_change: Callable[[Sequence[str]], None]) -> None:
        self.members: dict[str, Member] = {}
        #: Notified whenever a state changes.
        self.condition = threading.Condition(threading.RLock())
        self._on_change = on_change

    def all_members(self) -> list[Member]:
        return list(self.members.values())

    def alive_members(self, group: str | None = None) -> list[Member]:
        """Returns the ranks that have not ended, of one group or by default of all groups."""
        return [
            member for member in self.all_members() if member.state != "ended" and group in (None, member.spec.group)
        ]

    def add(self, members: Sequence[Member]) -> None:
        """Adds ranks; each replaces an earlier rank of the same name."""
        with self.condition:
            self._on_change(())
            self.members.update({member.spec.name: member for member in members})

    def forget_ended(self, group: str) -> None:
        """Removes all ranks that have ended, and all ranks of the group."""
        with self.condition:
            self.members = {
                n: member
                for n, member in self.members.items()
                if member.state != "ended" and member.spec.group != group
            }

    def find(self, name: str, incarnation: str) -> Member | None:
        """Returns the rank with this name and incarnation; None if it is unknown or a later incarnation has replaced it."""
        member = self.members.get(name)
        return member if member is not None and member.spec.incarnation == incarnation else None

    def record_start(self, member: Member, pid: int) -> None:
        """Registers that a rank's process has started."""
        with self.condition:
            member.pid = pid
            self.condition.notify_all()

    def record_arrival(self, member: Member, pid: int, record: dict[str, Any]) -> None:
        """Registers that a rank has built its object, so that it is ready."""
        with self.condition:
            self._on_change(())
            member.record, member.pid = record, pid
            if member.state == "starting":
                member.state = "ready"
            self.condition.notify_all()

    def record_ends(self, members: Sequence[Member]) -> list[Member]:
        """Registers that the processes of ranks have ended; returns the ranks that ended unexpectedly."""
        with self.condition:
            for member in members:
                member.has_exited = True
            return self.give_up(members)

    def give_up(self, members: Sequence[Member]) -> list[Member]:
        """Marks ranks as ended, even if their processes still run; returns the ranks that ended unexpectedly."""
        with self.condition:
            newly_ended = [m for m in members if self.members.get(m.spec.name) is m and m.state != "ended"]
            unexpected_members = [m for m in newly_ended if m.state in _ALIVE]
            if newly_ended:
                self._on_change(_list_process_keys(newly_ended))
            for member in newly_ended:
                member.state = "ended"
            self.condition.notify_all()
        return unexpected_members

    def await_exit(self, members: Sequence[Member], timeout: float) -> list[Member]:
        """Waits at most `timeout` seconds for the processes of ranks to end; returns the ranks with running processes."""
        with self.condition:
            self.condition.wait_for(lambda: all(member.has_exited for member in members), timeout)
            return [member for member in members if not member.has_exited]

    def announce(self, service: Service, ended_members: Sequence[Member] = ()) -> None:
        """Notifies all ready ranks, in the background, that ranks have been added or that `ended_members` have ended.

        The notified ranks then free their data for ended ranks, and read the records of the other ranks again.
        """
        records = [member.record for member in self.all_members() if member.state == "ready"]
        message = pickle.dumps((service.epoch, _list_process_keys(ended_members)))

        def tell() -> None:
            pending_requests = []
            for record in records:
                with contextlib.suppress(RlhpcError, OSError):  # this rank may have ended as well
                    wait_purpose = f"{record['group']}-{record['rank']} to hear who takes part"
                    pending_requests.append(
                        service.peers.begin(choose(record["data"]), b"MEMBERS", [message], wait_purpose, _CONFIRM_S)
                    )
            # one deadline for all: after the failure of a switch, thousands of ranks may not answer
            deadline = time.monotonic() + _CONFIRM_S
            for request in pending_requests:
                with contextlib.suppress(RlhpcError, OSError):
                    service.peers.reply_to(request, max(0.0, deadline - time.monotonic()))

        if records:
            in_background("members", tell)

    def mark_stopping(self, members: Collection[Member]) -> None:
        """Marks ranks as stopping, so that their end is no failure."""
        with self.condition:
            for member in members:
                if member.state != "ended":
                    member.state = "stopping"
            self.condition.notify_all()

    def await_ended(self, members: Sequence[Member], timeout: float) -> bool:
        """Waits at most `timeout` seconds for ranks to end; returns whether all have ended."""
        with self.condition:
            return self.condition.wait_for(state_check("ended", members), timeout)

    def await_settled(self, arrival_s: float = 0.0) -> None:
        """Waits at most `arrival_s` seconds for starting ranks, then for the end of all ranks that are not ready.

        The second wait takes at most `limit_s` seconds of the launchers.
        """
        with self.condition:
            self.condition.wait_for(lambda: all(member.state != "starting" for member in self.all_members()), arrival_s)
        limit_s = max((member.launcher.limit_s for member in self.all_members()), default=0.0)
        self.await_ended([member for member in self.all_members() if member.state != "ready"], limit_s)


def _list_process_keys(members: Sequence[Member]) -> list[str]:
    return [process_key(member.record["data"]) for member in members if member.record]


log = logging.getLogger(__name__)


#: Seconds between attempts to write the record of a departure.
_RETRY_S = 2.0


@dataclass
class _Departure:
    """Departure of a rank, with the first line of its reason."""

    member: Member
    reason: str
    has_warned: bool = False


class Membership:
    """Manager of the ranks that join and leave a run, in the driver.

    Args:
        ranks: All ranks.
        registry: Registry in which departures are recorded for other processes.
        failures: Failure policy, which has the elastic groups.
        log_dir: Folder for the ranks' logs.
        listens: Whether the driver listens for processes of other hosts.
        on_event: Called with each event of a joined rank, as a mapping; the events are joined, works and left.
        on_lost: Called with group, rank and reason if a rank has gone without leaving gracefully, and its group continues.

    Attributes:
        epoch: Number of times that a rank has joined, returned or left since the groups were launched.
        faulty: Ids of jobs with a rank that has raised an exception.
    """

    def __init__(
        self,
        ranks: RankTable,
        registry: GenerationFolder,
        failures: FailurePolicy,
        log_dir: Path,
        listens: bool,
        on_event: Callable[[dict[str, Any]], None],
        on_lost: Callable[[str, int, str], None] = lambda group, rank, reason: None,
    ) -> None:
        self._ranks, self._registry, self._failures = ranks, registry, failures
        self._log_dir, self._listens = log_dir, listens
        self._joined_launcher, self._host = JoinedLauncher(), host_id()
        self._departures: queue.SimpleQueue[_Departure | None] = queue.SimpleQueue()
        threading.Thread(target=self._publish_departures, name="rlhpc-departures", daemon=True).start()
        self._jobs: dict[str, tuple[str, Member]] = {}
        #: Incarnation → reason of each joined rank that has left.
        self._leave_reasons: dict[str, str] = {}
        #: Incarnation → job of each joined rank that takes part or has taken part.
        self._participants: dict[str, str] = {}
        self._on_event, self._on_lost = on_event, on_lost
        self.epoch = 0
        self.faulty = set[str]()

    def register_departure(self, member: Member, failure: RlhpcError, rpc: RpcClient) -> None:
        """Registers that a rank has ended or is lost and that its group continues without it.

        Also ends the other ranks of its replica, because they may wait for this rank, and receive no message while they wait.
        """
        self._record_departure(member, failure, rpc)
        worker_spec = member.spec
        replica = self._failures.replica_of(worker_spec.group, worker_spec.rank)
        for replica_member in self._ranks.alive_members(worker_spec.group):
            if replica_member.spec.rank in replica:
                replica_member.leave_reason = replica_member.leave_reason or member.leave_reason
                self._record_departure(
                    replica_member, RlhpcError(f"{worker_spec.name} has ended, and both are one engine"), rpc
                )

    def _record_departure(self, member: Member, failure: RlhpcError, rpc: RpcClient) -> None:
        worker_spec = member.spec
        if member.leave_reason:
            log.info("%s leaves: %s", worker_spec.name, member.leave_reason)
        else:
            log.warning("%s goes on without rank %d: %s", worker_spec.group, worker_spec.rank, failure)
        member.has_departed = True
        self._ranks.give_up([member])
        self.epoch += 1
        if member.record:
            rpc.leave(member.record)
        if member.launcher is self._joined_launcher:
            self._leave_reasons[worker_spec.incarnation] = member.leave_reason or str(failure).splitlines()[0]
        job, _ = self._jobs.pop(worker_spec.incarnation, ("", None))
        if job and isinstance(failure, WorkerFailed) and failure.remote_traceback:
            self.faulty.add(job)
        self._departures.put(_Departure(member, str(failure).splitlines()[0]))

    def _publish_departures(self) -> None:
        """Kills the processes of ranks that have left, and publishes their departures; runs on a separate thread.

        A kill may query the scheduler, and writing the record may block on a full or stalled filesystem. Threads that receive
        reports of other ranks must not wait for this. If a record cannot be written, the thread retries until the session
        ends.
        """
        unwritten_departures: list[_Departure] = []
        while True:
            with contextlib.suppress(queue.Empty):
                departure = self._departures.get(timeout=_RETRY_S if unwritten_departures else None)
                if departure is None:
                    return
                self._kill_process(departure)
                unwritten_departures.append(departure)
            unwritten_departures = [departure for departure in unwritten_departures if not self._publish(departure)]

    def close(self) -> None:
        """Ends the thread that publishes departures."""
        self._departures.put(None)

    def _kill_process(self, departure: _Departure) -> None:
        member = departure.member
        if not member.has_exited:
            with log_errors(f"{member.spec.name} has left, and could not be killed"):
                member.launcher.kill([member])
        if not member.leave_reason:
            self.report_lost(member, departure.reason)
        if member.launcher is self._joined_launcher:
            self._report_event(
                {
                    "event": "left",
                    "incarnation": member.spec.incarnation,
                    "why": member.leave_reason or departure.reason,
                }
            )

    def _publish(self, departure: _Departure) -> bool:
        """Publishes a departure for ranks that may wait for the departed rank; returns False if this has to be retried."""
        member, worker_spec = departure.member, departure.member.spec
        if not member.record and member.launcher is not self._joined_launcher:
            return True
        try:
            self._registry.put(
                DEPARTED, worker_spec.name, {"incarnation": worker_spec.incarnation, "why": departure.reason}
            )
        except StaleGeneration:
            return True  # another driver has taken over the run
        except (RlhpcError, OSError) as error:
            if not departure.has_warned:
                log.warning("cannot record yet that %s has left: %s", worker_spec.name, error)
            departure.has_warned = True
            return False
        return True

    def report_lost(self, member: Member, reason: str) -> None:
        """Calls `on_lost` for a rank that was lost and whose group continues without it."""
        with log_errors(f"cannot report that {member.spec.name} is lost"):
            self._on_lost(member.spec.group, member.spec.rank, reason)

    def _report_event(self, event: dict[str, Any]) -> None:
        """Reports an event of a joined rank. A failure to report is only logged, because the events only inform users."""
        with log_errors(f"cannot record that {event['incarnation']} has {event['event']}"):
            self._on_event(event)

    def why_left(self, group: str, rank: int) -> str:
        """Returns the reason for which a rank got a notice to leave and left; "" if it ended for another reason."""
        return next(
            (
                member.leave_reason
                for member in self._ranks.all_members()
                if (member.spec.group, member.spec.rank) == (group, rank)
            ),
            "",
        )

    def leaving(self, group: str) -> list[int]:
        """Returns the ranks of a group that have a notice to leave and wait for permission (`Worker.stay_until_let_go`)."""
        return [member.spec.rank for member in self._ranks.alive_members(group) if member.asks_to_leave]

    def by_job(self) -> dict[str, int]:
        """Returns the number of joined ranks that take part, by job id.

        The number is 0 if all ranks of the job have left. Omits jobs without a rank that has ever taken part.
        """
        ranks_by_job = dict.fromkeys(list(self._participants.values()), 0)
        for incarnation, (job, member) in list(self._jobs.items()):
            if incarnation in self._participants and member.state == "ready":
                ranks_by_job[job] += 1
        return ranks_by_job

    def register_participant(self, group: str, rank: int) -> None:
        """Registers a joined rank as a participant after its setup; ignores other ranks."""
        for member in self._ranks.alive_members(group):
            if member.spec.rank == rank and member.launcher is self._joined_launcher:
                if member.spec.incarnation in self._jobs:
                    self._participants[member.spec.incarnation] = self._jobs[member.spec.incarnation][0]
                self._report_event({"event": "works", "incarnation": member.spec.incarnation})

    def ranks_of_job(self, job_id: str) -> list[Member]:
        """Returns the ranks that have joined from a job and have not ended."""
        return [member for home, member in list(self._jobs.values()) if home == job_id and member.state != "ended"]

    def newcomers(self, group: str, incarnations: Collection[str]) -> list[dict[str, Any]]:
        """Returns the records of a group's ready ranks except those with the given incarnations."""
        with self._ranks.condition:
            ready_members = [
                member
                for member in self._ranks.alive_members(group)
                if member.state == "ready" and member.record["incarnation"] not in incarnations
            ]
        self.epoch += len(ready_members)
        return [member.record for member in ready_members]

    def restartable(self, group: str) -> list[Member]:
        """Returns the ended ranks of a group that this session can restart. Their processes may still exist.

        Omits joined ranks, because this session has not started them.
        """
        return [
            member
            for member in self._ranks.all_members()
            if member.spec.group == group and member.state == "ended" and member.launcher is not self._joined_launcher
        ]

    def join(self, request: Mapping[str, Any]) -> bytes:
        """Adds a rank to a group for a process that requests to join; returns the rank's specification as JSON.

        To a process that names the incarnation of a joined rank, returns the reason why the rank has left, as JSON; "" while
        the rank takes part.

        Called on the thread that runs the service's event loop.

        Raises:
            ChannelError: The process may not join; the message has the reason. `TooEarly` if it may join later.
        """
        if "incarnation" in request:
            return json.dumps(self._leave_reasons.get(str(request["incarnation"]), "")).encode()
        group = request["group"]
        self._check_request(group, request)
        with self._ranks.condition:
            members = [m for m in self._ranks.all_members() if m.spec.group == group]  # including ended ranks
            template, rank = members[0].spec, self._place_in(group, members, request)
            stem = self._log_dir / f"{group}-{rank}"
            env = {
                name: variable_value for name, variable_value in template.env.items() if name != "CUDA_VISIBLE_DEVICES"
            }
            worker_spec = replace(
                template, rank=rank, node=request["node"], node_rank=rank, local_rank=0, local_world_size=1,
                accelerators=tuple(range(request["accelerators"])), visible=(), log_out=f"{stem}.out",
                log_err=f"{stem}.err", env=env, threads=request["threads"], interpreter="", incarnation=f"{time.time_ns():x}",
            )  # fmt: skip
            member = Member(worker_spec, self._joined_launcher)
            self._ranks.add([member])
            if request["job"]:
                self._jobs[worker_spec.incarnation] = request["job"], member
        self._report_event({
            "event": "joined", "incarnation": worker_spec.incarnation, "group": group, "rank": rank, "node": worker_spec.node,
            "job": request["job"], "accelerators": request["accelerators"],
        })  # fmt: skip
        log.info("%s joins from node %s (job %s)", worker_spec.name, worker_spec.node, request["job"] or "none")
        return worker_spec.to_json()

    def _place_in(self, group: str, members: Sequence[Member], request: Mapping[str, Any]) -> int:
        """Returns the rank for a joining process.

        This is a free rank of an incomplete replica with ranks of the same job, or of the same node without a job. Otherwise
        it is the first rank of a new replica.
        """
        next_rank = 1 + max(m.spec.rank for m in members)
        if len(self._failures.replica_of(group, 0)) == 1:
            return next_rank
        by_rank = {m.spec.rank: m for m in members}
        for member in members:
            replica = self._failures.replica_of(group, member.spec.rank)
            free_ranks = [rank for rank in replica if rank not in by_rank]
            replica_members = [by_rank[rank] for rank in replica if rank in by_rank]
            jobs = {self._jobs.get(m.spec.incarnation, ("", m))[0] for m in replica_members}
            is_neighbour = (
                jobs == {request["job"]}
                if request["job"]
                else {m.spec.node for m in replica_members} == {request["node"]}
            )
            if free_ranks and is_neighbour and all(m.state != "ended" for m in replica_members):
                return free_ranks[0]
        return self._failures.replica_of(group, next_rank - 1).stop

    def _check_request(self, group: str, request: Mapping[str, Any]) -> None:
        policies = self._failures.policies
        if self._failures.phase not in (SessionPhase.RUNNING, SessionPhase.RECOVERING):
            raise TooEarly("the ranks that the run starts with are starting or ending")
        elastic = policies.elastic
        if group not in elastic:
            elastic_text = f"groups that take some: {', '.join(elastic) or 'none'}"
            reason = f"; {policies.closed_reason}" if policies.closed_reason else ""
            raise ChannelError(f"no rank can join group {group!r} of this run; {elastic_text}{reason}")
        if request["code"] != fingerprint():
            raise ChannelError(
                "this is another rlhpc than the run's own: use the environment that the run was started with"
            )
        if request["host"] != self._host and not self._listens:
            raise ChannelError("this run listens to processes of its own host only")
