"""A fixed text, scored by trainer and engine: whether what writes is what is trained, behind loader and kernels."""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from rlhpc.language.tokens.batches import TokenBatch
from rlhpc.language.tokens.rounding import rounded_otherwise
from rlhpc.weights.cost import COST
from rlhpc.weights.proof import WeightsDiffer

if TYPE_CHECKING:
    from rlhpc.language.engines.base import ScoresTexts
    from rlhpc.language.tokens.trainer import TokenTrainer

#: Tokens of the text.
_LENGTH = 16
#: How far log-probs may differ, a token on average, by rounding alone: in single precision on a CPU; on an accelerator, where
#: some kernels round factors to ten bits; and in half precision, if the trainer does not say how far (`Probe.rounding`).
_SINGLE, _ROUNDED, _HALF = 1e-3, 0.02, 0.25
#: What is allowed of what it says: nearly twice the most of 930 sound updates of 28 models (`python -m bench.rounding`).
_TIMES = 6.0
#: Texts that are rounded otherwise, and probes from one time that they are to the next.
_TEXTS, _EVERY = 4, 10


@dataclass(frozen=True)
class Probe:
    """What the trainer says of the text.

    Attributes:
        token_ids: The text.
        logprobs: Of its tokens but the first, at temperature 1.
        dtype: What it computes in.
        rounding: How far these are moved, a token on average, where layers' results are rounded otherwise in half precision;
            0 if that is not known.
        policy: Which of several policies says it.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    dtype: str
    rounding: float = 0.0
    policy: int | None = None


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


class Prober:
    """Has a trainer score the text.

    Args:
        trainer: It.
        text: The text.
        pad: Token that fills up rectangles.
        dtype: The coarsest that trainer and engine compute in.
    """

    def __init__(self, trainer: TokenTrainer, text: Sequence[int], pad: int, dtype: torch.dtype) -> None:
        self._trainer, self._text, self._pad, self._dtype = trainer, list(text), pad, dtype
        self._rounding, self._asked = 0.0, 0

    @COST.proving(time.process_time)
    def ask(self, policy: int | None = None, role: int = 0) -> Probe:
        """What the weights of now say; all ranks call it, awake. Of several policies it is this one, by which the role speaks.
        In half precision it is also found out how far that is what
        rounding made of it, at first and then once in ten times."""
        (said,) = self._said(1, role)
        if self._dtype != torch.float32 and (self._asked < 2 or self._asked % _EVERY == 0):
            with rounded_otherwise(self._trainer.backend.module, self._dtype):
                found = max(_gap(one, said) for one in self._said(_TEXTS, role))
            self._rounding = found if math.isfinite(found) else 0.0
        self._asked += 1
        dtype = str(self._trainer.backend.dtype).removeprefix("torch.")
        return Probe(tuple(self._text), tuple(said), dtype, self._rounding, policy)

    def _said(self, times: int, role: int) -> list[list[float]]:
        """Log-probs of its tokens but the first, of so many copies in one batch."""
        batch = TokenBatch.of([self._text] * times, [[True] * len(self._text)] * times, pad_id=self._pad)
        batch.role += role
        said = self._trainer.forward(batch, temperature=1.0).logprobs.double().cpu()
        rows: list[list[float]] = said.view(times, -1)[:, 1:].tolist()
        return rows


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
    said = engine.score(probe.token_ids, **({} if probe.policy is None else {"policy": probe.policy}))
    gap = _gap(said, probe.logprobs)
    single = _SINGLE if device == "cpu" else _ROUNDED
    half = max(single, _TIMES * probe.rounding) if probe.rounding else _HALF
    most = tolerance if tolerance is not None else single if {*dtypes} == {"float32"} else half
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
