"""Evaluation of a policy with deterministic actions and a fixed number of episodes per slot."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlhpc.algorithms.nonfinite import bad_tensors, skips
from rlhpc.config.typed import mapping, with_value
from rlhpc.embodied.config import EmbodiedConfig, EnvSideConfig, EvalEnvConfig, RealTimeConfig
from rlhpc.embodied.envs import make_env
from rlhpc.embodied.envs.base import VectorEnv, env_failed
from rlhpc.embodied.envs.observations import count_rows
from rlhpc.embodied.models.base import Guide, Obs, Policy, noise_of_episodes, overlap_weights
from rlhpc.metrics.statistics import mean_interval, wilson_interval
from rlhpc.runs.device import to_tensors
from rlhpc.runtime.errors import ConfigError, NonFinite, RlhpcError
from rlhpc.runtime.text import format_names

_KEY = "env.eval.real_time_chunking"


class RealTime:
    """Wrapper of a flow policy that acts with an inference delay (real-time chunking).

    Args:
        policy: Flow policy.
        delay: d, number of steps until a chunk is available.
        num_executed: s, number of actions executed per chunk.
        max_weight: Maximum weight of the guidance; 0 disables guidance.
    """

    def __init__(self, policy: Policy, delay: int, num_executed: int, max_weight: float) -> None:
        self._policy, self._delay, self._num_executed, self._max_weight = policy, delay, num_executed, max_weight
        self._weights = overlap_weights(policy.horizon, num_executed, delay)
        self._plan: Tensor | None = None
        self._has_previous = np.zeros(0, bool)

    def predict_action_batch(
        self, obs: Obs, mode: str = "eval", noise: Tensor | None = None
    ) -> tuple[Tensor, dict[str, Any]]:
        """Returns actions `[B, s, dim]`, like a policy. The first d actions are from the previous chunk, if any."""
        del mode
        inference_delay, num_executed, previous_plan, policy = self._delay, self._num_executed, self._plan, self._policy
        with torch.inference_mode(False), torch.no_grad():  # guidance needs a gradient
            self._plan = plan = policy.plan(
                _copy_arrays(obs), self._build_guide(), None if noise is None else noise.clone()
            )
            actions = policy.decode_plan(plan, slice(0, num_executed)).clone()
            if previous_plan is not None and inference_delay:
                has_previous = torch.from_numpy(self._has_previous)
                actions[has_previous, :inference_delay] = policy.decode_plan(
                    previous_plan, slice(num_executed, num_executed + inference_delay)
                )[has_previous]
        self._has_previous = np.ones(count_rows(obs), bool)
        return actions, {}

    def on_episode_end(self, is_done: np.ndarray) -> None:
        """Marks slots (indices) in which an episode has ended, so that the previous chunk does not guide the next chunk."""
        self._has_previous[is_done] = False

    def _build_guide(self) -> Guide | None:
        if self._plan is None or not self._max_weight or not self._has_previous.any():
            return None
        remainder = torch.zeros_like(self._plan)
        remainder[:, : -self._num_executed] = self._plan[:, self._num_executed :]
        weights = torch.zeros(remainder.shape[1])
        weights[: len(self._weights)] = self._weights
        slot_weights = torch.from_numpy(self._has_previous).float()[:, None] * weights
        return Guide(remainder, slot_weights.to(remainder.device)[..., None], self._max_weight)


def has_inference_delay(env_cfg: EvalEnvConfig) -> bool:
    """Returns whether the evaluation has an inference delay. Off-policy runs and old checkpoints lack the section and have
    no delay.
    """
    section: RealTimeConfig | None = mapping(env_cfg).get("real_time_chunking")
    return section is not None and section.inference_delay is not None


def real_time(policy: Any, env_cfg: EvalEnvConfig) -> RealTime | None:
    """Wraps the policy for `env.eval.real_time_chunking`; returns None if no inference delay is configured.

    Raises:
        ConfigError: The policy is not a flow policy, or its chunks are too short.
    """
    section: RealTimeConfig | None = mapping(env_cfg).get("real_time_chunking")
    if section is None:
        return None
    inference_delay, num_executed, max_weight = (
        section.inference_delay,
        section.execution_horizon,
        section.max_guidance_weight,
    )
    if inference_delay is None:
        return None
    horizon = policy.horizon if isinstance(policy, Policy) else 0
    if not horizon:
        raise ConfigError(
            f"{_KEY}.inference_delay is {inference_delay}; chunks are guided where a policy acts by a flow (flow, "
            f"pi0, and lerobot's "
            f"smolvla, pi0 and pi05), which {type(policy).__name__} does not"
        )
    num_executed = min(policy.chunk, horizon - inference_delay) if num_executed is None else num_executed
    if not inference_delay <= num_executed or num_executed < 1 or num_executed + inference_delay > horizon:
        raise ConfigError(
            f"{_KEY}: inference_delay is {inference_delay} and execution_horizon {num_executed}; the former may be no "
            f"more than the latter, "
            f"and both together no more than the {horizon} actions that the policy predicts at once"
        )
    return RealTime(policy, inference_delay, num_executed, max_weight)


def _copy_arrays(obs: Obs) -> Obs:
    """Returns copies of observations, because tensors created in inference mode do not support gradients."""
    return {name: tensor.clone() for name, tensor in obs.items()} if isinstance(obs, dict) else obs.clone()


log = logging.getLogger(__name__)

#: Maximum number of decisions per episode; an evaluation with a longer episode raises an error.
_MAX_DECISIONS = 1_000_000
#: Maximum number of decisions per episode if the environment has no time limit.
_MAX_WITHOUT_LIMIT = 20_000
#: Maximum number of failed episodes in a slot that are replaced; more failures raise an error.
_MAX_FAILURES = 20

#: A row of results for each episode of a part of an evaluation; None if a return is not finite.
EvaluationRows = list[dict[str, Any]] | None
#: Function called after each decision with the numbers of complete episodes and of environment steps so far.
_ProgressCallback = Callable[[int, int], None]
#: Function from each slot's episode index and decision index to noise `[N, ...]`.
_Noise = Callable[[np.ndarray, np.ndarray], torch.Tensor]


class StepObserver:
    """Observer of the steps of `play`."""

    def on_step_start(self, obs: Any, actions: np.ndarray) -> None:
        """Handles observations and actions before each step of all slots. A simulator may reuse the observations' memory."""

    def on_step_end(
        self, slots: np.ndarray, rewards: np.ndarray, terminations: np.ndarray, truncations: np.ndarray,
        infos: Mapping[str, Any],
    ) -> None:  # fmt: skip
        """Handles the outcome of a step. `slots`, bool `[N]`, marks the slots with episodes that count."""


