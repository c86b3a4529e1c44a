"""The placement grammar, the strategies, and what the two component placements demand."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from rlhpc.runtime.cluster import Cluster
from rlhpc.runtime.errors import ConfigError, PlacementError
from rlhpc.runtime.placement import HybridComponentPlacement, ModelParallelComponentPlacement, parse_placement
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


class TestGrammar:
    @pytest.mark.parametrize(
        ("text", "processes"),
        [
            ("0", [[0]]),
            ("0-3", [[0], [1], [2], [3]]),
            ("0,2", [[0], [2]]),
            ("0-1,4-5", [[0], [1], [4], [5]]),
            ("all", [[n] for n in range(12)]),
            ("all:0-5", [[n, n + 1] for n in range(0, 12, 2)]),
            ("0-1:0-3", [[0], [0], [1], [1]]),
            ("0-3:0-1", [[0, 1], [2, 3]]),
            ("0-3:0", [[0, 1, 2, 3]]),
            ("0:0-2", [[0], [0], [0]]),
            ("0-1:0-3,3-5:4-6", [[0], [0], [1], [1], [3], [4], [5]]),
            # parts without process ranks count on from those before, as in RLinf's documentation
            ("0-1:0-3,3-5,7-10:7-14", [[n] for n in (0, 0, 1, 1, 3, 4, 5, 7, 7, 8, 8, 9, 9, 10, 10)]),
            ("0-1:0-1,2-3", [[0], [1], [2], [3]]),
            ("3,5:1-2", [[3], [5], [5]]),
            # and are a comma list when the processes after the ':' begin with theirs
            ("0,2,4-5:0-1", [[0, 2], [4, 5]]),
            ("0:0-1,2,4:2-5", [[0], [0], [2], [2], [4], [4]]),
            (" 0 - 1 : 0 - 3 , 3 ", [[0], [0], [1], [1], [3]]),
        ],
    )
    def test_what_it_means(self, text: str, processes: list[list[int]]) -> None:
        assert parse_placement("actor", text, 12) == processes

    @pytest.mark.parametrize(
        ("text", "fault", "rule"),
        [
            ("", "''", "ranks are missing"),
            ("0,,1", "'' in '0,,1'", "ranks are missing"),
            ("0-3,", "''", "ranks are missing"),
            (":0", "':0'", "ranks are missing"),
            ("0:", "'0:'", "ranks are missing"),
            ("0:0:0", "'0:0:0'", "more than one ':'"),
            ("first", "'first'", "not a rank (3), a range (0-3) or 'all'"),
            ("-1", "'-1'", "not a rank"),
            ("1.5", "'1.5'", "not a rank"),
            ("0..3", "'0..3'", "not a rank"),
            ("0-1-2", "'0-1-2'", "not a rank"),
            ("٣", "'٣'", "not a rank"),
            ("9" * 30, "999", "not a rank"),
            ("3-1", "'3-1'", "a range runs upwards"),
            ("0:3-1", "'3-1' in '0:3-1'", "a range runs upwards"),
            ("0:0-99999999", "'0-99999999'", "more than a million processes"),
            ("0:all", "'all' in '0:all'", "'all' stands for resources only"),
            ("4", "'4'", "resource 4 does not exist (the cluster has 4 accelerators (0 to 3))"),
            ("0-4", "'0-4'", "resource 4 does not exist"),
            ("0,0", "'0' in '0,0'", "accelerator 0 follows 0; resource ranks are unique and ascending"),
            ("0-2,2-3", "'2-3' in '0-2,2-3'", "unique and ascending"),
            ("2,1", "'1' in '2,1'", "unique and ascending"),
            ("all,3", "'3' in 'all,3'", "unique and ascending"),
            ("0:0,0:1", "'0:1' in '0:0,0:1'", "unique and ascending"),
            ("0:1", "'0:1'", "process ranks start at 1 instead of 0"),
            ("0:0,1:2", "'1:2' in '0:0,1:2'", "process ranks start at 2 instead of 1"),
            ("0:0-1,1:1", "'1:1' in '0:0-1,1:1'", "process ranks start at 1 instead of 2"),
            ("0-1:0-2", "'0-1:0-2'", "2 accelerators and 3 processes: one count must divide the other"),
            ("0-2:0-1", "'0-2:0-1'", "3 accelerators and 2 processes: one count must divide the other"),
        ],
    )  # fmt: skip
    def test_violations(self, text: str, fault: str, rule: str) -> None:
        with pytest.raises(PlacementError) as error:
            parse_placement("rollout", text, 4, "accelerator")
        message = str(error.value)
        assert message.startswith("cluster.component_placement.rollout: ")
        assert fault in message and rule in message

    def test_nothing_to_place_on(self) -> None:
        with pytest.raises(PlacementError, match="there is no accelerator"):
            parse_placement("actor", "all", 0, "accelerator")

    @given(st.data())
    def test_whatever_is_written_from_the_grammar_is_read_back(self, data: st.DataObject) -> None:
        expected: list[list[int]] = []
        parts: list[str] = []
        resource = 0
        for _ in range(data.draw(st.integers(1, 5))):
            first = resource + data.draw(st.integers(0, 3))
            count, factor = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 3))
            form = data.draw(st.sampled_from(["bare", "shared", "several"]))
            size = count * factor if form == "several" else count
            ranks = list(range(first, first + size))
            resource = first + size
            if form == "bare":
                new = [[r] for r in ranks]
            elif form == "shared":
                new = [[r] for r in ranks for _ in range(factor)]
            else:
                new = [ranks[i * factor : (i + 1) * factor] for i in range(count)]
            names = f":{len(expected)}-{len(expected) + len(new) - 1}" if form != "bare" else ""
            parts.append(f"{ranks[0]}-{ranks[-1]}{names}" if size > 1 else f"{first}{names}")
            expected += new
        assert parse_placement("actor", ",".join(parts), resource) == expected

    @given(st.text(alphabet="0123456789-:, al", max_size=14), st.integers(0, 12))
    def test_any_text_is_placed_by_the_rules_or_refused(self, text: str, resources: int) -> None:
        try:
            processes = parse_placement("actor", text, resources)
        except PlacementError as error:
            assert "cluster.component_placement.actor" in str(error)
            return
        used = [r for ranks in processes for r in ranks]
        assert processes and all(processes) and used == sorted(used) and set(used) <= set(range(resources))
        assert all(a == b or not set(a) & set(b) for a in processes for b in processes)
