"""Checkpoints of language models to Hugging Face folders and back, against what the backends themselves export."""

from __future__ import annotations

import json
import os
import shutil
import string
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.extras import need_extra

need_extra("llm")

sys.path.insert(0, str(Path(__file__).parent))

from lm_ranks import TEMPERATURE, Trainer, loss_of, make_config, probe_batch, share, train
from safetensors.torch import load_file

from rlhpc import Cluster, NodePlacementStrategy, Session, Worker
from rlhpc.checkpoint import CheckpointWriter
from rlhpc.checkpoint.manifest import COMPLETE, MANIFEST
from rlhpc.jobs.paths import RunPaths
from rlhpc.language.export import CONVERSION, export_language_model
from rlhpc.language.models.logprobs import token_scores
from rlhpc.language.models.tiny_vision import make_tiny_vision_model
from rlhpc.language.training.trainer import TokenTrainer
from rlhpc.runtime.errors import CheckpointError, ConfigError

Saved = Callable[..., tuple[Path, dict[str, Any]]]


@pytest.fixture(scope="module")
def ranks() -> Iterator[Callable[[], Any]]:
    """Two real worker processes, once they are wanted."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    groups: list[Any] = []

    def two() -> Any:
        if not groups:
            Session.prewarm(("deepspeed", "peft", "transformers.models.llama.modeling_llama"))
            cluster = Cluster.local(num_nodes=1, accelerators_per_node=0)
            strategy = NodePlacementStrategy([0, 0])
            groups.append(Trainer.create_group().launch(cluster, placement_strategy=strategy, name="savers"))
        return groups[0]

    yield two
    for group in groups:
        group.shutdown()
    session = Session.running()
    if session:
        session.stop()


@pytest.fixture
def saved(ranks, model: Path, tmp_path: Path) -> Saved:
    """Trains two steps on n ranks and saves; the checkpoint, and what the backend exported and scored."""

    def make(n: int, backend: str, **changes: Any) -> tuple[Path, dict[str, Any]]:
        cfg = make_config(model, training_backend=backend, **changes)
        with CheckpointWriter(RunPaths(tmp_path / "run"), 2) as writer:
            options = {"steps": range(2), "save": writer.staging, "export": tmp_path / "own"}
            if changes.get("lora.rank"):
                options["adapter"] = tmp_path / "own_adapter"
            report = train(Worker(), cfg, **options) if n == 1 else ranks().train(cfg, **options).wait()[0]
            writer.commit({})
        return writer.final, {**report, "own": tmp_path / "own", "own_adapter": tmp_path / "own_adapter"}

    return make


@pytest.fixture(scope="module")
def looking(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model that looks at pictures."""
    folder = tmp_path_factory.mktemp("looking") / "tiny"
    make_tiny_vision_model(folder, vocabulary=string.printable[:90], hidden=32, seed=3)
    return folder


CASES = [
    (2, "fsdp", {"model.dtype": "bfloat16"}),
    (2, "fsdp", {"lora.rank": 2}),
    (2, "fsdp", {"model.dtype": "bfloat16", "lora.rank": 2}),
    (2, "deepspeed", {"deepspeed.zero_stage": 1, "model.dtype": "bfloat16"}),
    (2, "deepspeed", {"deepspeed.zero_stage": 2}),
    (2, "deepspeed", {"deepspeed.zero_stage": 2, "lora.rank": 2}),
    (2, "deepspeed", {"deepspeed.zero_stage": 3}),
    (2, "deepspeed", {"deepspeed.zero_stage": 3, "model.dtype": "bfloat16", "lora.rank": 2}),
]


