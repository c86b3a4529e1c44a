"""Recordings of openpi's own code: `python record.py OUTPUT.json`, with openpi's `src` and `packages/openpi-client/src` in
PYTHONPATH and its `transformers_replace` copied over transformers.

Recorded with openpi 15a9616a00943ada6c20a0f158e3adb39df2ccac, transformers 4.53.2, torch 2.13.0, jax
0.10.2 and jaxtyping 0.2.36.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from openpi.models import tokenizer as tokenizers
from openpi.models.pi0_config import Pi0Config
from openpi.models_pytorch import pi0_pytorch
from openpi.shared.normalize import NormStats
from openpi.transforms import Normalize, Unnormalize


class Words:
    """Tokenizer that keeps the texts which openpi gives it."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def encode(self, text: str, add_bos: bool = False) -> list[int]:
        self.texts.append(f"<bos>{text}" if add_bos else text)
        return [1]


def prompt(text: str, state: np.ndarray | None) -> str:
    """What PaliGemma's tokenizer is given for an instruction and a normalised state."""
    words = Words()
    own: Any = object.__new__(tokenizers.PaligemmaTokenizer)  # its constructor downloads a tokenizer
    own._max_len, own._tokenizer = 200, words
    own.tokenize(text, state)
    return "".join(words.texts)


def names(pi05: bool) -> dict[str, list[int]]:
    """Names and shapes of the weights as `safetensors.torch.save_model` writes them: of tied weights, the first name."""
    with torch.device("meta"):
        model = pi0_pytorch.PI0Pytorch(Pi0Config(pi05=pi05, dtype="float32", pytorch_compile_mode=None))
    by_weight: dict[int, list[str]] = {}
    state = model.state_dict(keep_vars=True)
    for name, weight in state.items():
        by_weight.setdefault(id(weight), []).append(name)
    return {name: list(state[name].shape) for name in (min(group) for group in by_weight.values())}


def main() -> None:
    rng = np.random.default_rng(0)
    columns = {"state": 8, "actions": 7}
    stats = {}
    for name, dim in columns.items():
        low = rng.normal(size=dim)
        stats[name] = NormStats(
            mean=rng.normal(size=dim), std=rng.uniform(0.01, 2, dim), q01=low, q99=low + rng.uniform(0.02, 3, dim)
        )
    stats["state"].std[3] = stats["actions"].std[6] = 0.0
    stats["state"].q99[3] = stats["state"].q01[3]
    values = {name: rng.normal(size=(5, dim)) for name, dim in columns.items()}
    recorded: dict[str, Any] = {
        "statistics": {
            name: {key: getattr(column, key).tolist() for key in ("mean", "std", "q01", "q99")}
            for name, column in stats.items()
        },
        "values": {name: rows.tolist() for name, rows in values.items()},
    }
    for family, quantiles in (("pi0", False), ("pi05", True)):
        normalised = Normalize(stats, use_quantiles=quantiles)({name: rows.copy() for name, rows in values.items()})
        unnormalised = Unnormalize(stats, use_quantiles=quantiles)({name: rows.copy() for name, rows in values.items()})
        texts = ["pick up_the\nred cube ", "open the drawer"]
        states = normalised["state"][: len(texts)]
        pairs = zip(texts, states if quantiles else [None, None], strict=True)
        recorded[family] = {
            "normalised": {name: rows.tolist() for name, rows in normalised.items()},
            "unnormalised": {name: rows.tolist() for name, rows in unnormalised.items()},
            "texts": texts, "prompts": [prompt(text, state) for text, state in pairs], "weights": names(quantiles),
        }  # fmt: skip
    torch.manual_seed(0)
    times = pi0_pytorch.PI0Pytorch.sample_time(None, 200_000, torch.device("cpu")).sort().values
    recorded["time_quantiles"] = times[:: len(times) // 20].tolist()
    Path(sys.argv[1]).write_text(json.dumps(recorded))


if __name__ == "__main__":
    main()
