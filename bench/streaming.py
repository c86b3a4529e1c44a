"""Memory and speed of behaviour cloning that streams its demonstrations, compared with demonstrations in memory.

    python -m bench.streaming --frames 50000

Writes a LeRobot dataset (v3.0) of two cameras with 256 × 256 pixels as H.264, and trains a CNN on it in fresh processes, each
with another amount of `demos.memory_mb`. The first episodes fit in memory, and are read once before the measurement: nothing
is decoded any more, which is the speed in memory. `read` is the rate at which one thread reads batches in random order,
`decoded` the fraction of their images that was decoded, and `train` the rate of training. The peak is that of the process's
resident memory, with Python, PyTorch and the model; `before` is the peak before the demonstrations are opened. The episodes
of the large dataset are copies of a few, in separate files. Prints a line for each run and writes
bench/results/streaming.json.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from bench.machine import write

ROOT = Path(__file__).resolve().parents[1]
SIZE, LENGTH, BATCH = 256, 250, 32
#: Number of episodes whose images fit in memory.
FEW = 4


class TwoCameras(gymnasium.Env[Any, Any]):
    """Spaces of the dataset's observations and actions."""

    metadata = {"render_modes": []}  # noqa: RUF012
    observation_space = spaces.Dict(
        {"state": spaces.Box(-9, 9, (8,), np.float32), "rgb": spaces.Box(0, 255, (SIZE, SIZE, 6), np.uint8)}
    )
    action_space = spaces.Box(-1, 1, (7,), np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return self.observation_space.sample(), 0.0, False, False, {}


gymnasium.register("TwoCameras-v0", entry_point=lambda **_: TwoCameras(), max_episode_steps=LENGTH)


def make_episode(number: int) -> dict[str, Any]:
    """Returns an episode: a square moves over a textured background, and the action is its velocity."""
    rng = np.random.default_rng(number)
    background = np.kron(rng.integers(40, 160, (SIZE // 8, SIZE // 8, 6)), np.ones((8, 8, 1))).astype(np.uint8)
    images = np.repeat(background[None], LENGTH + 1, 0)
    positions = (rng.uniform(40, 200, 2) + np.cumsum(rng.normal(0, 2, (LENGTH + 1, 2)), 0)).clip(0, SIZE - 24)
    for image, (y, x) in zip(images, positions.astype(int), strict=True):
        image[y : y + 24, x : x + 24] = 220
    actions = rng.uniform(-1, 1, (LENGTH, 7)).astype(np.float32)
    actions[:, :2] = np.diff(positions, axis=0).clip(-5, 5) / 5
    state = np.concatenate([positions / SIZE, rng.normal(size=(LENGTH + 1, 6))], 1).astype(np.float32)
    return {
        "source": f"episode {number}", "obs": {"state": state, "rgb": images}, "actions": actions, "rewards": None,
        "terminations": np.zeros(LENGTH, bool), "truncations": np.arange(LENGTH) == LENGTH - 1, "success": None,
        "env_states": None, "seed": number,
    }  # fmt: skip


def write_dataset(folder: Path, num_frames: int) -> None:
    """Writes the dataset, unless the folder exists: `FEW` episodes, and copies of their files under other names."""
    import pyarrow
    from pyarrow import parquet

    from rlhpc.embodied.data.lerobot_writer import LeRobotWriter

    if folder.exists():
        return
    with LeRobotWriter(folder, fps=10, task="", videos=True) as writer:
        for number in range(FEW):
            writer.add(make_episode(number))
    rows, episodes = folder / "data/chunk-000/file-000.parquet", folder / "meta/episodes/chunk-000/file-000.parquet"
    table, entries = parquet.read_table(rows), parquet.read_table(episodes).to_pylist()
    episode_rows = list(entries)
    for copy in range(1, num_frames // (FEW * LENGTH)):
        columns = table.to_pydict()
        columns["episode_index"] = [index + copy * FEW for index in columns["episode_index"]]
        columns["index"] = [index + copy * len(table) for index in columns["index"]]
        parquet.write_table(pyarrow.table(columns, table.schema), rows.with_name(f"file-{copy:03d}.parquet"))
        for entry in entries:
            changes = {name: copy for name in entry if name.endswith("/file_index") and not name.startswith("meta")}
            episode_rows.append({**entry, **changes, "episode_index": entry["episode_index"] + copy * FEW})
        for video in folder.glob("videos/*/chunk-000/file-000.mp4"):
            shutil.copy(video, video.with_name(f"file-{copy:03d}.mp4"))
    parquet.write_table(pyarrow.Table.from_pylist(episode_rows), episodes)
    info = json.loads((folder / "meta/info.json").read_text())
    info |= {"total_episodes": len(episode_rows), "total_frames": len(episode_rows) * LENGTH}
    (folder / "meta/info.json").write_text(json.dumps(info))


def read_peak_mib() -> float:
    """Returns the process's peak of resident memory so far."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


def measure(folder: Path, memory_mb: int, limit: int | None, warm: int, num_minibatches: int) -> dict[str, Any]:
    """Returns the rates and peaks of this process; `warm` rows in random order are read before the measurement."""
    import torch

    from rlhpc.config.typed import typed
    from rlhpc.embodied.config import BcConfig
    from rlhpc.embodied.workers.bc_actor import BcActor
    from rlhpc.runs.configuration import load_config

    torch.set_num_threads(1)
    overrides = [
        "runner.name=streaming", "runner.max_steps=1", "env.train.env_id=bench.streaming:TwoCameras-v0",
        f"demos.path={folder}", "demos.holdout=0", f"demos.memory_mb={memory_mb}", "actor.model.model_type=cnn",
        f"actor.global_batch_size={BATCH}", f"algorithm.minibatches_per_step={num_minibatches}",
        *([f"demos.limit={limit}"] if limit else []),
    ]  # fmt: skip
    actor = BcActor(typed(BcConfig, load_config(ROOT / "configs" / "base" / "bc.yaml", overrides)))
    before = read_peak_mib()
    actor.init_worker()
    open_peak_mib = read_peak_mib()
    order = torch.randperm(actor.total, generator=torch.Generator().manual_seed(0)).numpy()
    rows = [order[start : start + BATCH] for start in range(0, len(order), BATCH)]
    for part in rows[: warm // BATCH]:
        actor.stream.read(part)
    read_rows = rows[-num_minibatches - 1 : -1]
    num_decoded, begin = actor.stream.pool.num_read, time.perf_counter()
    for part in read_rows:
        actor.stream.read(part)
    read_rate = sum(map(len, read_rows)) / (time.perf_counter() - begin)
    num_decoded = actor.stream.pool.num_read - num_decoded
    begin = time.perf_counter()
    samples = actor.imitate(1, 0.0)["samples"]
    train_rate = samples / (time.perf_counter() - begin)
    return {
        "frames": actor.total, "memory_mb": memory_mb, "read": read_rate, "train": train_rate, "before": before,
        "opened": open_peak_mib, "peak": read_peak_mib(), "held": actor.stream.retained_bytes / 2**20,
        "decoded": num_decoded / (2 * sum(map(len, read_rows))),
    }  # fmt: skip


def main() -> None:
    """Measures each amount of memory in a separate process, and writes the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--frames", type=int, default=50_000)
    parser.add_argument("--minibatches", type=int, default=8)
    parser.add_argument("--folder", type=Path, help="folder of the dataset, which is kept")
    parser.add_argument("--arm", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.arm:
        print(json.dumps(measure(args.folder, **json.loads(args.arm), num_minibatches=args.minibatches)))
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.folder or Path(temporary) / "dataset"
        begin = time.perf_counter()
        write_dataset(folder, args.frames)
        print(f"{args.frames} frames: {time.perf_counter() - begin:.0f} s to write")
        arms = [
            {"memory_mb": 768, "limit": None, "warm": 1800},
            {"memory_mb": 768, "limit": FEW, "warm": FEW * LENGTH},
            {"memory_mb": 64, "limit": FEW, "warm": 320},
        ]
        size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
        command_line, results = " ".join(["python -m bench.streaming", *sys.argv[1:]]), []
        for arm in arms:
            command = [sys.executable, "-m", "bench.streaming", "--folder", str(folder), "--arm", json.dumps(arm)]
            command += ["--minibatches", str(args.minibatches)]
            result = json.loads(
                subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1]
            )
            print({name: round(value, 2) for name, value in result.items()})
            results.append(result)
            write("streaming", command_line, {"dataset_bytes": size, "runs": results})


if __name__ == "__main__":
    main()
