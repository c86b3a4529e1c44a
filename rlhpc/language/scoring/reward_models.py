"""Reward models: Hugging Face sequence classifiers with one label that score answers, or the steps of an answer."""

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
    """Reward model that rates an answer by a sequence classifier's value at the answer's last token. The model's tokenizer and
    chat template may differ from the policy's.
    """

    def __init__(self, cfg: GrpoConfig, device: torch.device, group: ScoringGroup) -> None:
        super().__init__(cfg, device, group)
        key = require_classifier(group)
        dtype = compute_dtype(group.model, device, group.model_section)
        model = load_scalar_model(group.model, dtype=dtype, key=key)
        self.model = model.eval().requires_grad_(False).to(device)
        self.tokenizer = load_tokenizer(str(group.model.model_path), group.model.trust_remote_code)
        pad_id, end_id = self.tokenizer.pad_token_id, self.tokenizer.eos_token_id
        self.pad, self.end = int(pad_id if pad_id is not None else end_id or 0), end_id
        self.encoder = PromptTokenizer(
            self.tokenizer, group.max_tokens, "drop", bool(getattr(self.tokenizer, "chat_template", None)), key=key
        )

    def rate(self, samples: Sequence[Sample]) -> list[float | None]:
        """Implements `Rater.rate`. An answer with more tokens than a micro-batch may have gets None."""
        encoded_samples = [self.encode(sample) for sample in samples]
        indices = [
            sample_index for sample_index, ids in enumerate(encoded_samples) if 0 < len(ids) <= self.group.max_tokens
        ]
        ratings: list[float | None] = [None] * len(samples)
        if not indices:
            return ratings
        ids = [encoded_samples[sample_index] for sample_index in indices]
        batch = TokenBatch.from_sequences(ids, [[True] * len(sample_ids) for sample_ids in ids], pad_id=self.pad)
        for indices_in_batch in micro_batches(batch.lengths, self.group.max_tokens):
            micro_batch = batch.select(indices_in_batch).to(self.device)
            with torch.no_grad():
                predictions = last_values(token_values(self.model, micro_batch), micro_batch)
            for batch_index, predicted_rating in zip(indices_in_batch.tolist(), predictions.tolist(), strict=True):
                ratings[indices[batch_index]] = predicted_rating
        return ratings

    def encode(self, sample: Sample) -> list[int]:
        """Tokenizes the conversation, the answer and, if the answer is finished, the end token."""
        messages = sample.messages or ({"role": "user", "content": sample.prompt},)
        is_bare = not self.encoder.chat_template or messages[0]["role"] == "raw"
        prompt, prompt_text = (
            self.encoder.encode_messages(messages, sample.tools),
            self.encoder.text(messages, sample.tools),
        )
        joined_ids = self.tokenizer(prompt_text + sample.response, add_special_tokens=is_bare)["input_ids"]
        if is_bare and joined_ids and joined_ids[-1] == self.end and len(joined_ids) > 1:
            joined_ids = joined_ids[:-1]
        if joined_ids[: len(prompt)] != prompt:  # the answer changes the prompt's tokens
            joined_ids = [*prompt, *self.tokenizer(sample.response, add_special_tokens=False)["input_ids"]]
        lacks_end = sample.finished and self.end is not None and joined_ids[-1:] != [self.end]
        return [*joined_ids, *([int(self.end)] if lacks_end else [])]


def require_classifier(group: ScoringGroup) -> str:
    """Checks that a group's model is a sequence classifier; returns the configuration key of the model.

    Raises:
        ConfigError: The model has no classification head.
    """
    key = f"{group.model_section}.model_path"
    if str(group.model.model_path).startswith("builtin:") or not is_classifier(group.model, key):
        raise ConfigError(
            f"{key}={group.model.model_path}: it is no sequence classifier, so its values would be those of a new head; "
            "train one with runner.task_type=reward_model, and name what that run exports"
        )
    return key


