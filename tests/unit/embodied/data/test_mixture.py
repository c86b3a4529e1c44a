"""Mixture of demonstrations and played transitions."""

from __future__ import annotations

import numpy as np
import pytest
from gymnasium import spaces

from rlhpc.embodied.data.mixture import (
    INTERVENED,
    INTERVENTIONS_FOLDER,
    POSITION,
    DrawOptions,
    Mixture,
    PositionCounter,
    fit,
    transitions_of,
)
from rlhpc.embodied.data.replay_buffer import ReplayBuffer
from rlhpc.runtime.errors import ConfigError
from tests.unit.embodied.data.transitions import SLOTS, batch, buffers, fill, play


def test_demonstrations_are_a_fixed_share_on_any_number_of_ranks(tmp_path):
    demos = transitions_of([demo(5), demo(8)])
    one, two = buffers(tmp_path), buffers(tmp_path, 2)
    for found in (one, two):
        fill(found, 0, 9)
    rows = batch(one, demos=demos, ratio=0.25)
    assert (rows[:, 0] < 0).sum() == 4
    assert np.array_equal(rows, batch(two, demos=demos, ratio=0.25))
    assert (batch(one, demos=demos, ratio=1.0)[:, 0] < 0).all()
    other = transitions_of([{**demo(5), "obs": np.zeros((6, 3))}])
    with pytest.raises(ConfigError, match=r"algorithm\.demo_buffer\.load_path.*float32\[3\].*float32\[2\]"):
        batch(one, demos=other)


def test_before_anything_is_played_all_rows_are_demonstrations_on_any_number_of_ranks(tmp_path):
    demos = transitions_of([demo(5), demo(8)])
    one, two = buffers(tmp_path), buffers(tmp_path, 2)
    rows = batch(one, alone=True, demos=demos, ratio=0.25)
    assert len(rows) == 16 and (rows[:, 0] < 0).all() and len(set(rows[:, 1])) == 16
    assert np.array_equal(rows, batch(two, alone=True, demos=demos, ratio=0.25))


def demo(steps: int) -> dict[str, np.ndarray]:
    ends = np.zeros(steps, bool)
    ends[-1] = True
    return {
        "obs": np.arange(2 * steps + 2, dtype=np.float64).reshape(-1, 2),
        "actions": np.full((steps, 1), 0.5),
        "rewards": -np.arange(1.0, steps + 1),
        "terminations": ends,
        "truncations": np.zeros(steps, bool),
        "success": ends,
    }


def test_trajectories_become_transitions_with_the_run_s_rewards_and_ends():
    rows = transitions_of([demo(3)], reward_scale=0.1)
    assert rows["rewards"].tolist() == pytest.approx([-0.1, -0.2, -0.3])
    assert rows["obs"][:, 0].tolist() == [0, 2, 4] and rows["next_obs"][:, 0].tolist() == [2, 4, 6]
    assert rows["terminations"].tolist() == [False, False, True]
    assert not transitions_of([demo(3)], ignore_terminations=True)["terminations"].any()
    several = transitions_of([{**demo(3), "obs": {"state": np.zeros((4, 2)), "rgb": np.zeros((4, 2, 2, 3), np.uint8)}}])
    assert several["next_obs.rgb"].shape == (3, 2, 2, 3) and several["obs.state"].dtype == np.float32


