"""What Atari's usual preprocessing has beyond `gymnasium.wrappers` (Mnih et al. 2015, as in CleanRL and Stable-Baselines3)."""

from __future__ import annotations

from typing import Any

import gymnasium


class LifeLoss(gymnasium.Wrapper[Any, Any, Any, Any]):
    """The loss of a life ends an episode, and the next goes on with the game. Put it over `atari`.

    Its `info["life_lost"]` tells the vector environment that the game goes on: returns and lengths are those of whole games.
    """

    def __init__(self, env: Any) -> None:
        super().__init__(env)
        self._lives, self._goes_on = 0, False

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """One step."""
        obs, reward, terminated, truncated, info = self.env.step(action)
        lives = info["lives"]
        self._goes_on = 0 < lives < self._lives and not (terminated or truncated)
        self._lives = lives
        if self._goes_on:
            info = {**info, "life_lost": True}
        return obs, reward, terminated or self._goes_on, truncated, info

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        """Goes on with the game, or starts one."""
        ended = not self._goes_on or seed is not None
        if not ended:
            obs, _, terminated, truncated, info = self.env.step(0)
            ended = terminated or truncated
        if ended:
            obs, info = self.env.reset(seed=seed, options=options)
        self._lives, self._goes_on = info["lives"], False
        return obs, info


class FireReset(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Presses FIRE when an episode begins, in games that wait for it. Put it over `life_loss`."""

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
