"""Construction of the command line: arguments, help, exit codes, and what it does not import."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from rlhpc import cli

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
