"""Life cycle of vLLM's engine in the process of a rank: build, error messages, sleep and shutdown."""

from __future__ import annotations

import functools
import gc
import glob
import hashlib
import itertools
import logging
import os
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from rlhpc.jobs.lease import Lease
from rlhpc.jobs.shared_files import revalidate_folder
from rlhpc.language.data.images import has_vision
from rlhpc.language.engines.batch_invariance import has_states
from rlhpc.language.engines.vllm_adapter import (
    external_launcher,
    preload_engine_modules,
    register_without_torchvision,
    restore_variables,
    restored_process,
    use_batch_invariant_mode,
    use_plain_lookup,
)
from rlhpc.language.engines.vllm_images import register_images
from rlhpc.runtime.errors import ConfigError, RlhpcError
from rlhpc.runtime.host import host_id
from rlhpc.runtime.scratch import cache_folder
from rlhpc.runtime.start_phases import enter_phase, phases_within
from rlhpc.runtime.text import first_line, with_source_line

if TYPE_CHECKING:
    from rlhpc.language.engines.common import EngineOptions
    from rlhpc.language.engines.multi_rank import EngineLink


@contextmanager
def group_rank_environment(link: EngineLink | None) -> Iterator[None]:
    """Prepares the process while vLLM builds the engine of one rank of a group.

    - vLLM reads `RANK` and `LOCAL_RANK`, which is the index of the rank's accelerator among those that the process sees: those
      of all ranks of the engine on this host (`Worker.ranks_sharing_devices`).
    - The name of the process group becomes that of the shared memory in which ranks on one host reduce tensors:
      it must be unique to the engine and the host.
    - The shared memory's name in /dev/shm is removed once all ranks have opened it, so that a killed rank leaves no file.
    - Ranks never sleep while they wait in shared memory. Ranks that may share a core could block each other, so they reduce by
      gloo, which vLLM selects if the ranks' names differ.
    - vLLM creates no message queue between ranks. rlhpc does not use the queue, which would open a port without
      authentication.

    Args:
        link: Connection to the engine's other ranks; None for an engine of one rank.
    """
    if link is None:
        yield
        return
    from vllm.platforms import current_platform

    name = link.ident.replace(":", "-").replace("/", "-")  # vLLM reads the text after the last colon
    if current_platform.is_cpu() and not has_disjoint_cores():
        name = f"{name}-{link.rank}"
    variables = {"RANK": str(link.rank), "LOCAL_RANK": str(link.device_index), "WORLD_SIZE": str(link.size)}
    previous_variables = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    use_plain_lookup()
    try:
        with external_launcher(name, link.rank, link.device_index):
            yield
    finally:
        for path in Path("/dev/shm").glob(f"{glob.escape(name)}-*-cpushm_*"):
            path.unlink(missing_ok=True)
        restore_variables(previous_variables)


def sees_all_devices(num_ranks: int) -> bool:
    """Returns whether this process's device mask has as many accelerators as its engine has ranks.

    vLLM's custom all-reduce uses the rank as an index into the mask and fails if the mask is shorter, as that of an engine on
    several hosts is; then NCCL must reduce.

    Args:
        num_ranks: Number of ranks of the engine.
    """
    from vllm.platforms import current_platform

    mask = os.environ.get(current_platform.device_control_env_var)
    return mask is None or len([device for device in mask.split(",") if device.strip()]) >= num_ranks


def has_disjoint_cores() -> bool:
    """Returns whether all ranks of the default process group on one host have disjoint sets of cores."""
    local_cores = (host_id(), frozenset(os.sched_getaffinity(0)))
    rank_cores: list[tuple[str, frozenset[int]]] = [local_cores] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(rank_cores, local_cores)
    pairs = itertools.combinations(rank_cores, 2)
    return not any(host == other_host and cores & other_cores for (host, cores), (other_host, other_cores) in pairs)


log = logging.getLogger(__name__)
#: Logs a warning the first time that it is called with a text.
_warn_once = functools.cache(log.warning)


#: Beginning of a line of vLLM's log → phase of the start that begins with the line.
PHASE_LINES = {
    "Initializing a V1 LLM engine": "vLLM: devices",
    "Starting to load model": "vLLM: load weights",
    "Loading model from scratch": "vLLM: load weights",
    "Model loading took": "vLLM: profile",
    "Warming up model for the compilation": "vLLM: profile",
    "Explicitly set (": "vLLM: KV cache and graphs",
    "Auto set (": "vLLM: KV cache and graphs",
    "Available KV cache memory": "vLLM: KV cache and graphs",
    "Initial free memory": "vLLM: KV cache and graphs",
}


