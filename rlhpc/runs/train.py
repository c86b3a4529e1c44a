"""Composition root of `rlhpc train`: checks everything first, then builds cluster, placement, groups and runner."""

from __future__ import annotations

import os
from dataclasses import asdict
from typing import Any

from rlhpc.jobs.attempt_logs import mark_start
from rlhpc.jobs.driver_lock import require_hosts, require_live_allocation, require_no_driver, sole_driver
from rlhpc.jobs.paths import RunPaths
from rlhpc.jobs.signals import MAX_RESTARTS, StopRequest
from rlhpc.runs.config_changes import check_resume
from rlhpc.runs.elastic_driver import Elastic
from rlhpc.runs.preflight import run_checks
from rlhpc.runs.run_folder import RunFolder, fail_status, keep_traceback, note, read_segment_done
from rlhpc.runs.run_identity import make_longer
from rlhpc.runs.runner import Runner
from rlhpc.runs.task_type import Cfg, Kind, kind_of
from rlhpc.runtime.cluster import Cluster
from rlhpc.runtime.devices import torch_device
from rlhpc.runtime.errors import Stopped
from rlhpc.runtime.files import expand_home
from rlhpc.runtime.placement import HybridComponentPlacement
from rlhpc.runtime.plugins import load_attribute
from rlhpc.runtime.session import Session


def train(cfg: Cfg, *, segment: int | None = None, resume_with: bool = False) -> dict[str, Any]:
    """Trains a run, or one segment of it, to its end.

    Args:
        cfg: Configuration from `load_config`.
        segment: Number of a segment, below `runner.segments`; it starts from the newest checkpoint and writes
            `segments/<k>.json`. A finished segment is not trained again.
        resume_with: Continue a started run even if its training configuration has changed.

    Returns:
        The result of the runner's `run`, and exit_code: 0, or that of a signal that ended the run early.

    Raises:
        ConfigError, PlacementError, CheckpointError: A check failed; nothing was written.
        WorkerFailed: A rank failed; the error is that of the first failed rank.
    """
    kind, user_cfg = kind_of(cfg), cfg
    require_live_allocation()
    require_no_driver(RunPaths.of(cfg.runner.run_dir, cfg.runner.name))
    run = RunFolder.plan(cfg, segment, resume_with=resume_with)
    if segment is not None:
        make_longer(run.paths, cfg, segment)
    if segment is not None and (done := read_segment_done(run.paths, segment)) is not None:
        return {**done, "finished": True, "exit_code": 0}
    if cfg.cluster.scratch is not None:
        os.environ["RLHPC_SCRATCH"] = str(expand_home(cfg.cluster.scratch))  # of the ranks, too
    Session.prewarm(kind.preload)  # it imports torch while this process checks the run
    cluster = Cluster(cfg.cluster)
    require_hosts(cluster)
    placement = HybridComponentPlacement(cfg, cluster)
    strategies = {role: placement.get_strategy(role) for role in kind.roles_of(cfg)}
    placements = {role: strategy.place(cluster) for role, strategy in strategies.items()}
    if cluster.source == "machine":  # job steps say so themselves: this may be a login node
        torch_device(sorted({i for ranks in placements.values() for rank in ranks for i in rank.accelerators}))
    cfg = kind.prepare(cfg, resumes=run.resume.path is not None)
    cfg = kind.placed(cfg, {role: strategy.replica for role, strategy in strategies.items()})
    if run.resume.path is not None:
        check_resume(kind, cfg, run.resume.path)
        note(f"goes on from step {run.resume.step} ({run.resume.path})")
    run_checks(kind.checks(cfg, {role: len(ranks) for role, ranks in placements.items()}))
    with sole_driver(run.paths):
        return _train(kind, cfg, user_cfg, run, cluster, strategies, placements)


def _train(
    kind: Kind[Cfg],
    cfg: Cfg,
    user_cfg: Cfg,
    run: RunFolder,
    cluster: Cluster,
    strategies: dict[str, Any],
    placements: dict[str, Any],
) -> dict[str, Any]:
    roles = kind.roles_of(cfg)
    classes = {role: load_attribute(name, f"role {role} of the kind {kind.name}") for role, name in roles.items()}
    make_runner = load_attribute(kind.runner, f"the runner of the kind {kind.name}")
    run.open(user_cfg)
    mark_start(run.paths.segment_logs(run.segment or 0))
    run.record_placement({role: [asdict(rank) for rank in ranks] for role, ranks in placements.items()})
    runner: Runner[Cfg] | None = None
    useful = kind.most_useful(cfg, {role: len(ranks) for role, ranks in placements.items()})
    helpers = Elastic(cfg.cluster, run.paths, placements, useful)
    with StopRequest() as stop:
        session = Session.start(
            registry_root=run.paths.registry, log_dir=run.paths.segment_logs(run.segment or 0), preload=kind.preload,
            interface=cluster.interface, tcp_address=helpers.address(cluster),
        )  # fmt: skip
        helpers.open(session)
        session.interrupted = stop.check  # until the first step there is nothing to save
        try:
            groups = {
                role: cls.create_group(cfg).launch(
                    cluster,
                    placement_strategy=strategies[role],
                    name=role,
                    timeout=cfg.runner.rendezvous_timeout_s,
                    wait=False,
                )
                for role, cls in classes.items()
            }
            run.mark("launched")
            for group in groups.values():
                group.wait_ready()
            run.mark("ranks")
            runner = active_runner = make_runner(cfg, **groups, run=run, stop=stop)
            active_runner.init_workers()
            # A submitted run recovers by itself after a failure; a run at a terminal reports the failure and ends.
            active_runner.max_recoveries = int(os.environ.get(MAX_RESTARTS, "0"))
            session.failures.expendable = kind.expendable_of(cfg) if active_runner.max_recoveries else frozenset()
            session.failures.independent = kind.independent_of(cfg)
            session.failures.elastic, session.failures.together = kind.elastic_of(cfg), kind.together_of(cfg)
            session.membership.why_fixed = kind.why_fixed(cfg)
            session.leases.patience = kind.patience_of(cfg)
            session.interrupted = lambda: None
            active_runner.saw = helpers.saw
            helpers.start(session)
            result = active_runner.run()
            session.membership.is_open = False
            session.failures.expendable, session.failures.elastic = frozenset(), {}
            for group in groups.values():
                group.shutdown()
        except Stopped as stopped:
            note(f"{stopped}; it ended while ranks were starting, so there was nothing to save")
            step = runner.step if runner else run.resume.step
            run.write_status("stopped", step, force=True, stop_reason=stop.reason)
            result = {"global_step": step, "stop_reason": "signal", "finished": False}
        except BaseException as error:
            keep_traceback(run, error)
            fail_status(run, runner.step if runner else run.resume.step, error)
            helpers.failed(error)
            raise
        finally:
            session.stop()
            helpers.close(stop)
        if run.segment is not None and result["finished"]:
            result.update(run.finish_segment(result["global_step"], result["stop_reason"]))
        return {**result, "exit_code": 0 if result["finished"] else stop.exit_code}
