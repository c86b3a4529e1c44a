"""Interventions: a person or a script watches a policy and takes control when the policy fails (human-gated DAgger, Kelly et
al. 2019).
"""

from __future__ import annotations

import logging
import os
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from rlhpc.embodied.envs.base import VectorEnv
from rlhpc.embodied.envs.observations import as_arrays
from rlhpc.embodied.envs.wrappers import parse_entry
from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.files import read_yaml
from rlhpc.runtime.former_names import former_members
from rlhpc.runtime.plugins import Registry, load_attribute


@former_members(ended="end_episodes")
class Intervention(ABC):
    """Observer of a policy that may replace the policy's actions at every step.

    Attributes:
        one_slot: True if the intervention supports only a single slot.
        needs_pictures: True if the intervention needs rendered images of the first slot.
    """

    one_slot = False
    needs_pictures = False

    @abstractmethod
    def act(self, obs: Any, actions: np.ndarray, picture: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
        """Chooses the actions of this step.

        Args:
            obs: Observations `[N, ...]`, or a dict of such arrays.
            actions: The policy's actions, `[N, dim]`.
            picture: Image of the first slot, uint8 `[H, W, 3]`, if `needs_pictures` and the environment can be rendered.

        Returns:
            Actions `[N, dim]`, and a mask of the slots in which the policy's actions were replaced, bool `[N]`.
        """

    def end_episodes(self, slots: np.ndarray) -> None:  # noqa: B027 (most need not know)
        """Handles the end of episodes; `slots` (bool `[N]`) marks the slots in which an episode ended."""

    def close(self) -> None:  # noqa: B027 (most have nothing to free)
        """Frees resources at the end."""


INTERVENTIONS: Registry[Any] = Registry(
    "intervention", "--intervene", "rlhpc.interventions",
    {
        "gamepad": "rlhpc.embodied.evaluation.intervention:Gamepad",
        "keyboard": "rlhpc.embodied.evaluation.intervention:Keyboard",
        "scripted": "rlhpc.embodied.evaluation.intervention:Scripted",
    },
)  # fmt: skip
register_intervention = INTERVENTIONS.register


def named_intervention(text: str) -> tuple[str, Any, dict[str, Any]]:
    """Parses a name, or a mapping from a name to settings, such as `{scripted: {expert: module:function}}`.

    Returns:
        The name, the factory that is called with the settings, and the settings.

    Raises:
        ConfigError: The name is unknown.
    """
    try:
        content = read_yaml(text)
    except Exception as error:  # whatever the YAML parser has against it
        raise ConfigError(
            f"--intervene is {text!r}, which is no name and no mapping of one to settings: {error}"
        ) from None
    name, settings = parse_entry(content, "--intervene")
    return name, INTERVENTIONS.find(name), settings


def find_intervention(text: str) -> Intervention:
    """Builds the intervention from a text (see `named_intervention`). Interventions by a person open a window.

    Raises:
        ConfigError: The intervention is unknown, or rejects its settings.
    """
    name, factory, settings = named_intervention(text)
    try:
        intervention: Intervention = factory(**settings)
    except TypeError as error:
        raise ConfigError(f"--intervene is {name!r}, which refuses {settings}: {error}") from None
    return intervention


def require_single(chunk: int) -> None:
    """Checks that a policy acts in single actions.

    Raises:
        ConfigError: The policy acts in chunks.
    """
    if chunk != 1:
        raise ConfigError(
            f"the policy acts in chunks of {chunk} (actor.model.num_action_chunks); people take over between single actions: "
            "allowed is 1"
        )


class Gated:
    """Policy whose actions an intervention may replace.

    Args:
        policy: Policy of single actions.
        intervention: Observer that may take over.
        env: Environment in which the policy acts.

    Attributes:
        intervened: Mask of the slots in which the intervention replaced the policy's last actions, bool `[N]`.
    """

    def __init__(self, policy: Any, intervention: Intervention, env: VectorEnv) -> None:
        if intervention.one_slot and env.num_envs > 1:
            raise ConfigError(f"a person watches one slot at a time: set env.eval.num_envs=1 (it is {env.num_envs})")
        self._policy, self.intervention, self._env = policy, intervention, env
        self.intervened = np.zeros(env.num_envs, bool)

    def predict_action_batch(
        self, obs: Any, mode: str = "eval", noise: Any = None
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        """Returns actions `[N, 1, dim]`, like a policy."""
        actions, extras = self._policy.predict_action_batch(obs, mode=mode, noise=noise)
        require_single(actions.shape[1])
        frames = self._env.render([0]) if self.intervention.needs_pictures else None
        frame = None if frames is None else frames[0]
        executed_actions, self.intervened = self.intervention.act(as_arrays(obs), actions[:, 0].cpu().numpy(), frame)
        return torch.from_numpy(np.asarray(executed_actions))[:, None], extras


__all__ = ["INTERVENTIONS", "Gated", "Intervention", "find_intervention", "named_intervention", "register_intervention"]


log = logging.getLogger(__name__)

#: Effect of a key, a button or a stick: index of the action component, and its change.
Move = Sequence[float]
_KEYS = {"up": (0, 1.0), "down": (0, -1.0), "left": (1, 1.0), "right": (1, -1.0),
         "w": (2, 1.0), "s": (2, -1.0), "c": (3, 1.0), "o": (3, -1.0)}  # fmt: skip
_STICKS = {1: (0, -1.0), 0: (1, -1.0), 4: (2, -1.0)}
_BUTTONS = {0: (3, 1.0), 1: (3, -1.0)}
#: Maximum deflection of a stick that counts as rest.
_DEAD_ZONE = 0.1
#: SDL drivers without a visible window.
_HEADLESS_DRIVERS = ("dummy", "offscreen")
#: Environment variables that name the display on Linux.
_SCREENS = ("DISPLAY", "WAYLAND_DISPLAY", "SDL_VIDEODRIVER")
_SCREEN = "a person needs one: log in with it (ssh -X), or take scripted"


class Person(Intervention):
    """Intervention by a person, who watches the environment in a window and may take control.

    Args:
        hz: Maximum number of steps per second.
        size: Width and height of the window, in pixels.
    """

    one_slot = True
    needs_pictures = True

    def __init__(self, hz: float = 10.0, size: int = 512) -> None:
        import pygame

        if hz <= 0 or size < 1:
            raise ConfigError(f"--intervene: hz is {hz} and size {size}; both must be above 0")
        self._pygame, self._period, self._next_step_time = pygame, 1.0 / hz, 0.0
        # SDL would try all its drivers, and the libraries of some abort the process if there is no screen.
        if sys.platform == "linux" and not any(os.environ.get(name) for name in _SCREENS):
            raise ConfigError(f"--intervene: there is no screen (DISPLAY is not set); {_SCREEN}")
        try:
            pygame.init()
            self._window = pygame.display.set_mode((size, size))
        except pygame.error as error:
            raise ConfigError(f"--intervene: no window can be opened ({error}); {_SCREEN}") from None
        if (driver := pygame.display.get_driver()) in _HEADLESS_DRIVERS and os.environ.get("SDL_VIDEODRIVER") != driver:
            raise ConfigError(f"--intervene: there is no screen (DISPLAY is not set); {_SCREEN}")
        self.in_control = False

    @abstractmethod
    def handle_event(self, event: Any) -> None:
        """Handles a keyboard or gamepad event."""

    @abstractmethod
    def moves(self) -> list[tuple[int, float]]:
        """Returns the person's current moves: pairs of action component index and change."""

    def act(self, obs: Any, actions: np.ndarray, picture: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
        """Chooses the actions of this step (`Intervention.act`)."""
        del obs
        self._show_picture(picture)
        time.sleep(max(0.0, self._next_step_time - time.monotonic()))
        self._next_step_time = time.monotonic() + self._period
        for event in self._pygame.event.get():
            if event.type == self._pygame.QUIT:
                raise KeyboardInterrupt
            self.handle_event(event)
        if not self.in_control:
            return actions, np.zeros(1, bool)
        person_actions = np.zeros_like(actions)
        for axis, amount in self.moves():
            if axis < person_actions.shape[1]:
                person_actions[0, axis] += amount
        return person_actions, np.ones(1, bool)

    def _show_picture(self, picture: np.ndarray | None) -> None:
        pygame = self._pygame
        if picture is not None:
            pygame.transform.scale(
                pygame.surfarray.make_surface(picture.swapaxes(0, 1)), self._window.get_size(), self._window
            )
        pygame.display.set_caption("you lead" if self.in_control else "the policy leads")
        pygame.display.flip()

    def close(self) -> None:
        """Closes the window."""
        self._pygame.quit()


class Keyboard(Person):
    """Intervention by keyboard: keys move while they are pressed, and one key toggles control.

    Args:
        keys: For each key, by pygame's name: index of the action component, and its change.
        take: Key that toggles control.
        hz, size: Arguments of `Person`.
    """

    def __init__(
        self, keys: Mapping[str, Move] = _KEYS, take: str = "space", hz: float = 10.0, size: int = 512
    ) -> None:
        super().__init__(hz, size)
        try:
            self._keys = {
                self._pygame.key.key_code(name): (int(move[0]), float(move[1])) for name, move in keys.items()
            }
            self._control_key = self._pygame.key.key_code(take)
        except ValueError as error:
            raise ConfigError(
                f"--intervene keyboard: {error}; keys are named as pygame names them: left, space, a"
            ) from None
        self._pressed: set[int] = set()

    def handle_event(self, event: Any) -> None:
        """Handles a key (`Person.handle_event`)."""
        if event.type == self._pygame.KEYDOWN:
            self._pressed.add(event.key)
            self.in_control ^= event.key == self._control_key
        elif event.type == self._pygame.KEYUP:
            self._pressed.discard(event.key)

    def moves(self) -> list[tuple[int, float]]:
        """Returns the moves of the pressed keys (`Person.moves`)."""
        return [move for key, move in self._keys.items() if key in self._pressed]


class Gamepad(Person):
    """Intervention by gamepad: sticks and buttons move, and one button gives control while it is pressed.

    Args:
        sticks: For each axis, by index: index of the action component, and its change at full deflection.
        buttons: For each button, by index: index of the action component, and its change.
        take: Button that gives control.
        hz, size: Arguments of `Person`.
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
        self._control_key, self._deflections, self._pressed = take, dict.fromkeys(self._sticks, 0.0), set[int]()

    def handle_event(self, event: Any) -> None:
        """Handles a stick or a button (`Person.handle_event`)."""
        if event.type == self._pygame.JOYDEVICEADDED:
            self._devices.append(self._pygame.joystick.Joystick(event.device_index))
        elif event.type == self._pygame.JOYAXISMOTION and event.axis in self._deflections:
            self._deflections[event.axis] = event.value if abs(event.value) > _DEAD_ZONE else 0.0
        elif event.type == self._pygame.JOYBUTTONDOWN:
            self._pressed.add(event.button)
        elif event.type == self._pygame.JOYBUTTONUP:
            self._pressed.discard(event.button)
        self.in_control = self._control_key in self._pressed

    def moves(self) -> list[tuple[int, float]]:
        """Returns the moves of sticks and pressed buttons (`Person.moves`)."""
        stick_moves = [
            (action_axis, amount * self._deflections[axis]) for axis, (action_axis, amount) in self._sticks.items()
        ]
        return stick_moves + [move for button, move in self._buttons.items() if button in self._pressed]


class Scripted(Intervention):
    """Scripted intervention that imitates a person. It tolerates small differences, reacts with a delay, and keeps control
    for a minimum time.

    Args:
        expert: Function `obs [N, ...] -> actions [N, dim]`, as `module:function`.
        apart: Maximum tolerated difference of an action component between policy and expert.
        patience: Number of consecutive steps with a larger difference before the expert takes over.
        hold: Minimum number of steps in control. Afterwards the expert acts until the policy's actions are close again.
    """

    def __init__(self, expert: str, apart: float = 0.5, patience: int = 3, hold: int = 10) -> None:
        if apart < 0 or patience < 1 or hold < 1:
            raise ConfigError(
                f"--intervene scripted: apart is {apart}, patience {patience}, hold {hold}; at least 0, 1 and 1 are wanted"
            )
        self._expert = load_attribute(expert, "--intervene scripted.expert")
        self._apart, self._patience, self._hold = apart, patience, hold
        self._steps_apart = self._steps_in_control = np.zeros(0, np.int64)

    def act(self, obs: Any, actions: np.ndarray, picture: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
        """Chooses the actions of this step (`Intervention.act`)."""
        del picture
        if len(self._steps_in_control) != len(actions):
            self._steps_apart, self._steps_in_control = (
                np.zeros(len(actions), np.int64),
                np.zeros(len(actions), np.int64),
            )
        expert_actions = np.asarray(self._expert(obs), actions.dtype).reshape(actions.shape)
        is_far = np.abs(expert_actions - actions).max(1) > self._apart
        self._steps_apart = np.where(is_far, self._steps_apart + 1, 0)
        was_in_control = self._steps_in_control > 0
        in_control = np.where(
            was_in_control, is_far | (self._steps_in_control < self._hold), self._steps_apart >= self._patience
        )
        self._steps_in_control = np.where(in_control, self._steps_in_control + 1, 0)
        return np.where(in_control[:, None], expert_actions, actions), in_control

    def end_episodes(self, slots: np.ndarray) -> None:
        """Resets the counters of slots whose episode ended (`Intervention.end_episodes`)."""
        self._steps_apart, self._steps_in_control = (
            np.where(slots, 0, self._steps_apart),
            np.where(slots, 0, self._steps_in_control),
        )
