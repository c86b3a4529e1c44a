"""Demonstrations to a policy, by the commands a user types: record, bc, eval, and PPO that starts from it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from rlhpc import cli
from rlhpc.checkpoint.state import load_tensors
from rlhpc.embodied.data.trajectories import TrajectoryWriter, read_trajectories
from tests.extras import need_extra


def along(obs: np.ndarray) -> np.ndarray:
    """MountainCarContinuous: pushes where the car goes anyway, which solves it."""
    return np.sign(obs[:, 1:2])


TASK = {
    "runner": {"name": "bc", "task_type": "bc", "max_steps": 20},
    "cluster": {"component_placement": {"actor": "0"}},
    "algorithm": {"update_epochs": 5},
    "actor": {"optim": {"lr": 1e-3}},
    "env": {"train": {"env_id": "MountainCarContinuous-v0"}, "eval": {"num_episodes": 10}},
}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a configuration, ten demonstrations, and this module to be imported from."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"{Path(__file__).parent}:{__import__('os').environ.get('PYTHONPATH', '')}")
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    Path("bc.yaml").write_text(yaml.safe_dump({**TASK, "demos": {"path": "demos.h5", "holdout": 0.1}}))
    expert = f"{Path(__file__).stem}:along"
    assert run("record", "--expert", expert, "--config", "bc.yaml", "--episodes", "10", "--output", "demos.h5") == 0
    return tmp_path


def run(*words: str) -> int:
    return cli.main(list(words))


def rows(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(f"runs/{name}/metrics.jsonl").read_text().splitlines()]


def weights(name: str, step: int = 20) -> dict[str, Any]:
    return load_tensors(Path(f"runs/{name}/checkpoints/global_step_{step}/model.safetensors"))


def test_demonstrations_are_learned_from(here: Path) -> None:
    """The clone solves what it was shown; random actions get −33 on average, never the 100 at the goal."""
    assert len(list(read_trajectories("demos.h5"))) == 10
    for loss in ("nll", "mse"):
        assert run("train", "bc.yaml", f"runner.name={loss}", f"algorithm.bc_loss={loss}") == 0
        assert run("eval", "--run", f"runs/{loss}", "--output", "result.json") == 0
        result = json.loads(Path("result.json").read_text())
        assert result["episodes"] == 10 and result["return_mean"] > 85
        found = rows(loss)
        assert found[-1]["train/holdout_loss"] < found[0]["train/holdout_loss"]
        assert found[-1]["train/demonstrations"] == 9


def test_any_number_of_ranks_and_a_resume_make_the_same_policy(here: Path) -> None:
    """Two ranks sum other parts of the same minibatches; a run in two parts is the run in one, bit for bit."""
    assert run("train", "bc.yaml", "runner.name=one", "runner.save_interval=5") == 0
    assert run("train", "bc.yaml", "runner.name=two", "cluster.component_placement={actor: '0:0-1'}") == 0
    for name, value in weights("one").items():
        np.testing.assert_allclose(value.numpy(), weights("two")[name].numpy(), atol=2e-4)
    start = "runner.resume_dir=" + str(here / "runs/one/checkpoints/global_step_15")
    assert run("train", "bc.yaml", "runner.name=again", start) == 0
    for name, value in weights("one").items():
        assert (value == weights("again")[name]).all(), name


def test_a_run_that_stops_within_a_pass_continues_there(here: Path) -> None:
    """Steps of three minibatches of a streamed LeRobot dataset, on two ranks; a step is a tenth of a pass or less."""
    need_extra("embodied")
    assert run("data", "convert", "demos.h5", "--to", "lerobot", "--fps", "10", "--output", "set") == 0
    words = ["demos.path=set", "demos.memory_mb=1", "algorithm.minibatches_per_step=3", "actor.global_batch_size=32"]
    words += ["runner.max_steps=6", "runner.save_interval=2", "cluster.component_placement={actor: '0:0-1'}"]
    assert run("train", "bc.yaml", "runner.name=whole", *words) == 0
    assert [row["train/samples"] for row in rows("whole")] == [96 * step for step in range(1, 7)]
    start = "runner.resume_dir=" + str(here / "runs/whole/checkpoints/global_step_4")
    assert run("train", "bc.yaml", "runner.name=resumed", *words, start) == 0
    for name, value in weights("whole", 6).items():
        assert (value == weights("resumed", 6)[name]).all(), name
    assert [row["train/loss"] for row in rows("whole")][4:] == [row["train/loss"] for row in rows("resumed")][-2:]


def test_ppo_starts_from_the_clone(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`runner.init_from` gives a fresh run the weights, whichever folder holds them; provenance.json says which."""
    assert run("train", "bc.yaml") == 0
    assert run("convert", "--run", "runs/bc") == 0
    Path("ppo.yaml").write_text(yaml.safe_dump({**TASK, "runner": {"name": "ppo", "max_steps": 1},
                                                "cluster": {"component_placement": {"actor,rollout,env": "0"}}}))  # fmt: skip
    ppo = ["actor.optim.lr=1e-12", "algorithm.rollout_steps=32"]
    for number, start in enumerate(["runs/bc", "runs/bc/export/global_step_20"]):
        words = [f"runner.name=ppo{number}", f"runner.init_from={start}", *ppo]
        assert run("train", "ppo.yaml", *words) == 0
        for name, value in weights(f"ppo{number}", 1).items():
            np.testing.assert_allclose(value.numpy(), weights("bc")[name].numpy(), atol=1e-6)
    provenance = json.loads(Path("runs/ppo1/provenance.json").read_text())
    assert (
        provenance["init_from"]["folder"].endswith("export/global_step_20")
        and len(provenance["init_from"]["sha256"]) == 64
    )

    capsys.readouterr()
    wrong = ["runner.name=wrong", "runner.init_from=runs/bc", "actor.model.hidden_sizes=[32]", *ppo]
    assert run("train", "ppo.yaml", *wrong) == 2
    said = capsys.readouterr().err
    assert "runner.init_from" in said and "critic.0.weight is [64, 2] there and [32, 2] here" in said
    assert not Path("runs/wrong").exists()


