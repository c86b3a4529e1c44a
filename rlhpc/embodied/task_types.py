"""Task types of runs with simulators: PPO and related algorithms, off-policy learning, behaviour cloning."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from rlhpc.config.conditional_keys import Condition
from rlhpc.config.constraints import Fail
from rlhpc.config.parallel import check_parallel
from rlhpc.config.schema import Schema
from rlhpc.config.sections import RunConfig
from rlhpc.config.typed import with_value
from rlhpc.embodied import checks, conditional_keys
from rlhpc.embodied.config import (
    BcConfig,
    DemonstratedWorkflowConfig,
    EmbodiedConfig,
    PpoConfig,
    SacConfig,
    acts_in_actor,
)
from rlhpc.embodied.rollout.work_sharing import divisible, max_sharing_ranks
from rlhpc.jobs.paths import CONFIG, RunPaths
from rlhpc.metrics.provenance import describe_result
from rlhpc.runs.checks import check_estimators
from rlhpc.runs.config_changes import differing, saved_values
from rlhpc.runs.preflight import Check
from rlhpc.runs.task_type import (
    ConfigChecks,
    Exporting,
    GroupSpec,
    Headline,
    Offline,
    Parts,
    Planning,
    PlayOptions,
    Preparation,
    Reporting,
    Rows,
    TaskType,
)
from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.policies import GroupPolicy, SessionPolicies

_ENVIRONMENT_KEYS = ("env.train.env_type", "env.train.env_id")
_SHAPE_KEYS = (
    "model_type", "hidden_sizes", "num_action_chunks", "value_per_action", "critic_hidden_sizes", "critic_layer_norm",
    "add_value_head",
)  # fmt: skip
_PLAYING_MODULES = (
    "rlhpc.embodied.workers.ppo_actor", "rlhpc.embodied.workers.rollout", "rlhpc.embodied.workers.env",
    "rlhpc.weights.transport",
    "rlhpc.training", "rlhpc.embodied.models.mlp", "rlhpc.embodied.envs.gymnasium_env",
)  # fmt: skip
_COMPARED_METRICS = (
    ("eval/success_once", "Success (once) in evaluation", "share of episodes"),
    ("eval/return_mean", "Return in evaluation", "mean return"),
)
#: Metric of `demos.holdout`.
HOLDOUT_LOSS = "train/holdout_loss"
#: Metrics of evaluations during training; success metrics exist only if the environment reports success.
EVALUATION_METRICS = ("eval/return_mean", "eval/success_once", "eval/success_at_end")
_PLAYED_METRICS = (
    *_COMPARED_METRICS,
    ("train/success_once", "Success (once) in training", "share of episodes"),
    ("train/episode_return", "Return in training", "episode return"),
)
_EPISODE_HEADLINES = (
    Headline("eval/success_once", "success once", "share"),
    Headline("eval/return_mean", "evaluated return"),
)
_TIME_CHARTS = {"throughput": "Environment steps per second", "time_per_phase": "Time per phase"}
_RETURN_CHARTS = {
    "return_vs_env_steps": "Return over experience",
    "return_vs_time": "Return over wall time",
    "evaluation": "Evaluation per checkpoint",
}


#: Configuration of a run with simulators.
Cfg = TypeVar("Cfg", bound=EmbodiedConfig)


#: Configuration of a run whose policy is trained on its own rollouts.
Playing = TypeVar("Playing", PpoConfig, SacConfig)


def _find_python(cfg: RunConfig, component: str) -> str | None:
    """Returns the Python interpreter of a component's node group, or None if `cluster.node_groups` sets none."""
    placements = cfg.cluster.component_placement.items()
    placement = next(
        (
            component_placement
            for component_names, component_placement in placements
            if component in re.split(r"\s*,\s*", component_names)
        ),
        None,
    )
    label = placement.get("node_group") if isinstance(placement, Mapping) else None
    return next((group.python_interpreter for group in cfg.cluster.node_groups if group.label == label), None)


def _build_preparation(workflow: DemonstratedWorkflowConfig, path: Any) -> Preparation:
    if workflow.demos_expert is None:
        return Preparation()
    return Preparation(demos=(str(path), workflow.demos_expert, workflow.demos_episodes))


