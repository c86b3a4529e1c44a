"""What an evaluation of a language model says: accuracy, pass@k, majority vote, each with a 95 % interval.

Everything is computed from rows, one per sample, as `<suite>.samples.jsonl` holds them:

    {"id", "sample", "level", "right", "vote", "reward", "terms", "tokens", "finished", "failed", …}

Samples of one problem are not independent, so every quantity is first taken per problem, and its interval is over
problems: Wilson's where all of them are 0 or 1, else a bootstrap that draws whole problems.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from rlhpc.metrics.statistics import interval, share_interval
from rlhpc.runtime.text import in_parentheses

Row = Mapping[str, Any]


def pass_at_k(n: int, right: int, k: int) -> float:
    """Probability that k of a problem's n samples, drawn without replacement, have a right one.

    1 − C(n − right, k) / C(n, k): the unbiased estimator of Chen et al. 2021 (arXiv:2107.03374), in exact integers.
    """
    if not 0 <= right <= n or not 1 <= k <= n:
        raise ValueError(f"pass@{k} of {n} samples, {right} of them right, is not defined")
    return 1.0 - math.comb(n - right, k) / math.comb(n, k)


def ks(samples: int) -> list[int]:
    """For which k a suite is reported: 1, 2, 4, … and the number of samples."""
    return sorted({2**i for i in range(samples.bit_length()) if 2**i <= samples} | {samples})


def majority(votes: Sequence[str], right: Sequence[bool]) -> float:
    """Share of right samples among those of the answer that most samples of a problem agree on; the mean over tied
    answers.

    Args:
        votes: Normalized answers; "" did not answer and does not vote.
        right: Which samples are right.
    """
    counts = Counter(vote for vote in votes if vote)
    if not counts:
        return 0.0
    most = max(counts.values())
    won = [answer for answer, count in counts.items() if count == most]
    shares = [sum(r for v, r in zip(votes, right, strict=True) if v == answer) / most for answer in won]
    return sum(shares) / len(shares)


def by_problem(rows: Iterable[Row]) -> list[list[Row]]:
    """Rows grouped by problem, problems and their samples in order."""
    groups: dict[Any, list[Row]] = {}
    for row in sorted(rows, key=lambda row: (row["id"], row["sample"])):
        groups.setdefault(row["id"], []).append(row)
    return list(groups.values())


def summarize(rows: Iterable[Row]) -> dict[str, Any]:
    """Everything that an evaluation's JSON says about the answers.

    Returns:
        n (problems), samples (of each), accuracy, pass_at_k, majority (null where no sample has a `vote`), reward_mean,
        reward_terms, response_tokens, truncated, failed, levels; `<name>_ci95` beside each mean.

    Raises:
        ValueError: There is no row, or problems have different numbers of samples.
    """
    problems = by_problem(rows)
    counts = {len(problem) for problem in problems}
    if len(counts) != 1:
        raise ValueError(f"problems have {sorted(counts) or 'no'} samples; each must have equally many, at least one")
    tokens = np.asarray([row["tokens"] for problem in problems for row in problem])
    terms = problems[0][0]["terms"]
    return {
        **_scores(problems),
        "reward_terms": {name: _overall(problems, partial(_term, name)) for name in terms},
        "response_tokens": {
            "mean": float(tokens.mean()),
            "median": float(np.median(tokens)),
            "p95": float(np.quantile(tokens, 0.95)),
            "max": int(tokens.max()),
        },
        **_mean("truncated", [_share(problem, lambda row: not row["finished"]) for problem in problems]),
        "failed": sum(bool(row["failed"]) for problem in problems for row in problem),
        "levels": _levels(problems),
    }


def _scores(problems: Sequence[Sequence[Row]]) -> dict[str, Any]:
    samples = len(problems[0])
    right = [sum(bool(row["right"]) for row in problem) for problem in problems]
    passed = {k: [pass_at_k(samples, count, k) for count in right] for k in ks(samples)}
    voted = any(row["vote"] for problem in problems for row in problem)
    votes = [majority([r["vote"] for r in problem], [bool(r["right"]) for r in problem]) for problem in problems]
    return {
        "n": len(problems),
        "samples": samples,
        **_mean("accuracy", [count / samples for count in right]),
        "pass_at_k": {str(k): sum(values) / len(values) for k, values in passed.items()},
        "pass_at_k_ci95": {str(k): list(interval(values)) for k, values in passed.items()},
        **(_mean("majority", votes) if voted else {"majority": None, "majority_ci95": None}),
        **_mean("reward_mean", [_share(problem, lambda row: row["reward"]) for problem in problems]),
    }


def _levels(problems: Sequence[Sequence[Row]]) -> dict[str, Any]:
    """The scores of each level, where the suite has levels; numbers in their order, then words."""
    groups: dict[str, list[Sequence[Row]]] = {}
    for problem in problems:
        groups.setdefault(str(problem[0]["level"]), []).append(problem)
    if set(groups) == {""}:
        return {}
    return {level: _scores(groups[level]) for level in sorted(groups, key=level_order)}


def level_order(level: str) -> tuple[list[tuple[int, str]], str]:
    """Sorts "level 2" before "level 10"."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", level) if part], level


def _mean(name: str, values: Sequence[float]) -> dict[str, Any]:
    return {name: sum(values) / len(values), f"{name}_ci95": list(interval(values))}


def _term(name: str, row: Row) -> float:
    return float(row["terms"][name])


def _share(problem: Sequence[Row], value: Callable[[Row], float]) -> float:
    return sum(float(value(row)) for row in problem) / len(problem)


def _overall(problems: Sequence[Sequence[Row]], value: Callable[[Row], float]) -> float:
    return sum(_share(problem, value) for problem in problems) / len(problems)


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
    }


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
