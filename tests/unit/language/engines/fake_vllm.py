"""Stand-in for the package vllm, whose import takes half a minute: its engine continues each prompt by fixed tokens.

What the real package does with these calls is tested in test_vllm_contracts.py and in tests/integration/language.
"""

from __future__ import annotations

import enum
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest

from rlhpc.language.engines.vllm_weights import Loaded


class Platform:
    """vLLM's platform: the CPU build, unless a test says another.

    Attributes:
        device_type: Device that the build is for.
    """

    device_control_env_var = "FAKE_VISIBLE_DEVICES"
    kernels_replaced = (True,)  # read by tests.warm.engines
    register_triton_kernel_overrides = None

    def __init__(self, device_type: str, capability: tuple[int, int] = (9, 0)) -> None:
        self.device_type, self.capability = device_type, capability

    def get_device_name(self) -> str:
        return self.device_type

    def is_cpu(self) -> bool:
        return self.device_type == "cpu"

    def is_cuda(self) -> bool:
        return self.device_type == "cuda"

    def has_device_capability(self, capability: tuple[int, int]) -> bool:
        return self.capability >= capability


class RequestOutputKind(enum.Enum):
    """Tokens that an output has: those since the last output, or all in the end."""

    DELTA, FINAL_ONLY = 1, 2


class SamplingParams(SimpleNamespace):
    """Sampling parameters as they were given."""


@dataclass
class EngineArgs:
    """Arguments of the engine; another one is a TypeError."""

    model: str
    dtype: str
    trust_remote_code: bool
    max_model_len: int | None
    max_num_seqs: int | None
    gpu_memory_utilization: float
    seed: int
    skip_tokenizer_init: bool
    disable_log_stats: bool
    use_tqdm_on_load: bool
    enable_sleep_mode: bool
    enforce_eager: bool = False
    max_cudagraph_capture_size: int | None = None
    cudagraph_capture_sizes: list[int] | None = None
    enable_chunked_prefill: bool = True
    enable_prefix_caching: bool | None = None
    compilation_config: dict[str, Any] | None = None
    max_num_batched_tokens: int | None = None
    kv_cache_memory_bytes: int | None = None
    logprobs_mode: str = ""
    async_scheduling: bool = True
    load_format: str = "auto"
    tensor_parallel_size: int = 1
    enable_lora: bool = False
    max_loras: int = 0
    max_lora_rank: int = 0
    moe_backend: str = "auto"
    quantization: str | None = None


@dataclass
class RunningRequest:
    """Request in the engine, with the tokens so far and how many of them an output has brought."""

    external_req_id: str
    prompt: dict[str, Any]
    parameters: Any
    lora_request: Any
    tokens: list[int] = field(default_factory=list)
    num_sent: int = 0

    @property
    def detokenizer(self) -> Any:
        return SimpleNamespace(output_token_ids=self.tokens)

    @property
    def logprobs_processor(self) -> Any:
        return SimpleNamespace(logprobs=SimpleNamespace(logprobs=logprobs_of(self.tokens)))


def logprobs_of(tokens: Iterable[int]) -> list[float]:
    return [-0.01 * token for token in tokens]


