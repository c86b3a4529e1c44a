"""Claims, submit locks and drivers on filesystems with manners of their own: no locks, locks of one node, listings of some
time ago, and answers that contradict what was done."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import json
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from rlhpc.jobs import lease, probes, shared_files
from rlhpc.jobs import segment as claim
from rlhpc.jobs.driver_lock import sole_driver
from rlhpc.jobs.paths import RunPaths
from rlhpc.jobs.probes import ProcessId
from rlhpc.jobs.segment import Claim, SegmentJournal
from rlhpc.runtime import files as durable
from rlhpc.runtime.errors import DeadlineExceeded, UserError


def no_flock(patch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    patch.setattr(fcntl, "flock", refuse)


def flock_of_one_node(patch: pytest.MonkeyPatch) -> None:
    """Each process here stands for a node of its own: nobody else's lock is seen."""
    patch.setattr(fcntl, "flock", lambda *_: None)


def empty_listing(patch: pytest.MonkeyPatch) -> None:
    """As a client's cache of a folder in which everything is newer."""
    real_listdir, real_iterdir = os.listdir, Path.iterdir
    patch.setattr(os, "listdir", lambda path=".": [] if Path(path).name == "submit" else real_listdir(path))
    patch.setattr(Path, "iterdir", lambda self: iter(()) if self.name == "submit" else real_iterdir(self))


def link_that_lies(patch: pytest.MonkeyPatch) -> None:
    """The server made the link, and its answer was lost: the request is sent again, and meets that link."""
    real = os.link

    def link(source: Any, target: Any) -> None:
        real(source, target)
        raise FileExistsError(errno.EEXIST, "File exists", str(target))

    patch.setattr(durable.os, "link", link)


def no_links(patch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    patch.setattr(durable.os, "link", refuse)


MANNERS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "ideal": lambda patch: None,
    "no flock": no_flock,
    "flock of one node": flock_of_one_node,
    "empty listing": empty_listing,
    "link that lies": link_that_lies,
    "no hard links": no_links,
}


@pytest.fixture(params=MANNERS)
def manners(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    MANNERS[request.param](monkeypatch)
    return str(request.param)


@pytest.fixture
def files(tmp_path: Path) -> SegmentJournal:
    paths = RunPaths(tmp_path / "run")
    paths.submit.mkdir(parents=True)
    return SegmentJournal(paths, 0)


def elsewhere(pid: int = 4242) -> dict[str, Any]:
    return {"pid": pid, "start": 1, "host": "login01/another-boot/pid:[1]"}


@pytest.fixture
def short_leases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claim, "LEASE_S", 1.0)
    monkeypatch.setattr(lease, "LEASE_S", 1.0)
    monkeypatch.setattr(lease, "RENEW_S", 0.1)


@contextlib.contextmanager
def renewed(path: Path) -> Iterator[None]:
    """Somebody of another host renews a file."""
    over = threading.Event()

    def renew() -> None:
        while not over.wait(0.1):
            with contextlib.suppress(FileNotFoundError):
                os.utime(path)

    thread = threading.Thread(target=renew)
    thread.start()
    yield
    over.set()
    thread.join()


