"""Checks of the nodes: shell, versions, disk, network and GPUs."""

from __future__ import annotations

from typing import Any

import pytest

from rlhpc.jobs.doctor import Finding, node_probe, worst_level
from rlhpc.jobs.doctor import node_checks as here
from rlhpc.jobs.doctor import node_checks as nodes
from rlhpc.jobs.doctor.probe_jobs import ProbeJob
from tests.unit.jobs.doctor.cluster import SPACE, hello, levels, probed, site


def test_this_shell() -> None:
    lines = list(here.environment({"CUDA_VISIBLE_DEVICES": "7", "SBATCH_PARTITION": "gpu"}))
    assert levels(lines) == ["warn", "warn"] and "'7'" in lines[0].result and "SBATCH_PARTITION" in lines[1].result
    assert list(here.environment({"PATH": "/bin"})) == []


def test_versions() -> None:
    plugin = "snakemake-executor-plugin-slurm"
    versions = {"snakemake": "9.27.1", plugin: None, f"{plugin}-jobstep": "0.6.1", "submitit": "1.4.9"}
    assert levels(here.packages(versions, "/other/slurm.conf")) == ["pass", "warn", "warn", "fail"]
    assert levels(here.packages(versions, None)) == ["pass", "warn", "pass", "fail"]


def test_disk_and_quota() -> None:
    assert here.disk("d", "/d", SPACE).level == "pass"
    assert here.disk("d", "/d", {**SPACE, "inodes_free": 5}).level == "warn"
    assert here.disk("d", "/d", {**SPACE, "writable": False}).level == "fail"
    assert here.disk("d", "/d", {"error": "No such file or directory"}).level == "fail"
    lines = list(
        here.quotas(
            "Disk quotas for user me (uid 1000): \n"
            "     Filesystem   space   quota   limit   grace   files   quota   limit   grace\n"
            " server:/home 20400000*  20480000  20971520     0   12000  100000  110000       0\n"
        )
    )
    assert levels(lines) == ["warn", "pass"] and "100 % of 20 GiB space on server:/home" in lines[0].result


def test_nodes_as_they_should_be() -> None:
    found = probed(hello("n1"), hello("n2"))
    found.jobs[0].offsets = {"n1": (0.2, 0.01), "n2": (-0.1, 0.01)}
    lines = [
        *nodes.job_starts(found.jobs), *nodes.shared_folder(found), *nodes.interface(found, site(), {}), *nodes.ports(found),
        *nodes.gpu_masks(found, {}), *nodes.python(found), *nodes.shared_memory(found), *nodes.node_disks(found, site()),
        *nodes.simulators(found), *nodes.clocks(found), *nodes.limits(found),
    ]  # fmt: skip
    assert levels(lines) == ["pass"] * 11
    assert "within 9 ms" in lines[1].result and "eth0: n1, n2" in lines[2].result


def test_an_unshared_folder() -> None:
    found = probed(
        hello("n1", canary={"error": "no such file", "parent": True}),
        hello("n2", canary={"error": "no such file", "parent": False}),
        hello("n3"), hello("n4"), hello("n5", canary={"ms": 1.0, "parent": True, "write_error": "Disk quota exceeded"}),
    )  # fmt: skip
    found.jobs[0].canary_views["n4"] = {"error": "no such file"}
    lines = list(nodes.shared_folder(found))
    assert levels(lines) == ["fail", "fail", "fail", "fail", "pass"]
    assert "not shared: n1 have another folder" in lines[0].result and "n2 have no such folder" in lines[1].result
    assert "n4 write files there that are not seen here" in lines[2].result and "Disk quota" in lines[3].result
    assert "from n3," in lines[4].result
    found.jobs[0].peers["n3"]["second"] = {"error": "no such file"}
    assert worst_level(list(nodes.shared_folder(found))) == "fail"


def test_masks() -> None:
    found = probed(hello("n1", mask="7"), hello("n2"))
    [line] = nodes.gpu_masks(found, {"CUDA_VISIBLE_DEVICES": "7"})
    assert (
        line.level == "fail"
        and "stale on n1" in line.result
        and "this shell's" in line.result
        and "unset" in line.advice
    )
    assert levels(nodes.gpu_masks(probed(hello("n1", mask="0,1"), gpus=1), {})) == ["fail"]
    assert levels(nodes.gpu_masks(probed(hello("n1", mask="3"), gpus=1), {})) == ["pass"]
    assert levels(nodes.gpu_masks(probed(hello("n1"), gpus=1), {})) == ["warn"]
    assert levels(nodes.gpu_masks(probed(hello("n1", mask="")), {})) == ["pass"]


#: What torch says where all is well.
FINE = {
    "driver": "13.0", "torch": "2.13.0+cu130", "cuda": "13.0", "hip": None, "seen": 2, "warning": "", "computes": True,
    "vllm": False, "nccl": True, "code": 0,
}  # fmt: skip


