"""Command `run`: Snakemake's command line, and what is printed while the workflow runs and when it ends."""

from __future__ import annotations

import argparse
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlhpc import cli
from rlhpc.cli import parse
from rlhpc.cli.follow import WorkflowFollower
from rlhpc.cli.run import Interrupted, find_profile, interrupt_on_signals, same_command, snakemake_command
from rlhpc.cli.sweep import SweepFollower
from rlhpc.jobs.lease import Lease
from rlhpc.jobs.paths import RunPaths
from rlhpc.runtime.errors import ConfigError

QUICKSTART = str(Path(__file__).resolve().parents[3] / "configs" / "quickstart.yaml")


def arguments(*words: str) -> argparse.Namespace:
    return parse(["run", "configs/quickstart.yaml", *words])


def test_words_after_two_dashes_are_snakemakes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MAKELEVEL", raising=False)
    args = arguments("runner.name=a b", "--site", "here", "--", "--forcerun", "report", "--config", "retries=0")
    words = snakemake_command(args)
    config = words[words.index("--config") + 1 :]
    assert config == ["run=configs/quickstart.yaml", 'overrides=["runner.name=a b"]', "site=here", "retries=0"]
    assert words[-7:-5] == ["--forcerun", "report"] and words.count("--config") == 1
    assert same_command(args) == (
        "rlhpc run configs/quickstart.yaml 'runner.name=a b' --site here -- --forcerun report --config retries=0"
    )


@pytest.mark.parametrize(("file", "typed"), [("bin/rlhpc", "bin/rlhpc"), ("rlhpc/cli/__main__.py", "rlhpc")])
def test_under_make_the_command_is_the_environments(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, file: str, typed: str
) -> None:
    (tmp_path / file).parent.mkdir(parents=True)
    (tmp_path / file).touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MAKELEVEL", "1")
    monkeypatch.setattr("sys.argv", [str(tmp_path / file), "run"])
    assert same_command(arguments()) == f"{typed} run configs/quickstart.yaml"


def test_a_dry_run_and_a_profile_are_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MAKELEVEL", raising=False)
    args = arguments("-n", "--profile", "slurm", "--resume-with", "--", "report")
    words = snakemake_command(args)
    assert words[words.index("--profile") + 1].endswith("profiles/slurm") and "--dry-run" in words
    assert words[-4:] == ["overrides=[]", "resume_with=true", "--", "report"]  # the name of a target, not a value
    assert same_command(args) == "rlhpc run configs/quickstart.yaml --profile slurm --resume-with -- report"


# -- profiles -------------------------------------------------------------------------------------------------------------


def test_a_profile_is_a_folder_or_the_name_of_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    mine, home, site = tmp_path / "mine", tmp_path / "home", tmp_path / "site"
    for folder in (mine, tmp_path / "profiles" / "here", home / "snakemake" / "users", site / "snakemake" / "sites"):
        folder.mkdir(parents=True)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(home))
    monkeypatch.setenv("XDG_CONFIG_DIRS", f"/nowhere:{site}")
    assert find_profile(str(mine)) == str(mine)
    assert find_profile("here") == str(tmp_path / "profiles" / "here")
    assert (find_profile("users"), find_profile("sites")) == ("users", "sites")
    assert any(Path(find_profile("local")).glob("*.yaml"))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("slrum", r"--profile is 'slrum'; did you mean 'slurm'\?"),
        ("other", "there are: local, slurm, slurm-no-accounting, a folder's path"),
        ("no/such", "--profile is no/such: there is no such folder"),
    ],
)
def test_an_unknown_profile_is_refused_with_the_names_of_the_others(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        find_profile(name)


# -- workflows ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """Runs the quickstart with a script in Snakemake's place; returns exit code, stdout and stderr."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MAKELEVEL", raising=False)

    def run(script: str, *words: str) -> tuple[int, str, str]:
        program = tmp_path / "program"
        program.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" > words\n{script}\n')
        program.chmod(0o755)
        monkeypatch.setattr("rlhpc.cli.run.sys.executable", str(program))
        code = cli.main(["run", QUICKSTART, "runner.run_dir=runs", "runner.name=one", *words])
        said = capsys.readouterr()
        return code, said.out, said.err

    return run


Command = Callable[..., tuple[int, str, str]]
#: What a workflow leaves of a run.
LEAVES = """mkdir -p runs/one/segments runs/one/eval/global_step_9 runs/one/export/global_step_9
echo '{"global_step": 9}' > runs/one/segments/0.json
echo '{"return_mean": 9.5, "return_ci95": [9, 10], "episodes": 100, "env_id": "X-v0"}' \\
    > runs/one/eval/global_step_9/default.json
"""
FAILS = """echo 'rlhpc: error: no Slurm' > rule.log
echo 'Error in rule plan:
    log: rule.log (check log file(s) for error details)
'
exit 1"""


def test_a_finished_run_shows_its_result_and_the_next_commands(run: Command) -> None:
    code, out, err = run(LEAVES, "runner.seed=4")
    assert code == 0
    assert "one: 360 steps into runs/one; Snakemake log: runs/one/logs/workflow/snakemake.log" in err
    lines = out.splitlines()
    assert lines[1].startswith("one: done in ") and "mean return 9.5" in lines[1]
    assert lines[3] == "  policy  runs/one/export/global_step_9"
    assert lines[4:] == [
        "next",
        "  rlhpc status runs/one",
        "  rlhpc eval --run runs/one --suite again --episodes 20",
        f"  rlhpc run {QUICKSTART} runner.name=one-2 runner.seed=5",
    ]
    assert "--snakefile" in Path("words").read_text().split()


def test_a_run_goes_on_from_what_is_saved(run: Command) -> None:
    checkpoint = RunPaths(Path("runs/one").absolute()).checkpoint(7)
    checkpoint.mkdir(parents=True)
    (checkpoint / "COMPLETE").touch()
    code, _, err = run("exit 0")
    assert code == 0 and "into runs/one, from step 7 on; " in err


def test_a_dry_run_only_asks_snakemake(run: Command) -> None:
    code, out, err = run("exit 3", "-n")
    assert (code, out, err) == (3, "", "") and "--dry-run" in Path("words").read_text().split()
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("script", "code", "messages"),
    [
        (
            FAILS,
            1,
            ["rlhpc: error: no Slurm", "failed; log: rule.log; Snakemake's: runs/one/logs", "checkpoint: rlhpc run"],
        ),
        ("echo 'rlhpc: error: no such key'; exit 1", 2, ["rlhpc: error: no such key"]),
        ("exit 4", 4, ["Snakemake ended with exit code 4 and said nothing", "failed; log: runs/one/logs/workflow"]),
        ("kill -9 $$", 137, ["Snakemake was killed by SIGKILL; jobs in Slurm go on", "the same command finds them"]),
    ],
)
def test_a_failed_workflow_says_why_and_how_to_go_on(run: Command, script: str, code: int, messages: list[str]) -> None:
    ended, out, err = run(script)
    assert (ended, out) == (code, "")
    for message in messages:
        assert message in err


