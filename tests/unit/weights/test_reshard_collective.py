"""Shards as they lie side by side on their way over a process group, and what shows that they are what was handed over."""

from __future__ import annotations

import pytest
import torch

from rlhpc.checkpoint.tensor_slice import TensorSlice, full_slice
from rlhpc.weights.reshard_collective import pack_round, unpack_round
from rlhpc.weights.transfer_plan import ShardMetadata, TransferRound, plan_rounds, plan_transfer
from rlhpc.weights.verification import WeightsDiffer

SHAPES = {"a": (6, 5), "b": (40, 3), "c": (), "d": (7,)}
DTYPES = {"a": "float32", "b": "bfloat16", "c": "int64", "d": "float64"}
WHOLE = {
    name: torch.arange(1, 1 + full_slice(shape).numel).view(shape).to(getattr(torch, DTYPES[name]))
    for name, shape in SHAPES.items()
}


def held(rank: int) -> list[ShardMetadata]:
    """Of two ranks, each has half the rows of a matrix, and all of the rest."""
    found = []
    for name, shape in SHAPES.items():
        half = shape[0] // 2 if len(shape) == 2 else 0
        tensor_slice = TensorSlice((half * rank, 0), (half, shape[1])) if half else full_slice(shape)
        found.append(ShardMetadata(name, shape, WHOLE[name].itemsize, tensor_slice, False, DTYPES[name]))
    return found


ROUTES = plan_transfer([held(0), held(1)], None)
CUT = plan_rounds(ROUTES.slices, 100)


def values(piece: object) -> torch.Tensor:
    name, tensor_slice = piece[0], piece[1]  # type: ignore[index]
    return WHOLE[name][tuple(slice(*ends) for ends in zip(tensor_slice.starts, tensor_slice.ends, strict=True))]


def sent(load: TransferRound) -> torch.Tensor:
    flat = torch.empty(load.size, dtype=torch.uint8)
    for rank, (start, end) in load.spans.items():
        flat[start:end] = pack_round(load, rank, values, 3, lambda size: torch.empty(size, dtype=torch.uint8))
    return flat


def test_what_is_opened_is_what_was_packed() -> None:
    assert [piece for load in CUT for piece in load.slices] == list(ROUTES.slices)
    assert len(CUT) > 2 and any(len(load.spans) == 2 for load in CUT)
    for load in CUT:
        assert len(load.slices) == 1 or sum(piece.nbytes for piece in load.slices) <= 100
        for piece, tensor in unpack_round(load, sent(load), ROUTES.dtypes, 3):
            assert torch.equal(tensor, values(piece))


def test_a_bit_that_differs_is_noticed() -> None:
    load = CUT[0]
    for piece, at in zip(load.slices, load.offsets, strict=True):
        flat = sent(load)
        flat[at + piece.nbytes - 1] ^= 1
        with pytest.raises(
            WeightsDiffer, match=rf"version 3: {piece.name}@.* rank {piece.source} of the trainer handed over"
        ):
            [*unpack_round(load, flat, ROUTES.dtypes, 3)]
