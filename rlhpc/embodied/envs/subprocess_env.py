"""Vector environment whose slots run in simulator processes: the slots use all cores, and a simulator that crashes or
hangs loses only the current episodes of its slots.
"""

from __future__ import annotations

import errno
import logging
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cloudpickle
import numpy as np

from rlhpc.embodied.envs.base import EnvFactory, Step, Timing, VectorEnv
from rlhpc.embodied.envs.observations import join
from rlhpc.embodied.envs.subprocess_main import CLOSE_S, ENV_PROPERTIES, receive, send
from rlhpc.runtime.comm.context import check_run
from rlhpc.runtime.errors import ConfigError, RlhpcError
from rlhpc.runtime.imports import python_path, run_module

if TYPE_CHECKING:
    from rlhpc.embodied.config import EnvSideConfig

log = logging.getLogger(__name__)
#: Maximum seconds until a simulator is ready: importing one may take a minute on a cold filesystem.
_START_S = 600.0
#: Maximum seconds from the closing of a process's hardware to the end of the process.
_EXIT_S = 3.0
#: Maximum number of consecutive failures of a simulator, without a step in between.
_MAX_FAILURES = 3


class SimulatorFailed(Exception):
    """Error raised when a simulator process has died, hung or raised; the message names the failure."""


class _Simulator:
    """Simulator process of a range of slots."""

    def __init__(self, slots: range, on_wait: Callable[[str], None]) -> None:
        self.slots = slots
        self._on_wait = on_wait
        self.num_failures = 0
        self.holds_hardware = False
        self._timeout_s = _START_S

    def start(self, python: str | None, factory: EnvFactory, cfg: EnvSideConfig, kwargs: dict[str, Any]) -> None:
        """Starts the process, with this process's Python if `python` is None. `answer` then returns the environment's
        properties.
        """
        sock, child_sock = socket.socketpair()
        lifeline_end, self._lifeline = os.pipe()
        try:
            self.process = subprocess.Popen(
                run_module(
                    "rlhpc.embodied.envs.subprocess_main", str(child_sock.fileno()), str(lifeline_end), python=python
                ),
                pass_fds=(child_sock.fileno(), lifeline_end),
                stdin=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": python_path(foreign=python is not None), "OMP_NUM_THREADS": "1"},
            )
        except OSError as error:
            sock.close()
            os.close(self._lifeline)
            raise _start_error(python, error.strerror) from None
        finally:
            child_sock.close()
            os.close(lifeline_end)
        self._sock = sock
        self._deadline = time.monotonic() + _START_S
        self._exchange(send, sock, cloudpickle.dumps((factory, cfg, kwargs)), self._deadline)

    def call(self, name: str, *args: Any, timeout_s: float) -> None:
        """Sends a call to the process; `answer` waits for its result."""
        self._timeout_s = timeout_s
        self._deadline = time.monotonic() + timeout_s
        self._exchange(send, self._sock, (name, args), self._deadline)

    def answer(self) -> Any:
        """Waits for the result of the last call and returns it. While a robot waits for a person, the deadline is
        extended.

        Raises:
            SimulatorFailed: The process died, hung or raised.
            ConfigError: The environment cannot be built as configured.
        """
        message_type, payload = self._exchange(receive, self._sock, self._deadline)
        while message_type == "waits":
            self._deadline = time.monotonic() + self._timeout_s
            self._on_wait(payload)
            message_type, payload = self._exchange(receive, self._sock, self._deadline)
        if message_type == "config":
            raise ConfigError(payload)
        if message_type == "raised":
            raise SimulatorFailed(f"raised:\n{payload}")
        return payload

    def _exchange(self, exchange: Any, *args: Any) -> Any:
        try:
            return exchange(*args)
        except TimeoutError:
            raise SimulatorFailed("hung") from None
        except (EOFError, OSError):
            try:
                exit_code = self.process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                exit_code = None
            cause_text = f"signal {-exit_code}" if exit_code is not None and exit_code < 0 else f"exit code {exit_code}"
            raise SimulatorFailed(f"died ({cause_text})") from None

    def stop(self) -> None:
        """Ends the process in any state. A process with hardware first gets time to stop and close the hardware."""
        if hasattr(self, "process"):
            os.close(self._lifeline)
            if self.holds_hardware:
                try:
                    self.process.wait(CLOSE_S + _EXIT_S)
                except subprocess.TimeoutExpired:
                    log.error(
                        "the process of a robot did not end in time; it is killed, and its robot may not be stopped"
                    )
            self.process.kill()
            self.process.wait()
            self._sock.close()
            del self.process


