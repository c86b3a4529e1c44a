"""Plan of helper jobs: Slurm resources, rule for the number of jobs, and checks of `cluster.elastic`. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from rlhpc.config.constraints import Fail
from rlhpc.jobs.slurm import minutes_of
from rlhpc.runtime.allocation import gpus_in
from rlhpc.runtime.cluster import read_key
from rlhpc.runtime.cluster_config import Key, SectionSource

#: Thresholds on the share of a step's time in which the actor waits for rollouts: at or above the first, jobs are added; at or
#: below the second, jobs are removed.
GROW_WAIT_SHARE, SHRINK_WAIT_SHARE = 0.25, 0.05
#: Seconds to pause after a failed job, and the maximum; the pause doubles with each failed job in a row.
_PAUSE_S, _MAX_PAUSE_S = 30.0, 3600.0


@dataclass(frozen=True)
class Bounds:
    """Limits of the helper jobs from the configuration.

    Attributes:
        min_ranks, max_ranks: Minimum and maximum number of ranks.
        per_job: Number of ranks per job.
        hours_per_job: Hours of the budget that a job uses if it runs to its walltime.
        budget: Budget in hours; None for no limit.
        react_s: Seconds for which a condition must hold before the number changes.
    """

    min_ranks: int
    max_ranks: int
    per_job: int
    hours_per_job: float
    budget: float | None = None
    react_s: float = 60.0

    @property
    def min_jobs(self) -> int:
        """Minimum number of jobs with at least `min_ranks` ranks in total."""
        return math.ceil(self.min_ranks / self.per_job)


@dataclass(frozen=True)
class LiveHelperJob:
    """Helper job that has not ended.

    Attributes:
        id: Slurm's id.
        state: `leaving` after it was asked to leave.
        ranks: Number of the job's ranks that have joined and not left.
        hours: Hours of the budget that the job has used.
    """

    id: str
    state: Literal["queued", "running", "leaving"]
    ranks: int = 0
    hours: float = 0.0


@dataclass(frozen=True)
class ClusterState:
    """State of the helper jobs at one moment.

    Attributes:
        now: Seconds of any clock.
        jobs: Jobs that have not ended, oldest first.
        waited_s: Share of the last steps' time in which the actor waited for rollouts; None if unknown.
        requested_ranks: Number of ranks that a user requested; None if there is no request.
        spent: Hours of the budget that ended jobs have used.
        useful: Maximum number of ranks that the run can use.
        num_consecutive_failures: Number of failed jobs since the last successful one. A failed job ended before any of its
            ranks joined, or after an error of a rank.
        failed_at: Time at which the end of the last failed job was detected.
    """

    now: float
    jobs: Sequence[LiveHelperJob] = ()
    waited_s: float | None = None
    requested_ranks: int | None = None
    spent: float = 0.0
    useful: int = 2**31
    num_consecutive_failures: int = 0
    failed_at: float = 0.0


@dataclass(frozen=True)
class Decision:
    """Decision of the rule: the number of jobs to submit and the jobs to end.

    Attributes:
        submit: Number of jobs to submit.
        only_soon: Submit only jobs that would start soon.
        leave: Jobs to remove from the queue, or to ask to leave, by id.
        target: Target number of ranks.
        reason: Reason for the target, as text.
    """

    submit: int = 0
    only_soon: bool = False
    leave: tuple[str, ...] = ()
    target: int = 0
    reason: str = ""


class Rule:
    """Rule for the number of helper jobs. The rule converts all numbers of ranks to whole jobs: it rounds the minimum up, and
    the maximum, the useful ranks and a requested number down.

    Without a requested number, the rule doubles the number of jobs, starting with one, when the actor has waited for rollouts
    for `react_s` seconds and all target jobs are at work. It removes one job when the actor has hardly waited for `react_s`
    seconds, even if jobs are still pending. It removes queued jobs before running jobs, and newer jobs before older jobs.

    Args:
        bounds: Limits from the configuration.
    """

    def __init__(self, bounds: Bounds) -> None:
        self.bounds = bounds
        self._target_jobs: int | None = None  # in jobs
        self._trend_started_at: float | None = None
        self._trend = 0

    def decide(self, state: ClusterState) -> Decision:
        """Returns the decision for the current state."""
        bounds, live_jobs = self.bounds, [job for job in state.jobs if job.state != "leaving"]
        if self._target_jobs is None:  # a restarted driver begins with the present jobs
            self._target_jobs = self._count_jobs_for(len(live_jobs) * bounds.per_job)
        spent_hours = state.spent + sum(job.hours for job in state.jobs)
        if bounds.budget is not None and spent_hours >= bounds.budget:
            return Decision(
                leave=tuple(job.id for job in live_jobs), reason=f"the budget of {bounds.budget:g} hours is used up"
            )
        if state.requested_ranks is not None:
            self._target_jobs, self._trend_started_at, reason = (
                self._count_jobs_for(state.requested_ranks),
                None,
                f"{state.requested_ranks} were asked for",
            )
        else:
            reason = self._adjust_target(state, live_jobs)
        ranks = self._target_jobs * bounds.per_job
        if (surplus := len(live_jobs) - self._target_jobs) > 0:
            ordered_jobs = sorted(
                range(len(live_jobs)), key=lambda job_index: (live_jobs[job_index].state != "queued", -job_index)
            )
            return Decision(
                leave=tuple(live_jobs[index].id for index in ordered_jobs[:surplus]), target=ranks, reason=reason
            )
        num_missing = min(-surplus, self._count_affordable_jobs(state))
        if num_missing <= 0 or self._is_pausing(state):
            return Decision(target=ranks, reason=reason)
        only_if_soon = state.requested_ranks is None and len(live_jobs) * bounds.per_job >= bounds.min_ranks
        return Decision(num_missing, only_if_soon, target=ranks, reason=reason)

    def limit_to_live_jobs(self, num_live_jobs: int) -> None:
        """Limits the target to the number of live jobs, because the queue would not start a new job soon. The target may grow
        again after the actor has waited for another `react_s` seconds.
        """
        self._target_jobs, self._trend_started_at = self._count_jobs_for(num_live_jobs * self.bounds.per_job), None

    def _count_jobs_for(self, num_ranks: int) -> int:
        """Returns the number of whole jobs with up to `num_ranks` ranks, within the limits."""
        bounds = self.bounds
        return max(bounds.min_jobs, min(num_ranks, bounds.max_ranks) // bounds.per_job)

    def _adjust_target(self, cluster_state: ClusterState, live_jobs: Sequence[LiveHelperJob]) -> str:
        """Adjusts the target to the actor's waiting time; returns the reason as text."""
        assert self._target_jobs is not None
        self._target_jobs = min(self._target_jobs, self._count_jobs_for(cluster_state.useful))
        waited_fraction, unchanged_reason = (
            cluster_state.waited_s,
            f"there are to be {self._target_jobs * self.bounds.per_job}",
        )
        trend = (
            0
            if waited_fraction is None
            else 1
            if waited_fraction >= GROW_WAIT_SHARE
            else -1
            if waited_fraction <= SHRINK_WAIT_SHARE
            else 0
        )
        all_running = len(live_jobs) >= self._target_jobs and all(
            job.state == "running" and job.ranks for job in live_jobs
        )
        if trend != self._trend or trend == 0 or (trend > 0 and not all_running):
            self._trend, self._trend_started_at = trend, cluster_state.now
            return unchanged_reason
        if self._trend_started_at is None:
            self._trend_started_at = cluster_state.now
        if cluster_state.now - self._trend_started_at < self.bounds.react_s:
            return unchanged_reason
        self._trend_started_at = cluster_state.now
        if trend > 0:
            self._target_jobs = min(max(1, 2 * self._target_jobs), self._count_jobs_for(cluster_state.useful))
            return f"the actor waits for rollouts {waited_fraction:.0%} of the time"
        self._target_jobs = max(self.bounds.min_jobs, min(self._target_jobs, len(live_jobs)) - 1)
        return f"the actor waits for rollouts only {waited_fraction:.0%} of the time"

    def _count_affordable_jobs(self, cluster_state: ClusterState) -> int:
        bounds = self.bounds
        if bounds.budget is None:
            return len(cluster_state.jobs) + bounds.max_ranks
        reserved_hours = sum(max(job.hours, bounds.hours_per_job) for job in cluster_state.jobs)
        return max(0, int((bounds.budget - cluster_state.spent - reserved_hours) / bounds.hours_per_job + 1e-9))

    @staticmethod
    def _is_pausing(cluster_state: ClusterState) -> bool:
        if not cluster_state.num_consecutive_failures:
            return False
        return cluster_state.now - cluster_state.failed_at < min(
            _PAUSE_S * 2.0 ** (cluster_state.num_consecutive_failures - 1), _MAX_PAUSE_S
        )


