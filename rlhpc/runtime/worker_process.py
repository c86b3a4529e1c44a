"""Worker process: finds the other processes, builds the user's object, then executes one call after another."""

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
from typing import Any, Protocol, runtime_checkable

from rlhpc.runtime.context import Farewell
from rlhpc.runtime.devices import pci_addresses
from rlhpc.runtime.disk_errors import explained, log_stream
from rlhpc.runtime.errors import RlhpcError
from rlhpc.runtime.known_warnings import quiet_known_warnings
from rlhpc.runtime.os_resources import stay_near
from rlhpc.runtime.proxies import without_proxy
from rlhpc.runtime.registry import MEMBERS
from rlhpc.runtime.worker_spec import EXIT, IDLE, RESUME, WorkerSpec

HEARTBEAT_S = 5.0
_LOG_FORMAT = "%(asctime)s %(levelname)s [{name}] %(message)s"


@runtime_checkable
class Closing(Protocol):
    """A worker with something to free as its rank ends."""

    def close(self) -> None:
        """Frees it."""


def ignore_job_signals() -> None:
    """Ignores the signals that the scheduler sends to the whole job: every step gets them, but only the driver acts."""
    for number in (signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def before_sigterm(act: Callable[[], None], ends_itself: Callable[[], bool] = lambda: False) -> None:
    """Makes SIGTERM end this process at once, whatever its main thread is doing, after calling `act`; unless `ends_itself`
    returns that the process ends by itself.
    """
    reader, writer = os.pipe2(os.O_CLOEXEC)
    os.set_blocking(writer, False)
    ending = threading.Lock()

    def end(*_: Any) -> None:
        if ends_itself():
            return
        if ending.acquire(blocking=False):
            with contextlib.suppress(Exception):
                act()
            ctypes.CDLL(None).signal(int(signal.SIGTERM), None)  # SIG_DFL; Python lets only the main thread set it
            os.kill(os.getpid(), signal.SIGTERM)

    def watch() -> None:
        # C code writes the byte, so it arrives even while the main thread is inside a library; code with its own handler
        # decides for itself
        while number := os.read(reader, 1):
            if number[0] == signal.SIGTERM and signal.getsignal(signal.SIGTERM) is end:
                end(number[0], None)

    masks = threading.local()

    def before_fork() -> None:
        masks.before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

    def in_parent() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, masks.before)

    def in_child() -> None:
        # a child's signal must not be taken for this process's, even one that comes at once: it waits until here
        signal.set_wakeup_fd(-1)
        if signal.getsignal(signal.SIGTERM) is end:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        in_parent()

    signal.signal(signal.SIGTERM, end)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    os.register_at_fork(before=before_fork, after_in_parent=in_parent, after_in_child=in_child)
    threading.Thread(target=watch, name="rlhpc-sigterm", daemon=True).start()


def _redirect(spec: WorkerSpec) -> None:
    for path, fd in ((spec.log_out, 1), (spec.log_err, 2)):
        target = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(target, fd)
        os.close(target)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    sys.stdout, sys.stderr = log_stream(1), log_stream(2)


def _environment(spec: WorkerSpec) -> None:
    from rlhpc.runtime.scratch import Scratch

    os.environ.update(spec.env)
    os.environ.update(without_proxy(filter(None, (spec.node, spec.tcp_address or ""))))
    Scratch(spec.token).hold_caches()
    if "OMP_NUM_THREADS" not in spec.env:
        os.environ["OMP_NUM_THREADS"] = str(spec.threads)
    with contextlib.suppress(OSError):
        os.chdir(spec.cwd)
    sys.path[:] = [p for p in spec.sys_path if p not in sys.path] + sys.path
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))


def _stay_near_devices(spec: WorkerSpec) -> None:
    """Binds the rank to cores near its accelerators, before it starts threads; see `cluster.bind_cores`."""
    if spec.accelerators and spec.bind_cores and (addresses := pci_addresses()):
        logging.getLogger(__name__).info("cores: %s", stay_near(addresses, spec.threads))


def describe(error: BaseException) -> dict[str, Any]:
    """Returns the report of an exception to the driver: text, traceback, exit code, and the exception itself if it pickles."""
    error = explained(error, "this rank")
    try:
        body = pickle.dumps(error)
        pickle.loads(body)
    except Exception:
        body = b""
    return {
        "text": f"{type(error).__name__}: {error}",
        "traceback": "".join(traceback.format_exception(error)),
        "exit_code": error.exit_code if isinstance(error, RlhpcError) else 1,
        "pickled": body,
    }