class ProcessVectorEnv(VectorEnv):
    """Vector environment whose slots are divided among several processes; each process has a range of slots.

    A process that dies, hangs or raises is restarted. The episodes of its slots end as truncated at the last observation,
    with reward 0 and without episode statistics; `infos["lost"]` marks the slots, and `restarts` counts the restarts.

    Args:
        factory: Builds the environment of one process: `(cfg, num_envs, slot_offset, seed) -> VectorEnv`.
        cfg: Section `env.train` or `env.eval`.
        num_envs, slot_offset, seed: Arguments of `make_env`.
        num_processes: Number of processes.
        stage: "train" or "eval" for a factory that takes it (`VectorEnv.takes_stage`), otherwise None.
    """

    def __init__(
        self,
        factory: EnvFactory,
        cfg: EnvSideConfig,
        num_envs: int,
        slot_offset: int,
        seed: int,
        num_processes: int,
        stage: str | None = None,
    ) -> None:
        self._stage_kwargs = {} if stage is None else {"stage": stage}
        #: Number of reported episodes of each slot.
        self._num_reported = np.zeros(num_envs, np.int64)
        self.num_envs = num_envs
        self._offset = slot_offset
        self._seed = seed
        from rlhpc.config.typed import alone

        cfg = alone(cfg)  # resolves references to other sections, which the processes do not receive
        self._factory = factory
        self._cfg = cfg
        self._timeout_s = cfg.simulator_timeout_s
        self._wait_reason = ""
        bounds = np.linspace(0, num_envs, min(num_processes, num_envs) + 1).astype(int).tolist()
        self._simulators = [_Simulator(range(start, stop), self._on_robot_wait) for start, stop in pairwise(bounds)]
        #: First observations of simulators that were restarted between steps, by index.
        self._restarted_obs: dict[int, Any] = {}
        try:
            for simulator in self._simulators:
                self._start(simulator)
            env_properties = [self._receive_properties(simulator) for simulator in self._simulators]
        except BaseException:
            self.close()
            raise
        for name in ENV_PROPERTIES:
            setattr(self, name, env_properties[0][name])
        if env_properties[0]["timed"]:
            self.timing = Timing()

    def _start(self, simulator: _Simulator) -> None:
        # A restarted simulator gets new episodes, because the same episode could make it fail again.
        seed = self._seed
        if self.restarts:
            seed = int(np.random.SeedSequence([seed, simulator.slots.start, self.restarts]).generate_state(1)[0])
        env_arguments = {
            "num_envs": len(simulator.slots),
            "slot_offset": self._offset + simulator.slots.start,
            "seed": seed,
        }
        simulator.start(self._cfg.simulator_python, self._factory, self._cfg, env_arguments | self._stage_kwargs)

    def _receive_properties(self, simulator: _Simulator) -> dict[str, Any]:
        try:
            properties: dict[str, Any] = simulator.answer()
            simulator.holds_hardware = properties["holds_hardware"]
            return properties
        except SimulatorFailed as failure:
            raise RlhpcError(f"a simulator of env_id {self._cfg.env_id!r} {failure} while it started") from None

    def _on_robot_wait(self, reason: str) -> None:
        """Logs once per reason that a robot waits for a person; then checks the run. Simulators call it repeatedly."""
        if reason != self._wait_reason:
            self._wait_reason = reason
            # The robot's process has warned in the same log, with the robot's name.
            log.info("%s is stopped (%s), and waits for a person: rlhpc robot resume", self._cfg.env_id, reason)
        (self.on_wait or check_run)(reason)

    # -- episodes ---------------------------------------------------------------------------------------------------

    def reset(self, seed: int | None = None) -> tuple[Any, dict[str, Any]]:
        """Starts an episode in every slot (`VectorEnv.reset`)."""
        if seed is not None:
            self._seed = seed
        self._restarted_obs.clear()
        answers = self._call_all("reset", lambda slots: (seed,), recover=lambda obs: (obs, {}))
        self._last_obs = [obs for obs, _ in answers]
        return join(self._last_obs), {}

    def step(self, actions: np.ndarray) -> Step:
        """Steps every slot by one action (`VectorEnv.step`)."""
        return self._step_all("step", actions)

    def chunk_step(self, actions: np.ndarray) -> Step:
        """Executes a chunk of actions in every slot (`VectorEnv.chunk_step`)."""
        return self._step_all("chunk_step", actions)

    def _step_all(self, name: str, actions: np.ndarray) -> Step:
        answers: list[Any] = self._call_all(
            name, lambda slots: (actions[slots.start : slots.stop],), recover=lambda obs: obs
        )
        failed_slots = np.zeros(self.num_envs, bool)
        for i, simulator in enumerate(self._simulators):
            if isinstance(answers[i], tuple):
                simulator.num_failures = 0
                self._count_reported(simulator.slots, answers[i][4])
                continue
            num_slots, env_slots = len(simulator.slots), simulator.slots
            failed_slots[env_slots.start : env_slots.stop] = True
            infos: dict[str, Any] = {"final_obs": self._last_obs[i]}
            if actions.shape[1:2] != (1,) and name == "chunk_step":
                infos["chunk"] = {"rewards": np.zeros((num_slots, actions.shape[1]), np.float32)}
                infos["chunk"]["mask"] = np.zeros((num_slots, actions.shape[1]), bool)
            answers[i] = (
                answers[i],
                np.zeros(num_slots, np.float32),
                np.zeros(num_slots, bool),
                np.ones(num_slots, bool),
                infos,
            )
        self._last_obs = [answer[0] for answer in answers]
        for answer in answers:
            if (timing := answer[4].pop("timing", None)) is not None and self.timing is not None:
                self.timing.add(timing)
        infos = _merge_infos([answer[4] for answer in answers], [len(sim.slots) for sim in self._simulators])
        if failed_slots.any():
            infos["lost"] = failed_slots
            infos.setdefault("episode", {name: np.zeros(self.num_envs) for name in ("return", "length")})
            infos["episode"].setdefault("mask", np.zeros(self.num_envs, bool))
        obs, rewards, terminations, truncations = (
            join([answer[column_index] for answer in answers]) for column_index in range(4)
        )
        return obs, rewards, terminations, truncations, infos

    def refresh(self) -> Any:
        """Returns the current observations of hardware, or None for simulators (`VectorEnv.refresh`)."""
        if not self.holds_hardware:
            return None
        self._last_obs = self._call_all("refresh", lambda slots: (), recover=lambda obs: obs)
        return join(self._last_obs)

    def hold(self) -> None:
        """Makes hardware hold still (`VectorEnv.hold`)."""
        if self.holds_hardware:
            self._call_all("hold", lambda slots: (), recover=lambda obs: None)

    def stop(self, reason: str) -> None:
        """Stops hardware for safety (`VectorEnv.stop`)."""
        if self.holds_hardware:
            self._call_all("stop", lambda slots: (reason,), recover=lambda obs: None)

    @property
    def _repeats_episodes(self) -> bool:
        """True in an evaluation that enumerates its episodes: a restarted simulator repeats the failed episodes, so
        that every episode is played.
        """
        return self._stage_kwargs.get("stage") == "eval"

    def _count_reported(self, slots: range, infos: dict[str, Any]) -> None:
        """Counts the episodes that a step reported for a share of the slots."""
        if "mask" in infos.get("episode", {}):
            self._num_reported[slots.start : slots.stop] += np.asarray(infos["episode"]["mask"], bool)

    def _call_all(self, name: str, args: Any, recover: Any) -> list[Any]:
        """Calls a method of all simulators in parallel, restarts those that fail, and returns their answers.

        Args:
            name: Name of the method.
            args: Returns the method's arguments for a simulator's range of slots.
            recover: Computes the answer of a restarted simulator from its first observation.
        """
        failures: dict[int, SimulatorFailed] = {}
        for i, simulator in enumerate(self._simulators):
            if i not in self._restarted_obs:
                try:
                    simulator.call(name, *args(simulator.slots), timeout_s=self._timeout_s)
                except SimulatorFailed as failure:
                    failures[i] = failure
        answers: list[Any] = []
        for i, simulator in enumerate(self._simulators):
            try:
                if i in self._restarted_obs:
                    answers.append(recover(self._restarted_obs.pop(i)))
                elif i in failures:
                    raise failures[i]
                else:
                    answers.append(simulator.answer())
            except SimulatorFailed as failure:
                answers.append(recover(self._restart(simulator, failure)))
        return answers

    def _restart(self, simulator: _Simulator, failure: SimulatorFailed) -> Any:
        """Restarts a simulator until it is ready; returns its first observations.

        Raises:
            RlhpcError: The simulator has failed too many times in a row.
        """
        while True:
            simulator.num_failures += 1
            env_slots = simulator.slots
            slots_text = f"{self._offset + env_slots.start}-{self._offset + env_slots.stop - 1}"
            if simulator.num_failures > _MAX_FAILURES:
                raise RlhpcError(
                    f"the simulator of slots {slots_text} failed {_MAX_FAILURES + 1} times in a row: it {failure}"
                )
            log.warning("the simulator of slots %s %s; their episodes are lost, it starts again", slots_text, failure)
            self.restarts += 1
            simulator.stop()
            try:
                self._start(simulator)
                simulator.answer()
                if self._repeats_episodes:
                    counts = self._num_reported[env_slots.start : env_slots.stop]
                    simulator.call("continue_episodes", counts, timeout_s=self._timeout_s)
                    simulator.answer()
                simulator.call("reset", timeout_s=self._timeout_s)
                return simulator.answer()[0]
            except SimulatorFailed as restart_failure:
                failure = restart_failure

    # -- state and images ------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Returns the slots' state for a checkpoint (`VectorEnv.state_dict`), which a run with a different number of
        processes can load.
        """
        while True:
            restarted_before = set(self._restarted_obs)
            states = [self._call_between_steps(i, "save") for i in range(len(self._simulators))]
            if set(self._restarted_obs) == restarted_before:
                return {"slots": [slot for simulator_state in states for slot in simulator_state]}

    def _call_between_steps(self, index: int, name: str, *args: Any) -> Any:
        """Calls a simulator between steps and returns its answer. If the simulator fails, restarts it and returns None;
        its episodes then end in the next step.
        """
        simulator = self._simulators[index]
        try:
            simulator.call(name, *args, timeout_s=self._timeout_s)
            return simulator.answer()
        except SimulatorFailed as failure:
            self._restarted_obs[index] = self._restart(simulator, failure)
            return None

    def load_state_dict(self, state: Any) -> None:
        """Restores the slots from a checkpoint (`VectorEnv.load_state_dict`).

        Raises:
            ValueError: A simulator process failed while it loaded its state.
        """
        slots = self.slots_of(state)
        for simulator in self._simulators:
            # The replay of an episode takes as long as the episode.
            slot_states = slots[simulator.slots.start : simulator.slots.stop]
            simulator.call("load", slot_states, timeout_s=max(self._timeout_s, _START_S))
        for simulator in self._simulators:
            try:
                simulator.answer()
            except SimulatorFailed as failure:
                raise ValueError(f"a simulator {failure} while it took over its state") from None

    def render(self, slots: Sequence[int] | None = None) -> np.ndarray | None:
        """Renders slots (`VectorEnv.render`)."""
        frames = []
        for slot in range(self.num_envs) if slots is None else slots:
            index = next(i for i, simulator in enumerate(self._simulators) if slot in simulator.slots)
            frames.append(self._call_between_steps(index, "render", [slot - self._simulators[index].slots.start]))
        return np.concatenate(frames) if all(frame is not None for frame in frames) else None

    def close(self) -> None:
        """Ends the processes."""
        for simulator in self._simulators:
            simulator.stop()


def _start_error(python: str | None, reason: str | None) -> ConfigError:
    return ConfigError(f"env.train.simulator_python is {python!r}, which cannot be started: {reason}")


def require_python(python: str) -> None:
    """Checks that the simulators' interpreter exists and is executable, without starting it.

    Raises:
        ConfigError: The file does not exist or is not executable.
    """
    if shutil.which(python) is None:
        exists = Path(python).exists()
        raise _start_error(python, os.strerror(errno.EACCES if exists else errno.ENOENT))


def moves_hardware(factory: Any) -> bool:
    """Returns whether a factory's environment moves hardware, which must stop before its process ends."""
    return isinstance(factory, type) and issubclass(factory, VectorEnv) and factory.holds_hardware


