"""Wrappers of Atari games. Exported policies contain this file, so that it imports only gymnasium."""

from __future__ import annotations

from typing import Any

import gymnasium


class LifeLoss(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Wrapper that ends an episode at the loss of a life; the next episode continues the game. Place it outside
    `atari`.

    `info["life_lost"]` marks that the game continues, so that the vector environment counts returns and lengths of
    complete games.
    """

    def __init__(self, env: Any) -> None:
        super().__init__(env)
        self._num_lives = 0
        self._goes_on = False

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Steps the game; a lost life ends the episode."""
        obs, reward, terminated, truncated, info = self.env.step(action)
        lives = info["lives"]
        self._goes_on = 0 < lives < self._num_lives and not (terminated or truncated)
        self._num_lives = lives
        if self._goes_on:
            info = {**info, "life_lost": True}
        return obs, reward, terminated or self._goes_on, truncated, info

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        """Continues the game, or starts a new game."""
        game_over = not self._goes_on or seed is not None
        if not game_over:
            obs, _, terminated, truncated, info = self.env.step(0)
            game_over = terminated or truncated
        if game_over:
            obs, info = self.env.reset(seed=seed, options=options)
        self._num_lives = info["lives"]
        self._goes_on = False
        return obs, info


class FireReset(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Wrapper that presses FIRE when an episode begins, in games that wait for FIRE. Place it outside `life_loss`."""

    def __init__(self, env: Any) -> None:
        super().__init__(env)
        meanings = env.unwrapped.get_action_meanings()
        self._fire = meanings.index("FIRE") if "FIRE" in meanings else None

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        """Starts an episode."""
        obs, info = self.env.reset(seed=seed, options=options)
        if self._fire is not None:
            obs, _, terminated, truncated, info = self.env.step(self._fire)
            if terminated or truncated:
                obs, info = self.env.reset(seed=seed, options=options)
        return obs, info
