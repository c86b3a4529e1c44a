"""Where a response ends: the model's end tokens, and stop texts."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhpc.config.typed import select
from rlhpc.language.hugging_face import special_tokens, transformers, turn_end
from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.text import first_line

if TYPE_CHECKING:
    from rlhpc.language.config import LanguageConfig


def load_model_config(model_path: str, trust_remote_code: bool) -> Any:
    """The model's configuration.

    Raises:
        ConfigError: There is no such model.
    """
    try:
        return transformers().AutoConfig.from_pretrained(model_path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            f"actor.model.model_path is {model_path!r}, where no model can be loaded from: {first_line(error)}; a folder with "
            "config.json and weights, or the name of a model in the hub's cache, is allowed"
        ) from None


def context_tokens(cfg: LanguageConfig, tokenizer: Any) -> int | None:
    """Returns the most tokens of prompt and response together, by `rollout.max_model_len` or the model that the tokenizer came
    with; None if neither says so."""
    limit = select(cfg, "rollout.max_model_len")
    if limit is not None:
        return int(limit)
    most, path = None, str(getattr(tokenizer, "name_or_path", "") or "")
    with contextlib.suppress(ConfigError):  # a tokenizer from elsewhere than its model
        config = load_model_config(path, cfg.actor.model.trust_remote_code) if path else None
        most = getattr(config.get_text_config(), "max_position_embeddings", None) if config else None
    return None if most is None else int(most)


#: One of these lies beside every tokenizer. Without, transformers makes up an empty one for some kinds of models.
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")


def find_tokenizer(model_path: str, trust_remote_code: bool) -> Any | None:
    """The tokenizer beside a model; None if there is none."""
    folder = Path(model_path)
    if folder.is_dir() and not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        return None
    try:
        return transformers().AutoTokenizer.from_pretrained(model_path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError, ImportError):
        return None


def end_tokens(model_path: str, config: Any, tokenizer: Any | None) -> frozenset[int]:
    """Tokens that end a response by themselves.

    Those of the generation configuration, of the model, of the tokenizer and of its chat template together: chat models
    fine-tuned from a base model often name their end of turn in one of these only.
    """
    found: list[Any] = [
        getattr(config.get_text_config(), "eos_token_id", None),
        getattr(tokenizer, "eos_token_id", None),
        turn_end(tokenizer),
    ]
    with contextlib.suppress(OSError, ValueError):  # a model may come without one
        found.append(transformers().GenerationConfig.from_pretrained(model_path).eos_token_id)
    ids: set[int] = set()
    for value in found:
        if value is not None:
            ids.update(value if isinstance(value, (list, tuple)) else (value,))
    return frozenset(int(i) for i in ids)


def without_end(token_ids: Sequence[int], tokenizer: Any) -> list[int]:
    """Returns a response without the end token that the model has drawn, whichever of its end tokens that is."""
    ends = _response_ends(tokenizer)
    return list(token_ids[:-1] if token_ids and token_ids[-1] in ends else token_ids)


@functools.lru_cache(maxsize=16)
def _response_ends(tokenizer: Any) -> frozenset[int]:
    """Returns the end tokens of the model that a tokenizer came with, and the padding token: some are trained to end so."""
    path = str(getattr(tokenizer, "name_or_path", "") or "")
    ends = {getattr(tokenizer, name, None) for name in ("eos_token_id", "pad_token_id")} | {turn_end(tokenizer)}
    with contextlib.suppress(ConfigError):  # a tokenizer from elsewhere than its model
        ends |= end_tokens(path, load_model_config(path, False), tokenizer) if path else frozenset()
    return frozenset(token for token in ends if token is not None)


def cut_at_stop(tokenizer: Any, token_ids: Sequence[int], stop: Sequence[str]) -> tuple[str, str | None]:
    """Returns the text of a response before its first stop text, and that stop text; the whole text and None without one.

    A stop text neither begins nor ends inside a special token: `b` does not match in `<bos>`, while `<bos>` does.
    """
    text: str = tokenizer.decode(list(token_ids), skip_special_tokens=False)
    edges: set[int] | None = None
    first, match = len(text), None
    for candidate in stop:
        at = text.find(candidate)
        while 0 <= at < first:
            edges = _inside_special(tokenizer, token_ids) if edges is None else edges
            if edges.isdisjoint((at, at + len(candidate))):
                first, match = at, candidate
            at = text.find(candidate, at + 1)
    return text[:first], match


def _inside_special(tokenizer: Any, token_ids: Sequence[int]) -> set[int]:
    """Returns the places of a response's text that are inside a special token."""
    special, places = _special(tokenizer), set[int]()
    for number, token in enumerate(token_ids):
        if token in special:
            end = len(tokenizer.decode(list(token_ids[: number + 1]), skip_special_tokens=False))
            places.update(range(end - len(tokenizer.decode([token], skip_special_tokens=False)) + 1, end))
    return places


_special = functools.lru_cache(maxsize=16)(special_tokens)


class StopTexts:
    """Finds a stop text at the end of a response, token by token.

    Both engines use it, in place of vLLM's own search: that one forgets a half-written stop text when a request is
    resumed, and does not see special tokens.

    Args:
        tokenizer: None where the model has none.
        model_path: For the message.
    """

    def __init__(self, tokenizer: Any | None, model_path: str) -> None:
        self._tokenizer, self._model_path = tokenizer, model_path

    def check(self, stop: Sequence[str]) -> None:
        """Raises:
        ConfigError: These stop texts cannot be looked for."""
        if not stop:
            return
        for text in stop:
            try:
                if text.encode():
                    continue
            except UnicodeEncodeError:
                pass
            raise ConfigError(f"a stop text is {text!r}; allowed: texts of at least one character that UTF-8 can hold")
        if self._tokenizer is None:
            raise ConfigError(
                f"stop texts need a tokenizer, and {self._model_path} has none: save it there, or use stop_token_ids"
            )

    def ended(self, token_ids: Sequence[int], stop: tuple[str, ...]) -> bool:
        """Whether the last token completed one of the texts."""
        # A token is at least a byte: the text cannot reach back further than this.
        window = max(len(text.encode()) for text in stop) + 3
        assert self._tokenizer is not None
        return cut_at_stop(self._tokenizer, token_ids[-window:], stop)[1] is not None
