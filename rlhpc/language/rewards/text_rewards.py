"""Rewards by equality, format and length of the response, and rewards from agents, task scorers and HTTP services."""

from __future__ import annotations

import json
import os
import re
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from typing import Any

from rlhpc.language.rewards.base import Sample
from rlhpc.language.rewards.math_verifier import check_extraction_methods, extract, references_of, squeeze
from rlhpc.runtime.errors import ConfigError, RlhpcError


def _compile_pattern(pattern: str, option_name: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise ConfigError(
            f"reward.terms: {option_name} is {pattern!r}, which is no regular expression: {error}"
        ) from None


class ExactReward:
    """Reward of 1 if the response equals the reference answer, or one of several, except for white space, and 0 otherwise.

    Args:
        extract: Regular expression. Its last match in the response is compared instead of the response: the first group, or
            the full match if the expression has no group. Without a match the reward is 0.
        ignore_case: Whether to ignore the difference between upper and lower case.
    """

    needs_answer = True

    def __init__(self, extract: str | None = None, ignore_case: bool = False) -> None:
        self._extract = None if extract is None else _compile_pattern(extract, "extract of 'exact'")
        self._ignore_case = ignore_case

    @staticmethod
    def inline(extract: str | None = None, ignore_case: bool = False) -> bool:
        """Returns whether no pattern is set. Matching may take forever on some texts and needs a process to kill."""
        return extract is None

    def __call__(self, sample: Sample) -> float:
        response = sample.response
        if self._extract is not None:
            extract_matches = list(self._extract.finditer(response))
            if not extract_matches:
                return 0.0
            response = extract_matches[-1].group(1 if self._extract.groups else 0) or ""
        texts = [squeeze(text) for text in (response, *references_of(sample.answer))]
        response, *references = [text.casefold() for text in texts] if self._ignore_case else texts
        return float(response in references)


class FormatReward:
    """Reward of 1 if the full response matches a regular expression, and 0 otherwise. `.` also matches line ends.

    Args:
        pattern: The expression, such as `<think>.*</think>\\s*<answer>.*</answer>\\s*`.
        anywhere: Whether a match of a part of the response is enough.
        finished: Whether a response that was truncated at the length limit gets 0.
    """

    def __init__(self, pattern: str, anywhere: bool = False, finished: bool = False) -> None:
        self._pattern = _compile_pattern(pattern, "pattern of 'format'")
        self._matches_anywhere = anywhere
        self._requires_finish = finished

    def __call__(self, sample: Sample) -> float:
        if self._requires_finish and not sample.finished:
            return 0.0
        find_match = self._pattern.search if self._matches_anywhere else self._pattern.fullmatch
        return float(find_match(sample.response) is not None)


class LengthReward:
    """Length penalty: 0 up to `start` tokens, then falling linearly to −1 at `limit` and beyond.

    Args:
        limit: Number of tokens at which the penalty is −1.
        start: Number of tokens up to which the penalty is 0.

    Raises:
        ConfigError: `start` and `limit` do not satisfy 0 <= start < limit.
    """

    inline = True

    def __init__(self, limit: int, start: int = 0) -> None:
        if not 0 <= start < limit:
            raise ConfigError(f"reward.terms: 'length' has start {start} and limit {limit}; needed: 0 <= start < limit")
        self._start = start
        self._limit = limit

    def __call__(self, sample: Sample) -> float:
        excess = (sample.tokens - self._start) / (self._limit - self._start)
        return -min(1.0, max(0.0, excess))


class AgentReward:
    """Reward that an external agent reports for its episode."""

    inline = True

    def __call__(self, sample: Sample) -> float:
        """Returns the agent's reward.

        Raises:
            RlhpcError: The agent reported no reward.
        """
        agent_report = sample.meta.get("agent", {})
        if agent_report.get("reward") is None:
            if agent_report.get("later"):
                raise RlhpcError("its reward comes later, and nobody waits for it here")
            raise RlhpcError(
                agent_report.get("error") or "the agent gave no reward: its function returned None or no `reward`"
            )
        return float(agent_report["reward"])


class ReasoningGymReward:
    """Reward from 0 to 1 by the task's scorer, for problems of source `reasoning_gym`.

    Args:
        extract: Extraction methods in the order of their use: `tag` (`<answer>…</answer>`), `boxed`, `####`, `last_number`,
            `whole`.
    """

    preload = ("rlhpc.language.data.reasoning_gym",)
    memory_mb = 4096

    def __init__(self, extract: Sequence[str] = ("tag", "boxed", "####", "whole")) -> None:
        self._methods = check_extraction_methods(extract, "extract of 'reasoning_gym'")

    def __call__(self, sample: Sample) -> float:
        from rlhpc.language.data.reasoning_gym import score

        if "entry" not in sample.meta:
            raise ValueError("the problem is not of source reasoning_gym: its meta has no entry")
        answer = extract(sample.response, self._methods)
        return 0.0 if answer is None else float(score(answer, sample.meta))


class HTTPReward:
    """Reward of an HTTP service.

    The service receives `{"prompt", "response", "answer", "meta", "tokens", "finished"}` as JSON by POST; the reply has the
    reward.

    After failed connections, timeouts, and replies with status 429 or 5xx, the request is repeated, with pauses that double.
    Any other reply without a reward is a failure of the sample. All attempts together must fit into `reward.timeout_s`.

    Args:
        url: URL of the service, `http://` or `https://`.
        timeout_s: Maximum time in seconds of an attempt.
        retries: Maximum number of further attempts.
        field: Path of the number in the reply; dots separate nested keys.
        headers: Further headers.
        token_env: Name of an environment variable with a bearer token, so that no file contains the token.

    Raises:
        ConfigError: An argument is out of its range, or the variable `token_env` is not set.
    """

    def __init__(
        self,
        url: str,
        timeout_s: float = 3.0,
        retries: int = 2,
        field: str = "reward",
        headers: dict[str, str] | None = None,
        token_env: str | None = None,
    ) -> None:
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"reward.terms: url of 'http' is {url!r}; it must begin with http:// or https://")
        if timeout_s <= 0 or retries < 0:
            raise ConfigError(f"reward.terms: 'http' has timeout_s {timeout_s}, retries {retries}; needed: > 0, >= 0")
        self._url = url
        self._timeout_s = timeout_s
        self._retries = retries
        self._field = field
        self._headers = {"Content-Type": "application/json", **(headers or {})}
        if token_env is not None:
            if token_env not in os.environ:
                raise ConfigError(
                    f"reward.terms: token_env of 'http' is {token_env!r}, which is not in the environment"
                )
            self._headers["Authorization"] = f"Bearer {os.environ[token_env]}"

    def __call__(self, sample: Sample) -> float:
        payload = {
            name: getattr(sample, name) for name in ("prompt", "response", "answer", "meta", "tokens", "finished")
        }
        reply: Any = json.loads(self._post(json.dumps(payload).encode()))
        for name in self._field.split("."):
            if not isinstance(reply, dict) or name not in reply:
                raise ValueError(f"{self._url} replied without {self._field!r}: {str(reply)[:200]}")
            reply = reply[name]
        return float(reply)

    def _post(self, body: bytes) -> bytes:
        for num_retries_left in range(self._retries, -1, -1):
            try:
                request = urllib.request.Request(self._url, body, self._headers, method="POST")
                with urllib.request.urlopen(request, timeout=self._timeout_s) as reply:
                    reply_bytes: bytes = reply.read()
                    return reply_bytes
            except urllib.error.HTTPError as error:
                if not num_retries_left or (error.code != 429 and error.code < 500):
                    raise ValueError(f"{self._url} replied {error.code}: {error.read(200)!r}") from None
            except (OSError, TimeoutError) as error:
                if not num_retries_left:
                    raise ValueError(f"{self._url}: {error}") from None
            time.sleep(0.1 * 2 ** (self._retries - num_retries_left))
        raise AssertionError("unreachable")