def test_sampled_episodes_are_the_seeds(here: Path) -> None:
    """A recording with noise can be made again."""
    assert run("train", "bc.yaml", "runner.max_steps=1") == 0

    def recorded(output: str, *words: str) -> np.ndarray:
        assert run("record", "--run", "runs/bc", "--sample", "--episodes", "1", "--output", output, *words) == 0
        return next(iter(read_trajectories(output)))["actions"]

    first = recorded("first.h5")
    np.testing.assert_array_equal(recorded("again.h5"), first)
    assert not np.array_equal(recorded("other.h5", "--config", "bc.yaml", "runner.seed=5"), first)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["demos.path=null"], "demos.path"),
        (["demos.path=other.h5"], "demos.path is 'other.h5'; there is no such file or folder"),
        (
            ["env.train.env_id=CartPole-v1"],
            "observations [2] and actions [1] (float32); env.train has observations [4]",
        ),
        (["env.train.env_id=MountainCar-v0", "algorithm.bc_loss=mse"], "algorithm.bc_loss"),
        (["runner.init_from=nowhere"], "runner.init_from is 'nowhere', which is no folder"),
        (["algorithm.bc_loss=l2"], "nll, mse"),
    ],
)
def test_what_is_said_of_a_mistake(here: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str) -> None:
    """Before anything starts, and nothing is written."""
    assert run("train", "bc.yaml", *words) == 2
    assert said in capsys.readouterr().err
    assert not Path("runs").exists()


