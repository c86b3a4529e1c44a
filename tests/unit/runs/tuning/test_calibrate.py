"""Calibration of the cost model: what short runs measure, and the costs that it makes of that."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from rlhpc.jobs.paths import RunPaths
from rlhpc.runs.tuning.calibrate import Calibration, MeasuredCosts, ShortRuns, device_size
from rlhpc.runs.tuning.shapes import Candidate, ClusterShape, GroupPlacement, Pool
from rlhpc.runs.tuning.workload import Knob, Phase, Workload
from rlhpc.runtime.errors import ConfigError, RlhpcError, Stopped
from rlhpc.runtime.host import node_name

# -- costs ----------------------------------------------------------------------------------------------------------------

WORKLOAD = Workload(
    phases=(
        Phase("act", "rollout", "time/act", turn=True),
        Phase("simulate", "env", "time/simulate", turn=True),
        Phase("train", "actor", "time/train", waits=True),
    ),
    samples=1024,
    unit="steps",
    knobs=(Knob("stages", (1, 2)), Knob("staleness", (0, 1)), Knob("micro", (None, 8))),
    stages="stages",
    staleness="staleness",
    turns="time/turns",
    measured_with=("stages=1",),
    smaller={2: ("half=true",)},
    divides=dict.fromkeys(("rollout", "env", "actor"), 12),
)
#: Seconds of a machine: a part that does not shrink with the work, and one that does.
FIXED = {"act": 0.02, "simulate": 0.1, "train": 0.0}
WORK = {"act": 0.4, "simulate": 0.3, "train": 2.0}
HOP_S, OVERHEAD_S = 0.05, 0.25


class Machine:
    """Short runs of a machine whose costs are known.

    Args:
        pace: Name of a run → how many times as long the machine takes at that time.
        broken: Name of a run that fails → its error.
    """

    def __init__(
        self, pace: dict[str, Sequence[float]] | None = None, broken: dict[str, BaseException] | None = None
    ) -> None:
        self.pace = {name: [*paces] for name, paces in (pace or {}).items()}
        self.broken, self.runs = broken or {}, list[tuple[str, tuple[str, ...], int]]()

    def run(self, name: str, overrides: Sequence[str], cores: frozenset[int] = frozenset()) -> MeasuredCosts:
        self.runs.append((name, tuple(overrides), len(cores)))
        if name in self.broken:
            raise self.broken[name]
        pace = self.pace[name].pop(0) if self.pace.get(name) else 1.0
        work = 0.5 if "half=true" in overrides else 1.0
        seconds = {phase: FIXED[phase] + WORK[phase] * work for phase in WORK}
        if name == "two_ranks":
            seconds = {phase: FIXED[phase] + WORK[phase] / 2 + 0.1 for phase in WORK}
        if "micro=8" in overrides:
            seconds["train"] *= 0.5
        if cores:
            seconds["train"] *= 2.0
        turns = seconds["act"] + seconds["simulate"] + HOP_S
        metrics = {f"time/{phase}": pace * value for phase, value in seconds.items()} | {"time/turns": pace * turns}
        step_s = pace * (turns + seconds["train"] + OVERHEAD_S)
        return MeasuredCosts(step_s, metrics, memory={"actor": 10.0 * pace}, device_memory={"actor": 3.0})


def calibration(machine: Machine, cores: int = 12) -> tuple[Calibration, list[str]]:
    """Returns a calibration on this machine, and the list of its messages."""
    shape = ClusterShape({"cluster": Pool("cluster", ((0, -1),))}, cores=(cores,))
    placements = {group: GroupPlacement.from_range("cluster", 0, 1) for group in WORKLOAD.groups}
    configured = Candidate(placements, {"stages": 2, "staleness": 0, "micro": None})
    said: list[str] = []
    runs: Any = machine
    return Calibration(WORKLOAD, shape, configured, runs, said.append), said


@pytest.fixture(autouse=True)
def no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)


def test_the_costs_of_a_steady_machine_are_found() -> None:
    machine = Machine()
    measured, said = calibration(machine)
    costs = measured.costs()
    for phase in WORK:
        assert costs.curves[phase].seconds_at(1.0) == pytest.approx(FIXED[phase] + WORK[phase])
        assert costs.curves[phase].seconds_at(0.25) == pytest.approx(FIXED[phase] + WORK[phase] / 4)
    assert costs.hop_s == pytest.approx(HOP_S) and costs.overhead_s == pytest.approx(OVERHEAD_S)
    assert costs.factors["micro=8"] == pytest.approx({"act": 1.0, "simulate": 1.0, "train": 0.5})
    assert costs.extra_s["micro=8"] == pytest.approx(0.0, abs=1e-9)
    assert costs.memory == {"actor": 10.0} and costs.device_memory == {"actor": 3.0} and costs.spread == 0.0
    assert 0 < costs.scaling["train"] <= 1 and set(costs.scaling) == {"train"}
    assert costs.together_s["act"] == pytest.approx(0.1) and set(costs.together_s) == set(WORK)
    assert "as it is: 3.12 s a step" in said and measured.knobs() == WORKLOAD.knobs


def test_phases_are_measured_where_none_overlaps_another() -> None:
    machine = Machine()
    measured, _ = calibration(machine)
    assert measured.plain.settings == {"stages": 1, "staleness": 0, "micro": None}
    measured.costs()
    names = [name for name, _, _ in machine.runs]
    steps = "plain again part_2 one_thread two_ranks stages_2 staleness_1 micro_8 last"
    assert names == steps.split()
    assert all(overrides[0] == "stages=1" for _, overrides, _ in machine.runs)
    assert [name for name, _, cores in machine.runs if cores] == ["one_thread"]


def test_where_steps_overlap_a_wait_measures_no_work() -> None:
    costs = calibration(Machine())[0].costs()
    assert set(costs.factors["staleness=1"]) == {"act", "simulate"}
    assert set(costs.factors["stages=2"]) == {"act", "simulate", "train"}


def test_on_one_core_no_run_asks_for_more() -> None:
    machine = Machine()
    costs = calibration(machine, cores=1)[0].costs()
    assert not costs.scaling and not costs.together_s
    assert not {"one_thread", "two_ranks"} & {name for name, _, _ in machine.runs}


def test_a_disturbed_machine_is_measured_again_and_its_drift_taken_out() -> None:
    machine = Machine(pace={"again": [2.0], "part_2": [2.0], "plain": [1.0, 2.0], "last": [2.0]})
    costs = calibration(machine, cores=1)[0].costs()
    assert [name for name, _, _ in machine.runs][:4] == ["plain", "again", "part_2", "plain"]
    assert costs.spread == pytest.approx(0.8, abs=0.3)
    ratio = costs.curves["train"].seconds_at(1.0) / (FIXED["train"] + WORK["train"])
    assert costs.curves["train"].seconds_at(0.5) == pytest.approx(ratio * WORK["train"] / 2)
    assert costs.hop_s == pytest.approx(ratio * HOP_S)


def test_a_value_that_fails_is_left_out() -> None:
    machine = Machine(broken={"micro_8": RlhpcError("out of memory\n  log: x"), "one_thread": RlhpcError("no")})
    measured, said = calibration(machine)
    costs = measured.costs()
    assert "micro=8" not in costs.factors and not costs.scaling
    assert measured.failed_overrides["micro=8"] == "out of memory"
    assert measured.knobs()[-1] == Knob("micro", (None,)) and measured.knobs()[:2] == WORKLOAD.knobs[:2]
    assert any(text.startswith("micro=8: left out: out of memory") for text in said)


@pytest.mark.parametrize(("name", "error"), [("again", RlhpcError("gone")), ("micro_8", Stopped("SIGTERM", 143))])
def test_an_end_of_all_is_no_failed_value(name: str, error: BaseException) -> None:
    with pytest.raises(type(error), match=str(error)):
        calibration(Machine(broken={name: error}))[0].costs()


# -- short runs -----------------------------------------------------------------------------------------------------------

#: Python that stands in for the runs' own: it writes what a run leaves, once its memory was looked at.
PROGRAM = """#!{python} -IS
import json, os, pathlib, sys, time
words = dict(word.split("=", 1) for word in sys.argv if "=" in word)
folder = pathlib.Path(json.loads(words["runner.run_dir"]), words["runner.name"])
if "broken" in words:
    print("noise", file=sys.stderr)
    if words["broken"] != "silent":
        print("rlhpc: error: no such key", "  log: x", sep=chr(10), file=sys.stderr)
    sys.exit(int(words["code"]))
