"""A language model on the cluster: the actor on one node, vLLM on another."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="needs the extra vllm")

from .cluster import SlurmCluster
from .runs import ROOT, SlurmRun, until

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(900)]

CONFIG = """
defaults: [{root}/configs/base/grpo.yaml]
runner: {{max_steps: 40, save_interval: 4, max_restarts: 3}}
cluster:
  num_nodes: 2
  accelerators_per_node: null
  node_groups:
    - {{label: gpu, het_component: 0, num_nodes: 1, accelerators_per_node: 2, cpus_per_node: 4, mem: 8G}}
    - {{label: cpu, het_component: 1, num_nodes: 1, accelerators_per_node: 0, cpus_per_node: 4, mem: 8G}}
  component_placement:
    actor: {{node_group: gpu, placement: 0}}
    rollout: {{node_group: cpu, placement: 0}}
data:
  train: {{source: arithmetic, size: 64, kwargs: {{digits: 1}}}}
  eval: [{{name: held_out, source: arithmetic, size: 10, kwargs: {{digits: 1}}}}]
  max_prompt_tokens: 16
  prompts_per_step: 8
reward: {{terms: [{{name: length, kwargs: {{limit: 8}}}}]}}
workflow: {{eval_suites: [held_out]}}
algorithm: {{group_size: 8}}
rollout: {{rollout_backend: vllm, max_new_tokens: 6, max_batch_size: 64}}
actor:
  global_batch_size: 64
  model: {{model_path: "builtin:tiny", kwargs: {{hidden: 64, layers: 2, heads: 2}}}}
  optim: {{lr: 3.0e-3}}
"""


@pytest.fixture(autouse=True)
def no_job_is_left(slurm: SlurmCluster) -> Iterator[None]:
    yield
    slurm.run("scancel", "--me")
    until(lambda: not slurm.run("squeue", "--me", "--noheader").strip(), "all jobs are gone")


def test_the_rollout_group_is_killed_and_starts_again(slurm: SlurmCluster, tmp_path: Path) -> None:
    """The actor's process and the job's attempt live on, and no step is missing or twice."""
    config = tmp_path / "language.yaml"
    config.write_text(CONFIG.format(root=ROOT))
    run = SlurmRun(slurm, tmp_path, config=config)
    run.environment |= {
        "RLHPC_MODELS": str(tmp_path / "models"), "HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1",
    }  # fmt: skip
    process = run.submit()
    until(lambda: run.committed() >= 4, "it has saved", 300)
    ranks = run.members()
    assert ranks["actor-0"]["node"] != ranks["rollout-0"]["node"]
    slurm.run("scancel", "--signal=KILL", ranks["rollout-0"]["step"])
    until(lambda: run.recoveries, "it starts again", 120)
    assert run.members()["actor-0"]["pid"] == ranks["actor-0"]["pid"]
    run.finish(process, 400)
    assert len(run.attempts) == 1
    assert [row["step"] for row in run.rows()] == list(range(1, 41))
    assert max(row["train/mismatch_abs"] for row in run.rows()) < 1e-4
