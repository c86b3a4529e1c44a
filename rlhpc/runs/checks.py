"""Configuration checks beyond types, for all task types: ranges, names, placement. The checks write nothing."""

from __future__ import annotations

import math
import os
import re
import shutil
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from rlhpc.algorithms.registry import ADVANTAGES, POLICY_LOSSES
from rlhpc.config.alerts import check_alerts
from rlhpc.config.constraints import MAX_EXACT_INTEGER, Fail, check_choices, check_ranges, parse_steps
from rlhpc.config.options import check_components
from rlhpc.config.sections import RunConfig
from rlhpc.config.typed import plain, select
from rlhpc.jobs.elastic.helper_plan import check_elastic
from rlhpc.jobs.paths import RunPaths, SweepPaths
from rlhpc.metrics.alert_rules import DEFAULT_RULES
from rlhpc.runs.checkpointing import check_best
from rlhpc.runs.preflight import FILES_ALONE, Check, Need, run_checks
from rlhpc.runs.task_type import Cfg, TaskType, task_type_of
from rlhpc.runtime.errors import ConfigError, PlacementError
from rlhpc.runtime.files import expand_home, unwritable
from rlhpc.runtime.launchers.srun_commands import NSYS_RESERVED, broken_srun_rule
from rlhpc.runtime.plugins import Registry, suggest_name
from rlhpc.runtime.text import short_repr
from rlhpc.weights.base import STRATEGIES

_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}"
_NAME_RULE = "use letters, digits, '.', '_' and '-' (at most 100), starting with a letter or digit"
_MEMORY = (r"\d+(\.\d+)?[KMGT](i?B)?", "write it with its unit: 80G, 81559M")
_WORD = (r"[^\s'\"\\`$;]+", "it goes into a job's directives: use one word without quotes")
_MAIL_EVENT = r"(NONE|BEGIN|END|FAIL|REQUEUE|ALL|TIME_LIMIT(_[589]0)?|INVALID_DEPEND|STAGE_OUT)"
_DIRECTIVES = {
    "accelerator_memory": _MEMORY,
    **dict.fromkeys(("partition", "account", "qos", "constraint", "gres"), _WORD),
    "mem": (r"\d+[KMGT]?B?", "write it as Slurm does: 64G, 512M or 0 for all"),
    "mail_type": (
        rf"{_MAIL_EVENT}(,{_MAIL_EVENT})*",
        "write events of Slurm in upper case, joined by commas: NONE, BEGIN, END, FAIL, REQUEUE, ALL, TIME_LIMIT, "
        "TIME_LIMIT_90, TIME_LIMIT_80, TIME_LIMIT_50, INVALID_DEPEND or STAGE_OUT",
    ),
    "mail_user": (r"[A-Za-z0-9][A-Za-z0-9._%+@,-]*", "write an address, or a name that the site's mail knows"),
    "time": (r"\d+|\d+:\d+|\d+:\d+:\d+|\d+-\d+(:\d+){0,2}", "write it as Slurm does: 02:00:00, 1-12:00:00, or minutes"),
}


def validate(
    cfg: RunConfig,
    source: str = "configuration",
    sources: Mapping[str, str] | None = None,
    *,
    training: bool = True,
) -> None:
    """Checks a loaded configuration.

    Args:
        cfg: The configuration.
        source: Origin of the configuration, for messages.
        sources: Key → the file or override that set the key, if known.
        training: True to check also values that only training needs: batches, placement, run folder.

    Raises:
        ConfigError: A rule is broken; the message has the key, the value and the allowed values of the first broken rule.
    """

    def make_error(key: str, rule: str) -> ConfigError:
        return ConfigError(f"{(sources or {}).get(key, source)}: {key} is {short_repr(select(cfg, key))}; {rule}")

    task_type = task_type_of(cfg)
    _check_numbers(cfg, task_type, make_error)
    check_choices(cfg, task_type.keys.by_path, make_error)
    check_components(cfg, task_type.keys.by_path, make_error)
    if STRATEGIES.key in task_type.schema:
        _check_registered(STRATEGIES, str(select(cfg, STRATEGIES.key)))
    if training:
        from rlhpc.metrics.loggers import check_loggers

        check_loggers(cfg.runner.logger.logger_backends, plain(cfg.runner.logger.kwargs))
        check_alerts(cfg.runner.alerts, [rule.name for rule in DEFAULT_RULES], make_error)
    for suite in cfg.workflow.eval_suites:
        if not re.fullmatch(_NAME, suite):
            raise make_error("workflow.eval_suites", f"a suite's name becomes a file's: {_NAME_RULE}")
    for key in ("cluster.node_groups", "cluster.elastic"):
        for index, section in enumerate(select(cfg, key) or ()):
            _check_directives(section, f"{key}[{index}]", make_error)
    if rule := broken_srun_rule(cfg.cluster.srun):
        raise make_error("cluster.srun", rule)
    policies = task_type.groups.policies(cfg)
    check_elastic(cfg.cluster, policies.elastic, make_error, policies.closed_reason)
    for key in ("cluster", "workflow.eval_job", "workflow.convert_job"):
        _check_directives(select(cfg, key), key, make_error)
    task_type.checks.check(cfg, make_error, training=training)
    if training:
        check_best(task_type, cfg, make_error)
        _check_runner(cfg, make_error)
        _check_trace(cfg, task_type, make_error)
        _check_placement(cfg, task_type)


