"""Reproduction of a bundle's run: the plan, the checks before it begins, and the run itself."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlhpc.jobs.paths import RunPaths
from rlhpc.publishing.comparison import Comparison, compare
from rlhpc.publishing.inputs import find_input
from rlhpc.publishing.layout import CODE, CONFIG, INPUTS, RUNS
from rlhpc.publishing.plan_text import (
    bundled_packages,
    find_differences,
    render_code,
    render_command,
    render_differences,
    render_inputs,
)
from rlhpc.publishing.reader import Bundle
from rlhpc.runtime.disk_errors import advice
from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.files import write_durably
from rlhpc.runtime.text import cut, format_names

_INSTALL_TIMEOUT_S = 3600.0


@dataclass(frozen=True)
class ReproduceOptions:
    """Choices of the user.

    Attributes:
        folder: New or empty folder in which the run is repeated.
        environment: `match` (the current one, if its packages are the same), `current` (whatever differs), or `install`.
        inputs: Name in the bundle, or path as the bundle has it → path here.
        arguments: Further arguments of `rlhpc run`, such as `--profile slurm`.
    """

    folder: Path
    environment: str = "match"
    inputs: Mapping[str, Path] = field(default_factory=dict)
    arguments: Sequence[str] = ()


class Reproduction:
    """Plan to repeat the run of a bundle; writes nothing until `run`.

    Attributes:
        differences: Differences between the bundle and this installation.
        inputs: Name in the bundle → path here, or None if the input was not found.
    """

    def __init__(self, bundle: Bundle, options: ReproduceOptions) -> None:
        self.bundle, self.options = bundle, options
        self.record: dict[str, Any] = bundle.record
        self.differences = find_differences(bundle)
        self.inputs = {
            str(input_entry["name"]): find_input(bundle, input_entry, options.inputs)
            for input_entry in self.record["inputs"]
            if input_entry.get("name") and not input_entry.get("included")
        }

    @property
    def difference_reasons(self) -> list[str]:
        """Reasons for which the repetition may differ; [] if it must be the same bit for bit."""
        reasons = [str(reason) for reason in self.record["not_promised"]]
        if self.differences.packages and not self._installs_packages:
            reasons.append(f"{len(self.differences.packages)} packages differ")
        reasons += [f"{name} differs" for name in self.differences.rounding]
        reasons += [
            f"{code_entry['role']}: {code_entry['missing']}"
            for code_entry in self.record["code"]
            if code_entry.get("missing")
        ]
        return reasons

    @property
    def command(self) -> list[str]:
        """Command line of the run, without the interpreter."""
        return ["rlhpc", "run", CONFIG, *self.options.arguments]

    def render(self) -> list[str]:
        """Renders the commands that would run, and the differences, as lines of text."""
        expectation = "the same bit for bit"
        if self.difference_reasons:
            expectation = f"close, but not the same: {'; '.join(self.difference_reasons)}"
        return [
            *render_command(self.record, self.command, self.options.folder),
            *render_code(self.bundle, self.differences, has_rlhpc=self._uses_rlhpc_of_bundle),
            *render_differences(self.differences),
            *render_inputs(self.record, self.inputs),
            "",
            f"expected: {expectation}",
        ]

    def check(self) -> None:
        """Refuses a reproduction that cannot begin.

        Raises:
            ConfigError: Packages differ and the user has not said what to do, an input is missing, or the folder is in use.
        """
        folder = self.options.folder
        if folder.is_symlink() or (folder.exists() and (not folder.is_dir() or any(folder.iterdir()))):
            raise ConfigError(f"--into is {folder}, which exists; choose a folder that is new or empty")
        packages = self.differences.packages
        if packages and self.options.environment == "match":
            package_texts = format_names(
                (
                    f"{name} {recorded_version} (here {installed_version})"
                    for name, recorded_version, installed_version in packages
                ),
                limit=5,
            )
            raise ConfigError(
                f"{len(packages)} packages differ from the bundle's: {package_texts}; --install makes an "
                f"environment with "
                "the bundle's, --current-environment goes on with those that are here"
            )
        missing_inputs = [
            input_entry
            for input_entry in self.record["inputs"]
            if self.inputs.get(str(input_entry.get("name")), "") is None
        ]
        if missing_inputs:
            raise ConfigError(
                f"{missing_inputs[0]['key']} was {missing_inputs[0]['path']}, and no file with its checksums is "
                f"there; say where it is with "
                f"--input {missing_inputs[0]['name']}=PATH"
            )

    def run(self) -> tuple[int, Comparison | None]:
        """Sets everything up in the folder, and repeats the run.

        Returns:
            Exit code of `rlhpc run`, and the comparison; None for a run that did not end well.

        Raises:
            ConfigError: The folder cannot be written, or the environment cannot be made. Then the folder is as it was.
        """
        self.check()
        folder = self.options.folder.absolute()
        try:
            python = self._set_up(folder)
        except OSError as error:
            shutil.rmtree(folder, ignore_errors=True)
            raise ConfigError(
                f"--into: {error.filename or folder} cannot be written: {error.strerror}. {advice(error, folder)}"
            ) from error
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)  # it was new or empty
            raise
        python_path = _import_path(self.bundle, folder, has_rlhpc=self._uses_rlhpc_of_bundle)
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(python_path)}
        environment["PATH"] = f"{python.parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
        exit_code = _run_to_end([str(python), "-P", "-m", "rlhpc.cli", *self.command[1:]], folder, environment)
        if exit_code != 0:
            return exit_code, None
        comparison = compare(self.bundle, RunPaths(folder / RUNS / str(self.bundle.config["runner"]["name"])))
        result_facts = {
            "not_promised": self.difference_reasons,
            "packages": self.differences.packages,
            **comparison.to_json(),
        }
        write_durably(folder / "reproduction.json", json.dumps(result_facts, indent=1).encode() + b"\n")
        return exit_code, comparison

    def _set_up(self, folder: Path) -> Path:
        """Writes the bundle's files, links to inputs, and the environment; returns the Python of the run."""
        folder.mkdir(parents=True, exist_ok=True)
        self.bundle.extract(folder)
        for name, path in self.inputs.items():
            (folder / INPUTS).mkdir(exist_ok=True)
            (folder / name).symlink_to(folder / CODE / path if path is not None else "")
        return _install_packages(self.bundle, folder) if self._installs_packages else Path(sys.executable)

    @property
    def _installs_packages(self) -> bool:
        return self.options.environment == "install" and bool(self.differences.packages)

    @property
    def _uses_rlhpc_of_bundle(self) -> bool:
        return bool(self.differences.rlhpc_files) or self._installs_packages


