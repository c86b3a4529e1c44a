"""What Slurm's accounting says about jobs and their steps: one `sacct` query, and its rows."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from rlhpc.runtime.allocation import expand_hostlist
from rlhpc.runtime.errors import ConfigError, RlhpcError
from rlhpc.runtime.slurm import TIMEOUT_S, ask

#: JobName comes last because it may contain the separator.
FIELDS = (
    "JobID", "State", "ElapsedRaw", "Start", "End", "AllocCPUS", "AllocTRES", "TotalCPU", "MaxRSS", "NodeList",
    "Partition", "JobName",
)  # fmt: skip
_TOTAL_S = 45.0
_PAUSES_S = (0.5, 1.0, 2.0)
_JOB = re.compile(r"^(\d+(?:_\d+)?)(?:\+(\d+))?(?:\.(\w+))?$")
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
#: What sacct says if trying again is pointless.
_NO_ACCOUNTING = re.compile(
    r"accounting storage is disabled|Slurm accounting.*(?:disabled|not running)|establish a configuration source",
    re.IGNORECASE,
)
_LIVE = ("RUNNING", "SUSPENDED", "COMPLETING", "RESIZING", "STOPPED", "SIGNALING", "STAGE_OUT")


class NoAccounting(RlhpcError):
    """sacct has no data; the message says why."""


@dataclass(frozen=True)
class JobIds:
    """Slurm jobs of a run.

    Attributes:
        ids: Job ids, in the order in which they were found.
        since: Unix time before which none of them was submitted; the ids may have been used for earlier jobs.
        own: The jobs that rlhpc submitted, as opposed to allocations that it was started in.
        drivers: How many times a driver was started, as far as is known.
    """

    ids: tuple[str, ...]
    since: float | None = None
    own: frozenset[str] = frozenset()
    drivers: int = 0


@dataclass
class Row:
    """A step, or one start of a job's component with its `steps`."""

    job_id: str
    component: int
    step: str
    state: str
    elapsed: float
    start: float | None
    end: float | None
    cpus: int
    gpus: int | None
    memory: int | None
    cpu_time: float
    max_rss: int | None
    nodes: list[str]
    partition: str
    name: str
    steps: list[Row] = field(default_factory=list)

    @property
    def live(self) -> bool:
        return self.state in _LIVE

    @property
    def measured(self) -> bool:
        """Whether the processor time is known: Slurm knows a step's only once it is over, and at some sites never."""
        return not self.live and (self.cpu_time > 0 or self.max_rss is not None)

    @property
    def span(self) -> tuple[float, float]:
        start = self.start or 0.0
        return start, start + self.elapsed


def query(jobs: JobIds, *, timeout_s: float = TIMEOUT_S, sleep: Callable[[float], None] = time.sleep) -> list[Row]:
    """Everything that sacct knows about the jobs: one command, retried a few times if it fails.

    Raises:
        NoAccounting: There is no sacct, no accounting, or no answer in time.
    """
    if not jobs.ids:
        raise NoAccounting("the run had no Slurm jobs")
    if shutil.which("sacct") is None:
        raise NoAccounting("there is no sacct on this machine")
    argv = ["sacct", "--duplicates", "--parsable2", "--noheader", "--noconvert", f"--jobs={','.join(jobs.ids)}"]
    if jobs.since is not None:
        argv.append(f"--starttime={time.strftime('%Y-%m-%dT%H:%M:%S', time.localtime(jobs.since))}")
    argv.append(f"--format={','.join(FIELDS)}")
    end, said = time.monotonic() + _TOTAL_S, ""
    for pause in (0.0, *_PAUSES_S):
        if pause:
            sleep(pause)
        left = end - time.monotonic()
        if left <= 0:
            break
        answer = ask(*argv, timeout_s=min(timeout_s, left))
        if answer.ok:
            if rows := parse(answer.lines):
                return rows
            raise NoAccounting(f"sacct knows nothing of job {', '.join(jobs.ids)}")
        said = answer.words
        if answer.code == 127 or _NO_ACCOUNTING.search(" ".join(answer.lines)):
            raise NoAccounting(said)
    raise NoAccounting(said)


def parse(lines: Iterable[str]) -> list[Row]:
    """The starts of the jobs' components with their steps, in sacct's order: steps follow the start they belong to."""
    starts: list[Row] = []
    for line in lines:
        row = _row(line)
        if row is None:
            continue
        if not row.step:
            starts.append(row)
            continue
        mine = [s for s in starts[::-1] if (s.job_id, s.component) == (row.job_id, row.component)]
        if mine:
            mine[0].steps.append(row)
    for start in starts:
        _mend(start)
    return starts


def _mend(start: Row) -> None:
    """Restores a start time from the steps: a job that was updated while being requeued has lost its own."""
    begun = [step.start for step in start.steps if step.start is not None]
    if start.elapsed == 0 and start.start is None and begun:
        ends = [step.span[1] for step in start.steps]
        start.start = min(begun)
        start.elapsed = max(0.0, (max(ends) if start.end is None else start.end) - start.start)


def _row(line: str) -> Row | None:
    words = line.rstrip("\n").split("|", len(FIELDS) - 1)
    match = _JOB.match(words[0])
    if match is None or len(words) < len(FIELDS):
        return None
    cell = dict(zip(FIELDS, words, strict=True))
    tres = dict(part.split("=", 1) for part in cell["AllocTRES"].split(",") if "=" in part)
    try:
        nodes = expand_hostlist(cell["NodeList"]) if cell["NodeList"] not in ("", "None assigned") else []
    except ConfigError:
        nodes = []
    return Row(
        job_id=match[1],
        component=int(match[2] or 0),
        step=match[3] or "",
        state=(cell["State"].split() or [""])[0],
        elapsed=float(cell["ElapsedRaw"] or 0) if cell["ElapsedRaw"].isdigit() else 0.0,
        start=_moment(cell["Start"]),
        end=_moment(cell["End"]),
        cpus=int(cell["AllocCPUS"]) if cell["AllocCPUS"].isdigit() else 0,
        gpus=_gpus(tres),
        memory=_bytes(tres.get("mem", "")),
        cpu_time=_seconds(cell["TotalCPU"]),
        max_rss=_bytes(cell["MaxRSS"]),
        nodes=nodes,
        partition=cell["Partition"],
        name=cell["JobName"],
    )


def _moment(text: str) -> float | None:
    try:
        return time.mktime(time.strptime(text, "%Y-%m-%dT%H:%M:%S"))
    except ValueError:
        return None  # Unknown, None


def _seconds(text: str) -> float:
    """`[days-[hours:]]minutes:seconds[.fraction]`."""
    days, _, rest = text.rpartition("-")
    try:
        total = float(days or 0) * 86400.0
        for scale, part in zip((1.0, 60.0, 3600.0), reversed(rest.split(":")), strict=False):
            total += scale * float(part)
    except ValueError:
        return 0.0
    return total


def _bytes(text: str) -> int | None:
    match = re.match(r"^([\d.]+)([KMGT]?)[nc]?$", text.strip())
    return round(float(match[1]) * _UNITS[match[2]]) if match else None


def _gpus(tres: Mapping[str, str]) -> int | None:
    """Number of GPUs; None if the site does not count them, or there are none."""
    if "gres/gpu" in tres:
        return int(tres["gres/gpu"])
    typed = [int(count) for name, count in tres.items() if name.startswith("gres/gpu:")]
    return sum(typed) if typed else None
