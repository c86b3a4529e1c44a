"""Traces of runs on two hosts, of which one has a clock that is 90 s ahead and drifts: merged, exported and decoded."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlhpc.tracing.read import read_trace
from tests.chromium_pipe import Browser
from tests.extras import find_program, has_extra, need_extra
from tests.false_clock import python_with_false_clock
from tests.integration.live.test_step_pages import serving_trace, wait_for_tracks
from tests.trace_decoders import Decoded, check_metrics, decode, steps

need_extra("llm")

from .cluster import SlurmCluster
from .jobs import end_jobs
from .runs import ROOT, SlurmRun, until

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(900)]

OFFSET_S, DRIFT = 90.0, 5e-4
STEPS = (2, 3, 4)
CLUSTER = """
runner: {{max_steps: 6, save_interval: 3, trace: {{steps: "2-4"}}}}
cluster:
  num_nodes: 2
  accelerators_per_node: null
  node_groups:
    - {{label: gpu, het_component: 0, num_nodes: 1, accelerators_per_node: 1, cpus_per_node: 2, mem: 8G}}
    - {{label: cpu, het_component: 1, num_nodes: 1, accelerators_per_node: 0, cpus_per_node: 2, mem: 8G,
       python_interpreter: {python}}}
"""
EMBODIED = """
defaults: [{root}/configs/base/ppo.yaml]
algorithm: {{rollout_steps: 64, update_epochs: 4}}
env: {{train: {{env_id: CartPole-v1, wrappers: ["trace_agent:Waiting"]}}}}
"""
LANGUAGE = """
defaults: [{root}/configs/base/grpo.yaml]
data:
  train: {{source: arithmetic, size: 64, kwargs: {{digits: 1}}}}
  max_prompt_tokens: 16
  prompts_per_step: 8
reward: {{terms: [{{name: length, kwargs: {{limit: 8}}}}]}}
algorithm: {{group_size: 4}}
rollout: {{rollout_backend: hf, max_new_tokens: 12, max_batch_size: 32}}
actor:
  global_batch_size: 32
  model: {{model_path: "builtin:tiny", kwargs: {{hidden: 64, layers: 2, heads: 2}}}}
"""
AGENT = """
agent: {{kind: python, target: "trace_agent:solve", timeout_s: 60, episodes_per_rank: 4}}
"""
PROGRAM = """
import time
import gymnasium

class Waiting(gymnasium.Wrapper):
    def step(self, action):
        time.sleep(0.002)
        return self.env.step(action)

def solve(task, model):
    return len(model.chat(task.messages).get("content") or "") / 24
