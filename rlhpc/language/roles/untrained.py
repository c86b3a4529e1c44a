"""Tokens that the model has drawn and that are not trained on, by reason."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from rlhpc.language.agents.episodes import OF_ROLES, Episode
from rlhpc.language.roles.groups import FINISHED
from rlhpc.language.roles.work import Slot

#: `lost`: for a client that had hung up. `failed`: in an episode whose agent failed. `role`: by one that is not trained
#: (`agent.untrained_roles`). `cut`: in an answer that was cut off (`algorithm.overlong_filter`). `old`: by weights older than
#: `algorithm.max_staleness` allows. `refilled`: in groups whose place another prompt took. `alone`: in a group of which no
#: other episode was left. `nonfinite`: in one that was left out.
REASONS = ("lost", "failed", "role", "cut", "old", "refilled", "alone", "nonfinite")
PREFIX = "untrained/"


def drawn(episodes: Iterable[Episode]) -> int:
    """Tokens that the model has drawn in some episodes and that may be trained on."""
    return sum(sum(sample.loss_mask) for episode in episodes for sample in episode.samples)


def members(slot: Slot, oldest: int) -> list[int]:
    """Which of a group's episodes are compared. What failed for its agent's sake says nothing about the policy, and what was
    drawn by weights before version `oldest` alone says nothing about these: neither is a reward of 0, or in any baseline."""
    return [m for m, found in sorted(slot.episodes.items()) if not found.failed and not _too_old(found, oldest)]


def _too_old(episode: Episode, oldest: int) -> bool:
    versions = [v for s in episode.samples for v, own in zip(s.versions, s.loss_mask, strict=True) if own]
    return bool(versions) and max(versions) < oldest


def failure_of(slot: Slot) -> str:
    """Returns why the last of a group's episodes that failed did, or could not be judged; "" if none has."""
    reasons = [
        episode.outcome.error for _, episode in sorted(slot.episodes.items()) if episode.failed and episode.outcome
    ]
    reasons += [scored.reason for _, scored in sorted(slot.scores.items()) if scored.failed and scored.reason]
    return reasons[-1] if reasons else ""


def is_cut(episode: Episode) -> bool:
    """Tells whether an episode's answer was cut off at a length limit."""
    return episode.finish_reason not in FINISHED


def refilled(slot: Slot) -> Counter[str]:
    """What was drawn in vain in a prompt's place, now that another one is asked there."""
    return slot.untrained + Counter(refilled=drawn(slot.episodes.values()))


def settle(slot: Slot, oldest: int, *, cut: bool, why: str) -> None:
    """Counts what is not trained of a group that is handed over, and masks what is too old.

    Args:
        slot: The group's.
        oldest: The first version of the weights whose tokens may be trained on.
        cut: Whether answers that were cut off are not.
        why: Why none of it is, as one of `REASONS`; "" if it is.
    """
    found = slot.untrained
    for episode in slot.episodes.values():
        found["lost"] += int(episode.outcome.metrics.get("not_received", 0)) if episode.outcome else 0
        if episode.failed or why:
            found["failed" if episode.failed else why] += drawn([episode])
            continue
        if episode.outcome and OF_ROLES in episode.outcome.metrics:
            found["role"] += int(episode.outcome.metrics[OF_ROLES])
        found["old"] += _mask_old(episode, oldest)
        if episode.branches:  # a role of which nothing is left would be compared as worth 0
            episode.branches = [s for s in episode.branches if any(s.loss_mask)] or episode.branches
        if cut and is_cut(episode):
            found["cut"] += drawn([episode])


def _mask_old(episode: Episode, oldest: int) -> int:
    count = 0
    for sample in episode.samples:
        for at, (own, version) in enumerate(zip(sample.loss_mask, sample.versions, strict=True)):
            if own and version < oldest:
                sample.loss_mask[at] = False
                count += 1
    return count


def facts(slot: Slot) -> dict[str, float]:
    """What a group cost besides, for the step's metrics: episodes that failed, answers that another rank had begun, and tokens
    that are not trained on. What is 0 is left out."""
    failed = sum(episode.failed for episode in slot.episodes.values())
    found = {"agent_failed": float(failed)} if failed else {}
    if slot.drawn:
        found |= {"continued": float(len(slot.drawn)), "continued_tokens": float(sum(slot.drawn.values()))}
    return found | {PREFIX + name: float(count) for name, count in slot.untrained.items() if count}
