"""Run folders, registries and keys of other users, and those that others may write to, are refused."""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlhpc.runtime.errors import OwnershipError
from rlhpc.runtime.ownership import make_private, require_own_run_folder, require_private
from rlhpc.runtime.registry import CurveKeys, GenerationFolder
from tests.users import ALICE, BOB, needs_root, run_as


@pytest.fixture
def project() -> Iterator[Path]:
    """A folder that all users may write to, as a group's project space is."""
    folder = Path(tempfile.mkdtemp(prefix="project-of-all-", dir="/tmp"))
    folder.chmod(0o1777)
    yield folder
    shutil.rmtree(folder)


START = """
import sys
from pathlib import Path
from rlhpc.runtime.errors import OwnershipError
from rlhpc.runtime.registry import CurveKeys, GenerationFolder
try:
    registry = GenerationFolder.create(Path(sys.argv[1]) / "registry", "local-0")
    registry.save_keys(CurveKeys(b"a", b"b"))
    print(registry.load_keys())
except OwnershipError as error:
    print(error)
    sys.exit(error.exit_code)
"""
PLANT = {
    "run folder": "os.makedirs(run); os.chmod(run, 0o777)",
    "run folder, open to its parent's group": "os.makedirs(run); os.chmod(run, 0o2775)",
    "link to a folder of Bob's": "os.makedirs(run + '-bobs'); os.chmod(run + '-bobs', 0o777); os.symlink(run + '-bobs', run)",
    "link to a folder of Alice's": "os.symlink(alices, run)",
    "link to nothing": "os.symlink('/nothing/there', run)",
}
PLANT_INSIDE = {
    "registry": "os.mkdir(run + '/registry'); os.chmod(run + '/registry', 0o777)",
    "registry is a link": "os.symlink(alices, run + '/registry')",
}
MAKE = "import os, sys; run, alices = sys.argv[1:]; {}"


@needs_root
@pytest.mark.parametrize("what", [*PLANT, *PLANT_INSIDE])
def test_what_bob_made_is_not_alices_run(project: Path, what: str) -> None:
    run, alices = project / "try", project / "alices"
    assert run_as(ALICE, "import os, sys; os.mkdir(sys.argv[1], 0o700)", alices).returncode == 0
    if what in PLANT_INSIDE:  # Alice's own folder was open for a while
        assert run_as(ALICE, "import os, sys; os.mkdir(sys.argv[1]); os.chmod(sys.argv[1], 0o777)", run).returncode == 0
    done = run_as(BOB, MAKE.format({**PLANT, **PLANT_INSIDE}[what]), run, alices)
    assert done.returncode == 0, done.stderr
    if what in PLANT_INSIDE:
        run.chmod(0o755)
    done = run_as(ALICE, START, run)
    assert done.returncode == 2 and str(run) in done.stdout, done.stdout + done.stderr
    if "link" not in what:
        assert f"user {BOB}" in done.stdout and "Choose another runner.name or runner.run_dir" in done.stdout
    else:
        assert "is a link" in done.stdout
    assert not list(alices.iterdir()) and not list(project.glob("**/keys.json"))


@needs_root
def test_a_shared_parent_is_fine_and_so_is_a_link_of_ones_own(project: Path) -> None:
    run = project / "group" / "try"
    run.parent.mkdir()
    run.parent.chmod(0o777)
    done = run_as(ALICE, START, run, umask=0o002)
    assert done.returncode == 0, done.stdout + done.stderr
    assert {stat.S_IMODE(p.stat().st_mode) for p in (run / "registry", run / "registry" / "local-0")} == {0o700}
    link = "import os, sys; os.symlink(sys.argv[1], sys.argv[2])"
    assert run_as(ALICE, link, run, project / "linked").returncode == 0
    assert run_as(ALICE, START, project / "linked").returncode == 0
    assert run_as(BOB, START, run).returncode == 2, "and it is hers alone"


LOAD = """
import sys
from pathlib import Path
from rlhpc.runtime.errors import OwnershipError
from rlhpc.runtime.registry import GenerationFolder
try:
    print(GenerationFolder(Path(sys.argv[1])).load_keys())
except (OwnershipError, OSError) as error:
    print(error)
    sys.exit(2)
"""


@needs_root
def test_keys_that_bob_put_in_place_are_not_loaded(project: Path) -> None:
    """He may rename what lies in a folder that he may write to: then the whole registry is his."""
    run = project / "try"
    assert run_as(ALICE, START, run).returncode == 0
    generation = run / "registry" / "local-0"
    assert run_as(ALICE, LOAD, generation).returncode == 0
    shutil.move(run, project / "away")
    assert run_as(BOB, START, run).returncode == 0
    for path in (run, run / "registry", generation):
        path.chmod(0o777)
    (generation / "keys.json").chmod(0o644)
    done = run_as(ALICE, LOAD, generation)
    assert done.returncode == 2 and f"user {BOB}" in done.stdout, done.stdout
    os.chown(generation, ALICE, ALICE)
    generation.chmod(0o700)
    done = run_as(ALICE, LOAD, generation)
    assert done.returncode == 2 and "keys that others can read or write are not used" in done.stdout


def test_what_others_may_read_is_closed_and_what_they_may_write_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "registry"
    make_private(folder)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    folder.chmod(0o755)
    with pytest.raises(OwnershipError, match=r"open to others \(mode 0755\).*chmod 700"):
        require_private(folder)
    make_private(folder)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    folder.chmod(0o770)
    with pytest.raises(OwnershipError, match=r"can be written by others \(mode 0770\)"):
        make_private(folder)
    (tmp_path / "file").touch()
    with pytest.raises(OwnershipError, match="no folder"):
        make_private(tmp_path / "file")


def test_a_run_folder_open_to_everybody_is_refused(tmp_path: Path) -> None:
    run = tmp_path / "run"
    require_own_run_folder(run)  # none yet
    run.mkdir()
    run.chmod(0o777)
    with pytest.raises(OwnershipError, match=r"can be written by everybody \(mode 0777\): chmod o-w"):
        require_own_run_folder(run)
    run.chmod(0o775)
    require_own_run_folder(run)


def test_keys_are_their_owners_alone(tmp_path: Path) -> None:
    registry = GenerationFolder.create(tmp_path / "registry", "local-0")
    registry.save_keys(CurveKeys(b"a", b"b"))
    assert registry.load_keys() == CurveKeys(b"a", b"b")
    (registry.root / "keys.json").chmod(0o644)
    with pytest.raises(OwnershipError, match=r"keys\.json"):
        registry.load_keys()
