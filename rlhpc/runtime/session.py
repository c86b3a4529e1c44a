"""Session of a driver: starts and ends the ranks of a run, and handles their failures."""

from __future__ import annotations

import atexit
import collections
import contextlib
import logging
import operator
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhpc.runtime.allocation import steps_possible
from rlhpc.runtime.comm import context as contexts
from rlhpc.runtime.comm.payload import pickle_object
from rlhpc.runtime.comm.service import Service
from rlhpc.runtime.comm.zmq_sockets import choose
from rlhpc.runtime.energy import EnergyReport
from rlhpc.runtime.environment_archive import UnpackedEnvironment
from rlhpc.runtime.errors import PlacementError, RendezvousTimeout, RlhpcError, guard_handler, log_errors
from rlhpc.runtime.failure_detection import TICK_S, FailurePolicy, HeartbeatMonitor, group_by
from rlhpc.runtime.host import host_id, node_name
from rlhpc.runtime.launchers import USAGE, Launcher, RankProcess, Usage
from rlhpc.runtime.launchers.local import PRELOAD, ForkLauncher, ForkServerProcess
from rlhpc.runtime.launchers.srun import SrunLauncher
from rlhpc.runtime.launchers.srun_commands import node_commands, step_environment
from rlhpc.runtime.log_sizes import LogSizesFile, Positions
from rlhpc.runtime.membership import (
    Membership,
    RankTable,
    early_output_text,
    exit_failure,
    state_check,
)
from rlhpc.runtime.network import job_address
from rlhpc.runtime.os_resources import open_files_of_driver, raise_limit
from rlhpc.runtime.policies import SessionPhase, SessionPolicies
from rlhpc.runtime.registry import MEMBERS, RANKS, CurveKeys, GenerationFolder, RegistryWatch
from rlhpc.runtime.remote_errors import worker_failed
from rlhpc.runtime.rpc import RpcClient
from rlhpc.runtime.start_phases import phase_record
from rlhpc.runtime.worker_spec import EXIT, IDLE, RESUME, spec_of

if TYPE_CHECKING:
    from rlhpc.runtime.cluster import Cluster
    from rlhpc.runtime.placement import Placement

log = logging.getLogger(__name__)

_launcher_of, _group_of = operator.attrgetter("launcher"), operator.attrgetter("spec.group")
#: Record of a rank, method of a call, and the energy counters around the call.
EnergyAnswer = tuple[dict[str, Any], str, EnergyReport]
#: Maximum number of calls whose counters are kept until a step ends.
_MAX_ENERGY_REPORTS = 100_000
_SETTLE_S = 0.3
#: Seconds to wait for killed ranks to end.
_KILL_TIMEOUT_S = 5.0
#: Seconds between two checks of the main thread whether this process was asked to end.
_CHECK_S = 0.2
#: Minimum seconds between two writes of what the ranks use.
_USAGE_S = 10.0


