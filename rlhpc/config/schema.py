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
    """`jsonl` (always written), `tensorboard`, `wandb`, `mlflow`, `swanlab`, `trackio`, the name of an entry point of group
    `rlhpc.loggers`, or `module:Class`."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Logger → what it is built with, such as `{wandb: {project: cartpole, mode: offline}}`."""


@dataclass
class RunnerConfig:
    """The loop: how long, what is kept, when it is evaluated."""

    task_type: str = "embodied"
    """Which runner: `embodied`, `off_policy` (SAC), `bc` (an embodied policy from demonstrations), `reasoning` (language
    models on verifiable tasks) or `sft`."""
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
    init_from: str | None = None
    """Weights that a fresh embodied run starts from, without optimizer and counters: a checkpoint, an export folder, or a run
    folder (its newest checkpoint)."""
    segments: int = 1
    """Jobs that the run is cut into; each starts from the last checkpoint of the one before."""
    max_restarts: int = 2
    """Restarts of a submitted run after a rank, a step, a node or the driver was killed, in a row without a new
    checkpoint in between, before it gives up."""
    stop_return: float | None = None
    """Stop when the mean return of the last 100 training episodes reaches this."""
    on_nonfinite: str = "stop"
    """What follows a number that is not finite (in an observation, a reward, a log-probability, a loss or a gradient): `stop`
    ends the run and says where it came from; `skip` leaves out those samples, or that optimizer step, and counts them, but
    ends the run after ten steps in a row. Neither commits weights that are not finite."""
    save_reserve_s: float = 60.0
    """Least time kept for a last save before the job's walltime ends; more where earlier saves took more than half of it."""
    rendezvous_timeout_s: float = 300.0
    """Seconds in which all processes of a group must have arrived."""
    step_timeout_s: float = 1800.0
    """Seconds after which any wait within a step gives up."""
    logger: LoggerConfig = field(default_factory=LoggerConfig)
    """Metric backends."""


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
class AlgorithmConfig:
    """Advantages, losses and the shape of a rollout."""

    adv_type: str = "gae"
    """Advantage estimator: gae, grpo, dr_grpo, rloo, reinforce++, reinforce++_baseline, raw, a registered name, or
    `module:function`."""
    loss_type: str = "ppo"
    """Policy loss: ppo (alias actor, actor_critic), gspo, cispo, decoupled_ppo, a registered name, or `module:function`;
    off-policy runs: sac (alias embodied_sac)."""
    loss_agg: str = "token-mean"
    """How per-step losses are averaged: token-mean (the embodied runner's only one), and others for sequences."""
    gamma: float = 0.99
    """Discount."""
    gae_lambda: float = 0.95
    """Trace decay of GAE."""
    normalize_advantages: str = "auto"
    """`minibatch` (embodied only), `batch` or `none`, always over all ranks; `auto` is minibatch for embodied runs and
    none for language models, whose estimators compare within groups."""
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
    update_epochs: int = 4
    """Passes over each rollout; bc: over the demonstrations, in a step."""
    bc_loss: str = "nll"
    """bc: `nll` (negative log-likelihood of the demonstrated actions, or what the policy's `bc_loss` has in its place: flow
    matching) or `mse` (squared error of the mean action)."""
    bc_value_coef: float = 0.0
    """bc: weight of a value loss on the demonstrations' discounted returns, so that PPO starts with a critic; 0 is off."""
    rollout_steps: int = 128
    """T: decisions per slot and step (embodied); each is a chunk of `actor.model.num_action_chunks` actions."""
    logprob_type: str = "chunk_level"
    """Embodied: what the policy loss takes for a token: `chunk_level` (all that is decided at once), `action_level` (each
    action of a chunk) or `token_level` (each component of an action)."""
    reward_type: str = "chunk_level"
    """Embodied: `chunk_level` sums the rewards of a chunk; with `action_level` advantages and returns are those of single
    actions."""
    anneal_lr: bool = False
    """Lowers the learning rate linearly to 0 over the run."""
    group_size: int = 8
    """Responses to each prompt (language models)."""
    kl_coef: float = 0.0
    """Weight of the KL to the reference policy; 0 does without the reference."""
    kl_type: str = "k3"
    """Estimator of that KL: k1, k2, k3 or abs."""
    kl_in: str = "loss"
    """Where the KL goes: `loss`, or `reward` (per token)."""
    recompute_logprobs: bool = False
    """Old log-probs come from the trainer rather than from the rollout engine."""
    tis_cap: float | None = None
    """Cap of the truncated importance weight between trainer and rollout engine (with `decoupled_ppo` between the policy of
    before the update and the one that acted); null is off."""
    filter_groups: bool = False
    """DAPO's dynamic sampling: groups whose rewards are all equal are dropped and refilled."""
    max_refills: int = 4
    """Rounds of refilling in a step before it goes on with what it has."""
    overlong_buffer: int = 0
    """DAPO's soft punishment over the last so many tokens before `rollout.max_new_tokens`; 0 is off."""
    overlong_filter: bool = False
    """Responses cut off at the length limit do not train."""
    max_staleness: int = 0
    """Async mode: most versions by which the policy that acted (language models: wrote a token) may lag behind the one that
    is trained; 0 is sync."""
    tau: float = 0.005
    """Off-policy: part of the critics' weights that goes into the target networks at each of their updates."""
    auto_entropy_tuning: bool = True
    """Off-policy: the temperature is learned, so that the policy's entropy becomes `target_entropy`."""
    initial_alpha: float = 1.0
    """Off-policy: temperature at the start, or throughout."""
    target_entropy: float | None = None
    """Off-policy: null takes minus the number of action components."""
    alpha_lr: float | None = None
    """Off-policy: learning rate of the temperature; null takes that of the critics (`actor.optim.value_lr`)."""
    backup_entropy: bool = True
    """Off-policy: the critics' targets contain the next action's entropy (RLPD goes without)."""
    update_to_data: float = 1.0
    """Off-policy: updates for each transition that the environments bring."""
    critic_actor_ratio: int = 1
    """Off-policy: updates of the critics for each of the actor."""
    target_update_freq: int = 1
    """Off-policy: updates of the critics for each of the target networks."""
    random_steps: int | None = None
    """Off-policy: transitions at the start whose actions are drawn evenly from the whole space; null takes
    `replay_buffer.min_buffer_size`, and 0 where the run starts from `runner.init_from`."""
    replay_buffer: ReplayBufferConfig = field(default_factory=ReplayBufferConfig)
    """Off-policy: what the environments brought."""
    demo_buffer: DemoBufferConfig = field(default_factory=DemoBufferConfig)
    """Off-policy: demonstrations, or other data from before the run."""


