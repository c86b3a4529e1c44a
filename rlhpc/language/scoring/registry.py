"""Registry of scorers: built-in names, registered names, entry points of group `rlhpc.scorers`, and `module:Class`."""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rlhpc.config.options import check_options
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
        "routed_logprobs": "rlhpc.language.scoring.logprobs:RoutedLogProbs",
        "engine_logprobs": "rlhpc.language.scoring.logprobs:EngineLogProbs",
        "classifier": "rlhpc.language.scoring.reward_models:Classifier",
        "process": "rlhpc.language.scoring.reward_models:ProcessRewards",
        "judge": "rlhpc.language.scoring.llm_judge:Judge",
    },
)  # fmt: skip
register_scorer = SCORERS.register
#: Built-in scorers that rate answers; all other built-in scorers score tokens.
_RATERS = ("classifier", "judge")


def rates(scorer: str) -> bool:
    """Returns whether a scorer rates answers (`Rater`) rather than scoring tokens (`Scorer`). Does not import built-in
    scorers.

    Raises:
        ConfigError: The scorer is unknown, or neither a `Scorer` nor a `Rater`.
    """
    if scorer.lower() in SCORERS.built_in:
        return scorer.lower() in _RATERS

    scorer_class = SCORERS.find(scorer)
    if not (isinstance(scorer_class, type) and issubclass(scorer_class, (Scorer, Rater))):
        raise ConfigError(
            f"{SCORERS.key} is {scorer!r}, which is no subclass of rlhpc.Scorer (values of tokens) or of rlhpc.Rater "
            "(a term of the reward)"
        )
    return issubclass(scorer_class, Rater)


def check_scorer(group: ScoringGroup) -> None:
    """Checks that the scorer of an entry of `groups` accepts its `kwargs`.

    Raises:
        ConfigError: An option is not accepted; the message names the accepted options.
    """
    if group.scorer in SCORERS.built_in and not group.kwargs:
        return
    factory = SCORERS.find(group.scorer)
    check_options(factory, group.kwargs, f"groups[{group.name}].kwargs", f"scorer {group.scorer}", 3)


def make_scorer(cfg: GrpoConfig, device: torch.device, group: ScoringGroup) -> Any:
    """Builds the `Scorer` or `Rater` of a group on one of its ranks.

    Raises:
        ConfigError: The model cannot be loaded, or does not fit the scorer.
    """
    return SCORERS.find(group.scorer)(cfg, device, group, **group.kwargs)


class Scorer(abc.ABC):
    """Scorer of tokens, which computes a column of a batch. Each rank of the actor or of a scoring group has one object.

    Args:
        cfg: The configuration.
        device: Device of the rank.
        group: Section of the scoring group; None on actor ranks.

    Attributes:
        packed: Whether micro-batches are packed sequences; otherwise they are padded to at most
            `max_tokens_per_micro_batch`.
        shares_prefixes: Whether packed sequences have shared prefixes once (`TokenBatch.shares_prefixes`).
    """

    packed: bool = False
    shares_prefixes: bool = False

    def __init__(self, cfg: GrpoConfig, device: torch.device, group: ScoringGroup | None = None) -> None:
        self.cfg, self.device, self.group = cfg, device, group

    @abc.abstractmethod
    def score(self, batch: TokenBatch) -> Tensor:
        """Returns the values of each token, `[T]` or `[T, k]`, float32. The caller disables gradients and passes
        micro-batches. All actor ranks call the method equally often, possibly with a batch without tokens. Ranks of a scoring
        group call the method independently.
        """

    def offload(self) -> None:  # noqa: B027 (most hold little)
        """Frees the accelerator's memory for another group (`actor.offload_in_rollout`)."""

    def reload(self) -> None:  # noqa: B027 (as above)
        """Moves the offloaded memory back."""

    def close(self) -> None:  # noqa: B027 (as above)
        """Releases resources of the scorer, on ranks of a scoring group."""


