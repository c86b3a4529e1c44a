"""Weight sync of language models: sending of the actor's weights to rollout ranks and reference ranks, and weight probes."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Collection, Container, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from rlhpc.language.config.run import GrpoConfig
from rlhpc.language.data.images import has_vision
from rlhpc.language.engines.base import Request, RolloutBackend, SamplingParams
from rlhpc.language.engines.common import has_separate_adapters
from rlhpc.language.engines.registry import ENGINES
from rlhpc.language.hugging_face import load_model_config
from rlhpc.language.models.token_batch import TokenBatch
from rlhpc.language.scoring.groups import REFERENCE
from rlhpc.language.training.prompt_dispatch import VERSIONS, PromptMap
from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.text import with_source_line
from rlhpc.runtime.worker import Worker
from rlhpc.training.backend import Named
from rlhpc.weights import WeightSync, make_sync, sends_shards
from rlhpc.weights.base import SHARDS
from rlhpc.weights.reshard import SendsShards
from rlhpc.weights.transport import BroadcastSync
from rlhpc.weights.transport_select import AUTO
from rlhpc.weights.verification import COST, WeightsDiffer

if TYPE_CHECKING:
    from rlhpc.language.training.trainer import ModelTrainer, TokenTrainer

log = logging.getLogger(__name__)


@contextmanager
def perturbed_rounding(module: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Perturbs the outputs of all leaf layers within the block, as another kernel's rounding would.

    The perturbation is at most half a unit in the last place of `dtype`. Each block draws the same random numbers; torch's
    global generators are not used.

    Args:
        module: Module, whose parameters may be sharded.
        dtype: Coarsest dtype of the compared computations.
    """
    generator, eps = torch.Generator().manual_seed(0), torch.finfo(dtype).eps

    def perturb(layer: nn.Module, inputs: Any, output: Any) -> Any:
        if not isinstance(output, torch.Tensor) or not output.is_floating_point():
            return None
        noise = torch.rand(output.shape, generator=generator).sub_(0.5).mul_(eps).to(output.device)
        return (output.float() * (1 + noise)).to(output.dtype)

    with ExitStack() as hooks:
        for layer in module.modules():
            if next(layer.children(), None) is None:
                hooks.callback(layer.register_forward_hook(perturb).remove)
        yield


#: Number of tokens of the probe text, and of each window over which differences are averaged.
_LENGTH = 16
#: Bounds of the mean difference of a token's log-prob that rounding explains: in single precision on a CPU; in single
#: precision on an accelerator, where some kernels round factors to ten bits; and in half precision if `Probe.rounding` is
#: unknown.
_SINGLE, _ROUNDED, _HALF = 1e-3, 0.02, 0.25
#: Allowed multiple of `Probe.rounding`: nearly twice the maximum of 930 correct updates of 28 models (`bench.rounding`).
_TIMES = 6.0
#: The same multiple where the engine computes in 8 bits: at least twice the largest of tiny models of several families
#: (`bench.families --dtypes fp8`). Linear layers alone are so coarse, and the perturbation is that of all layers.
_TIMES_OF_8_BITS = 2.0
#: Number of perturbed forward passes per measurement, and number of probes between two measurements.
_PERTURBED_PASSES, _ROUNDING_INTERVAL = 4, 10
#: Number of samples with short prompts, number of tokens of a short prompt, and maximum number of sampled tokens.
_NUM_SHORT_PROMPTS, _SHORT_PROMPT_TOKENS, _MAX_SAMPLED_TOKENS = 4, 8, 32
#: Minimum number of tokens of the long text, and number of tokens by which it exceeds attention window and prefill chunk.
_LONG_TEXT_TOKENS, _EXCESS_TOKENS = 256, 64


