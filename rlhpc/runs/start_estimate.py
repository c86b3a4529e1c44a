"""Start estimate (`rlhpc plan --when`): start and end of a run in several job shapes, from the scheduler and `rlhpc tune`."""

from __future__ import annotations

import dataclasses
import itertools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rlhpc.config import total_steps
from rlhpc.config.files import read_files
from rlhpc.config.schema import typed_value
from rlhpc.config.sections import RunConfig
from rlhpc.config.sites import find_site
from rlhpc.jobs.accelerators import with_accelerators
from rlhpc.jobs.paths import RunPaths
from rlhpc.jobs.plan import build_plan, count_noun
from rlhpc.jobs.shared_files import read_json_file
from rlhpc.jobs.slurm import Allowance, EstimatedStart, allowance, has_gpus, minutes_of, would_start
from rlhpc.runs.config_changes import training_fingerprint
from rlhpc.runs.configuration import load_config
from rlhpc.runs.tuning.costs import Costs
from rlhpc.runs.tuning.search import Space, search
from rlhpc.runs.tuning.tune import TuneRequest, configured_candidate, is_allowed, space_of, workload_of
from rlhpc.runs.tuning.workload import Knob
from rlhpc.runtime.cluster_config import ClusterConfig
from rlhpc.runtime.errors import ConfigError, RlhpcError
from rlhpc.runtime.text import align_columns

#: Ratio of walltime to predicted training time, as a reserve for evaluations, checkpoints and errors of the prediction.
_WALLTIME_MARGIN = 1.25
#: Maximum difference in seconds of two times that count as equal: the scheduler plans in intervals of this length.
SAME_S = 60.0


@dataclasses.dataclass(frozen=True)
class JobShape:
    """Shape of a job: nodes, partition and walltime.

    Attributes:
        nodes, accelerators: Total numbers of nodes and accelerators.
        partition: Partition in the job's directives; "" for the default partition, or if node groups name partitions.
        walltime: Walltime in minutes; None for the partition's default.
        overrides: Overrides that make the configuration request this shape.
        configured: True for the shape that the configuration requests.
        script: Job script that requests the shape.
        train_s: Seconds of training; None if unknown.
        usable_s: Seconds of a job that are available for training; None if there is no walltime.
        leaves_gpus_idle: True if the partition's nodes have GPUs and the shape requests none.
    """

    nodes: int
    accelerators: int
    partition: str
    walltime: int | None
    overrides: tuple[str, ...]
    configured: bool
    script: str = ""
    train_s: float | None = None
    usable_s: float | None = None
    leaves_gpus_idle: bool = False

    @property
    def jobs(self) -> int | None:
        """Number of consecutive jobs for the run; None if unknown, or if a job has no time to train."""
        if self.train_s is None or self.usable_s == 0:
            return None
        return 1 if self.usable_s is None else math.ceil(self.train_s / self.usable_s)

    @property
    def hours(self) -> float | None:
        """Accelerator hours, or node hours without accelerators."""
        return None if self.train_s is None else self.train_s * (self.accelerators or self.nodes) / 3600


@dataclasses.dataclass(frozen=True)
class StartTimes:
    """Estimated start and end of a run in a job shape. Assumes that every job after the first starts at once."""

    shape: JobShape
    start: EstimatedStart

    @property
    def end(self) -> float | None:
        """Unix time of the end; None if the run does not start, never ends, or its duration is unknown."""
        train_s = self.shape.train_s
        return None if self.start.time is None or train_s is None or self.never_ends else self.start.time + train_s

    @property
    def never_ends(self) -> bool:
        """True if the walltime is not longer than the reserve at the end of a job, so that no job trains."""
        return self.shape.usable_s == 0

    @property
    def ready_at(self) -> float | None:
        """Unix time of the end, or of the start if the end is unknown; None if the run does not start."""
        return self.start.time if self.end is None else self.end

    def rank(self, earliest: float) -> tuple[bool, int, int, bool, bool]:
        """Returns the sort key: earliest end, or earliest start if the end is unknown; then fewest jobs, no idle GPUs, and the
        configured shape first.

        Args:
            earliest: Earliest `ready_at` of all shapes. Times count from it: shapes that differ from it by less than `SAME_S`
                are equal, wherever the clock stands.
        """
        return (
            self.ready_at is None or self.never_ends,
            int(((self.ready_at or earliest) - earliest) / SAME_S),
            self.shape.jobs or 0,
            self.shape.leaves_gpus_idle,
            not self.shape.configured,
        )


