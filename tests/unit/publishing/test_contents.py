"""Contents of a bundle: no secret that was planted anywhere, the same bytes twice, and refusals by name."""

from __future__ import annotations

import json
import os
import subprocess
import zipfile
from pathlib import Path
from typing import Any

import pytest

from rlhpc.jobs.paths import RunPaths
from rlhpc.publishing.bundle import write_bundle
from rlhpc.publishing.contents import BundleOptions
from rlhpc.runtime.errors import ConfigError
from tests.finished_runs import make_repository, make_run, write_checkpoint

#: Where it is planted → the secret.
PLANTED = {
    "environment": "wandb0123456789abcdef0123456789abcdef012",
    "configuration": "hf_PlantedInKeywordArguments",
    "registry": "registry-curve-key-of-forty-characters!!",
    "account": "carol@login01.cluster",
    "home": "/home/carol",
    "remote": "glpat-PlantedInTheRemoteUrl",
    "difference": "sk-plantedInTheDifference01",
    "metrics": "ghp_PlantedInTheMetrics0123456789abc",
    "log": "AKIAPLANTEDINLOG1234",
    "module": "AIzaPlantedInAModule0123456789abcdefghi",
}


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunPaths:
    """A run in a repository of the user, with a secret planted in each place."""
    project = tmp_path / "project"
    make_repository(
        project,
        {
            "train.py": "x = 1\n",
            "rewards_of_a_bundle.py": "def f() -> float:\n    return 1.0\n",
            ".gitignore": "runs\n",
        },
        remote=f"https://bot:{PLANTED['remote']}@git.example.org/carol/project.git",
    )
    (project / "train.py").write_text(f'x = 2\nkey = "{PLANTED["difference"]}"\n')
    (project / "rewards_of_a_bundle.py").write_text(
        f'import helper\nkey = "{PLANTED["module"]}"\n\n\ndef f() -> float:\n    return 1.0\n'
    )
    (project / "helper.py").write_text("y = 1\n")
    monkeypatch.chdir(project)
    monkeypatch.syspath_prepend(str(project))
    monkeypatch.setenv("HOME", PLANTED["home"])
    monkeypatch.setenv("WANDB_API_KEY", PLANTED["environment"])
    paths = make_run(
        tmp_path / "project" / "runs",
        f"runner.logger.kwargs={{wandb: {{login: {{token: {PLANTED['configuration']}}}, dir: {PLANTED['home']}/wandb}}}}",
        "env.train.wrappers=[rewards_of_a_bundle:f]",
    )
    (paths.registry / "local-0").mkdir(parents=True)
    (paths.registry / "local-0" / "keys.json").write_text(json.dumps(["public-key-of-the-run", PLANTED["registry"]]))
    log = paths.segment_logs(0) / "driver.err"
    log.write_text(
        f"rlhpc: {PLANTED['home']}/runs; ssh {PLANTED['account']}; {PLANTED['registry']} {PLANTED['log']}\n"
        f"wandb: {PLANTED['environment']} and {PLANTED['configuration']}\n"
    )
    with paths.metrics.open("a") as file:
        file.write(json.dumps({"step": 3, "note": f"{PLANTED['metrics']} {PLANTED['environment']}"}) + "\n")
    return paths


def bundle(paths: RunPaths, output: Path, code: str = "commit", **options: str) -> dict[str, bytes]:
    write_bundle(paths, output, BundleOptions(code=code, **options))
    with zipfile.ZipFile(output) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def record_of(files: dict[str, bytes]) -> dict[str, Any]:
    return dict(json.loads(files["bundle.json"]))


@pytest.mark.parametrize("checkpoints", ["reference", "include"])
def test_no_planted_secret_gets_in(run: RunPaths, tmp_path: Path, checkpoints: str) -> None:
    files = bundle(run, tmp_path / "a.zip", code="include", checkpoints=checkpoints)
    everything = b"\n".join(files.values()).decode(errors="replace")
    assert [place for place, secret in PLANTED.items() if secret in everything] == []
    assert "carol@" not in everything and "/carol" not in everything.replace("example.org/carol/project.git", "")


def test_the_secrets_were_there(run: RunPaths) -> None:
    """What the test above looks for lies where the bundle takes its files from."""
    texts = "".join(path.read_text(errors="replace") for path in run.root.rglob("*") if path.is_file())
    remote = subprocess.run(["git", "config", "remote.origin.url"], capture_output=True, text=True, check=True).stdout
    texts += remote + " ".join(os.environ.values())
    assert [place for place, secret in PLANTED.items() if secret not in texts] == []


