"""Reader of safetensors files by tensor slice, so that no rank reads more than it keeps."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from rlhpc.checkpoint.tensor_slice import TensorSlice
from rlhpc.jobs.paths import MODEL

_INDEX, _SINGLE = "model.safetensors.index.json", MODEL


class Slices:
    """Reader of the tensors in a model's folder.

    Args:
        files: Path of the file that holds each tensor, by tensor name.
    """

    def __init__(self, files: Mapping[str, Path]) -> None:
        self.files = dict(files)
        self._open_files: dict[Path, Any] = {}
        self._stack = contextlib.ExitStack()

    @classmethod
    def from_model(cls, find: Callable[[str], Path | None]) -> Slices | None:
        """Finds the safetensors files of a model.

        Args:
            find: Returns the path of a file of the model; None if the model has no file of this name.

        Returns:
            The reader; None if the weights are not in safetensors files, or a file is missing or damaged.
        """
        from safetensors import SafetensorError, safe_open

        try:
            if (index := find(_INDEX)) is not None:
                names: dict[str, str] = json.loads(index.read_text())["weight_map"]
                paths = {file: find(file) for file in sorted(set(names.values()))}
                files = {name: path for name, file in names.items() if (path := paths[file]) is not None}
                return cls(files) if len(files) == len(names) else None
            if (single_file := find(_SINGLE)) is None:
                return None
            with safe_open(single_file, "pt") as file:
                return cls(dict.fromkeys(file.keys(), single_file))
        except (OSError, ValueError, KeyError, SafetensorError):  # transformers reports the error
            return None

    def __enter__(self) -> Slices:
        return self

    def __exit__(self, *_: object) -> None:
        self._open_files.clear()
        self._stack.close()

    def read(self, name: str, tensor_slice: TensorSlice | None = None) -> torch.Tensor:
        """Reads a tensor, or a slice of it, into host memory. Call it inside the object's `with` block."""
        from safetensors import safe_open

        path = self.files[name]
        if path not in self._open_files:
            self._open_files[path] = self._stack.enter_context(safe_open(path, "pt"))
        if tensor_slice is None or not tensor_slice.sizes:
            tensor: torch.Tensor = self._open_files[path].get_tensor(name)
        else:
            tensor = self._open_files[path].get_slice(name)[tensor_slice.slices]
        return tensor

    def shape(self, name: str) -> tuple[int, ...]:
        """Returns the shape of a full tensor."""
        from safetensors import safe_open

        with safe_open(self.files[name], "pt") as file:
            return tuple(file.get_slice(name).get_shape())
