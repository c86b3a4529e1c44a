"""Sections of the configuration about the groups beside actor and rollout: critic, reference, teacher, reward model, and
groups of one's own. The docstring under a field is its entry in the reference."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from omegaconf import II, MISSING

from rlhpc.config.ranges import COUNT, NOT_NEGATIVE, Range
from rlhpc.language.model_config import FrozenModelConfig, LanguageActorConfig, LanguageModelConfig, PretrainedConfig


@dataclass
class CriticModelConfig(LanguageModelConfig):
    """The value model: a language model's layers, with a head of one number for each token."""

    model_path: str | None = II("actor.model.model_path")
    """A Hugging Face folder or hub name, or a built-in model; by default that of the actor. A sequence classifier of one
    label, such as an exported reward model, brings its head along; of any other model the head is new."""


@dataclass
class CriticConfig(LanguageActorConfig):
    """The critic group, for `algorithm.adv_type: gae`: the values of tokens, trained beside the actor."""

    model: CriticModelConfig = field(default_factory=CriticModelConfig)
    """The value model."""
    global_batch_size: int = II("actor.global_batch_size")
    """Responses of one optimizer step, over all ranks."""
    update_epochs: int = II("algorithm.update_epochs")
    """Passes over each rollout."""
    warmup_steps: int = 0
    """Steps at the start of the run in which the critic alone is trained."""


@dataclass
class ScoringConfig:
    """How a group computes that scores what the model writes."""

    max_tokens_per_micro_batch: int = 16384
    """Most tokens, including padding, in one forward pass on a rank."""


@dataclass
class ReferenceConfig(ScoringConfig):
    """The reference group: the policy that `algorithm.kl_coef` keeps the actor close to. Without a place of its own, the
    actor scores for it."""


@dataclass
class TeacherConfig(ScoringConfig):
    """The teacher group: the model that a distillation learns from."""

    model: FrozenModelConfig = field(default_factory=FrozenModelConfig)
    """The model; it must have the actor's vocabulary."""


@dataclass
class RewardModelConfig(PretrainedConfig, ScoringConfig):
    """The reward model of the group `reward`: a Hugging Face sequence classifier of one label, with its tokenizer."""


@dataclass
class ScoringGroupConfig(ScoringConfig):
    """A further group that scores what the model writes."""

    name: str = MISSING
    """Its name in `cluster.component_placement`, and as a term of the reward."""
    scorer: str = MISSING
    """`logprobs`, `classifier`, a registered name, or `module:Class`: a subclass of `rlhpc.Scorer` (values of tokens, which
    an algorithm asks for) or of `rlhpc.Rater` (a term of the reward)."""
    model: FrozenModelConfig = field(default_factory=FrozenModelConfig)
    """The model, if it has one."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Options of the scorer."""


_SCORING: dict[str, Range] = {"max_tokens_per_micro_batch": COUNT}
#: What each number of these sections may be.
GROUP_RANGES: dict[str, Range] = {
    "critic.global_batch_size": COUNT,
    "critic.update_epochs": COUNT,
    "critic.warmup_steps": NOT_NEGATIVE,
    "critic.optim.lr_warmup_steps": NOT_NEGATIVE,
    "critic.max_tokens_per_micro_batch": COUNT,
    **{
        f"{section}.{name}": allowed
        for section in ("reference", "teacher", "reward.model", "groups[]")
        for name, allowed in _SCORING.items()
    },
}
