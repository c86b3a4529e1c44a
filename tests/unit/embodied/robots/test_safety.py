"""The safety core: what a robot is sent, and when it is stopped, measured by its own clock."""

from __future__ import annotations

import ast
import contextlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

import rlhpc
from rlhpc.cli import main
from rlhpc.embodied.config import EnvSideConfig
from rlhpc.embodied.robots.driver import Observation, Robot
from rlhpc.embodied.robots.limits import CommandLimits, RobotStopped, StaleObservation, observation_fault
from rlhpc.embodied.robots.notices import Notice, notices_folder, resume, stopped_robots
from rlhpc.embodied.robots.robot_env import RobotVectorEnv
from rlhpc.embodied.robots.safety import SafetyCore, build_safe_robot
from rlhpc.embodied.robots.states import State
from rlhpc.runtime.errors import ConfigError, RlhpcError
from tests.eventually import wait_until
from tests.logging_arm import MAX_CHANGE, LoggingArm, Ticks, kinds, violations

ROOT = Path(rlhpc.__file__).parent


@pytest.fixture
def arm() -> LoggingArm:
    return LoggingArm(ready=False)


@pytest.fixture
def core(arm: LoggingArm) -> Iterator[SafetyCore]:
    made = SafetyCore(arm, CommandLimits(stale_s=60.0, max_change=MAX_CHANGE))
    yield made
    arm.released.set()
    made.close()


def commands(arm: LoggingArm) -> list[Any]:
    return [entry[2] for entry in arm.log if entry[1] == "act"]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_stops_it_and_is_neither_sent_nor_remembered(
    core: SafetyCore, arm: LoggingArm, bad: float
) -> None:
    core.begin(0)
    core.command(np.array([2.0, -2.0]))
    with pytest.raises(RobotStopped, match="not finite"):
        core.command(np.array([bad, -2.0]))
    for call in (lambda: core.command(np.array([2.0, -2.0])), lambda: core.begin(0), core.observe, core.judge):
        with pytest.raises(RobotStopped, match="not finite"):
            call()
    assert commands(arm) == [[2.0, -2.0]] and kinds(arm.log)[-1] == "stop" and core.timing.num_stopped == 1
    arm.is_ready = True
    core.wait_for_person()
    core.begin(0)
    core.command(np.array([2.0, -2.0]))
    assert commands(arm) == [[2.0, -2.0]] * 2 and not violations(arm.log)


def test_commands_are_limited_from_the_measured_position_also_the_first_one(core: SafetyCore, arm: LoggingArm) -> None:
    core.begin(0)
    core.command(np.array([0.0, 0.0]))
    core.command(np.array([2.0, -2.0]))
    arm.place = np.array([-1.0, 1.0])  # somebody pushes it
    core.command(np.array([2.0, -2.0]))
    sent = np.array(commands(arm))
    assert np.allclose(sent, [[1.9, -1.9], [2.0, -2.0], [-0.9, 0.9]], atol=1e-6)
    arm.place = np.array([3.5, 0.0])
    with pytest.raises(RobotStopped, match="outside of the bounds of its commands by more than max_change"):
        core.command(np.array([3.5, 0.0]))
    core.close()


@pytest.mark.parametrize("mode", ["delta", "velocity"])
def test_changes_count_from_the_command_that_is_carried_out_and_from_0_where_it_holds_still(mode: str) -> None:
    arm = LoggingArm()
    arm.control_mode = mode
    core = SafetyCore(arm, CommandLimits(stale_s=60.0, max_change=0.5))
    core.begin(0)
    for _ in range(3):
        core.command(np.array([3.0, -3.0]))
    core.hold()
    core.command(np.array([3.0, -3.0]))
    core.begin(0)
    core.command(np.array([-3.0, 0.0]))
    assert commands(arm) == [[0.5, -0.5], [1.0, -1.0], [1.5, -1.5], [0.5, -0.5], [-0.5, 0.0]]
    core.close()


def test_max_change_needs_a_driver_that_says_from_what(arm: LoggingArm) -> None:
    class Silent(LoggingArm):
        control_mode = ""

    class Blind(LoggingArm):
        position = Robot.position

    for driver, says in (
        (
            Silent(),
            r"max_change is 0\.1; .*Silent\.control_mode is ''.* absolute \(with position\(\)\), delta or velocity",
        ),
        (Blind(), r"max_change is 0\.1; .*Blind\.control_mode is absolute: position\(\) must return"),
    ):
        with pytest.raises(ConfigError, match=says):
            SafetyCore(driver, CommandLimits(max_change=0.1))
        assert kinds(driver.log) == ["close"]
        SafetyCore(driver, CommandLimits()).close()


