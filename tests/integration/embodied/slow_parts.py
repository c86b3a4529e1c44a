"""Parts of a run that are slow as a test says: simulators and a weight sync strategy."""

from __future__ import annotations

import os
import time
from typing import Any

import numpy as np

from rlhpc.embodied.envs.base import Step
from rlhpc.embodied.envs.gymnasium_env import GymnasiumVectorEnv
from rlhpc.weights import Update

#: Seconds of a step of one slot, of one of the slow slots, and of a transfer of the weights.
_SLOT_S, _SLOW_SLOT_S = 0.002, float(os.environ.get("RLHPC_TEST_SLOW_SLOT_S", "0.002"))
_TRANSFER_S = float(os.environ.get("RLHPC_TEST_TRANSFER_S", "0"))


class SlowSlots(GymnasiumVectorEnv):
    """Simulates one slot after the other; the last quarter of all slots may be slow ones."""

    def __init__(self, cfg: Any, num_envs: int, slot_offset: int, seed: int) -> None:
        super().__init__(cfg, num_envs, slot_offset, seed)
        first_slow = cfg.num_envs * 3 // 4
        num_slow = sum(slot >= first_slow for slot in range(slot_offset, slot_offset + num_envs))
        self._seconds = (num_envs - num_slow) * _SLOT_S + num_slow * _SLOW_SLOT_S

    def step(self, actions: np.ndarray) -> Step:
        """See `VectorEnv.step`."""
        time.sleep(self._seconds)
        return super().step(actions)


class SlowTransfer:
    """Weight sync strategy whose messages take long, as on a network that others use, too."""

    def __init__(self, worker: Any, src: Any, receivers: Any, delta: str, complete_updates: bool) -> None:
        self._worker, self._src, self._receivers = worker, src, receivers

    def send(self, version: int, tensors: Any, *, frozen: Any = ()) -> None:
        """Sends everything as one message."""
        content = version, {name: tensor.detach().cpu().clone() for name, tensor in tensors}
        time.sleep(_TRANSFER_S)
        self._worker.broadcast(content, self._receivers, self._src)

    def receive(self) -> Update:
        """Receives what `send` sent."""
        version, tensors = self._worker.broadcast(None, self._receivers, self._src)
        return Update(version, complete=True, tensors=iter(tensors.items()))

    def forget(self) -> None:
        """Does nothing: each message is complete."""
