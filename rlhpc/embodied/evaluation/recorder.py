"""Recorders of episodes: they collect the steps of each slot until its episode ends, and write trajectories."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch

from rlhpc.config.typed import with_value
from rlhpc.embodied.config import EvalEnvConfig
from rlhpc.embodied.data.datasets import DatasetFacts, WriteOptions
from rlhpc.embodied.data.recording import Recording
from rlhpc.embodied.data.trajectories import TrajectoryWriter
from rlhpc.embodied.data.trajectory import EpisodeWriter
from rlhpc.embodied.envs import make_env
from rlhpc.embodied.envs.base import VectorEnv, env_failed
from rlhpc.embodied.envs.registry import ENVS
from rlhpc.embodied.envs.subprocess_env import moves_hardware
from rlhpc.embodied.evaluation.episodes import StepObserver, eval_noise, eval_seed, has_inference_delay, play, quotas
from rlhpc.embodied.interventions.intervention_env import InterventionEnv
from rlhpc.embodied.interventions.sources import Intervention
from rlhpc.runs.device import device_of, to_tensors
from rlhpc.runs.run_folder import note
from rlhpc.runtime.errors import ConfigError, RlhpcError

#: Episodes played per requested episode before `only_success` gives up.
MAX_ATTEMPTS = 20


class EpisodeRecorder(StepObserver):
    """Observer of `play` that writes episodes. Used in a `with` statement, an error in it ends the episodes in progress early
    (`Recording.add_incomplete`).

    Args:
        recording: Writer of the episodes.
        env: Environment.
        only_success: Write only episodes that succeeded.
        num_episodes: Number of episodes to write.
        teacher: Policy that labels the episodes (DAgger): its actions replace the executed actions. Rewards are then
            omitted, because they belong to the executed actions.
        has_interventions: Whether `env` is an `InterventionEnv`, whose infos have the executed actions.
        has_marks: Whether the source of interventions may mark episodes, so that one without a mark is no success.
    """

    def __init__(
        self,
        recording: Recording,
        env: VectorEnv,
        *,
        only_success: bool,
        num_episodes: int,
        teacher: Any = None,
        has_interventions: bool = False,
        has_marks: bool = False,
    ) -> None:
        self._teacher, self._has_interventions, self._has_marks = teacher, has_interventions, has_marks
        self._recording, self._env = recording, env
        self._only_success, self._num_episodes = only_success, num_episodes
        self._last_inputs: dict[str, Any] = {}
        self._open_steps: list[list[dict[str, Any]]] = [[] for _ in range(env.num_envs)]
        self._is_in_step = False
        self.num_played = 0
        self.success_known = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for slot in range(len(self._open_steps)) if error is not None else ():
            self._end_early(slot)

    @property
    def num_missing(self) -> int:
        """Number of episodes that must still be played."""
        return self._num_episodes - len(self._recording)

    def on_step_start(self, obs: Any, actions: np.ndarray) -> None:
        """Stores observation and actions of the step (`StepObserver.on_step_start`).

        Raises:
            ConfigError: The policy acts in chunks of several actions.
        """
        if actions.shape[1] != 1:
            raise ConfigError(
                f"the policy acts in chunks of {actions.shape[1]} (actor.model.num_action_chunks); episodes of single actions "
                "can be recorded"
            )
        if self._teacher is not None:
            teacher_obs = to_tensors(obs, device_of(self._teacher))
            actions = self._teacher.predict_action_batch(teacher_obs, mode="eval")[0].cpu().numpy()
        self._last_inputs = {"obs": copy.deepcopy(obs), "actions": actions}
        if (simulator_states := self._env.env_states()) is not None:
            self._last_inputs["env_states"] = simulator_states
        num_rows = sum(len(steps) + 2 for steps in self._open_steps)
        self._is_in_step = True
        self._recording.prepare_step(num_rows * _count_bytes(self._last_inputs) // len(self._open_steps))

    def on_step_end(
        self, slots: np.ndarray, rewards: np.ndarray, terminations: np.ndarray, truncations: np.ndarray,
        infos: Mapping[str, Any],
    ) -> None:  # fmt: skip
        """Stores the step's result (`StepObserver.on_step_end`). If the simulator or robot failed, the step is dropped, and
        its episode ended early.
        """
        has_failed = env_failed(infos, len(slots))
        for slot in np.flatnonzero(slots).tolist():
            if has_failed[slot]:
                self._end_early(slot)
                continue
            step = {name: _select_slot(column, slot) for name, column in self._last_inputs.items()}
            step |= {"rewards": rewards[slot], "terminations": terminations[slot], "truncations": truncations[slot]}
            if self._has_interventions:
                step |= {"actions": infos["executed_actions"][slot], "taken": bool(infos["intervened"][slot].any())}
            if "success" in infos:
                step["success"] = bool(infos["success"][slot])
            self._open_steps[slot].append(step)
            if terminations[slot] or truncations[slot]:
                self._write_episode(slot, infos)
        self._is_in_step = False

    def _end_early(self, slot: int) -> None:
        """Writes the episode in progress without the step in progress. Without one, the observation after the last step is
        unknown, and this step is dropped.
        """
        last_inputs = {name: _select_slot(column, slot) for name, column in self._last_inputs.items()}
        steps = self._open_steps[slot]
        if steps and not self._is_in_step:
            last_inputs, steps = steps[-1], steps[:-1]
        self._open_steps[slot] = []
        if steps:
            success = self._success_column(steps)
            self._recording.add_incomplete(
                self._build_trajectory(steps, last_inputs["obs"], last_inputs.get("env_states"), success)
            )

    def _write_episode(self, slot: int, infos: Mapping[str, Any]) -> None:
        steps = self._open_steps[slot]
        self.num_played += 1
        episode = infos.get("episode", {})
        success = self._success_column(steps)  # some environments report success only at the end
        success_at_end = next((episode[name] for name in ("success_at_end", "success") if name in episode), None)
        self.success_known |= success is not None or success_at_end is not None
        if success is None and (success_at_end is not None or self._has_marks):
            success = np.zeros(len(steps), bool)
            success[-1] = success_at_end is not None and bool(success_at_end[slot])
        has_success = success is not None and bool(success.any() or _read_flag(episode, "success_once", slot))
        if len(self._recording) < self._num_episodes and (has_success or not self._only_success):
            final_state = infos.get("final_env_states")
            final_state = None if final_state is None else _select_slot(final_state, slot)
            final_obs = _select_slot(infos["final_obs"], slot)
            self._recording.add(self._build_trajectory(steps, final_obs, final_state, success))
        self._open_steps[slot] = []

    def _success_column(self, steps: Sequence[Mapping[str, Any]]) -> np.ndarray | None:
        """Returns the success of each step `[T]`; None if the last step has none."""
        flags = [step.get("success") for step in steps]
        return None if flags[-1] is None else np.array([bool(success_flag) for success_flag in flags])

    def _build_trajectory(
        self, steps: Sequence[Mapping[str, Any]], final_obs: Any, final_state: Any, success: np.ndarray | None
    ) -> dict[str, Any]:
        return {
            "source": f"episode {self.num_played} of the recording",
            "obs": _stack([*(step["obs"] for step in steps), final_obs]),
            "actions": np.stack([np.asarray(step["actions"]).reshape(-1) for step in steps]),
            **{name: np.array([step[name] for step in steps]) for name in ("terminations", "truncations")},
            "rewards": np.array([step["rewards"] for step in steps]) if self._teacher is None else None,
            "success": success,
            "taken": np.array([step["taken"] for step in steps]) if self._has_interventions else None,
            "env_states": None
            if final_state is None
            else _stack([*(step["env_states"] for step in steps), final_state]),
        }  # fmt: skip


class InterventionRecorder(EpisodeRecorder):
    """Observer of `play` that writes only interventions, each as a separate episode that ends when the policy regains
    control.

    Args:
        recording, env: See `EpisodeRecorder`; `env` is an `InterventionEnv`.
        num_episodes: Number of episodes to watch, regardless of the number of interventions.
    """

    def __init__(self, recording: Recording, env: VectorEnv, *, num_episodes: int) -> None:
        super().__init__(recording, env, only_success=False, num_episodes=num_episodes, has_interventions=True)
        self.num_intervention_steps = 0

    @property
    def num_missing(self) -> int:
        """Number of episodes that must still be watched."""
        return self._num_episodes - self.num_played

    def on_step_end(
        self, slots: np.ndarray, rewards: np.ndarray, terminations: np.ndarray, truncations: np.ndarray,
        infos: Mapping[str, Any],
    ) -> None:  # fmt: skip
        """Stores the steps of interventions (`StepObserver.on_step_end`). If the simulator or robot fails, the step is
        dropped, and the earlier steps of the intervention are written.
        """
        is_done, has_failed = terminations | truncations, env_failed(infos, len(slots))
        is_intervened = infos["intervened"].any(1) & ~has_failed
        for slot in np.flatnonzero(slots).tolist():
            steps = self._open_steps[slot]
            if is_intervened[slot]:
                step = {"obs": _select_slot(self._last_inputs["obs"], slot), "actions": infos["executed_actions"][slot]}
                step |= {
                    "rewards": rewards[slot],
                    "terminations": terminations[slot],
                    "truncations": False,
                    "taken": True,
                }
                steps.append(step)
                self.num_intervention_steps += 1
            if steps and (is_done[slot] or not is_intervened[slot]):
                self._write_intervention(
                    slot, _select_slot(infos["final_obs"] if is_intervened[slot] else self._last_inputs["obs"], slot)
                )
            self.num_played += int(is_done[slot] and not has_failed[slot])
        self._is_in_step = False

    def _write_intervention(self, slot: int, final_obs: Any) -> None:
        steps = self._open_steps[slot]
        trajectory = self._build_trajectory(steps, final_obs, None, None)
        trajectory["truncations"][-1] = not steps[-1]["terminations"]
        trajectory["source"] = f"a part of episode {self.num_played + 1} of the recording"
        self._recording.add(trajectory)
        self._open_steps[slot] = []


def _count_bytes(data: Any) -> int:
    if isinstance(data, Mapping):
        return sum(_count_bytes(array) for array in data.values())
    return int(np.asarray(data).nbytes)


def _read_flag(episode: Mapping[str, Any], name: str, slot: int) -> bool:
    return name in episode and bool(episode[name][slot])


def _select_slot(data: Any, slot: int) -> Any:
    if isinstance(data, Mapping):
        return {name: _select_slot(array, slot) for name, array in data.items()}
    return np.array(data[slot])


def _stack(rows: list[Any]) -> Any:
    if isinstance(rows[0], Mapping):
        return {name: _stack([row[name] for row in rows]) for name in rows[0]}
    return np.stack(rows)


def _wrap_for_intervention(
    env: VectorEnv, intervention_source: Intervention, env_cfg: EvalEnvConfig, num_slots: int, seed: int
) -> VectorEnv:
    """Returns the environment in which `intervention_source` may act; closes both if they do not fit."""
    try:
        return InterventionEnv(env, intervention_source, env_cfg, range(num_slots), seed, key="env.eval.num_envs")
    except BaseException:
        env.close()
        intervention_source.close()
        raise


@torch.inference_mode()
def record(
    actor: Any, env_cfg: EvalEnvConfig, output: Path, *, episodes: int, seed: int, only_success: bool = False,
    mode: str = "eval", teacher: Any = None, intervention: Intervention | None = None, only_taken: bool = False,
    counts_whole: bool = False, source_type: str = "rl", source_desc: str = "", extra_facts: Mapping[str, Any] | None = None,
    options: WriteOptions | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Plays episodes and writes them as trajectories. If it is interrupted or fails, the episodes of a person or a robot are
    kept, those in progress apart (`Recording`); others are discarded.

    Args:
        actor: A policy, or an `ExpertPolicy`.
        env_cfg: Section `env.eval`.
        output: Path of the `.h5` file, or folder of a LeRobot dataset.
        episodes: Number of episodes to write.
        seed: Seed of the run (`eval_seed`).
        only_success: Write only episodes that succeeded, and play until enough episodes are written.
        mode: "eval" takes the most likely action, "train" samples an action.
        teacher: See `EpisodeRecorder`.
        intervention: Observer that may act instead of the actor.
        only_taken: Write only interventions; `episodes` then counts the watched episodes (`InterventionRecorder`).
        counts_whole: See `Recording`.
        source_type, source_desc, extra_facts: See `TrajectoryWriter`; LeRobot's format does not store them.
        options: Format of the output; ManiSkill's HDF5 by default.

    Returns:
        episodes (number written), played, steps, return_mean of all played episodes, and their success_once if known; with
        `only_taken` also taken_steps.

    Raises:
        ConfigError: Success is required but unknown, or an inference delay is configured.
        RlhpcError: Too few episodes succeed.
    """
    if has_inference_delay(env_cfg):
        raise ConfigError(
            "env.eval.real_time_chunking.inference_delay: what is recorded is played by a simulator that waits; take it out"
        )
    num_slots, seed = min(env_cfg.num_envs, episodes), eval_seed(env_cfg, seed)
    # Simulator states are read in the simulator's process, so it runs in this process if possible.
    separate_process = env_cfg.simulator_python is not None or moves_hardware(ENVS.find(env_cfg.env_type))
    recording_cfg = with_value(env_cfg, "num_envs", num_slots)
    env = make_env(
        recording_cfg if separate_process else with_value(recording_cfg, "simulators", 0),
        num_slots,
        slot_offset=0,
        seed=seed,
        stage="eval",
    )
    env.keep_states = True
    if intervention is not None:
        env = _wrap_for_intervention(env, intervention, env_cfg, num_slots, seed)
    kwargs = dict((env_cfg.kwargs or {}) if env.record_kwargs is None else env.record_kwargs)
    step_limit = (env_cfg.max_episode_steps if env.max_episode_steps is None else env.max_episode_steps) or None
    dataset_facts = DatasetFacts(fps=env.control_hz)

    def open_writer(path: Path) -> EpisodeWriter:
        if options is not None and options.to == "lerobot":
            return options.lerobot_writer(path, env_cfg.env_id, dataset_facts)
        return TrajectoryWriter(
            path, env_id=env_cfg.env_id, env_kwargs=kwargs, max_episode_steps=step_limit, source_type=source_type,
            source_desc=source_desc, extra_facts=extra_facts, facts=dataset_facts.to_json(),
        )  # fmt: skip

    returns: list[float] = []
    successes: list[float] = []
    num_steps = 0
    with ExitStack() as stack:
        stack.callback(env.close)
        # A person's time and a robot's episodes are not to be had again.
        keeps = intervention is not None or env.holds_hardware
        recording = Recording(open_writer, output, keeps=keeps, counts_whole=counts_whole)
        if only_taken and intervention is not None:
            recorder: EpisodeRecorder = InterventionRecorder(recording, env, num_episodes=episodes)
        else:
            recorder = EpisodeRecorder(
                recording, env, only_success=only_success, num_episodes=episodes, teacher=teacher,
                has_interventions=intervention is not None, has_marks=intervention is not None and intervention.gives_signals,
            )  # fmt: skip
        # A robot is stopped first. Then the episodes in progress are written.
        with torch.random.fork_rng(devices=[]), recording, recorder, stack.pop_all():
            torch.manual_seed(seed)  # makes samples reproducible
            num_attempts = -1
            while (num_missing := recorder.num_missing) > 0:
                if recorder.num_played and only_success and not recorder.success_known:
                    raise ConfigError(f"--only-success: {env_cfg.env_id} does not say whether an episode succeeded")
                if recorder.num_played >= MAX_ATTEMPTS * episodes:
                    raise RlhpcError(
                        f"of {recorder.num_played} episodes only {len(recording)} succeeded; {episodes} were wanted"
                    )
                num_attempts += 1
                noise = eval_noise(actor, env_cfg, seed + num_attempts) if mode == "eval" else None
                rows = play(
                    actor,
                    env,
                    quotas(num_missing, num_slots),
                    device_of(actor),
                    mode=mode,
                    observer=recorder,
                    noise=noise,
                )
                returns += [row["return"] for row in rows]
                num_steps += int(sum(row["length"] for row in rows))
                successes += [row["success_once"] for row in rows if "success_once" in row]
    if recording.num_incomplete or recording.num_nonfinite:
        note(recording.summary())
    summary: dict[str, Any] = {
        "episodes": len(recording),
        "played": recorder.num_played,
        "steps": num_steps,
        "return_mean": float(np.mean(returns)),
    }
    if successes:
        summary["success_once"] = float(np.mean(successes))
    if isinstance(recorder, InterventionRecorder):
        summary["taken_steps"] = recorder.num_intervention_steps
    return summary | {"env_id": env_cfg.env_id, "output": str(output)}
