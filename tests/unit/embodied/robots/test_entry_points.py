"""Ten thousand commands of a diverged policy, with faults of the arm between them, through each way to a robot.

The arm writes down what it is sent, by its own clock: no command is outside of the limits or a jump from its measured
position, and nothing moves it after a stop for safety before somebody has said so.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from omegaconf import OmegaConf

from rlhpc.embodied.config import EvalEnvConfig
from rlhpc.embodied.envs import make_env
from rlhpc.embodied.envs.subprocess_env import ProcessVectorEnv
from rlhpc.embodied.evaluation.episodes import evaluate_policy
from rlhpc.embodied.evaluation.recorder import record
from rlhpc.embodied.interventions.sources import Intervention
from rlhpc.embodied.robots.joining import invite
from rlhpc.embodied.robots.notices import resume, stopped_robots
from rlhpc.embodied.robots.robot_env import RobotVectorEnv
from rlhpc.embodied.robots.server import RobotRoute, RobotServer
from rlhpc.runtime.errors import RlhpcError
from tests.eventually import wait_until
from tests.logging_arm import BOUND, MAX_CHANGE, LoggingArm, Ticks, WildPolicy, kinds, read_log, violations

pytestmark = pytest.mark.long

COMMANDS, FAULTS = 10_000, 0.005
#: Where a command gives up after twenty lost episodes.
RARE = 0.0004
ROOT = Path(__file__).parents[4]
PACE = {"hz": 1e6, "stale_s": 60.0, "max_change": MAX_CHANGE}


def section(path: Path, limit: int = 100, simulators: int | None = None, **kwargs: Any) -> EvalEnvConfig:
    arm = {"path": str(path), "faults": FAULTS, **kwargs}
    return EvalEnvConfig(
        env_type="robot", env_id="tests.logging_arm:LoggingArm", num_envs=1, max_episode_steps=limit, kwargs={**PACE, **arm},
        simulators=simulators, simulator_python=None, wrappers=[], ignore_terminations=False,
    )  # fmt: skip


def play(env: Any, policy: WildPolicy) -> int:
    """Has a policy give all its commands; how many steps or chunks were lost."""
    env.reset()
    lost = 0
    for _ in range(COMMANDS // policy.chunk):
        *_, ended, cut, infos = env.chunk_step(policy.actions())
        if "lost" in infos:
            lost += 1
            assert cut[0] and not ended[0] and not infos["episode"]["mask"][0]
        if policy.chunk > 1:
            mask = infos["chunk"]["mask"][0]
            assert mask.sum() == np.argmin(mask) or mask.all()  # nothing is carried out behind an end
            assert mask.all() or ended[0] or cut[0]
    return lost


def held_up(log: list[list[Any]], commands: int, stops: int = 50) -> None:
    """What the arm has seen is in order, and nothing of it is missing."""
    assert not violations(log)
    calls = kinds(log)
    assert calls.count("act") > 0.8 * commands and calls.count("word") > stops and calls.count("fault") > stops / 4
    assert max(np.abs(np.array([entry[2] for entry in log if entry[1] == "act"])).max(0)) <= BOUND


@pytest.mark.parametrize("chunk", [1, 5])
def test_in_the_same_process(chunk: int) -> None:
    arm, policy = LoggingArm(faults=FAULTS), WildPolicy(chunk)
    kwargs = dict(PACE)
    env = RobotVectorEnv(EvalEnvConfig(env_type="robot", max_episode_steps=100, kwargs=kwargs), 1, 0, 0, arm)
    lost = play(env, policy)
    # of a chunk what is behind an end is dropped
    held_up(arm.log, COMMANDS if chunk == 1 else COMMANDS // 2)
    assert kinds(arm.log).count("word") == env.timing.num_stopped >= lost > 50
    env.close()
    assert kinds(arm.log)[-2:] == ["stop", "close"]


def test_in_a_process_of_its_own(tmp_path: Path) -> None:
    env = make_env(OmegaConf.structured(section(tmp_path / "log")), 1)
    assert isinstance(env, ProcessVectorEnv) and env.timing is not None and env.max_episode_steps == 100
    lost = play(env, WildPolicy())
    held_up(read_log(tmp_path / "log"), COMMANDS)
    assert env.timing.num_stopped >= lost > 50 and len(env.timing.latency_s) > 0.8 * COMMANDS
    env.close()
    assert kinds(read_log(tmp_path / "log"))[-2:] == ["stop", "close"]


def test_over_a_line(tmp_path: Path) -> None:
    arm, folder = LoggingArm(faults=FAULTS), tmp_path / "meeting"
    pace: dict[str, Any] = dict(PACE)
    bounds = {"low": [-BOUND] * 2, "high": [BOUND] * 2}
    kwargs = {"observes": 2, "acts": bounds, "folder": str(folder), "wait_s": 60.0, **pace}
    config = EvalEnvConfig(env_type="distant_robot", env_id="arm", num_envs=1, max_episode_steps=100, kwargs=kwargs,
                           simulator_python=None, wrappers=[], ignore_terminations=False)  # fmt: skip
    env: Any = make_env(OmegaConf.structured(config), 1)

    def serve() -> None:
        key = invite(folder, tmp_path / "key", slot=None, minutes=5, wait_s=60, run="here")
        RobotServer(arm, {"max_change": MAX_CHANGE}, print).serve(key, RobotRoute(key), 60.0)

    serving = threading.Thread(target=serve, daemon=True)
    serving.start()
    lost = play(env, WildPolicy())
    held_up(arm.log, COMMANDS)
    assert env.timing.num_stopped >= lost > 50
    env.close()
    serving.join(20)
    assert kinds(arm.log)[-1] == "close" and "stop" in kinds(arm.log)[-4:]


class LateLine:
    """A line that holds back all that is sent on it, both ways, while `held` is set; it listens at `address`."""

    def __init__(self, to: tuple[str, int]) -> None:
        self._to, self.held = to, threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                one, _ = self._listener.accept()
            except OSError:
                return
            other = socket.create_connection(self._to)
            for source, target in ((one, other), (other, one)):
                threading.Thread(target=self._pump, args=(source, target), daemon=True).start()

    def _pump(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                while self.held.is_set():
                    time.sleep(0.002)
                target.sendall(data)
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._listener.close()


def test_over_a_line_that_is_late(tmp_path: Path) -> None:
    """Where the line holds commands back, the robot stops by itself in time, and moves by none that comes late."""
    arm, folder, stale_s = LoggingArm(), tmp_path / "meeting", 0.3
    pace: dict[str, Any] = {"hz": 100.0, "stale_s": stale_s, "max_change": MAX_CHANGE}
    bounds = {"low": [-BOUND] * 2, "high": [BOUND] * 2}
    kwargs = {"observes": 2, "acts": bounds, "folder": str(folder), "wait_s": 60.0, **pace}
    config = EvalEnvConfig(env_type="distant_robot", env_id="arm", num_envs=1, max_episode_steps=10_000, kwargs=kwargs,
                           simulator_python=None, wrappers=[], ignore_terminations=False)  # fmt: skip
    env: Any = make_env(OmegaConf.structured(config), 1)
    lines: list[LateLine] = []

    def serve() -> None:
        key = invite(folder, tmp_path / "key", slot=None, minutes=5, wait_s=60, run="here")
        lines.append(LateLine((key.place.address, key.place.port)))
        RobotServer(arm, {"max_change": MAX_CHANGE}, print).serve(key, RobotRoute(key, address=lines[0].address), 60.0)

    serving = threading.Thread(target=serve, daemon=True)
    serving.start()
    env.reset()
    policy, holds, rng, ended = WildPolicy(nonfinite=0.0), [], np.random.default_rng(0), threading.Event()

    def hold() -> None:
        for late_s in rng.uniform(0.05, 1.2, 12):
            time.sleep(0.3)
            holds.append((time.monotonic(), late_s))
            lines[0].held.set()
            time.sleep(late_s)
            lines[0].held.clear()
        time.sleep(0.3)
        ended.set()

    with Ticks() as ticks:
        threading.Thread(target=hold, daemon=True).start()
        while not ended.is_set():
            env.step(policy.actions()[:, 0])
    log = list(arm.log)
    assert not violations(log) and kinds(log).count("act") > 50
    late = [(at, late_s) for at, late_s in holds if late_s > 2 * stale_s]
    assert len(late) > 3
    for at, late_s in late:
        acts = [entry[0] for entry in log if entry[1] == "act"]
        last = max(when for when in acts if when <= at + 0.05)
        first_stop = min(entry[0] for entry in log if entry[1] == "stop" and entry[0] > last)
        slack = 3 * ticks.gap(last, first_stop)
        assert first_stop - last <= stale_s + 0.1 + slack, (at, late_s)
        # What was held back is older than the limit when it comes, and is not executed.
        assert not [when for when in acts if first_stop < when < at + late_s], (at, late_s)
    env.close()
    serving.join(20)
    lines[0].close()


def test_in_an_evaluation(tmp_path: Path) -> None:
    config = OmegaConf.structured(section(tmp_path / "log", faults=RARE))
    found = evaluate_policy(WildPolicy(nonfinite=RARE), config, seed=0, episodes=105)
    held_up(read_log(tmp_path / "log"), COMMANDS, stops=4)
    assert found["episodes"] == 105 and found["length_mean"] > 80


class Wild(Intervention):
    """Takes over now and then, and does what a wild policy does."""

    one_slot = needs_pictures = False

    def __init__(self) -> None:
        self.policy, self.steps = WildPolicy(nonfinite=RARE), 0

    def act(self, obs: Any, actions: np.ndarray, picture: Any) -> tuple[np.ndarray, np.ndarray]:
        self.steps += 1
        takes = self.steps // 20 % 2 == 1
        return (self.policy.actions()[:, 0] if takes else actions), np.array([takes])


@pytest.mark.parametrize("kind", ["recording", "labelled", "intervention"])
def test_in_a_recording_and_in_rounds_of_dagger(tmp_path: Path, kind: str) -> None:
    import h5py

    options: dict[str, Any] = {
        "recording": {}, "labelled": {"teacher": WildPolicy(nonfinite=0.0)},
        "intervention": {"intervention": Wild(), "only_taken": True},
    }[kind]  # fmt: skip
    found = record(
        WildPolicy(nonfinite=RARE), OmegaConf.structured(section(tmp_path / "log", faults=RARE)), tmp_path / "made.h5",
        episodes=105, seed=0, **options,
    )  # fmt: skip
    held_up(read_log(tmp_path / "log"), COMMANDS, stops=4)
    assert found["episodes"] >= 105
    with h5py.File(tmp_path / "made.h5") as file:  # episodes that were stopped are not in it
        actions = [np.asarray(episode["actions"]) for episode in file.values()]
        assert all(np.isfinite(each).all() for each in actions)


# -- processes that end -----------------------------------------------------------------------------------------------


def test_the_rest_of_an_old_chunk_is_dropped_at_a_reset_and_at_a_stop() -> None:
    arm = LoggingArm()
    env = RobotVectorEnv(EvalEnvConfig(env_type="robot", max_episode_steps=2, kwargs=dict(PACE)), 1, 0, 0, arm)
    env.reset()
    before = len(arm.log)
    _, rewards, ended, cut, infos = env.chunk_step(np.full((1, 4, 2), 2.0, np.float32))
    assert kinds(arm.log[before:]) == ["act", "act", "stop", "reset"] and cut[0] and not ended[0] and rewards[0] == 2
    assert infos["chunk"]["mask"].tolist() == [[True, True, False, False]]
    arm.danger, before = "force limit", len(arm.log)
    *_, cut, infos = env.chunk_step(np.full((1, 4, 2), 2.0, np.float32))
    assert kinds(arm.log[before:]) == ["act", "fault", "stop", "word", "stop", "reset"]
    assert cut[0] and infos["lost"][0] and not infos["chunk"]["mask"].any()
    env.close()


def pause(env: Any) -> None:
    """Time goes by, without waiting for it."""
    env._core.observation = env._core.observation._replace(taken_at=time.monotonic() - 100)


def test_after_a_pause_the_first_action_is_chosen_anew() -> None:
    arm = LoggingArm()
    env = RobotVectorEnv(EvalEnvConfig(env_type="robot", max_episode_steps=100, kwargs=dict(PACE)), 1, 0, 0, arm)
    env.reset()
    pause(env)
    _, rewards, ended, cut, infos = env.chunk_step(np.full((1, 4, 2), 2.0, np.float32))
    assert infos["lost"][0] and cut[0] and not (ended[0] or rewards[0]) and "act" not in kinds(arm.log)
    assert env.timing.num_refused == 1 and env.timing.num_stopped == 0 and not infos["episode"]["mask"][0]
    pause(env)
    env.refresh()  # as an env rank does before a rollout
    assert "lost" not in env.step(np.full((1, 2), 2.0, np.float32))[4] and env.timing.num_refused == 1
    with pytest.raises(RlhpcError, match=r"20 times in a row: the policy is slower than stale_s \(60\)"):
        for _ in range(30):
            pause(env)
            env.step(np.full((1, 2), 2.0, np.float32))
    assert kinds(arm.log).count("act") == 1
    env.close()


SCRIPT = """
import sys, time
import numpy as np
from omegaconf import OmegaConf
from rlhpc.embodied.config import EnvSideConfig
from rlhpc.embodied.envs import make_env
if __name__ == "__main__":
    path, simulators, options = sys.argv[1], int(sys.argv[2]), eval(sys.argv[3])
    kwargs = {"hz": 200.0, "stale_s": 0.5, "path": path, **options}
    config = EnvSideConfig(env_type="robot", env_id="tests.logging_arm:LoggingArm", kwargs=kwargs, simulators=simulators)
    env = make_env(OmegaConf.structured(config), 1)
    env.reset()
    while True:
        env.step(np.zeros((1, 2), np.float32))