@dataclass
class EnvSideConfig:
    """Environments of training or of evaluation."""

    env_type: str = "gymnasium"
    """`gymnasium`, `maniskill`, `metaworld`, `libero`, a registered name, or `module:Class`."""
    env_id: str = ""
    """Id of the environment, such as `CartPole-v1`; embodied runs must name one."""
    num_envs: int = 8
    """Slots that are stepped together, over all ranks."""
    max_episode_steps: int | None = None
    """Steps after which an episode is truncated; null takes the environment's own limit."""
    seed: int | None = None
    """Seed of the environments; null takes `runner.seed` (evaluation: one derived from it)."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Arguments of the environment's constructor."""
    wrappers: list[str] = field(default_factory=list)
    """Wrappers to apply in order, as `module:Class`. Where they change rewards, put
    `gymnasium.wrappers:RecordEpisodeStatistics` first: returns are then reported as it counts them."""
    group_size: int = 1
    """Neighbouring slots that share their reset seeds."""
    use_fixed_reset_state_ids: bool = False
    """Every episode of a slot (or of a group of slots) starts from the same state."""
    ignore_terminations: bool = False
    """Episodes end at the step limit only."""
    auto_reset: bool = True
    """Episodes follow one another, over the bounds of rollouts. Without, each rollout plays one episode in every slot, from
    its start, and what comes after its end does not train; grpo, rloo and their like compare such episodes (training)."""
    reward_scale: float = 1.0
    """Factor on the rewards that the learner sees; returns are reported unscaled."""
    use_rel_reward: bool = False
    """The learner sees by how much the reward changed since the step before; returns are reported as the simulator has it."""
    simulators: int | None = None
    """Processes that a rank keeps its slots in, each with a share; 0 keeps them in the rank's own. null is one for each of
    the rank's cores where the simulator gains by it (maniskill, metaworld, libero; none with one core), else 0."""
    simulator_python: str | None = None
    """Python that simulator processes are started with, where the simulator needs an environment of its own."""
    simulator_timeout_s: float = 120.0
    """Seconds after which a simulator process that does not answer is taken for hung and started again."""


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
class RolloutConfig:
    """The rollout group."""

    pipeline_stage_num: int = 1
    """Stages the slots are cut into: while one is simulated, the policy acts on the others."""
    weight_sync: str = "auto"
    """How weights travel from the actor: auto or broadcast."""
    weight_delta: str = "frozen"
    """What an update leaves out: `frozen` (weights that are not trained travel once a rollout rank), `elements` (also whatever
    has not changed, element by element; costs the actor a copy of the weights), or `off` (nothing)."""
    rollout_backend: str = "hf"
    """Generation engine of language models: `hf`, `vllm`, or `module:Class`."""
    max_new_tokens: int = 256
    """Most tokens of a response."""
    temperature: float = 1.0
    """Of sampling in training; the losses use the same."""
    top_p: float = 1.0
    """Nucleus of sampling; 1 is off."""
    top_k: int = -1
    """Most likely tokens kept; -1 is off."""
    max_batch_size: int = 64
    """Sequences that a rollout rank makes at a time."""
    max_model_len: int | None = None
    """Longest prompt and response together; null takes the model's context."""
    dtype: str = "auto"
    """Of the engine's weights: auto (the actor's), float32, bfloat16 or float16."""
    gpu_memory_utilization: float = 0.6
    """Part of the accelerator's memory that vLLM takes."""
    engine_kwargs: dict[str, Any] = field(default_factory=dict)
    """Further arguments of the engine's constructor."""
    max_turns: int = 1
    """Turns of a multi-turn episode (`rollout.agent`)."""
    agent: str | None = None
    """Multi-turn episodes with tools: a registered name, or `module:Class`; null is one response a prompt."""


