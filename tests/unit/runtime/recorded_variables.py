"""Environments of batch scripts, as Slurm made them."""

from __future__ import annotations

from pathlib import Path


def recorded(name: str) -> dict[str, str]:
    """The environment of a batch script of Slurm 22.05.8."""
    text = (Path(__file__).parent / "slurm_variables" / f"{name}.env").read_text()
    return dict(line.split("=", 1) for line in text.splitlines())
