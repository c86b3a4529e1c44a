"""What a job of helpers asks Slurm for, and what must hold of `cluster.elastic`. Pure functions."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rlhpc.config.constraints import Fail
from rlhpc.jobs.elastic.rule import Bounds
from rlhpc.jobs.walltime import minutes_of
from rlhpc.runtime.allocation import gpus_in
from rlhpc.runtime.cluster import read_key
from rlhpc.runtime.cluster_config import Given, Key

#: Keys of an entry that become sbatch options of the same name; those of the second kind are the cluster's where omitted.
_OWN: tuple[Key, ...] = ("qos", "constraint", "mem")
_SHARED: tuple[Key, ...] = ("partition", "account")


class Placed(Protocol):
    """What is asked of a rank's place."""

    @property
    def accelerators(self) -> Sequence[int]: ...


@dataclass(frozen=True)
class HelperPlan:
    """The jobs of one entry of `cluster.elastic`.

    Attributes:
        group: Group that their ranks join.
        bounds: How many there may be.
        accelerators: Of a rank.
        options: sbatch options, in order.
        minutes: Walltime.
        start_within_s, look_s, signal_lead_s: As in the configuration.
        setup: Lines of the job's script before it starts.
        container: Words before the command.
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

    @property
    def counted(self) -> int:
        """What an hour of a job counts in the budget: its accelerators or, without any, its node."""
        return max(1, self.accelerators * self.bounds.per_job)

    def submitit_parameters(self) -> dict[str, Any]:
        """The job's resources as parameters of `submitit.SlurmExecutor`."""
        parameters: dict[str, Any] = {name.replace("-", "_"): value for name, value in self.options}
        for name in ("nodes", "ntasks_per_node", "cpus_per_task"):
            if name in parameters:
                parameters[name] = int(parameters[name])
        additional = {"signal": f"B:USR2@{self.signal_lead_s}", "no-requeue": True}
        return {**parameters, "time": self.minutes, "setup": list(self.setup), "additional_parameters": additional}

    def lines(self) -> list[str]:
        """What `rlhpc plan` prints."""
        bounds = self.bounds
        ranks = f"{bounds.least} to {bounds.most} more ranks of {self.group}, {bounds.per_job} a job"
        hours = "accelerator-hours" if self.accelerators else "node-hours"
        budget = "" if bounds.budget is None else f", {bounds.budget:g} {hours} in all"
        return [f"# helpers: {ranks}{budget}", *(f"#SBATCH --{name}={value}" for name, value in self.options)]


def helper_plans(section: Given, placements: Mapping[str, Sequence[Placed]]) -> tuple[HelperPlan, ...]:
    """The jobs of helpers of a run.

    Args:
        section: Section `cluster`.
        placements: Where the ranks are that the run starts with.
    """
    return tuple(_plan(section, raw, placements) for raw in read_key(section, "elastic", ()))


def _plan(section: Given, raw: Given, placements: Mapping[str, Sequence[Placed]]) -> HelperPlan:
    group, per_job = str(read_key(raw, "group", "rollout")), int(read_key(raw, "ranks_per_job", 1))
    own = placements.get(group) or ()
    given = read_key(raw, "accelerators_per_rank")
    accelerators = int(given) if given is not None else max((len(rank.accelerators) for rank in own), default=0)
    options: list[tuple[str, str]] = [
        (key, str(value)) for key in _SHARED if (value := read_key(raw, key, read_key(section, key))) is not None
    ]
    options += [(key, str(value)) for key in _OWN[:2] if (value := read_key(raw, key)) is not None]
    options += [("nodes", "1"), ("ntasks-per-node", "1")]
    options += [("cpus-per-task", str(cpus)) for cpus in [read_key(raw, "cpus_per_node")] if cpus is not None]
    options += [("mem", str(memory)) for memory in [read_key(raw, "mem")] if memory is not None]
    gres, count = read_key(raw, "gres"), accelerators * per_job
    if count and gpus_in(gres) is None:
        name = read_key(raw, "gres_name", read_key(section, "gres_name", "gpu"))
        gres = ",".join(filter(None, (gres, f"{name}:{count}")))
    time = str(read_key(raw, "time", "01:00:00"))
    options += [*((("gres", str(gres)),) if gres else ()), ("time", time)]
    minutes = minutes_of(time)
    budget = read_key(raw, "max_gpu_hours")
    bounds = Bounds(
        int(read_key(raw, "min", 0)), int(read_key(raw, "max", 1)), per_job, max(1, count) * minutes / 60,
        None if budget is None else float(budget), float(read_key(raw, "react_s", 60.0)),
    )  # fmt: skip
    return HelperPlan(
        group, bounds, accelerators, tuple(options), minutes, float(read_key(raw, "start_within_s", 300.0)),
        float(read_key(raw, "look_s", 15.0)), int(read_key(raw, "signal_lead_s", 30)),
        tuple(read_key(section, "setup", ())), tuple(read_key(section, "container", ())),
    )  # fmt: skip


def check_elastic(section: Given, groups: Collection[str], fail: Fail, why_none: str = "") -> None:
    """Refuses entries that could never start a job, or whose ranks nobody could take in.

    Args:
        section: Section `cluster`.
        groups: Those that take ranks under way.
        fail: Makes the error for a key and the rule that it breaks.
        why_none: Why there are none, where something can be changed.

    Raises:
        ConfigError: The first rule that is broken.
    """
    seen: set[str] = set()
    for index, raw in enumerate(read_key(section, "elastic", ())):
        at, group = f"cluster.elastic[{index}]", str(read_key(raw, "group", "rollout"))
        if group not in groups:
            known = f"groups of this run that take ranks under way: {', '.join(groups) or 'none'}"
            raise fail(f"{at}.group", f"{known}; {why_none}" if why_none else known)
        if group in seen:
            raise fail(f"{at}.group", "there is another entry for it: a group has one")
        seen.add(group)
        bounds = _plan(section, raw, {}).bounds
        if bounds.most < max(bounds.least, bounds.per_job):
            raise fail(f"{at}.max", f"it must be at least min ({bounds.least}) and ranks_per_job ({bounds.per_job})")
        if bounds.most < bounds.least_jobs * bounds.per_job:
            raise fail(
                f"{at}.max",
                f"min ({bounds.least}) takes {bounds.least_jobs} jobs of {bounds.per_job} ranks: it must be at least "
                f"{bounds.least_jobs * bounds.per_job}, or min or ranks_per_job smaller",
            )
        if bounds.budget is not None and bounds.budget < bounds.hours_per_job:
            raise fail(
                f"{at}.max_gpu_hours",
                f"one job takes {bounds.hours_per_job:g} (time {read_key(raw, 'time')}): give more, or a shorter time",
            )
