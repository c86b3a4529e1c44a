"""The plan of a run, held by golden files: `UPDATE_GOLDEN=1 pytest tests/unit/jobs/test_plan.py` rewrites them."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from omegaconf import OmegaConf

from rlhpc.jobs.plan import JobPlan, build_plan, job_options, render_plan
from rlhpc.jobs.slurm import minutes_of
from rlhpc.runs.configuration import load_config
from rlhpc.runtime.cluster import Cluster
from rlhpc.runtime.errors import ConfigError, PlacementError
from rlhpc.runtime.launchers import RankProcess
from rlhpc.runtime.launchers.srun import SrunLauncher
from rlhpc.runtime.launchers.srun_commands import SrunStep
from rlhpc.runtime.worker_spec import spec_of

GOLDEN = Path(__file__).parent / "golden"
QUICKSTART = Path(__file__).parents[3] / "configs" / "quickstart.yaml"

ONE_NODE = {"component_placement": {"actor,rollout,env": 0}}
HOMOGENEOUS = {
    "num_nodes": 2,
    "accelerators_per_node": 4,
    "component_placement": {
        "actor": "0-7", "rollout": "0-7:0-3", "env": "4-5:0-3", "reward": {"node_group": "node", "placement": "all"},
    },
    "node_groups": [{"label": "all", "partition": "gpu", "account": "abc", "cpus_per_node": 32, "time": "1-00:00:00"}],
}  # fmt: skip
HET = {
    "num_nodes": 3,
    "component_placement": {
        "actor": {"node_group": "gpu", "placement": "0-2"},
        "rollout": {"node_group": "gpu", "placement": "2:0"},
        "env": {"node_group": "cpu", "placement": "0-1:0-3"},
    },
    "node_groups": [
        {"label": "cpu", "het_component": 1, "num_nodes": 2, "partition": "cpu", "cpus_per_node": 16, "mem": "64G",
         "time": "02:00:00", "python_interpreter": "/opt/sim/bin/python"},
        {"label": "gpu", "het_component": 0, "num_nodes": 1, "partition": "gpu", "gres": "gpu:a100:4,nvme:1",
         "cpus_per_node": 32, "qos": "high", "constraint": "nvlink", "time": "02:00:00"},
    ],
}  # fmt: skip

#: The variables of a job that HET asks for.
HET_JOB = {
    "SLURM_JOB_ID": "7", "SLURM_HET_SIZE": "2", "SLURM_JOB_NODELIST_HET_GROUP_0": "gpu07",
    "SLURM_JOB_NODELIST_HET_GROUP_1": "cpu[08-09]", "SLURM_JOB_CPUS_PER_NODE_HET_GROUP_0": "32",
    "SLURM_JOB_CPUS_PER_NODE_HET_GROUP_1": "16(x2)", "CUDA_VISIBLE_DEVICES": "0,1,2,3",
}  # fmt: skip


def plan(section: dict[str, Any], **options: Any) -> JobPlan:
    return build_plan(OmegaConf.create({"cluster": section, "runner": {"name": "golden"}}), **options)


def compare(name: str, found: JobPlan) -> None:
    text, file = render_plan(found).replace(sys.executable, "python") + "\n", GOLDEN / f"{name}.txt"
    if os.environ.get("UPDATE_GOLDEN"):
        file.write_text(text)
    assert text == file.read_text()


@pytest.fixture(autouse=True)
def _elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with two accelerators and no Slurm."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.setenv("PATH", "")


def test_local() -> None:
    section = {**ONE_NODE, "component_placement": {"actor,rollout": "0-1", "env": "0:0-3", "judge": "1"}}
    groups = [{"label": "here", "python_interpreter": "/opt/judge/bin/python"}]
    section["component_placement"]["judge"] = {"node_group": "here", "placement": 1}
    compare("plan_local", plan({**section, "node_groups": groups}, cluster=Cluster.local(1, 2, groups, cpus=4)))


def test_one_slurm_node() -> None:
    compare("plan_one_node", plan({**ONE_NODE, "accelerators_per_node": 1}, launcher="slurm"))


def test_homogeneous() -> None:
    compare("plan_homogeneous", plan(HOMOGENEOUS))


def test_het() -> None:
    compare("plan_het", plan(HET))


def test_inside_the_allocation() -> None:
    found = plan(HET, cluster=Cluster(HET, environ=HET_JOB))
    assert [n.name for n in found.nodes] == ["gpu07", "cpu08", "cpu09"] and found.launcher == "slurm"
    assert [s.argv for s in found.steps] == [s.argv for s in plan(HET).steps]
    assert found.steps[-1].hosts == ("cpu08", "cpu08", "cpu09", "cpu09")


IMAGE = {"container": ["apptainer", "exec", "rlhpc.sif"], "container_python": "/opt/venv/bin/python"}
#: Options of each step.
STEP_OPTIONS = ({}, {"container": ["apptainer", "exec", "rlhpc.sif"]}, IMAGE, {"srun": ["--mpi=pmix", "--network=x"]})


@pytest.mark.parametrize("more", STEP_OPTIONS)
def test_what_is_planned_is_what_starts(more: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The steps of a plan made without Slurm are those that the driver starts in the job that the plan asked for."""

    class Recorded:
        running = True

        def __init__(self, planned: SrunStep, processes: list[RankProcess], *more: Any) -> None:
            self.processes = processes
            started.append(planned)

        def listen(self) -> None:
            pass

    started: list[SrunStep] = []
    monkeypatch.setattr("rlhpc.runtime.launchers.srun.JobStep", Recorded)
    section = {**HET, **more}
    cluster = Cluster(section, environ=HET_JOB)
    nobody: Any = SimpleNamespace(exited=None)
    starter = SrunLauncher(tmp_path, nobody, nobody)
    for group, ranks in plan(section, cluster=cluster).placements.items():
        specs = [
            spec_of(group, rank, len(ranks), cluster, {}, 1, tmp_path, in_step=True, registry="", token="", body=b"")
            for rank in ranks
        ]
        starter.start([RankProcess(spec, starter) for spec in specs], cluster)
    assert started == list(plan(section, cluster=cluster).steps)
    assert [step.argv for step in started] == [step.argv for step in plan(section).steps]


