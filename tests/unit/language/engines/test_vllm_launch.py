"""Life cycle of vLLM's engine: its arguments, error messages that name settings, sleep and shutdown."""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from rlhpc.language.engines import vllm_adapter, vllm_launch
from rlhpc.language.engines.common import EngineOptions
from rlhpc.language.engines.vllm_launch import VLLMProcess, sees_all_devices
from rlhpc.runtime.errors import ConfigError
from tests.unit.language.engines import fake_vllm

ENVIRONMENT = (
    "VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_LOGGING_LEVEL", "VLLM_LOGGING_STREAM", "VLLM_NO_USAGE_STATS",
    "VLLM_DO_NOT_TRACK", "VLLM_CACHE_ROOT", "VLLM_CPU_KVCACHE_SPACE", "VLLM_FLOAT32_MATMUL_PRECISION",
    "VLLM_BATCH_INVARIANT",
)  # fmt: skip


class Config:
    """Configuration of a small model without images."""

    num_hidden_layers, num_attention_heads, num_key_value_heads, hidden_size = 2, 4, 2, 64
    max_position_embeddings, architectures = 512, ["LlamaForCausalLM"]

    def get_text_config(self) -> Config:
        return self


class Seeded(VLLMProcess):
    """An engine whose requests have seeds, with an argument of its own."""

    has_seeds = True

    def _arguments(self) -> dict[str, Any]:
        return {"logprobs_mode": "processed_logprobs", "seed": 5}


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restores what an engine's build leaves in the environment."""
    for name in ENVIRONMENT:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def build(cls: type[VLLMProcess] = VLLMProcess, *, seed: int = 0, link: Any = None, **options: Any) -> Any:
    return cls(EngineOptions("models/small", **options), Config(), seed, link)


# -- arguments


def test_the_cpu_build_computes_whole_prompts_eagerly_in_a_cache_of_its_own_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake_vllm.install(monkeypatch)
    arguments = build(Seeded, max_batch_size=8)._engine.arguments
    assert arguments.enforce_eager and not arguments.enable_chunked_prefill and not arguments.enable_sleep_mode
    assert arguments.max_num_batched_tokens == 4096 and arguments.max_num_seqs == 8
    # Keys and values of 2 layers, 2 heads of 16 numbers in float32; 5 blocks of 128 tokens for each of 8 sequences.
    assert arguments.kv_cache_memory_bytes == 2 * 2 * 2 * 16 * 4 * 128 * 5 * 8
    assert (arguments.logprobs_mode, arguments.seed) == ("processed_logprobs", 5), "a subclass has the last word"
    assert build(Seeded, max_model_len=9000)._engine.arguments.max_num_batched_tokens == 9000, "a prompt at once"


