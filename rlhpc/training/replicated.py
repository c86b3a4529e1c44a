"""`actor.training_backend: local`: replicated weights, gradients in one flat buffer, one all-reduce per step."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from rlhpc.checkpoint.state import load_state, load_tensors, save_state, save_tensors
from rlhpc.jobs.paths import MODEL
from rlhpc.runtime.device import moved
from rlhpc.runtime.errors import CheckpointError
from rlhpc.training.contract import Blueprint, Named, Ranks
from rlhpc.training.flat import FlatModule
from rlhpc.training.parking import ParkingBackend, tensors_of

if TYPE_CHECKING:
    from rlhpc.training.contract import ActorSection

OPTIMIZER = "optimizer.pt"


class ReplicatedBackend(ParkingBackend):
    """Every rank holds all weights. In mixed precision, it computes with a copy of the float32 weights in the
    blueprint's dtype."""

    name = "local"
    lockstep = False

    def __init__(self, blueprint: Blueprint, actor: ActorSection, worker: Ranks) -> None:
        super().__init__(blueprint, actor, worker)
        self.module = moved(blueprint.build(), self.device)
        # A wing that keeps the weights itself has them in the dtype of the computation.
        dtype = None if blueprint.keeps_weights else self.dtype
        self.flat = FlatModule(self.module, self.optim, worker.all_reduce, self.ranks, look=blueprint.look, dtype=dtype)
        self.prepare_reference()

    def _make_reference(self) -> nn.Module:
        return moved(self.blueprint.build_reference(), self.device)

    def _clear(self) -> None:
        self.flat.zero_grad()

    def optimizer_step(self, lr: float) -> torch.Tensor:
        """Takes an optimizer step (`TrainingBackend.optimizer_step`). Gradients stay until the next `forward_backward`."""
        return self.flat.optimizer_step(lr)

    def refuses(self, norm: torch.Tensor) -> bool:
        """Whether the step with this gradient norm was not taken (`TrainingBackend.refuses`)."""
        return self.flat.refuses(norm)

    def bad_gradients(self) -> list[str]:
        """Parameters whose gradients were not finite (`TrainingBackend.bad_gradients`)."""
        return self.flat.bad_gradients()

    def replace_weights(self, tensors: dict[str, torch.Tensor]) -> None:
        """Replaces the module's weights (`TrainingBackend.replace_weights`)."""
        with self.awake():
            self.module.load_state_dict(tensors)
            if self.flat.mixed:
                self.flat.replace(tensors)

    def held_tensors(self) -> Named:
        """The weights in the form they are trained in, and the optimizer's averages."""
        with self.awake():
            yield from self.flat.named().items()
            optimizer = self.flat.optimizer
            yield from (("optimizer.exp_avg", optimizer.exp_avg), ("optimizer.exp_avg_sq", optimizer.exp_avg_sq))

    def save(self, folder: Path) -> None:
        """Rank 0 writes the optimizer and, if the wing does not write them, the trained weights in float32."""
        folder = Path(folder)
        if self.rank == 0:
            folder.mkdir(parents=True, exist_ok=True)
            with self.awake():
                if not self.blueprint.keeps_weights:
                    save_tensors(folder / MODEL, self.flat.named())
                save_state(folder / OPTIMIZER, self.flat.state_dict())
            self.write_identity(folder)
        self.worker.barrier()

    def load(self, folder: Path) -> None:
        """Restores what `save` wrote (`TrainingBackend.load`)."""
        folder = Path(folder)
        self.check_identity(folder)
        with self.awake():
            if not self.blueprint.keeps_weights:
                tensors = load_tensors(folder / MODEL)
                shapes = {name: tensor.shape for name, tensor in self.flat.named().items()}
                if {name: tensor.shape for name, tensor in tensors.items()} != shapes:
                    raise CheckpointError(
                        f"{folder / MODEL} holds other parameters than actor.model.model_path and actor.lora"
                    )
                self.flat.replace(tensors)
            self.flat.load_state_dict(load_state(folder / OPTIMIZER))
            self.flat.zero_grad()

    def belongings(self) -> tuple[Iterable[torch.Tensor], Iterable[torch.Tensor]]:
        """See `ParkingBackend.belongings`: gradients are cleared before they are made, and copies can be made again."""
        return (*self.flat.state(), *tensors_of(self.module, self._reference)), self.flat.scratch()

    def returned(self) -> None:
        """See `ParkingBackend.returned`."""
        self.flat.renew()
