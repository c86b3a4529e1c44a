"""A run's folder with the records of another user's or run's job."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rlhpc.jobs.paths import RunPaths
from rlhpc.jobs.segment import JobRecord, SegmentJournal

#: Jobs of the user: a training of another program, and its array.
SQUEUE = """#!/bin/sh
echo "squeue $*" >> CALLS
case "$*" in
*--name=analysis*) echo 12;;
*--name=*) ;;
*"--states=all"*--me*|*--me*"--states=all"*) echo '12|STATE|BeginTime|||NAME';;
*"--jobs=12 "*%j*) echo '12|/home/a/analysis|mine|NAME';;
*"--jobs=12 "*%S*) echo '12|PENDING|BeginTime|2999-01-01T00:00:00';;
*"--jobs=12 "*) echo '12|STATE|BeginTime';;
*) echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1;;
esac
"""


def folder(tmp_path: Path, name: str = "run", **fields: Any) -> SegmentJournal:
    files = SegmentJournal(RunPaths(tmp_path / name), 0)
    files.paths.submit.mkdir(parents=True)
    given = {"token": "t", "executor": "slurm", "job_name": "analysis", "job_id": "12", "phase": "submitted", **fields}
    JobRecord(0, 1, command=[], **given).write(files)
    return files


def claim_of(files: SegmentJournal, **fields: Any) -> None:
    elsewhere = {"pid": 7, "start": 5, "host": "n1/other/x"}
    files.claim(1).write_text(json.dumps({"token": "t", "executor": "slurm", "job": elsewhere, **fields}))
