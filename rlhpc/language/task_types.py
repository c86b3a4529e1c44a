"""Task types of language models: RL on verifiable tasks, SFT, DPO and reward model training."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlhpc.config.conditional_keys import Condition
from rlhpc.config.constraints import Fail
from rlhpc.config.typed import plain, select, typed, with_value
from rlhpc.jobs.paths import RunPaths
from rlhpc.language import checks, conditional_keys, size_checks
from rlhpc.language.config.data import suite_named
from rlhpc.language.config.run import (
    DpoConfig,
    GrpoConfig,
    RewardRunConfig,
    SftConfig,
)
from rlhpc.language.data.registry import check_holdout, holdout_section
from rlhpc.language.group_specs import Cfg, GrpoGroupSpec, RewardModelGroupSpec, SftGroupSpec, Trained
from rlhpc.language.scoring.groups import (
    CRITIC,
    group_models,
    group_worker_classes,
    placed_groups,
)
from rlhpc.runs.checks import check_estimators
from rlhpc.runs.config_changes import differing, saved_values
from rlhpc.runs.preflight import Check, Need
from rlhpc.runs.task_type import (
    ConfigChecks,
    Exporting,
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

_COMMON_CURVES = {
    "evaluation": "Evaluation per checkpoint", "throughput": "Tokens per second", "time_per_phase": "Time per phase",
}  # fmt: skip
_COMPARED_METRICS = (("eval/accuracy", "Accuracy in evaluation", "share of right answers"),)
_ANSWER_HEADLINES = (Headline("eval/accuracy", "accuracy", "share"), Headline("eval/pass_at_k", "pass@k", "share"))
_SUPERVISED_HEADLINES = (Headline("train/loss", "training loss"), Headline("train/tokens_total", "tokens", "count"))
#: Metrics of a suite by which checkpoints can be compared during training. `ANSWERED`: suites that engines answer; `JUDGED`:
#: suites of preferences, by form.
ANSWERED = ("accuracy", "reward", "truncated")
JUDGED = {
    "pairs": ("accuracy", "loss", "margin", "calibration_error"),
    "labels": ("accuracy", "loss", "mse", "r2", "spearman"),
}
#: Keys of a Hugging Face config that determine the shapes of the weights.
_SIZE_KEYS = (
    "model_type",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
)


def _list_suite_metrics(
    cfg: GrpoConfig | SftConfig | RewardRunConfig, list_metrics: Callable[[str], Sequence[str]]
) -> list[str]:
    """Returns the names of the metrics of the suites in `workflow.eval_suites`, as in a row of metrics. Names of the first
    suite's metrics do not contain the suite's name."""
    if cfg.runner.val_check_interval <= 0:
        return []
    return [
        f"eval/{suite}/{metric}" if index else f"eval/{metric}"
        for index, suite in enumerate(cfg.workflow.eval_suites)
        for metric in list_metrics(suite)
    ]


def _answer_metrics(cfg: GrpoConfig | SftConfig) -> list[str]:
    """Returns the names of the metrics that evaluations of generated answers (`data.eval`) produce."""

    def list_metrics(name: str) -> tuple[str, ...]:
        samples = suite_named(cfg.data.eval, name).samples
        return (*ANSWERED, *((f"pass_at_{samples}", "majority") if samples > 1 else ()))

    return _list_suite_metrics(cfg, list_metrics) if cfg.data.eval else []


def _list_suites(cfg: Any) -> Sequence[Any]:
    """Returns section `data.eval`."""
    return cfg.data.eval


# -- configuration ----------------------------------------------------------------------------------------------------


class TrainedChecks(ConfigChecks[Trained]):
    """Configuration checks of runs that train a language model.

    Args:
        conditions: Keys that a run reads only under a condition.
    """

    def __init__(self, conditions: tuple[Condition, ...]) -> None:
        self.conditions = conditions

    def read_data(self, cfg: Trained) -> None:
        """Reads the training data, to check it.

        Raises:
            ConfigError: The data cannot be read.
        """
        raise NotImplementedError

    def read_suite(self, cfg: Trained, section: Any) -> None:
        """Reads the data of a section of `data.eval`, to check it.

        Raises:
            ConfigError: The data cannot be read.
        """
        raise NotImplementedError

    def check_model(self, cfg: Trained, ranks: Mapping[str, int]) -> Any:
        """Refuses a model that cannot be used, and training data that do not fit it.

        Returns:
            The tokenizer, if the task type's model answers problems; otherwise None.

        Raises:
            ConfigError: The model or a row does not fit; the message names the key, or file and row.
        """
        raise NotImplementedError

    def preflight(self, cfg: Trained, ranks: Mapping[str, int]) -> Iterator[Check]:
        """Yields the checks of suites, training data and model (`ConfigChecks.preflight`)."""
        return self._checks(cfg, ranks, [])

    def _checks(self, cfg: Trained, ranks: Mapping[str, int], tokenizers: list[Any]) -> Iterator[Check]:
        """Yields the checks of `preflight`; the check of the model appends the tokenizer to `tokenizers`."""
        from rlhpc.language.preflight import actor_resource, data_resource

        for section in _list_suites(cfg):  # evaluated after training, at the latest
            resource = data_resource(cfg, section)
            yield Check(f"data.eval[{section.name}]", functools.partial(self.read_suite, cfg, section), resource)
        resource = actor_resource(cfg)
        if resource.need is not Need.FILES:
            yield Check("data.train", lambda: self.read_data(cfg), data_resource(cfg, select(cfg, "data.train")))
        yield Check("actor.model and data.train", lambda: tokenizers.append(self.check_model(cfg, ranks)), resource)

    def prepare(self, cfg: Trained, *, resumes: bool) -> Trained:
        """Returns the configuration with a built-in model's folder in place of its name.

        Raises:
            ConfigError: The built-in model does not exist, or the training data cannot be read. The data are read before a
                model is built for them.
        """
        from rlhpc.language.models.builtin import PREFIX, resolve_model

        if str(cfg.actor.model.model_path).startswith(PREFIX):
            self.read_data(cfg)
        return self.with_models(cfg, resolve_model)

    @contextlib.contextmanager
    def trial(self, cfg: Trained) -> Iterator[Trained]:
        """Yields the configuration with temporary built-in models, which are removed afterwards (`ConfigChecks.trial`)."""
        from rlhpc.language.models.builtin import trial_models

        with trial_models() as resolve_trial_model:
            yield self.with_models(cfg, resolve_trial_model)

    def with_models(self, cfg: Trained, resolve: Callable[[Any], str]) -> Trained:
        """Returns the configuration with the folder of its model; `resolve` maps a model's section to that folder."""
        return with_value(cfg, "actor.model.model_path", resolve(cfg.actor.model))

    def differences(self, cfg: Trained, checkpoint: Path) -> list[str]:
        """Returns the configuration's differences from a checkpoint: backend, adapters and sizes of the model."""
        checkpoint_values = saved_values(checkpoint / "backend.json")
        compared_keys = ["actor.training_backend", "actor.lora.rank"]
        if cfg.actor.lora.rank:
            compared_keys.append("actor.lora.alpha")
            checkpoint_values = {
                **saved_values(checkpoint / "backend.json", ("about.lora.alpha",)),
                **checkpoint_values,
            }
            checkpoint_values.setdefault("actor.lora.alpha", checkpoint_values.pop("about.lora.alpha", None))
        key_differences = differing(cfg, checkpoint_values, compared_keys)
        saved_sizes = saved_values(checkpoint / "model" / "config.json")
        model_sizes = saved_values(Path(str(cfg.actor.model.model_path)) / "config.json")
        size_differences = [
            f"{key} {saved_sizes[key]} there and {model_sizes[key]} here"
            for key in _SIZE_KEYS
            if key in saved_sizes and key in model_sizes and saved_sizes[key] != model_sizes[key]
        ]
        return [
            *key_differences,
            *(
                [f"actor.model.model_path names another model ({', '.join(size_differences)})"]
                if size_differences
                else []
            ),
        ]


