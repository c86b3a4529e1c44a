"""Turn trees: pictures and the tokens that are shown to a model."""

from __future__ import annotations

import numpy as np
import pytest

from rlhpc.language.agents.turn_tree import AgentTurn, Renderer, RequestError, TurnTree, canonical, keys_of
from rlhpc.language.data.images import PromptImages
from tests.unit.language.agents.pictures import by_url, picture


def test_a_model_of_text_is_shown_nothing() -> None:
    messages = [canonical(by_url(f"data:image/png;base64,{picture()}"))]
    with pytest.raises(RequestError, match="this model reads text alone"):
        Renderer(None).prompt(TurnTree(), messages, keys_of(messages, None), None)


def test_the_same_tokens_with_another_picture_go_on_from_nothing() -> None:
    def seen(*shades: float) -> PromptImages:
        patches = tuple(np.full((4, 2), shade, np.float32) for shade in shades)
        grids = np.asarray([[1, 2, 2]] * len(shades), np.int64)
        return PromptImages(
            patches, grids, 1 + 3 * np.arange(len(shades)), 2, tuple(str(shade).encode() for shade in shades)
        )

    tree = TurnTree([AgentTurn(None, [7, 9], [5], [-0.5], [0], "stop", images=seen(0.0))])
    longer = [7, 9, 5, 8, 9, 6]
    assert tree.find_parent(longer, images=seen(0.0)) == tree.find_parent(longer, images=seen(0.0, 1.0)) == 0
    assert tree.find_parent(longer, images=seen(1.0, 0.0)) is None and tree.find_parent(longer) is None
