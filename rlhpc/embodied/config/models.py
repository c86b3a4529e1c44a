"""Configuration sections of policy networks and actors. The docstring under a field is its entry in the reference."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any

from rlhpc.config.constraints import ATTENTION, COUNT, DTYPES, FREE, POSITIVE, Choices, OptionsOf, Range, Registered
from rlhpc.config.sections import AdapterConfig, DeepspeedConfig, FsdpConfig, OptimConfig, ParallelConfig


@dataclass
class NetworkConfig:
    """Options that all policy networks have."""

    model_type: Annotated[str, Registered("rlhpc.embodied.models.registry:MODELS")] = "mlp"
    """`mlp` (numbers), `cnn` and `resnet` (images, and numbers beside them), `flow` (chunks of continuous actions by flow
    matching, from either), `success` (from either, whether the task is done: behaviour cloning only), `conditioned` (one
    of these four after advantage conditioning), `vla` (Llava with action tokens), `pi0`, `openvla` (OpenVLA and
    OpenVLA-OFT), `lerobot` (policies of LeRobot's library: ACT, Diffusion Policy, SmolVLA, π0, π0.5), a registered
    name, or `module:Class`."""
    hidden_sizes: Annotated[list[int], COUNT] = field(default_factory=lambda: [64, 64])
    """Widths of the hidden layers; cnn and resnet take the last for what comes after the convolutions."""
    activation: Annotated[str, Choices("tanh", "relu", "elu", "silu", "gelu")] = "tanh"
    """tanh, relu, elu, silu or gelu."""
    ortho_init: bool = True
    """Orthogonal initial weights."""
    num_action_chunks: Annotated[int, COUNT] = 1
    """Actions that are chosen at once and executed one after the other (embodied)."""
    kwargs: Annotated[dict[str, Any], OptionsOf("model_type", "rlhpc.embodied.config.model_options:MODEL_OPTIONS")] = (
        field(default_factory=dict)
    )
    """Options of the model. `lerobot` has those of its folder's family, `conditioned` has `of`, `unconditioned` and the
    options of the inner policy, and a model of your own has what it takes."""


@dataclass
class ModelConfig(NetworkConfig):
    """The policy network."""

    log_std_init: Annotated[float, Range(-20, 20)] = 0.0
    """Initial log standard deviation of continuous actions."""
    value_per_action: bool = False
    """A value for each action of a chunk, for `algorithm.reward_type: action_level`."""
    normalize_observations: bool = False
    """`mlp`, and `flow` over numbers: observations are normalised by the running mean and variance of those that training has
    seen. The policy keeps them: they are saved, exported and used by evaluations and recordings."""
    add_value_head: bool = True
    """`vla`, `pi0`, `openvla`, `lerobot`: adds a value head, which GRPO does without."""
    model_path: str | None = None
    """Language models, `vla`, `pi0`, `openvla`: a Hugging Face folder or hub name, with its tokenizer, or `builtin:tiny`.
    `lerobot`: a folder that its `save_pretrained` wrote."""
    dtype: Annotated[str, DTYPES] = "auto"
    """`vla`, `pi0`, `openvla`: precision of the weights; with `fsdp` and `deepspeed`, of the computation (mixed precision:
    fp32 master weights). `auto` is bfloat16 on accelerators that compute in it, and float32 elsewhere and where `local` trains
    all weights, without adapters."""
    gradient_checkpointing: Annotated[bool, FREE] = False
    """`vla`, `openvla`: recomputes activations in the backward pass, which saves memory."""
    attn_implementation: Annotated[str, ATTENTION, FREE] = "sdpa"
    """Attention of transformers: sdpa, eager or flash_attention_2."""
    trust_remote_code: bool = False
    """Runs code that comes with the model."""


@dataclass
class EmbodiedActorConfig:
    """The actor group: training."""

    training_backend: Annotated[str, FREE, Registered("rlhpc.training.registry:BACKENDS")] = "local"
    """`local`: all weights on each rank, gradients summed over the ranks. `fsdp`, `deepspeed`: weights and optimizer spread
    over the ranks. Or `module:Class`."""
    micro_batch_size: Annotated[int | None, COUNT, FREE] = None
    """Transitions of one forward and backward pass on a rank; null takes a rank's whole share."""
    model: ModelConfig = field(default_factory=ModelConfig)
    """The policy."""
    optim: OptimConfig = field(default_factory=OptimConfig)
    """The optimizer."""
    lora: AdapterConfig = field(default_factory=AdapterConfig)
    """Adapters."""
    fsdp: Annotated[FsdpConfig, FREE] = field(default_factory=FsdpConfig)
    """Options of FSDP2."""
    parallel: Annotated[ParallelConfig, FREE] = field(default_factory=ParallelConfig)
    """What `fsdp` divides over which ranks."""
    deepspeed: Annotated[DeepspeedConfig, FREE] = field(default_factory=DeepspeedConfig)
    """Options of DeepSpeed."""


@dataclass
class BcModelConfig(ModelConfig):
    """The policy network."""

    model_type: str = "mlp"
    """`mlp` (numbers), `cnn` and `resnet` (images, and numbers beside them), `flow` (chunks of continuous actions by flow
    matching, from either), `success` (from either, whether the task is done), `conditioned` (one of these four, told what
    was an improvement: `algorithm.value_model`), `sac`, `td3` and `iql` (numbers; for an off-policy run to start from),
    `vla` (Llava with action tokens), `pi0`, `openvla`, a registered name, or `module:Class`."""
    critic_hidden_sizes: Annotated[list[int] | None, COUNT] = None
    """`sac`, `td3` and `iql`: widths of the critics' hidden layers; null takes `hidden_sizes`."""
    critic_layer_norm: bool = False
    """`sac`, `td3` and `iql`: normalises the critics' hidden layers, which keeps many updates per transition stable (RLPD)."""
    exploration_noise: Annotated[float, POSITIVE] = 0.1
    """`td3`: standard deviation of the noise around its actions, in halves of the bounds' width."""


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
    critic_hidden_sizes: Annotated[list[int] | None, COUNT] = None
    """Widths of the critics' hidden layers; null takes `hidden_sizes`."""
    critic_layer_norm: bool = False
    """`sac`, `td3`, `iql`: normalises the critics' hidden layers, which keeps many updates per transition stable (RLPD)."""
    exploration_noise: Annotated[float, POSITIVE] = 0.1
    """`td3`: standard deviation of the noise that is added to actions while training, in halves of the bounds' width."""
