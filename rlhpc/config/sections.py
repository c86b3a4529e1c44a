"""Configuration sections that task types have in common. The docstring under a field is its entry in the reference."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any

from omegaconf import II, MISSING

from rlhpc.config.alerts import AlertsConfig
from rlhpc.runtime.cluster_config import ClusterConfig
from rlhpc.runtime.key_metadata import (
    COUNT,
    EVALUATION,
    FREE,
    INTERVAL,
    NOT_NEGATIVE,
    PART,
    POSITIVE,
    RATE,
    SEED,
    Choices,
    Range,
    Registered,
)


@dataclass
class LoggerConfig:
    """Destinations of metrics, besides `metrics.jsonl`."""

    logger_backends: Annotated[list[str], Registered("rlhpc.metrics.loggers.registry:LOGGERS")] = field(
        default_factory=lambda: ["jsonl", "tensorboard"]
    )
    """`jsonl` (always written), `tensorboard`, `wandb`, `mlflow`, `swanlab`, `trackio`, the name of an entry point of group
    `rlhpc.loggers`, or `module:Class`."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Logger → its arguments, such as `{wandb: {project: cartpole, mode: offline}}`."""


@dataclass
class ProfileConfig:
    """Profiles of ranks during traced steps: operators and kernels by `torch.profiler`, or the process by Nsight Systems."""

    groups: list[str] = field(default_factory=list)
    """Worker groups whose ranks record a profile with `torch.profiler` in each step of `steps`."""
    ranks: str = "0"
    """Ranks of these groups, such as `0` or `0-3,8`."""
    steps: str = ""
    """Steps to profile, such as `11`; by default those of `runner.trace.steps`."""
    nsys: list[str] = field(default_factory=list)
    """Worker groups whose ranks run under `nsys profile`."""
    nsys_steps: str = ""
    """Steps that Nsight Systems records of ranks with CUDA, such as `11-12`; by default a rank from its start to its end."""
    nsys_options: dict[str, Any] = field(default_factory=dict)
    """Options of `nsys profile` by name, such as `{cudabacktrace: all, python-backtrace: true}`, where true is an option
    without a value. They replace those that rlhpc sets; `output` is not among them."""


@dataclass
class TraceConfig:
    """Recording of traces: the activity of each rank in some steps, for `rlhpc trace`."""

    steps: str = ""
    """Steps to record, such as `10-12` or `3,7-9`; "" records none until `rlhpc trace RUN --steps N`."""
    profile: ProfileConfig = field(default_factory=ProfileConfig)
    """Profiles of ranks during traced steps: operators and kernels by `torch.profiler`, or the process by Nsight Systems."""


