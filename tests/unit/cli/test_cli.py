"""The command line by itself: arguments, help, exit codes, and what it does not import."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rlhpc import cli
from rlhpc.config import config_to_yaml
from rlhpc.runs.configuration import load_config
from rlhpc.runs.task_type import find_kind

QUICKSTART = str(Path(__file__).resolve().parents[3] / "configs" / "quickstart.yaml")
COMMANDS = ("run", "plan", "train", "submit", "cancel", "status", "logs", "eval", "convert", "report")


@pytest.mark.parametrize("words", [["--help"], ["--version"], ["train", "--help"]], ids=" ".join)
def test_help_is_light(words: list[str]) -> None:
    code = (
        "import sys\nfrom rlhpc.cli import main\n"
        "try:\n    main(sys.argv[1:])\nexcept SystemExit as ended:\n    assert ended.code == 0\n"
        "loaded = {'torch', 'submitit', 'numpy', 'gymnasium'} & set(sys.modules)\n"
        "assert not loaded, loaded"
    )
    subprocess.run([sys.executable, "-c", code, *words], check=True, timeout=60, stdout=subprocess.DEVNULL)


def test_help_shows_every_command_once_and_the_documentation(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["--help"])
    text = capsys.readouterr().out
    assert ended.value.code == 0
    for name, command in cli.build_parser().commands.items():
        assert text.count(f"\n  {name} ") == 1 and str(command.description)[:40] in text
    titles = [line for line in text.splitlines() if line.endswith(":") and not line.startswith(" ")]
    assert titles == [f"{title}:" for title in cli.GROUPS]
    link = text.split("Documentation: ")[1].strip()
    assert Path(link).is_file() or link.startswith("https://")


def test_help_is_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["help"]) == 0
    assert "Use a policy:" in capsys.readouterr().out
    assert cli.main(["help", "train"]) == 0
    text = capsys.readouterr().out
    assert "usage: rlhpc train" in text and "examples:" in text
    with pytest.raises(SystemExit) as ended:
        cli.main([])
    assert ended.value.code == 0
    assert "Use a policy:" in capsys.readouterr().out


@pytest.mark.parametrize("words", [["tran", "c.yaml"], ["help", "tran"]], ids=" ".join)
def test_a_misspelt_command_is_recognized(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(words)
    said = capsys.readouterr().err
    assert ended.value.code == 2
    assert said == "rlhpc: error: there is no command 'tran'; did you mean rlhpc train?; see rlhpc --help\n"


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_examples_that_parse(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main([command, "--help"])
    text = capsys.readouterr().out
    assert ended.value.code == 0 and "examples:" in text and "key=value" in text
    examples = text.split("examples:")[1].strip().splitlines()
    for line in examples:
        program, *words = line.split()
        assert program == "rlhpc" and callable(cli.parse(words).function)


@pytest.mark.parametrize("words", [["--episodes", "2"], ["env.eval.seed=3"], ["--episodes", "2", "env.eval.seed=3"]])
def test_another_evaluation_does_not_replace_the_runs_own(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = tmp_path / "run" / "checkpoints" / "global_step_3"
    checkpoint.mkdir(parents=True)
    (checkpoint / "config.yaml").write_text(config_to_yaml(load_config(QUICKSTART, [])))
    evaluated: list[tuple[str, Path | None]] = []

    def evaluate(kind: Any, cfg: Any, source: Path, *, suite: str, output: Path | None, **options: Any) -> str:
        evaluated.append((suite, output))
        return "played"

    monkeypatch.setattr(type(find_kind("embodied")), "evaluate", evaluate)
    own = tmp_path / "run" / "eval" / "global_step_3" / "default.json"
    asked = ["eval", "--checkpoint", str(checkpoint)]
    assert cli.main([*asked, *words]) == 2
    said = capsys.readouterr().err
    assert f"the run's own evaluation belongs in {own}, and " in said and "--suite" in said and not evaluated
    named = (["--suite", "again"], ["--suite", "default"], ["--output", str(tmp_path / "x.json")])
    for more in ([], *([*name, *words] for name in named)):
        assert cli.main([*asked, *more]) == 0
    assert evaluated == [
        ("default", own), ("again", own.with_name("again.json")), ("default", own), ("default", tmp_path / "x.json"),
    ]  # fmt: skip


def test_only_runs_with_environments_are_recorded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = Path(QUICKSTART).parent / "reasoning" / "demo.yaml"
    argv = ["record", "--expert", "module:function", "--config", str(config), "--output", str(tmp_path / "made.h5")]
    assert cli.main(argv) == 2
    assert f"{config}: a run of kind reasoning has no environment (section env)" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
