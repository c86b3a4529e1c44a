"""Images of prompts: rows, files and URLs, patches and tokens, positions, and settings that a vision model does not have."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from omegaconf import OmegaConf
from PIL import Image

from rlhpc.config.typed import default_section
from rlhpc.language.config.run import GrpoConfig, SftConfig
from rlhpc.language.data.images import (
    PromptImageProcessor,
    check_images,
    check_vision,
    concatenate_images,
    image_names,
    insert_image_parts,
    load_image_processor,
    positions,
    read_images,
)
from rlhpc.language.data.prompts import Prompt
from rlhpc.language.data.registry import make_dataset
from rlhpc.language.hugging_face import load_model_config
from rlhpc.language.models.tiny_vision import make_tiny_vision_model
from rlhpc.runtime.errors import ConfigError
from tests.extras import need_extra


def test_one_question_about_many_pictures_is_held_out_by_picture(tmp_path: Path) -> None:
    """Both sides have some; and the same picture by another row is on the same one."""
    urls = []
    for shade in range(20):
        Image.new("L", (2, 2), shade).save(file := io.BytesIO(), "PNG")
        urls.append("data:image/png;base64," + base64.b64encode(file.getvalue()).decode())
    rows = [json.dumps({"prompt": "how many?", "answer": "", "shown": url}) for url in [*urls, *urls]]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    section = default_section(SftConfig).data.train
    section.path, section.images_key, section.eval_fraction = str(tmp_path / "rows.jsonl"), "shown", 0.5
    sides = [make_dataset(section, part) for part in ("train", "eval")]
    train, held = ([data[n].images for n in range(len(data))] for data in sides)
    assert train and held and not {*train} & {*held} and len(train) + len(held) == 40
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "how many?", "answer": "", "shown": urls[0][:60]}))
    with pytest.raises(ConfigError, match="column 'shown': a picture"):
        make_dataset(section)


def picture(seed: int, width: int, height: int) -> bytes:
    """Returns noise as a PNG."""
    pixels = np.random.default_rng(seed).integers(256, size=(height, width, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(file := io.BytesIO(), "PNG")
    return file.getvalue()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny vision-language model, whose image tokens cover 28 by 28 pixels."""
    need_extra("llm")
    folder = tmp_path_factory.mktemp("vision")
    make_tiny_vision_model(folder, family="qwen2_5_vl", hidden=32, heads=2, seed=3)
    return folder


@pytest.fixture(scope="module")
def processor(model: Path) -> PromptImageProcessor:
    return load_image_processor(str(model))


def test_an_image_takes_a_token_for_each_square_of_its_patches(processor: PromptImageProcessor) -> None:
    token = processor.token
    images = (picture(1, 28, 28), picture(2, 56, 84))
    ids, processed = processor.process_prompt(images, [5, token, 6, token, 7], offset=100)
    assert ids == [5, token, 6, *[token] * 6, 7]
    assert processed.at.tolist() == [101, 103] and processed.tokens.tolist() == [1, 6]
    assert [len(patches) for patches in processed.patches] == [4, 24] and processed.grids.tolist()[1] == [1, 6, 4]
    again = processor.prompt_images(images[::-1], [0, 6])
    assert again.digests == processed.digests[::-1] and processed.digests[0] != processed.digests[1]
    assert processed.places == ((101, processed.digests[0]), (103, processed.digests[1]))
    assert processor.process_prompt(images[:1], [token, token], literal_tokens={0})[1].at.tolist() == [1]
    with pytest.raises(ConfigError, match=r"there are 1 pictures, and the text has 2 places"):
        processor.expand_image_tokens(Prompt(0, ({"role": "user", "content": "x"},), images=images[:1]), [token, token])


def test_the_models_inputs_mark_the_tokens_of_images(processor: PromptImageProcessor) -> None:
    _, seen = processor.process_prompt((picture(1, 28, 56),), [5, processor.token, 6])
    inputs = seen.inputs(4, "cpu")
    assert inputs["mm_token_type_ids"].tolist() == [[0, 1, 1, 0]] and inputs["pixel_values"].shape[0] == 8
    both = concatenate_images(seen, processor.blank(3))
    assert both is not None and both.tokens.tolist() == [2, 3] and concatenate_images(None, seen) is seen
    assert concatenate_images(None, None) is None and processor.max_tokens >= 6
    assert seen.positions(4).tolist() == [[0, 1, 1, 3], [0, 1, 2, 3], [0, 1, 1, 3]]


