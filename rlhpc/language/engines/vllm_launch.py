"""vLLM's own engine in the process of a rank: built, explained where it fails, put to sleep and ended."""

from __future__ import annotations

import gc
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from rlhpc.language.data.images import looks
from rlhpc.language.engines.vllm_images import take_pictures
from rlhpc.runtime.errors import ConfigError, RlhpcError
from rlhpc.runtime.scratch import cache_folder
from rlhpc.runtime.text import first_line

if TYPE_CHECKING:
    from rlhpc.language.engines.common import EngineOptions
    from rlhpc.language.engines.multi_rank import EngineLink
import glob
import itertools
from pathlib import Path
from typing import TYPE_CHECKING

from rlhpc.runtime.host import host_id

if TYPE_CHECKING:
    from rlhpc.language.engines.multi_rank import EngineLink


@contextmanager
def one_of_several(link: EngineLink | None) -> Iterator[None]:
    """While vLLM builds the engine of this rank.

    - `RANK` and `LOCAL_RANK` are what it reads: a rank sees no accelerator but its own, which is its first.
    - The name of its process group becomes that of the shared memory by which ranks on one host add up what they computed:
      it must be the engine's own, and another on every host.
    - That shared memory has a name in /dev/shm, which is taken back once all have opened it: who is killed leaves nothing.
    - Who waits there never sleeps. Ranks that may be put on one core would wait for one that cannot run meanwhile, so these
      add up by gloo: vLLM does so where ranks have different names.
    - Its queue for messages between ranks would open a port that anybody may connect to. Nothing here sends by it.

    Args:
        link: To the engine's other ranks; None where there are none.
    """
    if link is None:
        yield
        return
    from vllm.distributed.device_communicators.shm_broadcast import MessageQueue
    from vllm.platforms import current_platform
    from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher

    name = link.ident.replace(":", "-").replace("/", "-")  # vLLM takes what comes behind the last colon
    if current_platform.is_cpu() and not cores_are_apart():
        name = f"{name}-{link.rank}"
    variables = {"RANK": str(link.rank), "LOCAL_RANK": "0", "WORLD_SIZE": str(link.size)}
    before = {name: os.environ.get(name) for name in variables}
    queues, launched = MessageQueue.create_from_process_group, ExecutorWithExternalLauncher._distributed_args

    def told(self: Any) -> tuple[str, int, int]:
        return f"rlhpc:{name}", link.rank, 0

    def none(*args: Any, **kwargs: Any) -> None:
        return None

    os.environ.update(variables)
    setattr(MessageQueue, "create_from_process_group", staticmethod(none))  # noqa: B010 (mypy knows its signature)
    setattr(ExecutorWithExternalLauncher, "_distributed_args", told)  # noqa: B010 (as above)
    _compile_no_lookup()
    try:
        yield
    finally:
        for path in Path("/dev/shm").glob(f"{glob.escape(name)}-*-cpushm_*"):
            path.unlink(missing_ok=True)
        setattr(MessageQueue, "create_from_process_group", staticmethod(queues))  # noqa: B010 (as above)
        setattr(ExecutorWithExternalLauncher, "_distributed_args", launched)  # noqa: B010 (as above)
        for variable, value in before.items():
            if value is None:
                os.environ.pop(variable, None)
            else:
                os.environ[variable] = value


def sees_all_cards(size: int) -> bool:
    """Returns whether this process's device mask shows as many accelerators as its engine has ranks.

    vLLM's own all-reduce takes the number of a rank for a place in that mask. Where there is no such place it fails, and NCCL
    has to add up.

    Args:
        size: Ranks of the engine.
    """
    from vllm.platforms import current_platform

    mask = os.environ.get(current_platform.device_control_env_var)
    return mask is None or len([device for device in mask.split(",") if device.strip()]) >= size


