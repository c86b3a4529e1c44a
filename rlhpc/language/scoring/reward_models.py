"""A reward model: a Hugging Face sequence classifier of one label, which reads a conversation with its answer."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import torch

from rlhpc.language.config.run import GrpoConfig
from rlhpc.language.data import PromptTokenizer, load_tokenizer
from rlhpc.language.models.loading import compute_dtype
from rlhpc.language.models.micro_batching import micro_batches
from rlhpc.language.models.token_batch import TokenBatch
from rlhpc.language.models.value_head import is_classifier, last_values, load_scalar_model, token_values
from rlhpc.language.rewards.base import Sample
from rlhpc.language.scoring.registry import Rater, Scorer, ScoringGroup
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


class ProcessRewards(Scorer):
    """The model's value once it has read the last token of a step, on that token, and 0 on all others: a term of
    `reward.process_terms`.

    It reads the policy's tokens as they are, so it must have the policy's vocabulary.

    Args:
        separator: What ends a step. What comes after the last one is a step, too, if there is more than white space.
        sigmoid: Whether a value is put between 0 and 1, as for a model that was trained to say whether a step is right.
        change: Whether a step is worth what it changed: its value less that of the step before, the first one's less that of
            what the model read before it wrote. These add up to the value of the whole, however many steps there are, so a
            model that values whole answers may be used without a reward for their number (potential-based shaping: Ng,
            Harada and Russell 1999).
    """

    def __init__(
        self, cfg: GrpoConfig, device: torch.device, group: ScoringGroup, separator: str = "\n", sigmoid: bool = False,
        change: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(cfg, device, group)
        if not separator:
            raise ConfigError(f"groups[{group.name}].kwargs.separator is empty; a step ends with it")
        self.separator, self.sigmoid, self.change = separator, sigmoid, change
        key, dtype = require_classifier(group), compute_dtype(group.model, device, group.model_section)
        model = load_scalar_model(group.model, dtype=dtype, key=key)
        self.model = model.eval().requires_grad_(False).to(device)
        self._tokenizer = load_tokenizer(str(group.model.model_path), group.model.trust_remote_code)
        self._pad = self.model.config.pad_token_id
        self._pieces: dict[int, str] = {}

    def score(self, batch: TokenBatch) -> torch.Tensor:
        """See `Scorer.score`."""
        values = token_values(self.model, batch)
        if self.sigmoid:
            values = values.sigmoid()
        found = torch.zeros_like(values)
        ends, before = self.ends(batch)
        if len(ends):
            found[ends] = values[ends] - values[before] if self.change else values[ends]
        return found

    def ends(self, batch: TokenBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """The last token of each step, and the one before the step's first that the model wrote or read, `[S]` each, as places
        in `[T]`."""
        ids, mask, cuts = batch.ids.tolist(), batch.mask.tolist(), batch.cu_seqlens.tolist()
        ends, before = list[int](), list[int]()
        for start, stop in itertools.pairwise(cuts):
            for first, behind in _turns(mask, start, stop):
                text, last = "", max(start, first - 1)
                # As for whole answers, padding says nothing, where it is made of the end token.
                written = [place for place in range(first, behind) if ids[place] != self._pad]
                for place in written:
                    text += self._piece(ids[place])
                    done, found, rest = text.rpartition(self.separator)
                    at_end = place == written[-1]
                    if not found and not at_end:
                        continue
                    if (done + rest if at_end else done).replace(self.separator, "").strip():
                        ends.append(place)
                        before.append(last)
                        last = place
                    text = rest
        return torch.tensor(ends, dtype=torch.long), torch.tensor(before, dtype=torch.long)

    def _piece(self, token: int) -> str:
        if token not in self._pieces:
            self._pieces[token] = str(self._tokenizer.decode([token], skip_special_tokens=True))
        return self._pieces[token]

    def offload(self) -> None:
        """See `Scorer.offload`."""
        self.model.to("cpu")

    def reload(self) -> None:
        """See `Scorer.reload`."""
        self.model.to(self.device)


def _turns(mask: list[bool], start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Where the model wrote, from the first token of each turn to the one behind its last."""
    first = None
    for place in range(start, stop):
        if mask[place] and first is None:
            first = place
        elif not mask[place] and first is not None:
            yield first, place
            first = None
    if first is not None:
        yield first, stop
