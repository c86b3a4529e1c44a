"""A reward model: a Hugging Face sequence classifier of one label, which reads a conversation with its answer."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rlhpc.language.config import GrpoConfig
from rlhpc.language.data import PromptTokenizer, load_tokenizer
from rlhpc.language.rewards.base import Sample
from rlhpc.language.scoring.base import Rater
from rlhpc.language.scoring.group import ScoringGroup
from rlhpc.language.tokens.batches import TokenBatch
from rlhpc.language.tokens.cutting import micro_batches
from rlhpc.language.tokens.model import compute_dtype
from rlhpc.language.tokens.scalar import is_classifier, last_values, load_scalar_model, token_values
from rlhpc.runtime.errors import ConfigError


class Classifier(Rater):
    """The model's value at an answer's last token. It reads text by its own tokenizer and chat template, so it need not have
    the policy's."""

    def __init__(self, cfg: GrpoConfig, device: torch.device, group: ScoringGroup) -> None:
        super().__init__(cfg, device, group)
        key = require_classifier(group)
        dtype = compute_dtype(group.model, device, group.model_section)
        model = load_scalar_model(group.model, dtype=dtype, key=key)
        self.model = model.eval().requires_grad_(False).to(device)
        self.tokenizer = load_tokenizer(str(group.model.model_path), group.model.trust_remote_code)
        pad, end = self.tokenizer.pad_token_id, self.tokenizer.eos_token_id
        self.pad, self.end = int(pad if pad is not None else end or 0), end
        self.encoder = PromptTokenizer(
            self.tokenizer, group.max_tokens, "drop", bool(getattr(self.tokenizer, "chat_template", None)), key=key
        )

    def rate(self, samples: Sequence[Sample]) -> list[float | None]:
        """See `Rater.rate`: None for one that is too long to be read at once."""
        encoded = [self.encode(sample) for sample in samples]
        kept = [number for number, ids in enumerate(encoded) if 0 < len(ids) <= self.group.max_tokens]
        found: list[float | None] = [None] * len(samples)
        if not kept:
            return found
        ids = [encoded[number] for number in kept]
        whole = TokenBatch.of(ids, [[True] * len(one) for one in ids], pad_id=self.pad)
        for places in micro_batches(whole.lengths, self.group.max_tokens):
            part = whole.select(places).to(self.device)
            with torch.no_grad():
                values = last_values(token_values(self.model, part), part)
            for place, value in zip(places.tolist(), values.tolist(), strict=True):
                found[kept[place]] = value
        return found

    def encode(self, sample: Sample) -> list[int]:
        """Token ids of the conversation, the answer and, if it ended by itself, the end token."""
        messages = sample.messages or ({"role": "user", "content": sample.prompt},)
        bare = not self.encoder.chat_template or messages[0]["role"] == "raw"
        prompt, text = self.encoder.encode_messages(messages, sample.tools), self.encoder.text(messages, sample.tools)
        joined = self.tokenizer(text + sample.response, add_special_tokens=bare)["input_ids"]
        if bare and joined and joined[-1] == self.end and len(joined) > 1:
            joined = joined[:-1]
        if joined[: len(prompt)] != prompt:  # some tokenizers put a space before any text
            joined = [*prompt, *self.tokenizer(sample.response, add_special_tokens=False)["input_ids"]]
        ends = sample.finished and self.end is not None and joined[-1:] != [self.end]
        return [*joined, *([int(self.end)] if ends else [])]


def require_classifier(group: ScoringGroup) -> str:
    """The key of the group's model.

    Raises:
        ConfigError: That model has no head of its own.
    """
    key = f"{group.model_section}.model_path"
    if str(group.model.model_path).startswith("builtin:") or not is_classifier(group.model, key):
        raise ConfigError(
            f"{key}={group.model.model_path}: it is no sequence classifier, so its values would be those of a new head; "
            "train one with runner.task_type=reward_model, and name what that run exports"
        )
    return key