def run_worker(spec: WorkerSpec, on_sigterm: Callable[[], None] | None = None, farewell: Farewell | None = None) -> int:
    """Runs a worker from start to end; returns its exit status.

    `on_sigterm` is called before SIGTERM ends it. `farewell` has the action of a joined rank before it leaves, after SIGTERM
    or another notice.
    """
    _redirect(spec)
    faulthandler.enable()  # shows which Python lines led to a fault in a library's own code
    ignore_job_signals()
    if on_sigterm is not None:
        before_sigterm(on_sigterm, farewell.tell if farewell is not None else lambda: False)
    _environment(spec)
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format=_LOG_FORMAT.format(name=spec.name), force=True)
    quiet_known_warnings()
    _stay_near_devices(spec)
    # Imported here: imported before the fork, they would start ZeroMQ's threads in the fork server.
    from rlhpc.runtime import context
    from rlhpc.runtime.comm import p2p
    from rlhpc.runtime.comm.gloo_auth import guard
    from rlhpc.runtime.comm.service import Service
    from rlhpc.runtime.comm.shared_memory import remove_idle_of_the_dead
    from rlhpc.runtime.comm.zmq_sockets import choose
    from rlhpc.runtime.errors import CallAborted, DeadlineExceeded
    from rlhpc.runtime.os_resources import raise_limit
    from rlhpc.runtime.registry import GenerationFolder
    from rlhpc.runtime.rpc import CallDoor, main_stack
    from rlhpc.runtime.scratch import Scratch

    raise_limit()
    guard()
    registry, scratch = GenerationFolder(Path(spec.registry)), Scratch(spec.token)
    scratch.ensure()
    remove_idle_of_the_dead(scratch.shm)
    keys = registry.load_keys()
    driver = choose(spec.driver)
    note = {"name": spec.name, "incarnation": spec.incarnation, "pid": os.getpid()}

    def heartbeat(service: Service) -> None:
        with contextlib.suppress(DeadlineExceeded):  # the service must not wait for a driver that does not read
            service.peers.post(driver, b"NOTE", [pickle.dumps({"note": "alive", **note})], timeout=0.0)

    #: The last recovery that has ended. The request to give up comes by another way than calls: it may come behind this.
    resumed = 0

    def check() -> None:
        if service.aborted > resumed:
            raise CallAborted(f"{spec.name} gave up a call: another group failed")

    service = Service(
        spec.name, keys, scratch, spec.tcp_address, check=check, on_tick=heartbeat, tick_s=HEARTBEAT_S,
        on_broken=lambda _: os._exit(1), doing=main_stack,
    )  # fmt: skip
    door = CallDoor(service, spec.tcp_address)
    record = {
        "group": spec.group, "rank": spec.rank, "node": spec.node, "node_rank": spec.node_rank, "pid": os.getpid(),
        "host": service.endpoint["host"], "rpc": door.record, "data": service.endpoint, "log_out": spec.log_out,
        "log_err": spec.log_err, "incarnation": spec.incarnation, "accelerators": list(spec.accelerators),
        "state": "running", "started": time.time(), "step": _step_id(),
    }  # fmt: skip
    farewell = farewell or Farewell()
    farewell.wake = door.interrupt

    def tell_driver(event: str, name: str = spec.name, incarnation: str = spec.incarnation) -> None:
        message = {"note": event, "name": name, "incarnation": incarnation}
        service.peers.post(driver, b"NOTE", [pickle.dumps(message)])

    farewell.announce = lambda: tell_driver("leaving")
    ctx = context.Context(
        spec.name, registry, service, check=check, wait_deadline=spec.wait_deadline, farewell=farewell,
        tell_driver=tell_driver,
    )  # fmt: skip
    context.install(ctx)
    registry.put(MEMBERS, spec.name, record)
    try:
        from rlhpc.runtime.worker import bind_spec

        bind_spec(spec)
        cls, args, kwargs = pickle.loads(spec.body)
        instance = cls(*args, **kwargs)
    except BaseException as error:
        traceback.print_exc()
        service.peers.post(driver, b"NOTE", [pickle.dumps({"note": "failed", **note, "error": describe(error)})])
        time.sleep(0.2)  # let the note leave before the process does
        return 1
    service.peers.post(driver, b"NOTE", [pickle.dumps({"note": "ready", **note, "record": record})])

    def close() -> None:
        if isinstance(instance, Closing):
            try:
                instance.close()
            except Exception:
                logging.getLogger(__name__).exception("%s.close() failed; this rank ends all the same", spec.name)

    while True:
        if farewell.has_notice:
            farewell.say()
        if farewell.over:
            close()
            return 1  # its run continues: a status different from an end that the driver requested
        call = door.next()
        if call is None:  # it has just got a notice to leave
            continue
        caller, (number, method, *frames) = call
        name, _, epoch = method.decode().partition(" ")
        service.members_changed(int(epoch or 0))
        if name == EXIT:
            door.answer(caller, [number, b"ok", b"0", *service.pack(None).frames()])
            close()
            return 0
        if name in (IDLE, RESUME):
            if name == RESUME:
                p2p.clear_inbox(service)
                service.lane.forget()
                ((resumed,), _), frames = service.unpack(frames), []
            door.answer(caller, [number, b"ok", b"0", *service.pack(None).frames()])
            continue
        started = time.perf_counter()
        try:
            check()
            args, kwargs = service.unpack(frames)
            frames = []
            result = getattr(instance, name)(*args, **kwargs)
            args = kwargs = None
            service.peers.confirm(ctx.wait_deadline)
            status, packed = b"ok", service.pack(result)
            result = None
        except BaseException as error:
            if isinstance(error, (KeyboardInterrupt, SystemExit)):
                raise
            service.peers.forget_unconfirmed()
            if not isinstance(error, CallAborted):
                traceback.print_exc()
            status, packed = b"error", service.pack(describe(error))
        seconds = b"%.9f" % (time.perf_counter() - started)
        door.answer(caller, [number, status, seconds, *packed.frames()])


