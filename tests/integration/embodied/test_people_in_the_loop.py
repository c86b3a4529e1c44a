"""Off-policy and on-policy runs in which a script leads like a person."""

from __future__ import annotations

import json
import os
import resource
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from rlhpc import cli
from rlhpc.checkpoint.state import load_tensors
from rlhpc.embodied.data.stored_replay import StoredReplay
from rlhpc.embodied.rewards import reward_model
from tests.unit.embodied.toy_carry import CarryEnv

ROOT = Path(__file__).parents[3]
TASK, EXPERT = "tests.unit.embodied.toy_carry:Carry-v0", "tests.unit.embodied.toy_carry:carry"

# What the comparison may cost and must show, written down before it was run: equal environment steps and updates in both arms,
# three seeds, two demonstrations, 50 evaluation episodes each.
ENV_STEPS, SEEDS, EPISODES = 2500, (1, 2, 3), 50
MIN_GAIN, MAX_CPU_S = 0.3, 60.0

RLPD = {
    "defaults": [str(ROOT / "configs/base/sac.yaml")],
    "runner": {"name": "carry", "max_steps": ENV_STEPS // 10, "save_interval": ENV_STEPS // 10,
               "logger": {"logger_backends": ["jsonl"]}},
    "algorithm": {
        "gamma": 0.95, "tau": 0.05, "initial_alpha": 0.01, "target_entropy": -1.5, "backup_entropy": False,
        "actor_agg_q": "mean", "critic_subsample_size": 2, "random_steps": 100, "rollout_steps": 10,
        "replay_buffer": {"size": 10_000, "min_buffer_size": 100}, "demo_buffer": {"load_path": "demos.h5", "ratio": 0.5},
    },
    "env": {
        "train": {
            "env_id": TASK, "num_envs": 1,
            "intervene": {"source": "scripted", "kwargs": {
                "expert": EXPERT, "apart": 0.0, "patience": 1, "hold": 8, "max_hold": 14, "chance": 0.05, "noise": 0.1,
            }},
        },
        "eval": {"num_envs": 10, "num_episodes": EPISODES},
    },
    "actor": {
        "global_batch_size": 64,
        "model": {"model_type": "sac", "hidden_sizes": [64, 64], "num_q_heads": 10, "critic_layer_norm": True},
        "optim": {"lr": 3e-4, "value_lr": 3e-4},
    },
}  # fmt: skip


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a configuration and two demonstrations."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{os.environ.get('PYTHONPATH', '')}")
    Path("carry.yaml").write_text(yaml.safe_dump(RLPD))
    no_demos = "algorithm.demo_buffer.load_path=null"
    words = ["--expert", EXPERT, "--config", "carry.yaml", "--episodes", "2", "--output", "demos.h5", no_demos]
    assert run("record", *words) == 0
    return tmp_path


def run(*words: str) -> int:
    return cli.main(list(words))


def rows(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(f"runs/{name}/metrics.jsonl").read_text().splitlines()]


def timeless_rows(name: str) -> list[dict[str, Any]]:
    left_out = ("time/", "energy/")
    return [{name: value for name, value in row.items() if not name.startswith(left_out)} for row in rows(name)]


def cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


SHORT = ["runner.max_steps=6", "runner.save_interval=3", "runner.keep_checkpoints=0", "algorithm.n_step=2",
         "algorithm.replay_buffer={size: 60, min_buffer_size: 20}", "env.train.num_envs=2",
         "env.train.intervene.kwargs.chance=0.3"]  # fmt: skip


