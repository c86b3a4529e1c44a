"""The kinds of run with language models: on verifiable tasks, on demonstrations, and reward models on preferences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from rlhpc.config.ranges import Range
from rlhpc.config.rules import Fail
from rlhpc.config.typed import changed
from rlhpc.jobs.paths import RunPaths
from rlhpc.language import checks
from rlhpc.language.choices import CHOICES, FREE
from rlhpc.language.config import GrpoConfig, LanguageConfig, SftConfig, TrainedLanguageConfig
from rlhpc.language.ranges import RANGES, TRAINED_RANGES
from rlhpc.language.reward_config import RewardRunConfig
from rlhpc.language.scoring.groups import AGENT, CRITIC, REFERENCE, group_models, group_roles, placed, scoring_groups
from rlhpc.runs.checks import check_estimators
from rlhpc.runs.kinds import Exporting, Kind, Parts, Preparation, Rows
from rlhpc.runs.saved import differing, saved_values
from rlhpc.runtime.errors import ConfigError

#: The configuration of a run that trains a language model; and of one whose model answers.
Trained = TypeVar("Trained", bound=TrainedLanguageConfig)
Cfg = TypeVar("Cfg", bound=LanguageConfig)
#: Seconds after which a silent rank of the group `agent` is done without.
_AGENT_LOST_S = 30.0
_PRELOAD = (
    "rlhpc.language.roles.agent",
    "rlhpc.language.roles.grpo",
    "rlhpc.language.roles.reward_model",
    "rlhpc.language.roles.rollout",
    "rlhpc.language.roles.sft",
    "rlhpc.language.roles.critic",
    "rlhpc.weights.broadcast",
    "transformers",
    "transformers.models.auto.modeling_auto",
)
_EACH = {
    "evaluation": "Evaluation per checkpoint", "throughput": "Tokens per second", "time_per_phase": "Time per phase",
}  # fmt: skip
_COMPARED = (("eval/accuracy", "Accuracy in evaluation", "share of right answers"),)
#: Keys of a Hugging Face config that determine the shapes of the weights.
_SIZES = ("model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")


@dataclass(frozen=True)
class TrainedKind(Kind[Trained]):
    """A kind of run that trains a language model, whatever for.

    Attributes:
        trained: Metric that says how training goes, and its title.
        rate: Metric of the tokens per second.
    """

    trained: tuple[str, str] = ("train/loss", "training loss")
    rate: str = "time/train_tokens_per_s"
    preload: tuple[str, ...] = _PRELOAD
    ranges: Mapping[str, Range] = field(default_factory=lambda: TRAINED_RANGES)
    choices: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: CHOICES)
    evaluation: tuple[str, ...] = ("data.eval",)
    free: tuple[str, ...] = FREE
    workload: str = "rlhpc.language.workload:supervised_workload"
    account: str = "rlhpc.language.memory.roles:accounts"

    def read_data(self, cfg: Trained) -> None:
        """Reads the training data, before a model is made for it.

        Raises:
            ConfigError: It cannot be read.
        """
        raise NotImplementedError

    def suites(self, cfg: Trained) -> Sequence[Any]:
        """Section `data.eval`."""
        raise NotImplementedError

    def prepare(self, cfg: Trained, *, resumes: bool) -> Trained:
        """The configuration, with a built-in model's folder in place of its name.

        Raises:
            ConfigError: There is no such built-in model; or its training data cannot be read, which is looked at before a
                model is made for it.
        """
        from rlhpc.language.data.builtin import PREFIX, resolve_model

        if str(cfg.actor.model.model_path).startswith(PREFIX):
            self.read_data(cfg)
        return changed(cfg, "actor.model.model_path", resolve_model(cfg.actor.model))

    def differences(self, cfg: Trained, checkpoint: Path) -> list[str]:
        """Where the checkpoint differs: another backend, other adapters, or a model of other sizes."""
        differ = differing(
            cfg, saved_values(checkpoint / "backend.json"), ("actor.training_backend", "actor.lora.rank")
        )
        there = saved_values(checkpoint / "model" / "config.json")
        here = saved_values(Path(str(cfg.actor.model.model_path)) / "config.json")
        sizes = [
            f"{key} {there[key]} there and {here[key]} here"
            for key in _SIZES
            if key in there and key in here and there[key] != here[key]
        ]
        return [*differ, *([f"actor.model.model_path names another model ({', '.join(sizes)})"] if sizes else [])]

    def preparation(self, cfg: Trained) -> Preparation:
        """A run on demonstrations, and the evaluation of the model as it is."""
        workflow = cfg.workflow
        sft = (workflow.sft, list(workflow.sft_overrides)) if workflow.sft else None
        return Preparation(sft=sft, evaluates_start=workflow.eval_start)

    def evaluate(
        self, cfg: Trained, checkpoint: Path, *, suite: str, episodes: int | None, output: Path | None, trust_code: bool
    ) -> str:
        """Evaluates a checkpoint on a suite (`Kind.evaluate`)."""
        if episodes is not None:
            raise ConfigError("--episodes is for runs with simulators; data.eval says how many rows a suite has (size)")
        return self._evaluated(cfg, checkpoint, suite, output)

    def evaluate_model(self, cfg: Trained, *, suite: str, output: Path | None) -> str:
        """Evaluates the model as it is: a Hugging Face folder or name, or a built-in one."""
        from rlhpc.language.data.builtin import resolve_model
        from rlhpc.language.suites import suite_named

        suite_named(self.suites(cfg), suite)  # before a built-in model is made
        return self._evaluated(cfg, resolve_model(cfg.actor.model), suite, output)

    def _evaluated(self, cfg: Trained, model: str | Path, suite: str, output: Path | None) -> str:
        """The result of a suite, in a line."""
        raise NotImplementedError

    def charts(self, paths: RunPaths, rows: Rows) -> dict[str, str]:
        """Every chart of a run as SVG, by file name."""
        from rlhpc.language.curves import all_curves

        return all_curves(paths, rows, self.curves)

    def parts(self, paths: RunPaths, rows: Rows, *, linked: bool) -> Parts:
        """The parts of the report for language models."""
        from rlhpc.language.report import parts

        return parts(paths, rows, always=self.curves, trained=self.trained, rate=self.rate, linked=linked)

    def export(self, checkpoint: Path, output: Path | None, wanted: Exporting) -> Path:
        """Writes a Hugging Face folder."""
        if wanted.released:
            raise ConfigError(
                f"--released is for policies of robots; {checkpoint} is a language model's, always written so"
            )
        from rlhpc.language.export import export_language_model

        return export_language_model(
            checkpoint, output, adapter_only=wanted.adapter_only, base=wanted.base, dtype=wanted.dtype, critic=wanted.critic,
            licence=wanted.licence, trust_code=wanted.trust_code,
        )  # fmt: skip


@dataclass(frozen=True)
class LanguageKind(TrainedKind[Cfg]):
    """A kind of run whose model answers, at least in evaluation."""

    ranges: Mapping[str, Range] = field(default_factory=lambda: RANGES)

    def check(self, cfg: Cfg, fail: Fail, *, training: bool) -> None:
        """Refuses wrong names, and what does not fit together."""
        checks.check_common(cfg, fail, training=training)

    def check_placement(self, cfg: Cfg, processes: Mapping[str, int], accelerators: Mapping[str, int]) -> None:
        """Refuses prompts that cannot be shared out evenly, and processes with several accelerators."""
        checks.check_sizes(cfg, cfg.data.prompts_per_step, processes)
        checks.check_accelerators(cfg, accelerators)

    def check_start(self, cfg: Cfg, ranks: Mapping[str, int]) -> None:
        """Refuses models, data, agents and judges that cannot be loaded."""
        from rlhpc.language.roles.opening import check_language

        check_language(cfg, dict(ranks))

    def suites(self, cfg: Cfg) -> Sequence[Any]:
        """Section `data.eval`."""
        return cfg.data.eval

    def read_data(self, cfg: Cfg) -> None:
        """Reads the problems (`TrainedKind.read_data`)."""
        from rlhpc.language.data.registry import make_dataset

        make_dataset(cfg.data.train)

    def _evaluated(self, cfg: Cfg, model: str | Path, suite: str, output: Path | None) -> str:
        from rlhpc.language.evaluate import describe, evaluate_language_model

        return describe(evaluate_language_model(cfg, model, suite, output))


@dataclass(frozen=True)
class RewardModelKind(TrainedKind[RewardRunConfig]):
    """The model learns to tell which of two responses is preferred, or what a response is worth."""

    def check(self, cfg: RewardRunConfig, fail: Fail, *, training: bool) -> None:
        """Refuses wrong names, and what does not fit together."""
        checks.check_reward_model(cfg, fail, training=training)

    def check_placement(
        self, cfg: RewardRunConfig, processes: Mapping[str, int], accelerators: Mapping[str, int]
    ) -> None:
        """Refuses rows that cannot be shared out evenly, and processes with several accelerators."""
        checks.check_sizes(cfg, cfg.data.prompts_per_step, processes)
        checks.check_accelerators(cfg, accelerators)

    def check_start(self, cfg: RewardRunConfig, ranks: Mapping[str, int]) -> None:
        """Refuses models and data that cannot be loaded."""
        from rlhpc.language.preference_scores import check_reward_model

        check_reward_model(cfg)

    def suites(self, cfg: RewardRunConfig) -> Sequence[Any]:
        """Section `data.eval`."""
        return cfg.data.eval

    def read_data(self, cfg: RewardRunConfig) -> None:
        """Reads the preferences (`TrainedKind.read_data`)."""
        from rlhpc.language.preference_scores import training_rows

        training_rows(cfg)

    def _evaluated(self, cfg: RewardRunConfig, model: str | Path, suite: str, output: Path | None) -> str:
        from rlhpc.language.preference_scores import evaluate_reward_model
        from rlhpc.language.preferences import describe

        return describe(evaluate_reward_model(cfg, model, suite, output))


@dataclass(frozen=True)
class GrpoKind(LanguageKind[GrpoConfig]):
    """The model answers prompts, and learns from what its answers were worth."""

    def roles_of(self, cfg: GrpoConfig) -> Mapping[str, str]:
        """Actor and rollout, and those groups of a configuration that have a place, or need one."""
        return {**self.roles, **group_roles(cfg)}

    def components(self, cfg: GrpoConfig) -> Sequence[str]:
        """All names that a component may have."""
        return [*self.roles, AGENT, CRITIC, *scoring_groups(cfg)]

    def expendable_of(self, cfg: GrpoConfig) -> frozenset[str]:
        """The engines, and what scores."""
        return self.expendable | (frozenset(group_roles(cfg)) - {CRITIC})

    def independent_of(self, cfg: GrpoConfig) -> frozenset[str]:
        """What scores: its ranks keep nothing, and have nothing to do with one another."""
        learning = {CRITIC, REFERENCE} if cfg.reference.update_interval else {CRITIC}
        return frozenset(group_roles(cfg)) - learning

    def elastic_of(self, cfg: GrpoConfig) -> dict[str, int]:
        """What runs agents; and the engines, where they are at work all the time: what one had under way, others take."""
        engines = {} if cfg.actor.offload_in_rollout else self.together_of(cfg)
        return {**engines, **({AGENT: 1} if AGENT in placed(cfg) else {})}

    def patience_of(self, cfg: GrpoConfig) -> dict[str, float]:
        """What runs agents: a step waits for their episodes, which others begin again at little cost."""
        del cfg
        return {AGENT: _AGENT_LOST_S}

    def together_of(self, cfg: GrpoConfig) -> dict[str, int]:
        """The ranks of an engine."""
        return {"rollout": cfg.rollout.parallel.tensor or 1}

    def placed(self, cfg: GrpoConfig, replicas: Mapping[str, int]) -> GrpoConfig:
        """Also with how many ranks are an engine."""
        return changed(cfg, "rollout.parallel.tensor", replicas["rollout"])

    def most_useful(self, cfg: GrpoConfig, started: Mapping[str, int]) -> dict[str, int]:
        """An engine takes a prompt at least, and a rank of agents an episode."""
        del started
        prompts = cfg.data.prompts_per_step
        agents = {AGENT: prompts * cfg.algorithm.group_size} if AGENT in placed(cfg) else {}
        return {"rollout": prompts * self.together_of(cfg)["rollout"], **agents}

    def differences(self, cfg: GrpoConfig, checkpoint: Path) -> list[str]:
        """Also that the checkpoint has no critic, where this run wants one."""
        wants = CRITIC in group_roles(cfg) and not (checkpoint / CRITIC).is_dir()
        return [*super().differences(cfg, checkpoint), *(["it has no critic"] if wants else [])]

    def prepare(self, cfg: GrpoConfig, *, resumes: bool) -> GrpoConfig:
        """Also with the folders of the groups' built-in models."""
        from rlhpc.language.data.builtin import PREFIX, resolve_model

        own = {key: model for key, model in group_models(cfg).items() if str(model.model_path).startswith(PREFIX)}
        same = [
            key for key, model in own.items() if model.model_path == cfg.actor.model.model_path and not model.kwargs
        ]
        prepared = super().prepare(cfg, resumes=resumes)
        for key, model in own.items():
            path = prepared.actor.model.model_path if key in same else resolve_model(model)
            prepared = changed(prepared, f"{key}.model_path", path)
        return prepared

    def check_start(self, cfg: GrpoConfig, ranks: Mapping[str, int]) -> None:
        """Also refuses groups whose models cannot be used."""
        from rlhpc.language.scoring.checks import check_groups

        super().check_start(cfg, ranks)
        check_groups(cfg, ranks)

    def check(self, cfg: GrpoConfig, fail: Fail, *, training: bool) -> None:
        """Also refuses wrong estimators, rewards and batches."""
        check_estimators(cfg)
        super().check(cfg, fail, training=training)
        if training:
            checks.check_reasoning(cfg, fail)


