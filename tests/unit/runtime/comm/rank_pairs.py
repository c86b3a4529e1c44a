"""Two ranks of a run in one process: each has a context and a service, and a test switches between them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rlhpc.runtime.comm.context import Context, install
from rlhpc.runtime.comm.service import Service
from rlhpc.runtime.registry import MEMBERS, CurveKeys, GenerationFolder
from rlhpc.runtime.scratch import Scratch


@contextmanager
def rank_pair(folder: Path, scratch: Scratch, tcp_address: str | None = None) -> Iterator[tuple[Context, Context]]:
    """Yields the contexts of `left-0` and `right-0`; the first is installed."""
    registry = GenerationFolder.create(folder / "run" / "registry", "local-0")
    keys = CurveKeys.fresh()
    contexts = []
    for group in ("left", "right"):
        service = Service(f"{group}-0", keys, scratch, tcp_address)
        record = {
            "group": group,
            "rank": 0,
            "host": service.endpoint["host"],
            "data": service.endpoint,
            "incarnation": "1",
        }
        registry.put(MEMBERS, f"{group}-0", record)
        contexts.append(Context(f"{group}-0", registry, service, service.check, 20.0))
    install(contexts[0])
    try:
        yield contexts[0], contexts[1]
    finally:
        install(None)
        for context in contexts:
            context.service.stop()
