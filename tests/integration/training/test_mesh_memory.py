"""No rank ever holds a whole model: the memory that loading, a step, a checkpoint and an export take of a rank, measured."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.extras import need_extra

need_extra("llm")

sys.path.insert(0, str(Path(__file__).parent))

from mesh_models import save_models

from tests.forked import forked

pytestmark = pytest.mark.long

#: MiB for what does not grow with the model: gloo's and torch's buffers, activations of a few tokens, modules.
BUFFERS = 24.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """34 million parameters in eight layers: 136 MiB."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(
        vocab_size=8192, hidden_size=512, intermediate_size=1536, num_hidden_layers=8, num_attention_heads=8,
        num_key_value_heads=8, tie_word_embeddings=False, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("memory") / "model"
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder, max_shard_size="32MB")
    return str(folder)


@pytest.mark.parametrize("changes", [{}, {"parallel__tensor": 2}], ids=["shard4", "shard2 tensor2"])
def test_a_rank_needs_its_part_and_one_layer(changes: dict[str, Any], model: str, tmp_path: Path) -> None:
    save_models(tmp_path, "llama")
    measured = forked(4, "memory_ranks:peaks", model, str(tmp_path / "llama"), str(tmp_path), changes)
    print(*measured, sep="\n")
    for found in measured:
        own, unit = found["own"], found["unit"]
        assert own < found["model"] * 0.27
        # The part and the optimizer's two averages of it; a pass over a few tokens, which shows whether the model reads rows,
        # gathers layers, whose weights are there twice while they come in.
        assert found["load"] < 3 * own + 4 * unit + BUFFERS, found
        # Gradients of the part; of a layer weights, gradients and what is reduced of them, and the next one's weights.
        assert found["step"] < own + 4 * unit + BUFFERS, found
        assert found["save"] < found["tensor"] + BUFFERS, found
        assert found["export"] < 2 * found["tensor"] + BUFFERS, found
    from transformers import AutoModelForCausalLM

    most = found["tensor"]
    first, second = forked(1, "memory_ranks:converted", model, str(tmp_path / "saved"), str(tmp_path))[0]
    print({"converted": round(first, 1), "in bfloat16": round(second, 1)})
    assert max(first, second) < 2 * most + BUFFERS
    read = {
        name: AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype="auto")
        for name in ("exported", "first", "second")
    }
    exported, first_read, second_read = (one.state_dict() for one in read.values())
    assert [name for name, tensor in exported.items() if not torch.equal(tensor, first_read[name])] == []
    assert [name for name, one in exported.items() if not torch.equal(one.bfloat16(), second_read[name])] == []
