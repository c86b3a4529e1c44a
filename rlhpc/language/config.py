"""The configurations of language models' runs. The docstring under a field is its entry in the reference."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeGuard

from omegaconf import MISSING

from rlhpc.config.sections import RunConfig, RunnerConfig, WeightSyncConfig, WorkflowConfig
from rlhpc.config.typed import mapping
from rlhpc.language.agent_config import AgentConfig, TrainedAgentConfig
from rlhpc.language.group_config import (
    CriticConfig,
    JudgeConfig,
    ReferenceConfig,
    RewardModelConfig,
    ScoringGroupConfig,
    TeacherConfig,
)
from rlhpc.language.model_config import GenerationConfig, LanguageActorConfig, LanguageModelConfig, LanguageOptimConfig
from rlhpc.runtime.cluster_config import ElasticClusterConfig


@dataclass
class SourceConfig:
    """Where conversations come from, and how they are put to the model."""

    source: str = "jsonl"
    """`jsonl`, `parquet`, `hdf5`, `hf` (a `datasets` folder on disk), `reasoning_gym`, `arithmetic`, `code`,
    `drawn` (pictures), `environment`, a registered name, or `module:Class`."""
    path: str | None = None
    """File or folder; a pattern takes all files it fits."""
    split: str | None = None
    """Part of an `hf` dataset, or a filter `column=value`."""
    prompt_key: str = "prompt"
    """Column of the question (a text, or a list of chat messages, which may have `tool_calls` and `reasoning_content`)."""
    tools_key: str | None = None
    """Column of the tools that the chat template shows to the model: a list of definitions, or that list as JSON text."""
    level_key: str | None = None
    """Column of the difficulty, for evaluation tables."""
    system_prompt: str | None = None
    """System prompt, put before every conversation."""
    prompt_template: str = "{prompt}"
    """How the question is put to the model; `{prompt}` is the question."""
    chat_template: bool = True
    """Formats the conversation with the tokenizer's template; false gives the model the bare text."""
    size: int | None = None
    """Number of problems taken (procedural sources: made)."""
    seed: int = 0
    """Seed of procedural sources, and of the choice of `size` problems."""
    eval_fraction: float = 0.0
    """Part that belongs to evaluation: training leaves it out, and evaluation takes it alone."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Arguments of the source: `reasoning_gym`: {task: …, …}; `arithmetic`: {digits: 2, operators: "+"}; `drawn`: {tasks:
    [count, area, side], most: 4, points: 56};
    `environment`: {name: search, …}, and demonstrations: true for rows of play (sft)."""


@dataclass
class DataSourceConfig(SourceConfig):
    """Problems of training, of one evaluation suite, or demonstrations."""

    answer_key: str | None = "answer"
    """Column of the reference answer; null where there is none."""
    response_key: str = "response"
    """Column of the demonstration (sft)."""
    images_key: str | None = None
    """Column of the pictures that a prompt shows: a file's path (relative ones begin at `path`'s folder), a data URL, bytes as
    `datasets` has them, or a list of these. `<image>` in the prompt says where each stands; by default they come first."""


@dataclass
class EvalDataConfig(DataSourceConfig):
    """One evaluation suite."""

    name: str = "default"
    """Name of the suite."""
    samples: int = 1
    """Responses to each problem: pass@k for k up to this, and majority."""
    temperature: float = 0.0
    """Temperature of sampling; 0 is greedy."""


@dataclass
class DataConfig:
    """What language models are trained and evaluated on."""

    train: DataSourceConfig = field(default_factory=DataSourceConfig)
    """Prompts of training, or demonstrations (sft)."""
    eval: list[EvalDataConfig] = field(default_factory=list)
    """Suites; `workflow.eval_suites` names those that the workflow and `runner.val_check_interval` evaluate on."""
    max_prompt_tokens: int = 1024
    """Longest prompt, in tokens."""
    overlong_prompts: str = "drop"
    """What happens to longer ones, which are found before the start: `drop`, or `error`, which names file and line."""
    prompts_per_step: int = 32
    """Prompts of a step; each gets `algorithm.group_size` responses (sft: demonstrations of a step)."""