# -- groups -----------------------------------------------------------------------------------------------------------


class PlayingGroupSpec(GroupSpec[Playing]):
    """Worker groups of runs whose policy is trained on its own rollouts.

    Attributes:
        fixed_reason: Clause of a message that states why a synchronous run cannot be elastic.
        simulating_actor: Path of the class of actors that simulate and act themselves.
    """

    fixed_reason = ""
    simulating_actor = ""

    def worker_classes_of(self, cfg: Playing) -> Mapping[str, str]:
        """Returns the groups (`GroupSpec.worker_classes_of`): the actor alone if its ranks simulate and act themselves."""
        return {"actor": self.simulating_actor} if acts_in_actor(cfg) else self.worker_classes

    def components(self, cfg: Playing) -> Sequence[str]:
        """Returns the names allowed in `cluster.component_placement` (`GroupSpec.components`)."""
        return list(self.worker_classes)

    def policies(self, cfg: Playing, *, max_recoveries: int = 0) -> SessionPolicies:
        """Returns the failure policies of the env and rollout groups. The groups are elastic if they act ahead of the actors;
        synchronous runs stay bit-reproducible. Any failure ends a run of actors alone.
        """
        if acts_in_actor(cfg):
            return SessionPolicies({}, max_recoveries, "its actor ranks simulate and act themselves")
        is_elastic = cfg.algorithm.max_staleness > 0
        policy = GroupPolicy(restartable=True, independent_ranks=True, min_ranks=1 if is_elastic else None)
        reason = (
            "env and rollout ranks can come and go where they play ahead of the actors (algorithm.max_staleness of 1 or "
            f"more); in this run {self.fixed_reason}: what the ranks that it started with play in it, with the newest weights"
        )
        return SessionPolicies({"env": policy, "rollout": policy}, max_recoveries, "" if is_elastic else reason)

    def max_useful_ranks(self, cfg: Playing, num_started: Mapping[str, int]) -> dict[str, int]:
        """Returns the maximum useful number of ranks by elastic group.

        The maximum for env ranks is the number of shards of a shared step, or one rank per unit of all steps in progress. The
        maximum for rollout ranks is the number of slot groups in a stage.
        """
        if acts_in_actor(cfg):
            return {}
        train_env, stages, num_units = cfg.env.train, cfg.rollout.pipeline_stage_num, num_started["env"]
        num_sharing_ranks = max_sharing_ranks(cfg.algorithm.rollout_steps, num_units) if divisible(cfg) else 0
        max_ranks = {
            "env": max((1 + cfg.algorithm.max_staleness) * num_units, num_sharing_ranks),
            "rollout": train_env.num_envs // (stages * train_env.group_size),
        }
        return {name: max_ranks[name] for name in self.policies(cfg).elastic}

    def check_placement(self, cfg: Playing, processes: Mapping[str, int], accelerators: Mapping[str, int]) -> None:
        """Checks that the slots can be divided over the processes."""
        checks.check_processes(cfg, processes)


class PpoGroupSpec(PlayingGroupSpec[PpoConfig]):
    """Worker groups of on-policy runs."""

    fixed_reason = "each step's batch is fixed"
    simulating_actor = "rlhpc.embodied.workers.tensor_actor:TensorActor"

    def check_placement(self, cfg: PpoConfig, processes: Mapping[str, int], accelerators: Mapping[str, int]) -> None:
        """Checks that the slots can be divided over the processes, and that `actor.parallel` fits the actors."""
        checks.check_processes(cfg, processes)
        check_parallel(cfg.actor, processes["actor"], "actor", layers=False)


class SacGroupSpec(PlayingGroupSpec[SacConfig]):
    """Worker groups of off-policy runs."""

    fixed_reason = "what each step adds to the buffer before its updates is fixed"
    simulating_actor = "rlhpc.embodied.workers.tensor_actor:OffPolicyTensorActor"


class BcGroupSpec(GroupSpec[BcConfig]):
    """Worker group of behaviour cloning."""

    def check_placement(self, cfg: BcConfig, processes: Mapping[str, int], accelerators: Mapping[str, int]) -> None:
        """Checks that `actor.parallel` fits the number of actors."""
        check_parallel(cfg.actor, processes["actor"], "actor", layers=False)


