"""Saving, damage, finding the checkpoint to resume from, pruning."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest

from rlhpc.checkpoint import (
    CheckpointWriter,
    clean_leftovers,
    find_resumable,
    move_newer_aside,
    newest_valid,
    prune,
    read_manifest,
    verify,
)
from rlhpc.jobs.paths import RunPaths
from rlhpc.runtime.errors import CheckpointError
from tests import warm
from tests.unit.checkpoint.saving import _flip, names, save


def steps(paths: RunPaths) -> list[int]:
    return [step for step, _ in paths.checkpoint_steps()]


@pytest.mark.parametrize("name", ["../x", "/etc/x", "", "manifest.json", "COMPLETE", "a/../b"])
def test_names_stay_inside(paths: RunPaths, name: str) -> None:
    with CheckpointWriter(paths, 1) as writer, pytest.raises(ValueError):
        writer.path(name)


def test_without_commit_nothing_is_left(paths: RunPaths) -> None:
    with CheckpointWriter(paths, 1) as writer:
        writer.add_bytes("a", b"x")
    assert names(paths) == []
    with pytest.raises(KeyError), CheckpointWriter(paths, 1) as writer:
        raise KeyError("a worker failed")
    assert names(paths) == []


def test_empty_checkpoint_is_refused(paths: RunPaths) -> None:
    with pytest.raises(CheckpointError, match="nothing was written"), CheckpointWriter(paths, 1) as writer:
        writer.commit()
    assert names(paths) == []


def test_find_resumable_choices(paths: RunPaths, tmp_path: Path) -> None:
    assert find_resumable(paths, "auto").path is None
    first, second = save(paths, 9), save(paths, 10)
    assert find_resumable(paths, None).path is None and find_resumable(paths, None).step == 0
    assert find_resumable(paths, "auto").path == second
    assert find_resumable(paths, str(first)).step == 9
    elsewhere = tmp_path / "copied"
    first.rename(elsewhere)
    assert find_resumable(paths, elsewhere).step == 9
    with pytest.raises(CheckpointError, match=r"global_step_11: no such .* has: global_step_10"):
        find_resumable(paths, "global_step_11")
    with pytest.raises(CheckpointError, match=r"manifest\.json: missing"):
        find_resumable(paths, tmp_path)


def test_same_step_is_replaced(paths: RunPaths) -> None:
    save(paths, 5, "old")
    (save(paths, 5, "new") / "COMPLETE").unlink()
    assert save(paths, 5, "newer").joinpath("model.safetensors").read_bytes().startswith(b"newer")
    assert names(paths) == ["global_step_5"] and verify(paths.checkpoint(5)) == []


def test_replacing_killed_between_the_renames_restores_the_old(paths: RunPaths) -> None:
    path = save(paths, 5)
    path.rename(paths.checkpoints / ".old_global_step_5-0a0b")
    (paths.checkpoints / ".tmp_global_step_5-0a0b").mkdir()
    assert find_resumable(paths, "auto").step == 5
    assert names(paths) == ["global_step_5"]


def test_leftovers_are_cleaned_at_the_next_save(paths: RunPaths) -> None:
    save(paths, 1)
    for name in (".tmp_global_step_2-ab12", ".trash_global_step_0-ab12", ".old_global_step_1-ab12"):
        (paths.checkpoints / name).mkdir()
        (paths.checkpoints / name / "COMPLETE").write_text("")
    (paths.checkpoints / ".hidden-of-the-user").mkdir()
    save(paths, 2)
    assert names(paths) == [".hidden-of-the-user", "global_step_1", "global_step_2"]
    assert clean_leftovers(paths) == []


def test_full_disk_is_one_error_and_leaves_the_old_checkpoint(paths: RunPaths) -> None:
    save(paths, 1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
    try:
        with pytest.raises(CheckpointError) as caught, CheckpointWriter(paths, 2) as writer:
            writer.add_bytes("model.safetensors", b"x" * 50_000)
            writer.commit()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "step 2" in str(caught.value) and "ulimit -f" in str(caught.value)
    assert "runner.resume_dir=auto" in str(caught.value)
    assert names(paths) == ["global_step_1"] and find_resumable(paths, "auto").step == 1


def test_errors_in_the_block_that_are_not_the_filesystems_pass(paths: RunPaths) -> None:
    for error in (TimeoutError("actor 0 did not answer"), ConnectionResetError()):
        with pytest.raises(type(error)), CheckpointWriter(paths, 1):
            raise error
    with pytest.raises(CheckpointError, match="No such file"), CheckpointWriter(paths, 1) as writer:
        writer.path("no/folder").write_bytes(b"")
    assert names(paths) == []


def test_unwritable_folder_is_one_error(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file where the run folder should be")
    with pytest.raises(CheckpointError, match=r"could not be saved.*Not a directory"):
        save(RunPaths.from_run_dir(tmp_path, "run"), 1)


def test_failed_rename_puts_the_replaced_one_back(paths: RunPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    save(paths, 1, "old")
    rename = Path.rename

    def failing(self: Path, target: Path) -> Path:
        if ".tmp_" in self.name:
            raise OSError(5, "Input/output error", str(target))
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", failing)
    with pytest.raises(CheckpointError, match="Input/output error"):
        save(paths, 1, "new")
    assert names(paths) == ["global_step_1"] and verify(paths.checkpoint(1)) == []


def test_prune(paths: RunPaths) -> None:
    for step in (1, 2, 3, 10, 20):
        save(paths, step)
    assert prune(paths, 0) == [] and prune(paths, -1) == []
    assert prune(paths, 3, protect=[1]) == [paths.checkpoint(2)]
    assert steps(paths) == [1, 3, 10, 20]
    prune(paths, 1)
    assert names(paths) == ["global_step_20"]


def test_prune_never_removes_the_newest_valid(paths: RunPaths) -> None:
    for step in (1, 2, 3, 4):
        save(paths, step)
    _flip(paths.checkpoint(4))
    _flip(paths.checkpoint(3))
    prune(paths, 1)
    assert steps(paths) == [2, 4]
    assert newest_valid(paths).step == 2
    _flip(paths.checkpoint(2))
    assert prune(paths, 1) == []  # none is sound: nothing is deleted


def test_prune_removes_incomplete_ones_only_below_the_newest(paths: RunPaths) -> None:
    for step in (1, 2, 3):
        save(paths, step)
    for step in (1, 3):
        (paths.checkpoint(step) / "COMPLETE").unlink()
    prune(paths, 5)
    assert steps(paths) == [2, 3]


def test_a_file_that_the_listing_lacks_is_sealed_or_missed(paths: RunPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names that the writer gave, and names that ranks reported, are looked up; without the file there is no seal."""
    iterdir = os.scandir
    monkeypatch.setattr(os, "scandir", lambda path=".": iterdir(paths.root.parent / "empty"))
    monkeypatch.setattr(os, "listdir", lambda path=".": [])
    (paths.root.parent / "empty").mkdir()
    with CheckpointWriter(paths, 1) as writer:
        writer.add_bytes("runner.json", b"{}")
        writer.path("actor-0.pt").write_bytes(b"of a worker")
        (writer.staging / "actor-1.pt").write_bytes(b"of another host")
        writer.commit({}, {"actor-1.pt": None})
    assert set(read_manifest(paths.checkpoint(1))["files"]) == {"runner.json", "actor-0.pt", "actor-1.pt"}
    for name in ("actor-0.pt", "actor-1.pt"):
        with (
            pytest.raises(CheckpointError, match=rf"{name} was written, and is gone"),
            CheckpointWriter(paths, 2) as writer,
        ):
            writer.add_bytes("runner.json", b"{}")
            if name == "actor-0.pt":
                writer.path(name)
            writer.commit({}, {} if name == "actor-0.pt" else {name: None})
    assert not paths.checkpoint(2).exists()


