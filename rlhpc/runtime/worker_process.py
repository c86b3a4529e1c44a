"""Worker process of a rank, which registers itself, builds the user's object, and executes calls one after another."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import logging
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from rlhpc.runtime.comm.context import Context, GracefulLeave, install
from rlhpc.runtime.devices import pci_addresses
from rlhpc.runtime.disk_errors import explain_error, log_stream
from rlhpc.runtime.energy import rank_meter
from rlhpc.runtime.errors import ConfigError, DeadlineExceeded, RlhpcError
from rlhpc.runtime.known_warnings import quiet_known_warnings
from rlhpc.runtime.log_sizes import stream_positions
from rlhpc.runtime.os_resources import bind_near, die_with_parent, open_files_of_rank, raise_limit
from rlhpc.runtime.proxies import without_proxy
from rlhpc.runtime.registry import MEMBERS
from rlhpc.runtime.start_phases import IMPORTS, RENDEZVOUS, WAITING, connect_reporter, enter_phase
from rlhpc.runtime.trace_recorder import process_usage, recorder
from rlhpc.runtime.worker_spec import BEHIND_PREFIX, WorkerSpec

if TYPE_CHECKING:
    from rlhpc.runtime.comm.service import Service
    from rlhpc.runtime.launchers import Usage

HEARTBEAT_S = 5.0
#: Seconds between two checks whether this rank's logs have grown, which take no file operation.
_TICK_S = 0.5
_LOG_FORMAT = "%(asctime)s %(levelname)s [{name}] %(message)s"


@runtime_checkable
class Closing(Protocol):
    """Worker that frees resources when its rank ends."""

    def close(self) -> None:
        """Frees the worker's resources."""


def ignore_job_signals() -> None:
    """Ignores the signals that the scheduler sends to every step of the job, because only the driver acts on them."""
    for signal_number in (signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP):
        signal.signal(signal_number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def before_sigterm(action: Callable[[], None], ends_itself: Callable[[], bool] = lambda: False) -> None:
    """Makes SIGTERM call `action` and end this process at once, even while the main thread is busy.

    Args:
        action: Called before the process ends.
        ends_itself: Called first; returns True if the process will end by itself, and SIGTERM must not end it.
    """
    reader, writer = os.pipe2(os.O_CLOEXEC)
    os.set_blocking(writer, False)
    end_lock = threading.Lock()

    def end(*_: Any) -> None:
        if ends_itself():
            return
        if end_lock.acquire(blocking=False):
            with contextlib.suppress(Exception):
                action()
            ctypes.CDLL(None).signal(int(signal.SIGTERM), None)  # SIG_DFL; Python allows this only on the main thread
            os.kill(os.getpid(), signal.SIGTERM)

    def watch() -> None:
        # C code writes the byte, so it arrives even while the main thread is inside a library. If other code has set another
        # handler, that handler applies.
        while signal_byte := os.read(reader, 1):
            if signal_byte[0] == signal.SIGTERM and signal.getsignal(signal.SIGTERM) is end:
                end(signal_byte[0], None)

    masks = threading.local()

    def before_fork() -> None:
        masks.before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

    def in_parent() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, masks.before)

    def in_child() -> None:
        # The parent's handler must not handle a signal to the child; the signal has been blocked until here.
        signal.set_wakeup_fd(-1)
        if signal.getsignal(signal.SIGTERM) is end:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        in_parent()

    signal.signal(signal.SIGTERM, end)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    os.register_at_fork(before=before_fork, after_in_parent=in_parent, after_in_child=in_child)
    threading.Thread(target=watch, name="rlhpc-sigterm", daemon=True).start()


def _redirect_output(worker_spec: WorkerSpec) -> None:
    for path, fd in ((worker_spec.log_out, 1), (worker_spec.log_err, 2)):
        target = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(target, fd)
        os.close(target)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    sys.stdout, sys.stderr = log_stream(1), log_stream(2)


