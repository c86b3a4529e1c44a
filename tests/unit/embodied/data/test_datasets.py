"""`rlhpc data`: what is written in any format is what was there, as we and as its own library read it."""

from __future__ import annotations

import json
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from omegaconf import OmegaConf

from rlhpc.cli import main
from rlhpc.embodied.config import EvalEnvConfig
from rlhpc.embodied.data.datasets import WriteOptions
from rlhpc.embodied.data.lerobot_writer import LeRobotWriter
from rlhpc.embodied.data.trajectories import TrajectoryWriter, read_trajectories
from rlhpc.embodied.envs import make_env
from rlhpc.embodied.envs.observations import encode_text
from rlhpc.embodied.evaluation.recorder import record
from tests.extras import find_python, need_extra
from tests.unit.embodied.data.dataset_files import data
from tests.unit.embodied.data.lerobot_files import Clocked, Shown, info
from tests.unit.embodied.data.lerobot_files import episode as lerobot_episode
from tests.unit.embodied.data.test_trajectories import assert_same, episode, write

ROOT = Path(__file__).resolve().parents[4]
#: LeRobot has a Python of its own.
LEROBOT = find_python("lerobot")
FIELDS = ("actions", "rewards", "terminations", "truncations", "success")


def episodes(**kind: Any) -> list[dict[str, Any]]:
    """One that succeeded and one that was cut off."""
    one, two = episode(5, **kind), episode(9, **kind)
    two |= {"terminations": np.zeros(9, bool), "truncations": np.arange(9) == 8}
    two["success"] = None if one["success"] is None else np.zeros(9, bool)
    return [one, two]


@pytest.mark.parametrize("kind", [{}, {"rgb": True}, {"discrete": True, "success": None}], ids=str)
@pytest.mark.parametrize("to", ["hdf5", "lerobot", "minari"])
def test_converted_and_back(tmp_path: Path, to: str, kind: dict[str, Any]) -> None:
    if to == "lerobot":
        need_extra("embodied")
    written = episodes(**kind)
    source, there, back = (
        write(tmp_path / "a.h5", *written),
        tmp_path / f"there{'.h5' * (to == 'hdf5')}",
        tmp_path / "b.h5",
    )
    data("convert", source, "--to", to, "--output", there)
    data("convert", there, "--output", back)
    for one, two in zip(written, read_trajectories(back), strict=True):
        for name in FIELDS:
            assert_same(one[name], two[name])
        if to == "lerobot":  # which has no observation after the last action
            kept = one["obs"] if isinstance(one["obs"], dict) else {"": one["obs"]}
            shown = two["obs"] if isinstance(two["obs"], dict) else {"": two["obs"]}
            assert_same(
                {name: value[:-1] for name, value in kept.items()}, {name: value[:-1] for name, value in shown.items()}
            )
        else:
            assert_same(one["obs"], two["obs"])


def pictures(T: int) -> np.ndarray:
    """A bright square that moves over a dark floor: what a video keeps."""
    found = np.full((T + 1, 32, 48, 3), 40, np.uint8)
    for t in range(T + 1):
        found[t, 8:24, 2 * t : 2 * t + 16] = (200, 120, 60)
    return found


