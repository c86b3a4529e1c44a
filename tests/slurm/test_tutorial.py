"""The tutorial of a first cluster run: each command as it stands, on the test cluster."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from .cluster import SlurmCluster
from .jobs import end_jobs
from .runs import ROOT, SITE, SlurmRun

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(900)]

PAGE = ROOT / "docs" / "tutorial" / "first-cluster-run.md"
#: Makes training short; a cancelled run has work left when it goes on.
SMALL = "runner.max_steps=6 runner.save_interval=2 algorithm.update_epochs=1 env.eval.num_episodes=2"
SHELL = 'rlhpc() { case "$1" in run|submit) command rlhpc "$@" $SMALL;; *) command rlhpc "$@";; esac; }\nset -e\n'


@pytest.fixture(autouse=True)
def no_job_is_left(slurm: SlurmCluster) -> Iterator[None]:
    yield
    end_jobs(slurm)


def project(folder: Path) -> None:
    """Links the configurations into a folder, with this cluster's site file in the place of the page's."""
    (folder / "configs" / "site").mkdir(parents=True)
    for path in (ROOT / "configs").iterdir():
        if path.name != "site":
            (folder / "configs" / path.name).symlink_to(path)
    (folder / "configs" / "site" / "mycluster.yaml").write_text(yaml.safe_dump(SITE))


def test_its_commands_run_in_order(slurm: SlurmCluster, tmp_path: Path) -> None:
    project(tmp_path)
    run = SlurmRun(slurm, tmp_path, name="cartpole_het")
    environment = {**run.environment, "SMALL": SMALL}
    blocks = re.findall(r"```bash\n(.*?)```", PAGE.read_text(), re.S)
    if not slurm.has_accounting:
        blocks = [block.replace("--profile slurm ", "--profile slurm-no-accounting ") for block in blocks]
    output = ""
    for block in blocks:
        done = subprocess.run(
            ["bash", "-c", SHELL + block],
            env=environment,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert done.returncode == 0, f"{block}\n{done.stdout}{done.stderr}{run.account()}"
        output += done.stdout
    runs = tmp_path / "runs"
    assert (runs / "cartpole_het/report/index.html").is_file()
    assert "[env-0]" in output
    for name in ("cartpole_het", "second"):
        rows = [json.loads(line) for line in (runs / name / "metrics.jsonl").read_text().splitlines()]
        assert [row["step"] for row in rows] == list(range(1, 7))
