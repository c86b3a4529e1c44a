"""Pairs of responses, and responses with labels: rows of the same sources that problems come from."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlhpc.language.config import DataSourceConfig, SourceConfig
from rlhpc.language.data.prompts import Prompt
from rlhpc.language.data.registry import WordedDataset, make_dataset
from rlhpc.language.data.tokens import PromptTokenizer
from rlhpc.runtime.errors import ConfigError

if TYPE_CHECKING:
    from rlhpc.language.reward_config import PreferenceSourceConfig


@dataclass(frozen=True)
class Judged:
    """A row: what reward models are trained on and measured by.

    Attributes:
        prompt: Conversation up to where the responses begin.
        responses: Of a pair the chosen and the rejected one; or the one that has a label.
        target: Of a pair its margin; or the label.
    """

    prompt: Prompt
    responses: tuple[str, ...]
    target: float


class Preferences:
    """The rows of a section `data.train` or `data.eval[i]`. All are looked at here, so that none ends a run halfway through.

    Args:
        cfg: The section.
        form: "pairs" or "labels" (`find_reward_loss`).
        part: "train" or "eval": the side of `eval_fraction`.
        key: What messages call the section.

    Raises:
        ConfigError: It cannot be read, or a row is not of that form; names file and row.
    """

    def __init__(self, cfg: PreferenceSourceConfig, form: str, part: str = "train", *, key: str | None = None) -> None:
        self._cfg, self._form, self._key = cfg, form, key or f"data.{part}"
        shared = {field.name: getattr(cfg, field.name) for field in dataclasses.fields(SourceConfig)}
        problems = DataSourceConfig(
            **{**shared, "kwargs": dict(cfg.kwargs)}, answer_key=None, response_key=cfg.response_key
        )
        self._problems: WordedDataset = make_dataset(problems, part, key=self._key)
        self._rows = [self._row(index) for index in range(len(self._problems))]

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Judged:
        return self._rows[index]

    def drop_overlong(self, encoder: PromptTokenizer, most: int) -> int:
        """Leaves out the rows that are too long; how many those were.

        Args:
            encoder: Of the model, which drops prompts that are too long.
            most: Most tokens of a response with its prompt.

        Raises:
            ConfigError: None is left.
        """
        rows = [row for row in self._rows if encode(row, encoder, most) is not None]
        if not rows:
            raise ConfigError(f"{self._key}: all {len(self._rows)} rows are too long (data.overlong_prompts=drop)")
        dropped, self._rows = len(self._rows) - len(rows), rows
        return dropped

    def _row(self, index: int) -> Judged:
        prompt, cfg = self._problems[index], self._cfg
        if self._form == "labels":
            if not prompt.response:
                raise self._fault(index, prompt, "response_key", cfg.response_key, "a text that is not empty")
            label = self._number(index, prompt, "label_key", cfg.label_key)
            return Judged(_bare(prompt), (prompt.response,), label)
        if prompt.response and cfg.response_key not in self._columns(index, prompt):
            raise ConfigError(
                f"{self._place(index, prompt)}: column {cfg.prompt_key!r} ends with the assistant's turn; it must end where "
                f"the responses of {cfg.chosen_key!r} and {cfg.rejected_key!r} begin"
            )
        texts = tuple(self._response(index, prompt, name) for name in ("chosen_key", "rejected_key"))
        margin = self._number(index, prompt, "margin_key", cfg.margin_key) if cfg.margin_key else 0.0
        return Judged(_bare(prompt), texts, margin)

    def _response(self, index: int, prompt: Prompt, name: str) -> str:
        """A response: a text, or the last turn of a conversation that goes on from the prompt's."""
        column = getattr(self._cfg, name)
        value = prompt.meta.get(column)
        if isinstance(value, list) and value and all(_is_message(turn) for turn in value):
            *before, last = value
            own = self._problems.problems[index].messages  # as the file has them, without template and system prompt
            said, asked = ([turn["content"] for turn in turns if turn["role"] != "system"] for turns in (before, own))
            if last["role"] == "assistant" and (not said or said == asked):
                value = last["content"]
            elif last["role"] == "assistant":
                raise ConfigError(f"{self._place(index, prompt)}: column {column!r} goes on from another conversation than "
                                  f"the prompt's ({self._cfg.prompt_key!r})")  # fmt: skip
        if not isinstance(value, str) or not value:
            allowed = "a text that is not empty, or messages of which the last is the assistant's"
            raise self._fault(index, prompt, name, column, allowed)
        return value

    def _number(self, index: int, prompt: Prompt, name: str, column: str) -> float:
        value = prompt.meta.get(column)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise self._fault(index, prompt, name, column, "a finite number")
        return float(value)

    def _fault(self, index: int, prompt: Prompt, name: str, column: str, allowed: str) -> ConfigError:
        place, there = self._place(index, prompt), self._columns(index, prompt)
        if column not in there:
            other = {self._cfg.chosen_key, self._cfg.label_key} & set(there)
            way_out = "; algorithm.loss_type=regression reads labels, bradley_terry pairs" if other else ""
            return ConfigError(
                f"{self._key}.{name} is {column!r}, but {place} has no such column; it has: {', '.join(there)}{way_out}"
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


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(value.get(name), str) for name in ("role", "content"))


def _bare(prompt: Prompt) -> Prompt:
    """The prompt without its responses, which the row has."""
    return dataclasses.replace(prompt, response="", meta={})


def encode(row: Judged, encoder: PromptTokenizer, most: int) -> list[list[int]] | None:
    """Token ids of each of a row's responses after the prompt, with the end token; None for a row that is to be dropped.

    They end with a token that is no padding, since that is where the reward is read. So where padding is made of the end
    token, there is none at the end.

    Args:
        row: The row.
        encoder: Of the model.
        most: Most tokens of a response with its prompt.

    Raises:
        ConfigError: One is too long and `data.overlong_prompts` is "error".
    """
    found, pad = [], encoder.tokenizer.pad_token_id
    for text in row.responses:
        encoded = encoder.encode_demonstration(dataclasses.replace(row.prompt, response=text), most)
        if encoded is None:
            return None
        ids = encoded[0]
        while len(ids) > 1 and ids[-1] == pad:
            ids = ids[:-1]
        found.append(ids)
    return found