def test_what_a_bundle_has(run: RunPaths, tmp_path: Path) -> None:
    files = bundle(run, tmp_path / "a.zip", code="include")
    record = record_of(files)
    code = {entry["role"]: entry for entry in record["code"]}
    assert code["project"]["remote"] == "https://<redacted>@git.example.org/carol/project.git"
    assert code["project"]["dirty"] and len(code["project"]["commit"]) == 40
    assert b"-x = 1\n+x = 2\n" in files["code/project.diff"]
    assert files["code/project/train.py"].startswith(b"x = 2\n"), "the files are those that ran, with their changes"
    assert files["code/modules/rewards_of_a_bundle.py"].startswith(b"import helper\n")
    assert files["code/modules/helper.py"] == files["code/project/helper.py"] == b"y = 1\n", "in no commit yet"
    assert b"torch==" in files["environment/packages.txt"] and record["system"]["libc"].startswith("glibc")
    assert (
        record["command"]["config"] == "configs/quickstart.yaml"
        and "runner.max_steps=2" in record["command"]["overrides"]
    )
    assert b"run_dir: runs\n" in files["config.yaml"] and b"token: <redacted>" in files["config.yaml"]
    assert record["redactions"].keys() == {"secret", "home", "account"}
    [checkpoint] = record["checkpoints"]
    assert (
        checkpoint["files"]["model.safetensors"]["size"] == len(b"\xff\0weights" * 100) and not checkpoint["included"]
    )
    assert "run/checkpoints/global_step_2/model.safetensors" not in files
    assert not [name for name in files if name.startswith("run/registry") or name.endswith(".pkl")]


def test_included_checkpoints_are_whole_and_loadable(run: RunPaths, tmp_path: Path) -> None:
    from rlhpc.checkpoint.manifest import verify

    write_bundle(run, tmp_path / "folder", BundleOptions(checkpoints="include", code="commit"))
    folder = tmp_path / "folder" / "run" / "checkpoints" / "global_step_2"
    assert verify(folder) == [], "its configuration was redacted, and the manifest has the new checksum"
    assert (folder / "model.safetensors").read_bytes() == (run.checkpoint(2) / "model.safetensors").read_bytes()


def test_a_binary_file_with_a_secret_is_refused_by_name(run: RunPaths, tmp_path: Path) -> None:
    write_checkpoint(run, 4, {"optimizer.pt": b"\0\xff" + PLANTED["environment"].encode() + b"\0"})
    with pytest.raises(ConfigError, match=r"global_step_4/optimizer.pt: it has a secret, which cannot be taken out"):
        write_bundle(run, tmp_path / "a.zip", BundleOptions(checkpoints="include", code="commit"))
    assert not list(tmp_path.glob("*a.zip*")), "nothing is half written"
    write_bundle(run, tmp_path / "a.zip", BundleOptions(code="commit"))  # by reference


def test_links_in_the_run_folder_are_not_followed(run: RunPaths, tmp_path: Path) -> None:
    (tmp_path / "private").mkdir()
    (tmp_path / "private" / "id_rsa").write_text("a key of mine")
    (run.logs / "keys").symlink_to(tmp_path / "private")
    (run.eval / "global_step_2" / "link.json").symlink_to(tmp_path / "private" / "id_rsa")
    assert b"a key of mine" not in b"".join(bundle(run, tmp_path / "a.zip").values())


@pytest.mark.parametrize("state", ["running", "failed"])
def test_states(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str) -> None:
    monkeypatch.chdir(tmp_path)
    paths = make_run(tmp_path / "runs", state=state)
    if state == "running":
        status = json.loads(paths.driver_state.read_text())
        host = os.uname().nodename
        paths.driver_state.write_text(
            json.dumps({**status, "pid": os.getpid(), "host": host, "updated": 4e9, "step": 1})
        )
        with pytest.raises(ConfigError, match=r"at step 1 of 2; a bundle is of a run that has ended"):
            write_bundle(paths, tmp_path / "a.zip", BundleOptions(code="commit"))
        assert not (tmp_path / "a.zip").exists()
    else:
        record = record_of(bundle(paths, tmp_path / "a.zip"))
        assert record["state"] == "failed" and "the run is failed" in record["not_promised"][0]


def test_a_run_of_an_earlier_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    paths = make_run(tmp_path / "runs")
    record = json.loads(paths.provenance.read_text())
    for start in (record, *record["segments"]):
        for key in ("code", "packages", "system", "modules"):
            start.pop(key, None)
    paths.provenance.write_text(json.dumps(record))
    files = bundle(paths, tmp_path / "a.zip")
    assert any("an earlier version of rlhpc" in reason for reason in record_of(files)["not_promised"])
    assert f"torch=={record['versions']['torch']}\n".encode() in files["environment/packages.txt"]


def test_an_sft_run_before_is_part_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its configuration is `sft.yaml`, and both runs are below `runs` wherever they were."""
    monkeypatch.chdir(tmp_path)
    paths = make_run(tmp_path / "runs")
    import yaml

    sft = make_run(tmp_path / "runs", name="small-sft")
    config = yaml.safe_load(paths.config.read_text())
    config["workflow"] |= {"sft": "../elsewhere/sft.yaml",
                           "sft_overrides": [f"runner.run_dir={tmp_path}/runs", "runner.name=small-sft"]}  # fmt: skip
    paths.config.write_text(yaml.safe_dump(config))
    files = bundle(paths, tmp_path / "a.zip", code="commit")
    portable = yaml.safe_load(files["config.yaml"])
    assert portable["workflow"]["sft"] == "sft.yaml"
    assert portable["workflow"]["sft_overrides"] == ["runner.run_dir=runs", "runner.name=small-sft"]
    assert (
        yaml.safe_load(files["sft.yaml"])["runner"] | {"name": "small-sft", "run_dir": "runs"}
        == yaml.safe_load(files["sft.yaml"])["runner"]
    )
    sft.config.unlink()
    with pytest.raises(ConfigError, match=r"whose folder .* has no config\.yaml"):
        write_bundle(paths, tmp_path / "b.zip", BundleOptions(code="commit"))
