"""How much memory there is, as the configuration says."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlhpc.cli import main
from rlhpc.jobs.plan import build_plan
from rlhpc.runs.configuration import load_config
from rlhpc.runs.memory.account import GIB
from rlhpc.runs.memory.plan import memory_plan
from rlhpc.runs.memory.rooms import parse_bytes

MATH = str(Path(__file__).resolve().parents[4] / "configs" / "reasoning" / "math.yaml")
EIGHT = ["cluster.accelerators_per_node=8", "cluster.accelerator_memory=80G"]


def test_a_node_group_says_what_its_accelerators_have() -> None:
    groups = "[{label: small, node_ranks: '0', accelerator_memory: 24G}]"
    placement = "{actor: {node_group: small, placement: 0-7}, rollout: {node_group: small, placement: 0-7}}"
    cfg = load_config(MATH, [*EIGHT, f"cluster.node_groups={groups}", f"cluster.component_placement={placement}"])
    place = memory_plan(cfg, build_plan(cfg, launcher="slurm")).places[0]
    assert place.room == 24 * GIB and place.said == "cluster.node_groups[small].accelerator_memory"


@pytest.mark.parametrize("text", ["80", "much", "80X"])
def test_a_wrong_size_is_one_message(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["plan", MATH, f"cluster.accelerator_memory={text}"])
    said = capsys.readouterr().err
    assert code == 2 and said.count("error:") == 1 and "cluster.accelerator_memory" in said and "80G" in said


def test_sizes_are_read_as_slurm_writes_them() -> None:
    assert [parse_bytes(text) for text in ("80G", "512M", "64", "1T", "0", "all")] == [
        80 * GIB, GIB / 2, GIB / 16, 1024 * GIB, None, None,
    ]  # fmt: skip
