"""Options of the built-in policies: `actor.model.kwargs` by `actor.model.model_type`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from rlhpc.config.options import NoOptions, read_options
from rlhpc.runtime.key_metadata import COUNT, INTERNAL, NOT_NEGATIVE, PART, POSITIVE, Choices, Range

if TYPE_CHECKING:
    from rlhpc.embodied.config.models import NetworkConfig

KEY = "actor.model.kwargs"
Options = TypeVar("Options")


@dataclass(frozen=True)
class MlpOptions:
    """Options of `mlp`."""

    actor_gain: Annotated[float, POSITIVE] = 0.01
    """Gain of the orthogonal weights of the actor's last layer."""
    critic_gain: Annotated[float, POSITIVE] = 1.0
    """Gain of the orthogonal weights of the critic's last layer."""


@dataclass(frozen=True)
class ResnetOptions:
    """Options of `resnet`."""

    channels: Annotated[list[int], COUNT] = field(default_factory=lambda: [16, 32, 32])
    """Number of channels of each block."""


@dataclass(frozen=True)
class Resnet10Options:
    """Options of `resnet10`."""

    weights: str | None = None
    """File with the initial weights of the residual network, under torchvision's names: RLinf's `resnet10_pretrained.pt`, or
    safetensors. A checkpoint contains the weights; it is evaluated and exported without the file."""
    freeze: bool = False
    """Leaves the residual network as it is, and trains the layers after it."""


@dataclass(frozen=True)
class EncoderOptions(ResnetOptions, Resnet10Options):
    """Options of policies with an encoder of images; `channels` is for resnet, `weights` and `freeze` are for resnet10."""

    encoder: Annotated[str, Choices("cnn", "resnet", "resnet10")] = "cnn"
    """Encoder of images."""


@dataclass(frozen=True)
class CrossqOptions(EncoderOptions):
    """Options of `crossq`."""

    critic_activation: Annotated[str | None, Choices("tanh", "relu", "elu", "silu", "gelu")] = None
    """Activation of the critics; null takes `actor.model.activation`."""
    actor_renorm: bool = True
    """Batch renormalisation in the actor, too; false builds the actor as that of `sac`."""
    renorm_rate: Annotated[float, PART] = 0.01
    """Update rate of the running statistics: the weight of a batch's statistics."""
    renorm_warmup: Annotated[int, NOT_NEGATIVE] = 100_000
    """Number of initial batches that are normalised by their own statistics alone."""


@dataclass(frozen=True)
class DenoisingOptions:
    """Options of policies that denoise actions."""

    num_steps: Annotated[int, COUNT] = 4
    """Number of denoising steps K."""
    noise_level: Annotated[float, POSITIVE] = 0.5
    """Scale of the noise in each step of training rollouts."""
    noise_steps: Annotated[str, Choices("all", "one")] = "all"
    """Denoising steps that add noise in training rollouts, and whose log-probabilities count: all, or one that is drawn for
    each chunk. With one, a training pass runs the denoising network once."""


@dataclass(frozen=True)
class FlowOptions(EncoderOptions, DenoisingOptions):
    """Options of `flow`."""

    network: Annotated[str, Choices("mlp", "transformer")] = "mlp"
    """Network of the velocity: an MLP, or a transformer whose tokens are the actions of a chunk."""
    width: Annotated[int, COUNT] = 96
    """Width of the transformer."""
    layers: Annotated[int, COUNT] = 2
    """Number of layers of the transformer."""
    heads: Annotated[int, COUNT] = 4
    """Number of attention heads of the transformer."""
    noise_method: Annotated[str, Choices("flow_sde", "flow_noise")] = "flow_sde"
    """Noise of the steps of training rollouts: `flow_sde` (fixed, by `noise_level`), or `flow_noise` (learned)."""
    noise_range: Annotated[list[float], POSITIVE] = field(default_factory=lambda: [0.05, 0.3])
    """`flow_noise`: lowest and highest standard deviation of a step, for actions scaled to [−1, 1]."""

    def __post_init__(self) -> None:
        if self.width % self.heads:
            raise ValueError(f"heads is {self.heads}, which does not divide width, {self.width}")
        if len(self.noise_range) != 2 or not self.noise_range[0] < self.noise_range[1]:
            raise ValueError(f"noise_range is {list(self.noise_range)}; allowed: [lowest, highest]")


