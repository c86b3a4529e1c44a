"""A sequence classifier for tests that need a reward model, whatever it says."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

TINY = {"hidden": 64, "layers": 2, "heads": 2}


def save_classifier(
    folder: Path, kwargs: Mapping[str, Any] | None = None, *, seed: int = 3, scale: float = 20.0
) -> Path:
    """A built-in tiny model with a head that was drawn, as a Hugging Face folder.

    Args:
        folder: The target.
        kwargs: Options of the model.
        seed, scale: Of the head.
    """
    from rlhpc.language.config.models import FrozenModelConfig
    from rlhpc.language.models.builtin import resolve_model
    from rlhpc.language.models.loading import export_model
    from rlhpc.language.models.value_head import load_scalar_model

    tiny = FrozenModelConfig(model_path="builtin:tiny", kwargs=dict(kwargs or TINY))
    source = FrozenModelConfig(model_path=resolve_model(tiny))
    weights = load_scalar_model(source, seed=seed).state_dict()
    scaled = ((name, one * scale if name.startswith("score") else one) for name, one in weights.items())
    export_model(folder, scaled, source, load=load_scalar_model)
    return folder
