"""Training on the cluster: one het job, walltime chains, preemption, cancellation."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from .cluster import SlurmCluster
from .jobs import end_jobs, wait_gone
from .processes import ClusterError
from .runs import ROOT, SITE, SlurmRun, until

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(900)]


@pytest.fixture(autouse=True)
def no_job_is_left(slurm: SlurmCluster) -> Iterator[None]:
    yield
    end_jobs(slurm)


#: Queries of a round, after which Snakemake's executor has no states (`slurm-status-attempts`).
ATTEMPTS = 5
TINY = ("algorithm.rollout_steps=64", "algorithm.update_epochs=2", "env.eval.num_episodes=4")


def same_weights(one: SlurmRun, other: SlurmRun, step: int) -> bool:
    mine, theirs = one.weights(step), other.weights(step)
    return mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)


def workflow(run: SlurmRun, profile: str, *overrides: str, timeout: float = 400) -> str:
    """`snakemake --profile profiles/<profile>` with fast polling; what it said."""
    words = " ".join([f"runner.run_dir={run.folder / 'runs'}", f"runner.name={run.root.name}", *overrides])
    done = subprocess.run(
        [sys.executable, "-m", "snakemake", "--profile", str(ROOT / "profiles" / profile), "--directory", str(run.folder),
         "--snakefile", str(ROOT / "workflow" / "Snakefile"), "--slurm-init-seconds-before-status-checks", "2",
         "--seconds-between-status-checks", "2", "--config", f"run={run.config}", f"site={run.site}", f"overrides={words}"],
        env=run.environment, capture_output=True, text=True, timeout=timeout,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr + run.account()
    return done.stdout + done.stderr


def test_the_quickstarts_task_as_one_het_job(slurm: SlurmCluster, tmp_path: Path) -> None:
    """`snakemake --profile profiles/slurm`: trained to 475, evaluated, exported, reported; a step for each group."""
    run = SlurmRun(slurm, tmp_path, name="het")
    workflow(run, "slurm" if slurm.has_accounting else "slurm-no-accounting", timeout=600)
    results = [json.loads(path.read_text()) for path in run.root.glob("eval/global_step_*/default.json")]
    assert len(results) == 3 and max(r["return_mean"] for r in results) >= 475
    assert {r["episodes"] for r in results} == {100}
    assert list(run.root.glob("export/*/model.safetensors")) and (run.root / "report" / "index.html").exists()
    placement = json.loads((run.root / "provenance.json").read_text())["placement"]
    assert placement["env"][0]["node_rank"] == 1 and placement["actor"][0]["accelerators"] == [0]
    if slurm.has_accounting:
        job = run.job
        table = slurm.run("sacct", "--jobs", job, "--noheader", "--parsable2", "--format=JobID,JobName,AllocTRES")
        steps = {(line.split(".")[0], line.split("|")[1]) for line in table.splitlines() if "." in line.split("|")[0]}
        assert {(f"{job}+0", "actor"), (f"{job}+0", "rollout"), (f"{job}+1", "env")} <= steps, table


SHORT = ("runner.max_steps=6", "runner.segments=2", "env.eval.num_episodes=4", "algorithm.update_epochs=1")


def test_without_accounting(slurm_without_accounting: SlurmCluster, tmp_path: Path) -> None:
    """Nothing hangs where sacct knows nothing; the report says so."""
    run = SlurmRun(slurm_without_accounting, tmp_path)
    workflow(run, "slurm-no-accounting", *SHORT)
    assert len(list(run.root.glob("eval/*/default.json"))) == 2 and (run.root / "report" / "index.html").exists()


def test_accounting_that_fails_half_the_time(slurm: SlurmCluster, tmp_path: Path) -> None:
    """Every other sacct fails, some of them only after a while, and Snakemake's own fail for several rounds at first."""
    if not slurm.has_accounting:
        pytest.skip("this cluster has no accounting that could fail")
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "sacct").write_text(
        "#!/bin/bash\n"
        f"n=$(cat {tools}/count 2>/dev/null || echo 0); echo $((n + 1)) > {tools}/count\n"
        f'case "$*" in *--name*) m=$(cat {tools}/rounds 2>/dev/null || echo 0); echo $((m + 1)) > {tools}/rounds\n'
        f"  [ $m -lt {2 * ATTEMPTS + 1} ] && exit 1;; esac\n"
        "if [ $((n % 2)) = 0 ]; then [ $((n % 4)) = 0 ] && sleep 3; echo 'sacct: error: Problem talking to the database' >&2\n"
        f'exit 1; fi\nexec {shutil.which("sacct")} "$@"\n'
    )
    (tools / "sacct").chmod(0o755)
    run = SlurmRun(slurm, tmp_path)
    run.environment["PATH"] = f"{tools}:{run.environment['PATH']}"
    workflow(run, "slurm", *SHORT)
    assert len(list(run.root.glob("eval/*/default.json"))) == 2
    assert int((tools / "count").read_text()) >= 4
    assert int((tools / "rounds").read_text()) > 2 * ATTEMPTS + 1


