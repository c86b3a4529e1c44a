"""Memory model: longest sequence that a cache holds."""

from __future__ import annotations

import pytest

from rlhpc.language.planning.memory_model import Serving
from rlhpc.language.planning.model_size import size_of
from tests.unit.language.planning.accounts import SMALL


@pytest.mark.parametrize("window", [None, 64])
@pytest.mark.parametrize("engine", ["hf", "vllm"])
def test_the_longest_sequence_is_the_last_that_the_cache_holds(engine: str, window: int | None) -> None:
    size = size_of("somebody/model", config={**SMALL, "model_type": "qwen2", "sliding_window": window,
                                             "use_sliding_window": window is not None, "max_window_layers": 3})  # fmt: skip
    serving = Serving(size, engine, 2, True, 1e9, 8, 8, 4)
    for nbytes in (0.0, 1e3, 1e5, 1e7):
        tokens = serving.longest_within(nbytes)
        assert serving.sequence(tokens) <= nbytes < serving.sequence(tokens + 1)
