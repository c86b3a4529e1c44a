"""Configuration sections that all runs with simulators share. The docstring under a field is its entry in the reference."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any

from omegaconf import II

from rlhpc.config.constraints import (
    ANY,
    COUNT,
    EVALUATION,
    FREE,
    INTERVAL,
    NOT_NEGATIVE,
    POSITIVE,
    SEED,
    Choices,
    OptionsOf,
    Registered,
)
from rlhpc.config.sections import RunnerConfig, WeightSyncConfig, WorkflowConfig


@dataclass
class EmbodiedRunnerConfig(RunnerConfig):
    """The loop: how long, what is kept, when it is evaluated."""

    val_check_interval: Annotated[int, INTERVAL, FREE] = -1
    """Steps between evaluations during training; -1 for none (the workflow evaluates checkpoints anyway)."""
    init_from: str | None = None
    """Weights that a fresh run starts from, without optimizer and counters: a checkpoint, an export folder, or a run
    folder (its newest checkpoint)."""


@dataclass
class PlayingRunnerConfig(EmbodiedRunnerConfig):
    """The loop: how long, what is kept, when it is evaluated."""

    stop_return: Annotated[float | None, ANY, FREE] = None
    """Stop when the mean return of the last 100 training episodes reaches this."""
    enable_decoupled_mode: bool = False
    """A rollout rank answers the env ranks that have asked, without waiting for slower ones; what comes of it is the same, bit
    for bit. Each answer costs a forward pass over all of the rank's slots of a stage."""


@dataclass
class EmbodiedWorkflowConfig(WorkflowConfig):
    """Options of the Snakemake rules for a run."""

    record_episodes: Annotated[int, NOT_NEGATIVE] = 0
    """Records this many episodes of the last policy, to `demos/global_step_<N>.h5` in the run's folder."""
    record_only_success: bool = True
    """Demonstrations and recordings contain only episodes that succeeded; needs an environment that reports success."""


@dataclass
class DemonstratedWorkflowConfig(EmbodiedWorkflowConfig):
    """Options of the Snakemake rules for a run that learns from demonstrations."""

    demos_expert: str | None = None
    """Records demonstrations before training: the expert, as `module:function` or a checkpoint. They are written to
    where this run reads them (`demos.path`; off-policy: `algorithm.demo_buffer.load_path`), which must then be one
    `.h5` file."""
    demos_episodes: Annotated[int, COUNT] = 100
    """Number of episodes that the expert records."""


@dataclass
class TaskConfig:
    """Task: environment, its arguments and wrappers."""

    env_type: Annotated[str, Registered("rlhpc.embodied.envs.registry:ENVS")] = "gymnasium"
    """`gymnasium`, `maniskill`, `metaworld`, `libero`, `robot`, `distant_robot`, a registered name, or
    `module:Class`."""
    env_id: str = ""
    """Id of the environment, such as `CartPole-v1`; embodied runs must name one."""
    max_episode_steps: Annotated[int | None, COUNT] = None
    """Steps after which an episode is truncated; null takes the environment's own limit."""
    kwargs: Annotated[dict[str, Any], OptionsOf("env_type", "rlhpc.embodied.envs.registry:ENV_OPTIONS")] = field(
        default_factory=dict
    )
    """Options of the environment; those of `gymnasium` and `maniskill` are arguments of the task's constructor."""
    wrappers: list[Any] = field(default_factory=list)
    """Wrappers to apply in order, each by its name or as `module:Class`, or as a mapping of that to its settings:
    `{frame_stack: {stack_size: 4}}`. Where they change rewards, put `statistics` first: returns are then reported as it
    counts them."""
    ignore_terminations: bool = False
    """Episodes end at the step limit only."""
    simulator_python: Annotated[str | None, FREE] = None
    """Python with which simulator processes are started, for simulators that need an environment of their own."""


@dataclass
class EnvSideConfig(TaskConfig):
    """Environments of training or of evaluation."""

    num_envs: Annotated[int, COUNT] = 8
    """Slots that are stepped together, over all ranks."""
    seed: Annotated[int | None, SEED] = None
    """Seed of the environments; null takes `runner.seed` (evaluation: one derived from it)."""
    group_size: Annotated[int, COUNT] = 1
    """Neighbouring slots that share their reset seeds."""
    use_fixed_reset_state_ids: bool = False
    """Every episode of a slot (or of a group of slots) starts from the same state."""
    reward_scale: Annotated[float, ANY] = 1.0
    """Factor on the rewards that the learner sees; returns are reported unscaled."""
    use_rel_reward: bool = False
    """The learner sees how much the reward changed since the step before; returns are reported from the simulator's own
    rewards."""
    simulators: Annotated[int | None, NOT_NEGATIVE, FREE] = None
    """Processes in which a rank keeps its slots, each with a share; 0 keeps them in the rank's own process. null is one
    for each of the rank's cores if the simulator gains by it (maniskill, metaworld, libero; none with one core), 1 for a
    robot, which is so stopped however the rank's process ends, else 0."""
    simulator_timeout_s: Annotated[float, POSITIVE] = 120.0
    """Seconds after which a simulator process that does not answer is taken for hung and started again."""