# -- configuration ----------------------------------------------------------------------------------------------------


class EmbodiedChecks(ConfigChecks[Cfg]):
    """Configuration checks of runs with simulators and a policy network.

    Args:
        config: Dataclass of the configuration.
        conditions: Keys that a run reads only under a condition.
    """

    other_start = " To start a new run from its weights: runner.init_from=… and another runner.name."

    def __init__(self, config: type[Cfg], conditions: tuple[Condition, ...]) -> None:
        self._config, self.conditions = config, conditions

    def find_missing_keys(self, cfg: Cfg) -> list[str]:
        """Returns the key of the environment's id if the id is not set."""
        return [] if cfg.env.train.env_id else ["env.train.env_id"]

    def prepare(self, cfg: Cfg, *, resumes: bool) -> Cfg:
        """Returns the configuration. If the run resumes, removes `runner.init_from`, because the weights may be gone."""
        if not resumes or cfg.runner.init_from is None:
            return cfg
        return with_value(cfg, "runner.init_from", None)

    def differences(self, cfg: Cfg, checkpoint: Path) -> list[str]:
        """Returns the differences between configuration and checkpoint in environment and network shapes."""
        model = saved_values(checkpoint / "model.json").get("model") or {}
        saved_shapes = {f"actor.model.{name}": model[name] for name in _SHAPE_KEYS if name in model}
        saved_config = {**saved_values(checkpoint / CONFIG, _ENVIRONMENT_KEYS), **saved_shapes}
        schema = Schema(self._config, cfg.runner.task_type)
        return differing(cfg, saved_config, [key for key in saved_config if key in schema])

    def evaluation_metrics(self, cfg: Cfg) -> Sequence[str]:
        """Returns the metrics of the evaluations at `runner.val_check_interval` (`ConfigChecks.evaluation_metrics`)."""
        return EVALUATION_METRICS if cfg.runner.val_check_interval > 0 else ()


class PlayingChecks(EmbodiedChecks[Playing]):
    """Configuration checks of runs whose policy is trained on its own rollouts."""

    def goal(self, cfg: Playing) -> Any:
        """Returns the conditions of an early end, including the return at which the run stops."""
        run: Any = cfg  # a constrained type variable is no argument of a generic base
        stop_keys: Any = super().goal(run)
        if stop_keys is None:
            return cfg.runner.stop_return
        return [cfg.runner.stop_return, *stop_keys]

    def _check_intervene(self, cfg: Playing, fail: Fail) -> None:
        if cfg.env.train.intervene.source is not None:
            from rlhpc.embodied.interventions.sources import check_intervene

            check_intervene(cfg, fail)


class PpoChecks(PlayingChecks[PpoConfig]):
    """Configuration checks of on-policy runs: the policy learns from its own rollouts."""

    def check(self, cfg: PpoConfig, fail: Fail, *, training: bool) -> None:
        """Checks the estimators, the keys that all kinds of run have, those of PPO and, for training, sizes of batches."""
        check_estimators(cfg.algorithm.adv_type, cfg.algorithm.loss_type)
        checks.check_common(cfg, fail)
        checks.check_ppo(cfg, fail)
        self._check_intervene(cfg, fail)
        if training:
            checks.check_divisibility(cfg, fail)

    def preflight(self, cfg: PpoConfig, ranks: Mapping[str, int]) -> Iterator[Check]:
        """Yields the checks of slots, environments and policy (`ConfigChecks.preflight`)."""
        from rlhpc.embodied.preflight import ppo_checks

        return ppo_checks(cfg, ranks, {name: _find_python(cfg, name) for name in ("env", "actor", "rollout")})


