"""Start of ranks in a job: one process of a node imports for all of them, from its own disk if the environment is packed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from .cluster import SlurmCluster
from .jobs import end_jobs
from .runs import ROOT

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(300)]

#: Runs in an allocation of two nodes, in a virtual environment, which it packs.
DRIVER = """
import json, os, sys
from pathlib import Path
from rlhpc import Cluster, NodePlacementStrategy, Session, Worker
from rlhpc.runtime.cluster_config import ClusterConfig
from rlhpc.runtime.environment_archive import folder_of, pack

class Fresh(Worker):
    @classmethod
    def preloads(cls):
        return ["colorsys"]

    def origin(self):
        import sys
        files = [module.__file__ for module in list(sys.modules.values()) if getattr(module, "__file__", None)]
        parent = os.getppid()
        words = Path(f"/proc/{parent}/cmdline").read_text().split(chr(0))
        return {
            "prefix": sys.prefix, "parent": parent, "server": "rlhpc.runtime.launchers.node_fork" in words,
            "preloaded": "colorsys" in sys.modules, "rank": self.all_reduce_ranks(), "task": os.environ["SLURM_PROCID"],
            "shared": [file for file in files if file.startswith((PREFIX, BASE))],
        }

    def all_reduce_ranks(self):
        import torch
        return float(self.all_reduce(torch.tensor(float(self.rank))))

PREFIX, BASE = sys.prefix, sys.base_prefix

if __name__ == "__main__":
    archive = Path("environment.tar").absolute()
    environment = pack(archive)
    cluster = Cluster(ClusterConfig(num_nodes=2))
    session = Session.start(
        registry_root=Path("registry").absolute(), log_dir=Path("logs").absolute(), environment_archive=archive
    )
    group = Fresh.create_group().launch(cluster, NodePlacementStrategy([0, 0, 1, 1]), "group")
    answers = group.origin().wait(120)
    session.stop()
    folder = folder_of(archive)
    print("RESULT", json.dumps({"answers": answers, "prefix": str(folder / "environment"), "is_left": folder.exists()}))
"""


def test_a_node_imports_once_and_from_its_own_disk(slurm: SlurmCluster, tmp_path: Path) -> None:
    prefix = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", prefix], check=True, timeout=120)
    [packages] = prefix.glob("lib/python*/site-packages")
    paths = [path for path in sys.path if "site-packages" in path]
    (packages / "others.pth").write_text("".join(f"{path}\n" for path in [*paths, ROOT]))
    script = tmp_path / "driver.py"
    script.write_text(DRIVER)
    output = tmp_path / "output"
    try:
        slurm.run(
            "sbatch", "--wait", "--partition=cpu", "--nodes=2", "--ntasks-per-node=1", "--exclusive", f"--output={output}",
            f"--chdir={tmp_path}", f"--wrap={prefix}/bin/python -P {script}", timeout_s=240,
        )  # fmt: skip
    finally:
        end_jobs(slurm)
    lines = output.read_text().splitlines()
    assert any(line.startswith("RESULT ") for line in lines), output.read_text()
    result = json.loads(next(line for line in lines if line.startswith("RESULT "))[7:])
    answers = result["answers"]
    assert [answer["task"] for answer in answers] == ["0", "1", "2", "3"] and {
        answer["rank"] for answer in answers
    } == {6.0}
    assert all(answer["server"] and answer["preloaded"] for answer in answers)
    assert len({answer["parent"] for answer in answers}) == 2, "each node has one process that imports"
    assert answers[0]["parent"] == answers[1]["parent"] and answers[2]["parent"] == answers[3]["parent"]
    assert {answer["prefix"] for answer in answers} == {result["prefix"]}
    assert not [file for answer in answers for file in answer["shared"]]
    assert not result["is_left"]
