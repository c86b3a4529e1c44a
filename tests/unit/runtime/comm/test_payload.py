"""Payloads: packed into shared memory, read, borrowed and returned."""

from __future__ import annotations

import gc

import torch

from rlhpc.runtime.comm.payload import Packed, unpack
from rlhpc.runtime.comm.shared_memory import Mappings, SegmentPool, bytes_in_use
from rlhpc.runtime.scratch import Scratch
from tests.unit.runtime.comm.shared_pairs import ORIGIN, SIZE, files, nowhere


def test_what_is_received_does_not_change_when_the_sender_goes_on(scratch: Scratch) -> None:
    pool, mappings = SegmentPool(scratch), Mappings()
    held = []
    for number in range(5):
        packed = Packed({"x": torch.full((SIZE,), number, dtype=torch.uint8)}, pool, ORIGIN)
        held.append(unpack(packed.frames(), "here", mappings, nowhere)["x"][7:-7])
    assert [set(x.unique().tolist()) for x in held] == [{0}, {1}, {2}, {3}, {4}]
    assert len(files(scratch)) == 5


def test_each_of_several_readers_may_write(scratch: Scratch) -> None:
    pool, mappings = SegmentPool(scratch), [Mappings() for _ in range(3)]
    packed = Packed(torch.zeros(SIZE), pool, ORIGIN, num_readers=3)
    got = [unpack(packed.frames(i), "here", each, nowhere) for i, each in enumerate(mappings)]
    got[0] += 1
    assert got[1].sum() == 0 and got[2].sum() == 0
    del got[0:2]
    gc.collect()
    assert bytes_in_use(scratch.shm) > 0, "the third looks at it still"
    Packed(torch.ones(SIZE), pool, ORIGIN)
    assert got[0].sum() == 0
    got.clear()
    packed = Packed(torch.ones(SIZE), pool, ORIGIN)
    assert len(files(scratch)) == 2


def test_borrowers_look_at_the_same_memory(scratch: Scratch) -> None:
    pool, mappings = SegmentPool(scratch), [Mappings(), Mappings()]
    packed = Packed(torch.zeros(SIZE), pool, ORIGIN, num_readers=2)
    first, second = (unpack(packed.frames(i), "here", each, nowhere, borrow=True) for i, each in enumerate(mappings))
    first[3] = 5
    assert second[3] == 5
