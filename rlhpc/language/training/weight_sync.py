"""How an actor's weights get to rollout ranks, and to the ranks of the reference."""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import TYPE_CHECKING

import torch

from rlhpc.language.config.run import GrpoConfig
from rlhpc.language.engines.common import adapters_apart
from rlhpc.language.scoring.groups import REFERENCE
from rlhpc.language.training.prompt_dispatch import VERSIONS, PromptMap
from rlhpc.runtime.worker import Worker
from rlhpc.training.backend import Named
from rlhpc.weights import WeightSync, make_sync, sends_shards
from rlhpc.weights.reshard import SendsShards

if TYPE_CHECKING:
    from rlhpc.language.training.trainer import ModelTrainer
import math
import time
from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from rlhpc.language.engines.base import Request, SamplingParams, ScoresTexts
from rlhpc.language.models.token_batch import TokenBatch
from rlhpc.runtime.errors import ConfigError
from rlhpc.weights.verification import COST, WeightsDiffer

if TYPE_CHECKING:
    from rlhpc.language.engines.base import RolloutBackend
    from rlhpc.language.training.trainer import TokenTrainer
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from torch import nn


@contextmanager
def rounded_otherwise(module: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """While the block runs, what each layer without layers in it says is off by up to half a unit of the last place of
    `dtype`, as if another kernel had made it. The same numbers are drawn each time; torch's own generators are left alone.

    Args:
        module: Any; its parameters may be sharded.
        dtype: The coarsest that whoever is compared computes in.
    """
    generator, most = torch.Generator().manual_seed(0), torch.finfo(dtype).eps

    def off(layer: nn.Module, given: Any, said: Any) -> Any:
        if not isinstance(said, torch.Tensor) or not said.is_floating_point():
            return None
        by = torch.rand(said.shape, generator=generator).sub_(0.5).mul_(most).to(said.device)
        return (said.float() * (1 + by)).to(said.dtype)

    with ExitStack() as hooks:
        for layer in module.modules():
            if next(layer.children(), None) is None:
                hooks.callback(layer.register_forward_hook(off).remove)
        yield


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
class ProbeSequence:
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
) -> list[ProbeSequence]:
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
        draws.append(ProbeSequence(text, tuple(completion.logprobs), scored, policy))
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
    draws: Sequence[ProbeSequence],
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


#: Dtypes of an engine's weights, by `rollout.dtype`; the trainer's own otherwise.
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def sync_of(cfg: GrpoConfig) -> str:
    """The strategy by which weights travel: adapters alone are small, and go whole, and so do those of several policies."""
    name = cfg.rollout.weight_sync
    return "auto" if (adapters_apart(cfg) or cfg.agent.policies) and sends_shards(name) else name


def reference_sync_of(cfg: GrpoConfig) -> str:
    """Returns the strategy of the reference's weights (`reference.update_interval`): that of `rollout.weight_sync`, but they
    travel whole."""
    return "auto" if sends_shards(cfg.rollout.weight_sync) else cfg.rollout.weight_sync


class ActorWeights:
    """Sends an actor's weights; all of its ranks call each method. By most strategies all gather each tensor, and the first
    sends it; by those that send shards, each sends what it holds.

    Args:
        worker: This rank of the actor.
        cfg: The run's configuration.
        prompts: Names the groups.
        backend: Holds the weights.
    """

    def __init__(self, worker: Worker, cfg: GrpoConfig, prompts: PromptMap, backend: ModelTrainer) -> None:
        self._worker, self._cfg, self._prompts, self._backend = worker, cfg, prompts, backend
        self._name, self._apart = sync_of(cfg), adapters_apart(cfg)
        self._by_shards = sends_shards(self._name)
        self._dtype = _DTYPES.get(cfg.rollout.dtype)
        self._sync: WeightSync | None = None
        self._before: WeightSync | None = None
        self._reference: WeightSync | None = None
        self._to: list[int] = []
        self._sent: frozenset[str] = frozenset()
        if worker.rank == 0 and cfg.reference.update_interval and REFERENCE in prompts.scoring:
            ranks = [(REFERENCE, list(range(prompts.scoring[REFERENCE])))]
            self._reference = make_sync(reference_sync_of(cfg), worker, (prompts.actor_name, 0), ranks, "off")

    def send(self, version: int, ranks: Sequence[int], probe: Probe | None) -> None:
        """Sends the weights to these rollout ranks; those that are not trained only once."""
        self._aim(list(ranks))
        frozen = self._frozen_names()
        self._announce(ranks, probe)
        if self._by_shards:
            self._send_shards(self._sync, version)
            return
        weights = self._weights(self._sent)
        if self._sync is None:
            for _ in weights:  # a sharded backend gathers each with all ranks
                pass
        else:
            self._sync.send(version, _as(self._dtype, weights), frozen=frozen)
        self._sent = frozen

    def welcome(self, version: int, ranks: Sequence[int]) -> None:
        """Sends all weights to rollout ranks that have just come."""
        self._announce(ranks, None)
        to = [(self._prompts.rollout_name, list(ranks))]
        if self._by_shards:
            self._send_shards(self._made(to, "off"), version)
            return
        weights = self._weights(())
        if self._worker.rank:
            for _ in weights:
                pass
            return
        self._made(to, "off").send(version, _as(self._dtype, weights))

    def refresh_reference(self, version: int) -> None:
        """Sends all weights to the reference's ranks."""
        weights = self._backend.named_weights()
        if self._reference is None:
            for _ in weights:
                pass
        else:
            self._reference.send(version, weights)

    def forget(self) -> None:
        """Frozen weights go out again with the next version."""
        self._sent = frozenset()
        for sync in (self._sync, self._before, self._reference):
            if sync is not None:
                sync.forget()

    def _weights(self, without: Container[str]) -> Named:
        """What engines get."""
        if not self._apart:
            return self._backend.named_weights(without)
        return iter(self._backend.adapters().items())

    def _announce(self, ranks: Sequence[int], probe: Probe | None) -> None:
        if self._worker.rank == 0:
            for rank in ranks:
                self._worker.notify(probe, self._prompts.rollout_name, rank, VERSIONS)

    def _send_shards(self, sync: WeightSync | None, version: int) -> None:
        assert isinstance(sync, SendsShards)
        sync.send_shards(version, self._backend.shards(self._dtype))

    def _made(self, to: list[tuple[str, list[int]]], delta: str) -> WeightSync:
        return make_sync(self._name, self._worker, (self._prompts.actor_name, 0), to, delta)

    def _aim(self, ranks: list[int]) -> None:
        """Where others receive than before, all of them get complete weights."""
        if ranks == self._to:
            return
        self._to = ranks
        if self._worker.rank == 0 or self._by_shards:
            if self._before is not None:
                self._before.forget()
            # Somebody may yet have to take in what the last version builds upon: it is let go with the next change.
            self._before = self._sync
            self._sync = self._made([(self._prompts.rollout_name, ranks)], self._cfg.rollout.weight_delta)
        self._sent = frozenset()

    def _frozen_names(self) -> frozenset[str]:
        off = self._cfg.rollout.weight_delta.lower() == "off"
        return frozenset() if off or self._apart else self._backend.frozen_names()


def _as(dtype: torch.dtype | None, weights: Named) -> Named:
    """Weights in an engine's dtype."""
    if dtype is None:
        return weights
    return ((name, one.to(dtype) if one.is_floating_point() else one) for name, one in weights)