"""


def started(tmp_path: Path, simulators: int, **options: Any) -> tuple[subprocess.Popen[bytes], Path]:
    """A process that moves an arm, in itself or in one of its own; and the arm's log."""
    script, log = tmp_path / "moves.py", tmp_path / "log"
    script.write_text(SCRIPT)
    command = [sys.executable, str(script), str(log), str(simulators), repr(options)]
    return subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, cwd=tmp_path), log


def acts(log: Path) -> int:
    return kinds(read_log(log)).count("act")


def stopped_behind(log: Path, at: float, *names: str) -> float:
    """When it was stopped after a time; waits until it was."""

    def stops() -> list[float]:
        return [entry[0] for entry in read_log(log) if entry[1] in names and entry[0] > at]

    wait_until(lambda: bool(stops()), 60)
    return min(stops())


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_robot_in_a_process_is_stopped_and_closed_when_its_parent_is_killed(tmp_path: Path, number: int) -> None:
    process, log = started(tmp_path, simulators=1, ready=False)
    wait_until(lambda: acts(log) > 10, 120)
    process.send_signal(number)
    process.wait()
    wait_until(lambda: kinds(read_log(log))[-2:] == ["stop", "close"], 30)


def test_a_robot_is_stopped_from_outside_when_its_process_is_killed_and_waits_for_a_person(tmp_path: Path) -> None:
    options = {"independent": True, "ready": False}
    process, log = started(tmp_path, simulators=0, **options)
    wait_until(lambda: acts(log) > 10, 120)
    process.kill()
    process.wait()
    killed_at = time.monotonic()
    with Ticks() as ticks:
        at = stopped_behind(log, killed_at - 1, "independent stop")
    assert at - killed_at <= 0.5 + 0.1 + 3 * ticks.gap(killed_at, max(at, killed_at + 0.01))
    before = len(read_log(log))
    again, _ = started(tmp_path, simulators=0, **options)
    wait_until(lambda: bool(stopped_robots()), 120)
    [notice] = stopped_robots()
    assert f"process {process.pid} on" in notice["reason"] and "ended without closing it" in notice["reason"]
    time.sleep(0.5)
    assert not {"act", "reset"} & set(kinds(read_log(log)[before:]))
    resume(notice["robot"])
    wait_until(lambda: acts(log) > 10 and "reset" in kinds(read_log(log)[before:]), 60)
    again.kill()
    again.wait()
    stopped_behind(log, time.monotonic() - 1, "independent stop")
    for path in Path(os.environ["XDG_STATE_HOME"]).rglob(f"{notice['robot']}.*"):
        path.unlink()


