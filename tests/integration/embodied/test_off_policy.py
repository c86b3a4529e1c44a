"""SAC runs: they learn, resume bit for bit, also ahead of the actors, and do the same on other layouts."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
import yaml
from test_resume import assert_identical, same
from tiny_run import ROOT, TinyRun, kill_tree, wait_until

from rlhpc.checkpoint.state import load_state, load_tensors
from rlhpc.cli import main
from rlhpc.embodied.data.stored_replay import StoredReplay
from rlhpc.embodied.export import load_exported

RANKS = 'cluster.component_placement={actor: "0:0-1", rollout: "0:0-1", env: "0:0-1"}'
TINY = (
    "runner.max_steps=12", "runner.save_interval=3", "runner.keep_checkpoints=0", "algorithm.rollout_steps=8",
    "env.train.num_envs=4",
    "algorithm.replay_buffer={size: 256, min_buffer_size: 64}", "actor.model.hidden_sizes=[32,32]",
    "actor.global_batch_size=32", "env.eval.num_episodes=4", "runner.logger.logger_backends=[jsonl]",
)  # fmt: skip


class SacRun(TinyRun):
    """A small run of Pendulum."""

    def __init__(self, run_dir: Path, *overrides: str) -> None:
        super().__init__(run_dir)
        self.overrides = [*TINY, f"runner.run_dir={run_dir}", *overrides]
        self.root = run_dir / "pendulum_sac"
        self.config = ROOT / "configs" / "embodied" / "pendulum_sac.yaml"

    def command(self, *more: str) -> list[str]:
        return [word if not word.endswith("quickstart.yaml") else str(self.config) for word in super().command(*more)]


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> dict[str, SacRun]:
    """Uninterrupted runs."""
    found = {}
    for name, overrides in (("sync", []), ("ahead", ["algorithm.max_staleness=1"]), ("ranks", [RANKS])):
        found[name] = SacRun(tmp_path_factory.mktemp(name), *overrides)
        found[name].train()
    return found


def assert_same_replay(run: SacRun, reference: SacRun, step: int = 12) -> None:
    ours, theirs = (StoredReplay(one.checkpoint(step)).transitions() for one in (run, reference))
    assert ours.tobytes() == theirs.tobytes()


@pytest.mark.parametrize("mode", ["sync", "ahead"])
def test_killed_and_resumed_is_bit_identical(references, tmp_path, mode):
    run = SacRun(tmp_path, *([] if mode == "sync" else ["algorithm.max_staleness=1"]))
    process = run.start()
    wait_until(lambda: run.checkpoint(6).exists())
    kill_tree(process)
    run.train("runner.resume_dir=auto")
    assert_identical(run, references[mode], 12)
    assert_same_replay(run, references[mode])


def test_environments_that_are_killed_start_again_alone(references, tmp_path, monkeypatch):
    """Also ahead of the actors: what they had played ahead is dropped and played again."""
    monkeypatch.setenv("RLHPC_MAX_RESTARTS", "2")
    run = SacRun(tmp_path, "algorithm.max_staleness=1")
    said = run.lose("env-0", after=3)
    assert "start again from global_step_" in said and "all other ranks stay" in said
    assert_identical(run, references["ahead"], 12)
    assert_same_replay(run, references["ahead"])


def test_environments_run_ahead_by_no_more_than_allowed(references):
    def lag(mode):
        return [row["step"] - 1 - row["rollout/version"] for row in references[mode].rows()]

    assert set(lag("sync")) == {0}
    # They wait before each checkpoint, which are 3 steps apart.
    assert lag("ahead") == [0, 1, 1] * 4
    assert references["sync"].rows()[0] != references["ahead"].rows()[-1]


def test_every_metric_is_documented(references):
    page = (ROOT / "docs" / "reference" / "metrics.md").read_text()
    language = page.split("## Language models")[1].split("## Off-policy runs")[0]
    documented = set(re.findall(r"`((?:train|rollout|time)/\w+)`", page.replace(language, "")))
    logged = {
        name
        for line in (references["sync"].root / "metrics.jsonl").read_text().splitlines()
        for name in json.loads(line)
    }
    assert logged - {"step"} <= documented


def test_layouts_learn_the_same_and_resume_each_other(references, tmp_path):
    one, two = references["sync"].rows(), references["ranks"].rows()
    for a, b in zip(one, two, strict=True):
        assert a.keys() == b.keys()
        for key in a:
            assert a[key] == pytest.approx(b[key], rel=5e-3, abs=2e-3, nan_ok=True), key
    run = SacRun(tmp_path, RANKS)
    process = run.start()
    wait_until(lambda: run.checkpoint(6).exists())
    kill_tree(process)
    run.overrides = [word for word in run.overrides if word != RANKS]
    run.train("runner.resume_dir=auto")
    for a, b in zip(one, run.rows(), strict=True):
        for key in a:
            assert a[key] == pytest.approx(b[key], rel=5e-3, abs=2e-3, nan_ok=True), key
    assert len(StoredReplay(run.checkpoint(12))) == 256


def write_demos(path: Path, episodes: int = 3, steps: int = 20, force: float = 0.0) -> None:
    """Pendulum upright and still, in ManiSkill's format; with `force`, anywhere, and random actions up to that."""
    draw, still = np.random.default_rng(0), np.tile(np.array([1, 0, 0], np.float32), (steps + 1, 1))
    with h5py.File(path, "w") as file:
        for number in range(episodes):
            group = file.create_group(f"traj_{number}")
            angle, speed = draw.uniform(-np.pi, np.pi, steps + 1), draw.uniform(-8, 8, steps + 1)
            anywhere = np.stack([np.cos(angle), np.sin(angle), speed], 1).astype(np.float32)
            group["obs"] = anywhere if force else still
            group["actions"] = draw.uniform(-force, force, (steps, 1)).astype(np.float32)
            group["rewards"] = np.zeros(steps, np.float32)
            for name in ("terminated", "truncated", "success"):
                group[name] = np.zeros(steps, bool)
    facts = {"env_info": {"env_id": "Pendulum-v1", "env_kwargs": {}},
             "episodes": [{"episode_id": number, "elapsed_steps": steps} for number in range(episodes)]}  # fmt: skip
    path.with_suffix(".json").write_text(json.dumps(facts))