def _set_environment(worker_spec: WorkerSpec) -> None:
    from rlhpc.runtime.scratch import Scratch

    os.environ.update(worker_spec.env)
    os.environ.update(without_proxy(filter(None, (worker_spec.node, worker_spec.tcp_address or ""))))
    Scratch(worker_spec.token).hold_caches()
    if "OMP_NUM_THREADS" not in worker_spec.env:
        os.environ["OMP_NUM_THREADS"] = str(worker_spec.threads)
    with contextlib.suppress(OSError):
        os.chdir(worker_spec.cwd)
    sys.path[:] = [path for path in worker_spec.sys_path if path not in sys.path] + sys.path
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))


def _bind_near_devices(worker_spec: WorkerSpec) -> None:
    """Binds the rank to cores near its accelerators, before the rank starts threads; see `cluster.bind_cores`."""
    if worker_spec.accelerators and worker_spec.bind_cores and (addresses := pci_addresses()):
        logging.getLogger(__name__).info("cores: %s", bind_near(addresses, worker_spec.threads))


class _Rank:
    """Connections between a rank's process and its run.

    Args:
        worker_spec: Specification of the rank.
        graceful_leave: Graceful leave of the rank.

    Attributes:
        context: Context of the process.
        receiver: Receiver of the rank's calls.
        record: The rank's record in the registry: endpoints, process and log files.
    """

    def __init__(self, worker_spec: WorkerSpec, graceful_leave: GracefulLeave) -> None:
        # Imported here, because an import before the fork would start ZeroMQ's threads in the fork server.
        from rlhpc.runtime.comm.service import Service
        from rlhpc.runtime.comm.shared_memory import remove_idle_of_the_dead
        from rlhpc.runtime.comm.zmq_sockets import choose
        from rlhpc.runtime.registry import GenerationFolder
        from rlhpc.runtime.rpc import CallReceiver, main_stack
        from rlhpc.runtime.scratch import Scratch

        self._spec, self._driver = worker_spec, choose(worker_spec.driver)
        self._next_heartbeat, self._positions = 0.0, (0, 0)
        self._cpu_times = (time.monotonic(), time.process_time())
        registry, session_scratch = GenerationFolder(Path(worker_spec.registry)), Scratch(worker_spec.token)
        session_scratch.ensure()
        remove_idle_of_the_dead(session_scratch.shm)
        self._service = Service(
            worker_spec.name, registry.load_keys(), session_scratch, worker_spec.tcp_address,
            on_tick=self._send_heartbeat, tick_s=_TICK_S,
            on_broken=lambda _: os._exit(1), describe_activity=main_stack,
        )  # fmt: skip
        self.receiver = CallReceiver(self._service, worker_spec.tcp_address)
        graceful_leave.wake = self.receiver.interrupt
        graceful_leave.announce = lambda: self._tell_driver("leaving", worker_spec.name, worker_spec.incarnation)
        self.context = Context(
            worker_spec.name, registry, self._service, check=self._service.check, wait_deadline=worker_spec.wait_deadline,
            graceful_leave=graceful_leave, tell_driver=self._tell_driver,
        )  # fmt: skip
        self.record = {
            "group": worker_spec.group, "rank": worker_spec.rank, "node": worker_spec.node,
            "node_rank": worker_spec.node_rank, "pid": os.getpid(),
            "host": self._service.endpoint["host"], "rpc": self.receiver.record, "data": self._service.endpoint,
            "log_out": worker_spec.log_out, "log_err": worker_spec.log_err, "incarnation": worker_spec.incarnation,
            "accelerators": list(worker_spec.accelerators), "state": "running", "started": time.time(), "step": _step_id(),
        }  # fmt: skip

    def publish(self) -> None:
        """Publishes the rank's record, so that other processes can reach it, and installs the process's context."""
        install(self.context)
        self.context.registry.put(MEMBERS, self._spec.name, self.record)

    def report_phases(self, prepared_at: float) -> None:
        """Starts to report the phases of the rank's start; its process was prepared at the Unix time `prepared_at`."""
        phases = [(RENDEZVOUS, prepared_at), (IMPORTS, time.time())]
        connect_reporter(lambda phases: self.note("phase", phases=phases), phases)

    def note(self, event: str, **facts: Any) -> None:
        """Sends the driver a note about this rank."""
        self._send_note(self._make_note(event, **facts))

    def _make_note(self, event: str, **facts: Any) -> dict[str, Any]:
        worker_spec = self._spec
        return {
            "note": event,
            "name": worker_spec.name,
            "incarnation": worker_spec.incarnation,
            "pid": os.getpid(),
            **facts,
        }

    def _send_note(self, rank_note: dict[str, Any]) -> None:
        self._service.peers.post(self._driver, b"NOTE", [pickle.dumps(rank_note)])

    def _tell_driver(self, event: str, name: str, incarnation: str) -> None:
        self._send_note({"note": event, "name": name, "incarnation": incarnation})

    def _send_heartbeat(self, service: Service) -> None:
        """Reports to the driver that the rank's logs have grown, and regularly that the rank is alive, with its usage."""
        now, log_positions = time.monotonic(), stream_positions()
        is_heartbeat = now >= self._next_heartbeat
        rank_facts: dict[str, Any] = {"usage": self._measure_usage(now)} if is_heartbeat else {}
        if log_positions != self._positions:
            rank_note = self._make_note("logs", positions=log_positions, **rank_facts)
        elif is_heartbeat:
            rank_note = self._make_note("alive", **rank_facts)
        else:
            return
        # the first note may be sent before `self._service` is set
        with contextlib.suppress(DeadlineExceeded):  # the service must not wait for a driver that does not read
            service.peers.post(self._driver, b"NOTE", [pickle.dumps(rank_note)], timeout=0.0)
            self._positions = log_positions
            if is_heartbeat:
                self._next_heartbeat = now + HEARTBEAT_S

    def _measure_usage(self, now: float) -> Usage:
        """Returns the processor cores that the process has used since the last call, and its current usage."""
        wall_s, cpu_s = self._cpu_times
        self._cpu_times = now, time.process_time()
        return round((self._cpu_times[1] - cpu_s) / max(now - wall_s, 1e-9), 2), *process_usage()


