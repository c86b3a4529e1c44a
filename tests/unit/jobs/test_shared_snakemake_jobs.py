"""Several Snakemakes at once over the same outputs: the Slurm executor's own code, with a stand-in for sbatch and squeue."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.extras import need_extra

need_extra("slurm")

import snakemake_executor_plugin_slurm as plugin
from snakemake_interface_executor_plugins.executors.base import SubmittedJobInfo
from throttler import Throttler

from rlhpc.jobs import snakemake_slurm
from rlhpc.jobs.probes import JobReport, JobState
from rlhpc.jobs.slurm import JobIdentity
from rlhpc.jobs.snakemake_slurm import keep_unanswered_jobs, share_jobs


class Input(str):
    is_ancient = False


class Cluster:
    """Slurm as Snakemake sees it: jobs with a state each, and whether queries are answered."""

    def __init__(self) -> None:
        self.states: dict[str, str] = {}
        self.jobs: dict[str, Any] = {}
        self.cancelled: list[str] = []
        self.answers = True

    def submit(self, job: Any) -> str:
        job_id = str(len(self.states) + 1)
        assert not self.live(job.output), f"{job.output} is being made by jobs {self.live(job.output)} already"
        self.states[job_id], self.jobs[job_id] = "PENDING", job
        return job_id

    def end(self, job_id: str, state: str) -> None:
        self.states[job_id] = state
        if state == "COMPLETED":
            for path in self.jobs[job_id].output:
                Path(path).write_text(job_id)

    def live(self, output: list[str] | None = None) -> list[str]:
        return [
            job_id
            for job_id, state in self.states.items()
            if state in ("PENDING", "RUNNING") and output in (None, self.jobs[job_id].output)
        ]

    def made(self, output: list[str]) -> list[str]:
        """Returns the jobs that have made an output."""
        return [i for i, state in self.states.items() if state == "COMPLETED" and self.jobs[i].output == output]

    # as a probe

    def query(self, job_ids: list[str]) -> dict[str, JobReport]:
        return {job_id: self.query_job(job_id) for job_id in job_ids}

    def query_job(self, job_id: str) -> JobReport:
        if not self.answers:
            return JobReport(JobState.UNKNOWN, conclusive=False)
        return JobReport(JobState.parse(self.states.get(job_id, "UNKNOWN")))

    def leave(self, job_ids: list[str]) -> None:
        pass

    def identify(self, job_id: str) -> JobIdentity:
        return JobIdentity("uuid", os.getcwd(), f"rule_{self.jobs[job_id].rule.name}_wildcards_x")


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    cluster = Cluster()

    class Executor(plugin.Executor):  # type: ignore[misc]
        def run_job(self, job: Any) -> None:
            job_id = cluster.submit(job)
            self.submitted_here.append(job_id)
            self.report_job_submission(SubmittedJobInfo(job, external_jobid=job_id, aux={"slurm_logfile": Path("log")}))

    async def query(command: str, logger: Any) -> tuple[dict[str, str] | None, float | None]:
        return (dict(cluster.states), 0.01) if cluster.answers else (None, None)

    def cancel(jobs: list[Any], *_: Any) -> None:
        cluster.cancelled += [job.external_jobid for job in jobs]

    monkeypatch.setattr(plugin, "Executor", Executor)
    monkeypatch.setattr(plugin, "query_job_status", query)
    monkeypatch.setattr(plugin, "cancel_slurm_jobs", cancel)
    monkeypatch.setattr(plugin, "get_min_job_age", lambda: 300)
    monkeypatch.setattr(plugin, "is_query_tool_available", lambda name: True)
    monkeypatch.setattr(plugin.subprocess, "check_output", lambda *_, **__: "")
    monkeypatch.setattr(snakemake_slurm, "SlurmProbe", lambda: cluster)
    monkeypatch.setattr(snakemake_slurm, "SharedProbe", lambda probe: probe)
    monkeypatch.setattr(snakemake_slurm, "identify_job", cluster.identify)
    keep_unanswered_jobs()
    share_jobs()
    share_jobs()  # of a workflow that includes another
    return cluster


class Snakemake:
    """One Snakemake's executor, and which of its jobs it takes for finished or failed."""

    def __init__(self, forced: bool = False) -> None:
        self.finished: list[Any] = []
        self.failed: list[Any] = []
        executor: Any = plugin.Executor.__new__(plugin.Executor)
        scheduler = SimpleNamespace(
            finish_callback=self.finished.append, error_callback=self.failed.append, submit_callback=lambda job: None
        )
        settings = SimpleNamespace(
            status_attempts=2, init_seconds_before_status_checks=1, keep_successful_logs=True, requeue=False,
            status_command="sacct",
        )  # fmt: skip
        dag = SimpleNamespace(reason=lambda job: SimpleNamespace(forced=forced))
        executor.workflow = SimpleNamespace(executor_settings=settings, scheduler=scheduler, dag=dag)
        executor.logger, executor.run_uuid = logging.getLogger("test"), "uuid"
        executor.status_rate_limiter = Throttler(rate_limit=100_000, period=1)
        executor._status_query_calls = executor._status_query_failures = 0
        executor._status_query_total_seconds = executor._status_query_max_seconds = 0.0
        executor._status_query_min_seconds, executor._status_query_cycle_rows = None, []
        executor._preemption_warning, executor.next_seconds_between_status_checks = False, 1
        executor._submitted_job_clusters = set()
        executor.print_job_error = lambda *_, **__: None
        executor.active_jobs, executor.lock, executor.submitted_here = [], threading.Lock(), []
        self.executor = executor

    def run(self, job: Any) -> None:
        self.executor.run_job(job)

    def check(self) -> None:
        """One round of `RemoteExecutor._wait_for_jobs`."""

        async def check() -> list[Any]:
            jobs, self.executor.active_jobs = self.executor.active_jobs, []
            return [info async for info in self.executor.check_active_jobs(jobs)]

        remaining = asyncio.run(check())
        self.executor.active_jobs += remaining


