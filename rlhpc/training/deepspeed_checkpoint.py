"""Reader of DeepSpeed's checkpoint files that needs no DeepSpeed, runs in one process, and executes no pickled code."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import re
import secrets
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from rlhpc.runtime.errors import CheckpointError

if TYPE_CHECKING:
    from rlhpc.training.backend import TrainingRanks


_RANK_FILE = re.compile(r"zero_pp_rank_(\d+)_mp_rank_00_(optim|model)_states\.pt$")
_UNPARTITIONED_FILE = "mp_rank_00_model_states.pt"


@dataclass
class _Fragment:
    """Position of a parameter's fragment in a rank's flat tensor."""

    numel: int = 0
    start: int = 0


class _Stage(int):
    """Stand-in for the enum of ZeRO's stages."""


class _Scaler:
    """Stand-in for the state of the loss scale, which is not used here."""


#: The classes that DeepSpeed pickles, and their stand-ins.
_STANDINS: dict[str, Any] = {
    "deepspeed.utils.tensor_fragment.fragment_address": _Fragment,
    "deepspeed.runtime.zero.config.ZeroStageEnum": _Stage,
    "deepspeed.runtime.fp16.loss_scaler.LossScaler": _Scaler,
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler": _Scaler,
}


def require_harmless(paths: Iterable[Path]) -> None:
    """Rejects files that would run code when DeepSpeed unpickles them.

    Raises:
        CheckpointError: A file names functions or classes that DeepSpeed's checkpoints do not have, or is damaged.
    """
    for path in paths:
        try:
            unsafe_names = torch.serialization.get_unsafe_globals_in_checkpoint(str(path))
        except Exception as error:  # a damaged file may raise anything
            raise CheckpointError(f"{path}: cannot be read ({type(error).__name__}: {error})") from error
        foreign_names = sorted(set(unsafe_names) - set(_STANDINS))
        if foreign_names:
            raise CheckpointError(
                f"{path}: not a file that DeepSpeed wrote; loading it would call {', '.join(foreign_names)}"
            )


def files_of(folder: Path, rank: int) -> list[Path]:
    """Returns the files in a tag's folder that a rank reads if the world size has not changed."""
    return [
        path
        for path in sorted(folder.glob("*_states.pt"))
        if path.name == _UNPARTITIONED_FILE or ((match := _RANK_FILE.search(path.name)) and int(match[1]) == rank)
    ]


