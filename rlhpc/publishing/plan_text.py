"""Plan of a reproduction: how this installation differs from the bundle, and the text of the plan (command, code that would
run, differences, inputs).
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import rlhpc
from rlhpc.metrics.environment import package_list, parse_package_list, system_facts
from rlhpc.publishing.layout import CONFIG, PACKAGES, SFT_CONFIG
from rlhpc.publishing.reader import Bundle
from rlhpc.runtime.text import align_columns, cut
from rlhpc.runtime.trust import named_code

_MAX_LINES = 40


def render_command(record: Mapping[str, Any], command: Sequence[str], folder: Path) -> list[str]:
    """Returns the state of the recorded run, the command that repeats it, and the command that started it."""
    recorded_command = record["command"]
    command_words = [
        str(command_word)
        for command_word in (recorded_command.get("config") or CONFIG, *(recorded_command.get("overrides") or ()))
    ]
    return [
        f"{record['run']}: {record['state']} at step {record['global_step']} of {record.get('max_steps')}",
        "",
        f"command, in the folder {folder}",
        f"  {shlex.join(command)}",
        f"  (it was: rlhpc run {cut(shlex.join(command_words), 500)})",
    ]


def render_code(bundle: Bundle, differences: Differences, *, has_rlhpc: bool) -> list[str]:
    """Renders the code that would run: each repository with its files, and the modules that the configuration names.

    Args:
        has_rlhpc: Whether the run uses rlhpc of the bundle, and not the installed one.
    """
    lines = [
        line
        for code_entry in bundle.record["code"]
        for line in _render_repository(bundle, code_entry, differences, has_rlhpc)
    ]
    lines = lines or ["  rlhpc as it is installed here; the bundle has no code"]
    named_lines = _render_named_code(bundle)
    code_lines = ["", "what the configuration has run, or reads", *(f"  {line}" for line in _limit_lines(named_lines))]
    return ["", "code that would be run", *lines, *(code_lines if named_lines else [])]


def render_differences(differences: Differences) -> list[str]:
    """Returns tables of the packages and the facts about the machine that differ."""
    lines: list[str] = []
    if differences.packages:
        rows = align_columns([("package", "in the bundle", "here"), *differences.packages])
        lines += ["", "packages that differ", *(f"  {line}" for line in _limit_lines(rows))]
    if differences.system:
        rows = align_columns([("", "in the bundle", "here"), *differences.system])
        lines += ["", "machine", *(f"  {line}" for line in rows)]
    return lines


def render_inputs(record: Mapping[str, Any], paths: Mapping[str, Path | None]) -> list[str]:
    """Formats the source of each input, and the number of secrets that the bundle lacks.

    Args:
        paths: Name in the bundle → path here, or None if the input was not found.
    """
    lines: list[str] = []
    if record["inputs"]:
        lines += ["", "inputs", *(f"  {_render_input(input_entry, paths)}" for input_entry in record["inputs"])]
    if secrets := (record.get("redactions") or {}).get("secret"):
        lines += ["", f"{secrets} secrets were taken out of the bundle's texts; set those that the run needs"]
    return lines


def _render_repository(
    bundle: Bundle, code_entry: Mapping[str, Any], differences: Differences, has_rlhpc: bool
) -> Iterator[str]:
    commit_text = f" at commit {code_entry['commit']}" if code_entry.get("commit") else ""
    changes_text = f" with the changes in {code_entry['diff']}" if code_entry.get("diff") else ""
    remote_text = f" of {code_entry['remote']}" if code_entry.get("remote") else ""
    missing_text = f"; not complete: {code_entry['missing']}" if code_entry.get("missing") else ""
    origin_text = f"{code_entry.get('role')}{commit_text}{remote_text}{changes_text}"
    yield f"  {origin_text}: {code_entry.get('files', 0)} files{missing_text}"
    folder = code_entry.get("folder")
    if not folder:
        return
    if not code_entry.get("has_rlhpc"):
        yield from _limit_lines([f"    {name}" for name in sorted(bundle.sizes) if name.startswith(f"{folder}/")])
    elif has_rlhpc:
        yield f"    rlhpc of the bundle: {len(differences.rlhpc_files)} files differ from those installed here"
        yield from _limit_lines([f"      {folder}/rlhpc/{name}" for name in differences.rlhpc_files])
    else:
        yield "    rlhpc is the one that is installed here: its files are the same"


def _render_named_code(bundle: Bundle) -> list[str]:
    """Returns a line for each value of the configurations that names code, starts a program or reads the environment."""
    configs = {CONFIG: bundle.config, **({SFT_CONFIG: bundle.sft_config} if bundle.sft_config else {})}
    lines = []
    for file, config in configs.items():
        for code_entry in named_code(config):
            origin = f" ({_find_module_origin(bundle, code_entry.module)})" if code_entry.module else ""
            lines.append(f"{file}: {code_entry.key} is {cut(code_entry.value, 200)}, which {code_entry.effect}{origin}")
    return lines


def _find_module_origin(bundle: Bundle, module: str) -> str:
    """Returns where a module would be imported from, as text; imports nothing."""
    path = module.replace(".", "/")
    for code_entry in bundle.record["code"]:
        for python_path in code_entry.get("python_path") or ():
            base_path = os.path.normpath(f"{code_entry.get('folder')}/{python_path}")
            for name in (f"{base_path}/{path}.py", f"{base_path}/{path}/__init__.py"):
                if name in bundle.sizes:
                    return f"{name} of the bundle"
    try:
        module_spec = importlib.util.find_spec(module.partition(".")[0])
    except (ImportError, ValueError, AttributeError):
        module_spec = None
    if module_spec is None:
        return "neither in the bundle nor installed here"
    return f"installed here: {module_spec.origin or next(iter(module_spec.submodule_search_locations or ()), '')}"


def _render_input(input_entry: Mapping[str, Any], paths: Mapping[str, Path | None]) -> str:
    if input_entry.get("hub"):
        commit_text = f" at commit {input_entry['commit']}" if input_entry.get("commit") else ""
        return f"{input_entry['key']}: {input_entry['hub']} of the hub{commit_text}, which the run loads"
    if input_entry.get("included"):
        return f"{input_entry['key']}: {input_entry['name']} of the bundle"
    path = paths[str(input_entry["name"])]
    place_text = f"not found: --input {input_entry['name']}=PATH" if path is None else str(path)
    return f"{input_entry['key']}: was {input_entry.get('path')}, by checksum: {place_text}"


def _limit_lines(lines: Sequence[str]) -> list[str]:
    """Returns the first lines, and the number of the others."""
    return [*lines[:_MAX_LINES], *([f"    … and {len(lines) - _MAX_LINES} more"] if len(lines) > _MAX_LINES else [])]


#: Names of a system's facts in messages. All but the driver change how floats are rounded.
_SYSTEM = {"python": "Python", "libc": "C library", "nvidia_driver": "NVIDIA driver", "cpu": "processor",
           "machine": "architecture", "omp_num_threads": "OMP_NUM_THREADS", "cpus_granted": "granted cores"}  # fmt: skip
_DRIVER = _SYSTEM["nvidia_driver"]


@dataclass(frozen=True)
class Differences:
    """Differences between a bundle and this installation.

    Attributes:
        packages: (name, version in the bundle, version here or `missing`).
        system: (fact, value in the bundle, value here), about the machine.
        rlhpc_files: Files of rlhpc that only the bundle or only this installation has, or that differ.
    """

    packages: list[tuple[str, str, str]]
    system: list[tuple[str, str, str]]
    rlhpc_files: list[str]

    @property
    def rounding(self) -> list[str]:
        """Facts about the machine that change how floats are rounded, and differ."""
        return [name for name, _, _ in self.system if name != _DRIVER]


def find_differences(bundle: Bundle) -> Differences:
    """Compares a bundle with this installation; runs nothing of the bundle."""
    return Differences(_compare_packages(bundle), _compare_system(bundle), _compare_rlhpc(bundle))


def bundled_packages(bundle: Bundle) -> dict[str, str]:
    """Returns the versions of the bundle's packages by name; {} if it lists no packages."""
    if PACKAGES not in bundle.sizes:
        return {}
    return parse_package_list(bundle.read(PACKAGES).decode(errors="replace"))


