"""A worker that takes as long to write its part of a checkpoint as the test wants."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch

from rlhpc import Worker
from rlhpc.checkpoint.async_writer import ChecksummedFile, SavingWorker, write_file
from rlhpc.checkpoint.state import save_state, stream_tensors

LARGE = 5 << 20


class Weights(SavingWorker):
    """Holds weights, of which each step makes others; from rank 2 on few.

    Args:
        gate: Its file is written once this file is there.
    """

    def __init__(self, gate: str) -> None:
        super().__init__()
        self.gate, self.weights = Path(gate), torch.zeros(LARGE if self.rank < 2 else 3)

    def train(self) -> float:
        self.weights += 1
        return float(self.weights[0])

    def pid(self) -> int:
        return os.getpid()

    def save(self, folder: str) -> None:
        write_file(Path(folder) / f"weights-{self.rank}", {"w": self.weights}, self._write)
        save_state(Path(folder) / f"small-{self.rank}", {"step": 1})

    def _write(self, file: ChecksummedFile, tensors: dict[str, torch.Tensor]) -> None:
        deadline = time.monotonic() + 120
        while self.rank < 2 and not self.gate.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        if self.rank < 2 and self.gate.read_text() == "full":
            file.failure = OSError(28, "No space left on device")
            raise file.failure
        stream_tensors(file, tensors)


class Plain(Worker):
    """Knows nothing of saves that go on."""

    def save(self, folder: str) -> None:
        (Path(folder) / "plain").write_text("all of it")
