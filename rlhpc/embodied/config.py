"""The configurations of runs with simulators. The docstring under a field is its entry in the reference."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeGuard

from omegaconf import II

from rlhpc.config.ranges import ANY, COUNT, FRACTION, INTERVAL, NOT_NEGATIVE, PART, POSITIVE, RATE, SEED, Range
from rlhpc.config.sections import (
    AdapterConfig,
    DeepspeedConfig,
    FsdpConfig,
    OptimConfig,
    RunConfig,
    RunnerConfig,
    WeightSyncConfig,
    WorkflowConfig,
)
from rlhpc.config.typed import mapping


@dataclass
class EmbodiedRunnerConfig(RunnerConfig):
    """The loop: how long, what is kept, when it is evaluated."""

    val_check_interval: int = -1
    """Steps between evaluations during training; -1 for none (the workflow evaluates checkpoints anyway)."""
    init_from: str | None = None
    """Weights that a fresh run starts from, without optimizer and counters: a checkpoint, an export folder, or a run
    folder (its newest checkpoint)."""


@dataclass
class PlayingRunnerConfig(EmbodiedRunnerConfig):
    """The loop: how long, what is kept, when it is evaluated."""

    stop_return: float | None = None
    """Stop when the mean return of the last 100 training episodes reaches this."""


@dataclass
class EmbodiedWorkflowConfig(WorkflowConfig):
    """What the Snakemake rules do with a run."""

    record_episodes: int = 0
    """Records so many episodes of the last policy, to `demos/global_step_<N>.h5` in the run's folder."""
    record_only_success: bool = True
    """Demonstrations and recordings have only episodes that succeeded; needs an environment that says so."""


@dataclass
class DemonstratedWorkflowConfig(EmbodiedWorkflowConfig):
    """What the Snakemake rules do with a run that learns from demonstrations."""

    demos_expert: str | None = None
    """Records demonstrations before training: the expert, as `module:function` or a checkpoint. They go where this run reads
    them (`demos.path`; off-policy: `algorithm.demo_buffer.load_path`), which then is one `.h5` file."""
    demos_episodes: int = 100
    """Number of episodes that the expert records."""


@dataclass
class TaskConfig:
    """What is played, or was."""

    env_type: str = "gymnasium"
    """`gymnasium`, `maniskill`, `metaworld`, `libero`, a registered name, or `module:Class`."""
    env_id: str = ""
    """Id of the environment, such as `CartPole-v1`; embodied runs must name one."""
    max_episode_steps: int | None = None
    """Steps after which an episode is truncated; null takes the environment's own limit."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Arguments of the environment's constructor."""
    wrappers: list[str] = field(default_factory=list)
    """Wrappers to apply in order, as `module:Class`. Where they change rewards, put
    `gymnasium.wrappers:RecordEpisodeStatistics` first: returns are then reported as it counts them."""
    ignore_terminations: bool = False
    """Episodes end at the step limit only."""
    simulator_python: str | None = None
    """Python that simulator processes are started with, where the simulator needs an environment of its own."""


@dataclass
class EnvSideConfig(TaskConfig):
    """Environments of training or of evaluation."""

    num_envs: int = 8
    """Slots that are stepped together, over all ranks."""
    seed: int | None = None
    """Seed of the environments; null takes `runner.seed` (evaluation: one derived from it)."""
    group_size: int = 1
    """Neighbouring slots that share their reset seeds."""
    use_fixed_reset_state_ids: bool = False
    """Every episode of a slot (or of a group of slots) starts from the same state."""
    reward_scale: float = 1.0
    """Factor on the rewards that the learner sees; returns are reported unscaled."""
    use_rel_reward: bool = False
    """The learner sees by how much the reward changed since the step before; returns are reported as the simulator has it."""
    simulators: int | None = None
    """Processes that a rank keeps its slots in, each with a share; 0 keeps them in the rank's own. null is one for each of
    the rank's cores where the simulator gains by it (maniskill, metaworld, libero; none with one core), else 0."""
    simulator_timeout_s: float = 120.0
    """Seconds after which a simulator process that does not answer is taken for hung and started again."""


