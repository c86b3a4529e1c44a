"""Display of a policy's episodes: a window where a display is, a video where none is."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlhpc.embodied.envs.base import VectorEnv
from rlhpc.embodied.envs.gymnasium_env import GymnasiumVectorEnv
from rlhpc.embodied.evaluation.window import EnvWindow, has_display, play_checkpoint
from rlhpc.runs.task_parts import PlayOptions
from rlhpc.runtime.errors import ConfigError
from tests.extras import need_extra
from tests.unit.embodied.evaluation.saved_policies import load, save_policy

need_extra("embodied")

import pygame

DISPLAYS = ("DISPLAY", "WAYLAND_DISPLAY", "SDL_VIDEODRIVER")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_policy(tmp_path_factory.mktemp("window") / "pole")


@pytest.fixture(autouse=True)
def no_display(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in DISPLAYS:
        monkeypatch.delenv(name, raising=False)
    pygame.display.quit()
    yield
    pygame.display.quit()


@pytest.fixture
def titles(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Titles of the window, on SDL's display without a screen, where no frame waits for its time."""
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")
    shown: list[str] = []
    monkeypatch.setattr(pygame.display, "set_caption", shown.append)
    return shown


def test_a_video_is_written_without_a_display(checkpoint: Path, tmp_path: Path) -> None:
    import av

    video = tmp_path / "video.mp4"
    result = play_checkpoint(checkpoint, load(), PlayOptions(video, episodes=2, seed=3))
    assert (result["episodes"], result["seed"], result["video"]) == (2, 3, str(video))
    with av.open(str(video)) as container:
        assert sum(1 for _ in container.decode(video=0)) == 7 + 10


def test_a_window_shows_one_slot_and_the_return_so_far(checkpoint: Path, tmp_path: Path, titles: list[str]) -> None:
    cfg = load("env.eval.video_fps=1000")
    result = play_checkpoint(checkpoint, cfg, PlayOptions(tmp_path / "video.mp4", episodes=2))
    assert result["episodes"] == 2 and "video" not in result and not (tmp_path / "video.mp4").exists()
    assert len(titles) == 14 and not pygame.display.get_init()
    assert (titles[0], titles[-1]) == ("CartPole-v1: episode 1, return 0.0", "CartPole-v1: episode 2, return 6.0")


@pytest.mark.parametrize("key", [None, pygame.K_ESCAPE, pygame.K_q])
def test_closing_the_window_ends_the_episodes(
    checkpoint: Path, tmp_path: Path, titles: list[str], monkeypatch: pytest.MonkeyPatch, key: int | None
) -> None:
    flip = pygame.display.flip

    def close() -> None:
        flip()
        event = pygame.event.Event(pygame.QUIT) if key is None else pygame.event.Event(pygame.KEYDOWN, key=key)
        pygame.event.post(event)

    monkeypatch.setattr(pygame.display, "flip", close)
    assert play_checkpoint(checkpoint, load(), PlayOptions(tmp_path / "video.mp4", episodes=1000)) == {}
    assert len(titles) == 1 and not pygame.display.get_init()


@pytest.mark.parametrize("display", [False, True])
def test_an_environment_without_pictures_is_refused(
    checkpoint: Path, tmp_path: Path, display: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if display:
        monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")
    monkeypatch.setattr(GymnasiumVectorEnv, "render", VectorEnv.render)
    with pytest.raises(ConfigError, match=r"CartPole-v1 cannot be rendered here, so there is nothing to show"):
        play_checkpoint(checkpoint, load(), PlayOptions(tmp_path / "video.mp4", episodes=1))


def test_an_environment_that_does_not_fit_is_named(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"env.eval.env_id=Acrobot-v1 does not fit"):
        play_checkpoint(checkpoint, load("env.eval.env_id=Acrobot-v1"), PlayOptions(tmp_path / "video.mp4"))


def test_a_small_picture_is_enlarged(titles: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    class Small:
        def render(self, slots: list[int]) -> Any:
            return np.zeros((len(slots), 100, 200, 3), np.uint8)

    sizes: list[tuple[int, int]] = []
    set_mode = pygame.display.set_mode
    monkeypatch.setattr(pygame.display, "set_mode", lambda size: (sizes.append(size), set_mode(size))[1])
    assert has_display()
    window = EnvWindow(Small(), "small", 1000)  # type: ignore[arg-type]
    window.on_step_start(None, np.zeros(1))
    window.close()
    assert sizes == [(1000, 500)], "by the same whole factor, and at least 480 pixels"


def test_a_display_that_cannot_be_opened_is_none(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert not has_display()
    monkeypatch.setenv("SDL_VIDEODRIVER", "no_such_driver")
    assert not has_display() and "a video is made" in capsys.readouterr().err
