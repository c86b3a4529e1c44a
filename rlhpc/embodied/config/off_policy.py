"""The configuration of off-policy runs. The docstring under a field is its entry in the reference."""

from __future__ import annotations

from dataclasses import dataclass, field

from rlhpc.config.sections import OptimConfig, RunConfig
from rlhpc.embodied.config.policy import NetworkConfig
from rlhpc.embodied.config.sections import DemonstratedWorkflowConfig, EnvConfig, PlayingRunnerConfig, RolloutConfig
from rlhpc.runtime.cluster_config import ElasticClusterConfig


@dataclass
class ReplayBufferConfig:
    """Off-policy learning: the transitions of the environments that batches are drawn from."""

    size: int = 1_000_000
    """Transitions kept, over all actor ranks; the oldest go first."""
    min_buffer_size: int = 5000
    """Transitions before the first update."""


@dataclass
class DemoBufferConfig:
    """Off-policy learning: a fixed second buffer (RLPD)."""

    load_path: str | None = None
    """HDF5 trajectories in ManiSkill's format (file, folder or pattern), a Minari or LeRobot dataset's folder, or a replay
    buffer (a checkpoint of an off-policy run, or what `rlhpc replay` wrote); null is none."""
    ratio: float = 0.5
    """Fraction of each batch that comes from this buffer."""


@dataclass
class SacAlgorithmConfig:
    """The targets, the buffers and the shape of a rollout."""

    name: str = "sac"
    """`sac`, `crossq`, `td3`, `iql`, a registered name, or `module:Class`; `actor.model.model_type` names its networks."""
    gamma: float = 0.99
    """Discount."""
    rollout_steps: int = 128
    """T: decisions per slot and step; each is a chunk of `actor.model.num_action_chunks` actions."""
    anneal_lr: bool = False
    """Lowers the learning rate linearly to 0 over the run."""
    max_staleness: int = 0
    """Most versions by which the policy that acted may lag behind the one that
    is trained; 0 is sync. With 1 or more, env ranks may come and go."""
    tau: float = 0.005
    """Fraction of the critics' weights that goes into the target networks at each of their updates."""
    auto_entropy_tuning: bool = True
    """`sac`: the temperature is learned, so that the policy's entropy becomes `target_entropy`."""
    initial_alpha: float = 1.0
    """`sac`: temperature at the start, or throughout."""
    target_entropy: float | None = None
    """`sac`: null takes minus the number of action components."""
    alpha_lr: float | None = None
    """`sac`: learning rate of the temperature; null takes that of the critics (`actor.optim.value_lr`)."""
    backup_entropy: bool = True
    """`sac`: the critics' targets contain the next action's entropy (RLPD goes without)."""
    update_to_data: float = 1.0
    """Updates for each transition that the environments bring."""
    policy_noise: float = 0.2
    """`td3`: standard deviation of the noise on actions in the critics' targets, in halves of the bounds' width."""
    noise_clip: float = 0.5
    """`td3`: its bound."""
    expectile: float = 0.7
    """`iql`: which expectile of the critics' values the value network learns; 0.5 is their mean, towards 1 their maximum."""
    inverse_temperature: float = 3.0
    """`iql`: how much more the policy learns from actions that are better; 0 is behaviour cloning."""
    max_weight: float = 100.0
    """`iql`: most that an action counts."""
    offline_steps: int = 0
    """Steps at the start in which nothing is played: they learn from `algorithm.demo_buffer` alone."""
    offline_updates: int = 1000
    """Updates of each of those steps."""
    critic_actor_ratio: int = 1
    """Updates of the critics for each of the actor."""
    target_update_freq: int = 1
    """Updates of the critics for each of the target networks."""
    random_steps: int | None = None
    """Transitions at the start whose actions are drawn evenly from the whole space; null takes
    `replay_buffer.min_buffer_size`, and 0 where the run starts from `runner.init_from` or with `offline_steps`."""
    replay_buffer: ReplayBufferConfig = field(default_factory=ReplayBufferConfig)
    """What the environments brought."""
    demo_buffer: DemoBufferConfig = field(default_factory=DemoBufferConfig)
    """Demonstrations, or other data from before the run."""


@dataclass
class SacModelConfig(NetworkConfig):
    """The policy network and its critics."""

    hidden_sizes: list[int] = field(default_factory=lambda: [256, 256])
    """Widths of the hidden layers; cnn and resnet take the last for what comes after the convolutions."""
    activation: str = "relu"
    """tanh, relu, elu, silu or gelu."""
    ortho_init: bool = False
    """Orthogonal initial weights."""
    model_type: str = "sac"
    """`sac` (numbers; a stochastic actor and twin critics), `crossq` (the same, with batch renormalisation), `td3` (numbers; a
    deterministic actor and twin critics), `iql` (numbers; a Gaussian actor, twin critics and a value network), `dsrl`
    (numbers; `sac` over the noise that a frozen flow policy begins with, `kwargs.base`), a registered name, or
    `module:Class`."""
    critic_hidden_sizes: list[int] | None = None
    """Widths of the critics' hidden layers; null takes `hidden_sizes`."""
    critic_layer_norm: bool = False
    """`sac`, `td3`, `iql`: normalises the critics' hidden layers, which keeps many updates per transition stable (RLPD)."""
    exploration_noise: float = 0.1
    """`td3`: standard deviation of the noise that is added to actions while training, in halves of the bounds' width."""


@dataclass
class SacOptimConfig(OptimConfig):
    """The optimizer."""

    adam_eps: float = 1.0e-8
    """Added to the denominator, for numerical stability."""
    clip_grad: float | None = None
    """Largest gradient norm; null does not clip."""
    value_lr: float | None = None
    """Learning rate of the critics; null takes `lr`."""


@dataclass
class SacActorConfig:
    """The actor group: training."""

    global_batch_size: int = 256
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
