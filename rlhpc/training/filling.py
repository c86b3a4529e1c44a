"""A divided module gets its weights from files, each rank its own boxes of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from rlhpc.checkpoint.tensor_slice import cut
from rlhpc.runtime.errors import ConfigError
from rlhpc.training.mesh import Mesh
from rlhpc.training.names import checkpoint_parts
from rlhpc.training.plans import model_in
from rlhpc.training.regions import boxes, held, named_tensor, regions
from rlhpc.training.slices import Slices


@torch.no_grad()
def fill(module: nn.Module, mesh: Mesh, slices: Slices, made: Iterable[tuple[str, torch.Tensor]], where: str) -> None:
    """Gives a divided module its weights: of each tensor the rank reads its boxes.

    Args:
        module: Its memory holds anything.
        mesh: How it is divided.
        slices: The files.
        made: What is not in the files, by the module's own names, one at a time: whole tensors, the same on every rank.
        where: What messages call the files.

    Raises:
        ConfigError: A tensor has another shape in the files.
    """
    done = set[str]()
    for name, whole in made:
        done.add(name)
        target = named_tensor(module, name)
        local: Any = target.to_local() if hasattr(target, "to_local") else target
        for box, here in boxes(target):
            cut(local.detach(), here).copy_(cut(whole, box))
    checked = set[str]()
    with slices:
        for region in regions(module, mesh, adapters=True):
            if region.parameter in done:
                continue
            if region.name not in checked:
                checked.add(region.name)
                if (there := slices.shape(region.name)) != region.shape:
                    raise ConfigError(
                        f"{where}: {region.name} is {list(there)} there, and {list(region.shape)} in the model"
                    )
            region.of(module).copy_(slices.read(region.name, region.box))


def missing(module: nn.Module, slices: Slices, made: Iterator[str]) -> list[str]:
    """Names of a module's tensors that are neither in the files nor made."""
    own = set(made)
    model = model_in(module)
    if getattr(getattr(model, "config", None), "quantization_config", None) is not None:
        return ["weight that is not quantized"]
    shapes = {name: tuple(tensor.shape) for name, tensor in held(module) if name not in own}
    parts = checkpoint_parts(module, shapes)
    return [part.name for name in shapes for part in parts[name] if part.name not in slices.files]
