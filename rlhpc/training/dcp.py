"""Sharded checkpoints in PyTorch's distributed format (DCP), stored as safetensors.

With PyTorch's own `dcp.save`, the ranks agree by sending pickles through the process group's sockets, to which anyone
on the network could send, and its default storage is read by unpickling. Here the plans travel through the worker
group's authenticated channel, and the files hold only tensors. `torch.distributed.checkpoint.HuggingFaceStorageReader`
reads them.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultSavePlanner, HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.api import CheckpointException

from rlhpc.runtime.durable import fsync_folder
from rlhpc.runtime.errors import CheckpointError

if TYPE_CHECKING:
    from rlhpc.training.contract import Ranks


def save_sharded(folder: Path, state: dict[str, torch.Tensor], worker: Ranks) -> None:
    """Writes each rank's part of `state` as one file; all ranks call it."""
    folder.mkdir(parents=True, exist_ok=True)
    writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
    planner = DefaultSavePlanner()
    planner.set_up_planner(state, storage_meta=writer.storage_meta(), is_coordinator=worker.rank == 0)
    writer.set_up_storage_writer(worker.rank == 0)
    plans = worker.all_gather_object(writer.prepare_local_plan(planner.create_local_plan()))
    # Every rank computes the plan for all ranks; it depends only on `plans`.
    plans = writer.prepare_global_plan(planner.create_global_plan(plans)[0])
    try:
        writer.write_data(planner.finish_plan(plans[worker.rank]), planner).wait()
        fsync_folder(folder)
    except OSError as error:
        raise CheckpointError(f"{folder}: could not be written: {error.strerror}") from error


def load_sharded(folder: Path, state: dict[str, torch.Tensor]) -> None:
    """Reads this rank's part into the tensors of `state`, however many ranks wrote it.

    Raises:
        CheckpointError: A tensor is missing or of another shape, or a file is damaged.
    """
    if not any(folder.glob("*.safetensors")):
        raise CheckpointError(f"{folder}: no shards of a checkpoint are there")
    try:
        with warnings.catch_warnings():  # it warns that it reads without talking to the other ranks, which is intended
            warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
            dcp.load(state, storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=True)
    # CheckpointException is not an Exception, and safetensors has errors of its own.
    except (CheckpointException, Exception) as error:
        failures = error.failures if isinstance(error, CheckpointException) else None
        reason = next(iter(failures.values()))[0] if failures else error
        raise CheckpointError(f"{folder}: the checkpoint does not fit this configuration: {reason}") from error
