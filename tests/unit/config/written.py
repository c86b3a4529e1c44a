"""A value that a user writes in a file or as an override, and the configuration that it becomes."""

from __future__ import annotations

from pathlib import Path

from rlhpc.config.sections import RunConfig
from rlhpc.runs.configuration import load_config

QUICKSTART = Path(__file__).resolve().parents[3] / "configs/quickstart.yaml"


def _file(folder: Path, key: str, written: str, name: str = "c.yaml") -> Path:
    *sections, last = key.split(".")
    lines = [f"defaults: [{QUICKSTART}]"]
    lines += [f"{'  ' * depth}{section}:" for depth, section in enumerate(sections)]
    path = folder / name
    path.write_text("\n".join([*lines, f"{'  ' * len(sections)}{last}: {written}"]) + "\n")
    return path


def _by_file(folder: Path, key: str, written: str) -> RunConfig:
    return load_config(_file(folder, key, written), check=False)


def _by_override(folder: Path, key: str, written: str) -> RunConfig:
    return load_config(QUICKSTART, [f"{key}={written}"], check=False)
