"""What the engine takes for granted of vLLM where it runs on a GPU, held against the sources that its CPU build has, too:
there, the second model runner's sampler and scheduling ahead of the results are the default."""

from __future__ import annotations

import inspect
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.extras import need_extra

need_extra("llm", "vllm")

from transformers import AutoConfig
from vllm import EngineArgs

from rlhpc.language.engines.vllm_launch import PHASE_LINES
from tests.unit.language.engines.test_vllm_device_memory import SAME, Change, loaded

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.core.sched.scheduler import Scheduler


@pytest.mark.parametrize(
    ("where", "names"),
    [
        ("vllm.v1.engine.llm_engine:LLMEngine.sleep", ("level", "mode")),
        ("vllm.v1.engine.llm_engine:LLMEngine.wake_up", ()),
        ("vllm.v1.engine.llm_engine:LLMEngine.reset_prefix_cache", ("reset_running_requests",)),
        ("vllm.v1.engine.llm_engine:LLMEngine.collective_rpc", ("method", "args", "kwargs")),
        ("vllm.v1.engine.llm_engine:LLMEngine.reset_encoder_cache", ()),
        ("vllm.v1.worker.gpu.model_runner:GPUModelRunner.reset_encoder_cache", ()),
        ("vllm.inputs.engine:mm_input", ("prompt_token_ids", "mm_kwargs", "mm_hashes", "mm_placeholders")),
        ("vllm.v1.worker.gpu_model_runner:GPUModelRunner.get_model", ()),
        ("vllm.v1.worker.gpu.model_runner:GPUModelRunner.get_model", ()),
        ("vllm.v1.worker.gpu_model_runner:GPUModelRunner.reload_weights", ("weights_iterator",)),
        ("vllm.model_executor.model_loader.reload.layerwise:get_numel_loaded", ("weight_loader", "args")),
        ("vllm.v1.worker.gpu.model_runner:GPUModelRunner.reload_weights", ("weights_iterator",)),
        ("vllm.v1.core.sched.scheduler:Scheduler._preempt_request", ("drop_stale_output",)),
    ],
)
def test_calls_have_the_arguments_that_are_given(where: str, names: tuple[str, ...]) -> None:
    module, _, path = where.partition(":")
    found: Any = __import__(module, fromlist=["_"])
    for part in path.split("."):
        found = getattr(found, part)
    parameters = inspect.signature(found).parameters
    assert set(names) <= set(parameters)
    required = {name for name, p in parameters.items() if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD}
    assert required <= {"self", "method", "request", "timestamp", *names}


@pytest.fixture(params=[False, True], ids=["first runner", "second runner"])
def scheduler(request: pytest.FixtureRequest, tmp_path: Path) -> Scheduler:
    """vLLM's own, as it is on a GPU: it schedules a step while the one before is under way."""
    from vllm.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.structured_output import StructuredOutputManager

    AutoConfig.for_model(
        "llama", architectures=["LlamaForCausalLM"], hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, vocab_size=64, max_position_embeddings=64,
    ).save_pretrained(tmp_path)  # fmt: skip
    config = VllmConfig(
        model_config=ModelConfig(model=str(tmp_path), skip_tokenizer_init=True, dtype="float32"),
        scheduler_config=SchedulerConfig(
            max_num_seqs=4, max_num_batched_tokens=64, max_model_len=64, is_encoder_decoder=False
        ),
        cache_config=CacheConfig(block_size=32),
    )
    config.scheduler_config.async_scheduling = True  # the CPU's platform turns it off
    config.cache_config.num_gpu_blocks = 8
    assert config.scheduler_config.get_scheduler_cls() is AsyncScheduler
    attention = FullAttentionSpec(block_size=32, num_kv_heads=2, head_size=8, dtype=torch.float32)
    cache = KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], attention)])
    manager = StructuredOutputManager(config)
    made = AsyncScheduler(vllm_config=config, kv_cache_config=cache, block_size=32, structured_output_manager=manager)
    made.use_v2_model_runner = request.param  # what it tells the worker; the second one itself needs Triton
    return made


