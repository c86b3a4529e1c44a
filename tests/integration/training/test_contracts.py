"""What is used of transformers and torch without being promised: a version that changes it fails here, and says what."""

from __future__ import annotations

import inspect
import sys
import tomllib
from pathlib import Path

import torch
from packaging.requirements import Requirement
from packaging.version import Version

from tests.extras import need_extra

need_extra("llm")

sys.path.insert(0, str(Path(__file__).parent))

import transformers
from mesh_models import BASE, configs

from tests.forked import forked


def test_the_version_is_one_for_which_this_was_looked_at() -> None:
    """What is below is not public, so that any version may change it: packages and environments allow this one alone."""
    root = Path(__file__).resolve().parents[3]
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    wanted = next(one for each in project["llm"] if (one := Requirement(each)).name == "transformers").specifier
    assert transformers.__version__ in wanted
    major, minor = Version(transformers.__version__).release[:2]
    assert f"{major}.{minor + 1}.0" not in wanted and f"{major}.{minor - 1}.99" not in wanted
    for path in sorted((root / "envs").glob("*.txt")):
        named = [line.partition("#")[0] for line in path.read_text().splitlines() if line.startswith("transformers=")]
        if path.name != "lerobot.txt":  # a Python of its own, which divides no model
            assert all(transformers.__version__ in Requirement(one).specifier for one in named), path


def _parameters(function: object) -> list[str]:
    return list(inspect.signature(function).parameters)  # type: ignore[arg-type]


def test_the_styles_of_transformers_are_as_they_are_used() -> None:
    from transformers.distributed import tensor_parallel as theirs

    style = theirs.TensorParallelLayer
    assert _parameters(style.shard_param) == ["self", "module", "param", "mesh"]
    assert _parameters(style.validate_param) == ["self", "module", "param", "mesh", "parameter_name"]
    assert _parameters(style.install_forward) == ["self", "module", "mesh"]
    dispatch = theirs.ALL_PARALLEL_STYLES["ep_dispatch_experts"]
    assert _parameters(dispatch.install_forward) == ["module", "ep_mesh", "tp_mesh"]
    assert _parameters(theirs._AllReduceBackward.forward) == ["ctx", "x", "process_group"]
    known = {"colwise", "rowwise", "colwise_gather_output", "embedding_rowwise", "replicated_with_grad_allreduce"}
    assert {*known, "packed_colwise", "packed_rowwise", "grouped_gemm", "mla_kv_a_proj"} <= {
        *theirs.ALL_PARALLEL_STYLES
    }


def test_plans_name_layers_as_they_are_looked_for() -> None:
    with torch.device("meta"):
        dense = transformers.Qwen3ForCausalLM(configs()["qwen3"])
        mixture = transformers.Qwen3MoeForCausalLM(configs()["qwen3_moe"])
    assert BASE["num_hidden_layers"] == 2
    assert dense.tp_plan["model.layers.*.self_attn.q_proj"] == "colwise"
    assert dense.tp_plan["model.layers.*.self_attn.q_norm"] == "replicated_with_grad_allreduce"
    assert dense.tp_plan["lm_head"] == "colwise_gather_output"
    assert dense.config.base_model_tp_plan
    assert mixture.ep_plan["model.layers.*.mlp.experts"] == "ep_dispatch_experts"
    assert mixture.tp_plan["model.layers.*.mlp.experts.gate_up_proj"] == "packed_colwise"
    recorded = mixture.model._can_record_outputs["router_logits"]
    assert (recorded.target_class.__name__, recorded.index) == ("Qwen3MoeTopKRouter", 0)


def test_conversions_of_checkpoints_say_what_they_are_made_of() -> None:
    from mesh_models import configs
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import rename_source_key

    with torch.device("meta"):
        model = transformers.MixtralForCausalLM(configs()["mixtral"])
    joined = next(one for one in get_model_conversion_mapping(model, add_legacy=False) if len(one.source_patterns) == 2)
    assert [type(operation).__name__ for operation in joined.operations] == ["MergeModulelist", "Concatenate"]
    assert (joined.operations[0].dim, joined.operations[1].dim) == (0, 1)
    assert joined._original_source_patterns == [".experts.*.w1.weight", ".experts.*.w3.weight"]
    assert _parameters(rename_source_key)[:3] == ["source_key", "weight_renamings", "weight_converters"]


def test_what_torch_does_not_do() -> None:
    """Norms over several meshes; packed columns in checkpoints. Where it has learnt to, ours can go."""
    norm, wrong = forked(2, "contract_ranks:not_done")[0]
    assert "device mesh" in norm.lower() or "mesh" in norm.lower()
    assert wrong > 0
