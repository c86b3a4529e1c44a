"""LeRobot's policies, tiny and random, by the commands a user types; `make setup-lerobot` makes the Python that has it."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file

from rlhpc import cli
from rlhpc.embodied.data.frames import FramePool
from rlhpc.embodied.data.lerobot_reader import LeRobotEpisodes
from rlhpc.embodied.data.trajectories import read_trajectories
from tests.extras import find_python, needs_python

pytestmark = pytest.mark.long

PYTHON = find_python("lerobot")
HERE = Path(__file__).parent
CONFIG: dict[str, Any] = {
    "cluster": {
        "node_groups": [{"label": "lerobot", "node_ranks": 0, "python_interpreter": PYTHON}],
        "component_placement": {"actor,rollout": {"node_group": "lerobot", "placement": 0}, "env": 0},
    },
    "runner": {"name": "run", "seed": 1, "max_steps": 2, "logger": {"logger_backends": ["jsonl"]}},
    "algorithm": {"rollout_steps": 4, "update_epochs": 1, "gamma": 0.9},
    "env": {
        "train": {"env_id": "square:Square-v0", "num_envs": 4, "wrappers": ["square:Silent"]},
        "eval": {"num_envs": 2, "num_episodes": 2},
    },
    "actor": {
        "global_batch_size": 16, "optim": {"lr": 3.0e-4},
        "model": {"model_type": "lerobot", "num_action_chunks": 2, "log_std_init": -1.0},
    },
}  # fmt: skip
#: Families that read an instruction.
WORDS = ("smolvla", "pi0", "pi05")
CLONING = {
    **CONFIG,
    "cluster": {**CONFIG["cluster"], "component_placement": {"actor": {"node_group": "lerobot", "placement": 0}}},
    "runner": {**CONFIG["runner"], "task_type": "bc"}, "demos": {"path": "data"},
    "env": {**CONFIG["env"], "train": {"env_id": "square:Square-v0", "wrappers": ["square:Silent"]}},
    "algorithm": {"update_epochs": 4, "gamma": 0.9},
}  # fmt: skip


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A folder with LeRobot's dataset, its policies, and configurations, to be in."""
    folder = tmp_path_factory.mktemp("lerobot")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        root = HERE.parents[2]
        patch.setenv(
            "PYTHONPATH",
            os.pathsep.join([str(HERE), str(HERE / "tiny_pi"), str(root), os.environ.get("PYTHONPATH", "")]),
        )
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setenv("RLHPC_LEROBOT_PYTHON", PYTHON)  # which commands read
        for path in (HERE, HERE / "tiny_pi"):
            patch.syspath_prepend(str(path))
        Path("ppo.yaml").write_text(yaml.safe_dump(CONFIG))
        Path("bc.yaml").write_text(yaml.safe_dump(CLONING))
        program("make", ".")
        yield folder


