"""Updates of engines of several ranks, by architecture: what each rank holds, its loaders cut out of whole tensors; and of
what it says that it wants, nothing is missing."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.extras import need_extra

need_extra("llm")

sys.path.insert(0, str(Path(__file__).parents[1] / "training"))
sys.path.insert(0, str(Path(__file__).parent))

from engine_models import EXPERTS, TOLERANCE, change, error_of, requests_of, run_out, save_model
from engine_ranks import Several, engine_of
from transformers import AutoModelForCausalLM
from transformers.core_model_loading import revert_weight_conversion

from rlhpc.language.engines import Completion
from rlhpc.language.engines.common import WeightUpdateError
from rlhpc.language.engines.vllm_weights import wanted_slices
from tests.forked import forked

pytestmark = pytest.mark.long(together=True)


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("Qwen2", {"tie_word_embeddings": True, "num_key_value_heads": 2}),
        ("Qwen3Moe", {**EXPERTS, "num_experts": 4, "moe_intermediate_size": 64, "head_dim": 32}),
    ],
)
def test_each_update_arrives(tmp_path: Path, kind: str, changes: dict[str, Any]) -> None:
    """Tied weights, heads for keys and values on each rank; experts that kernels pack anew."""
    reference = save_model(tmp_path, kind, **changes)
    engine = engine_of("vllm x 2", tmp_path, seed=0, max_batch_size=5)
    requests = requests_of(10, seed=10)
    assert isinstance(engine, Several)
    whole, mine = sum(p.numel() for p in reference.parameters()), engine.own.wants()
    assert sum(tensor_slice.numel for tensor_slices in mine.values() for tensor_slice in tensor_slices) < 0.6 * whole
    for version, layout in enumerate(("", "2x2", "4", "ep4", "")):
        change(reference, version)
        if layout:
            engine.take_shards(version, in_files(reference), layout)
        else:
            engine.update_weights(version, reference.named_parameters())
        for request, completion in zip(requests, engine.generate(requests), strict=True):
            assert error_of(reference, request, completion) < 5 * TOLERANCE
    engine.close()


@pytest.mark.parametrize(
    ("kind", "changes", "mesh"),
    [
        ("Qwen3", {"num_key_value_heads": 2, "head_dim": 32}, {"shard": 2, "tensor": 2}),
        (
            "Qwen3Moe",
            {**EXPERTS, "num_experts": 4, "moe_intermediate_size": 64, "head_dim": 32},
            {"shard": 4, "expert": 4},
        ),
    ],
)
def test_what_ranks_exported_together_is_read(
    tmp_path: Path, kind: str, changes: dict[str, Any], mesh: dict[str, int]
) -> None:
    """Several files, each written by four ranks: the engine says of a text what the ranks say."""
    save_model(tmp_path / "model", kind, **changes)
    sections = {f"parallel__{name}": size for name, size in mesh.items()}
    path, folder = str(tmp_path / "model"), tmp_path / "exported"
    said = forked(4, "mesh_ranks:exported_in_files", path, str(folder), sections)[0]
    assert len([*folder.glob("model-*.safetensors")]) > 3
    engine: Any = engine_of("vllm", folder)
    for ids, logprobs in said:
        assert float((torch.tensor(engine.score(ids)) - logprobs).abs().max()) < 5 * TOLERANCE
    engine.close()


def in_files(model: Any) -> list[tuple[str, Any]]:
    """A model's tensors as its files have them, tied ones once."""
    names = {name for name, _ in model.named_parameters()}
    return list(revert_weight_conversion(model, {n: t for n, t in model.state_dict().items() if n in names}).items())


def test_experts_divided_among_ranks_are_wanted_whole(tmp_path: Path) -> None:
    """vLLM's kernels for that do not run on CPUs: what its loaders want is what there is to see."""
    reference = save_model(
        tmp_path, "Qwen3Moe", **EXPERTS, num_experts=4, moe_intermediate_size=64, head_dim=32, num_key_value_heads=2
    )
    kwargs = {"enable_expert_parallel": True, "load_format": "dummy"}
    engine: Any = engine_of("vllm x 2", tmp_path, seed=0, max_batch_size=5, engine_kwargs=kwargs)
    shapes = {name: tuple(tensor.shape) for name, tensor in in_files(reference)}
    found = engine.own._engine.collective_rpc(wanted_slices, args=(shapes,))[0]
    experts = {name: tensor_slices for name, tensor_slices in found.items() if ".experts." in name}
    assert {int(name.split(".experts.")[1].split(".")[0]) for name in experts} == {0, 1}
    assert all(
        len(tensor_slices) == 1 and tensor_slices[0].sizes == shapes[name] for name, tensor_slices in experts.items()
    )
    halves = [name for name in found if "q_proj" in name]
    assert halves and all(found[name][0].sizes == (shapes[name][0] // 2, shapes[name][1]) for name in halves)
    engine.close()


@pytest.mark.parametrize("kind", ["vllm", "vllm x 2"])
def test_adapters_as_they_are(tmp_path: Path, kind: str) -> None:
    """An update is the adapters alone, also in the middle of answers; what is missing or another's is refused."""
    need_extra("llm")
    import peft

    save_model(tmp_path, num_key_value_heads=2)
    base = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    model = peft.get_peft_model(
        base, peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "down_proj", "up_proj"])
    )
    engine = engine_of(kind, tmp_path, adapters=(4, 8))
    requests = {request.id: request for request in requests_of(12, seed=4, max_new_tokens=24)}
    done, models = list[Completion](), list[Any]()
    for version in range(3):
        for name, parameter in model.named_parameters():
            if ".lora_" in name:
                generator = torch.Generator().manual_seed(version + len(name))
                parameter.data = torch.randn(parameter.shape, generator=generator) * 0.1
        adapters = {
            name.replace(".default", ""): tensor for name, tensor in model.state_dict().items() if ".lora_" in name
        }
        engine.update_weights(version, adapters.items())
        models.append(copy.deepcopy(model).merge_and_unload())
        if not version:
            engine.add(requests.values())
        done += [completion for _ in range(6) for completion in engine.step()]
        text = [5, 9, 14, 6, 11, 7, 8, 10]  # beside the requests under way
        with torch.no_grad():
            expected = (
                models[-1](torch.tensor([text]))
                .logits[0, :-1]
                .log_softmax(-1)
                .gather(-1, torch.tensor(text[1:])[:, None])
            )
        assert float((torch.tensor(engine.score(text)) - expected[:, 0]).abs().max()) < 5 * TOLERANCE
    done += run_out(engine)
    assert sorted(completion.id for completion in done) == sorted(requests)
    assert any({*completion.versions} == {0, 1, 2} for completion in done)
    for completion in done:
        for version, weights in enumerate(models):
            assert error_of(weights, requests[completion.id], completion, version) < 5 * TOLERANCE
    name = next(iter(adapters))
    for wrong, said in (
        ({k: v for k, v in adapters.items() if k != name}, "left out"),
        ({**adapters, name: adapters[name][:2]}, r"of shape \(2, 64\); \(4, 64\) is wanted"),
    ):
        with pytest.raises(WeightUpdateError, match=said):
            getattr(engine, "own", engine)._adapters.fitting(wrong.items())
    engine.close()
