"""Prompts and demonstrations for language models."""

from rlhpc.language.data.prompts import Prompt, PromptDataset
from rlhpc.language.data.registry import SOURCES, make_dataset, register_source
from rlhpc.language.data.sampler import PromptSampler
from rlhpc.language.data.tokens import PromptTokenizer, load_tokenizer

__all__ = [
    "SOURCES",
    "Prompt",
    "PromptDataset",
    "PromptSampler",
    "PromptTokenizer",
    "load_tokenizer",
    "make_dataset",
    "register_source",
]
