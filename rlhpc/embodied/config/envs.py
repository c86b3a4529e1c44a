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
    """Settings of the training loop: duration, checkpoints and evaluation."""

    val_check_interval: Annotated[int, INTERVAL, FREE] = -1
    """Steps between evaluations during training; -1 for none (the workflow evaluates checkpoints anyway)."""
    init_from: str | None = None
    """Initial weights of a new run, without optimizer and counters: a checkpoint, an export folder, or a run folder (its
    newest checkpoint)."""


@dataclass
class PlayingRunnerConfig(EmbodiedRunnerConfig):
    """Settings of the training loop: duration, checkpoints and evaluation."""

    stop_return: Annotated[float | None, ANY, FREE] = None
    """Stop when the mean return of the last 100 training episodes reaches this."""
    weight_sync_interval: Annotated[int, COUNT] = 1
    """Number of steps between weight syncs to the rollout ranks, which act with the weights of the last one in between; a
    start and an evaluation also sync. Checkpoints must fall on such steps, so that a resumed run is the same. On-policy runs
    have it with `algorithm.max_staleness: 0` alone; off-policy runs with `max_staleness` n then act with weights of up to
    n + interval - 1 updates ago."""
    enable_decoupled_mode: bool = False
    """Lets a rollout rank act for the env ranks whose observations have arrived, without waiting for slower ones. Results are
    bit-identical. Each pass covers all of the rank's slots of a stage."""


@dataclass
class EmbodiedWorkflowConfig(WorkflowConfig):
    """Options of the Snakemake rules for a run."""

    record_episodes: Annotated[int, NOT_NEGATIVE] = 0
    """Number of episodes of the last policy to record, in `demos/global_step_<N>.h5` of the run folder."""
    record_only_success: bool = True
    """Writes only successful episodes to demonstrations and recordings; needs an environment that reports success."""


@dataclass
class DemonstratedWorkflowConfig(EmbodiedWorkflowConfig):
    """Options of the Snakemake rules for a run that learns from demonstrations."""

    demos_expert: str | None = None
    """Expert that records demonstrations before training, as `module:function` or a checkpoint. They are written to the path
    from which the run reads them (`demos.path`; off-policy: `algorithm.demo_buffer.load_path`), which must then be one `.h5`
    file."""
    demos_episodes: Annotated[int, COUNT] = 100
    """Number of episodes that the expert records."""


@dataclass
class TaskConfig:
    """Task: environment, its arguments and wrappers."""

    env_type: Annotated[str, Registered("rlhpc.embodied.envs.registry:ENVS")] = "gymnasium"
    """`gymnasium`, `maniskill`, `metaworld`, `libero`, `rlinf` (RLinf's own classes), `robot`, `distant_robot`, `tensors`
    (simulators on the policy's device), a registered name, or `module:Class`."""
    env_id: str = ""
    """Id of the environment, such as `CartPole-v1`; required. `tensors`: `cartpole`, `pendulum`,
    `mjx_half_cheetah`, `mjx_inverted_pendulum`, `mjlab`, `isaac_lab`, or `module:Class`; `rlinf`: an environment type of
    RLinf, such as `robotwin`."""
    max_episode_steps: Annotated[int | None, COUNT] = None
    """Steps after which an episode is truncated; null takes the environment's own limit."""
    kwargs: Annotated[dict[str, Any], OptionsOf("env_type", "rlhpc.embodied.envs.registry:ENV_OPTIONS")] = field(
        default_factory=dict
    )
    """Options of the environment; for `gymnasium` and `maniskill`, arguments of the task's constructor."""
    wrappers: list[Any] = field(default_factory=list)
    """Wrappers to apply in order, each a name or `module:Class`, or a mapping from it to settings:
    `{frame_stack: {stack_size: 4}}`. If wrappers change rewards, put `statistics` first, so that the returns before these
    changes are reported."""
    ignore_terminations: bool = False
    """Ignores terminations: episodes end only at the step limit."""
    simulator_python: Annotated[str | None, FREE] = None
    """Python interpreter of simulator processes, for simulators that need a separate environment."""


@dataclass
class EnvSideConfig(TaskConfig):
    """Environments of training or of evaluation."""

    num_envs: Annotated[int, COUNT] = 8
    """Number of slots, over all ranks."""
    seed: Annotated[int | None, SEED] = None
    """Seed of the environments; null takes `runner.seed`, or for evaluation a seed derived from it."""
    group_size: Annotated[int, COUNT] = 1
    """Number of consecutive slots that share their reset seeds."""
    use_fixed_reset_state_ids: bool = False
    """Starts every episode of a slot (or of a group of slots) from the same state."""
    reward_scale: Annotated[float, ANY] = 1.0
    """Factor on the training rewards; returns are reported unscaled."""
    use_rel_reward: bool = False
    """Trains on the change of the reward since the preceding step; returns are reported from the simulator's rewards."""
    simulators: Annotated[int | None, NOT_NEGATIVE, FREE] = None
    """Number of simulator processes per rank, each with a share of its slots; 0 simulates in the rank's own process. null
    takes one per core for simulators that benefit from it (maniskill, metaworld, libero; 0 with one core), 1 for a robot, so
    that it is stopped however the rank's process ends, and 0 otherwise."""
    simulator_timeout_s: Annotated[float, POSITIVE] = 120.0
    """Seconds without an answer after which a simulator process counts as hung and is restarted."""