class LanguageChecks(TrainedChecks[Cfg]):
    """Configuration checks of runs with a model that answers problems, at least in evaluation.

    Attributes:
        answers_in_training: Whether the model answers during training, not only in evaluation.
    """

    answers_in_training = False

    def check(self, cfg: Cfg, fail: Fail, *, training: bool) -> None:
        """Refuses unknown names, and keys that exclude each other."""
        checks.check_common(cfg, fail, training=training)
        if training:
            size_checks.check_rows(cfg, fail)

    def preflight(self, cfg: Cfg, ranks: Mapping[str, int]) -> Iterator[Check]:
        """Yields the common checks, and the checks of agents and rewards if the placement has engines."""
        from rlhpc.language.preflight import actor_resource, answer_checks

        tokenizers: list[Any] = []
        yield from self._checks(cfg, ranks, tokenizers)
        if "rollout" in ranks:
            yield from answer_checks(cfg, lambda: tokenizers[0], actor_resource(cfg))

    def check_model(self, cfg: Cfg, ranks: Mapping[str, int]) -> Any:
        """Refuses a model that cannot be used, and prompts that do not fit it (`TrainedChecks.check_model`)."""
        from rlhpc.language.preflight import check_model

        return check_model(cfg, ranks)

    def read_data(self, cfg: Cfg) -> None:
        """Reads the problems (`TrainedChecks.read_data`)."""
        from rlhpc.language.data.registry import make_dataset
        from rlhpc.language.rewards.registry import check_problems

        dataset = make_dataset(cfg.data.train, requires_demonstrations=not self.answers_in_training)
        if self.answers_in_training:
            check_problems([term.name for term in cfg.reward.terms], dataset, "data.train")

    def read_suite(self, cfg: Cfg, section: Any) -> None:
        """Reads the problems of a suite (`TrainedChecks.read_suite`)."""
        from rlhpc.language.data.registry import make_dataset
        from rlhpc.language.rewards.registry import check_problems

        key = f"data.eval[{section.name}]"
        check_problems([term.name for term in cfg.reward.terms], make_dataset(section, "eval", key=key), key)


