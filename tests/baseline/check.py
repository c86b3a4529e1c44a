"""Checks of the baseline runs, for tests."""

from __future__ import annotations

import json
from pathlib import Path

from tests.baseline.archive import DATA, unpack
from tests.baseline.compare import differences, machine, outline, record_of
from tests.baseline.exercise import exercise
from tests.baseline.runs import RUNS
from tests.extras import need_extra


def check_files() -> None:
    """Checks that each run has an archive and a record, and that there are no others."""
    recorded = {path.stem for path in (DATA / "runs").glob("*.json")}
    packed = {path.name.removesuffix(".tar.xz") for path in (DATA / "runs").glob("*.tar.xz")}
    assert recorded == packed == set(RUNS)


def check(name: str, folder: Path, models: Path) -> None:
    """Checks that an archived run does what it did when it was recorded.

    Args:
        name: Name of the run.
        folder: An empty folder.
        models: Folder of the built-in models.
    """
    need_extra(*RUNS[name].extras)
    recorded = json.loads(record_of(name).read_text())
    exact = recorded.pop("machine") == machine()
    result = json.loads(json.dumps(exercise(RUNS[name], unpack(name, folder / "run", models), models)))
    if not exact:
        recorded, result = outline(recorded), outline(result)
    lines = differences(recorded, result, exact=exact, merged="lora" in RUNS[name].config["actor"])
    assert not lines, "\n".join([f"{len(lines)} differences; the first of them:", *lines[:40]])