#: Keys of an entry that become sbatch options of the same name.
_ENTRY_KEYS: tuple[Key, ...] = ("qos", "constraint")
#: Keys that become sbatch options, with the cluster's values as defaults.
_SHARED_KEYS: tuple[Key, ...] = ("partition", "account")


def submitit_options(options: Sequence[tuple[str, str]]) -> dict[str, Any]:
    """Returns sbatch options as parameters of `submitit.SlurmExecutor`; times are in minutes."""
    converters: dict[str, Callable[[str], Any]] = {
        "nodes": int,
        "ntasks_per_node": int,
        "cpus_per_task": int,
        "time": minutes_of,
    }
    parameters = {name.replace("-", "_"): option_value for name, option_value in options}
    return {name: converters.get(name, str)(option_value) for name, option_value in parameters.items()}


class HelperPlacement(Protocol):
    """Placement of a rank, with the fields that helper plans read."""

    @property
    def accelerators(self) -> Sequence[int]: ...


@dataclass(frozen=True)
class HelperPlan:
    """Jobs of one entry of `cluster.elastic`.

    Attributes:
        group: Group that their ranks join.
        bounds: Limits of their number.
        accelerators: Number of accelerators per rank.
        options: sbatch options, in order.
        minutes: Walltime.
        start_within_s, look_s, signal_lead_s: Values of the configuration keys with these names.
        setup: Shell lines that the batch script runs before the command.
        container: argv of the container runtime, before the command.
        python: Python in the container; None is this one.
        srun: Options of srun for the ranks' job steps; without any, ranks are children of the batch step.
    """

    group: str
    bounds: Bounds
    accelerators: int
    options: tuple[tuple[str, str], ...]
    minutes: int
    start_within_s: float
    look_s: float
    signal_lead_s: int
    setup: tuple[str, ...] = ()
    container: tuple[str, ...] = ()
    python: str | None = None
    srun: tuple[str, ...] = ()

    @property
    def counted(self) -> int:
        """Weight of a job's hour in the budget: its number of accelerators, or 1 without accelerators."""
        return max(1, self.accelerators * self.bounds.per_job)

    def submitit_parameters(self) -> dict[str, Any]:
        """Returns the job's resources as parameters of `submitit.SlurmExecutor`."""
        additional_parameters = {"signal": f"B:USR2@{self.signal_lead_s}", "no-requeue": True}
        return {
            **submitit_options(self.options),
            "setup": list(self.setup),
            "additional_parameters": additional_parameters,
        }

    def lines(self) -> list[str]:
        """Returns the lines that `rlhpc plan` prints."""
        bounds = self.bounds
        ranks_text = f"{bounds.min_ranks} to {bounds.max_ranks} more ranks of {self.group}, {bounds.per_job} a job"
        hours_unit = "accelerator-hours" if self.accelerators else "node-hours"
        budget_text = "" if bounds.budget is None else f", {bounds.budget:g} {hours_unit} in all"
        return [
            f"# helpers: {ranks_text}{budget_text}",
            *(f"#SBATCH --{name}={option_value}" for name, option_value in self.options),
        ]


