"""What an episode left, to be looked at: each context that the model read, turn by turn, and each token that it drew."""

from __future__ import annotations

from itertools import groupby
from typing import Any

from rlhpc.language.agents.episodes import Episode


def transcript(episode: Episode, tokenizer: Any, roles: tuple[str, ...] = ()) -> dict[str, Any]:
    """`{"episode": […]}`, a sample for each leaf of the tree of turns; nothing of an answer of one turn.

    A sample has its `role` and its `parts`: what was read (`read`), and what was drawn (`drawn`, a text and its log-prob for
    each token), with the number of the turn; a turn's own `reward`, where it had one. What was drawn and is trained in another
    sample, or in none, is among what was read.

    Args:
        episode: Ended.
        tokenizer: Of the model.
        roles: Their names.
    """
    if episode.outcome is None and episode.turns < 2:
        return {}
    return {"episode": [_sample(sample, tokenizer, roles) for sample in episode.samples]}


def _sample(sample: Episode, tokenizer: Any, roles: tuple[str, ...]) -> dict[str, Any]:
    parts: list[dict[str, Any]] = [{"turn": 0, "read": _text(tokenizer, sample.prompt_ids)}]
    at = 0
    for (turn, drawn), same in groupby(zip(sample.turn_ids, sample.loss_mask, strict=True)):
        end = at + len(list(same))
        ids = sample.token_ids[at:end]
        if drawn:
            said = [
                [_text(tokenizer, [token]), round(logprob, 4)]
                for token, logprob in zip(ids, sample.logprobs[at:end], strict=True)
            ]
            reward = sum(sample.rewards[at:end])
            parts.append({"turn": turn, "drawn": said, **({"reward": reward} if reward else {})})
        else:
            parts.append({"turn": turn, "read": _text(tokenizer, ids)})
        at = end
    return {"role": roles[sample.role] if sample.role < len(roles) else "", "parts": parts}


def _text(tokenizer: Any, ids: Any) -> str:
    said: str = tokenizer.decode(list(ids), skip_special_tokens=False)
    return said
