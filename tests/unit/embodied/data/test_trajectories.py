"""Files of trajectories: what comes out of them, whoever wrote them, and what is said of those that are wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from rlhpc.embodied.data.trajectories import TrajectoryWriter, read_trajectories
from rlhpc.runtime.errors import ConfigError
from tests.extras import need_extra

RNG = np.random.default_rng(0)


def episode(T: int = 5, *, rgb: bool = False, discrete: bool = False, **fields: Any) -> dict[str, Any]:
    state = RNG.normal(size=(T + 1, 3)).astype(np.float32)
    obs: Any = state
    if rgb:
        obs = {"state": state, "rgb": RNG.integers(0, 255, (T + 1, 8, 8, 3)).astype(np.uint8)}
    ended = np.arange(T) == T - 1
    return {
        "obs": obs,
        "actions": RNG.integers(0, 4, (T, 1)) if discrete else RNG.normal(size=(T, 2)).astype(np.float32),
        "rewards": RNG.normal(size=T).astype(np.float32), "terminations": ended, "truncations": np.zeros(T, bool),
        "success": ended, "seed": 7, "env_states": {"actors": {"cube": RNG.normal(size=(T + 1, 13))}}, **fields,
    }  # fmt: skip


def write(path: Path, *episodes: dict[str, Any]) -> Path:
    with TrajectoryWriter(path, env_id="Task-v1", env_kwargs={"control_mode": "pd_ee_delta_pos"}) as writer:
        for each in episodes:
            writer.add(each)
    return path


def assert_same(one: Any, two: Any) -> None:
    if isinstance(one, dict):
        assert set(one) == set(two)
        for name in one:
            assert_same(one[name], two[name])
    else:
        np.testing.assert_array_equal(one, two)


@pytest.mark.parametrize("kind", [{}, {"rgb": True}, {"discrete": True}], ids=str)
def test_what_is_written_is_read(tmp_path: Path, kind: dict[str, Any]) -> None:
    written = [episode(T, **kind) for T in (5, 9)]
    read = list(read_trajectories(write(tmp_path / "demos.h5", *written)))
    for one, two in zip(written, read, strict=True):
        for name in one:
            assert_same(one[name], two[name])
        if kind.get("discrete"):
            assert two["actions"].dtype.kind == "i"


def test_a_folder_and_a_list_of_files(tmp_path: Path) -> None:
    write(tmp_path / "a.h5", episode(3))
    write(tmp_path / "b.h5", episode(4), episode(5))
    assert [len(t["actions"]) for t in read_trajectories(tmp_path)] == [3, 4, 5]
    assert [len(t["actions"]) for t in read_trajectories([tmp_path / "b.h5", tmp_path / "a.h5"], limit=2)] == [4, 5]


def test_only_those_that_succeeded(tmp_path: Path) -> None:
    path = write(tmp_path / "a.h5", episode(3, success=np.zeros(3, bool)), episode(4))
    assert [len(t["actions"]) for t in read_trajectories(path, only_success=True)] == [4]
    write(path, episode(3, success=np.zeros(3, bool)))
    with pytest.raises(ConfigError, match="none succeeded"):
        list(read_trajectories(path, only_success=True))


def test_an_interrupted_recording_leaves_the_older_file(tmp_path: Path) -> None:
    path = write(tmp_path / "a.h5", episode(3))
    with pytest.raises(RuntimeError), TrajectoryWriter(path, env_id="Task-v1") as writer:
        writer.add(episode(4))
        raise RuntimeError
    assert [len(t["actions"]) for t in read_trajectories(path)] == [3]
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a.h5", "a.json"]


def test_pictures_of_nested_recordings(tmp_path: Path) -> None:
    """What ManiSkill's `obs_mode=rgb` records becomes one state and one picture."""
    path = write(tmp_path / "a.h5", episode(2, obs=None))
    rgb = [RNG.integers(0, 255, (3, 4, 4, 3)).astype(np.uint8) for _ in range(2)]
    with h5py.File(path, "a") as file:
        group = file["traj_0"].create_group("obs", track_order=True)
        group["agent/qpos"], group["extra/tcp"] = np.ones((3, 9)), np.full((3,), 2.0)
        group["sensor_data/one/rgb"], group["sensor_data/two/rgb"] = rgb
        group["sensor_param/one/fov"] = np.zeros((3, 1))
    obs = next(read_trajectories(path))["obs"]
    assert obs["state"].shape == (3, 10) and obs["state"].dtype == np.float32 and obs["state"][0, 9] == 2
    np.testing.assert_array_equal(obs["rgb"], np.concatenate(rgb, -1))