def helper_plans(section: SectionSource, placements: Mapping[str, Sequence[HelperPlacement]]) -> tuple[HelperPlan, ...]:
    """Returns the plans of a run's helper jobs.

    Args:
        section: Section `cluster`.
        placements: Placements of the ranks that the run starts with.
    """
    return tuple(_build_plan(section, raw_helper, placements) for raw_helper in read_key(section, "elastic", ()))


def _build_plan(
    section: SectionSource, raw_section: SectionSource, placements: Mapping[str, Sequence[HelperPlacement]]
) -> HelperPlan:
    group, per_job = str(read_key(raw_section, "group", "rollout")), int(read_key(raw_section, "ranks_per_job", 1))
    group_ranks = placements.get(group) or ()
    max_accelerators = max((len(rank.accelerators) for rank in group_ranks), default=0)
    accelerators = int(read_key(raw_section, "accelerators_per_rank", max_accelerators))
    gres_text, num_accelerators = read_key(raw_section, "gres"), accelerators * per_job
    if num_accelerators and gpus_in(gres_text) is None:
        name = read_key(raw_section, "gres_name", read_key(section, "gres_name", "gpu"))
        gres_text = ",".join(filter(None, (gres_text, f"{name}:{num_accelerators}")))
    time = str(read_key(raw_section, "time", "01:00:00"))
    option_values: dict[str, Any] = {key: read_key(raw_section, key, read_key(section, key)) for key in _SHARED_KEYS}
    option_values |= {key: read_key(raw_section, key) for key in _ENTRY_KEYS}
    option_values |= {"nodes": 1, "ntasks-per-node": 1, "cpus-per-task": read_key(raw_section, "cpus_per_node")}
    option_values |= {"mem": read_key(raw_section, "mem"), "gres": gres_text or None, "time": time}
    options = tuple(
        (name, str(option_value)) for name, option_value in option_values.items() if option_value is not None
    )
    time_minutes = minutes_of(time)
    budget = read_key(raw_section, "max_gpu_hours")
    bounds = Bounds(
        int(read_key(raw_section, "min", 0)), int(read_key(raw_section, "max", 1)), per_job,
        max(1, num_accelerators) * time_minutes / 60,
        None if budget is None else float(budget), float(read_key(raw_section, "react_s", 60.0)),
    )  # fmt: skip
    return HelperPlan(
        group, bounds, accelerators, options, time_minutes, float(read_key(raw_section, "start_within_s", 300.0)),
        float(read_key(raw_section, "look_s", 15.0)), int(read_key(raw_section, "signal_lead_s", 30)),
        tuple(read_key(section, "setup", ())), tuple(read_key(section, "container", ())),
        read_key(section, "container_python") if read_key(section, "container", ()) else None,
        tuple(read_key(section, "srun", ())),
    )  # fmt: skip