@pytest.mark.parametrize(("n", "backend", "changes"), CASES)
def test_it_is_what_the_backend_itself_exports(saved: Saved, n, backend, changes) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if backend == "deepspeed":
        need_extra("deepspeed")
        changes = {**changes, "deepspeed.config": {"zero_optimization": {"stage3_param_persistence_threshold": 0}}}
    checkpoint, report = saved(n, backend, **changes)
    folder = export_language_model(checkpoint)
    assert folder == checkpoint.parent.parent / "export" / "global_step_2"
    mine, own = load_file(folder / "model.safetensors"), load_file(report["own"] / "model.safetensors")
    assert mine.keys() == own.keys()
    for name, value in mine.items():
        assert value.dtype == own[name].dtype and torch.equal(value, own[name]), name
    loaded = AutoModelForCausalLM.from_pretrained(folder).eval()
    if changes.get("model.dtype") is None:
        with torch.no_grad():
            scores = token_scores(loaded, probe_batch(), TEMPERATURE).logprobs
        torch.testing.assert_close(scores, report["after"], rtol=1e-5, atol=1e-5)
    assert AutoTokenizer.from_pretrained(folder).get_vocab().keys() > {"7", "a"}
    assert json.loads((folder / "config.json").read_text())["use_cache"] is True

    record = json.loads((folder / CONVERSION).read_text())
    assert record["backend"] == backend and record["global_step"] == 2 and record["from"] == str(checkpoint)
    assert record["files"]["model.safetensors"]["size"] == (folder / "model.safetensors").stat().st_size
    assert len({path.stat().st_mode for path in folder.iterdir()}) == 1  # all as readable as any new file
    assert (record["lora"] is None) == ("lora.rank" not in changes)
    if "lora.rank" in changes:
        adapter = export_language_model(checkpoint, folder.with_name("adapter"), adapter_only=True)
        name = "adapter_model.safetensors"
        mine, own = load_file(adapter / name), load_file(report["own_adapter"] / name)
        assert mine.keys() == own.keys() and all(torch.equal(value, own[key]) for key, value in mine.items())


FROZEN = [
    (1, "local", {}),
    (1, "local", {"model.dtype": "bfloat16", "model.value_head": True}),
    (1, "fsdp", {}),
    (2, "fsdp", {"model.dtype": "bfloat16"}),
    (1, "deepspeed", {"deepspeed.zero_stage": 2}),
    (2, "deepspeed", {"deepspeed.zero_stage": 3}),
]


@pytest.mark.parametrize(("n", "backend", "changes"), FROZEN)
def test_frozen_parts_are_the_base_models(looking: Path, ranks, tmp_path: Path, n, backend, changes) -> None:
    """What a checkpoint lacks because it was frozen is read from the model that training began from, wherever that is now, and
    training goes on from such a checkpoint; what it lacks otherwise is a fault."""
    if backend == "deepspeed":
        need_extra("deepspeed")
    cfg = make_config(looking, training_backend=backend, **{"model.freeze_vision": True, **changes})
    run = train if n == 1 else lambda _, *args, **options: ranks().train(*args, **options).wait()[0]
    with CheckpointWriter(RunPaths(tmp_path / "run"), 2) as writer:
        options = {"steps": range(2), "save": writer.staging, "export": tmp_path / "own"}
        report = run(Worker(), cfg, **options)
        writer.commit({})
    mine = load_file(export_language_model(writer.final) / "model.safetensors")
    own, base = (load_file(folder / "model.safetensors") for folder in (tmp_path / "own", looking))
    assert mine.keys() == own.keys() and all(torch.equal(value, own[name]) for name, value in mine.items())
    eyes = {name for name in mine if "visual" in name}
    same = {name for name, value in mine.items() if torch.equal(value, base[name].to(value.dtype))}
    assert eyes and eyes <= same and len(same) < len(mine)
    again = run(Worker(), cfg, steps=range(0), load=writer.final)
    torch.testing.assert_close(again["before"], report["after"], rtol=1e-5, atol=1e-5)

    moved = looking.rename(tmp_path / "moved")
    try:
        with pytest.raises(ConfigError, match="the model cannot be loaded"):
            export_language_model(writer.final, tmp_path / "out")
        out = load_file(export_language_model(writer.final, tmp_path / "out", base=moved) / "model.safetensors")
    finally:
        moved.rename(looking)
    assert all(torch.equal(value, mine[name]) for name, value in out.items())

    with CheckpointWriter(RunPaths(tmp_path / "other"), 2) as writer:
        whole = tmp_path / "run" / "checkpoints" / "global_step_2"
        shutil.copytree(whole, writer.staging, dirs_exist_ok=True, ignore=shutil.ignore_patterns(MANIFEST, COMPLETE))
        about = json.loads((writer.staging / "backend.json").read_text())
        about["about"]["frozen"].pop()
        (writer.staging / "backend.json").write_text(json.dumps(about))
        writer.commit({})
    with pytest.raises(CheckpointError, match=r"visual\.\S+ \[.*\] is missing"):
        export_language_model(writer.final, tmp_path / "out")


