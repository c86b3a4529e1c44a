"""Upload of an export to the Hugging Face hub, with its model card and without secrets."""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Any

import yaml

from rlhpc.jobs.paths import COMPLETE, RunPaths
from rlhpc.publishing.file_set import FileSet
from rlhpc.runtime.errors import ConfigError, RlhpcError
from rlhpc.runtime.files import read_file, read_yaml
from rlhpc.runtime.plugins import require_package
from rlhpc.runtime.redaction import Redactor
from rlhpc.runtime.text import first_line

_CARD = "README.md"
_CONFIGS = ("config.json", "adapter_config.json")
#: Files that rlhpc writes for people, which may name folders and accounts; in others, only what is certain is replaced.
_PROSE = (_CARD, "conversion.json")


class UploadError(RlhpcError):
    """Failure of the hub, or of the connection to it."""


def push_export(folder: Path, repository: str, *, is_public: bool = False, revision: str | None = None) -> str:
    """Uploads an export in one commit.

    Args:
        folder: Folder that `rlhpc convert` has written.
        repository: `owner/name`; created if it does not exist.
        is_public: Whether everybody may read the repository.
        revision: Branch; by default the main branch.

    Returns:
        Address of the repository.

    Raises:
        ConfigError: The folder is no export or has a secret that cannot be taken out, there are no credentials, or the
            repository can be read by everybody although `is_public` is False.
        UploadError: The hub refuses the upload or does not answer.
    """
    check_export(folder)
    hub = require_package("huggingface_hub", "push needs huggingface_hub")
    errors = require_package("huggingface_hub.errors", "push needs huggingface_hub")
    files = FileSet(Redactor.of_user())
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if not stat.S_ISDIR(path.lstat().st_mode):
            files.add_file(name, path, is_code=name not in _PROSE)
    if hub.get_token() is None:
        raise ConfigError(
            "push needs credentials of the hub, and there are none: set HF_TOKEN to a token that may write, or run "
            "hf auth login"
        )
    commit_operations = [
        hub.CommitOperationAdd(path_in_repo=name, path_or_fileobj=file.content)
        for name, file in sorted(files.files.items())
    ]
    api = hub.HfApi()
    try:
        _require_visibility(errors, api, repository, is_public)
        address = api.create_repo(repository, private=not is_public, exist_ok=True)
        if revision is not None:
            api.create_branch(repository, branch=revision, exist_ok=True)
        api.create_commit(
            repository, commit_operations, commit_message=f"Upload {folder.name} of rlhpc", revision=revision
        )  # fmt: skip
    except errors.HFValidationError as error:
        raise ConfigError(f"the repository is {repository!r}; write OWNER/NAME: {first_line(error)}") from error
    except (errors.HTTPError, OSError, ValueError) as error:  # of the hub, of the connection, of an answer
        raise UploadError(
            f"{repository} at {api.endpoint}: {first_line(error)}; nothing is half uploaded: a commit has all files or none. "
            "Check the token's rights and the connection, then push again"
        ) from error
    return str(address)


def check_export(folder: Path) -> None:
    """Refuses a folder that is not an export.

    Raises:
        ConfigError: Says what is missing, and how to get an export.
    """
    if not folder.is_dir():
        raise ConfigError(f"{folder}: no such folder; rlhpc convert --run RUN writes an export")
    if RunPaths(folder).config.is_file() and RunPaths(folder).checkpoints.is_dir():
        exports = sorted(str(path) for path in (folder / "export").glob("*") if path.is_dir())
        login_advice = (
            f"push one of its exports: {', '.join(exports)}" if exports else f"rlhpc convert --run {folder} writes one"
        )
        raise ConfigError(f"{folder} is a run, not an export; {login_advice}")
    if (folder / COMPLETE).exists():
        raise ConfigError(f"{folder} is a checkpoint, not an export; rlhpc convert --checkpoint {folder} writes one")
    policies = sorted(path.parent.name for path in folder.glob(f"*/{_CARD}"))
    if policies and not (folder / _CARD).exists():
        raise ConfigError(f"{folder} has several policies; push them one by one: {', '.join(policies)}")
    missing_names = [
        requirement_text
        for requirement_text, is_there in {
            "a model card of rlhpc (README.md)": _is_card(folder / _CARD),
            " or ".join(_CONFIGS): any((folder / name).is_file() for name in _CONFIGS),
            "weights (*.safetensors)": any(folder.glob("*.safetensors")),
        }.items()
        if not is_there
    ]
    if missing_names:
        raise ConfigError(
            f"{folder} is not an export: it has no {', no '.join(missing_names)}; rlhpc convert --run RUN writes one"
        )
    for path in sorted(folder.rglob("*")):
        mode_bits = path.lstat().st_mode
        if not stat.S_ISREG(mode_bits) and not stat.S_ISDIR(mode_bits):
            raise ConfigError(f"{path}: it is a link or a device; an export has only files")


def _is_card(path: Path) -> bool:
    """Returns whether a file is a model card written by rlhpc, possibly with later changes by a person."""
    try:
        card_text = read_file(path, 1 << 24).decode()
        head: Any = read_yaml(card_text.split("---\n")[1]) if card_text.startswith("---\n") else None
    except (OSError, ValueError, IndexError, yaml.YAMLError):
        return False
    return isinstance(head, dict) and "rlhpc" in (head.get("tags") or ())


def _require_visibility(errors: Any, api: Any, repository: str, is_public: bool) -> None:
    """Refuses a repository that everybody can read, unless the user has asked for it."""
    try:
        is_private = api.repo_info(repository).private
    except errors.RepositoryNotFoundError:
        return
    if not is_private and not is_public:
        raise ConfigError(
            f"{repository} exists at {api.endpoint}, and everybody can read it; add --public, or choose another name"
        )