def test_demonstrations_of_another_task_are_refused_and_what_is_not_needed_is_left_out():
    actions = spaces.Box(-1, 1, (1,), np.float32)
    plain = spaces.Box(-np.inf, np.inf, (2,), np.float64)  # environments hand over float32
    rows = fit(transitions_of([demo(3)]), plain, actions, 1)
    assert rows["next_obs"][:, 0].tolist() == [2, 4, 6] and rows["rewards"].tolist() == [-1, -2, -3]
    several = {**demo(3), "obs": {"state": np.ones((4, 2)), "rgb": np.zeros((4, 2, 2, 3), np.uint8)}}
    rows = fit(transitions_of([several]), spaces.Dict({"state": plain}), actions, 1)
    assert set(rows.dtype.names) == {"obs.state", "next_obs.state", "actions", "rewards", "terminations"}
    for space, action, chunk in (
        (plain, spaces.Box(-1, 1, (2,)), 1),
        (plain, actions, 3),
        (spaces.Dict({"x": plain}), actions, 1),
    ):
        with pytest.raises(ConfigError, match=r"algorithm\.demo_buffer\.load_path.*this run's transitions have"):
            fit(transitions_of([demo(3)]), space, action, chunk)


def interventions_of(tmp_path, rank, *rows):
    buffer = ReplayBuffer(40, range(1), 1, rank, tmp_path / "ring", checkpoint_folder=INTERVENTIONS_FOLDER)
    for columns in rows:
        buffer.add(columns)
    return buffer


def drawn(found, tmp_path, demos=None, rows=(), update=5):
    """Rewards of a batch over all ranks, of which half come from demonstrations and interventions."""
    rewards = []
    for rank, replay in enumerate(found):
        buffer = interventions_of(tmp_path, rank, *rows)
        mixture = Mixture(
            replay, demos, DrawOptions(16, 0.5, 2), seed=3, rank=rank, ranks=len(found), interventions=buffer
        )
        rewards += mixture.draw(update).columns["rewards"].tolist()
    return sorted(rewards)


def test_interventions_are_drawn_as_demonstrations_are_on_any_number_of_ranks(tmp_path):
    one, two = buffers(tmp_path), buffers(tmp_path, 2)
    for found in (one, two):
        fill(found, 0, 9)
    led = play(50, 6, range(1))
    assert all(reward < 1000 for reward in drawn(one, tmp_path)), "nobody has led yet"
    rewards = drawn(one, tmp_path, rows=[led])
    assert sum(reward >= 5000 for reward in rewards) == 8
    assert rewards == drawn(two, tmp_path, rows=[led])
    demos = transitions_of([demo(5), demo(8)])
    mixed = drawn(one, tmp_path, demos=demos, rows=[led])
    assert sum(reward < 0 for reward in mixed) + sum(reward >= 5000 for reward in mixed) == 8
    assert any(reward < 0 for reward in mixed) and any(reward >= 5000 for reward in mixed)
    assert mixed == drawn(two, tmp_path, demos=demos, rows=[led])


def test_sums_of_rewards_over_a_change_of_who_leads(tmp_path):
    """In the replay buffer they go on, as one episode does; those of interventions end where the person lets go."""
    columns = play(1, 6, range(SLOTS))
    columns["rewards"] = np.broadcast_to(np.array([1, 2, 4, 8, 16, 32], np.float32), (SLOTS, 6)).copy()
    columns["terminations"] = np.zeros((SLOTS, 6), bool)
    columns[POSITION] = PositionCounter(range(SLOTS)).count(columns["terminations"])
    led = np.zeros((SLOTS, 6), bool)
    led[0, [0, 1, 4, 5]] = True
    columns[INTERVENED] = led
    (replay,) = buffers(tmp_path)
    replay.add(columns)
    rows = {name: column[led][None] for name, column in columns.items()}
    options = DrawOptions(64, 0.5, 2, num_steps=3)
    mixture = Mixture(replay, None, options, seed=1, interventions=interventions_of(tmp_path, 0, rows))
    draw = mixture.draw(0)
    of_person = {(reward, steps) for reward, steps in zip(draw.columns["rewards"][:32], draw.steps[:32], strict=True)}
    assert of_person == {(3, 2), (2, 1), (48, 2), (32, 1)}
    of_all = {(reward, steps) for reward, steps in zip(draw.columns["rewards"][32:], draw.steps[32:], strict=True)}
    assert of_all == {(7, 3), (14, 3), (28, 3), (56, 3), (48, 2), (32, 1)}
    first = np.flatnonzero(draw.columns["rewards"][:32] == 3)[0]
    assert draw.columns["next_obs"][first].tolist() == columns["next_obs"][0, 1].tolist()


