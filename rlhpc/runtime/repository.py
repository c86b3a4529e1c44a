"""Git repository around a folder, read safely. A repository's configuration can name commands (`core.fsmonitor`, filters,
hooks, diff drivers), and the user who unpacked it may not have read it: git never reads it here.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from rlhpc.runtime.files import read_file

_LIMIT_S = 10.0
#: Most bytes of a file that names a commit or another folder.
_LONGEST = 1 << 16
#: Of a worktree, and of the repository that worktrees share: what git reads beside its configuration.
_OF_WORKTREE = ("index", "sharedindex.*")
_SHARED = ("objects", "refs", "packed-refs", "reftable", "shallow", "info")
#: The keys of a repository's configuration that say how its files are compared; with these values none names a command.
_VALUES = {
    "core.filemode": ("true", "false"), "core.ignorecase": ("true", "false"), "core.symlinks": ("true", "false"),
    "core.precomposeunicode": ("true", "false"), "core.trustctime": ("true", "false"),
    "core.autocrlf": ("true", "false", "input"),
    "core.eol": ("lf", "crlf", "native"), "core.checkstat": ("default", "minimal"),
    "extensions.objectformat": ("sha1", "sha256"), "extensions.refstorage": ("files", "reftable"),
}  # fmt: skip


def git_state(folder: Path) -> dict[str, Any]:
    """Returns the commit, the branch and whether the tree is dirty; empty outside a repository or without git."""
    try:
        return {
            "commit": run_git(folder, "rev-parse", "HEAD"),
            "branch": run_git(folder, "rev-parse", "--abbrev-ref", "HEAD"),
            "dirty": bool(run_git(folder, "status", "--porcelain", "--untracked-files=no")),
        }
    except (OSError, subprocess.SubprocessError):
        return {}


def run_git(folder: Path, command: str, *arguments: str) -> str:
    """Returns the output of a read-only git command on the repository around a folder.

    It uses a separate git directory, which has the repository's objects, references and index, but only those of its settings
    that control how files are compared. Submodules are compared by their commit: they have a configuration, too.

    Args:
        folder: Folder of the repository, or one below it.
        command: Git command, such as `status`.
        arguments: Arguments of the command.

    Raises:
        OSError: There is no repository, or no git.
        subprocess.SubprocessError: Git has failed.
    """
    top, worktree, common_dir = _find_repository(folder.absolute())
    if command in ("status", "diff"):
        arguments = ("--ignore-submodules=dirty", *arguments)
    with tempfile.TemporaryDirectory(prefix="rlhpc-git-") as name:
        clean_dir = Path(name)
        (clean_dir / "HEAD").write_bytes(read_file(worktree / "HEAD", _LONGEST))
        for source, patterns in ((worktree, _OF_WORKTREE), (common_dir, _SHARED)):
            for path in (path for pattern in patterns for path in source.glob(pattern)):
                (clean_dir / path.name).symlink_to(path)
        (clean_dir / "config").write_text(_harmless_settings(common_dir / "config", clean_dir))
        environment = _environment(clean_dir) | {"GIT_WORK_TREE": str(top)}
        argv = ["git", "--no-pager", command, *arguments]
        completed = subprocess.run(
            argv,
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_LIMIT_S,
            check=True,
        )
    return completed.stdout.decode(errors="replace").strip()


def _environment(git_folder: Path) -> dict[str, str]:
    """Returns variables by which git works on that folder, changes nothing in it and fetches nothing."""
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("GIT_") or name == "GIT_EXEC_PATH"
    }
    return environment | {
        "GIT_DIR": str(git_folder), "GIT_OPTIONAL_LOCKS": "0", "GIT_NO_LAZY_FETCH": "1", "GIT_ALLOW_PROTOCOL": "none",
        "GIT_TERMINAL_PROMPT": "0",
    }  # fmt: skip


def _find_repository(folder: Path) -> tuple[Path, Path, Path]:
    """Returns the top of the files, their git directory, and the one that all worktrees share."""
    for top in (folder, *folder.parents):
        git = top / ".git"
        if git.is_file():
            git = top / _text_of(git).removeprefix("gitdir:").strip()
        if (git / "HEAD").is_file():
            common_dir = git
            with contextlib.suppress(OSError):
                common_dir = git / _text_of(git / "commondir").strip()
            return top, git, common_dir
    raise FileNotFoundError(f"{folder} is in no git repository")


def _text_of(file: Path) -> str:
    return os.fsdecode(read_file(file, _LONGEST))


def _harmless_settings(config: Path, empty: Path) -> str:
    """Returns the settings of a repository that name no command, as the text of a configuration."""
    argv = ["git", "config", "--no-includes", "--null", "--file", str(config), "--list"]
    completed = subprocess.run(
        argv, cwd=empty, env=_environment(empty), capture_output=True, timeout=_LIMIT_S, check=True
    )
    lines, version = [], 0
    for setting in completed.stdout.decode(errors="replace").split("\0"):
        key, _, setting_value = setting.partition("\n")
        if setting_value.lower() in _VALUES.get(key, ()):
            section, _, name = key.partition(".")
            lines.append(f"[{section}]\n{name} = {setting_value}\n")
            version = 1 if section == "extensions" else version
    return f"[core]\nrepositoryformatversion = {version}\nbare = false\n{''.join(lines)}"