def test_options_of_srun_are_in_each_step() -> None:
    """A type of MPI replaces the default, and the launcher's own options follow, which srun then takes."""
    plain = plan(HET).steps
    for words in (["--network=x"], ["--mpi=pmix", "--network=x"]):
        steps = plan({**HET, "srun": words}).steps
        default = [] if words[0].startswith("--mpi") else ["--mpi=none"]
        for before, step in zip(plain, steps, strict=True):
            assert list(step.argv[2:]) == ["--overlap", *default, *words, *before.argv[4:]]


def test_the_python_of_an_image() -> None:
    """It starts ranks of job steps alone; a node group's own Python comes first."""
    commands = {step.group: step.argv for step in plan({**HET, **IMAGE}).steps}
    at = {group: argv.index("rlhpc.sif") for group, argv in commands.items()}
    assert {group: argv[at[group] + 1] for group, argv in commands.items()} == {
        "actor": "/opt/venv/bin/python", "rollout": "/opt/venv/bin/python", "env": "/opt/sim/bin/python"
    }  # fmt: skip
    local = plan({**IMAGE, "component_placement": {"actor": 0}}, launcher="local")
    assert sys.executable in local.steps[0].argv and "apptainer" not in local.steps[0].argv


def test_cores_of_the_whole_cluster() -> None:
    found = plan({**ONE_NODE, "cpus_per_node": 8}, launcher="slurm")
    assert "#SBATCH --cpus-per-task=8" in found.components[0].directives
    assert all("--cpus-per-task=8" in step.argv and "--overcommit" not in step.argv for step in found.steps)
    assert "the site's number of cores" not in render_plan(found)


def test_a_group_over_two_components_is_two_steps() -> None:
    section = {**HET, "component_placement": {"env": {"node_group": "node", "placement": "0-2:0-5"}}}
    first, second = plan(section).steps
    assert (first.ranks, first.component, second.ranks, second.component) == ((0, 1), 0, (2, 3, 4, 5), 1)
    assert "--gres=none" in first.argv and "--het-group=1" in second.argv


def test_parameters_for_submitit() -> None:
    parameters = plan(HET).submitit_parameters()
    assert parameters["gres"] == "gpu:a100:4,nvme:1" and parameters["cpus_per_task"] == 32 and parameters["nodes"] == 1
    assert parameters["time"] == 120
    assert parameters["setup"][:2] == ["#SBATCH hetjob", "#SBATCH --partition=cpu"]
    assert plan({**ONE_NODE, "accelerators_per_node": 0}, launcher="slurm").submitit_parameters() == {
        "nodes": 1, "ntasks_per_node": 1, "setup": [],
        "additional_parameters": {"signal": "B:USR2@120"},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("time", "minutes"),
    [("90", 90), ("30:00", 30), ("00:01:30", 2), ("02:00:00", 120), ("1-12", 2160), ("1-12:30", 2190), ("0-0:0:1", 1)],
)
def test_walltimes(time: str, minutes: int) -> None:
    assert minutes_of(time) == minutes


