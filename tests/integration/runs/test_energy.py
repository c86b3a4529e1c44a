"""Energy of real runs, by cards that are files: the shares of the roles sum to what the counters say, also over two starts."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tiny_run import TinyRun

from rlhpc.jobs.paths import RunPaths
from rlhpc.metrics import read_metrics
from rlhpc.runs.compare import write_comparison
from rlhpc.runs.report import write_report
from tests.extras import needs_programs
from tests.fake_nvml import Cards

pytestmark = pytest.mark.timeout(300)
#: Three roles share card 0, and the actor has card 1, too.
SHARED = (
    "cluster.accelerators_per_node=2", 'cluster.component_placement={actor: "0:0,1:1", rollout: 0, env: 0}',
    "algorithm.rollout_steps=16", "runner.max_steps=4", "actor.global_batch_size=32", "env.train.num_envs=4",
)  # fmt: skip


class Powered:
    """Cards that take power until the test ends, in a folder that the run's loader knows."""

    def __init__(self, folder: Path) -> None:
        self.cards, self.taken = Cards(folder), [10**9, 5 * 10**9]
        for card, value in enumerate(self.taken):
            self.cards.set(card, value)
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._take)
        self._thread.start()

    def _take(self) -> None:
        while not self._ends.wait(0.01):
            for card, millijoules in enumerate((3_000, 7_000)):
                self.taken[card] += millijoules
                self.cards.set(card, self.taken[card])

    def end(self) -> None:
        self._ends.set()
        self._thread.join()


@pytest.fixture
def powered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Powered]:
    needs_programs("cc")
    powered = Powered(tmp_path / "nvml")
    monkeypatch.setenv("LD_LIBRARY_PATH", f"{tmp_path / 'nvml'}:{os.environ.get('LD_LIBRARY_PATH', '')}")
    monkeypatch.setenv("RLHPC_VIRTUAL_ACCELERATORS", "1")
    yield powered
    powered.end()


def account(run: TinyRun) -> dict[str, Any]:
    return dict(json.loads((run.root / "energy.json").read_text()))


def parts(entry: dict[str, Any], unit: str) -> float:
    return sum(part[unit] for role in entry["roles"].values() for part in role["phases"].values())


def test_the_roles_of_a_run_share_what_its_cards_took(tmp_path: Path, powered: Powered) -> None:
    run = TinyRun(tmp_path, *SHARED)
    before = sum(powered.taken) / 1000
    run.train()
    taken = sum(powered.taken) / 1000 - before
    content = account(run)
    gpu = content["gpu"]
    assert gpu["roles"].keys() == {"actor", "rollout", "env", "idle"} and content["gpu_missing"] == {}
    assert (
        0 < gpu["j"] <= taken
        and parts(gpu, "j") == pytest.approx(gpu["j"])
        and parts(gpu, "hours") == pytest.approx(gpu["hours"])
    )
    assert content["cpu"] is None and "RAPL" in next(iter(content["cpu_missing"]))
    rows = read_metrics(RunPaths(run.root).metrics)
    for row in rows:
        roles = sum(row.get(f"energy/{role}_gpu_j", 0.0) for role in ("actor", "rollout", "env", "idle"))
        assert roles == pytest.approx(row["energy/gpu_j"]) and row["energy/gpu_j"] > 0
    assert sum(row["energy/gpu_j"] for row in rows) <= gpu["j"]
    first = gpu["j"]
    run.train("runner.max_steps=6", "runner.resume_dir=auto")
    assert account(run)["gpu"]["j"] > first and len(run.rows()) == 6
    paths = RunPaths(run.root)
    page = write_report(paths).read_text()
    steps = rows[-1]["rollout/env_steps"] // 4 * 6
    per_thousand = 1000 * account(run)["gpu"]["j"] / steps
    text = f"{per_thousand / 1000:.1f} kJ per 1000 environment steps"
    assert "Energy of the accelerators" in page and text in page and "not measured: there are no RAPL counters" in page
    other = TinyRun(tmp_path / "other", "runner.max_steps=2", "runner.name=unmeasured")
    other.root = tmp_path / "other" / "unmeasured"
    other.train()
    assert not (other.root / "energy.json").exists()
    compared = write_comparison([("a", paths), ("b", RunPaths(other.root))], tmp_path / "compare.html").read_text()
    assert "GPU energy" in compared and "not measured" in compared and "per 1000 environment steps" in compared


def test_a_run_whose_counters_are_not_there_names_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLHPC_VIRTUAL_ACCELERATORS", "1")
    run = TinyRun(tmp_path, *SHARED)
    run.train()
    content = account(run)
    assert content["gpu"] is None
    assert content["gpu_missing"] == {"there is no NVML here (libnvidia-ml.so.1)": ["actor", "rollout", "env"]}
    assert not [name for row in read_metrics(RunPaths(run.root).metrics) for name in row if name.startswith("energy/")]
    assert "not measured: there is no NVML here" in write_report(RunPaths(run.root)).read_text()
