"""`rlhpc doctor` on allocated nodes: faults of steps, folders, locks, clocks, names and networks, all made and named."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.false_clock import find_faketime

from .cluster import SlurmCluster
from .runs import SITE
from .test_doctor import Doctor, failed, line_of

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(400)]


def on_site(slurm: SlurmCluster, folder: Path, **keys: Any) -> Doctor:
    """The doctor with a site file that has further keys."""
    return Doctor(slurm, folder, {"cluster": {**SITE["cluster"], **keys}})


def test_a_second_step_shares_gpus_folders_and_locks(slurm: SlurmCluster, tmp_path: Path) -> None:
    """As it should be, with options of srun that Slurm accepts and options that each step gets."""
    lines = on_site(slurm, tmp_path, srun=["--export=ALL,RLHPC_TEST=1", "--cpu-bind=none"])(code=0)
    found = {what: line_of(lines, what) for what in (
        "srun options", "overlapping steps in gpu", "overlapping steps in cpu", "/tmp of steps", "file locks between nodes",
        "clocks",
    )}  # fmt: skip
    assert {line["level"] for line in found.values()} == {"pass"}, found
    assert found["srun options"]["found"] == "--export=ALL,RLHPC_TEST=1 --cpu-bind=none: accepted"
    assert found["overlapping steps in gpu"]["found"] == "two at the same time, both with gpu:fake:2"
    assert "two jobs on" in found["/tmp of steps"]["found"] and "share it, too" in found["/tmp of steps"]["found"]


def test_options_that_srun_refuses(slurm: SlurmCluster, tmp_path: Path) -> None:
    """One line names the key and srun's own words; the other checks are made all the same."""
    lines = on_site(slurm, tmp_path, srun=["--container-imag=/images/rlhpc.sqsh"])(code=1)
    assert list(failed(lines)) == ["srun options"]
    line = line_of(lines, "srun options")
    assert "--container-imag=/images/rlhpc.sqsh: refused in cpu, gpu: " in line["found"] and "srun" in line["do"]
    assert "unrecognized option" in line["found"] or "ambiguous" in line["found"], line
    assert line_of(lines, "overlapping steps in gpu")["level"] == "pass"


def test_a_wrapper_of_srun_that_drops_overlap(slurm: SlurmCluster, tmp_path: Path) -> None:
    """As sites have them; each step of a run would wait for the one before it."""
    folder, srun = tmp_path / "bin", shutil.which("srun")
    folder.mkdir()
    wrapper = folder / "srun"
    wrapper.write_text(
        '#!/bin/bash\nwords=()\nfor word; do [ "$word" = --overlap ] && word=--exact; words+=("$word"); done\n'
        f'exec {shlex.quote(str(srun))} "${{words[@]}}"\n'
    )
    wrapper.chmod(0o755)
    lines = on_site(slurm, tmp_path)(code=1, PATH=f"{folder}:{os.environ['PATH']}")
    assert {"overlapping steps in gpu", "overlapping steps in cpu"} == set(failed(lines))
    line = line_of(lines, "overlapping steps in gpu")
    assert "a second step with gpu:fake:2 did not start on gpu1, gpu2 while the first one ran" in line["found"]
    assert "wrapper of srun" in line["do"]


#: Command that gives what it runs a /tmp of its own, as a container without the node's /tmp does.
OWN_TMP = ["unshare", "--mount", "bash", "-c", 'mount -t tmpfs none "$0" && exec "$@"']


def test_steps_with_a_tmp_of_their_own(slurm_hosts: SlurmCluster, tmp_path: Path) -> None:
    """The folder of runs is shared, /tmp is not: /dev/shm shows the same, for the tests' own files are in /tmp."""
    lines = on_site(slurm_hosts, tmp_path, container=[*OWN_TMP, "/dev/shm"])(code=1)
    assert list(failed(lines)) == ["/tmp of steps"]
    line = line_of(lines, "/tmp of steps")
    assert line["found"] == "steps of one job have their own /dev/shm on cpu1, cpu2, gpu1, gpu2"
    assert "--container-mounts=/tmp:/tmp" in line["do"] and "--bind /tmp" in line["do"]


def test_locks_that_hold_on_one_node_only(slurm_hosts: SlurmCluster, tmp_path: Path) -> None:
    """Another superblock over the same files, as of Lustre with localflock; and a system call that fails, as with noflock."""
    doctor = on_site(slurm_hosts, tmp_path)
    work = tmp_path / "work"
    work.mkdir()
    lower = tmp_path / "lower"
    lower.mkdir()
    options = f"lowerdir={lower},upperdir={doctor.runs},workdir={work}"
    slurm_hosts.run_on("gpu2", "mount", "-t", "overlay", "overlay", "-o", options, doctor.runs)
    try:
        lines = doctor(code=1)
    finally:
        slurm_hosts.run_on("gpu2", "umount", doctor.runs)
    line = line_of(lines, "file locks between nodes")
    assert list(failed(lines)) == ["shared folder"], "this kind of superblock also remembers which names were missing"
    assert line["level"] == "warn" and "gpu2 get a lock that this machine holds: locks are node-local" in line["found"]
    assert "HF_HOME" in line["do"] and "-o flock" in line["do"]