def _check_numbers(cfg: Cfg, task_type: TaskType[Cfg], fail: Fail) -> None:
    for key, scalar_value in _iter_scalars(plain(cfg)):
        if isinstance(scalar_value, float) and not math.isfinite(scalar_value):
            raise fail(key, "it must be a finite number")
        if isinstance(scalar_value, int) and abs(scalar_value) > MAX_EXACT_INTEGER:
            raise fail(key, f"it must not be greater than {MAX_EXACT_INTEGER}")
    check_ranges(cfg, task_type.keys.by_path, fail)
    for key in task_type.keys.by_path:
        section, _, name = key.rpartition(".")
        if name == "min_lr" and select(cfg, key) > select(cfg, f"{section}.lr"):
            raise fail(key, f"it must not be above {section}.lr ({select(cfg, f'{section}.lr')})")


def _iter_scalars(tree: Any, prefix: str = "") -> Iterable[tuple[str, Any]]:
    """Yields (dotted key, scalar); the elements of a list have the key of the list."""
    if isinstance(tree, dict):
        for key, tree_value in tree.items():
            yield from _iter_scalars(tree_value, f"{prefix}.{key}" if prefix else str(key))
    elif isinstance(tree, list):
        for tree_value in tree:
            yield from _iter_scalars(tree_value, prefix)
    else:
        yield prefix, tree


def _check_runner(cfg: RunConfig, fail: Fail) -> None:
    name = cfg.runner.name
    if not re.fullmatch(_NAME, name):
        raise fail("runner.name", _NAME_RULE)
    steps = cfg.runner.max_steps if cfg.runner.max_steps != -1 else cfg.runner.max_epochs
    if steps == -1:
        raise fail("runner.max_steps", "one of runner.max_steps and runner.max_epochs must be at least 1")
    if cfg.runner.segments > steps:
        raise fail("runner.segments", f"there cannot be more segments than training steps ({steps})")
    resume = cfg.runner.resume_dir
    checkpoints = RunPaths(Path(cfg.runner.run_dir) / name).checkpoints
    if resume not in (None, "auto") and not expand_home(resume).exists() and not (checkpoints / resume).exists():
        raise fail("runner.resume_dir", "there is no such checkpoint; allowed: null, auto, or a global_step_<N> folder")
    folder = expand_home(cfg.runner.run_dir).absolute() / name
    if SweepPaths(folder).is_there:
        raise fail("runner.name", f"{folder} is the folder of a sweep; choose another name")
    if reason := unwritable(folder):
        raise fail("runner.run_dir", f"{reason}; choose another with runner.run_dir=…")


def _check_trace(cfg: Cfg, task_type: TaskType[Cfg], fail: Fail) -> None:
    for key in ("runner.trace.steps", "runner.trace.profile.steps", "runner.trace.profile.nsys_steps"):
        if parse_steps(select(cfg, key)) is None:
            raise fail(key, "write steps from 1 on, such as 10-12 or 3,7-9")
    if parse_steps(cfg.runner.trace.profile.ranks, first=0) is None:
        raise fail("runner.trace.profile.ranks", "write ranks such as 0 or 0-3,8")
    if reserved_options := [name for name in cfg.runner.trace.profile.nsys_options if name in NSYS_RESERVED]:
        raise fail(
            f"runner.trace.profile.nsys_options.{reserved_options[0]}", "reports are in the run folder: leave it out"
        )
    worker_classes = task_type.groups.worker_classes_of(cfg)
    for key in ("runner.trace.profile.groups", "runner.trace.profile.nsys"):
        for group in select(cfg, key):
            if group not in worker_classes:
                raise fail(key, f"{group} is no worker group of this run; its groups: {', '.join(worker_classes)}")


