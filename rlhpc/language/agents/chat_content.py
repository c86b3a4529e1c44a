"""Contents of the messages between a model's turns: checks texts and images of clients and inline agents, and renders them
with the chat template.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlhpc.language.data.images import (
    PromptImageProcessor,
    from_url,
    has_vision,
    load_image_processor,
    read_images,
    size_of,
)
from rlhpc.language.data.tokenizer import REPLY, render_chat
from rlhpc.runtime.errors import ConfigError

#: Maximum size of a client's image, in bytes and in pixels. The rollout rank decodes it.
MAX_IMAGE_BYTES, MAX_IMAGE_PIXELS = 8 << 20, 1 << 24
_TEXT_TYPES = ("text", "input_text", "output_text")
_IMAGE_TYPES = ("image_url", "input_image", "image")
Content = str | list[dict[str, Any]]


def content_of(raw_content: Any, *, is_trusted: bool = False) -> tuple[Content, tuple[bytes, ...]]:
    """Converts a message's content to the form that chat templates read: a text or, with images, a list of parts. Returns the
    content and the images.

    Args:
        raw_content: A text, or a list of texts and parts.
        is_trusted: Whether the content comes from this process. The key `image` of a part may then have any form that
            `rlhpc.language.data.images` reads.

    Raises:
        ConfigError: The content has a different type, or an image is not accepted.
    """
    if raw_content is None or isinstance(raw_content, str):
        return raw_content or "", ()
    if not isinstance(raw_content, Sequence):
        raise ConfigError("a message's content must be a text, or a list of parts")
    content_parts, images = list[dict[str, Any]](), list[bytes]()
    for content_part in raw_content:
        part_type, part_value = ("text", content_part) if isinstance(content_part, str) else _parse_part(content_part)
        if part_type in _TEXT_TYPES and isinstance(part_value, str):
            content_parts.append({"type": "text", "text": part_value})
        elif part_type in _IMAGE_TYPES:
            images += (
                read_images(content_part["image"], Path())
                if is_trusted and "image" in content_part
                else [_decode_image(part_type, content_part)]
            )
            content_parts.append({"type": "image"})
        else:
            raise ConfigError(f"a message has a part of type {part_type}; this model reads texts and pictures alone")
    return (
        (content_parts, tuple(images))
        if images
        else ("".join(content_part["text"] for content_part in content_parts), ())
    )


def make_image_parts(images: Sequence[bytes], mime_type: str = "image/png") -> list[dict[str, Any]]:
    """Converts images to message parts with data URLs, for requests to the gateway."""
    urls = [f"data:{mime_type};base64,{base64.b64encode(image).decode()}" for image in images]
    return [{"type": "image_url", "image_url": {"url": url}} for url in urls]


def image_processor_of(tokenizer: Any) -> PromptImageProcessor | None:
    """Returns the image processor of the model that a tokenizer belongs to; None if the model reads only text."""
    from rlhpc.language.hugging_face import load_model_config

    path = str(getattr(tokenizer, "name_or_path", "") or "")
    if not path:
        return None
    try:
        is_vision_model = has_vision(load_model_config(path, False))
    except ConfigError:  # the tokenizer's folder has no model
        return None
    return load_image_processor(path) if is_vision_model else None


def message_text(tokenizer: Any, message: Mapping[str, Any], ids: list[int]) -> str:
    """Returns the text that the chat template puts between the end of a turn of the model and the start of its next turn.

    Args:
        tokenizer: Tokenizer of transformers, with a chat template.
        message: Message between the two turns.
        ids: Tokens of the model's turn; an end token in them is not repeated.

    Raises:
        ConfigError: The template does not contain the model's turn.
    """
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": REPLY}, dict(message)]
    following_text = text_after_reply(tokenizer, render_chat(tokenizer, turns, add_generation_prompt=True), ids)
    if following_text is None:
        raise ConfigError(
            "rollout.agent answers with a message, but the chat template does not keep the turns before it"
        )
    return following_text


def text_after_reply(tokenizer: Any, conversation_text: str, sampled_ids: list[int]) -> str | None:
    """Returns the text after `REPLY` in a rendered conversation, or None if it does not contain `REPLY`. Omits an end token
    that the model has already sampled.
    """
    _, marker, following_text = conversation_text.partition(REPLY)
    return (
        following_text.removeprefix(tokenizer.decode(sampled_ids[-1:], skip_special_tokens=False)) if marker else None
    )


def _parse_part(content_part: Any) -> tuple[str, Any]:
    if not isinstance(content_part, Mapping) or not isinstance(content_part.get("type"), str):
        raise ConfigError("a message's content must be a text, or a list of parts that have a type")
    return content_part["type"], content_part.get("text")


def _decode_image(part_type: str, content_part: Mapping[str, Any]) -> bytes:
    """Returns the bytes of an image that a client's message contains. Images at other URLs are refused, not fetched."""
    image_source, url = content_part.get("source"), content_part.get("image_url")
    if isinstance(image_source, Mapping) and image_source.get("type") == "base64":  # Anthropic's format
        url = f"data:{image_source.get('media_type', 'image/png')};base64,{image_source.get('data', '')}"
    elif isinstance(image_source, Mapping):
        url = image_source.get("url", "")
    elif isinstance(url, Mapping):
        url = url.get("url")
    if not isinstance(url, str) or not url.startswith("data:"):
        raise ConfigError(
            f"a part of type {part_type} has its picture elsewhere ({str(url)[:60]!r}), and nothing is fetched here: send it "
            "within the message, as a data URL (data:image/png;base64,…)"
        )
    if len(url) > MAX_IMAGE_BYTES * 4 // 3 + 100:
        raise ConfigError(
            f"a picture is larger than {MAX_IMAGE_BYTES >> 20} MiB, the most that is taken: make it smaller"
        )
    image = from_url(url)
    width, height = size_of(image)
    if width * height > MAX_IMAGE_PIXELS:
        raise ConfigError(
            f"a picture has {width} x {height} points, and {MAX_IMAGE_PIXELS} are the most that is taken: make it smaller"
        )
    return image