def in_torch(*, granted: int = 2, without: tuple[str, ...] = (), **changed: Any) -> Finding:
    found = probed(hello("n1", mask="0,1"), gpus=granted)
    found.jobs[0].torch["n1"] = {key: value for key, value in {**FINE, **changed}.items() if key not in without}
    [line] = nodes.gpus_in_torch(found, {})
    return line


def test_gpus_that_torch_can_use() -> None:
    line = in_torch()
    assert (line.level, line.advice) == ("pass", "")
    assert line.result == "torch 2.13.0+cu130 computes on the 2 granted, and sums over 2 of them by NCCL (n1)"
    assert "computes on the 2 granted, loads vLLM's kernels, and sums" in in_torch(vllm=True).result
    one = in_torch(granted=1, seen=1, without=("nccl",))
    assert one.level == "pass" and "NCCL" not in one.result
    assert list(nodes.gpus_in_torch(probed(hello("n1")), {})) == []  # none was asked for
    missing = probed(hello("n1", packages={"torch": False}), gpus=1)
    assert list(nodes.gpus_in_torch(missing, {})) == []  # another line says that


@pytest.mark.parametrize(
    ("said", "found", "do"),
    [
        ({"seen": 0, "torch": "2.13.0+cpu", "cuda": None}, "granted 2, torch sees 0: torch 2.13.0+cpu is built for the "
         "CPU; the driver takes CUDA up to 13.0", "RLHPC_TORCH=cu130 bash envs/setup.sh"),
        ({"seen": 0, "cuda": None, "driver": "12.9"}, "up to 12.9", "RLHPC_TORCH=cu128 "),
        ({"seen": 0, "cuda": None, "driver": "12.2"}, "up to 12.2", "RLHPC_TORCH=cu126 "),
        ({"seen": 0, "cuda": None, "driver": ""}, "there is no libcuda.so.1", "RLHPC_TORCH=auto "),
        ({"seen": 0, "driver": "12.4", "warning": "The NVIDIA driver on your system is too old"},
         "is built for CUDA 13.0 and finds 0 of them (CUDA_VISIBLE_DEVICES=0,1) (The NVIDIA driver on your system is too "
         "old); the driver takes CUDA up to 12.4", "nvidia-smi"),
        ({"seen": 1}, "granted 2, torch sees 1", "nvidia-smi"),
        ({"error": "RuntimeError: CUDA error: device busy", "without": ("computes", "vllm", "nccl")},
         "computing on a GPU failed: RuntimeError: CUDA error: device busy", "nvidia-smi"),
        ({"error": "ImportError: libcudart.so.13: cannot open shared object file", "without": ("vllm", "nccl")},
         "importing vLLM's kernels failed: ImportError: libcudart.so.13", "NVIDIA driver 580"),
        ({"error": "RuntimeError: NCCL Error 1", "without": ("nccl",)}, "NCCL's all-reduce failed: RuntimeError", "P2P"),
        ({"hung_s": 60.0, "without": ("nccl", "code")}, "NCCL's all-reduce did not end within 60 s", "P2P"),
        ({"nccl": False}, "a wrong sum", "NCCL_P2P_DISABLE=1"),
        ({"hung_s": 60.0, "without": ("seen", "code")}, "counting GPUs did not end within 60 s", "nvidia-smi"),
        ({"code": -11, "words": "Segmentation fault", "without": ("torch",)},
         "importing torch ended with exit code -11: Segmentation fault", "import torch"),
    ],
)  # fmt: skip
def test_gpus_that_torch_cannot_use(said: dict[str, Any], found: str, do: str) -> None:
    line = in_torch(**said)
    assert line.level == "fail" and line.result.startswith("n1: ") and found in line.result and do in line.advice


#: What the probe of an engine says where all is well.
STARTED = {"ranks": 2, "launch_s": 3.0, "device": "cuda", "start_s": 42.4, "tokens": 4, "code": 0}


def of_engine(*, without: tuple[str, ...] = (), **changed: Any) -> Finding:
    found = probed(hello("n1", mask="0,1"), gpus=2)
    found.jobs[0].engine["n1"] = {key: value for key, value in {**STARTED, **changed}.items() if key not in without}
    [line] = nodes.engines(found)
    return line


def test_an_engine_of_two_ranks_that_starts() -> None:
    line = of_engine()
    assert (line.level, line.result, line.advice) == ("pass", "vLLM starts in 42 s and generates (n1)", "")
    none = probed(hello("n1"))
    assert list(nodes.engines(none)) == []
    none.jobs[0].engine["n1"] = {}  # it has fewer GPUs, or another node of the job starts one
    assert list(nodes.engines(none)) == []


