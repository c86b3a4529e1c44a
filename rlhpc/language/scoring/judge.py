"""A language model that judges answers: it is asked for a grade of each, or which of two is better."""

from __future__ import annotations

import collections
import hashlib
import itertools
from collections.abc import Sequence
from typing import Any

import torch

from rlhpc.language.config import GrpoConfig
from rlhpc.language.data import PromptTokenizer, load_tokenizer
from rlhpc.language.data.builtin import resolve_model
from rlhpc.language.engines import Request, SamplingParams, make_rollout
from rlhpc.language.engines.ends import without_end
from rlhpc.language.rewards.base import Sample
from rlhpc.language.scoring.base import Rater
from rlhpc.language.scoring.group import ScoringGroup
from rlhpc.language.scoring.judge_section import section_of
from rlhpc.language.scoring.own_engine import engine_config, explained, key_of
from rlhpc.language.scoring.rubrics import Questions
from rlhpc.language.scoring.verdicts import better_in, both_say, pairs, score_in, shares
from rlhpc.runtime.errors import ConfigError

#: What is counted: questions that were not asked because they do not fit, or because there were enough; replies without a
#: readable verdict, and comparisons that depended on the order. What the engine was spared depends on what came before.
_COUNTS = ("too_long", "over_budget", "no_verdict", "inconsistent", "time/requests", "time/cache_hits")

Question = tuple[int, ...]


class Judge(Rater):
    """A language model with an engine of its own. What it says of the answers to a problem depends on these alone.

    Args:
        cfg: The configuration.
        device: Where the engine computes.
        group: Its name and model.
        options: Of a group of one's own; see `section_of`.
    """

    def __init__(self, cfg: GrpoConfig, device: torch.device, group: ScoringGroup, **options: Any) -> None:
        super().__init__(cfg, device, group)
        del options  # which `section_of` takes from the group
        self.section = section = section_of(cfg, group)
        path, self.compares = resolve_model(section.model), section.mode.lower() == "compare"
        key = key_of(group, "model.model_path")
        self.tokenizer = load_tokenizer(path, section.model.trust_remote_code, key=key)
        templated = bool(getattr(self.tokenizer, "chat_template", None))
        encoder = PromptTokenizer(self.tokenizer, section.max_prompt_tokens, "drop", templated, key=key)
        with explained(group):
            built = engine_config(section, max_new_tokens=section.max_new_tokens, temperature=section.temperature)
            engine = make_rollout(built, model_path=path, device=device, seed=cfg.runner.seed)
        self.engine = engine
        context = int(getattr(engine, "context", section.max_prompt_tokens + section.max_new_tokens))
        most = min(section.max_prompt_tokens, context - section.max_new_tokens)
        scale = None if self.compares else (float(section.scale[0]), float(section.scale[1]))
        self.questions = Questions(section.rubric, scale, encoder, cfg.runner.seed, most, section.reply_start)
        if self.questions.about(Sample("x", "x"), ["x"] * (1 + self.compares)) is None:
            engine.close()
            raise ConfigError(
                f"{key_of(group, 'max_prompt_tokens')}: not even a question about an empty answer fits into {most} tokens "
                f"(the engine's context is {context}, of which {key_of(group, 'max_new_tokens')}={section.max_new_tokens} are "
                "for the reply); raise it, take a shorter rubric, or a model with a longer context"
            )
        self.sampling = SamplingParams(max_new_tokens=section.max_new_tokens, temperature=section.temperature)
        self._numbers = itertools.count(1)
        self._said: collections.OrderedDict[Question, str] = collections.OrderedDict()
        self._counts = collections.Counter[str]()

    def rate(self, samples: Sequence[Sample]) -> list[float | None]:
        """See `Rater.rate`: None where the judge gave no verdict. Answers that are alike are asked about once."""
        if not samples:
            return []
        texts = list(dict.fromkeys(sample.response for sample in samples))
        found = self._compare(samples[0], texts) if self.compares else self._grade(samples[0], texts)
        values = dict(zip(texts, found, strict=True))
        if self.compares and len(texts) == 1 < len(samples):
            values[texts[0]] = 0.5  # all tie
        return [values[sample.response] for sample in samples]

    def _grade(self, problem: Sample, texts: Sequence[str]) -> list[float | None]:
        questions = [self._fitting(problem, [text]) for text in texts]
        asked = [question for question in questions if question is not None]
        self._counts["over_budget"] += max(0, len(asked) - self.section.max_requests)
        replies = self._ask(asked[: self.section.max_requests])
        low, high = self.section.scale
        values = {question: score_in(reply, low, high) for question, reply in replies.items()}
        self._counts["no_verdict"] += sum(value is None for value in values.values())
        return [None if question is None else values.get(question) for question in questions]

    def _compare(self, problem: Sample, texts: Sequence[str]) -> list[float | None]:
        chosen = list(pairs(len(texts)))
        budget = self.section.max_requests // 2
        self._counts["over_budget"] += 2 * max(0, len(chosen) - budget)
        questions: dict[tuple[int, int], tuple[Question, Question]] = {}
        for one, other in chosen[:budget]:
            both = [texts[one], texts[other]]
            there, back = self._fitting(problem, both), self._fitting(problem, both[::-1])
            if there is not None and back is not None:
                questions[one, other] = there, back
        replies = self._ask([question for both in questions.values() for question in both])
        said = {question: better_in(reply) for question, reply in replies.items()}
        self._counts["no_verdict"] += sum(verdict is None for verdict in said.values())
        won = {pair: both_say(said[there], said[back]) for pair, (there, back) in questions.items()}
        self._counts["inconsistent"] += sum(
            won[pair] is None and None not in (said[there], said[back]) for pair, (there, back) in questions.items()
        )
        return shares(len(texts), won)

    def _fitting(self, problem: Sample, responses: Sequence[str]) -> Question | None:
        question = self.questions.about(problem, responses)
        self._counts["too_long"] += question is None
        return question

    def _ask(self, questions: Sequence[Question]) -> dict[Question, str]:
        """Question → reply; empty where the judge did not come to an end."""
        found: dict[Question, str] = {}
        for question in questions:
            if question in self._said:
                self._said.move_to_end(question)
                found[question] = self._said[question]
        self._counts["time/cache_hits"] += len(found)
        new = {next(self._numbers): question for question in questions if question not in found}
        requests = [Request(number, question, self.sampling, self._seed(question)) for number, question in new.items()]
        self._counts["time/requests"] += len(requests)
        for completion in self.engine.generate(requests) if requests else ():
            ended = completion.finish_reason == "stop"
            text = self.tokenizer.decode(without_end(completion.token_ids, self.tokenizer), skip_special_tokens=True)
            found[new[completion.id]] = self._said[new[completion.id]] = (
                self.section.reply_start + text if ended else ""
            )
        while len(self._said) > self.section.cache_size:
            self._said.popitem(last=False)
        return found

    def _seed(self, question: Question) -> int:
        digest = hashlib.blake2b(repr((self.cfg.runner.seed, question)).encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") >> 1

    def counts(self) -> dict[str, float]:
        """See `Rater.counts`."""
        found = {name: float(self._counts[name]) for name in _COUNTS}
        self._counts.clear()
        return found

    def close(self) -> None:
        """See `Rater.close`."""
        self.engine.close()