def _prepare_process(
    worker_spec: WorkerSpec, on_sigterm: Callable[[], None] | None, graceful_leave: GracefulLeave | None
) -> None:
    """Sets up log files, signals, environment and limits of a rank's process."""
    _redirect_output(worker_spec)
    faulthandler.enable()  # prints the Python stack after a fault in a library's native code
    ignore_job_signals()
    if on_sigterm is not None:
        before_sigterm(on_sigterm, graceful_leave.notify if graceful_leave is not None else lambda: False)
    _set_environment(worker_spec)
    logging.basicConfig(
        level=logging.INFO, stream=sys.stderr, format=_LOG_FORMAT.format(name=worker_spec.name), force=True
    )
    quiet_known_warnings()
    _bind_near_devices(worker_spec)
    raise_limit(
        open_files_of_rank(worker_spec.world_size),
        f"a rank of {worker_spec.group!r}, a group of {worker_spec.world_size} ranks,",
    )


def _build_instance(worker_spec: WorkerSpec) -> Any:
    """Builds and returns the user's object."""
    from rlhpc.runtime.worker import bind_spec

    bind_spec(worker_spec)
    cls, args, kwargs = pickle.loads(worker_spec.body)
    return cls(*args, **kwargs)


def _close(instance: Any, name: str) -> None:
    """Calls `close` of the user's object, if it has this method, before the rank ends; only logs its exceptions."""
    if isinstance(instance, Closing):
        try:
            instance.close()
        except Exception:
            logging.getLogger(__name__).exception("%s.close() failed; this rank ends all the same", name)


