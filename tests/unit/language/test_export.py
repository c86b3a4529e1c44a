"""Export of language models: checkpoints of one rank and adapters to Hugging Face folders, and back.

Checkpoints of several ranks and of other backends are in tests/integration/language/test_convert_lm.py.
"""

from __future__ import annotations

import json
import string
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.extras import need_extra

need_extra("llm")

from safetensors.torch import load_file

from rlhpc import Worker
from rlhpc.checkpoint import CheckpointWriter
from rlhpc.jobs.paths import RunPaths
from rlhpc.language.export import CONVERSION, export_language_model, import_model, trained_weights
from rlhpc.language.models.logprobs import token_scores
from rlhpc.runtime.errors import CheckpointError, ConfigError
from tests.integration.language.lm_ranks import TEMPERATURE, make_config, probe_batch, train

Saved = Callable[..., tuple[Path, dict[str, Any]]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama of 64 tokens."""
    from rlhpc.language.models.tiny import make_tiny_model

    folder = tmp_path_factory.mktemp("models") / "tiny"
    make_tiny_model(folder, vocabulary=string.printable[:60], hidden=32, layers=2)
    return folder


@pytest.fixture
def saved(model: Path, tmp_path: Path) -> Saved:
    """Trains a step and saves; the checkpoint, and what the backend exported and scored."""

    def make(**changes: Any) -> tuple[Path, dict[str, Any]]:
        cfg = make_config(model, **changes)
        with CheckpointWriter(RunPaths(tmp_path / "run"), 2) as writer:
            options: dict[str, Any] = {"steps": range(1), "save": writer.staging, "export": tmp_path / "own"}
            if changes.get("lora.rank"):
                options["adapter"] = tmp_path / "own_adapter"
            report = train(Worker(), cfg, **options)
            writer.commit({})
        return writer.final, report

    return make


def same(folder: Path, other: Path, name: str) -> bool:
    """Returns whether files of two folders have the same tensors of the same dtypes."""
    first, second = load_file(folder / name), load_file(other / name)
    return first.keys() == second.keys() and all(
        tensor.dtype == second[key].dtype and torch.equal(tensor, second[key]) for key, tensor in first.items()
    )


def test_a_checkpoint_becomes_the_folder_that_its_backend_exports(saved: Saved, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    checkpoint, report = saved()
    folder = export_language_model(checkpoint)
    assert folder == checkpoint.parent.parent / "export" / "global_step_2"
    assert same(folder, tmp_path / "own", "model.safetensors")
    loaded = AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        scores = token_scores(loaded, probe_batch(), TEMPERATURE).logprobs
    torch.testing.assert_close(scores, report["after"], rtol=1e-5, atol=1e-5)
    assert AutoTokenizer.from_pretrained(folder).get_vocab().keys() > {"7", "a"}
    assert json.loads((folder / "config.json").read_text())["use_cache"] is True


def test_a_folder_records_what_it_was_made_of(saved: Saved, model: Path) -> None:
    checkpoint, _ = saved()
    folder = export_language_model(checkpoint, licence="apache-2.0")
    record = json.loads((folder / CONVERSION).read_text())
    assert (record["backend"], record["global_step"], record["from"]) == ("local", 2, str(checkpoint))
    assert (record["base"], record["lora"], record["dtype"]) == (str(model), None, "float32")
    assert record["files"].keys() == {path.name for path in folder.iterdir()} - {CONVERSION}
    assert record["files"]["model.safetensors"]["size"] == (folder / "model.safetensors").stat().st_size
    assert len({path.stat().st_mode for path in folder.iterdir()}) == 1, "all as readable as any new file"
    card = (folder / "README.md").read_text()
    assert "license: apache-2.0" in card and "AutoModelForCausalLM" in card and "global step 2" in card
    halved = export_language_model(checkpoint, dtype="bfloat16")
    assert halved == folder, "an earlier export is replaced"
    assert {tensor.dtype for tensor in load_file(folder / "model.safetensors").values()} == {torch.bfloat16}


def test_an_adapter_is_merged_or_alone_as_its_backend_exports_it(saved: Saved, tmp_path: Path) -> None:
    checkpoint, _ = saved(**{"model.dtype": "bfloat16", "lora.rank": 2})
    merged = export_language_model(checkpoint)
    assert same(merged, tmp_path / "own", "model.safetensors")
    assert json.loads((merged / CONVERSION).read_text())["lora"]["merged"] is True
    adapter = export_language_model(checkpoint, tmp_path / "adapter", adapter_only=True)
    assert same(adapter, tmp_path / "own_adapter", "adapter_model.safetensors")


def test_a_value_head_is_exported_as_a_model_of_its_own(saved: Saved, tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification

    checkpoint, _ = saved(**{"model.value_head": True})
    policy = load_file(export_language_model(checkpoint) / "model.safetensors")
    folder = export_language_model(checkpoint, critic=True)
    assert folder.name == "global_step_2-critic"
    critic = load_file(folder / "model.safetensors")
    assert set(policy) - set(critic) <= {"lm_head.weight"} and set(critic) - set(policy) == {"score.weight"}
    assert AutoModelForSequenceClassification.from_pretrained(folder).num_labels == 1
    assert "value-model" in (folder / "README.md").read_text()


def test_a_model_is_copied_in_another_dtype(model: Path, tmp_path: Path) -> None:
    copied = load_file(import_model(model, tmp_path / "copy", dtype="bfloat16") / "model.safetensors")
    original = load_file(model / "model.safetensors")
    assert copied.keys() == original.keys()
    assert all(torch.equal(tensor, original[name].bfloat16()) for name, tensor in copied.items())
    assert json.loads((tmp_path / "copy" / CONVERSION).read_text())["backend"] is None


def test_files_of_an_unknown_backend_are_not_guessed_at(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"actor\.training_backend=other, whose files only that backend can read"):
        trained_weights(tmp_path, "other")
    with pytest.raises(CheckpointError, match="cannot be read"):
        trained_weights(tmp_path, "fsdp")


def test_an_adapter_becomes_a_model_that_a_run_starts_from(saved: Saved, model: Path, tmp_path: Path) -> None:
    checkpoint, report = saved(**{"lora.rank": 2})
    adapter = export_language_model(checkpoint, tmp_path / "adapter", adapter_only=True)
    assert json.loads((adapter / "adapter_config.json").read_text())["base_model_name_or_path"] == str(model)
    started = import_model(adapter, tmp_path / "start")
    again = train(Worker(), make_config(started), steps=range(0))
    torch.testing.assert_close(again["before"], report["after"], rtol=1e-5, atol=1e-5)
    copied = import_model(model, tmp_path / "copy")
    first = train(Worker(), make_config(model), steps=range(0))
    assert torch.equal(train(Worker(), make_config(copied), steps=range(0))["before"], first["before"])


def test_what_cannot_be_converted_says_why(saved: Saved, model: Path, tmp_path: Path) -> None:
    checkpoint, _ = saved()
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "thesis.tex").write_text("")
    with pytest.raises(CheckpointError, match="taken exists and is not an export folder"):
        export_language_model(checkpoint, tmp_path / "taken")
    with pytest.raises(ConfigError, match="only an adapter was asked for"):
        export_language_model(checkpoint, tmp_path / "out", adapter_only=True)
    with pytest.raises(ConfigError, match="dtype is 'float8'; choose from float32, bfloat16"):
        export_language_model(checkpoint, tmp_path / "out", dtype="float8")
    with pytest.raises(ConfigError, match="cannot be loaded"):
        import_model(tmp_path / "nothing", tmp_path / "out")
    identity = json.loads((checkpoint / "backend.json").read_text())
    weights = checkpoint / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])
    with pytest.raises(CheckpointError, match=r"model\.safetensors.*truncated"):
        export_language_model(checkpoint, tmp_path / "out")
    with CheckpointWriter(RunPaths(tmp_path / "other"), 2) as writer:
        (writer.staging / "backend.json").write_text(json.dumps({**identity, "actor.training_backend": "a:B"}))
        writer.commit({})
    with pytest.raises(CheckpointError, match="a:B, whose files only that backend can read"):
        export_language_model(writer.final, tmp_path / "out")
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".tmp*"))