class Session:
    """Session of a driver process, created by `start` or by the first launch.

    Args:
        registry_root: The run's registry folder on the shared filesystem; None uses the node's scratch, for scripts without a
            run folder.
        log_dir: Folder for the workers' stdout and stderr.
        preload: Modules that the fork server imports in addition to its default list, so that ranks need not import them.
        wait_deadline: Seconds after which a wait of any process fails.
        tcp_address: This host's address for processes on other hosts. The default in a Slurm job of several nodes is the
            address on the route to the other nodes. Otherwise it is None, and no TCP port is opened.
        interface: Network interface that determines the address on every node instead.
        check_stop: Raises if this process was asked to end. The main thread calls it in all waits while ranks start or
            recover, because there is nothing to save at these times.
        on_membership: Called with the events of ranks that join and leave (`Membership`).
        on_lost: Called with group, rank and reason if a rank is lost and its group continues without it.
        reports_calls: Whether ranks report their calls as phases of the start, until `end_start`.
        environment_archive: Archive of the Python environment, which the nodes unpack before the first ranks start
            (`environment_archive`); None starts ranks with the driver's environment.
    """

    _running_session: Session | None = None

    def __init__(
        self,
        registry_root: Path | None = None,
        log_dir: Path | None = None,
        preload: Sequence[str] = (),
        wait_deadline: float | None = None,
        tcp_address: str | None = None,
        interface: str | None = None,
        check_stop: Callable[[], None] = lambda: None,
        on_membership: Callable[[dict[str, Any]], None] = lambda event: None,
        on_lost: Callable[[str, int, str], None] = lambda group, rank, reason: None,
        reports_calls: bool = False,
        environment_archive: Path | None = None,
    ) -> None:
        steps = steps_possible()
        if tcp_address is None and steps:
            tcp_address = job_address(interface)
        self.tcp_address, self.interface = tcp_address, interface
        # if ranks are job steps, the fork server forks no ranks and only removes the folders of a killed driver
        server = ForkServerProcess.take(None if steps else preload)
        self.scratch = server.scratch
        self._check_stop, self._reports_calls = check_stop, reports_calls
        self._environment_archive = environment_archive
        self._unpacked_environment: UnpackedEnvironment | None = None
        self._pid = os.getpid()
        #: Number of steps that a user has asked to trace, since `TraceControl` has set it to 0.
        self.trace_request = 0
        root = registry_root or self.scratch.sockets / "registry"
        job = os.environ.get("SLURM_JOB_ID")
        restart = os.environ.get("SLURM_RESTART_COUNT", "0")
        self.registry = GenerationFolder.create_next(root, job, restart)
        curve_keys = CurveKeys.fresh()
        self.registry.save_keys(curve_keys)
        self.log_dir = log_dir or self.scratch.sockets / "logs"
        self.log_dir.mkdir(parents=True, exist_ok=True)
        self.ranks = RankTable(lambda processes: self.service.members_changed(self.service.epoch + 1, processes))
        self.failures, self._recovery = FailurePolicy(), 0
        self.membership = Membership(
            self.ranks, self.registry, self.failures, self.log_dir, bool(tcp_address), on_membership, on_lost
        )
        self.leases = HeartbeatMonitor(self.fail, lambda record: self.service.peers.has_ended(record), self.failures)
        self.service = Service(
            "driver", curve_keys, self.scratch, tcp_address,
            check=self.check, tick_s=TICK_S, on_tick=lambda _: self.leases.check_ranks(self.ranks.all_processes()),
            on_note=self._handle_note, on_join=self.membership.join,
            on_broken=lambda error: self.fail(RlhpcError(f"the driver cannot be reached any more: {error}")),
        )  # fmt: skip
        limit_s = contexts.default_wait_deadline_s() if wait_deadline is None else wait_deadline
        self.context = contexts.Context("driver", self.registry, self.service, self.check, limit_s)
        contexts.install(self.context)
        self._energy_reports = collections.deque[EnergyAnswer](maxlen=_MAX_ENERGY_REPORTS)
        self.rpc = RpcClient(
            self.context, self.fail, self.check, lambda: self._reports_calls, self._describe_phase,
            lambda record, method, report: self._energy_reports.append((record, method, report)),
        )  # fmt: skip
        items = (*PRELOAD, *preload)
        self._fork_launcher = ForkLauncher(server, self.log_dir, self, items)
        self._srun_launcher = SrunLauncher(self.log_dir, self.scratch, self, items) if steps else None
        self._has_new_phases = False
        self._record = {
            "group": "driver", "rank": 0, "pid": self._pid, "node": node_name(), "host": host_id(),
            "data": self.service.endpoint, "state": "running", "started": time.time(), "token": self.scratch.token,
        }  # fmt: skip
        self._published_rows: list[dict[str, Any]] = []
        self._published_usage: dict[str, Usage] = {}
        self._next_usage_at = 0.0
        self._registry_watch = RegistryWatch(
            self.registry, curve_keys, self.fail, self._publish, self._read_trace_request
        )
        self.registry.put(MEMBERS, "driver", self._record)
        self._log_sizes = LogSizesFile(self.log_dir, self._log_rows)
        atexit.register(self.stop)

    @classmethod
    def prewarm(cls, preload: Sequence[str] = ()) -> None:
        """Starts the next session's fork server early, so that its imports overlap with other work of this process."""
        if cls._running_session is None and not steps_possible():
            ForkServerProcess.prewarm(preload)

    @classmethod
    def start(cls, **options: Any) -> Session:
        """Starts this process's session; stops an earlier one first."""
        if cls._running_session is not None:
            cls._running_session.stop()
        cls._running_session = cls(**options)
        return cls._running_session

    @classmethod
    def running(cls) -> Session | None:
        """Returns the session of this process; None if this process is not the driver."""
        session = cls._running_session
        return session if session is not None and session._pid == os.getpid() else None

    @classmethod
    def current(cls) -> Session:
        """Returns the session of this process; starts one if the process has none."""
        return cls.running() or cls.start()

    @property
    def failure(self) -> RlhpcError | None:
        """First failure; None if nothing has failed, or if the session has recovered."""
        return self.failures.first_failure

    @property
    def processes(self) -> dict[str, RankProcess]:
        """Ranks by name."""
        return self.ranks.processes

    # -- reports of the launchers --------------------------------------------------------------------------------

    @guard_handler
    def record_start(self, process: RankProcess, pid: int) -> None:
        """Registers that a rank's process has started."""
        self.ranks.record_start(process, pid)

    @guard_handler
    def record_exit(self, process: RankProcess, status: int) -> None:
        """Registers that a rank's process has ended with this wait status."""
        if self.ranks.record_ends([process]):
            self.fail(exit_failure(process.spec, status, early_output_text(process)))

    def job_gone(self, job_id: str) -> None:
        """Records the end of a job from which ranks have joined, and the end of these ranks."""
        for joined_process in self.membership.ranks_of_job(job_id):
            self.membership.report_lost(joined_process, f"its job {job_id} has ended")
            joined_process.leave_reason = f"its job {job_id} has ended"
            self.record_exit(joined_process, 0)

    def record_ends(self, processes: Sequence[RankProcess]) -> list[RankProcess]:
        """Registers that the processes of all these ranks have ended; returns the ranks that ended unexpectedly."""
        return self.ranks.record_ends(processes)

    # -- notes from workers ---------------------------------------------------------------------------------------

    @guard_handler
    def _handle_note(self, rank_note: dict[str, Any]) -> None:
        process = self.ranks.find(rank_note["name"], rank_note["incarnation"])
        if process is None:
            return
        self.leases.record_note(process, rank_note["note"])
        process.usage = rank_note.get("usage", process.usage)
        if rank_note["note"] == "phase":
            clock_difference = time.time() - rank_note["phases"][-1][1]  # a rank sends a phase when the phase begins
            process.phases += [(phase, start_time + clock_difference) for phase, start_time in rank_note["phases"]]
            self._has_new_phases = True
        elif rank_note["note"] == "logs":
            stdout_position, err = rank_note["positions"]
            process.log_positions = (int(stdout_position), int(err))
        elif rank_note["note"] == "ready":
            self.ranks.record_arrival(process, rank_note["pid"], rank_note["record"])
        elif rank_note["note"] == "exit":
            process.leave_reason = rank_note.get("why", "")
            self.record_exit(process, rank_note["status"])
        elif rank_note["note"] == "failed":
            record = {"group": process.spec.group, "rank": process.spec.rank, "node": process.spec.node,
                      "pid": rank_note["pid"], "log_err": process.spec.log_err}  # fmt: skip
            self.fail(worker_failed(rank_note["error"], f"the constructor of {rank_note['name']}", record))

    def pop_energy(self) -> tuple[list[EnergyAnswer], set[tuple[str, int]], list[dict[str, Any]]]:
        """Returns the energy counters around the calls that ranks have answered since the last such call, group and rank of
        those that have a call in progress, and the records of all ranks.
        """
        answers = [self._energy_reports.popleft() for _ in range(len(self._energy_reports))]
        return answers, self.rpc.busy_ranks(), [process.record for process in self.ranks.all_processes()]

    # -- start phases -----------------------------------------------------------------------------------------------

    def end_start(self) -> None:
        """Ends the start of the run: ranks no longer report their calls as phases."""
        self._reports_calls = False

    def _publish(self) -> None:
        """Publishes the phases and the table of all ranks, if they have changed."""
        self._publish_phases()
        rows = [self._record, *(process.table_row() for process in self.ranks.all_processes())]
        if rows != self._published_rows:
            self.registry.put(RANKS, RANKS, {"ranks": rows})
            self._published_rows = rows
        self._publish_usage()

    def _publish_usage(self) -> None:
        """Publishes the ranks' usage, if it has changed, at most every `_USAGE_S` seconds."""
        if time.monotonic() < self._next_usage_at:
            return
        ready_processes = [process for process in self.ranks.all_processes() if process.state == "ready"]
        usage = {process.spec.name: process.usage for process in ready_processes if process.usage is not None}
        if usage != self._published_usage:
            self.registry.put(RANKS, USAGE, {"usage": usage})
            self._published_usage = usage
            self._next_usage_at = time.monotonic() + _USAGE_S

    def _log_rows(self) -> list[tuple[str, str, Positions]]:
        return [(process.spec.name, process.state, process.log_positions) for process in self.ranks.all_processes()]

    def _publish_phases(self) -> None:
        """Writes the phases of all ranks to the registry if a rank has started or has entered a phase."""
        if not self._has_new_phases:
            return
        self._has_new_phases = False
        try:
            self.registry.put(*phase_record(process.start_phases() for process in self.ranks.all_processes()))
        except (RlhpcError, OSError):
            self._has_new_phases = True
            raise

    def _read_trace_request(self) -> None:
        """Reads a request to trace steps, if a user has made one."""
        self.trace_request = self.registry.take_trace_request() or self.trace_request

    def _describe_phase(self, record: dict[str, Any]) -> str:
        process = self.ranks.find(f"{record['group']}-{record['rank']}", record["incarnation"])
        return "" if process is None else process.start_phases().describe(time.time())

    # -- failure --------------------------------------------------------------------------------------------------

    @guard_handler
    def fail(self, failure: RlhpcError) -> None:
        """Registers a failure.

        The first failure ends all ranks that cannot survive it; later failures are ignored. If the failure is the end of a
        rank and its group can continue without it, only registers the departure of this rank.
        """
        with self.ranks.condition:
            if self.failures.is_departure(failure, self.ranks.all_processes()):
                self.membership.register_departure(self.processes[f"{failure.group}-{failure.rank}"], failure, self.rpc)
                processes = group_by(self.ranks.all_processes(), _group_of)[failure.group]
                self.ranks.announce(self.service, [process for process in processes if process.state == "ended"])
                return
            if not self.failures.take(failure):
                log.debug("after the first failure: %s", failure)
                return
            ending_processes = [
                self.processes[name] for name in self.failures.names_to_end(failure, self.ranks.all_processes())
            ]
            self.ranks.mark_stopping(ending_processes)
        for launcher, processes in group_by(ending_processes, _launcher_of).items():
            with log_errors(f"ranks of {processes[0].spec.group} could not be asked to end"):
                launcher.end(processes)
            for delay_s in (launcher.grace_s, 2 * launcher.grace_s):  # again for late processes
                timer = threading.Timer(delay_s, self._kill, [launcher, processes])
                timer.daemon = True
                timer.start()
        self.rpc.interrupt()

    def _kill(self, launcher: Launcher, processes: Sequence[RankProcess]) -> None:
        if self.failure is not None:
            with log_errors(f"ranks of {processes[0].spec.group} could not be killed"):
                launcher.kill(processes)

    def recover(self, patience_s: float = 20.0) -> dict[str, list[int]]:
        """Recovers from the failure of a restartable group or of an independent rank.

        Waits for the failed ranks to end, and aborts the calls of the other ranks. These abort their current call as soon as
        they wait for another rank, and drop the messages that they have not received. Call `WorkerGroup.relaunch` afterwards.

        Returns:
            The ranks that have ended, by group.

        Raises:
            RlhpcError: The failure itself, if recovery is not possible.
        """
        failure = self.failure
        if failure is None or not self.failures.names_to_keep(failure, self.ranks.all_processes()):
            raise failure or RlhpcError("nothing has failed")
        time.sleep(_SETTLE_S)  # ranks that died at the same time are reported one by one
        self.ranks.await_settled(patience_s)  # a rank may be restarting or joining
        with self.ranks.condition:
            if not self.failures.recoverable(self.ranks.all_processes()):
                raise failure
            failed_groups, survivors = (
                [m for m in self.ranks.all_processes() if m.state == process_state]
                for process_state in ("ended", "ready")
            )
            self.failures.forgive()
        self._recovery += 1
        self.ranks.announce(self.service, failed_groups)
        for name in {m.spec.group for m in self.ranks.all_processes()}:
            self.rpc.forget(name)
        for process in failed_groups:
            self.registry.remove(MEMBERS, process.spec.name)
        try:
            for process in survivors:
                self.service.peers.post(choose(process.record["data"]), b"ABORT", [b"%d" % self._recovery])
            for command in (IDLE, RESUME):  # once all ranks have answered IDLE, no rank sends messages any more
                groups = group_by(survivors, _group_of).values()
                for call_handle in [
                    self.rpc.call([process.record for process in processes], command, (self._recovery,), {})
                    for processes in groups
                ]:
                    call_handle.wait(patience_s)
        except (RlhpcError, OSError) as error:
            log.warning("the ranks of %s are not free again: %s", {m.spec.group for m in survivors}, error)
            self.failures.enter(SessionPhase.CLOSING)
            if self.failure is None:
                self.fail(failure)
            self.check()
            raise failure from error
        return {
            name: sorted(process.spec.rank for process in processes)
            for name, processes in sorted(group_by(failed_groups, _group_of).items())
        }

    # -- phases ---------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def training(self, policies: SessionPolicies) -> Iterator[None]:
        """Applies the policies and lets ranks join elastic groups during the block; enters the phase CLOSING afterwards."""
        self.failures.enter(SessionPhase.RUNNING, policies)
        try:
            yield
        finally:
            self.failures.enter(SessionPhase.CLOSING)

    @contextlib.contextmanager
    def recovering(self) -> Iterator[None]:
        """Ends the waits of the main thread during the block if a request to stop arrives.

        Such a stop loses only the unsaved steps, which the failure has lost anyway.
        """
        self.failures.enter(SessionPhase.RECOVERING)
        try:
            yield
        finally:
            self.failures.enter(SessionPhase.RUNNING)

    def _raise_if_stopped(self) -> None:
        if self.failures.phase in (SessionPhase.STARTING, SessionPhase.RECOVERING):
            self._check_stop()

    def check(self) -> None:
        """Checks whether the run has failed or the session has ended.

        Raises:
            RlhpcError: The first failure, raised after the ranks have ended and their shared memory has been freed.
            ChannelError: The session has ended.
        """
        if self.service.stopped:
            self.service.check()
        if threading.current_thread() is threading.main_thread():
            self._raise_if_stopped()
        failure = self.failure
        if failure is None:
            return
        self.ranks.await_settled()
        if not self.ranks.alive_processes():
            self.scratch.free_memory()  # no worker is left that could read payloads
        raise failure

    # -- groups ---------------------------------------------------------------------------------------------------

    def launch(
        self,
        name: str,
        payload: tuple[type, tuple[Any, ...], dict[str, Any]],
        placements: Sequence[Placement],
        cluster: Cluster,
        env_vars: dict[str, str],
        fork: bool,
        command_prefix: Sequence[str] = (),
        preload: Sequence[str] = (),
    ) -> list[RankProcess]:
        """Starts a group's ranks and returns them; see `WorkerGroup.launch`, and `Worker.preloads` for `preload`.

        Raises:
            PlacementError: A group of this name is running.
            ConfigError: The limit of open files is too low for so many ranks.
        """
        with self.ranks.condition:
            if self.failure is not None:
                self.ranks.await_settled()
                self.failures.archive_failure()
            if self.ranks.alive_processes(name):
                raise PlacementError(f"a group named {name!r} is running already: give launch() another name")
            self.ranks.forget_ended(name)
        num_ranks = len(placements) + len(self.ranks.alive_processes())
        raise_limit(open_files_of_driver(num_ranks), f"the driver of {num_ranks} ranks")
        class_pickle, incarnation = pickle_object(payload), f"{time.time_ns():x}"
        launcher = (
            self._srun_launcher
            if self._srun_launcher is not None and cluster.source == "slurm"
            else self._fork_launcher
        )
        # the fork server imports once, so only ranks in interpreters of their own need the unpacked environment
        is_forked = launcher is self._fork_launcher and fork and not command_prefix
        interpreter = "" if is_forked else self._find_unpacked_python(cluster)
        ranks_by_node = Counter(p.node_rank for p in placements) + Counter(
            m.spec.node_rank for m in self.ranks.alive_processes()
        )
        started_processes = []
        for placement in placements:
            worker_spec = spec_of(
                name, placement, len(placements), cluster, env_vars, ranks_by_node[placement.node_rank], self.log_dir,
                default_interpreter=interpreter, registry=str(self.registry.root), token=self.scratch.token,
                body=class_pickle, incarnation=incarnation, driver=self.service.endpoint,
                wait_deadline=self.context.wait_deadline, tcp_address=self.tcp_address, interface=self.interface,
                command_prefix=list(command_prefix), in_step=launcher is self._srun_launcher, preload=list(preload),
            )  # fmt: skip
            launcher.prepare(worker_spec, cluster.nodes[placement.node_rank], fork)
            started_processes.append(RankProcess(worker_spec, launcher))
        self.ranks.add(started_processes)
        self._has_new_phases = True
        self.registry.put("groups", name, {"world_size": len(placements), "class": payload[0].__qualname__})
        launcher.start(started_processes, cluster)
        return started_processes

    def _find_unpacked_python(self, cluster: Cluster) -> str:
        """Returns the interpreter of the environment that the nodes have unpacked; "" if there is no archive.

        The first call lets them unpack it, and waits for them.
        """
        if self._environment_archive is None:
            return ""
        if self._unpacked_environment is None:
            by_step = self._srun_launcher is not None and cluster.source == "slurm"
            self._unpacked_environment = UnpackedEnvironment(
                self._environment_archive,
                node_commands(cluster) if by_step else [([node_name()], [])],
                self.check,
                step_environment(os.environ) if by_step else dict(os.environ),
            )
        return self._unpacked_environment.python

    def relaunch(self, name: str, cluster: Cluster, patience_s: float = 0.0) -> list[RankProcess]:
        """Restarts the ended ranks of a group with the same placement, and returns them; see `WorkerGroup.relaunch`.

        If the earlier process of a rank still runs after `patience_s` seconds, kills this process and does not restart the
        rank, because both processes would share the accelerator.
        """
        ended_processes = self.membership.restartable(name)
        running_processes = self.ranks.await_exit(ended_processes, patience_s)
        for launcher, processes in group_by(running_processes, _launcher_of).items():
            launcher.kill(processes)
        incarnation = f"{time.time_ns():x}"
        restarted_processes = [
            RankProcess(replace(m.spec, incarnation=incarnation), m.launcher)
            for m in ended_processes
            if m not in running_processes
        ]
        self.ranks.add(restarted_processes)
        if restarted_processes:
            restarted_processes[0].launcher.start(restarted_processes, cluster)
        return restarted_processes

    def await_arrivals(
        self, name: str, started_processes: Sequence[RankProcess], timeout: float
    ) -> list[dict[str, Any]]:
        """Waits until all given ranks are ready; returns their records in the same order. See `WorkerGroup.launch`."""
        all_ready, deadline = state_check("ready", started_processes), time.monotonic() + timeout
        with self.ranks.condition:
            while self.failure is None and not all_ready() and (remaining_s := deadline - time.monotonic()) > 0:
                if self.failures.past_failure is not None and any(
                    process.state == "ended" for process in started_processes
                ):
                    break  # the failure happened before another group was launched
                self.ranks.condition.wait(min(remaining_s, _CHECK_S))
                self._raise_if_stopped()
        if (
            self.failures.past_failure is not None
            and self.failure is None
            and any(process.state == "ended" for process in started_processes)
        ):
            self.fail(self.failures.past_failure)
        self.check()
        missing_processes = [process for process in started_processes if process.state != "ready"]
        if missing_processes:
            lines = [
                f"  {process.spec.name} on {process.spec.node} (pid {process.pid or '?'}, log {process.spec.log_err})"
                f" {process.start_phases().describe(time.time())}"
                for process in missing_processes
            ]
            lines += [f"  {line}" for line in missing_processes[0].launcher.arrival_report(missing_processes)]
            num_missing = len(missing_processes)
            message = f"{num_missing} of {len(started_processes)} ranks of {name!r} did not arrive in {timeout:.0f} s:"
            self.fail(RendezvousTimeout("\n".join([message, *lines])))
            self.check()
        return [process.record for process in started_processes]

    def shutdown_group(self, name: str, started_processes: Sequence[RankProcess], grace: float) -> None:
        """Ends ranks of a group: asks them to stop, waits `grace` seconds, then kills them.

        Does not wait for ranks that are still starting.
        """
        with self.ranks.condition:
            group_processes = set(started_processes)
            processes = [m for m in self.ranks.alive_processes(name) if m in group_processes]
            alive_records = [m.record for m in processes if m.state == "ready"]
            self.ranks.mark_stopping(processes)
        if alive_records and self.failure is None:
            self.rpc.call(alive_records, EXIT, (), {})
        if processes:
            launcher = processes[0].launcher
            launcher.end([m for m in processes if not m.record])
            for act, patience_s in ((launcher.end, launcher.grace_s), (launcher.kill, _KILL_TIMEOUT_S)):
                if self.ranks.await_ended(processes, grace):
                    break
                act(processes)
                grace = patience_s
            self.ranks.await_ended(processes, grace)
        self.rpc.forget(name)
        if self._registry_watch.owns_registry():
            self.registry.remove("groups", name)
            for process in processes:
                self.registry.remove(MEMBERS, process.spec.name)
        if Session._running_session is self:
            self.ranks.announce(self.service, processes)

    def stop(self) -> None:
        """Ends all groups and the session, and removes the session's shared memory and scratch folders."""
        if self._pid != os.getpid() or Session._running_session is not self:
            return
        Session._running_session = None
        self._registry_watch.stop()
        if self._registry_watch.owns_registry():
            with contextlib.suppress(RlhpcError, OSError):  # only the report lacks the last phases then
                self._publish_phases()
            with contextlib.suppress(
                OSError
            ):  # from now on the ranks' own records apply, which this removes one by one
                self.registry.remove(RANKS, RANKS)
                self.registry.remove(RANKS, USAGE)
        with self.ranks.condition:
            starting_processes = [m for m in self.ranks.alive_processes() if m.state == "starting"]
            if self._fork_launcher.cut_short():
                self.ranks.mark_stopping(starting_processes)
        with contextlib.suppress(Exception):
            for name in {m.spec.group for m in self.ranks.alive_processes()}:
                self.shutdown_group(name, self.ranks.alive_processes(name), 2.0)
        for launcher in (self._srun_launcher, self._fork_launcher):
            if launcher is not None:
                launcher.close(clears_folders=self.failure is not None and bool(self.tcp_address))
        if self._unpacked_environment is not None:
            self._unpacked_environment.close()
        self.membership.close()
        self._log_sizes.stop()
        self.rpc.close()
        self.service.stop()
        contexts.install(None)
        self.scratch.remove()
        self.scratch.release()
        if self._registry_watch.owns_registry():
            (self.registry.root / "keys.json").unlink(missing_ok=True)
        atexit.unregister(self.stop)


def current_context() -> contexts.Context:
    """Returns this process's context; a process that belongs to no run becomes the driver of a new run."""
    return contexts.installed_context() or Session.start().context
