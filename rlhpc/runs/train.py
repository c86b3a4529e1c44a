"""`rlhpc train`: the composition root. Checks everything first, then Cluster → placement → groups → runner."""

from __future__ import annotations

import importlib
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from rlhpc.jobs.granted import require_hosts, require_live_allocation
from rlhpc.jobs.paths import RunPaths
from rlhpc.jobs.signals import MAX_RESTARTS, StopRequest
from rlhpc.jobs.sole import require_no_driver, sole_driver
from rlhpc.runs.runner import Runner
from rlhpc.runs.resuming import check_resume
from rlhpc.runs.folder import RunFolder, fail_status, keep_traceback, note, read_segment_done
from rlhpc.runs.same_run import make_longer
from rlhpc.runtime.cluster import Cluster
from rlhpc.runtime.device import torch_device
from rlhpc.runtime.errors import ConfigError, Stopped
from rlhpc.runtime.placement import HybridComponentPlacement
from rlhpc.runtime.session import Session

#: What the fork server imports once, so that ranks start with it.
_EMBODIED = (
    "rlhpc.embodied.roles.ppo", "rlhpc.embodied.roles.rollout", "rlhpc.embodied.roles.env", "rlhpc.weights", "rlhpc.training",
    "rlhpc.embodied.models.mlp", "rlhpc.embodied.envs.gymnasium_env",
)  # fmt: skip
_BC = (
    "rlhpc.embodied.roles.bc",
    "rlhpc.training",
    "rlhpc.embodied.models.mlp",
    "rlhpc.embodied.envs.gymnasium_env",
    "rlhpc.embodied.data.trajectories",
)
_LANGUAGE = ("rlhpc.language.roles.actor", "rlhpc.language.roles.rollout", "transformers", "transformers.models.auto.modeling_auto")


@dataclass(frozen=True)
class Task:
    """A kind of run: which groups it has, and what drives them.

    Attributes:
        roles: Group → its worker class, as `module:Class`.
        runner: Its runner, as `module:Class`; called with the groups by name.
        preload: Modules that the fork server imports.
        check: Refuses what would fail after the start, as `module:function`, called with configuration and ranks.
        expendable: Groups that may be lost and started again in a submitted run.
        independent: Those of them whose ranks have no collectives among themselves: one that dies starts again alone.
    """

    roles: dict[str, str]
    runner: str
    preload: tuple[str, ...]
    check: str
    expendable: frozenset[str] = frozenset()
    independent: frozenset[str] = frozenset()


TASKS = {
    "embodied": Task(
        {
            "actor": "rlhpc.embodied.roles.ppo:EmbodiedActor",
            "rollout": "rlhpc.embodied.roles.rollout:MultiStepRolloutWorker",
            "env": "rlhpc.embodied.roles.env:EnvWorker",
        },
        "rlhpc.embodied.runners.ppo:EmbodiedRunner",
        _EMBODIED,
        "rlhpc.runs.train:check",
        expendable=frozenset({"rollout", "env"}),
        independent=frozenset({"rollout", "env"}),
    ),
    "off_policy": Task(
        {
            "actor": "rlhpc.embodied.roles.sac:OffPolicyActor",
            "rollout": "rlhpc.embodied.roles.sac:OffPolicyRolloutWorker",
            "env": "rlhpc.embodied.roles.env:EnvWorker",
        },
        "rlhpc.embodied.runners.sac:OffPolicyRunner",
        (*_EMBODIED, "rlhpc.embodied.roles.sac"),
        "rlhpc.runs.train:check_replay",
        expendable=frozenset({"rollout", "env"}),
        independent=frozenset({"rollout", "env"}),
    ),
    "bc": Task(
        {"actor": "rlhpc.embodied.roles.bc:BcActor"},
        "rlhpc.embodied.runners.bc:BcRunner",
        _BC,
        "rlhpc.embodied.roles.bc:check_bc",
    ),
    "reasoning": Task(
        {
            "actor": "rlhpc.language.roles.actor:LanguageActor",
            "rollout": "rlhpc.language.roles.rollout:LanguageRolloutWorker",
        },
        "rlhpc.language.runners.grpo:ReasoningRunner",
        _LANGUAGE,
        "rlhpc.language.roles.rollout:check_language",
        expendable=frozenset({"rollout"}),
    ),
    "sft": Task(
        {"actor": "rlhpc.language.roles.actor:LanguageActor"},
        "rlhpc.language.runners.sft:SftRunner",
        _LANGUAGE,
        "rlhpc.language.roles.rollout:check_language",
    ),
}


def _find(name: str) -> Any:
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)


