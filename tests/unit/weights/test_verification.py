"""What proving weights takes of the processor: each second once, by the clock that is asked for."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable

import pytest
import torch

from rlhpc.runtime.comm.shared_memory import SegmentPool
from rlhpc.weights import sender as publish
from rlhpc.weights import verification as proof
from rlhpc.weights.base import Receipt, Update
from rlhpc.weights.sender import Publisher
from rlhpc.weights.verification import COST, Cost, UpdateVerification

from .test_verification_digest import pool, scratch  # noqa: F401 (fixtures)


def test_what_is_within_counts_once() -> None:
    cost, ticks = Cost(), itertools.count(10)

    def clock() -> float:
        return float(next(ticks))

    for _ in range(2):
        with cost.measuring(clock), cost.measuring(clock):
            pass
    with pytest.raises(ValueError, match="broke"), cost.measuring(clock):
        raise ValueError("broke")
    found = cost.pop()
    assert found["proof_s"] == 3.0 and found["cpu_s"] >= 0.0
    assert cost.pop()["proof_s"] == 0.0


def test_digests_count_at_both_ends(monkeypatch: pytest.MonkeyPatch, pool: SegmentPool) -> None:  # noqa: F811
    def slow(tensor: torch.Tensor, version: int) -> int:
        end = time.thread_time() + 0.01
        while time.thread_time() < end:
            pass
        return version

    def all_slow(tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> dict[str, int]:
        return {name: slow(tensor, version) for name, tensor in tensors}

    for module in (publish, proof):
        monkeypatch.setattr(module, "digests", all_slow)
    monkeypatch.setattr(proof, "digest", slow)
    named = {f"t{i}": torch.randn(8) for i in range(4)}
    COST.pop()
    (announcement,) = Publisher(pool, 1).publish(1, named.items())
    assert announcement.receipt == Receipt(1, dict.fromkeys(named, 1)) and COST.pop()["proof_s"] >= 0.04
    taken = UpdateVerification(Update(1, True, iter(named.items()), lambda: announcement.receipt))
    assert len(list(taken.tensors())) == 4 and COST.pop()["proof_s"] >= 0.04
    taken.check(named.get)
    assert COST.pop()["proof_s"] >= 0.04
