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
    """Gain of the last layer's orthogonal weights."""
    critic_gain: Annotated[float, POSITIVE] = 1.0
    """Gain of the last layer's orthogonal weights."""


@dataclass(frozen=True)
class ResnetOptions:
    """Options of `resnet`."""

    channels: Annotated[list[int], COUNT] = field(default_factory=lambda: [16, 32, 32])
    """Channels of the blocks."""


@dataclass(frozen=True)
class SuccessOptions(ResnetOptions):
    """Options of `success`; `channels` are those of the resnet."""

    encoder: Annotated[str, Choices("cnn", "resnet")] = "cnn"
    """Network that reads images."""


@dataclass(frozen=True)
class DenoisingOptions:
    """Options of policies that denoise actions."""

    num_steps: Annotated[int, COUNT] = 4
    """Denoising steps K."""
    noise_level: Annotated[float, POSITIVE] = 0.5
    """Scale of the noise in each step of training rollouts."""


@dataclass(frozen=True)
class FlowOptions(SuccessOptions, DenoisingOptions):
    """Options of `flow`."""


@dataclass(frozen=True)
class ConditionedOptions:
    """Options of `conditioned`, beside those of the inner policy."""

    of: Annotated[str, Choices("mlp", "cnn", "resnet", "flow")]
    """Model type of the inner policy."""
    unconditioned: Annotated[float, PART] = 0.3
    """Share of training in which the policy does not get the improvement."""


@dataclass(frozen=True)
class DsrlOptions:
    """Options of `dsrl`."""

    base: str | None = None
    """Run, checkpoint or export folder of the flow policy."""
    noise_bound: Annotated[float, POSITIVE] = 1.5
    """Each component of the noise lies between minus this and this."""
    base_spec: dict[str, Any] | None = field(default=None, metadata={INTERNAL: True})
    """Description of the flow policy in a checkpoint, which contains its weights."""


@dataclass(frozen=True)
class VlaOptions:
    """Options of `vla`."""

    prompt: str | None = None
    """Text with `{instruction}`; null is that of the model."""
    lora: dict[str, Any] | None = field(default=None, metadata={INTERNAL: True})
    """Adapters; `actor.lora` sets them."""


@dataclass(frozen=True)
class OpenVlaOptions(VlaOptions):
    """Options of `openvla`."""

    head: Annotated[str | None, Choices("tokens", "parallel", "l1")] = None
    """tokens (OpenVLA), parallel (OFT with tokens) or l1 (OFT); null is l1 if the folder has such a head, else tokens."""
    proprio: bool | None = None
    """True if the model takes `state`; null: if the folder has a projector for it."""
    unnorm_key: str | None = None
    """Dataset whose statistics scale actions and state; optional if there is only one."""
    statistics: str | None = None
    """A file, or a LeRobot dataset's folder, in place of the model's own; `bounds` are those of the action space."""
    normalisation: Annotated[str | None, Choices("q99", "bounds")] = "q99"
    """Statistics that become −1 and 1: the quantiles, or the bounds."""
    gripper: Annotated[str | None, Choices("rlds")] = None
    """rlds, if the last component is a gripper as datasets of RLDS have it (`Scaling.gripper`)."""
    center_crop: bool = False
    """Shows the middle 90 % of the pictures, as OpenVLA's evaluations do."""


@dataclass(frozen=True)
class Pi0Options(VlaOptions, DenoisingOptions):
    """Options of `pi0`."""

    statistics: str | dict[str, Any] | None = None
    """openpi's norm_stats.json or its content in place of the folder's own, or `bounds` (`read_norm_stats`)."""
    normalisation: Annotated[str | None, Choices("mean_std", "quantiles")] = "mean_std"
    """mean_std, as π0, or quantiles, as π0.5."""


@dataclass(frozen=True)
class LerobotOptions:
    """Options of `lerobot`; those of ACT."""

    statistics: str | None = None
    """A LeRobot dataset's folder, or its stats.json, in place of the folder's own."""
    cameras: dict[str, Any] | None = None
    """The environment's camera of each of the folder's, where their names differ."""


@dataclass(frozen=True)
class LerobotDiffusionOptions(LerobotOptions):
    """Options of LeRobot's Diffusion Policy."""

    num_steps: Annotated[int | None, COUNT] = None
    """Denoising steps K; null is that of the folder."""
    noise_level: Annotated[float, POSITIVE] = 0.1
    """Scale of the noise in each step of training rollouts."""


@dataclass(frozen=True)
class LerobotFlowOptions(LerobotDiffusionOptions):
    """Options of LeRobot's SmolVLA, π0 and π0.5."""

    noise_level: Annotated[float, POSITIVE] = 0.5
    """Scale of the noise in each step of training rollouts."""
    vlm: str | None = None
    """Local folder in place of the hub name that the folder has."""
    task: str | None = None
    """The instruction, where observations have none."""


#: By model type; `lerobot`, whose folder decides, and `conditioned`, whose inner policy has some, check theirs when built.
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
    """Returns the options of a policy.

    Raises:
        ConfigError: They are not those of the policy.
    """
    return read_options(declaration, model.kwargs, KEY, f"model_type {model.model_type}")
