"""Environment of a remote robot outside the cluster, which joins the run over SSH with a key."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from rlhpc.embodied.envs.base import TIMING_NAMES, Step, Timing
from rlhpc.embodied.envs.observations import rows_of
from rlhpc.embodied.robots.joining import RobotListener
from rlhpc.embodied.robots.protocol import (
    ConnectionLost,
    Message,
    RobotConnection,
    action_space_of,
    describe_misfit,
    describe_spaces,
    observation_space_of,
)
from rlhpc.embodied.robots.robot_env import OneRobotEnv, Pace, positive_number
from rlhpc.runtime.comm.context import check_run
from rlhpc.runtime.errors import ConfigError, DeadlineExceeded
from rlhpc.runtime.files import expand_home
from rlhpc.runtime.network import address_of
from rlhpc.runtime.registry import ROBOTS

if TYPE_CHECKING:
    from rlhpc.embodied.config import EnvSideConfig

log = logging.getLogger(__name__)

#: Settings of the section that apply on the robot's side.
SETTINGS = ("use_fixed_reset_state_ids", "use_rel_reward", "ignore_terminations", "reward_scale", "group_size")
_EPISODE = ("return", "length", "success_once", "success_at_end")
_POLL_S = 0.2


class RemoteRobotVectorEnv(OneRobotEnv):
    """Vector environment of one remote robot (`rlhpc robot serve`); `env_id` is the name in messages. Episodes cannot be
    resumed.

    The safety core on the robot's machine enforces rate, limits and safety. This class requests the steps and waits for them,
    without a deadline while the robot waits for a person. When the connection to the robot is lost, the episode ends as
    truncated, without an entry in the statistics (`infos["lost"]`), and the run waits.

    `kwargs`: `observes` and `acts`, descriptions of the robot's spaces (see `protocol`); `hz`, `stale_s`, `max_change`,
    `late`, see `RobotVectorEnv`; `wait_s` (600), time to wait for the robot; `interface` (null), the network interface
    to listen on; `folder` (null), the folder of addresses and keys, by default in the run's registry.

    Args:
        cfg: Section `env.train` or `env.eval`.
        num_envs: 1.
        slot_offset: Global number of the slot.
        seed: Seed of the run.

    Raises:
        ConfigError: `env.train.kwargs` has unknown keys.
    """

    timing: Timing

    def __init__(self, cfg: EnvSideConfig, num_envs: int, slot_offset: int, seed: int) -> None:
        kwargs = {str(name): value for name, value in (cfg.kwargs or {}).items()}
        self._name, self._slot, self._seed = cfg.env_id, slot_offset, seed
        if "resume" in kwargs:
            raise ConfigError(
                "env.train.kwargs.resume: who ends a stop for safety is said at the robot: rlhpc robot serve --resume"
            )
        pace = Pace.pop_from(num_envs, kwargs)
        self._max_change = pace.max_change
        self.control_hz = pace.hz
        self._wait_s = positive_number("wait_s", kwargs.pop("wait_s", 600.0))
        self._folder, self._interface = kwargs.pop("folder", None), kwargs.pop("interface", None)
        self.observation_space, self.action_space = (
            observation_space_of(kwargs.pop("observes", None)),
            action_space_of(kwargs.pop("acts", None)),
        )
        if kwargs:
            allowed_names = "observes, acts, hz, stale_s, max_change, late, wait_s, interface, folder"
            raise ConfigError(f"env.train.kwargs of a distant_robot has {', '.join(kwargs)}; there are {allowed_names}")
        self.max_episode_steps = cfg.max_episode_steps or 0
        settings = {name: getattr(cfg, name) for name in SETTINGS}
        self._settings = settings | {"max_episode_steps": self.max_episode_steps, "slot": slot_offset, **pace.to_json()}
        self.timing = Timing()
        self._listener: RobotListener | None = None
        self._connection: RobotConnection | None = None
        self._num_requests = self._num_begins = self._num_round_trips = 0
        self._lost_reason, self._needs_begin = "", False
        self._wait_reason = ""

    # -- connection -----------------------------------------------------------------------------------------------

    def _open_listener(self) -> RobotListener:
        """Returns the listener. The first call opens it, so that a check of the configuration opens nothing."""
        if self._listener is None:
            from rlhpc.runtime.comm.context import installed_context

            run = installed_context()
            if run is None and self._folder is None:
                raise ConfigError(
                    "a distant_robot joins a run; for commands name the folder in which it is met: "
                    "env.eval.kwargs.folder=robots"
                )
            folder = expand_home(self._folder).absolute() if self._folder else run.registry.root / ROBOTS  # type: ignore[union-attr]
            name = self._folder or run.registry.root.parent.parent.name  # type: ignore[union-attr]
            self._listener = RobotListener(
                folder, self._name, self._slot, self._address(), str(name), self._describe_misfit
            )
        return self._listener

    def _address(self) -> str:
        from rlhpc.runtime.comm.context import installed_context

        if self._interface is not None:
            return address_of(str(self._interface))
        run = installed_context()
        endpoint = str(run.service.endpoint["tcp"]) if run is not None else ""
        return endpoint.removeprefix("tcp://").rpartition(":")[0].strip("[]") or "127.0.0.1"

    def _describe_misfit(self, description: Any) -> str:
        """Returns the reason why a robot does not fit this environment; empty if it fits."""
        spaces = describe_spaces(self.observation_space, self.action_space)
        if reason := describe_misfit(spaces, description):
            return reason
        no_max_change = str(description.get("no_max_change", ""))
        return (
            f"kwargs.max_change is {self._max_change:g}; {no_max_change}" if self._max_change and no_max_change else ""
        )

    def _wait_for_robot(self, deadline: float) -> tuple[RobotConnection, bool]:
        listener, meeting_point = self._open_listener(), self._open_listener().place
        if (connection := listener.wait(0.0, check_run)) is None:
            log.warning(
                "%s waits for %s, at %s port %d of %s: rlhpc robot invite makes a key for it", meeting_point.run, self._name,
                meeting_point.address, meeting_point.port, meeting_point.node,
            )  # fmt: skip
            connection = listener.wait(max(0.0, deadline - time.monotonic()), check_run)
        if connection is None:
            problem = (
                f"it was lost ({self._lost_reason}) and has not come back" if self._lost_reason else "it has not come"
            )
            raise DeadlineExceeded(
                f"waited {self._wait_s:g} s (kwargs.wait_s) for the robot {self._name} of slot {self._slot}: {problem}; "
                f"rlhpc robot invite {meeting_point.run} --output FILE makes its key, rlhpc robot serve FILE brings it"
            )
        return connection

    # -- episodes -------------------------------------------------------------------------------------------------

    def reset(self, seed: int | None = None) -> tuple[Any, dict[str, Any]]:
        """Starts an episode, once the robot has joined (`VectorEnv.reset`)."""
        if seed is not None:
            self._seed = seed
        return self._begin_episode(seed), {}

    def _begin_episode(self, seed: int | None) -> Any:
        deadline = time.monotonic() + self._wait_s
        while True:
            connection, is_fresh = self._wait_for_robot(deadline)
            self._num_round_trips = 0 if connection is not self._connection else self._num_round_trips
            self._connection = connection
            try:
                self._needs_begin |= is_fresh
                if self._needs_begin:
                    # with the same seed, another process would play the same episodes again
                    begin_seed = self._seed
                    if self._num_begins:
                        sequence = np.random.SeedSequence([self._seed, self._num_begins])
                        begin_seed = int(sequence.generate_state(1)[0])
                    self._num_begins += 1
                    connection.send({"begin": self._settings, "seed": begin_seed})
                answer = self._request({"do": "reset", "seed": seed}, {}, deadline)
                self._needs_begin, self._obs = False, self._observation_from(answer, "obs")
                return self._obs
            except ConnectionLost as error:
                self._drop_connection(error)

    def refresh(self) -> Any:
        """Returns a current observation (`VectorEnv.refresh`). The next step reports a lost robot."""
        try:
            self._obs = self._observation_from(
                self._request({"do": "refresh"}, {}, time.monotonic() + self._wait_s), "obs"
            )
        except ConnectionLost as error:
            self._drop_connection(error)
        return self._obs

    def hold(self) -> None:
        """Makes the robot hold still (`VectorEnv.hold`)."""
        self._tell({"do": "hold"})

    def stop(self, reason: str) -> None:
        """Stops the robot for safety (`VectorEnv.stop`). The next step reports a lost episode and waits for a person."""
        self._tell({"do": "stop", "reason": reason})

    def _tell(self, fields: dict[str, Any]) -> None:
        try:
            self._request(fields, {}, time.monotonic() + self._wait_s)
        except ConnectionLost as error:  # the robot's side stops it
            self._drop_connection(error)

    def step(self, actions: np.ndarray) -> Step:
        """Executes one step of the robot in real time (`VectorEnv.step`)."""
        space = self.action_space
        action = np.asarray(actions, space.dtype).reshape(space.shape)
        try:
            answer = self._request({"do": "step"}, {"action": action}, time.monotonic() + self._wait_s)
            return self._parse_step(answer)
        except ConnectionLost as error:
            self._drop_connection(error)
        final_obs, obs = self._obs, self._begin_episode(None)
        mask = np.array([False])
        episode = {"return": np.zeros(1), "length": np.zeros(1, np.int64), "mask": mask}
        infos = {"final_obs": final_obs, "episode": episode, "lost": np.array([True])}
        return obs, np.zeros(1, np.float32), np.array([False]), np.array([True]), infos

    def _parse_step(self, answer: Message) -> Step:
        fields, arrays = answer
        # a robot with an older version does not measure everything
        self.timing.add({name: np.asarray(arrays.get(name, ()), float).reshape(-1) for name in TIMING_NAMES})
        self._obs = self._observation_from(answer, "obs")
        rewards = np.array([fields["reward"]], np.float32)
        terminations, truncations = np.array([fields["ended"] is True]), np.array([fields["cut"] is True])
        infos: dict[str, Any] = {}
        if terminations[0] or truncations[0]:
            statistics = fields["episode"]
            episode = {name: np.array([float(statistics[name])]) for name in _EPISODE if name in statistics}
            infos = {"final_obs": self._observation_from(answer, "final_obs"), "episode": episode}
            infos["episode"]["mask"] = np.array([fields["lost"] is not True])
            infos |= {"lost": np.array([True])} if fields["lost"] is True else {}
        return self._obs, rewards, terminations, truncations, infos

    def _request(self, fields: dict[str, Any], arrays: dict[str, np.ndarray], deadline: float) -> Message:
        """Sends a request to the robot and returns its answer.

        Raises:
            ConnectionLost: The robot is gone, or does not answer in time.
        """
        connection = self._connection
        assert connection is not None
        self._num_requests += 1
        connection.send({**fields, "number": self._num_requests}, arrays)
        while True:
            answer = connection.receive(_POLL_S)
            round_trips_s = connection.round_trips_s[self._num_round_trips :]
            self._num_round_trips += len(round_trips_s)
            self.timing.record_round_trips(round_trips_s)
            if answer is not None and answer.fields.get("number") == self._num_requests:
                if "waits" in answer.fields:  # the robot waits for a person, without a deadline
                    deadline = time.monotonic() + self._wait_s
                    self._note_wait(str(answer.fields["waits"]))
                    continue
                self._wait_reason = ""
                if reason := answer.fields.get("broken"):
                    raise ConnectionLost(f"it said: {reason}")
                return answer
            if answer is not None:  # an answer to an earlier request
                continue
            check_run()
            if time.monotonic() > deadline:
                raise ConnectionLost(f"it is there, and has not finished its {fields['do']} in {self._wait_s:g} s")

    def _note_wait(self, reason: str) -> None:
        if reason != self._wait_reason:
            self._wait_reason = reason
            log.warning(
                "%s of slot %d is stopped (%s), and the run waits for a person at the robot: rlhpc robot resume, there",
                self._name, self._slot, reason,
            )  # fmt: skip

    def _drop_connection(self, error: ConnectionLost) -> None:
        self._lost_reason = str(error)
        self.timing.record_loss()
        log.warning("%s of slot %d was lost: %s", self._name, self._slot, error)
        if self._connection is not None:
            self._connection.close()

    def _observation_from(self, answer: Message, name: str) -> Any:
        obs, space = rows_of(answer.arrays, name), self.observation_space
        subspaces = space.spaces if hasattr(space, "spaces") else {"": space}
        obs_parts = obs if isinstance(obs, dict) else {"": obs}
        for key, subspace in subspaces.items():
            if key not in obs_parts or obs_parts[key].shape != subspace.shape:
                raise ConnectionLost(
                    f"it showed { ({key: array.shape for key, array in obs_parts.items()})!r}, which is not what it said"
                )
        rows = {key: obs_parts[key].astype(subspace.dtype)[None] for key, subspace in subspaces.items()}
        return rows if isinstance(obs, dict) else rows[""]

    def close(self) -> None:
        """Releases the robot and closes the listener."""
        if self._connection is not None and not self._connection.loss_reason:
            try:
                self._connection.send({"do": "leave", "number": 0})
                self._connection.receive(_POLL_S * 10)  # the robot confirms that it has stopped
            except ConnectionLost:
                pass
        if self._listener is not None:
            self._listener.close()