def clone(folder: Path, *overrides: str, bc_loss: str | None = None, **model: Any) -> SacRun:
    """A policy of the demonstrations in a folder."""
    cloned = SacRun(folder / "cloned")
    cloned.config = folder / "clone.yaml"
    network = {"hidden_sizes": [32, 32], "activation": "relu", "ortho_init": False, **model}
    cloned.config.write_text(yaml.safe_dump({
        "cluster": {"accelerators_per_node": 0, "component_placement": {"actor": 0}},
        "runner": {"task_type": "bc", "name": cloned.root.name, "max_steps": 2, "run_dir": str(cloned.root.parent)},
        "algorithm": {"bc_loss": bc_loss} if bc_loss else {}, "env": {"train": {"env_id": "Pendulum-v1"}},
        "actor": {"global_batch_size": 32, "model": network}, "demos": {"path": str(folder / "demos.h5")},
    }))  # fmt: skip
    cloned.overrides = list(overrides)
    cloned.train()
    return cloned


@pytest.mark.long
def test_the_noise_of_a_cloned_flow_is_learned(tmp_path, capsys):
    """DSRL: the flow stays as it is, transitions have its noise, and checkpoints and exports have the flow with them."""
    write_demos(tmp_path / "demos.h5")
    cloned = clone(tmp_path, model_type="flow", num_action_chunks=2)
    words = (
        "actor.model.model_type=dsrl", "actor.model.num_action_chunks=2", "runner.max_steps=6",
        f"actor.model.kwargs={{base: {cloned.root}, noise_bound: 0.8}}", "algorithm.random_steps=32",
    )  # fmt: skip
    for wrong, said in (
        ("actor.model.num_action_chunks=1", "actor.model.num_action_chunks is 1, and 2 in actor.model.kwargs.base"),
        ("actor.model.kwargs.base=nowhere", "actor.model.kwargs.base is 'nowhere', which is no folder"),
        ("env.train.env_id=MountainCarContinuous-v0", "actor.model.kwargs.base: its observations are"),
        (f"algorithm.demo_buffer.load_path={tmp_path / 'demos.h5'}", "dsrl learns of noise"),
    ):
        refused = SacRun(tmp_path / "refused", *words, wrong)
        assert main(refused.command()[3:]) == 2 and said in capsys.readouterr().err and not refused.root.exists()
    whole, parts = SacRun(tmp_path / "whole", *words), SacRun(tmp_path / "parts", *words)
    whole.train()
    process = parts.start()
    wait_until(parts.checkpoint(3).exists)
    kill_tree(process)
    parts.train("runner.resume_dir=auto")
    assert_identical(parts, whole, 6)
    assert_same_replay(parts, whole, 6)
    flow = load_tensors(cloned.checkpoint(2) / "model.safetensors")
    ours = load_tensors(whole.checkpoint(6) / "model.safetensors")
    assert same({name[5:]: tensor for name, tensor in ours.items() if name.startswith("base.")}, flow)
    assert not same(load_tensors(whole.checkpoint(3) / "model.safetensors"), ours)
    noise = StoredReplay(whole.checkpoint(6)).transitions()["actions"]
    assert noise[0].size == 2 and 0.5 < np.abs(noise).max() <= 0.8
    cloned.root.rename(tmp_path / "gone")
    assert main(["convert", "--run", str(whole.root), "--output", str(tmp_path / "export")]) == 0
    capsys.readouterr()
    policy, base = (
        load_exported(tmp_path / "export"),
        load_exported(tmp_path / "gone" / "checkpoints" / "global_step_2"),
    )
    obs = torch.randn(5, 3)
    with torch.no_grad():
        acted, chosen = policy.predict_action_batch(obs, "eval")[0], policy.head.act(policy.actor(obs), None)[0]
        velocity, _ = base.prepare(obs, True, False)
        chain, _ = base.flow.act(velocity, None, chosen.reshape(5, 2, 1))
    torch.testing.assert_close(acted, base.unscaled(chain[:, -1]), rtol=0, atol=1e-6)
    assert (acted - base.predict_action_batch(obs, "eval")[0]).abs().max() > 1e-3