def test_two_at_once_submit_each_job_once(slurm: SlurmCluster, tmp_path: Path) -> None:
    """The same command twice: one trains, evaluates and converts, and the other waits for its jobs. Each has a log."""
    run = SlurmRun(slurm, tmp_path)
    profile = ROOT / "profiles" / ("slurm" if slurm.has_accounting else "slurm-no-accounting")
    command = [
        sys.executable, "-P", "-m", "rlhpc.cli", "run", str(run.config), *run.overrides, *SHORT,
        "--profile", str(profile), "--site", str(run.site),
        "--", "--slurm-init-seconds-before-status-checks", "2", "--seconds-between-status-checks", "2",
    ]  # fmt: skip
    both = []
    for number in range(2):
        with (tmp_path / f"said-{number}.txt").open("w") as said:
            process = subprocess.Popen(
                command, env=run.environment, cwd=tmp_path, stdout=said, stderr=said, start_new_session=True
            )
        SlurmRun.submitted.append(process)  # type: ignore[arg-type]
        both.append(process)
        until(lambda: run.job, f"training is submitted\n{run.account()}", 300)
    until(lambda: all(one.poll() is not None for one in both), f"both have ended\n{run.account()}", 800)
    said = "\n".join((tmp_path / f"said-{number}.txt").read_text() for number in range(2))
    assert [one.returncode for one in both] == [0, 0], said + run.account()
    logs = [(run.root / "logs" / "workflow" / name).read_text() for name in ("snakemake.log", "snakemake-2.log")]
    submitted = [re.findall(r"has been submitted with SLURM jobid (\d+)", log) for log in logs]
    attached = [re.findall(r"waits for SLURM job (\d+), submitted for it before", log) for log in logs]
    assert sum(map(len, submitted)) == 3, "two evaluations and a conversion\n" + said
    assert set(attached[0]) <= set(submitted[1]) and set(attached[1]) <= set(submitted[0])
    assert sum(map(len, attached)) == 3, said
    assert len(list(run.root.glob("eval/*/default.json"))) == 2 and (run.root / "report" / "index.html").exists()


def test_every_rank_sees_its_own_part(slurm: SlurmCluster, tmp_path: Path) -> None:
    """Masks, nodes and cores of the ranks, as the placement has them."""
    run = SlurmRun(slurm, tmp_path, *TINY, "runner.max_steps=100000")
    process = run.submit()
    until(lambda: len(run.members()) == 4, "all ranks are there")
    ranks = run.members()
    seen = {}
    for name in ("actor-0", "rollout-0", "env-0"):
        environment = Path(f"/proc/{ranks[name]['pid']}/environ").read_bytes().split(b"\0")
        seen[name] = dict(v.decode(errors="replace").split("=", 1) for v in environment if b"=" in v)
    assert ranks["actor-0"]["node"] == ranks["rollout-0"]["node"] != ranks["env-0"]["node"]
    assert seen["actor-0"]["CUDA_VISIBLE_DEVICES"].count(",") == 1  # what the step was given; a rank narrows it
    assert "CUDA_VISIBLE_DEVICES" not in seen["env-0"]
    assert [ranks[name]["accelerators"] for name in ("actor-0", "rollout-0", "env-0")] == [[0], [1], []]
    run.training()
    assert "was cancelled" in run.rlhpc("cancel", str(run.root))
    assert process.wait(60) != 0
    assert run.committed() == run.step() > 0, "it saved before it ended"
    wait_gone(slurm, run.job)


