"""Episodes of several turns on the real engines: what is kept of them is what the model would say of the same tokens."""

from __future__ import annotations

import pytest
import torch
from omegaconf import OmegaConf

from rlhpc.config.typed import default_section
from rlhpc.language.agents.registry import Agent, run_episodes
from rlhpc.language.config.engines import GrpoRolloutConfig as RolloutConfig
from rlhpc.language.config.training import GrpoActorConfig as ActorConfig
from rlhpc.language.engines import Request, SamplingParams, make_rollout
from tests.extras import need_extra

need_extra("llm")
import transformers


class Echo(Agent):
    """Ends a turn at the first odd digit, and says how many there have been; without one, the episode is over."""

    stop = tuple("13579")

    def respond(self, episode, text):
        episode.state["said"] = [*episode.state.get("said", []), text]
        return None if episode.turns == 4 or text[-1:] not in self.stop else f" {episode.turns} so far: "


@pytest.mark.parametrize("backend", ["hf", pytest.param("vllm", marks=pytest.mark.long)])
def test_log_probs_over_all_turns(tmp_path, backend):
    need_extra("vllm" if backend == "vllm" else "llm")
    from rlhpc.language.models.tiny import VOCABULARY, make_tiny_model

    make_tiny_model(tmp_path, vocabulary=VOCABULARY + ":", hidden=64, heads=2, layers=2, context=512, seed=1)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    sections = {
        "rollout": OmegaConf.structured(RolloutConfig(rollout_backend=backend, max_batch_size=4)),
        "actor": default_section(ActorConfig),
    }
    engine = make_rollout(OmegaConf.create(sections), model_path=str(tmp_path), device="cpu", seed=0)
    sampling = SamplingParams(max_new_tokens=300)
    requests = [
        (Request(i, tuple(tokenizer.encode(f"{i}+{i}=", add_special_tokens=False)), sampling, seed=i), None)
        for i in range(10)
    ]
    try:
        episodes = list(run_episodes(engine, requests, Echo(), tokenizer, 6))
        assert engine.unfinished() == 0
    finally:
        engine.close()
    assert sorted(episode.id for episode in episodes) == list(range(10))
    ended = [episode for episode in episodes if episode.turns == 4]
    assert len(ended) > 2  # the others drew an end token before
    for episode in episodes:
        lengths = {len(part) for part in (episode.token_ids, episode.logprobs, episode.versions, episode.loss_mask)}
        assert len(lengths) == 1
        ids = torch.tensor([[*episode.prompt_ids, *episode.token_ids]])
        with torch.inference_mode():
            scores = model(ids).logits[0, len(episode.prompt_ids) - 1 : -1].log_softmax(-1)
        wanted = scores.gather(1, torch.tensor(episode.token_ids).unsqueeze(1)).squeeze(1)
        mask = torch.tensor(episode.loss_mask)
        torch.testing.assert_close(torch.tensor(episode.logprobs)[mask], wanted[mask], atol=2e-5, rtol=0)
        assert not torch.tensor(episode.logprobs)[~mask].any()
    answered = tokenizer.decode([t for t, m in zip(ended[0].token_ids, ended[0].loss_mask, strict=True) if not m])
    assert answered == " 1 so far:  2 so far:  3 so far: "
    assert all(said[-1] in Echo.stop for said in ended[0].state["said"][:3])  # the last may end by itself
