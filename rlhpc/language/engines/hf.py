"""Generation engine hf, which runs causal models of transformers on CPUs and accelerators."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from rlhpc.language.data.tokenizer import StopTexts, end_tokens, find_tokenizer, first_line
from rlhpc.language.engines.base import Completion, Request, context_error
from rlhpc.language.engines.batch_invariance import STATE_LAYER_TYPES
from rlhpc.language.engines.common import EngineBase, EngineOptions, checked_update, observed_outputs
from rlhpc.language.engines.hf_forward import Forward, KVCache, plan_row_moves
from rlhpc.language.hugging_face import explain_loading_error, load_model_config, no_progress_bar, transformers
from rlhpc.language.models.loading import auto_class
from rlhpc.language.models.moe_routing import Routing, routing_of
from rlhpc.language.models.vision import place_by_token_type, tower_of
from rlhpc.runtime.devices import empty_cache, move_module
from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.trace_recorder import add_gauge
from rlhpc.training.blueprint import transformer_layers
from rlhpc.weights.delta import Elements, copy_update
from rlhpc.weights.verification import digests

if TYPE_CHECKING:
    from rlhpc.language.config.run import LanguageConfig


def uniforms(request: Request, num_draws: int) -> np.ndarray:
    """Returns a request's random numbers in [0, 1), one per token. The numbers depend only on the request's seed."""
    generator = np.random.Generator(np.random.Philox(key=request.seed % 2**128))
    return generator.random(num_draws)


class RowSampling:
    """Sampling parameters of the running rows, as tensors on the device."""

    def __init__(self, requests: Sequence[Request], vocabulary: int, device: torch.device) -> None:
        temperatures = [request.sampling.temperature for request in requests]
        top_ps = [request.sampling.top_p for request in requests]
        top_ks = [min(k, vocabulary) if (k := request.sampling.top_k) > 0 else vocabulary for request in requests]
        self.temperature = torch.tensor(temperatures, dtype=torch.float32, device=device).unsqueeze(1)
        self.greedy = self.temperature == 0.0
        self.divisor = torch.where(self.greedy, 1.0, self.temperature)
        self.any_greedy = 0.0 in temperatures
        self.all_greedy = not any(temperatures)
        self.has_temperature = any(t not in (0.0, 1.0) for t in temperatures)
        self.has_filters = any(p < 1.0 for p in top_ps) or any(k < vocabulary for k in top_ks)
        self.top_p = torch.tensor(top_ps, dtype=torch.float64, device=device).unsqueeze(1)
        self.top_k = torch.tensor(top_ks, dtype=torch.int64, device=device).unsqueeze(1)


def draw(logits: Tensor, rows: RowSampling, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Samples one token for each row.

    The cumulative probability exceeds the row's random number first at the sampled token, so a row needs one random number
    per token, not one per entry of the vocabulary. The sum is float64, because float32 loses the tail of a large vocabulary.

    Args:
        logits: `[N, V]`.
        rows: Sampling parameters of the N rows.
        noise: `[N]` float64 in [0, 1).

    Returns:
        Token ids `[N]` and their log-probs `[N]` after temperature, before top-p and top-k; rows of temperature 0 get
        the log-probs of temperature 1.
    """
    logits = logits.float()
    if rows.has_temperature:
        logits = logits / rows.divisor
    logprobs = torch.log_softmax(logits, dim=-1)
    if rows.all_greedy:
        tokens = logprobs.argmax(dim=-1, keepdim=True)
        return tokens.squeeze(1), logprobs.gather(1, tokens).squeeze(1)
    mass = logprobs.double().exp_()
    if rows.has_filters:
        # The mask keeps the vocabulary's order, so a row samples the same token whether or not other rows are filtered.
        mass = mass.masked_fill_(~_compute_allowed_mask(mass, rows), 0.0)
    tokens = _pick(mass.cumsum_(dim=-1), noise)
    if rows.any_greedy:
        tokens = torch.where(rows.greedy, logprobs.argmax(dim=-1, keepdim=True), tokens)
    return tokens.squeeze(1), logprobs.gather(1, tokens).squeeze(1)