def test_text_goes_on_after_the_longest_side_of_an_image() -> None:
    """Two words, an image of 2 by 3 tokens, and two words (Qwen2-VL, section 2.1)."""
    found = positions(10, np.array([2]), np.array([[1, 4, 6]]), merge=2)
    assert found.tolist() == [
        [0, 1, 2, 2, 2, 2, 2, 2, 5, 6],
        [0, 1, 2, 2, 2, 3, 3, 3, 5, 6],
        [0, 1, 2, 3, 4, 2, 3, 4, 5, 6],
    ]


def test_images_stand_where_they_are_marked_or_before_the_last_question() -> None:
    system, user = {"role": "system", "content": "s"}, {"role": "user", "content": "how many?"}
    assert insert_image_parts([system, user], 2)[1]["content"] == [
        {"type": "image"}, {"type": "image"}, {"type": "text", "text": "how many?"}
    ]  # fmt: skip
    marked = {"role": "user", "content": "a<image>b"}
    assert insert_image_parts([marked, user], 1) == [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image"}, {"type": "text", "text": "b"}]},
        {"role": "user", "content": [{"type": "text", "text": "how many?"}]},
    ]


def test_an_image_is_a_path_a_url_bytes_or_pil(tmp_path: Path) -> None:
    png = picture(1, 3, 2)
    (tmp_path / "a.png").write_bytes(png)
    url = "data:image/png;base64," + base64.b64encode(png).decode()
    assert read_images(["a.png", url, {"bytes": png}, {"path": str(tmp_path / "a.png")}, png], tmp_path) == (png,) * 5
    [encoded] = read_images(Image.open(io.BytesIO(png)), tmp_path)
    assert np.array_equal(np.asarray(Image.open(io.BytesIO(encoded))), np.asarray(Image.open(io.BytesIO(png))))
    assert read_images(None, tmp_path) == ()
    check_images(["a.png", url], tmp_path)
    assert image_names(["a.png", url]) == image_names(["a.png", {"bytes": png}]) != image_names(["a.png"])


@pytest.mark.parametrize(
    ("image", "said"),
    [
        ("none.png", "none.png cannot be read: No such file"),
        (3, "a picture is int; allowed: a file's path"),
        ("", "a picture is str; allowed: a file's path"),
        ("data:image/png,AAAA", "a picture is the URL 'data:image/png,AAAA'"),
        ("data:image/png;base64,A", "a picture's data URL is not base64"),
    ],
)
def test_what_is_no_image_is_refused(image: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        read_images(image, tmp_path)
    assert said in str(refused.value)


def test_images_are_checked_without_reading_files(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"no picture, which only training would notice")
    check_images("a.png", tmp_path)
    with pytest.raises(ConfigError, match="there is no file"):
        check_images("b.png", tmp_path)
    with pytest.raises(ConfigError, match="a picture of 4 bytes is none"):
        check_images({"bytes": b"none"}, tmp_path)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"agent.kind": "env"}, "agent.kind is env, which asks the model with texts of its own"),
        ({"rollout.weight_sync": "shards"}, "rollout.weight_sync is 'shards'"),
        ({"actor.training_backend": "deepspeed"}, "actor.training_backend is 'deepspeed'"),
        ({"actor.parallel.tensor": 2}, "actor.parallel.tensor is 2"),
        ({"teacher.rollout_backend": "vllm"}, "teacher.rollout_backend is 'vllm'"),
        ({"actor.lora.rank": 2, "rollout.merge_adapters": False}, "rollout.merge_adapters is false"),
        ({"actor.lora.rank": 2, "actor.model.freeze_vision": True}, "actor.model.freeze_vision is true"),
        ({}, ""),
    ],
)
def test_settings_that_a_vision_model_does_not_have_are_named(changes: dict[str, Any], said: str, model: Path) -> None:
    cfg: Any = default_section(GrpoConfig)
    cfg.actor.model.model_path = str(model)
    for key, value in changes.items():
        OmegaConf.update(cfg, key, value)
    config = load_model_config(str(model), False)
    if not said:
        check_vision(cfg, config, has_images=True)
        return
    with pytest.raises(ConfigError) as refused:
        check_vision(cfg, config, has_images=True)
    assert said in str(refused.value)


def test_a_model_that_cannot_look_is_refused(model: Path, tmp_path: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"has no image processor that can be loaded"):
        load_image_processor(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(ConfigError, match="a llama, reads text alone"):
        load_image_processor(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llava"}))
    with pytest.raises(ConfigError, match="a llava, which looks at pictures in a way that is not known here"):
        load_image_processor(str(tmp_path))