@dataclass
class RolloutEnvConfig(EnvSideConfig):
    """Environments of training, where each rollout is learned from as a whole."""

    auto_reset: bool = True
    """Episodes follow one another, over the bounds of rollouts. Without, each rollout plays one episode in every slot, from
    its start, and what comes after its end does not train; grpo, rloo and their like compare such episodes (training)."""


@dataclass
class ClonedEnvConfig(TaskConfig):
    """The environment that demonstrations are of. Nobody plays in it: evaluation has its own."""

    reward_scale: float = 1.0
    """Factor on the demonstrations' rewards, for `algorithm.bc_value_coef`: that of the run which goes on from this policy."""


@dataclass
class EvalEnvConfig(EnvSideConfig):
    """Environments of evaluation: the training ones, unless said otherwise."""

    env_type: str = II("env.train.env_type")
    """As `env.train.env_type`."""
    env_id: str = II("env.train.env_id")
    """As `env.train.env_id`."""
    max_episode_steps: int | None = II("env.train.max_episode_steps")
    """As `env.train.max_episode_steps`."""
    kwargs: dict[str, Any] = field(default=II("env.train.kwargs"))
    """As `env.train.kwargs`."""
    simulator_python: str | None = II("env.train.simulator_python")
    """As `env.train.simulator_python`."""
    wrappers: list[str] = field(default=II("env.train.wrappers"))
    """As `env.train.wrappers`: the policy is to see what it was trained on."""
    ignore_terminations: bool = II("env.train.ignore_terminations")
    """As `env.train.ignore_terminations`."""
    num_episodes: int = 100
    """Episodes of an evaluation; each slot contributes a fixed share."""
    video_episodes: int = 0
    """Episodes shown side by side in an mp4 file beside the result of `rlhpc eval`; 0 makes none."""
    video_fps: int = 20
    """Pictures a second of that file; one is taken before each decision."""


@dataclass
class EnvConfig:
    """The env group."""

    train: EnvSideConfig = field(default_factory=EnvSideConfig)
    """Training environments."""
    eval: EvalEnvConfig = field(default_factory=EvalEnvConfig)
    """Evaluation environments."""


@dataclass
class RolloutEnvsConfig(EnvConfig):
    """The env group."""

    train: RolloutEnvConfig = field(default_factory=RolloutEnvConfig)
    """Training environments."""


@dataclass
class ClonedEnvsConfig:
    """Environments."""

    train: ClonedEnvConfig = field(default_factory=ClonedEnvConfig)
    """What the demonstrations are of."""
    eval: EvalEnvConfig = field(default_factory=EvalEnvConfig)
    """Evaluation environments."""


@dataclass
class RolloutConfig(WeightSyncConfig):
    """The rollout group."""

    pipeline_stage_num: int = 1
    """Stages the slots are cut into: while one is simulated, the policy acts on the others."""


@dataclass
class ModelConfig:
    """The policy network."""

    model_type: str = "mlp"
    """`mlp` (numbers), `cnn` and `resnet` (images, and numbers beside them), `flow` (chunks of continuous actions by flow
    matching, from either), `vla` (Llava with action tokens),
    `pi0`, a registered name, or `module:Class`."""
    hidden_sizes: list[int] = field(default_factory=lambda: [64, 64])
    """Widths of the hidden layers; cnn and resnet take the last for what comes after the convolutions."""
    activation: str = "tanh"
    """tanh, relu, elu, silu or gelu."""
    ortho_init: bool = True
    """Orthogonal initial weights."""
    log_std_init: float = 0.0
    """Initial log standard deviation of continuous actions."""
    num_action_chunks: int = 1
    """Actions that are chosen at once and executed one after the other (embodied)."""
    value_per_action: bool = False
    """A value for each action of a chunk, for `algorithm.reward_type: action_level`."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Options of the model: `mlp` has `actor_gain` (0.01) and `critic_gain` (1), of the last layers' orthogonal weights;
    `resnet` has `channels` (default `[16, 32, 32]`), `flow` has `num_steps` (4), `noise_level` (0.5) and `encoder` (of images:
    cnn or resnet); `pi0` has these two; `vla` and `pi0` have `prompt`, with `{instruction}`; a model of your own has what it
    wants."""
    add_value_head: bool = True
    """`vla` and `pi0`: values, which GRPO does without."""
    model_path: str | None = None
    """Language models, `vla` and `pi0`: a Hugging Face folder or hub name, with its tokenizer, or `builtin:tiny`."""
    dtype: str = "float32"
    """`vla` and `pi0`: of the weights; with `fsdp` and `deepspeed` of the computation (mixed precision: fp32 master
    weights)."""
    gradient_checkpointing: bool = False
    """`vla`: recomputes activations in the backward pass, which saves memory."""
    attn_implementation: str = "sdpa"
    """Of transformers: sdpa, eager or flash_attention_2."""
    trust_remote_code: bool = False
    """Runs code that comes with the model."""


