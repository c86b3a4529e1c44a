"""Safe reading of the git repository around a folder.

A repository's configuration can name commands (`core.fsmonitor`, filters, hooks, diff drivers), and a user may have unpacked
the repository without reading the configuration. Therefore git never reads this configuration here.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from rlhpc.runtime.files import read_file

_TIMEOUT_S = 10.0
#: Maximum bytes of a file that names a commit or another folder.
_MAX_BYTES = 1 << 16
#: Files that git reads besides the configuration: files of a worktree, and files of the repository that worktrees share.
_WORKTREE_FILES = ("index", "sharedindex.*")
_SHARED_FILES = ("objects", "refs", "packed-refs", "reftable", "shallow", "info")
#: Keys of a repository's configuration that control how files are compared, with their values that name no command.
_HARMLESS_SETTINGS = {
    "core.filemode": ("true", "false"), "core.ignorecase": ("true", "false"), "core.symlinks": ("true", "false"),
    "core.precomposeunicode": ("true", "false"), "core.trustctime": ("true", "false"),
    "core.autocrlf": ("true", "false", "input"),
    "core.eol": ("lf", "crlf", "native"), "core.checkstat": ("default", "minimal"),
    "extensions.objectformat": ("sha1", "sha256"), "extensions.refstorage": ("files", "reftable"),
}  # fmt: skip


def git_state(folder: Path) -> dict[str, Any]:
    """Returns the commit, the branch and whether the tree is dirty; an empty dict outside a repository or without git."""
    try:
        return {
            "commit": run_git(folder, "rev-parse", "HEAD"),
            "branch": run_git(folder, "rev-parse", "--abbrev-ref", "HEAD"),
            "dirty": bool(run_git(folder, "status", "--porcelain", "--untracked-files=no")),
        }
    except (OSError, subprocess.SubprocessError):
        return {}


def remote_url(folder: Path) -> str:
    """Returns the address of the remote `origin` of the repository around a folder, as in the repository's configuration.

    Raises:
        OSError: The folder is in no repository, or git is not installed.
        subprocess.SubprocessError: The repository has no such remote.
    """
    _, _, common_dir = _find_repository(folder.absolute())
    return _read_settings(common_dir / "config", common_dir, "--get", "remote.origin.url").rstrip("\0\n")


def repository_top(folder: Path) -> Path:
    """Returns the top folder of the repository around a folder.

    Raises:
        OSError: The folder is in no repository.
    """
    return _find_repository(folder.absolute())[0]


def run_git(folder: Path, command: str, *arguments: str) -> str:
    """Returns the output of a read-only git command as text without white space at its ends; see `git_output`."""
    return git_output(folder, command, *arguments).decode(errors="replace").strip()


def git_output(folder: Path, command: str, *arguments: str, timeout_s: float = _TIMEOUT_S) -> bytes:
    """Returns the output of a read-only git command on the repository around a folder.

    Uses a separate git directory with the repository's objects, references and index, but only with the settings that control
    how files are compared. Submodules are compared only by their commits, because they have configurations, too.

    Args:
        folder: Folder of the repository, or a folder below it.
        command: Git command, such as `status`.
        arguments: Arguments of the command.
        timeout_s: Seconds after which the command has failed.

    Raises:
        OSError: The folder is in no repository, or git is not installed.
        subprocess.SubprocessError: Git has failed.
    """
    top, worktree, common_dir = _find_repository(folder.absolute())
    if command in ("status", "diff"):
        arguments = ("--ignore-submodules=dirty", *arguments)
    with tempfile.TemporaryDirectory(prefix="rlhpc-git-") as name:
        clean_dir = Path(name)
        (clean_dir / "HEAD").write_bytes(read_file(worktree / "HEAD", _MAX_BYTES))
        for source_folder, patterns in ((worktree, _WORKTREE_FILES), (common_dir, _SHARED_FILES)):
            for path in (path for pattern in patterns for path in source_folder.glob(pattern)):
                (clean_dir / path.name).symlink_to(path)
        (clean_dir / "config").write_text(_format_harmless_settings(common_dir / "config", clean_dir))
        environment = _make_environment(clean_dir) | {"GIT_WORK_TREE": str(top)}
        argv = ["git", "--no-pager", command, *arguments]
        completed_process = subprocess.run(
            argv,
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=timeout_s,
            check=True,
        )
    return completed_process.stdout


def _make_environment(git_folder: Path) -> dict[str, str]:
    """Returns an environment in which git uses a git directory, writes nothing to it and fetches nothing."""
    environment = {
        name: variable_value
        for name, variable_value in os.environ.items()
        if not name.startswith("GIT_") or name == "GIT_EXEC_PATH"
    }
    return environment | {
        "GIT_DIR": str(git_folder), "GIT_OPTIONAL_LOCKS": "0", "GIT_NO_LAZY_FETCH": "1", "GIT_ALLOW_PROTOCOL": "none",
        "GIT_TERMINAL_PROMPT": "0",
    }  # fmt: skip


def _find_repository(folder: Path) -> tuple[Path, Path, Path]:
    """Returns the top folder of the repository around a folder, its git directory, and the directory that worktrees share."""
    for top in (folder, *folder.parents):
        git = top / ".git"
        if git.is_file():
            git = top / _read_text(git).removeprefix("gitdir:").strip()
        if (git / "HEAD").is_file():
            common_dir = git
            with contextlib.suppress(OSError):
                common_dir = git / _read_text(git / "commondir").strip()
            return top, git, common_dir
    raise FileNotFoundError(f"{folder} is in no git repository")


def _read_text(file: Path) -> str:
    return os.fsdecode(read_file(file, _MAX_BYTES))


def _format_harmless_settings(config: Path, empty_folder: Path) -> str:
    """Returns the text of a configuration with the repository's settings that name no command."""
    lines, version = [], 0
    for setting_text in _read_settings(config, empty_folder, "--list").split("\0"):
        key, _, setting_value = setting_text.partition("\n")
        if setting_value.lower() in _HARMLESS_SETTINGS.get(key, ()):
            section, _, name = key.partition(".")
            lines.append(f"[{section}]\n{name} = {setting_value}\n")
            version = 1 if section == "extensions" else version
    return f"[core]\nrepositoryformatversion = {version}\nbare = false\n{''.join(lines)}"


def _read_settings(config: Path, git_folder: Path, *query_arguments: str) -> str:
    """Returns the output of `git config` for one configuration file, without the files that it includes."""
    argv = ["git", "config", "--no-includes", "--null", "--file", str(config), *query_arguments]
    completed_process = subprocess.run(
        argv, cwd=git_folder, env=_make_environment(git_folder), capture_output=True, timeout=_TIMEOUT_S, check=True
    )
    return completed_process.stdout.decode(errors="replace")
