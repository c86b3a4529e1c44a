"""Pairs of responses, and responses with labels: rows of the same sources that problems come from."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlhpc.language.config.data import DataSourceConfig, SourceConfig
from rlhpc.language.data.chat_messages import Message, is_plain, last_turn, read_messages, written
from rlhpc.language.data.prompts import Prompt
from rlhpc.language.data.registry import WordedDataset, make_dataset
from rlhpc.language.data.tokenizer import PromptTokenizer
from rlhpc.runtime.errors import ConfigError

if TYPE_CHECKING:
    from rlhpc.language.config.data import PairSourceConfig


@dataclass(frozen=True)
class PreferenceRow:
    """A row: what reward models and DPO are trained on and measured by.

    Attributes:
        prompt: Conversation up to where the responses begin.
        responses: Of a pair the chosen and the rejected one; or the one that has a label.
        target: Of a pair its margin; or the label.
        turns: Of each response, the assistant's message where it has more than a text; None otherwise.
    """

    prompt: Prompt
    responses: tuple[str, ...]
    target: float
    turns: tuple[Message | None, ...] = ()


class Preferences:
    """The rows of a section `data.train`, `data.eval[i]` or `data.holdout`. All are looked at here, so that none ends a run
    halfway through.

    Args:
        cfg: The section; that of labels is a `PreferenceSourceConfig`.
        form: "pairs" or "labels" (`find_reward_loss`).
        part: "train" or "eval": the side of `eval_fraction`.
        key: What messages call the section.

    Raises:
        ConfigError: It cannot be read, or a row is not of that form; names file and row.
    """

    def __init__(self, cfg: PairSourceConfig, form: str, part: str = "train", *, key: str | None = None) -> None:
        self._cfg, self._form, self._key = cfg, form, key or f"data.{part}"
        # A section of pairs alone has none of these.
        self._margin, self._label = getattr(cfg, "margin_key", None), getattr(cfg, "label_key", None)
        self._response_key = getattr(cfg, "response_key", "response")
        shared = {field.name: getattr(cfg, field.name) for field in dataclasses.fields(SourceConfig)}
        problems = DataSourceConfig(
            **{**shared, "kwargs": dict(cfg.kwargs)}, answer_key=None, response_key=self._response_key
        )
        self._problems: WordedDataset = make_dataset(problems, part, key=self._key)
        inner: Any = self._problems.problems
        if form == "labels" and hasattr(inner, "expect_responses"):
            inner.expect_responses()
        self._rows = [self._row(index) for index in range(len(self._problems))]

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> PreferenceRow:
        return self._rows[index]

    def fit(self, encoder: PromptTokenizer, most: int) -> int:
        """Leaves out the rows that are too long; how many those were.

        Args:
            encoder: Of the model.
            most: Most tokens of a response with its prompt.

        Raises:
            ConfigError: One is too long, unless the encoder drops those; the chat template leaves something of one out;
                or none is left.
        """
        rows = []
        for row in self._rows:
            for turn in row.turns or (None,):
                encoder.check(dataclasses.replace(row.prompt, turn=turn))
            if encode_demonstrations(row, encoder, most) is not None:
                rows.append(row)
        if not rows:
            raise ConfigError(f"{self._key}: all {len(self._rows)} rows are too long (data.overlong_prompts=drop)")
        dropped, self._rows = len(self._rows) - len(rows), rows
        return dropped

    def _row(self, index: int) -> PreferenceRow:
        prompt, cfg = self._problems[index], self._cfg
        if self._form == "labels":
            if not prompt.response:
                raise self._fault(index, prompt, "response_key", self._response_key, "a text that is not empty")
            label = self._number(index, prompt, "label_key", str(self._label))
            return PreferenceRow(_bare(prompt), (prompt.response,), label, (prompt.turn,))
        there = self._columns(index, prompt)
        if prompt.response and cfg.chosen_key in there and self._response_key not in there:
            raise ConfigError(
                f"{self._place(index, prompt)}: column {cfg.prompt_key!r} ends with the assistant's turn; it must end where "
                f"the responses of {cfg.chosen_key!r} and {cfg.rejected_key!r} begin"
            )
        texts, turns = zip(
            *(self._response(index, prompt, name) for name in ("chosen_key", "rejected_key")), strict=True
        )
        margin = self._number(index, prompt, "margin_key", self._margin) if self._margin else 0.0
        return PreferenceRow(_bare(prompt), texts, margin, turns)

    def _response(self, index: int, prompt: Prompt, name: str) -> tuple[str, Message | None]:
        """A response: a text, or the last turn of a conversation that goes on from the prompt's."""
        column, inner = getattr(self._cfg, name), self._problems.problems
        value = prompt.meta.get(column)
        allowed = "a text that is not empty, or messages of which the last is the assistant's"
        if isinstance(value, str) and value:
            return value, None
        if not isinstance(value, list):
            raise self._fault(index, prompt, name, column, allowed)
        try:
            before, last = last_turn(read_messages(value, sparse=getattr(inner, "sparse", False)))
        except ConfigError as error:
            raise self._fault(index, prompt, name, column, f"{allowed} ({error})") from None
        if last is None or not (last["content"] or not is_plain(last)):
            raise self._fault(index, prompt, name, column, allowed)
        messages = inner[index].messages  # as the file has them, without template and system prompt
        turns = [[turn for turn in each if turn["role"] != "system"] for each in (before, messages)]
        systems = [[turn["content"] for turn in each if turn["role"] == "system"] for each in (before, messages)]
        other = systems[0] and systems[0] != systems[1] and not self._cfg.system_prompt
        if (turns[0] and turns[0] != turns[1]) or other:
            raise ConfigError(f"{self._place(index, prompt)}: column {column!r} goes on from another conversation than "
                              f"the prompt's ({self._cfg.prompt_key!r})")  # fmt: skip
        return written(last), None if is_plain(last) else last

    def _number(self, index: int, prompt: Prompt, name: str, column: str) -> float:
        value = prompt.meta.get(column)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise self._fault(index, prompt, name, column, "a finite number")
        return float(value)

    def _fault(self, index: int, prompt: Prompt, name: str, column: str, allowed: str) -> ConfigError:
        place, there = self._place(index, prompt), self._columns(index, prompt)
        if column not in there:
            other = {self._cfg.chosen_key, self._label} & set(there)
            both = bool(self._label and other)
            way_out = "; algorithm.loss_type=regression reads labels, bradley_terry pairs" if both else ""
            names = ", ".join(there) or "none"
            return ConfigError(
                f"{self._key}.{name} is {column!r}, but {place} has no such column; it has: {names}{way_out}"
            )
        value = prompt.response if name == "response_key" else prompt.meta.get(column)
        found = json.dumps(value, ensure_ascii=False)[:60]
        return ConfigError(f"{place}: column {column!r} is {found}; allowed: {allowed}")

    def _place(self, index: int, prompt: Prompt) -> str:
        inner: Any = self._problems.problems
        return str(inner.place(index)) if hasattr(inner, "place") else f"{self._key}: prompt {prompt.id}"

    def _columns(self, index: int, prompt: Prompt) -> list[str]:
        inner: Any = self._problems.problems
        return list(inner.columns(index)) if hasattr(inner, "columns") else list(prompt.meta)


