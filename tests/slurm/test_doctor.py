"""`rlhpc doctor` on a real cluster: as it should be, and with planted faults, each of which it finds and names."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.planted import plant

from .cluster import SlurmCluster
from .runs import ROOT, SITE, until

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(180)]


class Doctor:
    """The command, with a site file of its own."""

    def __init__(self, cluster: SlurmCluster, folder: Path, site: dict[str, Any] = SITE) -> None:
        self.cluster, self.folder = cluster, folder
        self.site = folder / "site.yaml"
        self.site.write_text(yaml.safe_dump(site))
        self.runs = folder / "runs"
        self.runs.mkdir()
        self.here = plant(folder / "here")  # the probes import nothing from where they are sent off

    def command(self, *words: str) -> list[str]:
        return [sys.executable, "-P", "-m", "rlhpc.cli", "doctor", "--site", str(self.site), *words]

    def environment(self, **changed: str) -> dict[str, str]:
        return {**os.environ, **self.cluster.env(), **changed}

    def __call__(self, *words: str, code: int, folder: Path | None = None, **environment: str) -> list[dict[str, str]]:
        """The lines; checks that nothing is left behind."""
        report, looked_into = self.folder / "report.json", folder or self.runs
        done = subprocess.run(
            self.command("--folder", str(looked_into), "--json", str(report), *words),
            env=self.environment(**environment), cwd=self.here, capture_output=True, text=True, timeout=150,
        )  # fmt: skip
        assert done.returncode == code, done.stdout + done.stderr
        assert not done.stderr
        self.nothing_is_left(looked_into)
        lines: list[dict[str, str]] = json.loads(report.read_text())["lines"]
        assert all(line["do"] for line in lines if line["level"] != "pass")
        return lines

    def nothing_is_left(self, folder: Path) -> None:
        assert not list(folder.iterdir())
        queue = ("squeue", "--noheader", "--name=rlhpc-doctor", "--states=PENDING,RUNNING")
        until(lambda: not self.cluster.run(*queue), "no probe job is left", 20)


def failed(lines: list[dict[str, str]]) -> dict[str, str]:
    return {line["what"]: line["found"] for line in lines if line["level"] == "fail"}


def line_of(lines: list[dict[str, str]], what: str) -> dict[str, str]:
    [line] = [line for line in lines if line["what"] == what]
    return line


@pytest.fixture
def doctor(slurm: SlurmCluster, tmp_path: Path) -> Doctor:
    return Doctor(slurm, tmp_path)


@contextmanager
def configured(cluster: SlurmCluster, old: str, new: str) -> Iterator[None]:
    """The cluster with another line in its slurm.conf."""
    before = cluster.slurm_conf.read_text()
    assert old in before
    try:
        cluster.slurm_conf.write_text(before.replace(old, new))
        cluster.run("scontrol", "reconfigure")
        yield
    finally:
        cluster.slurm_conf.write_text(before)
        cluster.run("scontrol", "reconfigure")
        cluster.wait_for_nodes()


def test_a_good_cluster(doctor: Doctor) -> None:
    lines = doctor(code=0)
    looked_at = {"probe in gpu": "looked at gpu1, gpu2", "probe in cpu": "looked at cpu1, cpu2"}
    assert {what: line_of(lines, what)["found"] for what in looked_at} == looked_at
    for what in ("het jobs", "requeue", "shared folder", "interface", "ports", "GPU mask", "GPUs of gpu", "Python"):
        if doctor.cluster.nodes_are_hosts or what != "interface":
            assert line_of(lines, what)["level"] == "pass", line_of(lines, what)
    assert line_of(lines, "GPUs in torch")["level"] == "warn"  # they are only a number here


def test_gpus_that_are_not_there(doctor: Doctor) -> None:
    """Torch is asked on the nodes themselves; it sees none of the cluster's, which are only a number."""
    lines = doctor(code=1, RLHPC_VIRTUAL_ACCELERATORS="")
    assert list(failed(lines)) == ["GPUs in torch"]
    assert failed(lines)["GPUs in torch"].startswith("gpu1, gpu2: granted 2, torch sees 0: torch ")


def test_a_wrong_partition(slurm: SlurmCluster, tmp_path: Path) -> None:
    groups = [{"label": "gpu", "partition": "gpus", "gres_name": "gpu:fake"}, {"label": "cpu", "partition": "cpu"}]
    lines = Doctor(slurm, tmp_path, {"cluster": {"node_groups": groups}})(code=1)
    assert failed(lines) == {"partition gpus": "there is no such partition; there are: gpu, cpu, all, preempt"}
    assert "of gpu in the site file" in line_of(lines, "partition gpus")["do"]
    assert line_of(lines, "probe in cpu")["level"] == "pass"  # the rest is looked at all the same


