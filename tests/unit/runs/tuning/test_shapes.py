"""Shapes of clusters, and placements of groups on them."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlhpc.runs.configuration import load_config
from rlhpc.runs.tuning.shapes import Candidate, ClusterShape, GroupPlacement, configured_placements

CONFIGS = Path(__file__).resolve().parents[4] / "configs"
MATH, QUICKSTART = CONFIGS / "reasoning" / "math.yaml", CONFIGS / "quickstart.yaml"
TWO_KINDS = CONFIGS / "embodied" / "cartpole_het.yaml"


@pytest.mark.parametrize(
    ("arguments", "text", "processes"),
    [
        ((0, 1), "0", ((0,),)),
        ((2, 3), "2-4", ((2,), (3,), (4,))),
        ((1, 1, 2), "1:0-1", ((1,), (1,))),
        ((0, 2, 2), "0-1:0-3", ((0,), (0,), (1,), (1,))),
    ],
)
def test_a_placement_is_written_as_configurations_have_it(
    arguments: tuple[int, ...], text: str, processes: tuple[tuple[int, ...], ...]
) -> None:
    placement = GroupPlacement.from_range("cluster", *arguments)
    assert (placement.text, placement.processes) == (text, processes)
    assert placement.resources == {index for indices in processes for index in indices}


def test_the_pool_of_a_group_has_its_accelerators_or_else_its_nodes() -> None:
    shape = ClusterShape.from_config(load_config(TWO_KINDS), ["gpu", "cpu", "node"], memory=7, device_memory=5)
    assert shape.pools["gpu"].resources == ((0, 0), (0, 1)) and not shape.pools["gpu"].by_node
    assert shape.pools["cpu"].resources == ((1, -1),) and shape.pools["cpu"].by_node
    assert shape.pools["node"].resources == ((0, -1), (1, -1))
    assert (shape.cores, shape.accelerators, shape.memory, shape.device_memory) == ((4, 4), 2, 7, 5)
    assert shape.nodes_of(GroupPlacement.from_range("node", 0, 2)) == [0, 1]
    assert shape.resources_of(GroupPlacement.from_range("gpu", 1, 1, 2)) == [[(0, 1)], [(0, 1)]]


def test_the_placement_of_a_configuration_is_read_and_written_back() -> None:
    placements = configured_placements(load_config(TWO_KINDS))
    assert {group: placement.label for group, placement in placements.items()} == {
        "actor": "gpu", "rollout": "gpu", "env": "cpu",
    }  # fmt: skip
    candidate = Candidate(placements, {"runner.max_steps": 7})
    assert candidate.placement() == {
        "actor": {"node_group": "gpu", "placement": "0"},
        "rollout": {"node_group": "gpu", "placement": "1"},
        "env": {"node_group": "cpu", "placement": "0"},
    }
    cfg = load_config(TWO_KINDS, candidate.overrides())
    assert cfg.runner.max_steps == 7 and configured_placements(cfg) == placements


def test_groups_that_one_key_places_have_one_placement_each() -> None:
    words = ["cluster.accelerators_per_node=4", 'cluster.component_placement={"actor, rollout": 0-3}']
    placements = configured_placements(load_config(MATH, words))
    assert set(placements) == {"actor", "rollout"}
    assert {placement.text for placement in placements.values()} == {"0-3"}
    assert all(placement.processes == ((0,), (1,), (2,), (3,)) for placement in placements.values())
    assert Candidate(placements, {}).ranks("actor") == 4


@pytest.mark.parametrize(
    ("actor", "rollout", "mode"),
    [
        (GroupPlacement.from_range("cluster", 0, 2), GroupPlacement.from_range("cluster", 0, 2, 2), "collocated"),
        (GroupPlacement.from_range("cluster", 0, 1), GroupPlacement.from_range("cluster", 1, 3), "disaggregated"),
        (GroupPlacement.from_range("cluster", 0, 2), GroupPlacement.from_range("cluster", 1, 2), "hybrid"),
        (GroupPlacement.from_range("gpu", 0, 1), GroupPlacement.from_range("cpu", 0, 1), "disaggregated"),
    ],
)
def test_the_mode_says_what_groups_share(actor: GroupPlacement, rollout: GroupPlacement, mode: str) -> None:
    assert Candidate({"actor": actor, "rollout": rollout}, {}).mode == mode


def test_a_machine_without_accelerators_is_a_pool_of_one_node() -> None:
    cfg = load_config(QUICKSTART, ["cluster.accelerators_per_node=0"])
    shape = ClusterShape.from_config(cfg, {placement.label for placement in configured_placements(cfg).values()})
    assert [pool.resources for pool in shape.pools.values()] == [((0, -1),)]
    assert shape.accelerators == 0 and len(shape.cores) == 1
