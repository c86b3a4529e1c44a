"""Engines that are wrong in ways that a short text with the first weights does not show. Named as `false_engines:…` in
configurations, and importable by the ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from rlhpc.language.engines.base import Completion, Request
from rlhpc.language.engines.hf import HFRollout


class DecodesOtherwise(HFRollout):
    """Reads prompts rightly, and is off after some tokens of its own."""

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        completions = super().generate(requests)
        for completion in completions:
            completion.logprobs[2:] = [logprob - 0.05 for logprob in completion.logprobs[2:]]
        return completions


class ForgetsItsWindow(HFRollout):
    """Sees all of a text, where its model sees the last tokens alone."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._model.config.sliding_window = None
        for layer in self._model.model.layers:
            layer.self_attn.sliding_window = None


class PacksOnce(HFRollout):
    """Keeps one weight in the form that a kernel made of it when it came first."""

    def update_weights(self, version: int, named_tensors: Iterable[tuple[str, Any]], **options: Any) -> None:
        super().update_weights(version, named_tensors, **options)
        weight = self._model.model.layers[0].mlp.down_proj.weight
        if not hasattr(self, "_packed"):
            self._packed = weight.detach().clone()
        weight.data.copy_(self._packed)

    def held(self, name: str) -> None:
        return None  # its form is its own
