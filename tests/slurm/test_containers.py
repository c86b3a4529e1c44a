"""Ranks in the containers of an image, submission and driver outside: the workflow, a killed rank, and a cancelled run."""

from __future__ import annotations

import getpass
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests import drawn
from tests.extras import need_programs

from .cluster import SlurmCluster
from .jobs import end_jobs, wait_gone
from .runs import ROOT, SITE, SlurmRun, kill, until
from .test_training import workflow

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(1500)]  # on a busy machine each job takes minutes

#: In the image, and nowhere else.
PYTHON = "/opt/venv/bin/python"
#: What a simulator's process sees.
LOOKING = """
import json
import os
import sys
from pathlib import Path

import gymnasium

class Looking(gymnasium.Wrapper):
    purpose = "training"

    def __init__(self, env):
        super().__init__(env)
        release = Path("/etc/os-release").read_text()
        view = {"trixie": "trixie" in release, "python": sys.executable, "token": os.environ.get("RLHPC_TEST_TOKEN")}
        (Path(__file__).parent / f"{self.purpose}-{os.uname().nodename}-{os.getpid()}.json").write_text(json.dumps(view))

class LookingAtEvaluation(Looking):
    purpose = "evaluation"
"""
SHORT = ("runner.max_steps=3", "runner.segments=1", "env.eval.num_episodes=4", "algorithm.update_epochs=1")
INSIDE = {"trixie": True, "python": PYTHON, "token": "passed on"}


#: Programs that run a command in the image. Apptainer is in one of the roots of `roots.sh` only.
RUNTIMES = ["apptainer"] if shutil.which("apptainer") else ["bwrap", "ch-run"]


@pytest.fixture(autouse=True)
def no_job_is_left(slurm: SlurmCluster) -> Iterator[None]:
    yield
    end_jobs(slurm)


@pytest.fixture(scope="module")
def image() -> Path:
    """An unpacked image of another Debian release than this machine's."""
    need_programs("mmdebstrap")
    need_programs(*RUNTIMES)
    if os.geteuid() != 0:
        pytest.skip("needs root, to make an image")
    folder = Path(os.environ.get("RLHPC_SLURM_ROOTS", "/var/cache/rlhpc-slurm")) / "image"
    subprocess.run(["bash", ROOT / "tests" / "slurm" / "image.sh", folder], check=True, timeout=300)
    for path in _same_paths():  # Charliecloud makes no folders in an image
        (folder / path.relative_to("/")).mkdir(parents=True, exist_ok=True)
    return folder


def _same_paths() -> list[Path]:
    """Returns the folders that the image sees under their own paths: Python, this checkout and its environment."""
    return sorted({Path(sys.base_prefix), ROOT.resolve(), (ROOT / ".venv").resolve().parent})


def container(image: Path, folder: Path, runtime: str = RUNTIMES[0], *, private: bool = False) -> list[str]:
    """Returns the words that run a command in the image, as a user without rights would.

    The image sees the run's folder, this checkout and, as /opt/venv, its environment; of the node, /tmp, /dev and /proc.

    Args:
        image: The unpacked image.
        folder: The run's folder.
        runtime: The program (`RUNTIMES`).
        private: Whether each container has a /tmp, a /dev/shm and process ids of its own; bubblewrap alone.
    """
    environment = (ROOT / ".venv").resolve()
    if runtime == "apptainer":
        binds = [f"{path}:{path}:ro" for path in _same_paths()]
        binds += [f"{environment}:/opt/venv:ro", f"{folder}:{folder}"]
        return ["apptainer", "--silent", "exec", "--userns", "--no-home", "--bind", ",".join(binds), str(image)]
    if runtime == "ch-run":  # /tmp, where the run's folder is, and /dev are the node's
        binds = [f"--bind={path}" for path in _same_paths()]
        return ["ch-run", *binds, f"--bind={environment}:/opt/venv", str(image), "--"]
    words = [
        "bwrap",
        "--unshare-user",
        "--bind",
        str(image),
        "/",
        "--dev-bind",
        "/dev",
        "/dev",
        "--ro-bind",
        "/sys",
        "/sys",
    ]
    if private:
        words += ["--unshare-pid", "--die-with-parent", "--proc", "/proc", "--tmpfs", "/tmp", "--tmpfs", "/dev/shm"]
    else:
        words += ["--bind", "/proc", "/proc", "--bind", "/tmp", "/tmp"]
    for path in _same_paths():
        words += ["--ro-bind", str(path), str(path)]
    return [*words, "--ro-bind", str(environment), "/opt/venv", "--bind", str(folder), str(folder)]


def run_in(image: Path, slurm: SlurmCluster, folder: Path, *overrides: str, **cluster: object) -> SlurmRun:
    """Returns a run whose ranks are in the image; `cluster` are further keys of the site file."""
    run = SlurmRun(slurm, folder, "env.train.wrappers=[looking_env:Looking]", *overrides)
    (folder / "looking_env.py").write_text(LOOKING)
    words = {"container": container(image, folder), "container_python": PYTHON}
    site = {"cluster": SITE["cluster"] | words | cluster}
    run.site.write_text(yaml.safe_dump(site))
    run.environment |= {"PYTHONPATH": f"{folder}{os.pathsep}{ROOT}", "RLHPC_TEST_TOKEN": "passed on"}
    run.environment["USER"] = getpass.getuser()  # Charliecloud's condition
    return run


