"""Archives of Python environments: packing, checks, and nodes that unpack them for as long as jobs use them."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tarfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from rlhpc.runtime import environment_archive
from rlhpc.runtime.environment_archive import (
    UnpackedEnvironment,
    acquire,
    check_archive,
    folder_of,
    pack,
    python_of,
    read_manifest,
    release,
    remove_unused,
)
from rlhpc.runtime.errors import ConfigError
from tests.eventually import wait_until


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The node's own disk."""
    folder = tmp_path / "scratch"
    folder.mkdir(mode=0o700)
    monkeypatch.setenv("RLHPC_SCRATCH", str(folder))
    return folder


@pytest.fixture
def prefix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """This process's environment: a small one, with an interpreter that is no other environment's."""
    folder = tmp_path / "small"
    packages = folder / "lib" / "python3.11" / "site-packages"
    (packages / "pkg-1.0.dist-info").mkdir(parents=True)
    (packages / "pkg-1.0.dist-info" / "METADATA").write_text("Name: pkg\n")
    (packages / "pkg.py").write_text("VALUE = 1\n")
    (folder / "bin").mkdir()
    (folder / "bin" / "python").symlink_to(sys.executable)
    monkeypatch.setattr(sys, "prefix", str(folder))
    monkeypatch.setattr(sys, "base_prefix", str(folder))
    return folder


@pytest.fixture
def archive(prefix: Path, tmp_path: Path) -> Path:
    path = tmp_path / "environment.tar"
    pack(path)
    return path


def test_an_archive_says_what_it_has(archive: Path, prefix: Path) -> None:
    environment = check_archive(archive)
    assert (environment.prefix, environment.num_files, environment.base) == (str(prefix), 3, "")
    assert environment == read_manifest(archive)
    assert [path.name for path in archive.parent.iterdir() if path.is_file()] == ["environment.tar"]


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("none", r"cannot read .*: No such file or directory\. Write it with: rlhpc pack "),
        ("text", r"cannot read .*: it is no tar archive\. Write it with: rlhpc pack "),
        ("other", r"cannot read .*: it is no archive of rlhpc pack\. Write it"),
        ("packages", r"its packages have changed\. Write it again with: rlhpc pack "),
        ("prefix", r"the environment is /another, and the archive has .*small\. Write it again"),
    ],
)
def test_an_archive_that_is_not_of_this_environment_is_refused(
    fault: str, message: str, archive: Path, prefix: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    match fault:
        case "none":
            archive.unlink()
        case "text":
            archive.write_text("no archive")
        case "other":
            with tarfile.open(archive, "w") as tar:
                tar.add(prefix / "lib", "lib")
        case "packages":
            packages = prefix / "lib" / "python3.11" / "site-packages"
            (packages / "pkg-1.0.dist-info").rename(packages / "pkg-1.1.dist-info")
        case "prefix":
            monkeypatch.setattr(sys, "prefix", "/another")
    with pytest.raises(ConfigError, match=rf"^cluster\.environment_archive: .*{message}"):
        check_archive(archive)


def test_the_systems_python_is_not_packed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "prefix", "/usr")
    with pytest.raises(ConfigError, match="each node has on its own disk"):
        pack(tmp_path / "environment.tar")
    assert not list(tmp_path.iterdir())


def test_jobs_of_a_node_share_it_and_the_last_one_removes_it(archive: Path, scratch: Path) -> None:
    folder = folder_of(archive)
    assert folder.parent == scratch
    first = acquire(archive, folder)
    module = folder / "environment" / "lib" / "python3.11" / "site-packages" / "pkg.py"
    module.write_text("VALUE = 2\n")
    second = acquire(archive, folder)
    assert module.read_text() == "VALUE = 2\n", "it must not be unpacked a second time"
    assert folder.stat().st_mode & 0o077 == 0
    release(folder, first)
    assert module.exists() and remove_unused() == []
    release(folder, second)
    assert not list(scratch.iterdir())


def test_what_a_killed_job_leaves_is_unpacked_anew_or_removed(archive: Path, scratch: Path) -> None:
    folder = folder_of(archive)
    (folder / "environment" / "half").mkdir(parents=True)
    descriptor = acquire(archive, folder)
    assert not (folder / "environment" / "half").exists() and (folder / "environment" / "bin" / "python").exists()
    os.close(descriptor)  # as the kernel does when the process is killed
    assert remove_unused() == [folder]
    assert not list(scratch.iterdir())


