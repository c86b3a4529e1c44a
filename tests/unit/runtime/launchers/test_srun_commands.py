"""Command lines of job steps: the options of `cluster.srun`, and the environment that a step starts from."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rlhpc.runtime.launchers.srun_commands import (
    broken_srun_rule,
    clearing_step,
    killing_step,
    nsys_command,
    nsys_options,
    step_environment,
    with_default_options,
)

VARIABLES = Path(__file__).parents[1] / "slurm_variables"
#: Batch steps' environments by version of Slurm: nodes alone, tasks with their resources, `--tres-per-task`, a het job.
BATCH_STEPS = sorted(VARIABLES.glob("batch_*.env"))
#: Variables that say which job this is and where its nodes are.
OF_THE_JOB = re.compile(
    r"SLURM_(JOB_|JOBID$|CONF$|CLUSTER_NAME$|WORKING_CLUSTER$|HET_SIZE$|PACK_SIZE$|NODELIST$|NODE_ALIASES$|SUBMIT_(DIR|HOST)$"
    r"|TOPOLOGY_ADDR|PRIO_PROCESS$|CPUS_ON_NODE$|GET_USER_ENV$)|SLURMD_NODENAME$|TMPDIR$"
)
#: Variables that resize, place or bind a step, of which srun of that version fails or starts too few tasks.
HARMFUL = re.compile(
    r"SLURM_(NTASKS|NPROCS|NNODES|CPUS_PER_TASK|TRES_PER_TASK|TRES_BIND|GPUS|GPU_BIND|MEM_PER|HINT|THREADS_PER_CORE|DISTRIBUTION"
    r"|EXCLUSIVE|OOM_KILL_STEP|STEP_ID|STEPID|EXPORT_ENV)|SRUN_|.*_VISIBLE_DEVICES$"
)


def variables(file: Path) -> dict[str, str]:
    return dict(line.split("=", 1) for line in file.read_text().splitlines())


def test_there_are_environments_of_three_versions() -> None:
    assert {file.name.split("_")[1] for file in BATCH_STEPS} == {"22.05", "24.11", "26.05"}
    assert sum(any(map(HARMFUL.match, variables(file))) for file in BATCH_STEPS) == len(BATCH_STEPS)


@pytest.mark.parametrize("file", BATCH_STEPS, ids=lambda file: file.stem)
def test_a_step_starts_from_the_job_alone(file: Path) -> None:
    batch = variables(file)
    step = step_environment(batch)
    assert [name for name in step if not OF_THE_JOB.match(name)] == []
    assert [name for name in step if HARMFUL.match(name)] == []
    assert {name for name in batch if name.startswith("SLURM_JOB_")} <= set(step), "what names the job stays"
    assert step["SLURM_CONF"] and step["TMPDIR"] == batch["TMPDIR"]


def test_the_forms_of_each_component() -> None:
    """The batch step of a het job has each of these once for each component."""
    names = [
        f"SLURM_{name}_HET_GROUP_{k}" for name in ("TRES_PER_TASK", "CPUS_PER_TASK", "MEM_PER_NODE") for k in (0, 1)
    ]
    users = ["SLURM_EXCLUSIVE", "SLURM_OOM_KILL_STEP", "SRUN_CPUS_PER_TASK", "SRUN_CONTAINER", "SRUN_EXPORT_ENV"]
    assert step_environment(dict.fromkeys([*names, *users], "1")) == {}


@pytest.mark.parametrize(
    "option",
    [
        "--nodes=2", "--ntasks=1", "--nodelist=n1", "--het-group=0", "--kill-on-bad-exit=1", "--gres=gpu:1", "--overlap",
        "--jobid=7", "--output=x", "--pty", "--multi-prog", "--preserve-env", "--tres-per-task=cpu:2", "--exclusive",
        # abbreviations, and letters
        "--nod=2", "--kill", "--lab", "-N2", "-n1", "-wn1", "-K", "-l", "-o/dev/null",
    ],
)  # fmt: skip
def test_options_of_the_launcher_are_refused(option: str) -> None:
    rule = broken_srun_rule(["--network=single_node_vni", option])
    assert rule.startswith(option.partition("=")[0][: None if option.startswith("--") else 2])
    assert "that rlhpc itself sets" in rule and "allowed: other options of srun" in rule


@pytest.mark.parametrize(
    ("option", "rule"),
    [
        ("hostname", "'hostname' is not an option: write each option as one word"),
        ("--container-image img", "is not an option: write each option as one word"),
        ("--export=NONE", "allowed: --export=ALL"),
        ("--export=PATH", "allowed: --export=ALL"),
    ],
)
def test_words_that_are_no_options(option: str, rule: str) -> None:
    assert rule in broken_srun_rule([option])


@pytest.mark.parametrize(
    "option",
    [
        "--mpi=pmix", "--network=no_vni", "--container-image=/a b.sqsh", "--container-mounts=/tmp:/tmp,/dev/shm:/dev/shm",
        "--no-container-mount-home", "--export=ALL,FI_PROVIDER=cxi", "--cpu-bind=none", "--mem-bind=local", "--time=10",
        "--task-prolog=/site/prolog.sh", "--propagate=MEMLOCK", "-v", "-t10", "--gres-flags=allow-task-sharing",
    ],
)  # fmt: skip
def test_other_options_are_taken(option: str) -> None:
    assert broken_srun_rule([option]) == ""


def test_no_mpi_unless_it_is_asked_for() -> None:
    assert with_default_options([]) == ["--mpi=none"]
    assert with_default_options(["--network=x"]) == ["--mpi=none", "--network=x"]
    assert with_default_options(["--mpi=pmix", "--network=x"]) == ["--mpi=pmix", "--network=x"]


def test_steps_that_help_have_the_options_too() -> None:
    for argv in (
        clearing_step(0, 1, ["n1"], ["/tmp/x"], ["--mpi=pmix"]),
        killing_step(0, 1, "n1", "A=b", 0, Path("/sockets"), ["--mpi=pmix"]),
    ):
        assert argv[:3] == ["srun", "--overlap", "--mpi=pmix"]
    assert "--mpi=none" in clearing_step(0, 1, ["n1"], ["/tmp/x"])


def test_options_of_nsight_systems_are_the_users_then_those_of_the_steps_then_the_default_ones() -> None:
    command = nsys_command(Path("r"), "actor", nsys_options({}))
    assert command[:2] == ["nsys", "profile"] and "--sample=none" in command and command[-1] == "--output=r/actor-%h-%p"
    assert not [word for word in command if word.startswith("--capture-range")]
    user_options = {"t": "cuda", "sample": "process-tree", "python-backtrace": True, "cuda-graph-trace": False}
    command = nsys_command(Path("r"), "actor", nsys_options(user_options, {5, 6}))
    assert {"--trace=cuda", "--sample=process-tree", "--python-backtrace", "--cuda-graph-trace=false"} < set(command)
    assert {"--capture-range=cudaProfilerApi", "--capture-range-end=stop"} < set(command)
    assert nsys_options({}, {5, 6, 9})["capture-range-end"] == "repeat:2", "two runs of neighbouring steps"
    assert nsys_options({"capture-range": "nvtx"}, {5})["capture-range"] == "nvtx"