"""
ON_GPU, ON_CPU = "{{node_group: gpu, placement: 0}}", "{{node_group: cpu, placement: 0}}"
#: Kind of run → its configuration, the placement, and the rank on the other host with a span that it must have.
RUNS = {
    "embodied": (EMBODIED, f'{{{{"actor,rollout": {ON_GPU}, env: {ON_CPU}}}}}', ("env-0", "simulator")),
    "language": (LANGUAGE, f"{{{{actor: {ON_GPU}, rollout: {ON_CPU}}}}}", ("rollout-0", "engine")),
    "agent": (
        LANGUAGE.replace("{{name: length, kwargs: {{limit: 8}}}}", "{{name: agent}}") + AGENT,
        f'{{{{"actor,rollout": {ON_GPU}, agent: {ON_CPU}}}}}', ("agent-0", "turn"),
    ),
}  # fmt: skip


@pytest.fixture(autouse=True)
def no_job_is_left(slurm: SlurmCluster) -> Iterator[None]:
    yield
    end_jobs(slurm)


@pytest.mark.parametrize("kind", RUNS)
def test_a_trace_of_two_hosts(kind: str, slurm_hosts: SlurmCluster, tmp_path: Path) -> None:
    text, placement, _ = RUNS[kind]
    python = python_with_false_clock(tmp_path, OFFSET_S, DRIFT)
    config = tmp_path / "run.yaml"
    content = text + CLUSTER + f"  component_placement: {placement}\n"
    config.write_text(content.format(root=ROOT, python=python))
    (tmp_path / "trace_agent.py").write_text(PROGRAM)
    run = SlurmRun(slurm_hosts, tmp_path, config=config)
    run.environment |= {
        "RLHPC_MODELS": str(tmp_path / "models"), "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}",
    }  # fmt: skip
    run.finish(run.submit(), 600)
    traces = []
    for ending in ("json.gz", "pftrace"):
        said = run.rlhpc("trace", str(run.root), "-o", str(tmp_path / f"t.{ending}"))
        assert "clock of cpu" in said and "+9" in said, said
        traces.append(decode(tmp_path / f"t.{ending}"))
    for trace in traces:
        check(trace, run, kind)
    if has_extra("trace") and find_program("chromium"):
        (tmp_path / "browser").mkdir()
        with serving_trace(run.root, tmp_path) as (lines, _), Browser(tmp_path / "browser") as browser:
            browser.open(lines[0])
            wait_for_tracks(browser, [track.name for track in read_trace(run.root).tracks])


def check(trace: Decoded, run: SlurmRun, kind: str) -> None:
    """The other host's clock is known, messages go forwards, and all ranks' times are those of the metrics."""
    rank, category = RUNS[kind][2]
    rows = {row["step"]: row for row in map(json.loads, (run.root / "metrics.jsonl").read_text().splitlines())}
    assert sorted(steps(trace)) == list(STEPS)
    (name,) = [name for name in trace.clocks if name.startswith("cpu")]
    clock = trace.clocks[name]
    # The process's own drift begins at its start, so the offset at any step is between these.
    assert OFFSET_S * 1e9 - clock["error_ns"] <= clock["offset_ns"] <= OFFSET_S * 1e9 + DRIFT * 900e9
    assert 0 < clock["error_ns"] < 100e6
    check_metrics(trace, rows, is_embodied=kind == "embodied", tolerance_s=0.01)
    for number, (start, end) in steps(trace).items():
        assert [one for one in trace.of(rank, category) if start <= one.start_ns <= end], (
            f"{rank} did nothing in {number}"
        )
    remote = [(s, t) for s, t in trace.flows() if s.process.startswith(rank) != t.process.startswith(rank)]
    assert len(remote) > 10 and any(s.process.startswith(rank) for s, _ in remote)
    for source, target in remote:
        assert source.start_ns <= target.end_ns + clock["error_ns"]


def test_a_running_job_is_traced_from_the_login_node(slurm_hosts: SlurmCluster, tmp_path: Path) -> None:
    config = tmp_path / "run.yaml"
    content = EMBODIED + CLUSTER.replace('"2-4"', '""') + f"  component_placement: {RUNS['embodied'][1]}\n"
    content = content.replace("max_steps: 6, save_interval: 3", "max_steps: 100000")
    config.write_text(content.format(root=ROOT, python="null"))
    run = SlurmRun(slurm_hosts, tmp_path, config=config)
    (tmp_path / "trace_agent.py").write_text(PROGRAM)
    run.environment["PYTHONPATH"] = f"{tmp_path}{os.pathsep}{ROOT}"
    process = run.submit()
    until(lambda: run.step() >= 3, f"it trains\n{run.account()}", 300)
    assert "will be recorded" in run.rlhpc("trace", str(run.root), "--steps", "3")
    found = tmp_path / "t.json"

    def recorded() -> bool:
        said = run.rlhpc("trace", str(run.root), "-o", str(found), code=None)
        return "2 ranks" not in said and said.count(",") >= 4 and len(steps(decode(found))) == 3

    until(recorded, "three steps are recorded", 120)
    numbers = sorted(steps(decode(found)))
    assert numbers == list(range(numbers[0], numbers[0] + 3)) and numbers[0] > 3
    process.terminate()
