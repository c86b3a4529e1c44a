"""Vector environment interface: N slots that are stepped together and reset themselves."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from rlhpc.embodied.envs.interface import InterfaceError, describe
from rlhpc.embodied.envs.observations import Obs, boxes_of
from rlhpc.runtime.similar_names import similar_names

if TYPE_CHECKING:
    from rlhpc.embodied.config import EnvSideConfig

#: Counts that an env rank with robots reports with each rollout (`Timing.pop_measurements`).
_COUNTS = ("late", "dropped", "held", "refused", "stopped", "missed", "lost")
TIMING_NAMES = ("robot_latency_ms", "robot_link_ms", "robot_period_ms", *(f"robot_{name}" for name in _COUNTS))
#: Maximum relative difference of a control period from its nominal length that does not count as missed.
_PERIOD_TOLERANCE = 0.1


class Timing:
    """Timing statistics of a robot's episodes.

    Attributes:
        latency_s: Seconds from each observation to the policy's command for it, by the robot's clock.
        link_s: Seconds of each round trip to a robot on another machine, by the run's clock.
        period_s: Seconds from each command to the next of the same episode, without pauses.
        num_late: Number of commands that arrived after their step had ended.
        num_dropped: Number of steps with the same observation as the step before.
        num_held: Number of times that the robot held still because no command arrived.
        num_refused: Number of commands refused because their observation was too old.
        num_stopped: Number of safety stops.
        num_missed: Number of control periods that were more than a tenth longer or shorter than configured.
        num_lost: Number of lost connections.
    """

    def __init__(self) -> None:
        self.latency_s: list[float] = []
        self.link_s: list[float] = []
        self.period_s: list[float] = []
        self.num_late = self.num_dropped = self.num_held = self.num_refused = self.num_stopped = 0
        self.num_missed = self.num_lost = 0
        self._reported_counts: dict[str, int] = {}

    def record_command(self, latency_s: float, *, is_late: bool) -> None:
        """Records a sent command; `is_late` means that the command's step had already ended."""
        self.latency_s.append(latency_s)
        self.num_late += is_late

    def record_period(self, seconds: float, nominal_s: float) -> None:
        """Records the time between two commands, which should be `nominal_s`."""
        self.period_s.append(seconds)
        self.num_missed += abs(seconds - nominal_s) > _PERIOD_TOLERANCE * nominal_s

    def record_step(self, *, is_dropped: bool) -> None:
        """Records the end of a step; `is_dropped` means that the step had the same observation as the step before."""
        self.num_dropped += is_dropped

    def record_round_trips(self, seconds: Iterable[float]) -> None:
        """Records round trips to a robot on another machine."""
        self.link_s += seconds

    def record_hold(self) -> None:
        """Counts a hold of the robot: no command arrived in time."""
        self.num_held += 1

    def record_refusal(self) -> None:
        """Counts a refused command: its observation was too old."""
        self.num_refused += 1

    def record_stop(self) -> None:
        """Counts a safety stop."""
        self.num_stopped += 1

    def record_loss(self) -> None:
        """Counts a lost connection."""
        self.num_lost += 1

    def __str__(self) -> str:
        if not self.latency_s:
            return "no steps"
        median_ms, p99_ms = np.quantile(self.latency_s, (0.5, 0.99)) * 1000
        counts_text = ", ".join(f"{getattr(self, f'num_{name}')} {name}" for name in _COUNTS[:-1])
        return f"{len(self.latency_s)} steps, latency {median_ms:.1f} ms (99 %: {p99_ms:.1f} ms), {counts_text}"

    def pop_measurements(self) -> dict[str, np.ndarray]:
        """Returns the measurements since the last call by name, one entry for each of `TIMING_NAMES`: latencies `[k]`,
        counts `[1]`.
        """
        latency_lists = {
            "robot_latency_ms": self.latency_s,
            "robot_link_ms": self.link_s,
            "robot_period_ms": self.period_s,
        }
        counts = {f"robot_{name}": getattr(self, f"num_{name}") for name in _COUNTS}
        reported_before = self._reported_counts
        self._reported_counts = counts | {name: len(latencies) for name, latencies in latency_lists.items()}
        latencies_ms = {
            name: np.array(latencies[reported_before.get(name, 0) : self._reported_counts[name]]) * 1000.0
            for name, latencies in latency_lists.items()
        }
        return latencies_ms | {name: np.array([count - reported_before.get(name, 0)]) for name, count in counts.items()}

    def add(self, measurements: dict[str, np.ndarray]) -> None:
        """Adds the measurements that `pop_measurements` of another `Timing` returned."""
        self.latency_s += (measurements["robot_latency_ms"] / 1000.0).tolist()
        self.link_s += (measurements["robot_link_ms"] / 1000.0).tolist()
        self.period_s += (measurements["robot_period_ms"] / 1000.0).tolist()
        for name in _COUNTS:
            attribute = f"num_{name}"
            setattr(self, attribute, getattr(self, attribute) + int(measurements[f"robot_{name}"].sum()))


