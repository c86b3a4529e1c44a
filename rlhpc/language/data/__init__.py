"""Training and evaluation data of language models: prompts, demonstrations, preferences and their tokenization."""

from rlhpc.language.data.prompts import Prompt, PromptDataset, PromptSampler
from rlhpc.language.data.registry import SOURCES, make_dataset, register_source
from rlhpc.language.data.tokenizer import PromptTokenizer, load_tokenizer

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
