"""Vision-language models: tiny ones, folders of weights, pictures and prompts as inputs, and value heads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

from tests.extras import need_extra

need_extra("llm")

from rlhpc.config.typed import default_section, typed
from rlhpc.embodied.config import ModelConfig
from rlhpc.embodied.models.vlm import (
    TINY,
    ByteTokenizer,
    DeepValueHead,
    ImagePreprocessing,
    ValueHead,
    VlmInputs,
    count_image_tokens,
    load_vlm,
    position_ids,
    require_weights,
    state_width,
    tiny_config,
    without_weights,
)
from rlhpc.runtime.errors import ConfigError


def test_pictures_are_resized_as_pillow_does():
    from PIL import Image

    waves = np.sin(np.arange(40)[:, None, None] * 0.9 + np.arange(30)[:, None] * 0.7 + np.arange(3))
    image = (waves * 127.5 + 127.5).astype(np.uint8)
    theirs = np.asarray(Image.fromarray(image).resize((28, 28), Image.Resampling.BICUBIC), np.float32) / 255
    mine = ImagePreprocessing(28, [[0.0] * 3, [0.5] * 3], [[1.0] * 3, [0.5] * 3], bicubic=True)(
        torch.from_numpy(image)[None]
    )
    assert mine.shape == (1, 1, 6, 28, 28)
    off = np.abs(mine[0, 0, :3].permute(1, 2, 0).numpy() - theirs)
    assert off.max() < 1.5 / 255 and (off > 0.5 / 255).mean() < 0.3  # Pillow also rounds between its two passes
    torch.testing.assert_close(mine[0, 0, 3:], mine[0, 0, :3] * 2 - 1)
    ramp = torch.arange(28, dtype=torch.uint8).expand(28, 28)[None, ..., None].repeat(1, 1, 1, 3)
    # A quarter of the area is half of each side.
    middle = ImagePreprocessing(28, [[0.0] * 3], [[1.0] * 3], crop_fraction=0.25)(ramp)[0, 0, 0] * 255
    torch.testing.assert_close(middle[5], torch.linspace(13.5 - 6.75, 13.5 + 6.75, 28))


def configured(path: str, **changes: Any) -> ModelConfig:
    section = default_section(ModelConfig)
    section.update({"model_path": path, "dtype": "float32", **changes})
    return typed(ModelConfig, section)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llava's folder with the settings of its image processor."""
    folder = tmp_path_factory.mktemp("llava")
    model, tokenizer, settings = load_vlm(configured(TINY), "vla", 1, 2, 0)
    assert settings == {}
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    settings = {"image_processor_type": "SiglipImageProcessor", "image_mean": [0.1, 0.2, 0.3], "image_std": [1, 1, 2]}
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    return folder


def test_a_folder_has_weights_tokens_and_the_statistics_of_its_pictures(folder: Path) -> None:
    require_weights(str(folder))
    model, tokenizer, settings = load_vlm(configured(str(folder)), "vla", 1, 2, 0)
    assert model.config.model_type == "llava" and tokenizer.encode("ab", add_special_tokens=False) == [97, 98]
    preprocessing = ImagePreprocessing.from_settings(model.config, settings)
    assert preprocessing.size == 32 and list(preprocessing.means[0]) == [0.1, 0.2, 0.3]
    white = preprocessing(torch.full((1, 32, 32, 3), 255, dtype=torch.uint8))
    torch.testing.assert_close(white[0, 0, :, 0, 0], torch.tensor([0.9, 0.8, 0.35]))
    with without_weights():
        empty, _, _ = load_vlm(configured(str(folder)), "vla", 1, 2, 0)
    assert {parameter.device.type for parameter in empty.parameters()} == {"meta"}
    assert count_image_tokens(model, model.config) == 16, "patches of 8 in a picture of 32"


