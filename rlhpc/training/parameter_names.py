"""What checkpoints and engines call the parts of a module's tensors.

transformers keeps the experts of a mixture as two tensors, `experts.gate_up_proj` `[E, 2I, H]` and `experts.down_proj`, and
files have each expert's matrices under a name of its own. A matrix in a file is a view of the module's tensor here, so nothing
is converted, gathered or copied: transformers' own conversion would make all experts whole on every rank.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from rlhpc.runtime.errors import ConfigError

#: How peft calls what it wraps.
_PREFIX = "base_model.model."


@dataclass(frozen=True)
class ParameterView:
    """A tensor of a checkpoint, as a view of a module's.

    Attributes:
        name: In the checkpoint.
        index: Of the module's tensor, one for each of its dimensions: a number, which drops it, or (start, stop).
    """

    name: str
    index: tuple[int | tuple[int, int], ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the checkpoint's tensor."""
        return tuple(one[1] - one[0] for one in self.index if not isinstance(one, int))

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The view of the module's whole tensor."""
        return tensor[tuple(one if isinstance(one, int) else slice(*one) for one in self.index)]


def plain(name: str) -> str:
    """What a tensor of a model with adapters is called without them."""
    return name.removeprefix(_PREFIX).replace(".base_layer.", ".")


def checkpoint_parts(module: nn.Module, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, list[ParameterView]]:
    """What a module's tensors are in a checkpoint of it, as `save_pretrained` would name them.

    Args:
        module: A model of transformers, with adapters or without, or anything else, of which all names are kept.
        shapes: Whole shapes by the module's own names.

    Returns:
        By the module's own names.

    Raises:
        ConfigError: The checkpoint has a tensor that is not a view of the module's, such as a transposed one.
    """
    package = sys.modules.get("transformers")
    model = next((part for part in module.modules() if package and isinstance(part, package.PreTrainedModel)), None)
    # What is inside something else keeps its names there: only a wrapper of peft's is looked through.
    wrapper: Any = module
    inner = wrapper.get_base_model() if hasattr(wrapper, "get_base_model") else module
    reverse = _Reverse(model) if model is not None and model is inner else None
    found: dict[str, list[ParameterView]] = {}
    for name, shape in shapes.items():
        whole = tuple((0, size) for size in shape)
        found[name] = (
            [ParameterView(plain(name), whole)] if reverse is None else list(reverse.parts(plain(name), shape))
        )
    return found


@contextlib.contextmanager
def _of_its_own_class(model: Any) -> Iterator[None]:
    """FSDP2 makes what it wraps one of another class, and transformers keeps some conversions by the class's name."""
    from torch.distributed.fsdp import FSDPModule

    wrapped = type(model)
    model.__class__ = next(one for one in wrapped.__mro__ if not issubclass(one, FSDPModule))
    try:
        yield
    finally:
        model.__class__ = wrapped


class _Reverse:
    """transformers' conversions of a model's checkpoints, backwards."""

    def __init__(self, model: Any) -> None:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import PrefixChange, WeightRenaming, rename_source_key

        self._rename: Any = rename_source_key
        with _of_its_own_class(model):
            every = get_model_conversion_mapping(model, add_legacy=False)
        conversions = [conversion for conversion in every if not isinstance(conversion, PrefixChange)]
        backwards: list[tuple[Any, Any]] = [(one, one.reverse_transform()) for one in reversed(conversions)]
        self._renamings = [back for _, back in backwards if isinstance(back, WeightRenaming)]
        self._converters = [back for _, back in backwards if not isinstance(back, WeightRenaming)]
        self._forward: dict[str, Any] = {pattern: one for one, back in backwards for pattern in back.source_patterns}
        self._model = type(model).__name__

    def parts(self, name: str, shape: tuple[int, ...]) -> Iterator[ParameterView]:
        """What a tensor is in the checkpoint."""
        renamed, pattern = self._rename(name, self._renamings, self._converters, reverse=True)
        whole = tuple((0, size) for size in shape)
        if pattern is None:
            yield ParameterView(renamed, whole)
            return
        forward = self._forward[pattern]
        sources: list[str] = forward._original_source_patterns
        operations = [type(operation).__name__ for operation in forward.operations]
        joined = operations == ["MergeModulelist", "Concatenate"] and forward.operations[1].dim == 1
        if not (joined or (operations == ["MergeModulelist"] and len(sources) == 1)) or forward.operations[0].dim != 0:
            raise ConfigError(
                f"{self._model}: {name} is kept in another form in checkpoints ({', '.join(operations)}), not as a view; "
                "actor.training_backend=fsdp cannot divide such a model: choose local"
            )
        # What was renamed has the first of the patterns in the name, and the others differ from it there alone.
        first = self._converted(name, sources[0], pattern)
        size = shape[1] // len(sources)
        for expert in range(shape[0]):
            for number, source in enumerate(sources):
                inner = first.replace(sources[0], source).replace("*", str(expert), 1)
                rows = (number * size, (number + 1) * size) if joined else (0, shape[1])
                yield ParameterView(self._named(inner), (expert, rows, *whole[2:]))

    @staticmethod
    def _converted(name: str, source: str, pattern: str) -> str:
        return name.replace(pattern, source, 1)

    def _named(self, name: str) -> str:
        return str(self._rename(name, self._renamings, [], reverse=True)[0])