def test_a_step_under_way_at_an_update_is_drawn_again(scheduler: Scheduler) -> None:
    """The token of a step that ran with the old weights is not delivered after the update, and its place is drawn anew."""
    from vllm import SamplingParams
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.request import Request

    request = Request("id", [1, 2, 3], SamplingParams(max_tokens=3, ignore_eos=True), pooling_params=None)
    scheduler.add_request(request)

    def delivered(step: SchedulerOutput, token: int) -> list[int]:
        drawn = ModelRunnerOutput(req_ids=["id"], req_id_to_index={"id": 0}, sampled_token_ids=[[token]])
        groups = scheduler.update_from_output(step, drawn).values()
        return [token for group in groups for output in group.outputs for token in output.new_token_ids]

    first = scheduler.schedule()
    second = scheduler.schedule()  # ahead of the first one's result
    assert delivered(first, 11) == [11]
    assert scheduler.reset_prefix_cache(reset_running_requests=True)
    third = scheduler.schedule()  # all that there is once more, with the new weights
    assert (first.num_scheduled_tokens, second.num_scheduled_tokens) == ({"id": 3}, {"id": 1})
    assert third.num_scheduled_tokens == {"id": 4}
    assert delivered(second, 22) == []
    assert delivered(third, 33) == [33]
    assert delivered(scheduler.schedule(), 44) == [44]
    assert list(request.output_token_ids) == [11, 33, 44] and not scheduler.has_unfinished_requests()


def test_one_kernel_uses_experts_as_they_are_loaded() -> None:
    """`moe_backend: triton`, which the engine takes on GPUs: the weights that an update copies are those it computes with."""
    from vllm.model_executor.layers.fused_moe.modular_kernel import FusedMoEExperts
    from vllm.model_executor.layers.fused_moe.oracle.unquantized import (
        UnquantizedMoeBackend,
        backend_to_kernel_cls,
        convert_to_unquantized_kernel_format,
        map_unquantized_backend,
    )

    triton = map_unquantized_backend("triton")
    assert triton is UnquantizedMoeBackend.TRITON
    first, second = torch.randn(2, 8, 4), torch.randn(2, 4, 4)
    config: Any = None  # only the kernels that shuffle ask for it
    converted = convert_to_unquantized_kernel_format(triton, config, first, second)
    assert converted[0] is first and converted[1] is second
    for kernel in backend_to_kernel_cls(triton):
        assert kernel.process_weights_after_loading is FusedMoEExperts.process_weights_after_loading


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("mask", [None, "0", "1", "3", "0,1", "2,3", "0,1,2,3", "7,5,3,1", "0,1,2,3,4,5,6,7"])
def test_vllms_own_all_reduce_is_off_where_it_would_look_for_devices_beyond_the_mask(
    monkeypatch: pytest.MonkeyPatch, mask: str | None, size: int
) -> None:
    """It asks its platform for the device of each rank of the engine, by the rank's number."""
    from vllm import platforms
    from vllm.platforms.interface import Platform

    from rlhpc.language.engines.vllm_launch import sees_all_devices

    class Card(Platform):
        device_control_env_var = "CUDA_VISIBLE_DEVICES"

    monkeypatch.setattr(platforms, "_current_platform", Card())
    if mask is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", mask)
    fails = False
    for rank in range(size):
        try:
            Card.logical_device_id_to_visible_device_id(rank)
        except IndexError:
            fails = True
    assert sees_all_devices(size) is not fails
    assert "disable_custom_all_reduce" in inspect.signature(EngineArgs).parameters


@pytest.mark.parametrize(
    ("visible", "change", "holds"),
    [
        ("0,1,2,3", SAME, True),
        ("7,5,3,1", SAME, True),
        (
            "7,5,3,1",
            ("return visible_physical_device_ids.index(physical_device_id)", "return physical_device_id"),
            False,
        ),
        ("7,5,3,1", ("visible_device_ids[device_id]\n", "visible_device_ids[0]\n"), False),
    ],
    ids=["in order", "another order", "other masks", "other indices"],
)
def test_all_ranks_of_an_engine_name_its_devices_alike(
    monkeypatch: pytest.MonkeyPatch, visible: str, change: Change, holds: bool
) -> None:
    """With the masks and local ranks that ranks get: by the rank's number in the engine, vLLM's platform finds the same device
    in each of its processes, and a rank's own at its local rank. Then no two ranks have the same pair of host and index, by
    which torch's symmetric memory tells devices apart."""
    from vllm import platforms

    from rlhpc.language.engines.vllm_launch import sees_all_devices
    from rlhpc.runtime.placement.strategies import Placement, with_shared_devices

    platform: Any = loaded("vllm.platforms.interface", change).Platform

    class Card(platform):
        device_control_env_var = "CUDA_VISIBLE_DEVICES"

    def physical(rank: int) -> int:
        index = Card.logical_device_id_to_visible_device_id(rank)  # as vLLM's custom all-reduce does
        found: int = Card.visible_device_id_to_physical_device_id(index)
        return found

    monkeypatch.setattr(platforms, "_current_platform", Card())
    names = visible.split(",")
    placements = with_shared_devices([Placement(rank, 0, rank, 4, (3 - rank,)) for rank in range(4)], 2)
    are_alike = list[bool]()
    for engine in (placements[:2], placements[2:]):
        devices = [int(names[placement.accelerators[0]]) for placement in engine]
        for number, placement in enumerate(engine):
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(names[index] for index in placement.visible))
            assert placement.visible.index(placement.accelerators[0]) == number
            try:
                are_alike.append(sees_all_devices(2) and [physical(rank) for rank in range(2)] == devices)
            except IndexError:
                are_alike.append(False)
    assert all(are_alike) is holds


