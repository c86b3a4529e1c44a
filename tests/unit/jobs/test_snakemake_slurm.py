"""Snakemake's Slurm executor, by its own code: which jobs it asks about again when Slurm does not answer."""

from __future__ import annotations

import asyncio
import logging
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.extras import need_extra

need_extra("slurm")

import snakemake_executor_plugin_slurm as plugin
from throttler import Throttler

from rlhpc.jobs.snakemake_slurm import keep_unanswered_jobs

ATTEMPTS = 5
#: What a query gives: states by job, or nothing because it failed.
Answer = dict[str, str] | None


def executor_with(answers: list[Answer], monkeypatch: pytest.MonkeyPatch) -> tuple[Any, list[str]]:
    """Returns the plugin's executor without a workflow, and the list of jobs that it reports as ended."""
    ended: list[str] = []
    queries = iter(answers)

    async def query(command: str, logger: Any) -> tuple[Answer, float | None]:
        answer = next(queries)
        return answer, None if answer is None else 0.01

    monkeypatch.setattr(plugin, "query_job_status", query)
    monkeypatch.setattr(plugin, "get_min_job_age", lambda: 300)
    monkeypatch.setattr(plugin, "is_query_tool_available", lambda name: True)
    executor: Any = plugin.Executor.__new__(plugin.Executor)
    scheduler = SimpleNamespace(finish_callback=ended.append, error_callback=ended.append)
    settings = SimpleNamespace(
        status_attempts=ATTEMPTS, init_seconds_before_status_checks=1, keep_successful_logs=True, requeue=False,
        status_command="sacct",
    )  # fmt: skip
    executor.workflow = SimpleNamespace(executor_settings=settings, scheduler=scheduler)
    executor.logger, executor.run_uuid = logging.getLogger("test"), "uuid"
    executor.status_rate_limiter = Throttler(rate_limit=100_000, period=1)
    executor._status_query_calls = executor._status_query_failures = 0
    executor._status_query_total_seconds = executor._status_query_max_seconds = 0.0
    executor._status_query_min_seconds, executor._status_query_cycle_rows = None, []
    executor._preemption_warning, executor.next_seconds_between_status_checks = False, 1
    executor.print_job_error = lambda *_, **__: None
    return executor, ended


def job(number: int) -> SimpleNamespace:
    return SimpleNamespace(external_jobid=str(number), aux={"slurm_logfile": Path("log")}, job=str(number))


def round_of(executor: Any, jobs: list[Any]) -> list[Any]:
    """Returns the jobs that Snakemake goes on asking about after a round of queries (`_wait_for_jobs`)."""

    async def check() -> list[Any]:
        return [one async for one in executor.check_active_jobs(jobs)]

    return asyncio.run(check())


def test_a_job_whose_state_could_not_be_learned_is_asked_about_again(monkeypatch: pytest.MonkeyPatch) -> None:
    keep_unanswered_jobs()
    keep_unanswered_jobs()  # of a workflow that includes another
    answers: list[Answer] = [None] * (2 * ATTEMPTS) + [{"1": "RUNNING", "2": "COMPLETED"}, {"1": "COMPLETED"}]
    executor, ended = executor_with(answers, monkeypatch)
    jobs = [job(1), job(2)]
    assert round_of(executor, jobs) == jobs and round_of(executor, jobs) == jobs and not ended
    assert round_of(executor, jobs) == jobs[:1] and ended == ["2"]
    assert round_of(executor, jobs[:1]) == [] and ended == ["2", "1"]


def test_no_job_is_lost_or_reported_twice_whatever_the_queries_give(monkeypatch: pytest.MonkeyPatch) -> None:
    keep_unanswered_jobs()
    for seed in range(30):
        draw = random.Random(seed)
        jobs = [job(number) for number in range(6)]
        ends = {one.job: draw.choice(("COMPLETED", "FAILED", "TIMEOUT", "OUT_OF_MEMORY")) for one in jobs}
        rounds: list[list[Answer]] = []
        for _ in range(8):
            failures = draw.choice((0, 1, ATTEMPTS - 1, ATTEMPTS, ATTEMPTS))
            states = {
                name: draw.choice(("RUNNING", "PENDING", "SUSPENDED", "COMPLETED"))
                for name in ends
                if draw.random() < 0.8
            }
            rounds.append([None] * failures + [states] * (failures < ATTEMPTS))
        rounds.append([ends])
        active, reported = jobs, list[str]()
        for answers in rounds:
            executor, ended = executor_with([*answers], monkeypatch)
            monkeypatch.setattr(plugin.subprocess, "check_output", lambda *_, **__: "")
            left = round_of(executor, active)
            reported += ended
            assert sorted([*reported, *(one.job for one in left)]) == sorted(ends), f"seed {seed}"
            active = left
        assert not active