def _compare_packages(bundle: Bundle) -> list[tuple[str, str, str]]:
    local_packages = parse_package_list(package_list())
    return [
        (name, version, local_packages.get(name, "missing"))
        for name, version in sorted(bundled_packages(bundle).items())
        if local_packages.get(name) != version
    ]


def _compare_system(bundle: Bundle) -> list[tuple[str, str, str]]:
    local_facts = {**system_facts(), "cpus_granted": len(os.sched_getaffinity(0))}
    recorded_facts = bundle.record["system"]
    return [
        (name, str(recorded_facts[key]), str(local_facts.get(key, "")))
        for key, name in _SYSTEM.items()
        if recorded_facts.get(key) is not None and str(recorded_facts[key]) != str(local_facts.get(key, ""))
    ]


def _compare_rlhpc(bundle: Bundle) -> list[str]:
    """Returns the files of rlhpc that differ. A file whose secrets were taken out counts as its original."""
    folders = [
        code_entry for code_entry in bundle.record["code"] if code_entry.get("has_rlhpc") and code_entry.get("folder")
    ]
    if not folders:
        return []
    folder = folders[0]["folder"]
    prefix = f"{folder}/rlhpc/"
    original_checksums = {f"{folder}/{name}": checksum for name, checksum in (folders[0].get("redacted") or {}).items()}
    root = Path(rlhpc.__file__).parent
    bundled_names = {name.removeprefix(prefix) for name in bundle.sizes if name.startswith(prefix)}
    installed_names = {str(path.relative_to(root)) for path in root.rglob("*.py")}
    differing = []
    for name in sorted(bundled_names | installed_names):
        if not name.endswith(".py"):
            continue
        if name not in bundled_names or name not in installed_names:
            differing.append(name)
            continue
        checksum = hashlib.sha256((root / name).read_bytes()).hexdigest()
        if checksum not in (bundle.checksums[prefix + name], original_checksums.get(prefix + name)):
            differing.append(name)
    return differing
