"""The page of a dataset's episodes: pictures of every form are drawn."""

from __future__ import annotations

import base64
import io
import re
from typing import Any

import numpy as np
import pytest

from rlhpc.embodied.data.datasets import page
from rlhpc.embodied.data.trajectory import Trajectory
from tests.extras import need_extra

need_extra("embodied")


def drawn(pictures: np.ndarray) -> list[np.ndarray]:
    """The pictures that a page of an episode shows, as arrays."""
    from PIL import Image

    steps = len(pictures) - 1
    fields: dict[str, Any] = {
        "obs": {"camera": pictures}, "actions": np.zeros((steps, 1)), "rewards": None, "success": None, "source": "test",
        "terminations": np.zeros(steps, bool), "truncations": np.zeros(steps, bool),
    }  # fmt: skip
    text = page("Title", {}, [Trajectory(**fields)])
    return [
        np.asarray(Image.open(io.BytesIO(base64.b64decode(data)))) for data in re.findall(r"base64,([^\"]+)\"", text)
    ]


@pytest.mark.parametrize(
    ("form", "shape", "channels"),
    [
        ("grey", (20, 20, 1), [0]),
        ("grey, channels first", (1, 20, 20), [0]),
        ("two stacked frames", (20, 20, 2), [1]),
        ("four stacked frames", (20, 20, 4), [3]),
        ("four stacked frames, channels first", (4, 20, 20), [3]),
        ("colours", (20, 24, 3), [0, 1, 2]),
        ("colours, channels first", (3, 20, 24), [0, 1, 2]),
        ("two cameras", (20, 24, 6), [0, 1, 2]),
    ],
)
def test_pictures_of_every_form_are_drawn(form: str, shape: tuple[int, ...], channels: list[int]) -> None:
    pictures = np.random.default_rng(0).integers(0, 256, (3, *shape), np.uint8)
    results = drawn(pictures)
    last = np.moveaxis(pictures, 1, -1) if form.endswith("first") else pictures
    assert len(results) == 3
    for picture, result in zip(last, results, strict=True):
        assert (result.reshape(*picture.shape[:2], -1) == picture[..., channels]).all()


def test_depth_is_drawn_from_near_to_far() -> None:
    depth = np.linspace(0.5, 2.0, 16, dtype=np.float32).reshape(1, 4, 4, 1).repeat(2, 0)
    assert drawn(depth)[0].min() == 0 and drawn(depth)[0].max() == 255