def test_a_command_beside_another_has_a_log_of_its_own(run: Command) -> None:
    log = Path("runs/one/logs/workflow/snakemake.log")
    log.parent.mkdir(parents=True)
    log.write_text("another's")
    other = Lease(log.with_suffix(".lease"))
    assert other.take_over()
    try:
        code, _, err = run("echo mine")
    finally:
        other.release()
    assert code == 0 and "Snakemake log: runs/one/logs/workflow/snakemake-2.log" in err
    assert (log.read_text(), log.with_name("snakemake-2.log").read_text()) == ("another's", "mine\n")


def test_a_folder_that_cannot_be_written_is_refused(run: Command) -> None:
    Path("runs/one").mkdir(parents=True)
    Path("runs/one/logs").touch()
    code, _, err = run("exit 0")
    assert code == 2 and "choose another runner.run_dir" in err and not Path("words").exists()


def test_braces_in_a_path_are_refused(run: Command) -> None:
    code, _, err = run("exit 0", "runner.run_dir=a{b}")
    assert code == 2 and "Snakemake reads braces in a path as wildcards" in err
    assert not Path("words").exists()


# -- interrupts -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sends this process SIGTERM at the first look at the workflow."""

    def update(self: Any) -> None:
        monkeypatch.setattr(WorkflowFollower, "update", lambda self: None)
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(WorkflowFollower, "update", update)


def test_an_interrupted_workflow_ends_with_the_command(run: Command, interrupted: None) -> None:
    code, out, err = run("exec sleep 1000", "runner.seed=4")
    assert (code, out) == (143, "")
    lines = err.splitlines()
    assert lines[-3:] == [
        "rlhpc: interrupted: saving; Ctrl-C again ends at once",
        "rlhpc: interrupted; nothing is saved yet",
        f"rlhpc: go on: rlhpc run {QUICKSTART} runner.run_dir=runs runner.name=one runner.seed=4",
    ]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_signals_are_interrupts_within_the_block_alone(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with pytest.raises(Interrupted) as interrupt, interrupt_on_signals():
        os.kill(os.getpid(), number)
    assert interrupt.value.signum == number and signal.getsignal(number) is before


# -- sweeps ---------------------------------------------------------------------------------------------------------------

SWEEP = "sweep={grid: {actor.optim.lr: [1e-4, 3e-4]}}"


def test_a_sweep_is_one_workflow_whose_failed_runs_do_not_stop_the_others(run: Command) -> None:
    code, out, err = run("exit 0", SWEEP)
    assert code == 0 and "one: 2 runs into runs/one; Snakemake log: runs/one/logs/workflow/snakemake.log" in err
    words = Path("words").read_text().splitlines()
    assert words[words.index("--config") - 1] == "--keep-going" and out.startswith("\n")


def test_a_sweep_of_which_nothing_started_says_why(run: Command) -> None:
    code, out, err = run("echo 'rlhpc: error: no such key'; exit 1", SWEEP)
    assert (code, out) == (2, "") and "rlhpc: error: no such key" in err
    assert run("exit 5", SWEEP, "-n")[0] == 5


def test_an_interrupted_sweep_counts_what_is_saved(run: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def update(self: Any) -> None:
        monkeypatch.setattr(SweepFollower, "update", lambda self: None)
        raise Interrupted(signal.SIGHUP)

    monkeypatch.setattr(SweepFollower, "update", update)
    code, _, err = run("exec sleep 1000", SWEEP)
    assert code == 129 and "interrupted; 0 of 2 runs have saved something" in err
    assert err.splitlines()[-1].startswith(f"rlhpc: go on: rlhpc run {QUICKSTART} ")
