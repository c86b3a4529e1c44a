"""DAgger: which data each round trains on, which weights it starts from, and what a repeated command leaves alone.

Training and recording are replaced: their own tests are elsewhere.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlhpc.checkpoint import CheckpointWriter
from rlhpc.embodied.data.datasets import WriteOptions
from rlhpc.embodied.data.lerobot_writer import NothingToWrite
from rlhpc.embodied.runners.dagger import dagger
from rlhpc.jobs.paths import RunPaths
from rlhpc.runtime.errors import ConfigError, RlhpcError

BASE = str(Path(__file__).resolve().parents[4] / "configs" / "base" / "bc.yaml")
QUICKSTART = str(Path(BASE).parents[1] / "quickstart.yaml")
PERSON = "{scripted: {expert: 'a:b', apart: 1, patience: 1, hold: 1}}"


class Rounds:
    """Stand-ins of training and recording, which write what the rounds look for and keep their arguments."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.trained: list[Any] = []
        self.recorded: list[dict[str, Any]] = []
        self.exit_code, self.interventions = 0, 2

    def train(self, cfg: Any) -> dict[str, Any]:
        self.trained.append(cfg)
        if not self.exit_code:
            with CheckpointWriter(
                RunPaths.from_run_dir(cfg.runner.run_dir, cfg.runner.name), cfg.runner.max_steps
            ) as writer:
                writer.add_bytes("model.safetensors", cfg.runner.name.encode())
                writer.commit()
        return {"exit_code": self.exit_code}

    def record(self, source: str, cfg: Any, output: Path, **options: Any) -> dict[str, Any]:
        self.recorded.append({"source": source, "output": output, **options})
        if options["only_taken"] and not self.interventions and output.suffix != ".h5":
            raise NothingToWrite("no intervention")
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_bytes(b"")
        episodes = [{}] * (self.interventions if options["only_taken"] else options["episodes"])
        output.with_suffix(".json").write_text(json.dumps({"episodes": episodes}))
        return {"played": options["episodes"], "return_mean": 1.0, "taken_steps": 3, "steps": 9}

    def run(self, *overrides: str, **options: Any) -> list[dict[str, Any]]:
        words = [f"runner.run_dir={self.folder}", "runner.name=clone", "runner.max_steps=2"]
        words += ["env.train.env_id=Pendulum-v1", *overrides]
        return dagger(BASE, words, **{"expert": "a:b", "num_rounds": 2, "num_episodes": 5, **options})

    def data(self) -> list[list[str]]:
        """Names of the files that each training read."""
        return [[Path(path).name for path in cfg.demos.path] for cfg in self.trained]


@pytest.fixture
def rounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Rounds:
    module = importlib.import_module("rlhpc.embodied.runners.dagger")
    stand_ins = Rounds(tmp_path)
    monkeypatch.setattr(module, "train", stand_ins.train)
    monkeypatch.setattr(module, "record_episodes", stand_ins.record)
    return stand_ins


def test_each_round_trains_on_all_data_and_starts_from_the_round_before(rounds: Rounds) -> None:
    runs = rounds.run("demos.path=first.h5")
    assert rounds.data() == [
        ["first.h5"], ["first.h5", "round_1.h5"], ["first.h5", "round_1.h5", "round_2.h5"],
    ]  # fmt: skip
    checkpoints = [run["checkpoint"] for run in runs]
    assert [cfg.runner.init_from for cfg in rounds.trained] == [None, *checkpoints[:2]]
    assert [run["name"] for run in runs] == ["clone-round0", "clone-round1", "clone-round2"]
    assert runs[2]["data"][0] == "first.h5"
    assert [call["source"] for call in rounds.recorded] == checkpoints[:2]
    assert all(call["teacher"] == "a:b" and call["intervene"] is None for call in rounds.recorded)
    seeds = [call["seed"] for call in rounds.recorded]
    assert len({*seeds, rounds.trained[0].runner.seed}) == 3, (
        "no round repeats the episodes of another or of evaluation"
    )


def test_the_expert_records_the_first_data_where_there_is_none(rounds: Rounds) -> None:
    rounds.run(num_rounds=0)
    [call] = rounds.recorded
    assert (call["source"], call["teacher"], call["episodes"]) == ("a:b", None, 5)
    assert rounds.data() == [["round_0.h5"]]


def test_what_was_recorded_of_a_round_before_it_ended_early_is_cloned(rounds: Rounds) -> None:
    """Also if nobody takes over when the round is played again."""
    early = rounds.folder / "clone-dagger" / "round_1.incomplete" / "0.h5"
    early.parent.mkdir(parents=True)
    early.touch()
    rounds.interventions = 0
    rounds.run("demos.path=first.h5", intervene=PERSON, expert=None)
    assert rounds.data() == [["first.h5"], ["first.h5", "0.h5"]]
    assert all(call["counts_whole"] for call in rounds.recorded)


def test_a_repeated_command_trains_and_records_nothing_again(rounds: Rounds) -> None:
    first = rounds.run("demos.path=first.h5")
    rounds.trained.clear()
    rounds.recorded.clear()
    assert rounds.run("demos.path=first.h5") == first
    assert not rounds.trained and not rounds.recorded
    assert len(rounds.run("demos.path=first.h5", num_rounds=3)) == 4
    assert len(rounds.trained) == len(rounds.recorded) == 1, "one more round is added"


def test_a_round_that_was_stopped_goes_on(rounds: Rounds) -> None:
    rounds.exit_code = 3
    with pytest.raises(RlhpcError, match=r"clone-round0 was stopped; the same command goes on from there"):
        rounds.run("demos.path=first.h5")
    with CheckpointWriter(RunPaths.from_run_dir(rounds.folder, "clone-round0"), 1) as writer:
        writer.add_bytes("model.safetensors", b"")
        writer.commit()
    rounds.exit_code = 0
    rounds.trained.clear()
    rounds.run("demos.path=first.h5", num_rounds=0)
    assert [cfg.runner.resume_dir for cfg in rounds.trained] == ["auto"]


@pytest.mark.parametrize("to", ["hdf5", "lerobot"])
def test_rounds_end_where_nobody_takes_over(rounds: Rounds, to: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = {"expert": None, "intervene": PERSON, "options": WriteOptions(to=to)}
    runs = rounds.run("demos.path=first.h5", num_rounds=1, **options)
    assert len(runs) == 2 and rounds.recorded[0]["only_taken"] and rounds.recorded[0]["teacher"] is None
    rounds.interventions = 0
    rounds.recorded.clear()
    runs = rounds.run("demos.path=first.h5", "runner.name=alone", **options)
    assert [run["name"] for run in runs] == ["alone-round0"] and len(rounds.recorded) == 1
    assert "nobody took over in 5 episodes" in capsys.readouterr().err


def test_what_it_cannot_begin_with_is_refused_before_the_first_round(rounds: Rounds) -> None:
    refused: list[tuple[str, Callable[[], Any]]] = [
        ("did you mean 'keyboard'", lambda: rounds.run("demos.path=a.h5", intervene="keybord")),
        ("acts in chunks of 2", lambda: rounds.run("demos.path=a.h5", "actor.model.num_action_chunks=2", intervene=PERSON)),
        ("demos.path is null", lambda: rounds.run(expert=None, intervene=PERSON)),
        ("dagger takes runs of bc", lambda: dagger(QUICKSTART, [], expert="a:b", num_rounds=1, num_episodes=1)),
    ]  # fmt: skip
    for message, call in refused:
        with pytest.raises(ConfigError, match=message):
            call()
    assert not rounds.trained and not rounds.recorded
