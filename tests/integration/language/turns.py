"""A trainer and an engine that share an accelerator which is not there: its memory is a ledger, and what is given away is
gone. Named in configurations as `turns:…`; importable by the ranks.

On a CPU `offload` has nothing to give away, so a call in the wrong order would show on no test. Here it empties the memory.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import torch

from rlhpc.language.engines.hf import HFRollout
from rlhpc.training.contract import TrainingBackend
from rlhpc.training.fsdp import FsdpBackend
from rlhpc.training.parking import ParkingBackend
from rlhpc.training.replicated import ReplicatedBackend
from rlhpc.training.zero import DeepSpeedBackend


def note(role: str, resident: bool, pid: bool = False) -> None:
    """One line of the ledger; appended whole, so lines of two processes never mix."""
    line = f"{role} {'in' if resident else 'out'} {os.getpid()}\n"
    with open(os.environ["RLHPC_TEST_LEDGER"], "a") as ledger:
        ledger.write(line)


class _InTurn(TrainingBackend):
    """What all trainers here have in common."""

    def __init__(self, blueprint: Any, actor: Any, worker: Any) -> None:
        note("actor", True)
        super().__init__(blueprint, actor, worker)
        self.updates = 0

    def optimizer_step(self, lr: float) -> torch.Tensor:
        """Once, where the test asks for it, the engine's process dies while this one holds the accelerator."""
        self.updates += 1
        if os.environ.get("RLHPC_TEST_KILL_AT") == str(self.updates):
            lines = Path(os.environ["RLHPC_TEST_LEDGER"]).read_text().split("\n")
            engine = int(next(line for line in reversed(lines) if line.startswith("rollout")).split()[2])
            os.kill(engine, signal.SIGKILL)
            end = time.monotonic() + 30
            while Path(f"/proc/{engine}/cwd").exists() and time.monotonic() < end:
                time.sleep(0.05)
            time.sleep(1.0)  # so that the driver most likely hears of it while this update is under way
        return super().optimizer_step(lr)


class _Parking(_InTurn, ParkingBackend):
    """Empties its memory, as it does on an accelerator."""

    def offload(self) -> None:
        if not self.away:
            self.park()
            note("actor", False)

    def reload(self) -> None:
        if self.away:
            note("actor", True)
        super().reload()

    def evaluate(self, *given: Any) -> Any:
        assert not self.away
        return super().evaluate(*given)

    def forward_backward(self, *given: Any) -> Any:
        assert not self.away
        return super().forward_backward(*given)


class ParkingZero(_Parking, DeepSpeedBackend):
    """DeepSpeed's ZeRO."""


class ParkingReplicas(_Parking, ReplicatedBackend):
    """Replicated weights."""


class ParkingShards(_Parking, FsdpBackend):
    """FSDP."""


class SleepingEngine(HFRollout):
    """An engine that forgets its weights in its sleep, as vLLM's does."""

    updates_in_part = False

    def __init__(self, cfg: Any, **options: Any) -> None:
        note("rollout", True)
        super().__init__(cfg, **options)
        self.asleep = False

    def offload(self) -> None:
        assert not self.asleep
        super().offload()
        self.asleep = True
        self._refuses = "asleep, or without weights since"
        with torch.no_grad():
            for parameter in self._model.parameters():
                parameter.fill_(torch.nan)
        note("rollout", False)

    def reload(self) -> None:
        if self.asleep:
            note("rollout", True)
        self.asleep = False
        super().reload()

    def update_weights(self, *given: Any, **options: Any) -> None:
        assert not self.asleep
        super().update_weights(*given, **options)