@dataclass
class RunnerConfig:
    """Training loop: length, checkpoints and evaluation."""

    task_type: Annotated[str, Registered("rlhpc.runs.task_type:TASK_TYPES")] = "embodied"
    """Which runner: `embodied`, `off_policy` (SAC), `bc` (an embodied policy from demonstrations), `reasoning` (language
    models on verifiable tasks), `sft`, `reward_model` or `dpo`."""
    name: Annotated[str, FREE] = MISSING
    """Name of the run, whose folder is `run_dir/name`."""
    run_dir: Annotated[str, FREE] = "runs"
    """Folder that contains the folders of runs."""
    seed: Annotated[int, SEED] = 1
    """Seed of all random number generators."""
    tf32: Annotated[bool | None, FREE] = None
    """Whether NVIDIA GPUs round the inputs of float32 matrix products and convolutions to TF32, which has 10 of the 23 bits of
    the mantissa and is several times as fast: true in both, false in neither, null in convolutions only, as torch does.
    Products in bfloat16 do not change."""
    max_steps: Annotated[int, INTERVAL, FREE] = -1
    """Training steps (one rollout and update each); -1 uses `max_epochs`."""
    max_epochs: Annotated[int, INTERVAL, FREE] = 1
    """Training steps if `max_steps` is -1."""
    save_interval: Annotated[int, INTERVAL, FREE] = -1
    """Steps between checkpoints; -1 saves only at the end of each segment."""
    async_save: Annotated[bool, FREE] = True
    """Continue training while a checkpoint's large files are written from copies in host memory; if the copies do not fit, the
    run pauses for the write. false always pauses."""
    keep_checkpoints: Annotated[int, NOT_NEGATIVE, FREE] = 3
    """Number of newest checkpoints to keep, besides the best one (`keep_best`) and those that end a segment; 0 keeps all."""
    keep_best: Annotated[str | None, FREE] = None
    """Metric of the evaluations during training, such as `eval/accuracy` or `eval/loss`. Each new best step is saved, and its
    checkpoint is kept besides the newest ones (`checkpoints/best`). A smaller loss or error is better. null tracks no
    metric."""
    patience: Annotated[int, NOT_NEGATIVE, FREE] = 0
    """Number of consecutive evaluations without a better `keep_best` after which the run ends; 0 never ends it early."""
    resume_dir: Annotated[str | None, FREE] = None
    """null starts fresh, `auto` loads the run's newest intact checkpoint, and a path loads that checkpoint."""
    segments: Annotated[int, COUNT, FREE] = 1
    """Number of jobs that the run is split into; each starts from the last checkpoint of the previous one."""
    max_restarts: Annotated[int, NOT_NEGATIVE, FREE] = 2
    """Maximum number of consecutive restarts of a submitted run, without a new checkpoint in between, after a rank, a step, a
    node or the driver was killed."""
    on_nonfinite: Annotated[str, Choices("stop", "skip"), FREE] = "stop"
    """Reaction to a non-finite number in an observation, a reward, a log-probability, a loss or a gradient: `stop` ends the
    run and reports its origin; `skip` drops and counts the samples or the optimizer step, but ends the run after ten
    consecutive steps. Neither commits non-finite weights."""
    save_reserve_s: Annotated[float, NOT_NEGATIVE, FREE] = 60.0
    """Minimum seconds for a last save before the job's walltime ends; more if earlier saves took more than half of that."""
    rendezvous_timeout_s: Annotated[float, POSITIVE, FREE] = 300.0
    """Seconds within which all processes of a group must have started."""
    step_timeout_s: Annotated[float, POSITIVE, FREE] = 1800.0
    """Timeout in seconds of any wait within a step."""
    logger: Annotated[LoggerConfig, FREE] = field(default_factory=LoggerConfig)
    """Destinations of metrics."""
    trace: Annotated[TraceConfig, FREE] = field(default_factory=TraceConfig)
    """Recording of traces: the activity of each rank in some steps, for `rlhpc trace`."""
    alerts: Annotated[AlertsConfig, FREE] = field(default_factory=AlertsConfig)
    """Alerts when the run ends, stalls, diverges or loses ranks; without a command and a webhook there are none."""


@dataclass
class AdapterConfig:
    """Low-rank adapters, through peft."""

    rank: Annotated[int, NOT_NEGATIVE] = 0
    """Rank of the adapters; 0 trains all weights."""
    alpha: Annotated[int, COUNT] = 16
    """Scale of the adapters: their output is multiplied by `alpha / rank`."""
    target_modules: Any = "all-linear"
    """Modules that get an adapter: a list of names or of their last parts; a regular expression that matches complete names;
    or `all-linear`: all linear layers except the head, the experts of mixtures, and layers whose weights a recurrent layer
    reads itself."""


@dataclass
class PolicyAdapterConfig(AdapterConfig):
    """Low-rank adapters of a policy, through peft."""

    init: Annotated[str, Choices("kaiming", "gaussian")] = "kaiming"
    """Initial values of the adapters' first matrix: `kaiming` (uniform, peft's default) or `gaussian` (normal, with a standard
    deviation of 1 / `rank`); the second matrix is 0."""
    path: str | None = None
    """Folder of trained adapters in peft's format (`adapter_config.json`, `adapter_model.safetensors`), which training
    continues; null starts new ones. Their rank, which must be `rank`, alpha and layers are the folder's."""


