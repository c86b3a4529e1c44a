"""Folders of OpenVLA and OpenVLA-OFT as they are released.

config.json, *.safetensors, preprocessor_config.json, the tokenizer's files    as transformers has them
dataset_statistics.json                 of fine-tuned ones; goes before `norm_stats` of config.json
action_head--<step>_checkpoint.pt       OFT's regression; keys may begin with `module.`
proprio_projector--<step>_checkpoint.pt OFT's
lora_adapter/                           peft's, whose product is in *.safetensors already
rlhpc.safetensors                       ours: value head and log-std, which others pass over
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from rlhpc.checkpoint.state import load_tensors
from rlhpc.embodied.config import ModelConfig
from rlhpc.embodied.envs.observations import boxes_of
from rlhpc.embodied.models.statistics import BOUNDS, read_statistics
from rlhpc.embodied.models.vlm import Eye, read_config, require_weights
from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.files import expand_home
from rlhpc.training.lora import ADAPTER, adapter_weights, full_weights, is_lora

if TYPE_CHECKING:
    from rlhpc.embodied.models.prismatic import ActionHead, OpenVLAConfig, ProprioProjector

HEAD, PROJECTOR = "action_head", "proprio_projector"
STATISTICS, OURS = "dataset_statistics.json", "rlhpc.safetensors"
_PARTS = ("value_head.", "head.")


def path_of(given: Any) -> Path:
    """A path as users write it."""
    return expand_home(str(given))


def folder_of(cfg: ModelConfig) -> Path | None:
    """The model's folder; None for a hub name or a built-in one."""
    folder = path_of(cfg.model_path or "")
    return folder if cfg.model_path and folder.is_dir() else None


def beside(folder: Path | None) -> dict[str, Path]:
    """The files of what stands beside the network, by what it is.

    Raises:
        ConfigError: There are several of one.
    """
    found: dict[str, Path] = {}
    for name in (HEAD, PROJECTOR) if folder else ():
        assert folder is not None
        files = sorted(folder.glob(f"{name}--*checkpoint.pt"))
        if len(files) > 1:
            raise ConfigError(
                f"actor.model.model_path: {folder} has {len(files)} files {name}--*: {', '.join(p.name for p in files)}; "
                "leave one"
            )
        found.update((name, file) for file in files)
    return found


