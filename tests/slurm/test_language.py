"""A language model on the cluster: the actor on one node, vLLM on another."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.extras import need_extra

need_extra("vllm")

from tests.classifiers import save_classifier

from .cluster import SlurmCluster
from .jobs import end_jobs, wait_gone
from .runs import ROOT, SlurmRun, kill, until

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
    end_jobs(slurm)


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


GROUPS = (
    "runner.save_interval=100", "cluster.num_nodes=3", "rollout.rollout_backend=hf", "algorithm.adv_type=gae",
    "cluster.node_groups=["
    "{label: gpu, het_component: 0, num_nodes: 2, accelerators_per_node: 1, cpus_per_node: 4, mem: 8G}, "
    "{label: cpu, het_component: 1, num_nodes: 1, accelerators_per_node: 0, cpus_per_node: 4, mem: 8G}]",
    "cluster.component_placement={actor: {node_group: gpu, placement: 0}, rollout: {node_group: gpu, placement: 0}, "
    "critic: {node_group: gpu, placement: 1}, reward: {node_group: cpu, placement: '0:0-1'}}",
    "reward.terms=[{name: length, kwargs: {limit: 8}}, {name: reward, weight: 0.1}]",
)  # fmt: skip


def test_critic_and_reward_model_have_nodes_of_their_own(
    slurm: SlurmCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank of the reward model is killed: it alone starts again, and not a step is lost, though none was saved since."""
    monkeypatch.setenv("RLHPC_MODELS", str(tmp_path / "models"))
    config = tmp_path / "language.yaml"
    config.write_text(CONFIG.format(root=ROOT))
    model = save_classifier(tmp_path / "classifier")
    run = SlurmRun(slurm, tmp_path, *GROUPS, f"reward.model.model_path={model}", config=config)
    run.environment |= {"RLHPC_MODELS": str(tmp_path / "models"), "HF_HUB_OFFLINE": "1"}
    process = run.submit()
    until(lambda: run.step() >= 5, f"it trains\n{run.account()}", 300)
    ranks = run.members()
    assert len({ranks[name]["node"] for name in ("actor-0", "critic-0", "reward-0")}) == 3
    assert ranks["critic-0"]["accelerators"] and not ranks["reward-1"]["accelerators"]
    kill(ranks["reward-1"]["pid"])
    driver = run.root / "logs" / "segment_0" / "driver.err"
    until(lambda: "nothing else is lost" in driver.read_text(), f"it starts again\n{run.account()}", 120)
    until(lambda: run.members()["reward-1"]["pid"] != ranks["reward-1"]["pid"], "it is there again")
    alive = run.members()
    for name in ("actor-0", "rollout-0", "critic-0", "reward-0"):
        assert alive[name]["pid"] == ranks[name]["pid"], name
    run.finish(process, 400)
    assert len(run.attempts) == 1 and not run.recoveries
    assert [row["step"] for row in run.rows()] == list(range(1, 41))


ENGINE = (
    "cluster.num_nodes=4", "runner.max_steps=30", "rollout.weight_sync=shards", "actor.training_backend=fsdp",
    "rollout.probe_interval=1",
    "cluster.node_groups=["
    "{label: gpu, het_component: 0, num_nodes: 2, accelerators_per_node: 1, cpus_per_node: 2, mem: 8G}, "
    "{label: cpu, het_component: 1, num_nodes: 2, accelerators_per_node: 0, cpus_per_node: 2, mem: 8G}]",
    "cluster.component_placement={actor: {node_group: gpu, placement: 0-1}, "
    "rollout: {node_group: cpu, placement: '0-1:0'}}",
)  # fmt: skip


def test_an_engine_on_two_nodes_and_its_trainer_on_two_others(slurm: SlurmCluster, tmp_path: Path) -> None:
    """Weights go from shards to shards, over TCP. A rank of the engine is killed: its mate ends with it, both start again, and
    nobody else does."""
    config = tmp_path / "language.yaml"
    config.write_text(CONFIG.format(root=ROOT))
    run = SlurmRun(slurm, tmp_path, *ENGINE, config=config)
    run.environment |= {
        "RLHPC_MODELS": str(tmp_path / "models"), "HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1",
    }  # fmt: skip
    process = run.submit()
    until(lambda: run.committed() >= 4, f"it has saved\n{run.account()}", 400)
    ranks = run.members()
    assert len({ranks[name]["node"] for name in ("actor-0", "actor-1", "rollout-0", "rollout-1")}) == 4
    kill(ranks["rollout-1"]["pid"])
    until(lambda: run.recoveries, f"it starts again\n{run.account()}", 120)
    until(lambda: run.step() >= 10, f"it trains again\n{run.account()}", 400)
    again = run.members()
    assert {name for name in ranks if again[name]["pid"] != ranks[name]["pid"]} == {"rollout-0", "rollout-1"}
    run.finish(process, 500)
    assert len(run.attempts) == 1
    assert [row["step"] for row in run.rows()] == list(range(1, 31))
    assert max(row["train/mismatch_abs"] for row in run.rows()) < 1e-4


#: A reward that takes its time for as long as there is a file.
SLOW = """
import os
import time

def slow(sample):
    if os.path.exists(os.environ.get("RLHPC_TEST_PAUSE", "")):
        time.sleep(0.2)
    return len(sample.response) / 8
"""


def test_helpers_join_from_jobs_of_their_own(slurm: SlurmCluster, tmp_path: Path) -> None:
    """One is cancelled, one killed, one stays to the end; each on whatever node was idle, and no prompt is lost or trained
    on twice."""
    config, pause = tmp_path / "language.yaml", tmp_path / "pause"
    config.write_text(CONFIG.format(root=ROOT))
    (tmp_path / "slow_rewards.py").write_text(SLOW)
    pause.touch()
    run = SlurmRun(
        slurm, tmp_path, "rollout.rollout_backend=hf", "runner.max_steps=60", "runner.save_interval=100",
        "reward.terms=[{name: 'slow_rewards:slow'}]", config=config,
    )  # fmt: skip
    run.environment |= {
        "RLHPC_MODELS": str(tmp_path / "models"), "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(tmp_path),
        "RLHPC_TEST_PAUSE": str(pause),
    }  # fmt: skip
    process = run.submit()
    until(lambda: run.step() >= 1, f"it trains\n{run.account()}", 300)
    driver = run.root / "logs" / "segment_0" / "driver.err"

    def helper(rank: int) -> str:
        command = f"{sys.executable} -m rlhpc.cli join {run.root}"
        job = slurm.run(
            "sbatch", "--parsable", "--partition=cpu", "--cpus-per-task=1", "--mem=2G",
            f"--output={tmp_path}/helper-{rank}.log", "--wrap", command,
        ).strip()  # fmt: skip
        told = f"rollout[{rank}] takes part"
        until(lambda: told in driver.read_text(), f"helper {rank} takes part\n{run.account()}", 200)
        return job

    first = helper(1)
    slurm.run("scancel", first)
    until(lambda: "rollout[1] left (" in driver.read_text(), f"the first has left\n{run.account()}", 120)
    helper(2)
    kill(run.members()["rollout-2"]["pid"])
    until(lambda: "rollout[2] ended" in driver.read_text(), f"the second is lost\n{run.account()}", 120)
    last = helper(3)
    pause.unlink()
    run.finish(process, 400)
    wait_gone(slurm, last)
    assert "rollout-3 ended: " in (tmp_path / "helper-3.log").read_text()
    assert len(run.attempts) == 1 and not run.recoveries
    rows = run.rows()
    assert [row["rollout/samples"] for row in rows] == [64.0 * step for step in range(1, 61)]
