"""A run folder as a handle in Python, of a finished, a live and an older run, and folders that are no run."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rlhpc
from rlhpc.jobs.paths import RunPaths
from rlhpc.metrics.logger import read_metrics
from rlhpc.runtime.errors import CheckpointError, ConfigError
from tests.baseline.archive import unpack
from tests.extras import need_extra

FLAT_RUNS = Path(__file__).resolve().parents[2] / "data" / "flat_runs"


def write_rows(folder: Path, text: str) -> rlhpc.LoadedRun:
    folder.mkdir(exist_ok=True)
    (folder / "metrics.jsonl").write_text(text)
    return rlhpc.load_run(folder)


def row(step: int, **metrics: Any) -> str:
    return json.dumps({"step": step, **{name.replace("_", "/", 1): value for name, value in metrics.items()}}) + "\n"


# -- metrics ------------------------------------------------------------------------------------------------------------


def test_metrics_of_a_run_that_is_being_written(tmp_path: Path) -> None:
    text = row(1, train_loss=2.0) + "broken\n" + row(2, train_loss=None, eval_return=5) + '{"step": 3, "train/lo'
    run = write_rows(tmp_path / "run", text)
    metrics = run.metrics()
    assert metrics.step.tolist() == [1, 2] and list(metrics) == ["eval/return", "train/loss"]
    assert np.array_equal(metrics["train/loss"], [2.0, math.nan], equal_nan=True)
    assert [values.tolist() for values in metrics.curve("train/loss")] == [[1.0], [2.0]]
    with run.folder.joinpath("metrics.jsonl").open("a") as file:
        file.write('ss": 7.0}\n')
    later = run.metrics("train/*")
    assert list(later) == ["train/loss"] and later.step.tolist() == [1, 2, 3] and later["train/loss"][-1] == 7.0
    assert metrics.step.tolist() == [1, 2]  # what was returned before does not change


def test_metrics_are_those_of_the_rows(tmp_path: Path) -> None:
    run = rlhpc.load_run(FLAT_RUNS / "embodied")
    rows = read_metrics(FLAT_RUNS / "embodied" / "metrics.jsonl")
    metrics = run.metrics()
    assert len(rows) > 1 and metrics.step.tolist() == [r["step"] for r in rows]
    for name, values in metrics.items():
        assert values.tolist() == pytest.approx([r.get(name, math.nan) for r in rows], nan_ok=True)


def test_a_metric_that_does_not_exist_is_named_with_those_that_do(tmp_path: Path) -> None:
    run = write_rows(tmp_path / "run", row(1, train_loss=1.0))
    with pytest.raises(ConfigError, match=r"no metric fits 'train/los'; the run has: train/loss"):
        run.metrics("train/los")
    with pytest.raises(KeyError, match="the table has: train/loss"):
        run.metrics()["loss"]
    assert len(write_rows(tmp_path / "empty", "").metrics("train/*")) == 0  # before the first step


def test_metrics_become_a_table_of_pandas(tmp_path: Path) -> None:
    need_extra("dev")
    frame = write_rows(tmp_path / "run", row(1, train_loss=1.0) + row(4, train_loss=0.5)).metrics().to_pandas()
    assert frame.index.tolist() == [1, 4] and frame["train/loss"].tolist() == [1.0, 0.5] and frame.index.name == "step"


def test_without_pandas_the_message_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    metrics = write_rows(tmp_path / "run", row(1, train_loss=1.0)).metrics()
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ConfigError, match="pip install pandas"):
        metrics.to_pandas()


# -- samples and episodes -----------------------------------------------------------------------------------------------


def test_samples_of_a_language_run() -> None:
    run = rlhpc.load_run(FLAT_RUNS / "language")
    samples = list(run.samples())
    raw = [json.loads(line) for path in run.folder.rglob("*.samples.jsonl") for line in path.read_text().splitlines()]
    assert len(samples) == len(raw) > 0
    first = samples[0]
    assert (first.step, first.suite, first.prompt) == (2, "held_out", raw[0]["prompt"])
    assert (first.response, first.reward, first.num_tokens) == (raw[0]["response"], raw[0]["reward"], raw[0]["tokens"])
    with pytest.raises(ConfigError, match=r"no samples of step 3; it has: step 2 held_out"):
        run.samples(step=3)


def test_an_agents_sample_has_each_token_with_its_log_prob(tmp_path: Path) -> None:
    result = RunPaths(write_rows(tmp_path / "run", row(1, train_loss=1.0)).folder).eval_result(1, "default")
    result.parent.mkdir(parents=True)
    result.write_text(json.dumps({"global_step": 1, "suite": "default"}))
    parts = [
        {"turn": 0, "read": "<ask>"},
        {"turn": 1, "drawn": [["a", -0.5], ["b", "x"], ["c", -1]], "reward": 2},
        "no part",
    ]
    sample = {"id": 7, "sample": 0, "prompt": "p", "response": "r", "right": True, "terms": {"math": 1, "odd": "x"},
              "episode": [{"role": "solver", "parts": parts}, None]}  # fmt: skip
    answer = {**sample, "id": 8, "drawn": [["r", -0.25], ["!", -2]]}
    del answer["episode"]
    lines = [json.dumps(sample), json.dumps(answer), '{"id": 8', json.dumps({"id": 9})]
    result.with_name("default.samples.jsonl").write_text("\n".join(lines))
    [read, one_turn] = rlhpc.load_run(tmp_path / "run").samples()
    assert [(p.role, p.turn, p.text, p.tokens, p.logprobs, p.reward) for p in read.parts] == [
        ("solver", 0, "<ask>", (), (), 0.0), ("solver", 1, "ac", ("a", "c"), (-0.5, -1.0), 2.0)
    ]  # fmt: skip
    assert read.terms == {"math": 1.0} and read.reward is None and read.is_right
    assert [(p.turn, p.text, p.tokens, p.logprobs) for p in one_turn.parts] == [(0, "r!", ("r", "!"), (-0.25, -2.0))]


def test_recorded_episodes(tmp_path: Path) -> None:
    need_extra("embodied")
    folder = unpack("bc", tmp_path / "bc", tmp_path)
    run = rlhpc.load_run(folder / "runs" / "run")
    with pytest.raises(ConfigError, match=r"no recorded episodes; it has: none; record some: rlhpc record --run"):
        run.episodes()
    target = RunPaths(run.folder).recording(2)
    target.parent.mkdir()
    for suffix in (".h5", ".json"):
        shutil.copy(folder / "data" / f"demos{suffix}", target.with_suffix(suffix))
    episodes = list(run.episodes(step=2))
    assert [episode.index for episode in episodes] == list(range(len(episodes))) and len(episodes) > 1
    for episode in episodes:
        assert len(episode.observations) == len(episode) + 1 and episode.terminated.shape == (len(episode),)
        assert episode.rewards is None or episode.episode_return == pytest.approx(float(np.sum(episode.rewards)))
    target.write_bytes(b"no HDF5")
    with pytest.raises(ConfigError, match="demos"):
        list(run.episodes())


# -- policies ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["ppo_discrete", "ppo", "ppo_flow", "ppo_pixels", "td3"])
def test_the_policy_of_a_simulators_run_acts_as_in_an_evaluation(name: str, tmp_path: Path) -> None:
    need_extra("embodied")
    from rlhpc.embodied.envs.gymnasium_env import make_single_env
    from rlhpc.runs.configuration import load_config

    run = rlhpc.load_run(unpack(name, tmp_path / "run", tmp_path) / "runs" / "run")
    assert [record.step for record in run.checkpoints] == [2]
    env, _ = make_single_env(load_config(run.checkpoints[0].path / "config.yaml", training=False).env.eval)
    observation, _ = env.reset(seed=0)
    with run.policy() as policy, run.policy(2) as again:
        for _ in range(3):
            actions = policy.actions(observation)
            assert all(env.action_space.contains(action) for action in actions)
            assert np.array_equal(actions[0], again.act(observation))
            observation, *_ = env.step(actions[0])
        with pytest.raises(ConfigError, match="the observation does not fit the policy"):
            policy.act(np.zeros(99))


def test_a_policy_that_is_not_there_or_damaged(tmp_path: Path) -> None:
    need_extra("embodied")
    run = rlhpc.load_run(unpack("ppo", tmp_path / "run", tmp_path) / "runs" / "run")
    with pytest.raises(CheckpointError, match=r"no complete checkpoint of step 3; it has: 2"):
        run.policy(3)
    (run.checkpoints[0].path / "model.safetensors").write_bytes(b"cut")
    with pytest.raises(CheckpointError):
        run.policy()


def test_the_policy_of_a_language_models_run_answers() -> None:
    need_extra("llm")
    with rlhpc.load_run(FLAT_RUNS / "language").policy() as policy:
        answers = [policy.generate("1 + 1 =") for _ in range(2)]
    assert all(isinstance(answer, str) for answer in answers)


def test_a_run_whose_model_does_not_answer_says_so(tmp_path: Path) -> None:
    need_extra("llm")
    run = rlhpc.load_run(unpack("reward_model", tmp_path / "run", tmp_path) / "runs" / "run")
    with pytest.raises(ConfigError, match="no policy that acts or answers"):
        run.policy()


# -- the folder ----------------------------------------------------------------------------------------------------------


def test_facts_of_a_run_of_an_earlier_version() -> None:
    run = rlhpc.load_run(str(FLAT_RUNS / "embodied"))
    assert run.name == "embodied" and run.config["runner"]["task_type"] == "embodied" and run.provenance == {}
    [evaluation] = run.evaluations
    assert (evaluation.step, evaluation.suite) == (2, "default") and evaluation.numbers["episodes"] > 0
    assert run.status.state == "unknown" and run.status.step is None


def test_the_state_of_a_finished_run(tmp_path: Path) -> None:
    status = rlhpc.load_run(unpack("ppo", tmp_path / "run", tmp_path) / "runs" / "run").status
    assert (status.state, status.step, status.max_steps) == ("finished", 2, 2)


def test_a_folder_that_is_no_run_leads_to_the_runs_below_it(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "config.yaml").write_text("runner: {}")
    with pytest.raises(ConfigError, match=r"is no run folder; runs below it: runs/a, runs/b"):
        rlhpc.load_run(tmp_path)
    with pytest.raises(ConfigError, match=r"there is no folder .*; runs in .*: a, b"):
        rlhpc.load_run(tmp_path / "runs" / "c")
    with pytest.raises(ConfigError, match=r"is no run folder; give the folder of a run"):
        rlhpc.load_run(__file__)
    with pytest.raises(ConfigError, match=r"config.yaml cannot be read"):
        (tmp_path / "runs" / "a" / "config.yaml").write_bytes(b"{: \x00")
        rlhpc.load_run(tmp_path / "runs" / "a").config  # noqa: B018


def test_what_a_notebook_shows_is_escaped(tmp_path: Path) -> None:
    run = write_rows(tmp_path / "<img src=x>", json.dumps({"step": 1, "train/<script>": 1.0}) + "\n")
    for shown in (run._repr_html_(), run.metrics()._repr_html_()):
        assert "<table>" in shown and "<script>" not in shown and "<img" not in shown
    assert "&lt;script&gt;" in run.metrics()._repr_html_() and "<img src=x>" in repr(run)


def test_planted_files_are_messages_and_not_followed(tmp_path: Path) -> None:
    """A pipe would block a reader for ever, a device has no end."""
    folder = tmp_path / "run"
    (folder / "config.yaml").mkdir(parents=True)
    os.mkfifo(folder / "metrics.jsonl")
    (folder / "status.json").symlink_to("/dev/zero")
    run = rlhpc.load_run(folder)
    with pytest.raises(ConfigError, match=r"metrics\.jsonl cannot be read"):
        run.metrics()
    with pytest.raises(ConfigError, match=r"config\.yaml cannot be read"):
        run.config  # noqa: B018
    assert run.status.state == "unknown" and "<td>cannot be read</td>" in run._repr_html_()


def test_opening_a_run_imports_no_torch(tmp_path: Path) -> None:
    write_rows(tmp_path / "run", row(1, train_loss=1.0))
    code = f"import sys, rlhpc; rlhpc.load_run({str(tmp_path / 'run')!r}).metrics(); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
