"""Contents of a run's bundle: which files go in, under which names, without secrets.

config.yaml, sft.yaml          the configuration as it was run, with inputs and outputs inside the bundle's folder
bundle.json                    what `rlhpc reproduce` reads
environment/packages.txt       the installed packages
code/<role>/, code/<role>.diff the code at its commit with its changes, and the changes alone
    code/modules/                  the user's modules
workflow/                      the workflow
inputs/<n>-<name>              data sets and models, if they are included
run/                           metrics, evaluations, checkpoints' manifests, report, logs and batch scripts of the run
"""

from __future__ import annotations

import json
import os
import shlex
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from rlhpc import share
from rlhpc.checkpoint.manifest import digest, seal
from rlhpc.config.yaml_files import dump_yaml
from rlhpc.jobs.paths import COMPLETE, MANIFEST, RunPaths
from rlhpc.jobs.segment import SegmentJournal
from rlhpc.jobs.shared_files import read_json_file
from rlhpc.jobs.state import OVER, run_state
from rlhpc.metrics.provenance import read_provenance
from rlhpc.publishing.code import add_code
from rlhpc.publishing.file_set import BundleFile, FileSet
from rlhpc.publishing.inputs import Inputs
from rlhpc.publishing.layout import CONFIG, FORMAT, PACKAGES, RECORD, RUN, RUNS, SFT_CONFIG, WORKFLOW
from rlhpc.publishing.promise import broken_promises
from rlhpc.runs.configuration import load_config
from rlhpc.runs.run_identity import read_source
from rlhpc.runs.task_type import task_type_of
from rlhpc.runtime.errors import ConfigError, RlhpcError
from rlhpc.runtime.files import expand_home, read_file, read_json, read_yaml_file
from rlhpc.runtime.log_sizes import LOG_SIZES
from rlhpc.runtime.redaction import Redactor, secret_values

#: Files of a run folder that a bundle has besides its provenance and state, as patterns below it.
_RESULTS = (
    "metrics*.jsonl", "attendance.jsonl", "segments/*.json", "eval/**/*", "report/**/*",
    "logs/**/*", "submit/*.sh",
)  # fmt: skip
_NOT_RESULTS = ("logs/**/profiles/*", f"logs/**/{LOG_SIZES}", "**/.*", "**/*.lease", "**/*.tmp")


@dataclass(frozen=True)
class BundleOptions:
    """Choices of the user.

    Attributes:
        checkpoints, inputs: `reference` (checksums and sizes) or `include` (the files, too).
        code: `include` (the files of the commit) or `commit` (its name and the changes).
        author, licence: Person and licence (an address or SPDX identifier) of the bundle; "" if not given.
    """

    checkpoints: str = "reference"
    inputs: str = "reference"
    code: str = "include"
    author: str = ""
    licence: str = ""


