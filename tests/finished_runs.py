"""Run folders as a finished run leaves them, without training: a real configuration and provenance, made-up numbers."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path

from rlhpc.checkpoint.manifest import seal
from rlhpc.config import config_to_yaml
from rlhpc.jobs.paths import RunPaths
from rlhpc.metrics import write_provenance
from rlhpc.publishing.file_set import BundleFile
from rlhpc.runs.configuration import load_config

ROOT = Path(__file__).resolve().parents[1]


def make_run(run_dir: Path, *overrides: str, state: str = "finished", name: str = "small") -> RunPaths:
    """Makes the folder of a run of the quickstart's configuration, with two rows of metrics and a checkpoint."""
    words = [f"runner.run_dir={run_dir}", f"runner.name={name}", "runner.max_steps=2", "runner.segments=1", *overrides]
    cfg = load_config(ROOT / "configs" / "quickstart.yaml", words, check=False)
    paths = RunPaths.from_run_dir(cfg.runner.run_dir, cfg.runner.name)
    paths.root.mkdir(parents=True)
    paths.config.write_text(config_to_yaml(cfg))
    write_provenance(paths, cfg, ["rlhpc", "train", "configs/quickstart.yaml", *words])
    status = {"state": state, "segment": None, "step": 2, "max_steps": 2, "end_step": 2, "pid": 1, "host": "gone",
              "started": 1.7e9, "updated": 1.7e9 + 60, "stop_reason": "max_steps"}  # fmt: skip
    paths.driver_state.write_text(json.dumps(status))
    rows = [{"step": step, "train/loss": 1.0 / step, "time/step_s": 0.1 * step} for step in (1, 2)]
    paths.metrics.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (paths.eval / "global_step_2").mkdir(parents=True)
    result = {"suite": "default", "global_step": 2, "return_mean": 9.5, "episodes": 4}
    paths.eval_result(2, "default").write_text(json.dumps(result))
    paths.segment_logs(0).mkdir(parents=True)
    (paths.segment_logs(0) / "driver.err").write_text("rlhpc: started\n")
    write_checkpoint(paths, 2, {"model.safetensors": b"\xff\0weights" * 100, "config.yaml": paths.config.read_bytes()})
    return paths


def write_checkpoint(paths: RunPaths, step: int, files: dict[str, bytes]) -> Path:
    """Writes a complete checkpoint with these files."""
    folder = paths.checkpoint(step)
    folder.mkdir(parents=True)
    listed = {}
    for name, content in files.items():
        (folder / name).write_bytes(content)
        size, checksum = BundleFile(name, content).checksum()
        listed[name] = {"size": size, "sha256": checksum}
    manifest = json.dumps({"format": 1, "global_step": step, "files": listed, "meta": {}}).encode()
    (folder / "manifest.json").write_bytes(manifest)
    (folder / "COMPLETE").write_bytes(seal(manifest))
    return folder


def make_repository(folder: Path, files: dict[str, str], remote: str = "") -> None:
    """Makes a git repository with one commit of these files."""
    git = ["git", "-C", str(folder), "-c", "user.name=a", "-c", "user.email=a@example.org"]
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    commands: list[Sequence[str]] = [("init", "--quiet"), ("add", "--all"), ("commit", "--quiet", "--message", "first")]
    for command in [*commands, *([("remote", "add", "origin", remote)] if remote else [])]:
        subprocess.run([*git, *command], check=True, capture_output=True)
