"""Weight sync from a trainer rank to an engine rank on one card, within the card and through the host, and on two cards."""

from __future__ import annotations

import time

from bench.gpu.part import Report
from bench.gpu.ranks import DeviceHolder, launch_groups
from rlhpc import WorkerGroup

TENSORS = 64


def update(sender: WorkerGroup, taker: WorkerGroup, version: int) -> tuple[float, float]:
    """Returns the sender's seconds, and the seconds until the receiver has read the complete update."""
    start_time = time.perf_counter()
    send_handle, receive_handle = sender.give(version), taker.take()
    (sent_s,) = send_handle.wait()
    if receive_handle.wait() != [True]:
        raise RuntimeError("weights did not arrive as they were sent")
    return float(sent_s), time.perf_counter() - start_time


def measure(report: Report) -> None:
    """Measures two ranks on one card, and on two cards if available."""
    total = 64_000_000 if report.small else 3_000_000_000  # 1.5 billion weights in bfloat16
    cases = {"one card": (0, "auto", "copy, written"), "one card, by the host": (0, "host", "to the host")}
    cases |= {"two cards": (1, "auto", "")} if report.cards > 1 else {}
    if report.cards < 2:
        report.skip("from one card to another", "needs two cards")
    for case_name, (card, sync, ceiling) in cases.items():
        with launch_groups(report.device, (DeviceHolder, "sender", [0]), (DeviceHolder, "taker", [card])) as (
            sender,
            receiver,
        ):
            for group in (sender, receiver):
                group.open([("taker", [0])], TENSORS, total // 2 // TENSORS, sync).wait()
            # The first ones also take memory that later ones use again.
            durations = [update(sender, receiver, version) for version in range(1, 6)][2:]
            report.figure(
                f"{case_name}, sending {total / 1e9:g} GB", [total / sent_s / 1e9 for sent_s, _ in durations], "GB/s",
                of=ceiling,
            )  # fmt: skip
            report.figure(
                f"{case_name}, sent, taken in and compared", [total / total_s / 1e9 for _, total_s in durations], "GB/s",
                of=ceiling,
            )  # fmt: skip
            report.figure(f"{case_name}, the whole update", [total_s for _, total_s in durations], "s")
