"""Preference data: pairs of responses, and responses with labels, from the same sources as prompts."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlhpc.language.config.data import DataSourceConfig, SourceConfig
from rlhpc.language.data.chat_messages import Message, is_plain, last_turn, message_text, read_messages
from rlhpc.language.data.prompts import Prompt, TemplatedDataset
from rlhpc.language.data.registry import make_dataset
from rlhpc.language.data.tokenizer import PromptTokenizer
from rlhpc.runtime.errors import ConfigError

if TYPE_CHECKING:
    from rlhpc.language.config.data import PairSourceConfig


@dataclass(frozen=True)
class PreferenceRow:
    """Row of preference data, for training and evaluation of reward models and DPO.

    Attributes:
        prompt: Conversation before the responses.
        responses: The chosen and the rejected response of a pair, or the single response with a label.
        target: Margin of the pair, or label.
        turns: The assistant message of each response that has tool calls or reasoning; None for a plain text.
    """

    prompt: Prompt
    responses: tuple[str, ...]
    target: float
    turns: tuple[Message | None, ...] = ()


class Preferences:
    """Preference rows of a section `data.train`, `data.eval[i]` or `data.holdout`; the constructor checks all rows.

    Args:
        cfg: The section; a `PreferenceSourceConfig` for labels.
        form: "pairs" or "labels" (`find_reward_loss`).
        part: "train" or "eval": the side of the split by `eval_fraction`.
        key: Name of the section in messages.

    Raises:
        ConfigError: The source cannot be read, or a row does not have the form; the message names its file and row.
    """

    def __init__(self, cfg: PairSourceConfig, form: str, part: str = "train", *, key: str | None = None) -> None:
        self._cfg = cfg
        self._form = form
        self._key = key or f"data.{part}"
        # `PairSourceConfig` has neither margin_key nor label_key.
        self._margin = getattr(cfg, "margin_key", None)
        self._label = getattr(cfg, "label_key", None)
        self._response_key = getattr(cfg, "response_key", "response")
        source_fields = {field.name: getattr(cfg, field.name) for field in dataclasses.fields(SourceConfig)}
        problems = DataSourceConfig(
            **{**source_fields, "kwargs": dict(cfg.kwargs)}, answer_key=None, response_key=self._response_key
        )
        self._problems: TemplatedDataset = make_dataset(problems, part, key=self._key)
        source_problems: Any = self._problems.problems
        if form == "labels" and hasattr(source_problems, "expect_responses"):
            source_problems.expect_responses()
        self._rows = [self._build_row(index) for index in range(len(self._problems))]

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> PreferenceRow:
        return self._rows[index]

    def fit(self, encoder: PromptTokenizer, max_tokens: int) -> int:
        """Removes rows that are too long; returns their number.

        Args:
            encoder: Tokenizer and chat template of the model.
            max_tokens: Maximum number of tokens of prompt and response.

        Raises:
            ConfigError: A row is too long and the encoder does not drop it, the chat template omits a part of a row, or no
                row remains.
        """
        fitting_rows = []
        for row in self._rows:
            for response_turn in row.turns or (None,):
                encoder.check(dataclasses.replace(row.prompt, turn=response_turn))
            if encode_demonstrations(row, encoder, max_tokens) is not None:
                fitting_rows.append(row)
        if not fitting_rows:
            raise ConfigError(f"{self._key}: all {len(self._rows)} rows are too long (data.overlong_prompts=drop)")
        num_dropped, self._rows = len(self._rows) - len(fitting_rows), fitting_rows
        return num_dropped

    def _build_row(self, index: int) -> PreferenceRow:
        prompt, cfg = self._problems[index], self._cfg
        if self._form == "labels":
            if not prompt.response:
                raise self._make_row_error(
                    index, prompt, "response_key", self._response_key, "a text that is not empty"
                )
            label = self._number(index, prompt, "label_key", str(self._label))
            return PreferenceRow(_keep_prompt_only(prompt), (prompt.response,), label, (prompt.turn,))
        columns = self._columns(index, prompt)
        if prompt.response and cfg.chosen_key in columns and self._response_key not in columns:
            raise ConfigError(
                f"{self._place(index, prompt)}: column {cfg.prompt_key!r} ends with the assistant's turn; it must end where "
                f"the responses of {cfg.chosen_key!r} and {cfg.rejected_key!r} begin"
            )
        response_texts, turns = zip(
            *(self._response(index, prompt, name) for name in ("chosen_key", "rejected_key")), strict=True
        )
        margin = self._number(index, prompt, "margin_key", self._margin) if self._margin else 0.0
        return PreferenceRow(_keep_prompt_only(prompt), response_texts, margin, turns)

    def _response(self, index: int, prompt: Prompt, name: str) -> tuple[str, Message | None]:
        """Returns a response as text, and as a message if it has tool calls or reasoning (else None)."""
        column, source_problems = getattr(self._cfg, name), self._problems.problems
        response_value = prompt.meta.get(column)
        allowed_forms = "a text that is not empty, or messages of which the last is the assistant's"
        if isinstance(response_value, str) and response_value:
            return response_value, None
        if not isinstance(response_value, list):
            raise self._make_row_error(index, prompt, name, column, allowed_forms)
        try:
            prior_messages, last_message = last_turn(
                read_messages(response_value, is_sparse=getattr(source_problems, "sparse", False))
            )
        except ConfigError as error:
            raise self._make_row_error(index, prompt, name, column, f"{allowed_forms} ({error})") from None
        if last_message is None or not (last_message["content"] or not is_plain(last_message)):
            raise self._make_row_error(index, prompt, name, column, allowed_forms)
        messages = source_problems[index].messages  # as in the file, without prompt template and system prompt
        turns = [
            [turn for turn in turn_messages if turn["role"] != "system"] for turn_messages in (prior_messages, messages)
        ]
        system_prompts = [
            [turn["content"] for turn in turn_messages if turn["role"] == "system"]
            for turn_messages in (prior_messages, messages)
        ]
        has_other_system_prompt = (
            system_prompts[0] and system_prompts[0] != system_prompts[1] and not self._cfg.system_prompt
        )
        if (turns[0] and turns[0] != turns[1]) or has_other_system_prompt:
            raise ConfigError(
                f"{self._place(index, prompt)}: column {column!r} goes on from another conversation than "
                f"the prompt's ({self._cfg.prompt_key!r})"
            )
        return message_text(last_message), None if is_plain(last_message) else last_message

    def _number(self, index: int, prompt: Prompt, name: str, column: str) -> float:
        column_value = prompt.meta.get(column)
        if (
            isinstance(column_value, bool)
            or not isinstance(column_value, (int, float))
            or not math.isfinite(column_value)
        ):
            raise self._make_row_error(index, prompt, name, column, "a finite number")
        return float(column_value)

    def _make_row_error(self, index: int, prompt: Prompt, name: str, column: str, expectation: str) -> ConfigError:
        row_place, columns = self._place(index, prompt), self._columns(index, prompt)
        if column not in columns:
            other_columns = {self._cfg.chosen_key, self._label} & set(columns)
            has_both_forms = bool(self._label and other_columns)
            way_out = "; algorithm.loss_type=regression reads labels, bradley_terry pairs" if has_both_forms else ""
            column_names = ", ".join(columns) or "none"
            return ConfigError(
                f"{self._key}.{name} is {column!r}, but {row_place} has no such column; it has: {column_names}{way_out}"
            )
        column_value = prompt.response if name == "response_key" else prompt.meta.get(column)
        excerpt = json.dumps(column_value, ensure_ascii=False)[:60]
        return ConfigError(f"{row_place}: column {column!r} is {excerpt}; allowed: {expectation}")

    def _place(self, index: int, prompt: Prompt) -> str:
        source_problems: Any = self._problems.problems
        return (
            str(source_problems.place(index))
            if hasattr(source_problems, "place")
            else f"{self._key}: prompt {prompt.id}"
        )

    def _columns(self, index: int, prompt: Prompt) -> list[str]:
        source_problems: Any = self._problems.problems
        return list(source_problems.columns(index)) if hasattr(source_problems, "columns") else list(prompt.meta)


def _keep_prompt_only(prompt: Prompt) -> Prompt:
    """Returns the prompt without response and metadata, which `PreferenceRow` holds separately."""
    return dataclasses.replace(prompt, response="", meta={}, turn=None)


def encode_demonstrations(
    row: PreferenceRow, encoder: PromptTokenizer, max_tokens: int
) -> list[tuple[list[int], list[bool]]] | None:
    """Tokenizes each response of a row with the prompt and the end token; returns (ids, loss mask) of each response.

    Returns None if the row is dropped.

    Args:
        row: Row of preference data.
        encoder: Tokenizer and chat template of the model.
        max_tokens: Maximum number of tokens of prompt and response.

    Raises:
        ConfigError: A response is too long and `data.overlong_prompts` is "error".
    """
    samples = []
    turns = row.turns or (None,) * len(row.responses)
    for response_text, turn in zip(row.responses, turns, strict=True):
        encoded_row = encoder.encode_demonstration(
            dataclasses.replace(row.prompt, response=response_text, turn=turn), max_tokens
        )
        if encoded_row is None:
            return None
        samples.append(encoded_row[:2])
    return samples


def encode(row: PreferenceRow, encoder: PromptTokenizer, max_tokens: int) -> list[list[int]] | None:
    """Tokenizes each response of a row for a reward model; returns None if the row is dropped.

    The reward is the value at the last token that is not padding. Final padding tokens are therefore removed, including the
    end token if it is also the padding token.

    Args:
        row, encoder, max_tokens: See `encode_demonstrations`.

    Raises:
        ConfigError: See `encode_demonstrations`.
    """
    samples = encode_demonstrations(row, encoder, max_tokens)
    if samples is None:
        return None
    sequences, pad_id = [], encoder.tokenizer.pad_token_id
    for ids, _ in samples:
        while len(ids) > 1 and ids[-1] == pad_id:
            ids = ids[:-1]
        sequences.append(ids)
    return sequences