@pytest.mark.timeout(1500)  # on a busy machine, where an attempt does not get far
def test_a_walltime_chain_is_bit_identical(slurm: SlurmCluster, tmp_path: Path) -> None:
    """A run whose walltime is a third of what it needs: a chain of requeues, and the same numbers at the end."""
    # 90 s of training at the least; of a walltime of 60 s, 50 are for starting and training
    steps = ("runner.max_steps=200", "runner.save_interval=20", "algorithm.rollout_steps=96")
    whole = SlurmRun(slurm, tmp_path, *steps, name="whole", light=True)
    chain = SlurmRun(
        slurm, tmp_path, *steps, "cluster.time=00:01:00", "cluster.signal_lead_s=6", "runner.save_reserve_s=10",
        name="chain", light=True,
    )  # fmt: skip
    first = whole.submit()
    second = chain.submit()

    def is_over() -> bool:
        """Gives the chain a minute more after an attempt that was over before its first step, as on a busy machine."""
        nonlocal minutes
        begun = [attempt["step"] for attempt in chain.attempts]
        if len(begun) - len(set(begun)) >= minutes:
            with contextlib.suppress(ClusterError):  # of a job that is just being requeued: at the next look
                slurm.run("scontrol", "update", f"JobId={chain.job}", f"TimeLimit={minutes + 1}")
                minutes += 1
        return second.poll() is not None

    minutes = 1
    until(is_over, f"the chain has ended\n{chain.account()}", 1200)
    chain.finish(second, 1)
    whole.finish(first, 1200)
    assert len(chain.attempts) >= (3 if minutes == 1 else 2), chain.attempts
    assert chain.rows() == whole.rows() and [row["step"] for row in chain.rows()] == list(range(1, 201))
    assert same_weights(chain, whole, 200)
    begun = [attempt["step"] for attempt in chain.attempts]
    assert begun == sorted(begun), "each attempt went on where the one before had saved"


def test_no_progress_is_the_end(slurm: SlurmCluster, tmp_path: Path) -> None:
    """A job that never gets as far as a checkpoint is not requeued for ever."""
    # A start takes more than the 5 s that are left beside the reserve.
    run = SlurmRun(slurm, tmp_path, "cluster.time=00:01:00", "cluster.signal_lead_s=10", "runner.save_reserve_s=55",
                   "runner.max_steps=500")  # fmt: skip
    said = run.finish(run.submit(), 300, code=1)
    assert "made no progress in 2 attempts" in said and "save more often" in said


def test_preemption(slurm: SlurmCluster, tmp_path: Path) -> None:
    """A more important job takes the nodes: save, requeue, go on."""
    run = SlurmRun(slurm, tmp_path, "runner.max_steps=100", "runner.save_interval=5", light=True)
    site = json.loads(json.dumps(SITE))
    site["cluster"]["node_groups"] = [{"label": "gpu", "partition": "preempt", "gres_name": "gpu:fake"},
                                      {"label": "cpu", "partition": "preempt"}]  # fmt: skip
    run.site.write_text(json.dumps(site))
    process = run.submit()
    run.training()
    before = run.committed()
    nodes = str(len(slurm.nodes))
    slurm.run("sbatch", "--partition=all", f"--nodes={nodes}", "--exclusive", "--output=/dev/null", "--wrap", "sleep 5")
    until(lambda: len(run.attempts) > 1, f"it starts again\n{run.account()}", 150)
    run.finish(process)
    assert run.attempts[1]["step"] >= before
    assert [row["step"] for row in run.rows()] == list(range(1, 101))
