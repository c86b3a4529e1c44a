"""What the engine takes for granted of vLLM where it runs on a GPU, held against the sources that its CPU build has, too:
there, the second model runner's sampler and scheduling ahead of the results are the default."""

from __future__ import annotations

import inspect
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from tests.extras import need_extra

need_extra("llm", "vllm")
from transformers import AutoConfig
from vllm import EngineArgs

from rlhpc.language.engines.vllm_logprobs import log_before_filters, merged, return_outcomes
from rlhpc.language.models import logprobs as rows
from rlhpc.language.models.token_batch import TokenBatch
from tests.rectangles import top_told

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.outputs import LogprobsTensors


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


def test_the_second_runners_log_probs_are_before_the_filters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its sampler draws from what top-k leaves, and takes log-probs from the logits that `_sample_random` returns."""
    from vllm.v1.worker.gpu.sample import sampler as module

    scored: list[torch.Tensor] = []
    # Triton draws and scores there; the largest will do, and what is scored is kept.
    monkeypatch.setattr(module, "gumbel_sample", lambda logits, *args, **options: logits.argmax(-1))
    monkeypatch.setattr(module, "compute_topk_scores", lambda logits, *args, **options: scored.append(logits))
    monkeypatch.setattr(module, "get_num_sampled_and_rejected", lambda *args: (None, None))
    gpu, no = SimpleNamespace(gpu=None), lambda *args: False
    sampler = module.Sampler.__new__(module.Sampler)
    sampler.__dict__ |= {
        "sampling_states": SimpleNamespace(
            temperature=gpu, seeds=gpu, any_greedy=no, any_explicit_seed=no, max_num_logprobs=lambda rows: 0,
            get_top_k_top_p=lambda *args: (torch.tensor([2, 1]), None),
        ),
        "req_states": SimpleNamespace(prefill_len=gpu), "logprob_token_ids_state": SimpleNamespace(max_num_token_ids=no),
        "needs_logits_processing": np.zeros(2, bool), "logprobs_mode": "processed_logprobs", "trace_replay_state": None,
        "compute_nans": False, "return_sampling_mask": False, "use_fp64_gumbel": False, "use_xpu_sampler": False,
        "use_flashinfer": True,  # whose fused kernel says no logits: not taken where processed ones are asked for
    }  # fmt: skip
    worker = SimpleNamespace(model_runner=SimpleNamespace(sampler=sampler))
    logits, rows = torch.tensor([[0.0, 3.0, 1.0, 2.0], [5.0, 1.0, 1.5, 0.0]]), torch.arange(2)
    batch: Any = SimpleNamespace(
        num_reqs=2, positions=rows, logits_indices=rows, input_ids=rows, seq_lens=rows, seq_lens_cpu_upper_bound=rows,
        idx_mapping=rows, idx_mapping_np=rows.numpy(), expanded_idx_mapping=rows, expanded_local_pos=rows,
        cu_num_logits=rows, cu_num_logits_np=rows.numpy(),
    )  # fmt: skip
    before = sampler(logits.clone(), batch).sampled_token_ids
    assert torch.isinf(scored[0]).any()  # as vLLM has it: filtered
    assert log_before_filters(worker)
    tokens = sampler(logits.clone(), batch).sampled_token_ids
    assert tokens.tolist() == before.tolist() == [[1], [0]]
    assert torch.equal(scored[1], logits)


#: Of a prompt of four tokens, read in pieces of two; hidden states are logits here.
PROMPT, HIDDEN = (
    [2, 0, 1, 3],
    torch.tensor([[0.5, -1.0, 2.0, 0.0], [3.0, 1.0, 0.0, -2.0], [-1.0, 0.5, 1.5, 4.0], [0.0] * 4]),
)


class _Logits(torch.nn.Module):
    """Like vLLM's models: logits only where they are asked for."""

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden


def _first_runner(model: _Logits, parameters: SamplingParams, top: int) -> LogprobsTensors:
    """A prompt's log-probs by the first model runner, and its own sampler."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    request = SimpleNamespace(
        prompt_token_ids=PROMPT, sampling_params=parameters, num_computed_tokens=0, in_progress_prompt_logprobs_cpu=None
    )
    runner: Any = SimpleNamespace(
        num_prompt_logprobs={"id": top}, requests={"id": request}, device=torch.device("cpu"), model=model,
        input_batch=SimpleNamespace(req_id_to_index={"id": 0}), query_start_loc=SimpleNamespace(np=np.zeros(1, int)),
        model_config=SimpleNamespace(logprobs_mode="raw_logprobs"), sampler=model.sampler, _sync_device=lambda: None,
    )  # fmt: skip
    for start in (0, 2):
        request.num_computed_tokens = start
        found = GPUModelRunner._get_prompt_logprobs_dict(runner, HIDDEN[start : start + 2], {"id": 2})
    return found["id"]


def _second_runner(model: _Logits, parameters: SamplingParams, top: int) -> LogprobsTensors:
    """The same by the second one. Its kernels need Triton: plain torch takes their places."""
    from vllm.v1.outputs import LogprobsTensors
    from vllm.v1.worker.gpu.sample import prompt_logprob as module

    def scores(logits: torch.Tensor, num: int, ids: torch.Tensor, logits_mode: bool) -> LogprobsTensors:
        logprobs, chosen = logits.log_softmax(-1), ids[:, None]
        most, theirs = logprobs.topk(num, dim=-1)
        found = torch.cat([logprobs.gather(1, chosen), most], 1)
        return LogprobsTensors(torch.cat([chosen, theirs], 1), found, torch.zeros_like(ids))

    worker = module.PromptLogprobsWorker(1, torch.device("cpu"), "raw_logprobs")
    worker.add_request("id", 0, parameters)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "compute_topk_scores", scores)
        following = torch.tensor([*PROMPT[1:], 0])
        for start in (0, 2):
            patch.setattr(module, "get_prompt_logprobs_token_ids", lambda *args, at=start: following[at : at + 2])
            batch: Any = SimpleNamespace(
                idx_mapping_np=np.zeros(1, int), num_computed_prefill_tokens_np=np.array([start]), req_ids=["id"],
                prefill_len_np=np.array([4]), num_tokens=2, query_start_loc=None, idx_mapping=None,
                num_scheduled_tokens=np.array([2]), query_start_loc_np=np.array([0, 2]),
            )  # fmt: skip
            none: Any = None
            found = worker.compute_prompt_logprobs(
                model.compute_logits, HIDDEN[start : start + 2], batch, none, none, np.array([4])
            )
    return found["id"]


@pytest.mark.parametrize("top", [0, 2])
@pytest.mark.parametrize("runner", [_first_runner, _second_runner])
def test_a_prompts_log_probs_are_of_the_models_logits(runner: Any, top: int) -> None:
    """As they are, before temperature, filters and penalties: so what the model is made to say is what is told."""
    from vllm import SamplingParams
    from vllm.v1.sample.sampler import Sampler

    most = top + 1 if top else 0
    parameters = SamplingParams(temperature=0.5, top_k=1, min_p=0.5, prompt_logprobs=most)
    assert parameters.skip_reading_prefix_cache
    model: Any = _Logits()
    model.sampler = Sampler("raw_logprobs")
    worker = SimpleNamespace(model_runner=SimpleNamespace(get_model=lambda: model, sampler=model.sampler))
    return_outcomes(worker, 0, 4, 1.0)
    plain = HIDDEN[:3].log_softmax(-1).gather(1, torch.tensor(PROMPT[1:])[:, None])
    torch.testing.assert_close(runner(model, parameters, most).logprobs[:, :1], plain)
    return_outcomes(worker, top, 4, 2.0)
    found, expected = runner(model, parameters, most), (HIDDEN[:3] / 2).log_softmax(-1)
    if not top:
        torch.testing.assert_close(found.logprobs, expected.gather(1, torch.tensor(PROMPT[1:])[:, None]))
        return
    likely, ids = expected.topk(top, dim=-1)
    rest = expected.scatter(1, ids, -torch.inf).logsumexp(-1, keepdim=True)
    both, order = torch.cat([likely, rest], 1).sort(dim=-1, descending=True)
    torch.testing.assert_close(found.logprobs[:, 1:], both)
    names = torch.cat([ids, torch.full_like(ids[:, :1], 4)], 1).gather(1, order)
    assert torch.equal(found.logprob_token_ids[:, 1:].long(), names)


@pytest.mark.parametrize(("top", "width"), [(3, 7), (1, 9), (9, 9), (6, 7)])
def test_what_is_left_is_known_where_it_is_little(top: int, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What vLLM's softmax makes of the outcomes is what a teacher in transformers says, of a padded vocabulary, in chunks."""
    monkeypatch.setattr(rows, "_CHUNK", 20)
    logits = torch.randn(1, 12, 9, generator=torch.Generator().manual_seed(0)) * 15
    batch = TokenBatch.of([[0] * 12], [[False] + [True] * 11])
    told = top_told(logits, batch, top, 0.8, width)[1:]
    found = merged(logits[0, :-1], top, width, 0.8).log_softmax(-1)
    assert told[:, -1, 0].min() < -20 or top == width
    ids = torch.where(told[..., 1] < 0, width, told[..., 1]).long()
    torch.testing.assert_close(found.gather(1, ids), told[..., 0], rtol=1e-6, atol=1e-6)
    assert ((found > -torch.inf).sum(1) == top + 1).all()


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

    from rlhpc.language.engines.vllm_launch import sees_all_cards

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
    assert sees_all_cards(size) is not fails
    assert "disable_custom_all_reduce" in inspect.signature(EngineArgs).parameters


