"""A film of an evaluation: the first episode of some slots, side by side."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from rlhpc.embodied.envs.base import VectorEnv, env_failed
from rlhpc.embodied.play import Watch
from rlhpc.embodied.video import framed, shrink, tile, write_video

#: Pictures of one film at most.
MAX_FRAMES = 1500


class Film(Watch):
    """Takes a picture of each slot before each of its steps; a slot that has ended keeps its last one, framed.

    Args:
        env: A vector environment.
        episodes: How many slots are shown.
    """

    def __init__(self, env: VectorEnv, episodes: int) -> None:
        self._env, self._slots = env, list(range(min(episodes, env.num_envs)))
        self._ended: dict[int, np.ndarray] = {}
        self._now: np.ndarray | None = None
        self.frames: list[np.ndarray] = []
        self.available = True

    def before(self, obs: Any, actions: np.ndarray) -> None:
        """See `Watch`."""
        if not self.available or len(self._ended) == len(self._slots) or len(self.frames) >= MAX_FRAMES:
            return
        seen = self._env.render(self._slots)
        self.available = seen is not None
        if seen is None:
            return
        self._now = shrink(np.asarray(seen))
        shown = [self._ended.get(slot, self._now[i]) for i, slot in enumerate(self._slots)]
        self.frames.append(tile(np.stack(shown)))

    def after(
        self, slots: np.ndarray, rewards: np.ndarray, terminations: np.ndarray, truncations: np.ndarray,
        infos: Mapping[str, Any],
    ) -> None:  # fmt: skip
        """See `Watch`."""
        episode = infos.get("episode", {})
        success = next((episode[name] for name in ("success_once", "success") if name in episode), None)
        ended = (terminations | truncations) & ~env_failed(infos, len(slots))
        for i, slot in enumerate(self._slots):
            if self._now is not None and slot not in self._ended and ended[slot]:
                self._ended[slot] = framed(self._now[i], success is not None and bool(success[slot]))

    def write(self, path: Path, fps: int) -> None:
        """Writes the film as an mp4 file; its last picture stays for half a second."""
        if self._now is None:
            return
        last = tile(np.stack([self._ended.get(slot, self._now[i]) for i, slot in enumerate(self._slots)]))
        write_video(path, [*self.frames, *[last] * max(1, fps // 2)], fps)
