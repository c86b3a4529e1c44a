"""Display of a trained policy, in a window or, without a display, in a video file."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from rlhpc.config.typed import plain, with_value
from rlhpc.embodied.config import EmbodiedConfig
from rlhpc.embodied.data.video import pyav
from rlhpc.embodied.envs.base import VectorEnv
from rlhpc.embodied.evaluation.episodes import StepObserver, evaluate_policy
from rlhpc.embodied.evaluation.evaluate import VideoRecorder
from rlhpc.embodied.models.registry import load_policy
from rlhpc.runs.device import device_of, evaluation_device, place_policy
from rlhpc.runs.run_folder import note
from rlhpc.runs.task_type import PlayOptions
from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.files import expand_home
from rlhpc.runtime.trust import Trust

#: Default number of episodes.
_DEFAULT_EPISODES = 4
#: Minimum length of a window's shorter side, in pixels.
_MIN_SIDE = 480


class _WindowClosed(Exception):
    """Exception raised when the user closes the window."""


class EnvWindow(StepObserver):
    """Window that shows slot 0 of an environment at a fixed frame rate. Escape, q or the window's close button ends it.

    Args:
        env: Vector environment.
        name: Title of the window.
        fps: Frames per second.

    Attributes:
        available: Whether the environment can be rendered.
    """

    def __init__(self, env: VectorEnv, name: str, fps: int) -> None:
        import pygame

        self._pygame, self._env, self._name, self._period_s = pygame, env, name, 1.0 / fps
        self._surface: Any = None
        self._next_frame_time, self._return, self._episode = 0.0, 0.0, 1
        self.available = True

    def on_step_start(self, obs: Any, actions: np.ndarray) -> None:
        """Draws the current state (`StepObserver.on_step_start`)."""
        frames = self._env.render([0]) if self.available else None
        self.available = frames is not None
        if frames is None:
            return
        self._show(np.asarray(frames)[0])

    def on_step_end(
        self, slots: np.ndarray, rewards: np.ndarray, terminations: np.ndarray, truncations: np.ndarray,
        infos: Mapping[str, Any],
    ) -> None:  # fmt: skip
        """Updates return and episode number in the title (`StepObserver.on_step_end`)."""
        self._return += float(np.asarray(rewards)[0].sum())
        if bool(np.asarray(terminations)[0] | np.asarray(truncations)[0]):
            self._episode, self._return = self._episode + 1, 0.0

    def _show(self, picture: np.ndarray) -> None:
        pygame = self._pygame
        height, width = picture.shape[:2]
        enlargement = max(1, -(-_MIN_SIDE // min(height, width)))
        if self._surface is None:
            self._surface = pygame.display.set_mode((width * enlargement, height * enlargement))
        self._surface.blit(
            pygame.transform.scale_by(pygame.surfarray.make_surface(picture.swapaxes(0, 1)), enlargement), (0, 0)
        )
        pygame.display.set_caption(f"{self._name}: episode {self._episode}, return {self._return:.1f}")
        pygame.display.flip()
        for event in pygame.event.get():
            if event.type == pygame.QUIT or (
                event.type == pygame.KEYDOWN and event.key in (pygame.K_ESCAPE, pygame.K_q)
            ):
                raise _WindowClosed
        time.sleep(max(0.0, self._next_frame_time - time.monotonic()))
        self._next_frame_time = time.monotonic() + self._period_s

    def close(self) -> None:
        """Closes the window."""
        if self._surface is not None:
            self._pygame.display.quit()


def has_display() -> bool:
    """Returns whether a window can be opened in this process."""
    if not any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY", "SDL_VIDEODRIVER")):
        return False
    try:
        import pygame
    except ImportError:
        return False
    try:
        pygame.display.init()
    except pygame.error as error:
        note(f"no window can be opened ({error}); a video is made")
        return False
    return True


def play_checkpoint(checkpoint: str | Path, cfg: EmbodiedConfig, options: PlayOptions) -> dict[str, Any]:
    """Plays episodes of `env.eval` with a checkpoint's policy and deterministic actions, and shows them.

    Args:
        checkpoint: A `global_step_<N>` folder.
        cfg: Configuration, of which section `env.eval` and `runner.seed` are used.
        options: Options of `rlhpc play`.

    Returns:
        Result of `evaluate_policy`, with the path `video` if a video was written; empty if the user closed the window.

    Raises:
        CheckpointError: The checkpoint has faults.
        ConfigError: The environment cannot be built or rendered, or does not fit the policy.
    """
    folder = expand_home(checkpoint).absolute()
    policy = place_policy(
        load_policy(folder, Trust.from_config(plain(cfg), options.trust_code)), evaluation_device(cfg)
    )
    episodes = _DEFAULT_EPISODES if options.episodes is None else options.episodes
    in_window = has_display()
    if not in_window:
        pyav()
    env_cfg = with_value(cfg.env.eval, "num_envs", 1 if in_window else episodes)
    if options.seed is not None:
        env_cfg = with_value(env_cfg, "seed", options.seed)
    observers: list[EnvWindow | VideoRecorder] = []

    def build_observer(env: VectorEnv) -> StepObserver:
        observers.append(
            EnvWindow(env, env_cfg.env_id, env_cfg.video_fps) if in_window else VideoRecorder(env, episodes)
        )
        return observers[0]

    def check_pictures(num_done: int, num_steps: int) -> None:
        del num_done, num_steps
        if not observers[0].available:
            raise ConfigError(f"{env_cfg.env_id} cannot be rendered here, so there is nothing to show; see rlhpc eval")

    evaluation: dict[str, Any] = {}
    try:
        evaluation = evaluate_policy(
            policy,
            env_cfg,
            seed=cfg.runner.seed,
            episodes=episodes,
            device=device_of(policy),
            build_observer=build_observer,
            on_progress=check_pictures,
        )
    except _WindowClosed:
        return {}
    except RuntimeError as error:
        raise ConfigError(f"env.eval.env_id={env_cfg.env_id} does not fit {folder}'s policy: {error}") from error
    finally:
        for observer in observers:
            if isinstance(observer, EnvWindow):
                observer.close()
    if observers and isinstance(observers[0], VideoRecorder):
        observers[0].write(options.video, env_cfg.video_fps)
        evaluation["video"] = str(options.video)
    return evaluation