def write_minari(folder: Path, *episodes: dict[str, Any]) -> Path:
    """As Minari's HDF5Storage does."""
    (folder / "data").mkdir(parents=True)
    with h5py.File(folder / "data" / "main_data.hdf5", "w", track_order=True) as file:
        for number, each in enumerate(episodes):
            group = file.create_group(f"episode_{number}")
            group.attrs.update({"id": number, "seed": each["seed"], "total_steps": len(each["actions"])})
            for name, value in each["obs"].items() if isinstance(each["obs"], dict) else [("", each["obs"])]:
                group[f"observations/{name}".rstrip("/")] = value
            group["infos/success"] = np.concatenate([[False], each["success"]])
            for name in ("actions", "rewards", "terminations", "truncations"):
                group[name] = each[name]
    return folder


@pytest.mark.parametrize("kind", [{}, {"rgb": True}, {"discrete": True}], ids=str)
def test_minari_s_episodes(tmp_path: Path, kind: dict[str, Any]) -> None:
    """More than ten, whose names do not sort as their numbers do."""
    written = [episode(T, **kind, env_states=None) for T in range(3, 15)]
    folder = write_minari(tmp_path / "task" / "expert-v0", *written)
    for path in (folder, folder / "data" / "main_data.hdf5"):
        for one, two in zip(written, read_trajectories(path, require=("obs", "actions", "rewards")), strict=True):
            for name in one:
                assert_same(one[name], two[name])


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("observations", np.array([b"JPEG"] * 6, "S4"), "jpeg_encoding=False"),
        ("rewards", np.zeros(4), "5 actions, but rewards"),
        ("terminations", None, "lacks terminations"),
        ("actions/arm", np.zeros((5, 2)), "actions by name"),
    ],
)
def test_minari_s_that_are_wrong(tmp_path: Path, name: str, value: Any, words: str) -> None:
    file = write_minari(tmp_path, episode(5)) / "data" / "main_data.hdf5"
    with h5py.File(file, "a") as opened:
        del opened["episode_0"][name.split("/")[0]]
        if value is not None:
            opened["episode_0"][name] = value
    with pytest.raises(ConfigError, match=words) as caught:
        list(read_trajectories(tmp_path))
    assert str(file) in str(caught.value)


def bad_json(path: Path) -> None:
    path.with_suffix(".json").write_text("{")


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:900])


def edit(change: Any) -> Any:
    def apply(path: Path) -> None:
        with h5py.File(path, "a") as file:
            change(file)

    return apply


def shorten(file: Any) -> None:
    rewards = file["traj_0/rewards"][:-1]
    del file["traj_0/rewards"]
    file["traj_0/rewards"] = rewards


def widen(file: Any) -> None:
    del file["traj_1/actions"]
    file["traj_1/actions"] = np.zeros((5, 3))


def remove(name: str) -> Any:
    return edit(lambda file: file.pop(name))


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (bad_json, r"a\.json is not what ManiSkill writes"),
        (cut, r"a\.h5 cannot be read as HDF5"),
        (edit(shorten), r"a\.h5, traj_0: 5 actions, but rewards \[4\]"),
        (
            edit(widen),
            r"traj_1 has observations \[3\] and actions \[3\].*traj_0 has observations \[3\] and actions \[2\]",
        ),
        (remove("traj_1"), r"a\.h5 has no group 'traj_1', which a\.json names"),
        (remove("traj_0/terminated"), r"traj_0 lacks terminated"),
        (remove("traj_0/obs"), r"traj_0 has no obs; replay it"),
        (Path.unlink, r"a\.h5'; there is no such file or folder"),
    ],
)
def test_bad_files(tmp_path: Path, damage: Any, said: str) -> None:
    path = write(tmp_path / "a.h5", episode(), episode())
    damage(path)
    with pytest.raises(ConfigError, match=said):
        list(read_trajectories(path))


def test_a_number_that_is_not_finite_is_named_at_any_depth(tmp_path: Path) -> None:
    bad = episode()
    bad["env_states"]["actors"]["cube"][2, 0] = np.nan
    path = write(tmp_path / "a.h5", episode(), bad)
    with pytest.raises(ConfigError, match=r"traj_1: env_states\.actors\.cube of step 2 is not finite"):
        list(read_trajectories(path, require=("actions", "env_states")))
    assert len(list(read_trajectories(path))) == 2  # nobody asked for it


# -- LeRobot ------------------------------------------------------------------------------------------------------------