@pytest.mark.long
def test_lerobot_s_layout_statistics_and_videos(tmp_path: Path) -> None:
    need_extra("embodied")
    from pyarrow import parquet

    written = [episode(T, obs={"state": np.random.default_rng(T).normal(size=(T + 1, 3)).astype(np.float32),
                               "rgb": pictures(T)}) for T in (5, 9)]  # fmt: skip
    folder = tmp_path / "set"
    data(
        "convert",
        write(tmp_path / "a.h5", *written),
        "--to",
        "lerobot",
        "--videos",
        "--fps",
        10,
        "--task",
        "push",
        "--output",
        folder,
    )
    info, statistics = (json.loads((folder / "meta" / name).read_text()) for name in ("info.json", "stats.json"))
    assert (info["codebase_version"], info["total_episodes"], info["total_frames"], info["fps"]) == ("v3.0", 2, 14, 10)
    assert info["features"]["observation.images.rgb"]["dtype"] == "video" and info["features"]["action"]["shape"] == [2]
    state, seen = (np.concatenate([each["obs"][name][:-1] for each in written]) for name in ("state", "rgb"))
    found = {name: np.array(value) for name, value in statistics["observation.state"].items()}
    np.testing.assert_allclose(found["mean"], state.mean(0, np.float64))
    np.testing.assert_allclose(found["std"], state.std(0, dtype=np.float64))
    np.testing.assert_allclose(found["q90"], np.quantile(state.astype(np.float64), 0.9, axis=0))
    shown = {name: np.array(value) for name, value in statistics["observation.images.rgb"].items()}
    assert shown["mean"].shape == (3, 1, 1) and shown["count"].tolist() == [14]
    np.testing.assert_allclose(shown["mean"].ravel(), seen.mean((0, 1, 2)) / 255)
    np.testing.assert_allclose(shown["std"].ravel(), (seen / 255).std((0, 1, 2)))
    np.testing.assert_allclose(shown["max"].ravel() * 255, seen.max((0, 1, 2)))
    np.testing.assert_allclose(shown["q50"].ravel() * 255, np.quantile(seen, 0.5, (0, 1, 2), method="inverted_cdf"))
    rows = parquet.read_table(folder / "meta" / "episodes" / "chunk-000" / "file-000.parquet").to_pylist()
    assert [(row["dataset_from_index"], row["dataset_to_index"], row["length"]) for row in rows] == [
        (0, 5, 5),
        (5, 14, 9),
    ]
    assert [row["videos/observation.images.rgb/from_timestamp"] for row in rows] == [0.0, 0.5]
    assert rows[1]["stats/action/max"] == pytest.approx(written[1]["actions"].max(0))
    assert parquet.read_metadata(folder / "data" / "chunk-000" / "file-000.parquet").num_row_groups == 2
    for one, two in zip(written, read_trajectories(folder), strict=True):
        apart = np.abs(one["obs"]["rgb"][:-1].astype(int) - two["obs"]["rgb"][:-1])
        assert apart.mean() < 4, "another frame is further off"
    data("convert", tmp_path / "a.h5", "--to", "lerobot", "--output", tmp_path / "images")
    instructed(tmp_path / "told")
    if LEROBOT:
        found, told = read_by_lerobot(tmp_path / "images", tmp_path / "told")
        assert found == [
            [2, 14, "Task-v1", *np.concatenate([each["actions"] for each in written])[7].tolist()],
            [round(value / 255, 4) for value in seen[7, 9, 20].tolist()], sorted(info["features"]),
        ]  # fmt: skip
        assert told[0][:3] == [2, 14, "close the drawer"]


def instructed(folder: Path) -> list[dict[str, Any]]:
    """Writes two episodes with an instruction, the second with another one in the end; somebody takes over in the first."""
    lift, close = (encode_text(text, 128) for text in ("lift the cube", "close the drawer"))
    made = [episode(T, obs={"rgb": pictures(T), "instruction": words, "state": np.zeros((T + 1, 2), np.float32)})
            for T, words in ((6, np.repeat(lift[None], 7, 0)), (8, np.stack([close] * 5 + [lift] * 4)))]  # fmt: skip
    with LeRobotWriter(folder, fps=10, task="unused", robot="arm") as writer:
        writer.add({**made[0], "source": "a", "taken": np.arange(6) > 3})
        writer.add({**made[1], "source": "b", "taken": np.zeros(8, bool)})
    return made


def test_an_instruction_is_lerobot_s_task_of_each_frame_and_who_acted_is_kept(tmp_path: Path) -> None:
    need_extra("embodied")
    from pyarrow import parquet

    made = instructed(tmp_path / "set")
    table = parquet.read_table(tmp_path / "set/data/chunk-000/file-000.parquet")
    assert table["task_index"].to_pylist() == [0] * 6 + [1] * 5 + [0] * 3
    assert table["complementary_info.is_intervention"].to_pylist() == [False] * 4 + [True] * 2 + [False] * 8
    features = json.loads((tmp_path / "set/meta/info.json").read_text())["features"]
    assert "observation.instruction" not in features and features["task_index"]["dtype"] == "int64"
    for given, found in zip(made, read_trajectories(tmp_path / "set"), strict=True):
        assert_same(
            {name: value[:-1] for name, value in given["obs"].items()},
            {name: value[:-1] for name, value in found["obs"].items()},
        )


def test_who_acted_is_kept_by_merging_with_demonstrations_without_interventions(tmp_path: Path) -> None:
    need_extra("embodied")
    from pyarrow import parquet

    instructed(tmp_path / "led")
    lift = np.repeat(encode_text("lift the cube", 128)[None], 6, 0)
    obs = {"rgb": pictures(5), "instruction": lift, "state": np.zeros((6, 2), np.float32)}
    with LeRobotWriter(tmp_path / "demos", fps=10, task="unused", robot="arm") as writer:
        writer.add({**episode(5, obs=obs), "source": "a"})
    data("merge", tmp_path / "demos", tmp_path / "led", "--to", "lerobot", "--output", tmp_path / "all")
    table = parquet.read_table(tmp_path / "all/data/chunk-000/file-000.parquet")
    intervened = table["complementary_info.is_intervention"].to_pylist()
    assert intervened == [False] * 5 + [False] * 4 + [True] * 2 + [False] * 8


