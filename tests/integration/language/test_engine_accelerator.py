"""An engine on one accelerator: what it writes with, that updates arrive in place, and its sleep (`tests/accelerators.py`)."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.extras import need_extra

need_extra("llm", "vllm")

sys.path.insert(0, str(Path(__file__).parent))

from engine_models import change, error_of, requests_of, run_out, save_model
from transformers import AutoModelForCausalLM

from rlhpc.config.typed import default_section, typed
from rlhpc.language.config.run import GrpoConfig
from rlhpc.language.engines import Completion, RolloutBackend, make_rollout
from rlhpc.language.engines.common import WeightUpdateError
from tests.accelerators import ON_CPU, kind

pytestmark = pytest.mark.gpu

#: How far log-probs of the same weights may be apart from a forward of transformers in float32 on the CPU. Accelerators'
#: kernels multiply float32 with the precision of TF32.
TOLERANCE = {"float32": 2e-5 if ON_CPU else 0.03, "bfloat16": 0.15}
#: The engine that sleeps: of such, vLLM has one in a process.
sleeper = pytest.mark.parametrize("built", ["float32"], indirect=True)


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def built(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[RolloutBackend, Any]]:
    """An engine, and the model that it starts from."""
    folder = tmp_path_factory.mktemp("model")
    save_model(folder)
    cfg = typed(GrpoConfig, default_section(GrpoConfig))
    cfg.rollout.rollout_backend, cfg.rollout.max_batch_size, cfg.rollout.gpu_memory_utilization = "vllm", 16, 0.3
    cfg.rollout.dtype, cfg.actor.offload_in_rollout = request.param, request.param == "float32"
    engine = make_rollout(cfg, model_path=str(folder), device=kind(), seed=3)
    yield engine, AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    engine.close()


@pytest.fixture
def engine(built: tuple[RolloutBackend, Any]) -> RolloutBackend:
    """With nothing under way and the model's weights."""
    built[0].abort()
    built[0].update_weights(0, built[1].named_parameters())
    return built[0]


@pytest.fixture
def model(built: tuple[RolloutBackend, Any]) -> Any:
    """In float32 on the CPU, with the weights that the engine has, rounded as it rounds them."""
    model = built[1]
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype_of(built[0])).float()
    return model


def dtype_of(engine: Any) -> torch.dtype:
    found: torch.dtype = engine._engine.model_config.dtype
    return found


def tolerance(engine: Any) -> float:
    return TOLERANCE[str(dtype_of(engine)).removeprefix("torch.")]


def test_the_second_model_runner_writes(engine: Any) -> None:
    """What accelerators have and the CPU build has not: what else is promised of engines is to hold of this one."""
    modules = engine._engine.collective_rpc(lambda worker: type(worker.model_runner).__module__)
    assert modules == ["vllm.v1.worker.gpu.model_runner"]
    assert engine._engine.vllm_config.scheduler_config.async_scheduling


def test_an_update_under_way_is_followed(engine: RolloutBackend, model: Any) -> None:
    """Tokens before it are the old weights', tokens after it the new ones', also those whose step had been scheduled."""
    requests = {r.id: r for r in requests_of(24, seed=4, max_new_tokens=40, top_p=1.0, top_k=-1)}
    engine.add(requests.values())
    done: list[Completion] = []
    models = {}
    for version in range(3):
        if version:
            change(model, version)
            for parameter in model.parameters():
                parameter.data = parameter.data.to(dtype_of(engine)).float()
            engine.update_weights(version, model.named_parameters())
        models[version] = AutoModelForCausalLM.from_config(model.config).eval()
        models[version].load_state_dict(model.state_dict())
        for _ in range(6):
            done += engine.step()
    done += run_out(engine)
    assert sorted(completion.id for completion in done) == sorted(requests)
    assert [0, 1, 2] in [sorted(set(completion.versions)) for completion in done]
    for version, weights in models.items():
        errors = [error_of(weights, requests[completion.id], completion, version) for completion in done]
        assert max(errors) < tolerance(engine)
    stale = [error_of(models[0], requests[completion.id], completion, 2) for completion in done]
    assert max(stale) > 3 * tolerance(engine)  # so that it would show


def test_an_update_is_made_in_place(engine: Any, model: Any) -> None:
    """What captured graphs read: weights stay where they were and have the new values, fused ones among them. The CPU build
    packs those, and has no graphs."""

    def held(worker: Any) -> dict[str, tuple[int, torch.Tensor]]:
        named = worker.model_runner.get_model().named_parameters()
        return {name: (tensor.data_ptr(), tensor.detach().clone()) for name, tensor in named if tensor.data_ptr()}

    (before,) = engine._engine.collective_rpc(held)
    change(model, 7)
    engine.update_weights(7, model.named_parameters())
    (after,) = engine._engine.collective_rpc(held)
    assert before.keys() == after.keys() and len(before) >= 6
    assert ON_CPU or sum("qkv" in name or "gate_up" in name for name in before) == 4
    for name, (place, values) in before.items():
        assert after[name][0] == place, name
        assert not torch.equal(after[name][1], values), name


@sleeper
def test_after_its_sleep_and_an_update_it_writes_the_same(engine: RolloutBackend, model: Any) -> None:
    requests = requests_of(16, seed=9, temperature=0.0, top_p=1.0, top_k=-1, max_new_tokens=20)
    expected = engine.generate(requests)
    engine.offload()
    engine.reload()
    engine.update_weights(1, model.named_parameters())
    again = engine.generate(requests)
    assert [c.token_ids for c in again] == [c.token_ids for c in expected]
    assert all(error_of(model, *pair) < tolerance(engine) for pair in zip(requests, again, strict=True))


@sleeper
def test_sleep_gives_the_memory_back(engine: RolloutBackend, model: Any) -> None:
    """And nothing is written before weights have come."""
    awake, total = torch.accelerator.get_memory_info()
    engine.offload()
    given = torch.accelerator.get_memory_info()[0] - awake
    assert given > 0.15 * total  # of the 0.3 that it may take
    engine.reload()
    assert torch.accelerator.get_memory_info()[0] < awake + 0.1 * given
    engine.add(requests_of(1))
    with pytest.raises(WeightUpdateError, match="gave its weights away"):
        engine.step()
    engine.abort()
    engine.update_weights(1, model.named_parameters())
    assert engine.generate(requests_of(1))
