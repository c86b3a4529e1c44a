"""A robot that comes to a run from outside: who is taken, what is refused, and what happens when the line to it is lost."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from omegaconf import OmegaConf

from rlhpc.embodied.config import EnvSideConfig
from rlhpc.embodied.envs import make_env
from rlhpc.embodied.envs.base import timed, timing_row
from rlhpc.embodied.robots.joining import Key, RobotRefused, invite, places
from rlhpc.embodied.robots.protocol import LineLost, RobotConnection, packed, unpacked
from rlhpc.embodied.robots.robot_env import Observation, Robot, Verdict
from rlhpc.embodied.robots.server import Served, Way
from rlhpc.runs.configuration import load_config
from rlhpc.runtime.errors import ConfigError, RlhpcError
from tests.eventually import wait_until

SHOWN: dict[str, Any] = {"state": 1, "rgb": [2, 2, 3]}
QUICKSTART = Path(__file__).parents[4] / "configs/quickstart.yaml"
ACTS = {"low": [-1], "high": [1]}


class Rail(Robot):
    """A carriage on a rail, which goes where it is told, with a camera."""

    observation_space = spaces.Dict(
        {"state": spaces.Box(-1, 1, (1,), np.float32), "rgb": spaces.Box(0, 255, (2, 2, 3), np.uint8)}
    )
    action_space = spaces.Box(-1, 1, (1,), np.float32)
    control_mode = "velocity"

    def __init__(self) -> None:
        self.told: list[float] = []
        self.stops, self.closed, self.broken = 0, False, False

    def reset(self, seed: int) -> None:
        """To the middle."""
        self.place = np.zeros(1, np.float32)

    def act(self, action: np.ndarray) -> None:
        """Moves."""
        if self.broken:
            raise OSError("the wire is cut")
        self.told.append(float(action[0]))
        self.place = self.place + action / 4

    def observe(self) -> Observation:
        """Place and picture."""
        picture = np.full((2, 2, 3), int(100 + 100 * self.place[0]), np.uint8)
        return Observation({"state": self.place, "rgb": picture}, time.monotonic())

    def judge(self, obs: Any, action: np.ndarray) -> Verdict:
        """Done near the right end."""
        return Verdict(float(obs["state"][0]), success=bool(obs["state"][0] > 0.95))

    def stop(self) -> None:
        """Holds."""
        self.stops += 1

    def close(self) -> None:
        """Lets go."""
        self.closed = True


class Outside(threading.Thread):
    """The robot's machine."""

    def __init__(self, key: Key, robot: Rail, patience_s: float = 20.0, **bounds: float) -> None:
        super().__init__(daemon=True)
        self.way, self.said, self.error = Way(key), list[str](), RlhpcError("none")
        self._served, self._key, self._patience_s = Served(robot, bounds, self.said.append), key, patience_s
        self.start()

    def run(self) -> None:
        """Serves."""
        try:
            self._served.serve(self._key, self.way, self._patience_s)
        except RlhpcError as error:
            self.error = error


class Inside:
    """A run's environment, which is waited for by nobody; keys for it."""

    def __init__(self, folder: Path, wait_s: float = 20.0) -> None:
        self.folder, self._made = folder / "meeting", 0
        kwargs = {"observes": SHOWN, "acts": ACTS, "hz": 200.0, "stale_s": 30.0, "wait_s": wait_s}
        section = EnvSideConfig(
            env_type="distant_robot", env_id="rail", max_episode_steps=6, kwargs={**kwargs, "folder": str(self.folder)}
        )
        self.env: Any = make_env(OmegaConf.structured(section), 1, slot_offset=2, seed=3)
        self.first: Any = None
        self.error = ""
        self._waiting = threading.Thread(target=self._reset, daemon=True)
        self._waiting.start()

    def _reset(self) -> None:
        try:
            self.first = self.env.reset()[0]
        except RlhpcError as error:
            self.error = str(error)

    def key(self, minutes: float = 1.0) -> Key:
        self._made += 1
        file = self.folder.parent / f"{self._made}.key"
        made = invite(self.folder, file, slot=None, minutes=minutes, wait_s=20, run="here")
        assert file.stat().st_mode & 0o777 == 0o600 and Key.read(file) == made
        return made

    def joined(self) -> None:
        self._waiting.join(20)
        assert self.first is not None, self.error

    def refusal(self) -> str:
        """Why it could not wait, or not any longer."""
        self._waiting.join(20)
        assert self.first is None
        return self.error

    def move(self, to: float) -> Any:
        return self.env.step(np.float32([[to]]))