@dataclass(frozen=True)
class Probe:
    """Trainer's log-probs of the probe text.

    Attributes:
        token_ids: Tokens of the text.
        logprobs: Log-probs of the text's tokens except the first, at temperature 1.
        dtype: Dtype of the trainer's computation.
        rounding: Mean change of a token's log-prob by perturbed rounding in half precision; 0 if unknown.
        policy: Index of the policy; None in a run with one policy.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    dtype: str
    rounding: float = 0.0
    policy: int | None = None


@dataclass(frozen=True)
class ProbeSequence:
    """Sequence that an engine sampled, with its log-probs at temperature 1.

    Attributes:
        token_ids: Prompt and response.
        sampled_logprobs: Log-probs of the response's tokens when they were sampled.
        scored_logprobs: Log-probs of all tokens except the first when the engine scores the full text; None if it cannot.
        policy: Index of the policy; None in a run with one policy.
    """

    token_ids: tuple[int, ...]
    sampled_logprobs: tuple[float, ...]
    scored_logprobs: tuple[float, ...] | None
    policy: int | None = None


def probe_text(vocabulary: int, max_tokens: int, seed: Sequence[int] | int = 0) -> list[int]:
    """Returns random tokens that depend only on the arguments; by default the probe text.

    Args:
        vocabulary: Exclusive upper bound of the token ids.
        max_tokens: Number of tokens that fit into the engine's context.
        seed: 0 for the probe text; otherwise the seed of a text of `max_tokens` tokens.
    """
    length = max_tokens if seed else max(2, min(_LENGTH, max_tokens))
    token_ids: list[int] = np.random.default_rng(seed).integers(0, vocabulary, length).tolist()
    return token_ids


def is_probed(version: int, interval: int) -> bool:
    """Returns whether a version is probed: version 0 always; with an interval, also version 1 and the interval's multiples."""
    return version == 0 or (interval > 0 and (version == 1 or version % interval == 0))


def long_text(max_length: int, window: int, chunk: int, context: int = 0) -> int:
    """Returns the number of tokens of the long text.

    The long text exceeds an attention window and a prefill chunk if the run's sequences can be that long.

    Args:
        max_length: Number of tokens of the run's longest sequence.
        window: Number of tokens of a layer's attention window; 0 if there is no window.
        chunk: Number of tokens of a prefill chunk; 0 if there is no chunked prefill.
        context: Number of tokens of the engine's context, one more than the engine can score (`RolloutBackend.score`); 0 if
            unlimited.
    """
    if context:
        max_length = min(max_length, context - 1)
    return min(
        max_length, max(_LONG_TEXT_TOKENS, *(tokens + _EXCESS_TOKENS for tokens in (window, chunk) if tokens), 0)
    )