def test_what_was_chosen_from_an_old_observation_is_refused(arm: LoggingArm) -> None:
    core = SafetyCore(arm, CommandLimits(stale_s=60.0))
    core.begin(0)
    core.command(np.array([2.0, -2.0]))
    assert core.observation is not None
    core.observation = core.observation._replace(taken_at=time.monotonic() - 100)
    with pytest.raises(StaleObservation, match=r"100\.\d+ s old"):
        core.command(np.array([1.0, -1.0]))
    assert core.timing.num_refused == 1 and core.state is State.HELD and len(commands(arm)) == 1
    core.observe()
    core.command(np.array([1.0, -1.0]))
    assert len(commands(arm)) == 2
    core.close()


def test_a_clock_that_is_not_the_machines_is_found(core: SafetyCore, arm: LoggingArm) -> None:
    core.begin(0)
    arm.observe = lambda: LoggingArm.observe(arm)._replace(taken_at=time.time() + 1e6)  # type: ignore[method-assign]
    with pytest.raises(RobotStopped, match=r"it must be by time\.monotonic"):
        core.observe()


def test_an_old_action_does_not_outlive_an_episode(core: SafetyCore, arm: LoggingArm) -> None:
    with pytest.raises(RlhpcError, match="must be reset"):
        core.command(np.zeros(2))
    core.begin(0)
    core.end()
    with pytest.raises(RlhpcError, match="must be reset"):
        core.command(np.zeros(2))
    assert not commands(arm)


def drive(core: SafetyCore, outcome: list[str]) -> None:
    """An episode, until it is stopped."""
    try:
        core.begin(0)
        while True:
            with contextlib.suppress(StaleObservation):  # this machine has other work
                core.command(np.array([2.0, -2.0]))
            core.observe()
            core.judge()
    except RlhpcError as error:
        outcome.append(str(error))


@pytest.mark.parametrize("name", ["observe", "act", "unsafe", "judge", "position", "reset"])
def test_it_is_stopped_in_time_when_its_driver_hangs(name: str) -> None:
    """By the arm's clock, less the time for which this machine let no thread run."""
    stale_s, arm = 0.25, LoggingArm(ready=False)
    arm.reset_s = stale_s
    core = SafetyCore(arm, CommandLimits(stale_s=stale_s, max_change=MAX_CHANGE))
    outcome: list[str] = []
    driving = threading.Thread(target=drive, args=(core, outcome), daemon=True)
    with Ticks() as ticks:
        if name != "reset":
            driving.start()
            wait_until(lambda: arm.acts > 20, 20)
        arm.hangs.add(name)
        if name == "reset":
            driving.start()
        wait_until(lambda: core.state is State.STOPPED, 20)
        [hung] = [at for at, kind, *rest in arm.log if kind == "hangs"]
        wait_until(lambda: any(kind == "stop" and at > hung for at, kind, *_ in arm.log), 20)
    stopped = min(at for at, kind, *_ in arm.log if kind == "stop" and at > hung)
    assert stopped - hung <= stale_s + 0.1 + 3 * ticks.gap(hung, stopped)
    before = len(arm.log)
    arm.hangs.clear()
    arm.released.set()
    driving.join(20)
    assert outcome and f"its driver hangs: {name} has not returned for" in outcome[0]
    assert not {"act", "reset"} & set(kinds(arm.log[before:]))
    if name in ("act", "reset"):
        assert "stop" in kinds(arm.log[before:])  # again: the call may have moved it late
    core.close()


def test_nothing_moves_it_after_a_stop_from_any_thread() -> None:
    for number in range(30):
        arm = LoggingArm(ready=False)
        core = SafetyCore(arm, CommandLimits(stale_s=60.0, max_change=MAX_CHANGE))
        outcome: list[str] = []
        driving = threading.Thread(target=drive, args=(core, outcome), daemon=True)
        driving.start()
        wait_until(lambda: arm.acts > number, 20)  # noqa: B023
        stopping = [threading.Thread(target=core.stop, args=(f"button {i}",)) for i in range(3)]
        for thread in stopping:
            thread.start()
        for thread in (*stopping, driving):
            thread.join(20)
        calls = kinds(arm.log)
        assert not {"act", "reset"} & set(calls[calls.index("act") :][calls[calls.index("act") :].index("stop") :])
        assert calls[-3:] == ["stop"] * 3 and core.timing.num_stopped == 1 and "button" in outcome[0]
        core.close()


def test_whoever_closes_it_second_waits_until_it_is_closed(arm: LoggingArm) -> None:
    """The caller's process may end right behind it."""
    core = SafetyCore(arm, CommandLimits(stale_s=60.0))
    closes = threading.Event()

    def close() -> None:
        closes.set()
        arm.released.wait(20)
        arm.note("close")

    arm.close = close  # type: ignore[method-assign]
    first, second = (threading.Thread(target=core.close, daemon=True) for _ in range(2))
    first.start()
    assert closes.wait(20)
    second.start()
    second.join(0.2)
    assert second.is_alive()
    arm.released.set()
    second.join(20)
    assert kinds(arm.log)[-1] == "close" and not second.is_alive()