def full_parameters(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the trained parameters in full, in float32, from all ranks' files.

    Args:
        folder: Folder of one tag.

    Raises:
        CheckpointError: Files are missing or damaged.
    """
    optim_paths, model_paths = _rank_files(folder, "optim"), _rank_files(folder, "model")
    if not optim_paths:
        raise CheckpointError(f"{folder}: holds no *_optim_states.pt, so it is no DeepSpeed checkpoint")
    states = [_load_file(path)["optimizer_state_dict"] for path in optim_paths]
    num_ranks = int(_saved_world_size(states[0], len(states)))
    if len(states) != num_ranks:
        raise CheckpointError(f"{folder}: has files of {len(states)} ranks, of {num_ranks} that there were")
    shapes = _load_file(model_paths[0] if model_paths else folder / _UNPARTITIONED_FILE)["param_shapes"]
    if "fp32_flat_groups" in states[0]:
        yield from _iter_stage_3(states, shapes)
    else:
        yield from _iter_stages_1_2(states, shapes)


def _saved_world_size(state: dict[str, Any], default: int) -> Any:
    """Returns the world size at which the state was saved."""
    count = state.get("partition_count", default)
    return max(count) if isinstance(count, (list, tuple)) else count


def _iter_stages_1_2(states: list[dict[str, Any]], shapes: list[dict[str, Any]]) -> Iterator[tuple[str, torch.Tensor]]:
    for group, group_shapes in enumerate(shapes):
        for name, shape in group_shapes.items():
            partitions = []
            for state in states:
                fragment = state["param_slice_mappings"][group].get(name)
                if fragment is not None:
                    flat_tensor = state["single_partition_of_fp32_groups"][group]
                    partitions.append(flat_tensor.narrow(0, fragment.start, fragment.numel))
            yield name, _assemble(name, partitions, shape)


def _iter_stage_3(states: list[dict[str, Any]], shapes: list[dict[str, Any]]) -> Iterator[tuple[str, torch.Tensor]]:
    for group, group_shapes in enumerate(shapes):
        start = 0
        for name, shape in group_shapes.items():
            partition_size = -(
                -torch.Size(shape).numel() // len(states)
            )  # elements per rank; the last rank's partition is padded
            partitions = [state["fp32_flat_groups"][group].narrow(0, start, partition_size) for state in states]
            start += partition_size
            yield name, _assemble(name, partitions, shape)


def _assemble(name: str, pieces: list[torch.Tensor], shape: Any) -> torch.Tensor:
    size = torch.Size(shape)
    flat_tensor = torch.cat(pieces) if pieces else torch.empty(0)
    if flat_tensor.numel() < size.numel():
        raise CheckpointError(f"{name}: the files hold {flat_tensor.numel()} of its {size.numel()} elements")
    return flat_tensor.detach()[: size.numel()].view(size)


def _rank_files(folder: Path, kind: str) -> list[Path]:
    """Returns the ranks' files of one kind (`optim` or `model`), in rank order."""
    paths_by_rank = {
        int(m[1]): path for path in folder.glob("*.pt") if (m := _RANK_FILE.search(path.name)) and m[2] == kind
    }
    return [paths_by_rank[rank] for rank in sorted(paths_by_rank)]


def _load_file(path: Path) -> dict[str, Any]:
    require_harmless([path])
    standins: list[Any] = [(standin, name) for name, standin in _STANDINS.items()]
    try:
        with torch.serialization.safe_globals(standins):
            state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:
        raise CheckpointError(f"{path}: cannot be read ({type(error).__name__}: {error})") from error
    return state


@contextlib.contextmanager
def convert_to_universal(source: Path, *, neighbour: Path, worker: TrainingRanks) -> Iterator[Path]:
    """Provides a checkpoint in the universal format while the block runs. All ranks call it; rank 0 converts.

    Args:
        source: DeepSpeed's folder of one tag.
        neighbour: Folder next to which the converted checkpoint is written. All nodes must see it, so it cannot be a temporary
            folder of one machine. The new folder is named like an unfinished save, so that it is removed after a crash.
        worker: The worker of this rank.

    Yields:
        The folder that contains the converted folder of the tag.

    Raises:
        CheckpointError: The checkpoint could not be converted; raised on all ranks.
    """
    scratch: str | None = None
    failure = ""
    if worker.rank == 0:
        scratch = str(neighbour.with_name(f".tmp_{neighbour.name}-{secrets.token_hex(4)}"))
        try:
            require_harmless(sorted(source.glob("*.pt")))
            convert(source, Path(scratch) / source.name)
        except Exception as error:  # the other ranks wait for this result
            failure = f"{source} could not be converted for another number of ranks: {type(error).__name__}: {error}"
    reports = worker.all_gather_object((scratch, failure))
    folder = Path(reports[0][0])
    try:
        if reports[0][1]:
            raise CheckpointError(reports[0][1])
        yield folder
        worker.barrier()  # all ranks have read the folder
    finally:
        if worker.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)


def convert(source: Path, target: Path) -> None:
    """Writes `target` in the universal format, with DeepSpeed's converter in this process."""
    converter = importlib.import_module("deepspeed.checkpoint.ds_to_universal")
    target.mkdir(parents=True)
    options = argparse.Namespace(
        input_folder=str(source),
        output_folder=str(target),
        num_extract_workers=1,
        num_merge_workers=1,
        keep_temp_folder=False,
        strict=True,
        inject_missing_state=True,
    )
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        converter.main(options)
