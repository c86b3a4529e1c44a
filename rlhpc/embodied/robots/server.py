"""Robot server, which joins a robot to a run, executes the run's requests, and stops the robot if the connection is lost."""

from __future__ import annotations

import contextlib
import json
import logging
import shlex
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rlhpc.embodied.config import EnvSideConfig
from rlhpc.embodied.envs.observations import columns_of, take
from rlhpc.embodied.robots.driver import Robot
from rlhpc.embodied.robots.joining import GREETING_S, Key, RobotRefused, join
from rlhpc.embodied.robots.limits import CommandLimits
from rlhpc.embodied.robots.protocol import ConnectionLost, Message, RobotConnection, describe_spaces
from rlhpc.embodied.robots.remote_env import SETTINGS
from rlhpc.embodied.robots.robot_env import RobotVectorEnv
from rlhpc.embodied.robots.safety import SafetyCore
from rlhpc.runtime.errors import ConfigError, RlhpcError
from rlhpc.runtime.os_resources import start_bound_to_parent

log = logging.getLogger(__name__)

_POLL_S = 0.2
#: Maximum seconds of the ssh login, during which a user may have to type a password.
_LOGIN_S = 60.0
#: First and maximum pause between attempts to reach the run, in seconds.
_RETRY_PAUSES_S = (0.5, 4.0)
#: Seconds between messages that tell the run that the robot waits for a person.
_REMIND_S = 1.0
#: Settings of `RobotVectorEnv` for which the robot's machine may set upper bounds.
BOUNDS = ("hz", "stale_s", "max_change")