@pytest.fixture
def inside(tmp_path: Path) -> Iterator[Inside]:
    found = Inside(tmp_path)
    yield found
    found.env.close()


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
    wait_until(lambda: bool(inside.env._line.trips_s), 20)
    assert [bool(inside.move(0.0)[3][0]) for _ in range(6)] == [False] * 5 + [True]
    row = timing_row(timed([inside.env.timing]))
    assert row["env/robot_latency_ms_p50"] > 0 and row["env/robot_link_ms_max"] >= row["env/robot_link_ms_p50"] > 0
    assert row["env/robot_lost"] == 0 and not timing_row(timed([]))
    inside.env.close()
    outside.join(20)
    assert rail.closed and rail.stops and outside.said[-1] == f"{inside.folder} has let rail go after 11 steps"
    assert not places(inside.folder)


def test_who_opens_many_connections_keeps_no_robot_out(inside: Inside) -> None:
    """They say nothing, and come again as soon as they are sent away."""
    wait_until(lambda: bool(places(inside.folder)), 20)
    (place,), over = places(inside.folder), threading.Event()

    def come() -> None:
        while not over.is_set():
            with contextlib.suppress(OSError):
                there = (place.address, place.port)
                with socket.create_connection(there, 20, source_address=("127.0.0.2", 0)) as stranger:
                    while stranger.recv(4096):
                        pass
            over.wait(0.05)

    strangers = [threading.Thread(target=come, daemon=True) for _ in range(48)]
    for stranger in strangers:
        stranger.start()
    Outside(inside.key(), Rail(), patience_s=5.0)
    inside.joined()
    over.set()
    inside.env.close()


def refused(key: Key, robot: Rail | None = None) -> str:
    outside = Outside(key, robot or Rail())
    outside.join(20)
    assert isinstance(outside.error, RobotRefused), "it was taken"
    return str(outside.error)


def test_a_key_is_for_one_joining_of_one_robot_in_its_time(inside: Inside, tmp_path: Path) -> None:
    key, over, other = inside.key(), inside.key(minutes=1e-9), inside.key()
    assert "knows no such key" in refused(replace(key, secret="0" * 64)) + refused(replace(key, id="0" * 16))
    assert "this key ended 0 s ago" in refused(over)
    wide = Rail()
    wide.action_space = spaces.Box(-2, 2, (1,), np.float32)
    assert "kwargs.acts of the run says {'low': [-1.0], 'high': [1.0]}, and this robot {'low': [-2.0]" in refused(
        key, wide
    )
    outside = Outside(key, Rail())  # what was refused did not use it up
    inside.joined()
    assert "has its robot already" in refused(other) and "has been used" in refused(key)
    assert not inside.move(0.5)[3][0] and outside.is_alive()
    said = Inside(tmp_path).refusal()
    assert "slot 2 is already waited for" in said and "val_check_interval=-1" in said
    file, notes = tmp_path / "1.key", tmp_path / "notes"
    notes.touch(0o600)
    file.chmod(0o644)
    for path, says in (
        (file, "can be read by others"),
        (tmp_path / "none", "No such file"),
        (notes, "is no key of a robot"),
    ):
        with pytest.raises(ConfigError, match=says):
            Key.read(path)
    with pytest.raises(ConfigError, match="exists: a key is written once"):
        invite(inside.folder, file, slot=None, minutes=1, wait_s=0, run="here")
    with pytest.raises(ConfigError, match=r"waits for no robot of slot 0 \(waited 0 s\)"):
        invite(inside.folder, tmp_path / "new", slot=0, minutes=1, wait_s=0, run="here")


