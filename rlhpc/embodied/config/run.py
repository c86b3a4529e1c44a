"""Configurations of behaviour cloning, off-policy and on-policy runs. The docstring under a field is its entry in the
reference.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from rlhpc.config.constraints import (
    ANY,
    COUNT,
    FRACTION,
    FREE,
    NOT_NEGATIVE,
    PART,
    POSITIVE,
    RATE,
    Choices,
    Range,
    Registered,
)
from rlhpc.config.sections import OptimConfig, RunConfig
from rlhpc.embodied.config.data import DemoBufferConfig, DemosConfig, ReplayBufferConfig
from rlhpc.embodied.config.envs import (
    ClonedEnvsConfig,
    DemonstratedWorkflowConfig,
    EmbodiedRunnerConfig,
    EmbodiedWorkflowConfig,
    EnvConfig,
    PlayingRunnerConfig,
    RolloutConfig,
    RolloutEnvsConfig,
)
from rlhpc.embodied.config.models import BcModelConfig, EmbodiedActorConfig, SacModelConfig
from rlhpc.runtime.cluster_config import ElasticClusterConfig


@dataclass
class BcAlgorithmConfig:
    """The loss, and how often each demonstration is seen."""

    gamma: Annotated[float, FRACTION] = 0.99
    """Discount of the returns that `bc_value_coef` and `value_model` are for."""
    update_epochs: Annotated[int, COUNT] = 4
    """Passes over the demonstrations in a step."""
    bc_loss: Annotated[str, Choices("nll", "mse")] = "nll"
    """`nll` (negative log-likelihood of the demonstrated actions, or what the policy's `bc_loss` has in its place: flow
    matching) or `mse` (squared error of the mean action)."""
    bc_value_coef: Annotated[float, NOT_NEGATIVE] = 0.0
    """Weight of a value loss on the demonstrations' discounted returns, so that PPO starts with a critic; 0 is off."""
    value_model: str | None = None
    """A policy whose critic says what was to be expected (a run, a checkpoint or an export folder), so that the policy is
    told which actions turned out better than that, and is asked for such when it acts (advantage conditioning, RECAP);
    with `actor.model.model_type: conditioned`."""
    advantage_steps: Annotated[int, COUNT] = 50
    """`value_model`: rewards that are counted before the critic's value of what follows."""
    improved_fraction: Annotated[float, Range(0, 1, above=True, below=True)] = 0.3
    """`value_model`: the part of all steps that counts as improvements: those with the largest advantages."""
    anneal_lr: bool = False
    """Lowers the learning rate linearly to 0 over the run."""


@dataclass
class BcActorConfig(EmbodiedActorConfig):
    """The actor group: training."""

    global_batch_size: Annotated[int, COUNT] = 256
    """Demonstrated steps of one optimizer step, over all ranks; all of them, where there are fewer."""
    model: BcModelConfig = field(default_factory=BcModelConfig)
    """The policy."""


@dataclass
class BcConfig(RunConfig):
    """A run of behaviour cloning."""

    runner: EmbodiedRunnerConfig = field(default_factory=EmbodiedRunnerConfig)
    algorithm: BcAlgorithmConfig = field(default_factory=BcAlgorithmConfig)
    env: ClonedEnvsConfig = field(default_factory=ClonedEnvsConfig)
    actor: BcActorConfig = field(default_factory=BcActorConfig)
    demos: DemosConfig = field(default_factory=DemosConfig)
    workflow: DemonstratedWorkflowConfig = field(default_factory=DemonstratedWorkflowConfig)


