"""RO-Crate metadata of a bundle: the JSON-LD of a Workflow Run RO-Crate 0.5.

Profiles: https://w3id.org/ro/crate/1.1, https://w3id.org/workflowhub/workflow-ro-crate/1.0 and
https://w3id.org/ro/wfrun/workflow/0.5. The workflow is the main entity; the run is an action whose instrument it is. The
configuration and the inputs are the action's objects, and the files of the run are its results.
"""

from __future__ import annotations

import json
import mimetypes
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote

from rlhpc.publishing.layout import CONFIG, INPUTS, METADATA, RUN, SFT_CONFIG, WORKFLOW

_CRATE, _WORKFLOW_CRATE = "https://w3id.org/ro/crate/1.1", "https://w3id.org/workflowhub/workflow-ro-crate/1.0"
_PROFILES = {
    "https://w3id.org/ro/wfrun/process/0.5": ("Process Run Crate", "0.5"),
    "https://w3id.org/ro/wfrun/workflow/0.5": ("Workflow Run Crate", "0.5"),
    _WORKFLOW_CRATE: ("Workflow RO-Crate", "1.0"),
}
#: Terms of the run profiles that are not in the context of RO-Crate 1.1.
_TERMS = {"sha256": "https://w3id.org/ro/terms/workflow-run#sha256"}
_PARAMETER = "https://bioschemas.org/profiles/FormalParameter/1.0-RELEASE"
_ACTION, _PROGRAM, _SNAKEMAKE, _AUTHOR, _CONFIGURATION = "#run", "#rlhpc", "#snakemake", "#author", "#configuration"
_SNAKEFILE = f"{WORKFLOW}/Snakefile"
_MEDIA_TYPES = {
    ".yaml": "application/yaml", ".yml": "application/yaml", ".jsonl": "application/jsonl",
    ".log": "text/plain", ".out": "text/plain", ".err": "text/plain", ".diff": "text/x-diff", ".smk": "text/plain",
    ".sha256": "text/plain", ".rst": "text/x-rst", ".md": "text/markdown", ".py": "text/x-python", ".sh": "application/x-sh",
}  # fmt: skip
_STATUS = "http://schema.org/{}ActionStatus"
_DEFAULT_LICENCE = "not given"


def metadata(record: Mapping[str, Any], checksums: Mapping[str, tuple[int, str]], folders: Sequence[str]) -> bytes:
    """Returns the content of `ro-crate-metadata.json`.

    Args:
        record: Content of `bundle.json`.
        checksums: Size and SHA-256 of each file of the bundle, by name.
        folders: Folders whose files have no entity of their own; `checksums.sha256` has them.
    """
    listed_names = [name for name in sorted(checksums) if not any(name.startswith(f"{folder}/") for folder in folders)]
    files = {name: _file(name, *checksums[name]) for name in listed_names}
    sections = [_folder(folder, checksums) for folder in folders]
    files[_SNAKEFILE] |= {
        "@type": ["File", "SoftwareSourceCode", "ComputationalWorkflow"],
        "name": "Workflow of rlhpc: train, evaluate, export, report",
        "programmingLanguage": {"@id": _SNAKEMAKE},
        "input": [{"@id": _CONFIGURATION}],
        "sdPublisher": {"@id": _AUTHOR},
    }
    files[CONFIG]["exampleOfWork"] = {"@id": _CONFIGURATION}
    reference_entities = [
        _describe_checkpoint(checkpoint_entry)
        for checkpoint_entry in record["checkpoints"]
        if not checkpoint_entry["included"]
    ]
    source_entities = [
        _describe_input(input_entry) for input_entry in record["inputs"] if not input_entry.get("included")
    ]
    inputs = [name for name in files if name.startswith(f"{INPUTS}/") or name in (CONFIG, SFT_CONFIG)]
    results = [name for name in files if name.startswith(f"{RUN}/")]
    is_finished = record["state"] == "finished"
    steps = f"{record['global_step']} of {record['max_steps']} training steps"
    action = {
        "@id": _ACTION,
        "@type": "CreateAction",
        "name": f"rlhpc run: {record['run']}",
        "description": f"{_format_command(record)}: {steps}",
        "instrument": {"@id": _SNAKEFILE},
        "object": _format_ids([*map(_id, inputs), *(source_entity["@id"] for source_entity in source_entities)]),
        "result": _format_ids(
            [*map(_id, results), *(reference_entity["@id"] for reference_entity in reference_entities)]
        ),
        "agent": {"@id": _AUTHOR},
        "actionStatus": {"@id": _STATUS.format("Completed" if is_finished else "Failed")},
        "startTime": _format_time(record["created"]),
        "endTime": _format_time(record["updated"]),
        **(
            {}
            if is_finished
            else {"error": f"the run is {record['state']}: {record['stop_reason'] or 'no reason given'}"}
        ),
    }
    root = {
        "@id": "./",
        "@type": "Dataset",
        "name": f"Reinforcement learning run {record['run']}",
        "description": f"Configuration, code, environment and results of the rlhpc run {record['run']}: {steps}.",
        "datePublished": action["endTime"] or action["startTime"],
        "license": _link_licence(record["licence"]),
        "conformsTo": _format_ids(_PROFILES),
        "hasPart": _format_ids([*map(_id, files), *(f"{folder}/" for folder in folders)]),
        "mainEntity": {"@id": _SNAKEFILE},
        "mentions": [
            {"@id": _ACTION},
            *({"@id": external_entity["@id"]} for external_entity in [*reference_entities, *source_entities]),
        ],
        "author": {"@id": _AUTHOR},
    }
    graph: list[dict[str, Any]] = [
        {
            "@id": METADATA,
            "@type": "CreativeWork",
            "conformsTo": _format_ids([_CRATE, _WORKFLOW_CRATE]),
            "about": {"@id": "./"},
        },
        root,
        *(
            {"@id": profile, "@type": "CreativeWork", "name": name, "version": version}
            for profile, (name, version) in _PROFILES.items()
        ),
        *files.values(),
        *sections,
        *reference_entities,
        *source_entities,
        action,
        _program(record),
        {
            "@id": _SNAKEMAKE,
            "@type": "ComputerLanguage",
            "name": "Snakemake",
            "identifier": {"@id": "https://snakemake.github.io"},
            "url": {"@id": "https://snakemake.github.io"},
            "version": record["versions"].get("snakemake", "unknown"),
        },
        {"@id": "https://snakemake.github.io", "@type": "WebPage", "name": "Snakemake"},
        {
            "@id": _CONFIGURATION,
            "@type": "FormalParameter",
            "additionalType": "File",
            "conformsTo": {"@id": _PARAMETER},
            "name": "run",
            "description": "configuration of the run",
            "valueRequired": True,
        },
        {"@id": _AUTHOR, "@type": "Person", "name": record["author"] or "not given"},
        *_list_licence_entities(record["licence"]),
    ]
    crate_content = {"@context": [f"{_CRATE}/context", _TERMS], "@graph": [_without_none(entity) for entity in graph]}
    return json.dumps(crate_content, indent=1, ensure_ascii=False, sort_keys=True).encode() + b"\n"


