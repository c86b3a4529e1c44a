"""Loggers that a user brings, and rows for them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlhpc.jobs.paths import RunPaths
from rlhpc.metrics import MetricLogger
from rlhpc.metrics.loggers import RunFacts

OWN = f"{__name__}:Lines"


class Lines:
    """A logger of one's own: a text file."""

    def __init__(self, title: str = "rows") -> None:
        self.title = title

    def open(self, run: RunFacts, resume_step: int | None) -> int | None:
        self.path = run.folder / f"{self.title}.txt"
        run.saved_state.setdefault("id", f"{run.name}-{run.config['seed']}")
        run.saved_state["starts"] = run.saved_state.get("starts", 0) + 1
        return max((int(line.split()[0]) for line in self.lines()), default=None) if resume_step is not None else None

    def lines(self) -> list[str]:
        return self.path.read_text().splitlines() if self.path.exists() else []

    def log(self, step: int, row: Mapping[str, float]) -> None:
        with self.path.open("a") as file:
            print(step, row["train/a"], file=file)

    def commit(self) -> None:
        self.committed = True

    def close(self) -> None:
        assert self.committed


def write(paths: RunPaths, first: int, last: int, resume: int | None, backends: list[str], **kwargs: Any) -> None:
    named = {backend: kwargs for backend in backends if kwargs}
    with MetricLogger(paths, backends, resume, named, {"seed": 7}) as logger:
        for step in range(first, last + 1):
            logger.log(step, {"train/a": step * 10 + (resume or 0)})


def fragment(kind: int, data: bytes) -> bytes:
    """Of a LevelDB log."""
    return b"crc!" + len(data).to_bytes(2, "little") + bytes([kind]) + data
