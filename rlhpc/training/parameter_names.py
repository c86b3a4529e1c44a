"""Checkpoint names of a module's tensors, as views.

transformers keeps the experts of a mixture as two tensors, `experts.gate_up_proj` `[E, 2I, H]` and `experts.down_proj`, while
files have separate names for each expert's matrices. Here a matrix in a file is a view of the module's tensor, so no tensor
is converted, gathered or copied: transformers' own conversion would gather all experts on every rank.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.torch_adapter import class_before_fsdp

#: Prefix that peft gives the names of a wrapped module.
PEFT_PREFIX = "base_model.model."


@dataclass(frozen=True)
class ParameterView:
    """Checkpoint tensor as a view of a module's tensor.

    Attributes:
        name: Name in the checkpoint.
        index: Index into the module's tensor, one entry per dimension: a number, which drops the dimension, or (start, stop).
    """

    name: str
    index: tuple[int | tuple[int, int], ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the checkpoint's tensor."""
        return tuple(entry[1] - entry[0] for entry in self.index if not isinstance(entry, int))

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the view of the module's full tensor."""
        return tensor[tuple(entry if isinstance(entry, int) else slice(*entry) for entry in self.index)]


def plain(name: str) -> str:
    """Returns the name that a tensor of a model with adapters has without them."""
    return name.removeprefix(PEFT_PREFIX).replace(".base_layer.", ".")


def require_same_shapes(current: Mapping[str, Sequence[int]], tensors: Mapping[str, torch.Tensor]) -> None:
    """Refuses tensors that replace others of these shapes, by name.

    Raises:
        RuntimeError: Names or shapes differ.
    """
    if current.keys() != tensors.keys():
        raise RuntimeError(f"the names differ: {sorted(current.keys() ^ tensors.keys())[:3]}")
    for name, shape in current.items():
        if list(shape) != list(tensors[name].shape):
            raise RuntimeError(f"{name} is {list(tensors[name].shape)} there and {list(shape)} here")


def model_in(module: nn.Module) -> Any:
    """Returns the outermost model of transformers in a module; None without one."""
    package = sys.modules.get("transformers")
    if package is None:
        return None
    return next((submodule for submodule in module.modules() if isinstance(submodule, package.PreTrainedModel)), None)


def checkpoint_parts(module: nn.Module, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, list[ParameterView]]:
    """Returns the checkpoint tensors of each of a module's tensors, as `save_pretrained` would name them.

    Args:
        module: A model of transformers, with adapters or without, or any other module, whose names are all kept.
        shapes: Full shapes by the module's own names.
    """
    model = model_in(module)
    # A model inside another module keeps that module's names: only peft's wrapper is unwrapped.
    wrapper: Any = module
    base_model = wrapper.get_base_model() if hasattr(wrapper, "get_base_model") else module
    reverse = _Reverse(model) if model is not None and model is base_model else None
    views: dict[str, list[ParameterView]] = {}
    for name, shape in shapes.items():
        full_range = tuple((0, size) for size in shape)
        views[name] = (
            [ParameterView(plain(name), full_range)] if reverse is None else list(reverse.parts(plain(name), shape))
        )
    return views


class _Reverse:
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
        self._model = type(model).__name__

    def parts(self, name: str, shape: tuple[int, ...]) -> Iterator[ParameterView]:
        """Yields the checkpoint tensors of a tensor."""
        renamed, pattern = self._rename(name, self._renamings, self._converters, reverse=True)
        full_range = tuple((0, size) for size in shape)
        if pattern is None:
            yield ParameterView(renamed, full_range)
            return
        forward = self._forward[pattern]
        sources: list[str] = forward._original_source_patterns
        operations = [type(operation).__name__ for operation in forward.operations]
        is_concatenated = operations == ["MergeModulelist", "Concatenate"] and forward.operations[1].dim == 1
        if (
            not (is_concatenated or (operations == ["MergeModulelist"] and len(sources) == 1))
            or forward.operations[0].dim != 0
        ):
            raise ConfigError(
                f"{self._model}: {name} is kept in another form in checkpoints ({', '.join(operations)}), not as a view; "
                "actor.training_backend=fsdp cannot divide such a model: choose local"
            )
        # The renamed tensor has the first pattern in its name; the other names differ only there.
        first_name = name.replace(pattern, sources[0], 1)
        size = shape[1] // len(sources)
        for expert in range(shape[0]):
            for source_index, source in enumerate(sources):
                expert_name = first_name.replace(sources[0], source).replace("*", str(expert), 1)
                rows = (source_index * size, (source_index + 1) * size) if is_concatenated else (0, shape[1])
                renamed, _ = self._rename(expert_name, self._renamings, [], reverse=True)
                yield ParameterView(renamed, (expert, rows, *full_range[2:]))
