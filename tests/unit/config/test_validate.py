"""The placement is checked on the machines that the configuration asks for, not on those that are here."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlhpc.runs.configuration import load_config
from rlhpc.runtime.errors import PlacementError

REASONING = Path(__file__).resolve().parents[3] / "configs" / "reasoning" / "demo.yaml"
QUICKSTART = Path(__file__).resolve().parents[3] / "configs" / "quickstart.yaml"
OPEN = "cluster.accelerators_per_node=null"
TOGETHER = "cluster.component_placement={'actor,rollout,env': 0-7}"
HET = (
    "cluster.num_nodes=3",
    "cluster.node_groups=[{label: gpu, het_component: 0, num_nodes: 1, partition: gpu, gres: 'gpu:a100:4,nvme:1'}, "
    "{label: cpu, het_component: 1, num_nodes: 2, partition: cpu, cpus_per_node: 16}]",
    "cluster.component_placement={'actor,rollout': {node_group: gpu, placement: 0-3}, "
    "env: {node_group: cpu, placement: '0-1:0-7'}}",
)
SLURM = {
    "numbered": ("cluster.num_nodes=2", "cluster.accelerators_per_node=4", TOGETHER),
    "gres": ("cluster.num_nodes=2", "cluster.gres=gpu:a100:4", TOGETHER),
    "gres of all groups": (
        "cluster.num_nodes=2",
        "cluster.gres=gpu:4",
        "cluster.node_groups=[{label: near, node_ranks: 0, partition: near}]",
        TOGETHER,
    ),
    "heterogeneous": HET,
}
#: Variables of a job of three nodes whose first has four accelerators.
JOB = {
    "SLURM_JOB_ID": "7", "SLURM_HET_SIZE": "2", "SLURM_JOB_NODELIST_HET_GROUP_0": "gpu07",
    "SLURM_JOB_NODELIST_HET_GROUP_1": "cpu[08-09]", "SLURM_JOB_CPUS_PER_NODE_HET_GROUP_0": "32",
    "SLURM_JOB_CPUS_PER_NODE_HET_GROUP_1": "16(x2)", "CUDA_VISIBLE_DEVICES": "0,1,2,3", "SLURMD_NODENAME": "gpu07",
}  # fmt: skip


@pytest.fixture(autouse=True)
def no_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SLURM_JOB_ID", "SLURM_JOB_NODELIST", "SLURM_HET_SIZE"):
        monkeypatch.delenv(name, raising=False)


def load(*overrides: str) -> None:
    load_config(QUICKSTART, ([] if "accelerators_per_node" in " ".join(overrides) else [OPEN]) + list(overrides))


@pytest.mark.parametrize("mask", ["", "0", "0,1,2,3,4,5,6,7"], ids=["none", "one", "eight"])
@pytest.mark.parametrize("overrides", SLURM.values(), ids=SLURM)
def test_a_run_for_slurm_is_valid_anywhere(overrides: tuple[str, ...], mask: str, monkeypatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", mask)
    load(*overrides)


@pytest.mark.parametrize("mask", ["", "0,1,2,3,4,5,6,7"], ids=["none", "eight"])
@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (
            ("cluster.num_nodes=2", "cluster.gres=gpu:2", TOGETHER),
            r"component_placement\.actor: '0-7': resource 7 does not exist \(the cluster has 4 accelerators \(0 to 3\)\)",
        ),
        (
            (*HET[:2], HET[2].replace("0-3", "0-7")),
            r"component_placement\.actor: '0-7': resource 7 does not exist \(.*4 accelerators \(0 to 3\)\)",
        ),
        ((*HET[:2], HET[2].replace("0-1:", "0-2:")), r"component_placement\.env: .*resource 2 does not exist"),
        (("cluster.num_nodes=2", "cluster.accelerators_per_node=0", TOGETHER), r"the cluster has 2 nodes \(0 to 1\)"),
    ],
    ids=["gres", "accelerator of a group", "node of a group", "without accelerators"],
)
def test_what_does_not_fit_is_refused_anywhere(overrides: tuple[str, ...], says: str, mask: str, monkeypatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", mask)
    with pytest.raises(PlacementError, match=says):
        load(*overrides)


def test_a_number_that_is_left_open_is_what_is_visible_here(monkeypatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    load("cluster.component_placement={'actor,rollout,env': 0-1}")
    with pytest.raises(PlacementError, match=r"resource 3 does not exist \(the cluster has 2 accelerators"):
        load("cluster.component_placement={'actor,rollout,env': 0-3}")


class TestInsideAJob:
    """What the configuration leaves open, the job settles; what it says holds there, too."""

    LEFT_OPEN = (HET[0], HET[1].replace(", gres: 'gpu:a100:4,nvme:1'", ""), HET[2])

    @pytest.fixture(autouse=True)
    def job(self, no_slurm: None, monkeypatch: pytest.MonkeyPatch) -> None:
        for name, value in JOB.items():
            monkeypatch.setenv(name, value)

    def test_accelerators_of_the_job(self, monkeypatch) -> None:
        load(*self.LEFT_OPEN)
        monkeypatch.delenv("SLURM_JOB_ID")
        with pytest.raises(PlacementError, match="resource 3 does not exist"):
            load(*self.LEFT_OPEN)

    def test_a_run_for_another_job_is_valid(self) -> None:
        load("cluster.num_nodes=4", "cluster.accelerators_per_node=2", TOGETHER)

    def test_the_message_is_about_the_configuration(self) -> None:
        with pytest.raises(PlacementError, match=r"the cluster has 10 accelerators \(0 to 9\)"):
            load("cluster.num_nodes=5", "cluster.gres=gpu:2", TOGETHER.replace("0-7", "0-10"))


@pytest.mark.parametrize("role", ["actor", "rollout"])
def test_trainers_and_engines_take_one_accelerator_a_process(role: str, no_slurm: None) -> None:
    placed = {"actor": "0-3", "rollout": "0-3", role: "0-3:0-1"}
    placement = "cluster.component_placement={" + ", ".join(f"{name}: '{text}'" for name, text in placed.items()) + "}"
    given = (placement, "cluster.accelerators_per_node=4")
    with pytest.raises(PlacementError, match=rf"component_placement\.{role} .*each process 2 accelerators.*{role}: 0-"):
        load_config(REASONING, list(given))
    load_config(REASONING, [*given, f"cluster.component_placement.{role}=0-3"])
    if role == "rollout":
        load_config(REASONING, [*given, "rollout.rollout_backend=vllm"])  # two engines of two ranks
    # A backend from outside may be one that spans several.
    key = {"actor": "actor.training_backend", "rollout": "rollout.rollout_backend"}[role]
    load_config(REASONING, [*given, f"{key}=somewhere:Else"])