def check_elastic(section: SectionSource, groups: Collection[str], fail: Fail, missing_reason: str = "") -> None:
    """Checks that each entry can start a job and that its group can admit ranks during the run.

    Args:
        section: Section `cluster`.
        groups: Groups that admit ranks during the run.
        fail: Builds the error for a key and the rule that it breaks.
        missing_reason: Reason why no group admits ranks, if the configuration can change this.

    Raises:
        ConfigError: An entry breaks a rule; the error names the first broken rule.
    """
    checked_groups: set[str] = set()
    for index, raw_helper in enumerate(read_key(section, "elastic", ())):
        key_path, group = f"cluster.elastic[{index}]", str(read_key(raw_helper, "group", "rollout"))
        if group not in groups:
            rule_text = f"groups of this run that take ranks under way: {', '.join(groups) or 'none'}"
            raise fail(f"{key_path}.group", f"{rule_text}; {missing_reason}" if missing_reason else rule_text)
        if group in checked_groups:
            raise fail(f"{key_path}.group", "there is another entry for it: a group has one")
        checked_groups.add(group)
        bounds = _build_plan(section, raw_helper, {}).bounds
        if bounds.max_ranks < max(bounds.min_ranks, bounds.per_job):
            raise fail(
                f"{key_path}.max", f"it must be at least min ({bounds.min_ranks}) and ranks_per_job ({bounds.per_job})"
            )
        if bounds.max_ranks < bounds.min_jobs * bounds.per_job:
            raise fail(
                f"{key_path}.max",
                f"min ({bounds.min_ranks}) takes {bounds.min_jobs} jobs of {bounds.per_job} ranks: it must be at least "
                f"{bounds.min_jobs * bounds.per_job}, or min or ranks_per_job smaller",
            )
        if bounds.budget is not None and bounds.budget < bounds.hours_per_job:
            raise fail(
                f"{key_path}.max_gpu_hours",
                f"one job takes {bounds.hours_per_job:g} (time {read_key(raw_helper, 'time')}): give more, or a shorter time",
            )
