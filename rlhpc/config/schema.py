"""Every key of a configuration, with type and default. The docstring under a field is its entry in the reference."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from omegaconf import II, MISSING


@dataclass
class SlurmOptions:
    """What the nodes of a component of the job are asked for with."""

    partition: str | None = None
    """Slurm partition."""
    account: str | None = None
    """Slurm account."""
    qos: str | None = None
    """Slurm quality of service."""
    constraint: str | None = None
    """Slurm node features."""
    gres: str | None = None
    """Slurm generic resources in full, such as `gpu:a100:4,nvme:1`; by default `gres_name` and the accelerators asked for."""
    gres_name: str | None = None
    """Name and type of the accelerators among Slurm's generic resources, such as `gpu:a100` (default `gpu`)."""
    mem: str | None = None
    """Memory a node, as Slurm writes it: `64G`."""
    cpus_per_node: int | None = None
    """Cores a node."""
    time: str | None = None
    """Walltime, as Slurm writes it: `02:00:00`."""


@dataclass
class NodeGroupConfig(SlurmOptions):
    """Nodes with a label, which components name in their placement. A Slurm option that a group leaves out is that of
    `cluster`."""

    label: str = MISSING
    """Name of the group; `cluster` and `node` are reserved."""
    node_ranks: Any = None
    """Nodes of the group, such as `0-1,3`; by default all, or those of `het_component`."""
    het_component: int | None = None
    """Component of the heterogeneous Slurm job that the group's nodes come from."""
    num_nodes: int | None = None
    """Nodes that this component of the job asks for."""
    accelerators_per_node: int | None = None
    """Accelerators a node of this component has."""
    accelerator_kind: str | None = None
    """Kind of accelerator; `cpu` hides the nodes' accelerators from the group."""
    env_vars: dict[str, str] = field(default_factory=dict)
    """Environment variables of every process there."""
    python_interpreter: str | None = None
    """Python to start processes with, where the group needs an environment of its own."""


@dataclass
class ClusterConfig(SlurmOptions):
    """Machines, and which component runs where."""

    num_nodes: int = 1
    """Nodes of the run."""
    accelerators_per_node: int | None = None
    """Accelerators a node; null takes what is visible."""
    component_placement: dict[str, Any] = field(default_factory=dict)
    """Component → `resource ranks[:process ranks]`, for example `actor,rollout: 0-7`; or a mapping with `node_group`
    and `placement`."""
    node_groups: list[NodeGroupConfig] = field(default_factory=list)
    """Labelled groups of nodes."""
    interface: str | None = None
    """Network interface by which nodes reach one another, such as `ib0`; by default the one on the route between them."""
    scratch: str | None = None
    """Folder on each node's own disk, for what does not fit into its shared memory; by default below `/tmp`."""
    setup: list[str] = field(default_factory=list)
    """Lines of the job's script before the driver starts: `module load …`, `source …/activate`."""
    sbatch: list[str] = field(default_factory=list)
    """Further options of the whole job, such as `--reservation=rl`."""
    container: list[str] = field(default_factory=list)
    """Words that stand before every command of a job step, such as `[apptainer, exec, --nv, rlhpc.sif]`."""
    signal_lead_s: int = 120
    """Seconds before the walltime at which Slurm asks the job to save and end."""


@dataclass
class LoggerConfig:
    """Where metrics go."""

    logger_backends: list[str] = field(default_factory=lambda: ["jsonl", "tensorboard"])
    """`jsonl` (always written) and `tensorboard`."""


@dataclass
class RunnerConfig:
    """The loop: how long, what is kept, when it is evaluated."""

    task_type: str = "embodied"
    """Which runner: `embodied`."""
    name: str = MISSING
    """Name of the run; its folder is `run_dir/name`."""
    run_dir: str = "runs"
    """Folder of all runs."""
    seed: int = 1
    """Seed of everything that is random."""
    max_steps: int = -1
    """Training steps (one rollout and update each); -1 takes `max_epochs`."""
    max_epochs: int = 1
    """Training steps where `max_steps` is -1."""
    save_interval: int = -1
    """Steps between checkpoints; -1 saves at the end of each segment only."""
    val_check_interval: int = -1
    """Steps between evaluations during training; -1 for none (the workflow evaluates checkpoints anyway)."""
    keep_checkpoints: int = 3
    """Checkpoints kept, besides those that end a segment; 0 keeps all."""
    resume_dir: str | None = None
    """null starts fresh, `auto` takes the newest sound checkpoint of the run, a path takes that one."""
    segments: int = 1
    """Jobs that the run is cut into; each starts from the last checkpoint of the one before."""
    max_restarts: int = 2
    """Restarts of a submitted run after a rank, a step, a node or the driver was killed, in a row without a new
    checkpoint in between, before it gives up."""
    stop_return: float | None = None
    """Stop when the mean return of the last 100 training episodes reaches this."""
    save_reserve_s: float = 60.0
    """Least time kept for a last save before the job's walltime ends; more where earlier saves took more than half of it."""
    rendezvous_timeout_s: float = 300.0
    """Seconds in which all processes of a group must have arrived."""
    step_timeout_s: float = 1800.0
    """Seconds after which any wait within a step gives up."""
    logger: LoggerConfig = field(default_factory=LoggerConfig)
    """Metric backends."""


