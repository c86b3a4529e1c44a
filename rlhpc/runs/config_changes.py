"""Comparison of a configuration with a saved run: keys that may change within a run, and keys that may not.

The annotation of each field declares the effect of a change (`OnResume`). `EVALUATION` keys change the evaluation only.
`FREE` keys concern the machine, the length of the run and its segments. All other keys determine the training: a
configuration with another value of such a key belongs to another run.
"""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from omegaconf import OmegaConf

from rlhpc.config.schema import open_mapping_of
from rlhpc.config.sections import RunConfig
from rlhpc.config.typed import leaves, plain, select
from rlhpc.config.yaml_files import UniqueKeys
from rlhpc.jobs.paths import CONFIG, RunPaths
from rlhpc.runs.task_type import Cfg, TaskType, find_task_type, task_type_of
from rlhpc.runtime.errors import CheckpointError, ConfigError, UserError
from rlhpc.runtime.files import is_number, read_file, read_json, read_yaml, read_yaml_file
from rlhpc.runtime.key_metadata import OnResume
from rlhpc.runtime.text import first_line, printable

#: Maximum number of changes that a message lists; the message counts the remaining changes.
_MAX_LISTED = 6
#: Maximum number of characters of a value that is shown.
_MAX_CHARACTERS = 10_000


class KeyChange(NamedTuple):
    """Changed key with its values before and after the change."""

    key: str
    before: Any
    after: Any

    def __str__(self) -> str:
        return f"{self.key}: {_format_value(self.before)} → {_format_value(self.after)}"


def _format_value(config_value: Any) -> str:
    return (
        "null"
        if config_value is None
        else json.dumps(config_value, default=str)
        if not isinstance(config_value, str)
        else config_value or "''"
    )


def _list_plain_leaves(cfg: RunConfig | Mapping[str, Any]) -> dict[str, Any]:
    # Converts to the form that a file would have, so that tuples and other spellings of a number are no differences.
    return dict(leaves(yaml.safe_load(json.dumps(plain(cfg), default=str))))


def training_changes(
    old_config: RunConfig | Mapping[str, Any], new_config: RunConfig | Mapping[str, Any]
) -> list[KeyChange]:
    """Returns the changes that make `new_config` a different run from `old_config`.

    A key that only one side has does not count, because another version of rlhpc added or removed the key. A key of an open
    mapping, in which users choose the keys, does count if both sides have the mapping.
    """
    old_values, new_values = _list_plain_leaves(old_config), _list_plain_leaves(new_config)
    task_type = find_task_type(new_values.get("runner.task_type"))
    old_open, new_open = ({open_mapping_of(key) for key in values_by_key} for values_by_key in (old_values, new_values))
    shared_mappings = {path for path in old_open & new_open if path is not None}
    for values_by_key, other_values in ((old_values, new_values), (new_values, old_values)):
        for path in shared_mappings:
            if values_by_key.get(path) == {}:  # an empty mapping is a key of `values`
                del values_by_key[path]
        values_by_key.update(
            {
                key: None
                for key in other_values
                if key not in values_by_key and open_mapping_of(key) in shared_mappings and other_values[key] != {}
            }
        )
    return [
        KeyChange(key, old_values[key], new_values[key])
        for key in old_values
        if key in new_values
        and not _are_equal(key, old_values[key], new_values[key])
        and task_type.keys.on_resume(key) is OnResume.FIXED
        # A file keeps values from the environment as `${oc.env:…}`, so the value at that time is unknown.
        and "${" not in str(old_values[key])
    ]


def _are_equal(key: str, old_value: Any, new_value: Any) -> bool:
    """Returns whether values are equal. The dtype `auto` equals every dtype, because the nodes determine the dtype of a run
    with `auto`.
    """
    if old_value == new_value or (key.rpartition(".")[2] == "dtype" and "auto" in (old_value, new_value)):
        return True
    if isinstance(old_value, list) and isinstance(new_value, list) and len(old_value) == len(new_value):
        return all(_are_equal(key, *pair) for pair in zip(old_value, new_value, strict=True))
    if isinstance(old_value, Mapping) and isinstance(new_value, Mapping) and old_value.keys() == new_value.keys():
        return all(_are_equal(f"{key}.{name}", old_value[name], new_value[name]) for name in old_value)
    return False


def recorded_changes(saved_config: Path, cfg: RunConfig) -> list[str]:
    """Returns the changes of the training configuration since a saved one, for the run's record, as texts.

    Example: `actor.optim.lr: 0.001 → 0.0001`.

    Values other than numbers are left out, because they may contain secrets.

    Args:
        saved_config: File with the earlier configuration; a missing or broken file counts as equal.
        cfg: The present configuration.
    """
    try:
        saved_content = read_yaml(read_file(saved_config), UniqueKeys)
    except (OSError, ValueError, yaml.YAMLError):
        return []
    key_changes = training_changes(saved_content if isinstance(saved_content, dict) else {}, cfg)
    return [
        str(key_change) if all(value is None or is_number(value) for value in key_change[1:]) else key_change.key
        for key_change in key_changes
    ]


def training_fingerprint(cfg: RunConfig) -> str:
    """Returns the fingerprint of all keys that determine the training."""
    return _compute_fingerprint(cfg, OnResume.FIXED)


def evaluation_fingerprint(cfg: RunConfig) -> str:
    """Returns the fingerprint of the keys that determine only the evaluation of a checkpoint."""
    return _compute_fingerprint(cfg, OnResume.EVALUATION)