@dataclass
class EmbodiedActorConfig:
    """The actor group: training."""

    training_backend: str = "local"
    """`local`: all weights on each rank, gradients summed over the ranks. `fsdp`, `deepspeed`: weights and optimizer spread
    over the ranks. Or `module:Class`."""
    global_batch_size: int = 256
    """Transitions of one optimizer step, over all ranks."""
    micro_batch_size: int | None = None
    """Transitions of one forward and backward pass on a rank; null takes a rank's whole share."""
    model: ModelConfig = field(default_factory=ModelConfig)
    """The policy."""
    optim: OptimConfig = field(default_factory=OptimConfig)
    """The optimizer."""
    lora: AdapterConfig = field(default_factory=AdapterConfig)
    """Adapters."""
    fsdp: FsdpConfig = field(default_factory=FsdpConfig)
    """Options of FSDP2."""
    deepspeed: DeepspeedConfig = field(default_factory=DeepspeedConfig)
    """Options of DeepSpeed."""


@dataclass
class PpoActorConfig(EmbodiedActorConfig):
    """The actor group: training."""

    enable_offload: bool = False
    """Collocated: weights and optimizer are on the host while the rollout ranks play, so that these have the accelerator."""


@dataclass
class PpoRolloutConfig(RolloutConfig):
    """The rollout group."""

    enable_offload: bool = False
    """Collocated: the policy that acts is on the host while the actors train, so that these have the accelerator."""


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
    """Ends a step's updates before that of the first minibatch whose KL estimate passes this; null is off."""
    tis_cap: float | None = None
    """`decoupled_ppo`: cap of the importance weight between the policy of before the update and the one that acted; null is
    off."""
    update_epochs: int = 4
    """Passes over each rollout."""
    rollout_steps: int = 128
    """T: decisions per slot and step; each is a chunk of `actor.model.num_action_chunks` actions."""
    logprob_type: str = "chunk_level"
    """What the policy loss takes for a token: `chunk_level` (all that is decided at once), `action_level` (each
    action of a chunk) or `token_level` (each component of an action)."""
    reward_type: str = "chunk_level"
    """Embodied: `chunk_level` sums the rewards of a chunk; with `action_level` advantages and returns are those of single
    actions."""
    anneal_lr: bool = False
    """Lowers the learning rate linearly to 0 over the run."""
    max_staleness: int = 0
    """Most versions by which the policy that acted may lag behind the one that
    is trained; 0 is sync."""


@dataclass
class PpoConfig(RunConfig):
    """A run of PPO, GRPO and their like in simulators."""

    runner: PlayingRunnerConfig = field(default_factory=PlayingRunnerConfig)
    algorithm: PpoAlgorithmConfig = field(default_factory=PpoAlgorithmConfig)
    env: RolloutEnvsConfig = field(default_factory=RolloutEnvsConfig)
    rollout: PpoRolloutConfig = field(default_factory=PpoRolloutConfig)
    actor: PpoActorConfig = field(default_factory=PpoActorConfig)
    workflow: EmbodiedWorkflowConfig = field(default_factory=EmbodiedWorkflowConfig)


# -- off-policy -------------------------------------------------------------------------------------------------------


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
    """HDF5 trajectories in ManiSkill's format (file, folder or pattern), or a replay buffer (a checkpoint of an off-policy
    run, or what `rlhpc replay` wrote); null is none."""
    ratio: float = 0.5
    """Part of each batch that comes from there."""


