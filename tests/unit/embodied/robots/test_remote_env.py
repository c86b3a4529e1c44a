"""A run's environment of a robot elsewhere: a lost connection, messages, and mistakes in its configuration."""

from __future__ import annotations

import json
import socket
import threading
from pathlib import Path

import numpy as np
import pytest
from omegaconf import OmegaConf

from rlhpc.embodied.config import EnvSideConfig
from rlhpc.embodied.envs import make_env
from rlhpc.embodied.robots.protocol import ConnectionLost, RobotConnection, pack_message, unpack_message
from rlhpc.runs.configuration import load_config
from rlhpc.runtime.errors import ConfigError
from tests.eventually import wait_until
from tests.unit.embodied.robots.remote_robot import ACTS, Inside, Outside, Rail

QUICKSTART = Path(__file__).parents[4] / "configs/quickstart.yaml"


def test_when_the_line_is_lost_the_robot_stops_and_comes_back_and_the_episode_counts_for_nothing(
    inside: Inside,
) -> None:
    rail = Rail()
    outside = Outside(inside.key(), rail)
    inside.joined()
    last = inside.move(0.5)[0]
    stops = rail.stops
    inside.env._connection._sock.shutdown(socket.SHUT_RDWR)
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


def test_what_is_no_message_ends_the_line() -> None:
    arrays = {"obs": np.arange(6, dtype=np.float32).reshape(2, 3), "none": np.zeros((0, 2), np.uint8)}
    found = unpack_message(*pack_message({"do": "step"}, arrays)[1:])
    assert found.fields == {"do": "step"} and (found.arrays["obs"] == arrays["obs"]).all()
    assert found.arrays["none"].shape == (0, 2)
    for described in (["object", [1]], ["float32", [1 << 60]], ["float32", [-1]], ["<U4", [1]]):
        with pytest.raises(ValueError, match="array"):
            unpack_message(json.dumps({"words": {}, "arrays": {"x": described}}).encode(), b"12345678")
    for said in (b"\0\0\0\2\0\0\0\0{}" + bytes(32), b"\xff" * 8):
        ours, theirs = socket.socketpair()
        line = RobotConnection(ours, b"key", b"run", b"robot")
        theirs.sendall(said)
        with pytest.raises(ConnectionLost, match=r"not the other side's|too long"):
            line.receive(20)
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
