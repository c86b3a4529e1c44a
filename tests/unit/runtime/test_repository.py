"""The state of a git repository, and what a hostile one's configuration would have git do."""

from __future__ import annotations

import os
import stat
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from rlhpc.runtime.repository import git_output, git_state, remote_url, repository_top, run_git

IDENTITY = ("-c", "user.name=n", "-c", "user.email=e@x", "-c", "protocol.file.allow=always")


def git(folder: Path, *words: str) -> None:
    subprocess.run(["git", "-C", str(folder), *IDENTITY, *words], check=True, capture_output=True)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    folder = tmp_path / "repository"
    folder.mkdir()
    git(folder, "init", "-q", "-b", "trunk")
    for name in ("f", "unchanged"):
        (folder / name).write_text("1")
    git(folder, "add", ".")
    git(folder, "commit", "-qm", "m")
    return folder


def test_git_state(repository: Path, tmp_path: Path) -> None:
    assert git_state(tmp_path) == {}
    (repository / "below").mkdir()
    for folder in (repository, repository / "below"):
        state = git_state(folder)
        assert len(state["commit"]) == 40 and state["branch"] == "trunk" and state["dirty"] is False
    (repository / "f").write_text("2")
    assert git_state(repository)["dirty"] is True
    git(repository, "commit", "-qam", "n")
    assert git_state(repository)["dirty"] is False and git_state(repository)["commit"] != state["commit"]
    git(repository, "worktree", "add", "-q", str(tmp_path / "other"), "-b", "side")
    (tmp_path / "other/f").write_text("3")
    assert git_state(tmp_path / "other") == {**git_state(repository), "branch": "side", "dirty": True}
    git(repository, "checkout", "-q", "--detach")
    git(repository, "pack-refs", "--all")
    git(repository, "gc", "-q")
    git(repository, "update-index", "--split-index")
    assert git_state(repository)["branch"] == "HEAD" and git_state(repository)["dirty"] is False


def test_settings_of_comparison_are_kept(repository: Path) -> None:
    git(repository, "config", "core.fileMode", "false")
    (repository / "f").chmod((repository / "f").stat().st_mode ^ stat.S_IXUSR)
    assert git_state(repository)["dirty"] is False
    git(repository, "config", "core.fileMode", "true")
    assert git_state(repository)["dirty"] is True


def _setting(name: str, value: str = "{mark}") -> Callable[[Path, str], None]:
    def plant(repository: Path, mark: str) -> None:
        git(repository, "config", name, value.replace("{mark}", mark))

    return plant


def _attributes(*settings: tuple[str, str]) -> Callable[[Path, str], None]:
    def plant(repository: Path, mark: str) -> None:
        (repository / ".gitattributes").write_text("* filter=x diff=x merge=x\n")
        for name, value in settings:
            git(repository, "config", name, value.replace("{mark}", mark))

    return plant


def _included(repository: Path, mark: str) -> None:
    (repository.parent / "more").write_text(f"[core]\nfsmonitor = {mark}\n")
    git(repository, "config", "include.path", str(repository.parent / "more"))


def _included_if(repository: Path, mark: str) -> None:
    (repository.parent / "more").write_text(f"[core]\nfsmonitor = {mark}\n")
    git(repository, "config", f"includeIf.gitdir:{repository}/.path", str(repository.parent / "more"))


def _of_worktree(repository: Path, mark: str) -> None:
    git(repository, "config", "extensions.worktreeConfig", "true")
    (repository / ".git/config.worktree").write_text(f"[core]\nfsmonitor = {mark}\n")


def _hook(repository: Path, mark: str) -> None:
    hook = repository / ".git/hooks/post-index-change"
    hook.parent.mkdir(exist_ok=True)
    hook.write_text(f"#!/bin/sh\n{mark}\n")
    hook.chmod(0o755)


def _hooks_elsewhere(repository: Path, mark: str) -> None:
    _hook(repository, mark)
    (repository / ".git/hooks").rename(repository / ".git/others")
    git(repository, "config", "core.hooksPath", str(repository / ".git/others"))


def _submodule(repository: Path, mark: str) -> None:
    git(repository, "clone", "-q", ".", str(repository.parent / "inner"))
    git(repository, "submodule", "add", "-q", str(repository.parent / "inner"), "sub")
    git(repository, "commit", "-qam", "with it")
    git(repository / "sub", "config", "core.fsmonitor", mark)


