"""Experts that the engine chose, in the trainer: where routers are of two minds, trainer and engine agree all the same."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.extras import need_extra

need_extra("llm")

sys.path.insert(0, str(Path(__file__).parents[1] / "training"))
sys.path.insert(0, str(Path(__file__).parent))

from engine_models import requests_of
from engine_ranks import engine_of
from mesh_models import save_models
from replay_ranks import decided
from test_reasoning import LanguageRun

from rlhpc.language.agents.episodes import EpisodeRunner
from rlhpc.language.algorithms.base import ROLLOUT_LOGPROBS
from rlhpc.language.rollout.sample_group import build_sample_group
from tests.forked import forked

pytestmark = pytest.mark.long(together=True)

CLOSE = 1e-5


def _decided(folder: Path, sign: float) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    decided(model, sign)
    model.save_pretrained(folder)


def _written(folder: Path, *, updated: bool = False) -> dict[str, Any]:
    """What an engine writes with a model, as an actor gets it; maybe with an update in the middle, which changes nothing."""
    engine: Any = engine_of("hf", folder, routing_replay=True)
    episodes, requests = EpisodeRunner(engine, None), requests_of(6, seed=3, temperature=1.0, top_p=1.0, top_k=-1)
    episodes.add(requests)
    ended = [episode for _ in range(3) for episode in episodes.step()]
    if updated:
        engine.update_weights(1, [(n, p.clone()) for n, p in engine._model.named_parameters()])
    while len(ended) < len(requests):
        ended += episodes.step()
    for episode in ended:
        assert episode.experts is not None and episode.experts.min() >= 0
        assert len(episode.experts) == len(episode.prompt_ids) + len(episode.token_ids) - 1
    made, rewards = {episode.id: episode for episode in ended}, np.zeros(len(ended), np.float32)
    group = build_sample_group(0, 0, made, rewards, [{}] * len(made), True, 8, num_choices=engine.choices)
    engine.close()
    return group.batch.pack()


CASES: dict[str, list[dict[str, Any]]] = {
    "mixtral": [],
    "deepseek_v3": [{"parallel__expert": 2}],
    "qwen3_moe": [
        {"model__gradient_checkpointing": True}, {"parallel__context": 2, "parallel__expert": 2},
        {"parallel__expert": 2, "use_remove_padding": False}, {"parallel__tensor": 2, "parallel__expert": 2},
    ],
}  # fmt: skip


def _far(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    assert found.keys() == expected.keys()
    return max(float((found[n] - g).norm() / g.norm().clamp(min=1e-2)) for n, g in expected.items())


def test_a_trainer_takes_the_experts_that_the_engine_chose(tmp_path: Path) -> None:
    """Where routers are of two minds, log-probs are the engine's only with replay, on every mesh. Where they are not, replay
    changes no gradient, that of the routers included."""
    alone, divided = [], []
    for folder in ("engine", "trainer", "sure"):
        save_models(tmp_path / folder, *CASES)
    for family, settings in CASES.items():
        _decided(tmp_path / "engine" / family, -1.0)
        _decided(tmp_path / "trainer" / family, 1.0)
        packed, path = _written(tmp_path / "engine" / family), str(tmp_path / "trainer" / family)
        alone.append((path, {"training_backend": "local"}, packed))
        divided += [(path, changes, packed) for changes in settings]
    sure = str(tmp_path / "sure/qwen3_moe")
    alone.append((sure, {"training_backend": "local"}, _written(Path(sure), updated=True)))
    *found, (said, free, gradients, expected) = forked(1, "replay_ranks:scored", alone)[0]
    assert torch.allclose(said, free, atol=CLOSE) and _far(gradients, expected) < CLOSE
    assert all(float(g.norm()) > 1e-3 for n, g in gradients.items() if n.endswith("gate.weight"))
    whole = {Path(path).name: gradients for (path, *_), (_, _, gradients, _) in zip(alone[:-1], found, strict=True)}
    found += forked(2, "replay_ranks:scored", divided)[0]
    for (path, changes, batch), (said, free, gradients, _) in zip([*alone[:-1], *divided], found, strict=True):
        family, mask = Path(path).name, torch.from_numpy(batch["mask"])
        drawn = torch.from_numpy(batch["columns"][ROLLOUT_LOGPROBS])
        assert float((said - drawn)[mask].abs().max()) < CLOSE, (family, changes)
        assert float((free - drawn)[mask].abs().max()) > 100 * CLOSE, "routers decided as the engine's by themselves"
        assert _far(gradients, whole[family]) < 10 * CLOSE, (family, changes)


def test_an_engine_that_does_not_say_is_refused_before_anything_starts(tmp_path: Path) -> None:
    run = LanguageRun(tmp_path / "refused", "rollout.rollout_backend=vllm", "rollout.routing_replay=true")
    assert "rollout.routing_replay" in (said := run.train(code=2)) and "take hf, or leave it false" in said
    assert not run.root.exists()


def test_a_run_whose_engine_decides_otherwise(tmp_path: Path) -> None:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    from rlhpc.language.models.tiny import VOCABULARY, character_tokenizer

    tokenizer = character_tokenizer(VOCABULARY)
    config = Qwen3MoeConfig(  # type: ignore[call-arg]
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=32, moe_intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, head_dim=16, num_experts=4, num_experts_per_tok=2,
        max_position_embeddings=64, bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id, initializer_range=0.15,
    )  # fmt: skip
    torch.manual_seed(0)
    Qwen3MoeForCausalLM(config).save_pretrained(tmp_path / "mixture")
    tokenizer.save_pretrained(tmp_path / "mixture")
    _decided(tmp_path / "mixture", 1.0)
    run = LanguageRun(
        tmp_path / "otherwise", "runner.max_steps=1", "runner.save_interval=-1", "rollout.routing_replay=true",
        "rollout.rollout_backend=replay_ranks:Otherwise", f"actor.model.model_path={tmp_path / 'mixture'}",
        "actor.model.kwargs={}", "runner.val_check_interval=-1", "rollout.probe_tolerance=1e9",
    )  # fmt: skip
    run.train()
    assert run.rows()[0]["train/mismatch_abs"] < CLOSE