GRPO = GrpoKind(
    "reasoning",
    GrpoConfig,
    {
        "actor": "rlhpc.language.roles.grpo:GrpoActor",
        "rollout": "rlhpc.language.roles.rollout:LanguageRolloutWorker",
    },
    "rlhpc.language.runners.grpo:ReasoningRunner",
    curves={
        "reward": "Reward",
        "accuracy": "Accuracy on training prompts",
        "evaluation": "Evaluation per checkpoint",
        "response_length": "Response length",
        "kl": "Distance from the reference",
        "entropy": "Entropy",
        "clip_fraction": "Clipped ratios",
        "throughput": "Tokens per second",
        "time_per_phase": "Time per phase",
    },
    compared=(("train/reward", "Reward", "mean reward"), *_COMPARED),
    expendable=frozenset({"rollout"}),
    trained=("train/reward", "training reward"),
    rate="time/tokens_per_s",
    workload="rlhpc.language.workload:rl_workload",
)
SFT = LanguageKind(
    "sft",
    SftConfig,
    {"actor": "rlhpc.language.roles.sft:SftActor"},
    "rlhpc.language.runners.sft:SftRunner",
    curves={"loss": "Loss", **_EACH},
    compared=(("train/loss", "Loss", "cross entropy (nats per token)"), *_COMPARED),
)
REWARD_MODEL = RewardModelKind(
    "reward_model",
    RewardRunConfig,
    {"actor": "rlhpc.language.roles.reward_model:RewardModelActor"},
    "rlhpc.language.runners.reward_model:RewardModelRunner",
    curves={"preference_loss": "Loss", **_EACH},
    compared=(("train/loss", "Loss", "mean loss"), *_COMPARED),
)