class LLMEngine:
    """Engine that samples one token for each request in a step: the last token of the prompt and its successors.

    Attributes:
        arguments: Arguments of the engine.
        events: Calls that change the engine's state, in order.
        requests: Running requests by name.
        error: Error of the next step; None if there is none.
        replies: Replies to `collective_rpc`, by the name of the called function; by default all weights are loaded.
    """

    #: Error of the next engine that is built; None if there is none.
    build_error: BaseException | None = None
    #: Replies of the engines that are built.
    default_replies: ClassVar[dict[str, Callable[..., Any]]] = {}

    def __init__(self, arguments: EngineArgs) -> None:
        self.arguments = arguments
        self.events: list[Any] = []
        self.requests: dict[str, RunningRequest] = {}
        self.error: BaseException | None = None
        self.replies = dict(type(self).default_replies)
        self.model_config = SimpleNamespace(max_model_len=arguments.max_model_len or 64)
        scheduler = SimpleNamespace(max_num_seqs=arguments.max_num_seqs or 256, max_num_batched_tokens=4096)
        model = SimpleNamespace(enforce_eager=getattr(arguments, "enforce_eager", False))
        self.vllm_config = SimpleNamespace(scheduler_config=scheduler, model_config=model)
        self.output_processor = SimpleNamespace(request_states=self.requests)
        self.engine_core = SimpleNamespace(shutdown=lambda: self.events.append("shutdown"))

    @classmethod
    def from_engine_args(cls, arguments: EngineArgs, usage_context: Any) -> LLMEngine:
        if cls.build_error is not None:
            raise cls.build_error
        return cls(arguments)

    def add_request(self, name: str, prompt: dict[str, Any], parameters: Any, lora_request: Any = None) -> None:
        self.requests[name] = RunningRequest(name, prompt, parameters, lora_request)

    def abort_request(self, names: list[str]) -> None:
        for name in names:
            self.requests.pop(name, None)

    def step(self) -> list[Any]:
        if self.error is not None:
            error, self.error = self.error, None
            raise error
        return [output for request in list(self.requests.values()) if (output := self._advance(request))]

    def _advance(self, request: RunningRequest) -> Any:
        parameters, prompt = request.parameters, request.prompt["prompt_token_ids"]
        request.tokens.append(prompt[-1] + len(request.tokens) + 1)
        stops = request.tokens[-1] in getattr(parameters, "stop_token_ids", ())
        finished = stops or len(request.tokens) >= parameters.max_tokens
        if finished:
            self.requests.pop(request.external_req_id, None)
        elif parameters.output_kind is RequestOutputKind.FINAL_ONLY:
            return None
        tokens, request.num_sent = request.tokens[request.num_sent :], len(request.tokens)
        reason = ("stop" if stops else "length") if finished else None
        sequence = SimpleNamespace(
            token_ids=tokens, logprobs=SimpleNamespace(logprobs=logprobs_of(tokens)), finish_reason=reason
        )
        prompt_logprobs = SimpleNamespace(logprobs=[value for token in prompt[1:] for value in (-0.01 * token, 0.0)])
        return SimpleNamespace(
            request_id=request.external_req_id, outputs=[sequence], finished=finished, prompt_logprobs=prompt_logprobs
        )

    def collective_rpc(self, method: Callable[..., Any], args: tuple[Any, ...] = ()) -> list[Any]:
        self.events.append(method.__name__)
        return [self.replies[method.__name__](*args)]

    def sleep(self, level: int, mode: str) -> None:
        self.events.append(("sleep", level, mode))

    def wake_up(self) -> None:
        self.events.append("wake")

    def reset_prefix_cache(self, reset_running_requests: bool) -> None:
        self.events.append(("reset", reset_running_requests))


def load_all(weights: Iterable[tuple[str, Any]], is_packed: bool, untrained_parts: Iterable[str] = ()) -> Loaded:
    """Counts the elements of an update of which each is copied once."""
    return Loaded({name: tensor.numel() for name, tensor in weights}, ())


class ModelRegistry:
    """vLLM's models by architecture, and the classes that were registered."""

    def __init__(self) -> None:
        self.models: dict[str, Any] = {}
        self.registered: dict[str, Any] = {}

    def register_model(self, architecture: str, model: Any) -> None:
        self.registered[architecture] = model


def install(patch: pytest.MonkeyPatch, device_type: str = "cpu") -> type[LLMEngine]:
    """Puts this in the place of vllm, imported or not; returns its class of engines, of which each test has its own."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
        patch.delitem(sys.modules, name)
    replies = {
        "log_before_filters": lambda: True,
        "reload_counted": load_all,
        "set_adapter": lambda number, tensors, config: len(tensors),
        "packing_kernels": list,
        "renamed_tensors": lambda names: {},
    }
    engine = type("LLMEngine", (LLMEngine,), {"default_replies": replies})
    contents: dict[str, dict[str, Any]] = {
        "vllm": {"EngineArgs": EngineArgs, "LLMEngine": engine, "SamplingParams": SamplingParams, "__version__": "0"},
        "vllm.envs": {"VLLM_CACHE_ROOT": "/proc/no folder can be made here"},
        "vllm.logger": {},
        "vllm.platforms": {"current_platform": Platform(device_type)},
        "vllm.usage.usage_lib": {"UsageContext": SimpleNamespace(LLM_CLASS="class")},
        "vllm.sampling_params": {"RequestOutputKind": RequestOutputKind},
        "vllm.lora.request": {"LoRARequest": lambda name, number, path: (name, number)},
        "vllm.distributed.parallel_state": {
            "destroy_distributed_environment": lambda: None,
            "destroy_model_parallel": lambda: None,
        },
        "vllm.model_executor.models.registry": {"_run_in_subprocess": None, "ModelRegistry": ModelRegistry()},
    }
    modules: dict[str, ModuleType] = {}
    for name in contents:
        parts = name.split(".")
        for depth in range(1, len(parts) + 1):
            modules.setdefault(".".join(parts[:depth]), ModuleType(".".join(parts[:depth])))
    for name, module in modules.items():
        module.__path__ = []
        vars(module).update(contents.get(name, {}))
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(modules[parent], child, module)
        patch.setitem(sys.modules, name, module)
    return engine
