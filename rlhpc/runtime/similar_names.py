"""Names that a user may have meant in place of an unknown one."""

from __future__ import annotations

import difflib
import heapq
from collections.abc import Iterable


def similar_names(name: str, known_names: Iterable[str], max_names: int = 1, cutoff: float = 0.6) -> list[str]:
    """Returns the known names that are most similar to a name, the most similar one first.

    Case does not matter. Among equally similar names, one with the same letters in another order comes first.

    Args:
        name: The unknown name.
        known_names: The names to choose from.
        max_names: Maximum number of names.
        cutoff: Minimum similarity, as `difflib.SequenceMatcher.ratio` computes it.
    """
    matcher = difflib.SequenceMatcher()
    lowercase_name = name.lower()
    matcher.set_seq2(lowercase_name)
    candidates = list[tuple[float, bool, str]]()
    for known_name in known_names:
        lowercase_known = known_name.lower()
        matcher.set_seq1(lowercase_known)
        if matcher.quick_ratio() >= cutoff and (ratio := matcher.ratio()) >= cutoff:
            candidates.append((ratio, sorted(lowercase_known) == sorted(lowercase_name), known_name))
    return [known_name for _, _, known_name in heapq.nlargest(max_names, candidates)]
