"""Weight probe: log-probs of trainer and engine on the same tokens, which shows whether what writes is what is trained.

A fixed text goes out with some versions of the weights, and each engine compares as it takes them in (`check_probe`). At the
start of a run each engine also draws tokens, which the trainer scores (`compare_draws`): with the weights as they are, with
every trained number changed, and with the weights as they were before (`runners.agreement`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from rlhpc.language.engines.base import Request, SamplingParams, ScoresTexts
from rlhpc.language.tokens.batches import TokenBatch
from rlhpc.language.tokens.rounding import rounded_otherwise
from rlhpc.runtime.errors import ConfigError
from rlhpc.weights.verification import COST, WeightsDiffer

if TYPE_CHECKING:
    from rlhpc.language.engines.base import RolloutBackend
    from rlhpc.language.tokens.trainer import TokenTrainer

#: Tokens of the text, and of each stretch over which differences are averaged.
_LENGTH = 16
#: How far log-probs may differ, a token on average, by rounding alone: in single precision on a CPU; on an accelerator, where
#: some kernels round factors to ten bits; and in half precision, if the trainer does not say how far (`Probe.rounding`).
_SINGLE, _ROUNDED, _HALF = 1e-3, 0.02, 0.25
#: What is allowed of what it says: nearly twice the most of 930 sound updates of 28 models (`python -m bench.rounding`).
_TIMES = 6.0
#: Texts that are rounded otherwise, and probes from one time that they are to the next.
_TEXTS, _EVERY = 4, 10
#: Draws of each engine from short prompts, tokens of such a prompt, and tokens that are drawn at most.
_SHORT, _PROMPT, _DRAWN = 4, 8, 32
#: Tokens of a long text where neither a window nor pieces of a prefill say more, and how far it goes beyond those.
_LONG, _BEYOND = 256, 64


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


@dataclass(frozen=True)
class Draw:
    """A sequence that an engine drew, with its log-probs at temperature 1.

    Attributes:
        token_ids: Prompt and response.
        drawn: Log-probs of the response's tokens, as they were drawn.
        scored: Log-probs of all tokens but the first, as the engine finds the whole text; None if it cannot score.
        policy: Which of several policies drew; None if there is one.
    """

    token_ids: tuple[int, ...]
    drawn: tuple[float, ...]
    scored: tuple[float, ...] | None
    policy: int | None = None


def probe_text(vocabulary: int, most: int, seed: Sequence[int] | int = 0) -> list[int]:
    """The text: any tokens, always the same ones.

    Args:
        vocabulary: Ids are below this.
        most: Tokens that surely fit into the engine's context.
        seed: Of another text, whose length is `most`.
    """
    length = most if seed else max(2, min(_LENGTH, most))
    text: list[int] = np.random.default_rng(seed).integers(0, vocabulary, length).tolist()
    return text


def due(version: int, interval: int) -> bool:
    """Returns whether a version is probed: the first of all; with an interval, also the second and one of every so many."""
    return version == 0 or (interval > 0 and (version == 1 or version % interval == 0))


def long_text(longest: int, window: int, chunk: int, context: int = 0) -> int:
    """Returns how many tokens the long text has: more than a layer's window and than a piece of a prefill, if the run's
    sequences may.

    Args:
        longest: Tokens of the run's longest sequence.
        window: Tokens that a layer with a window sees; 0 without one.
        chunk: Tokens of a prompt that the engine reads at once; 0 if it reads all.
        context: Tokens that the engine has room for, one more than what it scores (`ScoresTexts.score`); 0 without a limit.
    """
    if context:
        longest = min(longest, context - 1)
    return min(longest, max(_LONG, *(tokens + _BEYOND for tokens in (window, chunk) if tokens), 0))


def draw(
    engine: RolloutBackend, vocabulary: int, prompt: int, response: int, length: int, phase: int, policies: int
) -> list[Draw]:
    """Has an engine draw from prompts of random tokens, short ones and a long one, and score what it drew.

    Args:
        engine: With nothing under way.
        vocabulary: Ids are below this.
        prompt: Tokens of the run's longest prompt.
        response: Tokens of its longest response.
        length: Tokens of the long text (`long_text`).
        phase: Prompts differ by it, so that no cache of another phase is used.
        policies: How many policies there are; 0 if they have no names.
    """
    drawn = max(1, min(_DRAWN, response, length // 2))
    lengths = [min(_PROMPT, prompt, length - drawn)] * _SHORT + [min(length - drawn, prompt)]
    requests = [
        Request(
            number,
            tuple(probe_text(vocabulary, tokens, (1, phase, policy, number))),
            SamplingParams(max_new_tokens=drawn, policy=policy),
            seed=number,
        )
        for policy in range(max(1, policies))
        for number, tokens in enumerate(lengths, policy * len(lengths))
    ]
    draws = []
    for request, completion in zip(requests, engine.generate(requests), strict=True):
        text, policy = (*request.prompt_ids, *completion.token_ids), request.sampling.policy if policies else None
        scored = tuple(_scored(engine, text, policy)) if isinstance(engine, ScoresTexts) else None
        draws.append(Draw(text, tuple(completion.logprobs), scored, policy))
    return draws


def _scored(engine: ScoresTexts, text: Sequence[int], policy: int | None) -> list[float]:
    return engine.score(text, **({} if policy is None else {"policy": policy}))


class Prober:
    """Has a trainer score texts.

    Args:
        trainer: It.
        text: The fixed text.
        pad: Token that fills up rectangles.
        dtype: The coarsest that trainer and engine compute in.
    """

    def __init__(self, trainer: TokenTrainer, text: Sequence[int], pad: int, dtype: torch.dtype) -> None:
        self._trainer, self._text, self._pad, self._dtype = trainer, list(text), pad, dtype
        self._rounding, self._asked = 0.0, 0

    @COST.proving(time.process_time)
    def ask(self, policy: int | None = None, role: int = 0) -> Probe:
        """What the weights of now say; all ranks call it, awake. Of several policies it is this one, by which the role speaks.
        In half precision it also measures how far rounding moves them, the first two times and then once in ten times."""
        logprobs = self._logprobs(self._text, role)
        if self._dtype != torch.float32 and (self._asked < 2 or self._asked % _EVERY == 0):
            self._rounding = self._moved(self._text, logprobs, role)
        self._asked += 1
        return Probe(tuple(self._text), tuple(logprobs), self.dtype, self._rounding, policy)

    @COST.proving(time.process_time)
    def score(self, text: Sequence[int], role: int = 0, *, perturbed: bool = False) -> tuple[list[float], float]:
        """Log-probs of a text's tokens but the first by the weights of now, and how far rounding moves them (`Probe.rounding`)
        in half precision, or where the weights are perturbed, which makes deep models amplify it; all ranks call it, awake."""
        logprobs = self._logprobs(text, role)
        moved = self._moved(text, logprobs, role) if perturbed or self._dtype != torch.float32 else 0.0
        return logprobs, moved

    @property
    def dtype(self) -> str:
        """Name of the dtype that the trainer computes in."""
        return str(self._trainer.backend.dtype).removeprefix("torch.")

    def _moved(self, text: Sequence[int], logprobs: Sequence[float], role: int) -> float:
        with rounded_otherwise(self._trainer.backend.module, self._dtype):
            moved = max(_gap(self._logprobs(text, role), logprobs) for _ in range(_TEXTS))
        return moved if math.isfinite(moved) else 0.0

    def _logprobs(self, text: Sequence[int], role: int) -> list[float]:
        """Log-probs of a text's tokens but the first."""
        batch = TokenBatch.of([list(text)], [[True] * len(text)], pad_id=self._pad)
        batch.role += role
        logprobs: list[float] = self._trainer.forward(batch, temperature=1.0).logprobs.double().cpu().tolist()
        return logprobs[1:]


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
    gap = _gap(_scored(engine, probe.token_ids, probe.policy), probe.logprobs)
    most = bound(tolerance, probe.rounding, dtypes, device)
    if not gap <= most:
        raise WeightsDiffer(
            f"version {version} of the weights: on a fixed text the engine's log-probs differ from those of {sender} by "
            f"{gap:.3g} a token on average, and rounding explains {most:g} (rollout.probe_tolerance): what writes is not what "
            "is trained; set rollout.weight_delta=off or rollout.rollout_backend=hf to see which of them is at fault"
        )
    return gap