@dataclass
class SacAlgorithmConfig:
    """The targets, the buffers and the shape of a rollout."""

    gamma: float = 0.99
    """Discount."""
    rollout_steps: int = 128
    """T: decisions per slot and step; each is a chunk of `actor.model.num_action_chunks` actions."""
    anneal_lr: bool = False
    """Lowers the learning rate linearly to 0 over the run."""
    max_staleness: int = 0
    """Most versions by which the policy that acted may lag behind the one that
    is trained; 0 is sync."""
    tau: float = 0.005
    """Part of the critics' weights that goes into the target networks at each of their updates."""
    auto_entropy_tuning: bool = True
    """The temperature is learned, so that the policy's entropy becomes `target_entropy`."""
    initial_alpha: float = 1.0
    """Temperature at the start, or throughout."""
    target_entropy: float | None = None
    """Null takes minus the number of action components."""
    alpha_lr: float | None = None
    """Learning rate of the temperature; null takes that of the critics (`actor.optim.value_lr`)."""
    backup_entropy: bool = True
    """The critics' targets contain the next action's entropy (RLPD goes without)."""
    update_to_data: float = 1.0
    """Updates for each transition that the environments bring."""
    critic_actor_ratio: int = 1
    """Updates of the critics for each of the actor."""
    target_update_freq: int = 1
    """Updates of the critics for each of the target networks."""
    random_steps: int | None = None
    """Transitions at the start whose actions are drawn evenly from the whole space; null takes
    `replay_buffer.min_buffer_size`, and 0 where the run starts from `runner.init_from`."""
    replay_buffer: ReplayBufferConfig = field(default_factory=ReplayBufferConfig)
    """What the environments brought."""
    demo_buffer: DemoBufferConfig = field(default_factory=DemoBufferConfig)
    """Demonstrations, or other data from before the run."""


@dataclass
class SacModelConfig:
    """The policy network and its critics."""

    model_type: str = "sac"
    """`sac` (numbers; actor and twin critics), a registered name, or `module:Class`."""
    hidden_sizes: list[int] = field(default_factory=lambda: [64, 64])
    """Widths of the hidden layers; cnn and resnet take the last for what comes after the convolutions."""
    activation: str = "tanh"
    """tanh, relu, elu, silu or gelu."""
    ortho_init: bool = True
    """Orthogonal initial weights."""
    log_std_init: float = 0.0
    """Initial log standard deviation of continuous actions."""
    num_action_chunks: int = 1
    """Actions that are chosen at once and executed one after the other (embodied)."""
    critic_layer_norm: bool = False
    """`sac`: normalises the critics' hidden layers, which keeps many updates per transition stable (RLPD)."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Options of the model: `mlp` has `actor_gain` (0.01) and `critic_gain` (1), of the last layers' orthogonal weights;
    `resnet` has `channels` (default `[16, 32, 32]`), `flow` has `num_steps` (4), `noise_level` (0.5) and `encoder` (of images:
    cnn or resnet); `pi0` has these two; `vla` and `pi0` have `prompt`, with `{instruction}`; a model of your own has what it
    wants."""