@dataclass
class SacAlgorithmConfig:
    """The targets, the buffers and the shape of a rollout."""

    name: Annotated[str, Registered("rlhpc.embodied.algorithms.registry:ALGORITHMS")] = "sac"
    """`sac`, `crossq`, `td3`, `iql`, a registered name, or `module:Class`; `actor.model.model_type` names its networks."""
    gamma: Annotated[float, FRACTION] = 0.99
    """Discount."""
    rollout_steps: Annotated[int, COUNT] = 128
    """T: decisions per slot and step; each is a chunk of `actor.model.num_action_chunks` actions."""
    anneal_lr: bool = False
    """Lowers the learning rate linearly to 0 over the run."""
    max_staleness: Annotated[int, NOT_NEGATIVE] = 0
    """Most versions by which the policy that acted may lag behind the one that
    is trained; 0 is sync. With 1 or more, env ranks may come and go."""
    tau: Annotated[float, Range(0, 1, above=True)] = 0.005
    """Fraction of the critics' weights that goes into the target networks at each of their updates."""
    auto_entropy_tuning: bool = True
    """`sac`: the temperature is learned, so that the policy's entropy becomes `target_entropy`."""
    initial_alpha: Annotated[float, POSITIVE] = 1.0
    """`sac`: temperature at the start, or throughout."""
    target_entropy: Annotated[float | None, ANY] = None
    """`sac`: null takes minus the number of action components."""
    alpha_lr: Annotated[float | None, RATE] = None
    """`sac`: learning rate of the temperature; null takes that of the critics (`actor.optim.value_lr`)."""
    backup_entropy: bool = True
    """`sac`: the critics' targets contain the next action's entropy (RLPD goes without)."""
    update_to_data: Annotated[float, POSITIVE] = 1.0
    """Updates for each transition that the environments bring."""
    policy_noise: Annotated[float, NOT_NEGATIVE] = 0.2
    """`td3`: standard deviation of the noise on actions in the critics' targets, in halves of the bounds' width."""
    noise_clip: Annotated[float, NOT_NEGATIVE] = 0.5
    """`td3`: its bound."""
    expectile: Annotated[float, Range(0, 1, above=True, below=True)] = 0.7
    """`iql`: which expectile of the critics' values the value network learns; 0.5 is their mean, towards 1 their maximum."""
    inverse_temperature: Annotated[float, NOT_NEGATIVE] = 3.0
    """`iql`: how much more the policy learns from actions that are better; 0 is behaviour cloning."""
    max_weight: Annotated[float, POSITIVE] = 100.0
    """`iql`: most that an action counts."""
    offline_steps: Annotated[int, NOT_NEGATIVE] = 0
    """Steps at the start in which nothing is played: they learn from `algorithm.demo_buffer` alone."""
    offline_updates: Annotated[int, COUNT] = 1000
    """Updates of each of those steps."""
    critic_actor_ratio: Annotated[int, COUNT] = 1
    """Updates of the critics for each of the actor."""
    target_update_freq: Annotated[int, COUNT] = 1
    """Updates of the critics for each of the target networks."""
    random_steps: Annotated[int | None, NOT_NEGATIVE] = None
    """Transitions at the start whose actions are drawn evenly from the whole space; null takes
    `replay_buffer.min_buffer_size`, and 0 where the run starts from `runner.init_from` or with `offline_steps`."""
    replay_buffer: ReplayBufferConfig = field(default_factory=ReplayBufferConfig)
    """What the environments brought."""
    demo_buffer: DemoBufferConfig = field(default_factory=DemoBufferConfig)
    """Demonstrations, or other data from before the run."""


@dataclass
class SacOptimConfig(OptimConfig):
    """The optimizer."""

    adam_eps: float = 1.0e-8
    """Added to the denominator, for numerical stability."""
    clip_grad: float | None = None
    """Largest gradient norm; null does not clip."""
    value_lr: Annotated[float | None, RATE] = None
    """Learning rate of the critics; null takes `lr`."""


@dataclass
class SacActorConfig:
    """The actor group: training."""

    global_batch_size: Annotated[int, COUNT] = 256
    """Transitions of one update, over all ranks."""
    model: SacModelConfig = field(default_factory=SacModelConfig)
    """The policy and its critics."""
    optim: SacOptimConfig = field(default_factory=SacOptimConfig)
    """The optimizer."""