class _PhaseLines(logging.Handler):
    """Handler that reports the phases of vLLM's start, and copies the lines about durations to this module's log."""

    def emit(self, record: logging.LogRecord) -> None:
        log_text = record.getMessage()
        for line_start, phase in PHASE_LINES.items():
            if log_text.startswith(line_start):
                enter_phase(phase)
        if _DURATION.search(log_text):
            log.info("vLLM: %s", log_text)


def _configure_logging(engine_args: Any) -> None:
    """Applies the logging configuration of vLLM, which would otherwise remove other handlers while it builds an engine."""
    from vllm import logger

    if hasattr(logger, "configure_logging_if_needed"):  # versions before 0.32 apply it at import
        logger.configure_logging_if_needed(engine_args.create_logging_config())


@contextmanager
def logged_phases() -> Iterator[None]:
    """Reports the phases of vLLM's start within the block and logs them; its other lines keep the user's level."""
    logger, handler = logging.getLogger("vllm"), _PhaseLines()
    logger_level, handler_levels = logger.level, [(handler, handler.level) for handler in logger.handlers]
    for other_handler, other_level in handler_levels:
        other_handler.setLevel(max(logger_level, other_level))
    logger.setLevel(min(logger_level, logging.INFO) or logging.INFO)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(logger_level)
        for other_handler, other_level in handler_levels:
            other_handler.setLevel(other_level)


#: Folder of leases and markers below `VLLM_CACHE_ROOT`.
_FOLDER = "rlhpc-starts"
#: Maximum seconds that a rank waits for the rank that compiles first.
_MAX_WAIT_S = 600.0
#: Seconds between two checks: first, and at most.
_FIRST_PAUSE_S, _MAX_PAUSE_S = 0.1, 2.0
#: Arguments of an engine that do not change what it compiles.
_OTHER_ARGUMENTS = ("model", "seed")


def cache_key(arguments: Mapping[str, Any], config: Any, *environment: str) -> str:
    """Returns a key that engines share if they compile the same.

    Args:
        arguments: Arguments of the engine.
        config: The model's Hugging Face configuration.
        environment: Versions and the device.
    """
    cache_factors = [
        *environment,
        repr(config),  # as JSON, with the values that differ from defaults
        repr(
            sorted(
                (name, repr(argument_value))
                for name, argument_value in arguments.items()
                if name not in _OTHER_ARGUMENTS
            )
        ),
    ]
    return hashlib.sha256("\n".join(cache_factors).encode()).hexdigest()[:16]


@contextmanager
def compiling_in_order(cache_root: Path, key: str, max_wait_s: float = _MAX_WAIT_S) -> Iterator[None]:
    """Runs the block, which fills the caches of `key`, on one rank first; other ranks wait until it has ended there.

    Below `VLLM_CACHE_ROOT`, vLLM keeps the graphs of torch.compile (`torch_compile_cache`), facts about model classes
    (`modelinfos`) and tuned kernels. Engines with the same model, arguments and device use the same entries. If that folder
    is on a node's own disk (`cluster.scratch`), one rank of each node compiles first; on a shared filesystem, one rank of the
    run.

    A marker in the folder says that the caches were filled once, so later starts do not wait. The order saves work only: a
    rank that has waited for too long, or cannot write the folder, compiles by itself. If the rank that runs the block dies
    or fails, a waiting rank takes its place.

    Args:
        cache_root: Folder of vLLM's caches.
        key: Key of the engine's entries (`cache_key`).
        max_wait_s: Maximum seconds to wait.
    """
    folder = cache_root / _FOLDER
    marker, lease = folder / f"{key}.filled", Lease(folder / f"{key}.lease")
    deadline, pause_s = time.monotonic() + max_wait_s, _FIRST_PAUSE_S
    is_first = False
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        while not _exists(marker) and not (is_first := lease.take_over()):
            if time.monotonic() > deadline:
                log.warning(
                    "waited %.0f s for the rank that compiles for vLLM's cache and holds %s; goes on without its result",
                    max_wait_s,
                    lease.path,
                )
                break
            enter_phase("vLLM: wait for the cache")
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _MAX_PAUSE_S)
    except OSError as error:
        log.info("vLLM's caches in %s are filled in no order: %s", cache_root, error)
    if not is_first:
        yield
        return
    try:
        yield
        if not _exists(marker):
            marker.touch(mode=0o600)
    finally:
        lease.release()


