"""Preflight checks: a run must pass the checks of its task type before it starts (`ConfigChecks.preflight`).

`rlhpc train` runs all checks. `rlhpc plan` and `rlhpc submit` run the checks that need only files.
"""

from __future__ import annotations

import enum
import os
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rlhpc.runtime.files import expand_home

if TYPE_CHECKING:
    from rlhpc.config.sections import RunConfig


class Need(enum.Enum):
    """Resource that a check needs in addition to the configuration; the value is its name in messages."""

    FILES = "files"
    LATER_FILES = "files that are there at the start"
    NETWORK = "the network"
    PROCESS = "a process of its own"
    ROBOT = "the robot"


#: Resources for commands that do not start a run.
FILES_ALONE = frozenset({Need.FILES})
#: Resources for the start of a run.
_ALL = frozenset(Need)


@dataclass(frozen=True)
class Resource:
    """Resource that a check needs, and its use.

    Attributes:
        need: The resource.
        use: Use of the resource, for messages.
    """

    need: Need = Need.FILES
    use: str = ""


FILES = Resource()


def path_resource(cfg: RunConfig, path: str, maker: str = "") -> Resource:
    """Returns the resource that a check of a path needs.

    Args:
        cfg: The configuration.
        path: Path as the user wrote it; may be a pattern.
        maker: Run or command that writes the path before the start; "" if the path must exist.
    """
    resource_path, scratch_path = expand_home(path).absolute(), cfg.cluster.scratch
    if resource_path.exists() or any(
        Path(resource_path.anchor).glob(str(resource_path.relative_to(resource_path.anchor)))
    ):
        return FILES
    if maker:
        return Resource(Need.LATER_FILES, f"{maker} writes {path}")
    if scratch_path is not None and resource_path.is_relative_to(expand_home(scratch_path).absolute()):
        return Resource(Need.LATER_FILES, f"{path} is below cluster.scratch, a node's own disk")
    return FILES


def merge_resources(*resources: Resource) -> Resource:
    """Returns the first resource that is not just files; `FILES` if all resources are files."""
    return next((resource for resource in resources if resource.need is not Need.FILES), FILES)


@dataclass(frozen=True)
class Check:
    """Check of a run before its start.

    Attributes:
        name: Checked part of the configuration, for messages.
        run: Function that makes the check; it raises a `UserError` that names the key.
        resource: Resource that the check needs.
    """

    name: str
    run: Callable[[], object]
    resource: Resource = FILES

    def __str__(self) -> str:
        return f"{self.name}: needs {self.resource.need.value} ({self.resource.use})"


def run_checks(checks: Iterable[Check], resources: Collection[Need] = _ALL) -> list[Check]:
    """Runs the checks that need only available resources. Checks that need only files come first, so that a plan and a start
    report the same error.

    Returns:
        The skipped checks, which need other resources.

    Raises:
        UserError: A check failed; later checks did not run.
    """
    skipped_checks = []
    for preflight_check in sorted(checks, key=lambda preflight_check: preflight_check.resource.need is not Need.FILES):
        if preflight_check.resource.need in resources:
            preflight_check.run()
        else:
            skipped_checks.append(preflight_check)
    return skipped_checks


def is_hub_name(name: str) -> bool:
    """Returns whether a model's name is a hub name rather than the path of a folder."""
    folder = expand_home(name)
    is_path = folder.is_dir() or folder.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1
    return not is_path


def cached_config(name: str) -> Path | None:
    """Returns the newest config.json of a hub name in the local cache; None if the model is not in the cache."""
    hf_home = Path(os.environ.get("HF_HOME", expand_home("~/.cache/huggingface")))
    cache = Path(os.environ.get("HF_HUB_CACHE", hf_home / "hub"))
    files = (cache / f"models--{name.replace('/', '--')}" / "snapshots").glob("*/config.json")
    try:
        return max(files, key=lambda path: path.stat().st_mtime, default=None)
    except OSError:
        return None


def has_tokenizer(folder: Path) -> bool:
    """Returns whether a model's folder has tokenizer files."""
    return any(folder.glob("*token*")) or any(folder.glob("vocab.*"))


def model_resource(cfg: RunConfig, path: str | None, maker: str = "") -> Resource:
    """Returns the resource that a check of a model's configuration and tokenizer needs.

    Args:
        cfg: The configuration.
        path: The model's folder or name.
        maker: Run or command that writes the folder before the start; "" if the folder must exist.
    """
    if not path or path.startswith("builtin:"):
        return FILES
    if not is_hub_name(path):
        return path_resource(cfg, path, maker)
    config_path = cached_config(path)
    if config_path is not None and has_tokenizer(config_path.parent):
        return FILES
    return Resource(Need.NETWORK, f"{path} is no folder, and not in the Hugging Face cache")
