"""Prompts and demonstrations for language models."""

from rlhpc.language.data.prompts import Prompt, PromptDataset
from rlhpc.language.data.registry import find_source, make_dataset, register_source, source_types
from rlhpc.language.data.sampler import PromptSampler
from rlhpc.language.data.tokens import PromptTokenizer, load_tokenizer

__all__ = [
    "Prompt",
    "PromptDataset",
    "PromptSampler",
    "PromptTokenizer",
    "find_source",
    "load_tokenizer",
    "make_dataset",
    "register_source",
    "source_types",
]
