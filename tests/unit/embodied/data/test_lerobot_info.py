"""Frame rate, robot, names and task of datasets: what one says reaches all that is made of it, and no number is made up."""

from __future__ import annotations

import itertools
import json
import subprocess
import tracemalloc
from fractions import Fraction
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from omegaconf import OmegaConf

from rlhpc.cli import main
from rlhpc.embodied.config import EvalEnvConfig
from rlhpc.embodied.data import video
from rlhpc.embodied.data.datasets import WriteOptions
from rlhpc.embodied.data.lerobot_reader import read_lerobot
from rlhpc.embodied.data.lerobot_writer import LeRobotWriter
from rlhpc.embodied.data.trajectories import TrajectoryWriter
from rlhpc.embodied.data.video import VideoReader, write_video
from rlhpc.embodied.envs import make_env
from rlhpc.embodied.evaluation.recorder import record
from rlhpc.runtime.errors import ConfigError
from tests.extras import find_python, need_extra, needs_python

need_extra("embodied")

LEROBOT = find_python("lerobot")
NAMES = {"action": ["shoulder", "gripper"], "observation.state": {"motors": ["a", "b", "c"]}}
CAMERAS = ("observation.images.wrist", "observation.images.front")


def episode(length: int, seed: int = 0, size: int = 16) -> dict[str, Any]:
    """With two cameras whose pictures tell camera, episode and time."""
    pictures = np.zeros((length + 1, size, size, 6), np.uint8)
    for t in range(length + 1):
        pictures[t, ..., :3], pictures[t, ..., 3:] = 40 + 10 * (seed % 8) + t, 180 - 10 * (seed % 8) - t
    return {
        "source": "made", "obs": {"state": np.full((length + 1, 3), seed, np.float32), "rgb": pictures},
        "actions": np.full((length, 2), seed, np.float32), "rewards": np.zeros(length, np.float32),
        "terminations": np.zeros(length, bool), "truncations": np.arange(length) == length - 1, "success": None,
        "env_states": None, "seed": seed,
    }  # fmt: skip


def dataset(folder: Path, episodes: int = 2, length: int = 6, **changes: Any) -> Path:
    facts: dict[str, Any] = {"fps": 50, "task": "fold the cloth", "robot": "so100", "names": NAMES, "cameras": CAMERAS}
    with LeRobotWriter(folder, **(facts | changes)) as writer:
        for seed in range(episodes):
            writer.add(episode(length, seed))
    return folder


def info(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "meta/info.json").read_text())
    return found


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


def test_a_rate_that_nothing_says_is_announced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with TrajectoryWriter(tmp_path / "a.h5", env_id="Task-v1") as writer:
        writer.add(episode(4))
    words = ["data", "convert", str(tmp_path / "a.h5"), "--to", "lerobot", "--output"]
    assert main([*words, str(tmp_path / "out")]) == 0
    assert "nothing says the frame rate; 20 frames a second" in "".join(capsys.readouterr())
    assert info(tmp_path / "out")["fps"] == 20 and info(tmp_path / "out")["robot_type"] == "Task-v1"