def quotas(num_episodes: int, num_slots: int) -> np.ndarray:
    """Returns the number of episodes for each slot. The numbers are fixed in advance, because using the first finished
    episodes would favour short episodes.
    """
    episode_counts = np.full(num_slots, num_episodes // num_slots)
    episode_counts[: num_episodes % num_slots] += 1
    return episode_counts


def eval_seed(env_cfg: EnvSideConfig, seed: int) -> int:
    """Returns the seed of the evaluation's environments: `env.eval.seed`, or a seed derived from the training seed."""
    return env_cfg.seed if env_cfg.seed is not None else seed + 1_000_003


def eval_noise(policy: Any, env_cfg: EnvSideConfig, seed: int, first_slot: int = 0) -> _Noise | None:
    """Returns the source of a policy's starting noise in evaluation (`env.eval.noise`); None for a policy without noise.

    Args:
        policy: A `Policy`, or another object that acts.
        env_cfg: Section `env.eval`.
        seed: Seed of the evaluation (`eval_seed`), which determines the noise together with slot, episode and decision.
        first_slot: Number of the first slot among those of all ranks.
    """
    # A checkpoint of an older version has no such key in its configuration.
    noise = mapping(env_cfg).get("noise", "seeded").lower()
    if not isinstance(policy, Policy) or not policy.start_shape:
        return None
    if noise == "zero":
        return lambda episodes, decisions: torch.zeros(len(episodes), *policy.start_shape)
    return lambda episodes, decisions: noise_of_episodes(
        policy.sample_start, seed, episodes.tolist(), decisions.tolist(), first_slot
    )


def evaluate_policy(
    policy: Any,
    env_cfg: EvalEnvConfig,
    *,
    seed: int,
    episodes: int | None = None,
    device: torch.device | str = "cpu",
    build_observer: Callable[[VectorEnv], StepObserver] | None = None,
    on_progress: _ProgressCallback | None = None,
) -> dict[str, Any]:
    """Evaluates a policy on the first episodes of every slot of a vector environment.

    Args:
        policy: Policy in eval mode, on `device`.
        env_cfg: Section `env.eval`.
        seed: Seed of the run (`eval_seed`).
        episodes: Number of episodes; default `env.eval.num_episodes`.
        device: Device of the policy.
        build_observer: Builds an observer for the environment.
        on_progress: Function called with the progress.

    Raises:
        NonFinite: A return is not finite.
        ConfigError: The number of episodes is below 1.

    Returns:
        return_mean, return_std, return_min, return_max, return_ci95 [low, high], length_mean, episodes, env_id and seed; also
        success_once, success_at_end and their `…_ci95` if the environment reports success; in a suite also `tasks`: episodes,
        return_mean and success_once by task.
    """
    num_episodes = env_cfg.num_episodes if episodes is None else episodes
    if num_episodes < 1:
        raise ConfigError(f"episodes is {num_episodes}; an evaluation needs at least 1")
    rows = _play_part(
        policy,
        env_cfg,
        eval_seed(env_cfg, seed),
        num_episodes,
        torch.device(device),
        build_observer=build_observer,
        on_progress=on_progress,
    )
    return _summarize(rows, env_cfg, seed)


@torch.inference_mode()
def _play_part(
    policy: Any,
    env_cfg: EvalEnvConfig,
    seed: int,
    num_episodes: int,
    device: torch.device,
    part_index: int = 0,
    num_parts: int = 1,
    *,
    build_observer: Callable[[VectorEnv], StepObserver] | None = None,
    on_progress: _ProgressCallback | None = None,
) -> list[dict[str, Any]]:
    """Plays the episodes of a part of an evaluation's slots; returns a row for each episode (`play`).

    A slot's episodes are the same in any part, because its number among all slots seeds its environment and noise.

    Raises:
        NonFinite: A return is not finite.
    """
    num_slots = min(env_cfg.num_envs, num_episodes)
    slots = np.array_split(np.arange(num_slots), num_parts)[part_index]
    if not slots.size:
        return []
    delayed_policy = real_time(policy, env_cfg)
    # An environment that enumerates its episodes counts in slots over all ranks.
    env_section = with_value(env_cfg, "num_envs", num_slots)
    env = make_env(env_section, len(slots), slot_offset=int(slots[0]), seed=seed, stage="eval")
    try:
        rows = play(
            delayed_policy or policy,
            env,
            quotas(num_episodes, num_slots)[slots],
            device,
            observer=build_observer(env) if build_observer else None,
            on_progress=on_progress,
            on_episode_end=None if delayed_policy is None else delayed_policy.on_episode_end,
            noise=eval_noise(policy, env_cfg, seed, int(slots[0])),
        )
    finally:
        env.close()
    if bad_episodes := [index for index, row in enumerate(rows) if not math.isfinite(row["return"])]:
        bad_weights = bad_tensors(policy.state_dict().items()) if isinstance(policy, torch.nn.Module) else []
        cause_text = (
            f"so is {format_names(bad_weights)} of the policy" if bad_weights else "the policy's weights are finite"
        )
        raise NonFinite(
            f"{len(bad_episodes)} of {len(rows)} episodes of {env_cfg.env_id} have a return that is not finite (the first is "
            f"episode {bad_episodes[0]}; {cause_text}): there is no mean to report. Evaluate another checkpoint, or look at "
            "what the environment gives"
        )
    return rows


def evaluation_rows(
    cfg: EmbodiedConfig, policy: Any, seed: int, device: torch.device, part_index: int, num_parts: int
) -> EvaluationRows:
    """Plays a rank's part of an evaluation on `env.eval` during training.

    Args:
        cfg: The configuration.
        policy: Policy in eval mode, on `device`.
        seed: Seed of the run.
        device: Device of the policy.
        part_index, num_parts: Index of the rank among those that evaluate, and their number.

    Returns:
        A row for each episode, for `evaluation_metrics`; None if a return is not finite and `runner.on_nonfinite` is skip.
    """
    env_cfg = cfg.env.eval
    try:
        return _play_part(
            policy, env_cfg, eval_seed(env_cfg, seed), env_cfg.num_episodes, device, part_index, num_parts
        )
    except NonFinite as error:
        if not skips(cfg):
            raise
        log.warning("%s", error)
        return None


def evaluation_metrics(cfg: EmbodiedConfig, parts: Sequence[EvaluationRows]) -> dict[str, float]:
    """Returns the metrics of an evaluation during training from the results of `evaluation_rows`, in the order of the parts.

    An evaluation with non-finite returns has only the metric `nonfinite`.
    """
    rows = list[dict[str, Any]]()
    for part_rows in parts:
        if part_rows is None:
            return {"nonfinite": 1.0}
        rows += part_rows
    summary = _summarize(rows, cfg.env.eval, cfg.runner.seed)
    return {name: float(metric) for name, metric in summary.items() if isinstance(metric, (int, float))}


def play(
    policy: Any,
    env: VectorEnv,
    quota: np.ndarray,
    device: torch.device,
    *,
    mode: str = "eval",
    observer: StepObserver | None = None,
    on_progress: _ProgressCallback | None = None,
    on_episode_end: Callable[[np.ndarray], None] | None = None,
    noise: _Noise | None = None,
) -> list[dict[str, Any]]:
    """Plays the first `quota[i]` episodes of each slot i, starting from a reset. If the simulator or robot
    fails in an episode, another episode replaces it.

    Args:
        policy: Policy on `device`.
        env: Vector environment.
        quota: Number of episodes by slot.
        device: Device of the policy.
        mode: "eval" or "train" (`Policy.predict_action_batch`).
        observer: Observer of the steps.
        on_progress: Function called with the progress.
        on_episode_end: Function called with the slots in which an episode has ended.
        noise: Source of the policy's starting noise (`eval_noise`).

    Returns:
        One row per episode, ordered by slot and time: return, length, success_once and success_at_end if known, and in a suite
        the name of the task.

    Raises:
        ConfigError: The observations lack an entry of those that the policy was trained with, such as a camera.
        RlhpcError: An episode does not end, or simulators fail repeatedly.
    """
    rows: list[tuple[int, int, dict[str, Any]]] = []  # slot, number of its episode, row
    num_finished, steps_since_reset = np.zeros_like(quota), np.zeros_like(quota)
    failures, episodes = np.zeros_like(quota), np.zeros_like(quota)
    max_decisions = _MAX_DECISIONS if env.max_episode_steps != 0 else _MAX_WITHOUT_LIMIT
    num_env_steps = 0
    obs, _ = env.reset()
    while steps_since_reset.max() < max_decisions:
        noise_kwargs = {} if noise is None else {"noise": noise(episodes, steps_since_reset).to(device)}
        try:
            actions, _ = policy.predict_action_batch(to_tensors(obs, device), mode=mode, **noise_kwargs)
        except KeyError as error:
            _require_entry(error.args[0] if error.args else None, policy, env)
            raise
        actions_array = actions.cpu().numpy()
        if observer is not None:
            observer.on_step_start(obs, actions_array)
        obs, rewards, terminations, truncations, infos = env.chunk_step(actions_array)
        if observer is not None:
            observer.on_step_end(num_finished < quota, rewards, terminations, truncations, infos)
        ended_slots = np.flatnonzero(np.asarray(terminations) | np.asarray(truncations))
        has_failed = env_failed(infos, len(quota))
        failures += has_failed
        if (failures > _MAX_FAILURES).any():
            raise RlhpcError(
                f"simulators failed {int(failures.max())} times in one slot of the evaluation; {len(rows)} of {quota.sum()} "
                "episodes ended. Look at what the environment logged, then evaluate again"
            )
        if on_episode_end is not None:
            on_episode_end(ended_slots)
        steps_since_reset += 1
        steps_since_reset[ended_slots] = 0
        episodes[ended_slots] += 1
        steps_since_reset[num_finished >= quota] = 0
        num_env_steps += len(quota)
        episode: dict[str, Any] = infos.get("episode", {}) if ended_slots.size else {}
        for slot in ended_slots.tolist() if episode else ():
            if num_finished[slot] < quota[slot] and episode["mask"][slot] and not has_failed[slot]:
                rows.append((slot, int(num_finished[slot]), _make_episode_row(episode, slot, env.task_names)))
                num_finished[slot] += 1
        if on_progress is not None:
            on_progress(len(rows), num_env_steps)
        if (num_finished >= quota).all():
            return [row for _, _, row in sorted(rows, key=lambda row: row[:2])]
    raise RlhpcError(
        f"an episode of the evaluation has not ended after {max_decisions} decisions"
        f"{', and its environment has no time limit' if max_decisions < _MAX_DECISIONS else ''}; {len(rows)} of {quota.sum()} "
        "episodes did; set env.eval.max_episode_steps=N"
    )


def _require_entry(name: Any, policy: Any, env: VectorEnv) -> None:
    """Checks that the environment shows an entry of the observations that the policy was trained with.

    Raises:
        ConfigError: It does not.
    """
    expected_entries = getattr(getattr(policy, "observation_space", None), "spaces", {})
    shown_entries = getattr(env.observation_space, "spaces", {})
    if name in expected_entries and name not in shown_entries:
        raise ConfigError(
            f"env.eval shows no {name!r}, which the policy was trained with; it shows "
            f"{', '.join(shown_entries) or env.observation_space}"
        ) from None


def _make_episode_row(episode: dict[str, Any], slot: int, task_names: Sequence[str]) -> dict[str, Any]:
    row: dict[str, Any] = {"return": float(episode["return"][slot]), "length": float(episode["length"][slot])}
    if len(task_names) > 1 and "task" in episode:
        row["task"] = task_names[int(episode["task"][slot])]
    for name in ("success_once", "success_at_end"):
        # Environments that report `success` report it only at the end.
        column = episode.get(name, episode.get("success"))
        if column is not None:
            row[name] = float(column[slot])
    return row


def _summarize(rows: list[dict[str, float]], env_cfg: EvalEnvConfig, seed: int) -> dict[str, Any]:
    """Returns the statistics of an evaluation with its environment and seed (`evaluate_policy`).

    The interval of the mean return is Student's; the intervals of success rates are Wilson's.
    """
    episode_returns = np.asarray([row["return"] for row in rows], np.float64)
    mean, num_episodes = float(episode_returns.mean()), len(episode_returns)
    std = float(episode_returns.std(ddof=1)) if num_episodes > 1 else 0.0
    statistics: dict[str, Any] = {
        "return_mean": mean,
        "return_std": std,
        "return_min": float(episode_returns.min()),
        "return_max": float(episode_returns.max()),
        "return_ci95": list(mean_interval(episode_returns)),
        "length_mean": float(np.mean([row["length"] for row in rows])),
        "episodes": num_episodes,
    }
    for name in ("success_once", "success_at_end"):
        successes = [row[name] for row in rows if name in row]
        if len(successes) == num_episodes:
            statistics[name] = float(np.mean(successes))
            statistics[f"{name}_ci95"] = list(wilson_interval(sum(successes), num_episodes))
    if tasks := list(dict.fromkeys(row["task"] for row in rows if "task" in row)):
        statistics["tasks"] = {
            task: _summarize_task([row for row in rows if row.get("task") == task]) for task in sorted(tasks)
        }
    return {**statistics, "env_id": env_cfg.env_id, "seed": eval_seed(env_cfg, seed)}


def _summarize_task(rows: list[dict[str, Any]]) -> dict[str, float]:
    summary = {"episodes": len(rows), "return_mean": float(np.mean([row["return"] for row in rows]))}
    if all("success_once" in row for row in rows):
        summary["success_once"] = float(np.mean([row["success_once"] for row in rows]))
    return summary
