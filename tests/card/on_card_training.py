"""Updates of language models on the accelerator of `tests.card`; `tests/unit/test_card.py` runs this file there."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from torch.utils._python_dispatch import TorchDispatchMode

from tests.extras import need_extra

need_extra("llm")

from rlhpc.algorithms.nonfinite import SkippedSteps
from rlhpc.language.algorithms.base import ADVANTAGES, ROLLOUT_LOGPROBS, MinibatchCounts
from rlhpc.language.algorithms.policy_gradient import OLD, PolicyGradient
from rlhpc.language.config.run import GrpoConfig
from rlhpc.language.models.logprobs import TokenScores
from rlhpc.language.models.tiny import make_tiny_model
from rlhpc.language.models.token_batch import TokenBatch
from rlhpc.language.multi_policy import ONE, Policies
from rlhpc.language.training.trainer import TokenTrainer
from rlhpc.language.workers.grpo_actor import GrpoActor
from rlhpc.weights.base import Update, VersionDigests
from rlhpc.weights.verification import UpdateVerification, WeightsDiffer, digest, digests

CARD = "card"


class Reads(TorchDispatchMode):
    """Counts what the host reads of the accelerator, for which it waits: values, numbers of values, and tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        source = args[1] if name == "copy_" else args[0] if args else None
        if isinstance(source, torch.Tensor) and source.device.type == CARD:
            leaves = name in ("_to_copy", "copy_") and result.device.type == "cpu"
            if leaves or name in ("_local_scalar_dense", "nonzero", "equal"):
                self.counts[name] += 1
        return result


def batch_of(seed: int) -> TokenBatch:
    generator = torch.Generator().manual_seed(seed)
    lengths = [5, 9, 4]
    ids = [torch.randint(1, 20, (length,), generator=generator) for length in lengths]
    batch = TokenBatch.from_sequences(ids, [torch.ones(length, dtype=torch.bool) for length in lengths])
    for name in (OLD, ROLLOUT_LOGPROBS, ADVANTAGES):
        batch.columns[name] = torch.randn(batch.tokens, generator=generator)
    MinibatchCounts.from_batch(batch)
    return batch.read_by(True)


@pytest.mark.parametrize("policies", [ONE, Policies(("first", "second"), (0, 1))], ids=["one policy", "two policies"])
def test_the_host_waits_no_more_often_for_more_micro_batches(policies: Policies, tmp_path: Path) -> None:
    """Metrics leave the accelerator once a step, and nothing of a pass depends on what the host reads of it."""
    make_tiny_model(tmp_path / "model", hidden=32, layers=2)
    cfg = OmegaConf.structured(GrpoConfig)
    cfg.actor.model.model_path = str(tmp_path / "model")
    cfg.actor.lora.rank = 4 * bool(policies.names)
    cfg.algorithm.recompute_logprobs = True
    actor, algorithm = GrpoActor(cfg), PolicyGradient(cfg)
    actor.accelerators, actor.skips = (0,), SkippedSteps(False)
    trainer = actor.backend = TokenTrainer(cfg, actor, policies=policies)
    assert trainer.device.type == CARD and trainer.packed
    reads = []
    for number in (2, 6):
        batches = [batch_of(seed) for seed in range(number)]
        counts = MinibatchCounts(tokens=18.0 * number, sequences=3.0 * number)

        def loss(scores: TokenScores, part: TokenBatch, counts: Any = counts) -> Any:
            return algorithm.loss(scores, part, counts)

        with Reads() as counted:
            sums = actor._reduce_metrics(trainer.forward_backward(batches, loss))
            metrics = actor._run_optimizer_step(1e-3, sums, counts.tokens, "step 1", batches[0])
        assert metrics["grad_norm"] > 0 and metrics["loss"] != 0
        reads.append(counted.counts)
    # The metrics; and the norm, which decides whether the step is taken.
    assert reads[0] == reads[1] == Counter({"_to_copy": 2})


def test_digests_of_many_weights_are_read_at_once() -> None:
    """Those of a sender, and those of tensors that a receiver's engine takes over and changes: one copy for all of them."""
    generator = torch.Generator().manual_seed(3)
    sizes = [1, 7, 4096, 70_000, 150_001, 400_000] * 8
    tensors = {f"t{i}": torch.randn(size, generator=generator).bfloat16() for i, size in enumerate(sizes)}
    tensors["transposed"] = torch.randn(300, 200, generator=generator).t()
    tensors["scalar"], tensors["empty"] = torch.tensor(2.5), torch.zeros(0)
    on_card = {name: tensor.to(CARD) for name, tensor in tensors.items()}
    expected = digests(tensors.items(), 5)
    assert expected == {name: digest(tensor, 5) for name, tensor in tensors.items()}
    with Reads() as counted:
        assert digests(on_card.items(), 5) == expected
    assert [*digests(on_card.items(), 5)] == [*tensors] and counted.counts == Counter({"_to_copy": 1})
    assert {name: digest(tensor, 5) for name, tensor in on_card.items()} == expected
    update = Update(5, True, iter(on_card.items()), lambda: VersionDigests(5, expected))
    verification = UpdateVerification(update)
    with Reads() as counted:
        for _, tensor in verification.tensors():
            tensor.zero_()
        verification.check()
    assert counted.counts == Counter({"_to_copy": 1})
    spoiled = {name: tensor.to(CARD) for name, tensor in tensors.items()}
    spoiled["t5"].zero_()
    verification = UpdateVerification(Update(5, True, iter(spoiled.items()), lambda: VersionDigests(5, expected)))
    for _ in verification.tensors():
        pass
    with pytest.raises(WeightsDiffer, match="version 5: t5 are others"):
        verification.check()