def test_a_run_with_interventions_resumes_bit_for_bit(here: Path) -> None:
    """The script, both buffers, the policy and the metrics go on as if nothing had happened; with two slots and n-step."""
    assert run("train", "carry.yaml", *SHORT, "runner.name=whole") == 0
    assert run("train", "carry.yaml", *SHORT, "runner.name=cut", "runner.max_steps=3") == 0
    resumed = ["runner.name=cut", "runner.resume_dir=auto"]
    assert run("train", "carry.yaml", *SHORT, *resumed) == 0
    metrics = [timeless_rows(name) for name in ("whole", "cut")]
    assert metrics[0] == metrics[1]
    assert metrics[0][-1]["train/demo_buffer_size"] > 34 and metrics[0][-1]["rollout/intervention_rate"] > 0
    paths = [Path(f"runs/{name}/checkpoints/global_step_6") for name in ("whole", "cut")]
    tensors = [load_tensors(path / "model.safetensors") for path in paths]
    assert all(tensors[0][name].equal(tensors[1][name]) for name in tensors[0])
    for folder in ("replay", "interventions"):
        ours, theirs = (StoredReplay(path / folder).transitions() for path in paths)
        assert len(ours) and all(np.array_equal(ours[name], theirs[name]) for name in ours.dtype.names)
    led = StoredReplay(paths[0] / "interventions").transitions()
    kept = StoredReplay(paths[0] / "replay").transitions()
    assert led["intervened"].all() and 0 < kept["intervened"].sum() < len(kept)
    in_both = np.isin(led["position"], kept["position"][kept["intervened"]])
    assert in_both.sum() == kept["intervened"].sum(), "they are in both"
    assert {row.tobytes() for row in led["obs"][in_both]} == {row.tobytes() for row in kept["obs"][kept["intervened"]]}


JUDGED = ["runner.max_steps=12", "runner.save_interval=6", "runner.keep_checkpoints=0", "algorithm.n_step=2",
          "algorithm.rollout_steps=50", "algorithm.replay_buffer={size: 2000, min_buffer_size: 100}",
          "env.train.intervene.source=tests.unit.embodied.toy_carry:Referee",
          "env.train.intervene.kwargs={apart: 0, patience: 1, hold: 30, chance: 0.1}",
          "algorithm.success_classifier={train: true, min_marks: 3, min_accuracy: 0.6, batch_size: 32, lr: 0.003, size: 8}",
          "algorithm.update_to_data=0.2", "env.train.reward_scale=2"]  # fmt: skip