class ProcessRewards(Scorer):
    """Scorer by a process reward model: the model's value at the last token of each step, 0 at all other tokens. A term of
    `reward.process_terms`.

    The model reads the policy's tokens unchanged, so it must have the policy's vocabulary.

    Args:
        separator: Text that ends a step. The text after the last separator is also a step if it is not only white space.
        sigmoid: Whether to apply a sigmoid to the values, as for a model that was trained to classify steps as right.
        change: Whether a step's reward is the change of the value: the step's value minus the value of the previous step or,
            for the first step, of the prompt. The sum of the rewards does not depend on the number of steps, so a model that
            rates answers does not reward many steps (potential-based shaping: Ng, Harada and Russell 1999).

    Raises:
        ConfigError: The separator is empty.
    """

    def __init__(
        self,
        cfg: GrpoConfig,
        device: torch.device,
        group: ScoringGroup,
        separator: str = "\n",
        sigmoid: bool = False,
        change: bool = False,
    ) -> None:
        super().__init__(cfg, device, group)
        if not separator:
            raise ConfigError(f"groups[{group.name}].kwargs.separator is empty; a step ends with it")
        self.separator, self.sigmoid, self.change = separator, sigmoid, change
        key, dtype = require_classifier(group), compute_dtype(group.model, device, group.model_section)
        model = load_scalar_model(group.model, dtype=dtype, key=key)
        self.model = model.eval().requires_grad_(False).to(device)
        self._tokenizer = load_tokenizer(str(group.model.model_path), group.model.trust_remote_code)
        self._pad = self.model.config.pad_token_id
        self._token_texts: dict[int, str] = {}

    def score(self, batch: TokenBatch) -> torch.Tensor:
        """Implements `Scorer.score`."""
        predictions = token_values(self.model, batch)
        if self.sigmoid:
            predictions = predictions.sigmoid()
        rewards = torch.zeros_like(predictions)
        step_ends, previous_ends = self.ends(batch)
        if len(step_ends):
            rewards[step_ends] = (
                predictions[step_ends] - predictions[previous_ends] if self.change else predictions[step_ends]
            )
        return rewards

    def ends(self, batch: TokenBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the positions of each step's last token and of the last token before the step, `[S]` each."""
        ids, mask, sequence_bounds = batch.ids.tolist(), batch.mask.tolist(), batch.cu_seqlens.tolist()
        step_ends, previous_ends = list[int](), list[int]()
        for sequence_start, sequence_end in itertools.pairwise(sequence_bounds):
            for turn_start, turn_end in _turns(mask, sequence_start, sequence_end):
                pending_text, last_end = "", max(sequence_start, turn_start - 1)
                # Padding is ignored, even if the padding token is the end token.
                written_positions = [
                    token_position for token_position in range(turn_start, turn_end) if ids[token_position] != self._pad
                ]
                for token_position in written_positions:
                    pending_text += self._find_token_text(ids[token_position])
                    step_text, separator, remainder = pending_text.rpartition(self.separator)
                    is_last = token_position == written_positions[-1]
                    if not separator and not is_last:
                        continue
                    if (step_text + remainder if is_last else step_text).replace(self.separator, "").strip():
                        step_ends.append(token_position)
                        previous_ends.append(last_end)
                        last_end = token_position
                    pending_text = remainder
        return torch.tensor(step_ends, dtype=torch.long), torch.tensor(previous_ends, dtype=torch.long)

    def _find_token_text(self, token: int) -> str:
        if token not in self._token_texts:
            self._token_texts[token] = str(self._tokenizer.decode([token], skip_special_tokens=True))
        return self._token_texts[token]

    def offload(self) -> None:
        """Implements `Scorer.offload`."""
        self.model.to("cpu")

    def reload(self) -> None:
        """Implements `Scorer.reload`."""
        self.model.to(self.device)


def _turns(mask: list[bool], search_start: int, search_end: int) -> Iterator[tuple[int, int]]:
    """Yields start and exclusive end of each run of consecutive tokens that the model wrote."""
    turn_start = None
    for token_position in range(search_start, search_end):
        if mask[token_position] and turn_start is None:
            turn_start = token_position
        elif not mask[token_position] and turn_start is not None:
            yield turn_start, token_position
            turn_start = None
    if turn_start is not None:
        yield turn_start, search_end