def test_a_tiny_model_is_made_without_weights_for_ranks_that_get_them() -> None:
    with without_weights():
        model, tokenizer, _ = load_vlm(configured(TINY), "pi0", 4, 3, 5)
    assert next(model.parameters()).device.type == "meta" and isinstance(tokenizer, ByteTokenizer)
    config = tiny_config("pi0", 4, 3, 5)
    assert (config.chunk_size, config.max_action_dim, config.max_state_dim) == (4, 3, 5)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "there is no such folder"),
        ({}, "config.json cannot be read"),
        ({"config.json": "{}"}, "a folder without weights"),
    ],
)
def test_a_folder_without_a_model_is_named(content: dict[str, str] | None, said: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    if content is not None:
        folder.mkdir()
        for name, text in content.items():
            (folder / name).write_text(text)
    with pytest.raises(ConfigError, match=said):
        require_weights(str(folder))
    for path in (None, TINY, "owner/name"):
        require_weights(path)


def test_a_model_of_another_kind_or_name_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"the only built-in vision-language model is builtin:tiny"):
        load_vlm(configured("builtin:large"), "vla", 1, 2, 0)
    with pytest.raises(ConfigError, match="which transformers cannot load"):
        load_vlm(configured(str(tmp_path)), "vla", 1, 2, 0)


SPACE = spaces.Dict(
    {"front": spaces.Box(0, 255, (8, 8, 6), np.uint8), "instruction": spaces.Box(0, 255, (9,), np.uint8),
     "state": spaces.Box(-1, 1, (5,), np.float32)}
)  # fmt: skip


def words(*texts: str) -> torch.Tensor:
    rows = [list(text.encode().ljust(9, b"\0")) for text in texts]
    return torch.tensor(rows, dtype=torch.uint8)


@pytest.mark.parametrize("image_first", [False, True])
def test_prompts_are_padded_on_the_left_behind_the_places_of_images(image_first: bool) -> None:
    build = VlmInputs(
        SPACE, ByteTokenizer(), ImagePreprocessing(4), 256, 2, "{instruction}:", image_first=image_first,
        num_state_tokens=1, suffix_ids=[7], lowercase=True,
    )  # fmt: skip
    ids, mask, pixels = build({"front": torch.zeros(2, 8, 8, 6, dtype=torch.uint8), "instruction": words("Push", "")})
    bos, images = [ByteTokenizer.bos_token_id], [256] * 5
    start = images + bos if image_first else bos + images
    assert ids[1].tolist() == [*start, *b"do the task:", 7], "of two cameras with two tokens, and one of the state"
    assert ids[0].tolist() == [0] * 7 + [*start, *b"push:", 7] and mask[0].tolist() == [0] * 7 + [1] * 12
    assert pixels.shape == (2, 2, 3, 4, 4)
    assert position_ids(mask)[0].tolist() == [0] * 8 + list(range(1, 12)) and state_width(SPACE) == 5


@pytest.mark.parametrize(
    ("space", "said"),
    [
        (spaces.Box(0, 1, (8, 8, 3), np.float32), "take pictures uint8"),
        (spaces.Box(0, 255, (8, 8, 4), np.uint8), "take pictures uint8"),
        (spaces.Box(0, 1, (4,), np.float32), "need pictures"),
    ],
)
def test_observations_without_pictures_are_refused(space: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        VlmInputs(space, ByteTokenizer(), ImagePreprocessing(4), 256, 2, "{instruction}")
    assert state_width(space) == 0


def test_values_are_zero_at_first_and_have_an_axis_only_for_several() -> None:
    hidden = torch.randn(3, 8)
    assert torch.equal(ValueHead(8, 1)(hidden), torch.zeros(3)) and ValueHead(8, 2)(hidden).shape == (3, 2)
    head = DeepValueHead(8, 1, [6, 4])
    assert head(hidden.bfloat16()).shape == (3,) and head(hidden).dtype == torch.float32
    assert [layer.out_features for layer in head.hidden] == [6, 4] and not head.out.bias.any()
