"""Environment wrapper in which a source of interventions may act in place of the policy.

Every action, the person's as well, is executed by the wrapped environment's `step`, so that a robot's safety core limits it.
The infos of a step report who led:

- `intervened`, bool `[N, chunk]`: executed actions that the source chose.
- `executed_actions`, float32 `[N, chunk, dim]`: the actions that were executed; beyond the end of an episode or of a shortened
  chunk, those of the policy.
- `marks`, int8 `[N]`: the verdict that ended the episode (`MARK_CODES`).
- `infos["episode"]["helped"]`, bool `[N]`: whether the source chose any action of the ended episode.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from rlhpc.embodied.envs.base import Step, VectorEnv, env_failed, merge_infos
from rlhpc.embodied.envs.observations import Obs, as_arrays
from rlhpc.embodied.envs.vector_wrapper import VectorEnvWrapper
from rlhpc.embodied.interventions.sources import KEY, MARK_CODES, Intervention, Mark, Signals, build_intervention
from rlhpc.runtime.comm.context import check_run
from rlhpc.runtime.errors import ConfigError

if TYPE_CHECKING:
    from rlhpc.embodied.config import EnvSideConfig, PlayedEnvConfig

log = logging.getLogger(__name__)

#: Seconds between two looks at the person's signals while the environment is paused.
_PAUSE_POLL_S = 0.02
#: Factor on the control period beyond which a period counts as missed.
MISSED_FACTOR = 1.1


class InterventionEnv(VectorEnvWrapper):
    """Vector environment in which a source of interventions may act in place of the policy.

    With one slot, a chunk of the policy's actions ends early if the person gives back control, pauses or marks the episode,
    because the remaining actions were chosen for another situation. With several slots, which only scripts can watch, chunks
    are executed to their end.

    A mark ends the episode as terminated, with reward 1 (success) or 0 (failure) times `reward_scale` in place of the last
    step's reward. During a pause a robot holds still, and the next observation is a new one.

    Args:
        env: Wrapped environment.
        source: Source of interventions, which is closed together with the environment.
        cfg: Section `env.train` or `env.eval`.
        slots: Global slots.
        seed: Seed of the environments.
        key: Configuration key of the number of slots, for messages.

    Raises:
        ConfigError: A person would have to watch several slots.
    """

    def __init__(
        self, env: VectorEnv, source: Intervention, cfg: EnvSideConfig, slots: range, seed: int,
        key: str = "env.train.num_envs",
    ) -> None:  # fmt: skip
        if source.one_slot and env.num_envs > 1:
            raise ConfigError(f"a person watches one slot at a time: set {key}=1 (it is {env.num_envs})")
        super().__init__(env)
        self.source = source
        self.control_hz = env.control_hz or source.hz
        self._scale = np.float32(cfg.reward_scale)
        self._period_s = 0.0 if source.hz is None or env.holds_hardware else 1.0 / source.hz
        self._step_end = 0.0
        self._has_source_failed = False
        self._obs: Any = None
        self._had_intervention = np.zeros(env.num_envs, bool)
        self._returns, self._lengths = np.zeros(env.num_envs), np.zeros(env.num_envs, np.int64)
        source.begin(slots, seed)

    # -- episodes -------------------------------------------------------------------------------------------------

    def reset(self, seed: int | None = None) -> tuple[Obs, dict[str, Any]]:
        """Starts an episode in every slot (`VectorEnv.reset`)."""
        self._obs, infos = self.env.reset(seed)
        self._forget_episodes(np.ones(self.num_envs, bool))
        return self._obs, infos

    def _forget_episodes(self, slots: np.ndarray) -> None:
        self.source.end_episodes(slots)
        for column in (self._had_intervention, self._returns, self._lengths):
            column[slots] = 0

    def step(self, actions: np.ndarray) -> Step:
        """Steps every slot by one action (`VectorEnv.step`)."""
        return self.chunk_step(np.asarray(actions)[:, None])

    def chunk_step(self, actions: np.ndarray) -> Step:
        """Executes a chunk of actions, each the policy's or the source's (`VectorEnv.chunk_step`)."""
        actions = np.asarray(actions)
        num_slots, chunk_length = actions.shape[:2]
        executed_actions, led = actions.copy(), np.zeros((num_slots, chunk_length), bool)
        rewards, is_executed = (
            np.zeros((num_slots, chunk_length), np.float32),
            np.zeros((num_slots, chunk_length), bool),
        )
        terminations, truncations = np.zeros(num_slots, bool), np.zeros(num_slots, bool)
        infos: dict[str, Any] = {}
        signals, marks = Signals(), np.zeros(num_slots, np.int8)
        for index in range(chunk_length):
            is_active = ~(terminations | truncations)
            chosen_actions, is_led = self._choose(actions[:, index])
            if index and num_slots == 1 and led[0, index - 1] and not is_led[0]:
                break
            executed_actions[:, index], led[:, index] = chosen_actions, is_led & is_active
            obs, step_rewards, terminated, truncated, step_infos = self._step_once(chosen_actions)
            signals = self._read_signals()
            if (
                num_slots == 1
                and signals.mark is not Mark.NONE
                and not (terminated | truncated | env_failed(step_infos, 1))[0]
            ):
                step_rewards, terminated, step_infos = self._end_by_mark(signals.mark, bool(led[:, : index + 1].any()))
                obs, marks[0] = self._obs, MARK_CODES[signals.mark]
            has_failed = env_failed(step_infos, num_slots)
            rewards[:, index] = np.where(is_active, step_rewards, 0)
            is_executed[:, index] = is_active & ~has_failed if self.holds_hardware else is_active
            led[:, index] &= is_executed[:, index]
            self._had_intervention |= led[:, index]
            has_ended = (terminated | truncated) & is_active
            self._count(step_rewards, is_active & ~has_failed)
            if has_ended.any():
                if "episode" in step_infos:
                    step_infos["episode"]["helped"] = self._had_intervention.copy()
                merge_infos(infos, step_infos, has_ended)
                self._forget_episodes(has_ended)
            elif chunk_length == 1:
                infos = step_infos
            terminations |= terminated & has_ended
            truncations |= truncated & has_ended
            if num_slots == 1 and (has_ended[0] or signals.paused):
                break
        if chunk_length > 1:
            infos["chunk"] = {"rewards": rewards, "mask": is_executed}
        infos |= {"intervened": led, "executed_actions": executed_actions, "marks": marks}
        if signals.paused:
            obs = self._wait_for_resume(obs)
        self._obs = obs
        return obs, rewards.sum(1), terminations, truncations, infos

    def _choose(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the actions of a step, and a mask of the slots in which the source chose them."""
        frames = self.env.render([0]) if self.source.needs_pictures else None
        obs, flat_actions = as_arrays(self._obs), actions.reshape(self.num_envs, -1)
        chosen_actions, is_led = self.source.act(obs, flat_actions, None if frames is None else frames[0])
        self._stop_on_failure()
        if not is_led.any():
            return actions, is_led
        chosen_actions = np.asarray(chosen_actions).reshape(actions.shape)
        if hasattr(self.action_space, "low"):
            shape = (self.num_envs, *self.action_space.shape)
            clipped_actions = np.clip(chosen_actions.reshape(shape), self.action_space.low, self.action_space.high)
            chosen_actions = clipped_actions.reshape(actions.shape)
        mask = is_led.reshape(-1, *[1] * (actions.ndim - 1))
        return np.where(mask, chosen_actions, actions).astype(actions.dtype), is_led

    def _read_signals(self) -> Signals:
        signals = self.source.signals()
        self._stop_on_failure()
        return signals

    def _stop_on_failure(self) -> None:
        """Stops a robot whose person has lost control against their will. In a simulator the policy leads on."""
        if self.source.failure and not self._has_source_failed:
            if not self.holds_hardware:
                log.warning("%s; the policy leads until it is back", self.source.failure)
            self.env.stop(self.source.failure)
        self._has_source_failed = bool(self.source.failure)

    def _step_once(self, actions: np.ndarray) -> Step:
        """Executes one action in every slot, after the control period has passed."""
        if self._period_s:
            now = time.monotonic()
            time.sleep(max(0.0, self._step_end - now))
            self._step_end = max(self._step_end, now) + self._period_s
        step = self.env.step(actions)
        self._obs = step[0]
        return step

    def _count(self, rewards: np.ndarray, slots: np.ndarray) -> None:
        self._returns[slots] += rewards[slots] / self._scale if self._scale else 0.0
        self._lengths[slots] += 1

    def _end_by_mark(self, end_mark: Mark, is_led: bool) -> tuple[np.ndarray, np.ndarray, dict[str, Any]]:
        """Ends the only slot's episode by a person's verdict, and begins the next. Returns the step's rewards, terminations
        and infos.
        """
        is_success = np.array([end_mark is Mark.SUCCESS])
        final_obs = self._obs
        rewards = is_success.astype(np.float32) * self._scale
        self.env.hold()
        episode = {
            "return": self._returns + is_success,
            "length": self._lengths + 1,
            "success_once": is_success,
            "success_at_end": is_success,
            "mask": np.ones(1, bool),
        }
        log.info(
            "a person marked an episode: %s%s", end_mark, " (with help)" if is_led or self._had_intervention[0] else ""
        )
        self._obs, _ = self.env.reset()
        return rewards, np.ones(1, bool), {"final_obs": final_obs, "episode": episode}

    def _wait_for_resume(self, obs: Obs) -> Obs:
        """Holds a robot still until the person resumes; returns the observation after the pause."""
        log.info("a person paused the environment")
        self.env.hold()
        while self._read_signals().paused:
            (self.on_wait or check_run)("a person paused the environment")
            time.sleep(_PAUSE_POLL_S)
        log.info("a person resumed the environment")
        self._step_end = 0.0
        refreshed_obs = self.env.refresh()
        return obs if refreshed_obs is None else refreshed_obs

    def refresh(self) -> Obs | None:
        """Returns current observations (`VectorEnv.refresh`)."""
        obs = self.env.refresh()
        self._obs = self._obs if obs is None else obs
        return obs

    def own_columns(self) -> dict[str, Any]:
        """Returns the state of the episodes and of the source (`VectorEnvWrapper.own_columns`)."""
        return {
            "obs": as_arrays(self._obs),
            "helped": self._had_intervention.copy(),
            "returns": self._returns.copy(),
            "lengths": self._lengths.copy(),
            "source": self.source.slot_states() or [None] * self.num_envs,
        }

    def load_own_columns(self, columns: Mapping[str, Any]) -> None:
        """Restores what `own_columns` returned."""
        self._obs = columns["obs"]
        self._had_intervention = np.array(columns["helped"], bool)
        self._returns, self._lengths = np.array(columns["returns"], float), np.array(columns["lengths"], np.int64)
        if None not in columns["source"]:
            self.source.load_slot_states(columns["source"])

    def close(self) -> None:
        """Closes the wrapped environment and the source."""
        self.env.close()
        self.source.close()


def with_interventions(env: VectorEnv, cfg: PlayedEnvConfig, slots: range, seed: int) -> VectorEnv:
    """Returns the environment with the interventions of `env.train.intervene`; the environment itself without a source.

    Raises:
        ConfigError: The source cannot be built, or does not fit the environment.
    """
    section = cfg.intervene
    if section.source is None:
        return env
    try:
        intervention_source = build_intervention(
            section.source, {str(name): option_value for name, option_value in section.kwargs.items()}, KEY
        )
        return InterventionEnv(env, intervention_source, cfg, slots, seed)
    except BaseException:
        env.close()
        raise