def test_the_cpu_build_computes_models_with_states(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where prompts are computed whole, vLLM cannot cache states by prefix; and its kernel of rotary positions is off."""
    fake_vllm.install(monkeypatch)
    monkeypatch.setattr(Config, "layer_types", ["full_attention"] * 2, raising=False)
    arguments = build(Seeded)._engine.arguments
    assert (arguments.enable_prefix_caching, arguments.compilation_config) == (None, None)
    monkeypatch.setattr(Config, "layer_types", ["conv", "full_attention"])
    for process, is_caching in ((Seeded, False), (VLLMProcess, None)):
        arguments = build(process)._engine.arguments
        assert arguments.enable_prefix_caching is is_caching
        assert arguments.compilation_config == {"custom_ops": ["-rotary_embedding"]}


@pytest.mark.parametrize("missing", ["torchvision", "another", None])
def test_a_text_model_in_a_module_that_needs_torchvision_is_registered_without_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, missing: str | None
) -> None:
    """vLLM could not inspect it; other modules are left to vLLM."""
    fake_vllm.install(monkeypatch)
    processor = "the_image_processor"
    needed = f"from {missing}_that_is_not_installed import v2" if missing == "another" else "import torchvision"
    (tmp_path / "module_of_model.py").write_text(
        f"import {processor}\nclass LlamaForCausalLM: pass\n" if missing else "class LlamaForCausalLM: pass\n"
    )
    (tmp_path / f"{processor}.py").write_text(f"{needed}\n")
    (tmp_path / "processor_of_pil.py").write_text("")
    monkeypatch.setattr(vllm_adapter, "_IMAGE_PROCESSOR", processor)
    monkeypatch.setattr(vllm_adapter, "_IMAGE_PROCESSOR_OF_PIL", "processor_of_pil")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, "torchvision", None)
    monkeypatch.delitem(sys.modules, "module_of_model", raising=False)
    registry = sys.modules["vllm.model_executor.models.registry"].ModelRegistry
    registry.models["LlamaForCausalLM"] = SimpleNamespace(module_name="module_of_model")
    build()
    assert [*registry.registered] == (["LlamaForCausalLM"] if missing == "torchvision" else [])
    assert processor not in sys.modules


def test_a_long_context_fits_into_the_cache_and_many_sequences_share_it(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_vllm.install(monkeypatch)
    token_bytes = 2 * 2 * 2 * 16 * 4
    many = build(max_batch_size=10**6)._engine.arguments.kv_cache_memory_bytes
    assert many == vllm_launch._CPU_CACHE_BYTES
    long = build(max_model_len=10**8)._engine.arguments.kv_cache_memory_bytes
    assert long >= token_bytes * 10**8


def test_the_users_cache_size_and_variables_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_vllm.install(monkeypatch)
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "7")
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "DEBUG")
    assert build()._engine.arguments.kv_cache_memory_bytes is None
    assert os.environ["VLLM_LOGGING_LEVEL"] == "DEBUG" and os.environ["VLLM_NO_USAGE_STATS"] == "1"
    assert os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0", "the engine runs in this process"


def test_the_engine_computes_in_the_precision_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM sets that of its process, the rank's: to the most exact one, unless a variable says otherwise."""
    fake_vllm.install(monkeypatch)
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        build()
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
    assert os.environ["VLLM_FLOAT32_MATMUL_PRECISION"] == "high"


def test_a_gpu_build_has_the_options_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_vllm.install(monkeypatch, "cuda")
    engine = build(
        seed=2**31 + 3, device="cuda:0", dtype="bfloat16", sleep_mode=True, gpu_memory_utilization=0.4,
        engine_kwargs={"max_num_batched_tokens": 512},
    )._engine  # fmt: skip
    arguments = engine.arguments
    assert (arguments.model, arguments.dtype, arguments.seed) == ("models/small", "bfloat16", 3)
    assert arguments.enable_sleep_mode and not arguments.enforce_eager and arguments.max_num_seqs is None
    assert (arguments.gpu_memory_utilization, arguments.max_num_batched_tokens) == (0.4, 512)


def test_the_batch_invariant_mode_reaches_modules_that_the_node_imported_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake_vllm.install(monkeypatch, "cuda")
    early = ModuleType("vllm.early")
    vars(early)["is_batch_invariant"] = False
    monkeypatch.setitem(sys.modules, "vllm.early", early)
    build(device="cuda:0")
    assert "VLLM_BATCH_INVARIANT" not in os.environ and not vars(early)["is_batch_invariant"]
    build(device="cuda:0", batch_invariant=True)
    assert os.environ["VLLM_BATCH_INVARIANT"] == "1" and vars(early)["is_batch_invariant"]


@pytest.mark.parametrize(
    ("device", "capability", "text"),
    [("cpu", (9, 0), "vLLM's CPU build has no such mode"), ("cuda", (7, 5), "compute capability 8.0 or higher")],
)
def test_the_batch_invariant_mode_is_refused_where_vllm_has_none(
    monkeypatch: pytest.MonkeyPatch, device: str, capability: tuple[int, int], text: str
) -> None:
    fake_vllm.install(monkeypatch, device)
    sys.modules["vllm.platforms"].current_platform.capability = capability
    with pytest.raises(ConfigError, match=rf"rollout\.batch_invariant: .*{re.escape(text)}"):
        build(device=device, batch_invariant=True)
    assert "VLLM_BATCH_INVARIANT" not in os.environ


def test_a_model_that_the_batch_invariant_mode_excludes_is_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = fake_vllm.install(monkeypatch, "cuda")
    for error in (
        RuntimeError("VLLM batch_invariant mode is not supported for GDN_ATTN."),
        NotImplementedError("No Unquantized MoE backend supports the deployment configuration"),
    ):
        engine.build_error = error
        with pytest.raises(ConfigError, match=f"refuses the model .*{re.escape(str(error))}"):
            build(device="cuda:0", batch_invariant=True)
    engine.build_error = AssertionError()
    with pytest.raises(ConfigError, match=r"refuses the model .*AssertionError \(.*fake_vllm\.py, line \d+: raise"):
        build(device="cuda:0")


def test_products_in_8_bits_are_a_scheme_of_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = fake_vllm.install(monkeypatch, "cuda")
    built = build(device="cuda:0", dtype="bfloat16", quantization="fp8")._engine.arguments
    assert (built.quantization, built.dtype) == ("fp8_per_channel", "bfloat16")
    assert build(device="cuda:0", dtype="bfloat16")._engine.arguments.quantization is None
    engine.build_error = RuntimeError("_C::dynamic_per_token_scaled_fp8_quant() expected at most 0 argument(s)")
    with pytest.raises(
        ConfigError, match=r"rollout\.quantization is 'fp8'; vLLM has no kernel .*_fp8_quant.*leave it null"
    ):
        build(device="cuda:0", dtype="bfloat16", quantization="fp8")


@pytest.mark.parametrize(
    ("options", "size"),
    [
        ({"max_batch_size": 96}, 96),
        ({}, None),
        ({"max_batch_size": 96, "engine_kwargs": {"max_cudagraph_capture_size": 8}}, 8),
        ({"max_batch_size": 96, "engine_kwargs": {"enforce_eager": True}}, None),
        ({"max_batch_size": 96, "engine_kwargs": {"cudagraph_capture_sizes": [1, 2]}}, None),
    ],
    ids=str,
)
def test_graphs_are_captured_for_batches_of_the_runs_size(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], size: int | None
) -> None:
    fake_vllm.install(monkeypatch, "cuda")
    assert build(device="cuda:0", **options)._engine.arguments.max_cudagraph_capture_size == size
    fake_vllm.install(monkeypatch)
    assert build(max_batch_size=96)._engine.arguments.max_cudagraph_capture_size is None, "on the CPU"