def bound(tolerance: float | None, rounding: float, dtypes: Collection[str], device: str) -> float:
    """Returns how far log-probs may differ, a token on average.

    Args:
        tolerance: `rollout.probe_tolerance`.
        rounding: See `Probe.rounding`.
        dtypes: What engine and trainer compute in.
        device: Where the engine is.
    """
    if tolerance is not None:
        return tolerance
    single = _SINGLE if device == "cpu" else _ROUNDED
    if rounding:
        return max(single, _TIMES * rounding)
    return single if {*dtypes} == {"float32"} else _HALF


def compare_draws(
    draws: Sequence[Draw],
    scores: Sequence[tuple[Sequence[float], float]],
    tolerance: float | None,
    dtypes: Collection[str],
    device: str,
    where: str,
) -> float:
    """Compares what an engine drew with what the trainer says of the same texts.

    Args:
        draws: What it drew.
        scores: The trainer's log-probs of each text, and how far rounding moves them (`Prober.score`).
        tolerance, dtypes, device: See `bound`.
        where: The engine and its weights, for messages.

    Returns:
        The largest difference, a token on average over a stretch of 16.

    Raises:
        ConfigError: It is larger than rounding explains.
    """
    largest = 0.0
    for one, (logprobs, rounding) in zip(draws, scores, strict=True):
        most = bound(tolerance, rounding, dtypes, device)
        count = len(one.drawn)
        parts: list[tuple[str, Any, Any]] = [("tokens that it drew", one.drawn, logprobs[len(logprobs) - count :])]
        if one.scored is not None:
            parts.append((f"a text of {len(one.token_ids)} tokens", one.scored, logprobs))
        for what, reported, expected in parts:
            gap = _gap(reported, expected)
            if not gap <= most:
                raise ConfigError(
                    f"{where}: the log-probs of {what} differ from the trainer's by {gap:.3g} a token on average, and "
                    f"rounding explains {most:g} (rollout.probe_tolerance): what writes would not be what is trained, so "
                    "nothing was; take rollout.rollout_backend=hf, another version of the engine, or another model"
                )
            largest = max(largest, gap)
    return largest


def _gap(mine: Sequence[float], theirs: Sequence[float]) -> float:
    """Returns the mean absolute difference over the stretch of `_LENGTH` tokens, or a few more, where it is largest."""
    if len(mine) != len(theirs):
        return float("nan")
    if not len(mine):
        return 0.0
    apart = np.abs(np.asarray(mine, np.float64) - np.asarray(theirs, np.float64))
    starts = np.arange(0, max(1, len(apart) - _LENGTH + 1), _LENGTH)
    counts = np.diff([*starts, len(apart)])
    return float((np.add.reduceat(apart, starts) / counts).max())