def gather_contents(paths: RunPaths, options: BundleOptions) -> tuple[FileSet, dict[str, Any]]:
    """Returns the files of a run's bundle, and its record (`bundle.json`), which is one of them.

    Raises:
        ConfigError: The run is still running, has no readable configuration, or has a file that must not be in a bundle.
    """
    run_state_name, _ = run_state(paths)
    status = read_json_file(paths.driver_state) or {}
    step = status.get("step", 0)
    if run_state_name not in OVER:
        raise ConfigError(
            f"{paths.root}: the run is {run_state_name}, at step {step} of {status.get('max_steps', '?')}; a bundle "
            f"is of a run that "
            f"has ended: wait for it, or end it with rlhpc cancel {paths.root}"
        )
    config = _read_config(paths.config)
    provenance = read_provenance(paths)
    files = FileSet(
        Redactor.of_user(
            [
                *secret_values(config, is_config=True),
                *_read_referenced_variables(config),
                *_read_registry_secrets(paths),
            ]
        )
    )
    inputs = Inputs(files, are_included=options.inputs == "include", workflow_outputs=_workflow_outputs(paths))
    config = _make_portable(config, paths, inputs)
    sft_config = _read_sft(paths, config)
    if sft_config is not None:
        config["workflow"]["sft"] = SFT_CONFIG
        _add_config(files, SFT_CONFIG, _make_portable(sft_config, paths, inputs))
    _add_config(files, CONFIG, config)
    for path in _iter_results(paths):
        files.add_file(f"{RUN}/{path.relative_to(paths.root)}", path)
    files.add_json(f"{RUN}/{paths.provenance.name}", _make_public_provenance(provenance))
    _add_workflow(files)
    _add_packages(files, paths, provenance)
    code_entries = add_code(files, paths, provenance, is_included=options.code == "include")
    config_source, overrides = _read_command(paths, provenance)
    steps = paths.complete_steps()
    record = {
        "format": FORMAT,
        "run": paths.root.name,
        "state": run_state_name,
        "global_step": step,
        "max_steps": status.get("max_steps"),
        "stop_reason": status.get("stop_reason"),
        "created": provenance.get("created"),
        "updated": status.get("updated"),
        "versions": provenance.get("versions") or {},
        "system": {**(provenance.get("system") or {}), "cpus_granted": provenance.get("cpus_granted")},
        "command": {"config": config_source, "overrides": overrides},
        "not_promised": broken_promises(config, provenance, run_state_name),
        "inputs": inputs.record,
        "checkpoints": [
            _add_checkpoint(files, step, folder, options.checkpoints == "include") for step, folder in steps
        ],
        "exports": [_reference(folder) for folder in sorted((paths.root / "export").glob("*")) if folder.is_dir()],
        "code": code_entries,
        "author": options.author,
        "licence": options.licence,
    }
    record["redactions"] = dict(sorted(files.redactor.counts.items()))
    record = files.redactor.value(record)
    files.add_json(RECORD, record)
    return files, record


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config = read_yaml_file(path)
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    if not isinstance(config, dict) or not isinstance(config.get("runner"), dict):
        raise ConfigError(f"{path}: it is not the configuration of a run")
    config.setdefault("workflow", {})
    return config


def _add_config(files: FileSet, name: str, config: dict[str, Any]) -> None:
    """Adds a configuration; redacts values instead of text, so that the file stays YAML."""
    files.files[name] = BundleFile(name, dump_yaml(files.redactor.config(config)).encode())


def _make_portable(config: dict[str, Any], paths: RunPaths, inputs: Inputs) -> dict[str, Any]:
    """Returns a configuration that reads inputs from `inputs` and writes the run to `runs` in the working directory."""
    run_dir = str(config["runner"].get("run_dir") or RUNS)
    prefixes = sorted(
        {run_dir, str(Path(run_dir).absolute()), str(paths.root.parent)}, key=lambda path: (-len(path), path)
    )

    def move_path(config_value: Any, key: str) -> Any:
        if isinstance(config_value, dict):
            return {
                name: move_path(child, f"{key}.{name}" if key else str(name)) for name, child in config_value.items()
            }
        if isinstance(config_value, list):
            return [move_path(child, f"{key}[{index}]") for index, child in enumerate(config_value)]
        if not isinstance(config_value, str):
            return config_value
        if key == "runner.run_dir":
            return RUNS
        for prefix in prefixes:
            if config_value.startswith(f"{prefix}/") and inputs.is_made(config_value):
                return f"{RUNS}/{config_value.removeprefix(f'{prefix}/')}"
            if key.startswith("workflow.") and config_value.endswith(f"={prefix}"):  # runner.run_dir of the SFT run
                return f"{config_value.removesuffix(prefix)}{RUNS}"
        return inputs.move_path(config_value, key)

    portable: dict[str, Any] = move_path(config, "")
    return portable


