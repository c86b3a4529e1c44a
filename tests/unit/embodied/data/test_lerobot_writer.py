"""Writer of LeRobot's datasets."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest

from rlhpc.cli import main
from rlhpc.embodied.data.lerobot_reader import read_lerobot
from rlhpc.embodied.data.lerobot_writer import LeRobotWriter
from tests.extras import find_python, need_extra, needs_python
from tests.unit.embodied.data.lerobot_files import CAMERAS, NAMES, Clocked, Shown, dataset, episode, info

need_extra("embodied")

LEROBOT = find_python("lerobot")


def kept(folder: Path) -> dict[str, Any]:
    """What must survive, and the time of the last frame."""
    said = info(folder)
    names = {name: feature["names"] for name, feature in said["features"].items()}
    frames = [row["obs"]["rgb"][:-1] for row in read_lerobot(folder)]
    [task] = json.loads(json.dumps(sorted(_tasks(folder))))
    return {"fps": said["fps"], "robot_type": said["robot_type"], "names": names, "task": task,
            "means": [frame.mean((1, 2)).round().tolist() for frame in frames]}  # fmt: skip


def _tasks(folder: Path) -> set[str]:
    import pyarrow.parquet as parquet

    return set(parquet.read_table(folder / "meta/tasks.parquet")["task"].to_pylist())


@pytest.mark.parametrize("videos", [False, True])
def test_facts_survive_every_way_of_making_another(tmp_path: Path, videos: bool) -> None:
    first, second = dataset(tmp_path / "a", videos=videos), dataset(tmp_path / "b", 3, videos=videos)
    more = ["--videos"] if videos else []

    def made(action: str, name: str, *paths: Path, to: str = "lerobot", words: tuple[str, ...] = ()) -> Path:
        ending = ".h5" if to == "hdf5" else ""
        arguments = [action, *map(str, paths), "--to", to, "--output", str(tmp_path / f"{name}{ending}"), *words]
        assert main(["data", *arguments, *(more if to == "lerobot" else [])]) == 0
        return tmp_path / f"{name}{ending}"

    source = kept(first)
    assert (source["fps"], source["robot_type"], source["task"]) == (50, "so100", "fold the cloth")
    assert source["names"]["action"] == NAMES["action"] and set(CAMERAS) <= set(source["names"])
    converted = made("convert", "converted", first)
    through = made("convert", "back", made("convert", "between", first, to="hdf5"))
    merged = made("merge", "merged", first, second)
    parts = made("split", "parts", merged, words=("--parts", "2"))
    for folder in (converted, through, merged, parts / "0", parts / "1"):
        assert {**kept(folder), "means": 0} == {**source, "means": 0}
        assert list(info(folder)["features"]) == list(info(first)["features"])
    for folder in (converted, through):
        for one, two in zip(kept(folder)["means"], source["means"], strict=True):
            np.testing.assert_allclose(one, two, atol=3 if videos else 0)  # cameras are tens apart


def test_sources_that_differ(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = dataset(tmp_path / "base")
    others = {"fps": {"fps": 30}, "robot_type": {"robot": "aloha"}, "cameras": {"cameras": CAMERAS[::-1]},
              "names the components of action": {"names": {"action": ["gripper", "shoulder"]}}}  # fmt: skip
    for number, (message, changes) in enumerate(others.items()):
        other = dataset(tmp_path / f"other{number}", **changes)
        words = ["data", "merge", str(base), str(other), "--to", "lerobot", "--output"]
        assert main([*words, str(tmp_path / f"out{number}")]) == 2
        assert message in capsys.readouterr().err and not (tmp_path / f"out{number}").exists()
        accepted = main([*words, str(tmp_path / f"told{number}"), "--fps", "25"])
        assert accepted == (0 if "fps" in changes else 2), "only --fps settles only a rate"
        capsys.readouterr()
    assert info(tmp_path / "told0")["fps"] == 25
    silent = dataset(tmp_path / "silent", names=None)
    assert main(["data", "merge", str(silent), str(base), "--to", "lerobot", "--output", str(tmp_path / "both")]) == 0
    assert info(tmp_path / "both")["features"]["action"]["names"] == NAMES["action"]


gymnasium.register("test/Clocked-v0", entry_point=Clocked, max_episode_steps=4)
gymnasium.register("test/Shown-v0", entry_point=Shown, max_episode_steps=4)


@needs_python("lerobot")
@pytest.mark.parametrize("fps", [10, 50])
@pytest.mark.long
def test_lerobot_finds_the_rate_the_names_and_the_statistics(tmp_path: Path, fps: int) -> None:
    """Of a merged dataset: times, the action one frame later, and statistics as LeRobot's own code computes them."""
    rng = np.random.default_rng(fps)
    parts = []
    for part in range(2):
        with LeRobotWriter(
            tmp_path / f"part{part}", fps=fps, task="fold", robot="so100", names=NAMES, cameras=CAMERAS
        ) as writer:
            for length in (6, 9):
                made = episode(length)
                made["actions"] = rng.normal(size=(length, 2)).astype(np.float32)
                made["obs"]["state"] = rng.normal(size=(length + 1, 3)).astype(np.float32)
                made["obs"]["rgb"] = rng.integers(0, 256, made["obs"]["rgb"].shape, np.uint8)
                writer.add(made)
                parts.append(made)
    folders = [str(tmp_path / f"part{part}") for part in range(2)]
    assert main(["data", "merge", *folders, "--to", "lerobot", "--output", str(tmp_path / "set")]) == 0
    home = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf"), "HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    program = [LEROBOT, str(Path(__file__).with_name("lerobot_reads.py")), str(tmp_path / "set")]
    done = subprocess.run(program, env=home, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert (found["fps"], found["robot_type"], found["tasks"]) == (fps, "so100", ["fold"])
    assert found["names"] == NAMES["action"] and found["cameras"] == sorted(CAMERAS)
    times = np.concatenate([np.arange(len(made["actions"])) / fps for made in parts])
    np.testing.assert_allclose(found["times"], times, rtol=1e-6)
    later = [np.concatenate([made["actions"][1:], made["actions"][-1:]]) for made in parts]
    np.testing.assert_allclose(np.array(found["next"])[:, 1:], np.concatenate(later), rtol=1e-6)
    assert sum(row[0] for row in found["next"]) == len(parts), "one frame an episode has none after it"
    ours = json.loads((tmp_path / "set/meta/stats.json").read_text())
    for name, stats in found["stats"].items():
        for key in ("min", "max", "mean", "std", "count"):
            np.testing.assert_allclose(ours[name][key], stats[key], rtol=2e-4, atol=1e-6, err_msg=f"{name} {key}")
