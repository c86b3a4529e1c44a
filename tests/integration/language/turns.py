"""A trainer and an engine that share an accelerator which is not there: a ledger says how many bytes each has of it, and what
is given away is gone. Named in configurations as `turns:…`; importable by the ranks.

On a CPU `offload` has nothing to give away, so a call in the wrong order would show on no test. Here it empties the memory.
"""

from __future__ import annotations

import gc
import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from rlhpc.language.engines.hf import HFRollout
from rlhpc.training.backend import HostMemory, OffloadedTensors, OffloadingBackend, TrainingBackend
from rlhpc.training.data_parallel import ReplicatedBackend
from rlhpc.training.deepspeed import DeepSpeedBackend
from rlhpc.training.fsdp import FsdpBackend


def resident(host: HostMemory | None = None) -> int:
    """Bytes under this process's tensors, but for what waits on the host."""
    gc.collect()
    found = dict[int, int]()
    for one in gc.get_objects():
        if issubclass(type(one), torch.Tensor) and one.device.type == "cpu" and not isinstance(one, DTensor):
            storage = one.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values()) - (0 if host is None else host.nbytes)


def note(role: str, nbytes: int) -> None:
    """One line of the ledger; appended whole, so lines of two processes never mix."""
    with open(os.environ["RLHPC_TEST_LEDGER"], "a") as ledger:
        ledger.write(f"{role} {nbytes} {os.getpid()}\n")


class _InTurn(TrainingBackend):
    """What all trainers here have in common."""

    def __init__(self, blueprint: Any, actor: Any, worker: Any) -> None:
        super().__init__(blueprint, actor, worker)
        self.updates = 0
        note("actor", resident())

    def optimizer_step(self, lr: float) -> torch.Tensor:
        """Once, where the test asks for it, the engine's process dies while this one holds the accelerator."""
        self.updates += 1
        note("actor", resident(getattr(self, "_host", None)))  # with gradients
        if os.environ.get("RLHPC_TEST_KILL_AT") == str(self.updates):
            lines = Path(os.environ["RLHPC_TEST_LEDGER"]).read_text().split("\n")
            engine = int(next(line for line in reversed(lines) if line.startswith("rollout")).split()[2])
            os.kill(engine, signal.SIGKILL)
            end = time.monotonic() + 30
            while Path(f"/proc/{engine}/cwd").exists() and time.monotonic() < end:
                time.sleep(0.05)
            time.sleep(1.0)  # so that the driver most likely hears of it while this update is under way
        return super().optimizer_step(lr)


class _Parking(_InTurn, OffloadingBackend):
    """Empties its memory, as it does on an accelerator."""

    def offload(self) -> None:
        if not self.is_offloaded:
            self.move_to_host()
            note("actor", resident(self._host))

    def reload(self) -> None:
        came = self.is_offloaded
        super().reload()
        if came:
            note("actor", resident(self._host))

    def evaluate(self, *given: Any) -> Any:
        assert not self.is_offloaded
        return super().evaluate(*given)

    def forward_backward(self, *given: Any) -> Any:
        assert not self.is_offloaded
        return super().forward_backward(*given)


class ParkingZero(_Parking, DeepSpeedBackend):
    """DeepSpeed's ZeRO."""

    def load(self, folder: Path) -> None:
        super().load(folder)
        with (
            self.keep_on_device()
        ):  # an accelerator has copies of what is read, and not the memory that it was read into
            for state in self.engine.optimizer.optimizer.state.values():
                state.update({name: one.clone() for name, one in state.items() if torch.is_tensor(one)})


class ParkingReplicas(_Parking, ReplicatedBackend):
    """Replicated weights."""


class ParkingShards(_Parking, FsdpBackend):
    """FSDP."""


class SleepingEngine(HFRollout):
    """An engine that forgets its weights in its sleep, as vLLM's does."""

    updates_in_part = False

    def __init__(self, cfg: Any, **options: Any) -> None:
        super().__init__(cfg, **options)
        for parameter in self._model.parameters():  # an accelerator has copies of what is read
            parameter.data = parameter.data.clone()
        self._parked: OffloadedTensors | None = None
        note("rollout", resident())

    def offload(self) -> None:
        assert self._parked is None
        super().offload()
        self._update_error = "asleep, or without weights since"
        self._parked = OffloadedTensors((), self._model.parameters())
        note("rollout", resident())

    def reload(self) -> None:
        if self._parked is not None:
            self._parked.restore()
            self._parked = None
            with torch.no_grad():
                for parameter in self._model.parameters():
                    parameter.fill_(torch.nan)
            note("rollout", resident())
        super().reload()

    def update_weights(self, *given: Any, **options: Any) -> None:
        assert self._parked is None
        super().update_weights(*given, **options)
        note("rollout", resident())
