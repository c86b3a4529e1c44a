"""Pictures for vision-language models."""

from __future__ import annotations

import numpy as np
import torch

from tests.extras import need_extra

need_extra("llm")

from rlhpc.embodied.models.vlm import ImagePreprocessing


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
