"""Checkpoint write time compared with `dd`, and the time until a resumed run continues.

`save` writes 500 MB of parameters in 290 tensors like a run (write, sync, checksum, seal, rename); the reference is
`dd conv=fsync` of as many bytes in the same folder. `verify` computes the checksums and `load` loads the weights into a model;
the reference is `dd` of the file to /dev/null, and all read from the page cache. `resume` measures the quickstart from the
command to the first step after its checkpoint; the reference is the same command without a checkpoint.

    python -m bench.checkpoint --repeat 5
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from bench.machine import spread, write
from bench.weights import BYTES, make_tensors
from rlhpc.checkpoint.manifest import verify
from rlhpc.checkpoint.state import load_tensors, save_tensors
from rlhpc.checkpoint.store import CheckpointWriter
from rlhpc.jobs.paths import RunPaths

HERE = Path(__file__).resolve().parent


def time_call(act: Callable[[], Any]) -> float:
    start_s = time.perf_counter()
    act()
    return time.perf_counter() - start_s


def run_dd(*arguments: str) -> None:
    subprocess.run(["dd", "bs=4M", "status=none", *arguments], check=True)


def measure_files(folder: Path, weights: dict[str, torch.Tensor], step: int) -> dict[str, float]:
    """Measures one save, one load, and one write by `dd`."""
    paths = RunPaths(folder)

    def save() -> None:
        with CheckpointWriter(paths, step) as writer:
            save_tensors(writer.path("model.safetensors"), weights)
            writer.commit()

    row = {"save (s)": time_call(save)}
    weights_file = paths.checkpoint(step) / "model.safetensors"
    source, target = folder / "source", folder / "target"
    source.write_bytes(os.urandom(1 << 20) * (BYTES >> 20))
    row["limit: dd with fsync (s)"] = time_call(lambda: run_dd(f"if={source}", f"of={target}", "conv=fsync"))
    target.unlink()
    row["verify (s)"] = time_call(lambda: verify(paths.checkpoint(step)))
    model = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}

    def load() -> None:
        for name, tensor in load_tensors(weights_file).items():
            model[name].copy_(tensor)

    row["load (s)"] = time_call(load)
    assert all(torch.equal(model[name], weights[name]) for name in weights)
    row["limit: dd to nowhere (s)"] = time_call(lambda: run_dd(f"if={weights_file}", "of=/dev/null"))
    source.unlink()
    return row


def time_until_step(folder: Path, num_steps: int) -> float:
    """Returns the seconds from the command until a row is added to the run's metrics; the run continues to its end."""
    metrics = folder / "resume" / "metrics.jsonl"
    size_before = metrics.stat().st_size if metrics.exists() else 0
    command = [
        sys.executable, "-m", "rlhpc.cli", "train", str(HERE.parent / "configs" / "quickstart.yaml"),
        f"runner.run_dir={folder}", "runner.name=resume", "runner.segments=1", f"runner.max_steps={num_steps}",
        "runner.save_interval=10", "runner.logger.logger_backends=[jsonl]", "runner.resume_dir=auto",
    ]  # fmt: skip
    start_s = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        while process.poll() is None and (not metrics.exists() or metrics.stat().st_size <= size_before):
            time.sleep(0.005)
        elapsed_s = time.perf_counter() - start_s
        _, output = process.communicate()
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {process.returncode}:\n{output[-2000:]}")
    return elapsed_s


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the benchmark and writes its figures to `results/checkpoint.json`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=5)
    args = parser.parse_args(argv)
    os.environ["OMP_NUM_THREADS"] = "1"
    weights: dict[str, torch.Tensor] = {name: tensor.normal_() for name, tensor in make_tensors()}
    rows: list[dict[str, float]] = []
    for step in range(args.repeat + 1):
        with tempfile.TemporaryDirectory(dir=".") as temporary_folder:
            row = measure_files(Path(temporary_folder), weights, step)
        with tempfile.TemporaryDirectory() as temporary_folder:
            row["start to the first step (s)"] = time_until_step(Path(temporary_folder), 10)
            row["resume to the next step (s)"] = time_until_step(Path(temporary_folder), 20)
        if step:  # the first one also warms the disk's cache and the interpreter's files
            rows.append(row)
            print(json.dumps(row), flush=True)
    figures = {name: spread([row[name] for row in rows]) for name in rows[0]}
    medians = {name: figure["median"] for name, figure in figures.items()}
    ratios = {
        "save / dd with fsync": medians["save (s)"] / medians["limit: dd with fsync (s)"],
        "load / dd to nowhere": medians["load (s)"] / medians["limit: dd to nowhere (s)"],
        "resume / start": medians["resume to the next step (s)"] / medians["start to the first step (s)"],
    }
    for name, ratio in ratios.items():
        print(f"{name:30} {ratio:8.2f}")
    print(
        write(
            "checkpoint", f"python -m bench.checkpoint --repeat {args.repeat}", {"figures": figures, "ratios": ratios}
        )
    )


if __name__ == "__main__":
    main()