def test_too_little_space_is_said_before_anything_is_unpacked(
    archive: Path, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=4096))
    with pytest.raises(
        ConfigError, match=r"takes 12.0 KiB, and .*scratch of node .* has 4.0 KiB free: .*cluster\.scratch"
    ):
        acquire(archive, folder_of(archive))
    assert not list(scratch.iterdir())


def unpacked(archive: Path) -> UnpackedEnvironment:
    node = os.uname().nodename
    return UnpackedEnvironment(archive, [([node], [])], lambda: None, dict(os.environ))


def test_a_node_keeps_it_as_long_as_the_session_lives(archive: Path, scratch: Path) -> None:
    environment, other = unpacked(archive), unpacked(archive)
    assert environment.python == other.python == python_of(folder_of(archive))
    assert Path(environment.python).exists()
    environment.close()
    assert Path(other.python).exists()
    other.close()
    assert not list(scratch.iterdir())


def test_a_node_that_cannot_unpack_it_is_an_error_with_its_reason(archive: Path, scratch: Path) -> None:
    archive.write_bytes(archive.read_bytes()[:4096])  # cut within its members
    with pytest.raises(
        ConfigError, match=rf"cannot unpack .*environment\.tar to .* on node {os.uname().nodename}: .*tar"
    ):
        unpacked(archive)
    assert not list(scratch.iterdir())


#: Driver that has an environment unpacked, says so, and does nothing.
DRIVER = """
import os, sys, time
from pathlib import Path
from rlhpc.runtime.environment_archive import UnpackedEnvironment
environment = UnpackedEnvironment(Path(sys.argv[1]), [([os.uname().nodename], [])], lambda: None, dict(os.environ))
print(environment.python, flush=True)
time.sleep(600)
"""


def test_a_killed_driver_leaves_nothing(archive: Path, scratch: Path) -> None:
    driver = subprocess.Popen([sys.executable, "-c", DRIVER, str(archive)], stdout=subprocess.PIPE, text=True)
    assert driver.stdout is not None
    python = driver.stdout.readline().strip()
    assert Path(python).exists()
    driver.send_signal(signal.SIGKILL)
    driver.communicate()
    wait_until(lambda: not list(scratch.iterdir()), 30)


#: Run with ranks in interpreters of their own, and which of their modules are of the environment in which the driver runs.
RUN = """
import sys
from pathlib import Path
from rlhpc import Cluster, NodePlacementStrategy, Session, Worker
from rlhpc.runtime.environment_archive import folder_of, pack

class Opener(Worker):
    def shared_files(self, prefixes):
        import json, small_module, sys
        files = [module.__file__ for module in list(sys.modules.values()) if getattr(module, "__file__", None)]
        return sys.prefix, [file for file in files if file.startswith(tuple(prefixes))]

archive = Path(sys.argv[1])
pack(archive)
Session.start(environment_archive=archive)
for ranks in (1, 4):
    group = Opener.create_group().launch(Cluster.local(1, 0), NodePlacementStrategy([0] * ranks), f"of{ranks}", fork=False)
    for prefix, files in group.shared_files([sys.prefix, sys.base_prefix]).wait():
        assert prefix == str(folder_of(archive) / "environment") and not files, (prefix, files)
    group.shutdown()
Session.current().stop()
assert not folder_of(archive).exists()
print("passed")
"""


@pytest.mark.long
def test_ranks_open_no_file_of_the_environment_itself(tmp_path: Path, scratch: Path) -> None:
    """With a virtual environment, whose interpreter is archived, too, unless it is the system's."""
    prefix = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", prefix], check=True, timeout=60)
    [packages] = prefix.glob("lib/python*/site-packages")
    (packages / "small_module.py").touch()
    (packages / "others.pth").write_text("".join(f"{path}\n" for path in sys.path if "site-packages" in path))
    command = [str(prefix / "bin" / "python"), "-c", RUN, str(tmp_path / "environment.tar")]
    run = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert run.stdout == "passed\n", run.stderr
    assert environment_archive.remove_unused() == [] and not list(scratch.iterdir())
