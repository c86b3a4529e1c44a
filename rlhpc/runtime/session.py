"""Session: the driver's side of a run. It owns the generation, the fork server, the workers' lives and the first failure."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhpc.runtime import context as contexts
from rlhpc.runtime import wire
from rlhpc.runtime.comm.service import Service
from rlhpc.runtime.comm.sockets import choose
from rlhpc.runtime.device import VIRTUAL
from rlhpc.runtime.errors import (
    PlacementError,
    RendezvousTimeout,
    RlhpcError,
    StepFailed,
    SubmitError,
    WorkerFailed,
)
from rlhpc.runtime.forking import ForkServerProcess
from rlhpc.runtime.import_paths import import_paths
from rlhpc.runtime.leases import TICK_S, Leases
from rlhpc.runtime.members import Member, all_in, class_body, death, tail
from rlhpc.runtime.registry import Keys, Registry
from rlhpc.runtime.rpc import RpcClient, worker_failed
from rlhpc.runtime.scratch import host_id
from rlhpc.runtime.spec import WorkerSpec
from rlhpc.runtime.steps import JobStep, clear_nodes, own_address, start_steps, steps_possible
from rlhpc.runtime.watch import RegistryWatch

if TYPE_CHECKING:
    from rlhpc.runtime.cluster import Cluster
    from rlhpc.runtime.placement import Placement

log = logging.getLogger(__name__)

#: How long a step that srun was told to end may take before the controller is asked; and all of it before we go on without.
_STEP_GRACE_S = 5.0
_STEP_LIMIT_S = 15.0
_SETTLE_S = 0.3
#: A wait of the main thread looks so often whether this process was asked to end.
_LOOK_S = 0.2


class Session:
    """One per driver process; made by `start` or, lazily, by the first launch.

    Args:
        registry_root: The run's registry folder on the shared filesystem; None keeps it in the node's scratch, for scripts
            that have no run folder.
        log_dir: Where the workers' stdout and stderr go.
        preload: Modules that the fork server imports besides torch, so that ranks start with them.
        wait_deadline: Seconds after which any wait of any process gives up.
        tcp_address: This host's address, where processes on other hosts take part. By default, in a Slurm job of several
            nodes, the one on the route to them; with None elsewhere no TCP port is opened at all.
        interface: Network interface to take that address from instead, on every node.
    """

    _running: Session | None = None
    _prewarmed: ForkServerProcess | None = None

    def __init__(
        self,
        registry_root: Path | None = None,
        log_dir: Path | None = None,
        preload: Sequence[str] = (),
        wait_deadline: float | None = None,
        tcp_address: str | None = None,
        interface: str | None = None,
    ) -> None:
        self.steps = steps_possible()
        if tcp_address is None and self.steps:
            tcp_address = own_address(interface)
        self.tcp_address, self.interface = tcp_address, interface
        # where ranks are job steps the fork server only clears up behind a driver that was killed
        server, Session._prewarmed = Session._prewarmed or ForkServerProcess(None if self.steps else preload), None
        self._fork_server = server
        self.scratch, self._server, self._control = server.scratch, server.process, server.control
        #: Of the fork server: it imports, it starts ranks, it has ended.
        self._server_state = "importing"
        #: Called by all waits of this process; raises where somebody has asked it to end and there is nothing to save.
        self.interrupted: Callable[[], None] = lambda: None
        self._pid = os.getpid()
        root = registry_root or self.scratch.sockets / "registry"
        job = os.environ.get("SLURM_JOB_ID")
        restart = os.environ.get("SLURM_RESTART_COUNT", "0")
        generation = Registry.job_generation(root, job, restart) if job else Registry.next_local_generation(root)
        self.registry = Registry.create(root, generation)
        keys = Keys.fresh()
        self.registry.save_keys(keys)
        self.log_dir = log_dir or self.scratch.sockets / "logs"
        self.log_dir.mkdir(parents=True, exist_ok=True)
        self.members: dict[str, Member] = {}
        self.failure: RlhpcError | None = None
        #: The failure after which the session went on.
        self._past: RlhpcError | None = None
        self.leases = Leases(self.fail)
        #: Groups whose failure leaves the others alive, see `recover`.
        self.expendable: frozenset[str] = frozenset()
        #: Those among them whose ranks do not need one another: one that dies leaves the rest of its group alive, too.
        self.independent: frozenset[str] = frozenset()
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self.service = Service(
            "driver", keys, self.scratch, tcp_address,
            check=self.check, tick_s=TICK_S, on_tick=lambda _: self.leases.look(list(self.members.values())),
            on_note=self._note,
            on_broken=lambda error: self.fail(RlhpcError(f"the driver cannot be reached any more: {error}")),
        )  # fmt: skip
        self.context = contexts.Context("driver", self.registry, self.service, check=self.check)
        if wait_deadline is not None:
            self.context.wait_deadline = wait_deadline
        contexts.install(self.context)
        self.rpc = RpcClient(self.context, self.fail, self.check)
        self._control_lock = threading.Lock()
        self._monitor = threading.Thread(target=self._watch, name="rlhpc-monitor", daemon=True)
        self._monitor.start()
        self._registry_watch = RegistryWatch(self.registry, keys, self.fail)
        self.registry.put(
            "members", "driver", {"group": "driver", "rank": 0, "pid": self._pid, "node": os.uname().nodename,
                                  "host": host_id(), "data": self.service.endpoint, "state": "running",
                                  "started": time.time(), "token": self.scratch.token}
        )  # fmt: skip
        atexit.register(self.stop)

    @classmethod
    def prewarm(cls, preload: Sequence[str] = ()) -> None:
        """Starts the next session's fork server already, so that it imports while this process does other things."""
        if cls._running is None and cls._prewarmed is None and not steps_possible():
            cls._prewarmed = ForkServerProcess(preload)
            atexit.unregister(cls._discard)
            atexit.register(cls._discard, os.getpid())

    @classmethod
    def _discard(cls, owner: int) -> None:
        """At the end of a process that has prewarmed and started no session."""
        if cls._prewarmed is not None and owner == os.getpid():
            cls._prewarmed.discard()
            cls._prewarmed = None

    @classmethod
    def start(cls, **options: Any) -> Session:
        """Starts this process's session; an earlier one is stopped first."""
        if cls._running is not None:
            cls._running.stop()
        cls._running = cls(**options)
        return cls._running

    @classmethod
    def running(cls) -> Session | None:
        """The session of this process, if it is a driver."""
        running = cls._running
        return running if running is not None and running._pid == os.getpid() else None

    @classmethod
    def current(cls) -> Session:
        """The session of this process; starts one in a process that has none."""
        return cls.running() or cls.start()

    # -- what the fork server reports -----------------------------------------------------------------------------

    def _tell(self, **message: Any) -> None:
        with self._control_lock, contextlib.suppress(OSError):
            wire.send(self._control, message)

    def _watch(self) -> None:
        """The monitor thread: what the fork server reports."""
        while (event := wire.receive(self._control)) is not None:
            if event["event"] == "ready":
                self._server_state = "serving"
                continue
            member = self.members.get(event["name"])
            if member is None:
                continue
            if event["event"] == "started":
                with self._changed:
                    member.pid = event["pid"]
                    self._changed.notify_all()
            elif event["event"] == "refused":
                self.fail(SubmitError(f"cannot start {event['name']} on {member.spec.node}: {event['error']}"))
            elif event["event"] == "exit":
                self._exited(member, event["status"])
        with self._changed:
            started = self._server_state == "serving"
            self._server_state = "ended"
            lost = [m for m in self.members.values() if m.step is None and m.state in ("starting", "ready")]
            for member in self.members.values():
                member.state = "ended"
            self._changed.notify_all()
        if lost:
            self._server_lost(lost[0].spec, "and its workers with it" if started else "before it had started a rank")

    def _server_lost(self, spec: WorkerSpec, what: str) -> None:
        """There is no fork server any more, for which nobody but it can be blamed."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._server.wait(1.0)  # it may be dying: its words are complete then
        log_err, words = self._own_words("forkserver.err")
        self.fail(WorkerFailed(
            f"the fork server of node {spec.node} died, {what} (log {log_err}){words}", node=spec.node, log_path=str(log_err)
        ))  # fmt: skip

    def _own_words(self, name: str) -> tuple[Path, str]:
        """What the fork server said, kept as a log of that name; and its last lines, as the end of a message."""
        kept, said = self.log_dir / name, self._fork_server.words_file
        with contextlib.suppress(OSError):
            kept.write_bytes(said.read_bytes())
        return kept, tail(str(said))

    def _task_exited(self, spec: WorkerSpec, status: int) -> None:
        """srun said that a rank ended badly."""
        member = self.members.get(spec.name)
        if member is not None and member.spec is spec:
            self._exited(member, status)

    def _step_ended(self, step: JobStep, code: int) -> None:
        """srun has ended: so have all ranks of its step."""
        with self._changed:
            members = [m for m in self.members.values() if m.step is step]
            lost = [m for m in members if m.state in ("starting", "ready")]
            for member in members:
                member.state = "ended"
            self._changed.notify_all()
        for member in members:
            self.service.consumer_died(member.spec.name)
        if not lost:
            return
        spec, words = lost[0].spec, step.last_words or "(it said nothing)"
        who = f"{spec.group} (ranks {', '.join(str(m.spec.rank) for m in lost)})"
        said = f"srun ended with exit code {code}:\n{words}\n  log: {step.log_err}"
        if lost[0].record:
            self.fail(WorkerFailed(
                f"the job step of {who} on node {spec.node} ended; {said}{tail(spec.log_err)}",
                group=spec.group, rank=spec.rank, node=spec.node, log_path=spec.log_err,
            ))  # fmt: skip
        else:
            self.fail(
                StepFailed(
                    f"the job step of {who} did not start on node {spec.node}: {said}", group=spec.group, node=spec.node
                )
            )

    def _exited(self, member: Member, status: int) -> None:
        with self._changed:
            expected = member.state in ("stopping", "ended")
            member.state = "ended"
            self._changed.notify_all()
        self.service.consumer_died(member.spec.name)
        if not expected:
            self.fail(death(member.spec, status, self._said_before_its_log(member)))

    def _said_before_its_log(self, member: Member) -> str:
        """What a rank said that died before it had opened its log; it is kept there."""
        log_err = Path(member.spec.log_err)
        with contextlib.suppress(OSError):
            if log_err.exists():
                return ""
            if member.step is None:
                return self._own_words(log_err.name)[1]
            log_err.write_text(member.step.last_words + "\n")
        return tail(str(log_err))

    # -- notes from workers ---------------------------------------------------------------------------------------

    def _note(self, note: dict[str, Any]) -> None:
        member = self.members.get(note["name"])
        if member is None or member.spec.incarnation != note["incarnation"]:
            return
        member.alive, member.suspect = time.monotonic(), False
        if note["note"] == "ready":
            with self._changed:
                member.record, member.pid = note["record"], note["pid"]
                if member.state == "starting":
                    member.state = "ready"
                if member.step is not None and note["record"].get("step"):
                    member.step.step_id = note["record"]["step"]
                self._changed.notify_all()
        elif note["note"] == "failed":
            record = {"group": member.spec.group, "rank": member.spec.rank, "node": member.spec.node,
                      "pid": note["pid"], "log_err": member.spec.log_err}  # fmt: skip
            self.fail(worker_failed(note["error"], f"the constructor of {note['name']}", record))

    # -- failure --------------------------------------------------------------------------------------------------

    def fail(self, failure: RlhpcError) -> None:
        """Records the first failure and stops all groups; later ones are its consequences and only logged."""
        with self._changed:
            if self.failure is not None:
                log.debug("after the first failure: %s", failure)
                return
            self.failure = failure
            spared = self._spared(failure)
            doomed = [m for m in self.members.values() if m.spec.name not in spared]
            alive = [m for m in doomed if m.state in ("starting", "ready")]
            # a step ends with its last rank only: where one has ended already, the others are still to be stopped
            kept = {m.step for m in self.members.values() if m.spec.name in spared}
            steps = {m.step for m in doomed if m.step is not None and m.step.running} - kept
            for member in doomed:
                if member.state != "ended":
                    member.state = "stopping"
            self._changed.notify_all()
        self._signal(alive, signal.SIGTERM)
        for step in steps:
            step.end()
        for delay in (1.5, _STEP_GRACE_S):
            timer = threading.Timer(delay, self._kill_rest, [steps if delay == _STEP_GRACE_S else set()])
            timer.daemon = True
            timer.start()
        self.rpc.interrupt()

    def _spared(self, failure: RlhpcError) -> set[str]:
        """Ranks that may live on after a failure.

        Those of the groups that nobody calls expendable, when one that is has failed; all that live, when what failed is
        ranks of an independent group that have ended.
        """
        group = getattr(failure, "group", "")
        if group not in self.expendable or not failure.restartable:
            return set()
        rank = getattr(failure, "rank", None)
        alone = group in self.independent and any(
            m.spec.rank == rank and m.state == "ended" for m in self.members.values() if m.spec.group == group
        )
        return {
            m.spec.name
            for m in self.members.values()
            if (alone and m.state != "ended") or m.spec.group not in self.expendable
        }

    def recover(self, patience_s: float = 20.0) -> dict[str, list[int]]:
        """After the failure of an expendable group or of an independent rank: what failed has ended, the others are free.

        The other ranks give up the call that they are in as soon as they wait for somebody, and forget the messages that
        they had not taken. Follow with `WorkerGroup.relaunch`.

        Returns:
            The ranks that have ended, by group.

        Raises:
            RlhpcError: The failure itself, where it cannot be recovered from.
        """
        failure = self.failure
        if failure is None or not self._spared(failure):
            raise failure or RlhpcError("nothing has failed")
        time.sleep(_SETTLE_S)  # what died together is reported one by one
        self._await_all()
        with self._changed:
            gone = [m for m in self.members.values() if m.state == "ended"]
            survivors = [m for m in self.members.values() if m.state == "ready"]
        doomed = any(m.spec.group not in self.expendable for m in gone)
        if doomed or not survivors or len(gone) + len(survivors) < len(self.members):
            raise failure
        self.failure = None
        for name in {m.spec.group for m in self.members.values()}:
            self.rpc.forget(name)
        for member in gone:
            self.registry.remove("members", member.spec.name)
        try:
            for member in survivors:
                self.service.peers.post(choose(member.record["data"]), b"ABORT", [])
            for command in ("\0idle", "\0resume"):  # nobody sends any more once all have answered the first
                handles = [self.rpc.call(records, command, (), {}) for records in _by_group(survivors).values()]
                for handle in handles:
                    handle.wait(patience_s)
        except (RlhpcError, OSError) as error:
            log.warning("the ranks of %s are not free again: %s", {m.spec.group for m in survivors}, error)
            self.expendable = frozenset()
            if self.failure is None:
                self.fail(failure)
            self.check()
            raise failure from error
        groups = sorted({m.spec.group for m in gone})
        return {group: sorted(m.spec.rank for m in gone if m.spec.group == group) for group in groups}

    def _signal(self, members: Sequence[Member], number: int) -> None:
        """To ranks that the fork server started."""
        self._tell(op="kill", pids=[m.pid for m in members if m.pid and m.step is None], signal=number)

    def _kill_rest(self, steps: set[JobStep]) -> None:
        if self.failure is not None:
            self._signal([m for m in self.members.values() if m.state == "stopping"], signal.SIGKILL)
            for step in steps:
                if step.running:
                    step.kill()

    def check(self) -> None:
        """Raises the first failure, once the groups have been stopped and their shared memory freed.

        Raises:
            ChannelError: The session has ended.
        """
        if self.service.stopped:
            self.service.check()
        if threading.current_thread() is threading.main_thread():
            self.interrupted()
        failure = self.failure
        if failure is None:
            return
        self._await_all()
        self._free_memory()
        raise failure

    def _await_all(self) -> None:
        limit = _STEP_LIMIT_S if any(m.step is not None for m in self.members.values()) else 4.0
        with self._changed:
            stopping = [m for m in self.members.values() if m.state != "ready"]
        self._await_ended(stopping, limit)

    def _await_ended(self, members: Sequence[Member], timeout: float) -> bool:
        with self._changed:
            return self._changed.wait_for(all_in("ended", members), timeout)

    def _free_memory(self) -> None:
        """Unlinks all payload segments; only when no worker is left that could read them."""
        if any(m.state != "ended" for m in self.members.values()):
            return
        for folder in (self.scratch.shm, self.scratch.spill):
            with contextlib.suppress(FileNotFoundError):
                for entry in os.scandir(folder):
                    Path(entry.path).unlink(missing_ok=True)

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
        """Starts a group's ranks. See `WorkerGroup.launch`."""
        with self._changed:
            if self.failure is not None:
                self._await_all()
                self._past, self.failure = self.failure, None
            if any(m.spec.group == name and m.state != "ended" for m in self.members.values()):
                raise PlacementError(f"a group named {name!r} is running already: give launch() another name")
            self.members = {k: m for k, m in self.members.items() if m.state != "ended" and m.spec.group != name}
        body, incarnation = class_body(payload), f"{time.time_ns():x}"
        started = []
        alive = Counter(m.spec.node_rank for m in self.members.values() if m.state != "ended")
        sharing = Counter(p.node_rank for p in placements) | alive
        for placement in placements:
            spec = self._spec(name, body, placement, len(placements), sharing, cluster, env_vars, fork)
            spec.incarnation = incarnation
            member = Member(spec)
            self.members[spec.name] = member
            started.append(member)
        self.registry.put("groups", name, {"world_size": len(placements), "class": payload[0].__qualname__})
        self._start(started, cluster)
        return started

    def relaunch(self, name: str, cluster: Cluster) -> list[Member]:
        """Starts the ranks of a group that have ended once more, where they were. See `WorkerGroup.relaunch`."""
        with self._changed:
            incarnation = f"{time.time_ns():x}"
            ended = [m.spec for m in self.members.values() if m.spec.group == name and m.state == "ended"]
            started = [Member(replace(spec, incarnation=incarnation)) for spec in ended]
            self.members.update({member.spec.name: member for member in started})
        self._start(started, cluster)
        return started

    def _start(self, started: Sequence[Member], cluster: Cluster) -> None:
        if self.steps and cluster.source == "slurm":
            self._start_steps(started, cluster)
        else:
            if self._server_state == "ended":
                with self._changed:
                    for member in started:
                        member.state = "ended"
                self._server_lost(started[0].spec, "and can start no more ranks")
                return
            for member in started:
                self._tell(op="start", spec=pickle.dumps(member.spec))

    def arrived(self, name: str, started: Sequence[Member], timeout: float) -> list[dict[str, Any]]:
        """Waits for a group's ranks; returns their records in rank order. See `WorkerGroup.launch`."""
        all_ready, deadline = all_in("ready", started), time.monotonic() + timeout
        with self._changed:
            while self.failure is None and not all_ready() and (left := deadline - time.monotonic()) > 0:
                if self._past is not None and any(m.state == "ended" for m in started):
                    break  # they failed before another group was launched
                self._changed.wait(min(left, _LOOK_S))
                self.interrupted()
        if self._past is not None and self.failure is None and any(m.state == "ended" for m in started):
            self.fail(self._past)
        self.check()
        missing = [m for m in started if m.state != "ready"]
        if missing:
            lines = [f"  {m.spec.name} on {m.spec.node} (pid {m.pid or '?'}, log {m.spec.log_err})" for m in missing]
            said = {m.step.last_words for m in missing if m.step is not None and m.step.last_words}
            lines += [f"  srun said: {words}" for words in sorted(said)]
            failure = RendezvousTimeout(
                f"{len(missing)} of {len(started)} ranks of {name!r} did not arrive in {timeout:.0f} s:\n"
                + "\n".join(lines)
            )
            self.fail(failure)
            self.check()
        return [m.record for m in started]

    def _start_steps(self, started: Sequence[Member], cluster: Cluster) -> None:
        try:
            steps = start_steps([m.spec for m in started], cluster, self.log_dir, self._task_exited, self._step_ended)
        except OSError as error:
            self.fail(StepFailed(f"cannot start srun: {error}", node=started[0].spec.node))
            return
        owner = {id(spec): step for step in steps for spec in step.specs}
        with self._changed:
            for member in started:
                member.step = owner[id(member.spec)]
        for step in steps:  # only now can the session tell whose step ends
            step.listen()

    def _spec(
        self,
        name: str,
        body: bytes,
        placement: Placement,
        world_size: int,
        sharing: Mapping[int, int],
        cluster: Cluster,
        env_vars: dict[str, str],
        fork: bool,
    ) -> WorkerSpec:
        node = cluster.nodes[placement.node_rank]
        by_step = self.steps and cluster.source == "slurm"
        if not node.is_local and not by_step:
            raise SubmitError(
                f"node {node.name} is not this machine: rank {placement.rank} of {name!r} needs a job step"
            )
        group = cluster.node_group(placement.node_group) if placement.node_group else None
        env = {**(dict(group.env_vars or {}) if group else {}), **env_vars}
        if cluster.source == "virtual":
            env.setdefault(VIRTUAL, "1")
        visible = node.visible_devices
        if visible and not by_step:  # a step looks into the mask that it finds itself with
            env.setdefault("CUDA_VISIBLE_DEVICES", ",".join(str(visible[i]) for i in placement.accelerators))
        interpreter = (group.python_interpreter if group else None) or ("" if fork or by_step else sys.executable)
        foreign = bool(group and group.python_interpreter)
        stem = self.log_dir / f"{name}-{placement.rank}"
        return WorkerSpec(
            group=name, rank=placement.rank, world_size=world_size, node=node.name, node_rank=placement.node_rank,
            local_rank=placement.local_rank, local_world_size=placement.local_world_size,
            accelerators=tuple(placement.accelerators), registry=str(self.registry.root), token=self.scratch.token,
            body=body, log_out=f"{stem}.out", log_err=f"{stem}.err", env=env,
            sys_path=import_paths(foreign=foreign), cwd=os.getcwd(), threads=max(1, node.cpus // sharing[placement.node_rank]),
            driver=self.service.endpoint, wait_deadline=self.context.wait_deadline, interpreter=interpreter,
            tcp_address=self.tcp_address, interface=self.interface,
        )  # fmt: skip

    def shutdown_group(self, name: str, started: Sequence[Member], grace: float) -> None:
        """Ends ranks of a group: asks, waits `grace` seconds, kills; those that are still starting are not waited for."""
        with self._changed:
            members = [m for m in started if self.members.get(m.spec.name) is m and m.state != "ended"]
            alive = [m.record for m in members if m.state == "ready"]
            for member in members:
                member.state = "stopping"
        if alive and self.failure is None:
            self.rpc.call(alive, "\0exit", (), {})
        if len(alive) < len(members):
            self._signal([m for m in members if not m.record], signal.SIGTERM)
        if not self._await_ended(members, grace):
            steps = {m.step for m in members if m.step is not None}
            for number, patience in ((signal.SIGTERM, 1.0 if not steps else _STEP_GRACE_S), (signal.SIGKILL, 5.0)):
                self._signal([m for m in members if m.state != "ended"], number)
                for step in steps:
                    step.end() if number == signal.SIGTERM else step.kill()
                if self._await_ended(members, patience):
                    break
        self.rpc.forget(name)
        if self._registry_watch.mine():
            self.registry.remove("groups", name)
            for member in members:
                self.registry.remove("members", member.spec.name)

    def stop(self) -> None:
        """Ends all groups and the session; nothing of it is left running, in shared memory or in the socket folder."""
        if self._pid != os.getpid() or Session._running is not self:
            return
        Session._running = None
        self._registry_watch.stop()
        if self._server_state == "importing" and not self.steps:
            with self._changed:
                for member in self.members.values():
                    member.state = "stopping" if member.state == "starting" else member.state
            self._server.kill()  # it has started nothing, and would look up from its imports much later
        with contextlib.suppress(Exception):
            for name in {m.spec.group for m in self.members.values() if m.state != "ended"}:
                self.shutdown_group(name, [m for m in self.members.values() if m.spec.group == name], 2.0)
        if self.failure is not None and self.tcp_address:
            clear_nodes({m.step for m in self.members.values() if m.step is not None}, self.scratch)
        self._tell(op="stop")
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._server.wait(timeout=10)
        self._control.close()
        self.rpc.close()
        self.service.stop()
        contexts.install(None)
        self.scratch.remove()
        if self._registry_watch.mine():
            (self.registry.root / "keys.json").unlink(missing_ok=True)
        atexit.unregister(self.stop)


def here() -> contexts.Context:
    """This process's context; a process that belongs to no run yet becomes the driver of one."""
    return contexts.installed() or Session.start().context


def _by_group(members: Sequence[Member]) -> dict[str, list[dict[str, Any]]]:
    """The members' records; a call goes to ranks of one group."""
    found: dict[str, list[dict[str, Any]]] = {}
    for member in members:
        found.setdefault(member.spec.group, []).append(member.record)
    return found
