"""Vector environment of simulators that simulate one robot each: a subclass implements the reset and step of one slot."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
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
        chunk_rewards, is_executed = np.zeros((n, chunk), np.float32), np.zeros((n, chunk), bool)
        terminations, truncations = np.zeros(n, bool), np.zeros(n, bool)
        for i in range(chunk):
            is_active = ~(terminations | truncations)
            (chunk_rewards[:, i], terminated, truncated), success = self._step_slots(clipped_actions[:, i], is_active)
            is_executed[:, i] = is_active
            terminations |= terminated
            truncations |= truncated
        is_done = terminations | truncations
        infos: dict[str, Any] = {"success": success} if chunk == 1 else {}
        if is_done.any():
            infos |= {"final_obs": _stack_obs(self._last_obs), "episode": self.report(is_done)}
            self._begin(np.flatnonzero(is_done))
        if chunk > 1:
            infos["chunk"] = {"rewards": chunk_rewards, "mask": is_executed}
        return _stack_obs(self._last_obs), chunk_rewards.sum(1), terminations, truncations, infos

    def report(self, is_done: np.ndarray) -> dict[str, np.ndarray]:
        """Returns `infos["episode"]` of a step in which the slots `is_done` (bool `[N]`) ended."""
        return self.episodes.report(is_done)

    def _step_slots(
        self, actions: np.ndarray, is_active: np.ndarray
    ) -> tuple[tuple[np.ndarray, np.ndarray, np.ndarray], np.ndarray]:
        """Steps the active slots; returns rewards and ends for training (`EpisodeTracker.add`), and successes."""
        n = self.num_envs
        rewards, is_terminal, success = np.zeros(n, np.float32), np.zeros(n, bool), np.zeros(n, bool)
        for slot in np.flatnonzero(is_active).tolist():
            self._actions[slot].append(actions[slot].copy())
            slot_step = self.step_slot(slot, actions[slot])
            self._last_obs[slot], rewards[slot], success[slot], is_terminal[slot] = slot_step
        return self.episodes.add(rewards, is_terminal, success, is_active), success

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
        """Renders a slot, uint8 `[H, W, 3]`; returns None if there is no renderer."""

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


class SuiteVectorEnv(SlotwiseVectorEnv):
    """Vector environment of a suite: an episode plays one of the suite's tasks from one of the task's starts.

    In training the episode's seed determines task and start, so that the slots of a group get the same; with `shuffles` the
    groups of all slots go through all (task, start) pairs in a random order, which is drawn anew for each pass. In evaluation
    the (task, start) pairs are enumerated over slots and episodes, beginning with the first start of every task. If the
    number of episodes equals the number of pairs, each pair is played once. With fewer episodes, all tasks get about
    the same number; with more, the enumeration repeats.

    Args:
        cfg, num_envs, slot_offset, seed, limit: Arguments of `SlotwiseVectorEnv`.
        stage: "train" or "eval".
        task_names: Names of the suite's tasks.
        starts: Number of starts by task (index in `task_names`), for the tasks that are played.
        shuffles: In training, plays each pair once before any is played again.
    """

    takes_stage = True

    def __init__(
        self,
        cfg: EnvSideConfig,
        num_envs: int,
        slot_offset: int,
        seed: int,
        limit: int,
        *,
        stage: str,
        task_names: Sequence[str],
        starts: Mapping[int, int],
        shuffles: bool = False,
    ) -> None:
        super().__init__(cfg, num_envs, slot_offset, seed, limit)
        self.task_names = list(task_names)
        self._pairs = task_start_pairs(starts)
        self._enumerates = stage == "eval" and not cfg.use_fixed_reset_state_ids
        self._shuffles = shuffles and stage != "eval"
        self._repeats_first_start = cfg.use_fixed_reset_state_ids
        self._group_size, self._num_groups = cfg.group_size, max(1, cfg.num_envs // max(1, cfg.group_size))
        self._stride, self._slot_offset = cfg.num_envs, slot_offset
        #: Task of each slot's episode.
        self.slot_tasks = np.full(num_envs, next(iter(starts)), np.int64)

    def draw_start(self, slot: int, seed: int) -> tuple[int, int]:
        """Returns (task, start) of the episode that a slot begins with `seed`, and notes the task in `slot_tasks`."""
        index = seed
        if self._enumerates:
            index = (int(self.episodes.num_begun[slot]) - 1) * self._stride + self._slot_offset + slot
        elif self._shuffles:
            index = self._shuffled_index(slot)
        task, start = self._pairs[index % len(self._pairs)]
        self.slot_tasks[slot] = task
        return task, start

    def _shuffled_index(self, slot: int) -> int:
        """Returns the index of the pair that a slot's group plays, by the number of the slot's episode."""
        episode_number = 0 if self._repeats_first_start else int(self.episodes.num_begun[slot]) - 1
        group = (self._slot_offset + slot) // max(1, self._group_size)
        pass_number, position = divmod(episode_number * self._num_groups + group, len(self._pairs))
        order = np.random.default_rng([int(self.episodes.seeds[slot]), pass_number]).permutation(len(self._pairs))
        return int(order[position])

    def continue_episodes(self, counts: np.ndarray) -> None:
        """Sets the number of episodes that each slot has begun (`VectorEnv.continue_episodes`)."""
        self.episodes.num_begun[:] = counts

    def report(self, is_done: np.ndarray) -> dict[str, np.ndarray]:
        """Returns `infos["episode"]` with the episodes' tasks (`SlotwiseVectorEnv.report`)."""
        return {**super().report(is_done), "task": self.slot_tasks.copy()}


def task_start_pairs(starts: Mapping[int, int]) -> list[tuple[int, int]]:
    """Returns the (task, start) pairs of a suite from the number of starts of each task: start 0 of every task, then
    start 1, and so on."""
    return [(task, i) for i in range(max(starts.values())) for task, count in starts.items() if i < count]


def _stack_obs(rows: list[Any]) -> Any:
    if isinstance(rows[0], dict):
        return {name: np.stack([row[name] for row in rows]) for name in rows[0]}
    return np.stack(rows)
