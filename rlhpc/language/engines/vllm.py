"""Generation with vLLM's own engine, in the rollout rank's process: the GPU build and the CPU build."""

from __future__ import annotations

import gc
import logging
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rlhpc.language.engines.base import Completion, Request
from rlhpc.language.engines.ends import (
    StopTexts,
    end_tokens,
    first_line,
    load_model_config,
    load_tokenizer,
    transformers_module,
)
from rlhpc.language.engines.engine import Engine, EngineOptions, UpdateFailed, fitting_update
from rlhpc.language.engines.vllm_experts import FileNames, is_mixture, packing_kernels, reload_packed
from rlhpc.language.engines.vllm_logprobs import log_before_filters
from rlhpc.language.engines.vllm_names import tensors_of, under_all_names
from rlhpc.runtime.errors import ConfigError, RlhpcError

if TYPE_CHECKING:
    from rlhpc.language.config import LanguageConfig

log = logging.getLogger(__name__)

#: What vLLM is told through its environment, unless the user did. Its engine runs in this process: weights are handed over
#: as tensors, and nothing of it outlives the rank.
_ENVIRONMENT = {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_DO_NOT_TRACK": "1",
}
#: Variables that vLLM sets for processes of its own; programs that the rank starts later have no use for them.
_LEAKED = ("LD_PRELOAD", "LOCAL_WORLD_SIZE")
#: Packages that vLLM must not see while it builds an engine: it looks at every attribute of all modules of the process, and
#: trimesh's stand-ins for packages that are missing raise at that. ManiSkill brings it.
_UNSEEN = ("trimesh",)
#: Most memory that the CPU build's cache takes unless told otherwise.
_CPU_CACHE_BYTES = 4 << 30


@dataclass
class _Running:
    """A request under way.

    Attributes:
        request: The request itself.
        token_ids, logprobs: What vLLM has handed out of the response.
        marks: (number of tokens, version) at each update during the request: the tokens up to there are of that
            version.
    """

    request: Request
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    marks: list[tuple[int, int]] = field(default_factory=list)

    def completion(self, version: int, reason: str) -> Completion:
        """The result to give back; tokens after the last update are of `version`."""
        versions: list[int] = []
        for tokens, older in (*self.marks, (len(self.token_ids), version)):
            versions += [older] * (tokens - len(versions))
        return Completion(self.request.id, self.token_ids, self.logprobs, versions, reason)


