"""Claims, locks, registry, checkpoints, exports, metrics and the quickstart on a shared folder of two hosts, with faults."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests import drawn
from tests.filesystems.beds import SharedFolder, need_mounts
from tests.filesystems.faults import Faults
from tests.filesystems.scenarios import SCENARIOS, drawn_faults

need_mounts()

#: Filesystems of clusters, each with the faults of its kind on both hosts.
KINDS = {
    "coherent": Faults(),
    "late names": Faults(attr_s=10.0, entry_s=3.0, negative_s=3.0, listing_s=3.0),
    "outdated listings": Faults(listing_s=1e6),
    "no flock": Faults(flock="ENOLCK"),
    "flock of one node": Faults(flock="local"),
    "lost replies": Faults(lost_replies=0.3),
    "late names and lost replies": Faults(
        attr_s=3.0, entry_s=2.0, negative_s=2.0, lost_replies=0.3, rename_error="EEXIST"
    ),
    "stale handles": Faults(stale_handles=True),
    "slow": Faults(delay_s=0.002, fsync_s=0.1),
}
CASES = [f"{scenario}, {kind}" for scenario in SCENARIOS if scenario != "quickstart" for kind in KINDS]


@pytest.mark.drawn
@pytest.mark.parametrize("case", drawn.drawn("filesystems", CASES, least=3))
def test_on_kinds_of_filesystems(tmp_path: Path, case: str) -> None:
    scenario, _, kind = case.partition(", ")
    with SharedFolder(tmp_path / "bed", KINDS[kind], KINDS[kind]) as bed:
        SCENARIOS[scenario](bed, random.Random(f"{case} {drawn.seed()}"))


@pytest.mark.long
def test_the_quickstart_goes_on_on_another_host(tmp_path: Path) -> None:
    draw = random.Random(drawn.number())
    with SharedFolder(tmp_path / "bed", drawn_faults(draw, 1), drawn_faults(draw, 2)) as bed:
        SCENARIOS["quickstart"](bed, draw)