def _check_directives(section: DictConfig, path: str, fail: Fail) -> None:
    """Checks the values of a job's directives, such as walltimes and partitions, and the accelerator memory."""
    for name, (pattern, rule) in _DIRECTIVES.items():
        if (directive_value := section.get(name)) is not None and not re.fullmatch(pattern, str(directive_value)):
            raise fail(f"{path}.{name}", rule)


def _check_placement(cfg: Cfg, task_type: TaskType[Cfg]) -> None:
    """Checks all placement rules on the machines that the configuration requests."""
    from rlhpc.jobs.accelerators import with_accelerators
    from rlhpc.runtime.allocation import in_slurm_job
    from rlhpc.runtime.cluster import Cluster
    from rlhpc.runtime.placement import HybridComponentPlacement

    cluster = Cluster.planned(cfg.cluster)
    try:
        placement = HybridComponentPlacement(cfg, cluster)
    except PlacementError as error:
        # If the configuration leaves the accelerators open, those of the job or of the partition count.
        if in_slurm_job(os.environ):
            try:
                cluster = Cluster(cfg.cluster)
                placement = HybridComponentPlacement(cfg, cluster)
            except (ConfigError, PlacementError):
                raise error from None
        elif shutil.which("sbatch"):
            try:
                cluster = Cluster.planned(with_accelerators(cfg).cluster)
            except ConfigError:  # Slurm says nothing
                raise error from None
            placement = HybridComponentPlacement(cfg, cluster)
        else:
            raise
    worker_classes, components = list(task_type.groups.worker_classes_of(cfg)), task_type.groups.components(cfg)
    for component in placement.components:
        if component not in worker_classes:
            raise ConfigError(
                f"cluster.component_placement.{component}: no such component; {suggest_name(component, components)}"
                f"components: {', '.join(components)}"
            )
    world_sizes = {name: placement.get_world_size(name) for name in worker_classes}
    ranks_by_role = {name: placement.get_strategy(name).place(cluster) for name in worker_classes}
    engine = {name: placement.get_strategy(name).replica for name in worker_classes}
    task_type.groups.check_placement(
        cfg, world_sizes, {name: len(ranks[0].accelerators) * engine[name] for name, ranks in ranks_by_role.items()}
    )


def check_planned(cfg: RunConfig, resources: Collection[Need] = FILES_ALONE) -> list[Check]:
    """Runs the preflight checks (`ConfigChecks.preflight`) that need only the given resources; writes nothing.

    Args:
        cfg: The configuration.
        resources: Resources that the checks may use.

    Returns:
        The skipped checks, which need other resources. The start of the run makes these checks.

    Raises:
        UserError: A check failed; the message is that of the first failed check.
    """
    from rlhpc.runtime.cluster import Cluster
    from rlhpc.runtime.placement import HybridComponentPlacement

    task_type = task_type_of(cfg)
    placement = HybridComponentPlacement(cfg, Cluster.planned(cfg.cluster))
    strategies = {role: placement.get_strategy(role) for role in task_type.groups.worker_classes_of(cfg)}
    ranks = {role: placement.get_world_size(role) for role in strategies}
    with task_type.checks.trial(cfg) as trial_cfg:
        trial_cfg = task_type.groups.placed(
            trial_cfg, {role: strategy.replica for role, strategy in strategies.items()}
        )
        return run_checks(task_type.checks.preflight(trial_cfg, ranks), resources)


def check_estimators(adv_type: str, loss_type: str) -> None:
    """Checks `algorithm.adv_type` and `algorithm.loss_type`; does not import torch for built-in names.

    Raises:
        ConfigError: An estimator with this name does not exist.
    """
    _check_registered(ADVANTAGES, adv_type)
    _check_registered(POLICY_LOSSES, loss_type)


def _check_registered(registry: Registry[Any], name: str) -> None:
    """Raises an error for an unknown name. Does not import built-in entries, because that would import torch."""
    if name.lower() not in registry.built_in:
        registry.find(name)
