"""How a job of helpers is submitted: by a process of its own, so that a Slurm that does not answer keeps nobody waiting, and
nothing of the job that the run's driver is in is handed on.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rlhpc.jobs.elastic.job import HelperJob
from rlhpc.jobs.elastic.plan import HelperPlan
from rlhpc.jobs.slurm import free_of_job
from rlhpc.runtime.errors import SubmitError
from rlhpc.runtime.imports import run_module
from rlhpc.runtime.ownership import make_private
from rlhpc.runtime.slurm import ask

#: How long `sbatch` may take.
_SUBMIT_S = 60.0


def submit(folder: Path, name: str, plan: HelperPlan, run_root: Path) -> str:
    """Submits one job; returns its id.

    Raises:
        SubmitError: In Slurm's words, or submitit's.
    """
    make_private(folder, parents=True)
    job = HelperJob(
        str(run_root), plan.group, plan.bounds.per_job, plan.accelerators, list(plan.container), 60.0 * plan.minutes
    )
    wish = {"folder": str(folder), "name": name, "slurm": plan.submitit_parameters(), "job": asdict(job)}
    done = ask(
        *run_module("rlhpc.jobs.elastic.submitting"), stdin=json.dumps(wish), timeout_s=_SUBMIT_S,
        environment=free_of_job(os.environ), apart=True,
    )  # fmt: skip
    words = done.text.split()
    if not done.ok or not words or not words[-1].isdigit():
        raise SubmitError(f"a job of helpers could not be submitted: {done.words}")
    return words[-1]


def main() -> None:
    """Submits the job that standard input describes, and prints its id."""
    from rlhpc.jobs.executor import make_slurm_executor

    wish: dict[str, Any] = json.loads(sys.stdin.read())
    executor = make_slurm_executor(wish["folder"], wish["name"], wish["slurm"], max_num_timeout=1)
    try:
        print(executor.submit(HelperJob(**wish["job"])).job_id)
    except Exception as error:  # submitit raises RuntimeError, CalledProcessError's text, OSError, ValueError, …
        sys.exit(" ".join(str(error).split()))


if __name__ == "__main__":
    main()
