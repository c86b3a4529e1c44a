"""The names that vLLM's tensors have in an update, those of tied weights included."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import Tensor, nn


def tensors_of(
    model: nn.Module,
) -> tuple[dict[str, tuple[int, ...]], dict[str, tuple[int, ...]], dict[str, list[str]]]:
    """Names and shapes of a complete update, those of what else it may contain, and the other names of tied weights."""
    names = {id(tensor): name for name, tensor in model.named_parameters()}
    needed: dict[str, tuple[int, ...]] = {}
    optional: dict[str, tuple[int, ...]] = {}
    aliases: dict[str, list[str]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        first = names.get(id(tensor))
        (needed if first == name else optional)[name] = tuple(tensor.shape)
        if first is not None and first != name:
            aliases.setdefault(first, []).append(name)
    return needed, optional, aliases


def under_all_names(
    weights: Iterable[tuple[str, Tensor]], aliases: dict[str, list[str]]
) -> Iterator[tuple[str, Tensor]]:
    """Tied weights under each of their names: if vLLM's kernels repack them, it keeps a copy for each."""
    others = {alias for names in aliases.values() for alias in names}
    for name, tensor in weights:
        if name not in others:
            yield name, tensor
            for alias in aliases.get(name, ()):
                yield alias, tensor