def job(
    folder: Path, name: str = "eval", params: tuple[Any, ...] = ("policy", 20), inputs: list[str] | None = None
) -> Any:
    """A job as two Snakemakes see it: equal, not the same."""
    return SimpleNamespace(
        rule=SimpleNamespace(name=name), jobid=1, is_group=lambda: False, log=[str(folder / "logs" / f"{name}.log")],
        output=[str(folder / f"{name}.json")], input=[Input(path) for path in inputs or []],
        non_derived_params=[*params, object()], register=lambda external_jobid=None: None,
    )  # fmt: skip


def test_a_second_snakemake_waits_for_the_job_of_the_first(cluster: Cluster, tmp_path: Path) -> None:
    first, second, third = Snakemake(), Snakemake(), Snakemake()
    first.run(job(tmp_path))
    second.run(job(tmp_path))
    for one in (first, second):
        one.check()
        assert not one.finished and len(one.executor.active_jobs) == 1
    cluster.end("1", "COMPLETED")
    third.run(job(tmp_path))  # came to it later: the outputs were missing when it began
    for one in (first, second, third):
        one.check()
        assert len(one.finished) == 1 and not one.failed and not one.executor.active_jobs
    assert list(cluster.states) == ["1"]


def test_other_work_is_submitted(cluster: Cluster, tmp_path: Path) -> None:
    source = tmp_path / "input.json"
    source.touch()
    Snakemake().run(job(tmp_path, inputs=[str(source)]))
    cluster.end("1", "COMPLETED")
    os.utime(tmp_path / "eval.json", (100, 100))
    source.write_text("other content")
    Snakemake().run(job(tmp_path, inputs=[str(source)]))  # its input is newer
    cluster.end("2", "COMPLETED")
    Snakemake().run(job(tmp_path, inputs=[str(source)], params=("policy", 40)))
    cluster.end("3", "COMPLETED")
    Snakemake(forced=True).run(job(tmp_path, inputs=[str(source)], params=("policy", 40)))
    cluster.end("4", "COMPLETED")
    (tmp_path / "eval.json").unlink()
    Snakemake().run(job(tmp_path, inputs=[str(source)], params=("policy", 40)))
    cluster.end("5", "COMPLETED")
    grouped = job(tmp_path, params=("policy", 40))
    grouped.is_group = lambda: True
    Snakemake().run(grouped)
    assert list(cluster.states) == [*"123456"]