#: Program that runs a command; on cpu1 the kernel refuses it flock, as Lustre does that is mounted without locks.
NO_FLOCK = """
import ctypes, os, platform, struct, sys

if os.environ.get("SLURMD_NODENAME") == "cpu1":
    number = {"x86_64": 73, "aarch64": 32}[platform.machine()]
    rules = [(0x20, 0, 0, 0), (0x15, 0, 1, number), (0x06, 0, 0, 0x00050000 | 38), (0x06, 0, 0, 0x7FFF0000)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *rule) for rule in rules))
    program = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(rules), ctypes.addressof(code)))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(38, 1, 0, 0, 0) == 0 and libc.prctl(22, 2, program, 0, 0) == 0, ctypes.get_errno()
os.execvp(sys.argv[1], sys.argv[1:])
"""


def test_no_locks(slurm: SlurmCluster, tmp_path: Path) -> None:
    """flock is not implemented on one node."""
    program = tmp_path / "noflock.py"
    program.write_text(NO_FLOCK)
    line = line_of(
        on_site(slurm, tmp_path, container=[sys.executable, "-S", str(program)])(code=0), "file locks between nodes"
    )
    assert line["level"] == "warn" and "cpu1 cannot lock a file (Function not implemented)" in line["found"]


@pytest.mark.parametrize(
    ("offsets", "found"),
    [
        ({"cpu2": 600}, "of cpu2 differ from this one's, by up to 600 s (cpu2)"),
        ({"gpu1": 4, "cpu1": -4}, "of cpu1 and gpu1 differ by 8 s"),
    ],
)
def test_clocks_that_disagree(slurm: SlurmCluster, tmp_path: Path, offsets: dict[str, int], found: str) -> None:
    """With this one, or only with one another."""
    if not (library := find_faketime()):
        pytest.skip("needs libfaketime: sudo tests/install.sh installs what the tests need of Debian")
    wrong = "export FAKETIME_DONT_FAKE_MONOTONIC=1 LD_PRELOAD=" + library
    setup = [
        f"if [ $SLURMD_NODENAME = {node} ]; then {wrong} FAKETIME={seconds:+d}; fi" for node, seconds in offsets.items()
    ]
    line = line_of(on_site(slurm, tmp_path, setup=setup)(code=0), "clocks")
    assert line["level"] == "warn" and line["found"] == found and "NTP" in line["do"]


@contextmanager
def names_of_nodes(slurm: SlurmCluster, file: Path) -> Iterator[None]:
    """The nodes with a /etc/hosts that names them all."""
    rows = [f"{slurm.address(node)} {node}" for node in slurm.nodes]
    file.write_text("\n".join(["127.0.0.1 localhost", *rows, ""]))
    mounted = []
    try:
        for node in slurm.nodes:
            slurm.run_on(node, "mount", "--bind", file, "/etc/hosts")
            mounted.append(node)
        yield
    finally:
        for node in mounted:
            slurm.run_on(node, "umount", "/etc/hosts")


def test_names_that_nodes_do_not_know(slurm_hosts: SlurmCluster, tmp_path: Path) -> None:
    """Nodes of the test cluster have addresses only. Runs need no names, so it is a warning."""
    doctor = on_site(slurm_hosts, tmp_path)
    line = line_of(doctor(code=0), "host names")
    assert line["level"] == "warn" and "cpu1, cpu2, gpu1, gpu2 cannot look up cpu1, cpu2, gpu1, gpu2 (" in line["found"]
    with names_of_nodes(slurm_hosts, tmp_path / "hosts"):
        line = line_of(doctor(code=0), "host names")
    assert (line["level"], line["found"]) == ("pass", "cpu1, cpu2, gpu1, gpu2 look up one another's names")


@contextmanager
def second_network(slurm: SlurmCluster) -> Iterator[None]:
    """The nodes with another interface, data0, in a network of its own."""
    connected = []
    try:
        for number, node in enumerate(slurm.nodes):
            slurm.add_interface(node, "data0", f"10.76.0.{11 + number}")
            connected.append(node)
        yield
    finally:
        for node in connected:
            slurm.remove_interface(node, "data0")


def test_nodes_on_two_networks(slurm_hosts: SlurmCluster, tmp_path: Path) -> None:
    """Which one ranks use is said, and how to choose; a variable of this shell that names neither is a fault."""
    doctor = on_site(slurm_hosts, tmp_path)
    with second_network(slurm_hosts):
        line = line_of(doctor(code=0), "interface")
        assert line["level"] == "warn" and line["found"].endswith("the nodes reach one another by data0, too"), line
        assert "data0 gives ranks NCCL_SOCKET_IFNAME=data0 GLOO_SOCKET_IFNAME=data0" in line["do"]
        (tmp_path / "other").mkdir()
        lines = on_site(slurm_hosts, tmp_path / "other", interface="data0")(code=1, NCCL_SOCKET_IFNAME="ib0")
    line = line_of(lines, "interface")
    assert line["level"] == "pass" and "ranks get NCCL_SOCKET_IFNAME=data0" in line["found"]
    assert list(failed(lines)) == ["NCCL_SOCKET_IFNAME"]
    assert (
        "ib0 of this shell is no interface of cpu1, cpu2, gpu1, gpu2; there are: data0, eth0, lo"
        in failed(lines)["NCCL_SOCKET_IFNAME"]
    )
