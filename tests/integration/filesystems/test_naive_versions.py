"""Each fault breaks a version of the code that does not expect it, and not the one that is shipped; without it, both pass."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from tests import drawn
from tests.filesystems.beds import SharedFolder, need_mounts
from tests.filesystems.faults import Faults
from tests.filesystems.naive import NAIVE
from tests.filesystems.scenarios import SCENARIOS, ActionError

need_mounts()


def lost(*operations: str) -> Faults:
    return Faults(lost_replies=1.0, lost_operations=operations)


#: Hosts where a removed file is gone, though it is open.
GONE = Faults(keep_open_files=False)

#: Naive version, scenario and faults of both hosts.
CASES = {
    "rename": ("believes a rename's error", "checkpoints", lost("rename")),
    "rename of an export": ("believes a rename's error", "exports", lost("rename")),
    "rename with another error": (
        "believes a rename's error",
        "exports",
        replace(lost("rename"), rename_error="EEXIST"),
    ),
    "rename of a record": ("believes a rename's error", "registry", lost("rename")),
    "rename of a lease": ("believes that a file is gone", "submit_locks", lost("rename")),
    "link": ("believes a link's error", "claims", lost("link")),
    "mkdir": ("believes a folder's error", "checkpoints", lost("mkdir")),
    "create": ("believes a temporary file's error", "registry", Faults(lost_replies=0.5, lost_operations=("create",))),
    "no flock": ("locks by flock", "submit_locks", Faults(flock="ENOLCK")),
    "flock of one node": ("locks by flock", "driver_lock", Faults(flock="local")),
    "attributes": ("uses the cached status", "driver_lock", Faults(attr_s=1e6, entry_s=45.0)),  # longer than any lease
    "names": ("believes that a name is missing", "registry", Faults(negative_s=3.0)),
    "listings": ("believes listings", "checkpoints", Faults(listing_s=1e6)),
    "unlink": ("looks before it removes", "claims", lost("unlink")),
    "rmdir": ("requires that a folder is gone", "exports", replace(lost("rmdir"), keep_open_files=False)),
    "close": ("ignores close", "full_disk", Faults()),
    "open files": ("requires that a folder is gone", "exports", Faults()),
}


@pytest.mark.drawn
@pytest.mark.parametrize("case", drawn.drawn("naive versions", CASES, least=2))
def test_a_naive_version_fails(tmp_path: Path, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    version, scenario, faults = CASES[case]
    draw = random.Random(7)
    monkeypatch.setenv(NAIVE, version)
    if scenario != "full_disk":  # which fills the disk itself
        without = GONE if version == "requires that a folder is gone" else Faults()
        with SharedFolder(tmp_path / "without", without, without) as bed:
            SCENARIOS[scenario](bed, random.Random(7))
    with SharedFolder(tmp_path / "bed", faults, faults) as bed, pytest.raises((ActionError, AssertionError)) as caught:
        SCENARIOS[scenario](bed, draw)
    assert "ended:" not in str(caught.value), "the agent itself has a fault"
    monkeypatch.delenv(NAIVE)
    with SharedFolder(tmp_path / "again", faults, faults) as bed:
        SCENARIOS[scenario](bed, random.Random(7))
