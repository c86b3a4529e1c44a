"""Sharded checkpoints in PyTorch's distributed format (DCP), stored as safetensors.

PyTorch's `dcp.save` exchanges pickles over the process group's sockets, to which any process on the network could send, and
its default storage is read by unpickling. Here the ranks exchange plans over the worker group's authenticated channel, and
the files contain only tensors. `torch.distributed.checkpoint.HuggingFaceStorageReader` reads the files.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from torch.distributed.checkpoint import DefaultSavePlanner, HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint._hf_utils import CUSTOM_METADATA_KEY, DCP_VERSION_KEY, HF_DCP_VERSION
from torch.distributed.checkpoint.api import CheckpointException

from rlhpc.checkpoint.async_writer import write_file
from rlhpc.checkpoint.state import on_host, stream_tensors
from rlhpc.checkpoint.tensor_slice import TensorSlice
from rlhpc.runtime.errors import CheckpointError
from rlhpc.runtime.files import fsync_folder

if TYPE_CHECKING:
    from rlhpc.training.backend import TrainingRanks

#: File name of a rank's shards, as in PyTorch; numbers start at 1.
_SHARD_FILE = "shard-{number:05d}-model-00001-of-00001.safetensors"


def save_sharded(folder: Path, state: dict[str, torch.Tensor], worker: TrainingRanks) -> None:
    """Writes each rank's shards of `state` to one file, or schedules the write (`async_writer.write_file`). All ranks call it.

    Raises:
        CheckpointError: The filesystem reported an error.
    """
    folder.mkdir(parents=True, exist_ok=True)
    writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
    planner = DefaultSavePlanner()
    planner.set_up_planner(state, storage_meta=writer.storage_meta(), is_coordinator=worker.rank == 0)
    writer.set_up_storage_writer(worker.rank == 0)
    plans = worker.all_gather_object(writer.prepare_local_plan(planner.create_local_plan()))
    # Every rank computes the plan for all ranks; it depends only on `plans`.
    plans = writer.prepare_global_plan(planner.create_global_plan(plans)[0])
    plan = planner.finish_plan(plans[worker.rank])
    # PyTorch's writer would copy all tensors once more, and hold the GIL.
    if plan.items:
        tensors = {
            write_item.index.fqn: tensor
            for write_item in plan.items
            if torch.is_tensor(tensor := planner.resolve_data(write_item))
        }
        tensor_data = [(write_item.index.fqn, write_item.tensor_data) for write_item in plan.items]
        offsets = {name: {"saved_offsets": data.chunk.offsets} for name, data in tensor_data if data is not None}
        metadata = {CUSTOM_METADATA_KEY: json.dumps(offsets), DCP_VERSION_KEY: str(HF_DCP_VERSION)}
        path = folder / _SHARD_FILE.format(number=plan.storage_data["shard_index"])
        write_file(path, tensors, lambda file, copies: stream_tensors(file, on_host(copies), metadata))
    fsync_folder(folder)


def iter_saved_slices(folder: Path) -> Iterator[tuple[str, Callable[[], torch.Tensor], TensorSlice]]:
    """Yields the stored slices of a checkpoint: name of the tensor, function that reads the slice's values, and the slice.

    Raises:
        CheckpointError: A file is damaged, or was written by another program.
    """
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, "pt") as file:
                offsets = json.loads((file.metadata() or {})[CUSTOM_METADATA_KEY])
                shapes = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118 (no mapping)
        except Exception as error:  # safetensors raises its own error classes
            raise CheckpointError(f"{path}: cannot be read ({type(error).__name__}: {error})") from error
        for name, shape in shapes.items():
            starts = tuple(int(start) for start in offsets.get(name, {}).get("saved_offsets") or [0] * len(shape))
            yield name, partial(_read_tensor, path, name), TensorSlice(starts, tuple(shape))


def _read_tensor(path: Path, name: str) -> torch.Tensor:
    with safe_open(path, "pt") as file:
        tensor: torch.Tensor = file.get_tensor(name)
        return tensor


def load_sharded(folder: Path, state: dict[str, torch.Tensor]) -> None:
    """Reads this rank's shards into the tensors of `state`, from a checkpoint of any number of ranks.

    Raises:
        CheckpointError: A tensor is missing or of a different shape, or a file is damaged.
    """
    if not any(folder.glob("*.safetensors")):
        raise CheckpointError(f"{folder}: no shards of a checkpoint are there")
    try:
        with warnings.catch_warnings():  # torch warns that it reads without the other ranks, which is intended
            warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
            dcp.load(state, storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=True)
    # CheckpointException is not an Exception, and safetensors raises its own error classes.
    except (CheckpointException, Exception) as error:
        failures = error.failures if isinstance(error, CheckpointException) else None
        reason = next(iter(failures.values()))[0] if failures else error
        raise CheckpointError(f"{folder}: the checkpoint does not fit this configuration: {reason}") from error