def test_a_stale_mask(doctor: Doctor) -> None:
    lines = doctor(code=1, CUDA_VISIBLE_DEVICES="7")
    assert list(failed(lines)) == ["GPU mask"]
    assert "stale on cpu1, cpu2: CUDA_VISIBLE_DEVICES=7" in failed(lines)["GPU mask"]
    assert "this shell's" in failed(lines)["GPU mask"]


def test_an_unshared_folder(slurm_hosts: SlurmCluster, tmp_path: Path) -> None:
    """One name, another folder on each node."""
    doctor = Doctor(slurm_hosts, tmp_path)

    def there() -> dict[str, str]:
        return {node: slurm_hosts.run_on(node, "ls", "-A", slurm_hosts.local) for node in slurm_hosts.nodes}

    before = there()
    lines = doctor(code=1, folder=slurm_hosts.local)
    assert list(failed(lines)) == ["shared folder"]
    assert "is not shared: cpu1, cpu2, gpu1, gpu2 have another folder" in failed(lines)["shared folder"]
    assert there() == before


def test_a_folder_that_nodes_do_not_have(slurm_hosts: SlurmCluster, tmp_path: Path) -> None:
    folder = Path("/dev/shm") / f"rlhpc-doctor-test-{os.getpid()}"
    folder.mkdir()
    try:
        lines = Doctor(slurm_hosts, tmp_path)(code=1, folder=folder)
        assert "have no such folder" in failed(lines)["shared folder"]
    finally:
        folder.rmdir()


def test_no_accounting(slurm_without_accounting: SlurmCluster, tmp_path: Path) -> None:
    doctor = Doctor(slurm_without_accounting, tmp_path)
    line = line_of(doctor(code=0), "accounting")
    assert (line["level"], line["found"]) == ("warn", "none (AccountingStorageType=accounting_storage/none)")
    with configured(slurm_without_accounting, "MinJobAge=300", "MinJobAge=30"):
        assert list(failed(doctor("--nodes", "0", code=1))) == ["MinJobAge"]


def test_accounting_is_away(doctor: Doctor) -> None:
    if not doctor.cluster.has_accounting:
        pytest.skip("the small cluster has no accounting")
    doctor.cluster.stop_accounting()
    try:
        line = line_of(doctor("--nodes", "0", code=0), "accounting")
    finally:
        doctor.cluster.start_accounting()
    assert line["level"] == "warn" and "sacct does not answer" in line["found"]


def test_requeue_disabled(doctor: Doctor) -> None:
    lines = doctor(code=1, SBATCH_NO_REQUEUE="1")
    assert list(failed(lines)) == ["requeue"]
    assert "disabled" in failed(lines)["requeue"] and "SBATCH_NO_REQUEUE" in failed(lines)["requeue"]
    with configured(doctor.cluster, "JobRequeue=1", "JobRequeue=0"):
        line = line_of(doctor(code=0), "requeue")
    # rlhpc asks for it itself, and gets it
    assert (
        line["level"] == "warn"
        and "disabled by default (JobRequeue=0)" in line["found"]
        and "Requeue=1" in line["found"]
    )


def test_a_cut_node(slurm_hosts: SlurmCluster, tmp_path: Path) -> None:
    """A node of a running cluster that nobody has missed yet; the others are looked at."""
    slurm_hosts.cut("cpu2")
    try:
        lines = Doctor(slurm_hosts, tmp_path)("--start", "20", code=1)
    finally:
        slurm_hosts.restore("cpu2")
        slurm_hosts.wait_for_nodes()
    assert "probe in cpu" in failed(lines)
    assert line_of(lines, "probe in gpu")["level"] == "pass"


def test_a_busy_partition(doctor: Doctor) -> None:
    """The probe is cancelled when it does not start in time."""
    job = doctor.cluster.run(
        "sbatch", "--parsable", "--partition=gpu", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=sleep 120"
    ).strip()
    try:
        until(lambda: doctor.cluster.run("squeue", "-h", "-j", job, "-o%T").strip() == "RUNNING", "the job runs", 30)
        lines = doctor("--start", "3", code=0)
    finally:
        doctor.cluster.run("scancel", job)
    line = line_of(lines, "probe in gpu")
    assert line["level"] == "warn" and "did not start within 3 s" in line["found"]


def test_being_told_to_end(doctor: Doctor) -> None:
    hold = doctor.cluster.run(
        "sbatch", "--parsable", "--partition=gpu", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=sleep 120"
    ).strip()
    process = subprocess.Popen(
        doctor.command("--folder", str(doctor.runs)), env=doctor.environment(), cwd=ROOT,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        queue = ("squeue", "--noheader", "--name=rlhpc-doctor")
        until(lambda: len(doctor.cluster.run(*queue).splitlines()) == 2, "both probes are there", 30)
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 130
    finally:
        process.kill()
        process.wait()
        doctor.cluster.run("scancel", hold)
    doctor.nothing_is_left(doctor.runs)