@dataclass
class SacOptimConfig(OptimConfig):
    """The optimizer."""

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

    runner: PlayingRunnerConfig = field(default_factory=PlayingRunnerConfig)
    algorithm: SacAlgorithmConfig = field(default_factory=SacAlgorithmConfig)
    env: EnvConfig = field(default_factory=EnvConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    actor: SacActorConfig = field(default_factory=SacActorConfig)
    workflow: DemonstratedWorkflowConfig = field(default_factory=DemonstratedWorkflowConfig)


# -- behaviour cloning ------------------------------------------------------------------------------------------------


@dataclass
class DemosConfig:
    """Demonstrations for embodied policies: what behaviour cloning trains on."""

    path: Any = None
    """Trajectories: a `.h5` file in ManiSkill's format, a pattern, a folder of such files, a LeRobot dataset's folder, or a
    list of those."""
    only_success: bool = False
    """Leaves out episodes that never succeeded."""
    limit: int | None = None
    """At most so many episodes; null takes all."""
    holdout: float = 0.0
    """Part of the episodes that is not trained on; `train/holdout_loss` is their loss."""


@dataclass
class BcAlgorithmConfig:
    """The loss, and how often each demonstration is seen."""

    gamma: float = 0.99
    """Discount of the returns that `bc_value_coef` is for."""
    update_epochs: int = 4
    """Passes over the demonstrations, in a step."""
    bc_loss: str = "nll"
    """bc: `nll` (negative log-likelihood of the demonstrated actions, or what the policy's `bc_loss` has in its place: flow
    matching) or `mse` (squared error of the mean action)."""
    bc_value_coef: float = 0.0
    """Weight of a value loss on the demonstrations' discounted returns, so that PPO starts with a critic; 0 is off."""
    anneal_lr: bool = False
    """Lowers the learning rate linearly to 0 over the run."""


@dataclass
class BcModelConfig(ModelConfig):
    """The policy network."""

    model_type: str = "mlp"
    """`mlp` (numbers), `cnn` and `resnet` (images, and numbers beside them), `flow` (chunks of continuous actions by flow
    matching, from either), `sac` (numbers; for an off-policy run to start from), `vla` (Llava with action tokens), `pi0`, a
    registered name, or `module:Class`."""
    critic_layer_norm: bool = False
    """`sac`: normalises the critics' hidden layers, which keeps many updates per transition stable (RLPD)."""


@dataclass
class BcActorConfig(EmbodiedActorConfig):
    """The actor group: training."""

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


#: The configuration of a run in which a policy plays while it learns.
PlayingConfig = PpoConfig | SacConfig
#: That of any run with simulators.
EmbodiedConfig = PpoConfig | SacConfig | BcConfig
#: The network of any policy.
PolicyConfig = ModelConfig | SacModelConfig


def plays(cfg: RunConfig) -> TypeGuard[EmbodiedConfig]:
    """Whether a run is one with simulators."""
    return "env" in mapping(cfg)


#: What each number may be, of all these kinds of run.
RANGES: dict[str, Range] = {
    "runner.val_check_interval": INTERVAL,
    "runner.stop_return": ANY,
    "algorithm.gamma": FRACTION,
    "algorithm.gae_lambda": FRACTION,
    "algorithm.clip_ratio_low": PART,
    "algorithm.clip_ratio_high": NOT_NEGATIVE,
    "algorithm.clip_ratio_c": Range(1, above=True),
    "algorithm.value_clip": POSITIVE,
    "algorithm.value_coef": NOT_NEGATIVE,
    "algorithm.entropy_coef": NOT_NEGATIVE,
    "algorithm.target_kl": POSITIVE,
    "algorithm.update_epochs": COUNT,
    "algorithm.bc_value_coef": NOT_NEGATIVE,
    "algorithm.rollout_steps": COUNT,
    "algorithm.tis_cap": POSITIVE,
    "algorithm.max_staleness": NOT_NEGATIVE,
    "algorithm.tau": Range(0, 1, above=True),
    "algorithm.initial_alpha": POSITIVE,
    "algorithm.target_entropy": ANY,
    "algorithm.alpha_lr": RATE,
    "algorithm.update_to_data": POSITIVE,
    "algorithm.critic_actor_ratio": COUNT,
    "algorithm.target_update_freq": COUNT,
    "algorithm.random_steps": NOT_NEGATIVE,
    "algorithm.replay_buffer.size": COUNT,
    "algorithm.replay_buffer.min_buffer_size": COUNT,
    "algorithm.demo_buffer.ratio": FRACTION,
    **{
        f"env.{side}.{name}": allowed
        for side in ("train", "eval")
        for name, allowed in {
            "num_envs": COUNT,
            "max_episode_steps": COUNT,
            "seed": SEED,
            "group_size": COUNT,
            "reward_scale": ANY,
            "simulators": NOT_NEGATIVE,
            "simulator_timeout_s": POSITIVE,
        }.items()
    },
    "env.eval.num_episodes": COUNT,
    "env.eval.video_episodes": NOT_NEGATIVE,
    "env.eval.video_fps": COUNT,
    "rollout.pipeline_stage_num": COUNT,
    "actor.global_batch_size": COUNT,
    "actor.micro_batch_size": COUNT,
    "actor.model.hidden_sizes": COUNT,
    "actor.model.log_std_init": Range(-20, 20),
    "actor.model.num_action_chunks": COUNT,
    "actor.optim.value_lr": RATE,
    "demos.limit": COUNT,
    "demos.holdout": PART,
    "workflow.demos_episodes": COUNT,
    "workflow.record_episodes": NOT_NEGATIVE,
}
