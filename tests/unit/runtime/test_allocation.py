"""Allocation of a job or of this machine: host lists, cores, masks of accelerators, and GPUs however they were requested."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhpc.runtime.allocation import (
    expand_counts,
    expand_hostlist,
    gpus_in,
    gpus_per_node,
    granted_cpus,
    query_gpus_of_job,
    slurm_nodes,
    steps_possible,
    visible_accelerators,
)
from rlhpc.runtime.errors import ConfigError
from tests.unit.runtime.recorded_variables import recorded


@pytest.mark.parametrize(
    ("fields", "count"),
    [
        ("NumNodes=2 NumTasks=2 TresPerJob=gres:gpu:4", 2),  # 22.05
        ("NumNodes=2 NumTasks=4 TresPerTask=gres:gpu:2", 4),
        ("NumNodes=2 NumTasks=2 TresPerNode=gres:gpu:3", 3),
        ("NumNodes=2 NumTasks=2 TresPerJob=gres/gpu:fake:4", 2),  # 24.11 and 26.05
        ("NumNodes=2 NumTasks=2 TresBind=gres/gpu:per_task:2 TresPerTask=cpu=2,gres/gpu=2", 2),
        ("NumNodes=2 NumTasks=2 TresPerNode=gres/gpu:3 TresPerTask=cpu=2", 3),
        ("NumNodes=2 NumTasks=2 TresPerJob=gres/gpu:3", None),
        ("NumNodes=2 NumTasks=2 TresPerTask=cpu=2", None),
    ],
)
def test_gpus_of_a_job_however_they_were_asked_for(fields: str, count: int | None) -> None:
    assert gpus_per_node(dict(field.split("=", 1) for field in fields.split())) == count


#: Two components of a job, of which the second has two GPUs a node.
JOBS = """JobId=7 HetJobId=7 HetJobOffset=0 NumNodes=1 NumTasks=1 TresPerNode=
JobId=8 HetJobId=7 HetJobOffset=1 NumNodes=2 NumTasks=2 TresPerNode=gres/gpu:2
"""


class TestNodes:
    def test_the_nodes_of_a_job_follow_its_components(self) -> None:
        nodes = slurm_nodes(recorded("het") | {"CUDA_VISIBLE_DEVICES": "3,1"})
        assert [(node.rank, node.name, node.het_group) for node in nodes] == [
            (0, "n1", 0),
            (1, "cpu08", 1),
            (2, "cpu09", 1),
        ]
        assert [node.visible_devices for node in nodes] == [("3", "1"), (), ()], "the mask is the first component's"
        assert [node.cpus for node in nodes] == [min(32, granted_cpus()), 8, 8]

    def test_identifiers_and_counts_name_the_gpus_where_no_mask_does(self) -> None:
        job = {"SLURM_JOB_NODELIST": "n[1-2]", "SLURM_JOB_CPUS_PER_NODE": "4"}
        for variables, devices in (
            ({"SLURM_JOB_GPUS": "0-1,7"}, ("0", "1", "7")),
            ({"SLURM_STEP_GPUS": "5", "SLURM_JOB_GPUS": "5,6"}, ("5",)),
            ({"SLURM_GPUS_ON_NODE": "2"}, ("0", "1")),
            ({"SLURM_GPUS_PER_NODE": "a100:2,h100:1"}, ("0", "1", "2")),
            ({}, ()),
        ):
            nodes = slurm_nodes(job | variables)
            assert [node.visible_devices for node in nodes] == [devices] * 2
            assert [node.cpus for node in nodes] == [4, 4], "the last count is that of the other nodes, too"

    def test_a_login_node_asks_slurm_for_the_gpus(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        scontrol = tmp_path / "scontrol"
        scontrol.write_text(f"#!/bin/sh\ncat <<'END'\n{JOBS}END\n")
        scontrol.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
        assert query_gpus_of_job("7") == {1: 2}
        job = {"SLURM_JOB_ID": "7", "SLURM_HET_SIZE": "2", "SLURM_JOB_NODELIST_HET_GROUP_0": "far1",
               "SLURM_JOB_NODELIST_HET_GROUP_1": "far[2-3]"}  # fmt: skip
        assert [node.accelerators for node in slurm_nodes(job, asks_slurm=True)] == [(), (0, 1), (0, 1)]
        assert [node.accelerators for node in slurm_nodes(job)] == [(), (), ()]

    def test_steps_need_a_job_and_srun(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PATH", str(tmp_path))
        monkeypatch.setenv("SLURM_JOB_ID", "7")
        monkeypatch.setenv("SLURM_JOB_NODELIST", "n1")
        assert not steps_possible()
        (tmp_path / "srun").touch(mode=0o755)
        assert steps_possible()
        monkeypatch.delenv("SLURM_JOB_NODELIST")
        assert not steps_possible()


class TestMachine:
    @pytest.mark.parametrize(
        ("mask", "devices"),
        [("", ()), ("-1", ()), ("NoDevFiles", ()), ("0,-1,1", ("0",)), ("2, 5", ("2", "5")),
         ("GPU-8f,MIG-1", ("GPU-8f", "MIG-1"))],
    )  # fmt: skip
    def test_masks(self, mask: str, devices: tuple[str, ...]) -> None:
        assert visible_accelerators({"CUDA_VISIBLE_DEVICES": mask}) == devices

    def test_device_files(self, tmp_path: Any) -> None:
        for name in ("nvidia10", "nvidia2", "nvidia0", "nvidiactl", "nvidia-uvm", "nvidia0x"):
            (tmp_path / name).touch()
        assert visible_accelerators({}, dev=tmp_path) == ("0", "2", "10")

    def test_quota_of_a_control_group_above(self, tmp_path: Any) -> None:
        root, membership = tmp_path / "cgroup", tmp_path / "self"
        (root / "job" / "step").mkdir(parents=True)
        (root / "job" / "cpu.max").write_text("100000 100000\n")
        (root / "job" / "step" / "cpu.max").write_text("max 100000\n")
        membership.write_text("0::/job/step\n")
        assert granted_cpus(root, membership) == 1
        (root / "job" / "cpu.max").write_text("max 100000\n")
        assert granted_cpus(root, membership) == len(os.sched_getaffinity(0))

    def test_quota_of_version_1(self, tmp_path: Any) -> None:
        root, membership = tmp_path / "cgroup", tmp_path / "self"
        (root / "cpu,cpuacct" / "job").mkdir(parents=True)
        (root / "cpu,cpuacct" / "job" / "cpu.cfs_quota_us").write_text("50000\n")
        (root / "cpu,cpuacct" / "job" / "cpu.cfs_period_us").write_text("100000\n")
        membership.write_text("4:memory:/job\n3:cpu,cpuacct:/job\n")
        assert granted_cpus(root, membership) == 1

    def test_without_control_groups(self, tmp_path: Any) -> None:
        assert granted_cpus(tmp_path / "none", tmp_path / "none") == len(os.sched_getaffinity(0))


class TestTexts:
    @pytest.mark.parametrize(
        ("text", "names"),
        [
            ("n1", ["n1"]),
            ("n[1-3,07]", ["n1", "n2", "n3", "n07"]),
            ("a[1-2]b[3-4]", ["a1b3", "a1b4", "a2b3", "a2b4"]),
            ("a[1-2],b[3-4]", ["a1", "a2", "b3", "b4"]),
            ("r[08-11]-ib,login-1.site", ["r08-ib", "r09-ib", "r10-ib", "r11-ib", "login-1.site"]),
        ],
    )
    def test_host_lists(self, text: str, names: list[str]) -> None:
        assert expand_hostlist(text) == names

    @pytest.mark.parametrize(
        "text", ["", "n[1-3", "n1]", "n[[1]]", "n[3-1]", "n[a-b]", "n[]", "n1,,n2", ",n1", "n 1", "n[1-999999999]",
                 "n[1-9999][1-9999]"]
    )  # fmt: skip
    def test_no_host_lists(self, text: str) -> None:
        with pytest.raises(ConfigError):
            expand_hostlist(text)

    @given(st.lists(st.tuples(st.sampled_from("abn"), st.integers(0, 500), st.integers(0, 20)), min_size=1, max_size=6))
    def test_host_lists_keep_order_and_number(self, parts: list[tuple[str, int, int]]) -> None:
        text = ",".join(f"{name}[{first}-{first + more}]" for name, first, more in parts)
        expected = [f"{name}{n}" for name, first, more in parts for n in range(first, first + more + 1)]
        assert expand_hostlist(text) == expected

    def test_counts(self) -> None:
        assert expand_counts("4(x2),8") == [4, 4, 8]
        for text in ("", "4(x)", "4x2", "-1", "4(x99999999)"):
            with pytest.raises(ConfigError):
                expand_counts(text)

    @pytest.mark.parametrize(
        ("text", "count"),
        [("gpu:a100:4", 4), ("gpu:2", 2), ("gpu", 1), ("gpu:a100", 1), ("nvme:1,gpu:3", 3), ("gpu:a:1,gpu:b:2", 3),
         ("gres:gpu:2(IDX:0-1)", 2), ("nvme:1", None), ("", None), (None, None)],
    )  # fmt: skip
    def test_gres(self, text: str | None, count: int | None) -> None:
        assert gpus_in(text) == count