def test_stacked_images_over_a_change_of_who_leads(tmp_path):
    """A person who comes back has the images of that time, and what is saved goes on bit for bit."""
    frames = np.random.default_rng(0).integers(0, 256, (9, 4, 4), np.uint8)
    stacks = np.stack([frames[i : i + 3] for i in range(7)])  # [7, 3, 4, 4], oldest first
    led = [0, 1, 3, 5]
    columns = {
        "obs": stacks[:6][led][None], "next_obs": stacks[1:][led][None],
        "actions": np.zeros((1, 4, 1, 1), np.float32), "rewards": np.arange(4, dtype=np.float32)[None],
        "terminations": np.zeros((1, 4), bool), INTERVENED: np.ones((1, 4), bool),
    }  # fmt: skip

    def build():
        folder, name = tmp_path / "ring", INTERVENTIONS_FOLDER
        return ReplayBuffer(20, range(1), 1, 0, folder, frame_stack=3, checkpoint_folder=name)

    def rows(buffer):
        out = np.zeros((len(buffer), buffer.dtype.itemsize), np.uint8)
        buffer.gather(buffer.local_rows(np.arange(len(buffer)))[1], out)
        return out.view(buffer.dtype)[:, 0]

    buffer, checkpoint = build(), tmp_path / "global_step_1"
    checkpoint.mkdir()
    buffer.add(columns)
    np.testing.assert_array_equal(rows(buffer)["obs"], stacks[:6][led])
    np.testing.assert_array_equal(rows(buffer)["next_obs"], stacks[1:][led])
    buffer.save(checkpoint)
    assert (checkpoint / INTERVENTIONS_FOLDER / "index-0.json").is_file()
    restored = build()
    restored.load(checkpoint)
    for one in (buffer, restored):
        one.add({name: column[:, 2:] for name, column in columns.items()})
    assert rows(buffer).tobytes() == rows(restored).tobytes() and len(restored) == 6


def test_demonstrations_are_marked_where_transitions_have_labels():
    plain, actions = spaces.Box(-np.inf, np.inf, (2,), np.float64), spaces.Box(-1, 1, (1,), np.float32)
    rows = fit(transitions_of([demo(3)]), plain, actions, 1, has_labels=True)
    assert rows[INTERVENED].all() and rows["rewards"].tolist() == [-1, -2, -3]
    rows[INTERVENED][0] = False  # as in another run's replay buffer
    assert fit(rows, plain, actions, 1, has_labels=True)[INTERVENED].tolist() == [False, True, True]


def test_a_message_about_demonstrations_shows_only_columns_that_differ():
    """Pictures of one camera for a run of two."""
    camera = {"rgb": np.zeros((4, 8, 8, 3), np.uint8), "state": np.zeros((4, 2), np.float32)}
    two_cameras = spaces.Dict(
        {"rgb": spaces.Box(0, 255, (8, 8, 6), np.uint8), "state": spaces.Box(-1, 1, (2,), np.float32)}
    )
    with pytest.raises(ConfigError) as caught:
        fit(transitions_of([{**demo(3), "obs": camera}]), two_cameras, spaces.Box(-1, 1, (1,), np.float32), 1)
    assert str(caught.value) == (
        "algorithm.demo_buffer.load_path: the demonstrations have next_obs.rgb uint8[8, 8, 3], obs.rgb uint8[8, 8, 3]; this "
        "run's transitions have next_obs.rgb uint8[8, 8, 6], obs.rgb uint8[8, 8, 6]. Record demonstrations with this run's "
        "environment (rlhpc record), or give the run the environment of these"
    )
