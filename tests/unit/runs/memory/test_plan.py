"""How much memory there is, as the configuration says."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlhpc.cli import main
from rlhpc.jobs.plan import build_plan
from rlhpc.runs.configuration import load_config
from rlhpc.runs.memory.account import GIB
from rlhpc.runs.memory.plan import compute_memory_plan, host_capacity, parse_bytes
from rlhpc.runtime import os_resources
from rlhpc.runtime.cluster import Cluster

MATH = str(Path(__file__).resolve().parents[4] / "configs" / "reasoning" / "math.yaml")
EIGHT = ["cluster.accelerators_per_node=8", "cluster.accelerator_memory=80G"]


def test_a_node_group_says_what_its_accelerators_have() -> None:
    groups = "[{label: small, node_ranks: '0', accelerator_memory: 24G}]"
    placement = "{actor: {node_group: small, placement: 0-7}, rollout: {node_group: small, placement: 0-7}}"
    cfg = load_config(MATH, [*EIGHT, f"cluster.node_groups={groups}", f"cluster.component_placement={placement}"])
    place = compute_memory_plan(cfg, build_plan(cfg, launcher="slurm")).pools[0]
    assert place.capacity == 24 * GIB and place.source == "cluster.node_groups[small].accelerator_memory"


@pytest.mark.parametrize("text", ["80", "much", "80X"])
def test_a_wrong_size_is_one_message(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["plan", MATH, f"cluster.accelerator_memory={text}"])
    said = capsys.readouterr().err
    assert code == 2 and said.count("error:") == 1 and "cluster.accelerator_memory" in said and "80G" in said


def test_sizes_are_read_as_slurm_writes_them() -> None:
    assert [parse_bytes(text) for text in ("80G", "512M", "64", "1T", "0", "all")] == [
        80 * GIB, GIB / 2, GIB / 16, 1024 * GIB, None, None,
    ]  # fmt: skip


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize(("limit", "expected"), [("2147483648", 2 * GIB), ("max", 64 * GIB), (str(1 << 62), 64 * GIB)])
def test_this_machine_has_no_more_than_its_control_groups_allow(
    version: int, limit: str, expected: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the limit is that of a group above the process's own; in either version of control groups."""
    root = tmp_path / "cgroup"
    (above := (root / "memory" if version == 1 else root) / "job_7").mkdir(parents=True)
    (above / "step_0").mkdir()
    (above / ("memory.limit_in_bytes" if version == 1 else "memory.max")).write_text(f"{limit}\n")
    (tmp_path / "own").write_text("4:memory:/job_7/step_0\n" if version == 1 else "0::/job_7/step_0\n")
    (tmp_path / "meminfo").write_text(f"MemTotal: {64 << 20} kB\nMemAvailable: {60 << 20} kB\n")
    for name, path in (("_MEMINFO", "meminfo"), ("_CGROUP_ROOT", "cgroup"), ("_PROCESS_CGROUP", "own")):
        monkeypatch.setattr(os_resources, name, tmp_path / path)
    cfg = load_config(MATH, EIGHT)
    assert host_capacity(cfg, Cluster.planned(cfg.cluster), 0, is_local=True) == (expected, "this machine")
