"""Names of a module's tensors in checkpoints.

A transformers model stores all experts of a layer in two tensors, `experts.gate_up_proj` `[E, 2I, H]` and `experts.down_proj`.
Checkpoint files store the matrices of each expert by name. Here a matrix in a file is a view of the module's tensor, so that
no tensor is converted, gathered or copied. The conversion in transformers would gather all experts on every rank.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.text import format_names
from rlhpc.runtime.torch_adapter import class_before_fsdp

#: Prefix that peft gives the names of a wrapped module.
PEFT_PREFIX = "base_model.model."


@dataclass(frozen=True)
class ParameterView:
    """Checkpoint tensor as a view of a module's tensor.

    Attributes:
        name: Name in the checkpoint.
        index: Index into the module's tensor, one entry per dimension. A number selects an index and drops the dimension;
            (start, stop) selects a range.
    """

    name: str
    index: tuple[int | tuple[int, int], ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the checkpoint tensor."""
        return tuple(entry[1] - entry[0] for entry in self.index if not isinstance(entry, int))

    def view_in(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the view of the module's full tensor."""
        return tensor[tuple(entry if isinstance(entry, int) else slice(*entry) for entry in self.index)]


def plain(name: str) -> str:
    """Returns the name of a tensor without the parts that peft adds to it."""
    return name.removeprefix(PEFT_PREFIX).replace(".base_layer.", ".")


def require_same_shapes(current_tensors: Mapping[str, Sequence[int]], tensors: Mapping[str, torch.Tensor]) -> None:
    """Checks that replacement tensors have the names and shapes of the current tensors.

    Raises:
        RuntimeError: Names or shapes differ.
    """
    if current_tensors.keys() != tensors.keys():
        raise RuntimeError(f"the names differ: {format_names(sorted(current_tensors.keys() ^ tensors.keys()))}")
    for name, shape in current_tensors.items():
        if list(shape) != list(tensors[name].shape):
            raise RuntimeError(f"{name} is {list(tensors[name].shape)} there and {list(shape)} here")


def model_in(module: nn.Module) -> Any:
    """Returns the outermost transformers model in a module; None if the module contains no such model."""
    package = sys.modules.get("transformers")
    if package is None:
        return None
    return next((submodule for submodule in module.modules() if isinstance(submodule, package.PreTrainedModel)), None)


def checkpoint_parts(module: nn.Module, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, list[ParameterView]]:
    """Returns the checkpoint tensors of each tensor of a module, with the names that `save_pretrained` would use.

    Args:
        module: A transformers model, with or without adapters. Tensors of any other module keep their names.
        shapes: Full shapes of the tensors, by their names in the module.
    """
    model = model_in(module)
    # A model inside another module keeps that module's names: only peft's wrapper is unwrapped.
    peft_model: Any = module
    base_model = peft_model.get_base_model() if hasattr(peft_model, "get_base_model") else module
    reverse_conversion = _ReverseConversion(model) if model is not None and model is base_model else None
    views_by_tensor: dict[str, list[ParameterView]] = {}
    for name, shape in shapes.items():
        full_range = tuple((0, size) for size in shape)
        views_by_tensor[name] = (
            [ParameterView(plain(name), full_range)]
            if reverse_conversion is None
            else list(reverse_conversion.split_views(plain(name), shape))
        )
    return views_by_tensor


class _ReverseConversion:
    """transformers' checkpoint conversions of a model, in reverse."""

    def __init__(self, model: Any) -> None:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import PrefixChange, WeightRenaming, rename_source_key

        self._rename: Any = rename_source_key
        with class_before_fsdp(model):
            mappings = get_model_conversion_mapping(model, add_legacy=False)
        conversions = [conversion for conversion in mappings if not isinstance(conversion, PrefixChange)]
        reversals: list[tuple[Any, Any]] = [(source, source.reverse_transform()) for source in reversed(conversions)]
        self._renamings = [reversal for _, reversal in reversals if isinstance(reversal, WeightRenaming)]
        self._converters = [reversal for _, reversal in reversals if not isinstance(reversal, WeightRenaming)]
        self._forward: dict[str, Any] = {
            pattern: source for source, reversal in reversals for pattern in reversal.source_patterns
        }
        self._class_name = type(model).__name__

    def split_views(self, name: str, shape: tuple[int, ...]) -> Iterator[ParameterView]:
        """Yields the checkpoint tensors that a tensor of the module is split into."""
        checkpoint_name, pattern = self._rename(name, self._renamings, self._converters, reverse=True)
        full_range = tuple((0, size) for size in shape)
        if pattern is None:
            yield ParameterView(checkpoint_name, full_range)
            return
        conversion = self._forward[pattern]
        source_patterns: list[str] = conversion._original_source_patterns
        operation_names = [type(operation).__name__ for operation in conversion.operations]
        is_concatenated = operation_names == ["MergeModulelist", "Concatenate"] and conversion.operations[1].dim == 1
        if (
            not (is_concatenated or (operation_names == ["MergeModulelist"] and len(source_patterns) == 1))
            or conversion.operations[0].dim != 0
        ):
            raise ConfigError(
                f"{self._class_name}: {name} is kept in another form in checkpoints ({', '.join(operation_names)}), not as a "
                "view; actor.training_backend=fsdp cannot divide such a model: choose local"
            )
        # The renamed tensor has the first pattern in its name; the other names differ only there.
        first_name = name.replace(pattern, source_patterns[0], 1)
        rows_per_source = shape[1] // len(source_patterns)
        for expert in range(shape[0]):
            for source_index, source in enumerate(source_patterns):
                expert_name = first_name.replace(source_patterns[0], source).replace("*", str(expert), 1)
                rows = (
                    (source_index * rows_per_source, (source_index + 1) * rows_per_source)
                    if is_concatenated
                    else (0, shape[1])
                )
                checkpoint_name, _ = self._rename(expert_name, self._renamings, [], reverse=True)
                yield ParameterView(checkpoint_name, (expert, rows, *full_range[2:]))
