"""Nobody without the generation's key gets in: not over UNIX sockets, not over ZeroMQ, not through files."""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
import zmq

from rlhpc import Channel, Session
from rlhpc.runtime.comm.unix_sockets import encode
from rlhpc.runtime.registry import CurveKeys


class Bomb:
    def __reduce__(self):
        return os.system, ("touch /tmp/rlhpc-bomb-went-off",)


def listening(pids: list[int]) -> set[tuple[str, int]]:
    """The TCP ports on which processes accept connections."""
    import psutil

    found = (c for pid in pids for c in psutil.Process(pid).net_connections("inet") if c.status == "LISTEN")
    return {(c.laddr.ip, c.laddr.port) for c in found}


@pytest.fixture
def of_other_tests() -> set[tuple[str, int]]:
    """What other tests in this process have left open: torch's stores, which end with it."""
    return listening([os.getpid()])


@pytest.fixture
def session(of_other_tests, launch):
    launch(1, "guarded")
    Path("/tmp/rlhpc-bomb-went-off").unlink(missing_ok=True)
    running = Session.running()
    assert running is not None
    yield running
    time.sleep(0.2)
    assert not Path("/tmp/rlhpc-bomb-went-off").exists()


def test_secrets_and_sockets_are_the_owners_alone(session):
    for folder in (session.registry.root, session.scratch.sockets, session.scratch.shm):
        assert stat.S_IMODE(os.stat(folder).st_mode) == 0o700
    assert stat.S_IMODE(os.stat(session.registry.root / "keys.json").st_mode) == 0o600


@pytest.mark.parametrize("door", ["data", "calls"])
def test_a_unix_peer_without_the_secret_is_dropped_before_it_is_read(session, door):
    calls = session.processes["guarded-0"].record["rpc"]
    path = (session.service.endpoint if door == "data" else calls)["ipc"][6:]
    sock = socket.socket(socket.AF_UNIX)
    sock.connect(path)
    sock.settimeout(5)
    bomb = [b"", b"NOTE", pickle.dumps(Bomb())] if door == "data" else [b"1", b"add", pickle.dumps(Bomb()), b""]
    for message in ([b"hello", b"x" * 32], bomb):
        try:
            sock.sendall(b"".join(encode(message)))
        except BrokenPipeError:
            break
    with contextlib.suppress(ConnectionResetError):
        assert sock.recv(100) == b""


def test_a_zeromq_peer_with_another_key_gets_no_answer(launch):
    session = Session.start(tcp_address="127.0.0.1")
    launch(1, "reachable")
    record = session.processes["reachable-0"].record
    stranger, context = CurveKeys.fresh(), zmq.Context()
    for keys, answered in ((stranger, False), (session.service.keys, True)):
        sock = context.socket(zmq.DEALER)
        sock.linger = 0
        sock.curve_publickey, sock.curve_secretkey = keys.public, keys.secret
        sock.curve_serverkey = session.service.keys.public
        sock.connect(record["rpc"]["tcp"])
        sock.send_multipart([b"1", b"identity 0", *session.service.pack(((), {})).frames()])
        assert bool(sock.poll(5000 if answered else 1000)) is answered
    context.destroy(0)
    session.stop()


def test_no_tcp_port_is_open_on_one_host(of_other_tests, session):
    pids = [
        os.getpid(),
        session._fork_launcher.server.process.pid,
        *(m.pid for m in session.processes.values() if m.pid),
    ]
    assert listening(pids) <= of_other_tests


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to become another user")
def test_another_user_can_neither_read_nor_connect(session):
    Channel.create("private").put("secret")
    attempt = (
        "import os, sys, socket; os.setuid(65534)\n"
        f"for path in ({str(session.registry.root / 'keys.json')!r}, {str(session.scratch.shm)!r}):\n"
        "    try: os.listdir(path) if os.path.isdir(path) else open(path).read(); sys.exit('read ' + path)\n"
        "    except PermissionError: pass\n"
        f"try: socket.socket(socket.AF_UNIX).connect({session.service.endpoint['ipc'][6:]!r}); sys.exit('connected')\n"
        "except PermissionError: pass\n"
    )
    done = subprocess.run([sys.executable, "-c", attempt], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
