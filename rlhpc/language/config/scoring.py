"""Sections of the configuration of the auxiliary groups: critic, reference, teacher, reward model,
judge, and groups of one's own. The docstring under a field is its entry in the reference."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any

from omegaconf import MISSING

from rlhpc.config.constraints import ANY, COUNT, FREE, INTERVAL_OR_0, NOT_NEGATIVE, Choices, Registered
from rlhpc.language.config.engines import GenerationConfig, ServingConfig
from rlhpc.language.config.models import FrozenModelConfig, PretrainedConfig
from rlhpc.language.config.rewards import RewardConfig


@dataclass
class ScoringConfig:
    """Computation of a group that scores the model's tokens."""

    max_tokens_per_micro_batch: Annotated[int, COUNT, FREE] = 16384
    """Maximum number of tokens, including padding, in one forward pass on a rank."""


@dataclass
class ReferenceConfig(ScoringConfig):
    """The reference group: the policy that `algorithm.kl_coef` keeps the actor close to. Without a place of its own, the
    actor scores for it."""

    update_interval: Annotated[int, INTERVAL_OR_0] = 0
    """Steps after which the reference becomes the actor's present policy, again and again; 0 keeps the one from before
    training. It needs a group `reference` with a place of its own."""


@dataclass
class TeacherConfig(ServingConfig, ScoringConfig):
    """The teacher: the model that `algorithm.name: distillation` learns from. Without a place of its own, it is on each actor
    rank, beside the model there, and takes `actor.max_tokens_per_micro_batch`."""

    model: FrozenModelConfig = field(default_factory=FrozenModelConfig)
    """The model; it must have the actor's vocabulary."""
    rollout_backend: Annotated[str | None, FREE] = None
    """`vllm`: an engine computes, on ranks of the teacher's own, and the keys about engines hold. Null: the model as it is in
    transformers."""


@dataclass
class RewardModelConfig(PretrainedConfig, ScoringConfig):
    """The reward model of the group `reward`: a Hugging Face sequence classifier of one label, with its tokenizer."""


@dataclass
class JudgeConfig(GenerationConfig):
    """The judge group: a language model that is asked what an answer is worth. An answer without a readable verdict gets
    `reward.failed`."""

    model: FrozenModelConfig = field(default_factory=FrozenModelConfig)
    """The model; if it has a chat template, it is asked in its form."""
    max_new_tokens: int = 128
    """Maximum number of tokens of a reply; a truncated one has no verdict."""
    mode: Annotated[str, Choices("grade", "compare")] = "grade"
    """`grade`: a number for each answer. `compare`: which of two answers to a problem is better, asked in both orders; an
    answer's value is its share of wins, a tie counting half."""
    rubric: str | None = None
    """The question: a text with `{response}`, and `{prompt}` and `{answer}` (the reference) where they are wanted; the form of
    the verdict is added at its end. Null is a question about correctness."""
    reply_start: str = ""
    """Beginning of each reply, such as `Score:` or `Better:`, which the model continues. For small models, which miss
    the form of a verdict otherwise."""
    scale: Annotated[list[float], ANY] = field(default_factory=lambda: [1.0, 10.0])
    """`grade`: lowest and highest grade; the value of an answer is 0 at the lowest and 1 at the highest."""
    temperature: Annotated[float, NOT_NEGATIVE] = 0.0
    """Temperature of the replies; 0 is greedy."""
    max_prompt_tokens: Annotated[int, COUNT] = 2048
    """Maximum number of tokens of a question. Longer ones are not asked: an answer that is too long is not rated."""
    max_requests: Annotated[int, COUNT] = 64
    """Maximum number of questions about the answers to one problem; a comparison is two. Further ones are not asked."""
    cache_size: Annotated[int, NOT_NEGATIVE, FREE] = 10000
    """Replies that a rank keeps, for a question that it has been asked before; 0 for none."""


@dataclass
class ScoringGroupConfig(ScoringConfig):
    """A further group that scores what the model writes."""

    name: str = MISSING
    """Its name in `cluster.component_placement`, and as a term of the reward."""
    scorer: Annotated[str, Registered("rlhpc.language.scoring.registry:SCORERS")] = MISSING
    """`logprobs`, `classifier`, `process`, `judge`, a registered name, or `module:Class`: a subclass of `rlhpc.Scorer`
    (values of tokens, for `reward.process_terms` or an algorithm that asks for them) or of `rlhpc.Rater` (a term of the
    reward)."""
    model: FrozenModelConfig = field(default_factory=FrozenModelConfig)
    """The model, if it has one."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Options of the scorer. A `judge` takes the keys of section `judge`, but for the model."""


@dataclass
class ProcessTermConfig:
    """One term of the reward that is given on the way."""

    name: str = MISSING
    """The group that says what each token is worth, such as one with the scorer `process`."""
    weight: Annotated[float, ANY] = 1.0
    """Weight of the term in the sum."""


@dataclass
class GrpoRewardConfig(RewardConfig):
    """Rewards of responses: the weighted sum of the terms."""

    process_terms: list[ProcessTermConfig] = field(default_factory=list)
    """Terms that are given on the way, at the end of each step of a response, by groups. The estimators `gae` and `raw` credit
    each to the tokens before it; the others compare whole responses, and add them up."""
    max_failed_steps: Annotated[int, NOT_NEGATIVE] = 0
    """Steps in a row in which no sample could be judged that a run survives; the next such step ends it."""
    model: RewardModelConfig = field(default_factory=RewardModelConfig)
    """The reward model of the group `reward`, which the term of that name asks."""
