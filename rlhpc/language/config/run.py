"""The configurations of language models' runs. The docstring under a field is its entry in the reference."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeGuard

from rlhpc.config.constraints import (
    ANY,
    COUNT,
    ELASTIC_RANGES,
    FRACTION,
    INTERVAL,
    INTERVAL_OR_0,
    NOT_NEGATIVE,
    PART,
    POSITIVE,
    Range,
)
from rlhpc.config.constraints import RANGES as COMMON_RANGES
from rlhpc.config.sections import RunConfig, RunnerConfig, WorkflowConfig
from rlhpc.config.typed import mapping
from rlhpc.language.config.agents import AgentConfig, TrainedAgentConfig
from rlhpc.language.config.algorithms import (
    DpoAlgorithmConfig,
    GrpoAlgorithmConfig,
    LanguageAlgorithmConfig,
    RewardAlgorithmConfig,
)
from rlhpc.language.config.data import DataConfig, DpoDataConfig, PreferenceDataConfig, SftDataConfig
from rlhpc.language.config.engines import EngineConfig, GrpoRolloutConfig
from rlhpc.language.config.rewards import RewardConfig
from rlhpc.language.config.scoring import (
    GROUP_RANGES,
    GrpoRewardConfig,
    JudgeConfig,
    ReferenceConfig,
    ScoringGroupConfig,
    TeacherConfig,
)
from rlhpc.language.config.training import (
    CriticConfig,
    DpoActorConfig,
    GrpoActorConfig,
    LanguageActorConfig,
    RewardActorConfig,
    SftActorConfig,
)
from rlhpc.runtime.cluster_config import ElasticClusterConfig


@dataclass
class GrpoRunnerConfig(RunnerConfig):
    """The loop: how long, what is kept, when it is evaluated."""

    val_check_interval: int = -1
    """Steps between evaluations during training, by the rollout ranks, of the suites that `workflow.eval_suites` names; -1 for
    none (the workflow evaluates checkpoints anyway)."""


@dataclass
class LanguageWorkflowConfig(WorkflowConfig):
    """Actions of the Snakemake rules on a run."""

    sft: str | None = None
    """Configuration of an SFT run that comes first, relative to this file; this run's `actor.model.model_path` then names
    the folder into which the workflow exports its chosen step, `export/chosen` in its run folder."""
    sft_overrides: list[str] = field(default_factory=list)
    """Changes to the configuration of that SFT run, as `key=value`."""
    eval_start: bool = False
    """Evaluates the model before training, too, as step 0."""


@dataclass
class TrainedLanguageConfig(RunConfig):
    """Sections of every run that trains a language model."""

    algorithm: LanguageAlgorithmConfig = field(default_factory=LanguageAlgorithmConfig)
    actor: LanguageActorConfig = field(default_factory=LanguageActorConfig)
    workflow: LanguageWorkflowConfig = field(default_factory=LanguageWorkflowConfig)


@dataclass
class LanguageConfig(TrainedLanguageConfig):
    """A run whose model answers: in evaluation, and maybe where it is trained."""

    rollout: EngineConfig = field(default_factory=EngineConfig)
    agent: AgentConfig = field(default_factory=AgentConfig)
    data: DataConfig = field(default_factory=DataConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)


def answers(cfg: RunConfig) -> TypeGuard[LanguageConfig]:
    """Returns whether the model of a run answers problems, so that it has the sections `rollout` and `reward`."""
    return {"rollout", "reward"} <= set(mapping(cfg))


@dataclass
class GrpoConfig(LanguageConfig):
    """A language model on verifiable tasks."""

    cluster: ElasticClusterConfig = field(default_factory=ElasticClusterConfig)
    runner: GrpoRunnerConfig = field(default_factory=GrpoRunnerConfig)
    algorithm: GrpoAlgorithmConfig = field(default_factory=GrpoAlgorithmConfig)
    rollout: GrpoRolloutConfig = field(default_factory=GrpoRolloutConfig)
    actor: GrpoActorConfig = field(default_factory=GrpoActorConfig)
    reward: GrpoRewardConfig = field(default_factory=GrpoRewardConfig)
    agent: TrainedAgentConfig = field(default_factory=TrainedAgentConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    reference: ReferenceConfig = field(default_factory=ReferenceConfig)
    teacher: TeacherConfig = field(default_factory=TeacherConfig)
    judge: JudgeConfig = field(default_factory=JudgeConfig)
    groups: list[ScoringGroupConfig] = field(default_factory=list)
    """Further groups that score what the model writes; `cluster.component_placement` says where."""


def responses_per_step(cfg: GrpoConfig) -> int:
    """Returns the responses of a step."""
    return cfg.data.prompts_per_step * cfg.algorithm.group_size


def minibatch_size(cfg: GrpoConfig, section: GrpoActorConfig | CriticConfig) -> int:
    """Returns the responses of one optimizer step of the actor or the critic: its `global_batch_size`, or all of a step."""
    return section.global_batch_size or responses_per_step(cfg)


@dataclass
class SftRunnerConfig(RunnerConfig):
    """The loop: how long, what is kept, when it is evaluated."""

    val_check_interval: int = -1
    """Steps between two evaluations, which the last step has, too; -1 for none. Each is the held-out loss (`eval/loss`) and,
    where `cluster.component_placement` has a group `rollout`, the suites of `workflow.eval_suites`, which its engines answer.
    Checkpoints are evaluated on suites either way (by the workflow, or `rlhpc eval`)."""


@dataclass
class SftConfig(LanguageConfig):
    """A language model on demonstrations."""

    runner: SftRunnerConfig = field(default_factory=SftRunnerConfig)
    data: SftDataConfig = field(default_factory=SftDataConfig)
    actor: SftActorConfig = field(default_factory=SftActorConfig)


CHOICES = {
    "algorithm.kl_type": ("k1", "k2", "k3", "abs", "kl", "mse", "low_var_kl"),
    "algorithm.kl_in": ("loss", "reward"),
    "algorithm.distillation.mode": ("sampled", "topk", "full"),
    "algorithm.credit": ("episode", "turn", "state"),
    "algorithm.normalize_advantages": ("auto", "batch", "none"),
    "algorithm.loss_agg": (
        "token-mean",
        "token-sum",
        "seq-mean-token-mean",
        "seq-mean-token-sum",
        "seq-mean-token-sum-norm",
    ),
    "actor.model.dtype": ("auto", "float32", "bfloat16"),
    "actor.model.attn_implementation": ("sdpa", "eager", "flash_attention_2"),
    "actor.optim.lr_scheduler": ("constant", "linear", "cosine"),
    "critic.model.dtype": ("auto", "float32", "bfloat16"),
    "critic.model.attn_implementation": ("sdpa", "eager", "flash_attention_2"),
    "critic.optim.name": ("adam", "adamw"),
    "critic.optim.lr_scheduler": ("constant", "linear", "cosine"),
    **{
        f"{section}.model.{key}": allowed
        for section in ("teacher", "reward", "judge")
        for key, allowed in {
            "dtype": ("auto", "float32", "bfloat16"),
            "attn_implementation": ("sdpa", "eager", "flash_attention_2"),
        }.items()
    },
    "rollout.dtype": ("auto", "float32", "bfloat16", "float16"),
    "teacher.dtype": ("auto", "float32", "bfloat16", "float16"),
    "judge.dtype": ("auto", "float32", "bfloat16", "float16"),
    "judge.mode": ("grade", "compare"),
    "data.overlong_prompts": ("error", "drop"),
    "agent.sandbox": ("bubblewrap", "unshare", "none"),
    "agent.kind": ("inline", "python", "command", "environment", "mcp", "verifiers", "openenv"),
}
DPO_CHOICES = {**CHOICES, "algorithm.loss_type": ("sigmoid", "ipo")}
#: Keys, and sections, of the machine and of how the work is cut into pieces.
FREE = (
    "runner.val_check_interval", "rollout.weight_sync", "rollout.weight_delta",
    "rollout.gpu_memory_utilization", "rollout.max_batch_size", "rollout.parallel.", "critic.max_tokens_per_micro_batch",
    "reference.", "teacher.max_tokens_per_micro_batch", "teacher.rollout_backend", "teacher.gpu_memory_utilization",
    "teacher.max_batch_size", "reward.model.max_tokens_per_micro_batch", "judge.gpu_memory_utilization",
    "judge.max_batch_size", "judge.cache_size", "critic.training_backend", "critic.fsdp.", "critic.deepspeed.",
    "critic.parallel.",
    "critic.use_remove_padding", "critic.enable_dp_load_balance", "actor.use_remove_padding", "actor.enable_dp_load_balance",
    "critic.model.gradient_checkpointing", "critic.model.attn_implementation",
    "actor.max_tokens_per_micro_batch", "actor.training_backend", "actor.fsdp.", "actor.deepspeed.", "actor.parallel.",
    "actor.offload_in_rollout", "actor.model.gradient_checkpointing", "actor.model.attn_implementation",
    "reward.timeout_s", "reward.processes", "agent.python", "agent.episodes_per_rank", "agent.timeout_s",
    "agent.sandbox_read", "agent.memory_mb", "agent.disk_mb",
    "agent.feedback_timeout_s", "agent.feedback_ahead",
)  # fmt: skip


#: Constraints of numbers, of all task types.
TRAINED_RANGES: dict[str, Range] = {
    "runner.val_check_interval": INTERVAL,
    "actor.optim.lr_warmup_steps": NOT_NEGATIVE,
    "actor.max_tokens_per_micro_batch": COUNT,
    "actor.model.router_aux_loss_coef": NOT_NEGATIVE,
    **{
        f"data.{part}.{name}": allowed
        for part in ("train", "eval[]")
        for name, allowed in {"size": COUNT, "seed": NOT_NEGATIVE, "eval_fraction": FRACTION}.items()
    },
    "data.max_prompt_tokens": COUNT,
    "data.prompts_per_step": COUNT,
}
#: And of those whose models answer.
RANGES: dict[str, Range] = {
    **TRAINED_RANGES,
    **ELASTIC_RANGES,
    "algorithm.beta": POSITIVE,
    "algorithm.label_smoothing": Range(0, 0.5, below=True),
    "algorithm.gamma": FRACTION,
    "algorithm.gae_lambda": FRACTION,
    "algorithm.turn_gamma": FRACTION,
    "algorithm.turn_coef": NOT_NEGATIVE,
    "algorithm.value_clip": POSITIVE,
    "algorithm.value_coef": NOT_NEGATIVE,
    "algorithm.clip_ratio_low": PART,
    "algorithm.clip_ratio_high": NOT_NEGATIVE,
    "algorithm.clip_ratio_c": Range(1, above=True),
    "algorithm.entropy_coef": NOT_NEGATIVE,
    "algorithm.update_epochs": COUNT,
    "algorithm.group_size": COUNT,
    "algorithm.kl_coef": NOT_NEGATIVE,
    "algorithm.tis_cap": POSITIVE,
    "algorithm.max_refills": NOT_NEGATIVE,
    "algorithm.overlong_buffer": NOT_NEGATIVE,
    "algorithm.max_staleness": NOT_NEGATIVE,
    "algorithm.distillation.topk": COUNT,
    "algorithm.distillation.beta": FRACTION,
    "algorithm.distillation.coef": POSITIVE,
    "algorithm.distillation.task_reward_coef": NOT_NEGATIVE,
    "rollout.max_new_tokens": COUNT,
    "rollout.temperature": NOT_NEGATIVE,
    "rollout.probe_interval": INTERVAL_OR_0,
    "rollout.probe_tolerance": POSITIVE,
    "rollout.top_p": Range(0, 1, above=True),
    "rollout.top_k": Range(1, also=(-1, "off")),
    "rollout.max_batch_size": COUNT,
    "rollout.parallel.tensor": COUNT,
    "rollout.max_model_len": COUNT,
    "rollout.gpu_memory_utilization": Range(0, 1, above=True),
    "rollout.max_turns": COUNT,
    "agent.episodes_per_rank": COUNT,
    "agent.timeout_s": POSITIVE,
    "agent.memory_mb": COUNT,
    "agent.disk_mb": COUNT,
    "agent.feedback_timeout_s": NOT_NEGATIVE,
    "agent.feedback_ahead": NOT_NEGATIVE,
    "agent.max_turns": COUNT,
    "agent.services[].timeout_s": POSITIVE,
    "agent.max_tokens": COUNT,
    "actor.global_batch_size": COUNT,
    "critic.model.router_aux_loss_coef": NOT_NEGATIVE,
    "data.eval[].samples": COUNT,
    "data.eval[].temperature": NOT_NEGATIVE,
    "reward.terms[].weight": ANY,
    "reward.process_terms[].weight": ANY,
    "reward.timeout_s": POSITIVE,
    "reward.failed": ANY,
    "reward.max_failed_steps": NOT_NEGATIVE,
    "reward.processes": COUNT,
    **GROUP_RANGES,
    **{f"critic.{key[6:]}": allowed for key, allowed in COMMON_RANGES.items() if key.startswith("actor.")},
}


@dataclass
class RewardRunnerConfig(RunnerConfig):
    """The loop: how long, what is kept, when it is evaluated."""

    val_check_interval: int = -1
    """Steps between evaluations during training, by the actor's ranks, of the suites that `workflow.eval_suites` names; -1
    for none (the workflow evaluates checkpoints anyway)."""


@dataclass
class RewardRunConfig(TrainedLanguageConfig):
    """A reward model: a language model's trunk with a head that gives one number to a response."""

    runner: RewardRunnerConfig = field(default_factory=RewardRunnerConfig)
    algorithm: RewardAlgorithmConfig = field(default_factory=RewardAlgorithmConfig)
    data: PreferenceDataConfig = field(default_factory=PreferenceDataConfig)
    actor: RewardActorConfig = field(default_factory=RewardActorConfig)


@dataclass
class DpoConfig(SftConfig):
    """A language model on preferences, held to the weights from before training (DPO)."""

    algorithm: DpoAlgorithmConfig = field(default_factory=DpoAlgorithmConfig)
    data: DpoDataConfig = field(default_factory=DpoDataConfig)
    actor: DpoActorConfig = field(default_factory=DpoActorConfig)
