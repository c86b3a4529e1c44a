"""Options of `cluster.srun` in every job step, on a run whose hosts' clocks disagree; and steps whose /tmp is their own."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.false_clock import python_with_false_clock

from .cluster import SlurmCluster
from .jobs import end_jobs
from .runs import SITE, SlurmRun

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(900)]

#: Seconds by which the environments' host is ahead: longer than any lease of a rank.
OFFSET_S = 600.0


@pytest.fixture(autouse=True)
def no_job_is_left(slurm: SlurmCluster) -> Iterator[None]:
    yield
    end_jobs(slurm)


def test_every_step_has_them_though_clocks_disagree(slurm: SlurmCluster, tmp_path: Path) -> None:
    """The site's options reach srun: a prolog of tasks sees each group's step. A clock ten minutes ahead loses no rank."""
    prolog, seen = tmp_path / "prolog.sh", tmp_path / "seen"
    prolog.write_text(f'#!/bin/bash\necho "$SLURM_STEP_ID $SLURM_PROCID $RLHPC_TEST $RLHPC_STEP" >>{seen}\n')
    prolog.chmod(0o755)
    python = python_with_false_clock(tmp_path, OFFSET_S, 0.0)
    run = SlurmRun(slurm, tmp_path, "runner.max_steps=6", "runner.save_interval=3", light=True)
    config = yaml.safe_load(run.config.read_text())
    groups = config["cluster"]["node_groups"]
    next(group for group in groups if group["label"] == "cpu")["python_interpreter"] = str(python)
    run.overrides.append(f"cluster.node_groups={json.dumps(groups)}")
    site = {"cluster": {**SITE["cluster"], "srun": [f"--task-prolog={prolog}", "--export=ALL,RLHPC_TEST=of-the-site"]}}
    run.site.write_text(yaml.safe_dump(site))
    run.finish(run.submit(), 600)
    assert run.committed() == 6 and len(run.attempts) == 1 and not run.recoveries
    rows = [line.split() for line in seen.read_text().splitlines()]
    assert {row[2] for row in rows} == {"of-the-site"}, rows
    groups_of_steps = {row[3].rpartition("-")[0] for row in rows if len(row) > 3}
    assert groups_of_steps == {"actor", "rollout", "env"}, rows
    assert len({row[0] for row in rows}) >= 3 and all(re.fullmatch(r"\d+", row[0]) for row in rows)


def test_an_option_that_the_launcher_sets(slurm: SlurmCluster, tmp_path: Path) -> None:
    """Refused in one message before anything is submitted."""
    run = SlurmRun(slurm, tmp_path, "cluster.srun=[--kill-on-bad-exit=1]")
    said = run.finish(run.submit(), 120, code=2)
    assert "cluster.srun is ['--kill-on-bad-exit=1']; --kill-on-bad-exit is an option that rlhpc itself sets" in said
    assert not run.root.exists()
