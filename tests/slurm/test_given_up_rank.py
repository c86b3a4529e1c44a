"""A rank of a job step with others that the run gives up: killed on its node before another is started in its place."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from .cluster import SlurmCluster
from .jobs import end_jobs
from .runs import ROOT, SlurmRun

pytestmark = [pytest.mark.slurm, pytest.mark.chaos, pytest.mark.timeout(300)]

#: Runs in an allocation of two nodes: stops a rank, waits until it is given up for its silence, and starts it again.
DRIVER = """
import json, os, signal, subprocess, sys, time
from pathlib import Path
from rlhpc import Cluster, Worker
from rlhpc.runtime.cluster_config import ClusterConfig
from rlhpc.runtime.placement import NodePlacementStrategy
from rlhpc.runtime.policies import GroupPolicy, SessionPolicies
from rlhpc.runtime.session import Session

class Probe(Worker):
    def __init__(self):
        super().__init__()
        self.child = subprocess.Popen(["sleep", "1000"], start_new_session=True)

    def processes(self):
        return [os.getpid(), self.child.pid]

    def add(self, x):
        return self.rank + x

def is_there(pid):
    try:
        with open(f"/proc/{pid}/status") as file:
            return not any(line.startswith("State:") and line.split()[1] in "ZX" for line in file)
    except FileNotFoundError:
        return False

def until(condition, what):
    end = time.monotonic() + 60
    while not (value := condition()):
        assert time.monotonic() < end, what
        time.sleep(0.05)
    return value

if __name__ == "__main__":
    rank = int(sys.argv[1])
    cluster = Cluster(ClusterConfig(num_nodes=2))
    driver = Session.start(registry_root=Path("registry").absolute(), log_dir=Path("logs").absolute())
    many = Probe.create_group().launch(cluster, NodePlacementStrategy([0, 1, 1]), "many")
    with driver.training(SessionPolicies({"many": GroupPolicy(min_ranks=1, lease_s=6.0)})):
        pids = many.processes().wait(60)
        nodes = [record["node"] for record in many._records]
        os.kill(pids[rank][0], signal.SIGSTOP)
        until(lambda: rank not in many.present, "it is given up")
        given_up = time.time()
        others = [0, 1, 2]
        others.remove(rank)
        assert many.add(1).wait(20) == [other + 1 for other in others], "the others go on"
        assert many.restart(30.0) == [rank], "it can start again"
        assert not any(is_there(pid) for pid in pids[rank]), "its processes are gone before its successor starts"
        until(many.admit, "the successor arrives")
        after = many.processes().wait(60)
        assert many.present == [0, 1, 2] and after[rank] != pids[rank]
        assert [after[other] for other in others] == [pids[other] for other in others], "the others are the same processes"
        assert all(is_there(pid) for both in after for pid in both)
        print("RESULT", json.dumps({"nodes": nodes}))
    driver.stop()
"""


@pytest.mark.parametrize("rank", [2, 1, 0])
def test_its_processes_are_gone_before_its_successor_starts(slurm: SlurmCluster, tmp_path: Path, rank: int) -> None:
    run = SlurmRun(slurm, tmp_path)
    program = tmp_path / "program.py"
    program.write_text(DRIVER)
    options = ["--partition=gpu", "--nodes=2", "--ntasks-per-node=1", "--cpus-per-task=4", "--mem=4G"]
    try:
        done = subprocess.run(
            ["salloc", *options, sys.executable, str(program), str(rank)], cwd=tmp_path,
            env={**run.environment, "PYTHONPATH": f"{tmp_path}:{ROOT}"}, capture_output=True, text=True, timeout=240,
        )  # fmt: skip
    finally:
        end_jobs(slurm)
    assert done.returncode == 0, done.stdout + done.stderr
    [line] = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert len(set(json.loads(line.removeprefix("RESULT "))["nodes"])) == 2