def test_demonstrations_and_weights_to_start_from(references, tmp_path):
    """Half of each batch from a file; the actor begins as another run's, and acts by itself from the first step."""
    write_demos(tmp_path / "demos.h5")
    start = references["sync"].checkpoint(12)
    options = [
        f"algorithm.demo_buffer.load_path={tmp_path / 'demos.h5'}", f"runner.init_from={start}", "runner.max_steps=3",
        "actor.optim.lr=1.0e-30", "actor.optim.value_lr=1.0e-30", "algorithm.tau=1.0", "algorithm.alpha_lr=1.0e-3",
    ]  # fmt: skip
    run = SacRun(tmp_path, *options)
    run.train()
    ours, theirs = (load_tensors(one / "model.safetensors") for one in (run.checkpoint(3), start))
    assert same(ours, theirs), "at these learning rates nothing moves"
    assert same(load_state(run.checkpoint(3) / "optimizer.pt")["targets"],
                {name[8:]: tensor for name, tensor in theirs.items() if name.startswith("critics.")})  # fmt: skip
    actions = StoredReplay(run.checkpoint(3)).transitions()["actions"]
    even = StoredReplay(references["sync"].checkpoint(3)).transitions()["actions"][: len(actions)]
    assert not np.array_equal(actions[:32], even[:32])
    # A demonstration is worth 0 a step and a random one about -6: the critics' loss shows whose rows they saw.
    without = SacRun(tmp_path / "without", *options[1:])
    without.train()
    assert run.rows()[-1]["train/q_loss"] < without.rows()[-1]["train/q_loss"]
    cloned = clone(tmp_path, bc_loss="mse", model_type="sac")
    after = SacRun(tmp_path / "after", f"runner.init_from={cloned.root}", "runner.max_steps=3")
    assert "starts from the weights" in after.train()
    mine = StoredReplay(after.checkpoint(3)).transitions()["actions"]
    assert mine[:32].std() < 0.8 < even[:32].std()
    wrong = SacRun(tmp_path / "wrong", f"runner.init_from={start}", "actor.model.hidden_sizes=[16]").train(code=2)
    assert "runner.init_from" in wrong and wrong.count("rlhpc: error:") == 1 and "Traceback" not in wrong


@pytest.mark.long
def test_offline_then_online_is_bit_identical_wherever_it_is_resumed(tmp_path):
    """IQL: five steps from a file, in which nothing is played, then four with the environments; killed in either part. Of the
    policy's own actions, some are clipped to the bounds, and of random ones none is."""
    write_demos(tmp_path / "demos.h5")
    words = (
        "algorithm.name=iql", "actor.model.model_type=iql", f"algorithm.demo_buffer.load_path={tmp_path / 'demos.h5'}",
        "algorithm.offline_steps=5", "algorithm.offline_updates=6", "algorithm.random_steps=32", "runner.max_steps=9",
        "runner.save_interval=2", "algorithm.replay_buffer={size: 256, min_buffer_size: 48}",
    )  # fmt: skip
    whole, parts = SacRun(tmp_path / "whole", *words), SacRun(tmp_path / "parts", *words)
    whole.train()
    for step in (4, 6):
        process = parts.start("runner.resume_dir=auto")
        wait_until(parts.checkpoint(step).exists)
        kill_tree(process)
    parts.train("runner.resume_dir=auto")
    assert_identical(parts, whole, 9)
    assert_same_replay(parts, whole, 9)
    rows = whole.rows()
    assert [row["rollout/env_steps"] for row in rows] == [0] * 5 + [32, 64, 96, 128]
    assert [row["train/updates"] for row in rows] == [6, 12, 18, 24, 30, 30, 46, 78, 110]
    assert "rollout/version" not in rows[4] and rows[5]["rollout/version"] == 5
    actions = np.abs(StoredReplay(whole.checkpoint(9)).transitions()["actions"])
    assert (actions[:32] < 2).all() and (actions[32:] == 2).any()


