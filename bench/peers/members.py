"""Members that are not processes: each has its own record, command socket and heartbeat; many share a process.

A member does what `rlhpc.runtime.worker_process` does on another host than the driver's, by the same parts: a record in the
registry, a ZeroMQ socket with CURVE over TCP, heartbeats. Only its data plane (the service thread) is shared by the members of
a simulating process. The methods of `bench.scale_loop.LoopRank` are executed, one member after the other; other methods do
nothing.
"""

from __future__ import annotations

import os
import pickle
import socket
import time
from pathlib import Path
from typing import Any

from bench.peers import slow_files
from rlhpc.runtime import pickle_stream
from rlhpc.runtime.worker_spec import WorkerSpec

#: ZeroMQ's limit of sockets a context is 1023.
PER_PROCESS = 900
ADDRESS = "127.0.0.1"


def build_instance(spec: WorkerSpec) -> Any:
    """Returns the object of a rank of the loop; None for other classes."""
    from rlhpc.runtime.worker import bind_spec

    cls, args, kwargs = pickle.loads(spec.body)
    if cls.__name__ != "LoopRank":
        return None
    bind_spec(spec)
    return cls(*args, **kwargs)


def serve(control: socket.socket) -> None:
    """Runs the members whose specs arrive over `control`; reports file operations when it is told to stop."""
    import zmq

    from rlhpc.runtime.comm import context as contexts
    from rlhpc.runtime.comm.service import Service
    from rlhpc.runtime.comm.zmq_sockets import TcpPort, choose, join_pieces, make_socket
    from rlhpc.runtime.registry import GenerationFolder
    from rlhpc.runtime.scratch import Scratch
    from rlhpc.runtime.worker_process import HEARTBEAT_S

    specs: list[WorkerSpec] = []
    while (message := pickle_stream.receive(control)) is not None and message != "go":
        specs.append(pickle.loads(message))
    if not specs:
        return
    first_spec = specs[0]
    slow_files.install(str(Path(first_spec.registry).parent))
    registry, scratch = GenerationFolder(Path(first_spec.registry)), Scratch(first_spec.token)
    keys = registry.load_keys()
    slow_files.take_count()
    os.environ["RLHPC_HOST_ID"] = "elsewhere"  # so that everything goes over TCP
    service = Service(f"simulated-{os.getpid()}", keys, scratch, ADDRESS)
    driver = choose(first_spec.driver)
    contexts.install(contexts.Context(f"simulated-{os.getpid()}", registry, service, service.check))
    poller, sockets = zmq.Poller(), []
    instances: dict[Any, Any] = {}
    for spec in specs:
        commands = make_socket(service.context, zmq.ROUTER, keys, server=True)
        rpc_endpoint = {"host": service.endpoint["host"], "ipc": "", "tcp": TcpPort(commands, ADDRESS).endpoint}
        record = {
            "group": spec.group, "rank": spec.rank, "node": spec.node, "node_rank": spec.node_rank, "pid": os.getpid(),
            "host": service.endpoint["host"], "rpc": rpc_endpoint, "data": service.endpoint, "log_out": spec.log_out,
            "log_err": spec.log_err, "incarnation": spec.incarnation, "accelerators": list(spec.accelerators),
            "state": "running", "started": time.time(), "step": "",
        }  # fmt: skip
        registry.put("members", spec.name, record)
        member_note = {"name": spec.name, "incarnation": spec.incarnation, "pid": os.getpid()}
        service.peers.post(driver, b"NOTE", [pickle.dumps({"note": "ready", **member_note, "record": record})])
        poller.register(commands, zmq.POLLIN)
        sockets.append(member_note)
        instances[commands] = build_instance(spec)
    pickle_stream.send(control, {"operations": slow_files.take_count(), "members": len(specs)})
    control.setblocking(False)
    poller.register(control, zmq.POLLIN)
    empty_frames = service.pack(None).frames()
    next_heartbeat_at = time.monotonic() + HEARTBEAT_S
    while True:
        for ready_socket, _ in poller.poll(200):
            if ready_socket == control.fileno() or ready_socket is control:
                return
            try:
                while True:
                    caller, *message = ready_socket.recv_multipart(zmq.NOBLOCK)
                    call_id, method, *frames = join_pieces(message)
                    answer = empty_frames
                    if (instance := instances[ready_socket]) is not None:
                        args, kwargs = service.unpack(frames)
                        result = getattr(instance, method.decode().split(" ")[0])(*args, **kwargs)
                        service.peers.confirm(60.0)
                        answer = service.pack(result).frames()
                    ready_socket.send_multipart([caller, call_id, b"ok", b"0", *answer])
            except zmq.Again:
                pass
        if time.monotonic() >= next_heartbeat_at:
            next_heartbeat_at += HEARTBEAT_S
            heartbeat = {"note": "alive", "usage": (time.process_time(), 1e9, None)}
            for member_note in sockets:
                service.peers.post(driver, b"NOTE", [pickle.dumps({**heartbeat, **member_note})])


class Simulators:
    """Pool of processes that host the members, forked before the driver has a thread."""

    def __init__(self, num_members: int) -> None:
        self.controls: list[socket.socket] = []
        self.pids: list[int] = []
        for _ in range(-(-num_members // PER_PROCESS)):
            parent_socket, child_socket = socket.socketpair()
            pid = os.fork()
            if pid == 0:
                try:
                    for control in (*self.controls, parent_socket):
                        control.close()
                    serve(child_socket)
                finally:
                    os._exit(0)
            child_socket.close()
            self.controls.append(parent_socket)
            self.pids.append(pid)
        self._next_index = 0

    def start(self, spec: bytes) -> None:
        """Assigns one simulated rank to the next process."""
        pickle_stream.send(self.controls[self._next_index % len(self.controls)], spec)
        self._next_index += 1

    def go(self) -> None:
        for control in self.controls:
            pickle_stream.send(control, "go")

    def count_operations(self) -> int:
        """Returns the file operations of all members while they joined."""
        reports: list[dict[str, Any]] = [pickle_stream.receive(control) or {} for control in self.controls]
        return sum(int(report.get("operations", 0)) for report in reports)

    def stop(self) -> None:
        for control in self.controls:
            control.close()
        for pid in self.pids:
            os.waitpid(pid, 0)
