"""Sections of scoring groups: reference, teacher, reward model, judge, and user-defined groups.

The docstring under a field is its entry in the reference.
"""

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
    """The reference group: the policy to which `algorithm.kl_coef` constrains the actor. If the placement has no group
    `reference`, the actor's ranks compute its log-probs."""

    update_interval: Annotated[int, INTERVAL_OR_0] = 0
    """Number of steps between updates of the reference to the actor's current policy; 0 keeps the initial policy. It requires
    a separately placed group `reference`."""


@dataclass
class TaskTeacherConfig:
    """A further teacher, from which the model learns some tasks."""

    name: str = MISSING
    """Name of the teacher in metrics, such as `train/teacher_divergence/<name>`."""
    tasks: list[str] = field(default_factory=list)
    """Tasks or data sources of this teacher: values of the field `data.train.level_key` of rows, or the levels that
    procedural sources give their problems, such as the names of `tasks` of reasoning_gym."""
    model: FrozenModelConfig = field(default_factory=FrozenModelConfig)
    """The model; it must have the actor's vocabulary."""


@dataclass
class TeacherConfig(ServingConfig, ScoringConfig):
    """The teacher: the model from which `algorithm.name: distillation` learns. If the placement has no group `teacher`, each
    actor rank also holds the teacher and uses `actor.max_tokens_per_micro_batch` for it."""

    model: FrozenModelConfig = field(default_factory=FrozenModelConfig)
    """The teacher model; it must have the actor's vocabulary."""
    by_task: list[TaskTeacherConfig] = field(default_factory=list)
    """Further teachers by task or data source. The responses to a prompt of one of their `tasks` learn from that teacher, all
    others from `teacher.model`. All teachers are loaded on each rank that has the teacher; not with
    `teacher.rollout_backend`."""
    rollout_backend: Annotated[str | None, FREE, Choices("vllm")] = None
    """`vllm`: an engine on separate ranks computes the log-probs, and the keys of engines apply. Null: the model runs in
    transformers."""


@dataclass
class RewardModelConfig(PretrainedConfig, ScoringConfig):
    """The reward model of the group `reward`: a Hugging Face sequence classifier with one label, and its tokenizer."""


@dataclass
class JudgeConfig(GenerationConfig):
    """The judge group: a language model that rates answers. An answer without a parsable verdict gets `reward.failed`."""

    model: FrozenModelConfig = field(default_factory=FrozenModelConfig)
    """The judge's model; its chat template is used if it has one."""
    max_new_tokens: int = 128
    """Maximum number of tokens of a reply; a truncated reply has no verdict."""
    mode: Annotated[str, Choices("grade", "compare")] = "grade"
    """`grade`: the judge gives each answer a number. `compare`: it decides which of two answers to a problem is better, in
    both orders; an answer's value is its share of wins, and a tie counts half."""
    rubric: str | None = None
    """The question to the judge: a text with `{response}`, and optionally `{prompt}` and `{answer}` (the reference); the form
    of the verdict is appended. Null is a question about correctness."""
    reply_start: str = ""
    """Beginning of each reply, such as `Score:` or `Better:`, which the model continues. It helps small models to keep to the
    form of a verdict."""
    scale: Annotated[list[float], ANY] = field(default_factory=lambda: [1.0, 10.0])
    """For `grade`: lowest and highest grade; an answer's value is 0 at the lowest and 1 at the highest grade."""
    temperature: Annotated[float, NOT_NEGATIVE] = 0.0
    """Temperature of the replies; 0 is greedy."""
    max_prompt_tokens: Annotated[int, COUNT] = 2048
    """Maximum number of tokens of a question. Longer questions are not asked, so that a too long answer is not rated."""
    max_requests: Annotated[int, COUNT] = 64
    """Maximum number of questions about the answers to one problem; a comparison counts as two."""
    cache_size: Annotated[int, NOT_NEGATIVE, FREE] = 10000
    """Number of replies that a rank caches for repeated questions; 0 for none."""


@dataclass
class ScoringGroupConfig(ScoringConfig):
    """A user-defined group that scores the model's responses."""

    name: str = MISSING
    """Name of the group in `cluster.component_placement` and in reward terms."""
    scorer: Annotated[str, Registered("rlhpc.language.scoring.registry:SCORERS")] = MISSING
    """`logprobs`, `classifier`, `process`, `judge`, a registered name, or `module:Class`: a subclass of `rlhpc.Scorer`
    (values per token, for `reward.process_terms` or an algorithm that uses them) or of `rlhpc.Rater` (a reward term)."""
    model: FrozenModelConfig = field(default_factory=FrozenModelConfig)
    """The scorer's model, if it has one."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Options of the scorer. A `judge` accepts the keys of section `judge` except `model`."""


@dataclass
class ProcessTermConfig:
    """One term of the process reward."""

    name: str = MISSING
    """Name of a group that computes a value per token, such as one with the scorer `process`."""
    weight: Annotated[float, ANY] = 1.0
    """Weight of the term in the sum."""


@dataclass
class GrpoRewardConfig(RewardConfig):
    """Rewards of responses: the weighted sum of the terms."""

    process_terms: list[ProcessTermConfig] = field(default_factory=list)
    """Process reward terms, which groups compute at the end of each step of a response. The estimators `gae` and `raw` credit
    each reward to the tokens before it; the others compare whole responses by the sums."""
    max_failed_steps: Annotated[int, NOT_NEGATIVE] = 0
    """Maximum number of consecutive steps in which no sample could be scored; one more such step ends the run."""
    model: RewardModelConfig = field(default_factory=RewardModelConfig)
    """The reward model of the group `reward`, used by the term of that name."""
