"""A run's folder with a checkpoint of one small file."""

from __future__ import annotations

from pathlib import Path

from rlhpc.checkpoint import CheckpointWriter
from rlhpc.jobs.paths import RunPaths


def save(paths: RunPaths, step: int, text: str = "weights") -> Path:
    with CheckpointWriter(paths, step) as writer:
        writer.add_bytes("model.safetensors", f"{text} {step}".encode() * 100)
        writer.path("actor-0.pt").write_bytes(b"written by a worker")
        return writer.commit({"env_steps": step * 10})


def names(paths: RunPaths) -> list[str]:
    return sorted(path.name for path in paths.checkpoints.iterdir())


def _flip(path: Path) -> None:
    part = path / "model.safetensors"
    data = bytearray(part.read_bytes())
    data[len(data) // 2] ^= 1
    part.write_bytes(data)
