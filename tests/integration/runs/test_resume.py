"""No committed step is lost, whatever is killed, whenever; and a resumed run goes on bit for bit."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import time
from pathlib import Path

import psutil
import pytest
import torch
from tiny_run import CONFIG, TINY, TinyRun, kill_tree, wait_until

from rlhpc.checkpoint.state import load_state, load_tensors
from rlhpc.cli import main

TWO_RANKS = 'cluster.component_placement={actor: "0:0-1", rollout: "0:0-1", env: "0:0-1"}'


def same(a: object, b: object) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and torch.equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return isinstance(b, (list, tuple)) and len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def assert_identical(run: TinyRun, reference: TinyRun, step: int = 20) -> None:
    ours, theirs = run.checkpoint(step), reference.checkpoint(step)
    assert same(load_tensors(ours / "model.safetensors"), load_tensors(theirs / "model.safetensors")), "weights differ"
    assert same(load_state(ours / "optimizer.pt"), load_state(theirs / "optimizer.pt")), "optimizer differs"
    assert run.rows() == reference.rows(), "metric rows differ"


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TinyRun]:
    """Uninterrupted runs, by layout."""
    found = {}
    for name, overrides in (("one", []), ("two", [TWO_RANKS, "rollout.pipeline_stage_num=2"])):
        found[name] = TinyRun(tmp_path_factory.mktemp(name), *overrides)
        found[name].train()
    return found


def test_two_runs_of_one_seed_are_identical_and_of_two_seeds_are_not(references, tmp_path):
    again, other = TinyRun(tmp_path / "again"), TinyRun(tmp_path / "other", "runner.seed=2")
    again.train()
    other.train()
    assert_identical(again, references["one"])
    assert other.rows() != again.rows()


@pytest.mark.parametrize("moment", range(3))
def test_killed_anywhere_and_resumed_is_bit_identical(references, tiny, moment):
    """Driver, fork server and all workers at once, at seeded moments of the run; twice in a row, once while it starts."""
    chance = random.Random(moment)
    process, first = tiny.start(), chance.randint(1, 6)
    wait_until(lambda: tiny.steps() >= first)
    time.sleep(chance.uniform(0, 0.05))
    kill_tree(process)
    second = tiny.steps() + chance.randint(1, 5)
    process = tiny.start("runner.resume_dir=auto")
    if moment:
        wait_until(lambda: tiny.steps() >= second or process.poll() is not None)
    time.sleep(chance.uniform(0, 0.05) if moment else 0.4)
    kill_tree(process)
    if not tiny.checkpoint(20).exists() or len(tiny.rows()) < 20:
        tiny.train("runner.resume_dir=auto")
    assert_identical(tiny, references["one"])


def test_killed_during_a_save_and_resumed_is_bit_identical(references, tiny):
    process = tiny.start()
    folder = tiny.root / "checkpoints"
    wait_until(lambda: tiny.checkpoint(6).exists())
    wait_until(lambda: any(p.name.startswith(".") for p in folder.iterdir()), pause=0.0005)
    kill_tree(process)
    tiny.train("runner.resume_dir=auto")
    assert_identical(tiny, references["one"])


def test_two_ranks_and_two_stages_resume_bit_identical(references, tmp_path):
    run = TinyRun(tmp_path, TWO_RANKS, "rollout.pipeline_stage_num=2")
    process = run.start()
    wait_until(lambda: run.checkpoint(6).exists())
    kill_tree(process)
    run.train("runner.resume_dir=auto")
    assert_identical(run, references["two"])


def test_layouts_learn_the_same_and_resume_each_other(references, tmp_path):
    """One rank a role, or two with two stages: the same data and, up to rounding, the same updates."""
    one, two = references["one"].rows(), references["two"].rows()
    for a, b in zip(one[:3], two[:3], strict=True):
        assert a.keys() == b.keys()
        for key in a:
            assert a[key] == pytest.approx(b[key], rel=2e-3, abs=2e-4, nan_ok=True), key
    run = TinyRun(tmp_path)
    process = run.start()
    wait_until(lambda: run.checkpoint(3).exists())
    kill_tree(process)
    run.overrides += [TWO_RANKS, "rollout.pipeline_stage_num=2"]
    run.train("runner.resume_dir=auto")
    assert [row["step"] for row in run.rows()] == list(range(1, 21))


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGUSR2, 75)])
def test_a_signal_saves_and_the_run_goes_on_from_there(references, tiny, number, code):
    process = tiny.start()
    wait_until(lambda: tiny.steps() >= 1)
    process.send_signal(number)
    _, err = process.communicate(timeout=30)
    assert process.returncode == code, err
    steps = [int(p.name.removeprefix("global_step_")) for p in (tiny.root / "checkpoints").glob("global_step_*")]
    assert max(steps) == tiny.rows()[-1]["step"]
    tiny.train("runner.resume_dir=auto")
    assert_identical(tiny, references["one"])


@pytest.mark.parametrize("damage", ["truncated", "altered"])
def test_a_damaged_checkpoint_is_skipped_by_auto_and_refused_by_name(tiny, damage):
    tiny.train("runner.max_steps=6")
    victim = tiny.checkpoint(6) / "model.safetensors"
    data = bytearray(victim.read_bytes())
    if damage == "truncated":
        data = data[:-10]
    else:
        data[-5] ^= 1
    victim.write_bytes(data)
    by_name = tiny.train("runner.max_steps=8", f"runner.resume_dir={tiny.checkpoint(6)}", code=2)
    assert "model.safetensors" in by_name and by_name.count("rlhpc: error:") == 1 and "Traceback" not in by_name
    skipped = tiny.train("runner.max_steps=8", "runner.resume_dir=auto")
    assert "global_step_6" in skipped and "model.safetensors" in skipped
    assert [row["step"] for row in tiny.rows()] == list(range(1, 9))


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("env.train.env_id=Acrobot-v1", "env.train.env_id is 'CartPole-v1' there and 'Acrobot-v1' here"),
        ("actor.model.hidden_sizes=[32,32]", "actor.model.hidden_sizes is [64, 64] there and [32, 32] here"),
    ],
    ids=["environment", "model"],
)
def test_a_checkpoint_of_something_else_is_refused_before_anything_starts(references, tmp_path, capfd, override, says):
    checkpoint = next(iter(references.values())).checkpoint(20)
    words = [*TINY, f"runner.run_dir={tmp_path}", f"runner.resume_dir={checkpoint}", override]
    assert main(["train", str(CONFIG), *words]) == 2
    said = capfd.readouterr().err
    assert said.startswith("rlhpc: error: runner.resume_dir: ") and says in said and said.count("rlhpc: error:") == 1
    assert not list(tmp_path.iterdir())


def test_a_run_with_checkpoints_is_not_started_over_by_accident(tiny):
    tiny.train("runner.max_steps=3")
    message = tiny.train("runner.max_steps=3", code=2)
    assert "runner.resume_dir=auto" in message and message.count("rlhpc: error:") == 1


def members(run: TinyRun) -> dict[str, int]:
    """Pids of the ranks by `group-rank`, from the registry."""
    import json

    found = {}
    for path in run.root.glob("registry/*/members/[!.]*.json"):
        found[path.stem] = int(json.loads(path.read_text())["pid"])
    return found


@pytest.mark.parametrize("victim", ["env-0", "rollout-0", "actor-0"])
def test_a_killed_worker_ends_the_run_at_once_and_says_who(tiny, victim):
    process = tiny.start("runner.max_steps=100000")
    wait_until(lambda: tiny.steps() >= 1)
    tree = psutil.Process(process.pid).children(recursive=True)
    os.kill(members(tiny)[victim], signal.SIGKILL)
    started = time.monotonic()
    _, err = process.communicate(timeout=20)
    assert time.monotonic() - started < 8
    group, rank = victim.split("-")
    assert process.returncode == 1
    assert f"{group}[{rank}]" in err and "signal 9" in err and f"{victim}.err" in err
    assert err.count("rlhpc: error:") == 1
    _, left = psutil.wait_procs(tree, timeout=10)
    assert not [p for p in left if p.status() != psutil.STATUS_ZOMBIE]
    left = [p for root in ("/tmp", "/dev/shm") for p in Path(root).glob("rlhpc-*") if holds(p, process.pid)]
    assert left == []


def holds(path: Path, pid: int) -> bool:
    """Whether a scratch folder was made by the driver `pid` (its sockets carry the pid)."""
    try:
        return any(f"-{pid}-" in p.name for p in path.iterdir())
    except (NotADirectoryError, FileNotFoundError):
        return False


@pytest.mark.parametrize("victims", [("env-0",), ("env-0", "env-1"), ("rollout-0",), ("env-1", "rollout-0")])
def test_environments_and_rollout_start_again_alone(references, tmp_path, monkeypatch, victims):
    """In a submitted run each such rank starts again alone; only `env/lost_…` tells of it."""
    monkeypatch.setenv("RLHPC_MAX_RESTARTS", "2")
    run = TinyRun(tmp_path, TWO_RANKS, "rollout.pipeline_stage_num=2")
    process = run.start()
    members = run.root / "registry" / "local-0" / "members"
    wait_until(lambda: run.checkpoint(3).joinpath("COMPLETE").exists())

    def pids():
        found = (json.loads(path.read_text()) for path in members.glob("*-*.json"))
        return {f"{record['group']}-{record['rank']}": record["pid"] for record in found}

    before = pids()
    for name in victims:
        os.kill(before[name], signal.SIGKILL)
    wait_until(lambda: run.lost())
    after = pids()
    _, said = process.communicate(timeout=240)
    assert process.returncode == 0, said
    assert "start again from global_step_" in said and "all other ranks stay" in said
    assert not (run.root / "registry" / "local-1").exists(), "the driver never started again"
    assert {name for name in before if after[name] != before[name]} == set(victims)
    transitions, lost = 8 * 32, run.lost()
    assert lost["ranks"] == len(victims) and lost["steps"] >= transitions and lost["steps"] % transitions == 0
    assert_identical(run, references["two"])


def test_environments_that_die_again_and_again_end_the_run(tmp_path, monkeypatch):
    monkeypatch.setenv("RLHPC_MAX_RESTARTS", "1")
    run = TinyRun(tmp_path, "runner.save_interval=2", "runner.max_steps=200", "algorithm.rollout_steps=256")
    process = run.start()
    record = run.root / "registry" / "local-0" / "members" / "env-0.json"
    wait_until(lambda: run.checkpoint(2).joinpath("COMPLETE").exists())
    killed: set[int] = set()
    while process.poll() is None:
        with contextlib.suppress(FileNotFoundError, ValueError):
            pid = json.loads(record.read_text())["pid"]
            if pid not in killed:
                killed.add(pid)
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.005)
    _, said = process.communicate()
    assert process.returncode == 1 and len(killed) >= 2
    assert "env[0] on node" in said and "killed by signal 9" in said and "Traceback" not in said