@dataclass
class ModelConfig:
    """The policy network."""

    model_type: str = "mlp"
    """`mlp` (numbers), `cnn` and `resnet` (images, and numbers beside them), `flow` (chunks of continuous actions by flow
    matching, from either), `sac` (numbers; actor and twin critics of off-policy runs), `vla` (Llava with action tokens),
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
    critic_layer_norm: bool = False
    """`sac`: normalises the critics' hidden layers, which keeps many updates per transition stable (RLPD)."""
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
    """Language models: of weights and computation: float32 or bfloat16 (mixed precision: fp32 master weights)."""
    gradient_checkpointing: bool = False
    """Recomputes activations in the backward pass, which saves memory."""
    attn_implementation: str = "sdpa"
    """Of transformers: sdpa, eager or flash_attention_2."""
    trust_remote_code: bool = False
    """Runs code that comes with the model."""


@dataclass
class LoraConfig:
    """Low-rank adapters, through peft."""

    rank: int = 0
    """Rank of the adapters; 0 trains all weights."""
    alpha: int = 16
    """Scale."""
    dropout: float = 0.0
    """Of the adapters' input."""
    target_modules: Any = "all-linear"
    """Modules that get an adapter: a list of names, or `all-linear`."""


@dataclass
class FsdpConfig:
    """`actor.training_backend: fsdp` (FSDP2)."""

    cpu_offload: bool = False
    """Keeps parameters, gradients and optimizer on the host between uses."""
    reshard_after_forward: bool = True
    """Frees gathered parameters between forward and backward (ZeRO-3); false keeps them (ZeRO-2)."""