@dataclass
class AlgorithmConfig:
    """Advantages, losses and the shape of a rollout."""

    adv_type: str = "gae"
    """Advantage estimator: gae, grpo, dr_grpo, rloo, reinforce++, reinforce++_baseline, raw, a registered name, or
    `module:function`."""
    loss_type: str = "ppo"
    """Policy loss: ppo (alias actor, actor_critic), gspo, cispo, decoupled_ppo, a registered name, or
    `module:function`."""
    loss_agg: str = "token-mean"
    """How per-step losses are averaged: token-mean (the embodied runner's only one), and others for sequences."""
    gamma: float = 0.99
    """Discount."""
    gae_lambda: float = 0.95
    """Trace decay of GAE."""
    normalize_advantages: str = "minibatch"
    """`minibatch`, `batch` or `none`; always over all ranks."""
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
    """Ends a step's epochs early when the KL estimate passes this; null is off."""
    update_epochs: int = 4
    """Passes over each rollout."""
    rollout_steps: int = 128
    """T: decisions per slot and step."""
    anneal_lr: bool = False
    """Lowers the learning rate linearly to 0 over the run."""


@dataclass
class EnvSideConfig:
    """Environments of training or of evaluation."""

    env_type: str = "gymnasium"
    """`gymnasium`, a registered name, or `module:Class`."""
    env_id: str = MISSING
    """Id of the environment, such as `CartPole-v1`."""
    num_envs: int = 8
    """Slots that are stepped together, over all ranks."""
    max_episode_steps: int | None = None
    """Steps after which an episode is truncated; null takes the environment's own limit."""
    seed: int | None = None
    """Seed of the environments; null takes `runner.seed` (evaluation: one derived from it)."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Arguments of the environment's constructor."""
    wrappers: list[str] = field(default_factory=list)
    """Wrappers to apply in order, as `module:Class`."""
    group_size: int = 1
    """Neighbouring slots that share their reset seeds."""
    ignore_terminations: bool = False
    """Episodes end at the step limit only."""
    reward_scale: float = 1.0
    """Factor on the rewards that the learner sees; returns are reported unscaled."""


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
    wrappers: list[str] = field(default=II("env.train.wrappers"))
    """As `env.train.wrappers`: the policy is to see what it was trained on."""
    ignore_terminations: bool = II("env.train.ignore_terminations")
    """As `env.train.ignore_terminations`."""
    num_episodes: int = 100
    """Episodes of an evaluation; each slot contributes a fixed share."""


@dataclass
class EnvConfig:
    """The env group."""

    train: EnvSideConfig = field(default_factory=EnvSideConfig)
    """Training environments."""
    eval: EvalEnvConfig = field(default_factory=EvalEnvConfig)
    """Evaluation environments."""


@dataclass
class RolloutConfig:
    """The rollout group."""

    pipeline_stage_num: int = 1
    """Stages the slots are cut into: while one is simulated, the policy acts on the others."""
    weight_sync: str = "auto"
    """How weights travel from the actor: auto or broadcast."""


@dataclass
class ModelConfig:
    """The policy network."""

    model_type: str = "mlp"
    """`mlp`, `cnn`, a registered name, or `module:Class`."""
    hidden_sizes: list[int] = field(default_factory=lambda: [64, 64])
    """Widths of the hidden layers."""
    activation: str = "tanh"
    """tanh, relu, elu, silu or gelu."""
    ortho_init: bool = True
    """Orthogonal initial weights."""
    log_std_init: float = 0.0
    """Initial log standard deviation of continuous actions."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Whatever a model of your own wants to know."""


@dataclass
class OptimConfig:
    """The optimizer."""

    name: str = "adam"
    """`adam` or `adamw`."""
    lr: float = 3.0e-4
    """Learning rate."""
    adam_beta1: float = 0.9
    """Decay of the first moment."""
    adam_beta2: float = 0.999
    """Decay of the second moment."""
    adam_eps: float = 1.0e-5
    """Term in the denominator."""
    weight_decay: float = 0.0
    """Weight decay (decoupled with adamw)."""
    clip_grad: float | None = 0.5
    """Largest gradient norm; null does not clip."""


@dataclass
class ActorConfig:
    """The actor group: training."""

    training_backend: str = "local"
    """`local`: data parallel, gradients summed over the ranks."""
    global_batch_size: int = 256
    """Transitions of one optimizer step, over all ranks."""
    micro_batch_size: int | None = None
    """Transitions of one forward and backward pass on a rank; null takes a rank's whole share."""
    model: ModelConfig = field(default_factory=ModelConfig)
    """The policy."""
    optim: OptimConfig = field(default_factory=OptimConfig)
    """The optimizer."""


@dataclass
class WorkflowConfig:
    """What the Snakemake rules do with a run."""

    eval_suites: list[str] = field(default_factory=lambda: ["default"])
    """Evaluation suites; each checkpoint is evaluated on every one."""


@dataclass
class Config:
    """A run."""

    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    runner: RunnerConfig = field(default_factory=RunnerConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    env: EnvConfig = field(default_factory=EnvConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    actor: ActorConfig = field(default_factory=ActorConfig)
    workflow: WorkflowConfig = field(default_factory=WorkflowConfig)