class SftChecks(LanguageChecks[SftConfig]):
    """Configuration checks of supervised fine-tuning."""

    held_out_metrics: tuple[str, ...] = ("eval/loss",)

    def check(self, cfg: SftConfig, fail: Fail, *, training: bool) -> None:
        """Checks the configuration, and refuses a validation without held-out data."""
        super().check(cfg, fail, training=training)
        if training:
            check_holdout(cfg.runner.val_check_interval, cfg.data.train, cfg.data.holdout, fail)
            checks.check_suite_engines(cfg, _answer_metrics(cfg), fail)

    def evaluation_metrics(self, cfg: SftConfig) -> Sequence[str]:
        """Returns the held-out metrics, and the metrics of the suites that engines answer."""
        if cfg.runner.val_check_interval <= 0:
            return ()
        return (*self.held_out_metrics, *(_answer_metrics(cfg) if "rollout" in placed_groups(cfg) else ()))

    def read_data(self, cfg: SftConfig) -> None:
        """Reads the training data and the held-out demonstrations (`TrainedChecks.read_data`)."""
        from rlhpc.language.data.registry import make_dataset

        super().read_data(cfg)
        if cfg.runner.val_check_interval > 0:
            section, key = holdout_section(cfg.data.train, cfg.data.holdout)
            make_dataset(section, "eval", requires_demonstrations=True, key=key)


class DpoChecks(SftChecks):
    """Configuration checks of DPO."""

    held_out_metrics = ("eval/loss", "eval/pair_accuracy", "eval/margin")

    def check_model(self, cfg: SftConfig, ranks: Mapping[str, int]) -> Any:
        """Refuses a model that cannot be used, and pairs that do not fit it (`TrainedChecks.check_model`)."""
        from rlhpc.language.preflight import check_dpo

        del ranks
        return check_dpo(typed(DpoConfig, cfg))

    def read_data(self, cfg: SftConfig) -> None:
        """Reads the training pairs and the held-out pairs (`TrainedChecks.read_data`)."""
        from rlhpc.language.data.preferences import Preferences

        data_config = typed(DpoConfig, cfg).data
        Preferences(data_config.train, "pairs")
        if cfg.runner.val_check_interval > 0:
            section, key = holdout_section(data_config.train, data_config.holdout)
            Preferences(section, "pairs", "eval", key=key)