@dataclass
class DeepspeedConfig:
    """`actor.training_backend: deepspeed`."""

    zero_stage: int = 2
    """1, 2 or 3."""
    cpu_offload: bool = False
    """Optimizer (and with stage 3 parameters) on the host."""
    config: dict[str, Any] = field(default_factory=dict)
    """Further keys of DeepSpeed's own configuration; those that rlhpc sets itself are refused."""


@dataclass
class OptimConfig:
    """The optimizer."""

    name: str = "adam"
    """`adam` or `adamw`."""
    lr: float = 3.0e-4
    """Learning rate."""
    value_lr: float | None = None
    """Off-policy: learning rate of the critics; null takes `lr`."""
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
    lr_warmup_steps: int = 0
    """Language models: steps over which the learning rate rises from 0."""
    lr_scheduler: str = "constant"
    """Language models: what it does after that, until the end of the run: constant, linear (to 0) or cosine (to 0)."""


@dataclass
class ActorConfig:
    """The actor group: training."""

    training_backend: str = "local"
    """`local`: data parallel, gradients summed over the ranks. Language models also: `fsdp`, `deepspeed`."""
    global_batch_size: int = 256
    """Transitions of one optimizer step, over all ranks."""
    micro_batch_size: int | None = None
    """Transitions of one forward and backward pass on a rank; null takes a rank's whole share."""
    model: ModelConfig = field(default_factory=ModelConfig)
    """The policy."""
    optim: OptimConfig = field(default_factory=OptimConfig)
    """The optimizer."""
    max_tokens_per_micro_batch: int = 16384
    """Language models: most tokens, padding included, of one forward and backward pass on a rank."""
    lora: LoraConfig = field(default_factory=LoraConfig)
    """Adapters."""
    fsdp: FsdpConfig = field(default_factory=FsdpConfig)
    """Options of FSDP2."""
    deepspeed: DeepspeedConfig = field(default_factory=DeepspeedConfig)
    """Options of DeepSpeed."""
    offload_in_rollout: bool = False
    """Collocated: moves the actor to the host while the rollout ranks generate, and these away while it trains."""


@dataclass
class DataSourceConfig:
    """Problems of training, of one evaluation suite, or demonstrations."""

    name: str = "default"
    """Name of the suite."""
    source: str = "jsonl"
    """`jsonl`, `parquet`, `hdf5`, `hf` (a `datasets` folder on disk), `reasoning_gym`, `arithmetic`, `code`, a registered
    name, or `module:Class`."""
    path: str | None = None
    """File or folder; a pattern takes all files it fits."""
    split: str | None = None
    """Part of an `hf` dataset, or a filter `column=value`."""
    prompt_key: str = "prompt"
    """Column of the question (a text, or a list of chat messages)."""
    answer_key: str | None = "answer"
    """Column of the reference answer; null where there is none."""
    response_key: str = "response"
    """Column of the demonstration (sft)."""
    level_key: str | None = None
    """Column of the difficulty, for evaluation tables."""
    system_prompt: str | None = None
    """Goes before every conversation."""
    prompt_template: str = "{prompt}"
    """The question as the user says it."""
    chat_template: bool = True
    """Formats the conversation with the tokenizer's template; false gives the model the bare text."""
    size: int | None = None
    """Problems taken (procedural sources: made)."""
    seed: int = 0
    """Of procedural sources, and of what `size` takes."""
    eval_fraction: float = 0.0
    """Part that belongs to evaluation: training leaves it out, and evaluation takes it alone."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Arguments of the source: `reasoning_gym`: {task: …, …}; `arithmetic`: {digits: 2, operators: "+"}."""


@dataclass
class EvalDataConfig(DataSourceConfig):
    """One evaluation suite."""

    samples: int = 1
    """Responses to each problem: pass@k for k up to this, and majority."""
    temperature: float = 0.0
    """Of sampling; 0 is greedy."""


