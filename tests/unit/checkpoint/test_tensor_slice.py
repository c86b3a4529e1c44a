"""Slices of tensors: cover, remainder and views."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from rlhpc.checkpoint.tensor_slice import box_of, cut, uncovered
from tests.unit.weights.boxes import boxes


@given(st.data())
def test_what_others_do_not_cover_is_the_rest(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
    wanted, held = data.draw(boxes(shape)), data.draw(st.lists(boxes(shape), max_size=4))
    mine, covered = torch.zeros(shape, dtype=torch.int), torch.zeros(shape, dtype=torch.bool)
    for box in held:
        cut(covered, box).fill_(True)
    for rest in uncovered(wanted, held):
        cut(mine, rest).add_(1)
    expected = torch.zeros(shape, dtype=torch.bool)
    cut(expected, wanted).fill_(True)
    assert torch.equal(mine.bool(), expected & ~covered) and int(mine.max()) <= 1


@given(st.data())
def test_a_view_of_a_tensor_is_the_box_that_it_shows(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)))
    box = data.draw(boxes(shape))
    view = cut(torch.empty(shape, device="meta"), box)
    found = box_of(view.storage_offset(), view.shape, view.stride(), shape)
    assert found is not None and found.sizes == box.sizes
    moved = [a != b and size > 1 for a, b, size in zip(found.starts, box.starts, box.sizes, strict=True)]
    assert not any(moved)
    squeezed = view.squeeze()
    assert box_of(squeezed.storage_offset(), squeezed.shape, squeezed.stride(), shape) == found


def test_what_is_turned_or_joined_is_no_box() -> None:
    full = torch.empty(6, 4, device="meta")
    assert box_of(0, full.T.shape, full.T.stride(), (6, 4)) is None
    assert box_of(0, (24,), (1,), (6, 4)) is None
    assert box_of(0, (3, 4), (8, 1), (6, 4)) is None  # every other row
