"""Sizes of a mesh: what fits so many ranks, who is where, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from rlhpc.config.parallel import MeshSizes
from rlhpc.config.sections import ParallelConfig
from rlhpc.runtime.errors import ConfigError


def test_ranks_that_the_other_sizes_leave_are_shards() -> None:
    assert MeshSizes.from_config(ParallelConfig(), 8) == MeshSizes(shard=8)
    assert MeshSizes.from_config(ParallelConfig(), 8).plain
    assert MeshSizes.from_config(ParallelConfig(replicate=2, tensor=2, expert=4), 8) == MeshSizes(2, 2, 1, 2, 4)


def test_neighbours_of_a_block_see_the_same_samples() -> None:
    sizes = MeshSizes.from_config(ParallelConfig(replicate=2, context=2, tensor=2), 16)
    assert (sizes.data, sizes.block, sizes.ranks) == (4, 4, 16)
    assert [sizes.data_of(rank) for rank in range(16)] == [0] * 4 + [1] * 4 + [2] * 4 + [3] * 4
    assert [sizes.lane_of(rank) for rank in range(4, 8)] == [0, 1, 2, 3]
    assert sizes.first_of(2) == 8
    assert sizes.coordinates(11) == {"replicate": 1, "shard": 0, "context": 1, "tensor": 1}


@pytest.mark.parametrize(
    ("given", "ranks", "told"),
    [
        (
            {"tensor": 3},
            8,
            "actor.parallel: replicate 1 × context 1 × tensor 3 = 3 does not divide the group's 8 ranks",
        ),
        ({"shard": 4, "tensor": 4}, 8, "shard 4 = 16, but the group has 8 ranks"),
        ({"context": 0}, 8, "actor.parallel.context is 0; it must be at least 1"),
        ({"shard": 0}, 8, "actor.parallel.shard is 0"),
        ({"replicate": 4, "expert": 4}, 8, r"expert(4) does not divide shard × context × tensor (2)"),
        ({"tensor": 4, "expert": 6}, 24, r"expert(6) and tensor(4): one of them must divide the other"),
    ],
)
def test_sizes_that_do_not_fit_are_refused_by_name(given: dict[str, Any], ranks: int, told: str) -> None:
    with pytest.raises(ConfigError) as error:
        MeshSizes.from_config(ParallelConfig(**given), ranks)
    assert told in str(error.value)
