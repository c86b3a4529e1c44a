"""Process groups of one process, whose collectives do nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore


@contextmanager
def group(rank: int, ranks: int) -> Iterator[None]:
    """A process group of one process, which is this rank of it."""
    if dist.is_initialized():  # an engine of an earlier test in this process left its own
        dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()
