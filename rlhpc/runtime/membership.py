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
from rlhpc.runtime.launchers import JoinedLauncher, RankProcess
from rlhpc.runtime.policies import SessionPhase
from rlhpc.runtime.registry import DEPARTED, GenerationFolder
from rlhpc.runtime.rpc import RpcClient
from rlhpc.runtime.text import last_lines, tail
from rlhpc.runtime.worker_spec import WorkerSpec


def state_check(awaited_state: str, processes: Sequence[RankProcess]) -> Callable[[], bool]:
    """Returns a function that returns whether all ranks have reached `awaited_state`. It does not check a rank again
    afterwards.
    """
    pending_processes = list(processes)

    def answer() -> bool:
        while pending_processes and pending_processes[-1].state == awaited_state:
            pending_processes.pop()
        return not pending_processes

    return answer


def early_output_text(process: RankProcess) -> str:
    """Returns the last lines of output of a rank that died before it opened its log, as the end of a message.

    Saves the output in the rank's log if possible.
    """
    output, log_err = "", Path(process.spec.log_err)
    with contextlib.suppress(OSError):
        if not log_err.exists():
            output = process.launcher.early_output(process)
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
        self.processes: dict[str, RankProcess] = {}
        #: Notified whenever a state changes.
        self.condition = threading.Condition(threading.RLock())
        self._on_change = on_change

    def all_processes(self) -> list[RankProcess]:
        return list(self.processes.values())

    def alive_processes(self, group: str | None = None) -> list[RankProcess]:
        """Returns the ranks that have not ended, of one group or by default of all groups."""
        return [
            process
            for process in self.all_processes()
            if process.state != "ended" and group in (None, process.spec.group)
        ]

    def add(self, processes: Sequence[RankProcess]) -> None:
        """Adds ranks; each replaces an earlier rank of the same name."""
        with self.condition:
            self._on_change(())
            self.processes.update({process.spec.name: process for process in processes})

    def forget_ended(self, group: str) -> None:
        """Removes all ranks that have ended, and all ranks of the group."""
        with self.condition:
            self.processes = {
                n: process
                for n, process in self.processes.items()
                if process.state != "ended" and process.spec.group != group
            }

    def find(self, name: str, incarnation: str) -> RankProcess | None:
        """Returns the rank with this name and incarnation; None if it is unknown or a later incarnation has replaced it."""
        process = self.processes.get(name)
        return process if process is not None and process.spec.incarnation == incarnation else None

    def record_start(self, process: RankProcess, pid: int) -> None:
        """Registers that a rank's process has started."""
        with self.condition:
            process.pid = pid
            self.condition.notify_all()

    def record_arrival(self, process: RankProcess, pid: int, record: dict[str, Any]) -> None:
        """Registers that a rank has built its object, so that it is ready."""
        with self.condition:
            self._on_change(())
            process.record, process.pid = record, pid
            if process.state == "starting":
                process.state = "ready"
            self.condition.notify_all()

    def record_ends(self, processes: Sequence[RankProcess]) -> list[RankProcess]:
        """Registers that the processes of ranks have ended; returns the ranks that ended unexpectedly."""
        with self.condition:
            for process in processes:
                process.has_exited = True
            return self.give_up(processes)

    def give_up(self, processes: Sequence[RankProcess]) -> list[RankProcess]:
        """Marks ranks as ended, even if their processes still run; returns the ranks that ended unexpectedly."""
        with self.condition:
            newly_ended = [m for m in processes if self.processes.get(m.spec.name) is m and m.state != "ended"]
            unexpected_ends = [m for m in newly_ended if m.state in _ALIVE]
            if newly_ended:
                self._on_change(_list_process_keys(newly_ended))
            for process in newly_ended:
                process.state = "ended"
            self.condition.notify_all()
        return unexpected_ends

    def await_exit(self, processes: Sequence[RankProcess], timeout: float) -> list[RankProcess]:
        """Waits at most `timeout` seconds for the processes of ranks to end; returns the ranks with running processes."""
        with self.condition:
            self.condition.wait_for(lambda: all(process.has_exited for process in processes), timeout)
            return [process for process in processes if not process.has_exited]

    def announce(self, service: Service, ended_processes: Sequence[RankProcess] = ()) -> None:
        """Notifies all ready ranks, in the background, that ranks have been added or that `ended_processes` have ended.

        The notified ranks then free their data for ended ranks, and read the records of the other ranks again.
        """
        records = [process.record for process in self.all_processes() if process.state == "ready"]
        message = pickle.dumps((service.epoch, _list_process_keys(ended_processes)))

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

    def mark_stopping(self, processes: Collection[RankProcess]) -> None:
        """Marks ranks as stopping, so that their end is no failure."""
        with self.condition:
            for process in processes:
                if process.state != "ended":
                    process.state = "stopping"
            self.condition.notify_all()

    def await_ended(self, processes: Sequence[RankProcess], timeout: float) -> bool:
        """Waits at most `timeout` seconds for ranks to end; returns whether all have ended."""
        with self.condition:
            return self.condition.wait_for(state_check("ended", processes), timeout)

    def await_settled(self, arrival_s: float = 0.0) -> None:
        """Waits at most `arrival_s` seconds for starting ranks, then for the end of all ranks that are not ready.

        The second wait takes at most `limit_s` seconds of the launchers.
        """
        with self.condition:
            self.condition.wait_for(
                lambda: all(process.state != "starting" for process in self.all_processes()), arrival_s
            )
        limit_s = max((process.launcher.limit_s for process in self.all_processes()), default=0.0)
        self.await_ended([process for process in self.all_processes() if process.state != "ready"], limit_s)


