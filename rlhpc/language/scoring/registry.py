"""Scorers by name: built in, registered, an entry point of group `rlhpc.scorers`, or `module:Class`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.plugins import Registry

if TYPE_CHECKING:
    import torch

    from rlhpc.language.config import GrpoConfig
    from rlhpc.language.scoring.group import ScoringGroup

SCORERS: Registry[Callable[..., Any]] = Registry(
    "scorer", "groups[].scorer", "rlhpc.scorers",
    {
        "logprobs": "rlhpc.language.scoring.logprobs:LogProbs",
        "top_logprobs": "rlhpc.language.scoring.logprobs:TopLogProbs",
        "engine_logprobs": "rlhpc.language.scoring.engine_logprobs:EngineLogProbs",
        "classifier": "rlhpc.language.scoring.classifier:Classifier",
        "process": "rlhpc.language.scoring.process:ProcessRewards",
        "judge": "rlhpc.language.scoring.judge:Judge",
    },
)  # fmt: skip
register_scorer = SCORERS.register
#: Those built in that rate answers; the others say something of tokens.
_RATERS = ("classifier", "judge")


def rates(scorer: str) -> bool:
    """Whether a scorer is a `Rater`: it rates answers, rather than tokens. Those that are built in are not imported.

    Raises:
        ConfigError: It is unknown, or neither a `Scorer` nor a `Rater`.
    """
    if scorer.lower() in SCORERS.built_in:
        return scorer.lower() in _RATERS
    from rlhpc.language.algorithm.base import Scorer
    from rlhpc.language.scoring.base import Rater

    found = SCORERS.find(scorer)
    if not (isinstance(found, type) and issubclass(found, (Scorer, Rater))):
        raise ConfigError(
            f"{SCORERS.key} is {scorer!r}, which is no subclass of rlhpc.Scorer (values of tokens) or of rlhpc.Rater "
            "(a term of the reward)"
        )
    return issubclass(found, Rater)


def check_scorer(group: ScoringGroup) -> None:
    """Whether the scorer of a group of one's own takes `groups[].kwargs`.

    Raises:
        ConfigError: It does not; names what it takes.
    """
    if group.scorer.lower() in SCORERS.built_in and not group.kwargs:
        return
    factory = SCORERS.find(group.scorer)
    try:
        inspect.signature(factory).bind(None, None, group, **group.kwargs)
    except TypeError as error:
        takes = [p.name for p in inspect.signature(factory).parameters.values()][3:]
        raise ConfigError(
            f"groups[{group.name}].kwargs: {error}; {group.scorer!r} takes (cfg, device, group) and: "
            f"{', '.join(takes) or 'nothing else'}"
        ) from None


def make_scorer(cfg: GrpoConfig, device: torch.device, group: ScoringGroup) -> Any:
    """A group's `Scorer` or `Rater`, on one of its ranks.

    Raises:
        ConfigError: Its model cannot be loaded, or does not fit.
    """
    return SCORERS.find(group.scorer)(cfg, device, group, **group.kwargs)
