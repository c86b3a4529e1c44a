"""Sizes of models: parameters, layers and the KV cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rlhpc.cli import main
from rlhpc.language.planning.model_size import UnknownModelError, size_of
from tests.extras import need_extra
from tests.unit.language.planning.accounts import EIGHT, MATH, SMALL


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("Qwen/Qwen2.5-0.5B-Instruct", 494_032_768),
        ("Qwen/Qwen2.5-7B-Instruct", 7_615_616_512),
        ("Qwen/Qwen2.5-32B", 32_763_876_352),
        ("Qwen/Qwen3-8B", 8_190_735_360),
        ("Qwen/Qwen3-30B-A3B-Instruct-2507", 30_532_122_624),
        ("Qwen/Qwen3-235B-A22B", 235_093_634_560),
        ("meta-llama/Llama-3.1-70B-Instruct", 70_553_706_496),
        ("builtin:smollm2", 134_515_008),
    ],
)
def test_parameters_are_those_of_the_published_weights(name: str, parameters: int) -> None:
    assert size_of(name, builds_model=False).parameters == parameters


def test_a_hub_name_without_files_is_not_known_and_planning_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UnknownModelError, match="give a folder"):
        size_of("somebody/her-model", builds_model=False)
    assert main(["plan", MATH, *EIGHT, "actor.model.model_path=somebody/her-model"]) == 2
    said, refused = capsys.readouterr()
    assert "actor: not known: somebody/her-model" in said and "SBATCH" in said
    assert "data/math/test.parquet'; there is no such file" in refused  # its data are not here, either


def test_the_hubs_cache_is_read_before_what_is_known_by_name(tmp_path: Path) -> None:
    folder = tmp_path / "hub" / "models--somebody--her-model" / "snapshots" / "abc"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(
        '{"model_type": "llama", "vocab_size": 10, "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1, '
        '"num_attention_heads": 2, "tie_word_embeddings": true}'
    )
    assert size_of("somebody/her-model").parameters == 10 * 8 + 4 * 64 + 3 * 128 + 3 * 8


LATENT: dict[str, Any] = {
    "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128, "num_key_value_heads": 4,
}  # fmt: skip
QWEN2: dict[str, Any] = {"model_type": "qwen2", "sliding_window": 100, "max_window_layers": 3}
FULL, PER_TOKEN = "full_attention", 2 * 2 * 16


@pytest.mark.parametrize(
    ("config", "kept"),
    [
        ({"model_type": "llama"}, [1000] * 4),
        ({"model_type": "mistral", "sliding_window": 100}, [100] * 4),
        ({"model_type": "mistral", "sliding_window": None}, [1000] * 4),
        ({**QWEN2, "use_sliding_window": False}, [1000] * 4),
        ({**QWEN2, "use_sliding_window": True}, [1000, 1000, 1000, 100]),
        ({"model_type": "gemma3_text", "sliding_window": 100, "num_hidden_layers": 6}, [100] * 5 + [1000]),
        ({"model_type": "gpt_oss", "sliding_window": 100}, [100, 1000, 100, 1000]),
        ({"model_type": "qwen3_next"}, [1000]),
        ({"model_type": "lfm2", "layer_types": ["conv", FULL, "conv", FULL]}, [1000, 1000]),
    ],
)  # fmt: skip
def test_a_cache_keeps_of_each_layer_what_it_looks_back_at(config: dict[str, Any], kept: list[int]) -> None:
    """In vLLM; engine `hf` keeps all tokens of each layer that keeps any."""
    need_extra("llm")
    size = size_of("somebody/model", config={**SMALL, **config})
    assert size.key_value_bytes(2, 1000, is_compact=True) == 2 * PER_TOKEN * sum(kept)
    assert size.key_value_bytes(2, 1000) == 2 * PER_TOKEN * 1000 * len(kept)
    assert size.key_value_bytes(2, 1000, 2) == PER_TOKEN * 1000 * len(kept)


def test_a_cache_of_latent_attention_keeps_the_latent_vectors() -> None:
    """1152 bytes a token and layer in vLLM, on each rank of an engine; keys and values of all heads in engine `hf`."""
    need_extra("llm")
    size = size_of("somebody/model", config={**SMALL, **LATENT, "model_type": "deepseek_v3"})
    assert (
        size.key_value_bytes(2, 10, is_compact=True) == size.key_value_bytes(2, 10, 4, is_compact=True) == 4 * 10 * 1152
    )
    assert size.key_value_bytes(2, 10) == 4 * 10 * 2 * 4 * (64 + 128 + 128)