def _compute_allowed_mask(mass: Tensor, rows: RowSampling) -> Tensor:
    """Returns the mask `[N, V]` of the tokens that top-k and top-p allow.

    Top-p allows a token if the more likely tokens have less than the fraction `top_p` of the mass, and so at least one token.
    """
    sorted_mass, token_order = torch.sort(mass, dim=-1, descending=True, stable=True)
    sorted_mass = sorted_mass.masked_fill_(torch.arange(mass.shape[1], device=mass.device) >= rows.top_k, 0.0)
    cumulative_mass = sorted_mass.cumsum(dim=-1)
    is_allowed = (sorted_mass > 0.0) & (
        (cumulative_mass - sorted_mass < rows.top_p * cumulative_mass[:, -1:]) | (rows.top_p == 1.0)
    )
    return torch.zeros_like(is_allowed).scatter_(1, token_order, is_allowed)


def _pick(sums: Tensor, noise: Tensor) -> Tensor:
    """Returns the index at which each row's cumulative mass exceeds its random number `[N, 1]` times the total mass."""
    total_mass = sums[:, -1:]
    # Strictly below the total, or rounding could point past the last entry that has mass.
    target = torch.minimum(noise.unsqueeze(1) * total_mass, torch.nextafter(total_mass, torch.zeros_like(total_mass)))
    return torch.searchsorted(sums, target, right=True)


class SequenceTable:
    """Table of the running rows as arrays on the host, so that a step over many rows needs few array operations.

    Args:
        max_rows: Maximum number of rows.
        vocabulary: Size of the vocabulary; token ids are smaller.
        end_ids: Tokens that end every response.
        stop_texts: Detector of the texts that end responses (`SamplingParams.stop`).
    """

    def __init__(self, max_rows: int, vocabulary: int, end_ids: frozenset[int], stop_texts: StopTexts) -> None:
        self.requests: list[Request] = []
        #: Routers' choices `[tokens, choices]` for the tokens that the model read in each row, one array per forward pass.
        self.experts: list[list[np.ndarray]] = []
        self._vocabulary = vocabulary
        self._end_ids = end_ids
        self._stop_texts = stop_texts
        self._count, self._limit, self._end_set = (np.zeros(max_rows, dtype=np.int64) for _ in range(3))
        self._has_stop_texts = np.zeros(max_rows, dtype=bool)
        self._tokens, self._versions = (np.zeros((max_rows, 64), dtype=np.int64) for _ in range(2))
        self._logprobs = np.zeros((max_rows, 64), dtype=np.float32)
        self._noise = np.zeros((max_rows, 64), dtype=np.float64)
        #: Row of `_end_masks`, a mask over the vocabulary, for each set of end tokens; at most `max_rows` sets.
        self._end_sets: dict[tuple[int, ...], int] = {}
        self._end_masks = np.zeros((0, vocabulary), dtype=bool)

    def __len__(self) -> int:
        return len(self.requests)

    def add(self, request: Request, limit: int) -> None:
        """Appends a row for a request, with a response of at most `limit` tokens."""
        row = len(self.requests)
        self.requests.append(request)
        self.experts.append([])
        if limit > self._tokens.shape[1]:
            padding = ((0, 0), (0, limit - self._tokens.shape[1]))
            self._tokens, self._versions = np.pad(self._tokens, padding), np.pad(self._versions, padding)
            self._logprobs, self._noise = np.pad(self._logprobs, padding), np.pad(self._noise, padding)
        self._count[row], self._limit[row] = 0, limit
        self._noise[row, :limit] = uniforms(request, limit)
        self._has_stop_texts[row] = bool(request.sampling.stop)
        self._end_set[row] = self._end_set_number(request.sampling.stop_token_ids, row)

    def _end_set_number(self, end_ids: tuple[int, ...], num_rows: int) -> int:
        """Returns the number of a set of end tokens; a new set replaces a set that no row uses, or gets a new number."""
        if end_ids in self._end_sets:
            return self._end_sets[end_ids]
        used_numbers = set(self._end_set[:num_rows].tolist())
        free_set = next(
            (end_set for end_set, set_number in self._end_sets.items() if set_number not in used_numbers), None
        )
        set_number = len(self._end_masks) if free_set is None else self._end_sets.pop(free_set)
        stop_mask = np.zeros((1, self._vocabulary), dtype=bool)
        stop_mask[0, [i for i in {*end_ids, *self._end_ids} if 0 <= i < self._vocabulary]] = True
        if free_set is None:
            self._end_masks = np.concatenate([self._end_masks, stop_mask])
        else:
            self._end_masks[set_number] = stop_mask
        self._end_sets[end_ids] = set_number
        return set_number

    def noise(self, begin: int) -> np.ndarray:
        """Returns the random numbers of the next token of rows from `begin` on."""
        rows = np.arange(begin, len(self.requests))
        return np.asarray(self._noise[rows, self._count[rows]])

    def record(self, begin: int, tokens: np.ndarray, logprobs: np.ndarray, version: int) -> list[tuple[int, str]]:
        """Records the tokens sampled by rows from `begin` on; returns the rows that end, with their finish reasons."""
        rows = np.arange(begin, len(self.requests))
        columns = self._count[rows]
        self._tokens[rows, columns], self._logprobs[rows, columns], self._versions[rows, columns] = (
            tokens,
            logprobs,
            version,
        )
        self._count[rows] += 1
        is_stopped = self._end_masks[self._end_set[rows], tokens]
        for row in rows[self._has_stop_texts[rows] & ~is_stopped].tolist():
            is_stopped[row - begin] = self._stop_texts.is_complete(self.response(row), self.requests[row].sampling.stop)
        is_finished = is_stopped | (self._count[rows] >= self._limit[rows])
        return [(begin + i, "stop" if is_stopped[i] else "length") for i in np.flatnonzero(is_finished).tolist()]

    def response(self, row: int) -> list[int]:
        """Returns the tokens of the response so far."""
        tokens: list[int] = self._tokens[row, : self._count[row]].tolist()
        return tokens

    def completion(self, row: int, reason: str) -> Completion:
        """Returns the response so far as a completion."""
        num_sampled = self._count[row]
        return Completion(
            id=self.requests[row].id,
            token_ids=self.response(row),
            logprobs=self._logprobs[row, :num_sampled].tolist(),
            versions=self._versions[row, :num_sampled].tolist(),
            finish_reason=reason,
            experts=np.concatenate(self.experts[row]) if self.experts[row] else None,
        )

    def move(self, moves: Iterable[tuple[int, int]], num_rows: int) -> None:
        """Moves rows (from, to), then keeps only the first `num_rows` rows."""
        for source_row, target in moves:
            self.requests[target], self.experts[target] = self.requests[source_row], self.experts[source_row]
            for column in self._list_row_arrays():
                column[target] = column[source_row]
        del self.requests[num_rows:], self.experts[num_rows:]

    def clear(self) -> None:
        """Removes all rows."""
        self.requests, self.experts = [], []

    def _list_row_arrays(self) -> tuple[np.ndarray, ...]:
        return (
            self._tokens,
            self._logprobs,
            self._versions,
            self._noise,
            self._count,
            self._limit,
            self._end_set,
            self._has_stop_texts,
        )