@dataclasses.dataclass(frozen=True)
class StartEstimate:
    """Start estimate of all job shapes.

    Attributes:
        answers: Start times of the shapes, the best first.
        allowance: Allowance of the account, if Slurm reports it.
        unknown_duration: Reason for an unknown duration; "" if the duration is known.
        impossible_shapes: Shapes that the configuration does not allow, with the reasons.
        now: Unix time of the queries.
    """

    answers: Sequence[StartTimes]
    allowance: Allowance | None
    unknown_duration: str
    impossible_shapes: Sequence[str]
    now: float


def estimate_starts(
    request: TuneRequest,
    nodes: Sequence[int],
    partition_names: Sequence[str],
    query_start: Callable[[str], EstimatedStart] = would_start,
) -> StartEstimate:
    """Asks the scheduler for the start of each job shape; returns the estimate.

    Args:
        request: Configuration and options.
        nodes: Numbers of nodes in addition to the configured number; by default half and twice that number.
        partition_names: Partitions in addition to the configured partition; by default the partitions of the site file.
        query_start: Function that returns the start estimate for a job script.

    Raises:
        ConfigError: `nodes` or `partition_names` are set, but the configuration has node groups and therefore only one shape.
    """
    cfg = load_config(request.config, request.overrides, site=request.site)
    if cfg.cluster.node_groups and (nodes or partition_names):
        raise ConfigError(
            "--nodes and --partitions are for configurations without cluster.node_groups; change the groups in the file"
        )
    space, reason = _read_costs(request, cfg)
    now, impossible_shapes, answers = time.time(), list[str](), list[StartTimes]()
    for num_nodes, partition in _list_alternatives(request, cfg, nodes, partition_names):
        try:
            shapes = _shapes(request, cfg, num_nodes, partition, space)
        except RlhpcError as error:
            impossible_shapes.append(f"{count_noun(num_nodes, 'node')}: {error}")
            continue
        candidates = [StartTimes(shape, query_start(shape.script)) for shape in shapes]
        answers.append(sort_answers(candidates)[0])
    return StartEstimate(sort_answers(answers), allowance(cfg.cluster.account), reason, impossible_shapes, now)


def sort_answers(answers: Sequence[StartTimes]) -> list[StartTimes]:
    """Returns the start times, the best first."""
    earliest = min((answer.ready_at for answer in answers if answer.ready_at is not None), default=0.0)
    return sorted(answers, key=lambda answer: answer.rank(earliest))


