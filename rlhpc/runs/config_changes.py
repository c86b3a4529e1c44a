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
from rlhpc.jobs.paths import CONFIG
from rlhpc.runs.task_type import Cfg, TaskType, find_task_type, task_type_of
from rlhpc.runtime.errors import CheckpointError, ConfigError
from rlhpc.runtime.files import read_file, read_json, read_yaml
from rlhpc.runtime.key_metadata import OnResume

#: Maximum number of changes that a message lists; the message counts the remaining changes.
_MAX_LISTED = 6


class KeyChange(NamedTuple):
    """Changed key with its values before and after the change."""

    key: str
    before: Any
    after: Any

    def __str__(self) -> str:
        return f"{self.key}: {_format_value(self.before)} → {_format_value(self.after)}"


def _format_value(value: Any) -> str:
    return "null" if value is None else json.dumps(value, default=str) if not isinstance(value, str) else value or "''"


def _plain_leaves(cfg: RunConfig | Mapping[str, Any]) -> dict[str, Any]:
    # Converts to the form that a file would have, so that tuples and other spellings of a number are no differences.
    return dict(leaves(yaml.safe_load(json.dumps(plain(cfg), default=str))))


def training_changes(before: RunConfig | Mapping[str, Any], after: RunConfig | Mapping[str, Any]) -> list[KeyChange]:
    """Returns the changes that make `after` a different run from `before`.

    A key that only one side has does not count, because another version of rlhpc added or removed the key. A key of an open
    mapping, in which users choose the keys, does count if both sides have the mapping.
    """
    old_values, new_values = _plain_leaves(before), _plain_leaves(after)
    task_type = find_task_type(new_values.get("runner.task_type"))
    old_open, new_open = ({open_mapping_of(key) for key in values} for values in (old_values, new_values))
    shared_mappings = {path for path in old_open & new_open if path is not None}
    for values, other_values in ((old_values, new_values), (new_values, old_values)):
        for path in shared_mappings:
            if values.get(path) == {}:  # an empty mapping is a key of `values`
                del values[path]
        values.update(
            {
                key: None
                for key in other_values
                if key not in values and open_mapping_of(key) in shared_mappings and other_values[key] != {}
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


def _are_equal(key: str, before: Any, after: Any) -> bool:
    """Returns whether values are equal. The dtype `auto` equals every dtype, because the nodes determine the dtype of a run
    with `auto`.
    """
    if before == after or (key.rpartition(".")[2] == "dtype" and "auto" in (before, after)):
        return True
    if isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        return all(_are_equal(key, *values) for values in zip(before, after, strict=True))
    if isinstance(before, Mapping) and isinstance(after, Mapping) and before.keys() == after.keys():
        return all(_are_equal(f"{key}.{name}", before[name], after[name]) for name in before)
    return False


def training_fingerprint(cfg: RunConfig) -> str:
    """Returns the fingerprint of all keys that determine the training."""
    return _fingerprint(cfg, OnResume.FIXED)


def evaluation_fingerprint(cfg: RunConfig) -> str:
    """Returns the fingerprint of the keys that determine only the evaluation of a checkpoint."""
    return _fingerprint(cfg, OnResume.EVALUATION)


def _fingerprint(cfg: RunConfig, on_resume: OnResume) -> str:
    keys = task_type_of(cfg).keys
    values = {key: value for key, value in _plain_leaves(cfg).items() if keys.on_resume(key) is on_resume}
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]


def require_same_run(saved: Path, cfg: RunConfig, *, subject: str, way_out: str) -> None:
    """Checks that a configuration describes the same training as a saved configuration.

    Args:
        saved: File with the run's configuration; if the file is missing, every configuration passes.
        cfg: The present configuration.
        subject: Owner of the saved configuration, for the beginning of the message.
        way_out: Advice to the user, for the end of the message.

    Raises:
        ConfigError: The configurations differ; the message names the keys with both values. Or the file cannot be read.
    """
    try:
        content = read_yaml(read_file(saved), UniqueKeys)
    except FileNotFoundError:
        return
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"{saved}: cannot be read: {error}. {way_out}") from None
    changes = training_changes(content if isinstance(content, dict) else {}, cfg)
    if not changes:
        return
    lines = "".join(f"\n  {change}" for change in changes[:_MAX_LISTED])
    omission_note = f"\n  and {len(changes) - _MAX_LISTED} more" if len(changes) > _MAX_LISTED else ""
    raise ConfigError(
        f"{subject} has another configuration ({shlex.quote(str(saved))}):{lines}{omission_note}\n{way_out}"
    )


def differing(cfg: RunConfig, saved: Mapping[str, Any], keys: Sequence[str]) -> list[str]:
    """Returns a sentence for each key that differs between a checkpoint and a configuration.

    Args:
        cfg: The configuration.
        saved: Dotted key → value in the checkpoint. Missing keys and None values are skipped.
        keys: Keys to compare.
    """
    differences = []
    for key in keys:
        saved_value, new_value = saved.get(key), plain(select(cfg, key), resolve=False)
        if saved_value is not None and str(saved_value).lower() != str(new_value).lower():
            differences.append(f"{key} is {saved_value!r} there and {new_value!r} here")
    return differences


def saved_values(path: Path, keys: Sequence[str] = ()) -> dict[str, Any]:
    """Returns values from a JSON or YAML file of a checkpoint, by dotted key; empty if the file cannot be read.

    Args:
        path: The file.
        keys: Keys to read; by default the keys at the top level.
    """
    try:
        content = (read_json if path.suffix == ".json" else read_yaml)(read_file(path))
        values: Any = OmegaConf.to_container(OmegaConf.create(content)) if keys else content
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    if not isinstance(values, dict):
        return {}
    return {key: OmegaConf.select(OmegaConf.create(values), key) for key in keys} if keys else values


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