CAMERAS = spaces.Dict({"state": spaces.Box(-1, 1, (2,), np.float32), "wrist": spaces.Box(0, 255, (4, 4, 3), np.uint8)})


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        ({"wrist": None}, r"its observation has no 'wrist': look after the camera or sensor"),
        ({"wrist": ...}, r"its observation has no 'wrist'"),
        ({"wrist": np.zeros((2, 4, 3), np.uint8)}, r"'wrist' of its observation has the shape \(2, 4, 3\); its"),
        ({"state": np.zeros(3)}, r"'state' of its observation has the shape \(3,\)"),
    ],
)  # fmt: skip
def test_a_camera_that_is_missing_stops_it_and_its_last_observation_is_kept(entries: Any, said: str) -> None:
    arm = LoggingArm(ready=False)
    arm.observation_space = CAMERAS  # type: ignore[assignment]
    seen: dict[str, Any] = {"state": np.zeros(2, np.float32), "wrist": np.zeros((4, 4, 3), np.uint8)}
    arm.observe = lambda: Observation(dict(seen), time.monotonic())  # type: ignore[method-assign]
    arm.unsafe = lambda obs: ""  # type: ignore[method-assign]
    core = SafetyCore(arm, CommandLimits(stale_s=60.0))
    try:
        first = core.begin(0)
        seen.update(entries)
        for name in [name for name, entry in seen.items() if entry is ...]:
            del seen[name]
        with pytest.raises(RobotStopped, match=said):
            core.observe()
        assert core.state is State.STOPPED and kinds(arm.log)[-1] == "stop" and core.observation is first
        with pytest.raises(RobotStopped, match=said):
            core.command(np.zeros(2))
    finally:
        core.close()


def test_an_observation_that_is_no_dict_stops_it() -> None:
    assert (
        observation_fault(np.zeros(2), CAMERAS)
        == "its observation is a ndarray; its observation_space has state, wrist"
    )
    assert observation_fault(np.zeros(3), CAMERAS["state"]) == (
        "its observation has the shape (3,); its observation_space has (2,)"
    )
    assert not observation_fault({"state": np.zeros(2), "wrist": np.zeros((4, 4, 3)), "more": 1}, CAMERAS)


def test_what_raises_stops_it_and_a_stop_that_fails_is_tried_again(arm: LoggingArm) -> None:
    core = SafetyCore(arm, CommandLimits(stale_s=60.0))
    core.begin(0)
    fails = [2]

    def stop() -> None:
        if fails[0]:
            fails[0] -= 1
            raise OSError("the wire is cut")
        arm.note("stop")

    arm.stop = stop  # type: ignore[method-assign]
    arm.judge = lambda obs, action: 1 / 0  # type: ignore[method-assign, assignment, return-value]
    core.command(np.zeros(2))
    before = len(arm.log)
    with pytest.raises(ZeroDivisionError):
        core.judge()
    wait_until(lambda: "stop" in kinds(arm.log[before:]), 20)
    assert core.state is State.STOPPED
    core.close()


# -- a person's word --------------------------------------------------------------------------------------------------


def environment(arm: LoggingArm, **kwargs: Any) -> RobotVectorEnv:
    section = EnvSideConfig(env_type="robot", kwargs={"hz": 1e6, "stale_s": 60.0, "max_change": MAX_CHANGE, **kwargs})
    return RobotVectorEnv(section, 1, 0, 0, arm)


def test_a_stop_waits_for_a_person_without_a_deadline_and_can_be_cancelled(caplog: pytest.LogCaptureFixture) -> None:
    arm = LoggingArm(ready=False)
    env, reasons = environment(arm), []

    def on_wait(reason: str) -> None:
        reasons.append(reason)
        if len(reasons) == 3:
            raise KeyboardInterrupt

    env.on_wait = on_wait
    env.reset()
    with pytest.raises(KeyboardInterrupt):
        env.step(np.full((1, 2), np.nan))
    assert len(set(reasons)) == 1 and "not finite" in reasons[0]
    assert "waits for a person who looks at it: its ready() says so" in caplog.text
    assert not {"act", "reset"} & set(kinds(arm.log[kinds(arm.log).index("reset") + 1 :]))
    env.close()