@dataclass
class LoraConfig(AdapterConfig):
    """Low-rank adapters, through peft."""

    dropout: Annotated[float, PART] = 0.0
    """Dropout on the adapters' input in supervised training; reinforcement learning uses no dropout."""


@dataclass
class GradScalerConfig:
    """Loss scale of training in float16, which is halved when a gradient overflows; that step is skipped and counted by
    `train/overflow_skipped`."""

    init_scale: Annotated[float, Range(1), FREE] = 65536.0
    """Scale of the first step; with `deepspeed` a power of two. A resumed run continues with the scale of its checkpoint."""
    growth_interval: Annotated[int, COUNT, FREE] = 400
    """Number of consecutive steps without an overflow after which the scale is doubled."""


@dataclass
class FsdpConfig:
    """`actor.training_backend: fsdp` (FSDP2)."""

    cpu_offload: bool = False
    """Keep parameters, gradients and optimizer state in host memory between uses."""
    reshard_after_forward: bool = True
    """Free gathered parameters between forward and backward (ZeRO-3); false keeps them (ZeRO-2)."""
    enable_gradient_accumulation: bool = False
    """Reduce gradients over the ranks once per optimizer step instead of once per micro-batch; each rank then keeps the full
    gradients of the model during a step."""


@dataclass
class ParallelConfig:
    """Division of a trained model and its data over ranks, with `training_backend: fsdp`. The product of all sizes but
    `expert` is the number of ranks.
    """

    replicate: Annotated[int, COUNT] = 1
    """Number of replicas of the sharded weights (HSDP): replicas only sum gradients; weights are gathered within a replica."""
    shard: Annotated[int | None, COUNT] = None
    """Number of ranks that shard weights, gradients and optimizer state, and train on different data; null uses the remaining
    ranks."""
    context: Annotated[int, COUNT] = 1
    """Number of ranks that share the tokens of a packed sequence (Ulysses). For language models that train without padding."""
    tensor: Annotated[int, COUNT] = 1
    """Number of ranks that share each layer's matrices, by transformers' plan for the model. For language models."""
    expert: Annotated[int, COUNT] = 1
    """Number of ranks that share the experts of a mixture, by transformers' plan; tokens are sent to them. These are the ranks
    of one replica (`replicate`), in another order. For language models."""


@dataclass
class DeepspeedConfig:
    """`actor.training_backend: deepspeed`."""

    zero_stage: Annotated[int, Range(1, 3)] = 2
    """1, 2 or 3."""
    cpu_offload: bool = False
    """Keep the optimizer state (with stage 3 also the parameters) in host memory."""
    config: dict[str, Any] = field(default_factory=dict)
    """Further keys of DeepSpeed's own configuration, except those that rlhpc sets itself."""


@dataclass
class OptimConfig:
    """Settings of the optimizer."""

    name: Annotated[str, Choices("adam", "adamw")] = "adam"
    """`adam` or `adamw`."""
    lr: Annotated[float, RATE] = 3.0e-4  # one step of Adam moves a weight by about as much
    """Learning rate."""
    adam_beta1: Annotated[float, PART] = 0.9
    """Decay of the first moment."""
    adam_beta2: Annotated[float, PART] = 0.999
    """Decay of the second moment."""
    adam_eps: Annotated[float, Range(0, 1, above=True)] = 1.0e-5
    """Added to the denominator, for numerical stability."""
    weight_decay: Annotated[float, Range(0, 100)] = 0.0
    """Weight decay (decoupled with adamw)."""
    clip_grad: Annotated[float | None, POSITIVE] = 0.5
    """Maximum gradient norm; null disables clipping."""
    min_lr: Annotated[float, Range(0, 10)] = 0.0
    """Learning rate at the end of a schedule that lowers it; at most `lr`. A learning rate besides `lr` falls by the same
    factor."""


