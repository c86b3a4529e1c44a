"""The folders of a session on a node: they go with it, and what others put under their names changes nothing."""

from __future__ import annotations

import ast
import fcntl
import os
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlhpc.cli import main
from rlhpc.jobs import shared_probe
from rlhpc.runtime import scratch as scratch_module
from rlhpc.runtime.errors import ConfigError, OwnershipError, StorageError
from rlhpc.runtime.scratch import (
    Scratch,
    cache_folder,
    live,
    make_socket_folder,
    make_temporary_folder,
    remove_stale,
    temporary_folder,
)
from tests.users import ALICE, BOB, needs_root, run_as

OLD = 3600.0


@pytest.fixture
def roots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """A /tmp and a /dev/shm of the test's own."""
    found = tmp_path / "tmp", tmp_path / "shm"
    for folder in found:
        folder.mkdir()
        folder.chmod(0o1777)
    monkeypatch.setattr(scratch_module, "_SOCKET_ROOT", found[0])
    monkeypatch.setattr(scratch_module, "_SHM_ROOT", found[1])
    monkeypatch.delenv("RLHPC_SCRATCH", raising=False)
    return found


def age(path: Path) -> None:
    """Makes a file or folder an hour old; not what a link leads to."""
    os.utime(path, (time.time() - OLD,) * 2, follow_symlinks=False)


def session(root: Path, token: str, *, lock: bool = True) -> Path:
    """What a session of this user that is over left."""
    folder = root / f"rlhpc-{os.getuid()}-{token}"
    folder.mkdir(mode=0o700)
    if lock:
        (folder / "lock").touch(0o600)
    age(folder)
    return folder


def test_made_twice_and_left_once_is_gone(roots: tuple[Path, Path]) -> None:
    scratch = Scratch("deadbeef")
    scratch.ensure()
    scratch.ensure()
    assert scratch.sockets.is_dir() and scratch.shm.is_dir()
    scratch.leave()
    assert [list(root.iterdir()) for root in roots] == [[], []]


HOLD = """
import os, sys, time
from pathlib import Path
from rlhpc.runtime import scratch
scratch._SOCKET_ROOT, scratch._SHM_ROOT = Path(sys.argv[1]), Path(sys.argv[2])
one = scratch.Scratch(sys.argv[3])
one.ensure(); one.ensure()
print("held", flush=True)
sys.stdin.read()
one.leave()
"""


def holder(roots: tuple[Path, Path], token: str) -> subprocess.Popen[str]:
    """Another process of the session; it leaves when its input ends."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, *map(str, roots), token], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    return process


def test_the_last_of_several_processes_removes_it(roots: tuple[Path, Path]) -> None:
    first, second = holder(roots, "feed"), holder(roots, "feed")
    first.communicate()
    assert live() and remove_stale() == []
    assert (roots[0] / f"rlhpc-{os.getuid()}-feed" / "lock").exists()
    second.communicate()
    assert [list(root.iterdir()) for root in roots] == [[], []]


def test_what_killed_processes_left_goes_with_the_next_start(roots: tuple[Path, Path]) -> None:
    dead, alive = holder(roots, "aaaa"), holder(roots, "bbbb")
    dead.kill()
    dead.communicate()
    mine = Scratch.create()
    names = {path.name.split("-")[2] for root in roots for path in root.iterdir()}
    assert names == {"bbbb", mine.token}
    mine.leave()
    alive.communicate()


def test_many_ranks_that_are_told_to_end_at_once_leave_nothing(roots: tuple[Path, Path]) -> None:
    """Whoever takes the lock for itself first finds the others in its way; the last one does not."""
    ranks = [holder(roots, "cafe") for _ in range(4)]
    for rank in ranks:
        assert rank.stdin is not None
        rank.stdin.close()
    for rank in ranks:
        rank.wait(30)
    assert [list(root.iterdir()) for root in roots] == [[], []]


MANY = """
import sys
from pathlib import Path
from rlhpc.runtime import scratch
scratch._SOCKET_ROOT, scratch._SHM_ROOT = Path(sys.argv[1]), Path(sys.argv[2])
for _ in range(60):
    one = scratch.Scratch.create()
    assert one._is_whole()
    one.leave()
