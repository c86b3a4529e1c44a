"""Environment of a start: packages, the system, changes to the commit, and the user's modules without importing them."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from rlhpc.jobs.paths import RunPaths
from rlhpc.metrics.environment import (
    find_user_modules,
    package_list,
    parse_package_list,
    record_environment,
    system_facts,
)
from tests.finished_runs import make_repository


def stored(paths: RunPaths, name: str) -> str:
    return (paths.provenance_files / name).read_text()


def test_the_list_has_the_versions_that_are_installed() -> None:
    versions = parse_package_list(package_list())
    assert versions["torch"] == metadata.version("torch") and versions["numpy"] == metadata.version("numpy")
    assert len(versions) == len(package_list().splitlines())


def test_packages_from_addresses_say_so_without_logins(tmp_path: Path) -> None:
    for name, origin in {
        "first_one": {"url": "https://bot:secret-of-mine@git.example.org/a.git", "vcs_info": {"commit_id": "abc"}},
        "second": {"url": "file:///home/alice/second", "dir_info": {"editable": True}},
    }.items():
        folder = tmp_path / f"{name}-1.0+x.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0+x\n\nVersion: 2 is old\n")
        (folder / "direct_url.json").write_text(json.dumps(origin))
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from rlhpc.metrics.environment import *; print(package_list())"
    lines = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.splitlines()
    assert "first-one==1.0+x  # from https://<redacted>@git.example.org/a.git at abc" in lines
    assert "second==1.0+x  # from a local folder" in lines
    assert parse_package_list("\n".join(lines))["first-one"] == "1.0+x"
    assert parse_package_list("-e .\nname @ file:///x\nnot a line\na==1\n") == {"a": "1"}


def test_facts_about_the_system() -> None:
    facts = system_facts()
    assert (
        facts["python"] == f"CPython {sys.version.split()[0]}" and facts["libc"].startswith("glibc ") and facts["cpu"]
    )


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "project"
    make_repository(folder, {"train.py": "x = 1\n", ".gitignore": "runs\nignored.py\n"})
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PYTHONPATH", f"{folder}/src:/elsewhere")
    return folder


def project_state(facts: dict[str, Any]) -> dict[str, Any]:
    return next(dict(code) for code in facts["code"] if code["role"] == "project")


def test_changes_to_the_commit_are_kept(project: Path) -> None:
    paths = RunPaths(project / "runs" / "a")
    clean = project_state(record_environment(paths, {}))
    assert not clean["dirty"] and "diff" not in clean and clean["python_path"] == ["src"] and not clean["has_rlhpc"]
    (project / "train.py").write_text("x = 2 \n")
    (project / "more.py").write_text("y = 1\n")
    (project / "ignored.py").write_text("z = 1\n")
    (project / "link.py").symlink_to("/etc/passwd")
    state = project_state(record_environment(paths, {}))
    assert stored(paths, state["diff"]).endswith("-x = 1\n+x = 2 \n"), "white space at the end is part of it"
    assert json.loads(stored(paths, state["untracked"])) == {"more.py": "y = 1\n"}
    assert (paths.provenance_files / state["diff"]).stat().st_mode & 0o777 == 0o600
    files = set(paths.provenance_files.iterdir())
    record_environment(paths, {})
    assert set(paths.provenance_files.iterdir()) == files, "a start that finds the same writes nothing new"


def test_settings_of_the_repository_run_nothing(project: Path) -> None:
    """A repository that somebody unpacked may name commands for its differences."""
    evil = f"touch {project}/evil; cat"
    for key in ("diff.external", "diff.x.textconv", "diff.x.command", "core.fsmonitor", "filter.x.clean"):
        subprocess.run(["git", "config", key, evil], check=True)
    (project / ".gitattributes").write_text("*.py diff=x filter=x\n")
    (project / "train.py").write_text("x = 2\n")
    state = project_state(record_environment(RunPaths(project / "runs" / "a"), {}))
    assert state["dirty"] and not (project / "evil").exists()


def test_modules_that_a_configuration_names_with_what_they_import(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {
        "rewards_of_a_project.py": "import numpy\nimport my_helper\nraise SystemExit('imported')\n",
        "my_helper.py": "from my_package import deep\nfrom my_package.sub import other as thing\n",
        "my_package/__init__.py": "",
        "my_package/deep.py": "from . import sibling\nfrom .sub import nothing\n",
        "my_package/sibling.py": "def broken(:\n",
        "my_package/sub/__init__.py": "",
        "my_package/sub/other.py": "import rewards_of_a_project\n",
        "my_package/unused.py": "",
        "unrelated.py": "",
    }
    for name, source in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    config = {
        "reward": {"terms": [{"name": "rewards_of_a_project:f"}]},
        "env": {"train": {"env_id": "gymnasium:CartPole"}},
    }
    before = set(sys.modules)
    assert set(find_user_modules(config)) == files.keys() - {"my_package/unused.py", "unrelated.py"}
    assert not {name for name in sys.modules.keys() - before if name.startswith("my_")}, "nothing was imported"
    assert find_user_modules({"a": "missing_module:f", "b": "os:path", "c": "rlhpc.share:path"}) == {}


def test_what_cannot_be_recorded_stops_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # in no repository
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "provenance").write_text("a file where the folder would be")
    facts = record_environment(RunPaths(tmp_path / "a"), {"x": "missing:y"})
    assert facts["system"]["libc"] and "packages" not in facts
