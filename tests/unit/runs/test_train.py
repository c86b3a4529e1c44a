"""Composition root of `rlhpc train`: what it builds in which order, and how a run ends. Session and ranks are stand-ins."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlhpc import Cluster
from rlhpc.jobs.signals import MAX_RESTARTS
from rlhpc.runs import train as train_module
from rlhpc.runs.configuration import load_config
from rlhpc.runs.train import idle_accelerators, train
from rlhpc.runtime.errors import ConfigError, Stopped, WorkerFailed
from rlhpc.runtime.placement import HybridComponentPlacement

QUICKSTART = Path(__file__).resolve().parents[3] / "configs" / "quickstart.yaml"
ROLES = ("actor", "rollout", "env")


class Program:
    """Notes what the run does, and holds what it is to do."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.policies: Any = None
        self.timeout: float | None = None
        self.errors: dict[str, BaseException] = {}
        self.result: dict[str, Any] = {"global_step": 5, "stop_reason": "max_steps", "finished": True}

    def note(self, call: str) -> None:
        self.calls.append(call)
        if call in self.errors:
            raise self.errors[call]


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> Program:
    """Puts stand-ins in the place of session, groups and runner."""
    program = Program()

    class Session:
        @staticmethod
        def prewarm(preload: Any) -> None:
            program.note("prewarm")

        @staticmethod
        def start(**options: Any) -> Any:
            program.note("session")
            options["check_stop"]()
            return Session()

        @contextlib.contextmanager
        def training(self, policies: Any) -> Iterator[None]:
            program.policies = policies
            yield

        def stop(self) -> None:
            program.note("session ends")

    class Group:
        def __init__(self, name: str) -> None:
            self.name = name

        def launch(self, cluster: Cluster, **options: Any) -> Any:
            program.timeout = options["timeout"]
            program.note(f"{options['name']} starts")
            return Group(options["name"])

        def wait_ready(self) -> None:
            program.note(f"{self.name} is ready")

        def shutdown(self) -> None:
            program.note(f"{self.name} ends")

    class Runner:
        step = 3

        def __init__(self, cfg: Any, *, run: Any, stop: Any, **groups: Any) -> None:
            assert set(groups) == set(ROLES)

        def init_workers(self) -> None:
            program.note("built")

        def run(self, on_step: Any, on_lost: Any) -> dict[str, Any]:
            program.note("trains")
            return dict(program.result)

    def load(name: str, what: str) -> Any:
        return Runner if "runner" in what else SimpleNamespace(create_group=lambda cfg: Group(""))

    monkeypatch.setattr(train_module, "Session", Session)
    monkeypatch.setattr(train_module, "load_attribute", load)
    for name in ("SLURM_JOB_ID", "SLURM_JOBID", "RLHPC_SCRATCH", MAX_RESTARTS):
        monkeypatch.delenv(name, raising=False)
    return program


def config(folder: Path, *words: str) -> Any:
    keys = (f"runner.run_dir={folder / 'runs'}", "runner.name=one", "cluster.accelerators_per_node=0")
    return load_config(QUICKSTART, [*keys, *words])


def status_of(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "runs" / "one" / "status.json").read_text()))


def test_all_groups_start_before_one_is_waited_for_and_end_with_the_run(program: Program, tmp_path: Path) -> None:
    result = train(config(tmp_path, "runner.rendezvous_timeout_s=77", "runner.seed=3"))
    assert result == {**program.result, "exit_code": 0}
    assert program.calls[:2] == ["prewarm", "session"]
    assert set(program.calls[2:5]) == {f"{role} starts" for role in ROLES}
    assert set(program.calls[5:8]) == {f"{role} is ready" for role in ROLES}
    assert program.calls[8:10] == ["built", "trains"]
    assert set(program.calls[10:13]) == {f"{role} ends" for role in ROLES}
    assert program.calls[13:] == ["session ends"] and program.timeout == 77
    root = tmp_path / "runs" / "one"
    assert load_config(root / "config.yaml").runner.seed == 3
    placement = json.loads((root / "provenance.json").read_text())["placement"]
    assert {role: len(ranks) for role, ranks in placement.items()} == dict.fromkeys(ROLES, 1)


