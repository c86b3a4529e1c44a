"""vLLM engine in the rollout rank's process: the GPU build and the CPU build."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from rlhpc.checkpoint.tensor_slice import TensorSlice
from rlhpc.language.data.tokenizer import StopTexts, end_tokens, find_tokenizer
from rlhpc.language.engines.base import Completion, Request
from rlhpc.language.engines.common import EngineBase, EngineOptions, WeightUpdateError, checked_update, observed_outputs
from rlhpc.language.engines.vllm_adapter import (
    cache_block_usage,
    decoder_layers,
    renamed_tensors,
    set_adapter,
    sum_with_residual,
)
from rlhpc.language.engines.vllm_images import image_prompt
from rlhpc.language.engines.vllm_launch import PRELOAD, VLLMProcess
from rlhpc.language.engines.vllm_logprobs import log_before_filters
from rlhpc.language.engines.vllm_weights import (
    FileNames,
    TensorSlices,
    is_mixture,
    packing_kernels,
    reload_counted,
    require_all_loaded,
    tensors_of,
    wanted_slices,
    with_tied_names,
)
from rlhpc.language.hugging_face import load_model_config, transformers
from rlhpc.language.models.loading import auto_class
from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.text import format_names
from rlhpc.runtime.trace_recorder import add_gauge
from rlhpc.weights.verification import COST, digests

if TYPE_CHECKING:
    from rlhpc.language.config.run import LanguageConfig
    from rlhpc.language.engines.multi_rank import EngineLink


#: Adapter ranks that vLLM's kernels support.
_ADAPTER_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
_PEFT_PREFIX = "base_model.model."


class Adapters:
    """LoRA adapters of one engine.

    Args:
        rank, alpha: Options of `actor.lora`.
        shapes: Shapes of the base model's weights, by name.
        policies: Names of the policies, each with separate adapters; empty for a single policy.

    Raises:
        ConfigError: vLLM has no kernels for such adapters.
    """

    def __init__(
        self, rank: int, alpha: int, shapes: Mapping[str, tuple[int, ...]], policies: Sequence[str] = ()
    ) -> None:
        if rank > _ADAPTER_RANKS[-1]:
            raise ConfigError(
                f"actor.lora.rank is {rank}, and vLLM takes adapters of at most {_ADAPTER_RANKS[-1]}; lower it, or set "
                "rollout.merge_adapters=true"
            )
        self._rank = rank
        self._alpha = alpha
        self._shapes = shapes
        self._policies = tuple(policies)
        self._names = frozenset[str]()

    def arguments(self) -> dict[str, Any]:
        """Returns the engine's arguments for LoRA."""
        return {
            "enable_lora": True,
            "max_loras": max(1, len(self._policies)),
            "max_lora_rank": next(r for r in _ADAPTER_RANKS if r >= self._rank),
        }

    def request(self, policy: int) -> Any:
        """Returns the LoRA request for the adapters of a policy; None before the first update."""
        if not self._names:
            return None
        from vllm.lora.request import LoRARequest

        name = self._policies[policy] if self._policies else "actor"
        return LoRARequest(name, policy + 1, "nowhere: the weights come from the actor")

    def fitting(self, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        """Checks an update's tensors and returns copies of them on the host.

        Raises:
            WeightUpdateError: A tensor is unknown, duplicate or missing; the message names it.
        """
        tensors = dict[str, torch.Tensor]()
        for name, tensor in named_tensors:
            policy, _, tensor_name = name.rpartition("/")
            layer, _, factor_name = tensor_name.removeprefix(_PEFT_PREFIX).removesuffix(".weight").rpartition(".")
            weight_shape = self._shapes.get(f"{layer}.weight", (0, 0))
            expected_shape = {"lora_A": (self._rank, weight_shape[1]), "lora_B": (weight_shape[0], self._rank)}.get(
                factor_name
            )
            if tuple(tensor.shape) != expected_shape or policy not in (self._policies or ("",)):
                raise WeightUpdateError(
                    f"a weight update brought {name!r} of shape {tuple(tensor.shape)}; "
                    + (
                        f"{expected_shape} is wanted"
                        if expected_shape and weight_shape != (0, 0)
                        else "the model has no such adapter"
                    )
                )
            if name in tensors:
                raise WeightUpdateError(f"a weight update brought {name!r} twice")
            tensors[name] = tensor.detach().to("cpu", copy=True)
        missing_names = sorted(
            (self._names - tensors.keys())
            | {_swap_factor_name(name) for name in tensors if _swap_factor_name(name) not in tensors}
        )
        if missing_names or not tensors:
            raise WeightUpdateError(f"a weight update left out {format_names(missing_names) or 'all adapters'}")
        if missing_policies := [
            policy for policy in self._policies if not any(name.startswith(f"{policy}/") for name in tensors)
        ]:
            raise WeightUpdateError(f"a weight update left out the adapters of policy {missing_policies[0]}")
        self._names = frozenset(tensors)
        return tensors

    def by_policy(self, tensors: Mapping[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
        """Returns an update's tensors for each policy, with their names in peft's files."""
        return [
            {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
            for prefix in [f"{policy}/" for policy in self._policies] or [""]
        ]

    def config(self, names: Iterable[str]) -> dict[str, Any]:
        """Returns the part of peft's adapter configuration that vLLM needs."""
        target_modules = sorted({name.split(".lora_")[0].rpartition(".")[2] for name in names})
        return {"r": self._rank, "lora_alpha": self._alpha, "target_modules": target_modules}


def _swap_factor_name(name: str) -> str:
    return name.replace(".lora_A.", ".lora_B.") if ".lora_A." in name else name.replace(".lora_B.", ".lora_A.")


#: Name of the request that `score` submits.
_PROBE = "probe"


@dataclass
class _RunningRequest:
    """Running request with the response so far.

    Attributes:
        request: The request of the caller.
        token_ids, logprobs: Tokens that vLLM has returned so far, and their log-probs.
        version_marks: (number of tokens, version) at each update during the request: `version` sampled the tokens up to this
            number.
    """

    request: Request
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    version_marks: list[tuple[int, int]] = field(default_factory=list)

    def completion(self, version: int, reason: str) -> Completion:
        """Returns the completion; `version` sampled the tokens after the last update."""
        versions: list[int] = []
        for tokens, version_until in (*self.version_marks, (len(self.token_ids), version)):
            versions += [version_until] * (tokens - len(versions))
        return Completion(self.request.id, self.token_ids, self.logprobs, versions, reason)


class VLLMRollout(VLLMProcess, EngineBase):
    """vLLM's `LLMEngine` for sampling.

    Args:
        cfg: The run's configuration.
        model_path: Hugging Face folder or hub name.
        device: `cpu` for the CPU build; a GPU build takes the rank's first visible accelerator.
        seed: Seed of the engine.
        link: Connection to the other ranks of an engine group (`multi_rank`).

    Raises:
        ConfigError: vLLM is not installed or of the wrong build, the model does not exist, or memory does not suffice.
    """

    awaiting: ClassVar[Mapping[str, Any] | None] = {"load_format": "dummy"}
    preload = PRELOAD
    can_score = True
    takes_shards = True
    has_seeds = True

    def __init__(
        self,
        cfg: LanguageConfig,
        *,
        model_path: str,
        device: str | torch.device,
        seed: int = 0,
        link: EngineLink | None = None,
    ) -> None:
        EngineBase.__init__(self)
        options = EngineOptions.from_config(cfg, model_path, device)
        config = load_model_config(options.model_path, options.trust_remote_code)
        self._tokenizer = find_tokenizer(options.model_path, options.trust_remote_code)
        self._stop_texts = StopTexts(self._tokenizer, options.model_path)
        self._end_ids = end_tokens(options.model_path, config, self._tokenizer)
        self.vocabulary = int(config.get_text_config().vocab_size)
        model = _build_on_meta(config, options)
        self._required_shapes, self._optional, self._aliases = tensors_of(model)
        aliases = {alias for alias_names in self._aliases.values() for alias in alias_names}
        buffer_names = self._optional.keys() - aliases
        if buffer_names:
            # An update may omit the model's buffers, so the engine reads them from the files, even if all weights come later.
            engine_kwargs = {**options.engine_kwargs}
            if engine_kwargs.get("load_format") == "dummy":
                del engine_kwargs["load_format"]
            options = replace(options, engine_kwargs=engine_kwargs)
        self._experts = FileNames(model) if is_mixture(config) else None
        self._adapters = (
            None if options.adapters is None else Adapters(*options.adapters, self._required_shapes, options.policies)
        )
        self._running_requests: dict[str, _RunningRequest] = {}
        self._broken_update = ""
        self._slept = False
        VLLMProcess.__init__(self, options, config, seed, link)
        self._renamed_buffers: dict[str, str] = self._engine.collective_rpc(
            renamed_tensors, args=(sorted(buffer_names),)
        )[0]
        self._untrained_parts = frozenset(name.rpartition(".")[2] for name in (*buffer_names, *self._renamed_buffers))
        self.context = int(self._engine.model_config.max_model_len)
        self.capacity = int(self._engine.vllm_config.scheduler_config.max_num_seqs)
        self.chunk = int(self._engine.vllm_config.scheduler_config.max_num_batched_tokens)
        self._needed_slices: TensorSlices | None = None
        engine = weakref.ref(self._engine)
        add_gauge(
            "KV cache", "%", lambda: None if (vllm_engine := engine()) is None else 100 * cache_block_usage(vllm_engine)
        )
        self._expected_sizes = {name: math.prod(shape) for name, shape in self._shapes().items()}
        if link is not None:
            tensor_slices = self._find_slices()
            self._expected_sizes = {
                name: sum(tensor_slice.numel for tensor_slice in tensor_slices.get(name, ()))
                for name in self._expected_sizes
            }
        self._filters_logged = all(self._engine.collective_rpc(log_before_filters))
        if self._experts and not self._is_on_cpu and (kernels := self._engine.collective_rpc(packing_kernels)[0]):
            raise ConfigError(
                f"rollout.engine_kwargs: vLLM's {', '.join(kernels)} keep experts in a form that weight updates do not reach; "
                "set moe_backend: triton"
            )

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        """Returns the shapes of the tensors that the loader must place, by the names that it knows."""
        meta_tensors = {name: torch.empty(list(shape), device="meta") for name, shape in self._required_shapes.items()}
        files = self._experts(meta_tensors.items()) if self._experts else meta_tensors.items()
        return {name: tuple(tensor.shape) for name, tensor in files}

    def _find_slices(self) -> TensorSlices:
        """Returns the slices that this rank's loaders copy from each tensor, with repetitions, under all tied names."""
        if self._needed_slices is None:
            shapes = self._shapes()
            shapes |= {alias: shapes[name] for name, alias_names in self._aliases.items() for alias in alias_names}
            self._needed_slices = self._engine.collective_rpc(wanted_slices, args=(shapes,))[0]
        return self._needed_slices

    def wants(self) -> dict[str, tuple[TensorSlice, ...]]:
        """Returns the slices that this rank needs, with one name for tied weights; see `RolloutBackend.wants`."""
        slices_by_name, first_names = (
            self._find_slices(),
            {alias: name for name, alias_names in self._aliases.items() for alias in alias_names},
        )
        merged_slices = dict[str, dict[TensorSlice, None]]()
        for name, tensor_slices in slices_by_name.items():
            merged_slices.setdefault(first_names.get(name, name), {}).update(dict.fromkeys(tensor_slices))
        return {name: tuple(tensor_slices) for name, tensor_slices in merged_slices.items()}

    def _arguments(self) -> dict[str, Any]:
        # After temperature, which is right except for rows with top-p or top-k: see `log_before_filters`.
        arguments: dict[str, Any] = {"logprobs_mode": "processed_logprobs"}
        if self._options.keeps_cache:
            # A step that runs during an update would sample with the old weights, but count as the new version.
            arguments["async_scheduling"] = False
        if self._adapters is not None:
            arguments |= self._adapters.arguments()
        if self._experts and not self._is_on_cpu:
            # Other kernels shuffle the loaded expert weights, which a weight update cannot do.
            arguments["moe_backend"] = "triton"
        return arguments

    # --- requests

    def _check_request(self, request: Request) -> None:
        super()._check_request(request)
        sampling = request.sampling
        self._stop_texts.check(sampling.stop)
        if not self._filters_logged and (sampling.top_p < 1.0 or sampling.top_k > 0):
            raise ConfigError(
                "this vLLM does not give the log-probs that losses need where rollout.top_p or top_k is on; turn them off, or "
                "take rollout_backend hf"
            )

    def _queue(self, requests: Sequence[Request]) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        for request in requests:
            sampling = request.sampling
            name = str(request.id)
            parameters = SamplingParams(
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                top_k=sampling.top_k,
                max_tokens=self._max_response_tokens(request),
                seed=request.seed % 2**63,
                stop_token_ids=sorted({*sampling.stop_token_ids, *self._end_ids}),
                ignore_eos=True,
                logprobs=0,
                flat_logprobs=True,
                detokenize=False,
                # Returning each token costs a tenth of a small model's step.
                output_kind=RequestOutputKind.DELTA if sampling.stop else RequestOutputKind.FINAL_ONLY,
            )
            prompt: dict[str, Any] = {"prompt_token_ids": list(request.prompt_ids)}
            if request.images is not None:
                prompt = image_prompt(request.prompt_ids, request.images)
            if self._options.keeps_cache:  # excludes keys and values that were computed before an update
                prompt["cache_salt"] = str(self.version)
            self._engine.add_request(name, prompt, parameters, lora_request=self._make_lora_request(sampling.policy))
            self._running_requests[name] = _RunningRequest(request)

    def _advance(self) -> list[Completion]:
        with self._explain_errors():
            outputs = self._engine.step()
        return self._collect_finished(outputs)

    def _collect_finished(self, outputs: Iterable[Any]) -> list[Completion]:
        completions: list[Completion] = []
        for output in outputs:
            running_request = self._running_requests.get(output.request_id)
            if running_request is None:
                continue
            sequence = output.outputs[0]
            running_request.token_ids += sequence.token_ids
            self.num_drawn += len(sequence.token_ids)
            running_request.logprobs += sequence.logprobs.logprobs
            finish_reason = str(sequence.finish_reason) if output.finished else ""
            stop_texts = running_request.request.sampling.stop
            if (
                stop_texts
                and finish_reason != "stop"
                and sequence.token_ids
                and self._stop_texts.is_complete(running_request.token_ids, stop_texts)
            ):
                if not finish_reason:
                    self._engine.abort_request([output.request_id])
                finish_reason = "stop"
            if finish_reason:
                completions.append(
                    self._running_requests.pop(output.request_id).completion(self.version, finish_reason)
                )
        return completions

    def _iter_running(self) -> Iterator[tuple[_RunningRequest, list[int], list[float]]]:
        """Yields running requests with all their tokens and log-probs, including those that vLLM has not returned yet."""
        for request_state in self._engine.output_processor.request_states.values():
            running_request = self._running_requests.get(request_state.external_req_id)
            if running_request is not None:
                yield (
                    running_request,
                    list(request_state.detokenizer.output_token_ids),
                    list(request_state.logprobs_processor.logprobs.logprobs),
                )

    def _drop(self, ids: Collection[int]) -> None:
        request_names = [str(request_id) for request_id in ids]
        self._engine.abort_request(request_names)
        for name in request_names:
            self._running_requests.pop(name, None)

    def sampled_tokens(self, ids: Collection[int]) -> dict[int, list[int]]:
        """Returns the tokens of running requests; see `RolloutBackend.sampled_tokens`."""
        return {
            running_request.request.id: tokens
            for running_request, tokens, _ in self._iter_running()
            if running_request.request.id in ids
        }

    def _abort(self) -> list[Completion]:
        for running_request, token_ids, logprobs in self._iter_running():
            running_request.token_ids, running_request.logprobs = token_ids, logprobs
        self._engine.abort_request(list(self._running_requests))
        aborted_completions = [
            running_request.completion(self.version, "abort") for running_request in self._running_requests.values()
        ]
        self._running_requests.clear()
        return aborted_completions

    # --- weights

    def update_weights(
        self, version: int, named_tensors: Iterable[tuple[str, Tensor]], *, complete: bool = True
    ) -> None:
        """Loads new weights; see `RolloutBackend.update_weights`.

        vLLM loads tensors layer by layer into the tensors of its kernels, and retains the source tensors until a layer is
        complete. Therefore the caller may drop a tensor, but not write to a tensor, before the update is over. Running
        requests keep their cache with `rollout.keep_cache_on_update`. Otherwise the next step that schedules a request
        prefills its prompt and response so far.

        Raises:
            WeightUpdateError: vLLM did not apply the adapter.
        """
        self._begin_load(version)
        if self._adapters is not None:
            for policy, tensors in enumerate(self._adapters.by_policy(self._adapters.fitting(named_tensors))):
                arguments = (policy + 1, tensors, self._adapters.config(tensors))
                if not self._engine.collective_rpc(set_adapter, args=arguments)[0]:
                    raise WeightUpdateError(f"vLLM has put no adapter of version {version} anywhere")
            self._finish_load(version)
            return
        weights = with_tied_names(checked_update(named_tensors, self._required_shapes, self._optional), self._aliases)
        self._load_weights(version, self._experts(weights) if self._experts else weights)

    def update_shards(self, version: int, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Loads the slices of this rank; see `RolloutBackend.update_shards`."""
        self._begin_load(version)
        shapes = self._shapes()
        required_shapes = {name: shapes[name] for name in self.wants()}
        self._load_weights(version, with_tied_names(checked_update(named_tensors, required_shapes, {}), self._aliases))

    def _begin_load(self, version: int) -> None:
        if self._broken_update:
            raise WeightUpdateError(self._broken_update)
        self._begin_update(version)
        # An interrupted update leaves vLLM with partly loaded layers, which a second update does not repair.
        self._broken_update = f"the update to version {version} of vLLM's weights broke off; restart the rollout group"

    def _load_weights(self, version: int, named_tensors: Iterator[tuple[str, Tensor]]) -> None:
        (load_counts,) = self._engine.collective_rpc(
            reload_counted, args=(named_tensors, bool(self._experts and self._is_on_cpu), self._untrained_parts)
        )
        with COST.measure():
            require_all_loaded(load_counts, self._expected_sizes, version)
        self._finish_load(version)

    def _make_lora_request(self, policy: int) -> Any:
        """Returns the LoRA request of a policy; None if there are no adapters."""
        return None if self._adapters is None else self._adapters.request(policy)

    def _reset_kv_cache(self) -> None:
        """Drops the KV cache, so that vLLM prefills running requests again with the current weights."""
        self._engine.reset_prefix_cache(reset_running_requests=True)

    def _finish_load(self, version: int) -> None:
        """Finishes an update whose tensors are all loaded: resets caches and sets the version."""
        if not self._options.keeps_cache:
            self._reset_kv_cache()
        if self._has_images:  # the old weights computed the cached image features
            self._engine.reset_encoder_cache()
        for running_request, token_ids, _ in self._iter_running():
            running_request.version_marks.append((len(token_ids), self.version))
        self._broken_update = ""
        self._end_update(version)

    def parameter_digests(self) -> dict[str, int]:
        """Returns a digest of each parameter of vLLM's model; see `RolloutBackend.parameter_digests`. Buffers have the names
        that they have in the trainer.
        """
        digests_by_name: dict[str, int] = self._engine.collective_rpc(_compute_parameter_digests)[0]
        return {self._renamed_buffers.get(name, name): digest for name, digest in digests_by_name.items()}

    def observed_layers(self, on_output: Callable[[int, Tensor], None]) -> AbstractContextManager[None]:
        """Observes the decoder layers; see `RolloutBackend.observed_layers`.

        Raises:
            ConfigError: vLLM runs compiled layers or CUDA graphs, which call no hooks.
        """
        if not self._engine.vllm_config.model_config.enforce_eager:
            raise ConfigError("vLLM's layers can be observed with rollout.engine_kwargs={enforce_eager: true} alone")
        layers: list[Any] = self._engine.collective_rpc(decoder_layers)[0]
        return observed_outputs(layers, on_output, sum_with_residual)

    def score(self, token_ids: Sequence[int], policy: int = 0) -> list[float]:
        """Returns the log-probs of a text with the adapters of a policy; see `RolloutBackend.score`."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        parameters = SamplingParams(
            temperature=0.0,
            max_tokens=1,
            ignore_eos=True,
            detokenize=False,
            flat_logprobs=True,
            prompt_logprobs=0,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        lora_request = self._make_lora_request(policy)
        self._engine.add_request(_PROBE, {"prompt_token_ids": list(token_ids)}, parameters, lora_request=lora_request)
        while True:
            with self._explain_errors():
                outputs = self._engine.step()
            self._retained_completions += self._collect_finished(
                output for output in outputs if output.request_id != _PROBE
            )
            for output in outputs:
                if output.request_id == _PROBE and output.finished:
                    num_scores = len(token_ids) - 1
                    logprobs = np.asarray(output.prompt_logprobs.logprobs, np.float64).reshape(num_scores, -1)
                    return [float(row[0]) for row in logprobs]

    def offload(self) -> None:
        """Frees the accelerator's memory, except in the CPU build; see `RolloutBackend.offload`.

        If updates contain only adapters, the base model's weights are kept on the host.
        """
        keeps_weights = self._adapters is not None
        if self._free_accelerator(level=1 if keeps_weights else 2):
            self._slept = True
            if not keeps_weights:
                self._update_error = "the rollout engine gave its weights away (offload); reload it and send new ones"

    def reload(self) -> None:
        """Reverses `offload`; see `RolloutBackend.reload`. vLLM prefills running requests again."""
        super().reload()
        if self._slept:
            self._reset_kv_cache()
            self._slept = False

    def close(self) -> None:
        """Shuts the engine down; see `RolloutBackend.close`."""
        self._running_requests.clear()
        self._active_ids.clear()
        super().close()


def _compute_parameter_digests(worker: Any) -> dict[str, int]:
    """Returns a digest of each parameter of a worker's model, in the form in which the kernels read it."""
    parameters = worker.model_runner.get_model().named_parameters()
    return digests(((name, parameter.detach()) for name, parameter in parameters), 0)


def _build_on_meta(config: Any, options: EngineOptions) -> Any:
    with torch.device("meta"):
        model_class = getattr(transformers(), auto_class(config))
        return model_class.from_config(config, trust_remote_code=options.trust_remote_code)
