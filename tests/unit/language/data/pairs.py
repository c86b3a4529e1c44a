"""Pairs of preferred and rejected responses."""

from __future__ import annotations

from typing import Any

from tests.extras import need_extra

need_extra("llm")

from rlhpc.language.data.tokenizer import PromptTokenizer
from rlhpc.language.models.tiny import character_tokenizer


def encoder(**options: Any) -> PromptTokenizer:
    tokenizer = character_tokenizer()
    if options.pop("end_pads", False):
        tokenizer.pad_token = tokenizer.eos_token
    return PromptTokenizer(tokenizer, 8, **options)
