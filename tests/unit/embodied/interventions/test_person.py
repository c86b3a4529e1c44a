"""Keyboard, gamepad and SpaceMouse."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlhpc.embodied.interventions.person import Gamepad, Keyboard, Person, SpaceMouse
from rlhpc.embodied.interventions.sources import Mark, Signals
from rlhpc.runtime.errors import ConfigError
from tests.unit.embodied.interventions.hid_files import attached


def test_a_person_needs_a_screen(monkeypatch: pytest.MonkeyPatch) -> None:
    """No window is tried: SDL has drivers that abort the process where there is no screen."""
    import pygame

    for name in ("DISPLAY", "WAYLAND_DISPLAY", "SDL_VIDEODRIVER"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pygame.display, "set_mode", lambda *_: os.abort())
    with pytest.raises(ConfigError, match=r"a person needs one: log in with it \(ssh -X\), or take scripted"):
        Keyboard()


@pytest.fixture
def pygame() -> Iterator[Any]:
    """SDL on a screen that nobody sees, as in all tests."""
    import pygame

    yield pygame
    pygame.quit()


def step(person: Person, pygame: Any, *events: Any) -> list[float] | None:
    """One step of a policy that would do 9 everywhere, after these events; None where it acted."""
    for kind, about in events:
        pygame.event.post(pygame.event.Event(kind, about))
    chosen, taken = person.act(None, np.full((1, 4), 9, np.float32), np.zeros((8, 8, 3), np.uint8))
    return chosen[0].tolist() if taken[0] else None


def test_no_test_opens_a_window(pygame: Any) -> None:
    pygame.display.init()
    assert pygame.display.get_driver() == "dummy"


def test_keys(pygame: Any) -> None:
    person = Keyboard(hz=1000)
    down, up, space = pygame.KEYDOWN, pygame.KEYUP, {"key": pygame.K_SPACE}
    assert step(person, pygame, (down, {"key": pygame.K_w})) is None  # the policy leads until somebody takes over
    assert step(person, pygame, (down, space), (up, space)) == [0, 0, 1, 0]
    both = [(down, {"key": pygame.K_RIGHT}), (down, {"key": pygame.K_c})]
    assert step(person, pygame, (up, {"key": pygame.K_w}), *both) == [0, -1, 0, 1]
    assert step(person, pygame, (up, {"key": pygame.K_RIGHT})) == [0, 0, 0, 1]
    assert step(person, pygame, (down, space), (up, space)) is None
    with pytest.raises(KeyboardInterrupt):
        step(person, pygame, (pygame.QUIT, {}))


def test_keys_pause_and_mark(pygame: Any) -> None:
    person = Keyboard(hz=1000)

    def after(*keys: int) -> Signals:
        for key in keys:
            pygame.event.post(pygame.event.Event(pygame.KEYDOWN, {"key": key}))
            pygame.event.post(pygame.event.Event(pygame.KEYUP, {"key": key}))
        return person.signals()

    assert after() == Signals()
    assert after(pygame.K_p) == Signals(Mark.NONE, True)
    assert after() == Signals(Mark.NONE, True)
    assert after(pygame.K_RETURN) == Signals(Mark.SUCCESS, True)
    assert after(pygame.K_p, pygame.K_BACKSPACE) == Signals(Mark.FAILURE)
    assert after() == Signals(), "a mark counts once"


def policy_of_nines(person: Person) -> list[float] | None:
    """Returns the actions of a step in which the policy would do 9 everywhere; None if the policy acted."""
    chosen, is_led = person.act(None, np.full((1, 4), 9, np.float32), None)
    return chosen[0].tolist() if is_led[0] else None


def test_a_gamepad(tmp_path: Path) -> None:
    with attached("gamepad", tmp_path) as pipe:
        options: dict[str, Any] = {"device": str(pipe.path), "descriptor": str(pipe.descriptor), "window": False}
        person = Gamepad(**options)
        assert person.one_slot and not person.needs_pictures
        pipe.send()
        assert policy_of_nines(person) is None
        pipe.send()
        assert policy_of_nines(person) == [0, 0, 0, 0]
        pipe.send()
        assert policy_of_nines(person) == [1, 0, 0, 0], "the left stick is up"
        pipe.send()
        assert policy_of_nines(person) == [0, 0, 0, 1], "in the dead zone, with a button"
        assert person.signals() == Signals()
        pipe.send()
        assert policy_of_nines(person) is None
        assert person.signals() == Signals(Mark.SUCCESS)
        pipe.send(2)
        assert person.signals() == Signals(Mark.NONE, True)
        pipe.send()
        assert person.signals() == Signals(Mark.NONE, True), "a pause lasts until the button is pressed again"
        person.close()
        with pytest.raises(ConfigError, match=r"has no axis 'dial'; it has rx, ry, rz, x, y, z"):
            Gamepad(sticks={"dial": (0, 1.0)}, **options)


def test_a_spacemouse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("rlhpc.embodied.interventions.person.time.monotonic", lambda: now[0])
    with attached("spacemouse", tmp_path) as pipe:
        person = SpaceMouse(device=str(pipe.path), descriptor=str(pipe.descriptor), window=False, linger_s=0.3)
        pipe.send(2)
        assert policy_of_nines(person) is None
        pipe.send()
        assert policy_of_nines(person) == [-0.5, -1, 0, 0], "towards the person and to the right"
        pipe.send(2)
        assert policy_of_nines(person) == [-0.5, -1, 0, 1]
        pipe.send(2)
        assert policy_of_nines(person) == [1, 0, 1, 0]
        pipe.send(2)
        now[0] = 0.2
        assert policy_of_nines(person) == [0, 0, 0, 0], "the person still leads, for a moment"
        now[0] = 0.4
        assert policy_of_nines(person) is None
        person.close()


def test_a_device_that_disconnects_is_opened_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = [0.0]
    monkeypatch.setattr("rlhpc.embodied.interventions.person.time.monotonic", lambda: now[0])
    with attached("gamepad", tmp_path) as pipe, caplog.at_level(logging.INFO):
        person = Gamepad(device=str(pipe.path), descriptor=str(pipe.descriptor), window=False)
        pipe.send(2)
        assert policy_of_nines(person) == [0, 0, 0, 0]
        pipe.detach()
        pipe.path.unlink()
        for _ in range(5):
            now[0] += 0.7
            assert policy_of_nines(person) is None and "disconnected while a person led" in person.failure
        assert not caplog.records, "the environment says it"
        pipe.attach()
        pipe.send()
        now[0] += 2
        assert policy_of_nines(person) == [1, 0, 0, 0] and person.failure == ""
        pipe.send(2)
        policy_of_nines(person)
        pipe.detach()
        assert policy_of_nines(person) is None and person.failure == "", "the policy led anyway"