class _Sleeper:
    """Stands for an engine on an accelerator: which level it sleeps at, and when its cache is dropped."""

    def __init__(self) -> None:
        self.events: list[object] = []

    def sleep(self, level: int, mode: str) -> None:
        self.events.append(("sleep", level, mode))

    def wake_up(self, tags: list[str] | None = None) -> None:
        self.events.append("wake" if tags is None else ("wake", *tags))

    def is_sleeping(self) -> bool:
        return bool(self.events) and self.events[-1] != "wake" and not isinstance(self.events[-1], bool)

    def reset_prefix_cache(self, reset_running_requests: bool) -> None:
        self.events.append(("reset", reset_running_requests))


@pytest.mark.parametrize("apart", [True, False], ids=["adapters apart", "all weights"])
def test_an_engine_keeps_the_weights_that_no_update_brings(apart: bool) -> None:
    """Turn after turn: what never comes again is kept on the host, and what comes with each update is dropped and demanded."""
    from rlhpc.language.engines.vllm import Adapters, VLLMRollout

    engine = VLLMRollout.__new__(VLLMRollout)
    sleeper = _Sleeper()
    engine._engine, engine._is_on_cpu, engine._sleep_mode, engine._slept, engine._update_error = (
        sleeper,
        False,
        True,
        False,
        "",
    )
    engine._adapters = Adapters(8, 16, {"model.layers.0.self_attn.q_proj.weight": (4, 4)}) if apart else None
    for _ in range(2):
        engine.offload()
        engine.reload()
    assert sleeper.events == [("sleep", 1 if apart else 2, "keep"), "wake", ("reset", True)] * 2
    assert bool(engine._update_error) is not apart
    sleeper.events.clear()
    engine.offload()
    engine.reload_weights()
    assert not engine.can_compute and sleeper.events[-1] == ("wake", "weights")
    engine.reload()
    assert engine.can_compute


def wake_faults(monkeypatch: pytest.MonkeyPatch, cumem: Any, abstract: Any) -> list[str]:
    """What of waking in parts is another than the project assumes."""
    mapped, faults = list[int](), list[str]()
    monkeypatch.setattr(cumem, "create_and_map", lambda handle: mapped.append(handle[0]), raising=False)
    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: None)
    allocator = cumem.CuMemAllocator.__new__(cumem.CuMemAllocator)
    allocator.pointer_to_data = {
        number: SimpleNamespace(handle=(number, 8), tag=tag, is_asleep=True, cpu_backup_tensor=None)
        for number, tag in enumerate(("weights", "kv_cache", "weights"))
    }
    allocator.wake_up(["weights"])
    if mapped != [0, 2]:
        faults.append("not the weights alone are mapped")
    allocator.wake_up(None)
    if mapped != [0, 2, 1]:
        faults.append("what is mapped is mapped again, or the cache is not")
    defined = dict.fromkeys(abstract.Executor.__abstractmethods__, lambda *arguments, **options: None)
    executor: Any = object.__new__(type("Some", (abstract.Executor,), defined))
    executor.sleeping_tags = set(abstract.SLEEP_TAGS)
    executor.wake_up(["weights"])
    if not executor.is_sleeping:
        faults.append("the executor is awake before its cache is")
    executor.wake_up(None)
    if executor.is_sleeping:
        faults.append("the executor sleeps on")
    return faults


_WAKE, _CLEAR = "data.tag in tags or data.tag", "self.sleeping_tags.clear()"
_REMOVE = "self.sleeping_tags.remove(tag)\n        else"


