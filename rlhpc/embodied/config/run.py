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
from rlhpc.config.sections import OptimConfig, RunConfig, ScheduledOptimConfig, ValueOptimConfig
from rlhpc.embodied.config.data import DemoBufferConfig, DemosConfig, ReplayBufferConfig, SuccessClassifierConfig
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
    """Loss of behaviour cloning, and number of passes over the demonstrations."""

    gamma: Annotated[float, FRACTION] = 0.99
    """Discount of the returns used by `bc_value_coef` and `value_model`."""
    update_epochs: Annotated[int, COUNT] = 4
    """Passes over the demonstrations per step."""
    minibatches_per_step: Annotated[int | None, COUNT] = None
    """Number of minibatches per step, for checkpoints and evaluations within a pass over many demonstrations; null takes
    `update_epochs` passes."""
    bc_loss: Annotated[str, Choices("nll", "mse")] = "nll"
    """`nll` (negative log-likelihood of the demonstrated actions, or the policy's own `bc_loss`, such as flow matching) or
    `mse` (squared error of the mean action)."""
    bc_value_coef: Annotated[float, NOT_NEGATIVE] = 0.0
    """Weight of a value loss on the demonstrations' discounted returns, so that PPO starts with a critic; 0 is off."""
    value_model: str | None = None
    """Policy whose critic estimates the expected return (a run, a checkpoint or an export folder). The trained policy is
    conditioned on whether an action turned out better than expected, and acts under the condition that it does (advantage
    conditioning, RECAP). Requires `actor.model.model_type: conditioned`."""
    advantage_steps: Annotated[int, COUNT] = 50
    """`value_model`: number of rewards that are summed before bootstrapping from the critic's value."""
    improved_fraction: Annotated[float, Range(0, 1, above=True, below=True)] = 0.3
    """`value_model`: fraction of all steps that count as improvements, namely those with the largest advantages."""
    anneal_lr: bool = False
    """Lowers the learning rate linearly to `actor.optim.min_lr` over the run."""


@dataclass
class BcActorConfig(EmbodiedActorConfig):
    """Settings of the actor group, which trains the model."""

    optim: ScheduledOptimConfig = field(default_factory=ScheduledOptimConfig)
    """Settings of the optimizer."""

    global_batch_size: Annotated[int, COUNT] = 256
    """Demonstrated steps per optimizer step, over all ranks; all steps if there are fewer."""
    model: BcModelConfig = field(default_factory=BcModelConfig)
    """The policy."""


@dataclass
class BcConfig(RunConfig):
    """Configuration of a behaviour-cloning run."""

    runner: EmbodiedRunnerConfig = field(default_factory=EmbodiedRunnerConfig)
    algorithm: BcAlgorithmConfig = field(default_factory=BcAlgorithmConfig)
    env: ClonedEnvsConfig = field(default_factory=ClonedEnvsConfig)
    actor: BcActorConfig = field(default_factory=BcActorConfig)
    demos: DemosConfig = field(default_factory=DemosConfig)
    workflow: DemonstratedWorkflowConfig = field(default_factory=DemonstratedWorkflowConfig)


