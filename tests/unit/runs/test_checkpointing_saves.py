"""Checkpoint saves of a run: when training goes on, when a checkpoint appears, and when one is dropped."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlhpc.checkpoint import CheckpointWriter, read_manifest
from rlhpc.checkpoint.async_writer import SavingWorker
from rlhpc.jobs.paths import RunPaths
from rlhpc.runs import checkpointing
from rlhpc.runs.checkpointing import Saves, merge_checksums
from rlhpc.runtime.errors import RlhpcError, StaleGeneration


class Handle:
    """Pending call of a group."""

    def __init__(self, answer: Callable[[], Any], done: Callable[[], bool] = lambda: True) -> None:
        self._answer, self.done = answer, done

    def wait(self, timeout: float) -> Any:
        return self._answer()


class Group:
    """Group of two ranks that write a file each; `slow` ones report it only when they are asked for it later."""

    worker_class: type = SavingWorker

    def __init__(self, name: str, slow: bool = False) -> None:
        self.name, self.slow, self.busy, self.error = name, slow, False, False
        self.folder, self.modes = Path(), list[bool]()

    def _sums(self) -> list[Any]:
        return [{f"{self.name}-{rank}.pt": (len(self.name), "0" * 32)} for rank in range(2)]

    def begin_save(self, folder: str, beside: bool) -> Handle:
        self.folder = Path(folder)
        self.modes.append(beside)
        for rank in range(2):
            (self.folder / f"{self.name}-{rank}.pt").write_text(self.name)
        return Handle(lambda: [self._sums()[0], None] if self.slow else self._sums())

    def saved(self, wait: bool) -> Handle:
        def answer() -> list[Any]:
            if self.error:
                raise RlhpcError("a rank was lost")
            return self._sums() if wait or not self.slow else [self._sums()[0], None]

        return Handle(answer, lambda: not self.busy)


class PlainGroup:
    """Group whose worker class only has `save`."""

    worker_class: type = object

    def __init__(self) -> None:
        self.folders: list[str] = []

    def save(self, folder: str) -> Handle:
        self.folders.append(folder)
        (Path(folder) / "plain.pt").write_text("plain")
        return Handle(lambda: [None])


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    """Returns the paths of a run."""
    return RunPaths.from_run_dir(tmp_path, "run")


@pytest.fixture(autouse=True)
def generation(monkeypatch: pytest.MonkeyPatch) -> dict[str, bool]:
    """Returns whether another driver has taken over."""
    state = {"stale": False}

    def check_current() -> None:
        if state["stale"]:
            raise StaleGeneration("another driver has taken over")

    context = SimpleNamespace(registry=SimpleNamespace(check_current=check_current))
    monkeypatch.setattr(checkpointing, "current", lambda: context)
    return state


def begin(saves: Saves, paths: RunPaths, step: int = 3) -> None:
    """Starts a save with a file of content and a copied one."""
    source = paths.root.parent / "source.txt"
    source.write_text("copied")
    saves.begin(CheckpointWriter(paths, step), {"driver.json": b"{}", "copy.txt": source}, {"env_steps": 7})


def names(paths: RunPaths) -> list[str]:
    """Returns what lies in the folder of checkpoints."""
    return sorted(path.name for path in paths.checkpoints.iterdir())


def test_a_checkpoint_appears_once_all_ranks_have_written(paths: RunPaths) -> None:
    actor, critic, plain = Group("actor", slow=True), Group("critic"), PlainGroup()
    saves = Saves({"actor": actor, "critic": critic, "env": plain}, True, 60.0)
    begin(saves, paths)
    assert saves.pending_step == 3 and actor.modes == critic.modes == [True] and len(plain.folders) == 1
    assert saves.advance() is None and all(name.startswith(".tmp") for name in names(paths))
    actor.slow = False
    seconds = saves.advance()
    assert seconds is not None and seconds >= 0 and saves.pending_step is None
    assert names(paths) == ["global_step_3"]
    folder = paths.checkpoint(3)
    manifest: Any = read_manifest(folder)
    text = str(manifest)
    for name in ("actor-0.pt", "actor-1.pt", "critic-1.pt", "plain.pt", "driver.json", "copy.txt"):
        assert (folder / name).exists() and name in text
    assert (folder / "copy.txt").read_text() == "copied" and "env_steps" in text
    assert saves.advance() is saves.finish() is None  # nothing is under way


def test_busy_ranks_are_not_waited_for_until_the_end(paths: RunPaths) -> None:
    actor = Group("actor", slow=True)
    saves = Saves({"actor": actor}, True, 60.0)
    begin(saves, paths)
    actor.busy = True
    assert saves.advance() is None and saves.advance() is None
    assert saves.finish() is not None and names(paths) == ["global_step_3"]


def test_without_a_thread_all_is_written_when_training_goes_on(paths: RunPaths) -> None:
    actor = Group("actor")
    saves = Saves({"actor": actor}, False, 60.0)
    begin(saves, paths)
    assert actor.modes == [False] and saves.finish() is not None


def test_a_save_whose_rank_was_lost_is_dropped(paths: RunPaths) -> None:
    actor = Group("actor", slow=True)
    saves = Saves({"actor": actor}, True, 60.0)
    begin(saves, paths)
    actor.error = True
    assert saves.finish_or_drop() is None and saves.pending_step is None and names(paths) == []
    begin(saves, paths)
    with pytest.raises(RlhpcError, match="a rank was lost"):
        saves.finish()
    assert names(paths) == []
    actor.error = False
    begin(saves, paths)
    assert saves.finish_or_drop() is not None and names(paths) == ["global_step_3"]


def test_a_driver_that_was_replaced_commits_nothing(paths: RunPaths, generation: dict[str, bool]) -> None:
    saves = Saves({"actor": Group("actor")}, True, 60.0)
    begin(saves, paths)
    generation["stale"] = True
    with pytest.raises(StaleGeneration):
        saves.advance()
    assert names(paths) == [] and saves.pending_step is None


def test_an_abandoned_save_leaves_nothing(paths: RunPaths) -> None:
    saves = Saves({"actor": Group("actor")}, True, 60.0)
    saves.abandon()
    begin(saves, paths)
    saves.abandon()
    assert saves.pending_step is None and names(paths) == []


def test_a_rank_that_fails_at_the_beginning_leaves_nothing(paths: RunPaths) -> None:
    class Failing(Group):
        def begin_save(self, folder: str, beside: bool) -> Handle:
            raise RlhpcError("the disk is full")

    saves = Saves({"actor": Failing("actor")}, True, 60.0)
    with pytest.raises(RlhpcError, match="the disk is full"):
        begin(saves, paths)
    assert saves.pending_step is None and names(paths) == []


def test_a_checksum_has_precedence_over_a_file_that_was_only_seen() -> None:
    assert merge_checksums([{"a": (1, "x"), "b": None}, {"a": None, "b": (2, "y"), "c": None}]) == {
        "a": (1, "x"), "b": (2, "y"), "c": None,
    }  # fmt: skip
