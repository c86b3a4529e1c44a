"""A process reward model: what a Hugging Face sequence classifier says at the end of each step of an answer."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch

from rlhpc.language.algorithm.base import Scorer
from rlhpc.language.config import GrpoConfig
from rlhpc.language.data import load_tokenizer
from rlhpc.language.scoring.classifier import require_classifier
from rlhpc.language.scoring.group import ScoringGroup
from rlhpc.language.tokens.batches import TokenBatch
from rlhpc.language.tokens.model import compute_dtype
from rlhpc.language.tokens.scalar import load_scalar_model, token_values
from rlhpc.runtime.errors import ConfigError


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