def _file(name: str, num_bytes: int, checksum: str) -> dict[str, Any]:
    suffix = f".{name.rpartition('.')[2]}"
    media_type = _MEDIA_TYPES.get(suffix) or mimetypes.types_map.get(suffix, "application/octet-stream")
    return {
        "@id": _id(name),
        "@type": "File",
        "name": name,
        "contentSize": str(num_bytes),
        "sha256": checksum,
        "encodingFormat": media_type,
    }


def _folder(folder: str, checksums: Mapping[str, tuple[int, str]]) -> dict[str, Any]:
    file_sizes = [num_bytes for name, (num_bytes, _) in checksums.items() if name.startswith(f"{folder}/")]
    return {
        "@id": f"{folder}/",
        "@type": "Dataset",
        "name": folder,
        "description": f"{len(file_sizes)} files, {sum(file_sizes)} bytes; checksums.sha256 has their checksums",
    }


def _describe_checkpoint(checkpoint_entry: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the entity of a checkpoint that is not in the bundle."""
    step = checkpoint_entry["global_step"]
    total_bytes = sum(int(file_facts["size"]) for file_facts in checkpoint_entry["files"].values())
    return {
        "@id": f"#checkpoint-{step}",
        "@type": "CreativeWork",
        "name": f"checkpoint of step {step}",
        "description": f"{len(checkpoint_entry['files'])} files, {total_bytes} bytes, not in this bundle",
        "identifier": [
            f"{name} sha256:{file_facts['sha256']}" for name, file_facts in sorted(checkpoint_entry["files"].items())
        ],
    }


def _describe_input(input_entry: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the entity of a data set or model that is not in the bundle."""
    name = str(input_entry.get("hub") or input_entry["name"].partition("/")[2])
    checksums = [
        f"{file or name} sha256:{file_facts['sha256']}"
        for file, file_facts in sorted((input_entry.get("files") or {}).items())
    ]
    return {
        "@id": f"#input-{quote(name, safe='')}",
        "@type": "CreativeWork",
        "name": name,
        "description": f"{input_entry['key']}, not in this bundle",
        "version": input_entry.get("commit"),
        "identifier": checksums or None,
    }


def _program(record: Mapping[str, Any]) -> dict[str, Any]:
    commits = [
        f"{code_entry['role']} at commit {code_entry['commit']}"
        for code_entry in record["code"]
        if code_entry.get("commit")
    ]
    return {
        "@id": _PROGRAM,
        "@type": "SoftwareApplication",
        "name": "rlhpc",
        "softwareVersion": record["versions"].get("rlhpc", "unknown"),
        "description": "; ".join(commits) or None,
    }


def _format_command(record: Mapping[str, Any]) -> str:
    command = record["command"]
    return " ".join(["rlhpc run", command["config"] or CONFIG, *command["overrides"]])


def _link_licence(licence: str) -> Any:
    return {"@id": _find_licence_address(licence)} if licence else _DEFAULT_LICENCE


def _find_licence_address(licence: str) -> str:
    return licence if "://" in licence else f"https://spdx.org/licenses/{licence}"


def _list_licence_entities(licence: str) -> list[dict[str, Any]]:
    if not licence:
        return []
    address = _find_licence_address(licence)
    return [{"@id": address, "@type": "CreativeWork", "name": licence, "description": f"licence {licence}"}]


def _format_time(unix_time: Any) -> str | None:
    """Converts an ISO 8601 time or seconds since 1970 to ISO 8601; returns None for other values."""
    if isinstance(unix_time, int | float):
        return datetime.fromtimestamp(unix_time, UTC).isoformat(timespec="seconds")
    return str(unix_time) if unix_time else None


def _format_ids(entity_ids: Any) -> list[dict[str, str]]:
    return [{"@id": name} for name in entity_ids]


def _id(name: str) -> str:
    """Returns the identifier of a file: its path, percent-encoded where a URL requires it."""
    return quote(name, safe="/=+,@()~!'")


def _without_none(entity: dict[str, Any]) -> dict[str, Any]:
    return {key: property_value for key, property_value in entity.items() if property_value is not None}
