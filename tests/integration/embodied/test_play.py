"""`rlhpc play` of a policy in a simulator: a video where there is no display, a window where there is one."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pygame
import pytest
import yaml

from rlhpc import cli
from rlhpc.embodied.envs.base import VectorEnv
from tests.extras import need_extra
from tests.stderr import error_lines

CONFIG: dict[str, Any] = {
    "runner": {"name": "pole", "max_steps": 1},
    "cluster": {"component_placement": dict.fromkeys(("actor", "rollout", "env"), "0")},
    "algorithm": {"rollout_steps": 32},
    "env": {"train": {"env_id": "CartPole-v1"}, "eval": {"max_episode_steps": 7}},
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    need_extra("embodied")
    folder = tmp_path_factory.mktemp("play")
    (folder / "run.yaml").write_text(yaml.safe_dump(CONFIG))
    assert cli.main(["train", str(folder / "run.yaml"), f"runner.run_dir={folder}"]) == 0
    return folder / "pole"


@pytest.fixture(autouse=True)
def no_display(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "SDL_VIDEODRIVER"):
        monkeypatch.delenv(name, raising=False)


def pictures(video: Path) -> int:
    import av

    with av.open(str(video)) as container:
        return sum(1 for _ in container.decode(video=0))


def test_a_video_without_a_display(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["play", str(run), "--episodes", "2", "--seed", "3"]) == 0
    video = run / "play" / "global_step_1.mp4"
    said = capsys.readouterr().out
    assert said.startswith("global_step_1: mean return 7.0 over 2 episodes") and str(video) in said
    assert pictures(video) == 7 + 10  # a picture a step, and half a second of the end
    checkpoint = run / "checkpoints" / "global_step_1"
    other = tmp_path / "other.mp4"
    words = ["play", "--checkpoint", str(checkpoint), "env.eval.max_episode_steps=5", "--episodes", "1"]
    assert cli.main([*words, "--output", str(other)]) == 0
    assert pictures(other) == 5 + 10


def test_a_window_where_there_is_a_display(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On SDL's display that nobody sees."""
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")
    titles, sizes = [], []
    set_caption, set_mode = pygame.display.set_caption, pygame.display.set_mode
    monkeypatch.setattr(pygame.display, "set_caption", lambda text: (titles.append(text), set_caption(text)))
    monkeypatch.setattr(pygame.display, "set_mode", lambda size: (sizes.append(size), set_mode(size))[1])
    assert cli.main(["play", str(run), "--episodes", "2"]) == 0
    assert "→" not in capsys.readouterr().out
    assert len(sizes) == 1 and min(sizes[0]) >= 256 and len(titles) == 14
    assert titles[0] == "CartPole-v1: episode 1, return 0.0" and titles[-1] == "CartPole-v1: episode 2, return 6.0"
    assert not pygame.display.get_init()


def test_a_window_that_is_closed_ends_it(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")
    flip, shown = pygame.display.flip, []

    def close() -> None:
        flip()
        shown.append(1)
        pygame.event.post(pygame.event.Event(pygame.QUIT))

    monkeypatch.setattr(pygame.display, "flip", close)
    assert cli.main(["play", str(run), "--episodes", "1000"]) == 0
    assert len(shown) == 1 and capsys.readouterr().out == ""


@pytest.mark.parametrize(("words", "said"), [
    (["--system", "x"], "--system and --max-tokens are for language models"),
    (["--episodes", "0"], "--episodes is 0; it must be at least 1"),
    (["--seed", "-1"], "--seed is -1"),
    (["--step", "7"], "no checkpoint of step 7; there are: 1"),
    (["--output", "/"], "a folder; name a file in it"),
    (["env.eval.max_episode_stepz=1"], "did you mean env.eval.max_episode_steps?"),
])  # fmt: skip
def test_what_is_wrong_is_said_once(run: Path, words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["play", str(run), *words]) == 2
    (line,) = error_lines(capsys.readouterr().err)
    assert said in line


@pytest.mark.parametrize("why", ["nothing to render", "no PyAV"])
def test_nothing_to_show_is_one_sentence(
    run: Path, why: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if why == "no PyAV":
        monkeypatch.setitem(sys.modules, "av", None)
    else:
        from rlhpc.embodied.envs.gymnasium_env import GymnasiumVectorEnv

        monkeypatch.setattr(GymnasiumVectorEnv, "render", VectorEnv.render)
    assert cli.main(["play", str(run), "--episodes", "1"]) == 2
    (line,) = error_lines(capsys.readouterr().err)
    assert ("PyAV" if why == "no PyAV" else "CartPole-v1 cannot be rendered here") in line
