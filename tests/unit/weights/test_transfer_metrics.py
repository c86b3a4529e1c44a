"""How long a version took, and by which transport, as receivers report it and as a step shows it."""

from __future__ import annotations

import math
import time

import pytest
import torch

from rlhpc.weights.base import Transfer, Update, VersionDigests
from rlhpc.weights.receiver import TransferTotals, note_announcement, transfer_facts, transfer_metrics
from rlhpc.weights.transfer_metrics import RATE, describe_strategy, summarize_transfers
from rlhpc.weights.verification import UpdateVerification, WeightsDiffer, digest


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def measured(clock: list[float], seconds: float, **nbytes: int) -> Transfer:
    transfer = Transfer()
    note_announcement(transfer, 0.0)
    transfer.bytes_by_transport.update(nbytes)
    clock[0] += seconds
    transfer.end_s = time.monotonic()
    return transfer


def test_a_receiver_that_reads_along_counts_from_the_first_byte(clock: list[float]) -> None:
    transfer = Transfer()
    for elapsed in (0.5, 1.5, 2.5):
        clock[0] += 1 if elapsed > 0.5 else 0.5
        note_announcement(transfer, elapsed)
    clock[0] += 0.25
    transfer.end_s = time.monotonic()
    assert transfer.end_s - transfer.start_s == pytest.approx(2.75)


def test_a_receiver_that_comes_late_counts_the_sending_and_not_its_delay(clock: list[float]) -> None:
    """The sender was done after 2.5 s; the receiver comes 60 s later, and reads for 1 s."""
    transfer = Transfer()
    clock[0] += 60
    for elapsed in (0.5, 1.5, 2.5):
        note_announcement(transfer, elapsed)
    clock[0] += 1
    transfer.end_s = time.monotonic()
    assert transfer.end_s - transfer.start_s == pytest.approx(3.5)


def test_totals_are_those_since_the_last_report(clock: list[float]) -> None:
    totals = TransferTotals()
    totals.add(None)
    assert totals.pop() == {}
    totals.add(measured(clock, 2.0, ipc=6_000_000_000))
    totals.add(measured(clock, 4.0, ipc=3_000_000_000, host=3_000_000_000))
    assert transfer_metrics([totals.pop()]) == {
        "time/weights_gb": 6.0, "time/weights_s": 3.0, "time/weights_gb_per_s": 2.0,
        "time/weights_by_host": 0.25, "time/weights_by_ipc": 0.75,
    }  # fmt: skip
    assert totals.pop() == {}


def test_a_step_is_as_slow_as_its_slowest_receiver(clock: list[float]) -> None:
    totals = [TransferTotals(), TransferTotals(), TransferTotals()]
    totals[0].add(measured(clock, 1.0, host=2_000_000_000))
    totals[1].add(measured(clock, 4.0, host=2_000_000_000))
    row = transfer_metrics([{"busy_s": 1.0}, *({"busy_s": 2.0, **part.pop()} for part in totals)])
    assert row == {
        "time/weights_gb": 2.0, "time/weights_s": 4.0, "time/weights_gb_per_s": 0.5, "time/weights_by_host": 1.0
    }  # fmt: skip


def test_a_step_without_weights_shows_nothing_of_them(clock: list[float]) -> None:
    assert transfer_metrics([{"busy_s": 1.0}]) == {} == transfer_metrics([]) == transfer_facts({"time/step_s": 1.0})
    totals = TransferTotals()
    totals.add(measured(clock, 0.5))  # nothing has changed since the last version
    row = transfer_metrics([totals.pop()])
    assert row == {"time/weights_gb": 0.0, "time/weights_s": 0.5} and describe_strategy(row) == ""
    assert summarize_transfers([row]).rate is None


def test_the_strategy_is_named_by_what_was_carried() -> None:
    assert describe_strategy({"time/weights_by_ipc": 1.0}) == "broadcast by ipc"
    assert describe_strategy({"time/weights_by_host": 0.1, "time/weights_by_nccl": 0.9}) == (
        "broadcast by nccl (90.0%), host (10.0%)"
    )
    assert describe_strategy({"time/weights_by_shards_nccl": 1.0}) == "shards by nccl"
    assert transfer_facts({"time/weights_by_ipc": 1.0, RATE: 3.0}) == {
        "weights_by": {"ipc": 1.0}, "weights_gb_per_s": 3.0,
    }  # fmt: skip


def test_a_run_is_summed_up_by_bytes_and_medians() -> None:
    rows = [
        {"time/weights_gb": 1.0, "time/weights_s": 9.0, RATE: 1 / 9, "time/weights_by_host": 1.0},
        {"time/weights_gb": 1.0, "time/weights_s": 0.5, RATE: 2.0, "time/weights_by_ipc": 1.0},
        {"time/weights_gb": 2.0, "time/weights_s": 0.5, RATE: 4.0, "time/weights_by_ipc": 1.0},
    ]
    assert summarize_transfers(rows) == ("broadcast by ipc (75.0%), host (25.0%)", 1.0, 0.5, 2.0)


@pytest.mark.parametrize("correct", [True, False])
def test_a_transfer_ends_with_the_check(clock: list[float], correct: bool) -> None:
    tensor, transfer = torch.ones(3), Transfer()
    note_announcement(transfer, 0.0)
    version_digests = VersionDigests(0, {"weight": digest(tensor, 0) + (not correct)})
    update = Update(0, True, iter([("weight", tensor)]), lambda: version_digests, transfer=transfer)
    verification = UpdateVerification(update)
    list(verification.tensors())
    clock[0] += 7
    assert math.isnan(transfer.end_s)
    if correct:
        verification.check()
        assert transfer.end_s - transfer.start_s == 7
    else:
        with pytest.raises(WeightsDiffer):
            verification.check()
