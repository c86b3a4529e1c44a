"""The placement grammar, the strategies, and what the two component placements demand."""

from __future__ import annotations

from typing import Any

import pytest
from omegaconf import OmegaConf

from rlhpc.runtime.cluster import Cluster
from rlhpc.runtime.errors import ConfigError, PlacementError
from rlhpc.runtime.placement import HybridComponentPlacement, ModelParallelComponentPlacement
from tests.unit.runtime.placement.clusters import mixed, spots


def config(**components: Any) -> Any:
    return OmegaConf.create({"cluster": {"component_placement": components}})


class TestHybrid:
    def test_names_share_a_place(self) -> None:
        placement = HybridComponentPlacement(
            config(**{"actor, reward": "0-7", "rollout": "0-1:0-3", "env": 3}), mixed()
        )
        assert placement.components == ["actor", "reward", "rollout", "env"]
        assert [placement.get_world_size(c) for c in placement.components] == [8, 8, 4, 1]
        assert spots(placement.get_strategy("env").place(mixed())) == [(0, (3,))]
        assert placement.has_component("env") and not placement.has_component("critic")
        assert set(placement.placements()) == set(placement.components)

    def test_group_without_accelerators_places_by_node(self) -> None:
        cfg = config(
            env={"node_group": "cpu", "placement": "0-1:0-3,2-3:4-5"}, sim={"node_group": "node", "placement": "all"}
        )
        placement = HybridComponentPlacement(cfg, mixed())
        assert [p.node_rank for p in placement.get_strategy("env").place(mixed())] == [2, 2, 3, 3, 4, 5]
        assert [p.node_rank for p in placement.get_strategy("sim").place(mixed())] == [0, 1, 2, 3, 4, 5]

    def test_cluster_without_accelerators_places_by_node(self) -> None:
        places = HybridComponentPlacement(config(env="0-0:0-3"), Cluster.local(1, 0)).get_strategy("env")
        assert spots(places.place(Cluster.local(1, 0))) == [(0, ())] * 4

    def test_plain_mappings_and_missing_group(self) -> None:
        cfg = {"cluster": {"component_placement": {"actor": {"node_group": None, "placement": "0-1"}}}}
        assert HybridComponentPlacement(cfg, mixed()).get_world_size("actor") == 2

    @pytest.mark.parametrize(
        ("components", "says"),
        [
            ({}, "component_placement is empty"),
            ({"": "0"}, "an empty component name"),
            ({"actor,,env": "0"}, "an empty component name"),
            ({"actor,env": "0", "env": "1"}, "placement.env: the component is placed twice"),
            ({"actor,actor": "0"}, "placement.actor: the component is placed twice"),
            ({"actor": None}, "placement.actor: None: write ranks as text"),
            ({"actor": True}, "placement.actor: True: write ranks as text"),
            ({"actor": 0.5}, "placement.actor: 0.5: write ranks as text"),
            ({"actor": [0, 1]}, "write ranks as text"),
            ({"actor": -1}, "placement.actor: '-1': not a rank"),
            ({"actor": {"node_group": "gpu"}}, "placement.actor: placement is missing; keys are node_group and placement"),
            ({"actor": {"placement": "0", "nodes": 1}}, "placement.actor: unknown key 'nodes'"),
            ({"actor": {"placement": None}}, "placement.actor: None: write ranks as text"),
            ({"actor": {"node_group": "tpu", "placement": "0"}}, "no node group 'tpu'; there are: gpu, cpu, cluster, node"),
            ({"actor": "8"}, "placement.actor: '8': resource 8 does not exist (the cluster has 8 accelerators (0 to 7))"),
            ({"env": {"node_group": "cpu", "placement": "4"}}, "(node group 'cpu' has 4 nodes (0 to 3))"),
            ({"env": {"node_group": "cpu", "placement": "0-3:0-1"}}, "placement.env: '0-3:0-1': one process on nodes [0, 1]"),
            ({"actor": "2-5:0-0"}, "placement.actor: '2-5:0-0': process 0: accelerators [2, 3, 4, 5] lie on nodes [0, 1]"),
        ],
    )  # fmt: skip
    def test_violations(self, components: dict[str, Any], says: str) -> None:
        with pytest.raises(PlacementError) as error:
            HybridComponentPlacement(config(**components), mixed())
        assert says in str(error.value)

    @pytest.mark.parametrize(
        ("text", "tensor", "ranks", "replica"),
        [
            ("0-7:0-3", None, [(n // 4, (n % 4,)) for n in range(8)], 2),  # each accelerator of a process is a rank
            ("0-7:0-3", 2, [(n // 4, (n % 4,)) for n in range(8)], 2),
            ("0-7", 4, [(n // 4, (n % 4,)) for n in range(8)], 4),
            ("0-7:0-0", None, [(n // 4, (n % 4,)) for n in range(8)], 8),  # over two nodes
            ("0-3", None, [(0, (n,)) for n in range(4)], 1),
        ],
    )
    def test_engines(
        self, text: str, tensor: int | None, ranks: list[tuple[int, tuple[int, ...]]], replica: int
    ) -> None:
        cfg = {**config(actor="0-7:0-3", rollout=text), "rollout": {"parallel": {"tensor": tensor}}}
        placement = HybridComponentPlacement(cfg, mixed())
        assert spots(placement.get_strategy("rollout").place(mixed())) == ranks
        assert placement.get_strategy("rollout").replica == replica and placement.get_world_size("rollout") == len(
            ranks
        )
        assert placement.get_world_size("actor") == 4 and placement.get_strategy("actor").replica == 1

    @pytest.mark.parametrize(
        ("where", "tensor", "says"),
        [
            ("0-7:0-3", 4, "each process has 2 accelerators, and rollout.parallel.tensor is 4"),
            ("0-1:0,2-5:1-4", None, "processes have [1, 2] accelerators; rule: all engines are of one size"),
            ("0-5", 4, "6 ranks are no whole number of engines of 4"),
            ("0-1:0-3", 2, "the 2 ranks of an engine (rollout.parallel.tensor) are on accelerators [0, 0]"),
        ],
    )
    def test_engines_that_cannot_be(self, where: str, tensor: int | None, says: str) -> None:
        cfg = {**config(rollout=where), "rollout": {"parallel": {"tensor": tensor}}}
        with pytest.raises(PlacementError) as error:
            HybridComponentPlacement(cfg, mixed())
        assert says in str(error.value)

    def test_an_engine_without_accelerators_may_be_on_two_nodes(self) -> None:
        cfg = {
            **config(rollout={"node_group": "cpu", "placement": "0-3:0-1"}),
            "rollout": {"parallel": {"tensor": None}},
        }
        strategy = HybridComponentPlacement(cfg, mixed()).get_strategy("rollout")
        assert [p.node_rank for p in strategy.place(mixed())] == [2, 3, 4, 5] and strategy.replica == 2

    def test_component_without_a_place(self) -> None:
        placement = HybridComponentPlacement(config(actor=0), mixed())
        with pytest.raises(PlacementError, match="no component 'env'; it has: actor"):
            placement.get_strategy("env")
        with pytest.raises(PlacementError, match="no component 'env'"):
            placement.get_world_size("env")

    def test_is_no_configuration_error(self) -> None:
        assert not issubclass(PlacementError, ConfigError)


class TestModelParallel:
    @pytest.mark.parametrize(
        "components",
        [
            {"actor,rollout": "0-7"},
            {"actor": "0-7", "rollout": "0-7:0-3", "reward": "0-1"},
            {"actor": "0-3", "rollout": "0-3:0", "env": {"node_group": "cpu", "placement": "all"}},
        ],
    )
    def test_collocated(self, components: dict[str, Any]) -> None:
        placement = ModelParallelComponentPlacement(config(**components), mixed())
        assert placement.is_collocated and not placement.is_disaggregated

    @pytest.mark.parametrize(
        "components",
        [{"actor": "0-3", "rollout": "4-7"}, {"actor": "0-3", "rollout": "4-5", "inference": "6-7", "reward": "0"}],
    )
    def test_disaggregated(self, components: dict[str, Any]) -> None:
        placement = ModelParallelComponentPlacement(config(**components), mixed())
        assert placement.is_disaggregated and not placement.is_collocated

    @pytest.mark.parametrize(
        ("components", "says"),
        [
            ({"actor": "0-3"}, "no component 'rollout'"),
            ({"rollout": "0-3"}, "no component 'actor'"),
            ({"actor": "0-3", "rollout": "2-5"}, "actor on 0-3 and rollout on 2-5 share 2,3"),
            ({"actor": "0-7", "rollout": "0-3"}, "share 0-3"),
            ({"actor": "0,2", "rollout": "4-7"}, "placement.actor: 0,2; rule: the accelerators"),
            ({"actor": "0-3", "rollout": "4-5", "inference": "5-6"}, "rollout on 4,5 and inference on 5,6 share 5"),
            ({"actor,rollout": "0-5", "inference": "6-7"}, "placement.inference: actor and rollout are collocated"),
            ({"actor": "0-5:0-1,6-7:2-2", "rollout": "0-7:0-7"}, "share one node"),
            ({"actor": "0-3:0-3,4-5:4-4,6-7:5-5", "rollout": "0-7:0-3"}, "actor has 6 processes and rollout 4"),
        ],
    )  # fmt: skip
    def test_violations(self, components: dict[str, Any], says: str) -> None:
        with pytest.raises(PlacementError) as error:
            ModelParallelComponentPlacement(config(**components), Cluster.local(2, 4))
        assert says in str(error.value)
