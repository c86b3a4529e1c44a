"""A trainer and a policy that share an accelerator which is not there: a ledger says who holds it, and what has left it
cannot be used. Named in configurations as `parking:…`; importable by the ranks.
"""

from __future__ import annotations

import os
from typing import Any

import torch

from rlhpc.embodied.models.mlp import MLPPolicy
from rlhpc.training.data_parallel import ReplicatedBackend


def note(role: str, resident: bool) -> None:
    """One line of the ledger; appended whole, so lines of two processes never mix."""
    with open(os.environ["RLHPC_TEST_LEDGER"], "a") as ledger:
        ledger.write(f"{role} {'in' if resident else 'out'}\n")


class ParkingTrainer(ReplicatedBackend):
    """Replicated weights whose memory is empty while they are away."""

    def __init__(self, *given: Any) -> None:
        note("actor", True)
        super().__init__(*given)

    def offload(self) -> None:
        if not self.is_offloaded:
            self.move_to_host()
            note("actor", False)

    def reload(self) -> None:
        if self.is_offloaded:
            note("actor", True)
        super().reload()


class RestingPolicy(MLPPolicy):
    """Acts only where it is awake. The trainer has one, too, but never sends it away by itself."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.resting = self.acts = False

    def cpu(self) -> Any:
        self.resting = self.acts = True
        note("rollout", False)
        return super().cpu()

    def to(self, *given: Any, **options: Any) -> Any:
        if self.resting:
            self.resting = False
            note("rollout", True)
        return super().to(*given, **options)

    def predict_action_batch(self, *given: Any, **options: Any) -> Any:
        assert self.acts and not self.resting
        return super().predict_action_batch(*given, **options)

    def value(self, obs: Any) -> torch.Tensor:
        assert not self.resting
        return super().value(obs)
