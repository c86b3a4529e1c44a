"""Base of all training loops: its hooks, and one loop from start to end, through saves, requests to stop and failures."""

from __future__ import annotations

import contextlib
import inspect
import json
import math
import time
import typing
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlhpc.jobs.signals import StopRequest
from rlhpc.metrics import read_metrics
from rlhpc.runs import checkpointing, runner
from rlhpc.runs.configuration import load_config
from rlhpc.runs.runner import Runner
from rlhpc.runs.task_type import TaskType, all_task_types
from rlhpc.runtime.errors import CheckpointError, WorkerFailed
from rlhpc.runtime.plugins import load_attribute

QUICKSTART = Path(__file__).resolve().parents[3] / "configs" / "quickstart.yaml"


def hooks_of(cls: type) -> set[str]:
    """The public methods and properties of a class that are not final: those that a subclass may override."""
    members = {name: member for name, member in vars(cls).items() if not name.startswith("_")}
    functions = {
        name: member.fget if isinstance(member, property) else member
        for name, member in members.items()
        if callable(member) or isinstance(member, property)
    }
    return {name for name, function in functions.items() if not getattr(function, "__final__", False)}


def test_a_runner_has_at_most_twelve_hooks() -> None:
    assert hooks_of(Runner) == {
        "begin", "build", "check_restored", "count_lost", "facts", "goal", "load_state", "one_step", "rebuild", "result",
        "state", "unharmed",
    }  # fmt: skip
    assert len(hooks_of(Runner)) <= 12


def test_a_task_type_has_at_most_ten_members() -> None:
    for kind in all_task_types():
        members = {name for name, _ in inspect.getmembers(kind) if not name.startswith("_")}
        assert members == {
            "checks", "config", "groups", "keys", "name", "offline", "planning", "reporting", "runner", "schema",
        }, kind.name  # fmt: skip
        assert len(members) <= 10


@pytest.mark.parametrize("kind", all_task_types(), ids=lambda kind: kind.name)
def test_no_runner_overrides_what_is_final(kind: TaskType[Any]) -> None:
    runner = load_attribute(kind.runner, "runner")
    final = {name for name in vars(Runner) if not name.startswith("_")} - hooks_of(Runner)
    assert final >= {"init_workers", "run", "max_recoveries"}
    # A task type may name a function that chooses among runners.
    runners = [runner] if isinstance(runner, type) else typing.get_args(typing.get_type_hints(runner)["return"])
    assert runners
    for runner in [typing.get_origin(runner) or runner for runner in runners]:  # a class may have type arguments
        for cls in runner.__mro__[: runner.__mro__.index(Runner)]:
            assert not final & set(vars(cls)), cls


class Handle:
    """Call of a group, which has been answered."""

    def __init__(self, answer: Any) -> None:
        self._answer = answer

    def wait(self, timeout: float) -> Any:
        return self._answer


class Player:
    """Group of one rank, whose state is a number."""

    worker_class = object

    def __init__(self) -> None:
        self.value = 0

    def save(self, folder: str) -> Handle:
        Path(folder, "player.json").write_text(json.dumps(self.value))
        return Handle([None])

    def load(self, folder: str) -> Handle:
        self.value = json.loads(Path(folder, "player.json").read_text())
        return Handle([self.value])

    def start_from(self, folder: str) -> Handle:
        self.value = len(Path(folder, "model.safetensors").read_bytes())
        return Handle([None])


class Counting(Runner[Any]):
    """Loop that counts. `failures` has the errors of steps, each of which is raised once."""

    def __init__(self, cfg: Any, *, stop: StopRequest | None = None) -> None:
        self.player = Player()
        super().__init__(cfg, {"actor": self.player}, stop=stop)
        self.failures: dict[int, WorkerFailed] = {}
        self.stops_in_failure = False
        self.calls: list[Any] = []
        self.returns: dict[int, float] = {}
        self.total, self.target, self.harmless = 0, 1000, False

    def build(self) -> None:
        self.calls.append("build")

    def facts(self, row: dict[str, float]) -> dict[str, Any]:
        return {"total_so_far": row["train/total"]}

    def begin(self) -> None:
        self.calls.append(("begin", self.step))

    def one_step(self) -> dict[str, float]:
        if (error := self.failures.pop(self.step + 1, None)) is not None:
            if self.stops_in_failure:
                self.stop.request("enough")
            raise error
        self.step += 1
        self.player.value += 1
        self.total += self.step
        evaluated = {"eval/return_mean": self.returns[self.step]} if self.step in self.returns else {}
        return {"train/total": float(self.total), **evaluated}

    def state(self) -> dict[str, Any]:
        return {"total": self.total}

    def load_state(self, state: dict[str, Any]) -> None:
        self.total = int(state["total"])

    def result(self) -> dict[str, Any]:
        return {"total": self.total}

    def goal(self) -> str:
        return "stop_return" if self.total >= self.target else ""

    def rebuild(self, lost_ranks: dict[str, list[int]]) -> None:
        self.calls.append(("rebuild", lost_ranks))

    def unharmed(self, lost_ranks: dict[str, list[int]]) -> bool:
        return self.harmless

    def count_lost(self, num_ranks: int, before: dict[str, Any]) -> None:
        self.calls.append(("lost", num_ranks, before["total"] - self.total))