class SacChecks(PlayingChecks[SacConfig]):
    """Configuration checks of off-policy runs: the policy is trained on samples from a buffer that rollouts fill."""

    def check(self, cfg: SacConfig, fail: Fail, *, training: bool) -> None:
        """Checks the keys that all kinds of run have, those of the replay buffer and, for training, the numbers of slots."""
        checks.check_common(cfg, fail)
        checks.check_off_policy(cfg, fail)
        self._check_intervene(cfg, fail)
        if cfg.algorithm.success_classifier.train:
            _check_success_classifier(cfg, fail)
        if training:
            checks.check_slots(cfg, fail)

    def preflight(self, cfg: SacConfig, ranks: Mapping[str, int]) -> Iterator[Check]:
        """Yields the checks of slots, environments, policy and demonstrations (`ConfigChecks.preflight`)."""
        from rlhpc.embodied.preflight import off_policy_checks

        return off_policy_checks(cfg, ranks, _find_python(cfg, "env"))


class BcChecks(EmbodiedChecks[BcConfig]):
    """Configuration checks of behaviour cloning: the policy learns from demonstrations."""

    def check(self, cfg: BcConfig, fail: Fail, *, training: bool) -> None:
        """Checks the keys that all kinds of run have, and those of the demonstrations."""
        checks.check_common(cfg, fail)
        checks.check_bc(cfg, fail)

    def preflight(self, cfg: BcConfig, ranks: Mapping[str, int]) -> Iterator[Check]:
        """Yields the checks of environment, policy and demonstrations (`ConfigChecks.preflight`)."""
        from rlhpc.embodied.preflight import bc_checks

        del ranks
        return bc_checks(cfg, _find_python(cfg, "actor"))

    def evaluation_metrics(self, cfg: BcConfig) -> Sequence[str]:
        """Returns the metrics of evaluations and, with held-out demonstrations, the loss that is computed at every step."""
        return [*super().evaluation_metrics(cfg), *([HOLDOUT_LOSS] if cfg.demos.holdout > 0 else [])]


# -- without training -------------------------------------------------------------------------------------------------


class EmbodiedOffline(Offline[Cfg]):
    """Evaluation, playing and export of policies."""

    def recording(self, cfg: Cfg) -> tuple[int, bool]:
        """Returns the number of episodes to record with the last policy, and whether to record only successful episodes."""
        return cfg.workflow.record_episodes, cfg.workflow.record_only_success

    def evaluate(
        self, cfg: Cfg, checkpoint: Path, *, suite: str, episodes: int | None, output: Path | None, trust_code: bool
    ) -> str:
        """Evaluates a checkpoint on episodes with deterministic actions, and returns a description of the result."""
        from rlhpc.checkpoint import require_valid

        # Before torch is imported.
        require_valid(checkpoint, hint="or evaluate another checkpoint", checks_digests=False)
        from rlhpc.embodied.evaluation.evaluate import evaluate_checkpoint
        from rlhpc.embodied.python_env import call_where_importable

        evaluation = call_where_importable(
            checkpoint, evaluate_checkpoint, checkpoint, cfg=cfg, suite=suite, episodes=episodes, output=output,
            trust_code=trust_code,
        )  # fmt: skip
        return describe_result(evaluation)

    def play(self, cfg: Cfg, checkpoint: Path, options: PlayOptions) -> str:
        """Plays episodes in a window, or records a video of them, and returns a description of the result.

        Raises:
            ConfigError: An option is for language models.
        """
        from rlhpc.checkpoint import require_valid

        if options.system is not None or options.max_tokens is not None:
            raise ConfigError(f"--system and --max-tokens are for language models; {checkpoint} is none")
        require_valid(checkpoint, hint="or play another checkpoint", checks_digests=False)
        from rlhpc.embodied.evaluation.window import play_checkpoint
        from rlhpc.embodied.python_env import call_where_importable

        playback = call_where_importable(checkpoint, play_checkpoint, checkpoint, cfg, options)
        return describe_result(playback) + (f" → {playback['video']}" if "video" in playback else "")

    def load_policy(self, cfg: Cfg, checkpoint: Path, *, trust_code: bool) -> Any:
        """Loads the policy, which acts on single observations (`ActingPolicy`)."""
        from rlhpc.embodied.evaluation.episodes import eval_seed
        from rlhpc.embodied.evaluation.evaluate import load_acting_policy

        return load_acting_policy(checkpoint, seed=eval_seed(cfg.env.eval, cfg.runner.seed), trust_code=trust_code)

    def export(self, checkpoint: Path, output: Path | None, options: Exporting) -> Path:
        """Exports the policy to a folder and returns its path.

        Raises:
            ConfigError: An option is for language models.
        """
        if options.adapter_only or options.base or options.dtype or options.critic:
            raise ConfigError(
                f"--adapter-only, --base, --dtype and --critic are for language models; {checkpoint} is none"
            )
        from rlhpc.embodied.export import export_checkpoint, write_release_folder
        from rlhpc.embodied.python_env import call_where_importable

        if options.released:
            return call_where_importable(
                checkpoint,
                write_release_folder,
                checkpoint,
                output,
                licence=options.licence,
                trust_code=options.trust_code,
            )
        return export_checkpoint(checkpoint, output, licence=options.licence)


