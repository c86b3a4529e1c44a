"""Commands on a sweep: its plan, its progress, its end, and the search for it."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import yaml

from rlhpc.cli.follow import WorkflowLog
from rlhpc.cli.sweep import (
    SweepFollower,
    cancel_sweep,
    render_sweep,
    render_sweep_ending,
    render_sweep_plan,
    sweep_paths,
)
from rlhpc.runs.sweep import Sweep, load_sweep
from rlhpc.runtime.errors import ConfigError

ROOT = Path(__file__).resolve().parents[3]
RULE = "rule {}:\n    log: x.log\n    resources: tmpdir=/tmp\n"


@pytest.fixture
def sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sweep:
    monkeypatch.chdir(tmp_path)
    content = {
        "defaults": [str(ROOT / "configs/quickstart.yaml")],
        "runner": {"name": "lr", "max_steps": 10, "segments": 2},
        "cluster": {"accelerators_per_node": 0},
        "sweep": {"grid": {"actor.optim.lr": [1e-4, 3e-4]}, "seeds": [1, 2], "max_queued": 3},
    }
    Path("lr.yaml").write_text(yaml.safe_dump(content))
    loaded = load_sweep("lr.yaml")
    assert loaded is not None
    return loaded


def test_the_plan_counts_runs_and_jobs(sweep: Sweep) -> None:
    lines = render_sweep_plan(sweep, "local").splitlines()
    assert lines[0] == (
        "sweep lr: 4 runs (2 configurations, 2 seeds), at most 3 training jobs queued or running at once"
    )
    assert lines[1] == "jobs         8 training, 8 evaluation, 4 export"
    assert [line for line in lines if line.startswith("  lr_")] == [f"  {run.point.name}" for run in sweep.runs]


def test_the_plan_says_what_it_costs_at_most(sweep: Sweep) -> None:
    assert "at most      unknown: no walltime" in render_sweep_plan(sweep, "slurm")
    timed = load_sweep("lr.yaml", ["cluster.time=01:30:00"])
    assert timed is not None
    assert "at most      12 node hours and 0 GPU hours of training" in render_sweep_plan(timed, "slurm")


def test_a_sweep_is_found_by_its_folder_or_its_file(sweep: Sweep) -> None:
    with pytest.raises(ConfigError, match=r"has not begun; start it: rlhpc run lr\.yaml"):
        sweep_paths("lr.yaml")
    assert sweep_paths("lr.yaml", ["sweep=null"]) is None and sweep_paths("nothing") is None
    sweep.begin()
    for name in ("lr.yaml", "runs/lr"):
        found = sweep_paths(name)
        assert found is not None and found.root == sweep.paths.root
    assert render_sweep(sweep.paths).splitlines()[0] == "sweep lr: 4 runs"
    assert cancel_sweep(sweep.paths) == []
    assert "; cancelled, rlhpc run goes on with it" in render_sweep(sweep.paths)
    assert render_sweep_ending(sweep)[0] == "lr: 0 of 4 runs finished"


def test_progress_names_each_run_once(sweep: Sweep, tmp_path: Path) -> None:
    output, path = io.StringIO(), tmp_path / "snakemake.log"
    follower = SweepFollower(WorkflowLog(path, tmp_path), sweep, output)
    first, second = (prefix for prefix in list(follower._prefixes.values())[:2])
    path.write_text(RULE.format(f"{first}train_segment"))
    follower.update()
    follower.update()
    path.write_text(
        path.read_text()
        + RULE.format(f"{first}report")
        + f"Finished jobid: 5 (Rule: {first}report)\n"
        + RULE.format(f"{second}eval").replace("rule", "Error in rule")
        + RULE.format("compare")
    )
    follower.close()
    names = [run.point.name for run in sweep.runs]
    assert output.getvalue().splitlines() == [
        f"  {names[0]}: training",
        "  writing the page",
        f"  {names[0]}: done (1)",
        f"  {names[1]}: failed: eval, see {tmp_path / 'x.log'}",
    ]
    assert follower.split_rule("all") == ("", "all") and follower.split_rule(f"{first}eval") == (names[0], "eval")
