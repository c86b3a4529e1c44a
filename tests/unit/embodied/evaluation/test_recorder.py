"""Recorder of episodes: complete ones, successful ones, interventions alone, and none that failed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlhpc.embodied.data.datasets import WriteOptions
from rlhpc.embodied.data.recording import Recording, incomplete_datasets
from rlhpc.embodied.data.trajectories import TrajectoryWriter, read_trajectories
from rlhpc.embodied.envs.base import Step
from rlhpc.embodied.envs.registry import check_env
from rlhpc.embodied.evaluation.episodes import play
from rlhpc.embodied.evaluation.recorder import EpisodeRecorder, InterventionRecorder, record
from rlhpc.embodied.interventions.sources import Mark, Scripted, Signals
from rlhpc.embodied.models import build_model
from rlhpc.runtime.errors import ConfigError, RlhpcError
from tests.extras import need_extra
from tests.unit.embodied.evaluation.saved_policies import load
from tests.unit.embodied.workers.failing import Failing, Still, recorded


def recording(folder: Path, *, keeps: bool = False) -> Recording:
    def open_writer(path: Path) -> TrajectoryWriter:
        return TrajectoryWriter(path, env_id="x", env_kwargs={}, max_episode_steps=4)

    return Recording(open_writer, folder / "a.h5", keeps=keeps)


def test_recordings_leave_out_episodes_that_failed(tmp_path: Path) -> None:
    env = Failing({3})
    with recording(tmp_path) as writer:
        recorder = EpisodeRecorder(writer, env, only_success=False, num_episodes=3)
        play(Still(), env, np.array([2, 1]), torch.device("cpu"), observer=recorder)
        assert len(writer) == recorder.num_played == 3
    assert [len(rewards) for rewards in recorded(tmp_path / "a.h5")] == [4, 4, 4]


def policy_of(cfg: Any) -> Any:
    return build_model(cfg.actor.model, *check_env(cfg.env.train), seed=1)


def test_a_policy_is_recorded_with_its_returns_and_steps(tmp_path: Path) -> None:
    cfg = load()
    summary = record(policy_of(cfg), cfg.env.eval, tmp_path / "a.h5", episodes=3, seed=1, source_desc="here")
    episodes = list(read_trajectories(tmp_path / "a.h5"))
    lengths = [len(episode["rewards"]) for episode in episodes]
    assert summary["episodes"] == len(episodes) == 3 and summary["steps"] == sum(lengths) and max(lengths) <= 7
    assert summary["return_mean"] == pytest.approx(sum(lengths) / 3), "a step of CartPole gives 1"
    assert all(len(episode["obs"]) == len(episode["rewards"]) + 1 for episode in episodes)
    assert json.loads((tmp_path / "a.json").read_text())["source_desc"] == "here"
    again = record(policy_of(cfg), cfg.env.eval, tmp_path / "b.h5", episodes=3, seed=1)
    assert {**again, "output": ""} == {**summary, "output": ""}


def test_success_that_nobody_tells_cannot_be_asked_for(tmp_path: Path) -> None:
    cfg = load()
    with pytest.raises(ConfigError, match="CartPole-v1 does not say whether an episode succeeded"):
        record(policy_of(cfg), cfg.env.eval, tmp_path / "a.h5", episodes=1, seed=1, only_success=True)


class Succeeding(Failing):
    """Episodes of slot 1 succeed at their end, those of slot 0 never do."""

    def step(self, actions: np.ndarray) -> Step:
        obs, rewards, terminations, truncations, infos = super().step(actions)
        if "episode" in infos:
            infos["episode"]["success"] = np.array([False, True])
        return obs, rewards, terminations, truncations, infos


def played(recorder: EpisodeRecorder, env: Failing, *quota: int) -> None:
    play(Still(), env, np.array(quota), torch.device("cpu"), observer=recorder)


def test_only_episodes_that_succeed_are_written(tmp_path: Path) -> None:
    env = Succeeding(set())
    with recording(tmp_path) as writer:
        recorder = EpisodeRecorder(writer, env, only_success=True, num_episodes=2)
        played(recorder, env, 2, 2)
        assert (recorder.num_played, recorder.num_missing, recorder.success_known) == (4, 0, True)
    assert [episode["success"].tolist() for episode in read_trajectories(tmp_path / "a.h5")] == [
        [False] * 3 + [True]
    ] * 2


def test_unsuccessful_play_has_an_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cfg, env = load(), Succeeding(set())
    monkeypatch.setattr("rlhpc.embodied.evaluation.recorder.make_env", lambda *args, **options: env)
    monkeypatch.setattr(Succeeding, "num_envs", 2, raising=False)
    with pytest.raises(RlhpcError, match=r"of \d+ episodes only \d+ succeeded; 30 were wanted"):
        monkeypatch.setattr("rlhpc.embodied.evaluation.recorder.MAX_ATTEMPTS", 1)
        record(Still(), cfg.env.eval, tmp_path / "a.h5", episodes=30, seed=1, only_success=True)


def test_chunks_of_actions_cannot_be_recorded(tmp_path: Path) -> None:
    with recording(tmp_path) as writer:
        recorder = EpisodeRecorder(writer, Failing(set()), only_success=False, num_episodes=1)
        with pytest.raises(ConfigError, match="acts in chunks of 3"):
            recorder.on_step_start(np.zeros((2, 1)), np.zeros((2, 3, 1)))


def steps_of(recorder: InterventionRecorder, taken: list[bool], ends: dict[int, str]) -> None:
    """Plays a slot whose observation is the number of the step; in steps of `taken` a person acts."""
    for number, is_taken in enumerate(taken):
        recorder.on_step_start(np.full((1, 1), float(number)), np.zeros((1, 1, 1)))
        end = ends.get(number, "")
        infos = {"executed_actions": np.full((1, 1), 10.0 + number), "intervened": np.array([[is_taken]]),
                 "final_obs": np.full((1, 1), 99.0), "lost": np.array([end == "lost"])}  # fmt: skip
        recorder.on_step_end(
            np.array([True]), np.array([1.0]), np.array([end == "terminated"]), np.array([end == "lost"]), infos
        )


def test_an_intervention_is_an_episode_that_ends_where_the_policy_acts_again(tmp_path: Path) -> None:
    env = Failing(set())
    env.num_envs = 1
    with recording(tmp_path) as writer:
        recorder = InterventionRecorder(writer, env, num_episodes=2)
        taken = [False, True, True, False, True, True, True]
        steps_of(recorder, taken, {5: "terminated", 6: "lost"})
        assert (recorder.num_intervention_steps, recorder.num_played, recorder.num_missing) == (4, 1, 1)
    first, second = read_trajectories(tmp_path / "a.h5")
    assert first["obs"].ravel().tolist() == [1, 2, 3] and first["actions"].ravel().tolist() == [11, 12]
    assert first["terminations"].tolist() == [False, False] and first["truncations"].tolist() == [False, True]
    assert second["obs"].ravel().tolist() == [4, 5, 99] and second["terminations"].tolist() == [False, True]


def test_a_script_takes_over_while_it_is_recorded(tmp_path: Path) -> None:
    """The actions that were executed are recorded, not those that the policy chose."""
    cfg = load("env.eval.env_id=Pendulum-v1", "env.train.env_id=Pendulum-v1")
    script = Scripted(f"{__name__}:full_torque", apart=0.0, patience=1, hold=2)
    actor = policy_of(cfg)
    summary = record(actor, cfg.env.eval, tmp_path / "a.h5", episodes=2, seed=1, intervention=script, only_taken=True)
    parts = list(read_trajectories(tmp_path / "a.h5"))
    assert summary["taken_steps"] == sum(len(part["rewards"]) for part in parts) > 0 and summary["played"] == 2
    assert all((part["actions"] == 2.0).all() for part in parts)


def full_torque(obs: np.ndarray) -> np.ndarray:
    return np.full((len(obs), 1), 2.0, np.float32)


class Leaving(Scripted):
    """A person who closes the window in the second step of the third episode."""

    episodes = steps = 0

    def act(self, obs: Any, actions: np.ndarray, picture: Any) -> tuple[np.ndarray, np.ndarray]:
        self.steps += 1
        if self.episodes == 2 and self.steps == 2:
            raise KeyboardInterrupt
        return super().act(obs, actions, picture)

    def end_episodes(self, slots: np.ndarray) -> None:
        self.steps = 0
        self.episodes += int(slots.sum())


@pytest.mark.parametrize("to", ["hdf5", "lerobot"])
def test_episodes_of_a_person_who_leaves_are_kept(tmp_path: Path, to: str) -> None:
    """In both formats; those of a round of DAgger apart, since an incomplete one would count as done."""
    if to == "lerobot":
        need_extra("embodied")
    cfg = load("env.eval.env_id=Pendulum-v1", "env.train.env_id=Pendulum-v1", "env.eval.num_envs=1")
    options = WriteOptions(to=to, task="swing", fps=5)

    def interrupted(name: str, **changes: Any) -> Path:
        leaving = Leaving(f"{__name__}:full_torque", apart=0.0, patience=1, hold=2)
        leaving.episodes = -1  # the reset before the first episode ends one, too
        output = tmp_path / (f"{name}.h5" if to == "hdf5" else name)
        with pytest.raises(KeyboardInterrupt) as caught:
            record(
                policy_of(cfg), cfg.env.eval, output, episodes=5, seed=1, intervention=leaving, options=options, **changes
            )  # fmt: skip
        assert "ended early" in caught.value.__notes__[0] or changes
        return output

    output = interrupted("whole")
    assert [len(episode["rewards"]) for episode in read_trajectories(output)] == [7, 7]
    [in_progress] = incomplete_datasets(output)
    [episode] = read_trajectories(in_progress)
    assert len(episode["rewards"]) == 1 and episode["truncations"].tolist() == [True]
    round_output = interrupted("round", only_taken=True, counts_whole=True)
    assert not round_output.exists()
    led = [len(episode["rewards"]) for path in incomplete_datasets(round_output) for episode in read_trajectories(path)]
    assert sum(led) == 7 + 7 + 1


@pytest.mark.parametrize("holds_hardware", [True, False])
def test_complete_episodes_of_a_robot_that_fails_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, holds_hardware: bool
) -> None:
    """Those of a simulator are played again."""

    class Breaking(Failing):
        steps_made = 0

        def step(self, actions: np.ndarray) -> Step:
            self.steps_made += 1
            if self.steps_made > 9:
                raise RlhpcError("the robot is lost")
            return super().step(actions)

    cfg, env = load("env.eval.num_envs=2"), Breaking(set())
    env.holds_hardware = holds_hardware
    monkeypatch.setattr("rlhpc.embodied.evaluation.recorder.make_env", lambda *args, **options: env)
    with pytest.raises(RlhpcError, match="the robot is lost"):
        record(Still(), cfg.env.eval, tmp_path / "a.h5", episodes=10, seed=1)
    assert (tmp_path / "a.h5").exists() is holds_hardware
    if holds_hardware:
        assert [len(rewards) for rewards in recorded(tmp_path / "a.h5")] == [4] * 4
        assert [len(rewards) for rewards in recorded(tmp_path / "a.incomplete")] == [1] * 2


@pytest.mark.parametrize("holds_hardware", [True, False])
def test_a_number_that_is_not_finite_costs_its_episode_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], holds_hardware: bool
) -> None:
    """The recording has as many episodes as were wanted, and says what is missing in one line."""

    class Spoiled(Failing):
        def _obs(self) -> np.ndarray:
            obs = super()._obs()
            if self._t == 6:
                obs[1] = np.nan
            return obs

    cfg, env = load("env.eval.num_envs=2"), Spoiled(set())
    env.holds_hardware = holds_hardware
    monkeypatch.setattr("rlhpc.embodied.evaluation.recorder.make_env", lambda *args, **options: env)
    summary = record(Still(), cfg.env.eval, tmp_path / "a.h5", episodes=4, seed=1)
    assert summary["episodes"] == 4 and summary["played"] > 4
    assert [len(rewards) for rewards in recorded(tmp_path / "a.h5")] == [4] * 4
    [line] = [text for text in capsys.readouterr().err.splitlines() if "finite" in text]
    assert "left out because of a number that is not finite: 1; episode " in line and "obs of step" in line
    assert (tmp_path / "a.incomplete").exists() is holds_hardware


def test_an_episode_whose_robot_was_stopped_is_kept_without_the_step_that_failed(tmp_path: Path) -> None:
    env = Failing({3})
    with recording(tmp_path, keeps=True) as writer:
        recorder = EpisodeRecorder(writer, env, only_success=False, num_episodes=3)
        with recorder:
            play(Still(), env, np.array([2, 1]), torch.device("cpu"), observer=recorder)
    assert [len(rewards) for rewards in recorded(tmp_path / "a.h5")] == [4, 4, 4]
    [episode] = read_trajectories(tmp_path / "a.incomplete")
    assert episode["obs"].ravel().tolist() == [0, 1, 2] and episode["truncations"].tolist() == [False, True]
    assert episode["success"].tolist() == [False, False]


class Interrupting(Failing):
    """The policy is asked once too often: between two steps, the program is interrupted."""

    def env_states(self) -> Any:
        if self._t == 6:
            raise KeyboardInterrupt
        return None


def test_between_two_steps_the_last_observation_is_unknown(tmp_path: Path) -> None:
    env = Interrupting(set())
    with pytest.raises(KeyboardInterrupt), recording(tmp_path, keeps=True) as writer:
        recorder = EpisodeRecorder(writer, env, only_success=False, num_episodes=9)
        with recorder:
            play(Still(), env, np.array([5, 4]), torch.device("cpu"), observer=recorder)
    assert [episode["obs"].ravel().tolist() for episode in read_trajectories(tmp_path / "a.incomplete")] == [[0, 1]] * 2


def test_episodes_with_and_without_a_mark_are_in_one_dataset(tmp_path: Path) -> None:
    """An episode that reached its limit before a person marked it is no success."""
    need_extra("embodied")
    cfg = load("env.eval.env_id=Pendulum-v1", "env.train.env_id=Pendulum-v1", "env.eval.num_envs=1")

    class MarkingOnce(Marking):
        def signals(self) -> Signals:
            return Signals(Mark.SUCCESS if self.steps == 3 and not self.num_ended else Mark.NONE)

        num_ended = -1

        def end_episodes(self, slots: np.ndarray) -> None:
            super().end_episodes(slots)
            self.num_ended += 1

    person = MarkingOnce(f"{__name__}:full_torque", apart=0.0, patience=1, hold=2)
    record(
        policy_of(cfg), cfg.env.eval, tmp_path / "a", episodes=2, seed=1, intervention=person,
        options=WriteOptions(to="lerobot", fps=5),
    )  # fmt: skip
    successes = [episode["success"].tolist() for episode in read_trajectories(tmp_path / "a")]
    assert successes == [[False, False, True], [False] * 7]


class Marking(Scripted):
    """A person who leads, pauses after the first step of an episode, and marks the third one as a success."""

    steps, polls = 0, 0

    def act(self, obs: Any, actions: np.ndarray, picture: Any) -> tuple[np.ndarray, np.ndarray]:
        self.steps, self.polls = self.steps + 1, 0
        return super().act(obs, actions, picture)

    def signals(self) -> Signals:
        self.polls += 1
        return Signals(Mark.SUCCESS if self.steps == 3 else Mark.NONE, paused=self.steps == 1 and self.polls < 3)

    def end_episodes(self, slots: np.ndarray) -> None:
        super().end_episodes(slots)
        self.steps = 0


@pytest.mark.parametrize("only_taken", [False, True])
def test_pauses_and_marks_while_it_is_recorded(tmp_path: Path, only_taken: bool) -> None:
    """Also with `only_success`, in an environment that does not say what a success is."""
    cfg = load("env.eval.env_id=Pendulum-v1", "env.train.env_id=Pendulum-v1", "env.eval.num_envs=1")
    person = Marking(f"{__name__}:full_torque", apart=0.0, patience=1, hold=2)
    summary = record(
        policy_of(cfg), cfg.env.eval, tmp_path / "a.h5", episodes=2, seed=1, intervention=person, only_taken=only_taken,
        only_success=not only_taken,
    )  # fmt: skip
    assert summary["success_once"] == 1 and summary["played"] == 2 and summary["steps"] == 6
    for episode in read_trajectories(tmp_path / "a.h5"):
        assert episode["terminations"].tolist() == [False, False, True] and episode["rewards"][-1] == 1
        assert only_taken or episode["success"].tolist() == [False, False, True]