def lerobot(folder: Path, version: str, episodes: list[dict[str, Any]], *, camera: str | None = None) -> Path:
    """A dataset as LeRobot lays it out: version 2 a file an episode, version 3 all in one."""
    need_extra("embodied")
    import pyarrow as pa
    import pyarrow.parquet as pq

    features = {
        name: {"dtype": "float32"}
        for name in ("observation.state", "action", "next.reward", "next.done", "episode_index", "frame_index")
    }
    if camera:
        features["observation.images.top"] = {"dtype": camera}
    tables = []
    for number, each in enumerate(episodes):
        T = len(each["actions"])
        columns = {
            "observation.state": each["obs"]["state"][:-1].tolist() if camera else each["obs"][:-1].tolist(),
            "action": each["actions"].tolist(), "next.reward": each["rewards"].tolist(),
            "next.done": each["terminations"].tolist(),
            "episode_index": [number] * T, "frame_index": list(range(T)),
        }  # fmt: skip
        if camera == "image":
            columns["observation.images.top"] = [{"bytes": png(frame)} for frame in each["obs"]["rgb"][:-1]]
        tables.append(pa.table(columns))
    (folder / "meta").mkdir(parents=True)
    (folder / "data" / "chunk-000").mkdir(parents=True)
    info = {"codebase_version": version, "fps": 10, "features": features, "chunks_size": 1000}
    if version.startswith("v2"):
        for number, table in enumerate(tables):
            pq.write_table(table, folder / f"data/chunk-000/episode_{number:06d}.parquet")
        info["video_path"] = "videos/chunk-{episode_chunk:03d}/{video_key}/episode_{episode_index:06d}.mp4"
        clips = [each["obs"]["rgb"][:-1] for each in episodes] if camera == "video" else []
        places = [folder / f"videos/chunk-000/observation.images.top/episode_{i:06d}.mp4" for i in range(len(clips))]
    else:
        pq.write_table(pa.concat_tables(tables), folder / "data/chunk-000/file-000.parquet")
        info["video_path"] = "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4"
        clips = [np.concatenate([each["obs"]["rgb"][:-1] for each in episodes])] if camera == "video" else []
        places = [folder / "videos/observation.images.top/chunk-000/file-000.mp4"]
        (folder / "meta/episodes/chunk-000").mkdir(parents=True)
        starts = np.cumsum([0, *(len(each["actions"]) for each in episodes[:-1])]) / 10
        key = "videos/observation.images.top/"
        rows = [
            {"episode_index": i, key + "chunk_index": 0, key + "file_index": 0, key + "from_timestamp": float(start)}
            for i, start in enumerate(starts)
        ]
        pq.write_table(pa.Table.from_pylist(rows), folder / "meta/episodes/chunk-000/file-000.parquet")
    (folder / "meta/info.json").write_text(json.dumps(info))
    for clip, place in zip(clips, places, strict=False):
        mp4(place, clip)
    return folder


def png(frame: np.ndarray) -> bytes:
    import io

    need_extra("embodied")
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(frame).save(buffer, "PNG")
    return buffer.getvalue()


def mp4(path: Path, frames: np.ndarray) -> None:
    need_extra("embodied")
    import av

    path.parent.mkdir(parents=True, exist_ok=True)
    with av.open(str(path), "w") as video:
        stream = video.add_stream("libx264rgb", rate=10, options={"qp": "0"})  # lossless
        stream.width, stream.height, stream.pix_fmt = frames.shape[2], frames.shape[1], "rgb24"
        for frame in frames:
            video.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        video.mux(stream.encode())


@pytest.mark.parametrize("version", ["v2.1", "v3.0"])
@pytest.mark.parametrize("camera", [None, "image", "video"])
def test_lerobot_datasets(tmp_path: Path, version: str, camera: str | None) -> None:
    episodes = [episode(4, rgb=bool(camera)), episode(6, rgb=bool(camera))]
    for each in episodes:
        if camera:
            each["obs"]["rgb"] = np.repeat(each["obs"]["rgb"], 4, 1).repeat(4, 2)
    read = list(read_trajectories(lerobot(tmp_path / "set", version, episodes, camera=camera)))
    for one, two in zip(episodes, read, strict=True):
        for name in ("actions", "rewards", "terminations", "truncations"):
            np.testing.assert_array_equal(one[name], two[name])
        for name in ("state", "rgb") if camera else ("",):
            given, found = (one["obs"][name], two["obs"][name]) if name else (one["obs"], two["obs"])
            np.testing.assert_array_equal(given[:-1], found[:-1])
            np.testing.assert_array_equal(found[-1], found[-2])
        assert two["success"] is None


def test_a_lerobot_dataset_that_is_none(tmp_path: Path) -> None:
    folder = lerobot(tmp_path / "set", "v2.1", [episode(4)])
    info = json.loads((folder / "meta/info.json").read_text())
    (folder / "meta/info.json").write_text(json.dumps({**info, "codebase_version": "v1.6"}))
    with pytest.raises(ConfigError, match=r"codebase_version is 'v1\.6'; supported are v2 and v3"):
        list(read_trajectories(folder))
    (folder / "meta/info.json").write_text(json.dumps(info))
    (folder / "data/chunk-000/episode_000000.parquet").write_bytes(b"PAR1")
    with pytest.raises(ConfigError, match=r"episode_000000\.parquet cannot be read as Parquet"):
        list(read_trajectories(folder))
