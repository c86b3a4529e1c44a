"""Episode tracking for simulator adapters: seeds, elapsed steps, returns, success, ends of episodes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from rlhpc.embodied.config import EnvSideConfig


class EpisodeTracker:
    """Tracker of the episodes of N slots.

    Args:
        cfg: Section `env.train` or `env.eval`.
        num_envs: N, number of slots.
        slot_offset: Global number of the first slot.
        seed: Seed of the run.
        limit: Steps after which an episode is truncated; 0 for none.
    """

    def __init__(self, cfg: EnvSideConfig, num_envs: int, slot_offset: int, seed: int, limit: int) -> None:
        self.num_envs = num_envs
        self.limit = limit
        #: Seed of each slot's series of episodes: a restarted simulator begins another series.
        self.seeds = np.full(num_envs, seed, np.int64)
        self._slot_groups = (slot_offset + np.arange(num_envs)) // max(1, cfg.group_size)
        self._repeats_first_state = cfg.use_fixed_reset_state_ids
        self._uses_relative_reward = cfg.use_rel_reward
        self._ignore_terminations = cfg.ignore_terminations
        self._reward_scale = cfg.reward_scale
        #: Number of episodes that each slot has begun.
        self.num_begun = np.zeros(num_envs, np.int64)
        self.elapsed_steps = np.zeros(num_envs, np.int64)
        self.returns = np.zeros(num_envs, np.float64)
        self._has_succeeded = np.zeros(num_envs, bool)
        self._is_successful = np.zeros(num_envs, bool)
        self._previous_rewards = np.zeros(num_envs, np.float32)
        self._reports_success = False

    def reseed(self, seed: int) -> None:
        """Restarts the slots' series of episodes from a seed."""
        self.seeds[:] = seed
        self.num_begun[:] = 0

    def position(self, slot: int) -> dict[str, int]:
        """Returns a slot's position in its series of episodes, for `replay`."""
        return {"seed": int(self.seeds[slot]), "begun": int(self.num_begun[slot])}

    def replay(self, slot: int, position: dict[str, Any]) -> None:
        """Makes the episode at `position` of a slot's series the slot's next episode."""
        self.seeds[slot], self.num_begun[slot] = int(position["seed"]), int(position["begun"]) - 1

    def begin(self, slots: np.ndarray) -> list[int]:
        """Starts the next episode of `slots`.

        Returns:
            Seeds of the episodes' first states, from (seed, group of slots, number of the episode). Slots of a group
            get the same seed.
        """
        for statistic in (
            self.elapsed_steps,
            self.returns,
            self._has_succeeded,
            self._is_successful,
            self._previous_rewards,
        ):
            statistic[slots] = 0
        seeds = [self._episode_seed(slot) for slot in slots.tolist()]
        self.num_begun[slots] += 1
        return seeds

    def _episode_seed(self, slot: int) -> int:
        episode_number = 0 if self._repeats_first_state else int(self.num_begun[slot])
        sequence = np.random.SeedSequence([int(self.seeds[slot]), int(self._slot_groups[slot]), episode_number])
        return int(sequence.generate_state(1)[0]) & 0x7FFFFFFF

    def add(
        self, rewards: np.ndarray, is_terminal: np.ndarray, success: np.ndarray | None, is_active: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Adds a step of the slots `is_active`.

        Args:
            rewards: Rewards of the simulator, float `[N]`.
            is_terminal: Slots whose episode ended without success, bool `[N]`.
            success: Slots in a successful state, bool `[N]`; None if the simulator does not report success.
            is_active: Slots that were stepped, bool `[N]`.

        Returns:
            Rewards (float32), terminations and truncations (bool) for training, each `[N]`; 0 for inactive slots.
        """
        rewards = np.where(is_active, rewards, 0).astype(np.float32)
        self.elapsed_steps += is_active
        self.returns += rewards
        terminated = is_terminal & is_active
        if success is not None:
            self._reports_success = True
            succeeded_now = success & is_active
            self._is_successful = np.where(is_active, success, self._is_successful)
            self._has_succeeded |= succeeded_now
            terminated = terminated | succeeded_now
        if self._ignore_terminations:
            terminated = np.zeros_like(terminated)
        truncated = (
            is_active & ~terminated & (self.elapsed_steps >= self.limit) if self.limit else np.zeros_like(terminated)
        )
        if self._uses_relative_reward:
            rewards, self._previous_rewards = (
                rewards - np.where(is_active, self._previous_rewards, 0),
                np.where(is_active, rewards, self._previous_rewards),
            )
        return rewards * np.float32(self._reward_scale), terminated, truncated

    def report(self, is_done: np.ndarray) -> dict[str, np.ndarray]:
        """Returns `infos["episode"]` of a step in which the slots `is_done` (bool `[N]`) ended."""
        episode = {"return": self.returns.copy(), "length": self.elapsed_steps.copy(), "mask": is_done.copy()}
        if self._reports_success:
            episode["success_once"] = self._has_succeeded.astype(np.float64)
            episode["success_at_end"] = self._is_successful.astype(np.float64)
        return episode
