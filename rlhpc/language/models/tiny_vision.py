"""Tiny vision-language model that learns to count on one core: random weights, a character tokenizer, and an image processor.

The following command writes a Hugging Face folder that transformers' auto classes and vLLM load.

    python -m rlhpc.language.models.tiny_vision models/tiny_vl
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from rlhpc.language.hugging_face import transformers
from rlhpc.language.models.tiny import (
    VOCABULARY,
    character_tokenizer,
    maker_parser,
    write_from_command_line,
    write_model,
)
from rlhpc.runtime.errors import ConfigError

FAMILIES = ("qwen2_5_vl", "qwen3_vl")
#: Start of an image, image token, end of an image, and video token.
MARKS = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>")
# Concatenates the turns' texts and images; only assistant turns end with an end token.
_CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
)
_PATCH_SIZES = {"qwen2_5_vl": 14, "qwen3_vl": 16}
_MERGE_SIZE = 2


def make_tiny_vision_model(
    folder: str | Path,
    *,
    family: str = "qwen2_5_vl",
    vocabulary: str = VOCABULARY,
    hidden: int = 64,
    layers: int = 2,
    heads: int = 2,
    context: int = 128,
    seed: int = 0,
) -> int:
    """Writes a vision-language model with random weights, its tokenizer and its image processor.

    Args:
        folder: Target folder, created if missing.
        family: Architecture, qwen2_5_vl or qwen3_vl, whose image tokens cover 28 × 28 or 32 × 32 pixels.
        vocabulary: Characters that have a token; other characters become `<unk>`.
        hidden: Hidden size of the language model and of the vision tower.
        layers: Number of layers of the language model and of the vision tower.
        heads: Number of attention heads of both. vLLM on a CPU requires `hidden / heads` to be 32, 64, 80, 96, 112, 128, …
        context: Maximum number of tokens of prompt and response, including images.
        seed: Seed of the weights; the same seed writes the same bytes.

    Returns:
        Number of parameters.

    Raises:
        ConfigError: The family is unknown, or the sizes are incompatible.
    """
    if family not in FAMILIES:
        raise ConfigError(f"family is {family!r}; allowed: {', '.join(FAMILIES)}")
    if hidden % heads or (hidden // heads) % 8:
        raise ConfigError(f"hidden={hidden} must be a multiple of 8 × heads={heads}")
    package = transformers()
    tokenizer = character_tokenizer(vocabulary, context)
    tokenizer.add_special_tokens({"additional_special_tokens": list(MARKS)})
    tokenizer.chat_template = _CHAT_TEMPLATE
    start, image, end, video = tokenizer.convert_tokens_to_ids(list(MARKS))
    text_config: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "max_position_embeddings": context,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": _sections(hidden // heads)},
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    vision_config: dict[str, Any] = {
        "depth": layers,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_heads": heads,
        "out_hidden_size": hidden,
        "patch_size": _PATCH_SIZES[family],
        "spatial_merge_size": _MERGE_SIZE,
    }
    if family == "qwen2_5_vl":
        vision_config |= {"window_size": 4 * _PATCH_SIZES[family], "fullatt_block_indexes": [layers - 1]}
        model_class: Any = package.Qwen2_5_VLForConditionalGeneration
        config_class: Any = package.Qwen2_5_VLConfig
    else:
        text_config["head_dim"] = hidden // heads
        text_config["rope_parameters"]["mrope_interleaved"] = True  # always true in transformers; vLLM requires the key
        vision_config |= {"num_position_embeddings": 64, "deepstack_visual_indexes": [0]}
        model_class, config_class = package.Qwen3VLForConditionalGeneration, package.Qwen3VLConfig
    config = config_class(
        text_config=text_config,
        vision_config=vision_config,
        image_token_id=image,
        video_token_id=video,
        vision_start_token_id=start,
        vision_end_token_id=end,
        tie_word_embeddings=False,
    )
    parameters = write_model(folder, model_class, config, tokenizer, seed)
    _processor(package, family).save_pretrained(folder)
    return parameters


def _sections(width: int) -> list[int]:
    """Returns the numbers of rotary pairs for time, height and width in a head of `width` elements."""
    num_pairs = width // 2
    spatial_width = 3 * num_pairs // 8
    return [num_pairs - 2 * spatial_width, spatial_width, spatial_width]


def _processor(package: Any, family: str) -> Any:
    """Creates an image processor that does not scale down images of up to 64 tokens."""
    pixels_per_token = (_PATCH_SIZES[family] * _MERGE_SIZE) ** 2
    options: dict[str, Any] = {
        "patch_size": _PATCH_SIZES[family],
        "merge_size": _MERGE_SIZE,
        "size": {"shortest_edge": pixels_per_token, "longest_edge": 64 * pixels_per_token},
    }
    return package.Qwen2VLImageProcessorPil(**options)


def main(argv: list[str] | None = None) -> int:
    """Runs `python -m rlhpc.language.models.tiny_vision FOLDER`."""
    parser = maker_parser("tiny_vision", __doc__, hidden=64, layers=2, heads=2, context=128, seed=0)
    parser.add_argument("--family", default=FAMILIES[0], choices=FAMILIES, help="default: %(default)s")
    return write_from_command_line(parser, make_tiny_vision_model, argv)


if __name__ == "__main__":
    sys.exit(main())
