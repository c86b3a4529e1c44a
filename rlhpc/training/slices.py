"""Weights of safetensors files, read box by box: no rank reads more than it keeps."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rlhpc.checkpoint.boxes import Box, cut
from rlhpc.jobs.paths import MODEL
from rlhpc.runtime.errors import ConfigError
from rlhpc.training.mesh import Mesh
from rlhpc.training.plans import model_in
from rlhpc.training.regions import boxes, named_tensor, regions

_INDEX, _SINGLE = "model.safetensors.index.json", MODEL


class Slices:
    """The tensors of a model's folder.

    Args:
        files: The file of each tensor, by name.
    """

    def __init__(self, files: Mapping[str, Path]) -> None:
        self.files = dict(files)
        self._open: dict[Path, Any] = {}
        self._stack = contextlib.ExitStack()

    @classmethod
    def of(cls, find: Callable[[str], Path | None]) -> Slices | None:
        """Those of a model.

        Args:
            find: Gives the path of a file of the model; None where it has none of this name.

        Returns:
            None if its weights are not in safetensors, or not all of them can be found.
        """
        from safetensors import SafetensorError, safe_open

        try:
            if (index := find(_INDEX)) is not None:
                names: dict[str, str] = json.loads(index.read_text())["weight_map"]
                paths = {file: find(file) for file in sorted(set(names.values()))}
                found = {name: path for name, file in names.items() if (path := paths[file]) is not None}
                return cls(found) if len(found) == len(names) else None
            if (single := find(_SINGLE)) is None:
                return None
            with safe_open(single, "pt") as file:
                return cls(dict.fromkeys(file.keys(), single))
        except (OSError, ValueError, KeyError, SafetensorError):  # transformers says what is wrong with them
            return None

    def __enter__(self) -> Slices:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.clear()
        self._stack.close()

    def read(self, name: str, box: Box | None = None) -> torch.Tensor:
        """A box of a tensor, or all of it, on the host; inside the object's `with` block."""
        from safetensors import safe_open

        path = self.files[name]
        if path not in self._open:
            self._open[path] = self._stack.enter_context(safe_open(path, "pt"))
        if box is None or not box.sizes:
            whole: torch.Tensor = self._open[path].get_tensor(name)
            return whole
        part: torch.Tensor = self._open[path].get_slice(name)[box.slices]
        return part

    def shape(self, name: str) -> tuple[int, ...]:
        """Of a whole tensor."""
        from safetensors import safe_open

        with safe_open(self.files[name], "pt") as file:
            return tuple(file.get_slice(name).get_shape())


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
    from rlhpc.training.names import checkpoint_parts
    from rlhpc.training.regions import held

    own = set(made)
    model = model_in(module)
    if getattr(getattr(model, "config", None), "quantization_config", None) is not None:
        return ["weight that is not quantized"]
    shapes = {name: tuple(tensor.shape) for name, tensor in held(module) if name not in own}
    parts = checkpoint_parts(module, shapes)
    return [part.name for name in shapes for part in parts[name] if part.name not in slices.files]