def test_a_robot_is_stopped_from_outside_while_its_process_is_blocked(tmp_path: Path) -> None:
    """The driver keeps the interpreter's lock for three seconds: no thread of its process can do anything."""
    with Ticks() as ticks:
        process, log = started(tmp_path, simulators=0, independent=True, ready=False, blocks_at=20)
        wait_until(lambda: acts(log) >= 20, 120)
        began = [entry[0] for entry in read_log(log) if entry[1] == "act"][19]
        at = stopped_behind(log, began, "independent stop")
        assert at - began <= 0.5 + 0.1 + 3 * ticks.gap(began, at)
        wait_until(lambda: bool(stopped_robots()), 60)  # the process has found out
    assert acts(log) == 20
    process.kill()
    process.wait()
    for path in Path(os.environ["XDG_STATE_HOME"]).rglob("*.json"):
        path.unlink()


def test_a_crash_of_a_robots_process_waits_for_a_person_too(tmp_path: Path) -> None:
    log = tmp_path / "log"
    env: Any = make_env(OmegaConf.structured(section(log, faults=0.0, ready=False, independent=True)), 1)
    env.reset()
    env.step(np.full((1, 2), 2.0, np.float32))
    waits: list[str] = []
    env.on_wait = waits.append
    env._simulators[0].process.kill()
    done = threading.Thread(target=env.step, args=(np.full((1, 2), 2.0, np.float32),), daemon=True)
    done.start()
    wait_until(lambda: bool(waits and stopped_robots()), 120)
    assert "ended without closing it" in waits[0] and kinds(read_log(log)).count("reset") == 1 and done.is_alive()
    stopped_behind(log, 0.0, "independent stop")
    resume(stopped_robots()[0]["robot"])
    done.join(60)
    assert kinds(read_log(log)).count("reset") == 2 and env.restarts == 1
    env.close()