def _workflow_outputs(paths: RunPaths) -> list[Path]:
    """Returns the files and folders that the workflow makes before training: the SFT run, and the expert's episodes."""
    try:
        cfg = load_config(paths.config, check=False, site="")
        preparation = task_type_of(cfg).offline.preparation(cfg)
    except RlhpcError:  # such as a task type of a plugin that is not installed here
        return []
    outputs = [paths.root]
    if preparation.sft is not None:
        outputs.append(paths.root.parent / _find_sft_name(preparation.sft[1]))
    if preparation.demos is not None:
        outputs.append(expand_home(preparation.demos[0]).absolute())
    return outputs


def _find_sft_name(overrides: Sequence[Any]) -> str:
    """Returns the name of the SFT run, from the overrides that it is started with; "" if they do not name it."""
    override_parts = [str(override).partition("=") for override in overrides]
    return next((name for key, _, name in reversed(override_parts) if key == "runner.name"), "")


def _read_sft(paths: RunPaths, config: dict[str, Any]) -> dict[str, Any] | None:
    """Returns the configuration with which the SFT run before a run was trained; None if there is no SFT run."""
    if not (config.get("workflow") or {}).get("sft"):
        return None
    name = _find_sft_name(config["workflow"].get("sft_overrides") or ())
    folder = paths.root.parent / name
    if not name or not (folder / CONFIG).is_file():
        raise ConfigError(
            f"{paths.root}: the run starts from an SFT run (workflow.sft), whose folder {folder} has no {CONFIG}; a bundle "
            "needs that run's folder beside this one, and workflow.sft_overrides with its runner.name"
        )
    return _read_config(folder / CONFIG)


def _iter_results(paths: RunPaths) -> Iterator[Path]:
    """Yields the regular files of a run folder that belong into a bundle, sorted. Follows no link."""
    root = paths.root
    selected_paths = {path for path in (paths.provenance, paths.driver_state) if path.exists()}
    for pattern in _RESULTS:
        selected_paths |= set(root.glob(pattern))
    for pattern in _NOT_RESULTS:
        selected_paths -= set(root.glob(pattern))
    for path in sorted(selected_paths):
        parents = [path, *path.relative_to(root).parents]
        if stat.S_ISREG(path.lstat().st_mode) and not any((root / parent).is_symlink() for parent in parents):
            yield path


def _add_checkpoint(files: FileSet, step: int, folder: Path, is_included: bool) -> dict[str, Any]:
    """Adds a checkpoint's manifest, and its files if they are included; returns its entry in the record.

    A text of an included checkpoint is redacted as all texts are, and the manifest then has the new checksum.
    """
    manifest = read_json_file(folder / MANIFEST) or {}
    listed_files = {str(name): dict(file_facts) for name, file_facts in (manifest.get("files") or {}).items()}
    checkpoint_entry = {"global_step": step, "files": listed_files, "included": is_included}
    name = f"{RUN}/{folder.relative_to(folder.parents[1])}"
    if not is_included:
        files.add_file(f"{name}/{MANIFEST}", folder / MANIFEST)
        return checkpoint_entry
    for file in sorted(listed_files):
        files.add_file(f"{name}/{file}", folder / file)
        num_bytes, checksum = files.files[f"{name}/{file}"].checksum()
        listed_files[file] = {"sha256": checksum, "size": num_bytes}
    manifest_bytes = json.dumps({**manifest, "files": listed_files}, indent=1, sort_keys=True).encode() + b"\n"
    files.files[f"{name}/{MANIFEST}"] = BundleFile(f"{name}/{MANIFEST}", manifest_bytes)
    files.files[f"{name}/{COMPLETE}"] = BundleFile(f"{name}/{COMPLETE}", seal(manifest_bytes))
    return checkpoint_entry