class VLLMRollout(Engine):
    """vLLM's `LLMEngine`.

    Args:
        cfg: The run's configuration.
        model_path: Hugging Face folder or hub name.
        device: `cpu` for the CPU build; a GPU build takes the rank's first visible accelerator.
        seed: Of the engine.

    Raises:
        ConfigError: vLLM is not installed or of the wrong build, there is no such model, or memory does not suffice.
    """

    def __init__(self, cfg: LanguageConfig, *, model_path: str, device: str | torch.device, seed: int = 0) -> None:
        super().__init__()
        self._options = options = EngineOptions.from_config(cfg, model_path, device)
        config = load_model_config(options.model_path, options.trust_remote_code)
        self._tokenizer = load_tokenizer(options.model_path, options.trust_remote_code)
        self._stop_texts = StopTexts(self._tokenizer, options.model_path)
        self._own_ends = end_tokens(options.model_path, config, self._tokenizer)
        self.vocabulary = int(config.get_text_config().vocab_size)
        model = _on_meta(config, options)
        self._needed, self._optional, self._aliases = tensors_of(model)
        self._experts = FileNames(model) if is_mixture(config) else None
        self._sleeps = options.sleeps
        self._running: dict[str, _Running] = {}
        self._torn = ""
        self._engine = self._build(config, seed)
        self.context = int(self._engine.model_config.max_model_len)

    def _build(self, config: Any, seed: int) -> Any:
        options = self._options
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        for name, value in _ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        try:
            from vllm import EngineArgs, LLMEngine
            from vllm.platforms import current_platform
            from vllm.usage.usage_lib import UsageContext
        except ImportError as error:
            raise ConfigError(
                f"rollout.rollout_backend is 'vllm', which cannot be imported ({first_line(error)}): pip install 'rlhpc[vllm]'"
            ) from None
        self._on_cpu = bool(current_platform.is_cpu())
        if self._on_cpu != options.device.startswith("cpu") or not current_platform.device_type:
            have = "the CPU" if self._on_cpu else current_platform.device_type or "an accelerator that it does not find"
            raise ConfigError(
                f"rollout.rollout_backend is 'vllm' on {options.device}, and the vLLM installed is built for {have}; install "
                "the other build, or take rollout_backend hf"
            )
        self._owns_group = not torch.distributed.is_initialized()
        if not self._owns_group and torch.distributed.get_world_size() > 1:
            raise RlhpcError(
                "vLLM needs a process whose torch process group is its own; build it before joining another"
            )
        arguments: dict[str, Any] = {
            "model": options.model_path,
            "dtype": options.dtype,
            "trust_remote_code": options.trust_remote_code,
            "max_model_len": options.max_model_len,
            "max_num_seqs": options.max_batch_size,
            "gpu_memory_utilization": options.gpu_memory_utilization,
            "seed": seed % 2**31,
            # After temperature, which is right but for rows with top-p or top-k: see `log_before_filters`.
            "logprobs_mode": "processed_logprobs",
            "skip_tokenizer_init": True,
            "disable_log_stats": True,
            "use_tqdm_on_load": False,
            "enable_sleep_mode": self._sleeps and not self._on_cpu,
        }
        if self._experts and not self._on_cpu:
            # The one kernel that uses experts as they are loaded; the others keep them shuffled.
            arguments["moe_backend"] = "triton"
        if self._on_cpu:
            arguments["enforce_eager"] = True
            if not os.environ.get("VLLM_CPU_KVCACHE_SPACE"):
                arguments["kv_cache_memory_bytes"] = _cpu_cache_bytes(config.get_text_config(), options)
        arguments.update(options.engine_kwargs)
        if max(int(arguments.get(f"{kind}_parallel_size", 1)) for kind in ("tensor", "pipeline", "data")) > 1:
            raise ConfigError(
                "rollout.engine_kwargs: vLLM runs in the rollout rank's process, on one accelerator; give the group more "
                "ranks instead of a larger parallel size"
            )
        with _leaving_no_trace(), _unseen_modules(), self._explained():
            try:
                engine_args = EngineArgs(**arguments)
            except TypeError as error:
                raise ConfigError(f"rollout.engine_kwargs: {error}") from None
            engine = LLMEngine.from_engine_args(engine_args, usage_context=UsageContext.LLM_CLASS)
        self._filters_logged = all(engine.collective_rpc(log_before_filters))
        if self._experts and not self._on_cpu and (kernels := engine.collective_rpc(packing_kernels)[0]):
            raise ConfigError(
                f"rollout.engine_kwargs: vLLM's {', '.join(kernels)} keep experts in a form that weight updates do not reach; "
                "set moe_backend: triton"
            )
        return engine

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Names the settings to change when memory runs out, and the configuration if vLLM refuses it."""
        try:
            yield
        except (torch.OutOfMemoryError, MemoryError, ValueError, RuntimeError) as error:
            text = str(error).lower()
            if isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "memory" in text or "kv cache" in text:
                share = (
                    "VLLM_CPU_KVCACHE_SPACE (GiB of cache)"
                    if self._on_cpu
                    else f"rollout.gpu_memory_utilization ({self._options.gpu_memory_utilization})"
                )
                raise ConfigError(
                    f"vLLM has not the memory it needs: {first_line(error)}; change {share}, or lower "
                    f"rollout.max_batch_size ({self._options.max_batch_size}) or rollout.max_model_len "
                    f"({self._options.max_model_len or 'null: the model’s context'})"
                ) from error
            if isinstance(error, ValueError) or "unsupported" in text:
                raise ConfigError(f"vLLM refuses the model or the section rollout: {_reason(error)}") from error
            raise

    # --- requests

    def _check(self, request: Request) -> None:
        super()._check(request)
        sampling = request.sampling
        if sampling.stop:
            self._stop_texts.require()
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
                max_tokens=self._limit(request),
                seed=request.seed % 2**63,
                stop_token_ids=sorted({*sampling.stop_token_ids, *self._own_ends}),
                ignore_eos=True,
                logprobs=0,
                flat_logprobs=True,
                detokenize=False,
                # Handing out each token costs a tenth of a small model's step.
                output_kind=RequestOutputKind.DELTA if sampling.stop else RequestOutputKind.FINAL_ONLY,
            )
            self._engine.add_request(name, {"prompt_token_ids": list(request.prompt_ids)}, parameters)
            self._running[name] = _Running(request)

    def _advance(self) -> list[Completion]:
        with self._explained():
            outputs = self._engine.step()
        done: list[Completion] = []
        for output in outputs:
            running = self._running.get(output.request_id)
            if running is None:
                continue
            new = output.outputs[0]
            running.token_ids += new.token_ids
            running.logprobs += new.logprobs.logprobs
            reason = str(new.finish_reason) if output.finished else ""
            stop = running.request.sampling.stop
            if stop and reason != "stop" and new.token_ids and self._stop_texts.ended(running.token_ids, stop):
                if not reason:
                    self._engine.abort_request([output.request_id])
                reason = "stop"
            if reason:
                done.append(self._running.pop(output.request_id).completion(self.version, reason))
        return done

    def _so_far(self) -> Iterator[tuple[_Running, list[int], list[float]]]:
        """Requests under way with all their tokens and log-probs, also those that vLLM keeps until the end."""
        for state in self._engine.output_processor.request_states.values():
            running = self._running.get(state.external_req_id)
            if running is not None:
                yield (
                    running,
                    list(state.detokenizer.output_token_ids),
                    list(state.logprobs_processor.logprobs.logprobs),
                )

    def _abort(self) -> list[Completion]:
        for running, token_ids, logprobs in self._so_far():
            running.token_ids, running.logprobs = token_ids, logprobs
        self._engine.abort_request(list(self._running))
        aborted = [running.completion(self.version, "abort") for running in self._running.values()]
        self._running.clear()
        return aborted

    # --- weights

    def update_weights(self, version: int, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Takes in new weights (`RolloutBackend.update_weights`).

        vLLM loads them layer by layer into the tensors that its kernels use, and holds on to what it was given until a
        layer has all of it: a tensor may be dropped, but not written to, before the update is over. Requests under way
        give their cache back, and prefill prompt and response so far when the next step schedules them.
        """
        if self._torn:
            raise UpdateFailed(self._torn)
        self._begin_update(version)
        # An update that breaks off leaves vLLM with layers half taken apart, which a second update does not mend.
        self._torn = f"the update to version {version} of vLLM's weights broke off; restart the rollout group"
        weights = fitting_update(named_tensors, self._needed, self._optional)
        tied = under_all_names(weights, self._aliases)
        if self._experts and self._on_cpu:
            self._engine.collective_rpc(reload_packed, args=(self._experts(tied),))
        else:
            named = self._experts(tied) if self._experts else tied
            self._engine.collective_rpc("reload_weights", kwargs={"weights_iterator": named})
        self._engine.reset_prefix_cache(reset_running_requests=True)
        for running, token_ids, _ in self._so_far():
            running.marks.append((len(token_ids), self.version))
        self._torn = ""
        self._end_update(version)

    def offload(self) -> None:
        """See `RolloutBackend.offload`. On the CPU build there is no accelerator to give back."""
        if self._on_cpu:
            _say_once("vLLM's CPU build has no sleep mode: offload frees nothing")
        elif not self._sleeps:
            _say_once("actor.offload_in_rollout is off, so vLLM has no sleep mode: offload frees nothing")
        else:
            self._engine.sleep(level=2, mode="keep")
            self._refuses = "the rollout engine gave its weights away (offload); reload it and send new ones"

    def reload(self) -> None:
        """Takes the accelerator back (`RolloutBackend.reload`)."""
        if self._sleeps and not self._on_cpu:
            with self._explained():
                self._engine.wake_up()

    def close(self) -> None:
        """Ends the engine (`RolloutBackend.close`)."""
        engine, self._engine = self._engine, None
        self._running.clear()
        self._under_way.clear()
        if engine is None:
            return
        from vllm.distributed.parallel_state import destroy_distributed_environment, destroy_model_parallel

        engine.engine_core.shutdown()
        del engine
        if self._owns_group:
            destroy_model_parallel()
            destroy_distributed_environment()
        gc.collect()


