"""Generation of preference data (`rlhpc pairs`) from a language model's answers and a verifiable reward.

The model gives several answers to each problem, and the rewards of `reward.terms` score the answers. The first right answer
forms a pair with each different wrong answer; with labels, each different answer is a row. The file is the same for the same
model, configuration and seed.
"""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhpc.config.typed import select
from rlhpc.language.config.data import DataSourceConfig, EvalDataConfig, suite_named
from rlhpc.language.data import load_tokenizer
from rlhpc.language.data.prompts import Prompt
from rlhpc.language.evaluation.evaluate import answer_problems, model_folder, problems_of
from rlhpc.language.models.builtin import resolve_model
from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.files import replace_durably

if TYPE_CHECKING:
    from rlhpc.language.config.run import LanguageConfig

Row = dict[str, Any]


def make_pairs(
    cfg: LanguageConfig,
    model: str | Path | None,
    output: Path,
    *,
    suite: str | None = None,
    num_samples: int = 8,
    temperature: float = 1.0,
    form: str = "pairs",
    shuffled: bool = False,
    progress: bool = True,
) -> dict[str, Any]:
    """Writes pairs, or answers with labels, as JSON lines.

    Args:
        cfg: Configuration of a run: sections `data`, `reward`, `rollout`, and `runner.seed`.
        model: A checkpoint, or a Hugging Face folder or name; None for the model of `actor.model`.
        output: File to write, replaced atomically.
        suite: Suite of `data.eval` with the problems; None for the training problems.
        num_samples: Number of answers to each problem.
        temperature: Sampling temperature.
        form: "pairs", or "labels" for answers with their rewards.
        shuffled: Whether to swap the responses of random pairs (with labels: to permute the labels).
        progress: Whether to show the number of scored answers on stderr.

    Returns:
        rows, form, problems (all), used (problems with rows), shuffled, accuracy (share of right answers), samples.

    Raises:
        ConfigError: `reward.terms` is empty, the suite is unknown, no problem gives a row, or the file cannot be written.
    """
    if not cfg.reward.terms:
        raise ConfigError("reward.terms is empty; say how answers are judged, such as [{name: math}]")
    section, split_name = _section(cfg, suite, num_samples, temperature)
    with model_folder(
        resolve_model(cfg.actor.model) if model is None else model, cfg.actor.model.trust_remote_code
    ) as folder_and_step:
        folder = folder_and_step[0]
        tokenizer = load_tokenizer(folder, cfg.actor.model.trust_remote_code)
        problems, _ = problems_of(cfg, section, tokenizer, split_name)
        answers = answer_problems(problems, cfg, section, section.name, folder, tokenizer, progress)
    groups = [answers[index * num_samples : (index + 1) * num_samples] for index in range(len(problems))]
    make_rows = pairs_of if form == "pairs" else labels_of
    rows_by_problem = [list(make_rows(prompt, group)) for (prompt, *_), group in zip(problems, groups, strict=True)]
    pair_rows = [row for problem_rows in rows_by_problem for row in problem_rows]
    if not pair_rows:
        raise ConfigError(
            f"none of {len(problems)} problems has a right and a wrong answer among {num_samples}; ask for more (--samples), "
            "or take a model that knows something, but not all"
        )
    if shuffled:
        shuffle(pair_rows, form, cfg.runner.seed)
    json_lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in pair_rows)
    try:
        replace_durably(output, json_lines.encode("utf-8", "backslashreplace"))
    except OSError as error:
        raise ConfigError(f"{output}: cannot be written: {error.strerror}") from error
    num_right = sum(bool(answer["right"]) for answer in answers)
    return {
        "rows": len(pair_rows),
        "form": form,
        "problems": len(problems),
        "used": sum(map(bool, rows_by_problem)),
        "shuffled": shuffled,
        "accuracy": num_right / len(answers),
        "samples": num_samples,
    }


def describe(result: dict[str, Any]) -> str:
    """Formats the result of `make_pairs` as a line."""
    row_noun = "pairs" if result["form"] == "pairs" else "labelled answers"
    shuffle_note = ", their order drawn by lot" if result["shuffled"] else ""
    return (
        f"{result['rows']} {row_noun}{shuffle_note}, of {result['used']} of {result['problems']} problems; "
        f"{result['accuracy']:.1%} of {result['samples']} answers to each were right"
    )


def _section(
    cfg: LanguageConfig, suite: str | None, num_samples: int, temperature: float
) -> tuple[EvalDataConfig, str]:
    """Returns the data section of the problems, and their side of `eval_fraction`.

    Raises:
        ConfigError: The suite is unknown, or no suite is named and the training data are pairs.
    """
    if suite is None and select(cfg, "data.train.chosen_key") is not None:
        raise ConfigError(
            "data.train has pairs, on which this run is trained, and no problems: name a suite of data.eval by --suite"
        )
    source_section = cfg.data.train if suite is None else suite_named(cfg.data.eval, suite)
    source_fields = {field.name: getattr(source_section, field.name) for field in dataclasses.fields(DataSourceConfig)}
    name = (
        "train" if suite is None else source_section.name if isinstance(source_section, EvalDataConfig) else str(suite)
    )
    section = EvalDataConfig(
        **{**source_fields, "kwargs": dict(source_section.kwargs)},
        name=name,
        samples=num_samples,
        temperature=temperature,
    )
    return section, "train" if suite is None else "eval"


def pairs_of(prompt: Prompt, answers: Sequence[Row]) -> Iterator[Row]:
    """Yields pairs of the first right answer and each different wrong answer. Empty and unscored answers are skipped."""
    usable_answers = [answer for answer in answers if answer["response"] and not answer["failed"]]
    right_response = next((answer["response"] for answer in usable_answers if answer["right"]), None)
    wrong_responses = dict.fromkeys(answer["response"] for answer in usable_answers if not answer["right"])
    if right_response is not None:
        for response in wrong_responses:
            yield {**_make_prompt_row(prompt), "chosen": right_response, "rejected": response}


def labels_of(prompt: Prompt, answers: Sequence[Row]) -> Iterator[Row]:
    """Yields each different answer with its reward. Empty and unscored answers are skipped."""
    reward_by_response = {a["response"]: a["reward"] for a in reversed(answers) if a["response"] and not a["failed"]}
    for response in dict.fromkeys(answer["response"] for answer in answers if answer["response"] in reward_by_response):
        yield {**_make_prompt_row(prompt), "response": response, "label": float(reward_by_response[response])}


def shuffle(rows: list[Row], row_form: str, seed: int) -> None:
    """Shuffles the preferences or labels of rows in place, so that they are independent of the answers."""
    generator = random.Random(f"shuffled {seed}")
    if row_form == "pairs":
        for row in rows:
            if generator.random() < 0.5:
                row["chosen"], row["rejected"] = row["rejected"], row["chosen"]
        return
    labels = [row["label"] for row in rows]
    generator.shuffle(labels)
    for row, label in zip(rows, labels, strict=True):
        row["label"] = label


def _make_prompt_row(prompt: Prompt) -> Row:
    """Returns the prompt's columns: its messages, or the text of a single question, and its level and tools."""
    messages = [dict(message) for message in prompt.messages]
    is_single_question = (
        len(messages) == 1 and messages[0].keys() == {"role", "content"} and messages[0]["role"] == "user"
    )
    return {
        "prompt": messages[0]["content"] if is_single_question else messages,
        **({"level": prompt.level} if prompt.level else {}),
        **({"tools": list(prompt.tools)} if prompt.tools else {}),
    }