def process_count(cfg: EnvSideConfig, factory: Any, num_envs: int) -> int:
    """Returns the number of processes for an environment's slots (`env.train.simulators`); 0 means that the slots run
    in this process.
    """
    num_processes = cfg.simulators
    # A robot gets a separate process, which stops the robot however this process ends.
    if num_processes is None and (cfg.simulator_python is not None or moves_hardware(factory)):
        return 1
    if num_processes is None:
        is_env = isinstance(factory, type) and issubclass(factory, VectorEnv)
        if not is_env or not factory.gains_by_processes or factory.uses_accelerator(cfg):
            return 0
        # OMP_NUM_THREADS is the launcher's limit for this rank, which CPU affinity does not show on a shared machine.
        num_cores = min(int(os.environ.get("OMP_NUM_THREADS") or 1 << 16), len(os.sched_getaffinity(0)))
        num_processes = num_cores if num_cores > 1 else 0
    return min(num_processes, num_envs)


def _merge_infos(infos_by_simulator: list[dict[str, Any]], sizes: list[int]) -> dict[str, Any]:
    """Concatenates the infos of the simulators. If a simulator's infos lack a key, its rows are 0."""
    merged_infos: dict[str, Any] = {}
    for name in {name: None for infos in infos_by_simulator for name in infos}:
        values = [infos.get(name) for infos in infos_by_simulator]
        first_value = next(value for value in values if value is not None)
        if isinstance(first_value, dict):
            merged_infos[name] = _merge_infos([value or {} for value in values], sizes)
        else:
            zero_arrays = [np.zeros((n, *np.shape(first_value)[1:]), np.asarray(first_value).dtype) for n in sizes]
            merged_infos[name] = np.concatenate(
                [zeros if array is None else array for array, zeros in zip(values, zero_arrays, strict=True)]
            )
    return merged_infos
