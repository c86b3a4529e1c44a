"""Alerts on the cluster: requeues, cancelled and killed jobs alert once; Slurm's mail options reach the job."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.alert_hooks import KeptAlerts

from .cluster import SlurmCluster
from .jobs import end_jobs
from .runs import SITE, SlurmRun, until

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(600)]


@pytest.fixture(autouse=True)
def no_job_is_left(slurm: SlurmCluster) -> Iterator[None]:
    yield
    end_jobs(slurm)


@pytest.fixture
def kept(tmp_path: Path) -> KeptAlerts:
    return KeptAlerts(tmp_path / "hook")


def test_slurms_mail_is_asked_for(slurm: SlurmCluster, tmp_path: Path) -> None:
    run = SlurmRun(
        slurm, tmp_path, "cluster.mail_type='END,FAIL,TIME_LIMIT_90'", "cluster.mail_user=me@example.org",
        "runner.max_steps=1000", light=True,
    )  # fmt: skip
    process = run.submit()
    until(lambda: run.job, "the job is submitted")
    shown = slurm.run("scontrol", "show", "job", run.job)
    assert re.search(r"MailUser=me@example\.org MailType=(END,FAIL|FAIL,END),TIME_LIMIT_90", shown), shown
    run.rlhpc("cancel", str(run.root))
    process.wait(120)


def test_a_requeue_alerts_as_preempted_and_then_the_run_completes(
    slurm: SlurmCluster, tmp_path: Path, kept: KeptAlerts
) -> None:
    run = SlurmRun(slurm, tmp_path, "runner.max_steps=60", "runner.save_interval=5", kept.override, light=True)
    site = json.loads(json.dumps(SITE))
    site["cluster"]["node_groups"] = [{"label": "gpu", "partition": "preempt", "gres_name": "gpu:fake"},
                                      {"label": "cpu", "partition": "preempt"}]  # fmt: skip
    run.site.write_text(json.dumps(site))
    process = run.submit()
    run.training()
    nodes = str(len(slurm.nodes))
    slurm.run("sbatch", "--partition=all", f"--nodes={nodes}", "--exclusive", "--output=/dev/null", "--wrap", "sleep 5")
    until(lambda: len(run.attempts) > 1, f"it starts again\n{run.account()}", 150)
    run.finish(process)
    until(lambda: len(kept.read()) >= 2, "both alerts have come")
    assert kept.rules() == ["preempted", "completed"], kept.read()


def test_a_job_that_is_cancelled_alerts_once(slurm: SlurmCluster, tmp_path: Path, kept: KeptAlerts) -> None:
    run = SlurmRun(slurm, tmp_path, "runner.max_steps=100000", "runner.save_interval=5", kept.override, light=True)
    process = run.submit()
    run.training()
    slurm.run("scancel", run.job)
    assert process.wait(120) != 0
    until(lambda: kept.rules(), "the alert has come")
    assert kept.rules() == ["cancelled"], kept.read()


def test_a_job_that_slurm_kills_is_reported_once_by_itself_or_by_the_waiting_command(
    slurm: SlurmCluster, tmp_path: Path, kept: KeptAlerts
) -> None:
    run = SlurmRun(slurm, tmp_path, "runner.max_steps=100000", "runner.save_interval=5", kept.override, light=True)
    process = run.submit()
    run.training()
    slurm.run("scancel", "--full", "--signal=KILL", run.job)  # Slurm calls this cancelled, too
    assert process.wait(180) != 0
    until(lambda: kept.rules(), "the alert has come")
    # the processes of a job do not die at the same moment: it may have time to report, too
    assert kept.rules() == ["cancelled"] and kept.read()[0]["reporter"] in ("job", "waiter"), kept.read()
