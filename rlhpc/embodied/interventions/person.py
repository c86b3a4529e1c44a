"""Interventions by a person: keyboard, gamepad and SpaceMouse.

All of them also pause and resume the environment, and mark the running episode as a success or a failure. Gamepad and
SpaceMouse are read from their hidraw device (`hid`); the keyboard needs a window.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import sys
import time
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rlhpc.embodied.interventions.hid import GAMEPAD, SPACEMOUSE, DeviceLost, HidDevice, find_device
from rlhpc.embodied.interventions.sources import Intervention, Mark, Signals
from rlhpc.runtime.errors import ConfigError

log = logging.getLogger(__name__)

#: Effect of a key, a button or an axis: index of the action component, and its change.
Move = Sequence[float]
_KEYS = {"up": (0, 1.0), "down": (0, -1.0), "left": (1, 1.0), "right": (1, -1.0),
         "w": (2, 1.0), "s": (2, -1.0), "c": (3, 1.0), "o": (3, -1.0)}  # fmt: skip
#: Keys of the window, for every source: p pauses and resumes, Return marks a success, Backspace a failure.
_PAUSE_KEY, _SUCCESS_KEY, _FAILURE_KEY = "p", "return", "backspace"
#: Left stick, and the vertical axis of the right stick, of a gamepad.
_STICKS = {"y": (0, -1.0), "x": (1, -1.0), "rz": (2, -1.0)}
_GAMEPAD_BUTTONS = {1: (3, 1.0), 2: (3, -1.0)}
#: Axes of a SpaceMouse: x to the right, y towards the person, z down.
_PUCK = {"y": (0, -1.0), "x": (1, -1.0), "z": (2, -1.0)}
_PUCK_BUTTONS = {1: (3, 1.0), 2: (3, -1.0)}
#: Maximum deflection that counts as rest.
_DEAD_ZONE = 0.1
#: Seconds between two attempts to open a device that is gone.
_REOPEN_S = 1.0
#: SDL drivers without a visible window.
_HEADLESS_DRIVERS = ("dummy", "offscreen")
#: Environment variables that name the display on Linux.
_SCREENS = ("DISPLAY", "WAYLAND_DISPLAY", "SDL_VIDEODRIVER")
_SCREEN = "a person needs one: log in with it (ssh -X), or take scripted"


def has_screen() -> bool:
    """Returns whether a window can be opened; on Linux, an environment variable must name a display."""
    # SDL would try all its drivers, and the libraries of some abort the process if there is no screen.
    return sys.platform != "linux" or any(os.environ.get(name) for name in _SCREENS)


class Window:
    """Window with the environment's picture, which also receives the keys.

    Args:
        size: Width and height in pixels.

    Raises:
        ConfigError: No window can be opened.
    """

    def __init__(self, size: int) -> None:
        import pygame

        self.pygame = pygame
        if not has_screen():
            raise ConfigError(f"--intervene: there is no screen (DISPLAY is not set); {_SCREEN}")
        try:
            pygame.init()
            self._surface = pygame.display.set_mode((size, size))
        except pygame.error as error:
            raise ConfigError(f"--intervene: no window can be opened ({error}); {_SCREEN}") from None
        if (driver := pygame.display.get_driver()) in _HEADLESS_DRIVERS and os.environ.get("SDL_VIDEODRIVER") != driver:
            raise ConfigError(f"--intervene: there is no screen (DISPLAY is not set); {_SCREEN}")
        self.pressed: set[int] = set()

    def key_code(self, name: str) -> int:
        """Returns the code of a key.

        Raises:
            ConfigError: The key is unknown.
        """
        try:
            return int(self.pygame.key.key_code(name))
        except ValueError as error:
            raise ConfigError(
                f"--intervene keyboard: {error}; keys are named as pygame names them: left, space, a"
            ) from None

    def show(self, picture: np.ndarray | None, caption: str) -> None:
        """Shows a picture, uint8 `[H, W, 3]`."""
        pygame = self.pygame
        if picture is not None:
            surface = pygame.surfarray.make_surface(picture.swapaxes(0, 1))
            pygame.transform.scale(surface, self._surface.get_size(), self._surface)
        pygame.display.set_caption(caption)
        pygame.display.flip()

    def read(self) -> list[int]:
        """Reads the keys; returns the codes of those that were pressed since the last call.

        Raises:
            KeyboardInterrupt: The person closed the window.
        """
        clicked_keys = []
        for event in self.pygame.event.get():
            if event.type == self.pygame.QUIT:
                raise KeyboardInterrupt
            if event.type == self.pygame.KEYDOWN:
                self.pressed.add(event.key)
                clicked_keys.append(event.key)
            elif event.type == self.pygame.KEYUP:
                self.pressed.discard(event.key)
        return clicked_keys

    def close(self) -> None:
        """Closes the window."""
        self.pygame.quit()


class Person(Intervention):
    """Intervention by a person, who watches one slot and may take control.

    Args:
        hz: Maximum number of steps per second of a simulator.
        window: Window with the environment's picture; None if no window is open.

    Attributes:
        in_control: Whether the person leads.
    """

    one_slot = True

    def __init__(self, hz: float, window: Window | None) -> None:
        self.hz, self._window = hz, window
        self.needs_pictures = window is not None
        self.in_control = False
        self._mark, self._is_paused = Mark.NONE, False
        self._signal_keys: tuple[int, ...] = ()
        if window is not None:
            self._signal_keys = tuple(window.key_code(name) for name in (_PAUSE_KEY, _SUCCESS_KEY, _FAILURE_KEY))

    @abstractmethod
    def moves(self) -> list[tuple[int, float]]:
        """Returns the person's current moves: pairs of action component index and change."""

    def read(self) -> None:
        """Reads the person's keys; a subclass also reads its device."""
        if self._window is None:
            return
        for key_code in self._window.read():
            self.handle_key(key_code)

    def handle_key(self, code: int) -> None:
        """Handles a key that was pressed in the window."""
        if code in self._signal_keys:
            self.signal(*(code == key for key in self._signal_keys))

    def signal(self, pause: bool, success: bool, failure: bool) -> None:
        """Records a person's signals; `pause` pauses or resumes."""
        self._is_paused ^= pause
        if success or failure:
            self._mark = Mark.SUCCESS if success else Mark.FAILURE

    def act(self, obs: Any, actions: np.ndarray, picture: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
        """Chooses the actions of this step (`Intervention.act`)."""
        del obs
        if self._window is not None:
            self._window.show(picture, "you lead" if self.in_control else "the policy leads")
        self.read()
        if not self.in_control:
            return actions, np.zeros(1, bool)
        person_actions = np.zeros_like(actions)
        for component, move_amount in self.moves():
            if component < person_actions.shape[1]:
                person_actions[0, component] += move_amount
        return person_actions, np.ones(1, bool)

    def signals(self) -> Signals:
        """Returns the person's signals since the last call (`Intervention.signals`)."""
        self.read()
        pending_mark, self._mark = self._mark, Mark.NONE
        if self._is_paused and self._window is not None:
            self._window.show(None, "paused")
        return Signals(pending_mark, self._is_paused)

    def close(self) -> None:
        """Closes the window."""
        if self._window is not None:
            self._window.close()


class Keyboard(Person):
    """Intervention by keyboard: keys move while they are pressed, and one key toggles control.

    Args:
        keys: For each key, by pygame's name: index of the action component, and its change.
        take: Key that toggles control.
        hz: Maximum number of steps per second of a simulator.
        size: Width and height of the window, in pixels.
    """

    def __init__(
        self, keys: Mapping[str, Move] = _KEYS, take: str = "space", hz: float = 10.0, size: int = 512
    ) -> None:
        _check_window(hz, size)
        window = Window(size)
        super().__init__(hz, window)
        self._keys = _index_moves({window.key_code(name): key_move for name, key_move in keys.items()})
        self._control_key = window.key_code(take)
        self._pressed = window.pressed

    def handle_key(self, code: int) -> None:
        """Handles a key (`Person.handle_key`)."""
        super().handle_key(code)
        self.in_control ^= code == self._control_key

    def moves(self) -> list[tuple[int, float]]:
        """Returns the moves of the pressed keys (`Person.moves`)."""
        return [key_move for key, key_move in self._keys.items() if key in self._pressed]


class DevicePerson(Person):
    """Intervention by an input device.

    A device that is gone is opened again as soon as it is back. If it goes while the person leads, `failure` says so, the
    policy does not take over a robot by itself: the environment stops it.

    Args:
        kind: Name of the device in messages.
        applications: Usages of the device (`hid`).
        device: Device file; None searches for one.
        descriptor: File with the report descriptor; None takes the one that the kernel reports.
        axes: For each axis, by name: index of the action component, and its change at full deflection.
        buttons: For each button, by number: index of the action component, and its change.
        signal_buttons: Buttons that pause and resume, mark a success and mark a failure; None for no button.
        hz: Maximum number of steps per second of a simulator.
        size: Width and height of the window, in pixels.
        window: Whether to open a window; None opens one if there is a screen.

    Raises:
        ConfigError: The device is not there, or has none of the axes.
    """

    def __init__(
        self, kind: str, applications: Sequence[int], device: str | None, descriptor: str | None,
        axes: Mapping[str, Move], buttons: Mapping[Any, Move], signal_buttons: Sequence[int | None], hz: float, size: int,
        window: bool | None,
    ) -> None:  # fmt: skip
        _check_window(hz, size)
        self._kind, self._applications = kind, applications
        self._path = None if device is None else Path(device)
        self._descriptor_path = None if descriptor is None else Path(descriptor)
        self._axes = _index_moves(axes)
        self._buttons = _index_moves({int(button): button_move for button, button_move in buttons.items()})
        self._signal_buttons = tuple(signal_buttons)
        self._next_attempt, self._device = 0.0, self._open()
        if self._device is None:
            device_text = device or "a hidraw device of that kind"
            raise ConfigError(
                f"--intervene {kind}: {device_text} is not attached; attach it to the node of the env rank"
            )
        if unknown_axes := [name for name in axes if name not in self._device.axes]:
            raise ConfigError(
                f"--intervene {kind}: {self._device.path} has no axis {unknown_axes[0]!r}; it has "
                f"{', '.join(sorted(self._device.axes)) or 'none'}"
            )
        is_shown = window is True or (window is None and has_screen())
        super().__init__(hz, Window(size) if is_shown else None)

    def _open(self) -> HidDevice | None:
        """Opens the device; returns None if it is not there."""
        path = self._path or find_device(self._applications)
        if path is None:
            return None
        try:
            return HidDevice(path, self._descriptor_path)
        except DeviceLost:
            return None

    def read(self) -> None:
        """Reads the device (`Person.read`)."""
        super().read()
        if self._device is None and time.monotonic() >= self._next_attempt:
            self._next_attempt = time.monotonic() + _REOPEN_S
            self._device = self._open()
            if self._device is not None:
                self.failure = ""
                log.info("the %s is back: %s", self._kind, self._device.path)
        if self._device is None:
            return
        try:
            self._device.read()
        except DeviceLost as error:
            self._release_control(error)
            return
        clicked_buttons = self._device.take_clicks()
        self.signal(*(button in clicked_buttons for button in self._signal_buttons))
        self.in_control = self.leads(self._device)

    def _release_control(self, error: DeviceLost) -> None:
        assert self._device is not None
        with contextlib.suppress(OSError):
            self._device.close()
        self._device, self._next_attempt = None, time.monotonic() + _REOPEN_S
        if self.in_control:
            self.failure = f"the {self._kind} disconnected while a person led ({error})"
        else:
            log.warning("the %s disconnected (%s); the policy leads until it is back", self._kind, error)
        self.in_control = False

    @abstractmethod
    def leads(self, device: HidDevice) -> bool:
        """Returns whether the person leads in this state of the device."""

    def moves(self) -> list[tuple[int, float]]:
        """Returns the moves of axes and pressed buttons (`Person.moves`)."""
        device = self._device
        if device is None:
            return []
        deflections = {name: device.axes[name] for name in self._axes}
        axis_moves = [
            (component, move_amount * deflections[name])
            for name, (component, move_amount) in self._axes.items()
            if abs(deflections[name]) > _DEAD_ZONE
        ]
        return axis_moves + [button_move for button, button_move in self._buttons.items() if button in device.pressed]

    def close(self) -> None:
        """Closes device and window."""
        super().close()
        if self._device is not None:
            self._device.close()


class Gamepad(DevicePerson):
    """Intervention by gamepad: sticks and buttons move, and one button gives control while it is pressed.

    Args:
        sticks: For each axis, by name (x, y, z, rx, ry, rz): index of the action component, and its change at full deflection.
        buttons: For each button, by number from 1: index of the action component, and its change.
        take: Button that gives control.
        pause, success, failure: Buttons that pause and resume, mark a success and mark a failure; None for no button.
        device, descriptor, hz, size, window: See `DevicePerson`.
    """

    def __init__(
        self, sticks: Mapping[str, Move] = _STICKS, buttons: Mapping[Any, Move] = _GAMEPAD_BUTTONS, take: int = 6,
        pause: int | None = 10, success: int | None = 4, failure: int | None = 3, device: str | None = None,
        descriptor: str | None = None, hz: float = 10.0, size: int = 512, window: bool | None = None,
    ) -> None:  # fmt: skip
        self._control_button = take
        signal_buttons = (pause, success, failure)
        super().__init__("gamepad", GAMEPAD, device, descriptor, sticks, buttons, signal_buttons, hz, size, window)

    def leads(self, device: HidDevice) -> bool:
        """Returns whether the button that gives control is pressed (`DevicePerson.leads`)."""
        return self._control_button in device.pressed


class SpaceMouse(DevicePerson):
    """Intervention by SpaceMouse: the person leads while the puck is moved or a moving button is pressed, and a moment longer.

    Args:
        axes: For each axis, by name (x, y, z, rx, ry, rz): index of the action component, and its change at full deflection.
        buttons: For each button, by number from 1: index of the action component, and its change.
        linger_s: Seconds of rest after which the policy leads again.
        pause, success, failure: Buttons that pause and resume, mark a success and mark a failure; None for no button.
        device, descriptor, hz, size, window: See `DevicePerson`.
    """

    def __init__(
        self, axes: Mapping[str, Move] = _PUCK, buttons: Mapping[Any, Move] = _PUCK_BUTTONS, linger_s: float = 0.3,
        pause: int | None = None, success: int | None = None, failure: int | None = None, device: str | None = None,
        descriptor: str | None = None, hz: float = 10.0, size: int = 512, window: bool | None = None,
    ) -> None:  # fmt: skip
        self._linger_s, self._moved_at = linger_s, -math.inf
        signal_buttons = (pause, success, failure)
        super().__init__("spacemouse", SPACEMOUSE, device, descriptor, axes, buttons, signal_buttons, hz, size, window)

    def leads(self, device: HidDevice) -> bool:
        """Returns whether the puck is moved, or was until a moment ago (`DevicePerson.leads`)."""
        is_moved = any(abs(deflection) > _DEAD_ZONE for deflection in device.axes.values())
        is_moved |= bool(device.pressed & self._buttons.keys())
        now = time.monotonic()
        self._moved_at = now if is_moved else self._moved_at
        return now - self._moved_at < self._linger_s


def _check_window(hz: float, side_length: int) -> None:
    if hz <= 0 or side_length < 1:
        raise ConfigError(f"--intervene: hz is {hz} and size {side_length}; both must be above 0")


def _index_moves(moves_by_control: Mapping[Any, Move]) -> dict[Any, tuple[int, float]]:
    return {
        control: (int(control_move[0]), float(control_move[1])) for control, control_move in moves_by_control.items()
    }
