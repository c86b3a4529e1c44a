"""Folders of exports: their files follow the umask, as those of checkpoints do."""

from __future__ import annotations

import os

import pytest

from rlhpc.checkpoint import CheckpointWriter, verify
from rlhpc.jobs.paths import RunPaths


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600)])
def test_files_of_checkpoints_and_exports_follow_the_umask(paths: RunPaths, umask: int, mode: int) -> None:
    """A colleague may evaluate what is not kept from him; safetensors by itself makes files that are the owner's alone."""
    import torch

    from rlhpc.checkpoint.export_folder import filled_folder
    from rlhpc.checkpoint.state import save_tensors

    before = os.umask(umask)
    try:
        with CheckpointWriter(paths, 1) as writer:
            save_tensors(writer.path("model.safetensors"), {"w": torch.zeros(2)})
            writer.add_bytes("runner.json", b"{}")
            checkpoint = writer.commit()
        with filled_folder(paths.export(1)) as staging:
            save_tensors(staging / "model.safetensors", {"w": torch.zeros(2)})
    finally:
        os.umask(before)
    files = [path for folder in (checkpoint, paths.export(1)) for path in folder.iterdir()]
    assert {path.name: oct(path.stat().st_mode & 0o777) for path in files} == {path.name: oct(mode) for path in files}
    assert not verify(checkpoint)
