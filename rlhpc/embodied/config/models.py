"""Configuration sections of policy networks and actors. The docstring under a field is its entry in the reference."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any

from rlhpc.config.constraints import ATTENTION, COUNT, DTYPES, FREE, POSITIVE, Choices, OptionsOf, Range, Registered
from rlhpc.config.sections import DeepspeedConfig, FsdpConfig, OptimConfig, ParallelConfig, PolicyAdapterConfig


@dataclass
class NetworkConfig:
    """Options of all policy networks."""

    model_type: Annotated[str, Registered("rlhpc.embodied.models.registry:MODELS")] = "mlp"
    """`mlp` (state vectors), `cnn`, `resnet` and `resnet10` (images, optionally with state vectors), `flow` (chunks of
    continuous actions by flow matching, from either), `success` (success classifier on either; behaviour cloning only),
    `conditioned` (mlp, cnn, resnet, resnet10 or flow after advantage conditioning), `vla` (Llava with action tokens), `pi0`,
    `openvla` (OpenVLA and OpenVLA-OFT), `lerobot` (policies of LeRobot's library: ACT, Diffusion Policy, SmolVLA, π0, π0.5),
    a registered name, or `module:Class`."""
    hidden_sizes: Annotated[list[int], COUNT] = field(default_factory=lambda: [64, 64])
    """Widths of the hidden layers; cnn, resnet and resnet10 use the last width for the layer after the convolutions."""
    activation: Annotated[str, Choices("tanh", "relu", "elu", "silu", "gelu")] = "tanh"
    """tanh, relu, elu, silu or gelu."""
    ortho_init: bool = True
    """Orthogonal initial weights."""
    num_action_chunks: Annotated[int, COUNT] = 1
    """Chunk size: number of actions that are chosen at once and executed one after the other."""
    kwargs: Annotated[dict[str, Any], OptionsOf("model_type", "rlhpc.embodied.config.model_options:MODEL_OPTIONS")] = (
        field(default_factory=dict)
    )
    """Options of the model. `lerobot` takes the options of its folder's family; `conditioned` takes `of`, `unconditioned` and
    the options of the inner policy; custom models define theirs."""


@dataclass
class ModelConfig(NetworkConfig):
    """Settings of the policy network."""

    log_std_init: Annotated[float, Range(-20, 20)] = 0.0
    """Initial log standard deviation of continuous actions."""
    value_per_action: bool = False
    """Predicts a value for each action of a chunk, for `algorithm.reward_type: action_level`."""
    normalize_observations: bool = False
    """`mlp`, and `flow` on state vectors: normalises observations by the running mean and variance of the training
    observations. These are part of the policy: they are saved, exported, and used in evaluations and recordings."""
    add_value_head: bool = True
    """`vla`, `pi0`, `openvla`, `lerobot`: adds a value head; GRPO does not need one."""
    model_path: str | None = None
    """Language models, `vla`, `pi0`, `openvla`: a Hugging Face folder or hub name, with its tokenizer, or `builtin:tiny`.
    `lerobot`: a folder written by LeRobot's `save_pretrained`."""
    dtype: Annotated[str, DTYPES] = "auto"
    """`vla`, `pi0`, `openvla`: precision of the weights; with `fsdp` and `deepspeed`, precision of the computation (mixed
    precision with fp32 master weights). `auto` is bfloat16 on accelerators that support it; it is float32 elsewhere, and if
    `local` trains all weights without adapters."""
    gradient_checkpointing: Annotated[bool, FREE] = False
    """`vla`, `openvla`: recomputes activations in the backward pass, which saves memory."""
    attn_implementation: Annotated[str, ATTENTION, FREE] = "sdpa"
    """Attention of transformers: sdpa, eager or flash_attention_2."""
    trust_remote_code: bool = False
    """Allows code from the model's folder to run."""


@dataclass
class EmbodiedActorConfig:
    """Settings of the actor group, which trains the model."""

    training_backend: Annotated[str, FREE, Registered("rlhpc.training.registry:BACKENDS")] = "local"
    """`local`: all weights on each rank, gradients summed over the ranks. `fsdp`, `deepspeed`: weights and optimizer sharded
    over the ranks. Or `module:Class`."""
    micro_batch_size: Annotated[int | None, COUNT, FREE] = None
    """Transitions per forward and backward pass on a rank; null takes the rank's whole part of a minibatch."""
    capture_graphs: Annotated[bool, FREE] = False
    """On a CUDA GPU with `training_backend: local`: records forward and backward passes once for each size and replays them,
    for small policies, whose kernels take longer to start than to run. The policy's pass may not read values on the host. With
    several ranks, rows without weight fill up the passes of PPO, so that there are few sizes."""
    model: ModelConfig = field(default_factory=ModelConfig)
    """The policy."""
    optim: OptimConfig = field(default_factory=OptimConfig)
    """Settings of the optimizer."""
    lora: PolicyAdapterConfig = field(default_factory=PolicyAdapterConfig)
    """Adapters."""
    fsdp: Annotated[FsdpConfig, FREE] = field(default_factory=FsdpConfig)
    """Options of FSDP2."""
    parallel: Annotated[ParallelConfig, FREE] = field(default_factory=ParallelConfig)
    """Parallelism of `fsdp`."""
    deepspeed: Annotated[DeepspeedConfig, FREE] = field(default_factory=DeepspeedConfig)
    """Options of DeepSpeed."""


@dataclass
class BcModelConfig(ModelConfig):
    """Settings of the policy network."""

    model_type: str = "mlp"
    """`mlp` (state vectors), `cnn`, `resnet` and `resnet10` (images, optionally with state vectors), `flow` (chunks of
    continuous actions by flow matching, from either), `success` (success classifier on either), `conditioned` (mlp, cnn,
    resnet, resnet10 or flow, conditioned on improvement labels: `algorithm.value_model`), `sac`, `td3` and `iql` (initial
    policy of an off-policy run), `vla` (Llava with action tokens), `pi0`, `openvla`, a registered name, or
    `module:Class`."""
    critic_hidden_sizes: Annotated[list[int] | None, COUNT] = None
    """`sac`, `td3` and `iql`: widths of the critics' hidden layers; null takes `hidden_sizes`."""
    critic_layer_norm: bool = False
    """`sac`, `td3` and `iql`: applies layer norm in the critics, which stabilizes many updates per transition (RLPD)."""
    num_q_heads: Annotated[int, COUNT] = 2
    """`sac` and `td3`: number of Q-networks."""
    exploration_noise: Annotated[float, POSITIVE] = 0.1
    """`td3`: standard deviation of the exploration noise, as a fraction of half the action range."""


@dataclass
class SacModelConfig(NetworkConfig):
    """Settings of the policy network and its critics."""

    hidden_sizes: list[int] = field(default_factory=lambda: [256, 256])
    """Widths of the hidden layers; cnn and resnet use the last width for the layer after the convolutions."""
    activation: str = "relu"
    """tanh, relu, elu, silu or gelu."""
    ortho_init: bool = False
    """Orthogonal initial weights."""
    model_type: str = "sac"
    """Networks on state vectors, or on images through an encoder (`kwargs.encoder`): `sac` (stochastic actor, twin
    critics), `crossq` (the same with batch renormalisation), `td3` (deterministic actor, twin critics), `iql` (Gaussian actor,
    twin critics, value network), `dsrl` (`sac` on the starting noise of a frozen flow policy, `kwargs.base`), a registered
    name, or `module:Class`."""
    critic_hidden_sizes: Annotated[list[int] | None, COUNT] = None
    """Widths of the critics' hidden layers; null takes `hidden_sizes`."""
    critic_layer_norm: bool = False
    """`sac`, `td3`, `iql`: applies layer norm in the critics, which stabilizes many updates per transition (RLPD)."""
    num_q_heads: Annotated[int, COUNT] = 2
    """`sac`, `td3`, `dsrl`: number of Q-networks; RLPD has 10, and `algorithm.critic_subsample_size: 2`."""
    exploration_noise: Annotated[float, POSITIVE] = 0.1
    """`td3`: standard deviation of the exploration noise in training, as a fraction of half the action range."""
