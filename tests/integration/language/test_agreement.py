"""No run trains against an engine that computes something else; and what shows it leaves no trace."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from tests.extras import need_extra

need_extra("llm", "deepspeed")

sys.path.insert(0, str(Path(__file__).parent))

from test_reasoning import LanguageRun

SHORT = ("runner.max_steps=2", "runner.save_interval=-1", "runner.val_check_interval=-1")
LONG = ("data.max_prompt_tokens=100", "actor.model.kwargs={}")


def windowed(folder: Path) -> str:
    from transformers import MistralConfig, MistralForCausalLM

    from rlhpc.language.models.tiny import VOCABULARY, character_tokenizer

    tokenizer = character_tokenizer(VOCABULARY)
    config = MistralConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=128, bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, sliding_window=24, initializer_range=0.3,
    )  # fmt: skip
    torch.manual_seed(0)
    MistralForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize(
    ("engine", "weights", "what"),
    [
        ("DecodesOtherwise", "the weights that the run starts with", "tokens that it drew"),
        ("ForgetsItsWindow", "the weights that the run starts with", "a text of 1[0-9]+ tokens"),
        ("PacksOnce", "weights of which each trained number was changed", "tokens that it drew"),
    ],
)
def test_a_false_engine_is_refused_at_the_start(engine: str, weights: str, what: str, tmp_path: Path) -> None:
    """Although no version is probed otherwise; and nothing was trained."""
    model = (*LONG, f"actor.model.model_path={windowed(tmp_path / 'model')}") if engine == "ForgetsItsWindow" else ()
    run = LanguageRun(
        tmp_path / "run", *SHORT, f"rollout.rollout_backend=false_engines:{engine}", "rollout.probe_interval=0", *model
    )
    said = run.train(code=2)
    family = "mistral" if model else "llama"
    assert f"does not compute this {family} model as the trainer does, with {weights}" in said, said
    assert "rollout.probe_tolerance" in said and not run.rows()
    if engine != "ForgetsItsWindow":
        assert f"the log-probs of {what}" in said, said


TWO = "cluster.component_placement={actor: '0:0-1', rollout: '0'}"
DEEPSPEED = "actor.training_backend=deepspeed"
KINDS = {
    "replicas": (TWO,),
    "shards": ("actor.training_backend=fsdp", TWO, "rollout.weight_sync=shards"),
    "zero 1": (DEEPSPEED, "actor.deepspeed.zero_stage=1"),
    "zero 3": (DEEPSPEED, "actor.deepspeed.zero_stage=3", TWO),
    "adapters": ("actor.lora.rank=4",),
    "adapters apart": (
        "actor.lora.rank=4", "rollout.rollout_backend=vllm", "rollout.merge_adapters=false", "actor.model.kwargs.heads=1",
    ),
    "half": ("actor.model.dtype=bfloat16",),
    "elements": ("rollout.weight_delta=elements",),
    "in turns": ("actor.offload_in_rollout=true",),
    "ahead": ("algorithm.max_staleness=1",),
}  # fmt: skip


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[] if kind in ("replicas", "zero 3") else pytest.mark.long) for kind in KINDS]
)
def test_the_proof_leaves_no_trace(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run with the proof is the run without, to the last bit; and the second does without because the first has made it."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    runs = [LanguageRun(tmp_path / name, *SHORT, *KINDS[kind]) for name in ("first", "second")]
    proofs = []
    for run in runs:
        run.train()
        proofs.append({path: path.stat().st_mtime_ns for path in (tmp_path / "state/rlhpc/engines").rglob("*.json")})
    assert len(proofs[0]) == 1 and proofs[0] == proofs[1]
    if kind != "ahead":  # which no two runs of are the same
        assert runs[0].rows() == runs[1].rows()
