"""Composition root of `rlhpc train`: runs all checks, then builds cluster, placement, groups and runner."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rlhpc.config.constraints import parse_steps
from rlhpc.config.sections import RunConfig
from rlhpc.jobs.driver_lock import require_hosts, require_live_allocation, require_no_driver, sole_driver
from rlhpc.jobs.elastic.helper_plan import helper_plans
from rlhpc.jobs.elastic.records import Attendance
from rlhpc.jobs.logs import mark_start
from rlhpc.jobs.paths import RunPaths
from rlhpc.jobs.plan import count_noun
from rlhpc.jobs.signals import MAX_RESTARTS, StopRequest
from rlhpc.metrics.provenance import record_placement
from rlhpc.runs.config_changes import check_resume
from rlhpc.runs.elastic_driver import Elastic, join_address
from rlhpc.runs.preflight import run_checks
from rlhpc.runs.run_alerts import CHECKED_STEPS, RunAlerts
from rlhpc.runs.run_folder import RunFolder, fail_status, keep_traceback, note, read_segment_done
from rlhpc.runs.run_identity import make_longer
from rlhpc.runs.runner import Runner
from rlhpc.runs.task_type import Cfg, TaskType, task_type_of
from rlhpc.runtime.cluster import Cluster
from rlhpc.runtime.devices import torch_device
from rlhpc.runtime.environment_archive import check_archive
from rlhpc.runtime.errors import Stopped
from rlhpc.runtime.files import expand_home
from rlhpc.runtime.launchers.srun_commands import nsys_command, nsys_options
from rlhpc.runtime.placement import HybridComponentPlacement, Placement, PlacementStrategy
from rlhpc.runtime.plugins import load_attribute
from rlhpc.runtime.session import Session
from rlhpc.runtime.worker import Worker
from rlhpc.runtime.worker_group import WorkerGroup


def train(cfg: Cfg, *, segment: int | None = None, resume_with: bool = False) -> dict[str, Any]:
    """Trains a run, or one segment of it, to its end.

    Args:
        cfg: Configuration from `load_config`.
        segment: Number of a segment, below `runner.segments`; None for the complete run. A segment starts from the newest
            checkpoint and writes `segments/<k>.json`. A finished segment is not trained again.
        resume_with: True to continue a started run even if its training configuration has changed.

    Returns:
        The result of the runner's `run`, and exit_code: 0, or the exit code for the signal that ended the run early.

    Raises:
        ConfigError, PlacementError, CheckpointError: A check failed; nothing was written.
        WorkerFailed: A rank failed; the message is the error of the first failed rank.
    """
    task_type, user_cfg = task_type_of(cfg), cfg
    require_live_allocation()
    require_no_driver(RunPaths.from_run_dir(cfg.runner.run_dir, cfg.runner.name))
    run = RunFolder.plan(cfg, segment, resume_with=resume_with)
    if segment is not None:
        make_longer(run.paths, cfg, segment)
    if segment is not None and (segment_record := read_segment_done(run.paths, segment)) is not None:
        return {**segment_record, "finished": True, "exit_code": 0}
    if cfg.cluster.scratch is not None:
        os.environ["RLHPC_SCRATCH"] = str(expand_home(cfg.cluster.scratch))  # the ranks inherit it
    if cfg.cluster.environment_archive is not None:
        check_archive(expand_home(cfg.cluster.environment_archive))
    Session.prewarm(task_type.groups.preload)  # the fork server imports torch while this process checks the run
    cluster = Cluster(cfg.cluster)
    require_hosts(cluster)
    placement = HybridComponentPlacement(cfg, cluster)
    strategies = {role: placement.get_strategy(role) for role in task_type.groups.worker_classes_of(cfg)}
    placements = {role: strategy.place(cluster) for role, strategy in strategies.items()}
    if cluster.source == "machine":  # in a job, the steps check their accelerators: this host may be a login node
        torch_device(sorted({i for ranks in placements.values() for rank in ranks for i in rank.accelerators}))
    if (idle_text := idle_accelerators(cluster, placements)) is not None:
        note(idle_text)
    cfg = task_type.checks.prepare(cfg, resumes=run.resume.path is not None)
    cfg = task_type.groups.placed(cfg, {role: strategy.replica for role, strategy in strategies.items()})
    if run.resume.path is not None:
        check_resume(task_type, cfg, run.resume.path)
        note(f"goes on from step {run.resume.step} ({run.resume.path})")
    run_checks(task_type.checks.preflight(cfg, {role: len(ranks) for role, ranks in placements.items()}))
    with sole_driver(run.paths):
        return _train(task_type, cfg, user_cfg, run, cluster, strategies, placements)


def idle_accelerators(cluster: Cluster, placements: Mapping[str, Sequence[Placement]]) -> str | None:
    """Returns a sentence about granted accelerators that no rank uses; None if ranks use all of them."""
    used_accelerators = {
        (rank.node_rank, index) for ranks in placements.values() for rank in ranks for index in rank.accelerators
    }
    if cluster.granted <= used_accelerators:
        return None
    owner_text = "the job" if cluster.source == "slurm" else "this machine"
    if cluster.num_accelerators > len(used_accelerators):
        key = "component_placement"
    elif any(node_rank >= cluster.num_nodes for node_rank, _ in cluster.granted):
        key = "num_nodes"
    else:
        key = "accelerators_per_node"
    return (
        f"{owner_text} has {count_noun(len(cluster.granted), 'accelerator')}, "
        f"and the run uses {len(used_accelerators) or 'none'} (cluster.{key})"
    )


def _train(
    task_type: TaskType[Cfg],
    cfg: Cfg,
    user_cfg: Cfg,
    run: RunFolder,
    cluster: Cluster,
    strategies: Mapping[str, PlacementStrategy],
    placements: Mapping[str, Sequence[Placement]],
) -> dict[str, Any]:
    """Opens the run folder, starts the session, the groups and the runner, and trains."""
    worker_classes = task_type.groups.worker_classes_of(cfg)
    classes = {
        role: load_attribute(name, f"role {role} of the kind {task_type.name}") for role, name in worker_classes.items()
    }
    make_runner = load_attribute(task_type.runner, f"the runner of the kind {task_type.name}")
    # A submitted run recovers by itself after a failure; a run at a terminal reports the failure and ends.
    policies = task_type.groups.policies(cfg, max_recoveries=int(os.environ.get(MAX_RESTARTS, "0")))
    num_started = {role: len(ranks) for role, ranks in placements.items()}
    useful_ranks = {
        role: n - num_started.get(role, 0) for role, n in task_type.groups.max_useful_ranks(cfg, num_started).items()
    }
    helper_jobs = helper_plans(cfg.cluster, placements)
    run.open(user_cfg)
    logs = run.paths.segment_logs(run.segment or 0)
    mark_start(logs)
    record_placement(run.paths, {role: [asdict(rank) for rank in ranks] for role, ranks in placements.items()})
    attendance = Attendance(run.paths.attendance)
    archive = cfg.cluster.environment_archive
    runner: Runner[Cfg] | None = None
    unchecked_rows: list[tuple[int, dict[str, float]]] = []
    with StopRequest() as stop_request, RunAlerts(cfg, run, stop_request) as alerts:
        session = Session.start(
            registry_root=run.paths.registry,
            log_dir=logs,
            preload=task_type.groups.preload,
            interface=cluster.interface,
            tcp_address=join_address(helper_jobs, cluster),
            check_stop=stop_request.check,
            on_membership=attendance.note,
            on_lost=lambda group, rank, reason: alerts.record_lost(group, [rank], reason),
            reports_calls=True,
            environment_archive=None if archive is None else expand_home(archive),
        )
        elastic = Elastic(helper_jobs, run.paths, useful_ranks, session, attendance)
        try:
            groups = _launch(cfg, classes, cluster, strategies, run)
            runner = active_runner = make_runner(cfg, **groups, run=run, stop=stop_request)
            active_runner.init_workers()
            with session.training(policies):
                elastic.start()
                alerts.watch(active_runner)

                def record_step(row: dict[str, float]) -> None:
                    elastic.record_step(row)
                    unchecked_rows.append((active_runner.step, row))
                    if alerts.has_hook or len(unchecked_rows) >= CHECKED_STEPS:
                        alerts.record_steps(unchecked_rows)

                try:
                    run_result = active_runner.run(record_step, alerts.record_lost)
                finally:
                    alerts.record_steps(unchecked_rows)
            for group in groups.values():
                group.shutdown()
        except Stopped as stop_error:
            note(f"{stop_error}; it ended while ranks were starting, so there was nothing to save")
            step = runner.step if runner else run.resume.step
            run.write_status("stopped", step, force=True, stop_reason=stop_request.reason)
            run_result = {"global_step": step, "stop_reason": "signal", "finished": False}
        except BaseException as error:
            keep_traceback(run, error)
            fail_status(run, runner.step if runner else run.resume.step, error)
            elastic.failed(error)
            raise
        finally:
            session.stop()
            elastic.close(stop_request)
        if run.segment is not None and run_result["finished"]:
            run_result.update(run.finish_segment(run_result["global_step"], run_result["stop_reason"]))
        alerts.record_end(run_result)
        return {**run_result, "exit_code": 0 if run_result["finished"] else stop_request.exit_code}


def _launch(
    cfg: RunConfig,
    classes: dict[str, type[Worker]],
    cluster: Cluster,
    strategies: Mapping[str, PlacementStrategy],
    run: RunFolder,
) -> dict[str, WorkerGroup]:
    """Starts the ranks of all groups and waits until they are ready; returns the groups by role."""
    profile = cfg.runner.trace.profile
    profiled_groups, options = (
        set(profile.nsys),
        nsys_options(profile.nsys_options, parse_steps(profile.nsys_steps) or ()),
    )
    if profiled_groups and shutil.which("nsys") is None:
        note("runner.trace.profile.nsys: there is no nsys on this machine's PATH; the run goes on without its profiles")
        profiled_groups = set()
    if profiled_groups:
        run.paths.nsys.mkdir(parents=True, exist_ok=True)
    groups = {
        role: cls.create_group(cfg).launch(
            cluster,
            placement_strategy=strategies[role],
            name=role,
            timeout=cfg.runner.rendezvous_timeout_s,
            wait=False,
            command_prefix=nsys_command(run.paths.nsys, role, options) if role in profiled_groups else (),
        )
        for role, cls in classes.items()
    }
    run.mark("launched")
    for group in groups.values():
        group.wait_ready()
    run.mark("ranks")
    return groups
