"""Tokenization of prompts and demonstrations, with chat templates, end tokens and stop texts."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhpc.config.typed import select
from rlhpc.language.data.chat_messages import Message, find_omitted_parts, require_plain
from rlhpc.language.data.images import PromptImageProcessor, PromptImages, digest_of, load_image_processor
from rlhpc.language.data.prompts import Prompt, PromptDataset
from rlhpc.language.hugging_face import count_embeddings, load_model_config, missing_embedding_error, transformers
from rlhpc.runs.preflight import has_tokenizer, is_hub_name
from rlhpc.runtime.errors import ConfigError, StorageError
from rlhpc.runtime.files import expand_home, read_json, replace_durably
from rlhpc.runtime.host import state_folder
from rlhpc.runtime.plugins import suggest_name
from rlhpc.runtime.similar_names import similar_names
from rlhpc.runtime.text import first_line, format_names

if TYPE_CHECKING:
    from rlhpc.language.config.run import LanguageConfig

#: Placeholder of the assistant's reply in rendered chat templates.
REPLY = "REPLYHERE7F3A"


def special_tokens(tokenizer: Any) -> frozenset[int]:
    """Returns the ids of a tokenizer's special tokens, such as `<bos>`."""
    added_ids = {token_id for token_id, token in tokenizer.added_tokens_decoder.items() if token.special}
    return frozenset(tokenizer.all_special_ids) | added_ids


def template_file(tokenizer: Any) -> str:
    """Returns the file of a tokenizer's chat template for messages, or the model's name if no file is known."""
    folder = Path(str(getattr(tokenizer, "name_or_path", "") or ""))
    file_names = ("chat_template.jinja", "chat_template.json", "tokenizer_config.json")
    file = next((folder / name for name in file_names if folder.name and (folder / name).is_file()), None)
    return str(file or folder.name or "of the tokenizer")


def render_chat(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] = (),
    *,
    add_generation_prompt: bool = False,
) -> str:
    """Renders a conversation with a tokenizer's chat template.

    Raises:
        ConfigError: The template raised an error; the message names its file.
    """
    try:
        rendering: str = tokenizer.apply_chat_template(
            list(messages),
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            **({"tools": list(tools)} if tools else {}),
        )
    except Exception as error:  # a template may raise any error
        from jinja2 import TemplateError

        error_type = "" if isinstance(error, TemplateError) else f"{type(error).__name__}: "
        role_names = ", ".join(str(message.get("role")) for message in messages)
        raise ConfigError(
            f"the chat template refuses a conversation of {role_names}: {error_type}{first_line(error)} "
            f"({template_file(tokenizer)})"
        ) from None
    return rendering


def turn_end(tokenizer: Any | None) -> int | None:
    """Returns the id of the special token that the chat template puts after an assistant message, or None.

    This token may differ from the base model's end token: `<|im_end|>` ends a turn, and `<|endoftext|>` ends a text.
    """
    if not getattr(tokenizer, "chat_template", None):
        return None
    assert tokenizer is not None
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": REPLY}]
    try:
        rendering = render_chat(tokenizer, turns)
    except ConfigError:
        return None
    special_ids = special_tokens(tokenizer)
    ids_after_reply: list[int] = (
        tokenizer.encode(rendering.rpartition(REPLY)[2], add_special_tokens=False) if REPLY in rendering else []
    )
    return next((token for token in ids_after_reply if token in special_ids), None)


OVERLONG = ("error", "drop")
#: Version of the cache format of `PromptTokenizer.fitting`.
_CACHE_VERSION = 1


