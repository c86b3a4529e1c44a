"""What `tests/unit/test_card.py` runs where the accelerator of `tests.card` is: rollouts that stay on it, up to the update."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rlhpc.config.typed import default_section, typed
from rlhpc.embodied.algorithms.ppo import METRICS
from rlhpc.embodied.config import BcModelConfig, PpoConfig, SacConfig
from rlhpc.embodied.envs.tensor_tasks import Pendulum
from rlhpc.embodied.models import build_model
from rlhpc.embodied.rollout.slot_map import SlotMap
from rlhpc.embodied.workers.bc_actor import BcActor
from rlhpc.embodied.workers.tensor_actor import OffPolicyTensorActor, TensorActor
from rlhpc.runs.configuration import load_config
from rlhpc.runtime.errors import ConfigError
from rlhpc.training.captured_passes import CapturedPasses
from tests.unit.embodied.workers.test_bc_actor import config, write_demos

ROOT = Path(__file__).resolve().parents[2]
SLOTS = 24


class Reads(TorchDispatchMode):
    """Counts what the host reads of the accelerator, and the bytes of it that are copied, without single numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.copied_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        source = args[1] if name == "copy_" else args[0] if args else None
        if isinstance(source, torch.Tensor) and source.device.type == "card":
            if name in ("_to_copy", "copy_") and result.device.type == "cpu":
                self.counts["copies"] += 1
                self.copied_bytes += result.numel() * result.element_size()
            elif name in ("_local_scalar_dense", "nonzero", "equal", "masked_select", "_unique2"):
                self.counts[name] += 1
            elif name in ("index", "index_put", "index_put_", "_index_put_impl_") and any(
                index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]
            ):
                self.counts["sizes of masks"] += 1  # the host reads how many elements a mask selects
        return result


class CaptureRules(TorchDispatchMode):
    """Refuses what a driver refuses while a stream is captured: values that the host reads, and copies from or to memory of
    the host that is not locked, such as constants that are made in a pass.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in (
            "_local_scalar_dense",
            "nonzero",
            "equal",
            "lift_fresh",
        ):  # the last is a constant's, of torch.tensor
            raise RuntimeError("operation not permitted when stream is capturing")
        result = func(*args, **(kwargs or {}))
        source = args[1] if name == "copy_" else args[0] if args else None
        if name in ("_to_copy", "copy_") and isinstance(source, torch.Tensor) and source.device != result.device:
            raise RuntimeError("operation not permitted when stream is capturing")
        return result


def record(compute: Any) -> Any:
    """Records by running the pass under the rules of a capture; a replay runs it again."""
    with CaptureRules():
        outputs = compute()

    def replay() -> None:
        for name, value in compute().items():
            outputs[name].copy_(value)

    return replay, outputs


def test_recording_a_pass_needs_nothing_of_the_host() -> None:
    worker = actor(8)
    backend: Any = worker.backend
    backend._captured_passes = CapturedPasses(backend._changed_by_passes, record)
    worker.play(1)
    assert worker.update(1)["grad_norm"] > 0
    with pytest.raises(ConfigError, match="cannot be captured"):
        backend._captured_passes.run("constant", (), lambda _: {"x": torch.tensor([1.0], device="card")})


def test_recording_a_pass_of_behaviour_cloning_needs_nothing_of_the_host(tmp_path: Path) -> None:
    """Rows come from the host before a pass begins, and a pass makes no constants there."""
    write_demos(tmp_path / "demos.h5")
    words = ("algorithm.bc_value_coef=1", "actor.micro_batch_size=16")
    losses = []
    for captures in (False, True):
        worker = BcActor(config(tmp_path / "demos.h5", *words))
        worker.accelerators = (0,)
        worker.init_worker()
        assert worker.device.type == "card"
        backend: Any = worker.backend
        backend._captured_passes = CapturedPasses(backend._changed_by_passes, record) if captures else None
        losses.append([worker.imitate(step, 0.0)["loss"] for step in (1, 2)])
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def actor(steps: int, *overrides: str) -> TensorActor:
    words = [
        f"env.train.num_envs={SLOTS}", f"algorithm.rollout_steps={steps}", f"actor.global_batch_size={SLOTS * steps // 2}",
        "algorithm.update_epochs=2", *overrides,
    ]  # fmt: skip
    cfg: Any = typed(PpoConfig, load_config(ROOT / "configs/embodied/cartpole_tensors.yaml", words, check=False))
    worker = TensorActor(cfg)
    worker.accelerators = (0,)
    worker.build(SlotMap(SLOTS))
    assert worker.device.type == worker.rollout.obs.device.type == "card"
    return worker


def step_reads(worker: Any, step: int) -> tuple[Reads, Any]:
    """Plays and trains a step, of which the host may read nothing, then reads its metrics.

    Returns:
        What the host read of the metrics, and the result of `read_step`.
    """
    with Reads() as reads:
        worker.play(step)
        worker.train(step)
    assert reads.copied_bytes == 0 and not reads.counts
    with Reads() as metric_reads:
        return metric_reads, worker.read_step()


@pytest.mark.parametrize("task", ["cartpole", "pendulum"])
def test_a_step_copies_nothing_until_its_metrics_are_read(task: str) -> None:
    """Rollout and update copy 0 bytes. Then one read of the step's metrics copies six numbers of each ended episode, the
    number of skipped actions, and the metrics of the update, however many decisions and minibatches there were."""
    counts = []
    for steps in (6, 14):
        words = (
            f"env.train.env_id={task}", "env.train.max_episode_steps=5", "actor.model.normalize_observations=true",
            f"algorithm.update_epochs={steps}",
        )  # fmt: skip
        worker = actor(steps, *words)
        step_reads(worker, 1)
        worker.play(2)
        assert worker.batch is not None and {tensor.device.type for tensor in worker.batch.tensors()} == {"card"}
        worker.train(2)
        worker.read_step()
        reads, (_, report, metrics) = step_reads(worker, 3)
        assert len(report["return"]) >= SLOTS and (report["by_device"], report["by_host"]) == ([steps], [0])
        assert metrics["grad_norm"] > 0 and metrics["epochs"] == steps
        assert reads.copied_bytes == 8 * (6 * len(report["return"]) + 1) + 8 * len(METRICS) + 8 * 5
        counts.append(reads.counts)
    # Sizes and flags are single numbers: the number of ended episodes, whether all is finite, and the sum of gradient norms.
    assert counts[0] == counts[1] == Counter({"nonzero": 1, "copies": 3, "_local_scalar_dense": 2})


def test_the_numbers_are_those_of_the_cpu() -> None:
    there, here = actor(16), actor(16, "cluster.accelerators_per_node=0")
    here = TensorActor(here.cfg)
    here.build(SlotMap(SLOTS))
    for step in (1, 2):
        for worker in (there, here):
            worker.play(step)
        assert there.batch is not None and here.batch is not None
        for mine, other in zip(there.batch.tensors(), here.batch.tensors(), strict=True):
            torch.testing.assert_close(mine.cpu(), other, rtol=1e-5, atol=1e-5)
        there.update(step)
        here.update(step)


def spec_of_a_flow() -> dict[str, Any]:
    """Returns the description of a flow policy for pendulums."""
    cfg: Any = default_section(BcModelConfig)
    cfg.model_type, cfg.hidden_sizes = "flow", [16]
    return build_model(cfg, Pendulum.observation_space, Pendulum.action_space, seed=0).spec()


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gives replay buffers a folder."""
    service = SimpleNamespace(scratch=SimpleNamespace(spill=tmp_path))
    monkeypatch.setattr("rlhpc.embodied.workers.off_policy.current", lambda: SimpleNamespace(service=service))