class LogitReader:
    """Reader of the trained model's logits, for losses that need more than log-probs and entropies (`TokenScores.read`).
    Each actor rank has one object. A subclass implements `rows` or `read`.

    Args:
        cfg: The configuration.
        device: Device of the rank.

    Attributes:
        packed: Whether micro-batches may be packed sequences if the trained model supports packing.
        shares_prefixes: Whether packed sequences may have shared prefixes once, so that one row of logits
            predicts several tokens.
    """

    packed: bool = False
    shares_prefixes: bool = False

    def __init__(self, cfg: GrpoConfig, device: torch.device) -> None:
        self.cfg, self.device = cfg, device

    def rows(self, batch: TokenBatch) -> RowReader | None:
        """Returns a reader that computes one number, with its gradient, for each row of logits that predicts a trained token.
        The caller computes a part of the rows at a time, so that no tensor holds all logits.

        Args:
            batch: The micro-batch with all columns, possibly without tokens. `batch.predictors()[0]` selects the tokens.

        Returns:
            The reader; None to use `read`, which gets all logits.
        """
        return None

    def read(self, logits: Tensor, batch: TokenBatch) -> Tensor:
        """Returns one value per token, `[T]` float32, with gradients.

        Args:
            logits: `[N, W, V]`, in the model's precision; the logits at `[n, t]` predict token t + 1 of sample n. With
                `batch.packed`, `[1, T, V]` of all samples in a row.
            batch: The micro-batch with all columns, possibly without tokens. `batch.predictors()` gives the positions of the
                logits in both cases.

        Raises:
            NotImplementedError: The subclass has neither `rows` nor `read`.
        """
        raise NotImplementedError(f"{type(self).__name__} has neither rows nor read")

    def offload(self) -> None:
        """Frees the accelerator's memory for another group (`actor.offload_in_rollout`)."""

    def reload(self) -> None:
        """Moves the offloaded memory back."""


@dataclass(frozen=True)
class Column:
    """Column of a batch that an algorithm requires for each token.

    Attributes:
        name: Name in `TokenBatch.columns`.
        by: Source of the column: `rollout` (part of the samples: `LanguageAlgorithm.rollout_columns`), `actor` (log-probs
            with the weights at the start of the step's training), `value_head` (values with these weights and
            `actor.model.value_head`), `reference` (log-probs with the weights before training: from the group of that name
            if it is placed, otherwise from the actor), `critic` (values from that group), the name of another scoring
            group, or a user's `Scorer`, which then runs on the actor ranks.
        loss_only: With `by="actor"`: whether only the loss reads the column, and not the advantages. In a step with one
            epoch, the first minibatch then gets the log-probs of its forward pass, which has the same weights.
    """

    name: str
    by: str | type[Scorer]
    loss_only: bool = False


class Rater(abc.ABC):
    """Rater of answers. Each rank of a scoring group has one object. Its ratings do not depend on earlier ratings.

    Args:
        cfg: The configuration.
        device: Device of the rank.
        group: Section of the group: its model and options.
    """

    def __init__(self, cfg: GrpoConfig, device: torch.device, group: ScoringGroup) -> None:
        self.cfg, self.device, self.group = cfg, device, group

    @abc.abstractmethod
    def rate(self, samples: Sequence[Sample]) -> Sequence[float | None]:
        """Rates the answers to one problem.

        Args:
            samples: All answers, always in the same order.

        Returns:
            A number for each answer, in the same order; None for an answer that cannot be rated, which gets `reward.failed`.
        """

    def counts(self) -> dict[str, float]:
        """Returns counters since the last call. The sum of a counter over the ranks is the metric `<group>/<name>`, or
        `time/<group>_<name>` for a name that begins with `time/`. Only metrics with `time/` may differ after a resume.
        """
        return {}

    def close(self) -> None:  # noqa: B027 (most start nothing)
        """Releases resources of the rater."""


#: Configuration sections with the models of groups; the reference has the actor's model.
_SECTIONS = {"reference": "actor", "teacher": "teacher", "reward": "reward", "judge": "judge"}


@dataclass(frozen=True)
class ScoringGroup:
    """Scoring group of a configuration.

    Attributes:
        name: Name in `cluster.component_placement`.
        scorer: Name of the scorer on the group's ranks (`rlhpc.language.scoring.registry.SCORERS`).
        model: Model of the group, if it has one.
        max_tokens: Maximum number of tokens in one forward pass on a rank, including padding.
        kwargs: Options of the scorer.
        section: Configuration section of the model, if the name does not tell it.
    """

    name: str
    scorer: str
    model: PretrainedConfig
    max_tokens: int
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    section: str = ""

    @property
    def model_section(self) -> str:
        """Configuration section of the group's model, for messages."""
        return f"{self.section or _SECTIONS.get(self.name, f'groups[{self.name}]')}.model"