while not pathlib.Path({looked!r}).exists():
    time.sleep(0.01)
with (folder / "metrics.jsonl").open("w") as file:
    for step in range(1, int(words["runner.max_steps"]) + 1):
        wall_s = step * step if step < 6 else 100.0
        row = {{"step": step, "time/wall_s": wall_s, "time/train": 0.1 * step, "name": "x"}}
        print(json.dumps(row), file=file)
"""
#: nvidia-smi of a machine with two accelerators, of which this process uses both.
SMI = """#!/bin/sh
touch {looked}
case "$1" in
*compute-apps*) echo "{pid}, 100"; echo "{pid}, 28"; echo "1, [N/A]" ;;
*) echo 81920; echo 40960; echo "[N/A]" ;;
esac
"""


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ShortRuns:
    """Short runs of a stand-in; the test's process is their only rank."""
    looked = str(tmp_path / "looked")
    programs = {
        "python": PROGRAM.format(python=sys.executable, looked=looked),
        "nvidia-smi": SMI.format(looked=looked, pid=os.getpid()),
    }
    for name, text in programs.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    paths = RunPaths.from_run_dir(tmp_path / "runs", "one")
    members = paths.registry / "local-0" / "members"
    members.mkdir(parents=True)
    record = {"node": node_name(), "pid": os.getpid(), "group": "actor"}
    (members / "actor-0.json").write_text(json.dumps(record))
    (members / "env-0.json").write_text(json.dumps({**record, "node": "elsewhere", "group": "env"}))
    (members / "half.json").write_text('{"node"')
    return ShortRuns(tmp_path / "config.yaml", tmp_path, ("always=1",), steps=3, deadline_s=200.0)