def run_worker(
    worker_spec: WorkerSpec, on_sigterm: Callable[[], None] | None = None, graceful_leave: GracefulLeave | None = None
) -> int:
    """Runs a worker from start to end; returns its exit status.

    Args:
        worker_spec: Specification of the rank.
        on_sigterm: Called before SIGTERM ends the process.
        graceful_leave: Graceful leave of a joined rank; None for other ranks.
    """
    _prepare_process(worker_spec, on_sigterm, graceful_leave)
    prepared_at = time.time()
    # Imported here, because an import before the fork would start ZeroMQ's threads in the fork server.
    from rlhpc.runtime.comm.gloo_auth import guard
    from rlhpc.runtime.remote_errors import describe_error
    from rlhpc.runtime.rpc import CallServer

    guard()
    rank = _Rank(worker_spec, graceful_leave or GracefulLeave())
    rank.publish()
    rank.report_phases(prepared_at)
    try:
        instance = _build_instance(worker_spec)
    except BaseException as error:
        traceback.print_exc()
        rank.note("failed", error=describe_error(error))
        time.sleep(0.2)  # the note must be sent before the process ends
        return 1
    meter = rank_meter(worker_spec.accelerators, pci_addresses)
    rank.record["energy"] = meter.describe()
    enter_phase(WAITING)
    rank.note("ready", record=rank.record)
    status = CallServer(rank.context, rank.receiver, instance, meter).run()
    _close(instance, worker_spec.name)
    recorder.stop(flush=True)
    return status


def live(
    worker_spec: WorkerSpec, on_sigterm: Callable[[], None] | None = None, graceful_leave: GracefulLeave | None = None
) -> int:
    """Runs a worker like `run_worker`; returns its exit status.

    Reports an exception in the rank's log and in this process's output.
    """
    try:
        return run_worker(worker_spec, on_sigterm, graceful_leave)
    except BaseException as error:
        reason = explain_error(error, "this rank")
        message = f"rlhpc: error: {reason}\n" if isinstance(reason, RlhpcError) else traceback.format_exc()
        with contextlib.suppress(OSError):
            os.write(2, message.encode())
        with contextlib.suppress(OSError), Path(worker_spec.log_err).open("a") as log:
            if not os.path.samestat(os.fstat(2), os.fstat(log.fileno())):
                log.write(message)
        if isinstance(reason, RlhpcError):
            return reason.exit_code
        return error.code if isinstance(error, SystemExit) and isinstance(error.code, int) and error.code else 1


def _step_id() -> str:
    """Returns `<job>.<step>` if this rank is a task of a job step, else ""."""
    job, step = os.environ.get("RLHPC_STEP_JOB"), os.environ.get("SLURM_STEP_ID")
    return f"{job}.{step}" if job and step and step.isdigit() else ""


def _check_driver_socket(worker_spec: WorkerSpec) -> None:
    """Checks that this rank can access the driver's UNIX socket, if the driver has no other address.

    Raises:
        ConfigError: It does not; the rank would otherwise wait until the rendezvous has timed out.
    """
    path = worker_spec.driver.get("ipc", "").removeprefix("ipc://")
    if path and not worker_spec.tcp_address and not Path(path).exists():
        raise ConfigError(
            f"{worker_spec.name} does not see the driver's socket {path}: its container has another /tmp than the "
            "node. Have cluster.container show that of the node (Apptainer without --contain, bwrap --bind /tmp /tmp)"
        )


def _read_spec(spec_number: int) -> WorkerSpec:
    """Reads the specification of a task of a job step or of a joined rank from stdin; adds the rank's devices and address.

    Args:
        spec_number: Index of the specification in the list on stdin.
    """
    from rlhpc.runtime.allocation import visible_accelerators
    from rlhpc.runtime.network import address_of, address_towards, interface_of
    from rlhpc.runtime.scratch import remove_stale
    from rlhpc.runtime.worker_spec import read_specs, step_devices

    worker_spec = read_specs(0)[spec_number]
    _check_driver_socket(worker_spec)
    worker_spec.env.setdefault(
        "CUDA_VISIBLE_DEVICES", step_devices(worker_spec, os.environ, visible_accelerators(os.environ))
    )
    if worker_spec.local_rank == 0:
        remove_stale()
    if worker_spec.tcp_address:
        driver = worker_spec.driver["tcp"].rpartition(":")[0].removeprefix("tcp://")
        worker_spec.tcp_address = (
            address_of(worker_spec.interface) if worker_spec.interface else address_towards(driver)
        )
        interface = interface_of(worker_spec.tcp_address)
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            if interface and name not in os.environ:
                worker_spec.env.setdefault(name, interface)
    return worker_spec


