"""The command line by itself: arguments, help, exit codes, and what it does not import."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from rlhpc import cli
from rlhpc.cli import start
from rlhpc.cli.named import run_paths
from rlhpc.jobs.paths import RunPaths
from rlhpc.runtime.errors import CheckpointError, RendezvousTimeout

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


@pytest.mark.parametrize(
    "words",
    [
        ["train", "c.yaml", "a=1", "b=2", "--segment", "1"],
        ["train", "c.yaml", "--segment", "1", "a=1", "b=2"],
        ["train", "--segment", "1", "c.yaml", "a=1", "b=2"],
        ["train", "c.yaml", "a=1", "--segment", "1", "b=2"],
    ],
    ids=["before", "after", "last", "around"],
)
def test_overrides_stand_anywhere(words: list[str]) -> None:
    args = cli.parse(words)
    assert (args.config, args.segment, args.overrides) == ("c.yaml", 1, ["a=1", "b=2"])


def run_with(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> int:
    def command(args: object) -> int:
        raise error

    monkeypatch.setattr(start, "_plan", command)
    return cli.main(["plan", QUICKSTART])


class TestEndings:
    """Exit codes and what is said on stderr."""

    @pytest.mark.parametrize(("error", "code"), [(CheckpointError("gone"), 2), (RendezvousTimeout("gone"), 1)])
    def test_own_errors(
        self, error: Exception, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert run_with(error, monkeypatch) == code
        assert capsys.readouterr().err == "rlhpc: error: gone\n"

    def test_interrupted(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        assert run_with(KeyboardInterrupt(), monkeypatch) == 130
        assert capsys.readouterr().err == "rlhpc: interrupted\n"

    def test_unexpected(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        monkeypatch.delenv("RLHPC_DEBUG", raising=False)
        assert run_with(ZeroDivisionError("by zero"), monkeypatch) == 1
        err = capsys.readouterr().err
        assert err.count("\n") == 1 and "ZeroDivisionError: by zero" in err and "RLHPC_DEBUG=1" in err

    def test_unexpected_with_traceback(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setenv("RLHPC_DEBUG", "1")
        assert run_with(ZeroDivisionError("by zero"), monkeypatch) == 1
        assert "Traceback" in capsys.readouterr().err


class TestWhichRun:
    """A run is named by its folder, or by its configuration and overrides."""

    @pytest.fixture
    def run(self, tmp_path: Path) -> RunPaths:
        paths = RunPaths(tmp_path / "runs" / "first")
        paths.root.mkdir(parents=True)
        paths.config.write_text("runner: {name: first, run_dir: elsewhere}\nenv: {train: {env_id: CartPole-v1}}\n")
        return paths

    def test_folder(self, run: RunPaths) -> None:
        assert run_paths(str(run.root)) == run

    def test_configuration_and_overrides(self, run: RunPaths) -> None:
        overrides = [f"runner.run_dir={run.root.parent}", "runner.name=first"]
        assert run_paths(QUICKSTART, overrides) == run

    def test_folder_and_override(self, run: RunPaths) -> None:
        other = RunPaths(run.root.parent / "second")
        other.checkpoints.mkdir(parents=True)
        assert run_paths(str(run.root), ["runner.name=second"]) == other
        assert run_paths(str(run.root), ["runner.seed=3"]) == run


@pytest.mark.parametrize("words", [["--deadline", "-5"], ["--deadline", "0"], ["--attempt", "0"]], ids=" ".join)
def test_submit_refuses_before_anything_is_submitted(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["submit", QUICKSTART, f"runner.run_dir={tmp_path}", "--executor", "local", *words]) == 2
    assert f"{words[0]} is {words[1]}" in capsys.readouterr().err and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--group", "nope"], "no logs of nope in .*; there are: driver"),
        (["--rank", "99"], "no logs of any group-99 in .*; there are: driver"),
        (["--rank", "-1"], "--rank is -1"),
        (["-n", "-3"], "--lines is -3"),
    ],
    ids=["group", "rank", "negative rank", "lines"],
)
def test_logs_that_are_not_there(
    words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = RunPaths(tmp_path / "run")
    paths.segment_logs(0).mkdir(parents=True)
    (paths.segment_logs(0) / "driver.out").write_text("hello\n")
    paths.config.touch()
    assert cli.main(["logs", str(paths.root), *words]) == 2
    assert re.search(said, capsys.readouterr().err)
    assert cli.main(["logs", str(paths.root)]) == 0 and capsys.readouterr().out == "[driver] hello\n"


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["run", "configs/quickstart.yaml", "--profile", "slurn"], "--profile is 'slurn'; did you mean 'slurm'?"),
        (["plan", "a" * 300 + ".yaml"], "File name too long"),
    ],
)
def test_names_of_files_that_are_none(
    argv: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(argv) == 2
    assert says in capsys.readouterr().err and not list(tmp_path.iterdir())


@pytest.mark.parametrize("command", ["eval", "record"])
def test_what_is_no_checkpoint_says_so(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([command, "--checkpoint", str(tmp_path), "--output", str(tmp_path / "made.h5")]) != 0
    assert f"{tmp_path} has no config.yaml, so it is no checkpoint of rlhpc" in capsys.readouterr().err
    instead = {"eval": "--model=", "record": "--expert=module:function"}[command]
    assert cli.main([command, "--checkpoint", str(tmp_path), "--output", str(tmp_path / "made.h5"), instead]) == 2
    assert f"{instead.partition('=')[0]} needs --config RUN.yaml, which " in capsys.readouterr().err


def test_only_runs_with_environments_are_recorded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = Path(QUICKSTART).parent / "reasoning" / "demo.yaml"
    argv = ["record", "--expert", "module:function", "--config", str(config), "--output", str(tmp_path / "made.h5")]
    assert cli.main(argv) == 2
    assert f"{config}: a run of kind reasoning has no environment (section env)" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