def test_a_short_run_is_measured_without_its_first_and_last_steps(runs: ShortRuns, tmp_path: Path) -> None:
    measured = runs.run("one", ["more=2"])
    assert measured.step_s == 7.0  # steps 3 to 5 take 5, 7 and 9
    assert measured.metrics["time/train"] == pytest.approx(0.4) and "name" not in measured.metrics
    assert measured.memory["actor"] > 1e6 and set(measured.memory) == {"actor"}
    assert measured.device_memory == {"actor": 128 * 2**20}
    assert not (tmp_path / "runs" / "one").exists()


def test_the_smallest_accelerator_counts(runs: ShortRuns) -> None:
    assert device_size() == 40960 * 2**20


def test_a_machine_without_accelerators_has_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert device_size() == 0


@pytest.mark.parametrize(
    ("words", "error", "message"),
    [
        (["broken=loud", "code=2"], ConfigError, r"the short run one failed \(log .*one\.log\): no such key\n  log: x"),
        (["broken=silent", "code=1"], RlhpcError, r"the short run one failed \(log .*one\.log\): noise"),
    ],
)
def test_a_failed_run_says_why(
    runs: ShortRuns, tmp_path: Path, words: list[str], error: type[RlhpcError], message: str
) -> None:
    with pytest.raises(RlhpcError, match=message) as failed:
        runs.run("one", words)
    assert type(failed.value) is error
    assert not (tmp_path / "runs" / "one").exists() and (tmp_path / "logs" / "one.log").exists()


def test_a_run_that_does_not_end_is_ended(runs: ShortRuns, tmp_path: Path) -> None:
    (tmp_path / "nvidia-smi").unlink()  # what the stand-in waits for never comes
    short = ShortRuns(runs.config, runs.folder, runs.common_overrides, runs.steps, deadline_s=0.0)
    with pytest.raises(RlhpcError, match=r"did not end within 0 s .*--deadline, or fewer steps with --steps"):
        short.run("one", [])
    assert not (tmp_path / "runs" / "one").exists()