def _reference(folder: Path) -> dict[str, Any]:
    """Returns names, sizes and checksums of the files in a folder."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    checksums = {str(path.relative_to(folder)): digest(path) for path in files}
    return {"name": folder.name, "files": {name: {"sha256": sha, "size": n} for name, (n, sha) in checksums.items()}}


def _add_workflow(files: FileSet) -> None:
    """Adds the workflow's files."""
    folder = share.path("workflow")
    for path in sorted(folder.rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts and not path.name.startswith("."):
            files.add_file(f"{WORKFLOW}/{path.relative_to(folder)}", path, is_code=True)


def _add_packages(files: FileSet, paths: RunPaths, provenance: dict[str, Any]) -> None:
    name = str(provenance.get("packages") or "")
    try:
        list_text = read_file(paths.provenance_files / Path(name).name).decode() if name else ""
    except (OSError, ValueError):
        list_text = ""
    versions = provenance.get("versions") or {}  # all that runs of earlier versions have
    list_text = list_text or "".join(
        f"{package}=={versions[package]}\n" for package in sorted(versions) if package != "python"
    )
    files.add_text(PACKAGES, list_text)


def _read_command(paths: RunPaths, provenance: dict[str, Any]) -> tuple[str, list[str]]:
    """Returns configuration file and overrides with which the run was started; ("", []) if they are not known."""
    for segment in paths.submitted_segments() if paths.submit.is_dir() else []:
        config_source, overrides = read_source(SegmentJournal(paths, segment).config)
        if config_source:
            folder = str(provenance.get("folder") or "")
            return (
                os.path.relpath(config_source, folder)
                if folder and config_source.startswith(f"{folder}/")
                else config_source
            ), overrides
    try:
        command_words = shlex.split(str(provenance.get("command") or ""))
    except ValueError:
        return "", []
    command_words = command_words[command_words.index("train") + 1 :] if "train" in command_words else []
    files = [
        command_word
        for command_word in command_words
        if command_word.endswith((".yaml", ".yml")) and "=" not in command_word
    ]
    return (files[0] if files else ""), [
        command_word for command_word in command_words if "=" in command_word and not command_word.startswith("-")
    ]


def _make_public_provenance(record: dict[str, Any]) -> dict[str, Any]:
    """Returns a provenance record without account names and process ids, which have no meaning on other machines."""
    left_out = ("user", "pid", "folder", "top")
    public_record: Any = {
        key: [_make_public_provenance(child) if isinstance(child, dict) else child for child in record_value]
        if isinstance(record_value, list) else {name: child for name, child in record_value.items() if name != "JOB_ACCOUNT"}
        if isinstance(record_value, dict) else record_value
        for key, record_value in record.items()
        if key not in left_out
    }  # fmt: skip
    return dict(public_record)


def _read_referenced_variables(config: Any) -> list[str]:
    """Returns the values of the environment's variables that a configuration refers to, without paths."""
    if isinstance(config, dict):
        return [variable_value for child in config.values() for variable_value in _read_referenced_variables(child)]
    if isinstance(config, list):
        return [variable_value for child in config for variable_value in _read_referenced_variables(child)]
    if not isinstance(config, str) or "${oc.env:" not in config:
        return []
    variable_names = [
        reference_text.partition("}")[0].partition(",")[0] for reference_text in config.split("${oc.env:")[1:]
    ]
    variable_values = [os.environ.get(name.strip(), "") for name in variable_names]
    return [
        variable_value
        for variable_value in variable_values
        if variable_value and not Path(variable_value).is_absolute()
    ]


def _read_registry_secrets(paths: RunPaths) -> list[str]:
    """Returns the keys of the run's processes and the other secrets in its registry."""
    secrets = []
    for path in sorted(paths.registry.rglob("*.json")) if paths.registry.is_dir() else []:
        try:
            registry_content = read_json(read_file(path, 1 << 20))
        except (OSError, ValueError):
            continue
        if path.name == "keys.json" and isinstance(registry_content, list):
            secrets += [key for key in registry_content if isinstance(key, str)]
        else:
            secrets += secret_values(registry_content, is_config=False)
    return secrets
