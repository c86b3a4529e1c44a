"""Registry of scorers: built-in ones, and those of users with their options."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from rlhpc.language.scoring.registry import SCORERS, LogitReader, Rater, Scorer, check_scorer, make_scorer, rates
from rlhpc.runtime.errors import ConfigError


class Halves(Scorer):
    """Scorer with an option."""

    def __init__(self, cfg: Any, device: Any, group: Any, share: float = 0.5) -> None:
        super().__init__(cfg, device, group)
        self.share = share

    def score(self, batch: Any) -> Any:
        return batch * self.share


class Length(Rater):
    """Rater of answers."""

    def rate(self, samples: Any) -> Any:
        return [float(len(sample)) for sample in samples]


class Neither:
    """A class that is no scorer."""


def group(scorer: str, **kwargs: Any) -> Any:
    """Returns the section of a scoring group."""
    return SimpleNamespace(name="mine", scorer=scorer, kwargs=kwargs)


@pytest.mark.parametrize(
    ("scorer", "result"),
    [("logprobs", False), ("Judge", True), ("classifier", True), ("process", False), (f"{__name__}:Halves", False),
     (f"{__name__}:Length", True)],
)  # fmt: skip
def test_raters_and_scorers_are_told_apart(scorer: str, result: bool) -> None:
    assert rates(scorer) == result


def test_another_class_is_neither() -> None:
    with pytest.raises(ConfigError, match=r"no subclass of rlhpc\.Scorer \(values of tokens\) or of rlhpc\.Rater"):
        rates(f"{__name__}:Neither")
    with pytest.raises(ConfigError, match="logprobs"):
        rates("logprob")


def test_options_must_be_those_of_the_scorer() -> None:
    check_scorer(group("logprobs"))
    check_scorer(group(f"{__name__}:Halves", share=0.25))
    with pytest.raises(
        ConfigError, match=r"groups\[mine\]\.kwargs\.part is 0\.25; scorer .* has no such option; allowed: share"
    ):
        check_scorer(group(f"{__name__}:Halves", part=0.25))
    with pytest.raises(ConfigError, match="allowed: none"):
        check_scorer(group(f"{__name__}:Length", part=0.25))


def test_a_scorer_is_built_with_its_options() -> None:
    cfg: Any = SimpleNamespace()
    device: Any = "cpu"
    scorer = make_scorer(cfg, device, group(f"{__name__}:Halves", share=0.25))
    assert isinstance(scorer, Halves) and scorer.share == 0.25 and scorer.group.name == "mine"
    assert scorer.score(8) == 2 and not scorer.packed
    scorer.offload()  # a scorer that holds little needs none of these
    scorer.reload()
    scorer.close()
    rater = make_scorer(cfg, device, group(f"{__name__}:Length"))
    assert rater.rate(["abc"]) == [3.0]


def test_a_user_may_register_a_name() -> None:
    SCORERS.register("test-only-halves")(Halves)
    assert not rates("Test-Only-Halves")
    with pytest.raises(ConfigError, match="registered twice"):
        SCORERS.register("test-only-halves")(Length)


def test_a_reader_of_logits_must_read_them_in_some_way() -> None:
    cfg: Any = SimpleNamespace()
    device: Any = "cpu"
    reader = LogitReader(cfg, device)
    batch: Any = None
    assert reader.rows(batch) is None
    with pytest.raises(NotImplementedError, match="LogitReader has neither rows nor read"):
        reader.read(batch, batch)
    reader.offload()
    reader.reload()
