"""Large copies are the same whoever makes them."""

from __future__ import annotations

import mmap
import os

import numpy as np
import pytest

from rlhpc.runtime.comm import shared_memory as copying
from rlhpc.runtime.comm.shared_memory import copy_into


@pytest.mark.parametrize("cores", [1, 2, 64])
def test_every_byte_lands_where_it_belongs(monkeypatch, cores):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))
    sizes = [0, 1, 12_345_678, 3, copying._COPY_BYTES, copying._COPY_BYTES + 1, 0, 7]
    sources = [np.random.default_rng(i).integers(0, 256, size, np.uint8) for i, size in enumerate(sizes)]
    offsets = np.cumsum([64, *(size + 64 for size in sizes)])[:-1]
    memory = mmap.mmap(-1, sum(sizes) + 64 * (len(sizes) + 1))
    copy_into(memory, zip(offsets, sources, strict=True))
    target = np.frombuffer(memory, np.uint8)
    expected = np.zeros_like(target)
    for start, source in zip(offsets, sources, strict=True):
        expected[start : start + len(source)] = source
    assert np.array_equal(target, expected)


def test_a_forked_process_copies_too(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    source, memory = np.ones(copying._MIN_THREADED_BYTES, np.uint8), mmap.mmap(-1, copying._MIN_THREADED_BYTES)
    copy_into(memory, [(0, source)])
    if (pid := os.fork()) == 0:
        memory[:] = bytes(len(memory))
        copy_into(memory, [(0, source)])
        os._exit(0 if np.frombuffer(memory, np.uint8).all() else 1)
    assert os.waitpid(pid, 0)[1] == 0
