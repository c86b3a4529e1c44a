"""Export of a checkpoint: layout, faults, atomic replacement, loading."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rlhpc.checkpoint import CheckpointWriter
from rlhpc.checkpoint.state import dump_tensors
from rlhpc.embodied.export import export_checkpoint, load_exported
from rlhpc.embodied.models import registry
from rlhpc.jobs.paths import RunPaths
from rlhpc.runtime.errors import CheckpointError


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    paths = RunPaths.from_run_dir(tmp_path / "runs", "run")
    with CheckpointWriter(paths, 40) as writer:
        writer.add_bytes("model.safetensors", dump_tensors(torch.nn.Linear(4, 2).state_dict()))
        writer.add_bytes("model.json", json.dumps({"model_type": "linear", "inputs": 4}).encode())
        writer.add_bytes("config.yaml", b"runner: {name: run}\nenv: {train: {env_id: CartPole-v1}}\n")
        return writer.commit()


@pytest.fixture
def models(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stands in for what builds policies: a specification is the number of inputs."""

    def policy_from_spec(spec: dict[str, Any], *_: object) -> torch.nn.Module:
        return torch.nn.Linear(spec["inputs"], 2)

    monkeypatch.setattr(registry, "policy_from_spec", policy_from_spec)


def test_layout(checkpoint: Path) -> None:
    folder = export_checkpoint(checkpoint)
    assert folder == checkpoint.parent.parent / "export" / "global_step_40"
    assert sorted(path.name for path in folder.iterdir()) == ["README.md", "config.json", "model.safetensors"]
    config = json.loads((folder / "config.json").read_text())
    assert config["policy"] == {"model_type": "linear", "inputs": 4} and config["env_id"] == "CartPole-v1"
    assert config["global_step"] == 40 and config["rlhpc_version"] and config["run"] == "run"
    assert set(load_file(folder / "model.safetensors")) == {"weight", "bias"}
    assert "CartPole-v1" in (folder / "README.md").read_text()


def test_of_a_copied_checkpoint_and_again(checkpoint: Path, tmp_path: Path) -> None:
    copied = checkpoint.rename(tmp_path / "elsewhere")
    target = tmp_path / "out" / "policy"
    for _ in range(2):
        assert export_checkpoint(copied, target) == target
    assert [path.name for path in target.parent.iterdir()] == ["policy"]


def test_faults_are_errors_and_write_nothing(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.tex").write_text("")
    with pytest.raises(CheckpointError, match="exists and is not an export folder"):
        export_checkpoint(checkpoint, tmp_path / "home")
    (checkpoint / "model.safetensors").write_bytes(b"x")
    with pytest.raises(
        CheckpointError, match=r"global_step_40 cannot be used: model\.safetensors: 1 bytes.*rlhpc convert"
    ):
        export_checkpoint(checkpoint, tmp_path / "out")
    with pytest.raises(CheckpointError, match="no such folder"):
        export_checkpoint(tmp_path / "global_step_9", tmp_path / "out")
    assert not (tmp_path / "out").exists() and (tmp_path / "home" / "thesis.tex").exists()


def test_unwritable_target(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="could not be exported"):
        export_checkpoint(checkpoint, tmp_path / "file" / "out")


@pytest.mark.usefixtures("models")
def test_loads_from_export_and_checkpoint(checkpoint: Path) -> None:
    exported, original = load_exported(export_checkpoint(checkpoint)), load_exported(checkpoint)
    assert not exported.training
    for name, tensor in exported.state_dict().items():
        assert torch.equal(tensor, original.state_dict()[name])


@pytest.mark.usefixtures("models")
def test_weights_that_do_not_fit(checkpoint: Path, tmp_path: Path) -> None:
    folder = export_checkpoint(checkpoint)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "policy": {"inputs": 5}}))
    with pytest.raises(CheckpointError, match="do not fit"):
        load_exported(folder)
    with pytest.raises(CheckpointError, match=r"model\.json: missing"):
        load_exported(tmp_path)
