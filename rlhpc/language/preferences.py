"""How good a reward model is: what follows from the rewards of held-out pairs, or of responses with labels.

pairs    accuracy, margin, and calibration: how often the likelier response of a pair is in fact the preferred one
labels   R², Spearman's rank correlation, and accuracy: how often two rewards are in the order of their labels
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rlhpc.metrics.statistics import share_interval
from rlhpc.runtime.text import in_parentheses

#: A row of an evaluation: `rewards` of its responses, `target` (margin or label), `level`, and the text of its `prompt`.
PreferenceRow = dict[str, Any]
#: Equal parts of the probabilities from 1/2 to 1 within which calibration is measured.
BINS = 10


def summarize_preferences(rows: Sequence[PreferenceRow], form: str) -> dict[str, Any]:
    """What the rows say.

    Args:
        rows: Each has `rewards`, `target`, `level` and `prompt`.
        form: "pairs" or "labels".

    Returns:
        n, unit, accuracy and accuracy_ci95, reward_mean, levels; of pairs margin, calibration_error and calibration; of
        labels r2, spearman and mse.
    """
    return pairs_summary(rows) if form == "pairs" else labels_summary(rows)


def pairs_summary(rows: Sequence[PreferenceRow]) -> dict[str, Any]:
    """See `summarize_preferences`. Two equal rewards are a mistake: who has to choose gets nothing from them."""
    rewards = np.asarray([row["rewards"] for row in rows], np.float64)
    margins = rewards[:, 0] - rewards[:, 1]
    right = margins > 0
    error, parts = calibration(margins)
    prompts = [row.get("prompt", place) for place, row in enumerate(rows)]  # pairs of one prompt often share a response
    levels: dict[str, list[int]] = {}
    for place, row in enumerate(rows):
        levels.setdefault(str(row["level"]), []).append(place)
    return {
        "n": len(rows),
        "unit": "pairs",
        "accuracy": float(right.mean()),
        "accuracy_ci95": list(share_interval(right, prompts)),
        "margin": float(margins.mean()),
        "reward_mean": float(rewards.mean()),
        "calibration_error": error,
        "calibration": parts,
        "levels": {
            level: {
                "n": len(places),
                "accuracy": float(right[places].mean()),
                "accuracy_ci95": list(share_interval(right[places], [prompts[place] for place in places])),
            }
            for level, places in sorted(levels.items())
        }
        if len(levels) > 1
        else {},
    }  # fmt: skip


def calibration(margins: np.ndarray) -> tuple[float, list[dict[str, float]]]:
    """The expected calibration error of σ(r_chosen − r_rejected) (Guo et al. 2017).

    Of each pair the likelier response has a probability p ≥ 1/2, by the rewards alone. Among pairs of about the same p it
    should be the preferred one in a share p of them.

    Args:
        margins: `[P]`: r_chosen − r_rejected.

    Returns:
        The mean over all pairs of |share − p|, by tenths of the range from 1/2 to 1; and of each tenth that has pairs n,
        said (mean p) and was (share).
    """
    said = 1 / (1 + np.exp(-np.abs(margins)))
    was = np.where(margins == 0, 0.5, margins > 0)  # a tie says that either is as likely
    place = np.minimum(((said - 0.5) * 2 * BINS).astype(int), BINS - 1)
    parts = []
    for part in range(BINS):
        own = place == part
        if own.any():
            parts.append({"n": int(own.sum()), "said": float(said[own].mean()), "was": float(was[own].mean())})
    error = sum(part["n"] * abs(part["said"] - part["was"]) for part in parts) / len(margins)
    return float(error), parts


def labels_summary(rows: Sequence[PreferenceRow]) -> dict[str, Any]:
    """See `summarize_preferences`. r2 and spearman are None where all labels, or all rewards, are equal."""
    rewards = np.asarray([row["rewards"][0] for row in rows], np.float64)
    labels = np.asarray([row["target"] for row in rows], np.float64)
    shares = _agreement(rewards, labels)
    spread = float(((labels - labels.mean()) ** 2).sum())
    return {
        "n": len(rows),
        "unit": "responses",
        "accuracy": float(np.mean(shares)) if shares else 0.5,
        "accuracy_ci95": list(share_interval(shares, influence=2.0)) if shares else [0.0, 1.0],  # of pairs of rows
        "reward_mean": float(rewards.mean()),
        "mse": float(((rewards - labels) ** 2).mean()),
        "r2": None if spread == 0 else 1 - float(((rewards - labels) ** 2).sum()) / spread,
        "spearman": spearman(rewards, labels),
        "levels": {},
    }


def _agreement(rewards: np.ndarray, labels: np.ndarray) -> list[float]:
    """Of each response the share of those with another label that are on the right side of it; ties are wrong."""
    shares = []
    for reward, label in zip(rewards, labels, strict=True):
        other = labels != label
        if other.any():
            same = np.sign(reward - rewards[other]) == np.sign(label - labels[other])
            shares.append(float(same.mean()))
    return shares


def spearman(first: np.ndarray, second: np.ndarray) -> float | None:
    """The correlation of the ranks, ties sharing theirs; None if either does not vary."""
    ranks = [_ranks(values) for values in (first, second)]
    if any(np.ptp(each) == 0 for each in ranks):
        return None
    return float(np.corrcoef(ranks[0], ranks[1])[0, 1])


def _ranks(values: np.ndarray) -> np.ndarray:
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = counts.cumsum()
    ranks: np.ndarray = ((ends - counts + ends - 1) / 2)[place]
    return ranks


def describe(result: dict[str, Any]) -> str:
    """An evaluation in one line."""
    between = in_parentheses(result["accuracy_ci95"], ".1%", "95 % interval ")
    line = f"accuracy {result['accuracy']:.1%}{between} on {result['n']} {result['unit']}"
    if result["unit"] == "pairs":
        line += f", margin {result['margin']:.3g}, calibration error {result['calibration_error']:.1%}"
    else:
        told = {"R²": result["r2"], "Spearman": result["spearman"]}
        line += "".join(f", {name} {value:.3f}" for name, value in told.items() if value is not None)
    return f"{line}; suite {result['suite']}, step {result['global_step']}"
