"""Two evaluations of one suite, sample by sample."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rlhpc.language.samples_page import read_samples, samples_path
from rlhpc.metrics.statistics import share_interval, wilson
from rlhpc.runtime.errors import ConfigError


def compare(first: str | Path, second: str | Path) -> dict[str, Any]:
    """Two evaluations of one suite, sample by sample: two engines on one model, or two models.

    Args:
        first, second: Their JSON files, with the samples beside them.

    Returns:
        n (samples that both have), same_text, same_right (shares), accuracy of both, difference (second − first, over
        problems) with its paired 95 % interval, and `examples`: the first five whose texts differ.

    Raises:
        ConfigError: A file cannot be read, or they have no problem in common.
    """
    texts, left, right = [], _by_sample(first), _by_sample(second)
    both = [key for key in left if key in right and left[key]["prompt"] == right[key]["prompt"]]
    if not both:
        raise ConfigError(f"{first} and {second} have no problem in common; compare evaluations of one suite")
    problems: dict[Any, list[int]] = {}
    for key in both:
        one, other = left[key], right[key]
        problems.setdefault(key[0], []).append(int(other["right"]) - int(one["right"]))
        if one["response"] != other["response"]:
            texts.append({"id": key[0], "sample": key[1], "first": one["response"], "second": other["response"]})
    differences = [sum(found) / len(found) for found in problems.values()]
    # From -1 to 1. Where no problem differs, it is bounded how many might.
    most = wilson(0, len(differences))[1]
    shares = share_interval([(difference + 1) / 2 for difference in differences])
    between = [2 * end - 1 for end in shares] if any(differences) else [-most, most]
    return {
        "n": len(both),
        "same_text": 1 - len(texts) / len(both),
        "same_right": sum(left[key]["right"] == right[key]["right"] for key in both) / len(both),
        "accuracy": [sum(rows[key]["right"] for key in both) / len(both) for rows in (left, right)],
        "difference": sum(differences) / len(differences),
        "difference_ci95": list(between),
        "examples": texts[:5],
    }


def _by_sample(result: str | Path) -> dict[tuple[Any, int], dict[str, Any]]:
    path = samples_path(Path(result))
    try:
        return {(row["id"], row["sample"]): row for row in read_samples(path)}
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot be read: {error.strerror}; an evaluation writes it beside its JSON"
        ) from error