"""


def test_starts_at_the_same_moment_do_not_take_one_another_for_dead(roots: tuple[Path, Path]) -> None:
    """Between the making of a lock and the taking of it any other start may look."""
    starts = [subprocess.Popen([sys.executable, "-c", MANY, *map(str, roots)]) for _ in range(4)]
    assert [start.wait(60) for start in starts] == [0, 0, 0, 0]
    assert [list(root.iterdir()) for root in roots] == [[], []]


def test_shared_memory_of_a_live_session_stays_where_its_tmp_is_out_of_sight(roots: tuple[Path, Path]) -> None:
    """A job may have a /tmp of its own, and see another job's /dev/shm."""
    other = holder(roots, "beef")
    shm = roots[1] / f"rlhpc-{os.getuid()}-beef-shm"
    age(shm)
    shutil.move(roots[0] / f"rlhpc-{os.getuid()}-beef", roots[0] / "elsewhere")
    assert remove_stale() == [] and shm.is_dir()
    other.kill()
    other.communicate()
    assert remove_stale() == [shm] and not shm.exists()


def test_a_folder_that_is_just_being_made_stays(roots: tuple[Path, Path]) -> None:
    making = roots[0] / f"rlhpc-{os.getuid()}-00000000"
    making.mkdir(mode=0o700)
    assert remove_stale() == [] and live() == [making]
    age(making)
    assert remove_stale() == [making]


def test_a_link_of_that_name_is_not_followed(roots: tuple[Path, Path], tmp_path: Path) -> None:
    important = tmp_path / "important"
    for name in ("spill", "lock"):
        (important / name).mkdir(parents=True)
    (important / "spill" / "thesis.tex").touch()
    important.chmod(0o700)
    age(important)
    for root, suffix in ((roots[0], ""), (roots[1], "-shm"), (roots[0], "-spill")):
        link = root / f"rlhpc-{os.getuid()}-cccccccc{suffix}"
        link.symlink_to(important)
        age(link)
    inside = session(roots[0], "dddddddd")  # a real one whose content leads elsewhere
    (inside / "spill").symlink_to(important / "spill")
    age(inside)
    Scratch.create().leave()
    assert (important / "spill" / "thesis.tex").exists() and not inside.exists()


@pytest.mark.parametrize("kind", ["fifo", "link", "folder", "loop", "socket"])
def test_odd_locks_keep_nobody_from_starting(roots: tuple[Path, Path], kind: str) -> None:
    folder = session(roots[0], "eeeeeeee", lock=False)
    lock = folder / "lock"
    if kind == "fifo":
        os.mkfifo(lock)
    elif kind == "link":
        lock.symlink_to("/dev/zero")
    elif kind == "folder":
        lock.mkdir()
    elif kind == "loop":
        lock.symlink_to(lock)
    else:
        os.mknod(lock, 0o600 | stat.S_IFSOCK)
    age(folder)
    Scratch.create().leave()
    assert not folder.exists(), "no session could have made that lock"


def test_a_loop_and_a_file_of_that_name_are_left_alone(roots: tuple[Path, Path]) -> None:
    loop, file = (roots[0] / f"rlhpc-{os.getuid()}-{name}" for name in ("ffffffff", "11111111"))
    loop.symlink_to(loop)
    file.touch()
    for path in (loop, file):
        age(path)
    Scratch.create().leave()
    assert loop.is_symlink() and file.exists()


BESIEGE = """
import os, sys
from pathlib import Path
tmp, shm, uid = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
own = tmp / "bobs"; own.mkdir(mode=0o700)
for root, suffix in ((tmp, ""), (shm, "-shm")):
    (root / f"rlhpc-{uid}-aaaaaaaa{suffix}").symlink_to(own / "x")
    (root / f"rlhpc-{uid}-bbbbbbbb{suffix}").symlink_to(own)
    (root / f"rlhpc-{uid}-cccccccc{suffix}").mkdir(mode=0o700)
    (root / f"rlhpc-{uid}-dddddddd{suffix}").mkdir(mode=0o777)
    (root / f"rlhpc-{uid}-eeeeeeee{suffix}").touch()
    os.mkfifo(root / f"rlhpc-{uid}-ffffffff{suffix}")
os.mkfifo(tmp / f"rlhpc-{uid}-dddddddd" / "lock", 0o666)
for number in range(300):
    (tmp / f"rlhpc-{uid}-{number:08x}").mkdir()
for path in [*tmp.iterdir(), *shm.iterdir()]:
    os.utime(path, (1, 1), follow_symlinks=False)
"""
START = """
import json, sys
from pathlib import Path
from rlhpc.runtime import scratch
scratch._SOCKET_ROOT, scratch._SHM_ROOT = Path(sys.argv[1]), Path(sys.argv[2])
one = scratch.Scratch.create()
print(json.dumps([str(one.sockets), str(one.shm)]))
one.leave()
"""