def _exit_with_input(worker_spec: WorkerSpec, graceful_leave: GracefulLeave | None = None) -> None:
    """Ends this process at the end of its stdin, as `exit_on_input_end` describes.

    Args:
        worker_spec: Specification of the rank.
        graceful_leave: Graceful leave of a joined rank.
    """
    from rlhpc.runtime.scratch import Scratch
    from rlhpc.runtime.worker_spec import exit_on_input_end

    notify = graceful_leave.notify if graceful_leave is not None else lambda: True
    exit_on_input_end(os.dup(0), Scratch(worker_spec.token).leave, notify)


def _run_forked(worker_spec: WorkerSpec, entry: Callable[[WorkerSpec], int]) -> None:
    """Asks the node's server to fork the rank of this process, and ends this process with the rank's status.

    Returns if the server cannot fork it, or if the rank's Python is too old for a server.

    Args:
        worker_spec: Specification of the rank.
        entry: Function of this module that runs the forked rank.
    """
    from rlhpc.runtime.launchers.node_fork import end_like, run_forked
    from rlhpc.runtime.scratch import Scratch

    if not worker_spec.preload or sys.version_info < (3, 11):  # an older one has no -P, with which the server starts
        return
    Scratch(worker_spec.token).ensure()
    is_joined = entry is live_joined
    status = run_forked(worker_spec, f"{__package__}.worker_process:{entry.__name__}", is_joined=is_joined)
    if status is not None:
        Scratch(worker_spec.token).leave()
        end_like(status)


def live_joined(worker_spec: WorkerSpec) -> int:
    """Runs a forked rank that has joined a run; its stdin is that of the process that joined."""
    graceful_leave = GracefulLeave()
    _exit_with_input(worker_spec, graceful_leave)
    return _live_and_leave(worker_spec, graceful_leave)


def live_and_leave(worker_spec: WorkerSpec) -> int:
    """Runs a forked rank of a job step like `live`, and releases the session's scratch folders."""
    return _live_and_leave(worker_spec, None)


def _live_and_leave(worker_spec: WorkerSpec, graceful_leave: GracefulLeave | None) -> int:
    from rlhpc.runtime.scratch import Scratch

    leave = Scratch(worker_spec.token).leave
    status = live(worker_spec, leave, graceful_leave)
    leave()
    return status


def main() -> None:
    """Runs a rank in a separate interpreter, which reads its specification from stdin."""
    by_step = sys.argv[1] in ("step", "joined")
    graceful_leave = GracefulLeave() if sys.argv[1] == "joined" else None
    try:
        match sys.argv[1:]:
            case ["step"]:
                worker_spec = _read_spec(int(os.environ["SLURM_PROCID"]))
                _exit_with_input(worker_spec)
                if worker_spec.shared_imports:
                    _run_forked(worker_spec, live_and_leave)
            case ["joined", parent]:
                die_with_parent(int(parent))
                worker_spec = _read_spec(0)
                _run_forked(worker_spec, live_joined)  # others may join on this node
                _exit_with_input(worker_spec, graceful_leave)
            case [parent]:  # started by the fork server
                die_with_parent(os.getppid() if parent == BEHIND_PREFIX else int(parent))
                worker_spec = pickle.loads(sys.stdin.buffer.read())
            case arguments:
                raise RlhpcError(f"a rank's process was started with {arguments}")
    except (RlhpcError, EOFError) as error:
        print(f"rlhpc: error: {error}", file=sys.stderr, flush=True)
        os._exit(1)
    from rlhpc.runtime.scratch import Scratch

    leave = (
        Scratch(worker_spec.token).leave if by_step else None
    )  # for other ranks, the fork server removes the folders
    status = live(worker_spec, leave, graceful_leave)
    if leave is not None:
        leave()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    main()
