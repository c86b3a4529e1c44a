"""What is known about a group that scores."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rlhpc.language.model_config import PretrainedConfig

#: Of groups that have one, the section with the model; a reference's is the actor's.
_SECTIONS = {"reference": "actor", "teacher": "teacher", "reward": "reward", "judge": "judge"}


@dataclass(frozen=True)
class ScoringGroup:
    """A group that scores.

    Attributes:
        name: In `cluster.component_placement`.
        scorer: What runs on its ranks: a name of `rlhpc.language.scoring.registry.SCORERS`.
        model: Its model, if it has one.
        max_tokens: Most tokens in one forward pass on a rank, padding included.
        kwargs: Options of the scorer.
    """

    name: str
    scorer: str
    model: PretrainedConfig
    max_tokens: int
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    @property
    def model_section(self) -> str:
        """What messages call the section of its model."""
        return f"{_SECTIONS.get(self.name, f'groups[{self.name}]')}.model"