def concat_timings(timings: Iterable[Timing | None]) -> dict[str, np.ndarray]:
    """Returns the concatenated `pop_measurements` of several robots; arrays of length 0 without robots."""
    robot_measurements = [timing.pop_measurements() for timing in timings if timing is not None]
    return {
        name: np.concatenate([measurements[name] for measurements in robot_measurements] or [np.zeros(0)])
        for name in TIMING_NAMES
    }


def timing_row(columns: dict[str, np.ndarray]) -> dict[str, float]:
    """Returns the timing metrics of a step by metric name; {} if there is no robot, or if the robot was idle."""
    row: dict[str, float] = {}
    for name in TIMING_NAMES:
        measurements = columns.get(name, np.zeros(0))
        if name.endswith("_ms") and measurements.size:
            p50, p95 = np.quantile(measurements, (0.5, 0.95))
            row |= {
                f"env/{name}_p50": float(p50),
                f"env/{name}_p95": float(p95),
                f"env/{name}_max": float(measurements.max()),
            }
        elif measurements.size:
            row[f"env/{name}"] = float(measurements.sum())
    return row


#: Class or function `(cfg, num_envs, slot_offset, seed) -> VectorEnv`; `cfg` is section `env.train` or `env.eval`.
EnvFactory = Callable[..., "VectorEnv"]
Step = tuple[Obs, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]


