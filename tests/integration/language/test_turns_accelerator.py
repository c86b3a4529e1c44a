"""GRPO on one accelerator that trainer and engine use in turn, with a checkpoint in the middle and resumed
(`tests/accelerators.py`)."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from tests.extras import need_extra

need_extra("llm", "deepspeed", "vllm")

sys.path.insert(0, str(Path(__file__).parent))

from test_reasoning import LanguageRun

from tests.accelerators import ON_CPU, STAND_IN

pytestmark = pytest.mark.gpu

SHORT = (
    "runner.max_steps=4",
    "runner.save_interval=2",
    "data.prompts_per_step=4",
    "actor.global_batch_size=32",
    "actor.offload_in_rollout=true",
    f"actor.model.dtype={'float32' if ON_CPU else 'bfloat16'}",
    f"rollout.rollout_backend={'hf' if STAND_IN else 'vllm'}",
    "rollout.gpu_memory_utilization=0.4",
    "rollout.probe_interval=1",
    "algorithm.recompute_logprobs=true",
    f"cluster.accelerators_per_node={0 if ON_CPU else 1}",
)
BACKENDS = {
    "local": ("actor.training_backend=local",),
    "fsdp": ("actor.training_backend=fsdp",),
    "zero 3": ("actor.training_backend=deepspeed", "actor.deepspeed.zero_stage=3"),
}
#: Of the engine's log-probs to the trainer's, a token on average.
APART = 1e-4 if ON_CPU else 0.1


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_run_in_turn_is_saved_and_resumed(backend: str, tmp_path: Path) -> None:
    """The engine has the trainer's weights in each step, in the first after a resume, too. It is the same run bit for bit
    where that is promised: on the CPU."""
    whole, parted = (LanguageRun(tmp_path / name, *SHORT, *BACKENDS[backend]) for name in ("whole", "parted"))
    whole.train()
    parted.train("runner.max_steps=2")
    parted.train("runner.resume_dir=auto")
    for run in (whole, parted):
        assert [row["step"] for row in run.rows()] == [1, 2, 3, 4]
        assert max(row["train/mismatch_abs"] for row in run.rows()) < APART
    if ON_CPU:
        assert parted.rows() == whole.rows()
        if backend == "local":  # the others' weights lie in shards
            mine, theirs = parted.weights(4), whole.weights(4)
            assert all(torch.equal(mine[name], theirs[name]) for name in theirs)