@dataclass
class SacAlgorithmConfig:
    """Off-policy algorithm: targets, buffers and the length of a rollout."""

    name: Annotated[str, Registered("rlhpc.embodied.algorithms.registry:ALGORITHMS")] = "sac"
    """`sac`, `crossq`, `td3`, `iql`, a registered name, or `module:Class`; `actor.model.model_type` selects the networks."""
    gamma: Annotated[float, FRACTION] = 0.99
    """Discount."""
    rollout_steps: Annotated[int, COUNT] = 128
    """T: decisions per slot and step; each is a chunk of `actor.model.num_action_chunks` actions."""
    anneal_lr: bool = False
    """Lowers the learning rate linearly to `actor.optim.min_lr` over the run."""
    max_staleness: Annotated[int, NOT_NEGATIVE] = 0
    """Maximum number of versions by which the policy that acts may lag behind the trained policy; 0 is synchronous. With 1 or
    more, env and rollout ranks may join and leave."""
    bootstrap_type: Annotated[str, Choices("standard", "always")] = "standard"
    """Where the critics' targets include the value of the next state: `standard`, except after terminations; `always`, also
    there, as if the limit of steps had ended the episode."""
    tau: Annotated[float, Range(0, 1, above=True)] = 0.005
    """Fraction by which the target networks move towards the trained networks at each target update."""
    auto_entropy_tuning: bool = True
    """`sac`: learns the temperature, so that the policy's entropy approaches `target_entropy`."""
    initial_alpha: Annotated[float, POSITIVE] = 1.0
    """`sac`: initial temperature; constant without `auto_entropy_tuning`."""
    target_entropy: Annotated[float | None, ANY] = None
    """`sac`: target of the policy's entropy; null takes minus the number of action components."""
    alpha_lr: Annotated[float | None, RATE] = None
    """`sac`: learning rate of the temperature; null takes the critics' (`actor.optim.value_lr`)."""
    alpha_type: Annotated[str, Choices("exp", "softplus")] = "exp"
    """`sac`: temperature of the trained number x: `exp` (exp(x)) or `softplus` (log(1 + exp(x)))."""
    alpha_clip_grad: Annotated[float | None, POSITIVE] = None
    """`sac`: bound of the gradient of x; null for none."""
    backup_entropy: bool = True
    """`sac`: includes the next action's entropy in the critics' targets (RLPD does not)."""
    update_to_data: Annotated[float, POSITIVE] = 1.0
    """Updates per transition from the environments."""
    policy_noise: Annotated[float, NOT_NEGATIVE] = 0.2
    """`td3`: standard deviation of the noise on actions in the critics' targets, as a fraction of half the action range."""
    noise_clip: Annotated[float, NOT_NEGATIVE] = 0.5
    """`td3`: bound of that noise."""
    expectile: Annotated[float, Range(0, 1, above=True, below=True)] = 0.7
    """`iql`: expectile of the Q-values that the value network learns; 0.5 is the mean, values towards 1 approach the
    maximum."""
    inverse_temperature: Annotated[float, NOT_NEGATIVE] = 3.0
    """`iql`: weight of advantages in the policy's loss; 0 is behaviour cloning."""
    max_weight: Annotated[float, POSITIVE] = 100.0
    """`iql`: upper bound of an action's weight."""
    offline_steps: Annotated[int, NOT_NEGATIVE] = 0
    """Number of first steps without environments, which train on `algorithm.demo_buffer` alone."""
    offline_updates: Annotated[int, COUNT] = 1000
    """Updates per offline step."""
    n_step: Annotated[int, COUNT] = 1
    """Number of decisions whose discounted rewards a critic's target sums up before it includes the value of a state; fewer at
    an episode's end, and for the newest transitions."""
    critic_subsample_size: Annotated[int | None, COUNT] = None
    """`sac`, `td3`: number of Q-networks, drawn for each update, whose smallest value the targets take (REDQ, RLPD); null
    takes all `actor.model.num_q_heads`."""
    actor_agg_q: Annotated[str, Choices("min", "mean")] = "min"
    """`sac`, `crossq`: Q-value that the actor increases: the smallest, or the mean (REDQ, RLPD)."""
    random_shift: Annotated[int, NOT_NEGATIVE] = 4
    """Pixels by which an update shifts images at most, at random and separately for observation and next observation (DrQ);
    0 is off."""
    critic_actor_ratio: Annotated[int, COUNT] = 1
    """Critic updates per actor update."""
    target_update_freq: Annotated[int, COUNT] = 1
    """Critic updates per update of the target networks."""
    random_steps: Annotated[int | None, NOT_NEGATIVE] = None
    """Number of first transitions whose actions are drawn uniformly from the action space; null takes
    `replay_buffer.min_buffer_size`, or 0 if the run starts from `runner.init_from` or has `offline_steps`."""
    replay_buffer: ReplayBufferConfig = field(default_factory=ReplayBufferConfig)
    """Buffer of the environments' transitions."""
    demo_buffer: DemoBufferConfig = field(default_factory=DemoBufferConfig)
    """Demonstrations, or other data from before the run."""
    success_classifier: SuccessClassifierConfig = field(default_factory=SuccessClassifierConfig)
    """Success classifier that is trained during the run."""


@dataclass
class SacOptimConfig(OptimConfig):
    """Settings of the optimizers of actor and critics."""

    adam_eps: float = 1.0e-8
    """Added to the denominator, for numerical stability."""
    clip_grad: float | None = None
    """Maximum gradient norm; null does not clip."""
    value_lr: Annotated[float | None, RATE] = None
    """Learning rate of the critics; null takes `lr`."""