class VectorEnv(ABC):
    """Vector environment with same-step auto-reset.

    When a slot's episode ends in a step, the returned observation is the first of its next episode, and
    `infos["final_obs"]` has the ended episode's last observation in that slot's row. `infos["episode"]` then has
    `return`, `length` and `mask` and, if the simulator reports success, `success_once` and `success_at_end`, and in a
    suite `task`, each `[N]`; rows outside `mask` are undefined.

    If a simulator or robot failed in a step, `infos["lost"]` (bool `[N]`) marks its slots: their episode ends as
    truncated, and the step's outcome is unknown, so that the step is not trained on, counted or recorded
    (`env_failed`).

    An observation is an array `[N, ...]`, or a dict of them (`observation_space` is then a `Dict` of `Box`): "state"
    float32 `[N, D]`, "rgb" uint8 `[N, H, W, C]`, "depth" `[N, H, W, 1]`, "instruction" uint8 `[N, bytes]`
    (`encode_text`), and so on.

    Attributes:
        num_envs: Number of slots N.
        observation_space, action_space: Spaces of one slot.
        supports_state: True if `state_dict` captures the simulators, so that a resumed run continues mid-episode.
        gains_by_processes: True if its slots should run in separate processes, provided that the rank has several cores
            and the slots are not on an accelerator.
        takes_stage: True if its constructor takes `stage`, "train" or "eval", because evaluations enumerate the
            episodes.
        restarts: Number of restarts of simulator processes that died or hung.
        can_stay_on_device: True if its observations are computed on an accelerator.
        on_device: True if observations are tensors on the accelerator; all other results remain arrays. An env rank
            sets it if the policies compute on the same accelerator.
        keep_states: True if `infos["final_env_states"]` has the simulators' states before the resets, provided that the
            environment has states (`env_states`). Recorders set it.
        timing: Timing statistics of a robot; None for simulators.
        max_episode_steps: Step limit, 0 for none; None if unknown.
        control_hz: Actions per second of the robot's time, used as the frame rate of recordings; None if unknown.
        task_names: Names of the tasks of a suite; the episode's `task` is an index of it. Empty for other environments.
        record_kwargs: The environment's arguments for recordings, instead of `kwargs`.
        holds_hardware: True if it moves hardware, which must stop before the process ends.
        on_wait: Function that the environment calls repeatedly, with the reason, while it waits for a person. The
            function cancels the wait by raising an error.
    """

    num_envs: int
    observation_space: Any
    action_space: Any
    supports_state = False
    gains_by_processes = False
    takes_stage = False
    restarts = 0
    keep_states = False
    can_stay_on_device = False
    on_device = False
    timing: Timing | None = None
    max_episode_steps: int | None = None
    control_hz: float | None = None
    task_names: Sequence[str] = ()
    record_kwargs: Mapping[str, Any] | None = None
    holds_hardware = False
    on_wait: Callable[[str], None] | None = None

    def __init_subclass__(cls) -> None:
        """Makes the methods `reset`, `step` and `chunk_step` of a user's class check their results.

        Methods inherited from rlhpc are not checked, because the class may still change their results.
        """
        super().__init_subclass__()
        if cls.__module__.partition(".")[0] != "rlhpc":
            for name, check in (("reset", check_reset), ("step", check_step), ("chunk_step", check_step)):
                if name in cls.__dict__:
                    setattr(cls, name, _with_check(cls.__dict__[name], check))

    @classmethod
    def uses_accelerator(cls, cfg: EnvSideConfig) -> bool:
        """Returns whether an environment of this section would simulate or render on an accelerator of this process."""
        del cfg
        return False

    @abstractmethod
    def reset(self, seed: int | None = None) -> tuple[Obs, dict[str, Any]]:
        """Starts new episodes in all slots; returns `obs [N, ...]`. If `seed` is given, the slots' random generators
        restart from it.
        """

    @abstractmethod
    def step(self, actions: np.ndarray) -> Step:
        """Steps all slots.

        Args:
            actions: `[N, ...]`.

        Returns:
            obs `[N, ...]`, rewards float32 `[N]`, terminations and truncations bool `[N]`, infos.
        """

    def chunk_step(self, actions: np.ndarray) -> Step:
        """Executes an action chunk, one action after the other. If an episode ends within the chunk, the remaining
        actions do not count.

        This implementation executes the remaining actions in the slot's next episode and omits their rewards. A
        subclass that can step only some of its slots makes the slot wait instead.

        Args:
            actions: `[N, chunk, dim]`.

        Returns:
            Result of `step`, with rewards summed over the chunk. For a chunk of several actions `infos["chunk"]` has
            `rewards` float32 and `mask` bool, each `[N, chunk]`: the reward of each action, and whether the slot was
            still in the episode in which the chunk began.
        """
        if actions.shape[1] == 1:
            return self.step(actions[:, 0])
        shape = (self.num_envs, actions.shape[1])
        rewards, is_executed = np.zeros(shape, np.float32), np.zeros(shape, bool)
        terminations = np.zeros(self.num_envs, bool)
        truncations = np.zeros(self.num_envs, bool)
        infos: dict[str, Any] = {}
        for i in range(actions.shape[1]):
            is_done = terminations | truncations
            obs, step_rewards, terminated, truncated, info = self.step(actions[:, i])
            rewards[:, i], is_executed[:, i] = np.where(is_done, 0, step_rewards), ~is_done
            has_just_ended = (terminated | truncated) & ~is_done
            terminations |= terminated & has_just_ended
            truncations |= truncated & has_just_ended
            if has_just_ended.any():
                merge_infos(infos, info, has_just_ended)
        infos["chunk"] = {"rewards": rewards, "mask": is_executed}
        return obs, rewards.sum(1), terminations, truncations, infos

    def refresh(self) -> Obs | None:
        """Returns current observations, for the first decision after a pause; None if the simulator did not advance
        during the pause.
        """
        return None

    def hold(self) -> None:  # noqa: B027 (simulators stand still between steps)
        """Makes a robot hold still until the next step; its episode continues."""

    def stop(self, reason: str) -> None:  # noqa: B027 (simulators have nothing to stop)
        """Stops a robot for safety; nothing moves it until a person allows it."""

    def continue_episodes(self, counts: np.ndarray) -> None:
        """Makes each slot continue its series of episodes after the first `counts` `[N]`. An evaluation calls it after
        the restart of a simulator, for environments that take `stage`.
        """
        raise NotImplementedError(f"{type(self).__name__} does not enumerate its episodes")

    def state_dict(self) -> Any:
        """Returns the complete state on which the next step depends, as plain containers, arrays and bytes."""
        raise NotImplementedError(f"{type(self).__name__} cannot save its state")

    def load_state_dict(self, state: Any) -> None:
        """Restores a state that `state_dict` returned."""
        raise NotImplementedError(f"{type(self).__name__} cannot restore a state")

    def slots_of(self, state: Any) -> list[Any]:
        """Returns the state of each slot in a `state_dict`.

        Raises:
            ValueError: The state has a different number of slots.
        """
        slots: list[Any] = state["slots"]
        if len(slots) != self.num_envs:
            raise ValueError(f"state of {len(slots)} slots for {self.num_envs}")
        return slots

    def slot_state(self, state: Any, index: int) -> Any:
        """Returns the state of one slot in a `state_dict`."""
        return state["slots"][index]

    def merge_states(self, slots: list[Any]) -> Any:
        """Builds a `state_dict` from the states of slots. A run with another layout of slots uses it to resume."""
        return {"slots": slots}

    def env_states(self) -> dict[str, Any] | None:
        """Returns the simulators' states, a nested dict of arrays `[N, ...]`; None if they are not available."""
        return None

    def render(self, slots: Sequence[int] | None = None) -> np.ndarray | None:
        """Renders slots (all by default), uint8 `[n, H, W, 3]`; returns None if there is no renderer."""
        del slots
        return None

    def close(self) -> None:  # noqa: B027 (most simulators have nothing to free)
        """Frees the simulators."""