def sample_probe(
    engine: RolloutBackend, vocabulary: int, prompt: int, response: int, length: int, phase: int, num_policies: int
) -> list[ProbeSequence]:
    """Draws samples from an engine for several short prompts and a long one, of random tokens; scores them by the engine.

    The first sample ends half-way, so that the engine goes on with the others after a sequence has left. A sample has at least
    the tokens over which differences are averaged, if the response has them.

    Args:
        engine: Engine without requests in flight.
        vocabulary: Exclusive upper bound of the token ids.
        prompt: Number of tokens of the run's longest prompt.
        response: Number of tokens of the run's longest response.
        length: Number of tokens of the long text (`long_text`).
        phase: Number of the phase; each phase has different prompts, so that the prefix cache of another phase is not used.
        num_policies: Number of policies; 0 in a run with a single policy.

    Raises:
        ConfigError: A check in the engine's code excludes the model, such as a router that its kernel has not.
    """
    num_drawn = max(1, min(_MAX_SAMPLED_TOKENS, response, length // 2))
    num_first_drawn = max(min(num_drawn, _LENGTH), num_drawn // 2)
    lengths = [min(_SHORT_PROMPT_TOKENS, prompt, length - num_drawn)] * _NUM_SHORT_PROMPTS + [
        min(length - num_drawn, prompt)
    ]
    requests = [
        Request(
            request_id,
            tuple(probe_text(vocabulary, tokens, (1, phase, policy, request_id))),
            SamplingParams(max_new_tokens=num_drawn if request_id else num_first_drawn, policy=policy),
            seed=request_id,
        )
        for policy in range(max(1, num_policies))
        for request_id, tokens in enumerate(lengths, policy * len(lengths))
    ]
    try:
        completions = engine.generate(requests)
    except torch.OutOfMemoryError:
        raise
    except (AssertionError, RuntimeError) as error:  # kernels refuse a model's sizes by the latter
        raise ConfigError(
            f"the rollout engine cannot generate with this model on this device: {with_source_line(error)}; take "
            "rollout.rollout_backend=hf, another version of the engine, or another model"
        ) from error
    sequences = []
    for request, completion in zip(requests, completions, strict=True):
        token_ids, policy = (
            (*request.prompt_ids, *completion.token_ids),
            request.sampling.policy if num_policies else None,
        )
        scored_logprobs = tuple(_score(engine, token_ids, policy)) if engine.can_score else None
        sequences.append(ProbeSequence(token_ids, tuple(completion.logprobs), scored_logprobs, policy))
    return sequences


def _score(engine: RolloutBackend, text: Sequence[int], policy: int | None) -> list[float]:
    return engine.score(text) if policy is None else engine.score(text, policy)


class Prober:
    """Scorer of probe texts with the trainer's weights.

    Args:
        trainer: Trainer with the weights.
        text: Tokens of the probe text.
        pad: Padding token.
        dtype: Coarsest dtype of trainer and engine.
    """

    def __init__(self, trainer: TokenTrainer, text: Sequence[int], pad: int, dtype: torch.dtype) -> None:
        self._trainer = trainer
        self._text = list(text)
        self._pad = pad
        self._dtype = dtype
        self._rounding = 0.0
        self._num_probes = 0

    @COST.measure(time.process_time)
    def ask(self, policy: int | None = None, role: int = 0) -> Probe:
        """Returns the probe with the current weights; all ranks call this method, with reloaded tensors.

        In half precision, the first two probes and then every tenth probe also measure the effect of rounding.

        Args:
            policy: Index of the policy; None in a run with one policy.
            role: Index of a role of the policy.
        """
        logprobs = self._logprobs(self._text, role)
        if self._dtype != torch.float32 and (self._num_probes < 2 or self._num_probes % _ROUNDING_INTERVAL == 0):
            self._rounding = self._rounding_change(self._text, logprobs, role)
        self._num_probes += 1
        return Probe(tuple(self._text), tuple(logprobs), self.dtype, self._rounding, policy)

    @COST.measure(time.process_time)
    def score(self, text: Sequence[int], role: int = 0, *, is_perturbed: bool = False) -> tuple[list[float], float]:
        """Scores a text with the current weights; all ranks call this method, with reloaded tensors.

        Returns:
            Log-probs of the text's tokens except the first; and their change by rounding (`Probe.rounding`). The change is
            measured in half precision, and with perturbed weights, where deep models amplify rounding; otherwise it is 0.
        """
        logprobs = self._logprobs(text, role)
        rounding_change = (
            self._rounding_change(text, logprobs, role) if is_perturbed or self._dtype != torch.float32 else 0.0
        )
        return logprobs, rounding_change

    @property
    def dtype(self) -> str:
        """Name of the dtype of the trainer's computation."""
        return str(self._trainer.backend.dtype).removeprefix("torch.")

    def _rounding_change(self, text: Sequence[int], logprobs: Sequence[float], role: int) -> float:
        with perturbed_rounding(self._trainer.backend.module, self._dtype):
            max_change = max(
                _max_window_difference(self._logprobs(text, role), logprobs) for _ in range(_PERTURBED_PASSES)
            )
        return max_change if math.isfinite(max_change) else 0.0

    def _logprobs(self, token_ids: Sequence[int], role: int) -> list[float]:
        """Returns the log-probs of tokens except the first, at temperature 1."""
        batch = TokenBatch.from_sequences([list(token_ids)], [[True] * len(token_ids)], pad_id=self._pad)
        batch.role += role
        logprobs: list[float] = self._trainer.forward(batch, temperature=1.0).logprobs.double().cpu().tolist()
        return logprobs[1:]


@COST.measure(time.process_time)
def check_probe(
    engine: RolloutBackend, probe: Probe, version: int, tolerance: float | None, dtypes: Collection[str], sender: str,
    device: str = "cpu",
) -> float:  # fmt: skip
    """Compares an engine's log-probs of the probe text with the trainer's.

    Args:
        engine: Engine with the version's weights.
        probe: The trainer's probe.
        version: Version of the weights.
        tolerance: `rollout.probe_tolerance`.
        dtypes: Dtypes of engine and trainer.
        sender: Name of the trainer's rank, for messages.
        device: Device type of the engine.

    Returns:
        Largest mean absolute difference per token over a window of 16 tokens.

    Raises:
        WeightsDiffer: The difference is larger than rounding explains.
    """
    mean_difference = _max_window_difference(_score(engine, probe.token_ids, probe.policy), probe.logprobs)
    max_difference = bound(tolerance, probe.rounding, dtypes, device)
    if not mean_difference <= max_difference:
        raise WeightsDiffer(
            f"version {version} of the weights: on a fixed text the engine's log-probs differ from those of {sender} by "
            f"{mean_difference:.3g} a token on average, and rounding explains {max_difference:g} (rollout.probe_tolerance): "
            "the engine samples from another policy than the trained one; set rollout.weight_delta=off or "
            "rollout.rollout_backend=hf to see which of them is at fault"
        )
    return mean_difference


def bound(tolerance: float | None, rounding: float, dtypes: Collection[str], device: str) -> float:
    """Returns the allowed mean difference of a token's log-prob.

    Args:
        tolerance: `rollout.probe_tolerance`.
        rounding: See `Probe.rounding`.
        dtypes: Dtypes of engine and trainer.
        device: Device type of the engine.
    """
    if tolerance is not None:
        return tolerance
    float32_bound = _SINGLE if device == "cpu" else _ROUNDED
    if rounding:
        is_quantized = any(getattr(torch, dtype).itemsize == 1 for dtype in dtypes)
        return max(float32_bound, (_TIMES_OF_8_BITS if is_quantized else _TIMES) * rounding)
    return float32_bound if {*dtypes} == {"float32"} else _HALF


def compare_probe_samples(
    samples: Sequence[ProbeSequence],
    scores: Sequence[tuple[Sequence[float], float]],
    tolerance: float | None,
    dtypes: Collection[str],
    device: str,
    label: str,
) -> float:
    """Compares the log-probs of an engine's samples with the trainer's.

    Args:
        samples: Samples of the engine.
        scores: The trainer's log-probs of each text, and their change by rounding (`Prober.score`).
        tolerance, dtypes, device: See `bound`.
        label: Name of the engine and its weights, for messages.

    Returns:
        Largest mean absolute difference per token over a window of 16 tokens.

    Raises:
        ConfigError: The difference is larger than rounding explains.
    """
    largest_difference = 0.0
    for sequence, (logprobs, rounding) in zip(samples, scores, strict=True):
        limit = bound(tolerance, rounding, dtypes, device)
        count = len(sequence.sampled_logprobs)
        comparisons: list[tuple[str, Any, Any]] = [
            ("tokens that it drew", sequence.sampled_logprobs, logprobs[len(logprobs) - count :])
        ]
        if sequence.scored_logprobs is not None:
            comparisons.append((f"a text of {len(sequence.token_ids)} tokens", sequence.scored_logprobs, logprobs))
        for contents, reported_logprobs, trainer_logprobs in comparisons:
            mean_difference = _max_window_difference(reported_logprobs, trainer_logprobs)
            if not mean_difference <= limit:
                raise ConfigError(
                    f"{label}: the log-probs of {contents} differ from the trainer's by {mean_difference:.3g} a token on "
                    f"average, and rounding explains {limit:g} (rollout.probe_tolerance): the engine would sample from "
                    "another policy than the trained one, so training did not start; take rollout.rollout_backend=hf, another "
                    "version of the engine, or another model"
                )
            largest_difference = max(largest_difference, mean_difference)
    return largest_difference


def _max_window_difference(logprobs: Sequence[float], expected_logprobs: Sequence[float]) -> float:
    """Returns the largest mean absolute difference over windows of `_LENGTH` tokens; NaN if the lengths differ.

    The last window may be longer.
    """
    if len(logprobs) != len(expected_logprobs):
        return float("nan")
    if not len(logprobs):
        return 0.0
    differences = np.abs(np.asarray(logprobs, np.float64) - np.asarray(expected_logprobs, np.float64))
    starts = np.arange(0, max(1, len(differences) - _LENGTH + 1), _LENGTH)
    counts = np.diff([*starts, len(differences)])
    return float((np.add.reduceat(differences, starts) / counts).max())


#: Dtypes of an engine's weights, by `rollout.dtype`; for other values the trainer's dtype is used.
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def sync_of(cfg: GrpoConfig, prompts: PromptMap) -> str:
    """Returns the name of the weight sync strategy for `rollout.weight_sync`; trainer and engines get the same.

    `auto` stands for `shards` if the trainer's ranks hold shards and the engine loads slices, unless each engine shares its
    accelerators with a trainer rank (`PromptMap.sources`), or quantizes. `auto` replaces a strategy with shards for separate
    adapters and several policies, which are sent as full tensors.
    """
    name, rollout = cfg.rollout.weight_sync, cfg.rollout
    if has_separate_adapters(cfg) or cfg.agent.policies:
        return AUTO if sends_shards(name) else name
    can_send_shards = prompts.num_shards > 1 and not (
        prompts.sources or rollout.weight_delta == "elements" or rollout.quantization
    )
    return SHARDS if name.lower() == AUTO and can_send_shards and _takes_shards(cfg) else name


def _takes_shards(cfg: GrpoConfig) -> bool:
    """Returns whether the engine loads the slices that it needs. Models with a vision tower are sent as full tensors."""
    engine: Any = ENGINES.find(cfg.rollout.rollout_backend)
    model = cfg.actor.model
    return getattr(engine, "takes_shards", False) and not has_vision(
        load_model_config(str(model.model_path), model.trust_remote_code)
    )


def reference_sync_of(cfg: GrpoConfig) -> str:
    """Returns the name of the strategy for the reference's weights (`reference.update_interval`), `rollout.weight_sync`.

    `auto` replaces a strategy with shards, because the reference's weights are sent as full tensors.
    """
    return AUTO if sends_shards(cfg.rollout.weight_sync) else cfg.rollout.weight_sync


class ActorWeights:
    """Sender of the actor's weights; all ranks of the actor call each method.

    With most strategies, the ranks of a sharded backend gather each tensor, and rank 0 sends it; or each rank sends it to the
    engines on its own accelerator (`PromptMap.sources`). With strategies that send shards, each rank sends its shards.

    Args:
        worker: Worker of this rank of the actor.
        cfg: The run's configuration.
        prompts: Map with the names of the groups.
        backend: Trainer with the weights.
    """

    def __init__(self, worker: Worker, cfg: GrpoConfig, prompts: PromptMap, backend: ModelTrainer) -> None:
        self._worker = worker
        self._cfg = cfg
        self._prompts = prompts
        self._backend = backend
        self._name, self._sends_adapters = sync_of(cfg, prompts), has_separate_adapters(cfg)
        self._by_shards = sends_shards(self._name)
        if self._by_shards and worker.rank == 0:
            log.info("each of the ranks that hold shards of the weights sends its own to the engines, without a gather")
        self._dtype = _DTYPES.get(cfg.rollout.dtype)
        self._sync: WeightSync | None = None
        self._previous_sync: WeightSync | None = None
        self._reference_sync: WeightSync | None = None
        self._receivers: list[int] = []
        self._sent_names: frozenset[str] = frozenset()
        if worker.rank == 0 and cfg.reference.update_interval and REFERENCE in prompts.scoring:
            ranks = [(REFERENCE, list(range(prompts.scoring[REFERENCE])))]
            self._reference_sync = make_sync(reference_sync_of(cfg), worker, (prompts.actor_name, 0), ranks, "off")

    def send(self, version: int, ranks: Sequence[int], probe: Probe | None, *, engines_wait: bool = False) -> None:
        """Sends the weights and the probe to rollout ranks; frozen weights are sent once, and again if the ranks change.

        Args:
            version: Version of the weights.
            ranks: Ranks of the rollout group.
            probe: The probe; None if there is no probe.
            engines_wait: Whether all engines receive the weights while they are sent, so that no more than a few parts need
                memory at once.
        """
        self._choose_receivers(list(ranks))
        if isinstance(self._sync, BroadcastSync):
            self._sync.require_readers(engines_wait)
        frozen_names = self._frozen_names()
        self._announce(ranks, probe)
        self._send_to_engines(self._sync, version, self._sent_names, frozen_names)
        self._sent_names = frozen_names

    def send_all_weights(self, version: int, ranks: Sequence[int]) -> None:
        """Sends all weights to rollout ranks that have just joined, without a probe."""
        self._announce(ranks, None)
        self._send_to_engines(self._make_sync(list(ranks), "off"), version)

    def refresh_reference(self, version: int) -> None:
        """Sends all weights to the reference's ranks."""
        self._send_full(self._reference_sync, version, self._backend.named_weights(), None)

    def forget(self) -> None:
        """Makes the next update complete, with the frozen weights."""
        self._sent_names = frozenset()
        for sync in (self._sync, self._previous_sync, self._reference_sync):
            if sync is not None:
                sync.forget()

    def _engine_weights(self, excluded_names: Container[str]) -> Named:
        """Yields the weights to send to engines: separate adapters, or all weights except those in `excluded_names`."""
        yield from (
            self._backend.adapters().items() if self._sends_adapters else self._backend.named_weights(excluded_names)
        )

    def _send_full(
        self,
        sync: WeightSync | None,
        version: int,
        weights: Named,
        dtype: torch.dtype | None,
        frozen: frozenset[str] = frozenset(),
    ) -> None:
        """Sends full tensors from the ranks that have a `sync`.

        If the ranks hold shards, the other ranks also iterate the weights, because gathering is collective.
        """
        if sync is not None:
            sync.send(version, _convert(dtype, weights), frozen=frozen)
        elif self._backend.backend.lockstep:
            for _ in weights:
                pass

    def _send_to_engines(
        self,
        sync: WeightSync | None,
        version: int,
        excluded_names: Container[str] = (),
        frozen: frozenset[str] = frozenset(),
    ) -> None:
        """Sends shards, separate adapters, or all weights except those in `excluded_names`."""
        if self._by_shards:
            assert isinstance(sync, SendsShards)
            sync.send_shards(version, self._backend.shards(self._dtype))
            return
        self._send_full(sync, version, self._engine_weights(excluded_names), self._dtype, frozen)

    def _announce(self, ranks: Sequence[int], probe: Probe | None) -> None:
        if self._worker.rank == 0:
            for rank in ranks:
                self._worker.notify(probe, self._prompts.rollout_name, rank, VERSIONS)

    def _make_sync(self, ranks: list[int], delta: str) -> WeightSync | None:
        """Creates a weight sync with rollout ranks; returns None on a rank that sends nothing."""
        prompts, source = self._prompts, 0
        if prompts.sources:
            source, ranks = self._worker.rank, prompts.receivers_of(self._worker.rank, ranks)
        if not ranks or (self._worker.rank != source and not self._by_shards):
            return None
        receivers = [(prompts.rollout_name, ranks)]
        return make_sync(self._name, self._worker, (prompts.actor_name, source), receivers, delta)

    def _choose_receivers(self, ranks: list[int]) -> None:
        """Creates a new weight sync if the receivers have changed; the next update is then complete for all receivers."""
        if ranks == self._receivers:
            return
        self._receivers = ranks
        if self._previous_sync is not None:
            self._previous_sync.forget()
        # A rank may not have received the last version yet, so the old sync is released only at the next change.
        self._previous_sync = self._sync
        self._sync = self._make_sync(ranks, self._cfg.rollout.weight_delta)
        self._sent_names = frozenset()

    def _frozen_names(self) -> frozenset[str]:
        sends_all = self._cfg.rollout.weight_delta == "off"
        return frozenset() if sends_all or self._sends_adapters else self._backend.frozen_names()


def _convert(dtype: torch.dtype | None, weights: Named) -> Named:
    """Returns the weights with floating-point tensors converted to `dtype`; None leaves all tensors unchanged."""
    if dtype is None:
        return weights
    return ((name, tensor.to(dtype) if tensor.is_floating_point() else tensor) for name, tensor in weights)
