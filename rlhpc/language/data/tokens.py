"""Prompts and demonstrations as tokens."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from rlhpc.language.data.pictures import Looker, Seen, make_looker
from rlhpc.language.data.prompts import Prompt, PromptDataset
from rlhpc.language.hugging_face import transformers
from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.lookup import meant
from rlhpc.runtime.shown import first_line

OVERLONG = ("error", "drop")


def load_tokenizer(path: str | None, trust_remote_code: bool = False, *, key: str = "actor.model.model_path") -> Any:
    """The tokenizer of a Hugging Face folder or hub name; one without a padding token pads with its end token.

    Raises:
        ConfigError: There is none at `path`.
    """
    if not path:
        raise ConfigError(f"{key} is not set; a language model needs a Hugging Face folder or hub name")
    package = transformers()
    folder = Path(path).expanduser()
    if folder.is_dir():
        if not any(folder.glob("*token*")) and not any(folder.glob("vocab.*")):
            there = ", ".join(sorted(entry.name for entry in folder.iterdir())[:8]) or "nothing"
            raise ConfigError(f"{key} is {path!r}, a folder without a tokenizer; it has: {there}")
    elif folder.is_absolute() or path.startswith((".", "~")) or path.count("/") > 1:
        raise ConfigError(f"{key} is {path!r}; there is no such folder{_nearest(folder)}")
    try:
        tokenizer = package.AutoTokenizer.from_pretrained(
            str(folder) if folder.is_dir() else path, trust_remote_code=trust_remote_code
        )
    except (OSError, ValueError, KeyError, ImportError) as error:
        reason = first_line(error)
        if folder.is_dir():
            raise ConfigError(f"{key} is {path!r}; its tokenizer cannot be loaded: {reason}") from None
        raise ConfigError(
            f"{key} is {path!r}, which is neither a folder here nor a model in the Hugging Face cache or on the hub: {reason}"
        ) from None
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


class PromptTokenizer:
    """Turns problems into token ids.

    Args:
        tokenizer: Of transformers.
        max_prompt_tokens: `data.max_prompt_tokens`.
        overlong: `data.overlong_prompts`: "error" or "drop".
        chat_template: `data.….chat_template`; false gives the model the bare text of the messages, one per line.
        key: What messages call the section.

    Raises:
        ConfigError: The tokenizer has no chat template, where one is wanted.
    """

    def __init__(
        self,
        tokenizer: Any,
        max_prompt_tokens: int,
        overlong: str = "error",
        chat_template: bool = True,
        *,
        key: str = "data.train",
    ) -> None:
        if overlong not in OVERLONG:
            raise ConfigError(
                f"data.overlong_prompts is {overlong!r}; {meant(str(overlong), OVERLONG)}allowed: {', '.join(OVERLONG)}"
            )
        if max_prompt_tokens < 1:
            raise ConfigError(f"data.max_prompt_tokens is {max_prompt_tokens}; allowed: 1 or more")
        if chat_template and not getattr(tokenizer, "chat_template", None):
            raise ConfigError(
                f"the tokenizer of {tokenizer.name_or_path or 'the model'} has no chat template; set "
                f"{key}.chat_template=false to give it bare text, or take a model with one (instruct models have)"
            )
        self.tokenizer, self.chat_template, self.key = tokenizer, chat_template, key
        self.max_prompt_tokens, self.overlong = max_prompt_tokens, overlong

    @cached_property
    def looker(self) -> Looker:
        """What looks at prompts' pictures.

        Raises:
            ConfigError: The model does not.
        """
        if not self.chat_template:
            raise ConfigError(
                f"{self.key}: prompts have pictures, and {self.key}.chat_template is false: only a chat template says how a "
                "picture is written; set it to true"
            )
        return make_looker(str(self.tokenizer.name_or_path))

    def seen(self, prompt: Prompt, at: Sequence[int]) -> Seen | None:
        """What a prompt shows, whose pictures begin where `encode` says; None if it shows nothing."""
        return self.looker.seen(prompt.images, at) if prompt.images else None

    def text(self, messages: Sequence[dict[str, Any]], *, add_generation_prompt: bool = True) -> str:
        """What the model reads, special tokens of the chat template included."""
        if not self.chat_template or messages[0]["role"] == "raw":
            return "\n".join(message["content"] for message in messages)
        from jinja2 import TemplateError

        try:
            text: str = self.tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=add_generation_prompt
            )
        except TemplateError as error:
            roles = ", ".join(message["role"] for message in messages)
            raise ConfigError(f"the chat template refuses a conversation of {roles}: {error}") from None
        return text

    def _messages(self, prompt: Prompt) -> Sequence[dict[str, Any]]:
        return self.looker.asked(prompt) if prompt.images else prompt.messages

    def encode_messages(self, messages: Sequence[dict[str, Any]], *, add_generation_prompt: bool = True) -> list[int]:
        """Token ids of a conversation, of any length."""
        text = self.text(messages, add_generation_prompt=add_generation_prompt)
        return self._ids(text, bare=not self.chat_template or messages[0]["role"] == "raw")

    def encode(self, prompt: Prompt) -> tuple[list[int], list[int]] | None:
        """Token ids up to where the response begins, and at which of them each picture does; None for a prompt that is to be
        dropped.

        Raises:
            ConfigError: The prompt is longer than allowed, or empty.
        """
        ids, at = self._widened(prompt, self.encode_messages(self._messages(prompt)))
        if not ids:
            raise ConfigError(f"prompt {prompt.id} has no tokens: {_shown(prompt)}")
        fits = self._fits(prompt, len(ids), self.max_prompt_tokens, "data.max_prompt_tokens", "tokens")
        return (ids, at) if fits else None

    def encode_demonstration(
        self, prompt: Prompt, max_tokens: int | None = None
    ) -> tuple[list[int], list[bool], list[int]] | None:
        """Token ids of prompt, response and end token, and which of them SFT trains on: response and end.

        The prompt's ids are those that `encode` gives.

        Args:
            prompt: Has a response.
            max_tokens: Most tokens in all, such as the model's context.

        Returns:
            ids and loss mask, equally long, and at which id each picture begins; None for a problem that is to be dropped.

        Raises:
            ConfigError: There is no response or no end token, or it is too long.
        """
        if not prompt.response:
            raise ConfigError(f"prompt {prompt.id} has no demonstration (data.train.response_key): {_shown(prompt)}")
        if self.tokenizer.eos_token_id is None:
            raise ConfigError(
                f"the tokenizer of {self.tokenizer.name_or_path} has no end token (eos_token); sft needs one"
            )
        encoded = self.encode(prompt)
        if encoded is None:
            return None
        ids, at = encoded
        bare = not self.chat_template or prompt.messages[0]["role"] == "raw"
        # Encoded together where the prompt's ids come out the same: some tokenizers put a space before any text.
        together, _ = self._widened(prompt, self._ids(self.text(self._messages(prompt)) + prompt.response, bare=bare))
        if together[: len(ids)] == ids and len(together) > len(ids):
            response = together[len(ids) :]
        else:
            response = self.tokenizer(prompt.response, add_special_tokens=False)["input_ids"]
        end = [] if response[-1:] == [self.tokenizer.eos_token_id] else [self.tokenizer.eos_token_id]
        whole = [*ids, *response, *end]
        if max_tokens is not None and not self._fits(
            prompt, len(whole), max_tokens, "the model's context", "tokens with its response"
        ):
            return None
        return whole, [False] * len(ids) + [True] * (len(whole) - len(ids)), at

    def fitting(
        self, dataset: PromptDataset, *, demonstrations: bool = False, max_tokens: int | None = None
    ) -> PromptDataset:
        """The problems that are not too long. Looks at all of them.

        Args:
            dataset: All problems.
            demonstrations: Looks at prompt and response together, too.
            max_tokens: Most of these.

        Raises:
            ConfigError: One is too long and `overlong` is "error", or none is left.
        """

        def fits(prompt: Prompt) -> bool:
            encoded = self.encode_demonstration(prompt, max_tokens) if demonstrations else self.encode(prompt)
            return encoded is not None

        kept = [index for index in range(len(dataset)) if fits(dataset[index])]
        if not kept:
            also = f", or with their responses than the context of {max_tokens}" if max_tokens is not None else ""
            raise ConfigError(
                f"all {len(dataset)} prompts are longer than data.max_prompt_tokens={self.max_prompt_tokens}{also}"
            )
        return dataset if len(kept) == len(dataset) else _Chosen(dataset, kept)

    def _widened(self, prompt: Prompt, ids: list[int]) -> tuple[list[int], list[int]]:
        return self.looker.widened(prompt, ids) if prompt.images else (ids, [])

    def _ids(self, text: str, bare: bool) -> list[int]:
        # A chat template writes its own beginning; bare text gets the tokenizer's, but no end.
        ids: list[int] = list(self.tokenizer(text, add_special_tokens=bare)["input_ids"])
        return ids[:-1] if bare and ids and ids[-1] == self.tokenizer.eos_token_id and len(ids) > 1 else ids

    def _fits(self, prompt: Prompt, length: int, most: int, limit: str, what: str) -> bool:
        if length <= most:
            return True
        if self.overlong == "error":
            raise ConfigError(
                f"prompt {prompt.id} has {length} {what}, more than {limit} allows ({most}): {_shown(prompt)}; raise the "
                "limit, or set data.overlong_prompts=drop"
            )
        return False


class _Chosen:
    """Some of the problems of a dataset."""

    def __init__(self, dataset: PromptDataset, positions: list[int]) -> None:
        self._dataset, self._positions = dataset, positions

    def __len__(self) -> int:
        return len(self._positions)

    def __getitem__(self, index: int) -> Prompt:
        return self._dataset[self._positions[index]]


def _shown(prompt: Prompt) -> str:
    text = prompt.messages[-1]["content"]
    return repr(text if len(text) <= 60 else text[:60] + "…")


def _nearest(folder: Path) -> str:
    beside = [entry.name for entry in folder.parent.iterdir() if entry.is_dir()] if folder.parent.is_dir() else []
    near = difflib.get_close_matches(folder.name, beside, 1)
    return f"; did you mean {str(folder.with_name(near[0]))!r}?" if near else ""