@dataclass
class RewardTermConfig:
    """One term of the reward."""

    name: str = MISSING
    """`math`, `exact`, `code`, `format`, `length`, `reasoning_gym`, `http`, a registered name, `module:function`, or the name
    of a group that rates answers, such as `reward` or `judge`."""
    weight: float = 1.0
    """Weight of the term in the sum."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Arguments of the reward."""


@dataclass
class RewardConfig:
    """How responses are judged: the weighted sum of the terms."""

    terms: list[RewardTermConfig] = field(default_factory=list)
    """Terms; the first one's value also says whether an answer is right in evaluation (1 is right)."""
    timeout_s: float = 10.0
    """Longest time for one sample; a reward that takes longer is ended, and the sample gets `failed`."""
    failed: float = 0.0
    """Reward of a sample whose judge hung, raised or died."""
    processes: int = 1
    """Judges working side by side on each reward rank."""


@dataclass
class GrpoRunnerConfig(RunnerConfig):
    """The loop: how long, what is kept, when it is evaluated."""

    val_check_interval: int = -1
    """Steps between evaluations during training, by the rollout ranks, of the suites that `workflow.eval_suites` names; -1 for
    none (the workflow evaluates checkpoints anyway)."""


@dataclass
class PolicyModelConfig(LanguageModelConfig):
    """The language model."""

    value_head: bool = False
    """A head for values on the model's own layers, for `algorithm.adv_type: gae` without a group `critic`: both losses train
    these layers. Rollout ranks and exports do without it."""


@dataclass
class GrpoActorConfig(LanguageActorConfig):
    """The actor group: training."""

    model: PolicyModelConfig = field(default_factory=PolicyModelConfig)
    """The model."""
    global_batch_size: int | None = None
    """Responses of one optimizer step, over all ranks; null takes all responses of a step, for one optimizer step an epoch."""
    offload_in_rollout: bool = False
    """Collocated: moves the actor to the host while the rollout ranks generate, and these away while it trains."""


@dataclass
class EngineConfig(GenerationConfig):
    """How the model answers: in evaluation, and where it is trained on its answers."""

    top_p: float = 1.0
    """Nucleus sampling (top-p); 1 is off."""
    top_k: int = -1
    """Number of most likely tokens kept in sampling; -1 is off."""
    max_turns: int = 1
    """Most turns of a multi-turn episode (`rollout.agent`)."""
    agent: str | None = None
    """Multi-turn episodes with tools: a registered name, or `module:Class`; null is one response a prompt."""


@dataclass
class EngineParallelConfig:
    """How many ranks are one engine, and what they share (`rollout_backend: vllm`)."""

    tensor: int | None = None
    """Ranks over which each layer of an engine is divided; null takes the accelerators that the placement gives a process
    (`rollout: 0-7:0-3` is four engines of two ranks)."""
    expert: bool = False
    """Whether whole experts of a mixture are divided among an engine's ranks, rather than each expert (not on CPUs)."""


@dataclass
class GrpoRolloutConfig(WeightSyncConfig, EngineConfig):
    """The rollout group."""

    parallel: EngineParallelConfig = field(default_factory=EngineParallelConfig)
    """Engines of several ranks."""
    temperature: float = 1.0
    """Temperature of sampling in training; the losses use the same."""
    probe_interval: int = 10
    """Versions of the weights between two probes: engine and trainer score a fixed text, and a difference that rounding does
    not explain ends the run. The first two versions are looked at as well; 0 leaves only version 0. What is compared at the
    start of a run does not depend on it."""
    probe_tolerance: float | None = None
    """How far the text's log-probs may differ, a token on average; null is 0.001 in float32 (on an accelerator 0.02);
    in half precision, and for the changed weights of the start, six times what the trainer finds rounding to make of it."""
    merge_adapters: bool = True
    """With `actor.lora.rank`, whether adapters are merged into the weights that engines get. False sends them as they are, and
    nothing else (`vllm`, which then computes with them): an update is small, and each token costs a little more."""
    keep_cache_on_update: bool = False
    """Sequences under way go on with the keys and values that older weights made, rather than have them recomputed (exact, and
    slow for long ones): for `algorithm.max_staleness`. Log-probs are those that tokens were drawn with either way."""
    routing_replay: bool = False
    """A mixture is trained with the experts that the engine (`hf`) chose for each token, weighted by its routers: rounding
    then sends no token to other experts in the trainer than in the engine."""