def train(cfg: Any, *, segment: int | None = None, resume_with: bool = False) -> dict[str, Any]:
    """Trains a run, or one segment of it, to its end.

    Args:
        cfg: Configuration, as `load_config` gives it.
        segment: Which of `runner.segments`; it starts from the newest checkpoint and leaves `segments/<k>.json`. A
            segment that is finished is not trained again.
        resume_with: A run that has begun is continued even where the configuration says now that something else is trained.

    Returns:
        What the runner's `run` returns, and exit_code: 0, or that of a signal that ended the run early.

    Raises:
        ConfigError, PlacementError, CheckpointError: Before anything was written.
        WorkerFailed: A rank failed; the first one that did.
    """
    if (kind := str(cfg.runner.task_type).lower()) not in TASKS:
        raise ConfigError(f"runner.task_type is {cfg.runner.task_type!r}; choose from {', '.join(TASKS)}")
    task = TASKS[kind]
    given = cfg
    require_live_allocation()
    require_no_driver(RunPaths.of(cfg.runner.run_dir, cfg.runner.name))
    run = RunFolder.plan(cfg, segment, resume_with=resume_with)
    if segment is not None:
        make_longer(run.paths, cfg, segment)
    if segment is not None and (done := read_segment_done(run.paths, segment)) is not None:
        return {**done, "finished": True, "exit_code": 0}
    if cfg.cluster.scratch is not None:
        os.environ["RLHPC_SCRATCH"] = str(Path(str(cfg.cluster.scratch)).expanduser())  # of the ranks, too
    Session.prewarm(task.preload)  # it imports torch while this process checks the run
    cluster = Cluster(cfg.cluster)
    require_hosts(cluster)
    placement = HybridComponentPlacement(cfg, cluster)
    strategies = {role: placement.get_strategy(role) for role in task.roles}
    placements = {role: strategy.place(cluster) for role, strategy in strategies.items()}
    if cluster.source == "machine":  # job steps say so themselves: this may be a login node
        torch_device(sorted({i for ranks in placements.values() for rank in ranks for i in rank.accelerators}))
    if kind in ("reasoning", "sft"):
        cfg = with_model(cfg)
    elif cfg.runner.init_from is not None and run.resume.path is not None:
        cfg = without_start(cfg)  # what it started from may be gone by now
    if run.resume.path is not None:
        check_resume(cfg, run.resume.path)
    _find(task.check)(cfg, {role: len(ranks) for role, ranks in placements.items()})
    with sole_driver(run.paths):
        return _train(task, cfg, given, run, cluster, strategies, placements)


def with_model(cfg: Any) -> Any:
    """The configuration with a built-in model's folder in the place of its name; the caller's stays as it is.

    Raises:
        ConfigError: There is no such built-in model; or its training data cannot be read, which is looked at before a model
            is made for it.
    """
    from rlhpc.language.data.builtin import PREFIX, resolve_model
    from rlhpc.language.data.registry import make_dataset

    if str(cfg.actor.model.model_path).startswith(PREFIX):
        make_dataset(cfg.data.train)
    return _changed(cfg, "actor.model.model_path", resolve_model(cfg.actor.model))


def without_start(cfg: Any) -> Any:
    """The configuration without `runner.init_from`, which a run that continues does not need; the caller's stays as it is."""
    return _changed(cfg, "runner.init_from", None)


def _changed(cfg: Any, key: str, value: Any) -> Any:
    changed = cfg.copy()
    OmegaConf.set_readonly(changed, False)
    OmegaConf.update(changed, key, value)
    OmegaConf.set_readonly(changed, True)
    return changed


def check(cfg: Any, ranks: dict[str, int]) -> None:
    """Refuses what would fail after the start: counts that do not divide, environments and models that cannot be built.

    Raises:
        ConfigError: Names the key and the numbers.
    """
    from rlhpc.embodied.models import build_model, policy_section
    from rlhpc.embodied.roles.ppo import check_batches
    from rlhpc.embodied.roles.env import check_env
    from rlhpc.embodied.roles.slots import SlotMap
    from rlhpc.checkpoint.start import check_start

    SlotMap.from_config(cfg, env=ranks["env"], rollout=ranks["rollout"], actor=ranks["actor"])
    check_batches(cfg)
    spaces = check_env(cfg.env.train, _env_python(cfg))
    if int(cfg.runner.val_check_interval) > 0:
        check_env(cfg.env.eval)
    check_start(cfg, build_model(policy_section(cfg.actor), *spaces))


def check_replay(cfg: Any, ranks: dict[str, int]) -> None:
    """As `check`, of an off-policy run."""
    from rlhpc.embodied.roles.sac import check_off_policy

    check_off_policy(cfg, ranks, _env_python(cfg))


def _env_python(cfg: Any) -> str | None:
    """The Python of the env group's nodes, where they have one of their own."""
    placed = cfg.cluster.component_placement.get("env")
    label = placed.get("node_group") if OmegaConf.is_dict(placed) else None
    return next((group.python_interpreter for group in cfg.cluster.node_groups if group.label == label), None)


def _train(
    task: Task,
    cfg: Any,
    given: Any,
    run: RunFolder,
    cluster: Cluster,
    strategies: dict[str, Any],
    placements: dict[str, Any],
) -> dict[str, Any]:
    classes = {role: _find(name) for role, name in task.roles.items()}
    make_runner = _find(task.runner)
    run.open(given)
    run.record_placement({role: [asdict(rank) for rank in ranks] for role, ranks in placements.items()})
    runner: Runner | None = None
    with StopRequest() as stop:
        session = Session.start(
            registry_root=run.paths.registry, log_dir=run.paths.segment_logs(run.segment or 0), preload=task.preload,
            interface=cluster.interface,
        )  # fmt: skip
        session.interrupted = stop.check  # until the first step there is nothing to save
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
            runner = made = make_runner(cfg, **groups, run=run, stop=stop)
            made.init_workers()
            # A submitted run goes on by itself after a failure; one at a terminal says so and ends.
            made.max_recoveries = int(os.environ.get(MAX_RESTARTS, "0"))
            session.failures.expendable = task.expendable if made.max_recoveries else frozenset()
            session.failures.independent = task.independent
            session.interrupted = lambda: None
            result = made.run()
            session.failures.expendable = frozenset()
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
            raise
        finally:
            session.stop()
        if run.segment is not None and result["finished"]:
            result.update(run.finish_segment(result["global_step"], result["stop_reason"]))
        return {**result, "exit_code": 0 if result["finished"] else stop.exit_code}
