"""Scorers by name: built in, registered, an entry point of group `rlhpc.scorers`, or `module:Class`."""

from __future__ import annotations

import abc
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rlhpc.language.config.models import PretrainedConfig
from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.plugins import Registry

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from rlhpc.language.config.run import GrpoConfig
    from rlhpc.language.models.logprobs import RowReader
    from rlhpc.language.models.token_batch import TokenBatch
    from rlhpc.language.rewards.base import Sample

SCORERS: Registry[Callable[..., Any]] = Registry(
    "scorer", "groups[].scorer", "rlhpc.scorers",
    {
        "logprobs": "rlhpc.language.scoring.logprobs:LogProbs",
        "top_logprobs": "rlhpc.language.scoring.logprobs:TopLogProbs",
        "engine_logprobs": "rlhpc.language.scoring.logprobs:EngineLogProbs",
        "classifier": "rlhpc.language.scoring.reward_models:Classifier",
        "process": "rlhpc.language.scoring.reward_models:ProcessRewards",
        "judge": "rlhpc.language.scoring.llm_judge:Judge",
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


class Scorer(abc.ABC):
    """Makes a column; one object per rank, of the actor or of a group of its own.

    Args:
        cfg: The configuration.
        device: Where the rank computes.
        group: The part of the configuration about the group of its own; None on actor ranks.

    Attributes:
        packed: Whether micro-batches are cut for models that read samples in a row; otherwise padded ones have at most
            `max_tokens_per_micro_batch`.
    """

    packed: bool = False

    def __init__(self, cfg: GrpoConfig, device: torch.device, group: ScoringGroup | None = None) -> None:
        self.cfg, self.device, self.group = cfg, device, group

    @abc.abstractmethod
    def score(self, batch: TokenBatch) -> Tensor:
        """One value per token, `[T]` or `[T, k]`, float32; called without gradients, on micro-batches. All actor ranks
        call it equally often, some with a batch without tokens; ranks of a group of its own have nothing to do with one
        another."""

    def offload(self) -> None:  # noqa: B027 (most hold little)
        """Gives the accelerator's memory to another role (`actor.offload_in_rollout`)."""

    def reload(self) -> None:  # noqa: B027 (as above)
        """Takes back what `offload` moved away."""

    def close(self) -> None:  # noqa: B027 (as above)
        """Ends what it started, on ranks of a group of its own."""


class LogitReader:
    """Makes of the trained model's own logits what a loss wants beside log-probs and entropies: `TokenScores.read`. One object
    per actor rank. A subclass has `rows` or `read`.

    Args:
        cfg: The configuration.
        device: Where the rank computes.

    Attributes:
        packed: Whether micro-batches may be samples in a row, where the trained model reads such.
    """

    packed: bool = False

    def __init__(self, cfg: GrpoConfig, device: torch.device) -> None:
        self.cfg, self.device = cfg, device

    def rows(self, batch: TokenBatch) -> RowReader | None:
        """Says one number, with its gradient, of each row of logits that says what a token is that is trained on. A part of
        the rows is made at a time, so that no tensor has the size of all of them.

        Args:
            batch: The micro-batch, with all columns; maybe without tokens. `batch.predictors()[0]` says which tokens they are.

        Returns:
            None has `read` asked, which wants all logits.
        """
        return None

    def read(self, logits: Tensor, batch: TokenBatch) -> Tensor:
        """One value per token, `[T]` float32, with gradients.

        Args:
            logits: `[N, W, V]`, in the model's precision: those at `[n, t]` say what token t + 1 of sample n is; or, where
                `batch.packed`, `[1, T, V]`, of all samples in a row.
            batch: The micro-batch, with all columns; maybe without tokens. `batch.predictors()` says where the logits are,
                either way.

        Raises:
            NotImplementedError: There is neither `rows` nor `read`.
        """
        raise NotImplementedError(f"{type(self).__name__} has neither rows nor read")

    def offload(self) -> None:
        """Gives the accelerator's memory to another role (`actor.offload_in_rollout`)."""

    def reload(self) -> None:
        """Takes back what `offload` moved away."""


@dataclass(frozen=True)
class Column:
    """Something that an algorithm wants to know about each token.

    Attributes:
        name: In `TokenBatch.columns`.
        by: Who makes it: `rollout` (it comes with the samples: `LanguageAlgorithm.rollout_columns`), `actor` (log-probs by the
            weights as they are when the step's training begins), `value_head` (values by these, with
            `actor.model.value_head`), `reference` (log-probs by those from before training: by the group of that name if
            it has a place, or else by the actor), `critic` (values: that group), the name of another group that scores, or
            a `Scorer` of your own, which then runs on the actor ranks.
    """

    name: str
    by: str | type[Scorer]


class Rater(abc.ABC):
    """Rates answers; one object per rank of a group, which keeps nothing of what it has rated.

    Args:
        cfg: The configuration.
        device: Where the rank computes.
        group: The group's part of it: its model and so on.
    """

    def __init__(self, cfg: GrpoConfig, device: torch.device, group: ScoringGroup) -> None:
        self.cfg, self.device, self.group = cfg, device, group

    @abc.abstractmethod
    def rate(self, samples: Sequence[Sample]) -> Sequence[float | None]:
        """Rates the answers to one problem.

        Args:
            samples: All of them, always in the same order.

        Returns:
            One number for each, in that order; None where it could not be rated: that one gets `reward.failed`.
        """

    def counts(self) -> dict[str, float]:
        """What is worth counting since the last call. The sum over the ranks becomes the metric `<group>/<name>`, or
        `time/<group>_<name>` for a name that begins with `time/`: those need not be the same in a run that was interrupted."""
        return {}

    def close(self) -> None:  # noqa: B027 (most start nothing)
        """Ends what it started."""


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
