"""Registry of policy models: built in, registered, an entry point of group `rlhpc.models`, or `module:Class`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhpc.checkpoint.export_folder import read_object
from rlhpc.checkpoint.state import load_tensors
from rlhpc.embodied.envs.observations import space_from_json
from rlhpc.embodied.models.base import Policy
from rlhpc.jobs.paths import MODEL
from rlhpc.runtime.errors import CheckpointError, ConfigError, RlhpcError
from rlhpc.runtime.plugins import Registry, load_attribute
from rlhpc.runtime.trust import Trust, without_variables

if TYPE_CHECKING:
    import torch

    from rlhpc.embodied.config import EmbodiedActorConfig, ModelConfig, PolicyConfig

#: Factories `(cfg, observation_space, action_space) -> Policy`, by name.
MODELS: Registry[Any] = Registry(
    "model type", "actor.model.model_type", "rlhpc.models",
    {
        "mlp": "rlhpc.embodied.models.mlp:MLPPolicy",
        "cnn": "rlhpc.embodied.models.cnn:CNNPolicy",
        "resnet": "rlhpc.embodied.models.cnn:ResNetPolicy",
        "resnet10": "rlhpc.embodied.models.resnet10:ResNet10Policy",
        "sac": "rlhpc.embodied.models.off_policy:SACPolicy",
        "crossq": "rlhpc.embodied.models.off_policy:CrossQPolicy",
        "td3": "rlhpc.embodied.models.off_policy:TD3Policy",
        "iql": "rlhpc.embodied.models.off_policy:IQLPolicy",
        "dsrl": "rlhpc.embodied.models.dsrl:DSRLPolicy",
        "flow": "rlhpc.embodied.models.flow:FlowPolicy",
        "conditioned": "rlhpc.embodied.models.advantage_conditioned:ConditionedPolicy",
        "success": "rlhpc.embodied.rewards:SuccessModel",
        "vla": "rlhpc.embodied.models.action_tokens:VLAPolicy",
        "pi0": "rlhpc.embodied.models.pi0:Pi0Policy",
        "openvla": "rlhpc.embodied.models.openvla:OpenVLAPolicy",
        "lerobot": "rlhpc.embodied.models.lerobot.policies:lerobot_policy",
    },
)  # fmt: skip
register_model = MODELS.register
#: Checks of a pretrained model's folder that need no environment: functions `(cfg) -> None`, by model type.
_FOLDER_CHECKS = {
    "vla": "rlhpc.embodied.models.vlm:check_folder",
    "pi0": "rlhpc.embodied.models.pi0:check_folder",
    "openvla": "rlhpc.embodied.models.openvla:check_folder",
    "lerobot": "rlhpc.embodied.models.lerobot.checkpoint:check_folder",
}
#: Checks of policies that may need another Python interpreter: functions `(cfg, observation_space, action_space)`, by model
#: type.
_SPACE_CHECKS = {"lerobot": "rlhpc.embodied.models.lerobot.checkpoint:describe"}


def policy_dtype(actor: EmbodiedActorConfig, has_bfloat16: bool) -> str:
    """Returns the dtype of `actor.model.dtype`, with `auto` resolved: "float32" or "bfloat16".

    Args:
        actor: Section `actor`.
        has_bfloat16: True if the policy's device computes in bfloat16.
    """
    model = actor.model
    if model.dtype != "auto":
        return model.dtype
    factory = MODELS.find(model.model_type)
    if not getattr(factory, "mixed_precision", False):
        return "float32"
    if actor.training_backend == "local" and not actor.lora.rank:
        return "float32"  # all weights are trained, by an optimizer without float32 copies
    return "bfloat16" if has_bfloat16 else "float32"


def policy_section(actor: EmbodiedActorConfig, device: str | torch.device = "cpu") -> ModelConfig:
    """Returns section `actor.model` for `build_model` on a device. Resolves the dtype (`policy_dtype`) and adds the
    adapters of `actor.lora` to the options.
    """
    from rlhpc.config.sections import PolicyAdapterConfig
    from rlhpc.config.typed import plain, with_value
    from rlhpc.runtime.devices import computes_bfloat16

    model, device_type = actor.model, device if isinstance(device, str) else device.type
    if policy_dtype(actor, computes_bfloat16(device_type)) == "bfloat16" != model.dtype:
        model = with_value(model, "dtype", "bfloat16")  # `build_model` would build float32 for `auto`
    if not actor.lora.rank:
        return model
    adapter_names = [field.name for field in fields(PolicyAdapterConfig)]
    adapters = {name: plain(getattr(actor.lora, name)) for name in adapter_names}
    return with_value(model, "kwargs", {**model.kwargs, "lora": adapters})


def build_model(cfg: PolicyConfig, observation_space: Any, action_space: Any, seed: int | None = None) -> Policy:
    """Builds the policy of section `actor.model`.

    Args:
        cfg: Section `actor.model`.
        observation_space, action_space: Spaces of one environment slot.
        seed: Seed of the initial weights, which leaves torch's global generator unchanged; None uses the global generator.

    Raises:
        ConfigError: The type is unknown, or does not support the spaces.
    """
    import torch

    factory = MODELS.find(cfg.model_type)
    with torch.random.fork_rng(devices=[], enabled=seed is not None):
        if seed is not None:
            torch.manual_seed(seed)
        policy: Policy = factory(cfg, observation_space, action_space)
    if getattr(cfg, "normalize_observations", False) and policy.normaliser is None:
        raise ConfigError(
            f"actor.model.normalize_observations is true, and a policy of model_type {cfg.model_type!r} with these "
            "observations normalises none: mlp, and flow over numbers, do; set it false"
        )
    return policy


def check_folder(cfg: PolicyConfig) -> None:
    """Checks that a pretrained policy's folder has all files; needs no environment.

    Raises:
        ConfigError: The type is unknown, or a file is missing; the message names it.
    """
    MODELS.find(cfg.model_type)
    if (check_path := _FOLDER_CHECKS.get(cfg.model_type)) is not None:
        load_attribute(check_path, "actor.model.model_type")(cfg)


def check_policy(actor: EmbodiedActorConfig, spaces: tuple[Any, Any], pythons: Sequence[str | None]) -> Policy | None:
    """Builds the policy as a check; returns None if only ranks with a separate Python can build it.

    Args:
        actor: Section `actor`.
        spaces: Observation and action space of one slot.
        pythons: Python interpreters of the groups that will build it.

    Raises:
        ConfigError: The policy cannot be built.
    """
    check_path = _SPACE_CHECKS.get(actor.model.model_type)
    if check_path is None or not all(pythons):
        return build_model(policy_section(actor), *spaces)
    load_attribute(check_path, "actor.model.model_type")(actor.model, *spaces)
    return None


def policy_from_spec(spec: dict[str, Any], trust: Trust | None = None, origin: str = "the description") -> Policy:
    """Builds the policy that a `Policy.spec` describes, with newly initialized weights.

    Args:
        spec: Result of `Policy.spec`.
        trust: Trust settings for code that the description names; no code is trusted by default.
        origin: Source of the description, for messages.

    Raises:
        ConfigError: The description names untrusted code, or does not describe a policy.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    from rlhpc.config.typed import typed
    from rlhpc.embodied.config import ModelConfig, SacModelConfig

    trust = trust or Trust()
    try:
        model = spec["model"]
        config_class: type[PolicyConfig] = SacModelConfig if "critic_layer_norm" in model else ModelConfig
        # Descriptions from earlier versions may lack keys.
        config = {"actor": {"model": {**asdict(config_class()), **model, "model_type": model["model_type"]}}}
        trust.check(config, origin)
        section = config if trust.everything else without_variables(config, trust, origin)
        cfg = typed(config_class, OmegaConf.create(section).actor.model)
        return build_model(cfg, space_from_json(spec["observation_space"]), space_from_json(spec["action_space"]))
    except (
        KeyError,
        TypeError,
        ValueError,
        AttributeError,
        RuntimeError,
        MemoryError,
        OmegaConfBaseException,
    ) as error:
        if isinstance(error, RlhpcError):
            raise
        message = str(error).strip().split("\n")[0]
        raise ConfigError(
            f"{origin} describes no policy that can be built: {type(error).__name__}: {message}"
        ) from error


def read_spec(folder: Path) -> tuple[dict[str, Any], Path]:
    """Reads the description of a folder's policy (`Policy.spec`); returns it and its file.

    Raises:
        CheckpointError: The folder has no description.
    """
    spec_file = folder / "config.json"
    policy_spec = read_object(spec_file).get("policy") if spec_file.is_file() else None
    if policy_spec is None:
        spec_file = folder / "model.json"
        policy_spec = read_object(spec_file)
    return policy_spec, spec_file


def load_policy(folder: Path, code_trust: Trust) -> Policy:
    """Loads a policy from a folder onto the CPU, in eval mode.

    Args:
        folder: Folder of a checkpoint or an export.
        code_trust: Trust settings for code that the folder names.

    Raises:
        CheckpointError: Files are missing, or the weights do not fit the policy.
        ConfigError: The folder names code that is not trusted.
    """
    policy_spec, spec_file = read_spec(folder)
    policy = policy_from_spec(policy_spec, code_trust, str(spec_file))
    try:
        policy.load_state_dict(load_tensors(folder / MODEL))
    except RuntimeError as error:
        raise CheckpointError(f"{folder}: the weights do not fit the policy it describes: {error}") from error
    policy.eval()
    return policy