@dataclass(frozen=True)
class ConditionedOptions:
    """Options of `conditioned`, in addition to those of the inner policy."""

    of: Annotated[str, Choices("mlp", "cnn", "resnet", "resnet10", "flow")]
    """Model type of the inner policy."""
    unconditioned: Annotated[float, PART] = 0.3
    """Fraction of training samples in which the policy does not get the improvement label."""


@dataclass(frozen=True)
class DsrlOptions(EncoderOptions):
    """Options of `dsrl`."""

    base: str | None = None
    """Run, checkpoint or export folder of the flow policy."""
    noise_bound: Annotated[float, POSITIVE] = 1.5
    """Bound of each noise component's absolute value."""
    base_spec: dict[str, Any] | None = field(default=None, metadata={INTERNAL: True})
    """Description of the flow policy in a checkpoint, which contains its weights."""


@dataclass(frozen=True)
class VlaOptions:
    """Options of policies on a vision-language model."""

    prompt: str | None = None
    """Prompt template with `{instruction}`; null takes the model's."""
    lora: dict[str, Any] | None = field(default=None, metadata={INTERNAL: True})
    """Adapters; `actor.lora` sets them."""


@dataclass(frozen=True)
class ActionTokenOptions(VlaOptions):
    """Options of `vla`, and of `openvla` with action tokens: how tokens are sampled."""

    temperature_train: Annotated[float, POSITIVE] = 1.0
    """Temperature at which training rollouts sample action tokens; log-probs in training have the same temperature."""
    temperature_eval: Annotated[float, NOT_NEGATIVE] = 0.0
    """Temperature at which evaluations sample action tokens; 0 takes the most likely token."""
    top_k: Annotated[int, Range(1, also=(-1, "off"))] = -1
    """Number of most likely bins to sample from; -1 for all."""


@dataclass(frozen=True)
class OpenVlaOptions(ActionTokenOptions):
    """Options of `openvla`."""

    head: Annotated[str | None, Choices("tokens", "parallel", "l1")] = None
    """tokens (OpenVLA), parallel (OFT with tokens) or l1 (OFT); null takes l1 if the folder has an L1 head, else tokens."""
    proprio: bool | None = None
    """True if the model takes `state`; null takes true if the folder has a projector for it."""
    unnorm_key: str | None = None
    """Dataset whose statistics scale actions and state; optional if there is only one."""
    statistics: str | None = None
    """File of statistics, or a LeRobot dataset's folder, instead of the model's; `bounds` uses the bounds of the action
    space."""
    normalisation: Annotated[str | None, Choices("q99", "bounds")] = "q99"
    """Statistics that map to −1 and 1: q99 (quantiles) or bounds (minimum and maximum)."""
    gripper: Annotated[str | None, Choices("rlds")] = None
    """rlds if the last action component is a gripper with the convention of RLDS datasets (`Scaling.gripper`)."""
    center_crop: bool = False
    """Crops images to the central 90 % of their area, as OpenVLA's evaluations do."""
    stop_token: bool = True
    """`parallel` and `l1`: the end of the text follows the empty positions of the actions, as in OFT's own code; false leaves
    it out, as RLinf's `implement_version: rlinf` does."""
    value_hidden: Annotated[list[int] | None, COUNT] = None
    """Widths of the value head's hidden layers with GELU; null takes one layer as wide as the language model."""
    proprio_adapters: bool = False
    """Trains adapters like those of `actor.lora` on the projector of `state`, instead of the projector's weights."""


@dataclass(frozen=True)
class Pi0Options(VlaOptions, DenoisingOptions):
    """Options of `pi0`."""

    statistics: str | dict[str, Any] | None = None
    """openpi's norm_stats.json, or its content, instead of the folder's; or `bounds` (`read_norm_stats`)."""
    normalisation: Annotated[str | None, Choices("mean_std", "quantiles")] = "mean_std"
    """mean_std, as in π0, or quantiles, as in π0.5."""


@dataclass(frozen=True)
class LerobotOptions:
    """Options of `lerobot` for ACT."""

    statistics: str | None = None
    """LeRobot dataset's folder, or its stats.json, instead of the policy folder's statistics."""
    cameras: dict[str, Any] | None = None
    """Mapping from the policy's cameras to the environment's, if their names differ."""


@dataclass(frozen=True)
class LerobotDiffusionOptions(LerobotOptions):
    """Options of LeRobot's Diffusion Policy."""

    num_steps: Annotated[int | None, COUNT] = None
    """Number of denoising steps K; null takes the folder's."""
    noise_level: Annotated[float, POSITIVE] = 0.1
    """Scale of the noise in each step of training rollouts."""


