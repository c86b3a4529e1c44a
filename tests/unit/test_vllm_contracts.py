"""What the engine takes for granted of vLLM where it runs on a GPU, held against the sources that its CPU build has, too:
there, the second model runner's sampler and scheduling ahead of the results are the default."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="needs the extra vllm")

from rlhpc.rollout.vllm import _log_before_filters


@pytest.mark.parametrize(
    ("where", "names"),
    [
        ("vllm.v1.engine.llm_engine:LLMEngine.sleep", ("level", "mode")),
        ("vllm.v1.engine.llm_engine:LLMEngine.wake_up", ()),
        ("vllm.v1.engine.llm_engine:LLMEngine.reset_prefix_cache", ("reset_running_requests",)),
        ("vllm.v1.engine.llm_engine:LLMEngine.collective_rpc", ("method", "args", "kwargs")),
        ("vllm.v1.worker.gpu_model_runner:GPUModelRunner.reload_weights", ("weights_iterator",)),
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

    # Triton draws there; the largest will do.
    monkeypatch.setattr(module, "gumbel_sample", lambda logits, *args, **options: logits.argmax(-1))
    sampler = module.Sampler.__new__(module.Sampler)
    gpu = SimpleNamespace(gpu=None)
    sampler.sampling_states = SimpleNamespace(temperature=gpu, seeds=gpu)
    sampler.use_fp64_gumbel = False
    worker = SimpleNamespace(model_runner=SimpleNamespace(sampler=sampler))
    logits = torch.tensor([[0.0, 3.0, 1.0, 2.0], [5.0, 1.0, 1.5, 0.0]])

    def draw() -> tuple[torch.Tensor, torch.Tensor]:
        found: tuple[torch.Tensor, torch.Tensor] = sampler._sample_random(
            logits.clone(), None, None, None, top_k=torch.tensor([2, 1]), top_p=None, use_fused_sampler=False
        )
        return found

    before = draw()
    assert torch.isinf(before[1]).any()  # as vLLM has it: filtered
    assert _log_before_filters(worker)
    tokens, kept = draw()
    assert tokens.tolist() == before[0].tolist() == [1, 0]
    assert torch.equal(kept, logits)
    # And what is returned is what log-probs are made of.
    assert "return self._sample_random(" in inspect.getsource(module.Sampler.sample)


def test_a_step_under_way_at_an_update_is_drawn_again() -> None:
    """With steps scheduled ahead, the tokens of one that ran with the old weights must not be delivered after the update."""
    from vllm.v1.core.sched.scheduler import Scheduler

    preempted = []
    scheduler = SimpleNamespace(
        running=["first", "second"], prev_step_scheduled_req_ids={"first"}, aux_output_connector=None,
        kv_cache_manager=SimpleNamespace(reset_prefix_cache=lambda: True),
        _preempt_request=lambda request, timestamp, drop_stale_output=False: preempted.append((request, drop_stale_output)),
    )  # fmt: skip
    assert Scheduler.reset_prefix_cache(scheduler, reset_running_requests=True)  # type: ignore[arg-type]
    assert preempted == [("second", True), ("first", True)] and not scheduler.prev_step_scheduled_req_ids


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