def _list_process_keys(processes: Sequence[RankProcess]) -> list[str]:
    return [process_key(process.record["data"]) for process in processes if process.record]


log = logging.getLogger(__name__)


#: Seconds between attempts to write the record of a departure.
_RETRY_S = 2.0


@dataclass
class _Departure:
    """Departure of a rank, with the first line of its reason."""

    process: RankProcess
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
        self._jobs: dict[str, tuple[str, RankProcess]] = {}
        #: Incarnation → reason of each joined rank that has left.
        self._leave_reasons: dict[str, str] = {}
        #: Incarnation → job of each joined rank that takes part or has taken part.
        self._participants: dict[str, str] = {}
        self._on_event, self._on_lost = on_event, on_lost
        self.epoch = 0
        self.faulty = set[str]()

    def register_departure(self, process: RankProcess, failure: RlhpcError, rpc: RpcClient) -> None:
        """Registers that a rank has ended or is lost and that its group continues without it.

        Also ends the other ranks of its replica, because they may wait for this rank, and receive no message while they wait.
        """
        self._record_departure(process, failure, rpc)
        worker_spec = process.spec
        replica = self._failures.replica_of(worker_spec.group, worker_spec.rank)
        for replica_process in self._ranks.alive_processes(worker_spec.group):
            if replica_process.spec.rank in replica:
                replica_process.leave_reason = replica_process.leave_reason or process.leave_reason
                self._record_departure(
                    replica_process, RlhpcError(f"{worker_spec.name} has ended, and both are one engine"), rpc
                )

    def _record_departure(self, process: RankProcess, failure: RlhpcError, rpc: RpcClient) -> None:
        worker_spec = process.spec
        if process.leave_reason:
            log.info("%s leaves: %s", worker_spec.name, process.leave_reason)
        else:
            log.warning("%s goes on without rank %d: %s", worker_spec.group, worker_spec.rank, failure)
        process.has_departed = True
        self._ranks.give_up([process])
        self.epoch += 1
        if process.record:
            rpc.leave(process.record)
        if process.launcher is self._joined_launcher:
            self._leave_reasons[worker_spec.incarnation] = process.leave_reason or str(failure).splitlines()[0]
        job, _ = self._jobs.pop(worker_spec.incarnation, ("", None))
        if job and isinstance(failure, WorkerFailed) and failure.remote_traceback:
            self.faulty.add(job)
        self._departures.put(_Departure(process, str(failure).splitlines()[0]))

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
        process = departure.process
        if not process.has_exited:
            with log_errors(f"{process.spec.name} has left, and could not be killed"):
                process.launcher.kill([process])
        if not process.leave_reason:
            self.report_lost(process, departure.reason)
        if process.launcher is self._joined_launcher:
            self._report_event(
                {
                    "event": "left",
                    "incarnation": process.spec.incarnation,
                    "why": process.leave_reason or departure.reason,
                }
            )

    def _publish(self, departure: _Departure) -> bool:
        """Publishes a departure for ranks that may wait for the departed rank; returns False if this has to be retried."""
        process, worker_spec = departure.process, departure.process.spec
        if not process.record and process.launcher is not self._joined_launcher:
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

    def report_lost(self, process: RankProcess, reason: str) -> None:
        """Calls `on_lost` for a rank that was lost and whose group continues without it."""
        with log_errors(f"cannot report that {process.spec.name} is lost"):
            self._on_lost(process.spec.group, process.spec.rank, reason)

    def _report_event(self, event: dict[str, Any]) -> None:
        """Reports an event of a joined rank. A failure to report is only logged, because the events only inform users."""
        with log_errors(f"cannot record that {event['incarnation']} has {event['event']}"):
            self._on_event(event)

    def find_leave_reason(self, group: str, rank: int) -> str:
        """Returns the reason for which a rank got a notice to leave and left; "" if it ended for another reason."""
        return next(
            (
                process.leave_reason
                for process in self._ranks.all_processes()
                if (process.spec.group, process.spec.rank) == (group, rank)
            ),
            "",
        )

    def leaving(self, group: str) -> list[int]:
        """Returns the ranks of a group that have a notice to leave and wait for permission (`Worker.stay_until_let_go`)."""
        return [process.spec.rank for process in self._ranks.alive_processes(group) if process.asks_to_leave]

    def by_job(self) -> dict[str, int]:
        """Returns the number of joined ranks that take part, by job id.

        The number is 0 if all ranks of the job have left. Omits jobs without a rank that has ever taken part.
        """
        ranks_by_job = dict.fromkeys(list(self._participants.values()), 0)
        for incarnation, (job, process) in list(self._jobs.items()):
            if incarnation in self._participants and process.state == "ready":
                ranks_by_job[job] += 1
        return ranks_by_job

    def register_participant(self, group: str, rank: int) -> None:
        """Registers a joined rank as a participant after its setup; ignores other ranks."""
        for process in self._ranks.alive_processes(group):
            if process.spec.rank == rank and process.launcher is self._joined_launcher:
                if process.spec.incarnation in self._jobs:
                    self._participants[process.spec.incarnation] = self._jobs[process.spec.incarnation][0]
                self._report_event({"event": "works", "incarnation": process.spec.incarnation})

    def ranks_of_job(self, job_id: str) -> list[RankProcess]:
        """Returns the ranks that have joined from a job and have not ended."""
        return [process for home, process in list(self._jobs.values()) if home == job_id and process.state != "ended"]

    def newcomers(self, group: str, incarnations: Collection[str]) -> list[dict[str, Any]]:
        """Returns the records of a group's ready ranks except those with the given incarnations."""
        with self._ranks.condition:
            ready_processes = [
                process
                for process in self._ranks.alive_processes(group)
                if process.state == "ready" and process.record["incarnation"] not in incarnations
            ]
        self.epoch += len(ready_processes)
        return [process.record for process in ready_processes]

    def restartable(self, group: str) -> list[RankProcess]:
        """Returns the ended ranks of a group that this session can restart. Their processes may still exist.

        Omits joined ranks, because this session has not started them.
        """
        return [
            process
            for process in self._ranks.all_processes()
            if process.spec.group == group
            and process.state == "ended"
            and process.launcher is not self._joined_launcher
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
            processes = [m for m in self._ranks.all_processes() if m.spec.group == group]  # including ended ranks
            template, rank = processes[0].spec, self._place_in(group, processes, request)
            stem = self._log_dir / f"{group}-{rank}"
            env = {
                name: variable_value for name, variable_value in template.env.items() if name != "CUDA_VISIBLE_DEVICES"
            }
            worker_spec = replace(
                template, rank=rank, node=request["node"], node_rank=rank, local_rank=0, local_world_size=1,
                accelerators=tuple(range(request["accelerators"])), visible=(), log_out=f"{stem}.out",
                log_err=f"{stem}.err", env=env, threads=request["threads"], interpreter="", incarnation=f"{time.time_ns():x}",
            )  # fmt: skip
            process = RankProcess(worker_spec, self._joined_launcher)
            self._ranks.add([process])
            if request["job"]:
                self._jobs[worker_spec.incarnation] = request["job"], process
        self._report_event({
            "event": "joined", "incarnation": worker_spec.incarnation, "group": group, "rank": rank, "node": worker_spec.node,
            "job": request["job"], "accelerators": request["accelerators"],
        })  # fmt: skip
        log.info("%s joins from node %s (job %s)", worker_spec.name, worker_spec.node, request["job"] or "none")
        return worker_spec.to_json()

    def _place_in(self, group: str, processes: Sequence[RankProcess], request: Mapping[str, Any]) -> int:
        """Returns the rank for a joining process.

        This is a free rank of an incomplete replica with ranks of the same job, or of the same node without a job. Otherwise
        it is the first rank of a new replica.
        """
        next_rank = 1 + max(m.spec.rank for m in processes)
        if len(self._failures.replica_of(group, 0)) == 1:
            return next_rank
        by_rank = {m.spec.rank: m for m in processes}
        for process in processes:
            replica = self._failures.replica_of(group, process.spec.rank)
            free_ranks = [rank for rank in replica if rank not in by_rank]
            replica_processes = [by_rank[rank] for rank in replica if rank in by_rank]
            jobs = {self._jobs.get(m.spec.incarnation, ("", m))[0] for m in replica_processes}
            is_neighbour = (
                jobs == {request["job"]}
                if request["job"]
                else {m.spec.node for m in replica_processes} == {request["node"]}
            )
            if free_ranks and is_neighbour and all(m.state != "ended" for m in replica_processes):
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
