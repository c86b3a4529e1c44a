"""Processes of one machine that do not share all of it: a /tmp or /dev/shm of its own, another PID namespace."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import pytest

from rlhpc.runtime.comm.service import Service
from rlhpc.runtime.comm.shared_memory import remove_idle_of_the_dead
from rlhpc.runtime.host import has_ended, host_id, process_id
from rlhpc.runtime.registry import CurveKeys
from tests.serving import temporary_scratch
from tests.users import needs_root

pytestmark = needs_root

PREPARE = """
import json, os, sys
from rlhpc.runtime.comm.service import Service
from rlhpc.runtime.comm.zmq_sockets import choose
from rlhpc.runtime.host import has_ended, host_id, process_id
from rlhpc.runtime.registry import CurveKeys
from rlhpc.runtime.scratch import Scratch
token, public, secret, endpoint, process, frames = json.loads(sys.argv[1])
scratch, keys = Scratch(token), CurveKeys(public.encode(), secret.encode())
scratch.ensure()
"""
REACH = """
service = Service("inside", keys, scratch, "127.0.0.1")
reply = service.peers.request(choose(endpoint), b"SYNC", [], 20, "the other process")
total = int(service.unpack([bytes.fromhex(frame) for frame in frames or []]).sum())
print(json.dumps([host_id(), choose(endpoint), reply, total,
                  service.peers.has_ended({"host": endpoint["host"], "data": endpoint})]))
service.stop()
"""
WRITE = """
from rlhpc.runtime.comm.shared_memory import SegmentPool
from rlhpc.runtime.comm.shared_memory import discard, remove_idle_of_the_dead
pool = SegmentPool(scratch)
paths = [pool.write([bytes(100_000)])[0] for _ in range(3)]
for path in paths:
    discard(path)
service = Service("inside", keys, scratch)
remove_idle_of_the_dead(scratch.shm)
print(json.dumps([process_id(), os.getpid(), paths, has_ended(process)]), flush=True)
sys.stdin.read(1)
service.stop()
"""


@pytest.fixture
def service() -> Iterator[Service]:
    with temporary_scratch() as scratch:
        made = Service("outside", CurveKeys.fresh(), scratch, "127.0.0.1")
        yield made
        made.stop()


def command(
    service: Service, unshare: list[str], mounts: list[str], code: str, frames: list[bytes] | None = None
) -> list[str]:
    """A process in namespaces of its own, with new filesystems at `mounts`."""
    keys, texts = service.keys, [bytes(frame).hex() for frame in frames or []]
    facts = [service.scratch.token, keys.public.decode(), keys.secret.decode(), service.endpoint, process_id(), texts]
    script = " && ".join([*(f"mount -t tmpfs none {folder}" for folder in mounts), 'exec "$@"'])
    inside = [sys.executable, "-c", PREPARE + code, json.dumps(facts)]
    return ["unshare", "--mount", "--propagation", "private", *unshare, "sh", "-c", script, "sh", *inside]


@pytest.mark.parametrize("mounts", [["/tmp"], ["/dev/shm"], ["/tmp", "/dev/shm"]], ids=",".join)
def test_a_process_with_folders_of_its_own_is_reached_by_tcp(service: Service, mounts: list[str]) -> None:
    """What one puts into its /tmp and /dev/shm the other does not find: for the two it is another host, and it lives."""
    packed = service.pack(np.ones(200_000, np.uint8))
    run = command(service, [], mounts, REACH, packed.frames())
    done = subprocess.run(run, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    host, chosen, reply, total, ended = json.loads(done.stdout)
    assert host != host_id() and chosen == service.endpoint["tcp"]
    assert (reply, total, ended) == ([], 200_000, False)


def test_a_process_that_shares_all_is_of_this_host(service: Service) -> None:
    packed = service.pack(np.ones(200_000, np.uint8))
    run = command(service, [], [], REACH, packed.frames())
    done = subprocess.run(run, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [host_id(), service.endpoint["ipc"], [], 200_000, False]


@pytest.mark.parametrize("proc", [["--mount-proc"], []], ids=["own /proc", "the outer /proc"])
def test_the_pid_of_another_namespace_says_nothing(service: Service, proc: list[str]) -> None:
    """Both write segments side by side; neither takes the other for dead, and their names differ."""
    outer = [service.pool.write([bytes(100_000)])[0] for _ in range(3)]
    for path in outer:
        service.pool.release(path, 0)
    run = command(service, ["--pid", "--fork", "--kill-child", *proc], [], WRITE)
    inside = subprocess.Popen(run, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert inside.stdout is not None
        process, pid, paths, outer_ended = json.loads(inside.stdout.readline())
        assert pid < 10 and not outer_ended and not has_ended(process)
        remove_idle_of_the_dead(service.scratch.shm)
        assert {*outer, *paths} == {str(path) for path in service.scratch.shm.iterdir()}
    finally:
        inside.communicate("x", timeout=30)
    assert inside.returncode == 0


def test_a_process_that_has_ended_is_known_to_have() -> None:
    child = subprocess.Popen([sys.executable, "-c", f"print({process_id()!r})"], stdout=subprocess.PIPE)
    namespace = process_id().partition(".")[2]
    assert not has_ended(process_id())
    child.communicate()
    assert has_ended(f"{child.pid}.{namespace}") and not has_ended(f"{child.pid}.1")