def test_options_of_the_whole_cluster() -> None:
    """A group takes from `cluster` what it leaves out; further options and set-up lines belong to the job."""
    section = {
        **HET, "account": "rl", "time": "01:00:00", "gres_name": "gpu:a100", "setup": ["module load cuda"],
        "sbatch": ["--reservation=rl"], "signal_lead_s": 90,
    }  # fmt: skip
    made = plan(section)
    assert all("#SBATCH --account=rl" in component.directives for component in made.components)
    assert "#SBATCH --time=02:00:00" in made.components[1].directives
    parameters = made.submitit_parameters()
    assert parameters["setup"][0] == "#SBATCH --reservation=rl" and parameters["setup"][-1] == "module load cuda"
    further = parameters["setup"].index("#SBATCH hetjob")  # what Slurm reads before it, it takes for the first alone
    assert "#SBATCH --reservation=rl" in parameters["setup"][further:]
    assert made.test_script().count("#SBATCH --reservation=rl") == 2
    assert parameters["additional_parameters"] == {"signal": "B:USR2@90"}
    alone = plan({**ONE_NODE, "accelerators_per_node": 2, "gres_name": "gpu:a100"}, launcher="slurm")
    assert "#SBATCH --gres=gpu:a100:2" in alone.components[0].directives


def test_submitit_takes_them(tmp_path: Path) -> None:
    """What submitit writes from them is the batch script of the plan."""
    import submitit.slurm.slurm as slurm

    script = slurm._make_sbatch_string(command="true", folder=tmp_path, **plan(HET).submitit_parameters()).splitlines()
    first, second = plan(HET).components
    second_at = script.index("#SBATCH hetjob")
    # submitit counts the first component's walltime in minutes
    asked = {line.replace("--time=02:00:00", "--time=120") for line in first.directives}
    assert asked <= set(script[:second_at])
    assert tuple(script[second_at : second_at + len(second.directives)]) == second.directives


@pytest.mark.parametrize(
    ("section", "launcher"),
    [
        (ONE_NODE, "local"),
        ({**ONE_NODE, "num_nodes": 2}, "slurm"),
        ({**ONE_NODE, "node_groups": [{"label": "a", "partition": "gpu", "gres": "gpu:1"}]}, "slurm"),
        ({**ONE_NODE, "node_groups": [{"label": "a", "env_vars": {"X": "1"}}]}, "local"),
    ],
)
def test_launcher_that_fits(section: dict[str, Any], launcher: str) -> None:
    assert plan(section).launcher == launcher