def _exists(path: Path) -> bool:
    """Returns whether a file exists; a network filesystem answers this from its cache unless the folder is opened first."""
    revalidate_folder(path.parent)
    return path.exists()


#: Environment variables for vLLM, unless the user sets them.
_ENVIRONMENT = {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_DO_NOT_TRACK": "1",
}
#: `rollout.quantization` → vLLM's scheme, which it has for weights that come in half precision. Scales by output channel and
#: by token are the finest that it has on each device.
_QUANTIZATIONS = {"fp8": "fp8_per_channel"}
#: Arguments that say themselves for which batches graphs are captured.
_CAPTURE_SETTINGS = {"max_cudagraph_capture_size", "cudagraph_capture_sizes", "compilation_config", "enforce_eager"}
#: Text of a line about a phase.
_DURATION = re.compile(r"\b(took|takes|finished in)\b.*\d")
#: Default limit of the CPU build's cache.
_CPU_CACHE_BYTES = 4 << 30
#: Minimum number of tokens that the CPU build computes in a step.
_CPU_BATCH_TOKENS = 4096


def _set_variables() -> None:
    """Sets the environment variables with which vLLM has to be imported and built."""
    # The engine runs in this process, so that weights are passed as tensors and no engine process outlives the rank.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    # A saved plan of the cache's size does not know gpu_memory_utilization: an engine would get the share of another.
    os.environ["VLLM_ENABLE_STARTUP_PLAN"] = "0"
    for name, setting in _ENVIRONMENT.items():
        os.environ.setdefault(name, setting)


def import_vllm() -> None:
    """Imports vLLM for the engine ranks that this process will fork (`Worker.preloads`)."""
    _set_variables()
    from vllm import EngineArgs, LLMEngine  # noqa: F401
    from vllm.usage.usage_lib import UsageContext  # noqa: F401


def import_vllm_worker() -> None:
    """Imports the modules that vLLM imports while it builds an engine, except the model's class.

    Separate from `import_vllm`, because vLLM itself never forks a process that has these modules: if one opens an accelerator,
    the ranks import them and still share the larger part.
    """
    _set_variables()
    preload_engine_modules()


#: What a node imports once for all ranks with such an engine (`Worker.preloads`).
PRELOAD = tuple(f"{__name__}:{function.__name__}" for function in (import_vllm, import_vllm_worker))