class SacOffline(EmbodiedOffline[SacConfig]):
    """Preparation, evaluation, playing and export of off-policy runs."""

    def preparation(self, cfg: SacConfig) -> Preparation:
        """Returns the recording of the expert's episodes that fills the demonstration buffer before training, if any."""
        return _build_preparation(cfg.workflow, cfg.algorithm.demo_buffer.load_path)


class BcOffline(EmbodiedOffline[BcConfig]):
    """Preparation, evaluation, playing and export of behaviour-cloning runs."""

    def preparation(self, cfg: BcConfig) -> Preparation:
        """Returns the recording of the expert's episodes before training, if any."""
        return _build_preparation(cfg.workflow, cfg.demos.path)

    def evaluate(
        self,
        cfg: BcConfig,
        checkpoint: Path,
        *,
        suite: str,
        episodes: int | None,
        output: Path | None,
        trust_code: bool,
    ) -> str:
        """Evaluates a policy on episodes, or a success model on held-out recorded episodes."""
        if cfg.actor.model.model_type == "success":
            from rlhpc.embodied.evaluation.evaluate import evaluate_judge

            return evaluate_judge(cfg, checkpoint, suite, episodes, output)
        return super().evaluate(cfg, checkpoint, suite=suite, episodes=episodes, output=output, trust_code=trust_code)

    def play(self, cfg: BcConfig, checkpoint: Path, options: PlayOptions) -> str:
        """Plays episodes with a policy; raises an error for a success model, which has no actions.

        Raises:
            ConfigError: The checkpoint is of a success model, which does not act.
        """
        if cfg.actor.model.model_type == "success":
            raise ConfigError(f"{checkpoint} is of a model of success, which judges and does not act; see rlhpc eval")
        return super().play(cfg, checkpoint, options)

    def load_policy(self, cfg: BcConfig, checkpoint: Path, *, trust_code: bool) -> Any:
        """Loads a policy; raises an error for a success model, which has no actions.

        Raises:
            ConfigError: The checkpoint is of a success model, which does not act.
        """
        if cfg.actor.model.model_type == "success":
            raise ConfigError(f"{checkpoint} is of a model of success, which judges and does not act; see rlhpc eval")
        return super().load_policy(cfg, checkpoint, trust_code=trust_code)


# -- reports ----------------------------------------------------------------------------------------------------------


class EmbodiedReporting(Reporting):
    """Report of runs with simulators."""

    def charts(self, paths: RunPaths, rows: Rows) -> dict[str, str]:
        """Returns every chart of a run as SVG, by file name."""
        from rlhpc.embodied.reporting import all_curves

        return all_curves(paths, rows, self.curves)

    def parts(self, paths: RunPaths, rows: Rows, *, linked: bool) -> Parts:
        """Returns the parts of the report for runs with simulators."""
        from rlhpc.embodied.reporting import parts

        return parts(paths, rows, shown_metrics=self.curves, linked=linked)