class RewardModelChecks(TrainedChecks[RewardRunConfig]):
    """Configuration checks of reward model training."""

    def check(self, cfg: RewardRunConfig, fail: Fail, *, training: bool) -> None:
        """Refuses unknown names, and keys that exclude each other."""
        checks.check_reward_model(cfg, fail, training=training)

    def check_model(self, cfg: RewardRunConfig, ranks: Mapping[str, int]) -> None:
        """Refuses a model that cannot be used, and rows that do not fit it (`TrainedChecks.check_model`)."""
        from rlhpc.language.evaluation.reward_model import check_reward_model

        del ranks
        check_reward_model(cfg)

    def evaluation_metrics(self, cfg: RewardRunConfig) -> Sequence[str]:
        """Returns the metrics of the suites (`ConfigChecks.evaluation_metrics`)."""
        from rlhpc.algorithms.preference_losses import find_reward_loss

        loss_form = find_reward_loss(cfg.algorithm.loss_type, plain(cfg.algorithm.loss_kwargs))[1]
        return _list_suite_metrics(cfg, lambda suite: JUDGED[loss_form])

    def read_data(self, cfg: RewardRunConfig) -> None:
        """Reads the preferences (`TrainedChecks.read_data`)."""
        from rlhpc.language.evaluation.reward_model import training_rows

        training_rows(cfg)

    def read_suite(self, cfg: RewardRunConfig, section: Any) -> None:
        """Reads the preferences of a suite (`TrainedChecks.read_suite`)."""
        from rlhpc.language.evaluation.reward_model import suite_rows

        suite_rows(cfg, section)


class GrpoChecks(LanguageChecks[GrpoConfig]):
    """Configuration checks of reinforcement learning."""

    answers_in_training = True

    def check(self, cfg: GrpoConfig, fail: Fail, *, training: bool) -> None:
        """Checks the configuration, with its estimators, rewards and batch sizes."""
        check_estimators(cfg.algorithm.adv_type, cfg.algorithm.loss_type)
        super().check(cfg, fail, training=training)
        if training:
            checks.check_reasoning(cfg, fail)
            size_checks.check_micro_batches(cfg, fail)

    def preflight(self, cfg: GrpoConfig, ranks: Mapping[str, int]) -> Iterator[Check]:
        """Yields the checks of `LanguageChecks` and the checks of the scoring groups (`ConfigChecks.preflight`)."""
        from rlhpc.language.preflight import group_checks

        yield from super().preflight(cfg, ranks)
        yield from group_checks(cfg, ranks)

    def evaluation_metrics(self, cfg: GrpoConfig) -> Sequence[str]:
        """Returns the metrics of the suites (`ConfigChecks.evaluation_metrics`)."""
        return _answer_metrics(cfg)

    def differences(self, cfg: GrpoConfig, checkpoint: Path) -> list[str]:
        """Returns the differences from a checkpoint, including a critic that the checkpoint lacks."""
        lacks_critic = CRITIC in group_worker_classes(cfg) and not (checkpoint / CRITIC).is_dir()
        return [*super().differences(cfg, checkpoint), *(["it has no critic"] if lacks_critic else [])]

    def with_models(self, cfg: GrpoConfig, resolve: Callable[[Any], str]) -> GrpoConfig:
        """Returns the configuration with the folders of all built-in models, including the scoring groups' models."""
        from rlhpc.language.models.builtin import PREFIX

        built_in_models = {
            key: model for key, model in group_models(cfg).items() if str(model.model_path).startswith(PREFIX)
        }
        shared_keys = [
            key
            for key, model in built_in_models.items()
            if model.model_path == cfg.actor.model.model_path and not model.kwargs
        ]
        resolved_cfg = super().with_models(cfg, resolve)
        for key, model in built_in_models.items():
            path = resolved_cfg.actor.model.model_path if key in shared_keys else resolve(model)
            resolved_cfg = with_value(resolved_cfg, f"{key}.model_path", path)
        return resolved_cfg


# -- without training -------------------------------------------------------------------------------------------------