#: Layer types for which the rows' cache has keys or states.
_LAYER_TYPES = frozenset({"full_attention", "sliding_attention", "chunked_attention"}) | STATE_LAYER_TYPES
#: Denominator of the fraction of rows that must be free to admit waiting requests, so that prefills come in batches.
_ADMISSION_DENOMINATOR = 8


class HFRollout(EngineBase):
    """Continuous batching over a transformers model's `forward`.

    The engine does not use transformers' `generate`, which takes a fixed batch and ends with the slowest sequence. During
    `generate`, no request can join, the weights cannot change, and rows have no separate random numbers. In this engine, the
    next request replaces a row that ends, and each step is one `forward` of all rows with a cache that is never copied
    (`KVCache`).

    Tokens and log-probs of a request depend, bit for bit, only on the request's prompt, seed, sampling parameters and the
    weights: not on other running requests, the time of arrival, or `rollout.max_batch_size` (`Forward`). This holds on CPUs of
    one type with the same number of threads and the same libraries, unless an update or `offload` interrupts a sequence: the
    engine then recomputes the sequence's cache in one pass. On an accelerator this also requires that a row's results depend
    neither on the row's index nor on the length of the longest row, which the libraries of accelerators do not guarantee.

    Args:
        cfg: The run's configuration.
        model_path: Hugging Face folder or hub name.
        device: Device of the computation.
        seed: Unused: the tokens of a row depend on its request's seed.
    """

    takes_partial_updates = True
    can_score = True

    @property
    def _kv(self) -> KVCache:
        return self._forward.kv

    def __init__(self, cfg: LanguageConfig, *, model_path: str, device: str | torch.device, seed: int = 0) -> None:
        super().__init__()
        del seed
        options = EngineOptions.from_config(cfg, model_path, device)
        config = load_model_config(options.model_path, options.trust_remote_code)
        text_config = config.get_text_config()
        _refuse_layer_types(text_config, options.model_path)
        self._device = torch.device(options.device)
        self._max_rows = options.batch
        self.capacity = options.batch
        self._model = self._load_model(options)
        self._tokenizer = find_tokenizer(options.model_path, options.trust_remote_code)
        self._stop_texts = StopTexts(self._tokenizer, options.model_path)
        self._end_ids = end_tokens(options.model_path, config, self._tokenizer)
        self.vocabulary = int(text_config.vocab_size)
        self.context = context_length(text_config, options)
        self._waiting_requests: deque[Request] = deque()
        with self._explain_memory_errors():
            self._sequences = SequenceTable(self._max_rows, self.vocabulary, self._end_ids, self._stop_texts)
            self._forward = Forward(
                self._model, self._device, self._max_rows, self.context, self.vocabulary, exact=options.exact
            )
        self._exact = options.exact
        self.choices = self._forward.record_routing(self._routers()) if options.returns_experts else 0
        self._stale = False
        self._keeps_cache = options.keeps_cache
        self._sent_tensors: dict[str, Tensor] = {}
        self._row_sampling: RowSampling | None = None
        self._last_tokens: Tensor = torch.empty(0, dtype=torch.int64, device=self._device)
        forward = weakref.ref(self._forward)
        add_gauge(
            "KV cache", "tokens", lambda: None if (hf_forward := forward()) is None else hf_forward.num_cached_tokens()
        )

    def _routers(self) -> Routing:
        routing = routing_of(self._model)
        if routing is None:
            raise ConfigError(
                "rollout.routing_replay: the model has no routers that transformers knows; leave it false"
            )
        return routing

    def _load_model(self, options: EngineOptions) -> Any:
        arguments = {"attn_implementation": options.attn_implementation, **options.engine_kwargs}
        class_name = auto_class(load_model_config(options.model_path, options.trust_remote_code))
        try:
            with self._explain_memory_errors(), no_progress_bar():
                model = getattr(transformers(), class_name).from_pretrained(
                    options.model_path,
                    dtype=getattr(torch, options.dtype),
                    trust_remote_code=options.trust_remote_code,
                    **arguments,
                )
                place_by_token_type(model)
                return move_module(model, self._device).eval().requires_grad_(False)
        except (OSError, ValueError, ImportError, TypeError) as error:
            reason = explain_loading_error(error, "actor.model.model_path")
            raise ConfigError(
                f"the model in {options.model_path!r} (actor.model.model_path) cannot be loaded: {reason}"
            ) from error

    @contextmanager
    def _explain_memory_errors(self) -> Iterator[None]:
        """Converts out-of-memory errors within the block to a ConfigError that names the settings to change."""
        try:
            yield
        except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
            if isinstance(error, RuntimeError) and "alloc" not in str(error) and "out of memory" not in str(error):
                raise
            raise ConfigError(
                f"memory of {self._device} does not suffice for generation: {first_line(error)}; lower "
                f"rollout.max_batch_size ({self._max_rows}), rollout.max_new_tokens or rollout.max_model_len, or take "
                "rollout.dtype bfloat16"
            ) from error

    def observed_layers(self, on_output: Callable[[int, Tensor], None]) -> AbstractContextManager[None]:
        """Observes the decoder layers; see `RolloutBackend.observed_layers`."""
        tower = tower_of(self._model)
        vision_layers = set() if tower is None else {id(layer) for layer in tower.blocks}
        layers = [layer for layer in transformer_layers(self._model) if id(layer) not in vision_layers]
        return observed_outputs(layers, on_output)

    # --- requests

    def _check_request(self, request: Request) -> None:
        super()._check_request(request)
        self._stop_texts.check(request.sampling.stop)

    def _queue(self, requests: Sequence[Request]) -> None:
        self._waiting_requests.extend(requests)

    def _advance(self) -> list[Completion]:
        with torch.inference_mode(), self._explain_memory_errors():
            if self._stale:
                self._recompute_kv_cache()
            free_rows = self._max_rows - self._kv.rows
            completions: list[Completion] = []
            if self._waiting_requests and free_rows >= min(
                len(self._waiting_requests), max(1, self._max_rows // _ADMISSION_DENOMINATOR)
            ):
                completions += self._admit(
                    [self._waiting_requests.popleft() for _ in range(min(free_rows, len(self._waiting_requests)))]
                )
            if self._kv.rows:
                completions += self._decode()
        return completions

    def _admit(self, requests: list[Request]) -> list[Completion]:
        """Prefills prompts, each once, and samples the first token of each request."""
        requests_by_prompt: dict[tuple[tuple[int, ...], tuple[bytes, ...]], list[Request]] = {}
        for request in requests:
            digests = () if request.images is None else request.images.digests
            requests_by_prompt.setdefault((request.prompt_ids, digests), []).append(request)
        grouped_requests = [request for prompt_requests in requests_by_prompt.values() for request in prompt_requests]
        prompt_indices = [
            index for index, prompt_requests in enumerate(requests_by_prompt.values()) for _ in prompt_requests
        ]
        first_requests = [prompt_requests[0] for prompt_requests in requests_by_prompt.values()]
        logits = self._forward.prefill(
            [first_request.prompt_ids for first_request in first_requests],
            prompt_indices,
            [first_request.images for first_request in first_requests],
        )
        first_row = len(self._sequences)
        for request, prompt_index in zip(grouped_requests, prompt_indices, strict=True):
            self._sequences.add(request, self._max_response_tokens(request))
            self._sequences.experts[-1] += self._forward.experts[prompt_index : prompt_index + 1]
        sampling = RowSampling(grouped_requests, self.vocabulary, self._device)
        return self._draw(first_row, logits[torch.tensor(prompt_indices, device=self._device)], sampling)

    def _draw(self, begin: int, logits: Tensor, sampling: RowSampling) -> list[Completion]:
        """Samples a token for each row from `begin` on; removes the rows that end, and returns their completions."""
        sequences = self._sequences
        noise = torch.from_numpy(sequences.noise(begin)).to(self._device)
        tokens, logprobs = draw(logits, sampling, noise)
        if self._exact:
            from rlhpc.language.engines.exact import token_logprobs

            logprobs = token_logprobs(logits, tokens, sampling.divisor)
        self.num_drawn += len(tokens)
        self._last_tokens = torch.cat([self._last_tokens[:begin], tokens])
        finished_rows = sequences.record(begin, tokens.cpu().numpy(), logprobs.cpu().numpy(), self.version)
        completions = [sequences.completion(row, finish_reason) for row, finish_reason in finished_rows]
        if finished_rows:
            self._remove([row for row, _ in finished_rows])
        if finished_rows or begin:
            self._row_sampling = None
        return completions

    def _remove(self, rows: list[int]) -> None:
        """Removes rows and moves the last rows into their places."""
        num_rows = len(self._sequences)
        # A stale cache is recomputed from the tokens; it may have no rows at all.
        row_moves = plan_row_moves(num_rows, rows) if self._stale else self._kv.drop(rows)
        num_remaining = num_rows - len(rows)
        self._sequences.move(row_moves, num_remaining)
        if row_moves:
            moved_rows, freed_rows = (list(row_numbers) for row_numbers in zip(*row_moves, strict=True))
            self._last_tokens[freed_rows] = self._last_tokens[moved_rows]
        self._last_tokens = self._last_tokens[:num_remaining]

    def _decode(self) -> list[Completion]:
        """Samples the next token of each row; returns the completions of the rows that end."""
        logits = self._forward.decode(self._last_tokens)
        for row_experts, last_experts in zip(self._sequences.experts, self._forward.experts, strict=False):
            row_experts.append(last_experts)
        if self._row_sampling is None:
            self._row_sampling = RowSampling(self._sequences.requests, self.vocabulary, self._device)
        return self._draw(0, logits, self._row_sampling)

    def _recompute_kv_cache(self) -> None:
        """Recomputes the cache of prompts and responses so far with the current weights."""
        table = self._sequences
        self._kv.clear()
        self._stale = False
        # The last token of each row is the next step's input.
        sequences = [(*request.prompt_ids, *table.response(row)[:-1]) for row, request in enumerate(table.requests)]
        if sequences:
            self._forward.prefill(sequences, range(len(sequences)), [request.images for request in table.requests])
            table.experts = [self._forward.experts[row : row + 1] for row in range(len(sequences))]

    def _drop(self, ids: Collection[int]) -> None:
        self._waiting_requests = deque(request for request in self._waiting_requests if request.id not in ids)
        if rows := [row for row, request in enumerate(self._sequences.requests) if request.id in ids]:
            with torch.inference_mode():
                self._remove(rows)
            self._row_sampling = None

    def sampled_tokens(self, ids: Collection[int]) -> dict[int, list[int]]:
        """Returns the tokens of running requests; see `RolloutBackend.sampled_tokens`."""
        rows = enumerate(self._sequences.requests)
        return {request.id: self._sequences.response(row) for row, request in rows if request.id in ids}

    def _abort(self) -> list[Completion]:
        aborted_completions = [self._sequences.completion(row, "abort") for row in range(len(self._sequences))]
        aborted_completions += [Completion(id=request.id, finish_reason="abort") for request in self._waiting_requests]
        self._waiting_requests.clear()
        self._sequences.clear()
        self._row_sampling, self._last_tokens = None, self._last_tokens[:0]
        self._kv.clear()
        self._stale = False
        return aborted_completions

    # --- weights

    def update_weights(
        self, version: int, named_tensors: Iterable[tuple[str, Tensor | Elements]], *, complete: bool = True
    ) -> None:
        """Loads new weights (`RolloutBackend.update_weights`)."""
        state_dict = self._model.state_dict(keep_vars=True)
        shapes = {name: tuple(tensor.shape) for name, tensor in state_dict.items()}
        required_shapes = {name: shapes.pop(name) for name, _ in self._model.named_parameters()}
        self._begin_update(version)
        with torch.no_grad():
            for name, weight_update in checked_update(
                named_tensors, required_shapes, optional=shapes, complete=complete
            ):
                copy_update(state_dict[name], weight_update)
                if state_dict[name].dtype == weight_update.dtype:
                    self._sent_tensors[name] = state_dict[name]
                else:
                    self._sent_tensors.pop(name, None)
        self._stale = self._stale or not self._keeps_cache
        self._end_update(version)

    def needs(self) -> frozenset[str]:
        """Returns the names of the weights in a complete update."""
        return frozenset(name for name, _ in self._model.named_parameters())

    def score(self, token_ids: Sequence[int], policy: int = 0) -> list[float]:
        """Returns the log-probs of a text; see `RolloutBackend.score`."""
        ids = torch.tensor([list(token_ids)], device=self._device)
        with torch.inference_mode(), self._explain_memory_errors():
            logprobs = self._model(input_ids=ids, use_cache=False).logits[0, :-1].float().log_softmax(-1)
        scores: list[float] = logprobs.gather(1, ids[0, 1:, None]).squeeze(1).tolist()
        return scores

    def parameter_digests(self) -> dict[str, int]:
        """Returns a digest of each parameter; see `RolloutBackend.parameter_digests`."""
        return digests(((name, parameter.detach()) for name, parameter in self._model.named_parameters()), 0)

    def held(self, name: str) -> Tensor | None:
        """Returns a current tensor; see `RolloutBackend.held`."""
        return self._sent_tensors.get(name)

    def offload(self) -> None:
        """Frees the cache and moves the weights to the host; see `RolloutBackend.offload`.

        The next step recomputes the cache of running requests.
        """
        self._forward.free()
        self._stale = True
        if self._device.type != "cpu":
            self._model.to("cpu")
            empty_cache()

    def reload(self) -> None:
        """Reverses `offload`; see `RolloutBackend.reload`."""
        with self._explain_memory_errors():
            self._model.to(self._device)

    def close(self) -> None:
        """Shuts the engine down; see `RolloutBackend.close`."""
        self._abort()
        self._forward.free()
        self._model = None
        self._sent_tensors.clear()


def context_length(config: Any, options: EngineOptions) -> int:
    """Returns the maximum length of prompt and response.

    Raises:
        ConfigError: `rollout.max_model_len` is beyond the model's context, or both are unknown.
    """
    model_context = getattr(config, "max_position_embeddings", None)
    if options.max_model_len is None:
        if model_context is None:
            raise ConfigError(
                f"the model in {options.model_path!r} does not say its context; set rollout.max_model_len"
            )
        return int(model_context)
    if model_context is not None and options.max_model_len > model_context:
        raise ConfigError(context_error("rollout.max_model_len", options.max_model_len, model_context))
    return options.max_model_len


def _refuse_layer_types(config: Any, model_path: str) -> None:
    """Raises ConfigError for models with layers for which the rows' cache has neither keys nor states."""
    unsupported_types = set(getattr(config, "layer_types", None) or ()) - _LAYER_TYPES
    if unsupported_types:
        raise ConfigError(
            f"the model in {model_path!r} has layers of kind {', '.join(sorted(unsupported_types))}, which "
            "rollout.rollout_backend hf cannot make tokens with (it has attention to all tokens or a window of them, and "
            "recurrent states); vllm has its own layers, and the check at the start of a run says whether it takes updates of "
            "them"
        )
