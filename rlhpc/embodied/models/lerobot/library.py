"""Loader of LeRobot's policies and processors from a folder."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlhpc.embodied.config.model_options import LerobotPiOptions
from rlhpc.embodied.models.lerobot import openpi_folder
from rlhpc.embodied.models.lerobot.checkpoint import FolderDescription
from rlhpc.embodied.python_env import importable, lerobot_error
from rlhpc.jobs.paths import MODEL
from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.files import expand_home, read_json
from rlhpc.runtime.scratch import temporary_folder
from rlhpc.runtime.text import first_line
from rlhpc.runtime.torch_adapter import import_torchvision

#: Keys of config.json that options of `actor.model.kwargs` replace.
_REPLACED_KEYS = {"chunk_size", "n_action_steps", "train_expert_only"}


def load(description: FolderDescription, vlm: str | None = None) -> Any:
    """Loads the policy of a folder, with its weights, on the CPU.

    Args:
        description: Description of the folder.
        vlm: Folder that replaces the vision-language model that the configuration names; the weights come from the
            policy's folder.

    Raises:
        ConfigError: LeRobot is not installed, or cannot load the policy.
    """
    if not importable():
        raise lerobot_error(f"model_type lerobot ({description.path})")
    import_torchvision()
    from lerobot.configs.policies import PreTrainedConfig
    from lerobot.policies.factory import get_policy_class

    try:
        with lerobot_folder(description) as folder:
            config = PreTrainedConfig.from_pretrained(folder)
        # The folder has all weights, so nothing is downloaded.
        overrides = {"device": "cpu", "pretrained_backbone_weights": None, "load_vlm_weights": False}
        overrides |= {"vlm_model_name": vlm} if vlm else {}
        for name in _REPLACED_KEYS & description.config.keys():
            setattr(config, name, description.config[name])
        is_pi = description.family in ("pi0", "pi05")
        if is_pi:  # bfloat16 would round small optimizer steps away
            overrides |= {"dtype": "float32", "compile_model": False}
        saved_values = {name: getattr(config, name) for name in overrides if hasattr(config, name)}
        for name in saved_values:
            setattr(config, name, overrides[name])
        if is_pi:
            from rlhpc.embodied.models.lerobot import openpi

            openpi.patch_lerobot()
            policy = openpi.load(get_policy_class(description.family), config, description.path / MODEL)
        else:
            policy = get_policy_class(description.family).from_pretrained(description.path, config=config, strict=True)
    except Exception as error:  # LeRobot's parsers and networks raise many types of errors
        raise ConfigError(
            f"actor.model.model_path: lerobot cannot load {description.path}: {type(error).__name__}: {first_line(error)}"
        ) from error
    for name, saved_value in saved_values.items():  # so that `save_pretrained` writes the folder's values
        setattr(policy.config, name, saved_value)
    return policy


@contextmanager
def lerobot_folder(description: FolderDescription) -> Iterator[Path]:
    """Yields a folder with a policy's configuration and processors in LeRobot's format.

    For an openpi folder, this is a temporary folder with converted files; otherwise it is the policy's folder.
    """
    if not description.is_openpi:
        yield description.path
        return
    with temporary_folder("lerobot") as folder:
        for name, content in openpi_folder.processor_files(description.config).items():
            (folder / name).write_text(json.dumps(content))
        yield folder


class Processors:
    """Pre- and postprocessor of a policy, which normalise by the statistics of the folder or of a dataset.

    Args:
        description: Description of the folder.
        config: Configuration of the policy.
        statistics: A LeRobot dataset's folder, or its stats.json (of an openpi folder, openpi's norm_stats.json); None takes
            the policy folder's statistics.
        vlm: See `load`.

    Raises:
        ConfigError: Statistics are missing, or the processors cannot be loaded.
    """

    def __init__(self, description: FolderDescription, config: Any, statistics: Any, vlm: str | None = None) -> None:
        self._path = description.path
        self._description = description
        self._config = config
        self._vlm = vlm
        if description.is_openpi:
            columns = openpi_folder.lerobot_statistics(statistics, description.path, description.config)
            self._stats: Any = {
                name: {stat: torch.tensor(row) for stat, row in rows.items()} for name, rows in columns.items()
            }
        else:
            self._stats = None if statistics is None else _read_statistics(expand_home(str(statistics)))
        if self._stats is None and not (description.path / "policy_preprocessor.json").is_file():
            raise ConfigError(
                f"actor.model.model_path: {description.path} has no policy_preprocessor.json; name the dataset whose "
                "statistics scale its actions: actor.model.kwargs.statistics"
            )
        self._tokenizer_name = _find_tokenizer_name(description.path)
        self._by_device: dict[str, tuple[Any, Any]] = {}
        self.for_device(torch.device("cpu"))

    def for_device(self, device: torch.device) -> tuple[Any, Any]:
        """Returns both processors for inputs on a device."""
        if str(device) not in self._by_device:
            self._by_device[str(device)] = self._build_processors(str(device))
        return self._by_device[str(device)]

    def preprocess(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Converts a batch to the inputs of the policy's network."""
        return self.for_device(_find_device(batch))[0](batch)

    def postprocess(self, actions: Tensor) -> Tensor:
        """Converts the network's actions to the environment's units."""
        return self.for_device(actions.device)[1](actions).to(actions.device)

    def save(self, folder: Path) -> None:
        """Writes both processors to the policy's folder."""
        for processor in self.for_device(torch.device("cpu")):
            for step in processor.steps:
                if self._vlm and hasattr(step, "tokenizer_name"):
                    step.tokenizer_name = self._tokenizer_name or getattr(self._config, "vlm_model_name", None)
            processor.save_pretrained(folder)

    def _build_processors(self, device: str) -> tuple[Any, Any]:
        normalizer_overrides: dict[str, Any] = {} if self._stats is None else {"stats": self._stats}
        tokenizer_overrides = {"tokenizer_processor": {"tokenizer_name": self._vlm}} if self._vlm else {}
        with lerobot_folder(self._description) as folder:
            return self._load_processors(folder, device, normalizer_overrides, tokenizer_overrides)

    def _load_processors(
        self, folder: Path, device: str, normalizer_overrides: dict[str, Any], tokenizer_overrides: dict[str, Any]
    ) -> tuple[Any, Any]:
        from lerobot.policies.factory import make_pre_post_processors

        kwargs: dict[str, Any] = {"dataset_stats": self._stats}
        if (folder / "policy_preprocessor.json").is_file():
            kwargs = {
                "pretrained_path": str(folder),
                "preprocessor_overrides": {
                    "device_processor": {"device": device},
                    "normalizer_processor": normalizer_overrides,
                    **tokenizer_overrides,
                },
                "postprocessor_overrides": {"unnormalizer_processor": normalizer_overrides},
            }
        try:
            preprocessor, postprocessor = make_pre_post_processors(self._config, **kwargs)
        except Exception as error:  # the processors' steps raise many types of errors
            raise ConfigError(
                f"actor.model.model_path: lerobot cannot load the processors of {self._path}: "
                f"{type(error).__name__}: {first_line(error)}"
            ) from error
        if isinstance(options := self._description.options, LerobotPiOptions):
            _apply_prompt_options(preprocessor, options)
        return preprocessor, postprocessor