def test_when_the_line_is_lost_the_robot_stops_and_comes_back_and_the_episode_counts_for_nothing(
    inside: Inside,
) -> None:
    rail = Rail()
    outside = Outside(inside.key(), rail)
    inside.joined()
    last = inside.move(0.5)[0]
    stops = rail.stops
    inside.env._line._sock.shutdown(socket.SHUT_RDWR)
    wait_until(lambda: rail.stops > stops, 20)  # before the run has said anything again
    obs, rewards, ends, cut, infos = inside.move(0.5)
    assert cut[0] and not ends[0] and rewards[0] == 0 and infos["lost"][0] and not infos["episode"]["mask"][0]
    assert (infos["final_obs"]["state"] == last["state"]).all() and obs["state"][0, 0] == 0
    assert "the robot is stopped, and tries to come back" in outside.said[-1]
    assert not inside.move(0.5)[3][0] and inside.env.timing.num_lost == 1
    rail.broken, key = True, inside.key()
    other = Outside(key, Rail())  # as another process would, with a key of its own, just before the first one ends
    other.join(0.3)
    waiting = threading.Thread(target=lambda: setattr(inside, "first", inside.move(0.5)), daemon=True)
    waiting.start()
    outside.join(20)
    assert "the robot's own code failed in step, and it is stopped: OSError: the wire is cut" in str(outside.error)
    waiting.join(20)
    assert inside.first[4]["lost"][0] and inside.env.timing.num_lost == 2 and other.is_alive()


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
    wait_until(lambda: bool(inside.env._waits_because), 20)
    inside.env._line.say({"do": "leave", "number": 0})  # the run ends while a person is waited for
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
        Served(rail, {}, print).serve(key, Way(key), 0.0)
    assert rail.closed


def test_what_is_no_message_ends_the_line() -> None:
    arrays = {"obs": np.arange(6, dtype=np.float32).reshape(2, 3), "none": np.zeros((0, 2), np.uint8)}
    found = unpacked(*packed({"do": "step"}, arrays)[1:])
    assert found.words == {"do": "step"} and (found.arrays["obs"] == arrays["obs"]).all()
    assert found.arrays["none"].shape == (0, 2)
    for described in (["object", [1]], ["float32", [1 << 60]], ["float32", [-1]], ["<U4", [1]]):
        with pytest.raises(ValueError, match="array"):
            unpacked(json.dumps({"words": {}, "arrays": {"x": described}}).encode(), b"12345678")
    for said in (b"\0\0\0\2\0\0\0\0{}" + bytes(32), b"\xff" * 8):
        ours, theirs = socket.socketpair()
        line = RobotConnection(ours, b"key", b"run", b"robot")
        theirs.sendall(said)
        with pytest.raises(LineLost, match=r"not the other side's|too long"):
            line.hear(20)
        line.close()
        theirs.close()


def test_what_is_said_of_a_mistake() -> None:
    kwargs = {"observes": 3, "acts": ACTS}
    for given, says in (
        ({"observes": None}, r"kwargs\.observes is None; it must be a shape"),
        ({"acts": {"low": [1], "high": [-1]}}, r"kwargs\.acts is .* low below high"),
        ({"address": "x"}, r"kwargs of a distant_robot has address; there are observes"),
        (
            {"resume": "auto"},
            r"kwargs\.resume: who ends a stop for safety is said at the robot: rlhpc robot serve --res",
        ),
        ({"wait_s": 0}, r"kwargs\.wait_s is 0; it must be a number above 0"),
    ):
        section = EnvSideConfig(env_type="distant_robot", env_id="rail", kwargs={**kwargs, **given})
        with pytest.raises(ConfigError, match=says):
            make_env(OmegaConf.structured(section), 1)


@pytest.mark.parametrize("kind", ["robot", "distant_robot"])
def test_a_robot_that_trains_is_not_evaluated_on_meanwhile(kind: str) -> None:
    words = [f"env.train.env_type={kind}", "runner.val_check_interval=1"]
    with pytest.raises(ConfigError) as error:
        load_config(QUICKSTART, words)
    assert str(error.value) == (
        f"override 'runner.val_check_interval=1': runner.val_check_interval is 1; env.eval is a {kind}, as env.train is, "
        "which an env rank holds while a rollout rank evaluates, and a robot is in one place at a time; allowed: -1, and "
        "rlhpc eval --run once the run has ended; or a simulator as env.eval (env_type, env_id, kwargs)"
    )
    assert load_config(QUICKSTART, [*words, "env.eval.env_type=gymnasium"]).env.eval.env_type == "gymnasium"
    assert load_config(QUICKSTART, [words[0], "runner.val_check_interval=-1"]).env.eval.env_type == kind
