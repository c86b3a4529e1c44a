"""Observed behaviour of a finished run: resumed for two steps, its checkpoint evaluated and exported, and the run reported.

Everything goes through the command line, so that a result does not depend on where modules are.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import numpy as np
import torch
import yaml
from safetensors import safe_open

from tests import warm
from tests.baseline.runs import RESUMED, RUN, SAVED, BaselineRun

#: Metrics of clocks and of the machine.
MEASURED = ("time/", "system/", "memory/")
#: Endings of files whose names are recorded, and whose content is not: texts, and programs, which hold paths.
_UNREAD = (".html", ".out", ".err", ".svg", ".md", ".py", ".pt2")
#: Folders of a run whose files have the names of hosts and jobs, and digests of what is installed.
_MACHINE = ("registry/", "logs/", "submit/", "provenance/", ".driver", ".newest_save.json")

#: Keys of JSON files whose values change with texts, paths and versions.
_DIGESTS = ("sha256", "manifest_sha256", "rlhpc_version")

Result = dict[str, Any]


class Commands:
    """The command line in a folder."""

    def __init__(self, folder: Path, models: Path) -> None:
        self.folder, self.models = folder, models
        self.environment = {
            **os.environ, "RLHPC_MODELS": str(models), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1",
            "PYTHONPATH": "", "PYGAME_HIDE_SUPPORT_PROMPT": "1",
        }  # fmt: skip

    def run(self, *words: str) -> str:
        """Runs `rlhpc` with these words, which must succeed; returns what it printed, without the folder's path."""
        done = warm.run(
            [sys.executable, "-P", "-m", "rlhpc.cli", *words], cwd=self.folder, env=self.environment, capture_output=True,
            text=True, timeout=200,
        )  # fmt: skip
        assert done.returncode == 0, f"rlhpc {' '.join(words)}\n{done.stdout}\n{done.stderr}"
        return self.without_paths(done.stdout)

    def without_paths(self, text: str) -> str:
        """Returns a text with placeholders for the folder and for that of the models."""
        return text.replace(str(self.folder), "<folder>").replace(str(self.models), "<models>")

    def contents_of(self, folder: Path) -> dict[str, Any]:
        """Returns the content of each file below a folder, by its path there."""
        return {name: _content(folder / name, self.without_paths) for name in names_of(folder)}


def train(run: BaselineRun, folder: Path, models: Path) -> None:
    """Trains a run, and those that it begins from, in an empty folder."""
    commands = Commands(folder, models)
    if run.data is not None:
        run.data(folder / "data")
    for name, config in {**run.earlier, RUN: run.config}.items():
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
        commands.run("train", f"{name}.yaml")


def exercise(run: BaselineRun, folder: Path, models: Path) -> Result:
    """Resumes an unpacked run, evaluates and exports its checkpoint, and reports it; returns what came of it."""
    commands, root = Commands(folder, models), folder / "runs" / RUN
    suite = ["--suite", run.suite] if run.suite else []
    chosen = ["--run", f"runs/{RUN}", "--step", str(SAVED)]
    result: Result = {"export": {}}
    before = _raw_rows(root)
    commands.run("train", f"{RUN}.yaml", "runner.resume_dir=auto", f"runner.max_steps={RESUMED}")
    rows = rows_of(root)
    assert [row["step"] for row in rows] == list(range(1, RESUMED + 1)), "the run did not resume from its checkpoint"
    lost = before[-1].keys() - {name for row in _raw_rows(root)[len(before) :] for name in row}
    assert not lost, f"metrics that the resumed run lacks: {sorted(lost)}"
    result["metrics"] = rows[len(before) :]
    result["checkpoint"] = commands.contents_of(root / "checkpoints" / f"global_step_{RESUMED}")
    result["evaluate"] = {
        "printed": commands.run("eval", *chosen, *suite),
        "files": commands.contents_of(root / "eval"),
    }
    for name, options in {"policy": (), **run.convert}.items():
        commands.run("convert", *chosen, "--output", f"export-{name}", *options)
        result["export"][name] = commands.contents_of(folder / f"export-{name}")
    commands.run("report", f"runs/{RUN}", "--curves", f"runs/{RUN}/report/curves")
    result["report"] = names_of(root / "report")
    result["run_folder"] = [name for name in names_of(root) if not name.startswith(_MACHINE)]
    return result


def rows_of(root: Path) -> list[dict[str, Any]]:
    """Returns a run's rows of metrics, without those of the machine."""
    rows = _raw_rows(root)
    return [{name: value for name, value in row.items() if not name.startswith(MEASURED)} for row in rows]


def _raw_rows(root: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (root / "metrics.jsonl").read_text().splitlines()]


def names_of(folder: Path) -> list[str]:
    """Returns the paths of all files below a folder, sorted."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def _content(path: Path, without_paths: Callable[[str], str]) -> Any:
    if path.suffix == ".safetensors":
        with safe_open(path, "pt") as file:
            return {name: described(file.get_tensor(name)) for name in sorted(file.keys())}
    if path.suffix in (".pt", ".pth"):
        try:
            return state_of(torch.load(path, map_location="cpu", weights_only=True))
        except UnpicklingError:  # DeepSpeed's own files have objects of its classes
            return state_of(torch.load(path, map_location="cpu", weights_only=False))
    if path.suffix in _UNREAD or path.name in ("COMPLETE", "manifest.json"):
        return None
    try:
        text = without_paths(path.read_text())
    except UnicodeDecodeError:
        return hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    if path.suffix == ".json" and path.stat().st_size < 20_000:
        return without_digests(json.loads(text))
    if path.suffix == ".jsonl":
        return [json.loads(line) for line in text.splitlines()]
    return hashlib.sha256(text.encode()).hexdigest()[:16] if path.suffix != ".yaml" else sorted(yaml.safe_load(text))


def without_digests(value: Any) -> Any:
    """Returns a JSON value without digests of files and the version of the package, which change with texts and paths."""
    if isinstance(value, list):
        return [without_digests(item) for item in value]
    if not isinstance(value, dict):
        return value
    kept = {key: item for key, item in value.items() if key not in _DIGESTS}
    return {key: without_digests(item) for key, item in kept.items()} if kept.keys() != {"size"} else None


def described(tensor: torch.Tensor) -> str:
    """Returns dtype, shape and digest of a tensor as a line."""
    raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)} {hashlib.sha256(raw).hexdigest()[:16]}"


def state_of(state: Any) -> dict[str, Any]:
    """Returns the leaves of a nested state by their path; long lists of numbers as an array."""
    return dict(_leaves(state, ""))


def _leaves(value: Any, path: str) -> Any:
    if isinstance(value, torch.Tensor):
        yield path, described(value)
    elif isinstance(value, Mapping):
        if not value:
            yield path, "{}"
        for key, item in value.items():
            yield from _leaves(item, f"{path}/{key}")
    elif isinstance(value, list | tuple):
        if len(value) > 8 and all(isinstance(item, int | float) for item in value):
            array = np.asarray(value)
            yield path, f"list {array.dtype} [{len(value)}] {hashlib.sha256(array.tobytes()).hexdigest()[:16]}"
            return
        if not value:
            yield path, "[]"
        for index, item in enumerate(value):
            yield from _leaves(item, f"{path}/{index}")
    elif isinstance(value, bytes):
        yield path, f"bytes [{len(value)}] {hashlib.sha256(value).hexdigest()[:16]}"
    else:
        yield path, value if value is None or isinstance(value, str | int | float) else type(value).__name__