class Clocked(gymnasium.Env[Any, Any]):
    """A simulator with a time step, and another rate at which it is shown."""

    metadata = {"render_modes": [], "render_fps": 30}  # noqa: RUF012
    observation_space = spaces.Box(-1, 1, (2,), np.float32)
    action_space = spaces.Box(-1, 1, (2,), np.float32)
    dt = 0.01

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        return np.zeros(2, np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return np.zeros(2, np.float32), 0.0, False, False, {}


class Shown(Clocked):
    """One that says only at which rate it is shown."""

    dt = None  # type: ignore[assignment]


gymnasium.register("test/Clocked-v0", entry_point=Clocked, max_episode_steps=4)
gymnasium.register("test/Shown-v0", entry_point=Shown, max_episode_steps=4)


def played(env_id: str, **changes: Any) -> Any:
    values = {"env_type": "gymnasium", "env_id": env_id, "num_envs": 1, "simulators": 0, "wrappers": [], "kwargs": {},
              "max_episode_steps": None, "ignore_terminations": False, "simulator_python": None}  # fmt: skip
    return OmegaConf.structured(EvalEnvConfig(**(values | changes)))


@pytest.mark.parametrize(
    ("env_id", "changes", "hz"),
    [
        ("test/Clocked-v0", {}, 100),
        ("test/Clocked-v0", {"wrappers": [{"frame_skip": {"skip": 4}}]}, 25),
        ("test/Clocked-v0", {"simulators": 1}, 100),
        ("test/Shown-v0", {}, 30),
        ("Pendulum-v1", {}, 20),
        ("CartPole-v1", {}, 50),
        ("HalfCheetah-v5", {}, 20),
    ],
)
def test_the_control_rate_of_an_environment(env_id: str, changes: dict[str, Any], hz: float) -> None:
    section = played(env_id, **changes)
    if changes.get("simulators"):  # another process has not registered it
        section.env_id = "tests.unit.embodied.data.test_lerobot_info:test/Clocked-v0"
    env = make_env(section, 1)
    try:
        assert env.control_hz == pytest.approx(hz)
    finally:
        env.close()


def test_recordings_have_the_rate_of_the_environment(tmp_path: Path) -> None:
    class Still:
        def predict_action_batch(self, obs: Any, mode: str) -> Any:
            import torch

            return torch.zeros(1, 1, 2), {}

    def recorded(name: str, to: str, fps: int | None = None) -> Path:
        ending = ".h5" if to == "hdf5" else ""
        record(Still(), played("test/Clocked-v0"), tmp_path / f"{name}{ending}", episodes=1, seed=0,
               options=WriteOptions(to, fps))  # fmt: skip
        return tmp_path / f"{name}{ending}"

    assert info(recorded("a", "lerobot"))["fps"] == 100 and info(recorded("b", "lerobot", 10))["fps"] == 10
    words = ["data", "convert", str(recorded("c", "hdf5")), "--to", "lerobot", "--output", str(tmp_path / "d")]
    assert main(words) == 0 and info(tmp_path / "d")["fps"] == 100


# -- videos -------------------------------------------------------------------------------------------------------


def test_memory_of_reading_videos_does_not_grow_with_the_file(tmp_path: Path) -> None:
    peaks = {}
    for episodes in (3, 30):
        folder = dataset(tmp_path / str(episodes), 1, videos=True)  # imports
        list(read_lerobot(folder))
        long = tmp_path / f"{episodes}_episodes"
        with LeRobotWriter(long, fps=10, task="t", videos=True) as writer:
            for seed in range(episodes):
                writer.add(episode(8, seed, size=96))
        assert len(list(long.rglob("*.mp4"))) == 2, "one file a camera"
        tracemalloc.start()
        for _ in read_lerobot(long):
            pass
        peaks[episodes] = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    size = episode(8, size=96)["obs"]["rgb"].nbytes
    assert peaks[30] < 8 * size and peaks[30] - peaks[3] < 2 * size, "the file of 30 holds 27 episodes more"


def test_each_frame_of_two_cameras_is_decoded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = dataset(tmp_path / "set", 7, length=5, videos=True)
    readers: list[VideoReader] = []
    begin = VideoReader.__init__
    monkeypatch.setattr(VideoReader, "__init__", lambda self, *args: (readers.append(self), begin(self, *args))[1])
    assert len(list(read_lerobot(folder))) == 7
    assert sorted(reader.decoded for reader in readers) == [35, 35]


def test_pictures_in_any_order_of_episodes(tmp_path: Path) -> None:
    frames = [np.full((16, 16, 3), 10 * t, np.uint8) for t in range(20)]
    write_video(tmp_path / "a.mp4", frames, 10)
    reader = VideoReader(tmp_path / "a.mp4")
    whole = reader.read(0, 20)
    for start, count in itertools.product((12, 3, 3, 0, 15), (1, 5)):
        np.testing.assert_array_equal(reader.read(start, count), whole[start : start + count])
    assert len(reader.read(18, 5)) == 2 and len(reader.read(40, 5)) == 0
    reader.close()
    (tmp_path / "b.mp4").write_bytes(b"no video")
    with pytest.raises(ConfigError, match=r"b\.mp4 cannot be read as a video"):
        VideoReader(tmp_path / "b.mp4")


def test_a_small_video_of_many_large_pictures_is_refused_before_memory_is_taken(tmp_path: Path) -> None:
    write_video(tmp_path / "a.mp4", [np.zeros((1024, 1024, 3), np.uint8)] * 2, 10)
    reader = VideoReader(tmp_path / "a.mp4")
    with pytest.raises(ConfigError, match=r"a\.mp4 has \d+ bytes, and pictures of 6\.3 GB are asked of it"):
        reader.read(0, 2000)
    assert len(reader.read(0, 2000 // 1000)) == 2
    reader.close()


@pytest.mark.parametrize("padding", [b"", bytes(16), bytes(4 << 20)])
def test_what_a_file_holds_beside_its_pictures_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, padding: bytes
) -> None:
    """A small video that is made to look large asks for no more memory than the small one."""
    write_video(tmp_path / "a.mp4", [np.zeros((512, 512, 3), np.uint8)] * 60, 10)
    with (tmp_path / "a.mp4").open("ab") as file:
        file.write(len(padding).to_bytes(4, "big") + b"free" + padding)
    monkeypatch.setattr(video, "_LARGE", 8 << 20)
    reader = VideoReader(tmp_path / "a.mp4")
    tracemalloc.start()
    with pytest.raises(ConfigError, match=r"a\.mp4 has \d+ bytes, and pictures of"):
        reader.read(0, 60)
    tracemalloc.stop()
    assert reader.decoded < 30
    reader.close()


@pytest.mark.parametrize(
    ("shape", "names"),
    [([64, 64, 3], None), ([3, 64, 64], None), ([64, 3, 64], ["height", "channels", "width"]), ([16, 8, 3], None)],
)
def test_pictures_of_another_size_than_is_said(tmp_path: Path, shape: list[int], names: list[str] | None) -> None:
    """They are refused before one is decoded."""
    folder = dataset(tmp_path / "set", 1, length=5, videos=True)
    info = json.loads((folder / "meta" / "info.json").read_text())
    info["features"][CAMERAS[0]].update(shape=shape, names=names)
    (folder / "meta" / "info.json").write_text(json.dumps(info))
    with pytest.raises(ConfigError, match=rf"has pictures of 16x16, and info\.json says {64 if 64 in shape else 16}x"):
        list(read_lerobot(folder))


def test_a_video_whose_pictures_grow(tmp_path: Path) -> None:
    """What its header says does not bind its frames."""
    av = video.pyav()
    parts = b""
    for size in (32, 1024):
        with av.open(str(tmp_path / "part.h264"), "w", format="h264") as part:
            stream = part.add_stream("libx264", rate=10)
            stream.width = stream.height = size
            stream.pix_fmt = "yuv420p"
            for _ in range(4):
                part.mux(stream.encode(av.VideoFrame.from_ndarray(np.zeros((size, size, 3), np.uint8), format="rgb24")))
            part.mux(stream.encode())
        parts += (tmp_path / "part.h264").read_bytes()
    (tmp_path / "both.h264").write_bytes(parts)
    with av.open(str(tmp_path / "both.h264"), format="h264") as source, av.open(str(tmp_path / "a.mkv"), "w") as target:
        stream = target.add_stream_from_template(source.streams.video[0])
        for number, packet in enumerate(source.demux(video=0)):
            if packet.size:
                packet.stream, packet.pts, packet.dts, packet.time_base = (
                    stream,
                    100 * number,
                    100 * number,
                    Fraction(1, 1000),
                )
                target.mux(packet)
    for size in ((32, 32), None):
        reader = VideoReader(tmp_path / "a.mkv", size)
        with pytest.raises(ConfigError, match=r"a\.mkv"):
            reader.read(0, 8)
        reader.close()


@pytest.mark.parametrize("text", ["ffconcat version 1.0\nfile a.mp4\n", "#EXTM3U\n#EXTINF:1,\na.mp4\n#EXT-X-ENDLIST\n"])
def test_a_list_of_other_files_is_no_video(tmp_path: Path, text: str) -> None:
    write_video(tmp_path / "a.mp4", [np.zeros((16, 16, 3), np.uint8)] * 2, 10)
    (tmp_path / "list.mp4").write_text(text)
    with pytest.raises(ConfigError, match=r"list\.mp4 cannot be read as a video"):
        VideoReader(tmp_path / "list.mp4")


@pytest.mark.parametrize("name", ["*.mp4", "*.parquet", "info.json"])
def test_links_out_of_a_dataset(tmp_path: Path, name: str) -> None:
    """They are refused as those of HDF5 are, but for those of the hub's cache."""
    folder = dataset(tmp_path / "hub" / "snapshots" / "set", 2, length=5, videos=True)
    for way, leads_out in (("hub/blobs", False), ("elsewhere", True)):
        target = tmp_path / way / "file"
        target.parent.mkdir(parents=True)
        file = sorted(folder.rglob(name))[0]
        file.resolve().rename(target)
        file.unlink(missing_ok=True)
        file.symlink_to(target)
        if not leads_out:
            assert len(list(read_lerobot(folder))) == 2
            continue
        with pytest.raises(ConfigError, match=r"is a link to .*; a dataset holds all its files itself"):
            list(read_lerobot(folder))


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