class TrainedOffline(Offline[Trained]):
    """Evaluation and export of language models."""

    def preparation(self, cfg: Trained) -> Preparation:
        """Returns the preparation of a run: the SFT run before it, and whether the initial model is evaluated."""
        workflow = cfg.workflow
        sft = (workflow.sft, list(workflow.sft_overrides)) if workflow.sft else None
        return Preparation(sft=sft, evaluates_start=workflow.eval_start)

    def evaluate(
        self, cfg: Trained, checkpoint: Path, *, suite: str, episodes: int | None, output: Path | None, trust_code: bool
    ) -> str:
        """Evaluates a checkpoint on a suite (`Offline.evaluate`).

        Raises:
            ConfigError: `episodes` is set, which is for runs with simulators.
        """
        if episodes is not None:
            raise ConfigError("--episodes is for runs with simulators; data.eval says how many rows a suite has (size)")
        return self._evaluate(cfg, checkpoint, suite, output)

    def evaluate_model(self, cfg: Trained, *, suite: str, output: Path | None) -> str:
        """Evaluates the initial model: a Hugging Face folder or name, or a built-in model."""
        from rlhpc.language.models.builtin import resolve_model

        suite_named(_list_suites(cfg), suite)  # fails early, before a built-in model is built
        return self._evaluate(cfg, resolve_model(cfg.actor.model), suite, output)

    def _evaluate(self, cfg: Trained, model: str | Path, suite: str, output: Path | None) -> str:
        """Evaluates a model on a suite; returns the results as text."""
        raise NotImplementedError

    def export(self, checkpoint: Path, output: Path | None, options: Exporting) -> Path:
        """Writes a checkpoint as a Hugging Face folder; returns its path.

        Raises:
            ConfigError: `released` is set, which is for robot policies.
        """
        if options.released:
            raise ConfigError(
                f"--released is for policies of robots; {checkpoint} is a language model's, always written so"
            )
        from rlhpc.language.export import export_language_model

        return export_language_model(
            checkpoint,
            output,
            adapter_only=options.adapter_only,
            base=options.base,
            dtype=options.dtype,
            critic=options.critic,
            licence=options.licence,
            trust_code=options.trust_code,
        )


class LanguageOffline(TrainedOffline[Cfg]):
    """Evaluation, chat and export of models that answer."""

    def play(self, cfg: Cfg, checkpoint: Path, options: PlayOptions) -> str:
        """Runs a chat with the model in the terminal; returns "".

        Raises:
            ConfigError: `episodes` is set, which is for runs with simulators.
        """
        from rlhpc.language.evaluation.chat import chat

        if options.episodes is not None:
            raise ConfigError("--episodes is for runs with simulators; a language model is talked with")
        chat(cfg, checkpoint, system=options.system, max_tokens=options.max_tokens, seed=options.seed)
        return ""

    def load_policy(self, cfg: Cfg, checkpoint: Path, *, trust_code: bool) -> Any:
        """Loads the model, which answers prompts (`GeneratingPolicy`)."""
        from rlhpc.language.evaluation.chat import GeneratingPolicy

        return GeneratingPolicy(cfg, checkpoint)

    def _evaluate(self, cfg: Cfg, model: str | Path, suite: str, output: Path | None) -> str:
        from rlhpc.language.evaluation.evaluate import describe, evaluate_language_model

        return describe(evaluate_language_model(cfg, model, suite, output))


class RewardModelOffline(TrainedOffline[RewardRunConfig]):
    """Evaluation and export of reward models."""

    def _evaluate(self, cfg: RewardRunConfig, model: str | Path, suite: str, output: Path | None) -> str:
        from rlhpc.language.evaluation.reward_model import evaluate_reward_model
        from rlhpc.language.reporting.eval_metrics import describe

        return describe(evaluate_reward_model(cfg, model, suite, output))


# -- reports ----------------------------------------------------------------------------------------------------------


