"""What happens to a run whose folder is removed, taken by a second driver, or full: it ends at once, and says why."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from tiny_run import TinyRun, wait_until

from tests import warm
from tests.users import needs_root

LONG = ("runner.max_steps=100000",)


def started(run: TinyRun, *more: str) -> subprocess.Popen[str]:
    """A run that has committed something."""
    process = run.start(*LONG, *more)
    wait_until(lambda: list(run.root.glob("checkpoints/*/COMPLETE")) or process.poll() is not None)
    assert process.poll() is None, process.communicate()
    return process


def ended(process: subprocess.Popen[str], *codes: int) -> str:
    """What it said, once it and all its processes are gone."""
    family = psutil.Process(process.pid).children(recursive=True)
    _, said = process.communicate(timeout=60)
    assert process.returncode in codes, said
    _, alive = psutil.wait_procs(family, timeout=10)
    assert not alive
    assert "Traceback" not in said and "fault of rlhpc" not in said
    return str(said)


def error_of(said: str) -> str:
    """The one message."""
    [message] = said.split("rlhpc: error: ")[1:]
    return message


def test_a_second_driver_is_refused_and_a_registry_that_is_removed_ends_the_first(tiny: TinyRun) -> None:
    process = started(tiny)
    config = (tiny.root / "config.yaml").read_text()
    said = tiny.train(*LONG, "runner.resume_dir=auto", code=2)
    assert f"{tiny.root} is being trained by process {process.pid} on " in said
    assert (tiny.root / "config.yaml").read_text() == config, "and has written nothing"
    shutil.rmtree(tiny.root / "registry")
    message = error_of(ended(process, 1))
    removed = rf"the registry( folder)? {tiny.root}/registry(/local-0)? was removed while the run went on"
    assert re.search(removed, message), "whoever sees it first may see it half removed"
    assert not list((tiny.root / "registry").glob("*")), "and it is not made again"
    assert len(tiny.status()["stop_reason"]) > 20
    assert "registry" in tiny.status()["stop_reason"]
    step = max(int(path.parent.name.rpartition("_")[2]) for path in tiny.root.glob("checkpoints/*/COMPLETE"))
    tiny.train("runner.resume_dir=auto", f"runner.max_steps={step + 2}")


def test_a_run_folder_that_is_removed_stays_removed(tiny: TinyRun) -> None:
    process = started(tiny)
    tiny.root.rename(tiny.root.with_name("gone"))
    shutil.rmtree(tiny.root.with_name("gone"))
    message = error_of(ended(process, 1, 2))  # it may be in a save at that moment
    assert f"the run folder {tiny.root} was removed while the run went on" in message
    assert not tiny.root.exists()


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A filesystem of its own with little room."""
    folder = tmp_path / "small"
    folder.mkdir()
    warm.run(["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(folder)], check=True)
    yield folder
    warm.run(["umount", "--lazy", str(folder)], check=True)


@needs_root
@pytest.mark.parametrize("writer", ["checkpoint", "metrics"])
def test_a_full_disk_is_one_message_and_the_run_goes_on_when_there_is_room(small: Path, writer: str) -> None:
    """Whoever finds no room first: a checkpoint, or what is written at each step."""
    run = TinyRun(small)
    process = started(run, "runner.keep_checkpoints=2", f"runner.save_interval={3 if writer == 'checkpoint' else 20}")
    complete = [path.parent for path in run.root.glob("checkpoints/*/COMPLETE")]
    with contextlib.suppress(OSError), (small / "filler").open("wb", buffering=0) as filler:
        while True:
            filler.write(bytes(4096))
    message = error_of(ended(process, 2))
    assert "No space left on device" in message and f"The filesystem at {small} is full" in message
    assert "make room there" in message and "runner.resume_dir=auto" in message
    left = [path.parent for path in run.root.glob("checkpoints/*/COMPLETE")]
    assert left and max(left) >= max(complete)
    os.unlink(small / "filler")
    newest = max(int(path.name.rpartition("_")[2]) for path in left)
    run.train("runner.resume_dir=auto", f"runner.max_steps={newest + 2}")
