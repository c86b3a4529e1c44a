"""Pictures in messages: the forms of clients, what is not taken, and what tells turns apart."""

from __future__ import annotations

import base64
import io
from typing import Any

import numpy as np
import pytest
from PIL import Image

from rlhpc.language.agents.chat_content import MOST_BYTES
from rlhpc.language.agents.gateway.api_formats import conversation_of
from rlhpc.language.agents.turn_tree import AgentTurn, Renderer, RequestError, Tree, canonical, key_of, keys_of
from rlhpc.language.data.images import PromptImages


def picture(width: int = 2, height: int = 2, shade: int = 0) -> str:
    """In base64."""
    file = io.BytesIO()
    Image.new("L", (width, height), shade).save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


def by_url(url: str) -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}


def test_a_picture_is_the_same_in_each_clients_form() -> None:
    ours, theirs = picture(), {"type": "base64", "media_type": "image/png", "data": picture()}
    shown = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{ours}"}}
    image, text = {"type": "image", "source": theirs}, {"type": "text", "text": "what?"}
    result = {"type": "tool_result", "tool_use_id": "1", "content": [text, image]}
    found = conversation_of({"messages": [{"role": "user", "content": [result, image, text]}]})[0]
    messages = [canonical(message) for message in found]
    assert messages == [
        canonical({"role": "tool", "tool_call_id": "1", "content": [text, shown]}),
        canonical(
            {"role": "user", "content": [{"type": "input_image", "image_url": shown["image_url"]["url"]}, "what?"]}
        ),
    ]
    assert messages[1]["content"] == [{"type": "image"}, text]
    assert messages[1]["images"] == (base64.b64decode(ours),)
    other = canonical(by_url(f"data:image/png;base64,{picture(shade=1)}"))
    assert key_of(other) != key_of(canonical(by_url(f"data:image/png;base64,{ours}")))


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("https://example.org/a.png", "nothing is fetched here"),
        ("/etc/passwd", "nothing is fetched here"),
        ("data:image/png;base64,x?", "is not base64"),
        ("data:image/png;base64,aGVsbG8=", "a picture of 5 bytes is none"),
        ("data:text/plain;base64,aGVsbG8=", "a picture is the URL"),
        ("data:image/png;base64," + "A" * (MOST_BYTES * 4 // 3 + 200), "larger than 8 MiB"),
        (f"data:image/png;base64,{picture(5000, 4000)}", "5000 x 4000 points"),
    ],
)
def test_what_is_not_taken(url: str, said: str) -> None:
    with pytest.raises(RequestError, match=said) as refused:
        canonical(by_url(url))
    assert refused.value.status == 400


def test_a_model_of_text_is_shown_nothing() -> None:
    messages = [canonical(by_url(f"data:image/png;base64,{picture()}"))]
    with pytest.raises(RequestError, match="this model reads text alone"):
        Renderer(None).prompt(Tree(), messages, keys_of(messages, None), None)


def test_the_same_tokens_with_another_picture_go_on_from_nothing() -> None:
    def seen(*shades: float) -> PromptImages:
        patches = tuple(np.full((4, 2), shade, np.float32) for shade in shades)
        grids = np.asarray([[1, 2, 2]] * len(shades), np.int64)
        return PromptImages(
            patches, grids, 1 + 3 * np.arange(len(shades)), 2, tuple(str(shade).encode() for shade in shades)
        )

    tree = Tree([AgentTurn(None, [7, 9], [5], [-0.5], [0], "stop", images=seen(0.0))])
    longer = [7, 9, 5, 8, 9, 6]
    assert tree.continued_by(longer, images=seen(0.0)) == tree.continued_by(longer, images=seen(0.0, 1.0)) == 0
    assert tree.continued_by(longer, images=seen(1.0, 0.0)) is None and tree.continued_by(longer) is None
