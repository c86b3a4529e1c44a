"""Slices of tensors: cover, remainder and views."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from rlhpc.checkpoint.tensor_slice import cut, slice_of_view, subtract_slices
from tests.unit.weights.boxes import tensor_slices


@given(st.data())
def test_what_others_do_not_cover_is_the_rest(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
    wanted, held = data.draw(tensor_slices(shape)), data.draw(st.lists(tensor_slices(shape), max_size=4))
    mine, covered = torch.zeros(shape, dtype=torch.int), torch.zeros(shape, dtype=torch.bool)
    for tensor_slice in held:
        cut(covered, tensor_slice).fill_(True)
    for rest in subtract_slices(wanted, held):
        cut(mine, rest).add_(1)
    expected = torch.zeros(shape, dtype=torch.bool)
    cut(expected, wanted).fill_(True)
    assert torch.equal(mine.bool(), expected & ~covered) and int(mine.max()) <= 1


@given(st.data())
def test_a_view_of_a_tensor_is_the_slice_that_it_shows(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)))
    tensor_slice = data.draw(tensor_slices(shape))
    view = cut(torch.empty(shape, device="meta"), tensor_slice)
    found = slice_of_view(view.storage_offset(), view.shape, view.stride(), shape)
    assert found is not None and found.sizes == tensor_slice.sizes
    moved = [
        a != b and size > 1 for a, b, size in zip(found.starts, tensor_slice.starts, tensor_slice.sizes, strict=True)
    ]
    assert not any(moved)
    squeezed = view.squeeze()
    assert slice_of_view(squeezed.storage_offset(), squeezed.shape, squeezed.stride(), shape) == found


def test_what_is_turned_or_joined_is_no_slice() -> None:
    full = torch.empty(6, 4, device="meta")
    assert slice_of_view(0, full.T.shape, full.T.stride(), (6, 4)) is None
    assert slice_of_view(0, (24,), (1,), (6, 4)) is None
    assert slice_of_view(0, (3, 4), (8, 1), (6, 4)) is None  # every other row