def off_policy_actor(model_type: str, num_updates: int, *overrides: str) -> OffPolicyTensorActor:
    words = [
        f"env.train.num_envs={SLOTS}", "algorithm.rollout_steps=6", "env.train.max_episode_steps=5", "algorithm.n_step=2",
        f"algorithm.name={'sac' if model_type == 'dsrl' else model_type}", f"actor.model.model_type={model_type}",
        "actor.model.hidden_sizes=[16,16]",
        "actor.model.critic_hidden_sizes=[16,16]", "actor.global_batch_size=16",
        "algorithm.replay_buffer={size: 400, min_buffer_size: 0}",
    ]  # fmt: skip
    if model_type == "dsrl":
        words.append(f"actor.model.kwargs.base_spec={json.dumps(spec_of_a_flow())}")
    words += [f"algorithm.update_to_data={num_updates / (6 * SLOTS)}", *overrides]
    cfg: Any = typed(SacConfig, load_config(ROOT / "configs/embodied/pendulum_sac_tensors.yaml", words, check=False))
    worker = OffPolicyTensorActor(cfg)
    worker.accelerators = (0,)
    worker.build(SlotMap(SLOTS))
    return worker


@pytest.mark.usefixtures("scratch")
@pytest.mark.parametrize("model_type", ["sac", "td3", "crossq", "iql", "dsrl"])
def test_an_off_policy_run_stays_there_too(model_type: str) -> None:
    """Rollouts, the replay buffer, batches and updates copy nothing to the host, until it reads the step's metrics."""
    counts = []
    for updates in (4, 12):
        worker = off_policy_actor(model_type, updates)
        worker.play(1)
        worker.update(1)
        reads, (_, report, metrics) = step_reads(worker, 2)
        assert (
            worker.replay.column("obs", torch.zeros(1, dtype=torch.int64, device=worker.device)).device.type == "card"
        )
        assert metrics["updates"] == 2 * updates
        assert reads.copied_bytes <= 8 * (6 * len(report["return"]) + 1) + 8 * 8
        counts.append(reads.counts)
    assert counts[0] == counts[1]
    worker.off_policy.capture_passes(record)
    worker.play(3)
    assert worker.update(3)["updates"] == 3 * updates


@pytest.mark.usefixtures("scratch")
@pytest.mark.parametrize(("algorithm", "num_reads"), [("ppo", 3), ("sac", 2)])
def test_a_norm_that_decides_about_a_step_is_read_once(algorithm: str, num_reads: int) -> None:
    """With `runner.on_nonfinite=skip`. An epoch of PPO has two minibatches, and counts its rows at once; an update of SAC
    steps the critics and the actor."""
    counts = []
    for number in (2, 6):
        skips = "runner.on_nonfinite=skip"
        worker: Any = (
            actor(6, f"algorithm.update_epochs={number}", skips)
            if algorithm == "ppo"
            else off_policy_actor("sac", number, skips)
        )
        with Reads() as reads:
            worker.play(1)
            worker.train(1)
        worker.read_step()
        counts.append(reads.counts.total())
    assert counts[1] - counts[0] == num_reads * (6 - 2)