@dataclass
class DataConfig:
    """What language models are trained and evaluated on."""

    train: DataSourceConfig = field(default_factory=DataSourceConfig)
    """Prompts of training, or demonstrations (sft)."""
    eval: list[EvalDataConfig] = field(default_factory=list)
    """Suites; `workflow.eval_suites` names those that the workflow runs."""
    max_prompt_tokens: int = 1024
    """Longest prompt."""
    overlong_prompts: str = "error"
    """What happens to longer ones: `error`, or `drop`."""
    prompts_per_step: int = 32
    """Prompts of a step; each gets `algorithm.group_size` responses (sft: demonstrations of a step)."""


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
class RewardTermConfig:
    """One term of the reward."""

    name: str = MISSING
    """`math`, `exact`, `code`, `format`, `length`, `reasoning_gym`, `http`, a registered name, or `module:function`."""
    weight: float = 1.0
    """Factor."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Arguments of the reward."""


@dataclass
class RewardConfig:
    """How responses are judged: the weighted sum of the terms."""

    terms: list[RewardTermConfig] = field(default_factory=list)
    """Terms; the first one's value also says whether an answer is right in evaluation (1 is right)."""
    timeout_s: float = 10.0
    """Of one sample; a reward that takes longer is ended, and the sample gets `failed`."""
    failed: float = 0.0
    """Reward of a sample whose judge hung, raised or died."""
    processes: int = 1
    """Judges working side by side on each reward rank."""


@dataclass
class JobConfig:
    """What the Slurm jobs of a rule beside training ask for."""

    partition: str | None = II("cluster.partition")
    """Slurm partition."""
    account: str | None = II("cluster.account")
    """Slurm account."""
    qos: str | None = None
    """Slurm quality of service."""
    constraint: str | None = None
    """Slurm node features."""
    gres: str | None = None
    """Slurm generic resources, such as `gpu:1`; evaluation takes the accelerator it is given."""
    cpus: int = 1
    """Cores."""
    mem: str = "4G"
    """Memory, as Slurm writes it."""
    time: str = "01:00:00"
    """Walltime, as Slurm writes it."""


@dataclass
class WorkflowConfig:
    """What the Snakemake rules do with a run."""

    eval_suites: list[str] = field(default_factory=lambda: ["default"])
    """Evaluation suites; each checkpoint is evaluated on every one."""
    suites: dict[str, list[str]] = field(default_factory=dict)
    """What a suite of an embodied run changes in the configuration, by its name, as `key=value`: another task, other seeds."""
    sft: str | None = None
    """Configuration of an SFT run that comes first, relative to this file; this run's `actor.model.model_path` then names
    the folder it exports."""
    sft_overrides: list[str] = field(default_factory=list)
    """What is changed in that configuration, as `key=value`."""
    demos_expert: str | None = None
    """Records demonstrations before training: the expert, as `module:function` or a checkpoint. They go to `demos.path` (to
    `algorithm.demo_buffer.load_path` of an off-policy run), which then is one `.h5` file."""
    demos_episodes: int = 100
    """How many."""
    record_episodes: int = 0
    """Records so many episodes of the last policy, to `demos/global_step_<N>.h5` in the run's folder."""
    record_only_success: bool = True
    """Demonstrations and recordings have only episodes that succeeded; needs an environment that says so."""
    eval_start: bool = False
    """Evaluates the model before training, too, as step 0 (language models)."""
    eval_job: JobConfig = field(default_factory=JobConfig)
    """Of an evaluation."""
    convert_job: JobConfig = field(default_factory=lambda: JobConfig(mem="8G"))
    """Of an export."""


@dataclass
class Config:
    """A run."""

    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    runner: RunnerConfig = field(default_factory=RunnerConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    env: EnvConfig = field(default_factory=EnvConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    actor: ActorConfig = field(default_factory=ActorConfig)
    data: DataConfig = field(default_factory=DataConfig)
    demos: DemosConfig = field(default_factory=DemosConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    workflow: WorkflowConfig = field(default_factory=WorkflowConfig)
