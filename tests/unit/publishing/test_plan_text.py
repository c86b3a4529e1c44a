"""Text of a reproduction's plan: long lists are cut, and every input has its origin."""

from __future__ import annotations

import json
import platform
from importlib import metadata
from pathlib import Path

import pytest

import rlhpc
from rlhpc.publishing import plan_text
from rlhpc.publishing.bundle import write_bundle
from rlhpc.publishing.contents import BundleOptions
from rlhpc.publishing.plan_text import (
    Differences,
    bundled_packages,
    find_differences,
    render_code,
    render_command,
    render_differences,
    render_inputs,
)
from rlhpc.publishing.reader import Bundle, open_bundle
from tests.finished_runs import make_repository, make_run

NO_DIFFERENCES = Differences([], [], [])


class CodeBundle(Bundle):
    """Bundle with a repository of 50 files, and rlhpc."""

    def __init__(self) -> None:
        self.sizes = {f"code/project/{number:02}.py": 1 for number in range(50)}
        self.config: dict[str, object] = {}
        self.sft_config = None
        project = {"role": "project", "folder": "code/project", "files": 50, "commit": "abc", "missing": "a large file"}
        self.record = {"code": [project, {"role": "rlhpc", "has_rlhpc": True, "folder": "code/rlhpc", "files": 9}]}


def test_files_of_code_and_where_rlhpc_comes_from() -> None:
    differing = Differences([], [], ["cli/share.py"])
    lines = render_code(CodeBundle(), NO_DIFFERENCES, has_rlhpc=False)
    assert "  project at commit abc: 50 files; not complete: a large file" in lines
    assert "    code/project/39.py" in lines and "    code/project/40.py" not in lines
    assert "    … and 10 more" in lines and lines[-1].endswith("its files are the same")
    lines = render_code(CodeBundle(), differing, has_rlhpc=True)
    assert lines[-2:] == [
        "    rlhpc of the bundle: 1 files differ from those installed here", "      code/rlhpc/rlhpc/cli/share.py"
    ]  # fmt: skip
    bundle = CodeBundle()
    bundle.record["code"] = []
    assert render_code(bundle, NO_DIFFERENCES, has_rlhpc=False)[-1].endswith("the bundle has no code")


def test_the_command_and_the_one_before() -> None:
    command = {"config": "my run.yaml", "overrides": ["runner.seed=2"]}
    record = {"run": "a", "state": "finished", "global_step": 2, "max_steps": 2, "command": command}
    lines = render_command(record, ["rlhpc", "run", "config.yaml"], Path("again"))
    assert lines[0] == "a: finished at step 2 of 2"
    assert lines[-2:] == ["  rlhpc run config.yaml", "  (it was: rlhpc run 'my run.yaml' runner.seed=2)"]


def test_tables_only_of_what_differs() -> None:
    assert render_differences(NO_DIFFERENCES) == []
    lines = render_differences(Differences([("numpy", "1", "2")], [("processor", "one", "another")], []))
    assert [line.split() for line in lines if line][1:3] == [
        ["package", "in", "the", "bundle", "here"],
        ["numpy", "1", "2"],
    ]
    assert lines[-1].split() == ["processor", "one", "another"]


def test_origins_of_inputs() -> None:
    entries = [
        {"key": "data.train.path", "name": "inputs/0-a", "path": "a", "included": True},
        {"key": "runner.init_from", "name": "inputs/1-b", "path": "b"},
        {"key": "demos.path", "name": "inputs/2-c", "path": "c"},
        {"key": "actor.model.model_path", "hub": "org/name", "commit": "abc"},
    ]
    record = {"inputs": entries, "redactions": {"secret": 3, "home": 1}}
    lines = render_inputs(record, {"inputs/1-b": Path("/data/b"), "inputs/2-c": None})
    assert lines[2:6] == [
        "  data.train.path: inputs/0-a of the bundle",
        "  runner.init_from: was b, by checksum: /data/b",
        "  demos.path: was c, by checksum: not found: --input inputs/2-c=PATH",
        "  actor.model.model_path: org/name of the hub at commit abc, which the run loads",
    ]
    assert lines[-1].startswith("3 secrets were taken out")
    assert render_inputs({"inputs": []}, {}) == []


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    make_repository(tmp_path / "project", {"README.md": "a\n", ".gitignore": "runs\n"})
    monkeypatch.chdir(tmp_path / "project")
    write_bundle(make_run(tmp_path / "project" / "runs"), tmp_path / "a.zip", BundleOptions(code="include"))
    return tmp_path / "a.zip"


def test_an_installation_does_not_differ_from_its_own_bundle(path: Path) -> None:
    with open_bundle(path) as bundle:
        differing = find_differences(bundle)
        assert bundled_packages(bundle)["numpy"] == metadata.version("numpy")
    assert (differing.packages, differing.system, differing.rlhpc_files, differing.rounding) == ([], [], [], [])


def test_packages_of_another_version_and_missing_ones(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"numpy": "0.0.1"}
    monkeypatch.setattr(plan_text, "package_list", lambda: "".join(f"{name}=={v}\n" for name, v in versions.items()))
    with open_bundle(path) as bundle:
        packages = {name: (recorded, here) for name, recorded, here in find_differences(bundle).packages}
        assert set(packages) == set(bundled_packages(bundle))
    assert packages["numpy"] == (metadata.version("numpy"), "0.0.1")
    assert packages["torch"] == (metadata.version("torch"), "missing")


def test_the_driver_of_a_gpu_rounds_nothing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_text, "system_facts", lambda: {"python": platform.python_version(), "cpu": "another"})
    with open_bundle(path) as bundle:
        bundle.record["system"] = {"nvidia_driver": "1", "cpu": "one", "machine": None}
        differing = find_differences(bundle)
    assert differing.system == [("NVIDIA driver", "1", ""), ("processor", "one", "another")]
    assert differing.rounding == ["processor"]


class FakeBundle(Bundle):
    """Bundle with these files of rlhpc in code/rlhpc, by name and checksum."""

    def __init__(self, files: dict[str, str], redacted: dict[str, str]) -> None:
        self.checksums = {f"code/rlhpc/rlhpc/{name}": checksum for name, checksum in files.items()}
        self.sizes = dict.fromkeys(self.checksums, 1)
        code = [{"has_rlhpc": True, "folder": "code/rlhpc", "redacted": redacted}]
        self.record = json.loads(json.dumps({"system": {}, "code": code}))


def test_files_of_rlhpc_by_checksum(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that differ, and those that only one of both has; one without its secrets is compared by its original."""
    for name, text in {"__init__.py": "", "same.py": "a", "edited.py": "a", "here.py": "a", "redacted.py": "a"}.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(rlhpc, "__file__", str(tmp_path / "__init__.py"))
    empty, a = (plan_text.hashlib.sha256(text).hexdigest() for text in (b"", b"a"))
    files = {"__init__.py": empty, "same.py": a, "edited.py": empty, "there.py": a, "redacted.py": empty, "data.txt": a}
    bundle = FakeBundle(files, {"rlhpc/redacted.py": a})
    assert find_differences(bundle).rlhpc_files == ["edited.py", "here.py", "there.py"]