def _compute_fingerprint(cfg: RunConfig, on_resume: OnResume) -> str:
    config_keys = task_type_of(cfg).keys
    fixed_values = {
        key: value for key, value in _list_plain_leaves(cfg).items() if config_keys.on_resume(key) is on_resume
    }
    return hashlib.sha256(json.dumps(fixed_values, sort_keys=True).encode()).hexdigest()[:16]


def require_same_run(saved_config: Path, cfg: RunConfig, *, subject: str, way_out: str) -> None:
    """Checks that a configuration describes the same training as a saved configuration.

    Args:
        saved_config: File with the run's configuration; if the file is missing, every configuration passes.
        cfg: The present configuration.
        subject: Owner of the saved configuration, for the beginning of the message.
        way_out: Advice to the user, for the end of the message.

    Raises:
        ConfigError: The configurations differ; the message names the keys with both values. Or the file cannot be read.
    """
    try:
        saved_content = read_yaml(read_file(saved_config), UniqueKeys)
    except FileNotFoundError:
        return
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"{saved_config}: cannot be read: {error}. {way_out}") from None
    key_changes = training_changes(saved_content if isinstance(saved_content, dict) else {}, cfg)
    if not key_changes:
        return
    lines = "".join(f"\n  {key_change}" for key_change in key_changes[:_MAX_LISTED])
    omission_note = f"\n  and {len(key_changes) - _MAX_LISTED} more" if len(key_changes) > _MAX_LISTED else ""
    raise ConfigError(
        f"{subject} has another configuration ({shlex.quote(str(saved_config))}):{lines}{omission_note}\n{way_out}"
    )


def configuration_differences(runs: Mapping[str, RunPaths]) -> dict[str, Any]:
    """Returns the configuration keys in which runs differ, with the value of each run as JSON text.

    The value is None in a run whose configuration lacks the key. The names of the runs are not compared.

    Args:
        runs: Name → files of each run.

    Raises:
        UserError: A configuration cannot be read.
    """
    texts_by_run = {name: _list_json_leaves(name, paths.config) for name, paths in runs.items()}
    leaf_keys = sorted({key for leaf_texts in texts_by_run.values() for key in leaf_texts} - {"runner.name"})
    rows = [{"key": printable(key), "values": [texts_by_run[name].get(key) for name in runs]} for key in leaf_keys]
    return {"runs": list(runs), "rows": [row for row in rows if len(set(row["values"])) > 1]}


def _list_json_leaves(name: str, config: Path) -> dict[str, str]:
    try:
        config_content = read_yaml_file(config)
        if not isinstance(config_content, Mapping):
            raise ValueError("it is not a mapping of keys")
    except (OSError, ValueError, yaml.YAMLError) as error:
        cause_text = error.strerror if isinstance(error, OSError) else first_line(error)
        raise UserError(f"{config.name} of {name} cannot be read: {cause_text}") from None
    return {
        key: printable(json.dumps(value, default=str, ensure_ascii=False))[:_MAX_CHARACTERS]
        for key, value in leaves(config_content)
    }


def differing(cfg: RunConfig, saved_values: Mapping[str, Any], compared_keys: Sequence[str]) -> list[str]:
    """Returns a sentence for each key that differs between a checkpoint and a configuration.

    Args:
        cfg: The configuration.
        saved_values: Dotted key → value in the checkpoint. Missing keys and None values are skipped.
        compared_keys: Keys to compare.
    """
    differing_keys = []
    for key in compared_keys:
        saved_value, new_value = saved_values.get(key), plain(select(cfg, key), resolve=False)
        if saved_value is not None and str(saved_value).lower() != str(new_value).lower():
            differing_keys.append(f"{key} is {saved_value!r} there and {new_value!r} here")
    return differing_keys


def saved_values(path: Path, selected_keys: Sequence[str] = ()) -> dict[str, Any]:
    """Returns values from a JSON or YAML file of a checkpoint, by dotted key; empty if the file cannot be read.

    Args:
        path: The file.
        selected_keys: Keys to read; by default the keys at the top level.
    """
    try:
        file_content = (read_json if path.suffix == ".json" else read_yaml)(read_file(path))
        plain_values: Any = OmegaConf.to_container(OmegaConf.create(file_content)) if selected_keys else file_content
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    if not isinstance(plain_values, dict):
        return {}
    return (
        {key: OmegaConf.select(OmegaConf.create(plain_values), key) for key in selected_keys}
        if selected_keys
        else plain_values
    )


_TASK_TYPE_KEY = ("runner.task_type",)


def check_resume(task_type: TaskType[Cfg], cfg: Cfg, checkpoint: Path) -> None:
    """Checks that a checkpoint has the task type, the environment and the model of the configuration.

    Raises:
        CheckpointError: Keys differ; the message names the keys with both values.
    """
    # A checkpoint without config.yaml passes here; the ranks check it when they load it.
    differing_keys = differing(cfg, saved_values(checkpoint / CONFIG, _TASK_TYPE_KEY), _TASK_TYPE_KEY)
    differing_keys = differing_keys or task_type.checks.differences(cfg, checkpoint)
    if differing_keys:
        raise CheckpointError(
            f"runner.resume_dir: {checkpoint} is not of this run: {'; '.join(differing_keys)}. Go on with the checkpoint's "
            f"configuration, or start fresh with another runner.name.{task_type.checks.other_start}"
        )