def test_only_the_checkpoint_is_needed(saved: Saved, model: Path, tmp_path: Path, monkeypatch) -> None:
    """Neither the model of before training nor the run's folder; with LoRA the model that was adapted."""
    from transformers import AutoModelForCausalLM

    moved = tmp_path / "moved"
    whole, report = saved(1, "local")
    hidden = model.rename(model.with_name("hidden"))
    try:
        folder = export_language_model(whole.rename(tmp_path / "global_step_2"), moved, dtype="bfloat16")
    finally:
        hidden.rename(model)
    assert AutoModelForCausalLM.from_pretrained(folder).dtype is torch.bfloat16

    adapted, report = saved(1, "local", **{"lora.rank": 2})
    hidden = model.rename(model.with_name("hidden"))
    try:
        with pytest.raises(ConfigError, match="the model cannot be loaded"):
            export_language_model(adapted, moved)
        assert load_file(moved / "model.safetensors")  # what was there before stays
        export_language_model(adapted, moved, base=hidden)
    finally:
        hidden.rename(model)
    assert load_file(moved / "model.safetensors").keys() == report["weights"].keys()


def test_files_that_deepspeed_did_not_write_are_not_unpickled(saved: Saved, tmp_path: Path) -> None:
    need_extra("deepspeed")
    checkpoint, _ = saved(1, "deepspeed", **{"deepspeed.zero_stage": 2})
    victim = checkpoint / "deepspeed" / "state" / "mp_rank_00_model_states.pt"
    torch.save({"param_shapes": Evil(tmp_path / "ran")}, victim)
    from rlhpc.training.deepspeed_checkpoint import full_parameters

    with pytest.raises(CheckpointError, match=r"not a file that DeepSpeed wrote; loading it would call posix\.mkdir"):
        dict(full_parameters(victim.parent))
    cfg = make_config("", training_backend="deepspeed", **{"deepspeed.zero_stage": 2})
    cfg.actor.model.model_path = json.loads((checkpoint / "backend.json").read_text())["about"]["model_path"]
    with pytest.raises(CheckpointError, match="not a file that DeepSpeed wrote"):
        train(Worker(), cfg, steps=range(0), load=checkpoint)
    assert not (tmp_path / "ran").exists()


class Evil:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("backend", ["local", "fsdp"])
def test_adapters_of_another_scale_are_refused(saved: Saved, model: Path, backend: str) -> None:
    """What they learnt would be multiplied by another number; also where a checkpoint says its scale in `about` alone."""
    from rlhpc.language.task_types import SFT

    checkpoint, report = saved(1, backend, **{"lora.rank": 2, "lora.alpha": 16})
    cfg = {
        alpha: make_config(model, training_backend=backend, **{"lora.rank": 2, "lora.alpha": alpha})
        for alpha in (16, 32)
    }
    path = checkpoint / "backend.json"
    said = json.loads(path.read_text())
    for _ in range(2):
        path.write_text(json.dumps(said))
        again = train(Worker(), cfg[16], steps=range(0), load=checkpoint)
        assert torch.equal(again["before"], report["after"])
        with pytest.raises(CheckpointError, match=r"the checkpoint has actor\.lora\.alpha 16, this configuration 32"):
            train(Worker(), cfg[32], steps=range(0), load=checkpoint)
        assert SFT.checks.differences(cfg[16], checkpoint) == []
        assert SFT.checks.differences(cfg[32], checkpoint) == ["actor.lora.alpha is 16 there and 32 here"]
        said.pop("actor.lora.alpha", None)


def test_each_parameter_goes_on_at_its_own_number_of_steps(model: Path, tmp_path: Path) -> None:
    """A head for values without a gradient in the first step, and none in the step after the checkpoint."""
    cfg = make_config(model, training_backend="fsdp", **{"model.value_head": True})

    def steps(trainer: TokenTrainer, numbers: range) -> dict[str, torch.Tensor]:
        for number in numbers:
            for name, parameter in trainer.backend.module.named_parameters():
                parameter.requires_grad_("value_head" not in name or number in (1, 3))
            trainer.forward_backward(
                share(Worker(), number), loss_of(number), temperature=TEMPERATURE, compute_entropy=True
            )
            for name, parameter in trainer.backend.module.named_parameters():
                parameter.requires_grad_(True)
                if "value_head" in name and number not in (1, 3):
                    parameter.grad = None
            trainer.optimizer_step(1e-2)
        return {name: tensor.clone() for name, tensor in trainer.backend.local_tensors()}

    straight = TokenTrainer(cfg, Worker(), has_values=True)
    steps(straight, range(3))
    straight.save(tmp_path / "saved")
    expected = steps(straight, range(3, 5))
    resumed = TokenTrainer(cfg, Worker(), has_values=True)
    resumed.load(tmp_path / "saved")
    assert all(torch.equal(tensor, expected[name]) for name, tensor in steps(resumed, range(3, 5)).items())