@dataclass
class LanguageAlgorithmConfig:
    """The learning rate's course."""

    anneal_lr: bool = False
    """Lowers the learning rate linearly to 0 over the run."""


@dataclass
class DistillationConfig:
    """On-policy distillation (`algorithm.name: distillation`): the model learns what section `teacher` says of its answers."""

    mode: str = "sampled"
    """What the teacher says of each token: `sampled`, its log-prob alone, for a policy gradient; `topk`, those of its most
    likely tokens, and of all others together; `full`, its whole distribution, for which it must be on the actor's ranks."""
    topk: int = 64
    """Tokens in mode topk."""
    beta: float = 1.0
    """Divergence, in the modes topk and full: 1 is the reverse KL(model ‖ teacher), 0 the forward KL(teacher ‖ model), between
    them generalized Jensen-Shannon."""
    coef: float = 1.0
    """Weight of the distillation."""
    task_reward_coef: float = 0.0
    """Weight of the advantages that the reward gives by `algorithm.adv_type`; 0 distils alone, and the reward is logged."""


@dataclass
class GrpoAlgorithmConfig(LanguageAlgorithmConfig):
    """Advantages, losses and the shape of a rollout."""

    name: str = "policy_gradient"
    """The algorithm: `policy_gradient` (to which the keys below belong), `distillation` (which also has
    `algorithm.distillation`), a registered name, or `module:Class`."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Further arguments of the algorithm's constructor."""
    adv_type: str = "grpo"
    """Advantage estimator: grpo, dr_grpo, rloo, reinforce++, reinforce++_baseline, raw, gae (with a group `critic`, or
    `actor.model.value_head`), a registered name, or `module:function`."""
    loss_type: str = "ppo"
    """Policy loss: ppo (alias actor, actor_critic), gspo, cispo, decoupled_ppo, a registered name, or `module:function`."""
    loss_agg: str = "token-mean"
    """How losses of tokens are averaged: token-mean, token-sum, seq-mean-token-mean, seq-mean-token-sum or
    seq-mean-token-sum-norm (Dr. GRPO: divided by the tokens that an episode may have, `rollout.max_new_tokens` or, with an
    agent outside, `agent.max_tokens`). A sequence is what one role says in an episode."""
    gamma: float = 1.0
    """Discount, from token to token."""
    credit: str = "episode"
    """What a turn of an agent's is credited with: `episode`, what the whole was worth; `turn`, what was paid from it on,
    compared with the same turn of the group's other episodes; `state`, as `episode`, and compared with turns that had just
    read the same (GiGPO). The last two are for estimators that compare: grpo, dr_grpo, rloo."""
    turn_gamma: float = 1.0
    """Discount from turn to turn, for `algorithm.credit`."""
    turn_coef: float = 1.0
    """Weight of the comparison of states, for `credit: state`."""
    gae_lambda: float = 1.0
    """Trace decay of GAE, from token to token."""
    value_clip: float | None = None
    """Clip range of the critic's loss; null is off."""
    value_coef: float = 0.5
    """Weight of the loss of values that come from the model's own head (`actor.model.value_head`)."""
    normalize_advantages: str = "auto"
    """`batch` (over all ranks) or `none`; `auto` is none, as the estimators compare within groups, but for gae, where it is
    batch."""
    clip_ratio_low: float = 0.2
    """PPO's ε below 1."""
    clip_ratio_high: float = 0.2
    """PPO's ε above 1."""
    clip_ratio_c: float | None = None
    """Dual clip's c (> 1); null is off."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus."""
    update_epochs: int = 1
    """Passes over each rollout."""
    group_size: int = 8
    """Responses to each prompt."""
    kl_coef: float = 0.0
    """Weight of the KL to the reference policy; 0 does without the reference."""
    kl_type: str = "k3"
    """Estimator of that KL: k1, k2, k3 or abs. In the loss, k2 has the gradient of the KL, k3 and abs one close to it, and k1,
    which has none, is refused."""
    kl_in: str = "loss"
    """Where the KL goes: `loss`, or `reward` (per token)."""
    recompute_logprobs: bool = False
    """Old log-probs come from the trainer rather than from the rollout engine."""
    tis_cap: float | None = None
    """Cap of the truncated importance weight between trainer and rollout engine (with `decoupled_ppo` between the
    policy from before the update and the one that wrote); null is off."""
    filter_groups: bool = False
    """DAPO's dynamic sampling: groups whose rewards, without penalties on length, are all equal are dropped and refilled."""
    max_refills: int = 4
    """Rounds of refilling in a step before it goes on with what it has."""
    overlong_buffer: int = 0
    """DAPO's soft length penalty: how many tokens before `rollout.max_new_tokens` it begins; 0 is off."""
    overlong_filter: bool = False
    """Responses cut off at the length limit are left out: not trained on, and in no mean or spread of their group. The others
    have the advantages that they would have if the cut ones had not been drawn."""
    max_staleness: int = 0
    """Most versions by which the policy that wrote a token may lag behind the one that
    is trained; 0 is sync."""
    distillation: DistillationConfig = field(default_factory=DistillationConfig)
    """On-policy distillation (`algorithm.name: distillation`)."""