def test_only_success_needs_a_word_about_success(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    expert = f"{Path(__file__).stem}:along"
    words = ["record", "--expert", expert, "--config", "bc.yaml", "--episodes", "2", "--output", "success.h5"]
    assert run(*words, "--only-success") == 2
    assert "does not say whether an episode succeeded" in capsys.readouterr().err
    assert not Path("success.h5").exists()


def test_discrete_actions(here: Path, tmp_path: Path) -> None:
    """Actions of a discrete space are recorded and cloned as the integers they are."""
    rng, path = np.random.default_rng(0), tmp_path / "poles.h5"
    with TrajectoryWriter(path, env_id="CartPole-v1") as writer:
        obs = rng.normal(size=(65, 4)).astype(np.float32)
        ended = np.arange(64) == 63
        writer.add({
            "obs": obs, "actions": (obs[:-1, 2:3] > 0).astype(np.int64), "rewards": np.ones(64),
            "terminations": ended, "truncations": ~ended & False,
        })  # fmt: skip
    words = ["env.train.env_id=CartPole-v1", "demos.path=poles.h5", "demos.holdout=0", "algorithm.bc_value_coef=0.1"]
    assert run("train", "bc.yaml", *words) == 0
    assert rows("bc")[-1]["train/loss"] < 0.3 < rows("bc")[0]["train/loss"]
    assert rows("bc")[-1]["train/value_loss"] < rows("bc")[0]["train/value_loss"]


def intervened(folder: str) -> list[bool]:
    """Of a LeRobot dataset's frames, where somebody had taken over."""
    from pyarrow import parquet

    table = parquet.read_table(Path(folder) / "data/chunk-000/file-000.parquet")
    return list(table["complementary_info.is_intervention"].to_pylist())


def test_dagger(here: Path) -> None:
    """Each round adds what the clone saw, labelled by the expert; a command given again trains nothing again.

    The workflow's expert, which records one file for a run, does not come into it.
    """
    command = ["dagger", "bc.yaml", "--expert", f"{Path(__file__).stem}:along", "--rounds", "2", "--episodes", "3"]
    words = ["runner.max_steps=3", "demos.holdout=0", "env.train.max_episode_steps=200"]
    words += [f"workflow.demos_expert={Path(__file__).stem}:along"]
    assert run(*command, *words) == 0
    for number in (1, 2):
        for trajectory in read_trajectories(f"runs/bc-dagger/round_{number}.h5"):
            np.testing.assert_array_equal(trajectory["actions"], along(trajectory["obs"][:-1]))
            assert trajectory["rewards"] is None  # those of the clone's own actions
    assert [rows(f"bc-round{k}")[-1]["train/demonstrations"] for k in range(3)] == [10, 13, 16]
    written = Path("runs/bc-round2/checkpoints/global_step_3/COMPLETE").stat().st_mtime_ns
    assert run(*command, *words) == 0
    assert Path("runs/bc-round2/checkpoints/global_step_3/COMPLETE").stat().st_mtime_ns == written


def test_what_somebody_does_who_takes_over_is_cloned(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And nothing else of what the clone plays; where nobody takes over, rounds end. Whole episodes have what was done in each
    step, and its reward."""
    need_extra("embodied")

    def person(apart: float) -> str:
        return "{scripted: {expert: '" + Path(__file__).stem + f":along', apart: {apart}, patience: 2, hold: 5" + "}}"

    words = ["runner.max_steps=1", "demos.holdout=0", "env.train.max_episode_steps=40", "env.eval.num_envs=2"]
    assert run("dagger", "bc.yaml", "--intervene", person(0.8), "--rounds", "1", "--episodes", "3", *words) == 0
    taken = list(read_trajectories("runs/bc-dagger/round_1.h5"))
    for trajectory in taken:
        np.testing.assert_array_equal(trajectory["actions"], along(trajectory["obs"][:-1]))
        obs = trajectory["obs"]  # also the last is what came of the action before it
        np.testing.assert_allclose(obs[1:, 0], obs[:-1, 0] + obs[1:, 1], atol=1e-6)
        assert trajectory["truncations"][-1] and not trajectory["truncations"][:-1].any()
        np.testing.assert_allclose(trajectory["rewards"], -0.1, rtol=1e-6)  # of the actions that were taken: -0.1 · 1²
    lengths = [len(trajectory["actions"]) for trajectory in taken]
    assert len(taken) > 3 and sum(length >= 5 for length in lengths) >= 3 and sum(lengths) < 120
    assert rows("bc-round1")[-1]["train/demonstrations"] == 10 + len(taken)
    assert json.loads(Path("runs/bc-dagger/round_1.json").read_text())["source_type"] == "human"

    dataset = ["--to", "lerobot", "--task", "go along", "runner.name=set"]
    assert (
        run("dagger", "bc.yaml", "--intervene", person(0.8), "--rounds", "1", "--episodes", "3", *words, *dataset) == 0
    )
    for one, two in zip(taken, read_trajectories("runs/set-dagger/round_1"), strict=True):
        np.testing.assert_array_equal(one["actions"], two["actions"])
        np.testing.assert_array_equal(one["obs"][:-1], two["obs"][:-1])
    assert rows("set-round1")[-1]["train/demonstrations"] == 10 + len(taken)
    assert set(intervened("runs/set-dagger/round_1")) == {True}

    more = [*words, *dataset, "runner.name=alone"]
    assert run("dagger", "bc.yaml", "--intervene", person(9), "--rounds", "2", "--episodes", "2", *more) == 0
    assert "nobody took over in 2 episodes" in capsys.readouterr().err and not Path("runs/alone-round1").exists()
    assert not Path("runs/alone-dagger/round_1").exists()

    record = [
        "record",
        "--run",
        "runs/bc-round0",
        "--config",
        "bc.yaml",
        "--episodes",
        "2",
        *words,
        "--output",
        "whole.h5",
    ]
    assert run(*record, "--intervene", person(0.8)) == 0
    assert run(*record[:-1], "whole", "--to", "lerobot", "--intervene", person(0.8)) == 0
    assert 5 <= sum(intervened("whole")) < 80  # of two whole episodes
    for trajectory in read_trajectories("whole.h5"):
        actions = trajectory["actions"][:, 0]
        np.testing.assert_allclose(trajectory["rewards"], -0.1 * actions**2, atol=1e-6)
        assert len(actions) == 40 and 0 < (np.abs(actions) == 1).sum() < 40
    for wrong in (["--expert", "a:b", "--intervene", "keyboard"], []):
        assert run("dagger", "bc.yaml", *wrong) == 2 and "name who labels" in capsys.readouterr().err
    assert run("dagger", "bc.yaml", "--intervene", "keybord", "runner.name=none") == 2
    assert "did you mean 'keyboard'" in capsys.readouterr().err
    chunks = ["actor.model.num_action_chunks=2", "runner.name=none"]
    assert run("dagger", "bc.yaml", "--intervene", person(0.8), *chunks) == 2
    assert "acts in chunks of 2" in capsys.readouterr().err and not Path("runs/none-round0").exists()
    assert run(*record, "--intervene", "keyboard", "--teacher", "runs/bc-round0") == 2