class LanguageReporting(Reporting):
    """Report of language models.

    Args:
        curves, compared, headlines: See `Reporting`.
        trained: Metric of the training progress, and its title.
        rate: Metric of the tokens per second.
    """

    def __init__(
        self,
        curves: Mapping[str, str],
        compared: Sequence[tuple[str, str, str]],
        headlines: Sequence[Headline],
        *,
        trained: tuple[str, str] = ("train/loss", "training loss"),
        rate: str = "time/train_tokens_per_s",
    ) -> None:
        super().__init__(curves, compared, headlines)
        self.trained, self.rate = trained, rate

    def charts(self, paths: RunPaths, rows: Rows) -> dict[str, str]:
        """Returns all charts of a run as SVG, by file name."""
        from rlhpc.language.reporting.report import all_curves

        return all_curves(paths, rows, self.curves)

    def parts(self, paths: RunPaths, rows: Rows, *, linked: bool) -> Parts:
        """Returns the parts of the report for language models."""
        from rlhpc.language.reporting.report import parts

        return parts(paths, rows, shown_metrics=self.curves, trained_metric=self.trained, rate=self.rate, linked=linked)


_SUPERVISED_PLANNING = Planning(
    "rlhpc.language.planning.workload:supervised_workload", "rlhpc.language.planning.memory_accounts:accounts"
)
GRPO = TaskType(
    "reasoning",
    GrpoConfig,
    GrpoGroupSpec(
        {
            "actor": "rlhpc.language.workers.grpo_actor:GrpoActor",
            "rollout": "rlhpc.language.workers.rollout:LanguageRolloutWorker",
        }
    ),
    "rlhpc.language.runners.grpo:ReasoningRunner",
    checks=GrpoChecks(conditional_keys.REASONING),
    offline=LanguageOffline("reasoning"),
    reporting=LanguageReporting(
        {
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
        (*_COMPARED_METRICS, ("train/reward", "Reward", "mean reward")),
        (
            *_ANSWER_HEADLINES,
            Headline("train/reward", "training reward"),
            Headline("train/response_tokens", "tokens per response"),
        ),
        trained=("train/reward", "training reward"),
        rate="time/tokens_per_s",
    ),
    planning=Planning(
        "rlhpc.language.planning.workload:rl_workload", "rlhpc.language.planning.memory_accounts:accounts"
    ),
)
SFT = TaskType(
    "sft",
    SftConfig,
    SftGroupSpec({"actor": "rlhpc.language.workers.supervised_actors:SftActor"}),
    "rlhpc.language.runners.supervised:SftRunner",
    checks=SftChecks(conditional_keys.SFT),
    offline=LanguageOffline("sft"),
    reporting=LanguageReporting(
        {"loss": "Loss", **_COMMON_CURVES},
        (*_COMPARED_METRICS, ("train/loss", "Loss", "cross entropy (nats per token)")),
        (*_ANSWER_HEADLINES, *_SUPERVISED_HEADLINES),
    ),
    planning=_SUPERVISED_PLANNING,
)
DPO = TaskType(
    "dpo",
    DpoConfig,
    SftGroupSpec({"actor": "rlhpc.language.workers.supervised_actors:DpoActor"}),
    "rlhpc.language.runners.supervised:DpoRunner",
    checks=DpoChecks(conditional_keys.DPO),
    offline=LanguageOffline("dpo"),
    reporting=LanguageReporting(
        {"preference_loss": "Loss", "pair_accuracy": "Pairs decided rightly", **_COMMON_CURVES},
        (*_COMPARED_METRICS, ("train/loss", "Loss", "mean over pairs")),
        (
            *_ANSWER_HEADLINES,
            Headline("train/accuracy", "training pairs decided rightly", "share"),
            *_SUPERVISED_HEADLINES,
        ),
    ),
    planning=_SUPERVISED_PLANNING,
)
REWARD_MODEL = TaskType(
    "reward_model",
    RewardRunConfig,
    RewardModelGroupSpec({"actor": "rlhpc.language.workers.supervised_actors:RewardModelActor"}),
    "rlhpc.language.runners.supervised:RewardModelRunner",
    checks=RewardModelChecks(conditional_keys.SUPERVISED),
    offline=RewardModelOffline("reward_model"),
    reporting=LanguageReporting(
        {"preference_loss": "Loss", **_COMMON_CURVES},
        (*_COMPARED_METRICS, ("train/loss", "Loss", "mean loss")),
        (
            Headline("eval/accuracy", "accuracy", "share"),
            Headline("train/accuracy", "training accuracy", "share"),
            *_SUPERVISED_HEADLINES,
        ),
    ),
    planning=_SUPERVISED_PLANNING,
)