@pytest.fixture(autouse=True)
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes this process a driver that no other has replaced."""
    registry = SimpleNamespace(root=tmp_path, check_current=lambda: None)
    for module in (runner, checkpointing):
        monkeypatch.setattr(module, "current", lambda: SimpleNamespace(registry=registry))
    for name in ("SLURM_JOB_ID", "SLURM_JOBID"):
        monkeypatch.delenv(name, raising=False)


def config(folder: Path, **keys: Any) -> Any:
    """Returns a configuration of six steps, of which every second is saved."""
    words = {
        "max_steps": 6, "segments": 1, "save_interval": 2, "run_dir": str(folder / "runs"), "name": "run",
        **keys,
    }  # fmt: skip
    overrides = [f"runner.{key}={json.dumps(value)}" for key, value in words.items()]
    return load_config(QUICKSTART, [*overrides, "runner.logger.logger_backends=[jsonl]"], check=False)


def rows_of(run: Counting) -> list[tuple[int, float]]:
    return [(row["step"], row["train/total"]) for row in read_metrics(run.folder.paths.metrics)]


def saved_steps(run: Counting) -> list[int]:
    return [step for step, _ in run.folder.paths.complete_steps()]


#: Totals after each step.
TOTALS = [(1, 1.0), (2, 3.0), (3, 6.0), (4, 10.0), (5, 15.0), (6, 21.0)]


def test_a_run_saves_at_its_interval_and_at_its_end(tmp_path: Path) -> None:
    run = Counting(config(tmp_path, max_steps=5))
    seen: list[float] = []
    result = run.run(on_step=lambda row: seen.append(row["train/total"]))
    assert rows_of(run) == TOTALS[:5] and seen == [total for _, total in TOTALS[:5]]
    assert saved_steps(run) == [2, 4, 5] and run.calls == ["build", ("begin", 0)]
    assert (result["global_step"], result["total"], result["stop_reason"]) == (5, 15, "max_steps")
    assert result["finished"] and result["checkpoint"] == str(run.folder.paths.checkpoint(5))
    status = json.loads(run.folder.paths.driver_state.read_text())
    assert (status["state"], status["step"], status["stop_reason"]) == ("finished", 5, "max_steps")
    assert status["total_so_far"] == 15  # the figures of the last step stay
    assert {"driver", "ready", "first_step"} <= set(json.loads((tmp_path / "timeline.json").read_text()))


def test_a_requested_stop_saves_and_the_next_start_goes_on(tmp_path: Path) -> None:
    stop = StopRequest()
    first = Counting(config(tmp_path), stop=stop)
    result = first.run(on_step=lambda row: stop.request("enough") if row["train/total"] == 6 else None)
    assert (result["stop_reason"], result["finished"], saved_steps(first)) == ("signal", False, [2, 3])
    assert json.loads(first.folder.paths.driver_state.read_text())["stop_reason"] == "enough"
    second = Counting(config(tmp_path, resume_dir="auto"))
    assert second.run()["global_step"] == 6
    assert second.player.value == 6 and second.calls == ["build", ("begin", 3)]
    assert rows_of(second) == TOTALS and second.elapsed >= first.elapsed


def test_a_run_that_has_reached_its_goal_does_not_go_on_unless_the_goal_is_another(tmp_path: Path) -> None:
    first = Counting(config(tmp_path))
    first.target = 10
    assert first.run()["stop_reason"] == "stop_return" and first.step == 4
    again = Counting(config(tmp_path, resume_dir="auto"))
    again.target = 10
    assert again.run()["stop_reason"] == "stop_return" and again.step == 4
    other = Counting(config(tmp_path, resume_dir="auto"))
    assert other.run()["stop_reason"] == "max_steps" and other.step == 6


def test_a_run_that_does_not_get_better_ends_and_keeps_its_best(tmp_path: Path) -> None:
    run = Counting(config(tmp_path, keep_best="eval/return_mean", patience=2, keep_checkpoints=1))
    run.returns = {1: 5.0, 2: math.nan, 3: 4.0, 4: 9.0}
    result = run.run()
    assert (result["stop_reason"], run.step) == ("patience", 3)
    paths = run.folder.paths
    assert paths.best.readlink() == Path("global_step_1") and saved_steps(run) == [1, 3]


def test_a_job_whose_time_is_over_saves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "end_of_job", lambda queries_slurm=False: time.time() + 1000)
    run = Counting(config(tmp_path, save_reserve_s=2000))
    assert run.run()["stop_reason"] == "signal"
    assert run.stop.reason == "the job's walltime leaves no room for another step"
    longer = Counting(config(tmp_path, save_reserve_s=10, resume_dir="auto"))
    assert longer.run()["stop_reason"] == "max_steps"


def test_weights_of_another_run_are_noted(tmp_path: Path) -> None:
    weights = tmp_path / "weights"
    weights.mkdir()
    (weights / "model.safetensors").write_bytes(b"abc")
    run = Counting(config(tmp_path, max_steps=1, init_from=str(weights)))
    run.run()
    assert run.player.value == 4 and run.step == 1
    source = json.loads(run.folder.paths.provenance.read_text())["init_from"]
    assert source["folder"] == str(weights) and source["sha256"].startswith("ba7816bf")


def test_a_checkpoint_without_the_loops_state_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Counting(config(tmp_path, max_steps=2)).run()
    monkeypatch.setattr(Counting, "load_state", lambda self, state: state["missing"])
    with pytest.raises(CheckpointError, match=r"global_step_2/runner\.json: cannot be read \(KeyError\('missing'\)\)"):
        Counting(config(tmp_path, max_steps=2, resume_dir="auto")).run()


# -- recovery -------------------------------------------------------------------------------------------------------------


class Recovering:
    """Session that starts a lost rank again."""

    def __init__(self, max_recoveries: int) -> None:
        self.trace_request = 0
        policies = SimpleNamespace(restartable=frozenset({"actor"}), max_recoveries=max_recoveries)
        self.failures = SimpleNamespace(policies=policies)

    def recover(self) -> dict[str, list[int]]:
        return {"actor": [0]}

    def end_start(self) -> None:
        """Ranks report no phases here."""

    def pop_energy(self) -> tuple[list[Any], set[Any], list[Any]]:
        """Ranks have no counters here."""
        return [], set(), []

    @contextlib.contextmanager
    def recovering(self) -> Iterator[None]:
        yield


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> Recovering:
    """Returns the session of this process, which recovers twice."""
    running = Recovering(2)
    monkeypatch.setattr(runner, "Session", SimpleNamespace(running=lambda: running))
    return running


def lost() -> WorkerFailed:
    return WorkerFailed("actor[0] was killed\n  log: x", group="actor", rank=0)


def test_a_lost_rank_starts_again_from_the_newest_checkpoint(
    tmp_path: Path, session: Recovering, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Counting(config(tmp_path))
    run.failures = {4: lost()}
    assert run.run()["global_step"] == 6 and run.recoveries == 1 and run.player.value == 6
    assert rows_of(run) == TOTALS
    assert run.calls == ["build", ("begin", 0), ("rebuild", {"actor": [0]}), ("lost", 1, 3), ("begin", 2)]
    said = capsys.readouterr().err
    assert "actor[0] was killed; actor[0] start again from global_step_2, all other ranks stay" in said


def test_where_nothing_is_lost_the_step_is_repeated(
    tmp_path: Path, session: Recovering, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Counting, "stateless", frozenset({"actor"}))
    run = Counting(config(tmp_path, save_interval=-1))
    run.failures, run.harmless = {1: lost(), 4: lost()}, True
    assert run.run()["total"] == 21 and run.recoveries == 2 and rows_of(run) == TOTALS
    assert "step 4 with them; nothing else is lost" in capsys.readouterr().err


def test_a_rank_that_is_lost_again_and_again_ends_the_run(tmp_path: Path, session: Recovering) -> None:
    run, errors = Counting(config(tmp_path)), [lost() for _ in range(3)]

    def one_step() -> dict[str, float]:
        if run.step < 2:
            return Counting.one_step(run)
        raise errors.pop(0)

    run.one_step = one_step  # type: ignore[method-assign]
    last = errors[-1]
    with pytest.raises(WorkerFailed) as failed:
        run.run()
    assert failed.value is last and run.recoveries == 2


@pytest.mark.parametrize("reason", ["no session", "nothing restarts", "a stop", "no checkpoint"])
def test_what_cannot_recover_raises_the_first_error(
    reason: str, tmp_path: Path, session: Recovering, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Counting(config(tmp_path, save_interval=-1 if reason == "no checkpoint" else 2))
    run.failures = {4: lost()}
    if reason == "no session":
        monkeypatch.setattr(runner, "Session", SimpleNamespace(running=lambda: None))
        assert run.max_recoveries == 0
    elif reason == "nothing restarts":
        session.failures.policies.restartable = frozenset()
    elif reason == "a stop":
        run.stops_in_failure = True
    with pytest.raises(WorkerFailed, match="was killed"):
        run.run()
    assert run.step == 3 and run.recoveries == 0
