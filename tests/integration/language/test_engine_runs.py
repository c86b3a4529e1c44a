"""Runs whose engines have two ranks each: they train as with one, and one that loses a rank is started again alone."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest
import torch

from tests.extras import need_extra

need_extra("vllm")

sys.path.insert(0, str(Path(__file__).parent))

from test_policies import SELF_PLAY
from test_reasoning import WORDS, LanguageRun, improves
from test_replicas import Disturbed

from rlhpc.language.models.tiny import VOCABULARY, character_tokenizer

pytestmark = pytest.mark.long

TWO = (
    "rollout.rollout_backend=vllm", "rollout.parallel.tensor=2", "rollout.probe_interval=1", "runner.save_interval=-1",
    "cluster.component_placement={actor: '0', rollout: '0:0-3'}", "runner.val_check_interval=4",
)  # fmt: skip


@pytest.mark.long
def test_two_engines_of_two_ranks(tmp_path: Path) -> None:
    """Each version is looked at by a text that trainer and engines score."""
    run = LanguageRun(tmp_path / "two", *TWO)
    run.train()
    rows = run.rows()
    assert improves(rows) and max(row["train/mismatch_abs"] for row in rows) < 1e-4
    assert [row["rollout/samples"] for row in rows] == [64.0 * step for step in range(1, 9)]
    assert [row["eval/problems"] for row in rows if "eval/problems" in row] == [10, 10]


@pytest.mark.timeout(600)
def test_an_engine_ends_whole_and_alone(tmp_path: Path) -> None:
    """Whichever of its ranks is killed, in the middle of a step; no other process is started again, and a helper is an engine
    of as many ranks. Who comes back, or comes anew, gets the weights by routes of its own."""
    run = Disturbed(
        tmp_path / "disturbed", pause_s=0.1, settings=(*TWO, "runner.max_steps=30", "rollout.weight_sync=shards")
    )
    run.until(lambda: run.step() >= 1)
    before = run.members()
    os.kill(before["rollout-3"], signal.SIGKILL)
    back = "rollout[2], rollout[3] takes part from the next step on"
    run.until(lambda: back in run.said())
    between = run.members()
    assert {name for name in before if before[name] != between[name]} == {"rollout-2", "rollout-3"}
    os.kill(between["rollout-0"], signal.SIGKILL)
    helpers = [run.join(), run.join()]  # while that one comes back
    run.until(lambda: "rollout[0], rollout[1] takes part from the next step on" in run.said())
    after = run.members()
    assert {name for name in between if between[name] != after[name]} == {"rollout-0", "rollout-1"}
    run.until(lambda: "rollout[4], rollout[5] takes part from the next step on" in run.said())
    run.hurry()
    said = run.end()
    assert "start again from" not in said and "rollout[2], rollout[3] ended; the others have made its prompts" in said
    for helper in helpers:
        helper.communicate(timeout=60)
    assert [row["rollout/samples"] for row in run.rows()] == [64.0 * step for step in range(1, 31)]
    assert max(row["train/mismatch_abs"] for row in run.rows()) < 1e-4
    assert not [name for name in os.listdir("/dev/shm") if "cpushm" in name and "rollout-" in name]


def test_an_engine_keeps_the_adapters_of_several_policies(tmp_path: Path) -> None:
    """Beside one model; each version is looked at, of each policy by turns. Two ranks train them."""
    run = LanguageRun(
        tmp_path / "policies", *SELF_PLAY, "rollout.rollout_backend=vllm", "rollout.merge_adapters=false",
        "cluster.component_placement={actor: '0:0-1', rollout: '0'}", "runner.val_check_interval=-1", "runner.max_steps=4",
    )  # fmt: skip
    run.train()
    rows = run.rows()
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    for policy in ("opens", "replies"):
        assert max(row[f"train/policy/{policy}/mismatch_abs"] for row in rows) < 1e-4
        assert sum(row[f"train/policy/{policy}/grad_norm"] > 0 for row in rows) >= 2


TWO_TO_TWO = ("cluster.component_placement={actor: '0:0-1', rollout: '0:0-1'}",)
#: A vocabulary that two ranks share, and heads that vLLM has kernels for on CPUs.
WIDE = WORDS.replace("hidden: 64", "hidden: 128")
ADAPTERS = (*TWO_TO_TWO, "actor.lora.rank=4", "actor.optim.lr=2e-2")


@pytest.mark.parametrize(
    "settings",
    [
        TWO_TO_TWO,
        (*ADAPTERS, "actor.offload_in_rollout=true"),
        (*ADAPTERS, "rollout.merge_adapters=false"),
        ("cluster.component_placement={actor: '0:0-3', rollout: '0'}", "rollout.parallel.tensor=1"),
        (
            "cluster.component_placement={actor: '0:0-3', rollout: '0:0-1'}",
            "actor.parallel={shard: 2, tensor: 2}",
            WIDE,
        ),
        (*ADAPTERS, "actor.parallel={shard: 1, tensor: 2}", WIDE),
    ],
    ids=["2 to 2", "adapters merged, in turns", "adapters apart", "4 to 1", "2 x 2 to 2", "adapters of a tensor group"],
)
def test_weights_from_shards_to_shards(tmp_path: Path, settings: tuple[str, ...]) -> None:
    """Ranks that train a part of each matrix, and ranks of an engine that want others; each version is looked at."""
    run = LanguageRun(
        tmp_path / "shards", *TWO, "actor.training_backend=fsdp", "runner.max_steps=3",
        "runner.val_check_interval=-1", *settings,
    )  # fmt: skip
    run.train()
    rows = run.rows()
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert max(row["train/mismatch_abs"] for row in rows) < 1e-4
    logs = "".join(path.read_text() for path in (tmp_path / "shards").rglob("actor-0.err"))
    assert ("sends its own to the engines" in logs) == ("rollout.merge_adapters=false" not in settings)


@pytest.mark.parametrize("mesh", ["{shard: 4, expert: 4}", "{shard: 2, tensor: 2, expert: 4}"])
def test_experts_to_an_engine_of_two_ranks(mesh: str, tmp_path: Path) -> None:
    """Each rank that trains keeps one of four experts whole; each rank of the engine wants half of every one."""
    need_extra("llm")
    import transformers

    tokenizer = character_tokenizer(VOCABULARY + "@")
    config = transformers.Qwen3MoeConfig(  # type: ignore[call-arg]
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=64, moe_intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, head_dim=32, num_experts=4, num_experts_per_tok=2,
        max_position_embeddings=64, bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.Qwen3MoeForCausalLM(config).save_pretrained(tmp_path / "mixture")
    tokenizer.save_pretrained(tmp_path / "mixture")
    run = LanguageRun(
        tmp_path / "shards", *TWO, "rollout.weight_sync=shards", "actor.training_backend=fsdp", "runner.max_steps=3",
        "runner.val_check_interval=-1", f"actor.model.model_path={tmp_path / 'mixture'}", "actor.model.kwargs={}",
        "cluster.component_placement={actor: '0:0-3', rollout: '0:0-1'}", f"actor.parallel={mesh}",
    )  # fmt: skip
    run.train()
    rows = run.rows()
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert max(row["train/mismatch_abs"] for row in rows) < 1e-4
    assert all(row["train/router_load_max"] >= 1.0 for row in rows)
