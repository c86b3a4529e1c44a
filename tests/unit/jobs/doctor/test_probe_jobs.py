"""Probe jobs of the doctor: one small job a partition, whose nodes report on themselves and on each other."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from rlhpc.jobs.doctor import node_probe, probe_jobs
from rlhpc.jobs.doctor.probe_jobs import ProbeJob, plan_jobs, probe_this_machine, run_probes, script_of, wake_up_s
from rlhpc.jobs.doctor.slurm_facts import Site, SiteNodeGroup
from tests.unit.jobs.doctor.cluster import facts, site


def test_one_small_job_a_partition(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_probe, "has_package", lambda name: False)
    asked = site(
        SiteNodeGroup("a", "gpu", "acct", gres="gpu:fake"), SiteNodeGroup("b", "gpu"), SiteNodeGroup("c", "cpu"),
        SiteNodeGroup("d", "gpux"),
        sbatch=("--reservation=r",),
    )  # fmt: skip
    first, second = plan_jobs(asked, facts(), 8)
    assert (first.partition, first.labels, first.nodes, first.gres) == ("gpu", ("a", "b"), 2, "gpu:fake:2")
    assert (second.partition, second.nodes, second.gres) == ("cpu", 1, None)  # cpu1 is down
    script = script_of(first, asked, 90)
    for option in (
        "--partition=gpu",
        "--account=acct",
        "--nodes=2",
        "--time=2",
        "--requeue",
        "--reservation=r",
        "--mem=4G",
    ):
        assert f"#SBATCH {option}\n" in script
    assert "#SBATCH --mem=500M\n" in script_of(second, asked, 90)
    # With vLLM, one of its nodes starts an engine of two ranks; where GPUs are only a number, none does.
    monkeypatch.setattr(node_probe, "has_package", lambda name: name == "vllm")
    monkeypatch.delenv("RLHPC_VIRTUAL_ACCELERATORS", raising=False)
    script = script_of(first, asked, 90)
    assert "#SBATCH --mem=24G\n" in script and "#SBATCH --cpus-per-task=4\n" in script
    assert "#SBATCH --mem=500M\n" in script_of(second, asked, 90)
    monkeypatch.setenv("RLHPC_VIRTUAL_ACCELERATORS", "1")
    assert "#SBATCH --mem=4G\n" in script_of(first, asked, 90)
    assert plan_jobs(asked, facts(), 1)[0].nodes == 1


#: Slurm of one node, which is this machine: a job is its batch script's report and the steps that srun starts here.
COMMANDS = {
    "sbatch": """
number=$(($(cat count 2>/dev/null || echo 40) + 1)); echo $number > count
cat > script.$number
grep -q partition=full script.$number && { echo "sbatch: error: Batch job submission failed: Job violates" >&2; exit 1; }
SLURM_JOB_ID=$number SLURMD_NODENAME=n1 bash <(grep '^(cd' script.$number)
echo $number
""",
    "squeue": """
for number in 41 42 43; do
  grep -q partition=busy script.$number 2>/dev/null && echo "$number|PENDING|Resources" || echo "$number|RUNNING|None"
done
""",
    "scontrol": 'echo "JobId=$4 Requeue=1"',
    "scancel": 'echo "$*" >> cancelled',
    "srun": """
while [[ $1 == -* ]]; do
  [[ $1 == --bad ]] && { echo "srun: unrecognized option '--bad'" >&2; exit 1; }
  shift
done
cd /; SLURM_PROCID=0 SLURMD_NODENAME=n1 exec "$@"
""",
}


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "slurm"
    folder.mkdir()
    for name, body in COMMANDS.items():
        (folder / name).write_text(f"#!/bin/bash\ncd {folder}\n{body.strip()}\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setattr(probe_jobs, "_POLL_S", 0.05)
    monkeypatch.setattr(probe_jobs, "_NEIGHBOUR_TIMEOUT_S", 1.0)
    return folder


def asked_for(partition: str) -> ProbeJob:
    return ProbeJob(partition, (partition,), (), None, 0, 1, 1)


def test_a_node_reports_on_itself_on_the_others_and_in_a_second_step(slurm: Path, tmp_path: Path) -> None:
    job = asked_for("gpu")
    probed = run_probes([job], Site(setup=("export FROM_SETUP=1",)), tmp_path, start_s=20.0)
    assert not probed.folder_error and not probed.lock_error and not job.error and not job.second_step_error
    hello = probed.hellos["n1"]
    assert hello["host"] == job.second_steps["n1"].get("host", hello["host"]) and hello["packages"]["torch"]
    assert set(probed.peers) == set(job.second_steps) == {"n1"} and "ms" in job.canary_views["n1"]
    assert abs(job.offsets["n1"][0]) <= job.offsets["n1"][1] + 0.05, "its clock is this one's"
    assert job.batch_folders["n1"] == {name: _identity(name) for name in node_probe.MEETING_FOLDERS}
    assert job.neighbour_folders == job.batch_folders and job.requeue == "1"
    assert (slurm / "cancelled").read_text().split() == ["41", "42"], "the job and its neighbour"
    assert not list(tmp_path.glob(".rlhpc-doctor-*"))


def _identity(name: str) -> str:
    status = os.stat(name)
    return f"{status.st_dev:x}.{status.st_ino}"


def test_a_job_that_cannot_run_says_why(slurm: Path, tmp_path: Path) -> None:
    full, busy = asked_for("full"), asked_for("busy")
    run_probes([full, busy], Site(), tmp_path / "missing", start_s=0.0)
    assert full.error == "sbatch: Batch job submission failed: Job violates" and not full.job_id
    assert busy.error == "did not start within 0 s (Resources)" and busy.job_id == "42"
    assert "42" in (slurm / "cancelled").read_text().split()


def test_a_folder_that_cannot_be_written_to_is_reported(slurm: Path, tmp_path: Path) -> None:
    probed = run_probes([], Site(), tmp_path / "missing", start_s=0.0)
    assert probed.folder_error == "No such file or directory" and probed.hellos == {}


def test_the_sites_options_of_srun_are_left_out_where_srun_refuses_them(slurm: Path, tmp_path: Path) -> None:
    job = asked_for("gpu")
    probed = run_probes([job], Site(srun=("--bad",), sbatch=("--exclusive",)), tmp_path, start_s=20.0)
    assert job.srun_error == "srun: unrecognized option '--bad'" and set(probed.hellos) == {"n1"}
    assert job.neighbour_folders == {}, "nodes are not shared with others' jobs"


def test_this_machine_is_examined_like_a_node(tmp_path: Path) -> None:
    probed = probe_this_machine(Site(scratch=str(tmp_path)), tmp_path, gpus=0)
    [report] = probed.hellos.values()
    assert report["packages"]["rlhpc"] and json.dumps(report) and probed.jobs[0].torch == {}


def test_nodes_that_sleep_get_the_time_to_wake_up() -> None:
    asleep = facts(ResumeTimeout="300 sec")
    for node in asleep.nodes:
        node["State"] = "IDLE+POWERED_DOWN"
    [job] = plan_jobs(site(SiteNodeGroup("a", "cpu")), asleep, 1)
    job.usable_nodes = 0
    assert wake_up_s([job], asleep) == 300.0
    job.usable_nodes = 1
    assert wake_up_s([job], asleep) == 0.0
