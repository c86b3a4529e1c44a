"""A reward that a service gives."""

from __future__ import annotations

import json
import os
import time
import urllib.error
import urllib.request
from typing import Any

from rlhpc.language.rewards.base import Sample
from rlhpc.runtime.errors import ConfigError


class HTTPReward:
    """Posts `{"prompt", "response", "answer", "meta", "tokens", "finished"}` as JSON; the reply has the reward.

    A connection that fails, a timeout, and replies 429 and 5xx are tried again, with pauses that double; any other
    reply is a failure of the sample. All tries together must fit into `reward.timeout_s`.

    Args:
        url: Of the service, `http://` or `https://`.
        timeout_s: Of one try.
        retries: Further tries.
        field: Where in the reply the number is; a dot goes deeper.
        headers: Further headers.
        token_env: Name of an environment variable that is sent as bearer token, so that it is in no file.
    """

    def __init__(
        self, url: str, timeout_s: float = 3.0, retries: int = 2, field: str = "reward",
        headers: dict[str, str] | None = None, token_env: str | None = None,
    ) -> None:  # fmt: skip
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"reward.terms: url of 'http' is {url!r}; it must begin with http:// or https://")
        if timeout_s <= 0 or retries < 0:
            raise ConfigError(f"reward.terms: 'http' has timeout_s {timeout_s}, retries {retries}; needed: > 0, >= 0")
        self._url, self._timeout_s, self._retries, self._field = url, timeout_s, retries, field
        self._headers = {"Content-Type": "application/json", **(headers or {})}
        if token_env is not None:
            if token_env not in os.environ:
                raise ConfigError(
                    f"reward.terms: token_env of 'http' is {token_env!r}, which is not in the environment"
                )
            self._headers["Authorization"] = f"Bearer {os.environ[token_env]}"

    def __call__(self, sample: Sample) -> float:
        asked = {name: getattr(sample, name) for name in ("prompt", "response", "answer", "meta", "tokens", "finished")}
        reply: Any = json.loads(self._post(json.dumps(asked).encode()))
        for name in self._field.split("."):
            if not isinstance(reply, dict) or name not in reply:
                raise ValueError(f"{self._url} replied without {self._field!r}: {str(reply)[:200]}")
            reply = reply[name]
        return float(reply)

    def _post(self, body: bytes) -> bytes:
        for left in range(self._retries, -1, -1):
            try:
                request = urllib.request.Request(self._url, body, self._headers, method="POST")
                with urllib.request.urlopen(request, timeout=self._timeout_s) as reply:
                    content: bytes = reply.read()
                    return content
            except urllib.error.HTTPError as error:
                if not left or (error.code != 429 and error.code < 500):
                    raise ValueError(f"{self._url} replied {error.code}: {error.read(200)!r}") from None
            except (OSError, TimeoutError) as error:
                if not left:
                    raise ValueError(f"{self._url}: {error}") from None
            time.sleep(0.1 * 2 ** (self._retries - left))
        raise AssertionError("unreachable")