def test_slurm_where_sbatch_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "sbatch").write_text("#!/bin/sh\n")
    (tmp_path / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert plan(ONE_NODE).launcher == "slurm"
    assert plan(ONE_NODE, cluster=Cluster(environ={})).launcher == "slurm"
    assert plan(ONE_NODE, launcher="local").launcher == "local"


def test_jobs_beside_training_find_a_partition() -> None:
    """On a cluster without a default one, where the site names those of the node groups only."""
    groups = [
        {"label": "gpu", "partition": "g", "account": "rl", "gres_name": "gpu:a100"},
        {"label": "cpu", "partition": "c", "qos": "low"},
    ]
    assert job_options({"node_groups": groups}, {}) == {"partition": "c", "qos": "low"}
    assert job_options({"node_groups": groups}, {"gres": "gpu:1"}) == {"partition": "g", "account": "rl"}
    assert job_options({"node_groups": groups[:1]}, {"account": "me"}) == {"partition": "g", "account": "me"}
    assert job_options({"node_groups": groups}, {"partition": "own"}) == {"partition": "own"}
    assert job_options({"node_groups": [{"label": "x"}]}, {}) == {}
    site = {**HET, "node_groups": [{**group, "account": "rl"} for group in HET["node_groups"]]}
    cfg = OmegaConf.create({"cluster": site, "runner": {"name": "x"}, "workflow": {"eval_job": {"mem": "1G"}}})
    assert "# jobs of workflow.eval_job: partition cpu, account rl" in render_plan(build_plan(cfg))


def test_components_in_the_order_of_the_nodes() -> None:
    groups = [{"label": "b", "node_ranks": "1-2", "partition": "b"}]
    found = plan(
        {**ONE_NODE, "num_nodes": 4, "node_groups": [*groups, {"label": "c", "node_ranks": 3, "partition": "c"}]}
    )
    assert [(c.index, c.label, c.nodes) for c in found.components] == [
        (0, "cluster", (0,)), (1, "b", (1, 2)), (2, "c", (3,))
    ]  # fmt: skip
    with pytest.raises(ConfigError, match="nodes of 'cluster' do not follow one another"):
        plan({**ONE_NODE, "num_nodes": 4, "node_groups": groups})


def test_groups_of_one_component_share_its_resources() -> None:
    groups = [
        {"label": "a", "het_component": 0, "node_ranks": 0, "partition": "x"},
        {"label": "b", "het_component": 0, "node_ranks": 1, "partition": "y"},
    ]
    with pytest.raises(ConfigError, match=r"node_groups\[a\+b\].partition is x and y"):
        plan({**ONE_NODE, "num_nodes": 2, "node_groups": groups})


def test_more_ranks_than_cores() -> None:
    groups = [{"label": "a", "partition": "cpu", "cpus_per_node": 2}]
    found = plan({"component_placement": {"env": "0:0-3"}, "node_groups": groups})
    assert "--overcommit" in found.steps[0].argv and found.warnings == ("node0: 4 processes share 2 cores",)


def test_a_limit_of_open_files_that_is_too_low_for_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    section = {"component_placement": {"env": "0:0-15"}}
    monkeypatch.setattr("rlhpc.jobs.plan.file_limit", lambda: 70)
    assert any(
        "16 ranks opens 80 files, and a process may open 70 files here" in warning for warning in plan(section).warnings
    )
    monkeypatch.setattr("rlhpc.jobs.plan.file_limit", lambda: 80)
    assert not any("open" in warning for warning in plan(section).warnings)


def test_bad_placement_and_launcher() -> None:
    with pytest.raises(PlacementError, match="resource 9 does not exist"):
        plan({"component_placement": {"actor": 9}})
    with pytest.raises(ConfigError, match="auto, slurm, local"):
        plan(ONE_NODE, launcher="pbs")


def test_a_whole_configuration() -> None:
    found = build_plan(load_config(QUICKSTART), launcher="local")
    assert found.name == "quickstart" and found.launcher == "local"
    assert [step.group for step in found.steps] == ["actor", "rollout", "env"]


@pytest.mark.parametrize(
    ("time", "lead", "reserve", "key"),
    [
        ("00:01:00", 120, 60, "cluster.signal_lead_s"),
        ("2", 120, 60, "cluster.signal_lead_s"),
        ("00:03:00", 120, 60, None),
        ("00:10:00", 30, 3600, "runner.save_reserve_s"),
        ("01:01:00", 30, 3600, None),
        ("0", 120, 60, None),  # Slurm's word for no limit
    ],
)
def test_a_walltime_without_room_for_a_step_is_refused(time: str, lead: int, reserve: int, key: str | None) -> None:
    words = [f"cluster.time='{time}'", f"cluster.signal_lead_s={lead}", f"runner.save_reserve_s={reserve}"]
    cfg = load_config(QUICKSTART, words)
    build_plan(cfg, launcher="local")
    if key is None:
        build_plan(cfg, launcher="slurm")
        return
    with pytest.raises(
        ConfigError, match=rf"cluster.time is {time} \(cluster\), of which the last {max(lead, reserve)} s .*{key}"
    ):
        build_plan(cfg, launcher="slurm")


def test_slurms_mail_is_asked_for_once() -> None:
    groups = [{"label": "a", "partition": "x", "node_ranks": 0}, {"label": "b", "partition": "y", "node_ranks": 1}]
    mail = {"mail_type": "END,FAIL", "mail_user": "me@example.org"}
    found = plan({**ONE_NODE, **mail, "num_nodes": 2, "node_groups": groups})
    assert [dict(c.options).get("mail-type") for c in found.components] == ["END,FAIL", None]
    assert "#SBATCH --mail-user=me@example.org" in found.components[0].directives
    assert found.submitit_parameters()["mail_type"] == "END,FAIL"
    assert "mail-type" not in dict(plan(ONE_NODE).components[0].options)


@pytest.mark.parametrize("value", ["END;rm", "end", "END FAIL", "END,", "SOON"])
def test_mail_that_slurm_does_not_know_is_refused(value: str) -> None:
    with pytest.raises(ConfigError, match=r"cluster.mail_type is .*; write events of Slurm in upper case"):
        load_config(QUICKSTART, [f"cluster.mail_type='{value}'"])
    with pytest.raises(ConfigError, match=r"cluster.mail_user is .*; write an address"):
        load_config(QUICKSTART, ["cluster.mail_user='me --wrap=x'"])