def program(*words: str) -> str:
    """What the program said."""
    command = [PYTHON, str(HERE / "lerobot_programs.py"), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def train(name: str, config: str, *overrides: str) -> list[dict[str, Any]]:
    assert cli.main(["train", config, f"runner.name={name}", *overrides]) == 0
    return [json.loads(line) for line in Path(f"runs/{name}/metrics.jsonl").read_text().splitlines()]


@needs_python("lerobot")
@pytest.mark.parametrize("family", ["act", "diffusion", "smolvla", "pi0", "pi05"])
@pytest.mark.long
def test_from_a_folder_to_a_folder(here: Path, family: str) -> None:
    """Cloned, reinforced, resumed bit for bit, evaluated, released, and loaded by LeRobot: nothing of it is imported here."""
    model, cloning = [f"actor.model.model_path={family}"], "statistics: data"
    if family in WORDS:  # whose words are the environment's; LeRobot's dataset is shown without
        noise_steps = "one" if family == "pi0" else "all"
        model += [f"actor.model.kwargs={{vlm: vlm, noise_steps: {noise_steps}}}", "env.train.wrappers=[]"]
        cloning += ", vlm: vlm, task: go to the square"
    cloned = [f"actor.model.model_path={family}", f"actor.model.kwargs={{{cloning}}}"]
    if family == "diffusion":  # which sees two observations; LeRobot's dataset has one a step
        stacked = "env.train.wrappers=['square:Silent', {frame_stack: {stack_size: 2}}]"
        model, cloned = [*model, stacked], [*cloned, stacked]
    if family in WORDS:  # small, and its loss is noisy
        cloned += ["actor.optim.lr=3e-3", "algorithm.update_epochs=20"]
    rows = train(f"{family}_bc", "bc.yaml", *cloned, "runner.max_steps=3")
    assert rows[-1]["train/loss"] < rows[0]["train/loss"]
    start = [*model, f"runner.init_from=runs/{family}_bc", "runner.save_interval=1"]
    rows = train(family, "ppo.yaml", *start)
    # The trainer finds the log-probs that the rollout acted with.
    assert rows[0]["train/approx_kl"] == pytest.approx(0, abs=1e-6) and rows[0]["train/grad_norm"] > 0
    assert rows[0]["train/value_loss"] > 0
    assert (
        4 * 4 < rows[0]["rollout/env_steps"] <= 4 * 4 * 2
    )  # what is left of a chunk when its episode ends is not executed
    train(f"{family}_again", "ppo.yaml", *start, f"runner.resume_dir=runs/{family}/checkpoints/global_step_1")
    last = [f"runs/{name}/checkpoints/global_step_2" for name in (family, f"{family}_again")]
    weights = [load_file(f"{folder}/model.safetensors") for folder in last]
    assert all(torch.equal(value, weights[1][key]) for key, value in weights[0].items())
    if family == "act":  # the commands are the same for all; `hold` releases the others itself
        assert cli.main(["eval", "--checkpoint", last[0], "--trust-checkpoint-code"]) == 0
        assert cli.main(["convert", "--checkpoint", last[0], "--released", "--output", f"{family}_out"]) == 0
    if family == "smolvla":  # as on a robot that does not wait: one of four actions is played while the next are made
        late = ["--suite", "late", "env.eval.real_time_chunking.inference_delay=1"]
        assert cli.main(["eval", "--checkpoint", last[0], "--trust-checkpoint-code", *late]) == 0
    assert program("hold", f"{family}_out", last[0]).endswith("equal\n")


def agreed(found: dict[str, Any], episodes: list[dict[str, Any]], task: str) -> list[bool]:
    """Holds what LeRobot finds in a dataset against its episodes; in which frames somebody had taken over, if it says so."""
    import square

    frames, count = {key: np.array(column) for key, column in found["frames"].items()}, len(found["tasks"])
    obs = {key: np.concatenate([each["obs"][key][:-1] for each in episodes]) for key in episodes[0]["obs"]}
    assert found["facts"] == [len(episodes), count, 5]
    red = (obs["rgb"] == square.COLOURS["red"]).all(-1).any((1, 2))
    assert found["tasks"] == [task or f"go to the {('blue', 'red')[int(is_red)]} square" for is_red in red]
    assert np.array_equal(frames["observation.state"], obs["state"])
    assert np.array_equal(np.moveaxis(frames.pop("picture"), 1, -1), obs["rgb"])
    assert np.array_equal(frames["action"], np.concatenate([each["actions"] for each in episodes]))
    for key, column in frames.items():
        for statistic in ("min", "max", "mean", "std"):
            expected = getattr(column.reshape(count, -1).astype(float), statistic)(0)
            np.testing.assert_allclose(found["stats"][key][statistic], expected, atol=1e-12)
        assert found["stats"][key]["count"] == [count]
    taken = frames.get("complementary_info.is_intervention")
    assert taken is None or np.array_equal(taken, (frames["action"] == square.expert(obs)).all(1))
    return [] if taken is None else taken.tolist()


@needs_python("lerobot")
def test_recorded_as_lerobot_reads_it(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same episodes as in the other format; a folder that is there already stays as it is. And a round of DAgger in which
    somebody took over, and whole episodes in which they did, whose instructions are tasks."""
    words = ["record", "--expert", "square:expert", "--config", "bc.yaml", "--episodes", "3"]
    assert cli.main([*words, "--output", "seen.h5"]) == 0
    words += ["--to", "lerobot", "--fps", "5", "--task", "go there", "--output", "seen"]
    assert cli.main(words) == 0
    played = list(read_trajectories("seen.h5"))
    for one, two in zip(played, read_trajectories("seen"), strict=True):
        assert np.array_equal(one["actions"], two["actions"]) and np.array_equal(one["success"], two["success"])
    person = "{scripted: {expert: 'square:expert', apart: 0.5, patience: 2, hold: 3}}"
    helped = ["--intervene", person, "--episodes", "3", "--to", "lerobot", "--fps", "5", "env.train.wrappers=[]"]
    helped += ["actor.model.model_type=cnn", "actor.model.num_action_chunks=1"]
    own = ["cluster.component_placement={actor: 0}", "runner.name=helped", "runner.max_steps=1", "env.eval.num_envs=1"]
    assert cli.main(["dagger", "bc.yaml", "--rounds", "1", *helped, *own]) == 0
    whole = ["record", "--run", "runs/helped-round0", "--config", "bc.yaml", "--output", "whole"]
    assert cli.main([*whole, *helped]) == 0
    sets = {"seen": played, **{name: list(read_trajectories(name)) for name in ("runs/helped-dagger/round_1", "whole")}}
    taken = {
        name: agreed(json.loads(line), episodes, "go there" if name == "seen" else "")
        for (name, episodes), line in zip(sets.items(), program("read", *sets).splitlines()[-3:], strict=True)
    }
    assert [set(each) for each in taken.values()] == [set(), {True}, {True, False}]
    assert cli.main(words) == 2 and "seen is there already" in capsys.readouterr().err
    assert cli.main([*words[:-1], "new", "--fps", "0"]) == 2 and not Path("new").exists()
    assert cli.main([*words[:-1], "filmed", "--videos"]) == 0
    # Of short episodes, whose frames the encoder still has when the next begins.
    filmed = list(read_trajectories("filmed"))
    assert [len(each["actions"]) for each in filmed] == [len(each["actions"]) for each in played]
    features = json.loads(Path("filmed/meta/info.json").read_text())["features"]
    assert features["observation.images.rgb"]["dtype"] == "video"


def shuffled(source: LeRobotEpisodes) -> list[np.ndarray]:
    """The images of all episodes, without the repeated last one, read step by step in random order."""
    pool, frames = FramePool(max_open=1), [source.episode(number)["obs"]["rgb"] for number in range(len(source))]
    images = [np.empty(each.shape, each.dtype) for each in frames]
    rows = [(number, step) for number, each in enumerate(frames) for step in range(len(each))]
    for number, step in np.random.default_rng(0).permutation(rows):
        pool.read([(frames[number], [step], images[number][step : step + 1])])
    pool.close()
    return [each[:-1] for each in images]


@needs_python("lerobot")
def test_streamed_frames_are_those_of_lerobots_loader(here: Path) -> None:
    """Images of a table, and of videos with several episodes a file: those of LeRobot's recorder, and those that rlhpc wrote
    with pictures of an environment. The recorder's also tell by their brightness which frame is which."""
    program("film", "films")
    words = [
        "record",
        "--expert",
        "square:expert",
        "--config",
        "ppo.yaml",
        "--episodes",
        "3",
        "--to",
        "lerobot",
        "--videos",
    ]
    assert cli.main([*words, "--fps", "7", "--output", "moving", "env.train.wrappers=[]"]) == 0
    for name in ("data", "films", "moving"):
        program("frames", name, "frames.npy")
        found = np.concatenate(shuffled(LeRobotEpisodes(here / name)))
        np.testing.assert_array_equal(found, np.load("frames.npy"), err_msg=name)
        assert len(np.unique(found.reshape(len(found), -1), axis=0)) > len(found) / 2, "they differ from each other"
    for episode, (images, length) in enumerate(zip(shuffled(LeRobotEpisodes(here / "films")), (7, 12, 5), strict=True)):
        steps = np.arange(length)
        levels = np.stack([30 + 60 * episode + 4 * steps, 225 - 60 * episode - 4 * steps], 1)
        np.testing.assert_allclose(images.reshape(length, -1, 2, 3).mean((1, 3)), levels, atol=1.5)


@needs_python("lerobot")
@pytest.mark.parametrize("family", ["pi0", "pi05"])
@pytest.mark.long
def test_critics_and_noise_of_pi_rl(here: Path, family: str) -> None:
    assert program("heads", family).endswith("equal\n")


@needs_python("lerobot")
@pytest.mark.parametrize("family", ["pi0", "pi05"])
@pytest.mark.long
def test_openpis_own_folders(here: Path, family: str) -> None:
    """Read with openpi's names, statistics and state words, and written again as they were."""
    assert program("openpi", family).endswith("equal\n")
