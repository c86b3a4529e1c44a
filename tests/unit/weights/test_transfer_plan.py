"""Slices, and who sends which: against tensors."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhpc.checkpoint.tensor_slice import TensorSlice, cut, full_slice, subtract_slices
from rlhpc.runtime.errors import RlhpcError
from rlhpc.weights.transfer_plan import ShardMetadata, plan_transfer
from tests.unit.weights.boxes import tensor_slices


@settings(max_examples=60)
@given(st.data())
def test_whoever_wants_gets_it_once_from_those_who_have_it(data: st.DataObject) -> None:
    shapes = {
        f"layers.{i}.weight": tuple(data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=2))) for i in range(3)
    }
    ranks = data.draw(st.integers(1, 4))
    held = [
        [
            ShardMetadata(n, s, 4, part)
            for n, s in shapes.items()
            for part in _rows_of(s, rank, ranks, data.draw(st.booleans()))
        ]
        for rank in range(ranks)
    ]
    everything = {name: [full_slice(shape)] for name, shape in shapes.items()}
    complete = all(
        not subtract_slices(full_slice(s), [h.tensor_slice for own in held for h in own if h.name == n])
        for n, s in shapes.items()
    )
    wanted = {n: (data.draw(tensor_slices(s)), data.draw(tensor_slices(s))) for n, s in shapes.items()}
    if not complete:
        with pytest.raises(RlhpcError, match="no rank of the trainer has"):
            plan_transfer(held, everything)
        return
    found = plan_transfer(held, wanted)
    assert found == plan_transfer(held, wanted) and sum(found.bytes_by_rank().values()) == sum(
        p.nbytes for p in found.slices
    )
    for name, shape in shapes.items():
        got = torch.zeros(shape, dtype=torch.int)
        for piece in found.slices:
            if piece.name == name:
                cut(got, piece.tensor_slice).add_(1)
                assert any(
                    h.tensor_slice.meet(piece.tensor_slice) == piece.tensor_slice
                    for h in held[piece.source]
                    if h.name == name
                )
        expected = torch.zeros(shape, dtype=torch.int)
        for tensor_slice in wanted[name]:
            cut(expected, tensor_slice).fill_(1)
        assert torch.equal(got, expected)


def _rows_of(shape: tuple[int, ...], rank: int, ranks: int, all_of_it: bool) -> list[TensorSlice]:
    if all_of_it:
        return [full_slice(shape)]
    size = math.ceil(shape[0] / ranks)
    start, stop = rank * size, min((rank + 1) * size, shape[0])
    return [TensorSlice((start, *(0 for _ in shape[1:])), (stop - start, *shape[1:]))] if stop > start else []


@pytest.mark.parametrize("ranks", [1, 3, 8])
def test_copies_share_what_there_is_to_send(ranks: int) -> None:
    """A model of which one matrix is most: no rank sends more than a tenth above its share."""
    shapes = {"embed": (50_000, 64), **{f"layers.{i}.w": (256, 256) for i in range(12)}, "norm": (64,)}
    held = [[ShardMetadata(name, shape, 2, full_slice(shape)) for name, shape in shapes.items()] for _ in range(ranks)]
    sent = plan_transfer(held, None).bytes_by_rank()
    assert max(sent.values()) <= 1.1 * sum(sent.values()) / ranks


def test_layers_go_out_in_the_order_in_which_they_are() -> None:
    names = [f"model.layers.{i}.w" for i in (10, 2, 0, 1)]
    found = plan_transfer([[ShardMetadata(name, (4, 4), 4, full_slice((4, 4))) for name in names]], None)
    assert [key for key, _ in itertools.groupby(p.name for p in found.slices)] == sorted(
        names, key=lambda n: int(n.split(".")[2])
    )


def test_what_nobody_has_is_named() -> None:
    with pytest.raises(RlhpcError, match="the engine wants lm_head, and no rank"):
        plan_transfer([[ShardMetadata("embed", (4,), 4, full_slice((4,)))]], {"lm_head": (full_slice((4,)),)})
    with pytest.raises(RlhpcError, match="ranks of the trainer have w of shape"):
        plan_transfer(
            [[ShardMetadata("w", (4,), 4, full_slice((4,)))], [ShardMetadata("w", (5,), 4, full_slice((5,)))]], None
        )