@dataclass
class InterveneConfig:
    """Interventions during training: a person or a script may act in place of the policy."""

    source: Annotated[str | None, Registered("rlhpc.embodied.interventions.sources:INTERVENTIONS"), FREE] = None
    """Source of interventions: `keyboard`, `gamepad`, `spacemouse`, `scripted`, a registered name, or `module:Class`; null is
    none. Steps that it leads go to replay and demonstration buffer; on-policy runs leave them out of the policy loss."""
    kwargs: Annotated[dict[str, Any], FREE] = field(default_factory=dict)
    """Options of the source, such as `{expert: module:function}` of `scripted` or `{device: /dev/hidraw2}` of `spacemouse`."""


@dataclass
class PlayedEnvConfig(EnvSideConfig):
    """Environments of training."""

    reward_model: str | None = None
    """Success classifier (a run, a checkpoint or an export folder of `model_type: success`). Its probability that the task is
    done after a step replaces the simulator's reward in training; returns are still reported from the simulator's rewards."""
    intervene: InterveneConfig = field(default_factory=InterveneConfig)
    """Interventions during training."""


@dataclass
class RolloutEnvConfig(PlayedEnvConfig):
    """Environments of on-policy training."""

    auto_reset: bool = True
    """Lets episodes follow one another across rollouts. If false, each rollout (or each of `algorithm.rollout_parts`) plays
    one episode in every slot from its start, and later decisions are not trained on; estimators such as grpo and rloo compare
    these episodes."""


@dataclass
class ClonedEnvConfig(TaskConfig):
    """Environment in which the demonstrations were recorded. It is not simulated; evaluation has a separate section."""

    reward_scale: Annotated[float, ANY] = 1.0
    """Factor on the demonstrations' rewards, for `algorithm.bc_value_coef`; use the factor of the run that continues from this
    policy."""


@dataclass
class RealTimeConfig:
    """Real-time chunking in evaluation: a flow policy computes the next chunk while the robot executes the current one."""

    inference_delay: Annotated[int | None, NOT_NEGATIVE] = None
    """Steps from an observation until its chunk is available. Until then, actions of the preceding chunk are executed, and the
    new chunk is guided to agree with them. null: the simulator waits for each chunk."""
    execution_horizon: Annotated[int | None, COUNT] = None
    """Actions executed per chunk, at least `inference_delay`; the sum of both is at most the number of actions that the policy
    predicts at once. null takes `actor.model.num_action_chunks`, or the predicted actions minus the delay if that is less."""
    max_guidance_weight: Annotated[float, NOT_NEGATIVE] = 5.0
    """Maximum weight of the guidance towards the preceding chunk; 0 disables guidance."""


@dataclass
class EvalEnvConfig(EnvSideConfig):
    """Environments of evaluation; by default those of training."""

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
    """Number of episodes of an evaluation; each slot plays a fixed share."""
    noise: Annotated[str, Choices("seeded", "zero")] = "seeded"
    """Starting noise of flow and diffusion policies in evaluation: `seeded` derives it from seed, slot, episode and decision;
    `zero` starts at zero, from which no training sample starts."""
    video_episodes: Annotated[int, NOT_NEGATIVE] = 0
    """Number of episodes shown side by side in an mp4 file, next to the result of `rlhpc eval`; 0 writes none."""
    video_fps: Annotated[int, COUNT] = 20
    """Frames per second of the video; one frame is rendered before each decision."""


@dataclass
class RealTimeEvalEnvConfig(EvalEnvConfig):
    """Environments of evaluation; by default those of training."""

    real_time_chunking: RealTimeConfig = field(default_factory=RealTimeConfig)
    """Simulated inference delay of the policy."""


@dataclass
class EnvConfig:
    """Settings of the env group."""

    train: PlayedEnvConfig = field(default_factory=PlayedEnvConfig)
    """Training environments."""
    eval: Annotated[EvalEnvConfig, EVALUATION] = field(default_factory=EvalEnvConfig)
    """Evaluation environments."""


@dataclass
class RolloutEnvsConfig(EnvConfig):
    """Settings of the env group."""

    train: RolloutEnvConfig = field(default_factory=RolloutEnvConfig)
    """Training environments."""
    eval: RealTimeEvalEnvConfig = field(default_factory=RealTimeEvalEnvConfig)
    """Evaluation environments."""


@dataclass
class ClonedEnvsConfig:
    """Environments."""

    train: ClonedEnvConfig = field(default_factory=ClonedEnvConfig)
    """Environment of the demonstrations."""
    eval: Annotated[RealTimeEvalEnvConfig, EVALUATION] = field(default_factory=RealTimeEvalEnvConfig)
    """Evaluation environments."""


@dataclass
class RolloutConfig(WeightSyncConfig):
    """Settings of the rollout group."""

    pipeline_stage_num: Annotated[int, COUNT, FREE] = 1
    """Number of stages into which the slots are divided: while one stage is simulated, the policy acts on another."""
