"""`rlhpc init`: projects that are complete, true to their README, and written as a whole or not at all."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlhpc.cli import main
from rlhpc.cli.init import _find_configs, _find_templates, project_files
from rlhpc.runs.configuration import load_config
from rlhpc.runs.sweep import load_sweep
from tests.extras import need_extra

NAMES = sorted({*_find_templates(), *_find_configs()})
OWN = sorted(_find_templates())
TESTS = {"embodied/own": 4, "reasoning/own": 7}


@pytest.fixture
def project(tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A new project of the parameter's name, as the working directory."""
    if request.param == "reasoning/own":
        need_extra("llm")
    assert main(["init", str(tmp_path / "mine"), "--config", request.param]) == 0
    monkeypatch.chdir(tmp_path / "mine")
    monkeypatch.syspath_prepend(tmp_path / "mine")
    return tmp_path / "mine"


def main_configuration(project: Path) -> Path:
    return project / str(yaml.safe_load((project / "config/config.yaml").read_text())["run"])


def written(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*"))


@pytest.mark.parametrize("project", NAMES, indirect=True)
def test_a_project_has_its_configuration_and_a_readme_whose_links_lead_somewhere(project: Path) -> None:
    path = main_configuration(project)
    if load_sweep(path) is None:
        load_config(path, check=False)
    text = (project / "README.md").read_text()
    links = re.findall(r"\]\(([^)]+)\)", text)
    assert links and [link for link in links if not Path(link).is_file()] == []
    files = re.findall(r"^\| `([^`]+)`(?:, `([^`]+)`)? \|", text, re.M)
    assert [name for name in sum(files, ()) if name and name != "runs/" and not (project / name).exists()] == []
    assert f"rlhpc run {path.relative_to(project)}" in text and "{" not in text.replace("{name}", "")


@pytest.mark.parametrize("project", OWN, indirect=True)
def test_a_configuration_of_ones_own_code_is_short_and_checked_as_it_stands(project: Path) -> None:
    for path in sorted((project / "configs").glob("*.yaml")):
        assert len(path.read_text().splitlines()) <= 12, path
        load_config(path)


@pytest.mark.parametrize("project", OWN, indirect=True)
def test_the_tests_of_a_project_pass_where_pytest_is_called(project: Path, request: pytest.FixtureRequest) -> None:
    name = request.node.callspec.params["project"]
    environment = {
        key: value for key, value in os.environ.items() if not key.startswith("PYTEST") and key != "PYTHONPATH"
    }
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"], cwd=project, env=environment, text=True,
        capture_output=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0 and f"{TESTS[name]} passed" in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize("config", [*OWN, "quickstart"])
def test_nothing_is_left_of_a_project_that_cannot_be_written(
    config: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whichever file it is, and whatever there was before."""
    (tmp_path / "there").mkdir()
    (tmp_path / "there/notes.txt").write_text("mine")
    before, number = Path.open, 0

    def open_(path: Path, *args: Any, **kwargs: Any) -> Any:
        nonlocal number
        if args and args[0] == "x":
            number -= 1
            if number < 0:
                raise OSError(28, "No space left on device", str(path))
        return before(path, *args, **kwargs)

    monkeypatch.setattr(Path, "open", open_)
    for last in range(len(project_files("x", config))):
        for folder in ("new/deep", "there"):
            number = last
            assert main(["init", str(tmp_path / folder), "--config", config]) == 2
            assert "No space left" in capsys.readouterr().err
            assert written(tmp_path) == ["there", "there/notes.txt"]


@pytest.mark.parametrize("name", ["README.md", "configs", "profiles/local", "configs/base/ppo.yaml"])
@pytest.mark.parametrize("kind", ["file", "link"])
def test_nothing_is_written_where_something_is_in_the_way(
    name: str, kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_text("mine") if kind == "file" else (tmp_path / name).symlink_to("nowhere")
    before = written(tmp_path)
    assert main(["init", str(tmp_path)]) == 2
    message = capsys.readouterr().err
    assert f"{tmp_path / name} is there already" in message and message.count("rlhpc: error:") == 1
    assert written(tmp_path) == before


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "rlhpc init --list shows what it can start from; see rlhpc init --help"),
        ([""], "rlhpc init --list"),
        (["new", "--config", "reasoning/owm"], "did you mean 'reasoning/own'?"),
        (["new", "--config", ""], "reasoning/own"),
        (["a:b"], "':'"),
        (["a\nb"], "printable"),
        (["new", "runner.max_steps=3"], "runner.max_steps=3"),
        (["file/new"], "file is there already"),
    ],
)
def test_a_mistake_is_one_sentence(
    words: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("mine")
    assert main(["init", *words]) == 2
    message = capsys.readouterr().err
    assert says in message and message.count("rlhpc: error:") == 1
    assert written(tmp_path) == ["file"]


def test_the_list_names_what_a_project_can_start_from(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", "--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert sorted(line.split()[0] for line in lines) == NAMES and all(len(line.split()) > 2 for line in lines)


def test_the_next_command_can_be_typed_as_it_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(tmp_path / "it's mine")
    assert main(["init", folder, "--config", "embodied/own"]) == 0
    command = capsys.readouterr().out.splitlines()[-1].removeprefix("next: ")
    done = subprocess.run(
        ["bash", "-c", f"rlhpc() {{ echo $PYTHONPATH $*; }}; {command}"], text=True, capture_output=True, check=True
    )
    assert done.stdout.strip() == f"{folder} run configs/ppo.yaml"
