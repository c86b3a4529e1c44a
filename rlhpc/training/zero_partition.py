"""Spreads a model over the ranks as in ZeRO-3, without any rank but the first ever holding all of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn


@torch.no_grad()
def partitioned(
    build: Callable[..., nn.Module], deepspeed: Any, config: dict[str, Any], dtype: torch.dtype, device: torch.device
) -> nn.Module:
    """Rank 0 reads the weights, which are broadcast and partitioned one parameter at a time. All ranks call it.

    Args:
        build: Builds the model on the host or, with `empty=True`, on the meta device.
        deepspeed: The package, initialized.
        config: DeepSpeed's configuration.
        dtype: Dtype of the parameters.
        device: Device of this rank.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    module = build(empty=rank != 0)
    convert = _converter(deepspeed, config)
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for owner in module.modules():
        for name, parameter in owner.named_parameters(recurse=False, remove_duplicate=False):
            places.setdefault(id(parameter), []).append((owner, name))
    for parameter in list(module.parameters()):
        if parameter.is_meta:
            found = places[id(parameter)]
            parameter = nn.Parameter(
                torch.empty(parameter.shape, dtype=dtype, device=device), requires_grad=parameter.requires_grad
            )
            for owner, name in found:
                setattr(owner, name, parameter)
        else:
            parameter.data = parameter.data.to(dtype)
        convert([parameter])
    for name, buffer in list(module.named_buffers()):
        value = torch.empty_like(buffer, device=device) if buffer.is_meta else buffer.to(device)
        if ranks > 1:
            value = value.contiguous()
            dist.broadcast(value, 0)
        owner_name, _, attribute = name.rpartition(".")
        setattr(module.get_submodule(owner_name), attribute, value)
    return module


def _converter(deepspeed: Any, config: dict[str, Any]) -> Callable[[list[nn.Parameter]], None]:
    """The function that turns plain parameters into ZeRO-3's; DeepSpeed offers it only on a parameter it has converted."""
    first = nn.Linear(1, 1, bias=False)
    deepspeed.zero.Init(module=first, config_dict_or_path=config)
    converted: Any = first.weight
    convert: Callable[[list[nn.Parameter]], None] = converted.convert_to_zero_parameters
    return convert
