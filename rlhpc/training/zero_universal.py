"""DeepSpeed checkpoints for another world size or stage, through its universal format: one file per parameter."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from rlhpc.runtime.errors import CheckpointError
from rlhpc.training.zero_files import require_harmless

if TYPE_CHECKING:
    from rlhpc.training.contract import Ranks


@contextlib.contextmanager
def as_universal(source: Path, *, beside: Path, worker: Ranks) -> Iterator[Path]:
    """Provides a checkpoint in the universal format while the block runs. All ranks call it; rank 0 converts.

    Args:
        source: DeepSpeed's folder of one tag.
        beside: The folder beside which the converted one is put: every node must see it, so it cannot be a temporary
            folder of one machine. The new folder is named like an unfinished save: what a killed run leaves goes with those.
        worker: The worker of this rank.

    Returns:
        The folder that contains the tag's folder.

    Raises:
        CheckpointError: The checkpoint could not be converted; raised on all ranks.
    """
    scratch: str | None = None
    failure = ""
    if worker.rank == 0:
        scratch = str(beside.with_name(f".tmp_{beside.name}-{secrets.token_hex(4)}"))
        try:
            require_harmless(sorted(source.glob("*.pt")))
            convert(source, Path(scratch) / source.name)
        except Exception as error:  # the other ranks are waiting: whatever it is, they must know
            failure = f"{source} could not be converted for another number of ranks: {type(error).__name__}: {error}"
    told = worker.all_gather_object((scratch, failure))
    folder = Path(told[0][0])
    try:
        if told[0][1]:
            raise CheckpointError(told[0][1])
        yield folder
        worker.barrier()  # nobody is reading there any more
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
