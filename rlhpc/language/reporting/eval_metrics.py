"""Evaluation metrics of language models: accuracy, pass@k and majority vote, each with a 95 % interval.

All metrics are computed from rows, one per sample, as in `<suite>.samples.jsonl`:

    {"id", "sample", "level", "right", "vote", "reward", "terms", "tokens", "finished", "failed", …}

Samples of a problem are not independent. So every metric is first computed per problem, and its interval is over problems:
Wilson's interval if all values are 0 or 1, otherwise a bootstrap that resamples problems.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any

import numpy as np

from rlhpc.metrics.statistics import interval, share_interval
from rlhpc.runtime.text import parenthesized_interval

_Row = Mapping[str, Any]


def pass_at_k(n: int, num_right: int, k: int) -> float:
    """Returns the probability that k samples, drawn without replacement from a problem's n samples, include a right sample.

    1 − C(n − right, k) / C(n, k): the unbiased estimator of Chen et al. 2021 (arXiv:2107.03374), in exact integers.

    Raises:
        ValueError: The numbers are outside of 0 <= correct <= n and 1 <= k <= n.
    """
    if not 0 <= num_right <= n or not 1 <= k <= n:
        raise ValueError(f"pass@{k} of {n} samples, {num_right} of them right, is not defined")
    return 1.0 - math.comb(n - num_right, k) / math.comb(n, k)


def ks(num_samples: int) -> list[int]:
    """Returns the values of k that a suite reports: 1, 2, 4, … and the number of samples."""
    return sorted({2**i for i in range(num_samples.bit_length()) if 2**i <= num_samples} | {num_samples})


def majority(votes: Sequence[str], is_right: Sequence[bool]) -> float:
    """Returns the share of right samples among the samples with a problem's most frequent answer. Tied answers are averaged.

    Args:
        votes: Normalized answers; samples with "" do not vote.
        is_right: Whether each sample is right.
    """
    vote_counts = Counter(vote for vote in votes if vote)
    if not vote_counts:
        return 0.0
    max_count = max(vote_counts.values())
    tied_answers = {answer for answer, count in vote_counts.items() if count == max_count}
    num_right = sum(is_right for vote, is_right in zip(votes, is_right, strict=True) if vote in tied_answers)
    return num_right / (max_count * len(tied_answers))


def _group_by_problem(rows: Iterable[_Row]) -> list[list[_Row]]:
    """Groups rows by problem; sorts problems by id, and the rows of a problem by sample."""
    sorted_rows = sorted(rows, key=itemgetter("id", "sample"))
    return [list(problem) for _, problem in groupby(sorted_rows, itemgetter("id"))]


def summarize(rows: Iterable[_Row]) -> dict[str, Any]:
    """Summarizes the answers of an evaluation for its JSON file.

    Returns:
        n (number of problems), samples (per problem), accuracy, pass_at_k, majority (null if no sample has a `vote`),
        reward_mean, reward_terms, response_tokens, truncated, failed, levels; `<name>_ci95` for each mean.

    Raises:
        ValueError: `rows` is empty, or problems have different numbers of samples.
    """
    problems = _group_by_problem(rows)
    sample_counts = {len(problem) for problem in problems}
    if len(sample_counts) != 1:
        raise ValueError(
            f"problems have {sorted(sample_counts) or 'no'} samples; each must have equally many, at least one"
        )
    tokens = np.asarray([row["tokens"] for problem in problems for row in problem])
    term_names = problems[0][0]["terms"]
    return {
        **_score_metrics(problems),
        "reward_terms": {
            name: sum(_mean_of_rows([row["terms"] for row in problem], itemgetter(name)) for problem in problems)
            / len(problems)
            for name in term_names
        },
        "response_tokens": {
            "mean": float(tokens.mean()),
            "median": float(np.median(tokens)),
            "p95": float(np.quantile(tokens, 0.95)),
            "max": int(tokens.max()),
        },
        **_mean_with_interval(
            "truncated", [_mean_of_rows(problem, lambda row: not row["finished"]) for problem in problems]
        ),
        "failed": sum(bool(row["failed"]) for problem in problems for row in problem),
        "levels": _level_metrics(problems),
    }


def _score_metrics(problems: Sequence[Sequence[_Row]]) -> dict[str, Any]:
    """Returns accuracy, pass@k, majority and mean reward of problems."""
    num_samples = len(problems[0])
    right_counts = [sum(bool(row["right"]) for row in problem) for problem in problems]
    pass_rates = {
        num_drawn: [pass_at_k(num_samples, count, num_drawn) for count in right_counts] for num_drawn in ks(num_samples)
    }
    has_votes = any(row["vote"] for problem in problems for row in problem)
    majority_scores = [
        majority([r["vote"] for r in problem], [bool(r["right"]) for r in problem]) for problem in problems
    ]
    return {
        "n": len(problems),
        "samples": num_samples,
        **_mean_with_interval("accuracy", [count / num_samples for count in right_counts]),
        "pass_at_k": {
            str(num_drawn): sum(problem_rates) / len(problem_rates) for num_drawn, problem_rates in pass_rates.items()
        },
        "pass_at_k_ci95": {
            str(num_drawn): list(interval(problem_rates)) for num_drawn, problem_rates in pass_rates.items()
        },
        **(
            _mean_with_interval("majority", majority_scores) if has_votes else {"majority": None, "majority_ci95": None}
        ),
        **_mean_with_interval(
            "reward_mean", [_mean_of_rows(problem, lambda row: row["reward"]) for problem in problems]
        ),
    }


def _level_metrics(problems: Sequence[Sequence[_Row]]) -> dict[str, Any]:
    """Returns the scores of each level in order of `level_order`; {} for suites without levels."""
    groups: dict[str, list[Sequence[_Row]]] = {}
    for problem in problems:
        groups.setdefault(str(problem[0]["level"]), []).append(problem)
    if set(groups) == {""}:
        return {}
    return {level: _score_metrics(groups[level]) for level in sorted(groups, key=level_order)}


def level_order(level: str) -> tuple[list[tuple[int, str]], str]:
    """Returns a sort key that orders numbers within names by value: "level 2" before "level 10"."""
    return [
        (int(level_part), "") if level_part.isdecimal() else (-1, level_part)
        for level_part in re.split(r"(\d+)", level)
        if level_part
    ], level


def _mean_with_interval(name: str, values: Sequence[float]) -> dict[str, Any]:
    return {name: sum(values) / len(values), f"{name}_ci95": list(interval(values))}


def _mean_of_rows(problem: Sequence[_Row], get_value: Callable[[_Row], float]) -> float:
    return sum(float(get_value(row)) for row in problem) / len(problem)


#: Row of an evaluation: `rewards` of the responses, `target` (margin or label), `level`, and the text of the `prompt`.
_PreferenceRow = dict[str, Any]
#: Number of bins of the probabilities from 1/2 to 1 for calibration.
_BINS = 10


def summarize_preferences(rows: Sequence[_PreferenceRow], form: str) -> dict[str, Any]:
    """Summarizes the rewards of preference rows.

    Args:
        rows: Rows with `rewards`, `target`, `level` and `prompt`.
        form: "pairs" or "labels".

    Returns:
        n, unit, accuracy and accuracy_ci95, reward_mean, levels; for pairs margin, calibration_error and calibration; for
        labels r2, spearman and mse.
    """
    return pairs_summary(rows) if form == "pairs" else labels_summary(rows)


def pairs_summary(rows: Sequence[_PreferenceRow]) -> dict[str, Any]:
    """Summarizes the rewards of pairs; see `summarize_preferences`. A pair with equal rewards counts as wrong."""
    rewards = np.asarray([row["rewards"] for row in rows], np.float64)
    margins = rewards[:, 0] - rewards[:, 1]
    is_right = margins > 0
    error, bins = calibration(margins)
    prompt_keys = [
        row.get("prompt", row_index) for row_index, row in enumerate(rows)
    ]  # pairs of the same prompt are not independent, because they often share a response
    levels: dict[str, list[int]] = {}
    for row_index, row in enumerate(rows):
        levels.setdefault(str(row["level"]), []).append(row_index)
    return {
        "n": len(rows),
        "unit": "pairs",
        "accuracy": float(is_right.mean()),
        "accuracy_ci95": list(share_interval(is_right, prompt_keys)),
        "margin": float(margins.mean()),
        "reward_mean": float(rewards.mean()),
        "calibration_error": error,
        "calibration": bins,
        "levels": {
            level: {
                "n": len(row_indices),
                "accuracy": float(is_right[row_indices].mean()),
                "accuracy_ci95": list(
                    share_interval(is_right[row_indices], [prompt_keys[row_index] for row_index in row_indices])
                ),
            }
            for level, row_indices in sorted(levels.items())
        }
        if len(levels) > 1
        else {},
    }


def calibration(margins: np.ndarray) -> tuple[float, list[dict[str, float]]]:
    """Returns the expected calibration error of σ(r_chosen − r_rejected) (Guo et al. 2017).

    The rewards give the response with the higher reward a probability p ≥ 1/2 of being the preferred response. With
    calibrated rewards, this response is preferred in a share p of the pairs with similar p.

    Args:
        margins: `[P]`: r_chosen − r_rejected.

    Returns:
        The mean of |share − p| over all pairs, with p and share averaged over each tenth of the range from 1/2 to 1; and n,
        said (mean p) and was (share) of each tenth with pairs.
    """
    probabilities = 1 / (1 + np.exp(-np.abs(margins)))
    outcomes = np.where(margins == 0, 0.5, margins > 0)  # a tie makes both equally likely
    bin_index = np.minimum(((probabilities - 0.5) * 2 * _BINS).astype(int), _BINS - 1)
    bins = []
    for bin_number in range(_BINS):
        is_in_bin = bin_index == bin_number
        if is_in_bin.any():
            bins.append(
                {
                    "n": int(is_in_bin.sum()),
                    "said": float(probabilities[is_in_bin].mean()),
                    "was": float(outcomes[is_in_bin].mean()),
                }
            )
    error = sum(row["n"] * abs(row["said"] - row["was"]) for row in bins) / len(margins)
    return float(error), bins


def labels_summary(rows: Sequence[_PreferenceRow]) -> dict[str, Any]:
    """Summarizes the rewards of labelled rows; see `summarize_preferences`. `r2` is None if all labels are equal, `spearman`
    also if all rewards are equal.
    """
    rewards = np.asarray([row["rewards"][0] for row in rows], np.float64)
    labels = np.asarray([row["target"] for row in rows], np.float64)
    agreement_shares = _agreement(rewards, labels)
    total_variance = float(((labels - labels.mean()) ** 2).sum())
    return {
        "n": len(rows),
        "unit": "responses",
        "accuracy": float(np.mean(agreement_shares)) if agreement_shares else 0.5,
        "accuracy_ci95": list(share_interval(agreement_shares, influence=2.0))
        if agreement_shares
        else [0.0, 1.0],  # of pairs of rows
        "reward_mean": float(rewards.mean()),
        "mse": float(((rewards - labels) ** 2).mean()),
        "r2": None if total_variance == 0 else 1 - float(((rewards - labels) ** 2).sum()) / total_variance,
        "spearman": spearman(rewards, labels),
        "levels": {},
    }


def _agreement(rewards: np.ndarray, labels: np.ndarray) -> list[float]:
    """Returns for each response the share of differently labelled responses that the rewards order correctly; ties count as
    wrong.
    """
    agreement_shares = []
    for reward, label in zip(rewards, labels, strict=True):
        is_comparable = labels != label
        if is_comparable.any():
            is_concordant = np.sign(reward - rewards[is_comparable]) == np.sign(label - labels[is_comparable])
            agreement_shares.append(float(is_concordant.mean()))
    return agreement_shares


def spearman(xs: np.ndarray, ys: np.ndarray) -> float | None:
    """Returns the rank correlation of two variables, with mean ranks of ties; None if a variable is constant."""
    ranks = [_ranks(observations) for observations in (xs, ys)]
    if any(np.ptp(rank_values) == 0 for rank_values in ranks):
        return None
    return float(np.corrcoef(ranks[0], ranks[1])[0, 1])


def _ranks(values: np.ndarray) -> np.ndarray:
    _, value_index, value_counts = np.unique(values, return_inverse=True, return_counts=True)
    end_ranks = value_counts.cumsum()
    ranks: np.ndarray = ((end_ranks - value_counts + end_ranks - 1) / 2)[value_index]
    return ranks


def describe(result: dict[str, Any]) -> str:
    """Formats the evaluation of a reward model as a line."""
    interval_part = parenthesized_interval(result["accuracy_ci95"], ".1%", "95 % interval ")
    line = f"accuracy {result['accuracy']:.1%}{interval_part} on {result['n']} {result['unit']}"
    if result["unit"] == "pairs":
        line += f", margin {result['margin']:.3g}, calibration error {result['calibration_error']:.1%}"
    else:
        correlations = {"R²": result["r2"], "Spearman": result["spearman"]}
        line += "".join(
            f", {name} {correlation:.3f}" for name, correlation in correlations.items() if correlation is not None
        )
    return f"{line}; suite {result['suite']}, step {result['global_step']}"
