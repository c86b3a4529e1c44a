"""Vector environment of simulators that simulate one robot each: a subclass implements the reset and step of one slot."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from rlhpc.embodied.envs.base import Step, VectorEnv
from rlhpc.embodied.envs.episode_tracker import EpisodeTracker

if TYPE_CHECKING:
    from rlhpc.embodied.config import EnvSideConfig


class SlotStep(NamedTuple):
    """Result of a simulator's step in one slot."""

    obs: Any
    reward: float
    success: bool
    failed: bool = False


class SlotwiseVectorEnv(VectorEnv):
    """Vector environment of N slots, stepped one after the other.

    The saved state of a slot is the number and the actions of its episode; loading replays the actions. A subclass sets
    `supports_state` to False if its resets keep state of the previous episode.

    Args:
        cfg: Section `env.train` or `env.eval`.
        num_envs: Number of slots in this environment.
        slot_offset: Global number of its first slot.
        seed: Seed of the run.
        limit: Steps after which an episode is truncated; 0 for none.
    """

    supports_state = True
    gains_by_processes = True

    def __init__(self, cfg: EnvSideConfig, num_envs: int, slot_offset: int, seed: int, limit: int) -> None:
        self.num_envs = num_envs
        self.episodes = EpisodeTracker(cfg, num_envs, slot_offset, seed, limit)
        #: Simulator of each slot; None before the slot's first episode if every episode builds a new simulator.
        self._envs: list[Any] = [None] * num_envs
        self._actions: list[list[np.ndarray]] = [[] for _ in range(num_envs)]
        self._last_obs: list[Any] = [None] * num_envs

    @abstractmethod
    def begin_slot(self, slot: int, seed: int) -> Any:
        """Starts the episode that `seed` determines; returns its first observation."""

    @abstractmethod
    def step_slot(self, slot: int, action: np.ndarray) -> SlotStep:
        """Steps one slot; `action` lies within the space's bounds."""

    def reset(self, seed: int | None = None) -> tuple[Any, dict[str, Any]]:
        """Starts an episode in every slot (`VectorEnv.reset`)."""
        if seed is not None:
            self.episodes.reseed(seed)
        self._begin(np.arange(self.num_envs))
        return _stack_obs(self._last_obs), {}

    def _begin(self, slots: np.ndarray) -> None:
        for slot, seed in zip(slots.tolist(), self.episodes.begin(slots), strict=True):
            self._actions[slot] = []
            self._last_obs[slot] = self.begin_slot(slot, seed)

    def step(self, actions: np.ndarray) -> Step:
        """Steps every slot by one action (`VectorEnv.step`). Actions are clipped to the space's bounds."""
        return self.chunk_step(actions.reshape(self.num_envs, 1, -1))

    def chunk_step(self, actions: np.ndarray) -> Step:
        """Executes a chunk (`VectorEnv.chunk_step`). A slot whose episode ends within the chunk is reset after the chunk."""
        n, chunk = actions.shape[:2]
        space = self.action_space
        clipped_actions = np.clip(actions.reshape(n, chunk, *space.shape), space.low, space.high).astype(space.dtype)
        chunk_rewards, executed = np.zeros((n, chunk), np.float32), np.zeros((n, chunk), bool)
        terminations, truncations = np.zeros(n, bool), np.zeros(n, bool)
        for i in range(chunk):
            active = ~(terminations | truncations)
            (chunk_rewards[:, i], terminated, truncated), success = self._step_slots(clipped_actions[:, i], active)
            executed[:, i] = active
            terminations |= terminated
            truncations |= truncated
        is_done = terminations | truncations
        infos: dict[str, Any] = {"success": success} if chunk == 1 else {}
        if is_done.any():
            infos |= {"final_obs": _stack_obs(self._last_obs), "episode": self.episodes.report(is_done)}
            self._begin(np.flatnonzero(is_done))
        if chunk > 1:
            infos["chunk"] = {"rewards": chunk_rewards, "mask": executed}
        return _stack_obs(self._last_obs), chunk_rewards.sum(1), terminations, truncations, infos

    def _step_slots(
        self, actions: np.ndarray, active: np.ndarray
    ) -> tuple[tuple[np.ndarray, np.ndarray, np.ndarray], np.ndarray]:
        """Steps the active slots; returns rewards and ends for training (`EpisodeTracker.add`), and successes."""
        n = self.num_envs
        rewards, failed, success = np.zeros(n, np.float32), np.zeros(n, bool), np.zeros(n, bool)
        for slot in np.flatnonzero(active).tolist():
            self._actions[slot].append(actions[slot].copy())
            slot_step = self.step_slot(slot, actions[slot])
            self._last_obs[slot], rewards[slot], success[slot], failed[slot] = slot_step
        return self.episodes.add(rewards, failed, success, active), success

    def state_dict(self) -> dict[str, Any]:
        """Returns the slots' state, for a checkpoint (`VectorEnv.state_dict`)."""
        no_actions = np.zeros((0, *self.action_space.shape), self.action_space.dtype)
        return {
            "slots": [
                {**self.episodes.position(slot), "actions": np.stack(actions) if actions else no_actions}
                for slot, actions in enumerate(self._actions)
            ]
        }

    def load_state_dict(self, state: Any) -> None:
        """Restores the slots from a checkpoint (`VectorEnv.load_state_dict`)."""
        for slot, slot_state in enumerate(self.slots_of(state)):
            self.episodes.replay(slot, slot_state)
            self._begin(np.array([slot]))
            is_slot = np.arange(self.num_envs) == slot
            for action in slot_state["actions"]:
                self._step_slots(np.broadcast_to(action, (self.num_envs, *np.shape(action))), is_slot)

    @abstractmethod
    def picture(self, slot: int) -> np.ndarray | None:
        """Renders a slot, uint8 `[H, W, 3]`; returns None without a renderer."""

    def render(self, slots: Sequence[int] | None = None) -> np.ndarray | None:
        """Renders slots (`VectorEnv.render`)."""
        frames = [self.picture(slot) for slot in (range(self.num_envs) if slots is None else slots)]
        available_frames = [frame for frame in frames if frame is not None]
        return np.stack(available_frames) if len(available_frames) == len(frames) else None

    def close(self) -> None:
        """Closes the simulators."""
        for env in self._envs:
            if env is not None:
                env.close()


def _stack_obs(rows: list[Any]) -> Any:
    if isinstance(rows[0], dict):
        return {name: np.stack([row[name] for row in rows]) for name in rows[0]}
    return np.stack(rows)
