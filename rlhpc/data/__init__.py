"""Prompts and demonstrations for language models."""

from rlhpc.data.prompts import Prompt, PromptDataset

__all__ = ["Prompt", "PromptDataset"]
