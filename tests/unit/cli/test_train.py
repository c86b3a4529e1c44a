"""Commands `plan`, `train`, `submit` and `cancel`: what they print, refuse and ask for."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlhpc import cli
from rlhpc.jobs import submit
from rlhpc.jobs.paths import SweepPaths
from rlhpc.jobs.signals import MAX_RESTARTS
from rlhpc.jobs.waiter import answer
from rlhpc.runs import train

QUICKSTART = str(Path(__file__).resolve().parents[3] / "configs" / "quickstart.yaml")
SWEEP = "sweep={grid: {actor.optim.lr: [1e-4, 3e-4]}}"


@pytest.fixture(autouse=True)
def no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SLURM_JOB_ID", "SLURM_JOBID", "RLHPC_SITE", MAX_RESTARTS):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def rlhpc(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Runs a command on the quickstart configuration; returns its exit code, stdout and stderr."""

    def run(command: str, *words: str) -> tuple[int, str, str]:
        keys = [f"runner.run_dir={json.dumps(str(tmp_path))}", "runner.name=one", "cluster.accelerators_per_node=0"]
        code = cli.main([command, QUICKSTART, *keys, *words])
        said = capsys.readouterr()
        return code, said.out, said.err

    return run


Command = Callable[..., tuple[int, str, str]]

# -- plan -----------------------------------------------------------------------------------------------------------------


def test_a_plan_shows_the_ranks_and_what_has_no_effect_and_starts_nothing(rlhpc: Command, tmp_path: Path) -> None:
    code, out, err = rlhpc("plan", "runner.max_epochs=2")
    assert (code, err) == (0, "")
    assert all(role in out for role in ("actor", "rollout", "env"))
    assert "no effect in this configuration:\n  runner.max_epochs" in out
    assert list(tmp_path.iterdir()) == []


def test_a_plan_for_slurm_says_whose_job_it_is(rlhpc: Command) -> None:
    code, out, _ = rlhpc("plan", "--launcher", "slurm")
    assert code == 0 and "This is the job of `rlhpc submit`" in out
    assert "This is the job" not in rlhpc("plan", "--launcher", "local")[1]


def test_a_plan_shows_the_placement_of_a_run_that_is_refused(rlhpc: Command) -> None:
    code, out, err = rlhpc("plan", "env.train.kwargs={nosuch: 1}")
    assert code == 2 and "nosuch" in err and "actor" in out


def test_the_plan_of_a_sweep_has_its_runs(rlhpc: Command) -> None:
    code, out, _ = rlhpc("plan", SWEEP)
    assert code == 0 and "0.0001" in out and "0.0003" in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--nodes", "2"], "--nodes and --partitions are alternatives for --when"),
        (["--when", SWEEP], "is a sweep; add sweep=null"),
        (["--when", "--nodes", "1,no"], "--nodes has 'no'; write numbers of nodes, such as 1,2,4"),
        (["--when", "--launcher", "local"], "--when asks Slurm, and there is no sbatch here"),
    ],
)
def test_a_question_to_slurm_that_makes_no_sense_is_refused(rlhpc: Command, words: list[str], message: str) -> None:
    code, out, err = rlhpc("plan", *words)
    assert (code, out) == (2, "") and message in err


# -- train ----------------------------------------------------------------------------------------------------------------


def stopped_with(outcome: int | BaseException) -> Callable[..., dict[str, Any]]:
    """Returns a training that ends so."""

    def run(cfg: Any, *, segment: int | None, resume_with: bool) -> dict[str, Any]:
        if isinstance(outcome, BaseException):
            raise outcome
        return {"exit_code": outcome}

    return run


@pytest.mark.parametrize(("outcome", "code"), [(143, 143), (KeyboardInterrupt(), 130)])
def test_an_interrupted_run_says_what_is_saved_and_how_to_go_on(
    rlhpc: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, outcome: int | BaseException, code: int
) -> None:
    monkeypatch.setattr(train, "train", stopped_with(outcome))
    ended, _, err = rlhpc("train", "runner.seed=3")
    assert ended == code and "rlhpc: interrupted; nothing is saved yet\n" in err
    assert f"go on: rlhpc train {QUICKSTART} " in err and err.endswith("runner.seed=3\n")
    checkpoint = tmp_path / "one" / "checkpoints" / "global_step_4"
    checkpoint.mkdir(parents=True)
    (checkpoint / "COMPLETE").touch()
    _, _, err = rlhpc("train", "runner.resume_dir=auto", "runner.seed=3")
    assert f"saved up to step 4 of 360 in {tmp_path / 'one'}" in err
    assert err.endswith("runner.seed=3 runner.resume_dir=auto\n")
    _, _, err = rlhpc("train", "--segment", "1")
    assert err.endswith("--segment 1\n")