@pytest.mark.parametrize(
    ("in_allocator", "in_executor", "fault"),
    [
        (SAME, SAME, None),
        ((_WAKE, "data.tag"), SAME, "not the weights alone are mapped"),
        (("data.is_asleep = False", "pass"), SAME, "what is mapped is mapped again, or the cache is not"),
        (SAME, (_REMOVE, "self.sleeping_tags.clear()\n                break\n        else"), "the executor is awake"),
        (SAME, (_CLEAR, "pass"), "the executor sleeps on"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_vllm_wakes_its_weights_alone_and_the_rest_later(
    monkeypatch: pytest.MonkeyPatch, in_allocator: Change, in_executor: Change, fault: str | None
) -> None:
    """What is mapped already is not mapped again; the executor sleeps until its cache is there, too."""
    cumem, abstract = (
        loaded("vllm.device_allocator.cumem", in_allocator), loaded("vllm.v1.executor.abstract", in_executor)
    )  # fmt: skip
    faults = wake_faults(monkeypatch, cumem, abstract)
    assert (faults == []) if fault is None else any(found.startswith(fault) for found in faults), faults


def test_the_worker_restores_its_buffers_with_the_weights() -> None:
    from vllm.v1.worker import gpu_worker

    assert '"weights" in tags' in inspect.getsource(gpu_worker.Worker.wake_up)


@pytest.mark.parametrize(
    ("change", "holds"),
    [(SAME, True), (("if level == 1:", "if level:"), False), (("if level == 1:", "if level == 0:"), False)],
    ids=["installed", "always", "never"],
)
def test_vllm_keeps_weights_on_the_host_at_level_1_alone(
    monkeypatch: pytest.MonkeyPatch, change: Change, holds: bool
) -> None:
    from vllm import device_allocator

    kept: list[tuple[str, ...]] = []
    allocator = SimpleNamespace(sleep=lambda offload_tags: kept.append(offload_tags))
    monkeypatch.setattr(device_allocator, "get_mem_allocator_instance", lambda: allocator)
    backend = loaded("vllm.device_allocator.sleep_mode_backend", change).CuMemBackend()
    for level in (1, 2):
        backend.suspend(level)
    assert (["weights" in tags for tags in kept] == [True, False]) is holds


# -- start


def _source(*modules: str) -> str:
    import importlib.util

    return "".join(Path(str(importlib.util.find_spec(module).origin)).read_text() for module in modules)  # type: ignore[union-attr]


def test_lines_of_the_log_mark_the_phases_of_a_start() -> None:
    """Each is in the code that logs it, where the phase begins."""
    workers = ("gpu_model_runner", "gpu.model_runner", "gpu_worker", "cpu_model_runner", "cpu_worker")
    lines = _source("vllm.v1.engine.core", *(f"vllm.v1.worker.{name}" for name in workers))
    assert [line for line in PHASE_LINES if f'"{line}' not in lines] == []


def test_logging_that_is_configured_beforehand_stays_while_an_engine_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm import logger as vllm_logger

    applied: list[Any] = []
    monkeypatch.setattr(vllm_logger, "_configure_vllm_root_logger", applied.append)
    monkeypatch.setattr(vllm_logger, "_last_configured_logging_config", None)
    for _ in range(2):
        vllm_logger.configure_logging_if_needed(EngineArgs(model="nowhere").create_logging_config())
    assert len(applied) == 1
    assert "configure_logging_if_needed(vllm_config.logging_config)" in _source("vllm.v1.engine.llm_engine")


def test_vllm_sets_the_precision_of_products_by_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    """By torch's words, and to "highest" where it is not set, whatever the process has chosen before."""
    from vllm import envs

    read = envs.environment_variables["VLLM_FLOAT32_MATMUL_PRECISION"]
    monkeypatch.delenv("VLLM_FLOAT32_MATMUL_PRECISION", raising=False)
    assert read() == "highest"
    monkeypatch.setenv("VLLM_FLOAT32_MATMUL_PRECISION", "high")
    assert read() == "high"
    worker = _source("vllm.v1.worker.gpu_worker")
    assert "precision = envs.VLLM_FLOAT32_MATMUL_PRECISION" in worker
    assert "torch.set_float32_matmul_precision(precision)" in worker


def test_what_engines_share_lies_below_one_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from vllm import envs

    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "cache"))
    assert envs.environment_variables["VLLM_CACHE_ROOT"]() == str(tmp_path / "cache")
    backends = _source("vllm.compilation.backends")
    assert 'envs.VLLM_CACHE_ROOT, "torch_compile_cache", hash_key' in backends, (
        "by what is compiled, not by process or run"
    )
    assert 'Path(envs.VLLM_CACHE_ROOT) / "modelinfos"' in _source("vllm.model_executor.models.registry")


def test_a_start_up_plan_does_not_know_the_share_of_memory() -> None:
    """vLLM's saved result of memory profiling would give an engine the cache of another `gpu_memory_utilization`. While this
    holds, engines are started without `VLLM_ENABLE_STARTUP_PLAN`."""
    from vllm.config import CacheConfig
    from vllm.v1.worker import startup_plan

    assert "vllm_config.compute_hash()" in inspect.getsource(startup_plan.compute_plan_fingerprint)
    assert "utilization" not in inspect.getsource(startup_plan)
    assert (
        CacheConfig(gpu_memory_utilization=0.3).compute_hash() == CacheConfig(gpu_memory_utilization=0.9).compute_hash()
    )
