"""rlhpc without its repository: a wheel, a project that it writes, and workflows that use its own as a module."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
TINY = (
    "runner.segments=1", "runner.max_steps=1", "env.train.num_envs=4", "algorithm.rollout_steps=16",
    "actor.global_batch_size=32", "algorithm.update_epochs=1",
)  # fmt: skip


@pytest.fixture(scope="module")
def site_packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel's content, as pip leaves it."""
    folder = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "wheel", str(ROOT), "--no-deps", "--no-build-isolation", "-w", str(folder)]
    done = subprocess.run(pip, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    [wheel] = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "site-packages")
    return folder / "site-packages"


def call(site_packages: Path, folder: Path, *argv: str, code: int = 0) -> str:
    """Runs a module with the installed rlhpc; returns everything it said."""
    env = {
        **os.environ,
        "PYTHONPATH": str(site_packages),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    done = subprocess.run(
        [sys.executable, "-P", "-m", *argv], cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == code, done.stdout
    return done.stdout


def jobs_of(said: str) -> set[str]:
    return set(re.findall(r"^(?:local)?(?:rule|checkpoint) (\w+):", said, re.MULTILINE))


def test_what_is_in_it(site_packages: Path) -> None:
    shared = site_packages / "rlhpc" / "share"
    tracked = subprocess.run(
        ["git", "ls-files", "workflow", "profiles", "configs", "config", "examples"], cwd=ROOT, text=True,
        capture_output=True, check=True,
    ).stdout.split()  # fmt: skip
    found = {path.relative_to(shared).as_posix() for path in shared.rglob("*") if path.is_file()}
    assert set(tracked) - found == set()
    assert (site_packages / "rlhpc" / "py.typed").is_file()


def test_a_run_from_its_own_configurations(site_packages: Path, tmp_path: Path) -> None:
    said = call(site_packages, tmp_path, "rlhpc.cli", "train", "configs/quickstart.yaml", *TINY)
    assert (tmp_path / "runs/quickstart/checkpoints/global_step_1/COMPLETE").is_file(), said


def test_a_project(site_packages: Path, tmp_path: Path) -> None:
    assert "next: cd mine" in call(site_packages, tmp_path, "rlhpc.cli", "init", "mine")
    project = tmp_path / "mine"
    said = call(site_packages, project, "snakemake", "--profile", "profiles/local", "--dry-run")
    assert {"prepare", "train_segment", "eval", "convert", "report"} <= jobs_of(said.replace("rlhpc_", ""))
    assert "gpu" in call(site_packages, project, "rlhpc.cli", "plan", "configs/quickstart.yaml", "--site", "mycluster",
                         "cluster.accelerators_per_node=1", "--launcher", "slurm")  # fmt: skip
    assert "nothing is overwritten" in call(site_packages, tmp_path, "rlhpc.cli", "init", "mine", code=2)
    wrong = call(site_packages, tmp_path, "rlhpc.cli", "init", "other", "--config", "embodied/pendulm", code=2)
    assert "did you mean 'embodied/pendulum'?" in wrong and not (tmp_path / "other").exists()


def test_projects_with_code_of_their_own_come_with_the_wheel(site_packages: Path, tmp_path: Path) -> None:
    for name, code in (("reasoning", "my_reward.py"), ("embodied", "my_env.py")):
        said = call(site_packages, tmp_path, "rlhpc.cli", "init", name, "--config", f"{name}/own")
        assert "PYTHONPATH=$PWD" in said and (tmp_path / name / code).is_file()
        assert "](docs/reference/config.md)" in (tmp_path / name / "README.md").read_text()
    assert "reasoning/own" in call(site_packages, tmp_path, "rlhpc.cli", "init", "--list")


def test_as_a_module_with_no_more_than_a_config_folder(site_packages: Path, tmp_path: Path) -> None:
    """What the workflow catalogue deploys: config/ copied, and a Snakefile that names the workflow."""
    (tmp_path / "config").mkdir()
    (tmp_path / "config/config.yaml").write_text((ROOT / "config/config.yaml").read_text())
    (tmp_path / "workflow").mkdir()
    (tmp_path / "workflow/Snakefile").write_text(
        f'configfile: "config/config.yaml"\nmodule rl:\n    snakefile: "{ROOT}/workflow/Snakefile"\n    config: config\n'
        "use rule * from rl\n"
    )
    said = call(site_packages, tmp_path, "snakemake", "--cores", "3", "--dry-run")
    assert {"prepare", "train_segment", "eval", "convert", "report"} <= jobs_of(said)


def test_a_run_is_a_module_of_a_snakefile(site_packages: Path, tmp_path: Path) -> None:
    """The how-to's Snakefile."""
    page = (ROOT / "docs/how-to/slurm.md").read_text()
    [snakefile] = re.findall(r"```python\n(# Snakefile\n.*?)```", page, re.DOTALL)
    (tmp_path / "Snakefile").write_text(snakefile)
    said = call(site_packages, tmp_path, "snakemake", "--cores", "8", "--dry-run")
    assert len(re.findall(r"output: runs/lr/report/index.html", said)) == 1 and "compare.html" in said


def test_completion(site_packages: Path, tmp_path: Path) -> None:
    script = tmp_path / "rlhpc.bash"
    script.write_text(call(site_packages, tmp_path, "rlhpc.cli", "completion", "bash"))
    ask = f"source {script}; COMP_WORDS=(rlhpc sta); COMP_CWORD=1; _shtab_rlhpc; echo ${{COMPREPLY[@]}}"
    done = subprocess.run(["bash", "-c", ask], capture_output=True, text=True, timeout=20, check=True)
    assert done.stdout.split() == ["status"]