def find_statistics(options: Mapping[str, Any], folder: Path | None, config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the statistics by which actions are scaled: those of `kwargs`, or those of the model; none for the bounds of the
    action space, and for a model that comes from no folder.

    Args:
        options: `actor.model.kwargs`.
        folder: The model's.
        config: Its config.json.

    Raises:
        ConfigError: A folder has none: its actions would be scaled otherwise than in its demonstrations.
    """
    source = options.get("statistics")
    if source == BOUNDS:
        return {}
    if source:
        return read_statistics(path_of(source))
    file = None if folder is None else folder / STATISTICS
    statistics = read_statistics(file) if file is not None and file.is_file() else dict(config.get("norm_stats") or {})
    if not statistics and folder is not None:
        raise ConfigError(
            f"actor.model.model_path is {str(folder)!r}, whose actions are scaled by a dataset's statistics; looked for "
            f"{folder / STATISTICS} and norm_stats in its config.json: there are none. Name a file: "
            f"actor.model.kwargs.statistics=FILE; or {BOUNDS}, for the bounds of the action space"
        )
    return statistics


def check_folder(cfg: ModelConfig) -> None:
    """Refuses a model's folder without weights or statistics.

    Raises:
        ConfigError: Says what is missing.
    """
    require_weights(cfg.model_path)
    if (folder := folder_of(cfg)) is not None:
        beside(folder)
        find_statistics(cfg.kwargs, folder, read_config(folder))


def load_beside(
    files: dict[str, Path], width: int, dim: int, state: int
) -> tuple[ActionHead | None, ProprioProjector | None]:
    """Head and projector, with weights where there is a file of them; None without components (`dim`) or numbers (`state`)."""
    from rlhpc.embodied.models.prismatic import ActionHead, ProprioProjector

    head = _loaded(ActionHead(width, dim), files.get(HEAD)) if dim else None
    return head, _loaded(ProprioProjector(state, width), files.get(PROJECTOR)) if state else None


def _loaded(module: Any, file: Path | None) -> Any:
    if file is not None:
        try:
            weights: dict[str, Tensor] = torch.load(file, map_location="cpu", weights_only=True)
            module.load_state_dict({name.removeprefix("module."): value for name, value in weights.items()})
        except Exception as error:
            raise ConfigError(
                f"actor.model.model_path: {file} does not fit this environment's actions and state: {error}"
            ) from error
    return module


def load_ours(policy: nn.Module, folder: Path | None) -> None:
    """Gives a policy the value head and the log-std that its folder has, if they fit it."""
    if folder is not None and (folder / OURS).is_file():
        own = policy.state_dict()
        found = load_tensors(folder / OURS).items()
        fitting = {name: value for name, value in found if name in own and own[name].shape == value.shape}
        policy.load_state_dict(fitting, strict=False)


def eye_of(config: OpenVLAConfig, settings: dict[str, Any], space: Any, crop: bool) -> Eye:
    """How it takes pictures.

    Args:
        config: Of the model.
        settings: Of its image processor.
        space: The observations, whose pictures must be square unless they are stretched.
        crop: The middle 90 % are shown, as to models whose training pictures were cropped at random.

    Raises:
        ConfigError: Its vision transformers want pictures of different sizes, or the pictures would have to be cut.
    """
    sizes = set(config.image_sizes)
    if len(sizes) > 1:
        raise ConfigError(f"the model's config.json has image_sizes {config.image_sizes}; they must be equal")
    strategy = settings.get("image_resize_strategy", getattr(config, "image_resize_strategy", "resize-naive"))
    for key, box in boxes_of(space).items():
        if len(box.shape) == 3 and strategy != "resize-naive" and box.shape[0] != box.shape[1]:
            raise ConfigError(
                f"the model's image_resize_strategy is {strategy!r}, which takes square pictures here; {key or 'this'} is "
                f"{box.shape[0]} x {box.shape[1]}"
            )
    means, stds = (
        settings.get(f"{name}s") or [getattr(shape, name) for shape in config.shapes] for name in ("mean", "std")
    )
    return Eye(sizes.pop(), means, stds, bicubic=True, middle=0.9 if crop else 1.0)


class Released(Protocol):
    """What of a policy is written.

    Attributes:
        vlm: The network, with adapters or without.
        source: The folder that it was read from; None for a built-in one.
        tokenizer, eye: Written where there was no such folder.
        statistics: That scale actions and state, by dataset.
        action_head, proprio_projector: OFT's.
    """

    vlm: Any
    source: Path | None
    tokenizer: Any
    eye: Eye
    statistics: dict[str, Any]
    action_head: ActionHead | None
    proprio_projector: ProprioProjector | None

    def state_dict(self) -> dict[str, Tensor]:
        """All its tensors, ours among them."""


def release(policy: Released, folder: Path, step: int) -> None:
    """Writes a policy as OpenVLA's folders are, with adapters merged, and beside.

    Args:
        policy: With its weights.
        folder: That is there.
        step: For the names of files.
    """
    if policy.source is not None:  # the tokenizer, the image processor, and the code that its configuration names
        for file in policy.source.iterdir():
            if file.suffix in (".json", ".model", ".py", ".txt") and ".index." not in file.name:
                shutil.copyfile(file, folder / file.name)
    else:
        policy.tokenizer.save_pretrained(folder)
        _write_json(folder / "preprocessor_config.json", _processor(policy.eye, policy.vlm.config))
    vlm: Any = policy.vlm
    weights = dict(full_weights(vlm, lambda tensor: tensor))
    vlm.config.norm_stats = policy.statistics or None
    vlm.save_pretrained(folder, state_dict=weights)
    if policy.statistics:
        _write_json(folder / STATISTICS, policy.statistics)
    parts: dict[str, nn.Module | None] = {HEAD: policy.action_head, PROJECTOR: policy.proprio_projector}
    for name, module in parts.items():
        if module is not None:
            torch.save(module.state_dict(), folder / f"{name}--{step}_checkpoint.pt")
    from safetensors.torch import save_file

    if is_lora(vlm):
        adapter = folder / "lora_adapter"
        vlm.peft_config[ADAPTER].save_pretrained(str(adapter))
        named = {
            f"base_model.model.{name}": value for name, value in adapter_weights(vlm, lambda tensor: tensor).items()
        }
        save_file(named, adapter / "adapter_model.safetensors")
    ours = {name: value for name, value in policy.state_dict().items() if name.startswith(_PARTS)}
    if ours:
        save_file(ours, folder / OURS)


def _processor(eye: Eye, config: OpenVLAConfig) -> dict[str, Any]:
    """preprocessor_config.json."""
    count = len(eye.means)
    return {
        "image_processor_type": "PrismaticImageProcessor", "image_resize_strategy": "resize-naive",
        "use_fused_vision_backbone": count > 1, "input_sizes": [[3, size, size] for size in config.image_sizes],
        "interpolations": ["bicubic"] * count, "means": [list(mean) for mean in eye.means],
        "stds": [list(std) for std in eye.stds],
    }  # fmt: skip


def _write_json(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n")
