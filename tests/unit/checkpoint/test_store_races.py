"""Checkpoints under the hands of two drivers: one was taken for dead on another host and goes on. At each line of one, the
other does all that it does."""

from __future__ import annotations

import contextlib
import itertools
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from rlhpc.checkpoint import CheckpointWriter, prune
from rlhpc.checkpoint.export_folder import filled_folder
from rlhpc.checkpoint.manifest import is_complete, verify
from rlhpc.checkpoint.store import clean_leftovers, move_newer_aside
from rlhpc.jobs.paths import RunPaths
from rlhpc.runtime.errors import CheckpointError
from tests.at_each_line import at_each_line

from .saving import names, save

#: Files whose lines are interrupted.
MODULES = ("checkpoint/store.py", "runtime/files.py")


@pytest.fixture
def prepare(tmp_path: Path) -> Callable[[], RunPaths]:
    """Makes copies of a run with checkpoints of steps 1 to 3."""
    first = RunPaths(tmp_path / "first")
    for step in (1, 2, 3):
        save(first, step)
    numbers = itertools.count()

    def copy() -> RunPaths:
        return RunPaths(Path(shutil.copytree(first.root, tmp_path / str(next(numbers)))))

    return copy


def start_again(paths: RunPaths) -> None:
    """What a driver does that trains the run from its beginning, up to its first save."""
    move_newer_aside(paths, 0)
    save(paths, 1, "later weights")


def test_a_checkpoint_that_another_driver_has_saved_meanwhile_is_not_pruned(prepare: Callable[[], RunPaths]) -> None:
    def act(paths: RunPaths) -> None:
        prune(paths, keep=1)

    for paths, line in at_each_line(prepare, act, start_again, *MODULES):
        assert verify(paths.checkpoint(1)) == [], f"line {line}"
        assert b"later weights" in (paths.checkpoint(1) / "model.safetensors").read_bytes(), f"line {line}"
        assert not [name for name in names(paths) if name.startswith(".trash")], f"line {line}"


def test_checkpoints_are_moved_aside_while_another_driver_prunes_them(prepare: Callable[[], RunPaths]) -> None:
    for paths, line in at_each_line(
        prepare, lambda paths: move_newer_aside(paths, 0), lambda paths: prune(paths, keep=1), *MODULES
    ):
        assert paths.checkpoint_steps() == [], f"line {line}"
        assert any("superseded" in name and name.endswith("step_3") for name in names(paths)), f"line {line}"


@pytest.fixture
def prepare_save(prepare: Callable[[], RunPaths]) -> Callable[[], tuple[RunPaths, CheckpointWriter]]:
    """Makes a run whose step 3 is being saved anew: its old checkpoint has just been renamed."""

    def make() -> tuple[RunPaths, CheckpointWriter]:
        paths = prepare()
        writer = CheckpointWriter(paths, 3)
        writer.__enter__()
        writer.add_bytes("model.safetensors", b"new weights")
        writer._write_manifest({}, {"model.safetensors": None})
        writer.final.rename(paths.checkpoints / f".old_{writer.final.name}-{writer._token}")
        return paths, writer

    return make


def end_save(state: tuple[RunPaths, CheckpointWriter]) -> None:
    """The rest of a save, of a driver that was taken for dead; it may fail."""
    with contextlib.suppress(OSError, CheckpointError):
        state[1]._rename()


def test_leftovers_are_removed_while_the_save_that_left_them_ends(
    prepare_save: Callable[[], tuple[RunPaths, CheckpointWriter]],
) -> None:
    for (paths, _), line in at_each_line(prepare_save, lambda state: clean_leftovers(state[0]), end_save, *MODULES):
        assert verify(paths.checkpoint(3)) == [], f"line {line}: {names(paths)}"


def test_a_save_ends_while_another_driver_removes_its_leftovers(
    prepare_save: Callable[[], tuple[RunPaths, CheckpointWriter]],
) -> None:
    for (paths, _), line in at_each_line(prepare_save, end_save, lambda state: clean_leftovers(state[0]), *MODULES):
        clean_leftovers(paths)  # the other driver's next save
        assert verify(paths.checkpoint(3)) == [], f"line {line}: {names(paths)}"


def test_two_saves_of_a_step_leave_one_of_both(prepare: Callable[[], RunPaths]) -> None:
    def rename_staged(paths: RunPaths, text: str) -> None:
        writer = CheckpointWriter(paths, 3)
        paths.checkpoints.joinpath(writer.staging.name).mkdir()
        writer.add_bytes("model.safetensors", text.encode())
        writer._write_manifest({}, {"model.safetensors": None})
        writer._rename()

    for paths, line in at_each_line(
        prepare, lambda paths: rename_staged(paths, "first"), lambda paths: rename_staged(paths, "second"), *MODULES
    ):
        assert is_complete(paths.checkpoint(3)) and verify(paths.checkpoint(3)) == [], f"line {line}"
        text = (paths.checkpoint(3) / "model.safetensors").read_text()
        assert text in ("first", "second"), f"line {line}"
        assert not [name for name in names(paths) if name.startswith((".old", ".tmp"))], f"line {line}"


def test_two_exports_to_one_folder_leave_one_of_both(tmp_path: Path) -> None:
    numbers = itertools.count()

    def prepare() -> Path:
        target = tmp_path / str(next(numbers)) / "export"
        fill(target, "before")
        return target

    def fill(target: Path, text: str) -> None:
        with filled_folder(target) as folder:
            (folder / "config.json").write_text(text)
            (folder / "weights").write_text(text)

    for target, line in at_each_line(
        prepare, lambda target: fill(target, "first"), lambda target: fill(target, "second"), "export_folder.py",
        "runtime/files.py",
    ):  # fmt: skip
        texts = {path.read_text() for path in target.iterdir()}
        assert texts in ({"first"}, {"second"}), f"line {line}"
        assert [path.name for path in target.parent.iterdir()] == ["export"], f"line {line}"
