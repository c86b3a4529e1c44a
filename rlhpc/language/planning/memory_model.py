"""Memory model of training and serving.

The terms of a decoder layer, in bytes per token, are the tensors that PyTorch's autograd saves for modules of transformers:

    norm            input in float32, normalized input, output                              12 H, or in bfloat16 8 H
    attention       queries, keys and values after rotation, the output, its log-sums       b (2 q + 2 kv) + 4 heads
    normalized q k  float32 input and normalized input                                      8 (q + kv), in bfloat16 6
    gated MLP       gate, SiLU of the gate, up, and the product of the last two             4 b I
    mixture         the MLP tensors, inputs and outputs of each token's experts             k b (4 W + 2 H)
                    (with expert parallelism, too: a rank receives on average as many tokens as it sends and frees)

H is the hidden size, I the inner width of an MLP and W of an expert, k the experts per token, q and kv the widths of queries
and keys, and b the bytes per number. If only adapters are trained, tensors for gradients of frozen weights are not saved: the
normalized inputs of all norms, including the norms of queries and keys.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Set
from dataclasses import dataclass

from rlhpc.config.parallel import MeshSizes
from rlhpc.language.models.logit_chunks import chunk_rows
from rlhpc.language.planning.model_size import ModelSize
from rlhpc.runs.memory.account import MemoryTerm, Moment, gib, process, terms
from rlhpc.runtime.devices import message_budget
from rlhpc.weights.device_sharing import device_chunk_bytes


@dataclass(frozen=True)
class LayerMemory:
    """Memory of a decoder layer, in bytes per token.

    Attributes:
        size: Sizes of the model.
        itemsize: Bytes of a number: 4, or 2 in half precision.
        on_host: Whether the layer is on a CPU, where the samples of a packed sequence are joined after attention.
        adapted: Names of linear layers with adapters if only adapters are trained; None if all weights are trained.
        tensor: Number of ranks that share each matrix.
        eager: Tokens of the longest sample if attention weights are materialized (eager attention); 0 otherwise.
        capacity: Bytes of the accelerator; None if unknown.
    """

    size: ModelSize
    itemsize: int
    on_host: bool = False
    adapted: Set[str] | None = None
    tensor: int = 1
    eager: int = 0
    capacity: float | None = None

    def chunk_rows(self, width: int) -> int:
        """Returns the maximum number of tokens whose logits, `width` each, are computed at once."""
        return chunk_rows(width, is_on_host=self.on_host, memory=self.capacity)

    @property
    def _q(self) -> float:
        return self.size.heads * self.size.head_dim / self.tensor

    @property
    def _kv(self) -> float:
        return max(self.size.kv_heads / self.tensor, 1) * self.size.head_dim

    def norm(self) -> float:
        """Returns the bytes of a norm over the hidden size."""
        float32_bytes, half_bytes = (12.0, 8.0) if self.adapted is None else (8.0, 6.0)
        return (float32_bytes if self.itemsize == 4 else half_bytes) * self.size.hidden

    def attention(self) -> float:
        """Returns the bytes of attention, without the preceding norm."""
        model_size, element_bytes = self.size, self.itemsize
        token_nbytes = element_bytes * (2 * self._q + 2 * self._kv) + 4.0 * model_size.heads / self.tensor
        if self.on_host and not self.eager:
            token_nbytes += element_bytes * self._q
        if model_size.qk_norm:
            token_nbytes += (4.0 if self.adapted is not None else 8.0 if element_bytes == 4 else 6.0) * (
                self._q + self._kv
            )
        if self.eager:
            token_nbytes += (4.0 + element_bytes) * model_size.heads / self.tensor * self.eager
        return token_nbytes

    def feed_forward(self) -> float:
        """Returns the bytes of the MLP, or of the experts of a token."""
        model_size = self.size
        if model_size.experts:
            bytes_per_expert = self.itemsize * (4.0 * model_size.expert_width + 2.0 * model_size.hidden) + 40.0
            return model_size.experts_per_token * bytes_per_expert + 4.0 * model_size.experts
        saved_tensors = 4.0 if self.adapted is None or "down_proj" in self.adapted else 3.0
        return saved_tensors * self.itemsize * model_size.intermediate / self.tensor

    def layer(self) -> float:
        """Returns all bytes that a layer saves for the backward pass."""
        return 2 * self.norm() + self.attention() + self.feed_forward()

    def layer_input(self) -> float:
        """Returns the bytes of a layer's input."""
        return float(self.itemsize * self.size.hidden)

    def rotary_tables(self) -> float:
        """Returns the bytes of the sines and cosines of rotary embeddings, which the model saves once."""
        return 2.0 * self.itemsize * self.size.head_dim

    def layer_gradients(self) -> float:
        """Returns the bytes that the backward pass of a layer adds: gradients in its MLP or experts."""
        model_size, element_bytes = self.size, self.itemsize
        if model_size.experts:
            return element_bytes * (
                model_size.experts_per_token * (2.0 * model_size.expert_width + 2.0 * model_size.hidden)
                + 2.0 * model_size.hidden
            )
        # Peak: gradients of gate and up exist, and the gradient of their product is freed.
        return element_bytes * (2.0 * model_size.intermediate / self.tensor + model_size.hidden)

    def layer_peak(self) -> float:
        """Returns the peak bytes of a layer in a forward pass that saves no activations."""
        model_size, element_bytes = self.size, self.itemsize
        num_inner_elements = (
            model_size.experts_per_token * (3.0 * model_size.expert_width + 2.0 * model_size.hidden)
            if model_size.experts
            else 3.0 * model_size.intermediate / self.tensor
        )
        return max(element_bytes * (2.0 * model_size.hidden + num_inner_elements), 16.0 * model_size.hidden)


