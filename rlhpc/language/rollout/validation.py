"""Evaluation during training (`runner.val_check_interval`): each rollout rank answers its share of the suites' problems.

A rank answers with its engine and its reward functions while no training sample is in flight, and each problem has separate
seeds. Therefore the metrics equal the metrics of `rlhpc eval` for any number of ranks, and the evaluation does not change
the training.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rlhpc.language.agents.registry import Generation
from rlhpc.language.config.run import GrpoConfig
from rlhpc.language.evaluation.evaluate import answers_to, identify, problems_of, suites_of
from rlhpc.language.reporting.eval_metrics import summarize
from rlhpc.language.scoring.reward_aggregator import RewardScorer
from rlhpc.runtime.errors import DeadlineExceeded

Row = dict[str, Any]
#: Keys of a row that are not sent to the driver.
_TEXTS = ("prompt", "response", "answer")


class Validation:
    """Evaluation suites of `workflow.eval_suites`.

    Args:
        cfg: The run's configuration.
        tokenizer: Tokenizer of the model.
    """

    def __init__(self, cfg: GrpoConfig, tokenizer: Any) -> None:
        self.cfg = cfg
        self.tokenizer = tokenizer
        self.suites = suites_of(cfg)
        self.problems = {name: problems_of(cfg, section, tokenizer)[0] for name, section in self.suites.items()}

    def rows(
        self, generation: Generation, reward_scorer: RewardScorer, share: tuple[int, int], deadline: float
    ) -> dict[str, list[Row]]:
        """Answers this rank's share of the problems.

        Args:
            generation, reward_scorer: The rank's generation and reward functions, with nothing in flight.
            share: Index of the share, and number of shares.
            deadline: Time on the clock of `time.monotonic`.

        Returns:
            Rows by suite, each with `place`, the index of its problem in the suite.
        """
        rows_by_suite, (share_index, num_shares) = {}, share
        for name, section in self.suites.items():
            suite_rows = answers_to(
                self.problems[name][share_index::num_shares],
                self.cfg,
                section,
                name,
                generation,
                reward_scorer,
                self.tokenizer,
                deadline=deadline,
            )
            rows_by_suite[name] = [
                {key: field for key, field in row.items() if key not in _TEXTS}
                | {"place": (row_index // section.samples) * num_shares + share_index}
                for row_index, row in enumerate(suite_rows)
            ]
        return rows_by_suite


def ask_until_complete(
    list_leaders: Callable[[], list[int]],
    ask: Callable[[list[int]], Sequence[Mapping[str, Sequence[Row]]]],
    timeout_s: float,
) -> list[Mapping[str, Sequence[Row]]]:
    """Returns the rows of all ranks; calls all ranks again if a rank was lost with its share.

    Args:
        list_leaders: Function that returns the current leaders of the engines, which answer.
        ask: Function that calls these ranks; a rank without a share returns an empty mapping.
        timeout_s: Seconds for all attempts.

    Raises:
        DeadlineExceeded: A share was missing in each attempt.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        ranks = list_leaders()
        rows_by_rank = [answer for answer in ask(ranks) if answer]
        if len(rows_by_rank) >= len(ranks):
            return rows_by_rank
        if time.monotonic() > deadline:
            raise DeadlineExceeded(
                f"evaluation: {len(rows_by_rank)} of the {len(ranks)} rollout ranks ({', '.join(map(str, ranks))}) answered "
                f"their share within runner.step_timeout_s ({timeout_s:g} s)"
            )


def validation_metrics(suite_rows: Sequence[Mapping[str, Sequence[Row]]]) -> dict[str, float]:
    """Returns the metrics of the ranks' rows: `eval/<metric>` of the first suite, `eval/<suite>/<metric>` of the others."""
    metrics: dict[str, float] = {}
    for suite_index, suite in enumerate(suite_rows[0]):
        rows = sorted(
            (row for rank_rows in suite_rows for row in rank_rows[suite]), key=lambda row: (row["place"], row["sample"])
        )
        samples = 1 + max(row["sample"] for row in rows)
        identify(rows, samples)
        summary = summarize(rows)
        suite_metrics = {
            "accuracy": summary["accuracy"],
            "reward": summary["reward_mean"],
            "response_tokens": summary["response_tokens"]["mean"],
            "truncated": summary["truncated"],
            "failed_rewards": summary["failed"],
            "problems": summary["n"],
        }
        if samples > 1:
            suite_metrics[f"pass_at_{samples}"] = summary["pass_at_k"][str(samples)]
            if summary["majority"] is not None:
                suite_metrics["majority"] = summary["majority"]
        prefix = f"eval/{suite}" if suite_index else "eval"
        metrics |= {f"{prefix}/{name}": float(metric) for name, metric in suite_metrics.items()}
    return metrics
