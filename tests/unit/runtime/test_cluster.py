"""Nodes, cores and accelerators: from Slurm's variables, from this machine, and as virtual nodes."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import pytest
from omegaconf import OmegaConf

from rlhpc.runtime.allocation import granted_cpus
from rlhpc.runtime.cluster import Cluster
from rlhpc.runtime.cluster_config import ClusterConfig, NodeGroupConfig
from rlhpc.runtime.errors import ConfigError
from tests.unit.runtime.recorded_variables import recorded

# The recordings are of nodes without accelerators; the variables that speak of them follow Slurm's documentation.
HOMOGENEOUS = recorded("homogeneous") | {
    "SLURM_JOB_GPUS": "0,1,2,3",
    "SLURM_GPUS_ON_NODE": "4",
    "CUDA_VISIBLE_DEVICES": "0,1,2,3",
}
HET = recorded("het") | {"SLURM_JOB_GPUS": "0,1", "CUDA_VISIBLE_DEVICES": "0,1"}
FRACTION = {
    "SLURM_JOB_ID": "4713",
    "SLURM_JOB_NODELIST": "n3",
    "SLURM_JOB_CPUS_PER_NODE": "8",
    "SLURM_JOB_GPUS": "2,5",
    "SLURMD_NODENAME": "n3",
    "CUDA_VISIBLE_DEVICES": "2,5",
}


def without(variables: dict[str, str], *names: str) -> dict[str, str]:
    return {k: v for k, v in variables.items() if k not in names}


def component(index: int, nodes: int | None = None) -> dict[str, Any]:
    return {"label": f"c{index}", "het_component": index, "num_nodes": nodes}


#: Of a machine whose accelerators are only a number.
VIRTUAL_ONES = {"CUDA_VISIBLE_DEVICES": "", "RLHPC_VIRTUAL_ACCELERATORS": "1"}


class TestSlurm:
    def test_homogeneous(self) -> None:
        cluster = Cluster(environ=HOMOGENEOUS)
        assert [n.name for n in cluster.nodes] == ["n1", "n2"]
        assert [n.rank for n in cluster.nodes] == [0, 1]
        assert [n.accelerators for n in cluster.nodes] == [(0, 1, 2, 3)] * 2
        assert [n.is_local for n in cluster.nodes] == [True, False]
        assert [n.het_group for n in cluster.nodes] == [None, None]
        assert cluster.nodes[1].cpus == 32
        assert cluster.num_accelerators == 8 and cluster.source == "slurm"
        assert cluster.accelerators_of("cluster")[5] == (1, 1) and cluster.accelerator_rank(1, 1) == 5

    def test_as_recorded(self) -> None:
        assert [(n.name, n.accelerators) for n in Cluster(environ=recorded("homogeneous")).nodes] == [
            ("n1", ()),
            ("n2", ()),
        ]
        nodes = Cluster(environ=recorded("het")).nodes
        assert [(n.name, n.het_group, n.is_local) for n in nodes] == [
            ("n1", 0, True),
            ("cpu08", 1, False),
            ("cpu09", 1, False),
        ]
        assert [n.cpus for n in nodes] == [min(32, granted_cpus()), 8, 8]

    def test_cores_of_this_host_are_those_of_this_process(self) -> None:
        assert Cluster(environ=HOMOGENEOUS).nodes[0].cpus == min(32, granted_cpus())

    def test_het_job(self) -> None:
        groups = [{"label": "gpu", "het_component": 0}, {"label": "cpu", "het_component": 1}]
        cluster = Cluster({"num_nodes": 3, "node_groups": groups}, environ=HET)
        assert [n.name for n in cluster.nodes] == ["n1", "cpu08", "cpu09"]
        assert [n.het_group for n in cluster.nodes] == [0, 1, 1]
        assert [n.cpus for n in cluster.nodes][1:] == [8, 8]
        assert cluster.node_group("cpu").node_ranks == (1, 2)
        # the mask of component 0 is in the driver's environment; it says nothing about the others
        assert [n.accelerators for n in cluster.nodes] == [(0, 1), (), ()]
        assert cluster.accelerators_of("cpu") == []

    def test_het_job_with_accelerators_in_a_later_component(self) -> None:
        by_variable = without(HET, "SLURM_JOB_GPUS", "CUDA_VISIBLE_DEVICES") | {
            "SLURM_GPUS_PER_NODE_HET_GROUP_1": "a100:2"
        }
        assert [len(n.accelerators) for n in Cluster(environ=by_variable).nodes] == [0, 2, 2]
        groups = [{"label": "sim", "het_component": 1, "gres": "gpu:4"}]
        cluster = Cluster({"node_groups": groups}, environ=without(HET, "SLURM_JOB_GPUS", "CUDA_VISIBLE_DEVICES"))
        assert [len(n.accelerators) for n in cluster.nodes] == [0, 4, 4]

    @pytest.mark.parametrize(
        "variables",
        [
            FRACTION,
            without(FRACTION, "SLURM_JOB_GPUS"),
            without(FRACTION, "CUDA_VISIBLE_DEVICES"),
            without(FRACTION, "SLURMD_NODENAME", "SLURM_JOB_GPUS"),
            without(FRACTION, "CUDA_VISIBLE_DEVICES", "SLURM_JOB_GPUS") | {"SLURM_STEP_GPUS": "2,5"},
        ],
        ids=["all", "mask", "job-gpus", "mask-elsewhere", "step-gpus"],
    )
    def test_fraction_of_a_node(self, variables: dict[str, str]) -> None:
        node = Cluster(environ=variables).nodes[0]
        assert node.accelerators == (0, 1) and node.visible_devices == ("2", "5")

    def test_mask_inside_a_control_group_renumbers(self) -> None:
        node = Cluster(environ=FRACTION | {"CUDA_VISIBLE_DEVICES": "0,1"}).nodes[0]
        assert node.visible_devices == ("0", "1")

    def test_ranges_of_ids(self) -> None:
        variables = without(FRACTION, "CUDA_VISIBLE_DEVICES") | {"SLURM_JOB_GPUS": "0-2,7"}
        assert Cluster(environ=variables).nodes[0].visible_devices == ("0", "1", "2", "7")

    def test_first_nodes(self) -> None:
        assert [n.name for n in Cluster(num_nodes=1, environ=HOMOGENEOUS).nodes] == ["n1"]
        assert len(Cluster(2, environ=HOMOGENEOUS).nodes) == 2

    def test_more_nodes_than_there_are(self) -> None:
        with pytest.raises(ConfigError, match=r"num_nodes is 3, but the Slurm job 3 has 2 \(n1, n2\)"):
            Cluster(num_nodes=3, environ=HOMOGENEOUS)

    def test_more_accelerators_than_there_are(self) -> None:
        with pytest.raises(ConfigError, match=r"accelerators_per_node is 4, but node n3 has 2 visible"):
            Cluster({"accelerators_per_node": 4}, environ=FRACTION)
        assert Cluster({"accelerators_per_node": 1}, environ=FRACTION).nodes[0].visible_devices == ("2",)
        assert Cluster({"accelerators_per_node": 0}, environ=FRACTION).num_accelerators == 0

    def test_a_machine_has_none_but_those_that_are_visible(self) -> None:
        with pytest.raises(
            ConfigError, match=r"accelerators_per_node is 8, but this machine .* has no visible accelerator"
        ):
            Cluster({"accelerators_per_node": 8}, environ={"CUDA_VISIBLE_DEVICES": ""})
        assert Cluster({"accelerators_per_node": 8}, environ=VIRTUAL_ONES).num_accelerators == 8
        assert Cluster({"accelerators_per_node": 1}, environ={"CUDA_VISIBLE_DEVICES": "3,4"}).num_accelerators == 1

    def test_component_that_the_job_lacks(self) -> None:
        with pytest.raises(ConfigError, match="het_component is 1, but none"):
            Cluster({"node_groups": [{"label": "cpu", "het_component": 1}]}, environ=HOMOGENEOUS)
        assert len(Cluster({"node_groups": [{"label": "all", "het_component": 0}]}, environ=HOMOGENEOUS).nodes) == 2

    @pytest.mark.parametrize(
        ("change", "says"),
        [
            ({"SLURM_JOB_NODELIST_HET_GROUP_1": ""}, "SLURM_JOB_NODELIST_HET_GROUP_1 is not set"),
            ({"SLURM_HET_SIZE": "two"}, "SLURM_HET_SIZE is 'two'"),
            ({"SLURM_JOB_NODELIST_HET_GROUP_1": "n[1-"}, "host list"),
            ({"SLURM_JOB_CPUS_PER_NODE_HET_GROUP_1": "many"}, "'many'"),
        ],
    )
    def test_unreadable_variables(self, change: dict[str, str], says: str) -> None:
        with pytest.raises(ConfigError) as error:
            Cluster(environ=HET | change)
        assert says in str(error.value)


class TestMachine:
    def test_one_node(self) -> None:
        cluster = Cluster(environ={"CUDA_VISIBLE_DEVICES": "3,1"})
        (node,) = cluster.nodes
        assert node.name == os.uname().nodename and node.is_local and node.cpus == granted_cpus()
        assert node.accelerators == (0, 1) and node.visible_devices == ("3", "1") and cluster.source == "machine"

    def test_more_nodes_than_one(self) -> None:
        with pytest.raises(ConfigError, match=r"num_nodes is 2, but this machine \(outside a Slurm job\) has 1"):
            Cluster(num_nodes=2, environ={})

    @pytest.mark.parametrize("count", [0, -1, True, 1.5, "2"])
    def test_counts(self, count: Any) -> None:
        with pytest.raises(ConfigError, match="num_nodes"):
            Cluster(num_nodes=count, environ={})

    def test_every_form_of_configuration(self) -> None:
        section = ClusterConfig(accelerators_per_node=2, node_groups=[NodeGroupConfig(label="a", env_vars={"X": "1"})])
        for config in (section, OmegaConf.structured(section), dataclasses.asdict(section)):
            cluster = Cluster(config, environ=VIRTUAL_ONES)
            assert cluster.num_accelerators == 2 and cluster.node_group("a").env_vars == {"X": "1"}


class TestVirtual:
    def test_nodes(self) -> None:
        cluster = Cluster.local(num_nodes=2, accelerators_per_node=4)
        assert [n.accelerators for n in cluster.nodes] == [(0, 1, 2, 3)] * 2 and cluster.source == "virtual"
        assert all(n.is_local for n in cluster.nodes) and len({n.name for n in cluster.nodes}) == 2

    def test_components_follow_one_another(self) -> None:
        groups = [
            {"label": "cpu", "het_component": 1, "num_nodes": 2, "cpus_per_node": 16},
            {"label": "gpu", "het_component": 0, "gres": "gpu:a100:4"},
        ]
        cluster = Cluster.planned({"num_nodes": 3, "node_groups": groups}, {"CUDA_VISIBLE_DEVICES": "0"})
        assert cluster.node_group("gpu").node_ranks == (0,) and cluster.node_group("cpu").node_ranks == (1, 2)
        assert [len(n.accelerators) for n in cluster.nodes] == [4, 0, 0] and cluster.nodes[1].cpus == 16

    def test_the_rest_is_component_0(self) -> None:
        groups = [{"label": "cpu", "het_component": 1, "num_nodes": 1, "accelerator_kind": "cpu"}]
        cluster = Cluster.local(3, 2, groups)
        assert [n.het_group for n in cluster.nodes] == [0, 0, 1] and cluster.num_accelerators == 4

    def test_counted_groups(self) -> None:
        cluster = Cluster.local(4, 0, [{"label": "a", "num_nodes": 1}, {"label": "b", "num_nodes": 2}])
        assert [cluster.node_group(label).node_ranks for label in "ab"] == [(0,), (1, 2)]

    def test_a_plan_for_this_machine_has_its_accelerators(self) -> None:
        assert Cluster.planned({}, {"CUDA_VISIBLE_DEVICES": "0,1"}).num_accelerators == 2

    def test_a_plan_has_the_accelerators_of_its_gres(self) -> None:
        groups = [
            {"label": "own", "num_nodes": 1, "gres": "gpu:2"},
            {"label": "common", "num_nodes": 1, "partition": "x"},
            {"label": "none", "num_nodes": 1, "accelerator_kind": "cpu"},
        ]
        section = {"num_nodes": 4, "gres": "gpu:a100:4,nvme:1", "node_groups": groups}
        for mask in ("", "0,1,2"):
            nodes = Cluster.planned(section, {"CUDA_VISIBLE_DEVICES": mask}).nodes
            assert [len(n.accelerators) for n in nodes] == [2, 4, 0, 4]
        nodes = Cluster.planned({**section, "accelerators_per_node": 1}, {}).nodes
        assert [len(n.accelerators) for n in nodes] == [2, 1, 0, 1], "a number that is given comes before it"

    def test_own_number_of_a_group(self) -> None:
        groups = [{"label": "few", "node_ranks": 1, "accelerators_per_node": 1}]
        assert [len(n.accelerators) for n in Cluster.local(2, 4, groups).nodes] == [4, 1]

    @pytest.mark.parametrize(
        ("nodes", "groups", "says"),
        [
            (1, [component(0, 2), component(1)], "num_nodes is 1"),
            (4, [component(0, 1), component(1, 1)], "1 + 1"),
            (4, [component(0), component(1)], "? + ?"),
            (4, [component(0, 1), component(2)], "0, 1, 2"),
            (2, [{"label": "a", "num_nodes": 3}], "2 of the 2 node(s) are left"),
        ],
    )  # fmt: skip
    def test_components_that_do_not_add_up(self, nodes: int, groups: list[Any], says: str) -> None:
        with pytest.raises(ConfigError) as error:
            Cluster.local(nodes, 0, groups)
        assert says in str(error.value)


class TestNodeGroups:
    def test_everything_it_says(self) -> None:
        raw = {"label": "sim", "node_ranks": "1,0", "env_vars": {"MUJOCO_GL": "egl", "N": 2},
               "python_interpreter": "/opt/py", "accelerator_kind": "rtx"}  # fmt: skip
        group = Cluster.local(2, 1, [raw]).node_group("sim")
        assert group.node_ranks == (0, 1) and group.env_vars == {"MUJOCO_GL": "egl", "N": "2"}
        assert group.python_interpreter == "/opt/py" and group.accelerator_kind == "rtx"

    @pytest.mark.parametrize("ranks", ["0-1,3", [0, 1, 3], "0,1,3"])
    def test_forms_of_ranks(self, ranks: Any) -> None:
        groups = OmegaConf.create([{"label": "a", "node_ranks": ranks}])
        assert Cluster.local(4, 2, groups).accelerators_of("a") == [(n, i) for n in (0, 1, 3) for i in (0, 1)]

    def test_reserved_labels(self) -> None:
        cluster = Cluster.local(2, 1)
        assert cluster.node_group("cluster").node_ranks == cluster.node_group("node").node_ranks == (0, 1)
        with pytest.raises(ConfigError, match="no node group 'gpu'; there are: cluster, node"):
            cluster.node_group("gpu")

    @pytest.mark.parametrize(
        ("groups", "says"),
        [
            ([{"label": "cluster"}], "is reserved"),
            ([{"label": "node"}], "is reserved"),
            ([{"label": "a", "node_ranks": 0}, {"label": "a", "node_ranks": 1}], "is given twice"),
            ([{"node_ranks": 0}], "node_groups[0].label is missing"),
            (
                [{"label": "a", "node_ranks": "0-1"}, {"label": "b", "node_ranks": "1-2"}],
                "node 1, which 'a' has already",
            ),
            ([{"label": "a"}, {"label": "b"}], "which 'a' has already"),
            ([{"label": "a", "node_ranks": 3}], "node 3 does not exist; the cluster has nodes 0 to 2"),
            ([{"label": "a", "node_ranks": "0,0"}], "0 stands there twice"),
            ([{"label": "a", "node_ranks": "2-1"}], "write ranks like 0-1,3"),
            ([{"label": "a", "node_ranks": "x"}], "write ranks like 0-1,3"),
            ([{"label": "a", "node_ranks": -1}], "write ranks like 0-1,3"),
            ([{"label": "a", "node_ranks": []}], "at least one node"),
            ([{"label": "a", "node_ranks": "0-1", "num_nodes": 1}], "num_nodes is 1, but it has 2"),
        ],
    )
    def test_violations(self, groups: list[Any], says: str) -> None:
        with pytest.raises(ConfigError) as error:
            Cluster.local(3, 0, groups)
        assert says in str(error.value)
