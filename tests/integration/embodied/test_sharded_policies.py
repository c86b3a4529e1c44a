"""Policies whose weights are sharded train as those that every rank holds: real FSDP2 and DeepSpeed, on real ranks."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.extras import need_extra

need_extra("llm", "deepspeed")

sys.path.insert(0, str(Path(__file__).parents[1] / "language"))
sys.path.insert(0, str(Path(__file__).parent))

from lm_ranks import groups_of
from policy_ranks import PolicyTrainer

from rlhpc import Session
from rlhpc.checkpoint.state import load_tensors
from rlhpc.embodied.data.trajectories import TrajectoryWriter
from rlhpc.runtime.errors import CheckpointError

pytestmark = pytest.mark.long(together=True)

BACKENDS = ("fsdp", "zero1", "zero2", "zero3")
#: Two layers to gather one at a time, and adapters on frozen ones.
VLA = {"actor.model.model_type": "vla", "actor.model.model_path": "builtin:tiny"}
OPENVLA = {**VLA, "actor.model.model_type": "openvla", "actor.model.kwargs": {"head": "l1"}}
PRELOAD = (
    "deepspeed",
    "transformers.models.llava.modeling_llava",
    "rlhpc.embodied.workers.bc_actor",
    "torch.distributed.fsdp",
)


def on(backend: str, **more: Any) -> dict[str, Any]:
    """Changes of a configuration that name a backend."""
    if not backend.startswith("zero"):
        return {"actor.training_backend": backend, **more}
    cut_up = {"zero_optimization": {"stage3_param_persistence_threshold": 0}}  # small parameters, too
    return {
        "actor.training_backend": "deepspeed", "actor.deepspeed.zero_stage": int(backend[-1]),
        "actor.deepspeed.config": cut_up, **more,
    }  # fmt: skip


@pytest.fixture(scope="module")
def ranks() -> Iterator[Callable[[int], Any]]:
    os.environ["DS_ACCELERATOR"] = "cpu"
    Session.prewarm(PRELOAD)
    yield from groups_of(PolicyTrainer, "policies")


@pytest.fixture(scope="module")
def demos(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Changes of a configuration that clones: three episodes, one of them held out."""
    path, random = tmp_path_factory.mktemp("demos") / "demos.h5", np.random.default_rng(0)
    with TrajectoryWriter(path, env_id="MountainCarContinuous-v0") as writer:
        for _ in range(3):
            ends = np.arange(11) == 10
            writer.add({
                "obs": random.normal(size=(12, 2)).astype(np.float32), "rewards": random.normal(size=11),
                "actions": random.uniform(-1, 1, (11, 1)).astype(np.float32), "terminations": ends,
                "truncations": ends & False,
            })  # fmt: skip
    return {
        "runner.task_type": "bc", "demos.path": str(path), "demos.holdout": 0.34, "algorithm.bc_value_coef": 0.1,
        "env.train.env_id": "MountainCarContinuous-v0", "env.eval.num_episodes": 1, "actor.global_batch_size": 8,
        "env.eval.num_envs": 1, "actor.micro_batch_size": 3,
    }  # fmt: skip


def assert_same(found: dict[str, Any], expected: dict[str, Any], tolerance: float = 2e-5) -> None:
    for mine, theirs in zip(found["metrics"], expected["metrics"], strict=True):
        assert mine == pytest.approx(theirs, rel=20 * tolerance, abs=tolerance)
    assert found["weights"].keys() == expected["weights"].keys()
    for name, value in found["weights"].items():
        torch.testing.assert_close(value, expected["weights"][name], rtol=tolerance, atol=tolerance, msg=name)


@pytest.mark.parametrize("backend", BACKENDS)
def test_ppo_is_that_of_one_rank_that_holds_all(ranks, backend: str) -> None:
    """The ranks have other parts of each minibatch than one alone, and other numbers of micro-batches."""
    expected = PolicyTrainer().ppo({})
    first, second = ranks(2).ppo(on(backend)).wait()
    assert_same(first, expected)
    assert_same(second, expected)
    if backend in ("fsdp", "zero3"):
        assert max(first["held"], second["held"]) < 0.7 * sum(tensor.numel() for tensor in expected["weights"].values())


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_critics_learning_rate_is_that_of_one_rank_that_holds_all(ranks, backend: str) -> None:
    given = {"actor.optim.value_lr": 3e-2}
    plain, expected = PolicyTrainer().ppo({}), PolicyTrainer().ppo(given)
    assert_same(ranks(2).ppo(on(backend, **given)).wait()[0], expected)
    assert not torch.allclose(plain["weights"]["critic.2.weight"], expected["weights"]["critic.2.weight"], rtol=0.1)


def test_a_critic_warm_up_leaves_the_policy_as_it_is_and_goes_on_after_a_resume(ranks, tmp_path: Path) -> None:
    """An update has four optimizer steps; the fifth of six warm-up steps is the first after the resume."""
    given = {"actor.optim.critic_warmup_steps": 6, "actor.optim.value_lr": 3e-2}
    start, expected = PolicyTrainer().ppo({}, range(0)), PolicyTrainer().ppo(given)
    early = PolicyTrainer().ppo(given, range(1), save=str(tmp_path / "local"))
    for name, weight in early["weights"].items():
        is_unchanged = torch.equal(weight, start["weights"][name])
        assert is_unchanged == (not name.startswith("critic.")), name
    resumed = PolicyTrainer().ppo(given, range(1, 3), load=str(tmp_path / "local"))
    for name, weight in resumed["weights"].items():
        assert torch.equal(weight, expected["weights"][name]), name
    sharded = on("fsdp", **given)
    found = ranks(2).ppo(sharded, save=str(tmp_path / "other")).wait()
    assert_same(found[0], expected)
    ranks(2).ppo(sharded, range(1), save=str(tmp_path / "fsdp")).wait()
    again = ranks(2).ppo(sharded, range(1, 3), load=str(tmp_path / "fsdp")).wait()
    for name, weight in again[0]["weights"].items():
        assert torch.equal(weight, found[0]["weights"][name]), name


