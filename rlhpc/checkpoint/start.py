"""Weights from which a run or an evaluation starts: in a checkpoint, an export folder or a run folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from torch import Tensor, nn

from rlhpc.checkpoint import newest_valid, require_valid
from rlhpc.checkpoint.state import load_tensors
from rlhpc.jobs.paths import MANIFEST, MODEL, RunPaths
from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.files import expand_home
from rlhpc.runtime.text import format_names

WEIGHTS = MODEL


def find_weights(path: str, key: str = "runner.init_from") -> Path:
    """Returns the folder with `model.safetensors` that a path names: a checkpoint, an export, or a run's newest checkpoint.

    Raises:
        ConfigError: The path is not such a folder.
        CheckpointError: The checkpoint has faults.
    """
    folder = expand_home(path).absolute()
    if not folder.is_dir():
        raise ConfigError(f"{key} is {path!r}, which is no folder; name a checkpoint, an export folder or a run folder")
    if RunPaths(folder).checkpoints.is_dir():
        newest_checkpoint = newest_valid(RunPaths(folder))
        if newest_checkpoint.path is None:
            raise ConfigError(f"{key} is {path!r}, a run without a complete checkpoint; see rlhpc status {folder}")
        return newest_checkpoint.path
    if not (folder / WEIGHTS).is_file():
        raise ConfigError(
            f"{key} is {path!r}, which has no {WEIGHTS}; name a checkpoint (global_step_<N>), an export folder or a run folder"
        )
    if (folder / MANIFEST).is_file():
        require_valid(folder, hint=f"or start from another one with {key}=…")
    return folder


def load_fitting_weights(
    expected_shapes: Mapping[str, Sequence[int]], folder: Path, key: str = "runner.init_from"
) -> dict[str, Tensor]:
    """Loads the weights from a folder of `find_weights`, for a module whose weights have these shapes.

    Raises:
        ConfigError: Names or shapes differ; the message lists the differences.
    """
    saved_tensors = load_tensors(folder / WEIGHTS)
    faults = [
        f"{name} is {list(saved_tensors[name].shape)} there and {list(shape)} here"
        for name, shape in expected_shapes.items()
        if name in saved_tensors and list(saved_tensors[name].shape) != list(shape)
    ]
    faults += [f"{name} is not there" for name in expected_shapes if name not in saved_tensors]
    faults += [f"{name} is not here" for name in saved_tensors if name not in expected_shapes]
    if faults:
        raise ConfigError(
            f"{key}: the weights in {folder} do not fit actor.model of this configuration: "
            f"{format_names(faults, separator='; ')}"
        )
    return saved_tensors


def load_weights(module: nn.Module, folder: Path, key: str = "runner.init_from") -> None:
    """Loads the weights from a folder of `find_weights` into a module.

    Raises:
        ConfigError: Names or shapes differ; the message lists the differences.
    """
    shapes = {name: tensor.shape for name, tensor in module.state_dict().items()}
    module.load_state_dict(load_fitting_weights(shapes, folder, key))


class InitFromSection(Protocol):
    """Section `runner` of a task type that can start from weights."""

    init_from: str | None


class InitFromRun(Protocol):
    """Configuration of a run that can start from weights."""

    @property
    def runner(self) -> InitFromSection:
        """Section that names the weights."""


def check_start(cfg: InitFromRun, module: nn.Module | None) -> None:
    """Checks `runner.init_from` before the start of a run.

    Args:
        cfg: The configuration.
        module: Policy built from the configuration; None if this Python cannot build the policy.

    Raises:
        ConfigError, CheckpointError: The weights do not exist or do not fit.
    """
    if cfg.runner.init_from is None:
        return
    folder = find_weights(cfg.runner.init_from)
    if module is not None:
        load_fitting_weights({name: tensor.shape for name, tensor in module.state_dict().items()}, folder)