class VLLMProcess:
    """vLLM's `LLMEngine` in this process. Subclasses add arguments of the engine in `_arguments`.

    Args:
        options: Options of the engine.
        config: The model's Hugging Face configuration.
        seed: Seed of the engine.
        link: Connection to the other ranks of an engine group.

    Raises:
        ConfigError: vLLM is not installed or of the wrong build, the model does not exist, or memory does not suffice.
    """

    #: Advice in the error message if vLLM is built for another device.
    alternative = "take rollout_backend hf"
    #: Whether requests have seeds.
    has_seeds = False
    #: False while some of the engine's memory is unmapped (`RolloutBackend.can_compute`).
    can_compute = True

    def __init__(self, options: EngineOptions, config: Any, seed: int, link: EngineLink | None = None) -> None:
        self._options = options
        self._sleep_mode = options.sleep_mode
        self._link = link
        self._has_images = has_vision(config)
        with phases_within():
            enter_phase("vLLM: imports")
            self._build_engine(config, seed)

    def _arguments(self) -> dict[str, Any]:
        """Returns arguments of the engine in addition to those of `_build_engine`."""
        return {}

    def _build_engine(self, config: Any, seed: int) -> None:
        options = self._options
        _set_variables()
        # vLLM's worker sets the precision of this process: that of the run (`runner.tf32`).
        os.environ.setdefault("VLLM_FLOAT32_MATMUL_PRECISION", torch.get_float32_matmul_precision())
        if cache := cache_folder():
            os.environ.setdefault("VLLM_CACHE_ROOT", str(cache / "vllm"))
        start_time = time.monotonic()
        try:
            from vllm import EngineArgs, LLMEngine
            from vllm.platforms import current_platform
            from vllm.usage.usage_lib import UsageContext
        except ImportError as error:
            raise ConfigError(
                f"rollout.rollout_backend is 'vllm', which cannot be imported ({first_line(error)}): pip install 'rlhpc[vllm]'"
            ) from None
        import_s = time.monotonic() - start_time
        self._is_on_cpu = bool(current_platform.is_cpu())
        if self._is_on_cpu != options.device.startswith("cpu") or not current_platform.device_type:
            build_device = (
                "the CPU" if self._is_on_cpu else current_platform.device_type or "an accelerator that it does not find"
            )
            raise ConfigError(
                f"rollout.rollout_backend is 'vllm' on {options.device}, and the vLLM installed is built for {build_device}; "
                f"install the other build, or {self.alternative}"
            )
        if options.batch_invariant:
            use_batch_invariant_mode()
        self._max_num_seqs = options.batch if self._is_on_cpu else options.max_batch_size
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
            "max_num_seqs": self._max_num_seqs,
            "gpu_memory_utilization": options.gpu_memory_utilization,
            "seed": seed % 2**31,
            "skip_tokenizer_init": True,
            "disable_log_stats": True,
            "use_tqdm_on_load": False,
            "enable_sleep_mode": self._sleep_mode and not self._is_on_cpu,
            **self._arguments(),
        }
        if options.quantization is not None:
            arguments["quantization"] = _QUANTIZATIONS[options.quantization]
        if self._has_images:
            # Images come as normalized patches; requests share none.
            arguments["mm_processor_cache_gb"] = 0
            if "mm_device_do_normalize" in EngineArgs.__dataclass_fields__:  # earlier versions never normalize
                arguments["mm_device_do_normalize"] = False
        if self._is_on_cpu:
            arguments["enforce_eager"] = True
            if self.has_seeds:
                # With a chunked prefill, vLLM rewinds random numbers, which CPU generators do not support.
                arguments["enable_chunked_prefill"] = False
                arguments["max_num_batched_tokens"] = max(
                    _CPU_BATCH_TOKENS, _max_sequence_tokens(config.get_text_config(), options)
                )
                if has_states(config.get_text_config()):
                    # vLLM stores states of a prefix at the ends of chunks.
                    arguments["enable_prefix_caching"] = False
            if has_states(config.get_text_config()):
                # The build's kernel turns only the first head of queries in three dimensions, as LFM2's are.
                arguments["compilation_config"] = {"custom_ops": ["-rotary_embedding"]}
            if not os.environ.get("VLLM_CPU_KVCACHE_SPACE"):
                arguments["kv_cache_memory_bytes"] = _compute_cpu_cache_bytes(config.get_text_config(), options)
        elif options.max_batch_size and _CAPTURE_SETTINGS.isdisjoint(options.engine_kwargs):
            # No decoding step has more sequences; vLLM would capture graphs of up to twice as many.
            arguments["max_cudagraph_capture_size"] = options.max_batch_size
        arguments.update(options.engine_kwargs)
        if (
            max(int(arguments.get(f"{parallelism}_parallel_size", 1)) for parallelism in ("tensor", "pipeline", "data"))
            > 1
        ):
            raise ConfigError(
                "rollout.engine_kwargs: vLLM runs in the rollout ranks' processes, each on one accelerator; say with "
                "rollout.parallel.tensor how many ranks are one engine"
            )
        if self._link is not None:
            if options.expert_parallel and self._is_on_cpu:
                raise ConfigError(
                    "rollout.parallel.expert: vLLM's CPU build ends with a segmentation fault where whole experts are divided "
                    "among ranks; leave it false there (each expert is divided)"
                )
            arguments |= {
                "tensor_parallel_size": self._link.size,
                "distributed_executor_backend": "external_launcher",
                **({"enable_expert_parallel": True} if options.expert_parallel else {}),
                **({} if self._is_on_cpu or sees_all_devices(self._link.size) else {"disable_custom_all_reduce": True}),
            }
        with self._compile_in_order(arguments, config):
            if self._link is not None:
                self._link.form()
            with restored_process(), group_rank_environment(self._link), self._explain_errors():
                if self._has_images:
                    register_images(config, options.model_path, options.trust_remote_code)
                else:
                    register_without_torchvision(getattr(config, "architectures", None) or ())
                try:
                    engine_args = EngineArgs(**arguments)
                except TypeError as error:
                    raise ConfigError(f"rollout.engine_kwargs: {error}") from None
                _configure_logging(engine_args)
                with logged_phases():
                    self._engine: Any = LLMEngine.from_engine_args(engine_args, usage_context=UsageContext.LLM_CLASS)
        total_s = time.monotonic() - start_time
        log.info("vLLM has started in %.1f s, of which its import took %.1f s", total_s, import_s)

    def _compile_in_order(self, arguments: Mapping[str, Any], config: Any) -> AbstractContextManager[None]:
        """Returns the context in which this rank builds its engine; the first rank of an engine waits there for the others."""
        if self._link is not None and self._link.rank > 0:
            return nullcontext()
        import vllm
        from vllm import envs
        from vllm.platforms import current_platform

        key = cache_key(arguments, config, vllm.__version__, torch.__version__, current_platform.get_device_name())
        return compiling_in_order(Path(envs.VLLM_CACHE_ROOT), key)

    @contextmanager
    def _explain_errors(self) -> Iterator[None]:
        """Converts out-of-memory errors and errors of vLLM's checks within the block to ConfigErrors that name settings."""
        try:
            yield
        except (torch.OutOfMemoryError, MemoryError, ValueError, RuntimeError, AssertionError) as error:
            message = str(error).lower()
            if isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "memory" in message or "kv cache" in message:
                memory_setting = (
                    "VLLM_CPU_KVCACHE_SPACE (GiB of cache)"
                    if self._is_on_cpu
                    else f"rollout.gpu_memory_utilization ({self._options.gpu_memory_utilization})"
                )
                raise ConfigError(
                    f"vLLM has not the memory it needs: {first_line(error)}; change {memory_setting}, or lower "
                    f"rollout.max_batch_size ({self._max_num_seqs or 'null: vLLM’s own number'}) or rollout.max_model_len "
                    f"({self._options.max_model_len or 'null: the model’s context'})"
                ) from error
            if (
                isinstance(error, (ValueError, NotImplementedError, AssertionError))
                or "unsupported" in message
                or "not supported" in message
            ):
                raise ConfigError(f"vLLM refuses the model or the section rollout: {_reason(error)}") from error
            if self._options.quantization is not None:
                raise ConfigError(
                    f"rollout.quantization is {self._options.quantization!r}; vLLM has no kernel for this model and "
                    f"device: {_reason(error)}; leave it null"
                ) from error
            raise

    def _free_accelerator(self, level: int) -> bool:
        """Frees the accelerator for another role, if roles of the run are colocated.

        Args:
            level: 1 keeps the weights on the host, 2 drops them.

        Returns:
            Whether the engine sleeps.
        """
        if self._is_on_cpu:
            _warn_once("vLLM's CPU build has no sleep mode: offload frees nothing")
        elif not self._sleep_mode:
            _warn_once("actor.offload_in_rollout is off, so vLLM has no sleep mode: offload frees nothing")
        else:
            self._engine.sleep(level=level, mode="keep")
            self.can_compute = False
            return True
        return False

    def reload_weights(self) -> None:
        """Maps the memory of the weights, and leaves the cache unmapped; see `RolloutBackend.reload_weights`."""
        if self._sleep_mode and not self._is_on_cpu and self._engine.is_sleeping():
            with self._explain_errors():
                self._engine.wake_up(["weights"])

    def reload(self) -> None:
        """Reverses `offload`; see `RolloutBackend.reload`."""
        if self._sleep_mode and not self._is_on_cpu:
            with self._explain_errors():
                self._engine.wake_up()
            self.can_compute = True

    def close(self) -> None:
        """Shuts the engine down; see `RolloutBackend.close`."""
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


def _max_sequence_tokens(config: Any, options: EngineOptions) -> int:
    """Returns the number of tokens of the longest sequence."""
    return options.max_model_len or int(getattr(config, "max_position_embeddings", 4096))


def _compute_cpu_cache_bytes(config: Any, options: EngineOptions) -> int:
    """Returns the cache size for the largest number of sequences at full length, up to a limit.

    vLLM's default would be most of the memory.
    """
    num_kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    token_bytes = 2 * config.num_hidden_layers * num_kv_heads * head_dim * getattr(torch, options.dtype).itemsize
    max_tokens = _max_sequence_tokens(config, options)
    # vLLM's blocks have up to 128 tokens; one sequence of full length must fit even if it exceeds the limit.
    num_blocks = -(-max_tokens // 128) + 1
    return int(
        max(token_bytes * 128 * num_blocks * 2, min(_CPU_CACHE_BYTES, token_bytes * 128 * num_blocks * options.batch))
    )


def _reason(error: BaseException) -> str:
    """Returns the first lines of an error message; errors of vLLM's checks, by pydantic, state the reason in line two.

    Assertions have their source line as well, because many have no message.
    """
    if isinstance(error, AssertionError):
        return with_source_line(error)
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:3])