def read_by_lerobot(*folders: Path) -> Any:
    program = (
        "import json, sys, torch\n"
        "library = torch.library.Library('torchvision', 'DEF')\n"  # an operator that its build of torchvision may lack
        "[library.define(f'{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor') for name in ('nms', 'qnms')]\n"
        "from lerobot.datasets.lerobot_dataset import LeRobotDataset\n"
        "all_found = []\n"
        "for root in sys.argv[1:]:\n"
        "    found = LeRobotDataset('local/set', root=root)\n"
        "    row = found[7]\n"
        "    facts = [found.num_episodes, found.num_frames, row['task'], *row['action'].tolist()]\n"
        "    seen = [round(value, 4) for value in row['observation.images.rgb'][:, 9, 20].tolist()]\n"
        "    all_found.append([facts, seen, sorted(found.features)])\n"
        "print(json.dumps(all_found))\n"
    )
    home = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(folders[0].parent / "hf"), "HOME": str(folders[0].parent)}
    command = [LEROBOT, "-c", program, *map(str, folders)]
    done = subprocess.run(command, env=home, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_split_merged_and_described(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written = [episode(T) for T in (3, 4, 5)]
    source = write(tmp_path / "a.h5", *written)
    data("split", source, "--parts", 2, "--output", tmp_path / "parts")
    lengths = [[len(t["actions"]) for t in read_trajectories(tmp_path / "parts" / f"{i}.h5")] for i in range(2)]
    assert lengths == [[3, 5], [4]]
    data("merge", tmp_path / "parts" / "1.h5", tmp_path / "parts" / "0.h5", "--output", tmp_path / "b.h5")
    capsys.readouterr()
    data("info", tmp_path / "b.h5")
    found = json.loads(capsys.readouterr().out)
    assert (found["env_id"], found["episodes"], found["steps"], found["length"]) == ("Task-v1", 3, 12, [3, 5])
    assert found["success_once"] == 1 and found["truncated"] == 0
    assert found["return"]["mean"] == pytest.approx(np.mean([each["rewards"].sum() for each in written]))
    assert json.loads((tmp_path / "b.json").read_text())["env_info"]["env_kwargs"] == {
        "control_mode": "pd_ee_delta_pos"
    }


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


def test_the_page_shows_episodes_and_loads_nothing(tmp_path: Path) -> None:
    data("show", write(tmp_path / "<b>.h5", *episodes(rgb=True)), "--episodes", 1, "--output", tmp_path / "a.html")
    text = (tmp_path / "a.html").read_text()
    tags = Tags()
    tags.feed(text)
    names = [tag for tag, _ in tags.found]
    assert names.count("section") == 1 and "5 steps" in text and "success" in text and "<b>" not in text
    assert names.count("polyline") == 1 + 2 + 3  # reward, actions, state
    sources = [attributes["src"] or "" for tag, attributes in tags.found if tag == "img"]
    assert len(sources) == 6 and all(source.startswith("data:image/png;base64,") for source in sources)
    assert not any("href" in attributes for _, attributes in tags.found) and "script" not in names


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("merge", "a.h5", "--output", "a.h5"), "is there already"),
        (("convert", "a.h5", "--to", "lerobot", "--output", "full"), "is there already"),
        (("convert", "a.h5", "--to", "minari", "--output", "full"), "is there already"),
        (("merge", "a.h5", "other.h5", "--output", "b.h5"), "one data set has one task"),
        (("split", "a.h5", "--parts", "9", "--output", "b"), "--parts is 9, but there are 2 episodes"),
        (("convert", "a.h5", "--output", "b.txt"), "does not end in .h5"),
        (("convert", "bare.h5", "--to", "lerobot", "--output", "b"), "has no obs"),
        (("convert", "bare.h5", "--to", "minari", "--output", "b"), "has no obs"),
        (("show", "a.h5"), "needs --output"),
        (("info", "nowhere.h5"), "rlhpc data PATH is 'nowhere.h5'; there is no such file"),
    ],
)
def test_bad_input_is_one_message_and_leaves_nothing(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: tuple[str, ...],
    said: str,
) -> None:
    if "lerobot" in words:
        need_extra("embodied")
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "a.h5", *episodes())
    write(tmp_path / "bare.h5", episode(3, obs=None))
    write(tmp_path / "other.h5", episode(3))
    described = json.loads((tmp_path / "other.json").read_text())
    described["env_info"]["env_id"] = "Other-v1"
    (tmp_path / "other.json").write_text(json.dumps(described))
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").touch()
    before = sorted(tmp_path.rglob("*"))
    assert main(["data", *words]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("rlhpc: error:") == 1 and "Traceback" not in error
    assert sorted(tmp_path.rglob("*")) == before


need_extra("embodied")


def test_a_rate_that_nothing_says_is_announced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with TrajectoryWriter(tmp_path / "a.h5", env_id="Task-v1") as writer:
        writer.add(lerobot_episode(4))
    words = ["data", "convert", str(tmp_path / "a.h5"), "--to", "lerobot", "--output"]
    assert main([*words, str(tmp_path / "out")]) == 0
    assert "nothing says the frame rate; 20 frames a second" in "".join(capsys.readouterr())
    assert info(tmp_path / "out")["fps"] == 20 and info(tmp_path / "out")["robot_type"] == "Task-v1"


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
        section.env_id = "tests.unit.embodied.data.test_datasets:test/Clocked-v0"
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