@dataclass
class LanguageWorkflowConfig(WorkflowConfig):
    """What the Snakemake rules do with a run."""

    sft: str | None = None
    """Configuration of an SFT run that comes first, relative to this file; this run's `actor.model.model_path` then names
    the folder into which the workflow exports its chosen step, `export/chosen` in its run folder."""
    sft_overrides: list[str] = field(default_factory=list)
    """Changes to the configuration of that SFT run, as `key=value`."""
    eval_start: bool = False
    """Evaluates the model before training, too, as step 0."""


@dataclass
class TrainedLanguageConfig(RunConfig):
    """What every run that trains a language model has."""

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
    """Whether the model of a run answers problems, so that it has the sections `rollout` and `reward`."""
    return {"rollout", "reward"} <= set(mapping(cfg))


@dataclass
class ProcessTermConfig:
    """One term of the reward that is given on the way."""

    name: str = MISSING
    """The group that says what each token is worth, such as one with the scorer `process`."""
    weight: float = 1.0
    """Weight of the term in the sum."""


@dataclass
class GrpoRewardConfig(RewardConfig):
    """How responses are judged: the weighted sum of the terms."""

    process_terms: list[ProcessTermConfig] = field(default_factory=list)
    """Terms that are given on the way, at the end of each step of a response, by groups. The estimators `gae` and `raw` credit
    each to the tokens before it; the others compare whole responses, and add them up."""
    max_failed_steps: int = 0
    """Steps in a row in which no sample could be judged that a run survives; the next such step ends it."""
    model: RewardModelConfig = field(default_factory=RewardModelConfig)
    """The reward model of the group `reward`, which the term of that name asks."""


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
class HoldoutConfig:
    """Rows of the held-out loss; what `data.train` says of its rows holds of them, too."""

    path: str | None = None
    """File or folder; null takes that of `data.train`, and of its rows those that `data.train.eval_fraction` keeps from
    training."""
    split: str | None = None
    """Part of an `hf` dataset, or a filter `column=value`, in place of that of `data.train`: all its rows are held out."""


@dataclass
class SftDataConfig(DataConfig):
    """Data of training, of the held-out loss and of evaluation."""

    holdout: HoldoutConfig = field(default_factory=HoldoutConfig)
    """Rows of the held-out loss (`runner.val_check_interval`)."""


@dataclass
class SftOptimConfig(LanguageOptimConfig):
    """The optimizer."""

    lr: float = 2.0e-5
    """Learning rate. The default is for all weights of a pretrained model; adapters take ten times as much or more."""


@dataclass
class SftActorConfig(LanguageActorConfig):
    """The actor group: training."""

    optim: SftOptimConfig = field(default_factory=SftOptimConfig)
    """The optimizer."""


@dataclass
class SftConfig(LanguageConfig):
    """A language model on demonstrations."""

    runner: SftRunnerConfig = field(default_factory=SftRunnerConfig)
    data: SftDataConfig = field(default_factory=SftDataConfig)
    actor: SftActorConfig = field(default_factory=SftActorConfig)