@dataclass
class SacActorConfig:
    """Settings of the actor group, which trains the model."""

    global_batch_size: Annotated[int, COUNT] = 256
    """Transitions per update, over all ranks."""
    capture_graphs: Annotated[bool, FREE] = False
    """On a CUDA GPU, with `sac`, `td3`, `iql` or, on one rank, `crossq`: records forward and backward passes once and replays
    them, because the kernels of small networks take longer to start than to run."""
    model: SacModelConfig = field(default_factory=SacModelConfig)
    """The policy and its critics."""
    optim: SacOptimConfig = field(default_factory=SacOptimConfig)
    """Settings of the optimizer."""


@dataclass
class SacConfig(RunConfig):
    """Configuration of an off-policy run in simulators."""

    cluster: ElasticClusterConfig = field(default_factory=ElasticClusterConfig)
    runner: PlayingRunnerConfig = field(default_factory=PlayingRunnerConfig)
    algorithm: SacAlgorithmConfig = field(default_factory=SacAlgorithmConfig)
    env: EnvConfig = field(default_factory=EnvConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    actor: SacActorConfig = field(default_factory=SacActorConfig)
    workflow: DemonstratedWorkflowConfig = field(default_factory=DemonstratedWorkflowConfig)


@dataclass
class PpoOptimConfig(ScheduledOptimConfig, ValueOptimConfig):
    """Settings of the optimizer."""


@dataclass
class PpoActorConfig(EmbodiedActorConfig):
    """Settings of the actor group, which trains the model."""

    optim: PpoOptimConfig = field(default_factory=PpoOptimConfig)
    """Settings of the optimizer."""
    global_batch_size: Annotated[int | None, COUNT] = None
    """Transitions per optimizer step, over all ranks; null takes a quarter of a rollout's transitions, or a third, half or all
    of them if they do not divide by four."""
    enable_offload: Annotated[bool, FREE] = False
    """Colocated runs: keeps weights and optimizer in host memory during rollouts, to free the accelerator for the rollout
    ranks."""


@dataclass
class PpoRolloutConfig(RolloutConfig):
    """Settings of the rollout group."""

    enable_offload: Annotated[bool, FREE] = False
    """Colocated runs: keeps the acting policy in host memory during training, to free the accelerator for the actors."""


@dataclass
class PpoRunnerConfig(PlayingRunnerConfig):
    """Settings of the training loop: duration, checkpoints and evaluation."""

    use_training_pipeline: bool = False
    """Overlaps training with the rollout: the first of `algorithm.update_epochs` trains on the parts of a rollout
    (`algorithm.rollout_parts`) in order, on each as soon as it has been played, while the next part is played."""


@dataclass
class PpoAlgorithmConfig:
    """On-policy algorithm: advantages, losses and the length of a rollout."""

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
    """ε of PPO's lower clip bound 1 − ε."""
    clip_ratio_high: Annotated[float, NOT_NEGATIVE] = 0.2
    """ε of PPO's upper clip bound 1 + ε."""
    clip_ratio_c: Annotated[float | None, Range(1, above=True)] = None
    """c of dual-clip PPO (> 1); null turns it off."""
    value_clip: Annotated[float | None, POSITIVE] = None
    """Clip range of the value loss; null is off."""
    huber_delta: Annotated[float | None, POSITIVE] = None
    """Error of a value up to which its loss is quadratic; it is linear beyond (Huber). null is quadratic everywhere."""
    value_coef: Annotated[float, NOT_NEGATIVE] = 0.5
    """Weight of the value loss."""
    loss_agg: Annotated[str, Choices("token-mean", "seq-mean-token-mean")] = "token-mean"
    """Aggregation of policy and value loss: `token-mean`, over all trained tokens of a minibatch; `seq-mean-token-mean`, in
    which all episodes have the same weight, whatever their length. The latter requires `env.train.auto_reset: false`."""
    entropy_coef: Annotated[float, NOT_NEGATIVE] = 0.0
    """Weight of the entropy bonus."""
    target_kl: Annotated[float | None, POSITIVE] = None
    """Ends a step's updates before the first minibatch whose KL estimate exceeds this; null is off."""
    tis_cap: Annotated[float | None, POSITIVE] = None
    """`decoupled_ppo`: cap of the importance ratio between the policy before the update and the policy that acted; null is
    off."""
    behave_weight_threshold: Annotated[float | None, POSITIVE] = None
    """`decoupled_ppo`: importance ratio (as in `tis_cap`) above which a token is left out of the policy loss; null is off."""
    proximal_policy: Annotated[str, Choices("recomputed", "interpolated")] = "recomputed"
    """`decoupled_ppo`: policy around which ratios are clipped: `recomputed`, the weights before the update; `interpolated`,
    between the log-probabilities of the policy that acted and of the trained one, the nearer to the latter the older the
    weights that acted, which saves a forward pass (RLinf's asynchronous PPO)."""
    update_epochs: Annotated[int, COUNT] = 4
    """Passes over each rollout."""
    rollout_steps: Annotated[int, COUNT] = 128
    """T: decisions per slot and step; each is a chunk of `actor.model.num_action_chunks` actions."""
    rollout_parts: Annotated[int, COUNT] = 1
    """Number of consecutive parts into which a step's decisions are divided; all are played with the same weights. GAE
    bootstraps at the end of a part; without `env.train.auto_reset` each part is one episode in every slot."""
    logprob_type: Annotated[str, Choices("token_level", "action_level", "chunk_level")] = "chunk_level"
    """Unit that the policy loss treats as a token: `chunk_level` (a chunk of actions), `action_level` (each action of a chunk)
    or `token_level` (each component of an action)."""
    reward_type: Annotated[str, Choices("action_level", "chunk_level")] = "chunk_level"
    """`chunk_level` sums the rewards of a chunk; with `action_level`, advantages and returns are computed per action."""
    bootstrap_type: Annotated[str, Choices("standard", "always")] = "standard"
    """Where GAE bootstraps from the value of an episode's last observation: `standard`, after truncations; `always`, also
    after terminations."""
    filter_rewards: bool = False
    """Drops groups whose mean return is below `rewards_lower_bound` or above `rewards_upper_bound`: all their transitions are
    left out of the step's training."""
    count_filtered_groups: bool = False
    """`filter_rewards`: counts the groups that are left out in the mean over episodes, with a loss of 0, so that gradients are
    smaller where fewer groups train. It requires `loss_agg: seq-mean-token-mean`."""
    rewards_lower_bound: Annotated[float, ANY] = 0.1
    """`filter_rewards`: smallest mean return of a group that is trained on."""
    rewards_upper_bound: Annotated[float, ANY] = 0.9
    """`filter_rewards`: largest mean return of a group that is trained on."""
    anneal_lr: bool = False
    """Lowers the learning rate linearly to `actor.optim.min_lr` over the run."""
    max_staleness: Annotated[int, NOT_NEGATIVE] = 0
    """Maximum number of versions by which the policy that acts may lag behind the trained policy; 0 is synchronous. With 1 or
    more, env and rollout ranks may join and leave."""


@dataclass
class PpoConfig(RunConfig):
    """Configuration of a run with PPO, GRPO or a similar algorithm in simulators."""

    cluster: ElasticClusterConfig = field(default_factory=ElasticClusterConfig)
    runner: PpoRunnerConfig = field(default_factory=PpoRunnerConfig)
    algorithm: PpoAlgorithmConfig = field(default_factory=PpoAlgorithmConfig)
    env: RolloutEnvsConfig = field(default_factory=RolloutEnvsConfig)
    rollout: PpoRolloutConfig = field(default_factory=PpoRolloutConfig)
    actor: PpoActorConfig = field(default_factory=PpoActorConfig)
    workflow: EmbodiedWorkflowConfig = field(default_factory=EmbodiedWorkflowConfig)


def minibatch_size(cfg: PpoConfig) -> int:
    """Returns the number of transitions per optimizer step: `actor.global_batch_size`, or by default a rollout divided into up
    to four equal minibatches (CleanRL's `num_minibatches`). With `runner.use_training_pipeline`, minibatches do not span parts
    of a rollout.
    """
    if cfg.actor.global_batch_size is not None:
        return cfg.actor.global_batch_size
    num_parts = cfg.algorithm.rollout_parts if cfg.runner.use_training_pipeline else 1
    num_transitions = cfg.env.train.num_envs * cfg.algorithm.rollout_steps // num_parts
    return next(num_transitions // n for n in range(max(1, 4 // num_parts), 0, -1) if num_transitions % n == 0)


def acts_in_actor(cfg: PpoConfig | SacConfig) -> bool:
    """Returns whether the actor ranks simulate and act themselves: the environments are tensors, and
    `cluster.component_placement` places no env and no rollout ranks.
    """
    components = {
        name.strip() for component_names in cfg.cluster.component_placement for name in str(component_names).split(",")
    }
    return cfg.env.train.env_type == "tensors" and not components & {"env", "rollout"}