@pytest.mark.drawn
@pytest.mark.parametrize("runtime", drawn.drawn("runtimes of the workflow", RUNTIMES, least=1))
def test_the_workflow(image: Path, slurm: SlurmCluster, tmp_path: Path, runtime: str) -> None:
    """`snakemake --profile profiles/slurm`: ranks, evaluation and conversion are in the image, and nothing else is."""
    assert not Path(PYTHON).exists(), "a command that ran outside would fail"
    run = run_in(image, slurm, tmp_path, container=container(image, tmp_path, runtime))
    profile = "slurm" if slurm.has_accounting else "slurm-no-accounting"
    looking = ("env.train.wrappers=[looking_env:Looking]", "env.eval.wrappers=[looking_env:LookingAtEvaluation]")
    workflow(run, profile, *SHORT, *looking, timeout=1400)
    assert [row["step"] for row in run.rows()] == [1, 2, 3]
    assert len(list(run.root.glob("eval/global_step_*/default.json"))) == 1
    assert list(run.root.glob("export/*/model.safetensors")) and (run.root / "report" / "index.html").exists()
    # The submission and the driver look at an environment of the training once, outside.
    views = [json.loads(path.read_text()) for path in tmp_path.glob("training-*.json")]
    assert INSIDE in views and all(view == INSIDE for view in views if view["python"] == PYTHON)
    views = [json.loads(path.read_text()) for path in tmp_path.glob("evaluation-*.json")]
    assert INSIDE in views and all(view == INSIDE for view in views if view["python"] == PYTHON)


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_a_killed_rank_and_a_cancelled_run(image: Path, slurm: SlurmCluster, tmp_path: Path, runtime: str) -> None:
    """The driver outside knows the ranks by their process ids, and how they ended; nothing is left in the containers."""
    run = run_in(
        image, slurm, tmp_path, "runner.max_steps=100000", "runner.save_interval=5", "algorithm.update_epochs=1",
        "runner.max_restarts=3", container=container(image, tmp_path, runtime),
    )  # fmt: skip
    process = run.submit()
    run.training(deadline_s=180)
    ranks = run.members()
    for name in ("actor-0", "rollout-0", "env-0"):
        root = Path(f"/proc/{ranks[name]['pid']}/root")
        assert "trixie" in (root / "etc" / "os-release").read_text(), f"{name} is in the image"
    if slurm.nodes_are_hosts:
        assert ranks["actor-0"]["host"] == ranks["rollout-0"]["host"] != ranks["env-0"]["host"]
        assert ranks["driver"]["host"] == ranks["actor-0"]["host"], "driver and ranks share sockets and shared memory"
    committed = run.committed()
    kill(ranks["actor-0"]["pid"])
    until(lambda: len(run.attempts) > 1, f"it starts again\n{run.account()}", 120)
    assert "was killed by signal 9 (SIGKILL)" in run.attempts[0]["how"], run.attempts
    assert run.attempts[1]["step"] >= committed
    run.training(beyond=committed, deadline_s=180)
    assert "was cancelled" in run.rlhpc("cancel", str(run.root))
    assert process.wait(120) != 0
    assert run.committed() == run.step() > 0, "it saved before it ended"
    wait_gone(slurm, run.job)
    for node in slurm.nodes:
        until(lambda node=node: not slurm.running_on(node), f"nothing runs on {node}: {slurm.running_on(node)}", 60)  # type: ignore[misc]


def test_private_folders_and_process_ids(image: Path, slurm: SlurmCluster, tmp_path: Path) -> None:
    """Each container is a host to the run: ranks of a node exchange data by TCP. The site's options reach srun."""
    need_programs("bwrap")
    run = run_in(
        image, slurm, tmp_path, "runner.max_steps=100000", "runner.save_interval=5", "algorithm.update_epochs=1",
        container=container(image, tmp_path, "bwrap", private=True), srun=["--export=ALL,RLHPC_TEST_TOKEN=of-the-site"],
    )  # fmt: skip
    del run.environment["RLHPC_TEST_TOKEN"]
    process = run.submit()
    run.training(deadline_s=300)
    ranks = run.members()
    hosts = [ranks[name]["host"] for name in ("driver", "actor-0", "rollout-0", "env-0")]
    assert len(set(hosts)) == len(hosts), hosts
    views = [json.loads(path.read_text()) for path in tmp_path.glob("training-*.json")]
    assert INSIDE | {"token": "of-the-site"} in views
    assert "was cancelled" in run.rlhpc("cancel", str(run.root))
    assert process.wait(120) != 0
    assert run.committed() == run.step() > 0, "it saved before it ended"
    wait_gone(slurm, run.job)
    for node in slurm.nodes:
        until(lambda node=node: not slurm.running_on(node), f"nothing runs on {node}: {slurm.running_on(node)}", 60)  # type: ignore[misc]