@pytest.mark.long
def test_pendulum_is_learned_and_the_checkpoint_evaluated_and_exported(tmp_path, capsys):
    """6 144 transitions; a random policy gets about -1 200, a good one -150."""
    run = SacRun(
        tmp_path, "runner.max_steps=96", "runner.save_interval=-1", "algorithm.rollout_steps=16",
        "algorithm.replay_buffer={size: 10000, min_buffer_size: 512}", "actor.model.hidden_sizes=[64,64]",
        "actor.global_batch_size=128", "actor.optim={lr: 1.0e-3, value_lr: 2.0e-3}", "algorithm.gamma=0.9",
        "algorithm.tau=0.02",
    )  # fmt: skip
    run.train()
    assert main(["eval", "--run", str(run.root), "--episodes", "20", "--output", str(tmp_path / "eval.json")]) == 0
    assert json.loads((tmp_path / "eval.json").read_text())["return_mean"] > -400
    assert main(["convert", "--run", str(run.root), "--output", str(tmp_path / "export")]) == 0
    assert main(["report", str(run.root), "--curves", str(tmp_path / "curves")]) == 0
    assert {"q_loss.svg", "actor_loss.svg", "alpha.svg", "entropy.svg"} <= {
        p.name for p in (tmp_path / "curves").iterdir()
    }
    assert set(load_exported(tmp_path / "export").state_dict()) == set(
        load_tensors(run.checkpoint(96) / "model.safetensors")
    )
    capsys.readouterr()


@pytest.mark.long
def test_a_flow_that_acts_at_random_is_steered_upright(tmp_path):
    """DSRL, 4 096 transitions. The flow by itself gets about -1 450; a good policy -150."""
    write_demos(tmp_path / "demos.h5", 20, 200, force=2.0)
    cloned = clone(
        tmp_path, "runner.max_steps=20", "actor.global_batch_size=256", "actor.optim.lr=1.0e-3", model_type="flow"
    )
    run = SacRun(
        tmp_path, "runner.max_steps=64", "runner.save_interval=-1", "algorithm.rollout_steps=16", "algorithm.gamma=0.9",
        "algorithm.replay_buffer={size: 10000, min_buffer_size: 512}", "actor.model.hidden_sizes=[64,64]",
        "actor.global_batch_size=128", "actor.optim={lr: 1.0e-3, value_lr: 2.0e-3}", "algorithm.tau=0.02",
        "actor.model.model_type=dsrl", f"actor.model.kwargs={{base: {cloned.root}, noise_bound: 2.5}}",
    )  # fmt: skip
    run.train()
    found = []
    for name, root in (("flow", cloned.root), ("steered", run.root)):
        assert main(["eval", "--run", str(root), "--episodes", "20", "--output", str(tmp_path / f"{name}.json")]) == 0
        found.append(json.loads((tmp_path / f"{name}.json").read_text())["return_mean"])
    assert found[0] < -1000 and found[1] > -400


def test_weights_are_sent_at_intervals_while_the_rollout_runs_ahead(tmp_path):
    """Weights of step 2 reach the rollout before step 4, which it plays while step 3 is trained on."""
    run = SacRun(
        tmp_path,
        "runner.max_steps=6",
        "runner.save_interval=-1",
        "algorithm.max_staleness=1",
        "runner.weight_sync_interval=2",
    )
    run.train()
    rows = [json.loads(line) for line in (run.root / "metrics.jsonl").read_text().splitlines()]
    assert [row["rollout/version"] for row in rows] == [0, 0, 0, 2, 2, 4]


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("algorithm.demo_buffer.ratio=1.5", "must lie between 0 and 1"),
        ("algorithm.replay_buffer.size=32", "min_buffer_size"),
        ("algorithm.demo_buffer.load_path=nowhere.h5", "no such file"),
        ("algorithm.loss_type=ppo", "is for task types that this one (off_policy) is not"),
        ("algorithm.name=td3", "algorithm.name td3 trains td3"),
        ("algorithm.name=sarsa", "which is unknown; allowed: crossq, iql, sac, td3"),
        ("algorithm.offline_steps=3", "name it in algorithm.demo_buffer.load_path"),
        ("algorithm.expectile=1", "must be above 0 and below 1"),
        ("algorithm.tau=0", "must be above 0 and at most 1"),
        ("env.train.env_id=CartPole-v1", "bounded continuous actions"),
    ],
)
def test_bad_input_is_one_message(tmp_path, capsys, override, words):
    run = SacRun(tmp_path, override)
    assert main(run.command()[3:]) == 2
    said = capsys.readouterr().err
    assert words in said and said.count("rlhpc: error:") == 1 and "Traceback" not in said and not run.root.exists()
