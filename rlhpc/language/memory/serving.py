"""What a rank holds that writes with a language model: weights, keys and values, and how many sequences these are."""

from __future__ import annotations

import math
from dataclasses import dataclass

from rlhpc.language.memory.layers import Layers
from rlhpc.language.memory.model import ModelSize
from rlhpc.language.memory.process import process
from rlhpc.runs.memory.account import MIB, Moment, Term, gib, terms

#: What vLLM has beside weights and cache: the largest batch's activations and its graphs.
_GRAPHS = 2.5 * (1 << 30)
#: Columns of the cache of engine `hf`: a half more than was needed when it grew, in blocks (`engines.kv.KeyValues`).
_GROWTH, _BLOCK, _MORE = 1.5, 32, 64
#: Bytes of a part of an update, and how many are under way at once (`weights.publish`, `weights.window`).
PART, PARTS = 256 * MIB, 3
#: Sequences of an engine that is not told how many, on an accelerator (vLLM) and elsewhere; most bytes of its cache on a CPU.
VLLM_SEQUENCES, SEQUENCES, CPU_CACHE = 256, 64, 4 << 30
GENERATION, UPDATE = "generation", "weight update"


@dataclass(frozen=True)
class Serving:
    """How an engine holds a model.

    Attributes:
        size: The model.
        engine: `hf`, `vllm`, or another's name.
        itemsize: Bytes of a weight.
        accelerated: Whether on an accelerator.
        room: Bytes of the accelerator, if anybody knows.
        tensor: Ranks of an engine.
        expert: Whether whole experts are divided among them.
        utilization: Part of an accelerator that vLLM takes.
        at_once: Sequences at a time, as configured; None for the engine's own number.
        work: Sequences of a step that a rank has at most.
        prompt, response: Most tokens of each.
        longest: Most tokens of a sequence that the engine is made for; None for the model's context.
        copies: Engines of a rank, each with weights of its own: those of several policies (`agent.policies`) by `hf`.
        section: What messages call the section.
    """

    size: ModelSize
    engine: str
    itemsize: int
    accelerated: bool
    room: float | None
    prompt: int
    response: int
    work: int
    tensor: int = 1
    expert: bool = False
    utilization: float = 0.6
    at_once: int | None = None
    longest: int | None = None
    copies: int = 1
    section: str = "rollout"

    @property
    def length(self) -> int:
        """Tokens of the longest sequence of the run."""
        return min(self.prompt + self.response, self.context)

    @property
    def context(self) -> int:
        """Tokens of the longest sequence that the engine takes."""
        return self.longest or self.size.context or self.prompt + self.response

    @property
    def weights(self) -> float:
        """Bytes of the weights on a rank."""
        return self.copies * self.itemsize * self.size.parameters / self.tensor

    def sequence(self, tokens: float) -> float:
        """Returns the bytes of a sequence's keys and values on a rank."""
        return self.size.key_value_bytes(self.itemsize, tokens, self.tensor, compact=self.engine == "vllm")

    def longest_in(self, nbytes: float) -> int:
        """Returns the number of tokens of the longest sequence whose keys and values a cache holds."""
        low, high = 0, 1 << 40
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.sequence(middle) <= nbytes else (low, middle - 1)
        return low

    @property
    def sequences(self) -> int:
        """Sequences at a time."""
        own = VLLM_SEQUENCES if self.engine == "vllm" and self.accelerated else SEQUENCES
        return max(1, min(self.at_once or own, self.work))

    def moments(self) -> tuple[Moment, ...]:
        """What is there at each moment, where the rank computes."""
        held = (*terms(weights=self.weights), *self._cache(), *self._passing(), process(self.accelerated))
        layer = self.itemsize * sum(self.size.layer_parameters) / self.tensor
        arriving = max(layer if self.engine == "vllm" else 0.0, self.itemsize * float(self.size.largest))
        return Moment(GENERATION, held), Moment(UPDATE, (*held, *terms(arriving_weights=arriving)))

    def _passing(self) -> tuple[Term, ...]:
        layers = Layers(self.size, self.itemsize, not self.accelerated, tensor=self.tensor)
        if self.engine == "vllm" and self.accelerated:
            return (Term("activations and graphs", _GRAPHS),)
        prefill = min(self.sequences, 8) * self.prompt * layers.passing()
        logits = 3.0 * 4.0 * min(self.sequences, self.work) * self.size.vocabulary
        return terms(activations=prefill, logits=logits)

    def _cache(self) -> tuple[Term, ...]:
        if self.engine == "vllm":
            return (Term("KV cache", self.cache_bytes(), self.cache_words()),)
        columns = -(-(self.length * _GROWTH + _MORE) // _BLOCK) * _BLOCK
        rows = self.sequences
        return terms(KV_cache=rows * self.sequence(columns), KV_cache_that_grows=rows * self.sequence(self.length))

    def cache_bytes(self) -> float:
        """Bytes of vLLM's cache: what its part of the accelerator leaves, but no less than a sequence of full length."""
        least = self.sequence(self.context)
        if not self.accelerated:
            blocks = self.sequence(128 * (-(-self.context // 128) + 1))
            return max(2 * blocks, min(CPU_CACHE, blocks * self.sequences))
        if self.room is None:
            return max(least, self.sequences * self.sequence(self.length))
        return max(least, self.left())

    def left(self) -> float:
        """Bytes that vLLM's part of the accelerator leaves for the cache."""
        return self.utilization * (self.room or 0.0) - self.weights - _GRAPHS

    def fitting(self) -> int:
        """Sequences of the run's longest length for which the cache has room."""
        return math.floor(self.cache_bytes() / self.sequence(self.length))

    def cache_words(self) -> str:
        """The cache, in sequences."""
        return f"{self.fitting()} sequences of {self.length} tokens"

    def refusals(self) -> tuple[str, ...]:
        """Why the engine could not be made."""
        if self.engine != "vllm" or not self.accelerated or self.room is None:
            return ()
        share, least = self.utilization * self.room, self.sequence(self.context)
        if self.left() >= least:
            return ()
        term = "weights" if self.weights + _GRAPHS > share else "KV cache"
        return (
            f"{self.section}.gpu_memory_utilization ({self.utilization:g}) gives an engine {gib(share)} of an accelerator; "
            f"it needs {gib(self.weights)} for weights, {gib(_GRAPHS)} for activations and graphs, {gib(least)} of KV cache "
            f"for one sequence of {self.context} tokens; the term that does not fit: {term}",
        )
