"""Who watches a policy play, and when who acts."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from rlhpc.embodied.evaluation.intervention import Gamepad, Gated, Keyboard, Person, find_intervention
from rlhpc.runtime.errors import ConfigError


def nothing(obs: Any) -> np.ndarray:
    """An expert who does not move."""
    return np.zeros((len(obs), 2))


def test_a_script_lets_small_differences_pass_reacts_late_and_leads_for_a_while() -> None:
    script = find_intervention("{scripted: {expert: '" + __name__ + ":nothing', apart: 0.5, patience: 2, hold: 3}}")
    far, near = [0.0, 0.9], [0.4, 0.4]
    led = []
    for step in (far, near, far, far, near, near, near, far, far, far, far, near):
        chosen, taken = script.act(np.zeros((2, 1)), np.float32([step, near]), None)
        np.testing.assert_array_equal(chosen, np.float32([[0, 0] if taken[0] else step, near]))
        assert not taken[1]
        led.append(int(taken[0]))
    assert led == [0, 0, 0, 1, 1, 1, 0, 0, 1, 1, 1, 0]
    script.act(np.zeros((2, 1)), np.float32([far, near]), None)
    script.end_episodes(np.array([True, False]))  # what was seen of an episode does not count in the next
    assert not script.act(np.zeros((2, 1)), np.float32([far, near]), None)[1].any()


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("keybord", "--intervene is 'keybord', which is unknown; did you mean 'keyboard'"),
        ("{scripted: {apart: 1}}", r"refuses {'apart': 1}: .*'expert'"),
        ("{scripted: {expert: 'a.b:c'}}", r"scripted\.expert is 'a.b:c', which cannot be imported"),
        ("{scripted: {expert: 'math:sin', patience: 0}}", "patience 0"),
        ("[1", "which is no name and no mapping"),
        ("{keyboard: {hz: 0}}", "hz is 0"),
        ("{keyboard: {keys: {nokey: [0, 1]}}}", "keys are named as pygame names them"),
    ],
)
def test_what_is_said_of_a_mistake(given: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        find_intervention(given)


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


def test_a_gamepad(pygame: Any) -> None:
    person = Gamepad(hz=1000, sticks={0: (0, 0.5)}, buttons={2: (3, -1.0)})
    axis, down, up = pygame.JOYAXISMOTION, pygame.JOYBUTTONDOWN, pygame.JOYBUTTONUP
    assert step(person, pygame, (axis, {"axis": 0, "value": 1.0})) is None
    assert step(person, pygame, (down, {"button": 5})) == [0.5, 0, 0, 0]
    assert step(person, pygame, (axis, {"axis": 0, "value": 0.05}), (down, {"button": 2})) == [0, 0, 0, -1]
    assert step(person, pygame, (up, {"button": 5})) is None


class Chunks:
    """A policy of chunks of two actions."""

    def predict_action_batch(
        self, obs: Any, mode: str = "eval", noise: Any = None
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        """Zeros."""
        return torch.zeros(len(obs), 2, 1), {}


def test_who_can_be_watched(pygame: Any) -> None:
    from omegaconf import OmegaConf

    from rlhpc.embodied.config import EnvSideConfig
    from rlhpc.embodied.envs import make_env

    env = make_env(OmegaConf.structured(EnvSideConfig(env_id="Pendulum-v1")), 2)
    with pytest.raises(ConfigError, match=r"one slot at a time: set env\.eval\.num_envs=1 \(it is 2\)"):
        Gated(Chunks(), Keyboard(), env)
    script = find_intervention("{scripted: {expert: '" + __name__ + ":nothing'}}")
    with pytest.raises(ConfigError, match="chunks of 2"):
        Gated(Chunks(), script, env).predict_action_batch(torch.zeros(2, 3))
