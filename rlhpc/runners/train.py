"""`rlhpc train`: the composition root. Checks everything first, then Cluster → placement → groups → runner."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rlhpc.runners.run_folder import RunFolder, fail_status, read_segment_done
from rlhpc.runtime.cluster import Cluster
from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.launch.signals import MAX_RESTARTS, StopRequest
from rlhpc.runtime.placement import HybridComponentPlacement
from rlhpc.runtime.session import Session

ROLES = ("actor", "rollout", "env")
#: What the fork server imports once, so that ranks start with it.
PRELOAD = (
    "rlhpc.roles.actor", "rlhpc.roles.rollout", "rlhpc.roles.env", "rlhpc.weights", "rlhpc.training",
    "rlhpc.models.mlp", "rlhpc.envs.gymnasium_env",
)  # fmt: skip


def train(cfg: Any, *, segment: int | None = None) -> dict[str, Any]:
    """Trains a run, or one segment of it, to its end.

    Args:
        cfg: Configuration, as `load_config` gives it.
        segment: Which of `runner.segments`; it starts from the newest checkpoint and leaves `segments/<k>.json`. A
            segment that is finished is not trained again.

    Returns:
        What `EmbodiedRunner.run` returns, and exit_code: 0, or that of a signal that ended the run early.

    Raises:
        ConfigError, PlacementError, CheckpointError: Before anything was written.
        WorkerFailed: A rank failed; the first one that did.
    """
    task = str(cfg.runner.task_type)
    if task != "embodied":
        raise ConfigError(f"runner.task_type is {task!r}; choose from embodied")
    run = RunFolder.plan(cfg, segment)
    if segment is not None and (done := read_segment_done(run.paths, segment)) is not None:
        return {**done, "finished": True, "exit_code": 0}
    if cfg.cluster.scratch is not None:
        os.environ["RLHPC_SCRATCH"] = str(Path(str(cfg.cluster.scratch)).expanduser())  # of the ranks, too
    Session.prewarm(PRELOAD)  # it imports torch while this process checks the run
    cluster = Cluster(cfg.cluster)
    placement = HybridComponentPlacement(cfg, cluster)
    strategies = {role: placement.get_strategy(role) for role in ROLES}
    placements = {role: strategy.place(cluster) for role, strategy in strategies.items()}
    check(cfg, {role: len(ranks) for role, ranks in placements.items()})
    return _train(cfg, run, cluster, strategies, placements)


def check(cfg: Any, ranks: dict[str, int]) -> None:
    """Refuses what would fail after the start: counts that do not divide, environments and models that cannot be built.

    Raises:
        ConfigError: Names the key and the numbers.
    """
    from rlhpc.models import build_model
    from rlhpc.roles.actor import check_batches
    from rlhpc.roles.env import check_env
    from rlhpc.roles.exchange import SlotMap

    SlotMap.from_config(cfg, env=ranks["env"], rollout=ranks["rollout"], actor=ranks["actor"])
    check_batches(cfg)
    spaces = check_env(cfg.env.train)
    if int(cfg.runner.val_check_interval) > 0:
        check_env(cfg.env.eval)
    build_model(cfg.actor.model, *spaces)


def _train(
    cfg: Any, run: RunFolder, cluster: Cluster, strategies: dict[str, Any], placements: dict[str, Any]
) -> dict[str, Any]:
    from rlhpc.roles.actor import EmbodiedActor
    from rlhpc.roles.env import EnvWorker
    from rlhpc.roles.rollout import MultiStepRolloutWorker
    from rlhpc.runners.embodied import EmbodiedRunner

    classes = {"actor": EmbodiedActor, "rollout": MultiStepRolloutWorker, "env": EnvWorker}
    run.open(cfg)
    run.record_placement({role: [asdict(rank) for rank in ranks] for role, ranks in placements.items()})
    runner: EmbodiedRunner | None = None
    with StopRequest() as stop:
        session = Session.start(
            registry_root=run.paths.registry, log_dir=run.paths.segment_logs(run.segment or 0), preload=PRELOAD,
            interface=cluster.interface,
        )  # fmt: skip
        try:
            groups = {
                role: cls.create_group(cfg).launch(
                    cluster,
                    placement_strategy=strategies[role],
                    name=role,
                    timeout=float(cfg.runner.rendezvous_timeout_s),
                    wait=False,
                )
                for role, cls in classes.items()
            }
            run.mark("launched")
            for group in groups.values():
                group.wait_ready()
            run.mark("ranks")
            runner = EmbodiedRunner(cfg, **groups, run=run, stop=stop)
            runner.init_workers()
            # A submitted run goes on by itself after a failure; one at a terminal says so and ends.
            runner.max_recoveries = int(os.environ.get(MAX_RESTARTS, "0"))
            session.expendable = frozenset({"rollout", "env"} if runner.max_recoveries else ())
            result = runner.run()
            session.expendable = frozenset()
            for group in groups.values():
                group.shutdown()
        except BaseException as error:
            fail_status(run, runner.step if runner else run.resume.step, error)
            raise
        finally:
            session.stop()
        if run.segment is not None and result["finished"]:
            result.update(run.finish_segment(result["global_step"], result["stop_reason"]))
        return {**result, "exit_code": 0 if result["finished"] else stop.exit_code}