def test_a_success_classifier_learns_from_marks_while_the_run_goes_on(here: Path) -> None:
    """Its reward is used once it predicts new marks, a resumed run goes on bit for bit, and another run can load it."""
    assert run("train", "carry.yaml", *JUDGED, "runner.name=whole") == 0
    assert run("train", "carry.yaml", *JUDGED, "runner.name=cut", "runner.max_steps=6") == 0
    assert run("train", "carry.yaml", *JUDGED, "runner.name=cut", "runner.resume_dir=auto") == 0
    metrics = [timeless_rows(name) for name in ("whole", "cut")]
    assert metrics[0] == metrics[1]
    used = [row["train/classifier_used"] for row in metrics[0]]
    assert used[0] == 0 and used[-1] == 1, used
    last = metrics[0][-1]
    assert last["train/classifier_accuracy"] >= 0.6 and 0 < last["train/classifier_successes"] < 0.5
    assert 8 < last["train/classifier_marks"] <= 16 and last["train/classifier_loss"] < 0.5
    folder = Path("runs/whole/checkpoints/global_step_12")
    kept = StoredReplay(folder / "replay").transitions()
    first = kept[: 50 * (used.index(1) + 1)]
    assert {*first["rewards"].tolist()} <= {0.0, 2.0}, "the environment's and the person's, until it is good enough"
    later = kept[len(first) :]
    between = ~np.isin(later["rewards"], (0.0, 2.0))
    assert between.any() and not later["terminations"][between].any(), "a mark is its step's reward"
    classifier = reward_model(str(folder / "success_classifier"), CarryEnv.observation_space)
    frames = StoredReplay(folder / "success_classifier/successes").transitions()["obs"]
    assert len(frames) <= 8 and (frames[:, 5] == 1).all() and (frames[:, 2] > 0).all(), "held, and above the middle"
    with torch.no_grad():
        assert (classifier.value(torch.from_numpy(frames)) > 0.5).float().mean() > 0.5
    assert run("train", "carry.yaml", *JUDGED, "runner.name=next", "runner.max_steps=1", "runner.save_interval=1",
               f"algorithm.success_classifier.init_from={folder / 'success_classifier'}") == 0  # fmt: skip
    loaded = load_tensors(Path("runs/next/checkpoints/global_step_1/success_classifier/model.safetensors"))
    saved = load_tensors(folder / "success_classifier/model.safetensors")
    assert all(not tensor.eq(0).all() and (tensor - saved[name]).abs().max() < 0.2 for name, tensor in loaded.items())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["env.train.intervene.source=scripted", "env.train.intervene.kwargs={expert: a:b}"], "learns from a person's marks"),
        (["env.train.intervene={source: null, kwargs: {}}"], "learns from a person's marks"),
        (["env.train.reward_model=nowhere"], "name it in algorithm.success_classifier.init_from"),
        (["env.train.use_rel_reward=true"], "rewards the state after a step"),
        (["algorithm.success_classifier.init_from=nowhere"], "algorithm.success_classifier.init_from is 'nowhere'"),
    ],
)  # fmt: skip
def test_what_a_success_classifier_needs(
    here: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    assert run("train", "carry.yaml", *JUDGED, "runner.name=wrong", *words) == 2
    assert said in capsys.readouterr().err and not Path("runs/wrong").exists()


def test_on_policy_runs_leave_out_what_a_person_chose(here: Path) -> None:
    """PPO with chunks of two actions, in which the script leads all the time: its values learn, and its policy does not."""
    ppo = {
        "runner": {"name": "ppo", "task_type": "embodied", "max_steps": 2, "save_interval": 1, "keep_checkpoints": 0,
                   "logger": {"logger_backends": ["jsonl"]}},
        "cluster": {"component_placement": {"actor,rollout,env": 0}},
        "algorithm": {"rollout_steps": 8, "update_epochs": 2, "entropy_coef": 0.0},
        "env": {"train": {"env_id": TASK, "num_envs": 2, "intervene": {"source": "scripted", "kwargs": {
            "expert": EXPERT, "apart": 0.0, "patience": 1, "hold": 1000,
        }}}},
        "actor": {"global_batch_size": 8, "model": {"hidden_sizes": [16], "num_action_chunks": 2}},
    }  # fmt: skip
    Path("ppo.yaml").write_text(yaml.safe_dump(ppo))
    assert run("train", "ppo.yaml") == 0
    assert rows("ppo")[0]["rollout/intervention_rate"] == 1.0 and "rollout/success_once" not in rows("ppo")[-1]
    one, two = (load_tensors(Path(f"runs/ppo/checkpoints/global_step_{step}/model.safetensors")) for step in (1, 2))
    changed = {name.split(".")[0] for name in one if not one[name].equal(two[name])}
    assert changed, "the values are trained"
    assert run("train", "ppo.yaml", "runner.name=free", "env.train.intervene.kwargs.apart=9") == 0
    one, two = (load_tensors(Path(f"runs/free/checkpoints/global_step_{step}/model.safetensors")) for step in (1, 2))
    freely_changed = {name.split(".")[0] for name in one if not one[name].equal(two[name])}
    assert changed < freely_changed, (changed, freely_changed)
    assert rows("free")[0]["rollout/intervention_rate"] == 0.0


@pytest.mark.long
def test_a_scripted_person_helps_rlpd(here: Path) -> None:
    success: dict[str, list[float]] = {"help": [], "none": []}
    for arm, override in (("help", []), ("none", ["env.train.intervene.source=null"])):
        for seed in SEEDS:
            name, begin = f"{arm}{seed}", cpu_s()
            assert run("train", "carry.yaml", f"runner.name={name}", f"runner.seed={seed}", *override) == 0
            assert cpu_s() - begin <= MAX_CPU_S
            assert rows(name)[-1]["rollout/env_steps"] == ENV_STEPS
            assert run("eval", "--run", f"runs/{name}") == 0
            result = json.loads(next(Path(f"runs/{name}/eval").rglob("*.json")).read_text())
            success[arm].append(result["success_at_end"] if "success_at_end" in result else result["success_once"])
    print(success)
    assert np.mean(success["help"]) - np.mean(success["none"]) >= MIN_GAIN, success
