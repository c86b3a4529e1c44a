"""LeRobot's π0 and π0.5 have no small sizes: a Python that finds this makes every one of them small, and nothing else."""

from __future__ import annotations

import importlib.machinery
import sys
from types import ModuleType
from typing import Any

NAMES = {f"lerobot.policies.{name}.modeling_{name}" for name in ("pi0", "pi05")}


def shrink(module: Any) -> None:
    """PaliGemma of two layers, with an eye of one, and an expert of two. Eight heads are fixed."""
    theirs, made = module.CONFIG_MAPPING, []

    def paligemma() -> Any:
        eye = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "patch_size": 16}
        made.append(theirs["paligemma"](vision_config={"model_type": "siglip_vision_model", **eye}))
        return made[-1]

    def gemma(**sizes: Any) -> Any:  # made after PaliGemma's configuration was filled in, before its network
        eye = made[-1].vision_config
        eye.intermediate_size, eye.projection_dim, made[-1].text_config.vocab_size = 64, 32, 320
        return theirs["gemma"](**sizes | {"vocab_size": 320})

    module.CONFIG_MAPPING = {"paligemma": paligemma, "gemma": gemma}
    module.get_gemma_config = lambda variant: module.GemmaConfig(
        width=32 if variant == "gemma_2b" else 16, depth=2, mlp_dim=64, num_heads=8, num_kv_heads=1, head_dim=8
    )


class Finder:
    """Shrinks what the ordinary finder finds."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name not in NAMES or not (spec := importlib.machinery.PathFinder.find_spec(name, path, target)):
            return None
        loader: Any = spec.loader
        load = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            load(module)
            shrink(module)

        loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, Finder)  # type: ignore[arg-type]
