"""Session of a driver: starts and ends the ranks of a run, and handles their failures."""

from __future__ import annotations

import atexit
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
from rlhpc.runtime.comm.payload import pickled
from rlhpc.runtime.comm.service import Service
from rlhpc.runtime.comm.zmq_sockets import choose
from rlhpc.runtime.errors import PlacementError, RendezvousTimeout, RlhpcError
from rlhpc.runtime.failure_detection import TICK_S, FailurePolicy, HeartbeatMonitor, group_by
from rlhpc.runtime.host import host_id, node_name
from rlhpc.runtime.launchers import Launcher, Member
from rlhpc.runtime.launchers.local import ForkLauncher, ForkServerProcess
from rlhpc.runtime.launchers.srun import SrunLauncher
from rlhpc.runtime.membership import (
    Membership,
    RankTable,
    early_output_text,
    exit_failure,
    state_check,
)
from rlhpc.runtime.network import job_address
from rlhpc.runtime.policies import SessionPhase, SessionPolicies
from rlhpc.runtime.registry import MEMBERS, CurveKeys, GenerationFolder, RegistryWatch
from rlhpc.runtime.reporting import guarded, logged
from rlhpc.runtime.rpc import RpcClient, worker_failed
from rlhpc.runtime.worker_spec import EXIT, IDLE, RESUME, spec_of

if TYPE_CHECKING:
    from rlhpc.runtime.cluster import Cluster
    from rlhpc.runtime.placement import Placement

log = logging.getLogger(__name__)

