"""What judges get to see of an episode."""

from __future__ import annotations

from typing import Any

import numpy as np

from rlhpc.language.agents.episodes import Episode
from rlhpc.language.data.prompts import Prompt
from rlhpc.language.engines.ends import without_end
from rlhpc.language.rewards.base import Sample
from rlhpc.runtime.errors import RlhpcError


def sample_of(prompt: Prompt, episode: Episode, tokenizer: Any, *, finished: bool) -> Sample:
    """An episode's last answer, or what its agent calls the response.

    Args:
        prompt: What it is about.
        episode: Ended.
        tokenizer: Of the model.
        finished: Whether it ended by itself.
    """
    text, meta, outcome = None, prompt.meta, episode.outcome
    if outcome is not None:
        text = outcome.response
        meta = {**meta, "agent": {"reward": outcome.reward, "error": outcome.error, "later": outcome.later}}
    if text is None:
        text = tokenizer.decode(without_end(episode.token_ids, tokenizer), skip_special_tokens=True)
    tokens = tokens_of(episode)
    return Sample(prompt.question, text, prompt.answer, meta, tokens, finished, prompt.messages, prompt.tools)


def tokens_of(episode: Episode) -> int:
    """Tokens that the model wrote in it and that may be trained on."""
    return sum(int(np.count_nonzero(sample.loss_mask)) for sample in episode.samples)


class AgentReward:
    """What the agent outside says that its episode was worth."""

    inline = True

    def __call__(self, sample: Sample) -> float:
        """The agent's number.

        Raises:
            RlhpcError: It gave none.
        """
        said = sample.meta.get("agent", {})
        if said.get("reward") is None:
            if said.get("later"):
                raise RlhpcError("its reward comes later, and nobody waits for it here")
            raise RlhpcError(said.get("error") or "the agent gave no reward: its function returned None or no `reward`")
        return float(said["reward"])
