"""Blueprint of a trained module, which a task package passes to a training backend: construction, sharding and names."""

from __future__ import annotations

import abc
import sys
from collections.abc import Callable, Container, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from rlhpc.config.parallel import unsupported_policy_sizes
from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.text import first_line
from rlhpc.runtime.torch_adapter import compile_forward

if TYPE_CHECKING:
    from rlhpc.training.mesh import Mesh
    from rlhpc.training.safetensors_reader import Slices

#: Returns the full tensor from a shard; all ranks call it for the same tensors in the same order.
Full = Callable[[torch.Tensor], torch.Tensor]
Named = Iterator[tuple[str, torch.Tensor]]


class Blueprint(abc.ABC):
    """Description of a trained module: its construction, and the facts that a backend needs about it.

    Attributes:
        dtype: Dtype of the computation. Trained weights are kept in float32 (or in the dtype that `build` gives them).
        identity_file: File in which a checkpoint records the backend that wrote it.
        keeps_weights: True if the task package writes and reads full weights itself (`named_weights`, `replace_weights`). Then
            a backend that holds full weights does not write them.
        gather_dtype: Dtype to which a backend may convert floating-point weights before it gathers them, because
            `named_weights` yields them in this dtype anyway; None if it computes with the gathered weights first.
        reads_norm: True if a backend must read each gradient norm before the update, even if it has to wait for the device.
        unmarked: Name of the backend whose old checkpoints may lack `identity_file`.
        knobs: Settings that a user may lower or set if memory is exhausted.
        key: Name of the configuration section in messages.
        policies: Names of adapters that are trained concurrently, each by its own optimizer; empty for a single policy.
    """

    key: str = "actor"
    policies: tuple[str, ...] = ()
    dtype: torch.dtype = torch.float32
    identity_file: str = "training.json"
    unmarked: str = ""
    keeps_weights: bool = False
    gather_dtype: torch.dtype | None = None
    reads_norm: bool = True
    knobs: str = "lower actor.micro_batch_size"

    @abc.abstractmethod
    def build(self, *, empty: bool = False) -> nn.Module:
        """Builds the module, on the host, with the same weights on every rank.

        Args:
            empty: Allow large weights on the meta device, because the caller fills them afterwards.
        """

    @property
    def has_reference(self) -> bool:
        """True if a second, frozen model is needed."""
        return False

    def build_reference(self, *, empty: bool = False) -> nn.Module:
        """Builds the frozen model with the weights from before training, in `dtype` (see `build`)."""
        raise NotImplementedError("this wing has no reference")

    def layers(self, module: nn.Module) -> list[nn.Module]:
        """Returns the submodules that a sharded backend gathers one at a time. The backend gathers all other weights as one
        unit.
        """
        return transformer_layers(module)

    def modules_without_cast(self, module: nn.Module) -> list[nn.Module]:
        """Returns the modules of `layers` whose inputs keep their dtype; other inputs are cast to the compute dtype."""
        return []

    def divide(self, module: nn.Module, mesh: Mesh) -> None:
        """Shards weights and experts over the ranks of a model-parallel block: parameters become DTensors over `mesh.tensor`
        and `mesh.expert`.

        Raises:
            ConfigError: The module has no plan, or the sizes do not suit it.
        """
        if mesh.sizes.block > 1 or mesh.sizes.expert > 1:
            raise ConfigError(unsupported_policy_sizes(self.key, mesh.sizes))

    def expert_modules(self, module: nn.Module) -> list[nn.Module]:
        """Returns the submodules whose parameters are sharded by experts."""
        return []

    def slices(self) -> Slices | None:
        """Returns a reader of the files that hold the module's weights, so that each rank reads its shards; None if rank 0
        must build the full module.
        """
        return None

    def is_exported(self, name: str) -> bool:
        """Returns whether a checkpoint tensor belongs to the acting policy and is exported."""
        return True

    def created_tensors(self, module: nn.Module) -> Named:
        """Yields names and full tensors of a module from `build` that are not in the files of `slices`, one at a time."""
        yield from ()

    def is_value(self, name: str) -> bool:
        """Returns whether a parameter of this name belongs to the value head or critic, which computes only values."""
        return not {"value_head", "critic"}.isdisjoint(name.split("."))

    def last_layer(self, module: nn.Module) -> nn.Module | None:
        """Returns the module of `layers` with which a backward pass starts; None if unknown. Its weights may stay gathered."""
        return None

    def identity(self) -> dict[str, Any]:
        """Returns the facts that must match for a checkpoint to be accepted."""
        return {}

    def recorded_facts(self, module: nn.Module) -> dict[str, Any]:
        """Returns additional facts that a checkpoint records, for readers without access to the run.

        Args:
            module: Trained module from `build`.
        """
        return {}

    def write_extra_files(self, folder: Path, module: nn.Module) -> None:  # noqa: B027 (optional)
        """Writes the files that accompany a checkpoint's weights; only rank 0 calls it."""

    @abc.abstractmethod
    def named_weights(self, module: nn.Module, gather_full: Full, excluded_names: Container[str] = ()) -> Named:
        """Yields all weights in full, under the names and in the dtype that acting workers and exports expect."""

    @abc.abstractmethod
    def frozen_names(self, module: nn.Module) -> frozenset[str]:
        """Returns the names of the weights that never change; the names are those of `named_weights`."""


