"""Where a response ends: the model's end tokens, and stop texts."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlhpc.language.hugging_face import transformers
from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.shown import first_line


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


#: One of these lies beside every tokenizer. Without, transformers makes up an empty one for some kinds of models.
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")


def load_tokenizer(model_path: str, trust_remote_code: bool) -> Any | None:
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

    Those of the generation configuration, of the model and of the tokenizer together: chat models fine-tuned from a base
    model often name their end of turn in one of the three only.
    """
    found: list[Any] = [
        getattr(config.get_text_config(), "eos_token_id", None),
        getattr(tokenizer, "eos_token_id", None),
    ]
    with contextlib.suppress(OSError, ValueError):  # a model may come without one
        found.append(transformers().GenerationConfig.from_pretrained(model_path).eos_token_id)
    ids: set[int] = set()
    for value in found:
        if value is not None:
            ids.update(value if isinstance(value, (list, tuple)) else (value,))
    return frozenset(int(i) for i in ids)


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

    def require(self) -> None:
        """Raises:
        ConfigError: Stop texts cannot be looked for, because there is no tokenizer."""
        if self._tokenizer is None:
            raise ConfigError(
                f"stop texts need a tokenizer, and {self._model_path} has none: save it there, or use stop_token_ids"
            )

    def ended(self, token_ids: Sequence[int], stop: tuple[str, ...]) -> bool:
        """Whether the last token completed one of the texts."""
        # A token is at least a byte: the text cannot reach back further than this.
        window = max(len(text.encode()) for text in stop) + 3
        assert self._tokenizer is not None
        tail = self._tokenizer.decode(list(token_ids[-window:]), skip_special_tokens=False)
        return any(text in tail for text in stop)