def test_a_finished_run_says_nothing_and_in_a_job_the_submitter_says_how_to_go_on(
    rlhpc: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train, "train", stopped_with(0))
    assert rlhpc("train") == (0, "", "")
    monkeypatch.setattr(train, "train", stopped_with(75))
    monkeypatch.setenv(MAX_RESTARTS, "2")
    code, _, err = rlhpc("train")
    assert code == 75 and err == "rlhpc: interrupted; nothing is saved yet\n"


# -- submit ---------------------------------------------------------------------------------------------------------------


class Submitted:
    """Stand-in for submissions, which notes what was asked for."""

    def __init__(self) -> None:
        self.requests: list[tuple[submit.SubmitRequest, submit.WaitOptions]] = []

    def __call__(self, request: submit.SubmitRequest, wait: submit.WaitOptions) -> Any:
        self.requests.append((request, wait))
        record: Any = SimpleNamespace(executor=request.executor, job_id="7")
        return SimpleNamespace(run=lambda: answer("submitted", record, request.segment, None))


@pytest.fixture
def submitted(monkeypatch: pytest.MonkeyPatch) -> Submitted:
    stand_in = Submitted()
    monkeypatch.setattr(submit, "Submission", stand_in)
    return stand_in


def test_a_submission_is_told_to_people_and_to_scripts(rlhpc: Command, submitted: Submitted, tmp_path: Path) -> None:
    words = ("--segment", "1", "--no-wait", "--deadline", "60", "--attempt", "2", "--resume-with")
    code, out, err = rlhpc("submit", "--executor", "local", *words)
    assert code == 0 and err.endswith("rlhpc: segment 1: submitted, job 7\n") and json.loads(out)["job_id"] == "7"
    ((request, wait),) = submitted.requests
    assert (request.run_root, request.segment, request.attempt) == (tmp_path / "one", 1, 2)
    assert request.executor == "local" and request.slurm == {} and request.environment == {}
    file = str(tmp_path / "one/submit/segment_1.yaml")
    assert [*request.command][-4:] == [file, "--segment", "1", "--resume-with"]
    assert (wait.enabled, wait.deadline_s, wait.requester) == (False, 60.0, None)
    assert wait.hand_over(SimpleNamespace()) is None  # type: ignore[func-returns-value, arg-type]


def test_a_submission_to_slurm_has_the_plans_resources(rlhpc: Command, submitted: Submitted) -> None:
    assert rlhpc("submit", "--executor", "slurm", "cluster.time=00:10:00")[0] == 0
    ((request, wait),) = submitted.requests
    assert request.executor == "slurm" and request.segment == 0 and request.slurm and wait.enabled


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--segment", "3"], "--segment is 3; the run has segments 0 to 2"),
        (["--segment=-1"], "--segment is -1; the run has segments 0 to 2"),
        (["--deadline", "0"], "--deadline is 0; it must be more than 0 seconds"),
        (["--deadline", "nan"], "--deadline is nan; it must be more than 0 seconds"),
        (["--attempt", "0"], "--attempt is 0; the first one is 1"),
    ],
)
def test_a_submission_that_makes_no_sense_is_refused(
    rlhpc: Command, submitted: Submitted, tmp_path: Path, words: Sequence[str], message: str
) -> None:
    code, _, err = rlhpc("submit", *words)
    assert code == 2 and message in err
    assert not submitted.requests and list(tmp_path.iterdir()) == []


def test_a_workflow_does_not_submit_a_run_of_a_cancelled_sweep(
    rlhpc: Command, submitted: Submitted, tmp_path: Path
) -> None:
    root = tmp_path / "one"
    assert rlhpc("submit", "--executor", "local", f"runner.run_dir={root}", "runner.name=a", "--no-wait")[0] == 0
    sweep = SweepPaths(root)
    root.mkdir(exist_ok=True)
    sweep.record.write_text("{}")
    sweep.cancel_mark.touch()
    words = ("--executor", "local", f"runner.run_dir={root}", "runner.name=a", "--asked-by", "1")
    code, _, err = rlhpc("submit", *words)
    assert code == 2 and f"the sweep {root} was cancelled; rlhpc run goes on with it" in err
    assert len(submitted.requests) == 1


# -- cancel ---------------------------------------------------------------------------------------------------------------


def test_a_run_without_a_job_has_nothing_to_cancel(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "one"
    run.mkdir()
    (run / "config.yaml").touch()
    assert cli.main(["cancel", str(run)]) == 0
    assert capsys.readouterr().out == "nothing is running\n"
    assert cli.main(["cancel", str(tmp_path / "two")]) == 2
    assert "does not exist: no such run folder; runs there: one" in capsys.readouterr().err
