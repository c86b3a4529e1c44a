"""Keys of requests: each that the endpoint knows is in the table of the page, and `null` is as good as no key."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlhpc.language.agents.gateway.request_schema import CHAT, GENERATE, MESSAGES, BodySchema, read_body
from rlhpc.language.agents.turn_tree import RequestError

PAGE = Path(__file__).parents[5] / "docs" / "how-to" / "train-your-agent.md"


def keys_of(form: BodySchema) -> Iterator[str]:
    yield from (*form.keys, *form.neutral)
    for inner in form.inner.values():
        yield from keys_of(inner)


@pytest.mark.parametrize("form", [CHAT, MESSAGES, GENERATE])
def test_each_key_is_in_the_table(form: BodySchema) -> None:
    table = PAGE.read_text().partition("### What a request may ask for")[2].partition("\n## ")[0]
    for name in keys_of(form):
        if name in ("type", "budget_tokens", "display", "include_usage"):  # of `thinking` and `stream_options`
            continue
        assert re.search(rf"`{name}[`:]", table), f"{name} is not in the table of {PAGE.name}"


@pytest.mark.parametrize("form", [CHAT, MESSAGES, GENERATE])
def test_null_is_as_good_as_nothing(form: BodySchema) -> None:
    body = b'{"messages": [{}], "token_ids": [1]'
    nulls = b"".join(
        b', "%s": null' % name.encode() for name in {**form.keys, **form.neutral} if name not in form.required
    )
    assert read_body(body + nulls + b"}", form) == read_body(body + b"}", form)
    for name in form.required:
        with pytest.raises(RequestError, match=name):
            read_body(b'{"%s": null}' % name.encode(), form)
