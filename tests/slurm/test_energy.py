"""Slurm's own energy accounting, by its plugin pm_counters, on nodes whose counters are files."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from .cluster import SlurmCluster
from .jobs import wait_gone
from .runs import SlurmRun, until

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(600)]
#: Joules that the counter rises in a tenth of a second.
RISE = 25


@pytest.fixture
def rising(slurm_with_energy: SlurmCluster) -> Iterator[SlurmCluster]:
    """The nodes take 250 W while the test runs."""
    ends = threading.Event()

    def write() -> None:
        joules = 1000
        while not ends.wait(0.1):
            joules += RISE
            now = time.time_ns() // 1000
            for name, text in (("energy", f"{joules} J {now} us\n"), ("power", f"250 W {now} us\n")):
                (slurm_with_energy.pm_counters / name).write_text(text)

    thread = threading.Thread(target=write)
    thread.start()
    yield slurm_with_energy
    ends.set()
    thread.join()


def test_the_energy_of_a_jobs_nodes_is_in_the_accounting(rising: SlurmCluster, tmp_path: Path) -> None:
    run = SlurmRun(rising, tmp_path, "runner.max_steps=20", "runner.save_interval=10", light=True)
    run.finish(run.submit())
    wait_gone(rising, run.job)

    def report() -> dict[str, object]:
        run.rlhpc("report", str(run.root))
        return run.json("report/accounting.json")

    found = until(lambda: (r := report()).get("complete") and r, "the accounting is complete", 60)
    gpu, cpu = found["components"]
    table = rising.run(
        "sacct", "--jobs", run.job, "--parsable2", "--noheader", "--format=JobID,ConsumedEnergyRaw,ElapsedRaw"
    )
    batch = next(line.split("|") for line in table.splitlines() if ".batch|" in line)
    assert gpu["energy_j"] == int(batch[1]) > 0 and gpu["energy_missing"] == "", table
    # 250 W for as long as the job ran, less what Slurm rounds and reads late
    assert 0.3 * 10 * RISE * int(batch[2]) <= gpu["energy_j"] <= 1.5 * 10 * RISE * (int(batch[2]) + 2), table
    assert (cpu["energy_j"], cpu["energy_missing"]) == (None, "no step lasts as long as the job on all of its nodes")
    assert "energy of nodes" in (run.root / "report" / "index.html").read_text()
