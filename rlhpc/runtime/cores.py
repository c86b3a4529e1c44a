"""Which cores a rank computes on: those near its accelerators, where the granted ones are not all equally near."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

PCI = Path("/sys/bus/pci/devices")


def cores_in(text: str) -> set[int]:
    """The cores of a list as Linux writes it: `0-3,8` → 0, 1, 2, 3, 8."""
    parts = (part.partition("-") for part in text.strip().split(",") if part)
    return {core for first, _, last in parts for core in range(int(first), int(last or first) + 1)}


def near(addresses: Iterable[str], pci: Path = PCI) -> set[int]:
    """The cores of the NUMA nodes that devices are on; empty where the kernel does not tell.

    Args:
        addresses: On the PCI bus, such as `0000:1b:00.0`.
        pci: Where the kernel has its facts of these devices.
    """
    found: set[int] = set()
    for address in addresses:
        try:
            found |= cores_in((pci / address / "local_cpulist").read_text())
        except OSError:
            return set()
    return found


def stay_near(addresses: Sequence[str], threads: int, pci: Path = PCI) -> str:
    """Binds the calling thread, and with it all threads and processes that it starts later, to the granted cores near devices.

    Ranks whose devices are near the same cores share these, as the kernel sees fit. A rank that would be left with fewer
    cores than threads keeps them all: some are then far, but none is taken from it.

    Args:
        addresses: Of the rank's accelerators on the PCI bus.
        threads: Cores that the rank counts on.
        pci: See `near`.

    Returns:
        What was done, and why.
    """
    granted = os.sched_getaffinity(0)
    close = near(addresses, pci) & granted
    if not close:
        return "not bound: the kernel does not tell of a granted core that is near its accelerators"
    if close == granted:
        return f"not bound: all its {len(granted)} cores are near its accelerators"
    if len(close) < threads:
        return f"not bound: {len(close)} of its {len(granted)} cores are near its accelerators, and it has {threads} threads"
    os.sched_setaffinity(0, close)
    return f"bound to {len(close)} of its {len(granted)} cores, those near its accelerators ({', '.join(addresses)})"
