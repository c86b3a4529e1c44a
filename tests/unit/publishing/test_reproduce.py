"""Reproduction of a bundle: what it shows before anything runs, and what it refuses."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rlhpc.publishing.bundle import write_bundle
from rlhpc.publishing.contents import BundleOptions
from rlhpc.publishing.layout import PACKAGES
from rlhpc.publishing.reader import Bundle, open_bundle
from rlhpc.publishing.reproduce import ReproduceOptions, Reproduction, _import_path, _install_packages
from rlhpc.runtime.errors import ConfigError
from tests.finished_runs import make_repository, make_run
from tests.integration.tiny_run import wait_until


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "project"
    make_repository(folder, {"data/train.h5": "numbers\n", "README.md": "a\n", ".gitignore": "runs\n"})
    monkeypatch.chdir(folder)
    return folder


def write(project: Path, *overrides: str, code: str = "commit", inputs: str = "reference") -> Path:
    paths = make_run(project / "runs", *overrides)
    write_bundle(paths, project.parent / "a.zip", BundleOptions(code=code, inputs=inputs))
    return project.parent / "a.zip"


def command(*words: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "rlhpc.cli", "reproduce", *words], cwd=folder, env={**os.environ, **environment},
        capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip


def rendered(path: Path, **options: object) -> str:
    with open_bundle(path) as bundle:
        return "\n".join(Reproduction(bundle, ReproduceOptions(Path("again"), **options)).render())  # type: ignore[arg-type]


def test_without_trust_nothing_is_written_or_run(project: Path, tmp_path: Path) -> None:
    path = write(project, "env.train.wrappers=[my_wrapper:Wrapper]", "cluster.setup=[touch evil]")
    (tmp_path / "elsewhere").mkdir()
    shown = command(str(path), folder=tmp_path / "elsewhere")
    assert shown.returncode == 0, shown.stderr
    assert "rlhpc run config.yaml" in shown.stdout and "nothing was written or run; --trust" in shown.stdout
    assert "env.train.wrappers[0] is my_wrapper:Wrapper, which names code to be imported and run" in shown.stdout
    assert "(neither in the bundle nor installed here)" in shown.stdout
    assert "cluster.setup[0] is touch evil, which is a command of each job" in shown.stdout
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_all_that_names_code_is_shown_with_its_place(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (project / "my_wrapper.py").write_text("raise SystemExit('imported')\n")
    monkeypatch.syspath_prepend(str(project))
    path = write(
        project, "env.train.wrappers=[my_wrapper:Wrapper]", "env.eval.wrappers=[os.path:join]",
        "env.train.simulator_python=/opt/python", "runner.logger.kwargs={wandb: {entity: '${oc.env:HOME}'}}", code="include",
    )  # fmt: skip
    text = rendered(path)
    assert (
        "my_wrapper:Wrapper, which names code to be imported and run (code/modules/my_wrapper.py of the bundle)" in text
    )
    assert "os.path:join, which names code to be imported and run (installed here:" in text
    assert "env.train.simulator_python is /opt/python, which starts a program" in text
    assert "${oc.env:HOME}, which reads a variable of your environment" in text
    assert "    code/modules/my_wrapper.py" in text and "project at commit " in text


def test_a_package_of_another_version_is_named_and_stops_it(project: Path, tmp_path: Path) -> None:
    path = write(project)
    (tmp_path / "site").mkdir()
    for name, version in (("numpy", "0.0.1"), ("gymnasium", "0.0.2")):
        folder = tmp_path / "site" / f"{name}-{version}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    search_path = os.pathsep.join([str(tmp_path / "site"), *filter(None, [os.environ.get("PYTHONPATH")])])
    shown = command(str(path), folder=tmp_path, PYTHONPATH=search_path)
    lines = [line.split() for line in shown.stdout.splitlines()]
    from importlib import metadata

    assert ["numpy", metadata.version("numpy"), "0.0.1"] in lines
    assert ["gymnasium", metadata.version("gymnasium"), "0.0.2"] in lines
    assert "2 packages differ" in shown.stdout.splitlines()[-3]
    stopped = command(str(path), "--trust", "--into", "again", folder=tmp_path, PYTHONPATH=search_path)
    assert stopped.returncode == 2 and not (tmp_path / "again").exists()
    assert "2 packages differ from the bundle's: gymnasium" in stopped.stderr
    assert "--current-environment" in stopped.stderr and "Traceback" not in stopped.stderr
    failed = command(
        str(path), "--trust", "--install", "--into", "again", folder=tmp_path, PYTHONPATH=search_path,
        UV_INDEX_URL="http://127.0.0.1:9/simple", UV_OFFLINE="1", UV_CACHE_DIR=str(tmp_path / "cache"),
    )  # fmt: skip
    assert (
        failed.returncode == 2
        and "--install: " in failed.stderr
        and "go on with --current-environment" in failed.stderr
    )


def test_an_input_is_found_by_its_checksum_or_named(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = tmp_path / "big.h5"
    data.write_bytes(b"\0numbers")
    path = write(project, f"runner.init_from={data}")
    data.rename(moved := tmp_path / "moved.h5")
    assert "not found: --input inputs/0-big.h5=PATH" in rendered(path)
    with open_bundle(path) as bundle:
        with pytest.raises(
            ConfigError, match=r"runner\.init_from was .*big\.h5, and no file with its checksums is there"
        ):
            Reproduction(bundle, ReproduceOptions(tmp_path / "again")).check()
        Reproduction(bundle, ReproduceOptions(tmp_path / "again", inputs={"inputs/0-big.h5": moved})).check()
        moved.write_bytes(b"\0changed")
        with pytest.raises(ConfigError, match="do not have the checksums"):
            Reproduction(bundle, ReproduceOptions(tmp_path / "again", inputs={"inputs/0-big.h5": moved}))


def test_an_input_of_the_repository_comes_with_the_code(project: Path, tmp_path: Path) -> None:
    path = write(project, "runner.init_from=data/train.h5", code="include")
    (project / "data" / "train.h5").unlink()
    assert "runner.init_from: was data/train.h5, by checksum: project/data/train.h5" in rendered(path)


def test_a_folder_in_use_is_refused(project: Path, tmp_path: Path) -> None:
    path = write(project)
    (tmp_path / "again").mkdir()
    (tmp_path / "again" / "mine").touch()
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for name in ("again", "link"):
        refused = command(str(path), "--trust", "--into", name, folder=tmp_path)
        assert refused.returncode == 2 and f"--into is {name}, which exists" in refused.stderr
    assert (tmp_path / "again" / "mine").exists() and not (tmp_path / "nowhere").exists()


def test_what_is_not_promised_is_said(project: Path) -> None:
    assert "expected: the same bit for bit" in rendered(write(project))


def test_other_hardware_breaks_the_promise(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(project)
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    text = rendered(path)
    assert "close, but not the same: OMP_NUM_THREADS differs" in text


def test_mistakes_on_the_command_line(project: Path, tmp_path: Path) -> None:
    path = write(project)
    wrong = command(str(path), "--input", "name", folder=tmp_path)
    assert wrong.returncode == 2 and "write NAME=PATH" in wrong.stderr
    missing = command("nothing.zip", folder=tmp_path)
    assert missing.returncode == 2 and "no such file" in missing.stderr


def test_a_run_that_cannot_start_leaves_word_and_a_failed_set_up_leaves_nothing(project: Path, tmp_path: Path) -> None:
    path = write(project)
    done = command(str(path), "--trust", "--into", "again", "--profile", "nothing", folder=tmp_path)
    assert done.returncode == 2 and "--profile is 'nothing'" in done.stderr
    assert "to go on: cd again && rlhpc run config.yaml --profile nothing" in done.stdout
    assert (tmp_path / "again" / "config.yaml").exists() and not (tmp_path / "again" / "runs").exists()
    limited = ["bash", "-c", f"ulimit -f 1; exec {sys.executable} -m rlhpc.cli reproduce {path} --trust --into full"]
    failed = subprocess.run(limited, cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False)
    assert failed.returncode == 2 and "cannot be written" in failed.stderr and not (tmp_path / "full").exists()


@pytest.mark.parametrize("delay_s", [0.0, 1.0])
def test_signals_reach_the_run(tmp_path: Path, delay_s: float) -> None:
    """`rlhpc run` saves when it is interrupted; `rlhpc reproduce` waits for that, however late it learns of the start."""
    (tmp_path / "inner.py").write_text(
        "import signal, sys, time\nfrom pathlib import Path\n"
        "signal.signal(signal.SIGTERM, lambda *_: (Path('saved').touch(), sys.exit(7)))\n"
        "Path('began').touch()\ntime.sleep(200)\n"
    )
    outer = (
        "import os, subprocess, sys, time\nfrom pathlib import Path\nfrom rlhpc.publishing.reproduce import _run_to_end\n"
        "start = subprocess.Popen\n"
        f"def start_slowly(*arguments, **options):\n    process = start(*arguments, **options)\n    time.sleep({delay_s})\n"
        "    return process\n"
        "subprocess.Popen = start_slowly\n"
        f"sys.exit(_run_to_end([sys.executable, 'inner.py'], Path({str(tmp_path)!r}), os.environ))\n"
    )
    process = subprocess.Popen([sys.executable, "-c", outer])
    wait_until((tmp_path / "began").exists)
    process.terminate()
    assert process.wait(timeout=100) == 7 and (tmp_path / "saved").exists()


# -- environment --------------------------------------------------------------------------------------------------------


class RecordedBundle(Bundle):
    """Bundle with a list of packages, and the code of rlhpc and of a project."""

    def __init__(self, packages: str) -> None:
        self._packages = packages.encode()
        self.sizes = {PACKAGES: len(self._packages)}
        self.record = {
            "system": {"python": "CPython 3.11.7"},
            "code": [
                {"role": "rlhpc", "has_rlhpc": True, "folder": "code/rlhpc"},
                {"role": "project", "folder": "code/project", "python_path": [".", "src", "../../../outside"]},
                {"role": "lost", "folder": None},
            ],
        }

    def read(self, name: str) -> bytes:
        """Returns the list of packages."""
        assert name == PACKAGES
        return self._packages


def make_uv(folder: Path, script: str) -> Path:
    """Writes a program `uv`, and returns the path of a Python beside it."""
    (folder / "bin").mkdir()
    program = folder / "bin" / "uv"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    return folder / "bin" / "python"


def test_what_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bundle's versions, torch's build by its own option, and rlhpc from the bundle's code alone."""
    monkeypatch.setattr(sys, "executable", str(make_uv(tmp_path, f'echo "$@" >> {tmp_path}/commands')))
    again = tmp_path / "again"
    (again / "environment").mkdir(parents=True)
    python = _install_packages(RecordedBundle("numpy==2.1.0\nrlhpc==1.0\ntorch==2.9.0+cpu\n"), again)
    assert python == again / "environment/venv/bin/python"
    assert (again / "environment/requirements.txt").read_text() == "numpy==2.1.0\ntorch==2.9.0\n"
    install = f"pip install --quiet --python {python}"
    assert (tmp_path / "commands").read_text().splitlines() == [
        f"venv --quiet --python 3.11.7 {again}/environment/venv",
        f"{install} --torch-backend cpu -r {again}/environment/requirements.txt",
        f"{install} --no-deps {again}/code/rlhpc",
    ]


def test_a_package_that_cannot_be_installed_is_a_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", str(make_uv(tmp_path, "echo no numpy==0.0.1 >&2; exit 1")))
    (tmp_path / "environment").mkdir()
    with pytest.raises(
        ConfigError, match=r"--install: .*uv venv --quiet failed: no numpy==0\.0\.1; go on with --current"
    ):
        _install_packages(RecordedBundle("numpy==0.0.1\n"), tmp_path)


def test_the_import_path_stays_in_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/mine:")
    project = [f"{tmp_path}/code/project", f"{tmp_path}/code/project/src"]
    bundle = RecordedBundle("")
    assert _import_path(bundle, tmp_path, has_rlhpc=False) == [*project, "/mine"]
    assert _import_path(bundle, tmp_path, has_rlhpc=True) == [f"{tmp_path}/code/rlhpc", *project, "/mine"]