ENTRIES: dict[str, Callable[[Path], Any]] = {
    "process": lambda path: make_env(OmegaConf.structured(section(path)), 1),
    "local": lambda path: make_env(OmegaConf.structured(section(path, simulators=0)), 1),
}


@pytest.mark.parametrize("name", ENTRIES)
def test_no_argument_of_a_call_gets_around_the_core(tmp_path: Path, name: str) -> None:
    """Whatever a caller tries: another shape, numbers in other types, a step before a reset and after a close."""
    log = tmp_path / "log"
    env = ENTRIES[name](log)
    attempts = [
        lambda: env.step(np.zeros((1, 2), np.float32)),
        lambda: env.reset(),
        lambda: env.step(np.full((1, 2), np.nan, np.float16)),
        lambda: env.step(np.full((1, 2), 10**9, np.int64)),
        lambda: env.step(np.full((1, 2), 1e300)),
        lambda: env.chunk_step(np.full((1, 3, 2), np.inf)),
        lambda: env.step(np.zeros((1, 3), np.float32)),
        lambda: env.close(),
        lambda: env.step(np.zeros((1, 2), np.float32)),
    ]
    for attempt in attempts:
        try:
            attempt()
        except Exception as error:  # a refusal
            print(error)
    assert not violations(read_log(log)) and kinds(read_log(log))[-1] == "close"
    for path in Path(os.environ["XDG_STATE_HOME"]).rglob("*.json"):
        path.unlink()
