"""Metrics of weight updates on their way: their names, and the summary of a run.

Receivers measure each version; `receiver.transfer_metrics` computes the metrics of a step from their reports.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

#: Bytes of a version in GB, its seconds, its rate, and the prefix of the share of each transport.
GIGABYTES, SECONDS, RATE, SHARE = "time/weights_gb", "time/weights_s", "time/weights_gb_per_s", "time/weights_by_"
#: Prefix of the transports of slices; without it, a sender broadcasts full tensors.
SHARDS_PREFIX = "shards_"


def describe_strategy(row: Mapping[str, object]) -> str:
    """Formats the strategies and transports of a step, such as `broadcast by ipc (97.1%), host (2.9%)`; "" without metrics."""
    transport_shares = {
        key.removeprefix(SHARE): metric_value
        for key, metric_value in row.items()
        if key.startswith(SHARE) and isinstance(metric_value, (int, float)) and metric_value > 0
    }
    transport_names = {
        strategy: [
            name.removeprefix(SHARDS_PREFIX) + (f" ({transport_share:.1%})" if transport_share < 0.9995 else "")
            for name, transport_share in sorted(transport_shares.items(), key=lambda named_share: -named_share[1])
            if name.startswith(SHARDS_PREFIX) == (strategy == "shards")
        ]
        for strategy in ("broadcast", "shards")
    }
    return "; ".join(
        f"{strategy} by {', '.join(transports)}" for strategy, transports in transport_names.items() if transports
    )


class TransferSummary(NamedTuple):
    """Transfers of a run.

    Attributes:
        strategy: Strategies and transports, with the share of each (`describe_strategy`).
        gigabytes, seconds: Medians of a version.
        rate: Median of the steps' rates in GB/s; None if no step reports a rate.
    """

    strategy: str
    gigabytes: float
    seconds: float
    rate: float | None


def summarize_transfers(rows: Sequence[Mapping[str, Any]]) -> TransferSummary:
    """Returns the summary of a run from its rows of metrics, of which at least one has `GIGABYTES` and `SECONDS`."""
    measured_rows = [row for row in rows if GIGABYTES in row and SECONDS in row]
    share_names = sorted({key for row in measured_rows for key in row if key.startswith(SHARE)})
    gigabytes_by_name = {
        name: sum(row.get(name, 0.0) * row[GIGABYTES] for row in measured_rows) for name in share_names
    }
    total_gigabytes = sum(gigabytes_by_name.values()) or 1.0
    rates = [row[RATE] for row in measured_rows if RATE in row]
    return TransferSummary(
        describe_strategy({name: gigabytes / total_gigabytes for name, gigabytes in gigabytes_by_name.items()}),
        statistics.median(row[GIGABYTES] for row in measured_rows),
        statistics.median(row[SECONDS] for row in measured_rows),
        statistics.median(rates) if rates else None,
    )