def _apply_prompt_options(preprocessor: Any, options: LerobotPiOptions) -> None:
    """Sets the prompts of a preprocessor of π0 or π0.5 by `discrete_state_input` and `prompt_tokens`.

    Without the state, a prompt is the instruction and an end of line, as π0's.
    """
    from lerobot.policies.pi0.processor_pi0 import Pi0NewLineProcessor
    from lerobot.policies.pi05.processor_pi05 import Pi05PrepareStateTokenizerProcessorStep
    from lerobot.processor import TokenizerProcessorStep

    steps = list(preprocessor.steps)
    prompts: dict[bool, Any] = {False: Pi0NewLineProcessor, True: Pi05PrepareStateTokenizerProcessorStep}
    for i, step in enumerate(steps):
        has_state = options.discrete_state_input
        if has_state is not None and isinstance(step, prompts[not has_state]):
            steps[i] = prompts[has_state]()
        if options.prompt_tokens is not None and isinstance(step, TokenizerProcessorStep):
            step.max_length = options.prompt_tokens
    preprocessor.steps = steps


def _find_tokenizer_name(folder: Path) -> str | None:
    """Returns the name of the tokenizer in a folder's preprocessor; None if the preprocessor has no tokenizer."""
    try:
        steps = read_json((folder / "policy_preprocessor.json").read_bytes())["steps"]
        return next((step["config"]["tokenizer_name"] for step in steps if "tokenizer_name" in step["config"]), None)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _find_device(batch: dict[str, Any]) -> torch.device:
    return next(tensor.device for tensor in batch.values() if isinstance(tensor, Tensor))


def _read_statistics(path: Path) -> dict[str, dict[str, Tensor]]:
    file = path / "meta" / "stats.json" if path.is_dir() else path
    try:
        statistics_content = read_json(file.read_bytes())
        stats = {
            name: {key: torch.tensor(statistic, dtype=torch.float32) for key, statistic in column_statistics.items()}
            for name, column_statistics in statistics_content.items()
        }
        if "action" not in stats:
            raise KeyError("action")
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise ConfigError(
            f"actor.model.kwargs.statistics: {file} is not a LeRobot dataset's stats.json: {error!r}"
        ) from error
    return stats