def _on_meta(config: Any, options: EngineOptions) -> Any:
    with torch.device("meta"):
        return transformers_module().AutoModelForCausalLM.from_config(
            config, trust_remote_code=options.trust_remote_code
        )


def _cpu_cache_bytes(config: Any, options: EngineOptions) -> int:
    """Bytes for the largest number of sequences at full length, up to a limit; by itself vLLM would take most of the
    memory."""
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    token = 2 * config.num_hidden_layers * heads * width * getattr(torch, options.dtype).itemsize
    length = options.max_model_len or int(getattr(config, "max_position_embeddings", 4096))
    # Its blocks are of up to 128 tokens; one sequence of full length must fit whatever the limit is.
    blocks = -(-length // 128) + 1
    return int(max(token * 128 * blocks * 2, min(_CPU_CACHE_BYTES, token * 128 * blocks * options.max_batch_size)))


@contextmanager
def _leaving_no_trace() -> Iterator[None]:
    """Undoes the side effects on the process of building an engine."""
    before = {name: os.environ.get(name) for name in _LEAKED}
    set_num_threads = torch.set_num_threads
    try:
        yield
    finally:
        torch.set_num_threads = set_num_threads  # the CPU build replaces it by a warning
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextmanager
def _unseen_modules() -> Iterator[None]:
    """Hides `_UNSEEN` from the process's modules for the duration of the block."""
    hidden = {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] in _UNSEEN}
    try:
        yield
    finally:
        sys.modules.update(hidden)


def _reason(error: BaseException) -> str:
    """vLLM checks its arguments with pydantic, whose second line is the reason."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:3])


_said: set[str] = set()


def _say_once(text: str) -> None:
    if text not in _said:
        _said.add(text)
        log.warning(text)