def test_the_phases_of_a_start_are_in_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Those of vLLM's lines that say what took how long; its own handler shows what it showed before."""
    logger, shown = logging.getLogger("vllm"), list[str]()

    class Shown(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            shown.append(record.getMessage())

    own = Shown(logging.NOTSET)
    monkeypatch.setattr(logger, "handlers", [own])
    monkeypatch.setattr(logger, "level", logging.ERROR)
    logger.manager._clear_cache()  # type: ignore[attr-defined]
    with caplog.at_level(logging.INFO, logger=vllm_launch.__name__), vllm_launch.logged_phases():
        inner = logging.getLogger("vllm.v1.worker")
        inner.info("Loading weights took %.2f seconds", 1.5)
        inner.info("Using a backend")
        inner.error("it took 3 attempts to fail")
    assert [record.getMessage() for record in caplog.records if record.name == vllm_launch.__name__] == [
        "vLLM: Loading weights took 1.50 seconds", "vLLM: it took 3 attempts to fail",
    ]  # fmt: skip
    assert shown == ["it took 3 attempts to fail"]
    assert logger.handlers == [own] and own.level == logging.NOTSET and logger.level == logging.ERROR
    caplog.clear()
    with caplog.at_level(logging.INFO, logger=vllm_launch.__name__):
        fake_vllm.install(monkeypatch)
        build()
    assert any("vLLM has started in" in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize(("rank", "expected"), [(0, ["waits", "forms", "has filled"]), (1, ["forms"])])
def test_the_first_rank_of_an_engine_waits_for_the_caches_and_the_others_for_it(
    monkeypatch: pytest.MonkeyPatch, rank: int, expected: list[str]
) -> None:
    """Before it joins the others, which wait for it there. Both ends are in order if the build fails, too."""
    fake_vllm.install(monkeypatch).build_error = RuntimeError("this is the end of the test")
    events: list[str] = []

    @contextmanager
    def in_order(root: Path, key: str) -> Iterator[None]:
        events.append("waits")
        try:
            yield
        finally:
            events.append("has filled")

    monkeypatch.setattr(vllm_launch, "compiling_in_order", in_order)
    monkeypatch.setattr(vllm_launch, "group_rank_environment", lambda link: nullcontext())
    fake_args = sys.modules["vllm"].EngineArgs
    monkeypatch.setattr(
        sys.modules["vllm"], "EngineArgs", lambda distributed_executor_backend, **words: fake_args(**words)
    )
    link = SimpleNamespace(rank=rank, size=2, ident="vm:x", form=lambda: events.append("forms"))
    with pytest.raises(RuntimeError, match="end of the test"):
        build(link=link)
    assert events == expected


# -- refused settings


def test_another_build_is_refused_by_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_vllm.install(monkeypatch)
    with pytest.raises(ConfigError, match=r"'vllm' on cuda:0, and the vLLM installed is built for the CPU; .*hf"):
        build(device="cuda:0")
    fake_vllm.install(monkeypatch, "cuda")
    with pytest.raises(ConfigError, match="'vllm' on cpu, and the vLLM installed is built for cuda"):
        build()
    fake_vllm.install(monkeypatch, "")
    with pytest.raises(ConfigError, match="built for an accelerator that it does not find"):
        build(device="cuda:0")


class Missing:
    """Finder of a Python without vllm."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> None:
        if name == "vllm":
            raise ModuleNotFoundError("No module named 'vllm'")


def test_a_missing_vllm_is_said_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Missing, *sys.meta_path])
    with pytest.raises(
        ConfigError, match=r"cannot be imported \(No module named 'vllm'\): pip install 'rlhpc\[vllm\]'"
    ):
        build()


@pytest.mark.parametrize("kind", ["tensor", "pipeline", "data"])
def test_ranks_of_vllms_own_are_refused_with_the_key_for_them(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    fake_vllm.install(monkeypatch)
    with pytest.raises(ConfigError, match=r"rollout\.engine_kwargs: .*rollout\.parallel\.tensor"):
        build(engine_kwargs={f"{kind}_parallel_size": 2})


def test_an_argument_that_vllm_does_not_have_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_vllm.install(monkeypatch)
    with pytest.raises(ConfigError, match=r"rollout\.engine_kwargs: .*no_such_argument"):
        build(engine_kwargs={"no_such_argument": 1})


def test_experts_are_not_divided_among_ranks_of_the_cpu_build(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_vllm.install(monkeypatch)
    with pytest.raises(ConfigError, match=r"rollout\.parallel\.expert: .*segmentation fault"):
        build(link=SimpleNamespace(rank=0, size=2, ident="vm:x"), expert_parallel=True)


# -- errors of vLLM


@pytest.mark.parametrize(
    ("device", "error", "message"),
    [
        (
            "cuda:0",
            torch.OutOfMemoryError("CUDA out of memory"),
            r"change rollout\.gpu_memory_utilization \(0\.6\), or lower",
        ),
        ("cuda:0", ValueError("No available memory for the cache"), r"max_batch_size \(null.*max_model_len \(null"),
        (
            "cpu",
            RuntimeError("the KV cache is too small\nmore"),
            r"the KV cache is too small; change VLLM_CPU_KVCACHE_SPACE",
        ),
        ("cpu", MemoryError("none"), r"rollout\.max_batch_size \(\d+\)"),
        (
            "cpu",
            ValueError("1 validation error\n  Model is odd\n"),
            "refuses the model .*: 1 validation error Model is odd",
        ),
        (
            "cpu",
            RuntimeError("Unsupported head size"),
            "refuses the model or the section rollout: Unsupported head size",
        ),
    ],
)
def test_errors_of_a_build_name_the_settings(
    monkeypatch: pytest.MonkeyPatch, device: str, error: BaseException, message: str
) -> None:
    engine = fake_vllm.install(monkeypatch, device.partition(":")[0])
    engine.build_error = error
    with pytest.raises(ConfigError, match=message):
        build(device=device)


def test_an_error_of_the_program_is_raised_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = fake_vllm.install(monkeypatch)
    engine.build_error = RuntimeError("shapes differ")
    with pytest.raises(RuntimeError, match=r"^shapes differ$"):
        build()


# -- sleep and shutdown


def test_an_engine_sleeps_on_an_accelerator_whose_roles_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_vllm.install(monkeypatch, "cuda")
    engine = build(device="cuda:0", sleep_mode=True)
    assert engine._free_accelerator(level=2)
    engine.reload()
    assert engine._engine.events == [("sleep", 2, "keep"), "wake"]


@pytest.mark.parametrize(("device", "sleep_mode"), [("cuda:0", False), ("cpu", True)])
def test_an_engine_without_sleep_mode_warns_and_stays_awake(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, device: str, sleep_mode: bool
) -> None:
    fake_vllm.install(monkeypatch, device.partition(":")[0])
    vllm_launch._warn_once.cache_clear()
    engine = build(device=device, sleep_mode=sleep_mode)
    for _ in range(2):
        assert not engine._free_accelerator(level=1)
        engine.reload()
    assert engine._engine.events == []
    (record,) = caplog.records
    assert "no sleep mode" in record.message


def test_an_engine_is_shut_down_once(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_vllm.install(monkeypatch)
    engine = build()
    inner = engine._engine
    engine.close()
    engine.close()
    assert inner.events == ["shutdown"]


# -- ranks


@pytest.mark.parametrize(
    ("mask", "size", "all_seen"), [(None, 4, True), ("0,1", 2, True), ("0", 2, False), ("3, ", 2, False)]
)
def test_a_device_mask_is_as_long_as_the_engine_has_ranks(
    monkeypatch: pytest.MonkeyPatch, mask: str | None, size: int, all_seen: bool
) -> None:
    fake_vllm.install(monkeypatch, "cuda")
    monkeypatch.delenv("FAKE_VISIBLE_DEVICES", raising=False)
    if mask is not None:
        monkeypatch.setenv("FAKE_VISIBLE_DEVICES", mask)
    assert sees_all_devices(size) is all_seen


@pytest.mark.parametrize("others", [{}, {"host": "elsewhere"}, {"cores": {10**6}}])
def test_ranks_of_a_host_that_share_a_core_are_noticed(monkeypatch: pytest.MonkeyPatch, others: dict[str, Any]) -> None:
    def gather(gathered: list[Any], local: Any) -> None:
        host, cores = local
        gathered[:] = [local, (others.get("host", host), frozenset(others.get("cores", cores)))]

    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    monkeypatch.setattr(torch.distributed, "all_gather_object", gather)
    assert vllm_launch.has_disjoint_cores() is bool(others)


def test_one_rank_needs_no_preparation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    with vllm_launch.group_rank_environment(None):
        assert os.environ["RANK"] == "3"
