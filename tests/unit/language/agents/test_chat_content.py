"""Pictures in messages: the forms of clients, what is not taken, and what tells turns apart."""

from __future__ import annotations

import pytest

from rlhpc.language.agents.chat_content import MAX_IMAGE_BYTES
from rlhpc.language.agents.turn_tree import RequestError, canonical
from tests.unit.language.agents.pictures import by_url, picture


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("https://example.org/a.png", "nothing is fetched here"),
        ("/etc/passwd", "nothing is fetched here"),
        ("data:image/png;base64,x?", "is not base64"),
        ("data:image/png;base64,aGVsbG8=", "a picture of 5 bytes is none"),
        ("data:text/plain;base64,aGVsbG8=", "a picture is the URL"),
        ("data:image/png;base64," + "A" * (MAX_IMAGE_BYTES * 4 // 3 + 200), "larger than 8 MiB"),
        (f"data:image/png;base64,{picture(5000, 4000)}", "5000 x 4000 points"),
    ],
)
def test_what_is_not_taken(url: str, said: str) -> None:
    with pytest.raises(RequestError, match=said) as refused:
        canonical(by_url(url))
    assert refused.value.status == 400