def _with_check(method: Any, check: Callable[[VectorEnv, str, Any], None]) -> Any:
    @functools.wraps(method)
    def call(env: VectorEnv, *args: Any, **options: Any) -> Any:
        result = method(env, *args, **options)
        check(env, method.__name__, result)
        return result

    return call


def check_reset(env: VectorEnv, name: str, result: Any) -> None:
    """Checks that the result of a user's `reset` is (observations, infos).

    Raises:
        InterfaceError: The result has a different form; the message describes it.
    """
    if not isinstance(result, tuple) or len(result) != 2 or not isinstance(result[1], dict):
        raise _interface_error(env, f"{name}() returned {describe(result)}")
    _check_observations(env, name, result[0])


def check_step(env: VectorEnv, name: str, result: Any) -> None:
    """Checks that the result of a user's `step` or `chunk_step` is a `Step`.

    Raises:
        InterfaceError: The result has a different form; the message describes it.
    """
    if not isinstance(result, tuple) or len(result) != 5 or not isinstance(result[4], dict):
        raise _interface_error(env, f"{name}() returned {describe(result)}")
    obs, rewards, terminations, truncations, infos = result
    _check_observations(env, name, obs)
    arrays = {"rewards": (rewards, "fiu"), "terminations": (terminations, "b"), "truncations": (truncations, "b")}
    for label, (values, dtype_kinds) in arrays.items():
        is_array = isinstance(values, np.ndarray) and values.dtype.kind in dtype_kinds
        if not is_array or values.shape != (env.num_envs,):
            raise _interface_error(env, f"{name}() returned {describe(values)} as {label}")
    if (terminations | truncations).any() and not ("final_obs" in infos or "lost" in infos):
        raise _interface_error(env, f"{name}() ended episodes, and its infos have no final_obs")


def _check_observations(env: VectorEnv, name: str, obs: Any) -> None:
    for key, box in boxes_of(env.observation_space).items():
        array = obs.get(key) if key and isinstance(obs, dict) else obs
        if tuple(getattr(array, "shape", ())) != (env.num_envs, *box.shape):
            label = f"observation {key}" if key else "observations"
            raise _interface_error(env, f"{name}() returned {describe(array)} as {label}; the space is {box}")


def _interface_error(env: VectorEnv, problem: str) -> InterfaceError:
    return InterfaceError(
        f"{type(env).__module__}:{type(env).__name__}: {problem}; a vector environment of N = {env.num_envs} slots returns "
        "(observations [N, …], infos) from reset(), and (observations [N, …], rewards [N], terminations bool [N], "
        "truncations bool [N], infos) from step(), where infos have final_obs if an episode ended (rlhpc.VectorEnv)"
    )


def similar_ids_hint(env_id: str, ids: Iterable[str], otherwise: str) -> str:
    """Returns a hint that names ids similar to an unknown one, or `otherwise` if no id is similar."""
    similar_ids = similar_names(env_id, ids, 3, 0.5)
    return f"did you mean {', '.join(similar_ids)}?" if similar_ids else otherwise


def env_failed(infos: Mapping[str, Any], num_envs: int) -> np.ndarray:
    """Returns a mask (bool `[N]`) of the slots whose simulator or robot failed in this step."""
    failed_mask = infos.get("lost")
    return np.zeros(num_envs, bool) if failed_mask is None else np.array(failed_mask, bool)


def merge_infos(target_infos: dict[str, Any], info: dict[str, Any], mask: np.ndarray) -> None:
    """Copies the rows of a step's infos that `mask` selects into the infos of earlier steps."""
    for name, array in info.items():
        if isinstance(array, dict):
            merge_infos(target_infos.setdefault(name, {}), array, mask)
        elif name not in target_infos:
            target_infos[name] = np.array(array)
        else:
            target_infos[name][mask] = array[mask]