def live(spec: WorkerSpec, on_sigterm: Callable[[], None] | None = None, farewell: Farewell | None = None) -> int:
    """Calls `run_worker`. If that fails before it has opened its log, the log and this process's own output still say why."""
    try:
        return run_worker(spec, on_sigterm, farewell)
    except BaseException as error:
        reason = explained(error, "this rank")
        words = f"rlhpc: error: {reason}\n" if isinstance(reason, RlhpcError) else traceback.format_exc()
        with contextlib.suppress(OSError):
            os.write(2, words.encode())
        with contextlib.suppress(OSError), Path(spec.log_err).open("a") as log:
            if not os.path.samestat(os.fstat(2), os.fstat(log.fileno())):
                log.write(words)
        if isinstance(reason, RlhpcError):
            return reason.exit_code
        return error.code if isinstance(error, SystemExit) and isinstance(error.code, int) and error.code else 1


def _step_id() -> str:
    """Returns `<job>.<step>` if this rank is a task of a job step."""
    job, step = os.environ.get("RLHPC_STEP_JOB"), os.environ.get("SLURM_STEP_ID")
    return f"{job}.{step}" if job and step and step.isdigit() else ""


def _spawned(parent: int) -> WorkerSpec:
    """Runs a rank that the fork server started with a fresh interpreter."""
    from rlhpc.runtime.os_resources import die_with_parent

    die_with_parent(parent)
    spec: WorkerSpec = pickle.loads(sys.stdin.buffer.read())
    return spec


def _joined(parent: int, farewell: Farewell) -> WorkerSpec:
    """Runs a rank that joins a live run."""
    from rlhpc.runtime.os_resources import die_with_parent

    die_with_parent(parent)
    return _task(0, farewell)


def _task(number: int, farewell: Farewell | None = None) -> WorkerSpec:
    """Runs a rank that is a task of a job step, or has joined; determines its devices, and its address for the other hosts.

    Args:
        number: Index of its specification on stdin.
        farewell: Graceful leave of a joined rank.
    """
    from rlhpc.runtime.allocation import visible_accelerators
    from rlhpc.runtime.network import address_of, address_towards, interface_of
    from rlhpc.runtime.scratch import Scratch, remove_stale
    from rlhpc.runtime.worker_spec import end_with_input, own_devices, read_specs

    stream = os.dup(0)
    spec = read_specs(stream)[number]
    end_with_input(stream, Scratch(spec.token).leave, farewell.tell if farewell is not None else lambda: True)
    spec.env.setdefault("CUDA_VISIBLE_DEVICES", own_devices(spec, os.environ, visible_accelerators(os.environ)))
    if spec.local_rank == 0:
        remove_stale()
    if spec.tcp_address:
        driver = spec.driver["tcp"].rpartition(":")[0].removeprefix("tcp://")
        spec.tcp_address = address_of(spec.interface) if spec.interface else address_towards(driver)
        interface = interface_of(spec.tcp_address)
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            if interface and name not in os.environ:
                spec.env.setdefault(name, interface)
    return spec


def main() -> None:
    """Runs a rank in a separate interpreter, which reads its specification from stdin."""
    by_step = sys.argv[1] in ("step", "joined")
    farewell = Farewell() if sys.argv[1] == "joined" else None
    try:
        match sys.argv[1:]:
            case ["step"]:
                spec = _task(int(os.environ["SLURM_PROCID"]))
            case ["joined", parent]:
                assert farewell is not None
                spec = _joined(int(parent), farewell)
            case [parent]:
                spec = _spawned(int(parent))
            case arguments:
                raise RlhpcError(f"a rank's process was started with {arguments}")
    except (RlhpcError, EOFError) as error:
        print(f"rlhpc: error: {error}", file=sys.stderr, flush=True)
        os._exit(1)
    from rlhpc.runtime.scratch import Scratch

    leave = Scratch(spec.token).leave if by_step else None  # of the others, the fork server removes the folders
    status = live(spec, leave, farewell)
    if leave is not None:
        leave()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    main()
