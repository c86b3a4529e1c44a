"""Site files: what a cluster calls things, filled into what a run leaves open."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlhpc.config import find_site
from rlhpc.jobs.plan import build_plan
from rlhpc.runs.configuration import load_config
from rlhpc.runtime.errors import ConfigError

ROOT = Path(__file__).resolve().parents[3]
HET = ROOT / "configs" / "embodied" / "cartpole_het.yaml"


def site(folder: Path, text: str) -> str:
    path = folder / "site.yaml"
    path.write_text(text)
    return str(path)


def test_fills_what_is_open_and_nothing_else(tmp_path: Path) -> None:
    file = site(
        tmp_path,
        "cluster:\n  time: '01:00:00'\n  interface: ib0\n  setup: [module load cuda]\n  node_groups:\n"
        "    - {label: gpu, partition: gpu, gres_name: 'gpu:a100', cpus_per_node: 64}\n"
        "    - {label: unused, partition: other}\n",
    )
    cfg = load_config(HET, ["cluster.time=00:10:00"], site=file)
    gpu, cpu = cfg.cluster.node_groups
    assert (gpu.partition, gpu.gres_name, gpu.cpus_per_node) == ("gpu", "gpu:a100", 4), "the run's own number stays"
    assert cpu.partition is None and len(cfg.cluster.node_groups) == 2
    assert (cfg.cluster.time, cfg.cluster.interface) == ("00:10:00", "ib0")
    assert list(cfg.cluster.setup) == ["module load cuda"]


def test_jobs_beside_training(tmp_path: Path) -> None:
    file = site(
        tmp_path, "cluster: {}\nworkflow: {eval_job: {partition: small}, convert_job: {partition: big, mem: 64G}}\n"
    )
    cfg = load_config(HET, ["workflow.convert_job.mem=2G"], site=file)
    assert (cfg.workflow.eval_job.partition, cfg.workflow.convert_job.partition) == ("small", "big")
    assert cfg.workflow.convert_job.mem == "2G"


def test_by_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLHPC_SITE", site(tmp_path, "cluster: {partition: batch}\n"))
    assert load_config(HET).cluster.partition == "batch"
    monkeypatch.delenv("RLHPC_SITE")
    assert load_config(HET).cluster.partition is None


def test_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_DIRS", str(tmp_path))
    folder = tmp_path / "rlhpc" / "site"
    folder.mkdir(parents=True)
    (folder / "alps.yaml").write_text("cluster: {account: all}\n")
    assert find_site("alps") == folder / "alps.yaml"
    with pytest.raises(ConfigError, match=r"no site 'alsp'; did you mean 'alps'\? there are: .*example"):
        find_site("alsp")
    with pytest.raises(ConfigError, match="no site file"):
        find_site(str(tmp_path / "nowhere.yaml"))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            "runner: {name: x}\n",
            "runner: a site file has the sections cluster, workflow.eval_job and workflow.convert_job",
        ),
        ("workflow: {sft: x}\n", "workflow.sft: a site file has the sections cluster"),
        ("cluster: {partitoin: gpu}\n", "unknown key cluster.partitoin; did you mean cluster.partition"),
        (
            "cluster: {srun: [--nodes=2]}\n",
            "cluster.srun is ['--nodes=2']; --nodes is an option that rlhpc itself sets for its job steps",
        ),
        ("cluster: {num_nodes: 4}\n", "cluster.num_nodes belongs to a run"),
        ("cluster: {component_placement: {actor: 0}}\n", "cluster.component_placement belongs to a run"),
        ("cluster:\n  node_groups: [{label: gpu, mem: [1]}]\n", "mem"),
        ("- 1\n", "found a list at the top"),
    ],
)
def test_mistakes(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_config(HET, site=site(tmp_path, text))
    assert says in str(error.value) and "site.yaml" in str(error.value)


def test_options_of_srun(tmp_path: Path) -> None:
    """The site's, unless the run has its own, which may be none."""
    file = site(tmp_path, "cluster: {srun: [--network=no_vni]}\n")
    assert list(load_config(HET, site=file).cluster.srun) == ["--network=no_vni"]
    assert list(load_config(HET, ["cluster.srun=[]"], site=file).cluster.srun) == []
    assert list(load_config(HET, ["cluster.srun=[--mpi=pmix]"], site=file).cluster.srun) == ["--mpi=pmix"]
    with pytest.raises(ConfigError, match=r"cluster.srun is \['-n', '4'\]; -n is an option that rlhpc itself sets"):
        load_config(HET, ["cluster.srun=[-n,4]"], site=file)


EXAMPLES = sorted(path.stem for path in (ROOT / "configs" / "site").glob("*.yaml"))
#: Partition of the nodes with accelerators, where it is not `gpu`.
PARTITIONS = {"example-mig": "mig"}
#: Example → a word of each step's command, a directive of the job, or a line of its script, that must be in the plan.
PLANNED = {
    "example": ("", "#SBATCH --constraint=nvlink", "module load cuda"),
    "example-apptainer": (
        " apptainer exec --nv --bind /tmp,/dev/shm,/shared /shared/images/rlhpc.sif ",
        "",
        "module load",
    ),
    "example-exclusive": ("", "#SBATCH --exclusive", ""),
    "example-mig": ("", "#SBATCH --gres=gpu:a100_3g.20gb:2", ""),
    "example-private-tmp": ("--task-prolog=/shared/rlhpc/tmpdir.sh", "", "export TMPDIR=/local/$SLURM_JOB_ID"),
    "example-pyxis": ("--container-mounts=/tmp:/tmp,/dev/shm:/dev/shm,/shared:/shared", "", ""),
    "example-slingshot": ("--network=job_vni,single_node_vni", "#SBATCH --network=job_vni,", "FI_PROVIDER=cxi"),
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_examples_are_planned(name: str) -> None:
    """Each of them with a run on two kinds of nodes: all steps have its words, and the job its options."""
    cfg = load_config(HET, site=name)
    assert [group.partition for group in cfg.cluster.node_groups] == [PARTITIONS.get(name, "gpu"), "cpu"]
    plan = build_plan(cfg, launcher="slurm")
    step_text, directive, setup_line = PLANNED[name]
    assert len(plan.steps) == 3 and all(step_text in shlex.join(step.argv) for step in plan.steps)
    assert all(step.argv[2:4] == ("--overlap", "--mpi=none") for step in plan.steps)
    assert directive in plan.test_script() and setup_line in "\n".join(plan.setup)


@pytest.mark.parametrize(
    ("key", "of_run", "of_site"),
    [("accelerators_per_node", 0, 4), ("env_vars", {}, {"NCCL_DEBUG": "INFO"}), ("accelerators_per_node", 2, 0)],
)
def test_what_a_run_says_of_its_groups_stands_also_where_it_is_nothing(
    tmp_path: Path, key: str, of_run: Any, of_site: Any
) -> None:
    """And a site may say nothing, too: 0 accelerators are no omission."""
    site = tmp_path / "site.yaml"
    site.write_text(yaml.safe_dump({"cluster": {"node_groups": [{"label": "gpu", key: of_site}]}}))
    says, omits = ({"label": "gpu", key: of_run}, {"label": "gpu"})
    for group, value in ((says, of_run), (omits, of_site)):
        cfg = load_config(
            ROOT / "configs" / "quickstart.yaml", [f"cluster.node_groups={json.dumps([group])}"], site=str(site)
        )
        assert getattr(cfg.cluster.node_groups[0], key) == value
