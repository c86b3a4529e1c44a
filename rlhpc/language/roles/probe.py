"""A fixed text, scored by trainer and engine: whether what writes is what is trained, behind loader and kernels."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from rlhpc.weights.cost import COST
from rlhpc.weights.proof import WeightsDiffer

if TYPE_CHECKING:
    from rlhpc.language.engines.base import ScoresTexts

#: Tokens of the text.
_LENGTH = 16
#: How far log-probs may differ, a token on average, by rounding alone: in single precision on a CPU; on an accelerator, where
#: some kernels round factors to ten bits; and in half precision.
_SINGLE, _ROUNDED, _HALF = 1e-3, 0.02, 0.25


@dataclass(frozen=True)
class Probe:
    """What the trainer says of the text.

    Attributes:
        token_ids: The text.
        logprobs: Of its tokens but the first, at temperature 1.
        dtype: What it computes in.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    dtype: str


def probe_text(vocabulary: int, most: int) -> list[int]:
    """The text: any tokens, always the same ones.

    Args:
        vocabulary: Ids are below this.
        most: Tokens that surely fit into the engine's context.
    """
    found: list[int] = np.random.default_rng(0).integers(0, vocabulary, max(2, min(_LENGTH, most))).tolist()
    return found


def due(version: int, interval: int) -> bool:
    """Whether a version is looked at: the first two, and then one of every so many."""
    return interval > 0 and (version <= 1 or version % interval == 0)


@COST.proving(time.process_time)
def check_probe(
    engine: ScoresTexts, probe: Probe, version: int, tolerance: float | None, dtypes: Collection[str], sender: str,
    device: str = "cpu",
) -> float:  # fmt: skip
    """Compares.

    Args:
        engine: With the version's weights.
        probe: What the trainer says.
        version: Version of the weights.
        tolerance: `rollout.probe_tolerance`.
        dtypes: What engine and trainer compute in.
        sender: Who trains, for messages.
        device: Where the engine is.

    Returns:
        How far the log-probs differ, a token on average.

    Raises:
        WeightsDiffer: Further than rounding explains.
    """
    said = engine.score(probe.token_ids)
    gap = _gap(said, probe.logprobs)
    single = _SINGLE if device == "cpu" else _ROUNDED
    most = tolerance if tolerance is not None else single if {*dtypes} == {"float32"} else _HALF
    if not gap <= most:
        raise WeightsDiffer(
            f"version {version} of the weights: on a fixed text the engine's log-probs differ from those of {sender} by "
            f"{gap:.3g} a token on average, and rounding explains {most:g} (rollout.probe_tolerance): what writes is not what "
            "is trained; set rollout.weight_delta=off or rollout.rollout_backend=hf to see which of them is at fault"
        )
    return gap


def _gap(mine: Sequence[float], theirs: Sequence[float]) -> float:
    if len(mine) != len(theirs):
        return float("nan")
    return float(np.abs(np.asarray(mine, np.float64) - np.asarray(theirs, np.float64)).mean())