def _list_alternatives(
    request: TuneRequest, cfg: RunConfig, nodes: Sequence[int], partition_names: Sequence[str]
) -> list[tuple[int, str | None]]:
    """Returns pairs of a number of nodes and a partition, the configured pair first."""
    num_nodes, partition = cfg.cluster.num_nodes, cfg.cluster.partition
    if cfg.cluster.node_groups:
        return [(num_nodes, None)]
    node_counts = [num_nodes, *(nodes or (num_nodes // 2, 2 * num_nodes))]
    partition_choices = [partition, *(partition_names or _find_site_partitions(request.site))]
    return list(dict.fromkeys((n, name) for n, name in itertools.product(node_counts, partition_choices) if n))


def _find_site_partitions(site: str | None) -> list[str]:
    """Returns the partitions that a site file names."""
    if not site:
        return []
    partition_names: list[str] = []
    for _, file_content in read_files(find_site(site)):
        cluster = typed_value(file_content.get("cluster") or {}, ClusterConfig)
        partition_names += [
            section["partition"]
            for section in (cluster, *(cluster.get("node_groups") or ()))
            if section.get("partition")
        ]
    return list(dict.fromkeys(partition_names))


def _read_costs(request: TuneRequest, cfg: RunConfig) -> tuple[Space | None, str]:
    """Returns (search space with the costs that `rlhpc tune` measured for this run, ""), or (None, reason)."""
    paths = RunPaths.from_run_dir(cfg.runner.run_dir, cfg.runner.name)
    record = read_json_file(paths.tuning_record)
    if record is None:
        return None, "how long it takes is not known: rlhpc tune, on such nodes, finds out"
    if record.get("fingerprint") != training_fingerprint(cfg):
        return (
            None,
            f"{paths.tuning_record} is of another configuration, so it is not known how long this one takes: rlhpc tune again",
        )
    try:
        workload = workload_of(cfg, None)
        knobs = tuple(
            Knob(knob.key, (configured_candidate(cfg, workload).settings[knob.key],)) for knob in workload.knobs
        )
        workload = dataclasses.replace(workload, knobs=knobs)
        return space_of(request, workload, Costs.from_json(record["costs"]), cfg, is_local=False), ""
    except (KeyError, TypeError, ValueError) as error:
        return None, f"{paths.tuning_record} cannot be read ({error!r}): rlhpc tune again"


def _shapes(
    request: TuneRequest, cfg: RunConfig, num_nodes: int, partition: str | None, space: Space | None
) -> list[JobShape]:
    """Returns the job shapes of a number of nodes in a partition, one for each candidate walltime.

    Raises:
        ConfigError, PlacementError: The configuration cannot be placed on these nodes.
    """
    is_configured_nodes, is_configured_partition = (
        num_nodes == cfg.cluster.num_nodes,
        partition == cfg.cluster.partition,
    )
    override_words = [] if is_configured_nodes else [f"cluster.num_nodes={num_nodes}"]
    override_words += [] if is_configured_partition else [f"cluster.partition={partition}"]
    step_s = None
    if space is not None:
        shape_request = dataclasses.replace(request, nodes=None if is_configured_nodes else num_nodes)
        shape_space = space_of(shape_request, space.model.workload, space.model.costs, cfg, is_local=False)
        if is_configured_nodes:
            step_s = shape_space.model.predict(shape_space.configured).step_s
        elif best_candidates := search(
            shape_space, 1, lambda candidate: is_allowed(shape_request, candidate, is_local=False)
        ):
            step_s = best_candidates[0].prediction.step_s
            override_words += best_candidates[0].candidate.overrides()[:1]
        else:
            raise ConfigError("no placement is allowed on them")
    shape_cfg = load_config(request.config, [*request.overrides, *override_words], site=request.site)
    train_s = None if step_s is None else step_s * total_steps(cfg)
    shapes = []
    for walltime in walltimes(shape_cfg, train_s):
        time_overrides = [] if walltime == _find_walltime(shape_cfg) else [f"cluster.time={walltime}"]
        sized_cfg = load_config(
            request.config, [*request.overrides, *override_words, *time_overrides], site=request.site
        )
        plan = build_plan(with_accelerators(sized_cfg), launcher="slurm")
        num_accelerators = sum(node.accelerators for node in plan.nodes)
        usable_s = None if walltime is None else max(0.0, 60.0 * walltime - _reserve_s(sized_cfg))
        shapes.append(
            JobShape(
                num_nodes, num_accelerators, str(partition or ""), walltime, (*override_words, *time_overrides),
                not (override_words or time_overrides),
                plan.test_script(), train_s, usable_s,
                not num_accelerators and not sized_cfg.cluster.node_groups and has_gpus(partition),
            )
        )  # fmt: skip
    return shapes


def _find_walltime(cfg: RunConfig) -> int | None:
    time_limits: list[str | None] = [group.time for group in cfg.cluster.node_groups if group.time]
    return min((minutes_of(time_limit) for time_limit in time_limits or [cfg.cluster.time] if time_limit), default=None)


def _reserve_s(cfg: RunConfig) -> float:
    """Returns the seconds at the end of a job that are reserved for saving."""
    return float(max(cfg.cluster.signal_lead_s, cfg.runner.save_reserve_s))


def walltimes(cfg: RunConfig, train_s: float | None) -> list[int | None]:
    """Returns the candidate walltimes in minutes: the configured walltime, and shorter walltimes.

    The shorter walltimes are the shortest that fits the run, and a quarter of the configured one, which back-fill can start
    early.
    """
    configured_minutes = _find_walltime(cfg)
    if any(group.time for group in cfg.cluster.node_groups):
        return [configured_minutes]  # each node group has its own walltime
    candidates: list[int | None] = [configured_minutes]
    if train_s is not None:
        candidates.append(math.ceil((train_s * _WALLTIME_MARGIN + _reserve_s(cfg)) / 60))
    if configured_minutes is not None:
        candidates.append(configured_minutes // 4)
    min_minutes = 2 * _reserve_s(cfg) / 60  # in a shorter job, the reserve takes most of the time
    shorter_walltimes = [
        t for t in candidates[1:] if t and t >= min_minutes and (configured_minutes is None or t < configured_minutes)
    ]
    return [configured_minutes, *dict.fromkeys(shorter_walltimes)]


def render(estimate: StartEstimate) -> str:
    """Formats the output of `rlhpc plan --when`."""
    unit_name = "GPU-hours" if any(answer.shape.accelerators for answer in estimate.answers) else "node hours"
    table = [["", "nodes", "GPUs", "partition", "walltime", "start", "end", "jobs", unit_name]]
    for index, answer in enumerate(estimate.answers):
        shape = answer.shape
        table.append(
            [
                f"{index + 1}{' (as configured)' if shape.configured else ''}",
                str(shape.nodes), str(shape.accelerators), shape.partition or "default",
                "default" if shape.walltime is None else f"{shape.walltime} min",
                answer.start.reason if answer.start.time is None else moment(answer.start.time, estimate.now),
                "-" if answer.end is None else moment(answer.end, estimate.now),
                "-" if shape.jobs is None else str(shape.jobs),
                "-" if shape.hours is None else f"{shape.hours:.3g}",
            ]
        )  # fmt: skip
    return "\n".join(
        [
            "when (sbatch --test-only: an estimate; jobs may end sooner, or others overtake this one)",
            *align_columns(table),
            *(f"not possible on {shape_text}" for shape_text in estimate.impossible_shapes),
            *([estimate.unknown_duration] if estimate.unknown_duration else []),
            *verdict(estimate),
            *_format_account_lines(estimate),
        ]
    )


def verdict(estimate: StartEstimate) -> list[str]:
    """Returns lines about the best shape: a comparison with the next worse shape, and the overrides for the best shape."""
    startable = [answer for answer in estimate.answers if answer.start.time is not None]
    if not startable:
        return ["no shape would start: rlhpc doctor says what this cluster allows"]
    best_answer = startable[0]
    lines = []
    best_time = best_answer.ready_at or 0.0
    worse_answer = next((a for a in startable[1:] if (a.ready_at or 0.0) - best_time >= SAME_S), None)
    if worse_answer is not None:
        have_ends = best_answer.end is not None and worse_answer.end is not None
        verb, num_resources = "end" if have_ends else "start", best_answer.shape.accelerators or best_answer.shape.nodes
        lines.append(
            f"{_describe(best_answer, estimate.now)} {verb}{'s' * (num_resources == 1)} before "
            f"{_describe(worse_answer, estimate.now)}"
            + (
                f": {moment(best_answer.end or 0, estimate.now)}, not {moment(worse_answer.end or 0, estimate.now)}"
                if have_ends
                else ""
            )
        )
    if best_answer.shape.leaves_gpus_idle:
        partition_text = best_answer.shape.partition or "the default partition"
        lines.append(
            f"the nodes of {partition_text} have GPUs, which this run would not use: ask whether the site allows that"
        )
    if best_answer.shape.overrides:
        lines.append(f"for the first: {' '.join(best_answer.shape.overrides)}")
    return lines


def _describe(answer: StartTimes, now: float) -> str:
    shape = answer.shape
    count_text = count_noun(shape.accelerators, "GPU") if shape.accelerators else count_noun(shape.nodes, "node")
    partition_text = f" in {shape.partition}" if shape.partition else ""
    start_text = moment(answer.start.time or now, now)
    return f"{count_text}{partition_text} {start_text if start_text == 'now' else f'from {start_text}'}"


def moment(timestamp: float, now: float) -> str:
    """Formats a Unix time as "now", as a time of today, as a weekday with time, or as a date with time."""
    if timestamp - now < SAME_S:
        return "now"
    local_time, local_now = time.localtime(timestamp), time.localtime(now)
    if local_time[:3] == local_now[:3]:
        return time.strftime("%H:%M", local_time)
    return time.strftime("%A %H:%M" if timestamp - now < 6 * 86400 else "%Y-%m-%d %H:%M", local_time)


def _format_account_lines(estimate: StartEstimate) -> list[str]:
    """Formats the remaining limits of the account, and the shapes that exceed them."""
    account_allowance = estimate.allowance
    if account_allowance is None:
        return ["what the account may use is not known: sshare does not tell"]
    fair_share_text = "" if account_allowance.fair_share is None else f"; fair share {account_allowance.fair_share:.2f}"
    limit_texts = [
        f"{(limit_minutes - used_minutes) / 60:.3g} of {limit_minutes / 60:.3g} {_format_resource_name(resource)}-hours left"
        for resource, (limit_minutes, used_minutes) in account_allowance.minutes.items()
        if limit_minutes > 0
    ]
    lines = [f"account {account_allowance.account}: {', '.join(limit_texts) or 'no limit'}{fair_share_text}"]
    for answer in estimate.answers:
        lines += [f"  {excess_text}" for excess_text in _list_excess_warnings(answer.shape, account_allowance.minutes)]
    return lines


def _format_resource_name(resource: str) -> str:
    return {"gres/gpu": "GPU", "cpu": "CPU"}.get(resource, resource)


def _list_excess_warnings(shape: JobShape, minutes_by_resource: Mapping[str, tuple[float, float]]) -> list[str]:
    """Returns a warning for each limit of the account that a run in this shape would exceed."""
    requirements: dict[str, Any] = {"gres/gpu": shape.accelerators, "node": shape.nodes}
    warnings = []
    for resource, num_required in requirements.items():
        if shape.train_s is None or not num_required or resource not in minutes_by_resource:
            continue
        limit_minutes, used_minutes = minutes_by_resource[resource]
        required_hours = shape.train_s * num_required / 3600
        if required_hours > (limit_minutes - used_minutes) / 60:
            warnings.append(
                f"{count_noun(shape.nodes, 'node')} in {shape.partition or 'the default partition'}: {required_hours:.3g} "
                f"{_format_resource_name(resource)}-hours are more than that"
            )
    return warnings
