"""No process that is started imports from the working directory; what the driver can import, ranks can."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rlhpc.runtime.imports import import_paths, run_module

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from tests.planted import ROOT, imported, plant

RLHPC = str(Path(sys.executable).parent / "rlhpc")
#: One step of the quickstart, with a simulator process.
SHORT = (
    "runner.max_steps=1", "runner.segments=1", "algorithm.rollout_steps=16", "algorithm.update_epochs=1",
    "actor.global_batch_size=128", "env.train.simulators=1", "env.eval.num_episodes=1",
)  # fmt: skip
ENTRY = """
import os
from rlhpc.language.config.rewards import RewardConfig, RewardTermConfig
from rlhpc.language.rewards import Sample, make_reward
from rlhpc import Cluster
from rlhpc.embodied.export import load_exported
from beside import Mine

if __name__ == "__main__":
    cluster = Cluster.local(1, 0)
    forked = Mine.create_group().launch(cluster, name="forked")
    spawned = Mine.create_group().launch(cluster, name="spawned", fork=False)
    print(forked.where().wait() + spawned.where().wait())
    reward = RewardConfig(terms=[RewardTermConfig(name="beside:two")], processes=1, timeout_s=20.0)
    with make_reward(reward) as pool:
        print(pool.score([Sample(prompt="", response="", answer="")])[0].total)
"""
BESIDE = """
import secrets
from rlhpc import Worker

class Mine(Worker):
    def where(self):
        import tempfile
        return __file__

def two(sample):
    return 2.0
"""


def run(command: list[str], cwd: Path) -> str:
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=cwd, env=kept, capture_output=True, text=True, timeout=120)
    assert not imported(cwd), done.stderr
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_run_and_a_submitted_one(tmp_path: Path) -> None:
    """submitit's controller and job, the driver, the fork server, ranks and simulators."""
    words = [str(ROOT / "configs/quickstart.yaml"), *SHORT, f"runner.run_dir={tmp_path / 'runs'}"]
    run([RLHPC, "submit", *words, "--executor", "local"], plant(tmp_path / "here"))
    assert (tmp_path / "runs/quickstart/segments/0.json").exists()


def test_as_a_module(tmp_path: Path) -> None:
    """It has come first on the path by then: what is imported later is not taken from it, nor are workers told of it."""
    (tmp_path / "rlhpc").symlink_to(ROOT)
    (tmp_path / "torch.py").write_text("raise SystemExit('this one lies in the working directory')")
    words = ["env.train.env_id=torch:Some-v0", f"runner.run_dir={tmp_path / 'runs'}"]
    done = subprocess.run(
        [sys.executable, "-m", "rlhpc.cli", "train", str(ROOT / "configs/quickstart.yaml"), *words],
        cwd=tmp_path, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 2 and "Some-v0" in done.stderr and "working directory" not in done.stderr, done.stderr


@pytest.mark.long
def test_a_script_and_what_lies_beside_it(tmp_path: Path) -> None:
    """Forked ranks, those of a fresh interpreter, and judges import what the script can, and nothing from where it runs."""
    scripts = tmp_path / "scripts"
    scripts.mkdir()
    (scripts / "entry.py").write_text(ENTRY)
    (scripts / "beside.py").write_text(BESIDE)
    ranks, reward = run([sys.executable, str(scripts / "entry.py")], plant(tmp_path / "here")).splitlines()
    assert ranks.count(str(scripts / "beside.py")) == 2 and reward == "2.0"


def test_a_script_beside_a_clone(tmp_path: Path) -> None:
    """The clone is a folder without `__init__.py`, and the script's folder comes first on the path."""
    (tmp_path / "rlhpc").symlink_to(ROOT)
    (tmp_path / "script.py").write_text("from rlhpc import load_exported\n")
    run([sys.executable, "script.py"], tmp_path)


def test_another_python(tmp_path: Path) -> None:
    """Those before 3.11 know neither -P nor PYTHONSAFEPATH, so what keeps them safe is in what they are told to run."""
    here = plant(tmp_path / "here")
    (here / "told.py").write_text("raise SystemExit('this one lies in the working directory')")
    (tmp_path / "told.py").write_text("import sys, socket\nprint(__name__, sys.argv[1:], '' in sys.path)")
    argv = run_module("told", "a", "b c", python=sys._base_executable)
    assert "-P" not in argv and argv[0] != sys.executable
    done = subprocess.run(argv, cwd=here, env={"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, timeout=60)
    assert done.stdout == "__main__ ['a', 'b c'] False\n", done.stderr
    assert not imported(here)


def test_paths_of_a_driver_whose_working_directory_was_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    monkeypatch.syspath_prepend("")
    assert "" not in import_paths() and str(ROOT) in import_paths()


def test_another_python_keeps_the_first_folder_of_pythonpath(tmp_path: Path) -> None:
    """As the Python of an image does: the command line removes the working directory once, not what comes after it."""
    python, modules, here = tmp_path / "python", tmp_path / "modules", tmp_path / "here"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    plant(here)
    modules.mkdir()
    (modules / "my_loss.py").write_text("def loss(**arguments):\n    return None, {}\n")
    command = run_module(
        "rlhpc.cli",
        "plan",
        str(ROOT / "configs/quickstart.yaml"),
        "algorithm.loss_type=my_loss:loss",
        python=str(python),
    )
    done = subprocess.run(
        command,
        cwd=here,
        env={**os.environ, "PYTHONPATH": f"{modules}:{ROOT}"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0 and not imported(here), done.stderr


def test_a_command_in_a_container_that_begins_elsewhere(tmp_path: Path) -> None:
    """It enters the working directory, from which paths are relative, and imports nothing from it."""
    here = plant(tmp_path / "it's here")
    (tmp_path / "where.py").write_text("import os, secrets; print(os.getcwd())")
    for folder, expected in ((str(here), here), (str(tmp_path / "not in the image"), Path("/"))):
        done = subprocess.run(
            run_module("where", folder=folder), cwd="/", env={**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"},
            capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        assert done.stdout.strip() == str(expected), done.stderr
    assert not imported(here)