@dataclass
class PlayedEnvConfig(EnvSideConfig):
    """Environments of training."""

    reward_model: str | None = None
    """A model of success (a run, a checkpoint or an export folder of `model_type: success`): the learner then sees the
    probability that the task is done after each step in the place of the simulator's rewards; returns are reported from
    those all the same."""


@dataclass
class RolloutEnvConfig(PlayedEnvConfig):
    """Environments of training, where each rollout is learned from as a whole."""

    auto_reset: bool = True
    """Episodes follow one another, across rollouts. If off, each rollout (or each of `algorithm.rollout_parts`) plays one
    episode in every slot, from its start, and what comes after its end is not trained on; grpo, rloo and their like compare
    such episodes."""


@dataclass
class ClonedEnvConfig(TaskConfig):
    """The environment that demonstrations are of. Nobody plays in it: evaluation has its own."""

    reward_scale: Annotated[float, ANY] = 1.0
    """Factor on the demonstrations' rewards, for `algorithm.bc_value_coef`: that of the run that continues from this
    policy."""


@dataclass
class RealTimeConfig:
    """Evaluation as on a robot that does not wait for its policy: real-time chunking, of policies that act by a flow."""

    inference_delay: Annotated[int | None, NOT_NEGATIVE] = None
    """Steps from an observation until the chunk that is made of it is there; until then the actions of the chunk before are
    played, and the new one is guided to agree with them. null: the simulator waits for each chunk."""
    execution_horizon: Annotated[int | None, COUNT] = None
    """Actions that are played from one chunk to the next, at least `inference_delay`; both together are at most what the
    policy predicts at once. null takes `actor.model.num_action_chunks`, or what the delay leaves of the prediction if that is
    less."""
    max_guidance_weight: Annotated[float, NOT_NEGATIVE] = 5.0
    """The most that a chunk is drawn to the actions of the one before; 0 makes each as if there had been no other."""


@dataclass
class EvalEnvConfig(EnvSideConfig):
    """Environments of evaluation: those of training, unless stated otherwise."""

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
    wrappers: list[Any] = field(default=II("env.train.wrappers"))
    """As `env.train.wrappers`: the policy should see what it was trained on."""
    ignore_terminations: bool = II("env.train.ignore_terminations")
    """As `env.train.ignore_terminations`."""
    num_episodes: Annotated[int, COUNT] = 100
    """Episodes of an evaluation; each slot contributes a fixed share."""
    noise: Annotated[str, Choices("seeded", "zero")] = "seeded"
    """What policies that act from noise (flows, diffusion) begin with in evaluations: `seeded`, noise that follows from seed,
    slot, episode and decision; or `zero`, where no training sample begins."""
    video_episodes: Annotated[int, NOT_NEGATIVE] = 0
    """Episodes shown side by side in an mp4 file beside the result of `rlhpc eval`; 0 makes none."""
    video_fps: Annotated[int, COUNT] = 20
    """Pictures per second in that file; one is taken before each decision."""


@dataclass
class RealTimeEvalEnvConfig(EvalEnvConfig):
    """Environments of evaluation: those of training, unless stated otherwise."""

    real_time_chunking: RealTimeConfig = field(default_factory=RealTimeConfig)
    """Whether the policy acts as if it took time."""


@dataclass
class EnvConfig:
    """The env group."""

    train: PlayedEnvConfig = field(default_factory=PlayedEnvConfig)
    """Training environments."""
    eval: Annotated[EvalEnvConfig, EVALUATION] = field(default_factory=EvalEnvConfig)
    """Evaluation environments."""


@dataclass
class RolloutEnvsConfig(EnvConfig):
    """The env group."""

    train: RolloutEnvConfig = field(default_factory=RolloutEnvConfig)
    """Training environments."""
    eval: RealTimeEvalEnvConfig = field(default_factory=RealTimeEvalEnvConfig)
    """Evaluation environments."""


@dataclass
class ClonedEnvsConfig:
    """Environments."""

    train: ClonedEnvConfig = field(default_factory=ClonedEnvConfig)
    """What the demonstrations are of."""
    eval: Annotated[RealTimeEvalEnvConfig, EVALUATION] = field(default_factory=RealTimeEvalEnvConfig)
    """Evaluation environments."""


@dataclass
class RolloutConfig(WeightSyncConfig):
    """The rollout group."""

    pipeline_stage_num: Annotated[int, COUNT, FREE] = 1
    """Stages into which the slots are divided: while one is simulated, the policy acts on the others."""