def load_tokenizer(path: str | None, trust_remote_code: bool = False, *, key: str = "actor.model.model_path") -> Any:
    """Loads the tokenizer of a Hugging Face folder or hub name; a missing padding token is replaced by the end token.

    Raises:
        ConfigError: `path` has no tokenizer, or the tokenizer cannot be loaded.
    """
    if not path:
        raise ConfigError(f"{key} is not set; a language model needs a Hugging Face folder or hub name")
    transformers_module = transformers()
    folder = expand_home(path)
    if folder.is_dir():
        if not has_tokenizer(folder):
            entry_names = format_names(sorted(item_path.name for item_path in folder.iterdir()), limit=8) or "nothing"
            raise ConfigError(f"{key} is {path!r}, a folder without a tokenizer; it has: {entry_names}")
    elif not is_hub_name(path):
        raise ConfigError(f"{key} is {path!r}; there is no such folder{_suggest_close_folder(folder)}")
    try:
        tokenizer = transformers_module.AutoTokenizer.from_pretrained(
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
    """Tokenizer of prompts and demonstrations.

    Args:
        tokenizer: A transformers tokenizer.
        max_prompt_tokens: `data.max_prompt_tokens`.
        overlong: `data.overlong_prompts`: "error" or "drop".
        chat_template: `data.….chat_template`; false joins the messages' texts by newlines instead.
        key: Name of the configuration section in messages.
        context: Context length of the model or its engine, in tokens; a prompt must leave room for one more token. None if
            unknown.

    Raises:
        ConfigError: An argument is invalid, or the tokenizer has no chat template although `chat_template` is true.
    """

    def __init__(
        self,
        tokenizer: Any,
        max_prompt_tokens: int,
        overlong: str = "error",
        chat_template: bool = True,
        *,
        key: str = "data.train",
        context: int | None = None,
    ) -> None:
        if overlong not in OVERLONG:
            raise ConfigError(
                f"data.overlong_prompts is {overlong!r}; {suggest_name(str(overlong), OVERLONG)}allowed: {', '.join(OVERLONG)}"
            )
        if max_prompt_tokens < 1:
            raise ConfigError(f"data.max_prompt_tokens is {max_prompt_tokens}; allowed: 1 or more")
        if chat_template and not getattr(tokenizer, "chat_template", None):
            raise ConfigError(
                f"the tokenizer of {tokenizer.name_or_path or 'the model'} has no chat template; set "
                f"{key}.chat_template=false to give it bare text, or take a model with one (instruct models have)"
            )
        self.tokenizer = tokenizer
        self.chat_template = chat_template
        self.key = key
        self.max_prompt_tokens = max_prompt_tokens
        self.overlong = overlong
        self.limit = "data.max_prompt_tokens"
        if context is not None and context - 1 < max_prompt_tokens:
            self.max_prompt_tokens, self.limit = context - 1, f"the model's context of {context} tokens"
        self._checked_shapes: set[tuple[str, ...]] = set()

    @cached_property
    def image_processor(self) -> PromptImageProcessor:
        """Image processor for prompts.

        Raises:
            ConfigError: The model does not support images, or `chat_template` is false.
        """
        if not self.chat_template:
            raise ConfigError(
                f"{self.key}: prompts have pictures, and {self.key}.chat_template is false: only a chat template says how a "
                "picture is written; set it to true"
            )
        return load_image_processor(str(self.tokenizer.name_or_path))

    @cached_property
    def _turn_end(self) -> int | None:
        return turn_end(self.tokenizer)

    def prompt_images(self, prompt: Prompt, first_positions: Sequence[int]) -> PromptImages | None:
        """Processes a prompt's images, with their positions from `encode`; returns None if the prompt has no images."""
        return self.image_processor.prompt_images(prompt.images, first_positions) if prompt.images else None

    def text(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        add_generation_prompt: bool = True,
    ) -> str:
        """Renders a conversation as the model's input text, including the chat template's special tokens.

        Raises:
            ConfigError: The template raised an error.
        """
        if self._is_bare(messages):
            return "\n".join(message["content"] for message in messages)
        return render_chat(self.tokenizer, messages, tools, add_generation_prompt=add_generation_prompt)

    def _is_bare(self, messages: Sequence[Mapping[str, Any]]) -> bool:
        return not self.chat_template or messages[0]["role"] == "raw"

    def _messages(self, prompt: Prompt) -> Sequence[dict[str, Any]]:
        return self.image_processor.conversation(prompt) if prompt.images else prompt.messages

    def encode_messages(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        add_generation_prompt: bool = True,
    ) -> list[int]:
        """Tokenizes a conversation without checking its length."""
        rendering = self.text(messages, tools, add_generation_prompt=add_generation_prompt)
        return self._ids(rendering, is_bare=self._is_bare(messages))

    def check(self, prompt: Prompt) -> list[str]:
        """Checks that the chat template renders every part of a problem.

        Returns:
            Keys of earlier turns that the template omits on purpose (reasoning).

        Raises:
            ConfigError: The template omits a part; the message names the file and line of the problem.
        """
        try:
            return self._check_prompt(prompt)
        except ConfigError as error:
            raise ConfigError(f"{prompt.where}: {error}") from None

    def _check_prompt(self, prompt: Prompt) -> list[str]:
        """Implements `check`; error messages do not name the problem."""
        messages = [*prompt.messages, *([prompt.turn] if prompt.turn else [])]
        if self._is_bare(prompt.messages):
            require_plain(messages, prompt.tools)
            return []
        is_plain = not prompt.tools and all(message.keys() == {"role", "content"} for message in messages)
        message_shape = tuple(f"{message['role']} {bool(message['content'].strip())}" for message in messages)
        if is_plain and message_shape in self._checked_shapes:
            return []

        def render(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> str:
            picture_messages = self._messages(Prompt(prompt.id, tuple(messages), images=prompt.images))
            return self.text(picture_messages, tools, add_generation_prompt=prompt.turn is None)

        missing_parts, old_reasoning = find_omitted_parts(messages, prompt.tools, render)
        if missing_parts:
            raise ConfigError(
                f"the chat template ({template_file(self.tokenizer)}) leaves out {', '.join(missing_parts)}: "
                "take it out of the data, or use a model whose template writes it"
            )
        if is_plain:
            self._checked_shapes.add(message_shape)
        return old_reasoning

    def encode(self, prompt: Prompt) -> tuple[list[int], list[int]] | None:
        """Tokenizes a prompt; returns its token ids and each image's first position, or None if the prompt is dropped.

        Raises:
            ConfigError: The prompt is empty, or it is too long and `overlong` is "error".
        """
        try:
            ids = self.encode_messages(self._messages(prompt), prompt.tools)
        except ConfigError as error:
            raise ConfigError(f"{prompt.where}: {error}") from None
        ids, image_starts = self._expand_image_tokens(prompt, ids)
        if not ids:
            raise ConfigError(f"{prompt.where} has no tokens: {_format_excerpt(prompt)}")
        is_fitting = self._fits(prompt, len(ids), self.max_prompt_tokens, self.limit, "tokens")
        return (ids, image_starts) if is_fitting else None

    def encode_demonstration(
        self, prompt: Prompt, max_tokens: int | None = None
    ) -> tuple[list[int], list[bool], list[int]] | None:
        """Tokenizes prompt and response for SFT.

        The prompt's ids are the same as in `encode`. If the response is a message (`Prompt.turn`), the chat template renders
        it.

        Args:
            prompt: Problem with a response.
            max_tokens: Maximum number of tokens of prompt and response (`actor.max_tokens_per_micro_batch`); None for no
                limit.

        Returns:
            Token ids of prompt, response and end token; the loss mask, equally long, which is true for response and end
            token; and the position of each image's first token. None if the problem is dropped.

        Raises:
            ConfigError: The problem has no response, the tokenizer has no end token, or the sequence is too long and
                `overlong` is "error".
        """
        if not prompt.response:
            raise ConfigError(
                f"{prompt.where} has no demonstration (data.train.response_key): {_format_excerpt(prompt)}"
            )
        if self.tokenizer.eos_token_id is None:
            raise ConfigError(
                f"the tokenizer of {self.tokenizer.name_or_path} has no end token (eos_token); sft needs one"
            )
        encoded_prompt = self.encode(prompt)
        if encoded_prompt is None:
            return None
        ids, image_starts = encoded_prompt
        is_bare = self._is_bare(prompt.messages)
        prompt_text = self.text(self._messages(prompt), prompt.tools)
        response_text = self._render_turn_text(prompt, prompt_text) if prompt.turn else prompt.response
        # Prompt and response are tokenized together, because some tokenizers prepend a space to any separate text. If that
        # changes the prompt's ids, the response is tokenized separately.
        try:
            joined_ids = self._ids(prompt_text + response_text, is_bare=is_bare)
        except ConfigError as error:
            raise ConfigError(f"{prompt.where}: {error}") from None
        joined_ids, _ = self._expand_image_tokens(prompt, joined_ids)
        if joined_ids[: len(ids)] == ids and len(joined_ids) > len(ids):
            response = joined_ids[len(ids) :]
        else:
            response = self.tokenizer(response_text, add_special_tokens=False, verbose=False)["input_ids"]
        end_token = self.tokenizer.eos_token_id if is_bare or self._turn_end is None else self._turn_end
        end_ids = (
            [] if response[-1:] == [end_token] or (prompt.turn and response[-1] in self._special_ids) else [end_token]
        )
        all_ids = [*ids, *response, *end_ids]
        if max_tokens is not None and not self._fits(
            prompt, len(all_ids), max_tokens, "actor.max_tokens_per_micro_batch", "tokens with its response"
        ):
            return None
        return all_ids, [False] * len(ids) + [True] * (len(all_ids) - len(ids)), image_starts

    @cached_property
    def _special_ids(self) -> frozenset[int]:
        return special_tokens(self.tokenizer)

    def _render_turn_text(self, prompt: Prompt, prompt_text: str) -> str:
        """Returns the text that the chat template renders for `prompt.turn`, up to and including its end token."""
        if self._is_bare(prompt.messages):
            self.check(prompt)  # raises
        assert prompt.turn is not None
        try:
            full_text = self.text([*self._messages(prompt), prompt.turn], prompt.tools, add_generation_prompt=False)
        except ConfigError as error:
            raise ConfigError(f"{prompt.where}: {error}") from None
        if not full_text.startswith(prompt_text):
            raise ConfigError(
                f"{prompt.where}: the chat template ({template_file(self.tokenizer)}) writes the conversation otherwise where "
                "the assistant's last turn follows, so that no response can be told from it: take another template, or give "
                "that turn as a text"
            )
        turn_text = full_text[len(prompt_text) :]
        special_names = [self.tokenizer.convert_ids_to_tokens(token_id) for token_id in self._special_ids]
        turn_end_index = max(
            (turn_text.rfind(name) + len(name) for name in special_names if name in turn_text), default=0
        )
        return turn_text[:turn_end_index] if turn_end_index and not turn_text[turn_end_index:].strip() else turn_text

    def fitting(
        self, dataset: PromptDataset, *, requires_demonstrations: bool = False, max_tokens: int | None = None
    ) -> FittingPrompts:
        """Checks all problems and returns the problems that are not too long; caches results in the user's state folder.

        Args:
            dataset: All problems.
            requires_demonstrations: Whether to check prompt and response together.
            max_tokens: Maximum number of tokens of prompt and response; None for no limit.

        Raises:
            ConfigError: A problem is too long and `overlong` is "error"; the chat template omits a part of a problem or
                rejects it; or all problems are too long.
        """
        file = (
            state_folder("prompts") / f"{self._compute_check_digest(dataset, requires_demonstrations, max_tokens)}.json"
        )
        check_results = _read_cached_results(file)
        if check_results is None:
            check_results = self._check_dataset(dataset, requires_demonstrations, max_tokens)
            with contextlib.suppress(OSError, StorageError):
                replace_durably(file, json.dumps(check_results).encode(), sync=False)
        if len(check_results["dropped"]) == len(dataset):
            token_limit_text = (
                f", or with their responses than actor.max_tokens_per_micro_batch={max_tokens}"
                if max_tokens is not None
                else ""
            )
            raise ConfigError(
                f"all {len(dataset)} prompts are longer than {self.limit}={self.max_prompt_tokens}{token_limit_text}"
            )
        return FittingPrompts(dataset, check_results["dropped"], check_results["left_out"])

    def _check_dataset(
        self, dataset: PromptDataset, has_demonstrations: bool, max_tokens: int | None
    ) -> dict[str, list[Any]]:
        dropped_indices, omitted_names = list[int](), set[str]()
        for index in range(len(dataset)):
            prompt = dataset[index]
            if not has_demonstrations:
                prompt = dataclasses.replace(prompt, turn=None)
            omitted_names.update(self.check(prompt))
            encoded_prompt = (
                self.encode_demonstration(prompt, max_tokens) if has_demonstrations else self.encode(prompt)
            )
            if encoded_prompt is None:
                dropped_indices.append(index)
        return {"dropped": dropped_indices, "left_out": sorted(omitted_names)}

    def _compute_check_digest(self, dataset: PromptDataset, has_demonstrations: bool, max_tokens: int | None) -> str:
        """Returns a digest of all inputs of the checks: tokenizer, options and problems."""
        tokenizer = getattr(self.tokenizer, "backend_tokenizer", None)
        vocabulary = (
            tokenizer.to_str() if tokenizer is not None else json.dumps(self.tokenizer.get_vocab(), sort_keys=True)
        )
        options = [
            str(self.tokenizer.name_or_path),
            self.tokenizer.chat_template,
            self.max_prompt_tokens,
            self.overlong,
            self.chat_template,
            has_demonstrations,
            max_tokens,
            _CACHE_VERSION,
        ]
        digest = hashlib.blake2b(vocabulary.encode("utf-8", "surrogatepass"), digest_size=16)
        digest.update(json.dumps(options, default=str).encode())
        for index in range(len(dataset)):
            prompt = dataset[index]
            row = [
                prompt.messages,
                prompt.response,
                prompt.turn,
                prompt.tools,
                [digest_of(image) for image in prompt.images],
            ]
            digest.update(json.dumps(row, sort_keys=True, default=str).encode())
        return digest.hexdigest()

    def _expand_image_tokens(self, prompt: Prompt, ids: list[int]) -> tuple[list[int], list[int]]:
        return self.image_processor.expand_image_tokens(prompt, ids) if prompt.images else (ids, [])

    def _ids(self, text: str, is_bare: bool) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            code_point = f"\\u{ord(text[error.start]):04x}"
            raise ConfigError(
                f"a text has {code_point}, half of the pair that writes one character: take it out"
            ) from None
        # A chat template renders the start token. For bare text, the tokenizer adds start and end token; the end is removed.
        ids: list[int] = list(self.tokenizer(text, add_special_tokens=is_bare, verbose=False)["input_ids"])
        if self._num_embeddings is not None and max(ids, default=0) >= self._num_embeddings:
            raise missing_embedding_error(max(ids), self.tokenizer, self._num_embeddings)
        return ids[:-1] if is_bare and ids and ids[-1] == self.tokenizer.eos_token_id and len(ids) > 1 else ids

    @cached_property
    def _num_embeddings(self) -> int | None:
        return count_embeddings(str(getattr(self.tokenizer, "name_or_path", "") or ""))

    def _fits(self, prompt: Prompt, length: int, bound: int, limit: str, unit: str) -> bool:
        if length <= bound:
            return True
        if self.overlong == "error":
            raise ConfigError(
                f"{prompt.where} has {length} {unit}, more than {limit} allows ({bound}): {_format_excerpt(prompt)}; "
                f"raise the "
                "limit, or set data.overlong_prompts=drop"
            )
        return False


class FittingPrompts:
    """Problems of a dataset that are not too long.

    Attributes:
        dropped: Number of problems that are too long.
        left_out: Message keys that the chat template renders only for the last turn (reasoning).
    """

    def __init__(self, dataset: PromptDataset, dropped_indices: Sequence[int], left_out: Sequence[str]) -> None:
        dropped_positions = frozenset(dropped_indices)
        self._dataset = dataset
        self._positions = [index for index in range(len(dataset)) if index not in dropped_positions]
        self.dropped = len(dropped_positions)
        self.left_out = tuple(left_out)

    def notes(self, key: str) -> list[str]:
        """Returns messages to print at the start of a run."""
        note_texts = []
        if self.dropped:
            num_problems = self.dropped + len(self)
            note_texts.append(
                f"{key}: {self.dropped} of {num_problems} problems are dropped, because they are too long "
                "(data.overlong_prompts=drop)"
            )
        if self.left_out:
            note_texts.append(
                f"{key}: the chat template leaves {', '.join(self.left_out)} out of turns before the last"
            )
        return note_texts

    def __len__(self) -> int:
        return len(self._positions)

    def __getitem__(self, index: int) -> Prompt:
        return self._dataset[self._positions[index]]


def _read_cached_results(file: Path) -> dict[str, list[Any]] | None:
    try:
        check_results = read_json(file.read_bytes())
    except (OSError, ValueError):
        return None
    return (
        check_results if isinstance(check_results, dict) and check_results.keys() == {"dropped", "left_out"} else None
    )


def _format_excerpt(prompt: Prompt) -> str:
    last_content = prompt.messages[-1]["content"]
    return repr(last_content if len(last_content) <= 60 else last_content[:60] + "…")


def _suggest_close_folder(folder: Path) -> str:
    folder_names = [path.name for path in folder.parent.iterdir() if path.is_dir()] if folder.parent.is_dir() else []
    close_names = similar_names(folder.name, folder_names, 1)
    return f"; did you mean {str(folder.with_name(close_names[0]))!r}?" if close_names else ""


def context_tokens(cfg: LanguageConfig, tokenizer: Any) -> int | None:
    """Returns the maximum number of tokens of prompt and response.

    The maximum is `rollout.max_model_len`, or the limit in the configuration of the tokenizer's model if that is not set. None
    if neither is set.
    """
    max_model_len = select(cfg, "rollout.max_model_len")
    if max_model_len is not None:
        return int(max_model_len)
    max_tokens, path = None, str(getattr(tokenizer, "name_or_path", "") or "")
    with contextlib.suppress(ConfigError):  # the tokenizer's folder may hold no model
        config = load_model_config(path, cfg.actor.model.trust_remote_code) if path else None
        max_tokens = getattr(config.get_text_config(), "max_position_embeddings", None) if config else None
    return None if max_tokens is None else int(max_tokens)


#: Each tokenizer has one of these files. Without them, transformers creates an empty tokenizer for some models.
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")


def find_tokenizer(model_path: str, trust_remote_code: bool) -> Any | None:
    """Loads the tokenizer of a model's folder or hub name; returns None if the model has no loadable tokenizer."""
    folder = Path(model_path)
    if folder.is_dir() and not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        return None
    try:
        return transformers().AutoTokenizer.from_pretrained(model_path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError, ImportError):
        return None


def end_tokens(model_path: str, config: Any, tokenizer: Any | None) -> frozenset[int]:
    """Returns the ids of the tokens that end a response.

    The generation configuration, the model's configuration, the tokenizer and the chat template may each declare end tokens.
    Chat models that were fine-tuned from a base model often declare their end of turn in only one of these.
    """
    declared_ends: list[Any] = [
        getattr(config.get_text_config(), "eos_token_id", None),
        getattr(tokenizer, "eos_token_id", None),
        turn_end(tokenizer),
    ]
    with contextlib.suppress(OSError, ValueError):  # the model may have no generation configuration
        declared_ends.append(transformers().GenerationConfig.from_pretrained(model_path).eos_token_id)
    ids: set[int] = set()
    for declared_end in declared_ends:
        if declared_end is not None:
            ids.update(declared_end if isinstance(declared_end, (list, tuple)) else (declared_end,))
    return frozenset(int(i) for i in ids)


def strip_end_tokens(token_ids: Sequence[int], tokenizer: Any) -> list[int]:
    """Returns a response's token ids without a final end token of the model."""
    end_ids = _find_response_ends(tokenizer)
    return list(token_ids[:-1] if token_ids and token_ids[-1] in end_ids else token_ids)


@functools.lru_cache(maxsize=16)
def _find_response_ends(tokenizer: Any) -> frozenset[int]:
    """Returns the end tokens of a tokenizer's model, and the padding token, with which some models end responses."""
    path = str(getattr(tokenizer, "name_or_path", "") or "")
    end_ids = {getattr(tokenizer, name, None) for name in ("eos_token_id", "pad_token_id")} | {turn_end(tokenizer)}
    with contextlib.suppress(ConfigError):  # the tokenizer's folder may hold no model
        end_ids |= end_tokens(path, load_model_config(path, False), tokenizer) if path else frozenset()
    return frozenset(token for token in end_ids if token is not None)


def cut_at_stop(tokenizer: Any, token_ids: Sequence[int], stop_texts: Sequence[str]) -> tuple[str, str | None]:
    """Cuts a response's text at its first stop text.

    A match must not begin or end inside a special token: the stop text `b` does not match in `<bos>`, but `<bos>` does.

    Returns:
        Text before the stop text, and the stop text; the complete text and None if no stop text matches.
    """
    text: str = tokenizer.decode(list(token_ids), skip_special_tokens=False)
    inside_positions: set[int] | None = None
    stop_start, matched_stop = len(text), None
    for stop_text in stop_texts:
        match_start = text.find(stop_text)
        while 0 <= match_start < stop_start:
            inside_positions = (
                _find_inside_special(tokenizer, token_ids) if inside_positions is None else inside_positions
            )
            if inside_positions.isdisjoint((match_start, match_start + len(stop_text))):
                stop_start, matched_stop = match_start, stop_text
            match_start = text.find(stop_text, match_start + 1)
    return text[:stop_start], matched_stop


def _find_inside_special(tokenizer: Any, token_ids: Sequence[int]) -> set[int]:
    """Returns the character positions strictly inside a special token of a response's text."""
    special_ids, inside_positions = _special_ids(tokenizer), set[int]()
    for token_position, token in enumerate(token_ids):
        if token in special_ids:
            text_end = len(tokenizer.decode(list(token_ids[: token_position + 1]), skip_special_tokens=False))
            inside_positions.update(
                range(text_end - len(tokenizer.decode([token], skip_special_tokens=False)) + 1, text_end)
            )
    return inside_positions


_special_ids = functools.lru_cache(maxsize=16)(special_tokens)


class StopTexts:
    """Detector of stop texts, called after each sampled token.

    Both engines use this detector, because vLLM's search loses a partial match when a request is resumed, and ignores special
    tokens.

    Args:
        tokenizer: Tokenizer of the model; None if the model has no tokenizer.
        model_path: Path of the model, for messages.
    """

    def __init__(self, tokenizer: Any | None, model_path: str) -> None:
        self._tokenizer = tokenizer
        self._model_path = model_path

    def check(self, stop: Sequence[str]) -> None:
        """Checks the stop texts of a request.

        Raises:
            ConfigError: A stop text is empty or not encodable as UTF-8, or the model has no tokenizer.
        """
        if not stop:
            return
        for stop_text in stop:
            try:
                if stop_text.encode():
                    continue
            except UnicodeEncodeError:
                pass
            raise ConfigError(
                f"a stop text is {stop_text!r}; allowed: texts of at least one character that UTF-8 can hold"
            )
        if self._tokenizer is None:
            raise ConfigError(
                f"stop texts need a tokenizer, and {self._model_path} has none: save it there, or use stop_token_ids"
            )

    def is_complete(self, token_ids: Sequence[int], stop: tuple[str, ...]) -> bool:
        """Returns whether the last token completes one of the stop texts."""
        # A token has at least one byte, so a stop text that ends at the last token begins within these tokens.
        num_tail_tokens = max(len(stop_text.encode()) for stop_text in stop) + 3
        assert self._tokenizer is not None
        return cut_at_stop(self._tokenizer, token_ids[-num_tail_tokens:], stop)[1] is not None
