"""Another UNIX user on the run's own nodes tries to read, connect, replay and inject, and gets nothing."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from .cluster import SlurmCluster
from .runs import SlurmRun, until

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(300)]

#: What the attacker runs; it prints what it got hold of, one line each, and nothing when it got nothing.
ATTACK = """
import encodings.idna, json, os, pickle, socket, sys
import zmq
os.setgroups([]); os.setgid(65534); os.setuid(65534)
given = json.loads(sys.argv[1])

class Bomb:
    def __reduce__(self):
        return os.mkdir, (given["bomb"],)

def attempt(what, act):
    try:
        found = act()
    except (OSError, EOFError):
        return
    if found:
        print(what, repr(found)[:200], flush=True)

for folder in given["folders"]:
    attempt("listed " + folder, lambda: os.listdir(folder))
for path in given["files"]:
    attempt("read " + path, lambda: open(path, "rb").read(10))
    attempt("wrote " + path, lambda: open(path, "ab").write(b"x"))
for pid in given["pids"]:
    for name in ("environ", "mem", "maps", "fd"):
        attempt(f"looked into {pid} {name}", lambda: os.listdir(f"/proc/{pid}/{name}") if name == "fd"
                else open(f"/proc/{pid}/{name}", "rb").read(10))
    attempt(f"killed {pid}", lambda: os.kill(pid, 9) or "killed")
for path in given["sockets"]:
    def connect():
        sock = socket.socket(socket.AF_UNIX); sock.settimeout(2); sock.connect(path); return "connected"
    attempt("reached " + path, connect)

bomb = pickle.dumps(Bomb())
for host, port in given["ports"]:
    # raw bytes, a pickle, and the greeting of ZeroMQ without security, each followed by a request
    for first in (bomb, b"GET / HTTP/1.0\\r\\n\\r\\n", b"\\xff" + bytes(8) + b"\\x7f\\x03\\x00NULL" + bytes(48)):
        def inject():
            sock = socket.create_connection((host, port), 3); sock.settimeout(2)
            sock.sendall(first + bomb)
            got = b""
            while part := sock.recv(4096):
                got += part
            # the greeting is all that a stranger may see
            return got if len(got) > 64 else b""
        attempt(f"an answer from {host}:{port}", inject)
    def with_other_keys():
        context = zmq.Context(); sock = context.socket(zmq.DEALER); sock.linger = 0
        public, secret = zmq.curve_keypair()
        sock.curve_publickey, sock.curve_secretkey = public, secret
        sock.curve_serverkey = given["old_public"].encode() if given["old_public"] else public
        sock.connect(f"tcp://{host}:{port}")
        sock.send_multipart([b"12345678", b"NOTE", bomb]); sock.send_multipart([b"12345678", b"PUT", bomb])
        return sock.recv() if sock.poll(1500) else b""
    attempt(f"a ZeroMQ answer from {host}:{port}", with_other_keys)
print("done")
"""


@pytest.fixture(autouse=True)
def no_job_is_left(slurm: SlurmCluster) -> Iterator[None]:
    yield
    slurm.run("scancel", "--me")


@pytest.fixture
def outside(slurm: SlurmCluster) -> Iterator[Path]:
    """A folder that everybody may enter, so that only the run's own modes protect it."""
    folder = slurm.root / f"open-{os.getpid()}"
    folder.mkdir(mode=0o755)
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def listening(pids: list[int]) -> list[tuple[str, int]]:
    """Addresses and ports on which these processes listen, in whichever network they are."""
    found = []
    for pid in pids:
        inodes = set()
        for link in Path(f"/proc/{pid}/fd").iterdir():
            try:
                inodes.add(os.readlink(link))
            except OSError:
                continue
        for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:
                address, port = fields[1].split(":")
                found.append((".".join(str(b) for b in bytes.fromhex(address)[::-1]), int(port, 16)))
    return found


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to become another user")
def test_another_user_gets_nothing(slurm: SlurmCluster, outside: Path) -> None:
    run = SlurmRun(slurm, outside, "runner.max_steps=100000", "runner.save_interval=50", "algorithm.update_epochs=1")
    process = run.submit()
    run.training()
    registry = run.root / "registry" / run.generation()
    old = json.loads((registry / "keys.json").read_text())[0]
    run.cluster.run("scancel", "--batch", "--signal=USR2", run.job)  # a second generation, with other keys
    until(lambda: run.generation().endswith("-1") and len(run.members()) == 4, f"it goes on\n{run.account()}", 120)
    run.training(beyond=run.committed())
    assert json.loads((run.root / "registry" / run.generation() / "keys.json").read_text())[0] != old
    pids = [record["pid"] for record in run.members().values()]
    ports = listening(pids)
    assert ports, "the ranks are on different hosts, so they listen"
    assert all(address != "0.0.0.0" for address, _ in ports)
    found = [(slurm.files(node), path) for node in slurm.nodes for root in ("tmp", "dev/shm")
             for path in (slurm.files(node) / root).glob("rlhpc-0-*")]  # fmt: skip
    scratch = sorted({"/" / path.relative_to(root) for root, path in found})
    doors = sorted(
        {"/" / door.relative_to(root) for root, path in found for door in path.rglob("*") if door.is_socket()}
    )
    bomb = outside / "bomb"
    outside.chmod(0o777)
    given = {
        "bomb": str(bomb),
        "folders": [str(p) for p in (run.root / "registry", run.root / "submit", *scratch)],
        "files": [str(p) for p in (run.root / "registry").rglob("*.json")] + [str(p) for p in (run.root / "submit").iterdir()],
        "pids": pids,
        "sockets": [str(p) for p in doors],
        "ports": ports,
        "old_public": old,
    }  # fmt: skip
    assert given["sockets"] and given["files"]
    before = run.committed()
    for node in {record["node"] for record in run.members().values() if record.get("node") in slurm.nodes}:
        done = subprocess.run(
            [*slurm.enter(node), sys.executable, "-c", ATTACK, json.dumps(given)],
            capture_output=True, text=True, timeout=200,
        )  # fmt: skip
        assert done.stdout == "done\n", f"on {node}: {done.stdout}{done.stderr}"
    assert not bomb.exists()
    run.training(beyond=before)  # and the run never noticed
    assert len(run.attempts) == 2
    run.rlhpc("cancel", str(run.root))
    process.wait(60)