@dataclass(frozen=True)
class LerobotFlowOptions(LerobotDiffusionOptions):
    """Options of LeRobot's SmolVLA, π0 and π0.5."""

    noise_level: Annotated[float, POSITIVE] = 0.5
    """Scale of the noise in each step of training rollouts."""
    noise_steps: Annotated[str, Choices("all", "one")] = "all"
    """Denoising steps that add noise in training rollouts, and whose log-probabilities count: all, or one that is drawn for
    each chunk. With one, a training pass runs the denoising network once."""
    vlm: str | None = None
    """Local folder of the vision-language model, instead of the hub name in the policy's folder."""
    task: str | None = None
    """Instruction, if observations contain none."""


@dataclass(frozen=True)
class LerobotPiOptions(LerobotFlowOptions):
    """Options of LeRobot's π0 and π0.5."""

    value_input: Annotated[str, Choices("last_token", "mean_token", "first_token", "action_expert")] = "last_token"
    """Input of the value head: PaliGemma's hidden state of the last token (for π0 with the state), the mean of its hidden
    states of all images and of the whole prompt including padding, its hidden state of the first token, or the mean of the
    action expert's hidden states. The last is computed in each noisy denoising step of training, and averaged over the steps
    in rollouts."""
    value_hidden: Annotated[list[int], COUNT] = field(default_factory=list)
    """Widths of the value head's hidden layers with ReLU; empty takes one layer as wide as the input, with GELU."""
    detach_value_input: bool = False
    """Lets the value loss train the value head alone."""
    delta_actions: Annotated[list[int], NOT_NEGATIVE] = field(default_factory=list)
    """Components of an action that the network predicts relative to the same component of `state` (openpi's
    `DeltaActions`)."""
    adapt_to_pi: bool = False
    """Converts state and actions of a robot with two ALOHA arms to the directions of joints and the angles of grippers in π0's
    training data (openpi's key of the same name)."""
    train_expert_only: bool | None = None
    """Trains the action expert and the projections, and keeps PaliGemma as it is; null takes the folder's key of the same
    name."""
    action_horizon: Annotated[int | None, COUNT] = None
    """Number of actions that the network predicts at once; null takes the folder's (`chunk_size`, openpi's
    `action_horizon`)."""
    discrete_state_input: bool | None = None
    """π0.5: whether the prompt contains the state; null takes the folder's preprocessor, with openpi's folders true."""
    prompt_tokens: Annotated[int | None, COUNT] = None
    """Number of tokens to which prompts are padded, and after which they are cut (openpi's `max_token_len`); null takes the
    folder's, with openpi's folders 48 for π0 and 200 for π0.5."""
    noise_method: Annotated[str, Choices("flow_sde", "flow_noise")] = "flow_sde"
    """Noise of the steps of training rollouts: `flow_sde` (fixed, by `noise_level`), or `flow_noise` (learned from the action
    expert's hidden states)."""
    noise_range: Annotated[list[float], POSITIVE] = field(default_factory=lambda: [0.08, 0.16])
    """`flow_noise`: lowest and highest standard deviation of a step."""
    step_logprobs: Annotated[str, Choices("sum", "mean")] = "sum"
    """Log-probability of a chunk over its denoising steps: their sum, or their mean with the start noise as a further step
    (π_RL's joint log-probability). Entropies alike."""

    def __post_init__(self) -> None:
        if len(self.noise_range) != 2 or not self.noise_range[0] < self.noise_range[1]:
            raise ValueError(f"noise_range is {list(self.noise_range)}; allowed: [lowest, highest]")


#: Options by model type. `lerobot` and `conditioned` check theirs when the policy is built, because these depend on the folder
#: and on the inner policy.
MODEL_OPTIONS: dict[str, type] = {
    "mlp": MlpOptions,
    "resnet": ResnetOptions,
    "resnet10": Resnet10Options,
    "flow": FlowOptions,
    "dsrl": DsrlOptions,
    "vla": ActionTokenOptions,
    "pi0": Pi0Options,
    "openvla": OpenVlaOptions,
    "cnn": NoOptions,
    **dict.fromkeys(("success", "sac", "td3", "iql"), EncoderOptions),
    "crossq": CrossqOptions,
}


def model_options(options_type: type[Options], model: NetworkConfig) -> Options:
    """Reads the options of a policy from `actor.model.kwargs`.

    Raises:
        ConfigError: The policy does not have these options.
    """
    return read_options(options_type, model.kwargs, KEY, f"model_type {model.model_type}")
