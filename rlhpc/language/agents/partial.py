"""What of a reply can be shown while it is written: texts of tokens, and what of these is certainly reasoning or an answer."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

_THINK_TAG, _THOUGHT, _CALL = "<think>", "</think>", "<tool_call>"
#: What a decoder puts where bytes of a character are still to come.
_BROKEN = "�"


class Partial:
    """A reply so far.

    Args:
        tokenizer: Of the model.
        opened: Whether the prompt has begun the reasoning.
        thinks: Whether reasoning is told from the answer.
        calls: Whether calls of tools are.
        stop: Texts that end the reply and are no part of it.
        hidden: Tokens that are no part of it either.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        opened: bool,
        thinks: bool,
        calls: bool,
        stop: Sequence[str] = (),
        hidden: Collection[int] = (),
    ) -> None:
        self._tokenizer, self._opened, self._thinks, self._calls = tokenizer, opened, thinks, calls
        self._stop, self._hidden = tuple(stop), hidden
        self._text, self._shown_to, self._read_to = "", 0, 0

    def split(self, ids: Sequence[int]) -> tuple[str, str]:
        """Reasoning and answer of the tokens so far, as far as neither can turn out to be something else.

        Args:
            ids: All tokens so far.
        """
        self._read([token for token in ids if token not in self._hidden])
        reasoning, text = "", self._text
        for stop in self._stop:
            text = _before(text, stop)
        if self._thinks:
            begun = text.lstrip()
            if not self._opened and _THINK_TAG.startswith(begun[: len(_THINK_TAG)]) and len(begun) < len(_THINK_TAG):
                return "", ""
            if self._opened or begun.startswith(_THINK_TAG):
                reasoning, ended, text = begun.removeprefix(_THINK_TAG).partition(_THOUGHT)
                reasoning = (reasoning if ended else _before(reasoning, _THOUGHT)).strip("\n")
                text = text.lstrip()
        if self._calls:  # the answer has no white space around it then
            text = _before(text, _CALL).strip()
        return reasoning, text

    def _read(self, ids: list[int]) -> None:
        """Goes on with the text, from a token on before which nothing changes any more."""
        known = self._decode(ids[self._shown_to : self._read_to])
        found = self._decode(ids[self._shown_to :])
        if len(found) > len(known) and not found.endswith(_BROKEN):
            self._text += found[len(known) :]
            self._shown_to, self._read_to = self._read_to, len(ids)

    def _decode(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=False)
        return text


def _before(text: str, tag: str) -> str:
    """What comes before a tag, and before what may be the beginning of one."""
    at = text.find(tag)
    if at >= 0:
        return text[:at]
    for length in range(min(len(tag) - 1, len(text)), 0, -1):
        if text.endswith(tag[:length]):
            return text[:-length]
    return text
