"""API formats of clients: one picture in each of them."""

from __future__ import annotations

import base64

from rlhpc.language.agents.gateway.api_formats import conversation_of
from rlhpc.language.agents.turn_tree import canonical, key_of
from tests.unit.language.agents.pictures import by_url, picture


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