@pytest.mark.parametrize(
    ("said", "found", "do"),
    [
        ({"hung_s": 300.0, "without": ("device", "start_s", "tokens", "code")},
         "n1: starting vLLM on two GPUs did not end within 300 s", "NCCL_P2P_DISABLE=1"),
        ({"error": "list index out of range", "without": ("device", "start_s", "tokens"), "code": 1},
         "n1: starting vLLM on two GPUs failed: list index out of range", "disable_custom_all_reduce"),
        ({"code": -11, "words": "Segmentation fault", "without": ("ranks", "launch_s", "device", "start_s", "tokens")},
         "n1: launching two ranks ended with exit code -11: Segmentation fault", "/dev/shm"),
        ({"hung_s": 300.0, "without": ("tokens", "code")}, "n1: generating with two ranks did not end", "enforce_eager"),
        ({"code": 1, "words": "terminated"}, "n1: ending two ranks ended with exit code 1: terminated", "log"),
    ],
)  # fmt: skip
def test_an_engine_of_two_ranks_that_does_not(said: dict[str, Any], found: str, do: str) -> None:
    line = of_engine(**said)
    assert line.level == "fail" and line.result.startswith(found) and do in line.advice


def test_a_node_that_was_to_start_an_engine_and_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_probe, "has_package", lambda name: True)
    monkeypatch.delenv("RLHPC_VIRTUAL_ACCELERATORS", raising=False)
    found = probed(hello("n1", mask="0,1"), gpus=2)
    found.jobs[0].torch["n1"] = {**FINE, "vllm": True}
    [line] = nodes.engines(found)
    assert line.level == "fail" and "n1: nothing was heard of it" in line.result
    found.jobs[0].torch["n1"] = FINE  # vLLM does not work there, which torch's line says
    assert list(nodes.engines(found)) == []


def test_gpus_that_are_only_a_number_are_not_looked_at() -> None:
    [line] = nodes.gpus_in_torch(probed(hello("n1"), gpus=1), {"RLHPC_VIRTUAL_ACCELERATORS": "1"})
    assert line.level == "warn" and "not looked at on n1: RLHPC_VIRTUAL_ACCELERATORS" in line.result
    [line] = nodes.gpus_in_torch(probed(hello("n1"), gpus=1), {})
    assert line.level == "fail" and "did not end in time" in line.result  # the node said nothing of it


def test_network() -> None:
    closed = list(nodes.ports(probed(hello("n1"), hello("n2"), reach={"error": "timed out"})))
    assert levels(closed) == ["fail"] and "2 of 2 connections" in closed[0].result and "timed out" in closed[0].result
    assert levels(nodes.ports(probed(hello("n1")))) == ["warn"]
    [line] = nodes.interface(probed(hello("n1"), hello("n2")), site(interface="ib0"), {})
    assert line.level == "fail" and "ib0 has no address on n1, n2" in line.result
    fast = {"eth0": "10.0.0.1", "ib0": "10.1.0.1"}
    [line] = nodes.interface(probed(hello("n1", interfaces=fast), hello("n2", interfaces=fast)), site(), {})
    assert line.level == "warn" and "interface: ib0" in line.advice


def test_gpu_nodes_need_the_library_of_gpu_simulation() -> None:
    found = probed(hello("g1", physx=True), hello("g2", physx=False), hello("g3"), gpus=1)
    vulkan, library = nodes.simulators(found)
    assert vulkan.level == "pass" and library.level == "warn" and library.result.startswith("g2 ")
    assert "sapien.physx.enable_gpu()" in library.advice
    assert levels(nodes.simulators(probed(hello("g1", physx=True), gpus=1))) == ["pass", "pass"]
    assert levels(nodes.simulators(probed(hello("c1", physx=False)))) == ["pass"]  # no GPU was asked for


def test_what_nodes_lack() -> None:
    small = {**hello("n")["space"], "/dev/shm": {**SPACE, "free": 64 * 2**20}}
    found = probed(
        hello("n1", packages={"rlhpc": False, "torch": True}), hello("n2", python=[3, 9, 1]), hello("n3", space=small),
        hello("n4", vulkan={"loader": False, "drivers": []}, limits={"nofile": 1024, "nproc": -1, "memlock": -1}),
    )  # fmt: skip
    found.jobs[0].offsets = {"n1": (40.0, 0.1)}
    assert [line.result.split()[0] for line in nodes.python(found)] == ["n1", "n2"]
    assert "64 MiB" in nodes.shared_memory(found)[0].result
    assert levels([*nodes.simulators(found), *nodes.limits(found), *nodes.clocks(found)]) == ["warn"] * 3
    assert levels(
        nodes.job_starts([ProbeJob("gpu", ("gpu",), (), None, 0, 1, 1, error="did not start within 60 s")])
    ) == ["warn"]