def transformer_layers(module: nn.Module) -> list[nn.Module]:
    """Returns the layers of the transformers models in a module, by the class names that those models declare.

    FSDP2 makes a layer an instance of a subclass, with a different name.
    """
    package = sys.modules.get("transformers")
    if package is None:  # not imported, so no such model exists
        return []
    models = [submodule for submodule in module.modules() if isinstance(submodule, package.PreTrainedModel)]
    class_names = {str(name) for model in models for name in model._no_split_modules or ()}
    return [
        submodule
        for submodule in module.modules()
        if any(base.__name__ in class_names for base in type(submodule).__mro__)
    ]


def disable_dropout(model: nn.Module) -> bool:
    """Sets all dropout rates of a model to 0: rates of dropout layers, and attributes that attention reads.

    Returns:
        Whether any rate was above 0.
    """
    had_dropout = False
    for module in model.modules():
        rate_names = [
            name
            for name, attribute in vars(module).items()
            if "dropout" in name and isinstance(attribute, float) and attribute
        ]
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.p:
            rate_names.append("p")
        for name in rate_names:
            setattr(module, name, 0.0)
        had_dropout |= bool(rate_names)
    return had_dropout


def compile_layers(
    model: nn.Module,
    layers: Sequence[nn.Module],
    key: str,
    *,
    has_variable_batch: bool = False,
    has_dropout: bool = False,
) -> None:
    """Compiles the forward function of each of a model's layers.

    Training and scoring have a graph each. If layers are of several kinds, which have graphs of their own, scoring takes the
    graphs of training, except in layers with dropout and in frozen ones.

    Args:
        model: The model, for messages.
        layers: Its layers.
        key: Name of the configuration key in messages.
        has_variable_batch: Whether the layers read batches of one row and of several rows (`compile_forward`).
        has_dropout: Whether the layers have dropout in training.

    Raises:
        ConfigError: There are no layers. A layer raises this error at its first call if torch cannot compile it.
    """
    if not layers:
        raise ConfigError(f"{key}=blocks: {type(model).__name__} does not declare its layers: set it to off")

    def fail(layer_name: str, cause: Exception) -> ConfigError:
        return ConfigError(
            f"{key}=blocks: torch cannot compile {layer_name} of this model: {first_line(cause)}; set it to off"
        )

    is_mixed = len({_layer_kind(layer) for layer in layers}) > 1
    for layer in layers:
        is_trained = any(parameter.requires_grad for parameter in layer.parameters())
        compile_forward(
            layer,
            partial(fail, type(layer).__name__),
            has_variable_batch=has_variable_batch,
            scores_by_training_graph=is_mixed and is_trained and not has_dropout,
        )


def _layer_kind(layer: nn.Module) -> tuple[Any, ...]:
    """Returns the properties of a layer on which a compiled graph may depend: classes, constants, and shapes of parameters,
    without the layer's index.
    """
    properties = list[tuple[Any, ...]]()
    for name, module in layer.named_modules():
        constants = tuple(
            (attribute, value)
            for attribute, value in sorted(vars(module).items())
            if isinstance(value, bool | int | float | str | None)
            and not attribute.startswith("_")
            and not attribute.endswith(("idx", "index", "_id"))
        )
        shapes = tuple((key, tuple(parameter.shape)) for key, parameter in module.named_parameters(recurse=False))
        properties.append((name, type(module), constants, shapes))
    return tuple(properties)
