"""Somebody at this machine's screen, with a keyboard or a gamepad, who sees the first slot in a window."""

from __future__ import annotations

import logging
import os
import sys
import time
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rlhpc.embodied.intervention.base import Intervention
from rlhpc.runtime.errors import ConfigError

log = logging.getLogger(__name__)

#: What a key, a button or a stick does: the number of the action that it moves, and by how much.
Move = Sequence[float]
_KEYS = {"up": (0, 1.0), "down": (0, -1.0), "left": (1, 1.0), "right": (1, -1.0),
         "w": (2, 1.0), "s": (2, -1.0), "c": (3, 1.0), "o": (3, -1.0)}  # fmt: skip
_STICKS = {1: (0, -1.0), 0: (1, -1.0), 4: (2, -1.0)}
_BUTTONS = {0: (3, 1.0), 1: (3, -1.0)}
#: What a stick says that nobody touches.
_DEAD = 0.1
#: Those of SDL that show nothing.
_BLIND = ("dummy", "offscreen")
#: Environment variables, one of which says where to open a window, on Linux.
_SCREENS = ("DISPLAY", "WAYLAND_DISPLAY", "SDL_VIDEODRIVER")
_SCREEN = "a person needs one: log in with it (ssh -X), or take scripted"


class Person(Intervention):
    """A window, the pace of a person, and whether the person has the control.

    Args:
        hz: Steps a second, at most.
        size: Pixels of the window's side.
    """

    one_slot = True
    needs_pictures = True

    def __init__(self, hz: float = 10.0, size: int = 512) -> None:
        import pygame

        if hz <= 0 or size < 1:
            raise ConfigError(f"--intervene: hz is {hz} and size {size}; both must be above 0")
        self._pygame, self._period, self._next = pygame, 1.0 / hz, 0.0
        # SDL would try every driver that it has, and some of their libraries abort the process where there is no screen.
        if sys.platform == "linux" and not any(os.environ.get(name) for name in _SCREENS):
            raise ConfigError(f"--intervene: there is no screen (DISPLAY is not set); {_SCREEN}")
        try:
            pygame.init()
            self._window = pygame.display.set_mode((size, size))
        except pygame.error as error:
            raise ConfigError(f"--intervene: no window can be opened ({error}); {_SCREEN}") from None
        if (driver := pygame.display.get_driver()) in _BLIND and os.environ.get("SDL_VIDEODRIVER") != driver:
            raise ConfigError(f"--intervene: there is no screen (DISPLAY is not set); {_SCREEN}")
        self.in_control = False

    @abstractmethod
    def hear(self, event: Any) -> None:
        """Takes in a key, a button or a stick."""

    @abstractmethod
    def moves(self) -> list[tuple[int, float]]:
        """What the person does now: numbers of the action, and by how much."""

    def act(self, obs: Any, actions: np.ndarray, picture: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
        """What is done in this step (`Intervention.act`)."""
        del obs
        self._show(picture)
        time.sleep(max(0.0, self._next - time.monotonic()))
        self._next = time.monotonic() + self._period
        for event in self._pygame.event.get():
            if event.type == self._pygame.QUIT:
                raise KeyboardInterrupt
            self.hear(event)
        if not self.in_control:
            return actions, np.zeros(1, bool)
        chosen = np.zeros_like(actions)
        for number, by in self.moves():
            if number < chosen.shape[1]:
                chosen[0, number] += by
        return chosen, np.ones(1, bool)

    def _show(self, picture: np.ndarray | None) -> None:
        pygame = self._pygame
        if picture is not None:
            surface = pygame.surfarray.make_surface(picture.swapaxes(0, 1))
            pygame.transform.scale(surface, self._window.get_size(), self._window)
        pygame.display.set_caption("you lead" if self.in_control else "the policy leads")
        pygame.display.flip()

    def close(self) -> None:
        """Closes the window."""
        self._pygame.quit()


class Keyboard(Person):
    """Keys that move while they are held, and one that takes the control and gives it back.

    Args:
        keys: Name of a key, as pygame has them → number of the action, and by how much.
        take: The one for the control.
        hz, size: See `Person`.
    """

    def __init__(
        self, keys: Mapping[str, Move] = _KEYS, take: str = "space", hz: float = 10.0, size: int = 512
    ) -> None:
        super().__init__(hz, size)
        try:
            self._keys = {
                self._pygame.key.key_code(name): (int(move[0]), float(move[1])) for name, move in keys.items()
            }
            self._take = self._pygame.key.key_code(take)
        except ValueError as error:
            raise ConfigError(
                f"--intervene keyboard: {error}; keys are named as pygame names them: left, space, a"
            ) from None
        self._held: set[int] = set()

    def hear(self, event: Any) -> None:
        """See `Person.hear`."""
        if event.type == self._pygame.KEYDOWN:
            self._held.add(event.key)
            self.in_control ^= event.key == self._take
        elif event.type == self._pygame.KEYUP:
            self._held.discard(event.key)

    def moves(self) -> list[tuple[int, float]]:
        """See `Person.moves`."""
        return [move for key, move in self._keys.items() if key in self._held]


class Gamepad(Person):
    """Sticks and buttons that move, and a button that has the control while it is held.

    Args:
        sticks: Number of an axis → number of the action, and by how much at its end.
        buttons: Number of a button → number of the action, and by how much.
        take: The button for the control.
        hz, size: See `Person`.
    """

    def __init__(
        self, sticks: Mapping[Any, Move] = _STICKS, buttons: Mapping[Any, Move] = _BUTTONS, take: int = 5, hz: float = 10.0,
        size: int = 512,
    ) -> None:  # fmt: skip
        super().__init__(hz, size)
        self._devices: list[Any] = []
        if not self._pygame.joystick.get_count():
            log.warning("no gamepad is attached; the policy leads until one is")
        self._sticks = {int(axis): (int(move[0]), float(move[1])) for axis, move in sticks.items()}
        self._buttons = {int(button): (int(move[0]), float(move[1])) for button, move in buttons.items()}
        self._take, self._at, self._held = take, dict.fromkeys(self._sticks, 0.0), set[int]()

    def hear(self, event: Any) -> None:
        """See `Person.hear`."""
        if event.type == self._pygame.JOYDEVICEADDED:
            self._devices.append(self._pygame.joystick.Joystick(event.device_index))
        elif event.type == self._pygame.JOYAXISMOTION and event.axis in self._at:
            self._at[event.axis] = event.value if abs(event.value) > _DEAD else 0.0
        elif event.type == self._pygame.JOYBUTTONDOWN:
            self._held.add(event.button)
        elif event.type == self._pygame.JOYBUTTONUP:
            self._held.discard(event.button)
        self.in_control = self._take in self._held

    def moves(self) -> list[tuple[int, float]]:
        """See `Person.moves`."""
        sticks = [(number, by * self._at[axis]) for axis, (number, by) in self._sticks.items()]
        return sticks + [move for button, move in self._buttons.items() if button in self._held]