_ACCOUNT = "rlhpc.embodied.planning:accounts"
_PLAYED_HEADLINES = (
    *_EPISODE_HEADLINES,
    Headline("train/episode_return", "training return"),
    Headline("rollout/env_steps", "env steps", "count"),
)
PPO = TaskType(
    "embodied",
    PpoConfig,
    PpoGroupSpec(
        {
            "actor": "rlhpc.embodied.workers.ppo_actor:EmbodiedActor",
            "rollout": "rlhpc.embodied.workers.rollout:MultiStepRolloutWorker",
            "env": "rlhpc.embodied.workers.env:EnvWorker",
        },
        _PLAYING_MODULES,
    ),
    "rlhpc.embodied.runners.rollout_runner:ppo_runner",
    checks=PpoChecks(PpoConfig, conditional_keys.PPO),
    offline=EmbodiedOffline("embodied"),
    reporting=EmbodiedReporting(
        {
            **_RETURN_CHARTS,
            "policy_loss": "Policy loss",
            "value_loss": "Value loss",
            "entropy": "Entropy",
            "kl": "Policy change per update",
            **_TIME_CHARTS,
        },
        _PLAYED_METRICS,
        _PLAYED_HEADLINES,
    ),
    planning=Planning("rlhpc.embodied.planning:ppo_workload", _ACCOUNT),
)
SAC = TaskType(
    "off_policy",
    SacConfig,
    SacGroupSpec(
        {
            "actor": "rlhpc.embodied.workers.off_policy:OffPolicyActor",
            "rollout": "rlhpc.embodied.workers.off_policy:OffPolicyRolloutWorker",
            "env": "rlhpc.embodied.workers.off_policy:OffPolicyEnvWorker",
        },
        (*_PLAYING_MODULES, "rlhpc.embodied.workers.off_policy"),
    ),
    "rlhpc.embodied.runners.off_policy_runner:off_policy_runner",
    checks=SacChecks(SacConfig, conditional_keys.OFF_POLICY),
    offline=SacOffline("off_policy"),
    reporting=EmbodiedReporting(
        {
            **_RETURN_CHARTS,
            "entropy": "Entropy",
            **_TIME_CHARTS,
            "q_loss": "Critics' loss",
            "actor_loss": "Actor's loss",
            "alpha": "Temperature",
        },
        _PLAYED_METRICS,
        _PLAYED_HEADLINES,
    ),
    planning=Planning(account=_ACCOUNT),
)
BC = TaskType(
    "bc",
    BcConfig,
    BcGroupSpec(
        {"actor": "rlhpc.embodied.workers.bc_actor:BcActor"},
        (
            "rlhpc.embodied.workers.bc_actor",
            "rlhpc.training",
            "rlhpc.embodied.models.mlp",
            "rlhpc.embodied.envs.gymnasium_env",
            "rlhpc.embodied.data.trajectories",
        ),
    ),
    "rlhpc.embodied.runners.bc:BcRunner",
    checks=BcChecks(BcConfig, conditional_keys.BC),
    offline=BcOffline("bc"),
    reporting=EmbodiedReporting(
        {
            "loss": "Imitation loss",
            "loss_vs_time": "Imitation loss over wall time",
            "grad_norm": "Gradient norm",
            "evaluation": "Evaluation per checkpoint",
            "throughput": "Demonstrated steps per second",
            "time_per_phase": "Time per phase",
        },
        (*_COMPARED_METRICS, ("train/loss", "Imitation loss", "loss")),
        (
            *_EPISODE_HEADLINES,
            Headline("eval/accuracy", "accuracy", "share"),
            Headline("train/holdout_loss", "held-out loss"),
            Headline("train/loss", "training loss"),
        ),
    ),
    planning=Planning(account=_ACCOUNT),
)


def _check_success_classifier(cfg: SacConfig, fail: Fail) -> None:
    """Checks that a run that trains a success classifier (`algorithm.success_classifier`) can do so.

    Raises:
        ConfigError: Nobody can mark episodes, or the classifier's rewards do not fit the run; the message names the key.
    """
    key, train_env = "algorithm.success_classifier.train", cfg.env.train
    if train_env.intervene.source in (None, "scripted"):
        raise fail(
            "env.train.intervene.source",
            f"{key} learns from a person's marks: take keyboard, gamepad, spacemouse or a source with signals",
        )
    if train_env.num_envs > 1:
        raise fail("env.train.num_envs", f"a person marks the episodes of one slot ({key}): take 1")
    if train_env.reward_model is not None:
        raise fail(
            "env.train.reward_model",
            f"{key} would replace its rewards: take null, and name it in algorithm.success_classifier.init_from",
        )
    if train_env.use_rel_reward:
        raise fail("env.train.use_rel_reward", f"{key} rewards the state after a step, not its change: take false")