def test_only_a_submitted_run_recovers_by_itself(
    program: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(config(tmp_path))
    assert program.policies.max_recoveries == 0
    monkeypatch.setenv(MAX_RESTARTS, "4")
    train(config(tmp_path))
    assert program.policies.max_recoveries == 4


def test_a_finished_segment_is_not_trained_again(program: Program, tmp_path: Path) -> None:
    program.result = {"global_step": 240, "stop_reason": "segment_end", "finished": True}
    result = train(config(tmp_path), segment=1)
    assert (result["segment"], result["global_step"], result["exit_code"]) == (1, 240, 0)
    marker = tmp_path / "runs" / "one" / "segments" / "1.json"
    assert json.loads(marker.read_text())["stop_reason"] == "segment_end"
    program.calls.clear()
    again = train(config(tmp_path), segment=1)
    assert again == {**json.loads(marker.read_text()), "finished": True, "exit_code": 0} and not program.calls


def test_a_segment_that_was_stopped_is_not_finished(program: Program, tmp_path: Path) -> None:
    program.result = {"global_step": 5, "stop_reason": "signal", "finished": False}
    result = train(config(tmp_path), segment=1)
    assert not result["finished"] and not (tmp_path / "runs" / "one" / "segments" / "1.json").exists()


def test_a_stop_while_ranks_start_is_no_failure(
    program: Program, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program.errors["rollout is ready"] = Stopped("asked to end (SIGTERM)", 143)
    result = train(config(tmp_path))
    assert (result["global_step"], result["stop_reason"], result["finished"]) == (0, "signal", False)
    assert status_of(tmp_path)["state"] == "stopped" and program.calls[-1] == "session ends"
    assert "it ended while ranks were starting, so there was nothing to save" in capsys.readouterr().err


def test_a_failed_rank_is_the_runs_failure(program: Program, tmp_path: Path) -> None:
    program.errors["trains"] = WorkerFailed("env[0] was killed\n  log: x", group="env", rank=0, node="n7")
    with pytest.raises(WorkerFailed, match="was killed"):
        train(config(tmp_path))
    status = status_of(tmp_path)
    assert (status["state"], status["step"], status["node"]) == ("failed", 3, "n7")
    assert status["stop_reason"] == "env[0] was killed" and program.calls[-1] == "session ends"


def test_the_traceback_of_a_fault_is_in_the_drivers_log(program: Program, tmp_path: Path) -> None:
    program.errors["built"] = ZeroDivisionError("by zero")
    with pytest.raises(ZeroDivisionError) as failed:
        train(config(tmp_path))
    log = tmp_path / "runs" / "one" / "logs" / "segment_0" / "driver.err"
    assert "ZeroDivisionError: by zero" in log.read_text()
    assert failed.value.__notes__ == [f"traceback in {log}"]
    assert status_of(tmp_path)["stop_reason"].startswith("ZeroDivisionError: by zero")


def test_ranks_inherit_the_folder_for_what_is_temporary(
    program: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLHPC_SCRATCH", "before")  # what the run sets ends with the test
    train(config(tmp_path, f"cluster.scratch={tmp_path / 'fast'}"))
    assert os.environ["RLHPC_SCRATCH"] == str(tmp_path / "fast")


def test_a_run_that_a_check_refuses_writes_nothing(program: Program, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nosuch"):
        train(config(tmp_path, "env.train.kwargs={nosuch: 1}"))
    assert program.calls == ["prewarm"] and list(tmp_path.iterdir()) == []


# -- accelerators ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("section", "placement", "used"),
    [
        ({}, "0-3", None),
        ({}, "all", None),
        ({}, "0", "1 (cluster.component_placement)"),
        ({"accelerators_per_node": 1}, "0", "1 (cluster.accelerators_per_node)"),
        ({"accelerators_per_node": 0}, "0", "none (cluster.accelerators_per_node)"),
    ],
)
def test_accelerators_that_no_rank_uses_are_reported(section: dict[str, int], placement: str, used: str | None) -> None:
    sentence = None if used is None else f"this machine has 4 accelerators, and the run uses {used}"
    cluster = Cluster(section, environ={"CUDA_VISIBLE_DEVICES": "0,1,2,3"})
    cfg = {"cluster": {**section, "component_placement": {"actor": placement}}}
    assert idle_accelerators(cluster, HybridComponentPlacement(cfg, cluster).placements()) == sentence


#: Two nodes of four accelerators, as Slurm's variables name them, and nodes whose accelerators they do not name.
JOB = {
    "SLURM_JOB_ID": "4711", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_JOB_CPUS_PER_NODE": "32(x2)", "SLURMD_NODENAME": "n1",
    "SLURM_JOB_GPUS": "0,1,2,3", "SLURM_GPUS_ON_NODE": "4", "CUDA_VISIBLE_DEVICES": "0,1,2,3",
}  # fmt: skip
UNNAMED = {name: value for name, value in JOB.items() if "GPUS" not in name and "CUDA" not in name}


@pytest.mark.parametrize(
    ("section", "placement", "environ", "used"),
    [
        ({}, "all", JOB, None),
        ({}, "0-7", JOB, None),
        ({}, "0-3", JOB, "4 (cluster.component_placement)"),
        ({"num_nodes": 1}, "all", JOB, "4 (cluster.num_nodes)"),
        ({"num_nodes": 1}, "0-1", JOB, "2 (cluster.component_placement)"),
        ({"accelerators_per_node": 2}, "all", JOB, "4 (cluster.accelerators_per_node)"),
        ({"accelerators_per_node": 0}, "0", JOB, "none (cluster.accelerators_per_node)"),
        ({"gres": "gpu:4"}, "all", UNNAMED, None),
        ({"gres": "gpu:4"}, "0-5", UNNAMED, "6 (cluster.component_placement)"),
    ],
)
def test_accelerators_of_a_slurm_job_that_no_rank_uses_are_reported(
    section: dict[str, Any], placement: str, environ: dict[str, str], used: str | None
) -> None:
    sentence = None if used is None else f"the job has 8 accelerators, and the run uses {used}"
    cluster = Cluster(section, environ=environ)
    cfg = {"cluster": {**section, "component_placement": {"actor": placement}}}
    assert idle_accelerators(cluster, HybridComponentPlacement(cfg, cluster).placements()) == sentence


def test_a_run_reports_them_before_it_starts_anything(
    program: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    output: list[str] = []
    prewarm = program.note

    def note(call: str) -> None:
        if call == "session":
            output.append(capsys.readouterr().err)
        prewarm(call)

    monkeypatch.setattr(program, "note", note)
    train(config(tmp_path))
    first_lines = output[0].splitlines()[:3]
    assert any("this machine has 2 accelerators, and the run uses none" in line for line in first_lines), output
