"""What a rank would refuse after the start is refused by the plan, from the configuration and config.json alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlhpc import load_config
from rlhpc.language.size_checks import CPU_HEAD_SIZES, check_models
from rlhpc.runtime.errors import ConfigError
from tests.extras import need_extra

CONFIGS = Path(__file__).resolve().parents[3] / "configs" / "reasoning"
RUN = ["data.max_prompt_tokens=100", "rollout.max_new_tokens=28"]
QUANTIZED = [
    "rollout.rollout_backend=vllm", "rollout.quantization=fp8", "algorithm.tis_cap=2", "algorithm.recompute_logprobs=true",
]  # fmt: skip
TENSOR = [
    "actor.training_backend=fsdp", "actor.parallel.tensor=2", "cluster.component_placement={actor: '0:0-1', rollout: 0}",
]  # fmt: skip


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["actor.max_tokens_per_micro_batch=127"], r"actor\.max_tokens_per_micro_batch.* = 128 tokens"),
        (["critic.max_tokens_per_micro_batch=127", "cluster.component_placement={actor: 0, rollout: 0, critic: 0}",
          "algorithm.adv_type=gae"], r"critic\.max_tokens_per_micro_batch.* = 128 tokens"),
        (["actor.parallel.context=2", "actor.use_remove_padding=false"], r"actor\.use_remove_padding.*set it true"),
        (["actor.parallel.context=2", "actor.model.attn_implementation=eager"], r"attn_implementation.*needs sdpa"),
        (["rollout.max_turns=4"], r"rollout\.max_turns.*rollout\.agent is not set"),
        (["rollout.agent=tools"], r"rollout\.max_turns.*must be at least 2"),
    ],
    ids=["actor", "critic", "padding", "eager", "no agent", "one turn"],
)  # fmt: skip
def test_keys_that_do_not_fit_together(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(CONFIGS / "smollm2.yaml", [*RUN, *overrides])


def test_a_micro_batch_of_just_one_sequence_is_allowed() -> None:
    load_config(CONFIGS / "smollm2.yaml", [*RUN, "actor.max_tokens_per_micro_batch=128"])
    agent = ["agent.kind=python", "agent.target=my:agent", "reward.terms=[{name: agent}]", "rollout.max_turns=1"]
    load_config(
        CONFIGS / "smollm2.yaml", [*RUN, "actor.max_tokens_per_micro_batch=127", *agent]
    )  # its turns are its own


@pytest.mark.parametrize(
    ("numbers", "overrides", "message"),
    [
        ({"vocab_size": 101}, TENSOR, r"actor\.parallel\.tensor\(2\) does not divide the vocabulary of 101 tokens"),
        (
            {"num_key_value_heads": 1},
            TENSOR,
            r"actor\.parallel\.tensor\(2\) does not divide the model's 1 heads of keys",
        ),
        (
            {"model_type": "smollm3", "num_key_value_heads": 1},
            TENSOR,
            r"actor\.parallel\.tensor\(2\) does not divide the model's 1 heads of keys",
        ),
        ({"model_type": "phi3", "num_key_value_heads": 1}, TENSOR, ""),  # its heads are not shared out
        ({"head_dim": 16}, ["rollout.rollout_backend=vllm"], "attention heads are 16 wide, and vLLM has 32, 64"),
        ({"head_dim": 64}, ["rollout.rollout_backend=vllm"], ""),
        (
            {"head_dim": 64},
            QUANTIZED,
            r"rollout\.quantization is 'fp8', which needs weights in bfloat16 or float16, and rollout\.dtype is 'auto', "
            r"which on cpu is float32: set rollout\.dtype=bfloat16",
        ),
        ({"head_dim": 64}, [*QUANTIZED, "rollout.dtype=bfloat16"], ""),
        ({"head_dim": 64}, [*QUANTIZED, "actor.model.dtype=float16"], ""),
        ({}, ["rollout.routing_replay=true"], r"rollout\.routing_replay is for a mixture of experts"),
        (
            {},
            ["actor.model.router_aux_loss_coef=0.1"],
            r"actor\.model\.router_aux_loss_coef is for a mixture of experts",
        ),
        ({"num_local_experts": 4}, ["actor.model.router_aux_loss_coef=0.1", "rollout.routing_replay=true"], ""),
        (
            {},
            [
                "critic.model.router_aux_loss_coef=0.1",
                "cluster.component_placement={actor: 0, rollout: 0, critic: 0}",
                "algorithm.adv_type=gae",
            ],
            r"critic\.model\.router_aux_loss_coef is for a mixture of experts",  # its model is the actor's
        ),
        ({}, ["actor.model.freeze_vision=true"], r"actor\.model\.freeze_vision: .* does not look at pictures"),
        ({"vision_config": {"hidden_size": 8}}, ["actor.model.freeze_vision=true"], ""),
        ({}, ["rollout.rollout_backend=hf"], ""),
    ],
)
def test_models_that_do_not_fit_their_ranks(
    numbers: dict[str, object], overrides: list[str], message: str, tmp_path: Path
) -> None:
    if overrides is TENSOR:
        need_extra("llm")  # its packages say which families divide their heads
    config = {
        "model_type": "llama", "vocab_size": 100, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
        "num_hidden_layers": 2, "intermediate_size": 64, "max_position_embeddings": 512, "architectures": ["Any"],
    }  # fmt: skip
    tmp_path.joinpath("config.json").write_text(json.dumps(config | numbers))
    words = [*RUN, f"actor.model.model_path={tmp_path}", *overrides]
    if not message:
        load_config(CONFIGS / "smollm2.yaml", words)
        return
    with pytest.raises(ConfigError, match=message):
        load_config(CONFIGS / "smollm2.yaml", words)


def test_the_head_sizes_are_those_of_vllm() -> None:
    need_extra("llm", "vllm")
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    assert tuple(CPUAttentionBackend.get_supported_head_sizes()) == CPU_HEAD_SIZES


@pytest.mark.parametrize(
    "name", ["demo_sft", "demo", "reward_model", "dpo", "pictures_sft", "pictures", "smollm2", "large"]
)
def test_models_of_every_kind_of_run_are_looked_at(name: str) -> None:
    """Also of those whose sections lack keys of others."""
    check_models(
        load_config(CONFIGS / f"{name}.yaml", ["workflow.sft=null"] if name in ("demo", "pictures") else []), {}
    )