def test_a_stop_outlives_its_process_and_so_does_an_end_without_a_close() -> None:
    kwargs = {"ready": False}
    path = "tests.logging_arm:LoggingArm"
    core = build_safe_robot(path, "env.env_id", kwargs, CommandLimits(stale_s=60.0))
    core.begin(0)
    core.close()
    assert not list(notices_folder().glob("*"))  # it ended as it should
    core = build_safe_robot(path, "env.env_id", kwargs, CommandLimits(stale_s=60.0))
    core.begin(0)
    core.stop("smoke")
    core.close()
    assert [(record["robot"], record["reason"]) for record in stopped_robots()] == [(core.name, "smoke")]
    again = build_safe_robot(path, "env.env_id", kwargs, CommandLimits(stale_s=60.0))
    with pytest.raises(RobotStopped, match="smoke"):
        again.begin(0)
    with pytest.raises(ConfigError, match=f"no robot 'other' is stopped on this machine; stopped are: {core.name}"):
        resume("other")
    assert resume(core.name) == "smoke"
    again.wait_for_person()
    again.begin(0)
    again.stop("fire")
    assert not Notice(core.name).resumed()  # a word is for one stop
    resume(core.name)
    again.wait_for_person()
    again.begin(0)
    another = build_safe_robot(path, "env.env_id", kwargs, CommandLimits(stale_s=60.0))
    another.close()
    assert list(notices_folder().glob("*.json"))  # one that did not move it leaves the other's notice
    again.stop("flood")
    again.close()
    resume(core.name)  # before the next process
    last = build_safe_robot(path, "env.env_id", kwargs, CommandLimits(stale_s=60.0))
    last.begin(0)
    last.close()
    assert not list(notices_folder().glob("*"))


def test_a_person_speaks_by_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    def rlhpc_robot(*words: str) -> tuple[int, str]:
        try:
            code = main(["robot", *words])
        except SystemExit as end:
            code = int(end.code or 0)
        said = capsys.readouterr()
        return code, said.out + said.err

    assert rlhpc_robot("resume") == (0, "no robot is stopped\n")
    core = build_safe_robot("tests.logging_arm:LoggingArm", "env.env_id", {"ready": False}, CommandLimits(stale_s=60.0))
    core.stop("smoke")
    code, text = rlhpc_robot("resume")
    assert code == 0 and f"{core.name}  stopped 0 s ago: smoke" in text and "rlhpc robot resume NAME" in text
    code, text = rlhpc_robot("resume", "other")
    assert code == 2 and f"no robot 'other' is stopped on this machine; stopped are: {core.name}" in text
    assert rlhpc_robot("resume", core.name) == (0, f"{core.name} may move again; it was stopped: smoke\n")
    core.wait_for_person()
    assert core.state is State.IDLE
    core.close()
    code, text = rlhpc_robot("serve")
    assert code == 2 and "rlhpc robot serve needs the key's file" in text


# -- nothing goes around it -------------------------------------------------------------------------------------------

DRIVER_CALLS = {"act", "unsafe", "judge", "observe", "position", "independent_stop", "ready"}
#: Modules that may see a driver: its interface, its core, and what hands a new one to the core.
KNOW_DRIVERS = {"robots/driver.py", "robots/limits.py", "robots/safety.py", "robots/robot_env.py", "robots/server.py",
                "robots/simulated_robot.py"}  # fmt: skip


def test_no_module_but_the_core_calls_a_driver() -> None:
    for path in sorted((ROOT / "embodied").rglob("*.py")):
        name, tree = str(path.relative_to(ROOT / "embodied")), ast.parse(path.read_text())
        names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names}
        if "Robot" in names or name == "robots/driver.py":
            assert name in KNOW_DRIVERS, f"{name} knows drivers"
        if name in KNOW_DRIVERS - {"robots/safety.py", "robots/simulated_robot.py"}:
            calls = {
                (node.func.attr, ast.unparse(node.func.value))
                for node in ast.walk(tree)
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
            }
            around = {call for call in calls if call[0] in DRIVER_CALLS and call[1] != "self._core"}
            assert not around, f"{name} calls {around}"
        assert name == "robots/safety.py" or "_SafetyCore__driver" not in path.read_text()


def reachable(thing: Any, depth: int = 6) -> Iterator[Any]:
    """What the public attributes of an object lead to, and of these."""
    seen: set[int] = set()
    level = [thing]
    for _ in range(depth):
        following = []
        for one in level:
            if id(one) in seen or isinstance(one, (str, bytes, int, float, np.ndarray, spaces.Space, type)):
                continue
            seen.add(id(one))
            yield one
            for name in dir(one):
                if not name.startswith("_"):
                    following.append(getattr(one, name, None))
        level = following


def test_no_public_attribute_leads_to_the_driver() -> None:
    arm = LoggingArm()
    env = environment(arm)
    env.reset()
    found = list(reachable(env))
    assert not any(isinstance(one, Robot) or getattr(one, "__self__", None) is arm for one in found)
    assert env in found and env.episodes in found
    env.close()
