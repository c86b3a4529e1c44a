"""What a kind of run and those who ask it hand each other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Preparation:
    """What the workflow does before training.

    Attributes:
        sft: Configuration of a run that comes first, relative to this run's; and what is changed in it.
        demos: The file for an expert's episodes, the expert, and how many episodes to record.
        evaluates_start: Whether the model is also evaluated before training, as step 0.
    """

    sft: tuple[str, list[str]] | None = None
    demos: tuple[str, str, int] | None = None
    evaluates_start: bool = False


@dataclass(frozen=True)
class Exporting:
    """What `rlhpc convert` was asked for.

    Attributes:
        licence: SPDX identifier for the model card.
        adapter_only: With LoRA: the adapter alone.
        base: With LoRA: where the adapted model is now, if it has moved.
        dtype: Of the written weights; None keeps that of training.
        critic: The critic rather than the policy.
        released: As the model's family is released, for its own code.
        trust_code: Import what the checkpoint names as `module:Class`.
    """

    licence: str | None = None
    adapter_only: bool = False
    base: str | None = None
    dtype: str | None = None
    critic: bool = False
    released: bool = False
    trust_code: bool = False


@dataclass(frozen=True)
class Headline:
    """A number by which runs of a kind are judged: a column of tables, and of `rlhpc status`.

    Attributes:
        metric: Name in metrics.jsonl; `eval/…` for a result of evaluations, `eval/pass_at_k` for that of the largest k.
        title: Title of the column.
        form: `share` (a percentage with its interval), `count`, or `number`.
    """

    metric: str
    title: str
    form: str = "number"


@dataclass(frozen=True)
class PlayOptions:
    """Options of `rlhpc play`; None stands for the default.

    Attributes:
        film: Where the film goes if there is no display.
        episodes: How many episodes are played.
        seed: Of the environment, or of sampling.
        system: First message of a conversation.
        max_tokens: Most tokens of a reply.
        trust_code: Import what the checkpoint names as `module:Class`.
    """

    film: Path
    episodes: int | None = None
    seed: int | None = None
    system: str | None = None
    max_tokens: int | None = None
    trust_code: bool = False


@dataclass(frozen=True)
class Parts:
    """The parts of a report that depend on the kind of run, as HTML and SVG.

    Attributes:
        subject: What is trained on what, for the subtitle.
        cards: The key figures.
        curves: Learning curves, the most important first.
        evaluation: Plot and table of the evaluations.
        times: Curves of time.
        evaluated: Step → what its first evaluation says, for the table of checkpoints.
        trained: The metric that the table of checkpoints shows, and its title.
    """

    subject: str
    cards: str
    curves: list[str]
    evaluation: str
    times: list[str]
    evaluated: Mapping[int, str]
    trained: tuple[str, str]