def _install_packages(bundle: Bundle, folder: Path) -> Path:
    """Makes an environment with the bundle's packages; returns its Python.

    Args:
        folder: Folder of the repeated run, which has the bundle's files.

    Raises:
        ConfigError: uv is missing, or a package cannot be installed.
    """
    uv_of_environment = Path(sys.executable).with_name("uv")
    uv = str(uv_of_environment) if uv_of_environment.is_file() else shutil.which("uv")
    if uv is None:
        raise ConfigError("--install needs uv: pip install uv, or go on with --current-environment")
    requirements, venv = folder / "environment" / "requirements.txt", folder / "environment" / "venv"
    python = venv / "bin" / "python"
    versions = bundled_packages(bundle)
    source_folders = [
        code_entry["folder"]
        for code_entry in bundle.record["code"]
        if code_entry.get("has_rlhpc") and code_entry.get("folder")
    ]
    # Builds such as 2.9.0+cpu are on no index under that name: uv chooses one by its own option.
    lines = [
        f"{name}=={version.partition('+')[0]}"
        for name, version in versions.items()
        if name != "rlhpc" or not source_folders
    ]
    write_durably(requirements, "\n".join([*lines, ""]).encode())
    python_version = str(bundle.record["system"].get("python") or "").rpartition(" ")[2]
    backend = ["--torch-backend", "cpu" if versions.get("torch", "").endswith("+cpu") else "auto"]
    install = [uv, "pip", "install", "--quiet", "--python", str(python)]
    _run_installer([uv, "venv", "--quiet", *(["--python", python_version] if python_version else []), str(venv)])
    _run_installer([*install, *backend, "-r", str(requirements)])
    if source_folders:
        _run_installer([*install, "--no-deps", str(folder / source_folders[0])])
    return python


def _import_path(bundle: Bundle, folder: Path, *, has_rlhpc: bool) -> list[str]:
    """Returns the import path of a repeated run: the folders of the bundle's code, then `PYTHONPATH`.

    Args:
        folder: Folder of the repeated run, which has the bundle's files.
        has_rlhpc: Whether the run uses rlhpc of the bundle, and not the installed one.
    """
    python_paths = []
    for code_entry in bundle.record["code"]:
        if not code_entry.get("folder") or (code_entry.get("has_rlhpc") and not has_rlhpc):
            continue
        root = folder / code_entry["folder"]
        paths = [os.path.normpath(root / str(python_path)) for python_path in code_entry.get("python_path") or ()]
        if code_entry.get("has_rlhpc"):
            paths.append(str(root))
        python_paths += [path for path in paths if Path(path).is_relative_to(root)]
    return [*dict.fromkeys(python_paths), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]


def _run_installer(command: list[str]) -> None:
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=_INSTALL_TIMEOUT_S)
    except subprocess.SubprocessError as error:
        message = str(getattr(error, "stderr", "") or error).strip()
        raise ConfigError(
            f"--install: {shlex.join(command[:3])} failed: {cut(' '.join(message.split()), 500)}; go on with "
            "--current-environment, or install environment/packages.txt yourself"
        ) from None


def _run_to_end(command: Sequence[str], folder: Path, environment: Mapping[str, str]) -> int:
    """Runs a command and returns its exit code. Passes signals on, so that the command can save and end its jobs."""
    process: subprocess.Popen[bytes] | None = None
    early_signals = list[int]()

    def pass_on(number: int, _: object) -> None:
        if process is None:
            early_signals.append(number)
        else:
            process.send_signal(number)

    signal_numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    # before the start: the command may run, and a signal come, before Popen returns
    handlers = {signal_number: signal.signal(signal_number, pass_on) for signal_number in signal_numbers}
    try:
        process = subprocess.Popen(command, cwd=folder, env=environment, process_group=0)
        for signal_number in early_signals:
            process.send_signal(signal_number)
        return process.wait()
    finally:
        for signal_number, handler in handlers.items():
            signal.signal(signal_number, handler)