class RobotRoute:
    """Route to the run's address: a direct connection, or a child process `ssh -L`.

    Args:
        key: Key with the run's address.
        ssh: Arguments for ssh: options and a host that can reach the address; empty to connect directly.
        address: Address `HOST:PORT` that replaces the run's address, such as the end of an existing tunnel.

    Raises:
        ConfigError: The address is not HOST:PORT.
    """

    def __init__(self, key: Key, ssh: str = "", address: str = "") -> None:
        self._target = (key.place.address, key.place.port)
        if address:
            host, _, port = address.rpartition(":")
            if not host or not port.isdecimal():
                raise ConfigError(f"--address is {address!r}; it must be HOST:PORT")
            self._target = (host, int(port))
        self._ssh = shlex.split(ssh)
        self._child: subprocess.Popen[bytes] | None = None

    def __str__(self) -> str:
        return f"{self._target[0]} port {self._target[1]}" + (f" by ssh {shlex.join(self._ssh)}" if self._ssh else "")

    def open(self) -> socket.socket:
        """Opens a new connection.

        Raises:
            OSError: The connection fails.
        """
        self.close()
        if not self._ssh:
            return socket.create_connection(self._target, GREETING_S)
        with tempfile.TemporaryDirectory(
            prefix="rlhpc-robot-"
        ) as folder:  # the socket needs no name once it is connected
            return self._tunnel(Path(folder) / "run")

    def _tunnel(self, end: Path) -> socket.socket:
        target_address = f"{self._target[0]}:{self._target[1]}"
        # With a session, even an idle one, ssh and sshd send data at once; without one (-W, -N) the end of a message may
        # wait 40 ms for an acknowledgement of its beginning. The session ends with this process, and ssh with the session.
        options = ("-T", "-o", "ExitOnForwardFailure=yes", "-o", "ControlPath=none", "-L", f"{end}:{target_address}")
        self._child = start_bound_to_parent(
            ["ssh", *options, *self._ssh, "cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL
        )
        deadline = time.monotonic() + _LOGIN_S
        while not end.exists():
            if (exit_code := self._child.poll()) is not None:
                raise ConnectionError(f"ssh ended with {exit_code}; what it said is above")
            if time.monotonic() > deadline:
                raise ConnectionError(f"ssh has not logged in in {_LOGIN_S:g} s")
            time.sleep(0.02)
        sock = socket.socket(socket.AF_UNIX)
        sock.connect(str(end))
        return sock

    def close(self) -> None:
        """Ends the child process."""
        if self._child is not None:
            assert self._child.stdin is not None
            self._child.stdin.close()
            self._child.terminate()
            try:
                self._child.wait(2)
            except subprocess.TimeoutExpired:
                self._child.kill()
                self._child.wait()
            self._child = None


class _RobotReleased(Exception):
    """Exception raised when the run releases the robot during a wait for a person. Its argument is the message's number."""


def machine_limits(bounds: Mapping[str, float], resume: str = "person") -> CommandLimits:
    """Returns the limits of a robot before a run requests narrower limits."""
    return CommandLimits(bounds.get("stale_s", CommandLimits().stale_s), bounds.get("max_change"), resume)


class RobotServer:
    """Robot that serves a run. Its safety core runs on this machine, so that no run can change who may end a safety stop.

    Args:
        robot: The robot, or its safety core.
        bounds: Upper bounds of the settings in `BOUNDS` that this machine sets for all runs.
        notify: Shows a message to the person at the robot.
    """

    def __init__(self, robot: Robot | SafetyCore, bounds: Mapping[str, float], notify: Callable[[str], None]) -> None:
        self._core = robot if isinstance(robot, SafetyCore) else SafetyCore(robot, machine_limits(bounds))
        self._bounds, self._notify = bounds, notify
        self._env: RobotVectorEnv | None = None
        self.num_steps = 0

    def serve(self, key: Key, route: RobotRoute, patience_s: float) -> None:
        """Serves a run until it releases the robot.

        Raises:
            RobotRefused: The run rejects the robot.
            RlhpcError: The run is gone or cannot be reached, or the robot's code failed.
        """
        spaces = describe_spaces(self._core.observation_space, self._core.action_space)
        description = json.dumps({**spaces, "no_max_change": self._core.explain_no_max_change()})
        name, secret, has_joined = key.id, key.secret, False
        deadline, reason, pause = time.monotonic() + patience_s, "", _RETRY_PAUSES_S[0]
        try:
            while True:
                connection, session, reason = self._join(route, name, secret, description)
                if connection is None:
                    if time.monotonic() > deadline:
                        state_text = "has not come back" if has_joined else "could not be reached"
                        raise RlhpcError(
                            f"{key.place.run} {state_text} in {patience_s:g} s (--patience), at {route}: {reason}; the "
                            "robot is stopped"
                        )
                    time.sleep(pause)
                    pause = min(2 * pause, _RETRY_PAUSES_S[1])
                    continue
                if not has_joined:
                    name, secret, has_joined = *session, True
                    self._notify(f"{key.place.robot} has joined {key.place.run} ({route})")
                try:
                    if self._serve_requests(connection):
                        self._notify(f"{key.place.run} has let {key.place.robot} go after {self.num_steps} steps")
                        return
                except ConnectionLost as error:
                    self._core.end()
                    self._notify(
                        f"the line to {key.place.run} is lost ({error}): the robot is stopped, and tries to come back"
                    )
                finally:
                    connection.close()
                deadline, pause = time.monotonic() + patience_s, _RETRY_PAUSES_S[0]
        finally:
            self._core.close()
            route.close()

    def _join(
        self, route: RobotRoute, name: str, secret: str, description: str
    ) -> tuple[RobotConnection | None, tuple[str, str], str]:
        """Returns a connection to the run, the session and "", or None, an empty session and the reason of the failure."""
        try:
            sock = route.open()
        except OSError as error:
            return None, ("", ""), str(error.strerror or error)
        try:
            return *join(sock, name, secret, description), ""
        except (OSError, KeyError, TypeError, ValueError) as error:
            sock.close()
            return None, ("", ""), str(error)
        except RobotRefused:
            sock.close()
            raise

    def _serve_requests(self, connection: RobotConnection) -> bool:
        """Executes the run's requests; returns once the run releases the robot.

        Raises:
            ConnectionLost: The run is gone.
        """
        while True:
            message = connection.receive(_POLL_S)
            if message is None:
                continue
            fields = message.fields
            if "begin" in fields:
                self._configure(fields["begin"], int(fields["seed"]))
            elif fields["do"] == "leave":
                return self._confirm_release(connection, fields["number"])
            else:
                try:
                    self._execute(connection, message)
                except ConnectionLost:
                    raise
                except _RobotReleased as release:
                    return self._confirm_release(connection, release.args[0])
                except Exception as error:
                    self._core.end()
                    error_text = f"{type(error).__name__}: {error}"[:500]
                    with contextlib.suppress(ConnectionLost):
                        connection.send({"number": fields["number"], "broken": error_text})
                    raise RlhpcError(
                        f"the robot's own code failed in {fields['do']}, and it is stopped: {error_text}"
                    ) from error

    def _confirm_release(self, connection: RobotConnection, number: int) -> bool:
        self._core.end()
        with contextlib.suppress(ConnectionLost):
            connection.send({"number": number})
        return True

    def _make_reminder(self, connection: RobotConnection, number: int) -> Callable[[str], None]:
        """Returns a function that tells the run that the robot waits for a person, and that ends the wait if the run is
        gone.
        """
        last_reminder = 0.0

        def remind(reason: str) -> None:
            nonlocal last_reminder
            if time.monotonic() - last_reminder > _REMIND_S:
                last_reminder = time.monotonic()
                connection.send({"number": number, "waits": reason[:500]})
            message = connection.receive(0.0)
            if message is not None and message.fields.get("do") == "leave":
                raise _RobotReleased(message.fields["number"])

        return remind

    def _configure(self, settings: Mapping[str, Any], seed: int) -> None:
        robot_kwargs: dict[str, Any] = {"late": settings["late"], "resume": self._core.limits.resume}
        for name in BOUNDS:
            bounds = [bound for bound in (settings[name], self._bounds.get(name)) if bound is not None]
            robot_kwargs[name] = float(min(bounds)) if bounds else None
        run_settings = {name: settings[name] for name in SETTINGS}
        limit = int(settings["max_episode_steps"]) or None
        section = EnvSideConfig(env_type="robot", max_episode_steps=limit, kwargs=robot_kwargs, **run_settings)
        self._core.end()
        self._core.set_limits(
            CommandLimits(robot_kwargs["stale_s"], robot_kwargs["max_change"], self._core.limits.resume)
        )
        self._env = RobotVectorEnv(section, 1, int(settings["slot"]), seed, self._core)

    def _execute(self, connection: RobotConnection, message: Message) -> None:
        fields, env = message.fields, self._env
        if env is None:
            raise ConnectionLost("the run did not say how the robot is moved")
        env.on_wait = self._make_reminder(connection, fields["number"])
        if fields["do"] in ("reset", "refresh"):
            if fields["do"] == "refresh":
                obs = env.refresh()
            else:
                obs, _ = env.reset(None if fields["seed"] is None else int(fields["seed"]))
            connection.send({"number": fields["number"]}, columns_of("obs", take(obs, 0)))
            return
        if fields["do"] in ("hold", "stop"):
            if fields["do"] == "hold":
                env.hold()
            else:
                env.stop(str(fields["reason"])[:500])
            connection.send({"number": fields["number"]})
            return
        obs, rewards, terminations, truncations, infos = env.step(message.arrays["action"][None])
        self.num_steps += 1
        reply: dict[str, Any] = {
            "number": fields["number"],
            "reward": float(rewards[0]),
            "ended": bool(terminations[0]),
            "cut": bool(truncations[0]),
            "lost": "lost" in infos,
        }
        arrays = columns_of("obs", take(obs, 0)) | env.timing.pop_measurements()
        if "episode" in infos:
            reply["episode"] = {
                name: float(statistic[0]) for name, statistic in infos["episode"].items() if name != "mask"
            }
            arrays |= columns_of("final_obs", take(infos["final_obs"], 0))
        connection.send(reply, arrays)
