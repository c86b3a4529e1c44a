"""The configuration of PPO. The docstring under a field is its entry in the reference."""

from __future__ import annotations

from dataclasses import dataclass, field

from rlhpc.config.sections import RunConfig
from rlhpc.embodied.config.policy import EmbodiedActorConfig
from rlhpc.embodied.config.sections import EmbodiedWorkflowConfig, PlayingRunnerConfig, RolloutConfig, RolloutEnvsConfig
from rlhpc.runtime.cluster_config import ElasticClusterConfig


@dataclass
class PpoActorConfig(EmbodiedActorConfig):
    """The actor group: training."""

    global_batch_size: int | None = None
    """Transitions of one optimizer step, over all ranks; null takes a quarter of a rollout's, or a third, half or all of them
    where that does not divide."""
    enable_offload: bool = False
    """Collocated: weights and optimizer are on the host while the rollout ranks play, so that these have the accelerator."""


@dataclass
class PpoRolloutConfig(RolloutConfig):
    """The rollout group."""

    enable_offload: bool = False
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

    adv_type: str = "gae"
    """Advantage estimator: gae, grpo, dr_grpo, rloo, reinforce++, reinforce++_baseline, raw, a registered name, or
    `module:function`."""
    loss_type: str = "ppo"
    """Policy loss: ppo (alias actor, actor_critic), gspo, cispo, decoupled_ppo, a registered name, or `module:function`."""
    gamma: float = 0.99
    """Discount."""
    gae_lambda: float = 0.95
    """Trace decay of GAE."""
    normalize_advantages: str = "auto"
    """`minibatch`, `batch` or `none`, always over all ranks; `auto` is minibatch."""
    clip_ratio_low: float = 0.2
    """PPO's ε below 1."""
    clip_ratio_high: float = 0.2
    """PPO's ε above 1."""
    clip_ratio_c: float | None = None
    """Dual clip's c (> 1); null is off."""
    value_clip: float | None = None
    """Clip range of the value loss; null is off."""
    value_coef: float = 0.5
    """Weight of the value loss."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus."""
    target_kl: float | None = None
    """Ends a step's updates before the first minibatch whose KL estimate exceeds this; null is off."""
    tis_cap: float | None = None
    """`decoupled_ppo`: cap of the importance weight between the policy from before the update and the one that acted;
    null is off."""
    update_epochs: int = 4
    """Passes over each rollout."""
    rollout_steps: int = 128
    """T: decisions per slot and step; each is a chunk of `actor.model.num_action_chunks` actions."""
    rollout_parts: int = 1
    """Parts in which the decisions of a step are played, one after the other, with the same weights. GAE takes the value of
    what comes next where a part ends; without `env.train.auto_reset` each part is an episode in every slot."""
    logprob_type: str = "chunk_level"
    """What the policy loss treats as a token: `chunk_level` (all that is decided at once), `action_level` (each
    action of a chunk) or `token_level` (each component of an action)."""
    reward_type: str = "chunk_level"
    """Embodied: `chunk_level` sums the rewards of a chunk; with `action_level` advantages and returns are those of single
    actions."""
    anneal_lr: bool = False
    """Lowers the learning rate linearly to 0 over the run."""
    max_staleness: int = 0
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
