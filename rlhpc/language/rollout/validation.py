"""Evaluation during training (`runner.val_check_interval`): each rollout rank answers its share of the suites' problems.

It answers with its own engine and judges while nothing of training is under way, and each problem has seeds of its own: so
the numbers are those of `rlhpc eval`, on any number of ranks, and training goes on as if there had been no evaluation.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rlhpc.language.agents.registry import Generation
from rlhpc.language.config.run import GrpoConfig
from rlhpc.language.evaluation.evaluate import answers_to, identify, problems_of, suites_of
from rlhpc.language.reporting.eval_metrics import summarize
from rlhpc.language.scoring.reward_aggregator import Judges
from rlhpc.runtime.errors import DeadlineExceeded

Row = dict[str, Any]
#: Texts, for which the driver has no use.
_TEXTS = ("prompt", "response", "answer")


class Validation:
    """The suites of `workflow.eval_suites`.

    Args:
        cfg: Configuration.
        tokenizer: Of the model.
    """

    def __init__(self, cfg: GrpoConfig, tokenizer: Any) -> None:
        self.cfg, self.tokenizer = cfg, tokenizer
        self.suites = suites_of(cfg)
        self.problems = {name: problems_of(cfg, section, tokenizer)[0] for name, section in self.suites.items()}

    def rows(
        self, generation: Generation, judges: Judges, share: tuple[int, int], deadline: float
    ) -> dict[str, list[Row]]:
        """Answers the problems.

        Args:
            generation, judges: The rank's, with nothing under way.
            share: Which share of the problems, of how many.
            deadline: On the clock of `time.monotonic`.

        Returns:
            Suite → its rows, each with its `place` among all rows of the suite.
        """
        found, (number, of) = {}, share
        for name, section in self.suites.items():
            rows = answers_to(
                self.problems[name][number::of],
                self.cfg,
                section,
                name,
                generation,
                judges,
                self.tokenizer,
                deadline=deadline,
            )
            found[name] = [
                {key: value for key, value in row.items() if key not in _TEXTS}
                | {"place": (at // section.samples) * of + number}
                for at, row in enumerate(rows)
            ]
        return found


def asked_of_all(
    firsts: Callable[[], list[int]], ask: Callable[[list[int]], Sequence[Mapping[str, Sequence[Row]]]], timeout: float
) -> list[Mapping[str, Sequence[Row]]]:
    """Every rank's rows; of all again, if one was lost with its share.

    Args:
        firsts: The ranks that answer now: of an engine of several, the first.
        ask: Asks these; who has no share gives nothing.
        timeout: Seconds for all of it.

    Raises:
        DeadlineExceeded: Some share was missing each time.
    """
    deadline = time.monotonic() + timeout
    while True:
        ranks = firsts()
        rows = [made for made in ask(ranks) if made]
        if len(rows) >= len(ranks):
            return rows
        if time.monotonic() > deadline:
            raise DeadlineExceeded(
                f"evaluation: {len(rows)} of the {len(ranks)} rollout ranks ({', '.join(map(str, ranks))}) answered "
                f"their share within runner.step_timeout_s ({timeout:g} s)"
            )


def validation_metrics(parts: Sequence[Mapping[str, Sequence[Row]]]) -> dict[str, float]:
    """Metrics from the ranks' rows: `eval/accuracy` and so on; of each further suite `eval/<suite>/accuracy`."""
    metrics: dict[str, float] = {}
    for number, suite in enumerate(parts[0]):
        rows = sorted((row for part in parts for row in part[suite]), key=lambda row: (row["place"], row["sample"]))
        samples = 1 + max(row["sample"] for row in rows)
        identify(rows, samples)
        result = summarize(rows)
        found = {
            "accuracy": result["accuracy"],
            "reward": result["reward_mean"],
            "response_tokens": result["response_tokens"]["mean"],
            "truncated": result["truncated"],
            "failed_rewards": result["failed"],
            "problems": result["n"],
        }
        if samples > 1:
            found[f"pass_at_{samples}"] = result["pass_at_k"][str(samples)]
            if result["majority"] is not None:
                found["majority"] = result["majority"]
        prefix = f"eval/{suite}" if number else "eval"
        metrics |= {f"{prefix}/{name}": float(value) for name, value in found.items()}
    return metrics