def _promisor(repository: Path, mark: str) -> None:
    """An object is missing, and the remote that it is to come from is a command."""
    git(repository, "config", "extensions.partialClone", "origin")
    git(repository, "config", "remote.origin.url", f"ext::{mark}")
    git(repository, "config", "remote.origin.promisor", "true")
    git(repository, "config", "protocol.ext.allow", "always")
    tree = subprocess.run(
        ["git", "-C", str(repository), "rev-parse", "HEAD^{tree}"], check=True, capture_output=True, text=True
    ).stdout.strip()
    (repository / ".git/objects" / tree[:2] / tree[2:]).unlink()


ATTACKS: dict[str, Callable[[Path, str], None]] = {
    "fsmonitor": _setting("core.fsmonitor"),
    "clean": _attributes(("filter.x.clean", "{mark}")),
    "process": _attributes(("filter.x.process", "{mark}"), ("filter.x.required", "true")),
    "smudge": _attributes(("filter.x.smudge", "{mark}")),
    "textconv": _attributes(("diff.x.textconv", "{mark}")),
    "diff driver": _attributes(("diff.x.command", "{mark}")),
    "external diff": _setting("diff.external"),
    "alias": _setting("alias.status", "!{mark}"),
    "pager": _setting("core.pager"),
    "pager of a command": _setting("pager.status"),
    "editor": _setting("core.editor"),
    "ssh": _setting("core.sshCommand"),
    "credentials": _setting("credential.helper", "!{mark}"),
    "signatures": _setting("gpg.program"),
    "alternates": _setting("core.alternateRefsCommand"),
    "include": _included,
    "conditional include": _included_if,
    "configuration of the worktree": _of_worktree,
    "hook": _hook,
    "hooks elsewhere": _hooks_elsewhere,
    "submodule": _submodule,
    "promisor": _promisor,
}
#: Those by which `git status` as it is runs a command, with git 2.39.
EFFECTIVE = {
    "fsmonitor", "clean", "process", "include", "conditional include", "configuration of the worktree", "hook",
    "hooks elsewhere", "submodule", "promisor",
}  # fmt: skip


@pytest.mark.parametrize("attack", ATTACKS)
def test_no_command_of_a_repository_is_run(attack: str, repository: Path, tmp_path: Path) -> None:
    mark, program = tmp_path / "ran", tmp_path / "program"
    program.write_text(f"#!/bin/sh\ntouch {mark}\n{'exit 1' if attack == 'promisor' else 'cat'}\n")
    program.chmod(0o755)
    ATTACKS[attack](repository, str(program))
    mark.unlink(missing_ok=True)
    (repository / "f").write_text("2")
    state = git_state(repository)
    for words in (("log", "-1", "--format=%h", "--", "f"), ("diff", "HEAD"), ("log", "-1", "--show-signature")):
        if attack != "promisor":
            run_git(repository, *words)
    assert not mark.exists()
    assert state == {} if attack == "promisor" else (state["branch"], state["dirty"]) == ("trunk", True)
    (repository / "f").write_text("3")
    os.utime(repository / "unchanged", (0, 0))  # git writes its index again, and calls the hook after that
    subprocess.run(["git", "-C", str(repository), "status", "--porcelain"], check=False, capture_output=True)
    assert mark.exists() == (attack in EFFECTIVE), "as git itself does it"


def test_the_remote_and_the_exact_output(repository: Path, tmp_path: Path) -> None:
    with pytest.raises(subprocess.SubprocessError):
        remote_url(repository)
    git(repository, "remote", "add", "origin", "https://git.example.org/a.git")
    git(repository, "config", "include.path", str(tmp_path / "more"))
    (tmp_path / "more").write_text('[remote "origin"]\nurl = https://elsewhere\n')
    (repository / "below").mkdir()
    assert remote_url(repository / "below") == "https://git.example.org/a.git", "of this file, not of one it includes"
    assert repository_top(repository / "below") == repository
    (repository / "f").write_bytes(b"\xff2 \n")
    assert git_output(repository, "diff", "HEAD").endswith(b"+\xff2 \n")
    with pytest.raises(OSError, match="in no git repository"):
        repository_top(tmp_path)
