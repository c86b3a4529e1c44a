"""Data parallel backend (`actor.training_backend: local`): replicated weights, one flat gradient buffer, one all-reduce per
step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from rlhpc.checkpoint.state import load_state, load_tensors, save_state, save_tensors
from rlhpc.jobs.paths import MODEL
from rlhpc.runtime.devices import move_module
from rlhpc.runtime.errors import CheckpointError
from rlhpc.training import lora
from rlhpc.training.backend import Batch, Blueprint, Metrics, Named, OffloadingBackend, TrainingRanks, tensors_of
from rlhpc.training.captured_passes import CapturedPasses, captures_graphs
from rlhpc.training.flat_parameters import FlatModule

if TYPE_CHECKING:
    from rlhpc.training.backend import ActorSection

OPTIMIZER = "optimizer.pt"


class ReplicatedBackend(OffloadingBackend):
    """Backend in which every rank holds all weights. In mixed precision, it computes with a copy of the float32 weights in the
    blueprint's dtype.
    """

    name = "local"
    lockstep = False
    scales_loss = True

    def __init__(self, blueprint: Blueprint, actor: ActorSection, worker: TrainingRanks) -> None:
        super().__init__(blueprint, actor, worker)
        self.module = move_module(blueprint.build(), self.device)
        # A task package that writes the weights itself keeps them in the compute dtype.
        dtype = None if blueprint.keeps_weights else self.dtype

        def build_flat(is_included: Callable[[str], bool] | None = None) -> FlatModule:
            reduce, reads_norm = worker.all_reduce, blueprint.reads_norm
            return FlatModule(
                self.module,
                self.optim,
                reduce,
                self.ranks,
                reads_norm=reads_norm,
                dtype=dtype,
                is_included=is_included,
                is_value=blueprint.is_value,
                scaler=self.scaler,
            )

        self.require_values()

        policies = blueprint.policies
        self._flats = (
            {name: build_flat(partial(lora.belongs_to_adapter, adapter=name)) for name in policies}
            if policies
            else {"": build_flat()}
        )
        captures = getattr(actor, "capture_graphs", False) and captures_graphs(self.device)
        self._captured_passes = CapturedPasses(self._changed_by_passes) if captures else None
        self.prepare_reference()

    @property
    def records_passes(self) -> bool:
        """True with `actor.capture_graphs` on a device that can record passes (`TrainingBackend.records_passes`)."""
        return self._captured_passes is not None

    def _changed_by_passes(self) -> list[torch.Tensor]:
        """Returns the tensors that a forward and backward pass changes."""
        return [*(flat_module.gradients for flat_module in self._flats.values()), *self.module.buffers()]

    def _run_pass(
        self, loss: Callable[[nn.Module, Batch], tuple[torch.Tensor, Metrics]], micro_batch: Batch, is_last: bool
    ) -> Metrics:
        """Runs one forward and backward pass (`TrainingBackend._run_pass`), by a replay with `actor.capture_graphs`."""
        run_pass = super()._run_pass
        if self._captured_passes is None:
            return run_pass(loss, micro_batch, is_last)
        return self._captured_passes.run(
            loss, micro_batch, lambda static_inputs: run_pass(loss, static_inputs, is_last)
        )

    @property
    def flat(self) -> FlatModule:
        """Trained parameters of the policy; there must be only one policy."""
        (flat_module,) = self._flats.values()
        return flat_module

    def _make_reference(self) -> nn.Module:
        return move_module(self.blueprint.build_reference(), self.device)

    def _clear(self) -> None:
        for flat_module in self._flats.values():
            flat_module.zero_grad()

    def optimizer_step(self, lr: float) -> torch.Tensor:
        """Takes an optimizer step (`TrainingBackend.optimizer_step`). Gradients are kept until the next
        `forward_backward`. With several policies, each policy is clipped by its norm; a policy without a gradient is not
        updated, and neither are its averages.
        """
        if not self.blueprint.policies:
            norm = self.flat.optimizer_step(lr)
            self._update_scale(norm)
            return norm
        norms = {name: flat_module.gradient_norm() for name, flat_module in self._flats.items()}
        host_norms = torch.stack([*norms.values()]).cpu()
        total_norm = host_norms.square().sum().sqrt()
        self.norms = dict(zip(norms, host_norms.tolist(), strict=True))
        if not self.is_step_skipped(total_norm):
            for name, flat_module in self._flats.items():
                if self.norms[name]:
                    flat_module.step(norms[name], lr)
        self._update_scale(total_norm)
        return total_norm

    def bad_gradients(self) -> list[str]:
        """Returns the parameters whose gradients were not finite (`TrainingBackend.bad_gradients`)."""
        return [name for flat_module in self._flats.values() for name in flat_module.bad_gradients()]

    def _named_weights(self) -> dict[str, torch.Tensor]:
        return {
            name: view for flat_module in self._flats.values() for name, view in flat_module.named_weights().items()
        }

    def replace_weights(self, tensors: dict[str, torch.Tensor]) -> None:
        """Replaces the module's weights (`TrainingBackend.replace_weights`)."""
        with self.keep_on_device():
            self.module.load_state_dict(tensors)
            for flat_module in self._flats.values():
                if flat_module.mixed:
                    flat_module.replace(tensors)

    def local_tensors(self) -> Named:
        """Yields names and tensors of the trained weights and of the optimizer's averages."""
        with self.keep_on_device():
            for policy, flat_module in self._flats.items():
                yield from flat_module.named_weights().items()
                optimizer, prefix = flat_module.optimizer, f"{policy}." if policy else ""
                yield from (
                    (f"optimizer.{prefix}exp_avg", optimizer.exp_avg),
                    (f"optimizer.{prefix}exp_avg_sq", optimizer.exp_avg_sq),
                )

    def save(self, folder: Path) -> None:
        """Writes the optimizers and, if the task package does not write them, the trained weights in float32, on rank 0."""
        folder = Path(folder)
        if self.rank == 0:
            folder.mkdir(parents=True, exist_ok=True)
            with self.keep_on_device():
                if not self.blueprint.keeps_weights:
                    save_tensors(folder / MODEL, self._named_weights())
                for policy, flat_module in self._flats.items():
                    save_state(folder / _optimizer_file(policy), flat_module.state_dict())
            self.write_identity(folder)
        self.worker.barrier()

    def load(self, folder: Path) -> None:
        """Restores the state that `save` wrote (`TrainingBackend.load`).

        Raises:
            CheckpointError: The checkpoint has other parameters than the model.
        """
        folder = Path(folder)
        self.check_identity(folder)
        with self.keep_on_device():
            if not self.blueprint.keeps_weights:
                tensors = load_tensors(folder / MODEL)
                shapes = {name: tensor.shape for name, tensor in self._named_weights().items()}
                if {name: tensor.shape for name, tensor in tensors.items()} != shapes:
                    raise CheckpointError(
                        f"{folder / MODEL} holds other parameters than actor.model.model_path and actor.lora"
                    )
                for flat_module in self._flats.values():
                    flat_module.replace(tensors)
            for policy, flat_module in self._flats.items():
                flat_module.load_state_dict(load_state(folder / _optimizer_file(policy)))
                flat_module.zero_grad()

    def move_to_host(self) -> int:
        """Moves this rank's tensors to the host (`OffloadingBackend.move_to_host`); drops captured passes."""
        if self._captured_passes is not None:
            self._captured_passes.clear()
        return super().move_to_host()

    def offloadable_tensors(self) -> tuple[Iterable[torch.Tensor], Iterable[torch.Tensor]]:
        """Returns the tensors to copy and to free (`OffloadingBackend.offloadable_tensors`). Gradients and copies of weights
        are freed, because they can be recreated.
        """
        flats = self._flats.values()
        state_tensors = [tensor for flat_module in flats for tensor in flat_module.state()]
        return (*state_tensors, *tensors_of(self.module, self._reference)), [
            t for flat_module in flats for t in flat_module.scratch()
        ]

    def recreate_freed(self) -> None:
        """Recreates copies and gradients (`OffloadingBackend.recreate_freed`)."""
        for flat_module in self._flats.values():
            flat_module.renew()


def _optimizer_file(policy: str) -> str:
    """Returns the file name of the state of a policy's optimizer."""
    return f"optimizer-{policy}.pt" if policy else OPTIMIZER
