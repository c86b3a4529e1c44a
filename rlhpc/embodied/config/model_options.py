"""Options of the built-in policies: `actor.model.kwargs` by `actor.model.model_type`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from rlhpc.config.options import NoOptions, read_options
from rlhpc.runtime.key_metadata import COUNT, INTERNAL, PART, POSITIVE, Choices

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
class SuccessOptions(ResnetOptions):
    """Options of `success`; `channels` is for the resnet encoder."""

    encoder: Annotated[str, Choices("cnn", "resnet")] = "cnn"
    """Encoder of images."""


@dataclass(frozen=True)
class DenoisingOptions:
    """Options of policies that denoise actions."""

    num_steps: Annotated[int, COUNT] = 4
    """Number of denoising steps K."""
    noise_level: Annotated[float, POSITIVE] = 0.5
    """Scale of the noise in each step of training rollouts."""


@dataclass(frozen=True)
class FlowOptions(SuccessOptions, DenoisingOptions):
    """Options of `flow`."""


@dataclass(frozen=True)
class ConditionedOptions:
    """Options of `conditioned`, in addition to those of the inner policy."""

    of: Annotated[str, Choices("mlp", "cnn", "resnet", "flow")]
    """Model type of the inner policy."""
    unconditioned: Annotated[float, PART] = 0.3
    """Fraction of training samples in which the policy does not get the improvement label."""


@dataclass(frozen=True)
class DsrlOptions:
    """Options of `dsrl`."""

    base: str | None = None
    """Run, checkpoint or export folder of the flow policy."""
    noise_bound: Annotated[float, POSITIVE] = 1.5
    """Bound of each noise component's absolute value."""
    base_spec: dict[str, Any] | None = field(default=None, metadata={INTERNAL: True})
    """Description of the flow policy in a checkpoint, which contains its weights."""


@dataclass(frozen=True)
class VlaOptions:
    """Options of `vla`."""

    prompt: str | None = None
    """Prompt template with `{instruction}`; null takes the model's."""
    lora: dict[str, Any] | None = field(default=None, metadata={INTERNAL: True})
    """Adapters; `actor.lora` sets them."""


@dataclass(frozen=True)
class OpenVlaOptions(VlaOptions):
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
    vlm: str | None = None
    """Local folder of the vision-language model, instead of the hub name in the policy's folder."""
    task: str | None = None
    """Instruction, if observations contain none."""


#: Options by model type. `lerobot` and `conditioned` check theirs when the policy is built, because these depend on the folder
#: and on the inner policy.
MODEL_OPTIONS: dict[str, type] = {
    "mlp": MlpOptions,
    "resnet": ResnetOptions,
    "flow": FlowOptions,
    "success": SuccessOptions,
    "dsrl": DsrlOptions,
    "vla": VlaOptions,
    "pi0": Pi0Options,
    "openvla": OpenVlaOptions,
    **dict.fromkeys(("cnn", "sac", "crossq", "td3", "iql"), NoOptions),
}


def model_options(declaration: type[Options], model: NetworkConfig) -> Options:
    """Reads the options of a policy from `actor.model.kwargs`.

    Raises:
        ConfigError: The policy does not have these options.
    """
    return read_options(declaration, model.kwargs, KEY, f"model_type {model.model_type}")