_launcher_of, _group_of = operator.attrgetter("launcher"), operator.attrgetter("spec.group")
_SETTLE_S = 0.3
#: Seconds to wait for killed ranks to end.
_KILL_TIMEOUT_S = 5.0
#: Seconds between two checks of the main thread whether this process was asked to end.
_CHECK_S = 0.2


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
    """

    _running: Session | None = None

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
    ) -> None:
        steps = steps_possible()
        if tcp_address is None and steps:
            tcp_address = job_address(interface)
        self.tcp_address, self.interface = tcp_address, interface
        # if ranks are job steps, the fork server forks no ranks and only removes the folders of a killed driver
        server = ForkServerProcess.take(None if steps else preload)
        self.scratch = server.scratch
        self._check_stop = check_stop
        self._pid = os.getpid()
        root = registry_root or self.scratch.sockets / "registry"
        job = os.environ.get("SLURM_JOB_ID")
        restart = os.environ.get("SLURM_RESTART_COUNT", "0")
        generation = (
            GenerationFolder.job_generation(root, job, restart) if job else GenerationFolder.next_local_generation(root)
        )
        self.registry = GenerationFolder.create(root, generation)
        keys = CurveKeys.fresh()
        self.registry.save_keys(keys)
        self.log_dir = log_dir or self.scratch.sockets / "logs"
        self.log_dir.mkdir(parents=True, exist_ok=True)
        self.ranks = RankTable(lambda processes: self.service.members_changed(self.service.epoch + 1, processes))
        self.failures, self._recovery = FailurePolicy(), 0
        self.membership = Membership(
            self.ranks, self.registry, self.failures, self.log_dir, bool(tcp_address), on_membership
        )
        self.leases = HeartbeatMonitor(self.fail, lambda record: self.service.peers.knows_ended(record), self.failures)
        self.service = Service(
            "driver", keys, self.scratch, tcp_address,
            check=self.check, tick_s=TICK_S, on_tick=lambda _: self.leases.check_ranks(self.ranks.all()),
            on_note=self._handle_note, on_join=self.membership.join,
            on_broken=lambda error: self.fail(RlhpcError(f"the driver cannot be reached any more: {error}")),
        )  # fmt: skip
        limit_s = contexts.default_wait_deadline_s() if wait_deadline is None else wait_deadline
        self.context = contexts.Context("driver", self.registry, self.service, self.check, limit_s)
        contexts.install(self.context)
        self.rpc = RpcClient(self.context, self.fail, self.check)
        self._fork_launcher = ForkLauncher(server, self.log_dir, self)
        self._srun_launcher = SrunLauncher(self.log_dir, self.scratch, self) if steps else None
        self._registry_watch = RegistryWatch(self.registry, keys, self.fail)
        self.registry.put(
            MEMBERS, "driver", {"group": "driver", "rank": 0, "pid": self._pid, "node": node_name(),
                                  "host": host_id(), "data": self.service.endpoint, "state": "running",
                                  "started": time.time(), "token": self.scratch.token}
        )  # fmt: skip
        atexit.register(self.stop)

    @classmethod
    def prewarm(cls, preload: Sequence[str] = ()) -> None:
        """Starts the next session's fork server early, so that its imports overlap with other work of this process."""
        if cls._running is None and not steps_possible():
            ForkServerProcess.prewarm(preload)

    @classmethod
    def start(cls, **options: Any) -> Session:
        """Starts this process's session; stops an earlier one first."""
        if cls._running is not None:
            cls._running.stop()
        cls._running = cls(**options)
        return cls._running

    @classmethod
    def running(cls) -> Session | None:
        """Returns the session of this process; None if this process is no driver."""
        session = cls._running
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
    def members(self) -> dict[str, Member]:
        """Ranks by name."""
        return self.ranks.members

    # -- reports of the launchers --------------------------------------------------------------------------------

    @guarded
    def started(self, member: Member, pid: int) -> None:
        """Registers that a rank's process has started."""
        self.ranks.started(member, pid)

    @guarded
    def exited(self, member: Member, status: int) -> None:
        """Registers that a rank's process has ended with this wait status."""
        if self.ranks.processes_ended([member]):
            self.fail(exit_failure(member.spec, status, early_output_text(member)))

    def job_gone(self, job: str) -> None:
        """Records the end of a job from which ranks have joined, and the end of these ranks."""
        for joined_member in self.membership.ranks_of_job(job):
            joined_member.leave_reason = f"its job {job} has ended"
            self.exited(joined_member, 0)

    def all_ended(self, members: Sequence[Member]) -> list[Member]:
        """Registers that the processes of all these ranks have ended; returns the ranks that ended unexpectedly."""
        return self.ranks.processes_ended(members)

    # -- notes from workers ---------------------------------------------------------------------------------------

    @guarded
    def _handle_note(self, note: dict[str, Any]) -> None:
        member = self.ranks.find(note["name"], note["incarnation"])
        if member is None:
            return
        self.leases.record_note(member, note["note"])
        if note["note"] == "ready":
            self.ranks.arrived(member, note["pid"], note["record"])
        elif note["note"] == "exit":
            member.leave_reason = note.get("why", "")
            self.exited(member, note["status"])
        elif note["note"] == "failed":
            record = {"group": member.spec.group, "rank": member.spec.rank, "node": member.spec.node,
                      "pid": note["pid"], "log_err": member.spec.log_err}  # fmt: skip
            self.fail(worker_failed(note["error"], f"the constructor of {note['name']}", record))

    # -- failure --------------------------------------------------------------------------------------------------

    @guarded
    def fail(self, failure: RlhpcError) -> None:
        """Registers a failure.

        The first failure ends all ranks that cannot survive it; later failures are ignored. If the failure is the end of a
        rank and its group can continue without it, only registers the departure of this rank.
        """
        with self.ranks.changed:
            if self.failures.is_departure(failure, self.ranks.all()):
                self.membership.register_departure(self.members[f"{failure.group}-{failure.rank}"], failure, self.rpc)
                members = group_by(self.ranks.all(), _group_of)[failure.group]
                self.ranks.announce(self.service, [member for member in members if member.state == "ended"])
                return
            if not self.failures.take(failure):
                log.debug("after the first failure: %s", failure)
                return
            doomed = [self.members[name] for name in self.failures.doomed(failure, self.ranks.all())]
            self.ranks.stopping(doomed)
        for launcher, members in group_by(doomed, _launcher_of).items():
            with logged(f"ranks of {members[0].spec.group} could not be asked to end"):
                launcher.end(members)
            for delay in (launcher.grace_s, 2 * launcher.grace_s):  # again for late processes
                timer = threading.Timer(delay, self._kill, [launcher, members])
                timer.daemon = True
                timer.start()
        self.rpc.interrupt()

    def _kill(self, launcher: Launcher, members: Sequence[Member]) -> None:
        if self.failure is not None:
            with logged(f"ranks of {members[0].spec.group} could not be killed"):
                launcher.kill(members)

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
        if failure is None or not self.failures.spared(failure, self.ranks.all()):
            raise failure or RlhpcError("nothing has failed")
        time.sleep(_SETTLE_S)  # ranks that died at the same time are reported one by one
        self.ranks.settle(patience_s)  # a rank may be restarting or joining
        with self.ranks.changed:
            if not self.failures.recoverable(self.ranks.all()):
                raise failure
            failed, survivors = ([m for m in self.ranks.all() if m.state == state] for state in ("ended", "ready"))
            self.failures.forgive()
        self._recovery += 1
        self.ranks.announce(self.service, failed)
        for name in {m.spec.group for m in self.ranks.all()}:
            self.rpc.forget(name)
        for member in failed:
            self.registry.remove(MEMBERS, member.spec.name)
        try:
            for member in survivors:
                self.service.peers.post(choose(member.record["data"]), b"ABORT", [b"%d" % self._recovery])
            for command in (IDLE, RESUME):  # once all ranks have answered IDLE, no rank sends messages any more
                groups = group_by(survivors, _group_of).values()
                for handle in [
                    self.rpc.call([member.record for member in members], command, (self._recovery,), {})
                    for members in groups
                ]:
                    handle.wait(patience_s)
        except (RlhpcError, OSError) as error:
            log.warning("the ranks of %s are not free again: %s", {m.spec.group for m in survivors}, error)
            self.failures.enter(SessionPhase.CLOSING)
            if self.failure is None:
                self.fail(failure)
            self.check()
            raise failure from error
        return {
            name: sorted(member.spec.rank for member in members)
            for name, members in sorted(group_by(failed, _group_of).items())
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
        """Lets a request to stop end the waits of the main thread during the block.

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
        self.ranks.settle()
        if not self.ranks.alive():
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
    ) -> list[Member]:
        """Starts a group's ranks and returns them; see `WorkerGroup.launch`."""
        with self.ranks.changed:
            if self.failure is not None:
                self.ranks.settle()
                self.failures.archive_failure()
            if self.ranks.alive(name):
                raise PlacementError(f"a group named {name!r} is running already: give launch() another name")
            self.ranks.forget_ended(name)
        class_pickle, incarnation = pickled(payload), f"{time.time_ns():x}"
        launcher = (
            self._srun_launcher
            if self._srun_launcher is not None and cluster.source == "slurm"
            else self._fork_launcher
        )
        sharing = Counter(p.node_rank for p in placements) + Counter(m.spec.node_rank for m in self.ranks.alive())
        started = []
        for placement in placements:
            spec = spec_of(
                name, placement, len(placements), cluster, env_vars, sharing[placement.node_rank], self.log_dir,
                registry=str(self.registry.root), token=self.scratch.token, body=class_pickle, incarnation=incarnation,
                driver=self.service.endpoint, wait_deadline=self.context.wait_deadline, tcp_address=self.tcp_address,
                interface=self.interface,
            )  # fmt: skip
            launcher.prepare(spec, cluster.nodes[placement.node_rank], fork)
            started.append(Member(spec, launcher))
        self.ranks.add(started)
        self.registry.put("groups", name, {"world_size": len(placements), "class": payload[0].__qualname__})
        launcher.start(started, cluster)
        return started

    def relaunch(self, name: str, cluster: Cluster, patience_s: float = 0.0) -> list[Member]:
        """Restarts the ended ranks of a group with the same placement, and returns them; see `WorkerGroup.relaunch`.

        If the earlier process of a rank still runs after `patience_s` seconds, kills this process and does not restart the
        rank, because both processes would share the accelerator.
        """
        ended_members = self.membership.startable(name)
        running_members = self.ranks.await_exit(ended_members, patience_s)
        for launcher, members in group_by(running_members, _launcher_of).items():
            launcher.kill(members)
        incarnation = f"{time.time_ns():x}"
        started = [
            Member(replace(m.spec, incarnation=incarnation), m.launcher)
            for m in ended_members
            if m not in running_members
        ]
        self.ranks.add(started)
        if started:
            started[0].launcher.start(started, cluster)
        return started

    def arrived(self, name: str, started: Sequence[Member], timeout: float) -> list[dict[str, Any]]:
        """Waits until all given ranks are ready; returns their records in the same order. See `WorkerGroup.launch`."""
        all_ready, deadline = state_check("ready", started), time.monotonic() + timeout
        with self.ranks.changed:
            while self.failure is None and not all_ready() and (remaining_s := deadline - time.monotonic()) > 0:
                if self.failures.past_failure is not None and any(member.state == "ended" for member in started):
                    break  # the failure happened before another group was launched
                self.ranks.changed.wait(min(remaining_s, _CHECK_S))
                self._raise_if_stopped()
        if (
            self.failures.past_failure is not None
            and self.failure is None
            and any(member.state == "ended" for member in started)
        ):
            self.fail(self.failures.past_failure)
        self.check()
        missing_members = [member for member in started if member.state != "ready"]
        if missing_members:
            lines = [
                f"  {member.spec.name} on {member.spec.node} (pid {member.pid or '?'}, log {member.spec.log_err})"
                for member in missing_members
            ]
            lines += [f"  {line}" for line in missing_members[0].launcher.arrival_report(missing_members)]
            message = f"{len(missing_members)} of {len(started)} ranks of {name!r} did not arrive in {timeout:.0f} s:"
            self.fail(RendezvousTimeout("\n".join([message, *lines])))
            self.check()
        return [member.record for member in started]

    def shutdown_group(self, name: str, started: Sequence[Member], grace: float) -> None:
        """Ends ranks of a group: asks them to stop, waits `grace` seconds, then kills them.

        Does not wait for ranks that are still starting.
        """
        with self.ranks.changed:
            group_members = set(started)
            members = [m for m in self.ranks.alive(name) if m in group_members]
            alive_records = [m.record for m in members if m.state == "ready"]
            self.ranks.stopping(members)
        if alive_records and self.failure is None:
            self.rpc.call(alive_records, EXIT, (), {})
        if members:
            launcher = members[0].launcher
            launcher.end([m for m in members if not m.record])
            for act, patience in ((launcher.end, launcher.grace_s), (launcher.kill, _KILL_TIMEOUT_S)):
                if self.ranks.await_ended(members, grace):
                    break
                act(members)
                grace = patience
            self.ranks.await_ended(members, grace)
        self.rpc.forget(name)
        if self._registry_watch.owns_registry():
            self.registry.remove("groups", name)
            for member in members:
                self.registry.remove(MEMBERS, member.spec.name)
        if Session._running is self:
            self.ranks.announce(self.service, members)

    def stop(self) -> None:
        """Ends all groups and the session, and removes the session's shared memory and scratch folders."""
        if self._pid != os.getpid() or Session._running is not self:
            return
        Session._running = None
        self._registry_watch.stop()
        with self.ranks.changed:
            starting_members = [m for m in self.ranks.alive() if m.state == "starting"]
            if self._fork_launcher.cut_short():
                self.ranks.stopping(starting_members)
        with contextlib.suppress(Exception):
            for name in {m.spec.group for m in self.ranks.alive()}:
                self.shutdown_group(name, self.ranks.alive(name), 2.0)
        for launcher in (self._srun_launcher, self._fork_launcher):
            if launcher is not None:
                launcher.close(clear=self.failure is not None and bool(self.tcp_address))
        self.membership.close()
        self.rpc.close()
        self.service.stop()
        contexts.install(None)
        self.scratch.remove()
        self.scratch.release()
        if self._registry_watch.owns_registry():
            (self.registry.root / "keys.json").unlink(missing_ok=True)
        atexit.unregister(self.stop)


def here() -> contexts.Context:
    """Returns this process's context; a process that belongs to no run becomes the driver of a new run."""
    return contexts.installed() or Session.start().context