@needs_root
def test_another_user_can_neither_stop_a_start_nor_lose_anything_by_it(tmp_path_of_all: Path) -> None:
    roots = tmp_path_of_all / "tmp", tmp_path_of_all / "shm"
    for folder in roots:
        folder.mkdir()
        folder.chmod(0o1777)
    assert run_as(BOB, BESIEGE, *roots, ALICE).returncode == 0
    before = sorted(path.name for root in roots for path in root.iterdir())
    done = run_as(ALICE, START, *roots)
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for root in roots for path in root.iterdir()) == before, "Bob's stay Bob's"


@pytest.fixture
def tmp_path_of_all() -> Iterator[Path]:
    """A folder that every user may enter; pytest's own is closed to others."""
    folder = Path(tempfile.mkdtemp(prefix="scratch-of-all-", dir="/tmp"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


TAKE = """
import sys
from pathlib import Path
from rlhpc.runtime import scratch
from rlhpc.runtime.errors import OwnershipError
scratch._SOCKET_ROOT, scratch._SHM_ROOT = Path(sys.argv[1]), Path(sys.argv[2])
try:
    scratch.Scratch("aaaaaaaa").ensure()
except OwnershipError as error:
    print(error)
    sys.exit(error.exit_code)
"""


@needs_root
@pytest.mark.parametrize("part", ["sockets", "shm", "spill", "spill is a link"])
def test_folders_of_another_user_are_refused(tmp_path_of_all: Path, part: str, monkeypatch) -> None:
    """Bob knows the run's token, and was first on this node."""
    roots = tmp_path_of_all / "tmp", tmp_path_of_all / "shm"
    scratch_root = tmp_path_of_all / "scratch"
    for folder in (*roots, scratch_root):
        folder.mkdir()
        folder.chmod(0o1777)
    monkeypatch.setenv("RLHPC_SCRATCH", str(scratch_root))
    name = f"rlhpc-{ALICE}-aaaaaaaa"
    target = {"sockets": roots[0] / name, "shm": roots[1] / f"{name}-shm"}.get(part, scratch_root / f"{name}-spill")
    make = "import os, sys; os.mkdir(sys.argv[1]); os.chmod(sys.argv[1], 0o777)"
    if part == "spill is a link":
        make = "import os, sys; os.mkdir(sys.argv[1] + '.bob'); os.symlink(sys.argv[1] + '.bob', sys.argv[1])"
    assert run_as(BOB, make, target).returncode == 0
    done = run_as(ALICE, TAKE, *roots)
    assert done.returncode == 2 and str(target) in done.stdout, done.stdout + done.stderr
    assert ("a link" if "link" in part else f"user {BOB}") in done.stdout
    assert not list(target.iterdir()), "and nothing was written there"


def test_an_own_spill_that_others_may_write_to_is_refused(roots: tuple[Path, Path]) -> None:
    scratch = Scratch("abcd")
    scratch.sockets.mkdir(mode=0o700)
    scratch.spill.mkdir()
    scratch.spill.chmod(0o777)
    with pytest.raises(OwnershipError, match=r"spill can be written by others \(mode 0777\).*chmod 700"):
        scratch.ensure()


def test_what_is_kept_for_the_next_run_is_private_and_no_sessions(
    roots: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cache_folder() is None
    monkeypatch.setenv("RLHPC_SCRATCH", str(tmp_path))
    cache = cache_folder()
    assert cache is not None and cache == cache_folder()
    assert cache.parent == tmp_path and cache.stat().st_mode & 0o777 == 0o700
    os.utime(cache, (0, 0))
    assert remove_stale() == [] and cache.is_dir()
    cache.chmod(0o777)
    with pytest.raises(OwnershipError, match="can be written by others"):
        cache_folder()


def test_a_folder_for_sockets_goes_with_its_session(roots: tuple[Path, Path], monkeypatch) -> None:
    monkeypatch.setattr(scratch_module, "_held", {})  # those of tests before, in the same process
    alone = make_socket_folder("agents")
    assert alone.parent == roots[0] and alone.stat().st_mode & 0o777 == 0o700
    scratch = Scratch.create()
    assert make_socket_folder("agents").parent == scratch.sockets != make_socket_folder("agents")
    scratch.leave()
    assert list(roots[0].iterdir()) == [alone]


def test_cluster_scratch_has_to_keep_users_apart(roots: tuple[Path, Path], tmp_path: Path, monkeypatch) -> None:
    shared = tmp_path / "shared"
    monkeypatch.setenv("RLHPC_SCRATCH", str(shared))
    with pytest.raises(ConfigError, match=r"cluster\.scratch: .*No such file"):
        Scratch.create()
    shared.mkdir()
    shared.chmod(0o777)
    with pytest.raises(ConfigError, match=r"everybody may rename what is in .*chmod \+t"):
        Scratch.create()
    shared.chmod(0o1777)
    scratch = Scratch.create()
    assert [path.name for path in shared.iterdir()] == [f"rlhpc-{os.getuid()}-{scratch.token}-spill"]
    scratch.leave()
    assert not list(shared.iterdir())


def test_no_room_for_the_folders(roots: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    real = Path.mkdir

    def full(self: Path, *args: object, **options: object) -> None:
        if self.parent == roots[1]:
            raise OSError(28, "No space left on device", str(self))
        real(self, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(Path, "mkdir", full)
    with pytest.raises(StorageError, match=r"No space left on device.*filesystem at .* is full.*make room"):
        Scratch.create()
    assert not list(roots[0].iterdir()), "nothing is left behind"


def test_two_locks_of_one_process_are_one(roots: tuple[Path, Path]) -> None:
    scratch = Scratch("f00d")
    scratch.ensure()
    before = len(os.listdir("/proc/self/fd"))
    scratch.hold()
    scratch.ensure()
    assert len(os.listdir("/proc/self/fd")) == before
    with open(scratch.sockets / "lock") as other:
        with pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        scratch.release()
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    scratch.remove()


def test_clean_says_what_it_removed_and_what_lives(
    roots: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    site_scratch = tmp_path / "site-scratch"
    site_scratch.mkdir(mode=0o1777)
    (tmp_path / "site.yaml").write_text(f"cluster:\n  scratch: {site_scratch}\n")
    monkeypatch.setenv("RLHPC_SITE", str(tmp_path / "site.yaml"))
    monkeypatch.setenv("RLHPC_SCRATCH", "")  # so that what the command sets is taken back
    monkeypatch.setattr(shared_probe, "remove_unused_folders", list)  # those of other tests
    spill = session(site_scratch, "dead-spill", lock=False)
    dead = session(roots[0], "dead")
    foreign = roots[0] / f"rlhpc-{os.getuid()}-0000"
    foreign.symlink_to(tmp_path)
    alive = holder(roots, "feed")
    assert main(["clean"]) == 0
    said = capsys.readouterr().out
    node = os.uname().nodename.split(".")[0]
    prefix = f"rlhpc-{os.getuid()}-feed"
    assert said.splitlines() == [
        f"{node}: removed {spill}",
        f"{node}: removed {dead}",
        f"{node}: left {roots[1] / prefix}-shm, which a live run has",
        f"{node}: left {roots[0] / prefix}, which a live run has",
    ]
    assert not dead.exists() and not spill.exists() and foreign.is_symlink()
    alive.communicate()
    assert main(["clean"]) == 0
    assert capsys.readouterr().out == f"{node}: nothing to remove\n"
    assert main(["clean", "a=b"]) == 2


TRAIN = """
import os, sys
from pathlib import Path
from rlhpc.runtime import scratch
scratch._SOCKET_ROOT = scratch._SHM_ROOT = Path(os.environ["TMPDIR"])
session = scratch.Scratch.create()
session.hold_caches()
import torch
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.Adam(model.parameters())
model(torch.ones(2)).sum().backward()
optimizer.step()
import torch._inductor.runtime.cache_dir_utils as caches
print(caches.cache_dir())
session.leave()
print(os.listdir(os.environ["TMPDIR"]))
"""


def test_what_torch_makes_for_compiling_goes_with_the_session(tmp_path: Path) -> None:
    """With its first optimizer it makes a folder for what it compiles. A place that somebody has chosen stays theirs."""
    environment = {name: value for name, value in os.environ.items() if name != "TORCHINDUCTOR_CACHE_DIR"}
    environment |= {"TMPDIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    where, rest = subprocess.check_output([sys.executable, "-c", TRAIN], env=environment, text=True).splitlines()
    assert where.startswith(f"{tmp_path}/rlhpc-") and rest == "[]"
    chosen = str(tmp_path / "chosen")
    environment["TORCHINDUCTOR_CACHE_DIR"] = chosen
    where, rest = subprocess.check_output([sys.executable, "-c", TRAIN], env=environment, text=True).splitlines()
    assert where == chosen and rest == "['chosen']"


#: Modules that make temporary folders by themselves, and why these do not go with a session.
OWN_FOLDERS = {
    "runtime/scratch.py": "where the rule stands",
    "language/agents/runner/shell.py": "its copy of the rule, for interpreters without rlhpc; is told the session's folder",
    "embodied/python_env.py": "a command's, which has no session",
    "embodied/data/recording.py": "a command's, for data that has no other place, to be kept",
    "embodied/robots/server.py": "on a robot's own machine, while it connects",
    "cli/config.py": "a command's, which has no session",
    "language/models/builtin.py": "a plan's, which has no session",
    "language/evaluation/evaluate.py": "a command's, which has no session",
    "language/rollout/engine_probe.py": "a probe job's of the doctor, which has no session",
    "publishing/code.py": "a command's, which has no session",
    "runs/tuning/tune.py": "in the run's folder, to be looked at",
    "runtime/repository.py": "a command's or the driver's, for the time of one call of git",
}


def test_no_other_module_makes_folders_that_a_killed_rank_leaves() -> None:
    package, makes = Path(scratch_module.__file__).parents[1], set[str]()
    for path in package.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
            if name in ("mkdtemp", "TemporaryDirectory", "NamedTemporaryFile", "mkstemp"):
                makes.add(str(path.relative_to(package)))
    assert makes == set(OWN_FOLDERS)


def test_a_temporary_folder_lies_in_the_session_and_goes_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scratch_module, "_held", {})  # whatever session another test of this process has not let go
    with temporary_folder("x") as outside:
        assert outside.parent == Path(tempfile.gettempdir()) and stat.S_IMODE(outside.stat().st_mode) == 0o700
    assert not outside.exists()
    scratch = Scratch.create()
    try:
        folder = make_temporary_folder("x")
        assert folder.parent == scratch.sockets == make_socket_folder("y").parent
        with temporary_folder("x") as inside:
            assert inside.parent == scratch.sockets
        assert not inside.exists()
    finally:
        scratch.remove()
        scratch.release()
    assert not folder.exists()


@needs_root
def test_what_a_program_has_locked_is_removed_with_its_session() -> None:
    """Root enters every folder; its users do not."""
    code = """
import rlhpc.runtime.scratch as module
scratch = module.Scratch.create()
folder = module.make_temporary_folder("x") / "deep" / "er"
folder.mkdir(parents=True)
(folder / "file").touch()
folder.chmod(0o500)
folder.parent.chmod(0)
scratch.release()
module.remove_stale()  # or another session of that user has
assert not scratch.sockets.exists()
print("gone")
"""
    done = run_as(ALICE, code)
    assert done.stdout == "gone\n", done.stderr


def test_large_files_lie_below_the_sites_scratch_and_sockets_do_not(
    roots: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Folders of programs stay where memory is freed, and go with the session."""
    disk = tmp_path / "disk"
    disk.mkdir()
    disk.chmod(0o1777)
    monkeypatch.setenv("RLHPC_SCRATCH", str(disk))
    scratch = Scratch.create()
    try:
        files, sockets = make_temporary_folder("box"), make_socket_folder("api")
        (files / "large").write_text("x")
        assert files.parent == scratch.spill and disk in files.parents and sockets.parent == scratch.sockets
        scratch.free_memory()
        assert (files / "large").exists()
    finally:
        scratch.remove()
        scratch.release()
    assert not list(disk.iterdir()) and not list(roots[0].iterdir())