def test_one_of_several_claims(files: SegmentJournal, manners: str) -> None:
    """Whoever comes at once: one gets the segment. So it is with each later start, whose earlier owner is dead."""
    generator = random.Random(manners)
    for start in range(1, 4):
        taken: list[Claim | None] = []
        gate = threading.Barrier(6)

        def take(taken: list[Claim | None] = taken, gate: threading.Barrier = gate) -> None:
            gate.wait()
            time.sleep(generator.random() * 0.01)
            taken.append(Claim.take(files, token="t", job_id="1", executor="local"))

        threads = [threading.Thread(target=take) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        owners = [each for each in taken if each is not None]
        assert [owner.number for owner in owners] == [start]
        assert owners[0].owns() and Claim.newest(files) == owners[0]
        owners[0].update(released=True)


def test_an_earlier_owner_knows_that_it_is_no_longer_one(files: SegmentJournal, manners: str) -> None:
    first = Claim.take(files, token="t", job_id="1", executor="local")
    assert first is not None and first.owns()
    first.update(released=True)
    second = Claim.take(files, token="t", job_id="2", executor="local")
    assert second is not None and second.owns() and not first.owns()


@pytest.mark.usefixtures("short_leases")
def test_a_live_submitter_of_another_host_is_waited_for_and_a_dead_one_is_not(
    files: SegmentJournal, manners: str
) -> None:
    files.lease.write_text(json.dumps({"process": elsewhere()}))
    with renewed(files.lease), pytest.raises(DeadlineExceeded, match="another process has been submitting it"):  # noqa: SIM117
        with files.submit_lock(timeout_s=2.5):
            pass
    with files.submit_lock(timeout_s=10.0):
        assert json.loads(files.lease.read_text())["process"]["pid"] == os.getpid()
    assert not files.lease.exists()


@pytest.mark.usefixtures("short_leases")
@pytest.mark.parametrize("missing_looks", [1, 2])
def test_a_claim_that_its_job_replaces_belongs_to_a_live_job(
    files: SegmentJournal, monkeypatch: pytest.MonkeyPatch, missing_looks: int
) -> None:
    """NFS renames an open file before it is replaced: for a moment, other hosts find none."""
    path = files.claim(1)
    path.write_text(json.dumps({"number": 1, "token": "t", "executor": "local", "job_id": "7", "job": elsewhere()}))
    newest, looks = Claim.newest(files), iter(range(missing_looks))
    assert newest is not None

    def look(looked_at: Path) -> durable.ServerStatus:
        if next(looks, None) is not None:
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", str(looked_at))
        return durable.server_status(looked_at)

    monkeypatch.setattr(shared_files, "server_status", look)
    with renewed(path):
        assert newest.alive()
    path.unlink()
    assert not newest.alive(), "it does not come back"


@pytest.mark.usefixtures("short_leases")
def test_a_slow_submission_is_renewed_all_the_while(
    files: SegmentJournal, manners: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with files.submit_lock():
        here = probes.process_space()
        monkeypatch.setattr(probes, "process_space", lambda: "login02/a-third-boot/pid:[2]")
        assert here != probes.process_space()
        content = json.loads(files.lease.read_text())
        for _ in range(3):  # each look from the other host takes as long as a lease
            assert lease.is_holder_alive(files.lease, content)
        monkeypatch.undo()


@pytest.mark.usefixtures("short_leases")
def test_what_another_has_taken_over_is_left_alone(files: SegmentJournal, manners: str) -> None:
    with files.submit_lock():
        files.lease.unlink()
        files.lease.write_text(json.dumps({"process": elsewhere(7)}))
    assert json.loads(files.lease.read_text())["process"]["pid"] == 7


@pytest.mark.usefixtures("short_leases")
def test_a_driver_of_another_host(files: SegmentJournal, manners: str) -> None:
    """One that renews its record keeps the run; one that does not has ended, whatever the locks say."""
    record = files.paths.driver_record
    record.write_text(json.dumps({"job": "", "process": elsewhere()}))
    with renewed(record), pytest.raises(UserError, match="is being trained by process 4242 on login01"):  # noqa: SIM117
        with sole_driver(files.paths):
            pass
    with sole_driver(files.paths):
        assert json.loads(record.read_text())["process"] == ProcessId.from_pid(os.getpid()).to_json()
        with pytest.raises(UserError, match="is being trained by"), sole_driver(files.paths):
            pass
    assert not record.exists()


def test_a_lease_that_this_host_remembers_as_missing_is_not_taken_from_its_holder(
    files: SegmentJournal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its content comes after a while; a file that stays empty is one of a process that died while it wrote it."""
    first, second = lease.Lease(files.lease), lease.Lease(files.lease)
    assert first.take()
    read, misses = lease.read_json_file, iter(range(5))
    monkeypatch.setattr(lease, "read_json_file", lambda path: None if next(misses, None) is not None else read(path))
    assert not second.take_over() and first.owns()
    first.release()
    files.lease.touch()
    monkeypatch.setattr(lease, "MISSING_NAME_S", 0.2)
    assert second.take_over() and second.owns()
    second.release()


def take_over_at_once(path: Path, at_line: int) -> tuple[list[str], int]:
    """Takes over a dead holder's lease while others do so, too: one before line `at_line`, one before each later line.

    Returns:
        Those that hold the lease, and the number of lines that the takeover has executed.
    """
    second, heir, third = (lease.Lease(path) for _ in range(3))
    line, holders = 0, list[str]()

    def interfere(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal line
        if frame.f_code.co_filename != lease.__file__ or threading.current_thread() is not threading.main_thread():
            return None
        if event == "line":
            line += 1
            if line == at_line and heir.take_over():
                holders.append("heir")
            if line > at_line and holders and third.take_over():
                holders.append("third")
        return interfere

    sys.settrace(interfere)
    try:
        if second.take_over():
            holders.append("second")
    finally:
        sys.settrace(None)
    for each in (second, heir, third):
        each.end_renewal()
    return holders, line


def test_a_dead_holder_s_lease_is_removed_only_while_it_is_his(files: SegmentJournal) -> None:
    ended = subprocess.Popen(["true"])
    dead = {"process": ProcessId.from_pid(ended.pid).to_json(), "nonce": "of the dead"}
    ended.wait()
    for at_line in itertools.count(1):
        path = files.lease.with_name(f"line_{at_line}.lease")
        path.write_text(json.dumps(dead))
        holders, lines = take_over_at_once(path, at_line)
        assert len(holders) == 1, f"{holders} at line {at_line}"
        if lines < at_line:
            break
    assert at_line > 10


def release_while_another_takes_over(path: Path, at_line: int) -> tuple[lease.Lease, int]:
    """Releases a lease that another process takes over before the release executes line `at_line`.

    Returns:
        The lease of the other one, and the number of lines that the release has executed.
    """
    released, heir = lease.Lease(path), lease.Lease(path)
    assert released.take()
    line = 0

    def interfere(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal line
        files = (lease.__file__, durable.__file__)
        if frame.f_code.co_filename not in files or threading.current_thread() is not threading.main_thread():
            return None
        if event == "line":
            line += 1
            if line == at_line:
                path.unlink(missing_ok=True)
                assert heir.take()
        return interfere

    sys.settrace(interfere)
    try:
        released.release()
    finally:
        sys.settrace(None)
    heir.end_renewal()
    return heir, line


@pytest.mark.parametrize("links", [True, False])
def test_a_release_leaves_the_lease_of_one_that_takes_over_at_any_moment(
    files: SegmentJournal, monkeypatch: pytest.MonkeyPatch, links: bool
) -> None:
    if not links:

        def refuse(*_: Any) -> None:
            raise OSError(errno.EPERM, "Operation not permitted")

        monkeypatch.setattr(os, "link", refuse)
    for at_line in itertools.count(1):
        path = files.lease.with_name(f"line_{at_line}.lease")
        heir, lines = release_while_another_takes_over(path, at_line)
        if lines < at_line:
            assert not path.exists()
            break
        assert heir.owns(), f"line {at_line}"
        assert [each.name for each in path.parent.iterdir() if path.name in each.name] == [path.name], f"line {at_line}"
    assert at_line > 10


DRIVE = """
import sys
from pathlib import Path
from rlhpc.jobs.paths import RunPaths
from rlhpc.jobs.driver_lock import sole_driver
from rlhpc.runtime.errors import DeadlineExceeded, UserError
try:
    with sole_driver(RunPaths(Path(sys.argv[1]))):
        print("drives", flush=True)
        sys.stdin.readline()
except UserError:
    print("refused", flush=True)
"""


def test_of_drivers_that_start_at_once_one_drives(files: SegmentJournal) -> None:
    started = [
        subprocess.Popen(
            [sys.executable, "-c", DRIVE, str(files.paths.root)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        )
        for _ in range(4)
    ]  # fmt: skip
    answers = [driver.stdout.readline().strip() for driver in started if driver.stdout]
    assert sorted(answers) == ["drives", "refused", "refused", "refused"]
    for driver in started:
        driver.communicate("\n", timeout=60)


def test_a_look_that_takes_longer_than_a_lease_is_not_the_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The filesystem stalls, or the process that watches: what it was answered before says nothing of a live holder."""
    clock, path = [0.0], tmp_path / "lease"
    path.touch()

    def stall(path: Path) -> durable.ServerStatus:
        status = durable.server_status(path)
        clock[0] += lease.LEASE_S + 1
        os.utime(path, ns=(0, status.mtime_ns + 10**9))  # the holder's renewal, which comes after the answer
        return status

    monkeypatch.setattr(durable.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(durable.time, "sleep", lambda pause_s: None)
    statuses = iter([durable.server_status, stall])
    monkeypatch.setattr(shared_files, "server_status", lambda path: next(statuses, durable.server_status)(path))
    assert shared_files.renewed_within(path, lease.LEASE_S)