def cores_are_apart() -> bool:
    """Whether no two ranks of the default process group that are on one host may compute on the same core."""
    mine = (host_id(), frozenset(os.sched_getaffinity(0)))
    found: list[tuple[str, frozenset[int]]] = [mine] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(found, mine)
    pairs = itertools.combinations(found, 2)
    return not any(host == other and cores & theirs for (host, cores), (other, theirs) in pairs)


def _compile_no_lookup() -> None:
    """A divided embedding finds its own tokens by a function that torch compiles, on a CPU by a compiler of C++: 15 seconds at
    the first step of every process, for two comparisons and a sum."""
    from vllm.model_executor.layers import vocab_parallel_embedding
    from vllm.platforms import current_platform

    compiled = vocab_parallel_embedding.get_masked_input_and_mask
    if current_platform.is_cpu():
        plain = getattr(compiled, "_torchdynamo_orig_callable", compiled)
        setattr(vocab_parallel_embedding, "get_masked_input_and_mask", plain)  # noqa: B010 (mypy knows its signature)


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
#: Least number of tokens that the CPU build computes in a step.
_CPU_BATCH_TOKENS = 4096


class VLLMProcess:
    """vLLM's `LLMEngine`, whatever for. A subclass says in `_arguments` what it wants of it.

    Args:
        options: Of the engine.
        config: The model's Hugging Face configuration.
        seed: Of the engine.
        link: To the other ranks of the engine, if it has several.

    Raises:
        ConfigError: vLLM is not installed or of the wrong build, there is no such model, or memory does not suffice.
    """

    #: What to do where vLLM cannot be had.
    instead = "take rollout_backend hf"
    #: Whether requests have seeds.
    draws = False

    def __init__(self, options: EngineOptions, config: Any, seed: int, link: EngineLink | None = None) -> None:
        self._options, self._sleeps, self._link = options, options.sleeps, link
        self._looks = looks(config)
        self._build(config, seed)

    def _arguments(self) -> dict[str, Any]:
        """Arguments of the engine beside those of `_build`."""
        return {}

    def _build(self, config: Any, seed: int) -> None:
        options = self._options
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        for name, value in _ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        if cache := cache_folder():
            os.environ.setdefault("VLLM_CACHE_ROOT", str(cache / "vllm"))
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
                f"the other build, or {self.instead}"
            )
        self._batch = options.batch if self._on_cpu else options.max_batch_size
        self._owns_group = not torch.distributed.is_initialized() and self._link is None
        if not self._owns_group and self._link is None and torch.distributed.get_world_size() > 1:
            raise RlhpcError(
                "vLLM needs a process whose torch process group is its own; build it before joining another"
            )
        arguments: dict[str, Any] = {
            "model": options.model_path,
            "dtype": options.dtype,
            "trust_remote_code": options.trust_remote_code,
            "max_model_len": options.max_model_len,
            "max_num_seqs": self._batch,
            "gpu_memory_utilization": options.gpu_memory_utilization,
            "seed": seed % 2**31,
            "skip_tokenizer_init": True,
            "disable_log_stats": True,
            "use_tqdm_on_load": False,
            "enable_sleep_mode": self._sleeps and not self._on_cpu,
            **self._arguments(),
        }
        if self._looks:
            # Pictures come cut and in the numbers that the model looks at; each request has its own.
            arguments["mm_processor_cache_gb"] = 0
            if "mm_device_do_normalize" in EngineArgs.__dataclass_fields__:  # earlier ones do not, either
                arguments["mm_device_do_normalize"] = False
        if self._on_cpu:
            arguments["enforce_eager"] = True
            if self.draws:
                # A prompt that is prefilled in parts has its random numbers taken back, which generators of CPUs cannot do.
                arguments["enable_chunked_prefill"] = False
                arguments["max_num_batched_tokens"] = max(
                    _CPU_BATCH_TOKENS, _context(config.get_text_config(), options)
                )
            if not os.environ.get("VLLM_CPU_KVCACHE_SPACE"):
                arguments["kv_cache_memory_bytes"] = _cpu_cache_bytes(config.get_text_config(), options)
        arguments.update(options.engine_kwargs)
        if max(int(arguments.get(f"{kind}_parallel_size", 1)) for kind in ("tensor", "pipeline", "data")) > 1:
            raise ConfigError(
                "rollout.engine_kwargs: vLLM runs in the rollout ranks' processes, each on one accelerator; say with "
                "rollout.parallel.tensor how many ranks are one engine"
            )
        if self._link is not None:
            if options.divides_experts and self._on_cpu:
                raise ConfigError(
                    "rollout.parallel.expert: vLLM's CPU build ends with a segmentation fault where whole experts are divided "
                    "among ranks; leave it false there (each expert is divided)"
                )
            self._link.form()
            arguments |= {
                "tensor_parallel_size": self._link.size,
                "distributed_executor_backend": "external_launcher",
                **({"enable_expert_parallel": True} if options.divides_experts else {}),
                **({} if self._on_cpu or sees_all_cards(self._link.size) else {"disable_custom_all_reduce": True}),
            }
        with _leaving_no_trace(), _unseen_modules(), one_of_several(self._link), self._explained():
            if self._looks:
                take_pictures(config, options.model_path, options.trust_remote_code)
            try:
                engine_args = EngineArgs(**arguments)
            except TypeError as error:
                raise ConfigError(f"rollout.engine_kwargs: {error}") from None
            self._engine: Any = LLMEngine.from_engine_args(engine_args, usage_context=UsageContext.LLM_CLASS)

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
                    f"rollout.max_batch_size ({self._batch or 'null: vLLM’s own number'}) or rollout.max_model_len "
                    f"({self._options.max_model_len or 'null: the model’s context'})"
                ) from error
            if isinstance(error, ValueError) or "unsupported" in text:
                raise ConfigError(f"vLLM refuses the model or the section rollout: {_reason(error)}") from error
            raise

    def _sleep(self, level: int) -> bool:
        """Gives the accelerator to another role, where there is one and the run has its roles take turns.

        Args:
            level: 1 keeps the weights on the host, 2 drops them.

        Returns:
            Whether it sleeps.
        """
        if self._on_cpu:
            _say_once("vLLM's CPU build has no sleep mode: offload frees nothing")
        elif not self._sleeps:
            _say_once("actor.offload_in_rollout is off, so vLLM has no sleep mode: offload frees nothing")
        else:
            self._engine.sleep(level=level, mode="keep")
            return True
        return False

    def reload(self) -> None:
        """Takes the accelerator back (`RolloutBackend.reload`)."""
        if self._sleeps and not self._on_cpu:
            with self._explained():
                self._engine.wake_up()

    def close(self) -> None:
        """Ends the engine (`RolloutBackend.close`)."""
        engine, self._engine = self._engine, None
        if engine is None:
            return
        from vllm.distributed.parallel_state import destroy_distributed_environment, destroy_model_parallel

        engine.engine_core.shutdown()
        del engine
        if self._owns_group:
            destroy_model_parallel()
            destroy_distributed_environment()
        gc.collect()


def _context(config: Any, options: EngineOptions) -> int:
    """Returns the number of tokens of the longest sequence."""
    return options.max_model_len or int(getattr(config, "max_position_embeddings", 4096))


def _cpu_cache_bytes(config: Any, options: EngineOptions) -> int:
    """Bytes for the largest number of sequences at full length, up to a limit; by itself vLLM would take most of the
    memory."""
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    token = 2 * config.num_hidden_layers * heads * width * getattr(torch, options.dtype).itemsize
    length = _context(config, options)
    # Its blocks are of up to 128 tokens; one sequence of full length must fit whatever the limit is.
    blocks = -(-length // 128) + 1
    return int(max(token * 128 * blocks * 2, min(_CPU_CACHE_BYTES, token * 128 * blocks * options.batch)))


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