class _Sleeper:
    """Stands for an engine on an accelerator: which level it sleeps at, and when its cache is dropped."""

    def __init__(self) -> None:
        self.events: list[object] = []

    def sleep(self, level: int, mode: str) -> None:
        self.events.append(("sleep", level, mode))

    def wake_up(self) -> None:
        self.events.append("wake")

    def reset_prefix_cache(self, reset_running_requests: bool) -> None:
        self.events.append(("reset", reset_running_requests))


@pytest.mark.parametrize("apart", [True, False], ids=["adapters apart", "all weights"])
def test_an_engine_keeps_the_weights_that_no_update_brings(apart: bool) -> None:
    """Turn after turn: what never comes again is kept on the host, and what comes with each update is dropped and demanded."""
    from rlhpc.language.engines.vllm import Adapters, VLLMRollout

    engine = VLLMRollout.__new__(VLLMRollout)
    sleeper = _Sleeper()
    engine._engine, engine._on_cpu, engine._sleeps, engine._slept, engine._refuses = sleeper, False, True, False, ""
    engine._adapters = Adapters(8, 16, {"model.layers.0.self_attn.q_proj.weight": (4, 4)}) if apart else None
    for _ in range(2):
        engine.offload()
        engine.reload()
    assert sleeper.events == [("sleep", 1 if apart else 2, "keep"), "wake", ("reset", True)] * 2
    assert bool(engine._refuses) is not apart


def test_vllm_keeps_weights_on_the_host_at_level_1_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm import device_allocator
    from vllm.device_allocator import sleep_mode_backend

    kept: list[tuple[str, ...]] = []
    allocator = SimpleNamespace(sleep=lambda offload_tags: kept.append(offload_tags))
    monkeypatch.setattr(device_allocator, "get_mem_allocator_instance", lambda: allocator)
    backend = sleep_mode_backend.CuMemBackend()
    for level in (1, 2):
        backend.suspend(level)
    assert ["weights" in tags for tags in kept] == [True, False]
