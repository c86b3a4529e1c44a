"""The configuration of behaviour cloning. The docstring under a field is its entry in the reference."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from rlhpc.config.sections import RunConfig
from rlhpc.embodied.config.policy import EmbodiedActorConfig, ModelConfig
from rlhpc.embodied.config.sections import ClonedEnvsConfig, DemonstratedWorkflowConfig, EmbodiedRunnerConfig


@dataclass
class DemosConfig:
    """Demonstrations for embodied policies: what behaviour cloning trains on."""

    path: Any = None
    """Trajectories: a `.h5` file in ManiSkill's format, a pattern, a folder of such files, the folder of a LeRobot or
    Minari dataset, or a list of those."""
    only_success: bool = False
    """Leaves out episodes that never succeeded."""
    limit: int | None = None
    """At most this many episodes; null takes all."""
    holdout: float = 0.0
    """Fraction of the episodes that is not trained on; `train/holdout_loss` is their loss."""


@dataclass
class BcAlgorithmConfig:
    """The loss, and how often each demonstration is seen."""

    gamma: float = 0.99
    """Discount of the returns that `bc_value_coef` and `value_model` are for."""
    update_epochs: int = 4
    """Passes over the demonstrations in a step."""
    bc_loss: str = "nll"
    """`nll` (negative log-likelihood of the demonstrated actions, or what the policy's `bc_loss` has in its place: flow
    matching) or `mse` (squared error of the mean action)."""
    bc_value_coef: float = 0.0
    """Weight of a value loss on the demonstrations' discounted returns, so that PPO starts with a critic; 0 is off."""
    value_model: str | None = None
    """A policy whose critic says what was to be expected (a run, a checkpoint or an export folder), so that the policy is
    told which actions turned out better than that, and is asked for such when it acts (advantage conditioning, RECAP);
    with `actor.model.model_type: conditioned`."""
    advantage_steps: int = 50
    """`value_model`: rewards that are counted before the critic's value of what follows."""
    improved_fraction: float = 0.3
    """`value_model`: the part of all steps that counts as improvements: those with the largest advantages."""
    anneal_lr: bool = False
    """Lowers the learning rate linearly to 0 over the run."""


@dataclass
class BcModelConfig(ModelConfig):
    """The policy network."""

    model_type: str = "mlp"
    """`mlp` (numbers), `cnn` and `resnet` (images, and numbers beside them), `flow` (chunks of continuous actions by flow
    matching, from either), `success` (from either, whether the task is done), `conditioned` (one of these four, told what
    was an improvement: `algorithm.value_model`), `sac`, `td3` and `iql` (numbers; for an off-policy run to start from),
    `vla` (Llava with action tokens), `pi0`, `openvla`, a registered name, or `module:Class`."""
    critic_hidden_sizes: list[int] | None = None
    """`sac`, `td3` and `iql`: widths of the critics' hidden layers; null takes `hidden_sizes`."""
    critic_layer_norm: bool = False
    """`sac`, `td3` and `iql`: normalises the critics' hidden layers, which keeps many updates per transition stable (RLPD)."""
    exploration_noise: float = 0.1
    """`td3`: standard deviation of the noise around its actions, in halves of the bounds' width."""


@dataclass
class BcActorConfig(EmbodiedActorConfig):
    """The actor group: training."""

    global_batch_size: int = 256
    """Demonstrated steps of one optimizer step, over all ranks; all of them, where there are fewer."""
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