def loss_chunk(layers: LayerMemory, num_tokens: int) -> float:
    """Returns the bytes of a chunk of logits in training: logits, log-probs and probabilities in float32, and the logits in
    half precision if the model computes in half precision.
    """
    model_size = layers.size
    if (
        model_size.computes_all_logits
    ):  # each rank of a tensor group computes all logits, and their gradient is as large
        num_rows = min(num_tokens, layers.chunk_rows(model_size.vocabulary))
        return (2.0 * layers.itemsize * num_tokens + 12.0 * num_rows) * model_size.vocabulary
    num_rows = min(num_tokens, layers.chunk_rows(model_size.vocabulary // layers.tensor))
    return (12.0 if layers.itemsize == 4 else 14.0) * num_rows * model_size.vocabulary / layers.tensor


def scoring_chunk(layers: LayerMemory, num_tokens: int) -> float:
    """Returns the bytes of a chunk of logits in scoring, without gradients."""
    model_size = layers.size
    num_rows = min(num_tokens, layers.chunk_rows(model_size.vocabulary))
    all_logits = (
        layers.itemsize * num_tokens * model_size.vocabulary / layers.tensor if model_size.computes_all_logits else 0.0
    )
    return all_logits + (8.0 if layers.itemsize == 4 else 10.0) * num_rows * model_size.vocabulary / layers.tensor


#: Bytes of vLLM besides weights and cache: activations of the largest batch, and CUDA graphs.
_VLLM_OTHER_BYTES = 2.5 * (1 << 30)
#: Growth factor of the KV cache of engine `hf`, and block size and extra columns of it (`hf_forward.KVCache`).
_GROWTH, _BLOCK, _EXTRA_COLUMNS = 1.5, 32, 64
#: Number of chunks of an update in flight in host memory (`weights.sender`).
NUM_CHUNKS = 3
#: Default number of sequences of vLLM on an accelerator and of other engines; maximum bytes of vLLM's cache on a CPU.
_VLLM_SEQUENCES, SEQUENCES, _CPU_CACHE = 256, 64, 4 << 30
_GENERATION, _UPDATE = "generation", "weight update"
_KV_CACHE = "KV cache"


@dataclass(frozen=True)
class Serving:
    """Memory of a model in an engine.

    Attributes:
        size: Sizes of the model.
        engine: `hf`, `vllm`, or another engine's name.
        itemsize: Bytes of a weight.
        accelerated: Whether the rank has an accelerator.
        capacity: Bytes of the accelerator, if known.
        quantized: Whether the weights of decoder layers take one byte each (`rollout.quantization`).
        tensor: Number of ranks of an engine.
        expert: Whether complete experts are divided among the ranks.
        utilization: Fraction of an accelerator that vLLM takes.
        max_batch_size: Configured number of concurrent sequences; None for the engine's default.
        max_step_sequences: Maximum number of sequences of a step per rank.
        prompt, response: Maximum numbers of tokens of a prompt and of a response.
        max_model_len: Maximum number of tokens of a sequence of the engine; None for the model's context.
        copies: Number of copies of the weights on a rank: engine `hf` has a copy for each policy (`agent.policies`).
        section: Name of the section in messages.
        model_path: Path or hub name of the model, for messages.
    """

    size: ModelSize
    engine: str
    itemsize: int
    accelerated: bool
    capacity: float | None
    prompt: int
    response: int
    max_step_sequences: int
    quantized: bool = False
    tensor: int = 1
    expert: bool = False
    utilization: float = 0.6
    max_batch_size: int | None = None
    max_model_len: int | None = None
    copies: int = 1
    section: str = "rollout"
    model_path: str = ""

    @property
    def length(self) -> int:
        """Number of tokens of the run's longest sequence."""
        return min(self.prompt + self.response, self.context)

    @property
    def context(self) -> int:
        """Maximum number of tokens of a sequence in the engine."""
        return self.max_model_len or self.size.context or self.prompt + self.response

    @property
    def weights(self) -> float:
        """Bytes of the weights on a rank."""
        num_quantized = self.size.parameters - self.size.root_parameters if self.quantized else 0
        return self.copies * (self.itemsize * (self.size.parameters - num_quantized) + num_quantized) / self.tensor

    def sequence(self, num_tokens: float) -> float:
        """Returns the bytes of a sequence's keys and values on a rank."""
        return self.size.key_value_bytes(self.itemsize, num_tokens, self.tensor, is_compact=self.engine == "vllm")

    def longest_within(self, max_nbytes: float) -> int:
        """Returns the number of tokens of the longest sequence with keys and values of at most `max_nbytes` bytes."""
        return bisect.bisect_right(range(1, 1 << 40), max_nbytes, key=self.sequence)

    @property
    def sequences(self) -> int:
        """Number of concurrent sequences."""
        default = _VLLM_SEQUENCES if self.engine == "vllm" and self.accelerated else SEQUENCES
        return max(1, min(self.max_batch_size or default, self.max_step_sequences))

    def moments(self) -> tuple[Moment, ...]:
        """Returns the memory terms of each moment on the rank's device."""
        common_terms = (
            *terms(weights=self.weights),
            *self._cache_terms(),
            *self._forward_terms(),
            process(self.accelerated),
        )
        layer_bytes = self.itemsize * sum(self.size.layer_parameters) / self.tensor
        arriving_bytes = max(layer_bytes if self.engine == "vllm" else 0.0, self.itemsize * float(self.size.largest))
        return Moment(_GENERATION, common_terms), Moment(
            _UPDATE, (*common_terms, *terms(arriving_weights=arriving_bytes))
        )

    def beside_trainer(self) -> float:
        """Returns the bytes of a vLLM engine while it takes an update on the trainer's accelerator: its weights, the copy
        of a chunk and the memory that it keeps while it sleeps, but not its cache.
        """
        (update,) = (update_moment for update_moment in self.moments() if update_moment.name == _UPDATE)
        return math.fsum(term.nbytes for term in update.terms if term.name != _KV_CACHE) + device_chunk_bytes(
            message_budget(int(self.capacity or 0))
        )

    def _forward_terms(self) -> tuple[MemoryTerm, ...]:
        if self.engine == "vllm" and self.accelerated:
            return (MemoryTerm("activations and graphs", _VLLM_OTHER_BYTES),)
        layers = LayerMemory(self.size, self.itemsize, not self.accelerated, tensor=self.tensor)
        return terms(
            activations=min(self.sequences, 8) * self.prompt * layers.layer_peak(),
            logits=3.0 * 4.0 * self.sequences * self.size.vocabulary,
        )

    def _cache_terms(self) -> tuple[MemoryTerm, ...]:
        if self.engine == "vllm":
            return (MemoryTerm(_KV_CACHE, self.cache_bytes(), self.describe_cache()),)
        columns = -(-(self.length * _GROWTH + _EXTRA_COLUMNS) // _BLOCK) * _BLOCK
        return terms(
            KV_cache=self.sequences * self.sequence(columns),
            KV_cache_that_grows=self.sequences * self.sequence(self.length),
        )

    def cache_bytes(self) -> float:
        """Returns the bytes of vLLM's KV cache, which holds at least one sequence of full length.

        On an accelerator, the cache gets the rest of vLLM's fraction of the memory.
        """
        min_bytes = self.sequence(self.context)
        if not self.accelerated:
            blocks = self.sequence(128 * (-(-self.context // 128) + 1))
            return max(2 * blocks, min(_CPU_CACHE, blocks * self.sequences))
        if self.capacity is None:
            return max(min_bytes, self.sequences * self.sequence(self.length))
        return max(min_bytes, self.cache_budget())

    def cache_budget(self) -> float:
        """Returns the bytes that vLLM's fraction of the accelerator leaves for the cache."""
        return self.utilization * (self.capacity or 0.0) - self.weights - _VLLM_OTHER_BYTES

    def num_fitting(self) -> int:
        """Returns the number of sequences of the run's maximum length that fit into the cache."""
        return math.floor(self.cache_bytes() / self.sequence(self.length))

    def describe_cache(self) -> str:
        """Formats the size of the cache in sequences."""
        return f"{self.num_fitting()} sequences of {self.length} tokens"

    def refusals(self) -> tuple[str, ...]:
        """Returns the reasons why the engine cannot be created."""
        if self.engine != "vllm" or not self.accelerated or self.capacity is None:
            return ()
        min_cache_bytes = self.sequence(self.context)
        if self.cache_budget() >= min_cache_bytes:
            return ()
        shortage_label = "weights" if self.cache_budget() < 0 else "KV cache"
        return (
            f"{self.section}.gpu_memory_utilization ({self.utilization:g}) gives an engine "
            f"{gib(self.utilization * self.capacity)} of an accelerator; it needs {gib(self.weights)} for weights, "
            f"{gib(_VLLM_OTHER_BYTES)} for activations and graphs, "
            f"{gib(min_cache_bytes)} of KV cache for one sequence of {self.context} tokens; "
            f"the term that does not fit: {shortage_label}",
        )


#: Maximum number of gathered elements in ZeRO-3, and of elements in a gradient bucket (DeepSpeed's defaults).
_MAX_LIVE_ELEMENTS, _BUCKET_ELEMENTS = 10**9, 5 * 10**8
#: Bytes per token of the tensors of a batch: ids, positions, log-probs, advantages and others.
_BATCH_BYTES = 96.0
_LOSS, _BACKWARD, _REDUCTION, STEP = "loss", "backward pass", "gradients of the embeddings", "optimizer step"


@dataclass(frozen=True)
class Training:
    """Memory of a model in training.

    Attributes:
        size: Sizes of the model.
        backend: `local`, `fsdp` or `deepspeed`.
        sizes: Division over the ranks.
        tokens: Number of tokens of a micro-batch.
        itemsize: Bytes of a number in the computation.
        accelerated: Whether the rank has an accelerator.
        lora: Rank of adapters; 0 to train all weights.
        policies: Number of policies, each with separate adapters (`agent.policies`).
        targets: `lora.target_modules`.
        checkpointing: Whether activations are recomputed.
        offload: `fsdp.cpu_offload` (weights, gradients and optimizer are on the host between uses), or
            `deepspeed.cpu_offload`.
        reshard: `fsdp.reshard_after_forward`.
        stage: ZeRO stage.
        reference: Whether the rank also has a frozen copy of the model.
        other_models_bytes: Bytes of other frozen models on the rank, such as a teacher.
        uses_logits: Whether the loss uses logits, rather than one number per token.
        has_head: Whether the model has the LM head.
        separate_embeddings: Whether FSDP gathers embeddings and head separately, if they are two matrices.
        eager, capacity: See `LayerMemory`.
    """

    size: ModelSize
    backend: str
    sizes: MeshSizes
    tokens: int
    itemsize: int
    accelerated: bool
    lora: int = 0
    targets: object = "all-linear"
    checkpointing: bool = False
    offload: bool = False
    reshard: bool = True
    stage: int = 2
    reference: bool = False
    other_models_bytes: float = 0.0
    policies: int = 1
    uses_logits: bool = True
    has_head: bool = True
    separate_embeddings: bool = False
    eager: int = 0
    capacity: float | None = None

    # -- elements ---------------------------------------------------------------------------------------------------

    @property
    def ranks(self) -> int:
        """Number of ranks of the group."""
        return self.sizes.ranks

    @property
    def mixed_precision(self) -> bool:
        """True if the computation has a different dtype than the trained weights."""
        return self.itemsize != 4

    def num_adapter_parameters(self) -> int:
        """Returns the number of elements of all adapters."""
        return (
            self.policies
            * sum(self.lora * (outputs + inputs) for outputs, inputs in self.size.adapted_layers(self.targets).values())
            if self.lora
            else 0
        )

    @property
    def num_trained(self) -> int:
        """Number of trained parameters."""
        return self.num_adapter_parameters() if self.lora else self.size.parameters - self._num_missing_head

    @property
    def _num_missing_head(self) -> int:
        """Number of parameters of the LM head if the model lacks it; 0 otherwise."""
        return 0 if self.has_head or self.size.tied else self.size.embedding

    @property
    def num_frozen(self) -> int:
        """Number of frozen parameters of the model, without the reference."""
        return self.size.parameters - self._num_missing_head if self.lora else 0

    def rank_fraction(self) -> float:
        """Returns the fraction of the model that a rank stores; it is the same for experts and other parameters."""
        mesh_sizes = self.sizes
        return {
            "local": 1.0,
            "fsdp": 1.0 / (mesh_sizes.shard * mesh_sizes.context * mesh_sizes.tensor),
            "deepspeed": 1.0 / self.ranks,
        }[self.backend]

    def layers(self) -> LayerMemory:
        """Returns the memory of a decoder layer, for the activation terms."""
        adapted_modules = (
            {name.rpartition(".")[2] for name in self.size.adapted_layers(self.targets)} if self.lora else None
        )
        return LayerMemory(
            self.size,
            self.itemsize,
            not self.accelerated,
            adapted_modules,
            self.sizes.tensor,
            self.eager,
            self.capacity,
        )

    # -- activations ------------------------------------------------------------------------------------------------

    @property
    def local_tokens(self) -> int:
        """Number of tokens of a micro-batch on a rank."""
        return math.ceil(self.tokens / self.sizes.context)

    def saved_activations(self) -> float:
        """Returns the bytes that the forward pass saves for the backward pass, in all layers."""
        layers = self.layers()
        bytes_per_token = layers.layer_input() if self.checkpointing else layers.layer()
        return self.local_tokens * (self.size.layers * bytes_per_token + layers.rotary_tables() + _BATCH_BYTES)

    def layer_backward(self) -> float:
        """Returns the bytes that the backward pass through one layer adds."""
        layers = self.layers()
        # The saved input of a layer is already counted; in half precision the norm adds a copy of the input in float32.
        recomputed_bytes = layers.layer() - (0.0 if self.mixed_precision else layers.layer_input())
        return self.local_tokens * (recomputed_bytes * self.checkpointing + layers.layer_gradients())

    def terms_at_loss(self) -> tuple[MemoryTerm, ...]:
        """Returns the terms of the loss, in addition to the saved activations."""
        layers, tokens = self.layers(), self.local_tokens
        hidden_bytes = tokens * (layers.norm() + 2 * layers.layer_input())
        if not self.uses_logits:
            return terms(last_hidden_states=hidden_bytes)
        # The head's gradient is summed in float32; in half precision, the gradient of a chunk is added.
        gradient_bytes = 0.0 if self.lora else 6.0 if self.mixed_precision else 4.0
        return terms(
            last_hidden_states=hidden_bytes,
            loss_chunk=loss_chunk(layers, tokens),
            gradient_of_the_head=gradient_bytes * self.size.embedding / layers.tensor,
        )

    def _list_model_terms(self) -> tuple[MemoryTerm, ...]:
        """Returns the terms of the rank's weights, optimizer and frozen models."""
        fraction = self.rank_fraction()
        return terms(
            weights=4.0 * self.num_trained * fraction,
            frozen_weights=self.itemsize * self.num_frozen * fraction,
            optimizer=8.0 * self.num_trained * fraction,
            reference=self.itemsize * self.size.parameters * fraction * (self.reference and not self.lora),
            other_models=self.other_models_bytes,
        )

    # -- by backend -------------------------------------------------------------------------------------------------

    def moments(self) -> tuple[Moment, ...]:
        """Returns the memory terms of each moment on the rank's device."""
        build_terms = {
            "local": self._list_local_moments,
            "fsdp": self._list_fsdp_moments,
            "deepspeed": self._list_deepspeed_moments,
        }[self.backend]
        return tuple(
            Moment(name, (*moment_terms, process(self.accelerated))) for name, moment_terms in build_terms().items()
        )

    def _list_local_moments(self) -> dict[str, tuple[MemoryTerm, ...]]:
        """Returns the memory terms of each moment with the backend `local`."""
        model_size, trained_bytes = self.size, 4.0 * self.num_trained
        base_terms = (
            *self._list_model_terms(),
            *terms(
                gradients=trained_bytes, weights_to_compute_with=self.itemsize * self.num_trained * self.mixed_precision
            ),
        )
        saved_terms = terms(activations=self.saved_activations())
        # The gradient of one weight at a time exists before it is accumulated.
        widest = (
            0
            if self.lora
            else model_size.largest
            if model_size.experts
            else model_size.hidden * model_size.intermediate
        )
        return {
            _LOSS: (*base_terms, *saved_terms, *self.terms_at_loss()),
            _BACKWARD: (
                *base_terms,
                *saved_terms,
                *terms(backward_pass_of_a_layer=self.layer_backward(), gradient_of_a_weight=self.itemsize * widest),
            ),
            STEP: (*base_terms, *terms(optimizer_temporaries=0.0 if self.accelerated else trained_bytes)),
        }

    def _list_fsdp_moments(self) -> dict[str, tuple[MemoryTerm, ...]]:
        """Returns the memory terms of each moment with FSDP2."""
        model_size, mesh_sizes, element_bytes = self.size, self.sizes, self.itemsize
        step_terms = (*self._list_model_terms(), *terms(gradients=4.0 * self.num_trained * self.rank_fraction()))
        if self.offload and self.accelerated:
            step_terms = terms(other_models=self.other_models_bytes)
        expert_parameters, dense_parameters = model_size.layer_parameters
        layer_elements = expert_parameters / mesh_sizes.expert + dense_parameters / mesh_sizes.tensor
        has_gradients = not self.lora  # whether gathered weights have gradients
        gradient_elements = layer_elements * has_gradients
        if (
            self.checkpointing
            and not self.accelerated
            and self.layer_backward() > (element_bytes + 4.0) * gradient_elements
        ):
            # A layer is recomputed before its gradients exist; on a CPU, after the next layer's gradients are summed.
            gradient_elements = 0.0
        layer_terms = terms(
            backward_pass_of_a_layer=self.layer_backward(),
            gathered_layers=element_bytes * layer_elements * (2.0 if self.reshard else model_size.layers),
            gradients_of_a_layer=element_bytes * gradient_elements,
            gradients_being_summed=4.0 * gradient_elements,
        )
        model_terms = (*step_terms, *terms(activations=self.saved_activations()))
        gathered_layer = terms(
            gathered_layers=element_bytes * layer_elements * (1.0 if self.reshard else model_size.layers)
        )
        loss_terms = (*model_terms, *self.terms_at_loss())
        is_separate = self.separate_embeddings and not model_size.tied
        edge_elements = (
            model_size.embedding if is_separate else model_size.root_parameters - self._num_missing_head
        ) / mesh_sizes.tensor
        edge_terms = terms(
            gradients_of_embeddings=element_bytes * edge_elements * has_gradients,
            gradients_being_summed=4.0 * edge_elements * has_gradients,
        )
        if is_separate:  # embeddings and head are gathered separately, and their gradients are summed immediately
            hidden_terms = terms(last_hidden_states=2.0 * self.local_tokens * self.layers().layer_input())
            return {
                _LOSS: (
                    *loss_terms,
                    *gathered_layer,
                    *terms(gathered_embeddings=element_bytes * edge_elements * self.has_head),
                ),
                _REDUCTION: (*model_terms, *hidden_terms, *edge_terms),
                _BACKWARD: (*model_terms, *layer_terms),
                STEP: step_terms,
            }
        # Embeddings and head belong to the root module. It stays gathered, and its gradients are summed at the end.
        root_terms = terms(gathered_embeddings=element_bytes * edge_elements)
        head_bytes = element_bytes * model_size.embedding / mesh_sizes.tensor * has_gradients * self.uses_logits
        return {
            _LOSS: (*loss_terms, *root_terms, *gathered_layer),
            _BACKWARD: (*model_terms, *root_terms, *layer_terms, *terms(gradient_of_the_head=head_bytes)),
            _REDUCTION: (*step_terms, *edge_terms),
            STEP: step_terms,
        }

    def _list_deepspeed_moments(self) -> dict[str, tuple[MemoryTerm, ...]]:
        """Returns the memory terms of each moment with DeepSpeed ZeRO."""
        model_size, element_bytes, num_trained, is_stage_3 = self.size, self.itemsize, self.num_trained, self.stage == 3
        fraction = 1.0 / self.ranks if is_stage_3 else 1.0
        is_offloaded = self.offload and self.accelerated
        shard_bytes = 0.0 if is_offloaded else 4.0 * num_trained / self.ranks
        base_terms = terms(
            weights_to_compute_with=element_bytes * num_trained * fraction * (not (is_stage_3 and is_offloaded)),
            frozen_weights=element_bytes * self.num_frozen * fraction,
            weights=shard_bytes,
            optimizer=2.0 * shard_bytes,
            reference=element_bytes * model_size.parameters * fraction * (self.reference and not self.lora),
            other_models=self.other_models_bytes,
        )
        gradient_terms = terms(gradients=shard_bytes)
        model_terms = (
            *base_terms,
            *terms(
                gathered_layers=element_bytes * min(model_size.parameters, _MAX_LIVE_ELEMENTS) * is_stage_3,
                activations=self.saved_activations(),
            ),
        )
        # Gradients of a micro-batch before reduction: all gradients with stage 1, otherwise a bucket and its contents.
        num_bucket_elements = min(num_trained, _BUCKET_ELEMENTS)
        num_unreduced_elements = num_trained if self.stage == 1 else num_bucket_elements * self.mixed_precision
        backward_terms = terms(
            gradients_being_summed=4.0 * num_bucket_elements + element_bytes * num_unreduced_elements,
            backward_pass_of_a_layer=self.layer_backward(),
        )
        return {
            _LOSS: (*model_terms, *self.terms_at_loss(), *gradient_terms),
            _BACKWARD: (*model_terms, *gradient_terms, *backward_terms),
            STEP: (*base_terms, *gradient_terms, *terms(optimizer_temporaries=4.0 * num_trained / self.ranks)),
        }

    # -- on the host ------------------------------------------------------------------------------------------------

    def host_copy_bytes(self) -> float:
        """Returns the bytes of a host copy of weights and optimizer, made to save a checkpoint or to offload the rank."""
        return 12.0 * self.num_trained * self.rank_fraction()

    def offloaded_bytes(self) -> float:
        """Returns the host bytes of offloaded weights, gradients and optimizer."""
        return 16.0 * self.num_trained * self.rank_fraction() if self.offload and self.accelerated else 0.0
