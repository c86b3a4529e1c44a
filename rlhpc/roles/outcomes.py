"""What a rollout brings besides observations: rewards, ends of episodes, and the observations that were cut off."""

from __future__ import annotations

from typing import Any

import numpy as np

from rlhpc.envs.observations import as_arrays, join, take


class Outcomes:
    """Collects one vector environment's outcomes over a rollout, batch first: `[n, T]`.

    Args:
        share: Global slots of the environment.
        steps: T, decisions of a rollout.
    """

    def __init__(self, share: range, steps: int) -> None:
        size = len(share)
        self.rewards = np.zeros((size, steps), np.float32)
        self.terminations = np.zeros((size, steps), bool)
        self.truncations = np.zeros((size, steps), bool)
        self._finals: list[tuple[int, np.ndarray, Any]] = []

    def add(
        self, t: int, rewards: np.ndarray, terminations: np.ndarray, truncations: np.ndarray, infos: dict[str, Any]
    ) -> np.ndarray | None:
        """Takes in step `t` of all slots.

        Returns:
            Indices of the slots whose episode ended; None where there is none.
        """
        self.rewards[:, t] = rewards
        self.terminations[:, t] = terminations
        self.truncations[:, t] = truncations
        done = np.flatnonzero(self.terminations[:, t] | self.truncations[:, t])
        if not done.size:
            return None
        self._finals.append((t, done, take(as_arrays(infos["final_obs"]), done)))
        return done

    def part(self, part: slice, last_obs: Any) -> dict[str, Any]:
        """The message about the slots `part`.

        Args:
            part: Which of the environment's slots.
            last_obs: What those slots show after the rollout.

        Returns:
            rewards, terminations, truncations `[n, T]`; last_obs `[n, ...]`; final_slot, final_step `[k]` and
            final_obs `[k, ...]`: the true last observations of the episodes that ended, slots counted from 0.
        """
        slots, steps, rows = [], [], []
        for t, done, final in self._finals:
            inside = (done >= part.start) & (done < part.stop)
            if inside.any():
                slots.append(done[inside] - part.start)
                steps.append(np.full(int(inside.sum()), t))
                rows.append(take(final, inside))
        empty = np.zeros(0, np.int64)
        return {
            "rewards": self.rewards[part],
            "terminations": self.terminations[part],
            "truncations": self.truncations[part],
            "last_obs": last_obs,
            "final_slot": np.concatenate(slots) if slots else empty,
            "final_step": np.concatenate(steps) if steps else empty,
            "final_obs": join(rows) if rows else take(last_obs, slice(0)),
        }


def next_values(
    values: np.ndarray,
    last_values: np.ndarray,
    final_slot: np.ndarray,
    final_step: np.ndarray,
    final_values: np.ndarray,
) -> np.ndarray:
    """Value of the true next observation of each transition, `[n, T]`.

    Args:
        values: `[n, T]`, of the observations that were acted on.
        last_values: `[n]`, of what the slots show after the rollout.
        final_slot, final_step, final_values: `[k]`, where episodes ended and the value of their last observation.
    """
    result = np.empty_like(values)
    result[:, :-1] = values[:, 1:]
    result[:, -1] = last_values
    result[final_slot, final_step] = final_values
    return result


class EpisodeLog:
    """Episodes that ended during a rollout."""

    def __init__(self) -> None:
        self._rows: list[np.ndarray] = []

    def add(self, t: int, slot_offset: int, infos: dict[str, Any], ended: np.ndarray) -> None:
        """Takes in the episodes that ended at step `t` in the slots `ended` (counted from `slot_offset`)."""
        episode = infos.get("episode")
        if episode is None:
            return
        finished = ended[np.asarray(episode["mask"])[ended]] if "mask" in episode else ended
        success = episode.get("success")
        rows = np.empty((finished.size, 5))
        rows[:, 0], rows[:, 1] = t, finished + slot_offset
        rows[:, 2], rows[:, 3] = np.asarray(episode["return"])[finished], np.asarray(episode["length"])[finished]
        rows[:, 4] = np.nan if success is None else np.asarray(success)[finished]
        self._rows.append(rows)

    def arrays(self) -> dict[str, np.ndarray]:
        """`step`, `slot`, `return`, `length`, `success` (nan where the environment says nothing), each `[k]`."""
        rows = np.concatenate(self._rows) if self._rows else np.zeros((0, 5))
        names = ("step", "slot", "return", "length", "success")
        return {name: rows[:, i] for i, name in enumerate(names)}


def in_order(parts: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """The ranks' episodes together, by step and then slot: the same whichever rank had which slot."""
    merged = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    order = np.lexsort((merged["slot"], merged["step"]))
    return {name: column[order] for name, column in merged.items()}