def _bare(prompt: Prompt) -> Prompt:
    """The prompt without its responses, which the row has."""
    return dataclasses.replace(prompt, response="", meta={}, turn=None)


def encode_demonstrations(
    row: PreferenceRow, encoder: PromptTokenizer, most: int
) -> list[tuple[list[int], list[bool]]] | None:
    """Token ids of each of a row's responses after the prompt, with the end token, and which are trained on; None for a
    row that is to be dropped.

    Args:
        row: The row.
        encoder: Of the model.
        most: Most tokens of a response with its prompt.

    Raises:
        ConfigError: One is too long and `data.overlong_prompts` is "error".
    """
    samples = []
    turns = row.turns or (None,) * len(row.responses)
    for text, turn in zip(row.responses, turns, strict=True):
        encoded = encoder.encode_demonstration(dataclasses.replace(row.prompt, response=text, turn=turn), most)
        if encoded is None:
            return None
        samples.append(encoded[:2])
    return samples


def encode(row: PreferenceRow, encoder: PromptTokenizer, most: int) -> list[list[int]] | None:
    """Token ids of each of a row's responses as a reward model reads them; None for a row that is to be dropped.

    They end with a token that is no padding, since that is where the reward is read. So where padding is made of the end
    token, there is none at the end.

    Args:
        row, encoder, most: See `encode_demonstrations`.

    Raises:
        ConfigError: See `encode_demonstrations`.
    """
    samples = encode_demonstrations(row, encoder, most)
    if samples is None:
        return None
    read, pad = [], encoder.tokenizer.pad_token_id
    for ids, _ in samples:
        while len(ids) > 1 and ids[-1] == pad:
            ids = ids[:-1]
        read.append(ids)
    return read