def test_the_newest_save_is_found_where_the_listing_lacks_it(paths: RunPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    save(paths, 2)
    save(paths, 4)
    iterdir = Path.iterdir
    monkeypatch.setattr(Path, "iterdir", lambda self: (path for path in iterdir(self) if path.name != "global_step_4"))
    assert find_resumable(paths, "auto").step == 4
    shutil.rmtree(paths.checkpoint(4))
    assert find_resumable(paths, "auto").step == 2
    paths.newest_save.write_text('{"global_step": "x"}')
    assert find_resumable(paths, "auto").step == 2


def test_a_checkpoint_that_is_listed_and_gone_stops_no_prune(paths: RunPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (1, 2, 3):
        save(paths, step)
    shutil.rmtree(paths.checkpoint(1))
    iterdir = Path.iterdir
    gone = {paths.checkpoints: [paths.checkpoint(1)]}
    monkeypatch.setattr(Path, "iterdir", lambda self: (*iterdir(self), *gone.get(self, [])))
    assert prune(paths, 1) == [paths.checkpoint(2)]


def test_move_newer_aside(paths: RunPaths) -> None:
    for step in (1, 2, 3):
        save(paths, step)
    moved = move_newer_aside(paths, 1)
    assert steps(paths) == [1] and len(moved) == 2 and all(path.name.startswith("superseded-") for path in moved)


SAVER = """
import sys
from rlhpc.checkpoint import CheckpointWriter, prune
from rlhpc.jobs.paths import RunPaths
from pathlib import Path
paths = RunPaths(Path(sys.argv[1]))
for step in range(int(sys.argv[2]), 100000):
    with CheckpointWriter(paths, step // 2) as writer:   # every step twice: replacing is killed as well
        for part in range(4):
            writer.add_bytes(f"part-{part}.bin", bytes([step % 251]) * 300_000)
        writer.commit({})
    prune(paths, 2)
    print(step // 2, flush=True)
"""


@pytest.mark.parametrize("delay", [0.0, 0.003, 0.007, 0.011, 0.017, 0.026, 0.04, 0.06])
def test_kill_during_save_loses_no_reported_step(paths: RunPaths, delay: float) -> None:
    """SIGKILL at some moment of a real save: what was reported is there and whole; the next save cleans up."""
    reported = -1
    for _ in range(2):
        process = warm.Popen(
            [sys.executable, "-c", SAVER, str(paths.root), str(2 * (reported + 1))], stdout=warm.PIPE, text=True
        )
        assert process.stdout is not None
        for _ in range(5):
            reported = int(process.stdout.readline())
        time.sleep(delay)
        process.send_signal(signal.SIGKILL)
        rest = process.stdout.read().split()
        process.wait()
        reported = int(rest[-1]) if rest else reported

        found = find_resumable(paths, "auto")
        assert found.path is not None and found.step >= reported
        assert verify(found.path) == [] and found.skipped == []
        assert all(verify(path) == [] for _, path in paths.checkpoint_steps())
    save(paths, reported + 10)
    assert not [name for name in names(paths) if name.startswith(".")]
    assert read_manifest(paths.checkpoint(reported + 10))["meta"] == {"env_steps": (reported + 10) * 10}


DIES = """
import os, signal, sys
from pathlib import Path
from rlhpc.checkpoint import CheckpointWriter, prune
from rlhpc.jobs.paths import RunPaths
paths, left = RunPaths(Path(sys.argv[1])), int(sys.argv[2])
def dying(function, after):
    def call(*args, **kw):
        global left
        left -= 1
        if left == 0 and not after:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            return function(*args, **kw)
        finally:
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
    return call
for name in ("fsync", "rename", "unlink", "rmdir", "mkdir"):
    setattr(os, name, dying(getattr(os, name), after=sys.argv[3] == "after"))
with CheckpointWriter(paths, int(sys.argv[4])) as writer:
    writer.add_bytes("model.safetensors", b"new" * 1000)
    writer.add_bytes("runner.json", b"{}")
    writer.commit({})
print("committed", flush=True)
prune(paths, 1)
print("pruned", flush=True)
"""


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("step", [2, 3], ids=["replacing", "new"])
def test_death_at_every_call_that_changes_the_disk(paths: RunPaths, when: str, step: int) -> None:
    """SIGKILL at the n-th fsync, rename or removal of a save and the pruning after it, for every n."""
    deaths = 0
    for count in range(1, 100):
        save(paths, 1)
        save(paths, 2)
        process = warm.run(
            [sys.executable, "-c", DIES, str(paths.root), str(count), when, str(step)], capture_output=True, text=True
        )
        found = find_resumable(paths, "auto")
        assert found.path is not None and found.skipped == [], (count, found)
        assert found.step >= (step if "committed" in process.stdout else 2), count
        assert not [name for name in names(paths) if name.startswith(".")]
        if process.returncode == 0:
            break
        assert process.returncode == -signal.SIGKILL, process.stderr
        deaths += 1
        for _, path in paths.checkpoint_steps():
            path.rename(paths.root / "old")
            shutil.rmtree(paths.root / "old")
    assert "pruned" in process.stdout and deaths >= 15
