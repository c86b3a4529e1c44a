"""A robot that serves a run: its machine's own bounds, stops that wait for a person, and a run that does not answer."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlhpc.embodied.envs.base import concat_timings, timing_row
from rlhpc.embodied.robots.joining import meeting_points
from rlhpc.embodied.robots.server import RobotRoute, RobotServer
from rlhpc.runtime.errors import RlhpcError
from tests.eventually import wait_until
from tests.unit.embodied.robots.remote_robot import Inside, Outside, Rail


def test_it_joins_is_moved_within_its_own_bounds_and_is_let_go(inside: Inside) -> None:
    rail = Rail()
    outside = Outside(inside.key(), rail, max_change=0.75)
    inside.joined()
    assert inside.first["state"].shape == (1, 1) and inside.first["rgb"].dtype == np.uint8
    steps = [inside.move(5.0) for _ in range(5)]
    assert rail.told == [0.75, 1.0, 1.0, 1.0, 1.0]  # its machine's bound holds, whatever the run asks for
    assert [bool(step[2][0]) for step in steps] == [False] * 4 + [True]
    obs, rewards, _, cut, infos = steps[-1]
    assert not cut[0] and rewards[0] == np.float32(1.1875) and obs["state"][0, 0] == 0 and obs["rgb"][0, 0, 0, 0] == 100
    assert infos["final_obs"]["state"][0, 0] == np.float32(1.1875) and infos["episode"]["success_once"][0] == 1
    assert infos["episode"]["mask"][0] and infos["episode"]["length"][0] == 5 and "lost" not in infos
    wait_until(lambda: bool(inside.env._connection.round_trips_s), 20)
    assert [bool(inside.move(0.0)[3][0]) for _ in range(6)] == [False] * 5 + [True]
    row = timing_row(concat_timings([inside.env.timing]))
    assert row["env/robot_latency_ms_p50"] > 0 and row["env/robot_link_ms_max"] >= row["env/robot_link_ms_p50"] > 0
    assert row["env/robot_lost"] == 0 and not timing_row(concat_timings([]))
    inside.env.close()
    outside.join(20)
    assert rail.closed and rail.stops and outside.said[-1] == f"{inside.folder} has let rail go after 11 steps"
    assert not meeting_points(inside.folder)


def test_the_run_holds_and_stops_it_for_a_person_who_helps(tmp_path: Path) -> None:
    inside, rail = Inside(tmp_path, wait_s=5.0), Rail()
    outside = Outside(inside.key(), rail)
    inside.joined()
    inside.move(0.5)
    stops = rail.stops
    inside.env.hold()
    assert rail.stops > stops and not inside.move(0.5)[3][0], "its episode goes on after a pause"
    rail.ready = lambda: True  # type: ignore[method-assign]
    inside.env.stop("the gamepad disconnected while a person led")
    _, _, _, cut, infos = inside.move(0.5)
    assert cut[0] and infos["lost"][0] and rail.told == [0.5, 0.5] and inside.env.timing.num_stopped == 1
    inside.env.close()
    outside.join(20)


def test_a_stop_waits_for_a_person_at_the_robot_whatever_the_run_says(tmp_path: Path) -> None:
    inside, rail = Inside(tmp_path, wait_s=1.5), Rail()
    outside = Outside(inside.key(), rail)
    inside.joined()
    inside.move(0.5)
    steps: list[Any] = []
    waiting = threading.Thread(target=lambda: steps.append(inside.move(float("nan"))), daemon=True)
    waiting.start()
    waiting.join(4.0)  # longer than the run waits for a robot that is gone
    assert waiting.is_alive() and rail.told == [0.5] and outside.is_alive()
    rail.ready = lambda: True  # type: ignore[method-assign]
    waiting.join(20)
    [(obs, rewards, ends, cut, infos)] = steps
    assert cut[0] and not ends[0] and not rewards[0] and infos["lost"][0] and not infos["episode"]["mask"][0]
    assert obs["state"][0, 0] == 0 and inside.env.timing.num_stopped == 1 and inside.env.timing.num_lost == 0
    assert (inside.env.refresh()["state"] == obs["state"]).all()
    rail.ready = lambda: False  # type: ignore[method-assign]

    def move_until_it_is_gone() -> None:
        with contextlib.suppress(RlhpcError):
            inside.move(float("inf"))

    again = threading.Thread(target=move_until_it_is_gone, daemon=True)
    again.start()
    wait_until(lambda: bool(inside.env._wait_reason), 20)
    inside.env._connection.send({"do": "leave", "number": 0})  # the run ends while a person is waited for
    outside.join(20)
    assert outside.said[-1].startswith(f"{inside.folder} has let rail go") and rail.closed and rail.told == [0.5]
    again.join(20)
    inside.env.close()


def test_one_that_does_not_come_is_named_and_so_is_a_run_that_does_not_answer(tmp_path: Path) -> None:
    inside = Inside(tmp_path, wait_s=0.01)
    assert (
        "waited 0.01 s (kwargs.wait_s) for the robot rail of slot 2: it has not come; rlhpc robot inv"
        in inside.refusal()
    )
    key = inside.key()
    inside.env.close()
    rail = Rail()
    with pytest.raises(
        RlhpcError, match=r"could not be reached in 0 s .*127\.0\.0\.1 port .*refused; the robot is stopped"
    ):
        RobotServer(rail, {}, print).serve(key, RobotRoute(key), 0.0)
    assert rail.closed
