"""Collectives of a group of one rank."""

from __future__ import annotations

import torch

from rlhpc.runtime.comm.collectives import Collectives


def test_one_rank_needs_no_process_group() -> None:
    collectives = Collectives("group", 0, 1, None)
    assert collectives.process_group() is None and collectives.all_gather_object("a") == ["a"]
    collectives.barrier()
    assert collectives.all_reduce(torch.ones(2), "sum").tolist() == [1, 1]