@dataclass
class ScheduledOptimConfig(OptimConfig):
    """Settings of the optimizer."""

    lr_warmup_steps: Annotated[int, NOT_NEGATIVE] = 0
    """Number of steps over which the learning rate rises from 0; `bc` counts optimizer steps."""
    lr_scheduler: Annotated[str, Choices("constant", "linear", "cosine")] = "constant"
    """Schedule of the learning rate after the warm-up: constant, linear (to `min_lr`) or cosine (to `min_lr`).
    `algorithm.anneal_lr` is linear."""
    lr_decay_steps: Annotated[int | None, COUNT] = None
    """Number of steps, with the warm-up, after which a schedule has reached `min_lr`, where it stays; null is the end of the
    run. `bc` counts optimizer steps."""


@dataclass
class ValueOptimConfig:
    """Optimizer keys of a model whose value head or critic is trained together with the policy."""

    value_lr: Annotated[float | None, RATE] = None
    """Learning rate of the value head or critic; null takes `lr`."""
    critic_warmup_steps: Annotated[int, NOT_NEGATIVE] = 0
    """Number of first optimizer steps that train the value head or critic alone. Not with `training_backend: deepspeed`."""


@dataclass
class WeightSyncConfig:
    """Weight sync from the actor to the rollout ranks; part of section `rollout`."""

    weight_sync: Annotated[str, FREE, Registered("rlhpc.weights.base:STRATEGIES")] = "auto"
    """Method of the weight sync: `broadcast` (of full tensors), `shards` (language models: each rank sends its shards to the
    ranks that need them, without a gather; through host memory, or by NCCL if each rank has its own accelerator), `auto`
    (`shards` if the actor's ranks hold shards and the engine loads slices, otherwise `broadcast`), one transport of a
    broadcast (`host`, `ipc`, `nccl`, `gloo`), a registered name, or `module:Class`."""
    weight_delta: Annotated[str, Choices("off", "frozen", "elements"), FREE] = "frozen"
    """Weights that an update omits: `frozen` (untrained weights, which each rollout rank receives only once), `elements` (also
    all unchanged elements; the actor then stores a copy of the weights), or `off` (none)."""


@dataclass
class JobConfig:
    """Resources of a workflow rule's Slurm jobs, other than training."""

    partition: str | None = II("cluster.partition")
    """Slurm partition."""
    account: str | None = II("cluster.account")
    """Slurm account."""
    qos: str | None = None
    """Slurm quality of service."""
    constraint: str | None = None
    """Slurm node features."""
    gres: str | None = None
    """Slurm generic resources, such as `gpu:1`; evaluation uses the allocated accelerator."""
    cpus: Annotated[int, COUNT] = 1
    """Number of cores."""
    mem: str = "4G"
    """Memory, in Slurm's format."""
    time: str = "01:00:00"
    """Walltime, in Slurm's format."""


@dataclass
class WorkflowConfig:
    """Snakemake workflow of a run."""

    eval_suites: list[str] = field(default_factory=lambda: ["default"])
    """Evaluation suites; each checkpoint is evaluated on every one."""
    suites: Annotated[dict[str, list[str]], EVALUATION] = field(default_factory=dict)
    """Suite → its overrides of an embodied run's configuration, as `key=value`, such as another task or other seeds."""
    eval_job: JobConfig = field(default_factory=JobConfig)
    """Resources of evaluation jobs."""
    convert_job: JobConfig = field(default_factory=lambda: JobConfig(mem="8G"))
    """Resources of export jobs."""


@dataclass
class RunConfig:
    """Sections of every run; each task type adds its own sections."""

    cluster: Annotated[ClusterConfig, FREE] = field(default_factory=ClusterConfig)
    """Machines of the run, and the placement of its components."""
    runner: RunnerConfig = field(default_factory=RunnerConfig)
    """Training loop: length, checkpoints and evaluation."""
    workflow: Annotated[WorkflowConfig, FREE] = field(default_factory=WorkflowConfig)
    """Snakemake workflow of a run."""
