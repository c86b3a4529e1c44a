"""What a wing hands over to a training backend: how its module is built, divided, and called in checkpoints."""

from __future__ import annotations

import abc
import sys
from collections.abc import Callable, Container, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from rlhpc.config.parallel import policy_undivided
from rlhpc.runtime.errors import ConfigError

if TYPE_CHECKING:
    from rlhpc.training.mesh import Mesh
    from rlhpc.training.safetensors_reader import Slices

#: Returns the whole of a tensor of which a rank may hold a part; all ranks call it for the same tensors, in one order.
Full = Callable[[torch.Tensor], torch.Tensor]
Named = Iterator[tuple[str, torch.Tensor]]


class Blueprint(abc.ABC):
    """What a wing hands over: how its module is built, and what a backend must know about it.

    Attributes:
        dtype: Dtype of the computation. Trained weights are kept in float32 (or in the dtype that `build` gives them).
        identity_file: File in which a checkpoint records which backend made it.
        keeps_weights: The wing writes and reads the weights itself, in full (`named_weights`, `replace_weights`), so a
            backend that holds all of them need not.
        look: Each gradient norm is read before its update, even if that means waiting for the device.
        unmarked: Name of the backend whose checkpoints may lack that file, because they predate it.
        knobs: What a user may lower or set if memory is exhausted.
        key: What messages call the section it is trained by.
        policies: Names of adapters that are trained beside each other, each by an optimizer of its own; none where there are
            not several.
    """

    key: str = "actor"
    policies: tuple[str, ...] = ()
    dtype: torch.dtype = torch.float32
    identity_file: str = "training.json"
    unmarked: str = ""
    keeps_weights: bool = False
    look: bool = True
    knobs: str = "lower actor.micro_batch_size"

    @abc.abstractmethod
    def build(self, *, empty: bool = False) -> nn.Module:
        """Builds the module, on the host, with the same weights on every rank.

        Args:
            empty: Large weights may be on the meta device: those of another rank will replace them.
        """

    @property
    def has_reference(self) -> bool:
        """Whether a second, frozen model is needed."""
        return False

    def build_reference(self, *, empty: bool = False) -> nn.Module:
        """Builds the frozen model as it was before training, in `dtype`; otherwise like `build`."""
        raise NotImplementedError("this wing has no reference")

    def layers(self, module: nn.Module) -> list[nn.Module]:
        """The parts to gather one at a time if the weights are sharded; everything outside them is gathered together."""
        return transformer_layers(module)

    def uncast(self, module: nn.Module) -> list[nn.Module]:
        """Those of `layers` that are to get what they compute with as it is, not in the dtype of the computation."""
        return []

    def divide(self, module: nn.Module, mesh: Mesh) -> None:
        """Cuts what ranks of a block, or experts, share: parameters become DTensors over `mesh.tensor` and `mesh.expert`.

        Raises:
            ConfigError: There is no plan for such a module, or the sizes do not suit it.
        """
        if mesh.sizes.block > 1 or mesh.sizes.expert > 1:
            raise ConfigError(policy_undivided(self.key, mesh.sizes))

    def apart(self, module: nn.Module) -> list[nn.Module]:
        """Parts whose parameters are shared out by experts."""
        return []

    def slices(self) -> Slices | None:
        """The files with the weights of what `build` makes, so that each rank reads its part; None has rank 0 build all."""
        return None

    def exported(self, name: str) -> bool:
        """Whether a tensor of the checkpoint, by its name there, belongs to what acts and is exported."""
        return True

    def made(self, module: nn.Module) -> Named:
        """Whole tensors of a module from `build` that are not in those files, by its own names, one at a time."""
        yield from ()

    def last(self, module: nn.Module) -> nn.Module | None:
        """The one of `layers` that a backward pass begins with, if it is known: its weights may stay gathered until then."""
        return None

    def identity(self) -> dict[str, Any]:
        """What must be the same for a checkpoint to be accepted."""
        return {}

    def about(self, module: nn.Module) -> dict[str, Any]:
        """Returns further facts that a checkpoint records, for readers that do not have the run.

        Args:
            module: From `build`, as it is trained.
        """
        return {}

    def write_beside(self, folder: Path, module: nn.Module) -> None:  # noqa: B027 (most have nothing there)
        """Writes what belongs beside a checkpoint's weights; only rank 0 calls it."""

    @abc.abstractmethod
    def named_weights(self, module: nn.Module, full: Full, without: Container[str] = ()) -> Named:
        """All weights in full, under the names and in the dtype that acting workers and exports expect."""

    @abc.abstractmethod
    def frozen_names(self, module: nn.Module) -> frozenset[str]:
        """Names of the weights that never change, as `named_weights` has them."""


def transformer_layers(module: nn.Module) -> list[nn.Module]:
    """The layers of the transformers models in a module, by the class names that those models declare."""
    package = sys.modules.get("transformers")
    if package is None:  # then there is no such model
        return []
    models = [part for part in module.modules() if isinstance(part, package.PreTrainedModel)]
    kinds = {str(name) for model in models for name in model._no_split_modules or ()}
    return [part for part in module.modules() if type(part).__name__ in kinds]
