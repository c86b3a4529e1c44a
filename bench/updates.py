"""Predicted time of an update of a large model's weights on several nodes, from measurements and assumptions.

    python -m bench.updates

The stages run concurrently on successive parts of 256 MB, so the slowest stage determines the rate, and each other stage adds
the time of one part. The rates of one TCP stream (hosts) and of writes into shared memory (weights) come from `bench/results`;
both were measured on a small machine whose two cores were sender and receiver, so a server is faster. The other rates are
assumptions (`ASSUMED`), because the machine has no accelerator and no network. The values in brackets assume that streams are
as fast as the network, like several parallel streams. Prints the table of `docs/explanation/performance.md`.
"""

from __future__ import annotations

import json
import math
from typing import NamedTuple

from bench.machine import RESULTS
from bench.weights import BYTES
from rlhpc.weights.device_sharing import CHUNK_BYTES

#: GB/s, and how many engines a node has.
ASSUMED = {"device to host, pages locked": 25.0, "host to device, for each engine": 6.0, "engines on a node": 8}
MODELS = {"7B": 15.2e9, "70B": 141e9}
NODES, LINKS = (1, 4, 16), (25, 100, 400)


class UpdateTimes(NamedTuple):
    """Times of an update in seconds, and its slowest stage."""

    seconds: float
    slowest: str


def measure_rates() -> dict[str, float]:
    """Returns the GB/s of one TCP stream, and of writing tensors into shared memory."""
    hosts = json.loads((RESULTS / "hosts.json").read_text())["figures"]
    weight_figures = json.loads((RESULTS / "weights.json").read_text())["figures"]
    return {
        "stream": (256 << 20) / hosts["TCP, 256 MiB dict (ms)"]["median"] / 1e6,
        "write": BYTES / weight_figures["1 to 1, adopted, all (s)"]["median"] / 1e9,
    }


def predict_update(size: float, num_nodes: int, link: float, stream: float, write: float) -> UpdateTimes:
    """Returns the times of an update of `size` bytes, all of it trained.

    Args:
        size: Bytes.
        num_nodes: Each has a share of the model, and every engine receives the complete model.
        link: Gb/s of a node's network, each way.
        stream: GB/s of one TCP stream; infinite where streams are not what limits.
        write: GB/s into shared memory.
    """
    link_bytes, hosts = link / 8, num_nodes - 1
    rates = {
        "device to host": min(ASSUMED["device to host, pages locked"], write),
        "host to device": ASSUMED["host to device, for each engine"],
    }
    num_levels = 0
    if hosts:
        num_copies = min(2, hosts)
        rates["gathering"] = link_bytes * num_nodes / hosts  # this node's own share need not come
        rates["sending"] = link_bytes / num_copies
        rates["a TCP stream"] = stream
        num_levels = (hosts + 1).bit_length() - 1
    slowest = min(rates, key=lambda stage: rates[stage])
    filling = CHUNK_BYTES / 1e9 * sum(1 / rates[stage] for stage in ("device to host", "host to device"))
    filling += num_levels * CHUNK_BYTES / 1e9 / min(link_bytes, stream)
    return UpdateTimes(size / 1e9 / rates[slowest] + filling, slowest)


def render_table() -> str:
    """Formats all predictions, in Markdown."""
    rates = measure_rates()
    lines = [
        "| model | nodes | " + " | ".join(f"{link} Gb/s" for link in LINKS) + " |",
        "|---" * (2 + len(LINKS)) + "|",
    ]
    for model, size in MODELS.items():
        for nodes in NODES:
            cells = []
            for link in LINKS:
                update_times = predict_update(size, nodes, link, **rates)
                storage_only = predict_update(size, nodes, link, math.inf, rates["write"])
                cells.append(f"{update_times.seconds:.0f} s, {update_times.slowest}")
                if storage_only.slowest != update_times.slowest:
                    cells[-1] += f" ({storage_only.seconds:.0f} s, {storage_only.slowest})"
            lines.append(f"| {model} | {nodes} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(render_table())
