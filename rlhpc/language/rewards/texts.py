"""Rewards that only look at the text: equality, form, length."""

from __future__ import annotations

import re

from rlhpc.language.rewards.answers import squeeze
from rlhpc.language.rewards.base import Sample
from rlhpc.runtime.errors import ConfigError


def _compiled(pattern: str, what: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise ConfigError(f"reward.terms: {what} is {pattern!r}, which is no regular expression: {error}") from None


class ExactReward:
    """1 where the response is the answer, up to white space (and case), else 0.

    Args:
        extract: Regular expression whose last match is compared instead of the whole response: its first group, or all
            of it where it has none. Without a match: 0.
        ignore_case: Whether upper and lower case are the same.
    """

    needs_answer = True

    def __init__(self, extract: str | None = None, ignore_case: bool = False) -> None:
        self._extract = None if extract is None else _compiled(extract, "extract of 'exact'")
        self._ignore_case = ignore_case

    @staticmethod
    def inline(extract: str | None = None, ignore_case: bool = False) -> bool:
        """A pattern may take for ever on some text, so it is matched where it can be ended."""
        return extract is None

    def __call__(self, sample: Sample) -> float:
        given = sample.response
        if self._extract is not None:
            matches = list(self._extract.finditer(given))
            if not matches:
                return 0.0
            given = matches[-1].group(1 if self._extract.groups else 0) or ""
        given, wanted = squeeze(given), squeeze(sample.answer)
        return float(given.casefold() == wanted.casefold() if self._ignore_case else given == wanted)


class FormatReward:
    """1 where the whole response matches a regular expression (`.` matches line ends, too), else 0.

    Args:
        pattern: The expression, such as `<think>.*</think>\\s*<answer>.*</answer>\\s*`.
        anywhere: A match of a part is enough.
        finished: A response that was cut off at the length limit gets 0.
    """

    def __init__(self, pattern: str, anywhere: bool = False, finished: bool = False) -> None:
        self._pattern, self._anywhere, self._finished = _compiled(pattern, "pattern of 'format'"), anywhere, finished

    def __call__(self, sample: Sample) -> float:
        if self._finished and not sample.finished:
            return 0.0
        match = self._pattern.search if self._anywhere else self._pattern.fullmatch
        return float(match(sample.response) is not None)


class LengthReward:
    """0 up to `start` tokens, then falling in a straight line to −1 at `limit` and beyond.

    Args:
        limit: Tokens at which it is −1.
        start: Tokens up to which it is 0.
    """

    inline = True

    def __init__(self, limit: int, start: int = 0) -> None:
        if not 0 <= start < limit:
            raise ConfigError(f"reward.terms: 'length' has start {start} and limit {limit}; needed: 0 <= start < limit")
        self._start, self._limit = start, limit

    def __call__(self, sample: Sample) -> float:
        over = (sample.tokens - self._start) / (self._limit - self._start)
        return -min(1.0, max(0.0, over))