#: Frozen weights beside trained ones, and the log-probs of a chain.
FLOW = {
    "num_steps": 2, "encoder": "resnet10", "freeze": True, "noise_method": "flow_noise",
    "network": "transformer", "width": 8, "heads": 2,
}  # fmt: skip
PICTURES = {"resnet10": {"freeze": True}, "flow": FLOW}


@pytest.mark.parametrize("backend", ["fsdp", "zero2", "zero3"])
@pytest.mark.parametrize("model_type", PICTURES)
def test_policies_that_see_train_as_on_one_rank(ranks, model_type: str, backend: str) -> None:
    changes = {"actor.model.model_type": model_type, "actor.model.kwargs": PICTURES[model_type]}
    expected = PolicyTrainer().ppo(changes, range(2))
    for found in ranks(2).ppo(on(backend, **changes), range(2)).wait():
        assert_same(found, expected, 1e-4)


#: The openvla trains weights beside its adapters: the head that gives numbers.
SHARDED = [
    ("fsdp", VLA, 2),
    ("zero3", VLA, 2),
    ("fsdp", OPENVLA, 0),
    *((b, OPENVLA, 2) for b in ("fsdp", "zero2", "zero3")),
]


@pytest.mark.long
@pytest.mark.parametrize(
    ("backend", "model", "rank"), SHARDED, ids=[f"{b}-{m['actor.model.model_type']}-{rank}" for b, m, rank in SHARDED]
)
def test_a_transformer_s_layers_are_sharded(ranks, backend: str, model: dict[str, Any], rank: int) -> None:
    """With adapters (of a rank) on frozen weights or all weights trained, and recomputed activations."""
    changes = {**model, "actor.lora.rank": rank}
    expected = PolicyTrainer().ppo(changes, range(1))
    found, _ = ranks(2).ppo(on(backend, **changes, **{"actor.model.gradient_checkpointing": True}), range(1)).wait()
    assert_same(found, expected, 1e-4)
    if backend != "zero2":
        assert found["held"] < 0.6 * sum(tensor.numel() for tensor in expected["weights"].values())


@pytest.mark.parametrize("backend", ["fsdp", "zero2"])
def test_a_transformer_computes_in_bfloat16_and_keeps_float32(ranks, backend: str) -> None:
    changes = {**on(backend, **VLA), "actor.model.dtype": "bfloat16"}
    single = ranks(2).ppo(on(backend, **VLA), range(1)).wait()[0]
    found = ranks(2).ppo(changes, range(1)).wait()[0]
    for name in ("policy_loss", "value_loss", "entropy"):
        assert found["metrics"][0][name] == pytest.approx(single["metrics"][0][name], abs=0.03)
        assert found["metrics"][0][name] != single["metrics"][0][name]  # it did compute in bfloat16
    # What those who act are sent is as their own policy is: of a tiny one in float32.
    assert {value.dtype for value in found["weights"].values()} == {torch.float32}


@pytest.mark.parametrize("backend", ["fsdp", "zero2", "zero3"])
def test_cloning_is_that_of_one_rank_that_holds_all(ranks, demos, backend: str) -> None:
    expected = PolicyTrainer().bc(demos)
    first, _ = ranks(2).bc(on(backend, **demos)).wait()
    assert first["metrics"][0]["holdout_loss"] != first["metrics"][2]["holdout_loss"]
    assert_same(first, expected)
    assert first["evaluation"]["return_mean"] == pytest.approx(expected["evaluation"]["return_mean"], rel=1e-3)


VALUE_LR = {"actor.optim.value_lr": 3e-2}


@pytest.mark.parametrize(
    ("backend", "options"),
    [*((backend, {}) for backend in ("local", "fsdp", "zero2", "zero3")), ("zero2", VALUE_LR), ("zero3", VALUE_LR)],
)
def test_a_checkpoint_resumes_on_this_and_on_another_world_size(
    ranks, tmp_path, backend: str, options: dict[str, float]
) -> None:
    whole = ranks(2).ppo(on(backend, **options)).wait()[0]
    folder = str(tmp_path / "global_step_2")
    ranks(2).ppo(on(backend, **options), range(2), save=folder).wait()
    # What evaluation, export and `runner.init_from` read has all weights, whoever trained.
    assert load_tensors(Path(folder) / "model.safetensors").keys() == whole["weights"].keys()
    again = ranks(2).ppo(on(backend, **options), range(2, 3), load=folder).wait()[0]
    assert again["metrics"] == whole["metrics"][2:]
    assert all(torch.equal(value, whole["weights"][name]) for name, value in again["weights"].items())
    if backend == "local":
        alone = PolicyTrainer().ppo(on(backend, **options), range(2, 3), load=folder)
    else:
        alone = ranks(1).ppo(on(backend, **options), range(2, 3), load=folder).wait()[0]
    assert_same(alone, {**whole, "metrics": whole["metrics"][2:]})


def test_a_checkpoint_of_another_backend_is_refused(tmp_path) -> None:
    PolicyTrainer().ppo({}, range(0), save=str(tmp_path))
    with pytest.raises(CheckpointError, match=r"training_backend 'local', this configuration 'fsdp'"):
        PolicyTrainer().ppo(on("fsdp"), range(0), load=str(tmp_path))