@dataclass
class SacConfig(RunConfig):
    """An off-policy run in simulators."""

    cluster: ElasticClusterConfig = field(default_factory=ElasticClusterConfig)
    runner: PlayingRunnerConfig = field(default_factory=PlayingRunnerConfig)
    algorithm: SacAlgorithmConfig = field(default_factory=SacAlgorithmConfig)
    env: EnvConfig = field(default_factory=EnvConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    actor: SacActorConfig = field(default_factory=SacActorConfig)
    workflow: DemonstratedWorkflowConfig = field(default_factory=DemonstratedWorkflowConfig)


@dataclass
class PpoActorConfig(EmbodiedActorConfig):
    """The actor group: training."""

    global_batch_size: Annotated[int | None, COUNT] = None
    """Transitions of one optimizer step, over all ranks; null takes a quarter of a rollout's, or a third, half or all of them
    where that does not divide."""
    enable_offload: Annotated[bool, FREE] = False
    """Collocated: weights and optimizer are on the host while the rollout ranks play, so that these have the accelerator."""


@dataclass
class PpoRolloutConfig(RolloutConfig):
    """The rollout group."""

    enable_offload: Annotated[bool, FREE] = False
    """Collocated: the policy that acts is on the host while the actors train, so that these have the accelerator."""


@dataclass
class PpoRunnerConfig(PlayingRunnerConfig):
    """The loop: how long, what is kept, when it is evaluated."""

    use_training_pipeline: bool = False
    """The first of `algorithm.update_epochs` takes the parts of a rollout (`algorithm.rollout_parts`) in their order, and
    trains on each as soon as it has been played, while the policy and the simulators play the next ones."""


@dataclass
class PpoAlgorithmConfig:
    """Advantages, losses and the shape of a rollout."""

    adv_type: Annotated[str, Registered("rlhpc.algorithms.registry:ADVANTAGES")] = "gae"
    """Advantage estimator: gae, grpo, dr_grpo, rloo, reinforce++, reinforce++_baseline, raw, a registered name, or
    `module:function`."""
    loss_type: Annotated[str, Registered("rlhpc.algorithms.registry:POLICY_LOSSES")] = "ppo"
    """Policy loss: ppo (alias actor, actor_critic), gspo, cispo, decoupled_ppo, a registered name, or `module:function`."""
    gamma: Annotated[float, FRACTION] = 0.99
    """Discount."""
    gae_lambda: Annotated[float, FRACTION] = 0.95
    """Trace decay of GAE."""
    normalize_advantages: Annotated[str, Choices("auto", "minibatch", "batch", "none")] = "auto"
    """`minibatch`, `batch` or `none`, always over all ranks; `auto` is minibatch."""
    clip_ratio_low: Annotated[float, PART] = 0.2
    """PPO's ε below 1."""
    clip_ratio_high: Annotated[float, NOT_NEGATIVE] = 0.2
    """PPO's ε above 1."""
    clip_ratio_c: Annotated[float | None, Range(1, above=True)] = None
    """Dual clip's c (> 1); null is off."""
    value_clip: Annotated[float | None, POSITIVE] = None
    """Clip range of the value loss; null is off."""
    value_coef: Annotated[float, NOT_NEGATIVE] = 0.5
    """Weight of the value loss."""
    entropy_coef: Annotated[float, NOT_NEGATIVE] = 0.0
    """Weight of the entropy bonus."""
    target_kl: Annotated[float | None, POSITIVE] = None
    """Ends a step's updates before the first minibatch whose KL estimate exceeds this; null is off."""
    tis_cap: Annotated[float | None, POSITIVE] = None
    """`decoupled_ppo`: cap of the importance weight between the policy from before the update and the one that acted;
    null is off."""
    update_epochs: Annotated[int, COUNT] = 4
    """Passes over each rollout."""
    rollout_steps: Annotated[int, COUNT] = 128
    """T: decisions per slot and step; each is a chunk of `actor.model.num_action_chunks` actions."""
    rollout_parts: Annotated[int, COUNT] = 1
    """Parts in which the decisions of a step are played, one after the other, with the same weights. GAE takes the value of
    what comes next where a part ends; without `env.train.auto_reset` each part is an episode in every slot."""
    logprob_type: Annotated[str, Choices("token_level", "action_level", "chunk_level")] = "chunk_level"
    """What the policy loss treats as a token: `chunk_level` (all that is decided at once), `action_level` (each
    action of a chunk) or `token_level` (each component of an action)."""
    reward_type: Annotated[str, Choices("action_level", "chunk_level")] = "chunk_level"
    """Embodied: `chunk_level` sums the rewards of a chunk; with `action_level` advantages and returns are those of single
    actions."""
    anneal_lr: bool = False
    """Lowers the learning rate linearly to 0 over the run."""
    max_staleness: Annotated[int, NOT_NEGATIVE] = 0
    """Most versions by which the policy that acted may lag behind the one that
    is trained; 0 is sync. With 1 or more, env ranks may come and go."""


@dataclass
class PpoConfig(RunConfig):
    """A run of PPO, GRPO and their like in simulators."""

    cluster: ElasticClusterConfig = field(default_factory=ElasticClusterConfig)
    runner: PpoRunnerConfig = field(default_factory=PpoRunnerConfig)
    algorithm: PpoAlgorithmConfig = field(default_factory=PpoAlgorithmConfig)
    env: RolloutEnvsConfig = field(default_factory=RolloutEnvsConfig)
    rollout: PpoRolloutConfig = field(default_factory=PpoRolloutConfig)
    actor: PpoActorConfig = field(default_factory=PpoActorConfig)
    workflow: EmbodiedWorkflowConfig = field(default_factory=EmbodiedWorkflowConfig)


def minibatch_size(cfg: PpoConfig) -> int:
    """Returns the transitions of one optimizer step: `actor.global_batch_size`, or at most four equal minibatches of a rollout
    (CleanRL's `num_minibatches`). With `runner.use_training_pipeline` each part of a rollout has whole minibatches."""
    if cfg.actor.global_batch_size is not None:
        return cfg.actor.global_batch_size
    parts = cfg.algorithm.rollout_parts if cfg.runner.use_training_pipeline else 1
    size = cfg.env.train.num_envs * cfg.algorithm.rollout_steps // parts
    return next(size // n for n in range(max(1, 4 // parts), 0, -1) if size % n == 0)