def test_an_input_that_another_snakemake_has_touched_is_the_same(cluster: Cluster, tmp_path: Path) -> None:
    """Snakemake touches the outputs of each job that it takes for finished, be it later than the next job's end."""
    source = tmp_path / "input.json"
    source.write_text("content")
    Snakemake().run(job(tmp_path, inputs=[str(source)]))
    cluster.end("1", "COMPLETED")
    os.utime(tmp_path / "eval.json", (100, 100))
    source.touch()
    Snakemake().run(job(tmp_path, inputs=[str(source)]))
    assert list(cluster.states) == ["1"]


def test_ctrl_c_cancels_the_own_jobs_and_those_of_a_snakemake_that_is_gone(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = Snakemake(), Snakemake()
    first.run(job(tmp_path))
    second.run(job(tmp_path))
    second.run(job(tmp_path, name="convert"))
    second.executor.cancel_jobs(second.executor.active_jobs)
    assert cluster.cancelled == ["2"]
    monkeypatch.setattr(snakemake_slurm.ProcessId, "alive", lambda self: False)
    second.executor.cancel_jobs(second.executor.active_jobs)
    assert cluster.cancelled == ["2", "1", "2"]


@pytest.mark.parametrize(
    ("folder", "comment"), [("/elsewhere", "rule_eval"), (None, "rule_other"), (None, "rule_evaluate")]
)
def test_a_job_of_something_else_is_not_cancelled(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str | None, comment: str
) -> None:
    """The file that names a rule's job may have come with the folder: Slurm says whether the job is one of this rule."""
    first, second = Snakemake(), Snakemake()
    first.run(job(tmp_path))
    second.run(job(tmp_path))
    monkeypatch.setattr(snakemake_slurm.ProcessId, "alive", lambda self: False)
    identity = JobIdentity("analysis", folder or os.getcwd(), comment)
    monkeypatch.setattr(snakemake_slurm, "identify_job", lambda job_id: identity)
    second.executor.cancel_jobs(second.executor.active_jobs)
    assert cluster.cancelled == []


def test_a_folder_that_cannot_be_written_keeps_no_job_from_its_submission(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "logs").touch()
    Snakemake().run(job(tmp_path))
    assert list(cluster.states) == ["1"]


@pytest.mark.parametrize("seed", range(40))
def test_each_output_is_made_once_whatever_ends_in_between(cluster: Cluster, tmp_path: Path, seed: int) -> None:
    """Two to four Snakemakes; jobs fail or are cancelled, Slurm is silent at times. `Cluster.submit` refuses a second job."""
    draw = random.Random(seed)
    names = ["eval_10", "eval_20", "convert_20"]
    group = [Snakemake() for _ in range(draw.randint(2, 4))]
    waiting = {(number, name): job(tmp_path, name=name) for number in range(len(group)) for name in names}
    begun: set[tuple[int, str]] = set()

    def retry() -> None:
        for number, one in enumerate(group):
            while one.failed:
                begun.discard((number, one.failed.pop().rule.name))

    for _ in range(80):
        event = draw.choice(("run", "run", "check", "check", "go on", "end", "silence"))
        one = draw.choice(group)
        if event == "run" and (left := sorted(waiting.keys() - begun)):
            number, name = draw.choice(left)
            begun.add((number, name))
            group[number].run(waiting[number, name])
        elif event == "check":
            one.check()
        elif event in ("go on", "end") and (live := cluster.live()):
            ends = ("COMPLETED", "COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
            cluster.end(draw.choice(live), "RUNNING" if event == "go on" else draw.choice(ends))
        elif event == "silence":
            cluster.answers = not cluster.answers
        retry()
    cluster.answers = True
    for _ in range(10):
        for number, name in sorted(waiting.keys() - begun):
            begun.add((number, name))
            group[number].run(waiting[number, name])
        for job_id in cluster.live():
            cluster.end(job_id, "COMPLETED")
        for one in group:
            one.check()
        retry()
    for one in group:
        assert sorted(done.rule.name for done in one.finished) == sorted(names) and not one.executor.active_jobs
    assert all(len(cluster.made(job(tmp_path, name=name).output)) == 1 for name in names)
